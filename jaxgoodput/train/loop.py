"""The loop: dispatch step n, look at step n - 2, obey; and what surrounds it, readable in one sitting.

The loop's thread dispatches step n while step n - 1 runs, and looks only at results of steps before
that; results, windows, the fit and verdicts are dealt with by the watcher and the analyst behind it.
Whatever is decided elsewhere (a verdict, a stop, a save) arrives as a `Control`, at the same step in
every process.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import numpy as np
from absl import logging
from jaxtyping import Array

from jaxgoodput import _serial
from jaxgoodput.clock import Clock
from jaxgoodput.data.loader import StepBatch
from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.state import StepMetrics, TrainState
from jaxgoodput.goodput.memory import TooLarge
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.events import Checkpoint, EvalEnd, FitEnd, FitStart, Preempt, Resharded
from jaxgoodput.parallel.move import MoveDoesNotFit
from jaxgoodput.train.analyst import Analyst
from jaxgoodput.train.checkpoint import CheckpointMeta
from jaxgoodput.train.compile_ahead import SizeCompiler
from jaxgoodput.train.config import Config
from jaxgoodput.train.control import (
    DEPTH,
    BatchWish,
    Control,
    Diverged,
    Due,
    Preempted,
    Requests,
    decode,
    encode,
)
from jaxgoodput.train.prepare import Start
from jaxgoodput.train.process import Compilations
from jaxgoodput.train.task import Task
from jaxgoodput.train.watcher import Result, Ticket, Watcher
from jaxgoodput.tune.tuner import Tuner


class Loop:
    """One call of `Trainer.fit`: owns the state, and the threads behind it."""

    def __init__(
        self,
        task: Task,
        config: Config,
        start: Start,
        *,
        requests: Requests,
        ledger: TimeLedger,
        compilations: Compilations,
        clock: Clock,
        tuner: Callable[..., Tuner] = Tuner,
    ):
        self.task = task
        self.config = config
        self.start = start
        self.requests = requests
        self.ledger = ledger
        self.compilations = compilations
        self.clock = clock
        self.where = start.where
        self.is_chief = start.where.process_index == 0
        self.strategies = start.strategies
        self.checkpoints = start.checkpoints
        self.loader = start.loader
        self.evaluator = start.evaluator
        # What the next step goes on from.
        self.engine: Engine = start.engine
        self.state: TrainState = start.state
        self.batch: BatchConfig = start.batch
        self.step: int = start.step
        self.samples: int = start.samples
        # What the loop remembers between steps.
        self._latest: Result | None = None
        self._untimed = DEPTH  # steps that are not to be timed
        self._outcome: str | None = None  # what ended the run before its end
        self._hook_error: BaseException | None = None
        self._began_s = clock.now()  # made anew at the first step
        self._due = Due(config, self._began_s, start.progress)
        # Sizes whose noise every process can measure, by strategy: the first was compiled before the start.
        self._measuring = {(start.batch.strategy, start.batch.micro_batch_size)}
        if self.where.process_count > 1:
            self.strategies.settled_everywhere = {}
        self.watcher = Watcher(self._read, self._on_result, clock)
        self.analyst = Analyst(
            config,
            start.strategies,
            current=start.batch,
            requests=requests,
            compile_s=start.compile_s,
            hooks=start.hooks,
            clock=clock,
            on_error=self._hook_failed,
            book=ledger.add,
            learning_rate=task.learning_rate,
            dataset_size=start.dataset_size,
            adapt=self.is_chief and config.policy == "goodput",
            schedule=config.policy
            if self.is_chief and not isinstance(config.policy, str)
            else None,
            tuner=tuner,
        )
        if start.memory is not None and start.memory.earlier is not None:
            self.analyst.recall(start.memory.earlier)
        if start.restored is not None:  # the run's own go before
            self.analyst.restore(start.restored.timings, start.restored.statistics_every)
        self._every = self.analyst.statistics_every  # steps between two measurements of the noise

    def announce(self) -> None:
        """Tell the hooks that the run begins."""
        layout = self.engine.layout
        self.analyst.tell(
            FitStart(
                step=self.step,
                progress=self.start.progress,
                restart=self.start.restart,
                config=self.batch,
                limits=self.start.limits,
                device_kind=layout.mesh.devices.flat[0].device_kind,
                num_devices=self.where.num_devices,
                num_processes=self.where.process_count,
                settings=_serial.encode(self.config),
                at_s=self.clock.now(),
            )
        )

    def close(self) -> None:
        """End the threads: results stop before the analyst does."""
        self.watcher.close()
        self.analyst.close()

    @property
    def sizes(self) -> SizeCompiler:
        """What compiles the sizes of the strategy in use."""
        return self.strategies.compiler(self.batch.strategy)

    # -- the loop --------------------------------------------------------------------------------

    def run(self) -> TrainState:
        """The whole run. See `Trainer.fit` for what it raises."""
        first, reason = self.step, "interrupted"
        self._began_s = self.clock.now()
        self._due = Due(self.config, self._began_s, self.start.progress)
        try:
            with jax.transfer_guard("disallow"):
                while self._obey(self._settled(first)):
                    batch = self._next_batch()
                    if batch is None:
                        break
                    self._dispatch(batch)
            self._drain(first)
            self.analyst.flush()  # the hooks have heard of every step
            if self._outcome and self._hook_error is None:
                self.analyst.tell(Preempt(step=self.step, signal=self._outcome))
            if self.evaluator is not None and self._outcome is None:
                self._evaluate()
            if self._outcome or self.config.saving.at_end:
                self._save(wait=True)
            reason = "preempted" if self._outcome else "done"
            if self._hook_error is not None:
                reason = _named(self._hook_error)
            elif self.start.memory is not None:
                self.start.memory.write(self.analyst.remembered(self.step))
        except Exception as error:
            reason = _named(error)
            raise
        finally:
            self._finish(reason)
        if self._hook_error is not None:
            if self.where.process_count == 1:
                self._save(wait=True)  # of what came after the last step, nothing is saved yet
            raise self._hook_error
        if self._outcome:
            raise Preempted(self.step, self._outcome)
        return self.state

    def _settled(self, first: int) -> Result | None:
        """The newest result that every process has by now: of the step before the one in flight."""
        wanted = self.step + 1 - DEPTH
        if wanted <= first:
            return None
        result = self.watcher.result(wanted)
        self._latest = result
        in_a_row = result.metrics.skipped_in_a_row
        if in_a_row >= self.config.max_skipped_in_a_row:
            why, remedy = _refused(result.metrics.weight)
            raise Diverged(
                f"{in_a_row} updates in a row {why}, the last at step {wanted}. None of them was applied, "
                f"and the checkpoints in {self.config.workdir} are from before. {remedy}"
            )
        return result

    def _obey(self, result: Result | None) -> bool:
        """Do what was asked; False to end the loop."""
        if self.is_chief:  # the answer takes effect everywhere
            progress = None if result is None else result.metrics.progress
            wish = self._due.asked(self.clock.now(), progress)
            if wish is not None:
                self.requests.post(wish)
        control = self._control(result)
        if control.stop:
            self._outcome = self.requests.signal or "peer"
            return False
        total = self.config.base_steps
        if control.finish or (total is not None and self._progress() >= total):
            return False
        if control.evaluate:
            self._evaluate()
        if control.save:
            self._save()
        if control.statistics_every:
            self._every = control.statistics_every
        if control.batch is not None:
            self._take_up(control.batch)
        return True

    def _take_up(self, wish: BatchConfig | BatchWish) -> None:
        strategy = self.batch.strategy if wish.strategy is None else wish.strategy
        batch = BatchConfig(
            micro_batch_size=wish.micro_batch_size,
            num_micro_batches=wish.num_micro_batches,
            num_replicas=self.strategies.engine(strategy).num_replicas,
            strategy=strategy,
        )
        if batch.strategy != self.batch.strategy and not self._switch(batch):
            return  # the batch asked for belongs to the other strategy
        if self.where.spans:
            self._compile_everywhere(batch)
        self.batch = batch
        self._untimed = 1
        with self.ledger.bucket("compilation"), jax.transfer_guard("allow"):
            self.strategies.use(
                batch
            )  # compiles here only where nothing is compiled in the background

    def _switch(self, batch: BatchConfig) -> bool:
        """Move the state to the layout of a batch's strategy, in memory; the loop waits for it.

        False, and nothing has moved, where it does not fit into the memory of some process.
        """
        strategy, refusal = batch.strategy, None
        try:
            with self.ledger.bucket("compilation"), jax.transfer_guard("allow"):
                self.strategies.require(strategy)
                jax.block_until_ready(self.state)  # steps under way take room
                new = self.strategies.engine(strategy).layout
                self.engine.engines.require_room(self.engine.layout, new)
        except (MoveDoesNotFit, TooLarge) as error:
            refusal = error
        if not self._everywhere(refusal is None):
            return self._stay(strategy, refusal or "it does not fit in another process")
        try:
            self._move(strategy)
        except (MoveDoesNotFit, TooLarge) as error:
            return self._stay(strategy, error)
        return True

    def _stay(self, strategy: str, why: object) -> bool:
        logging.warning("training goes on under %s: %s", self.batch.strategy, why)
        self.strategies.leave_out(strategy)
        return False

    def _everywhere(self, holds: bool) -> bool:
        with jax.transfer_guard("allow"):
            return self.where.everywhere(holds)

    def _compile_everywhere(self, batch: BatchConfig) -> None:
        """Have every process compile a batch's steps before one of them waits in a collective."""
        with self.ledger.bucket("compilation"), jax.transfer_guard("allow"):
            engine = self.strategies.engine(batch.strategy)
            for program in engine.training_programs(
                batch.micro_batch_size, accumulate=batch.num_micro_batches > 1
            ):
                engine.compile_program(program)
            if batch.num_micro_batches > 1:
                for program in engine.shared_programs(accumulate=True):
                    engine.compile_program(program)
            self.where.meet(f"step {self.step}")

    def _move(self, strategy: str) -> None:
        old, new = self.engine, self.strategies.engine(strategy)
        with self.ledger.bucket("resharding"), jax.transfer_guard("allow"):
            jax.block_until_ready(self.state)  # its computation is no part of the price
            start_s = self.clock.now()
            plan = old.plan_move(new.layout)
            self.state = jax.block_until_ready(old.move(self.state, new.layout))
        seconds = self.clock.now() - start_s
        self.strategies.switched(seconds, plan.bytes_moved)
        self.analyst.tell(
            Resharded(
                step=self.step,
                before=self.batch.strategy,
                after=strategy,
                seconds=seconds,
                bytes_moved=plan.bytes_moved,
                largest_send_bytes=plan.largest_send_bytes,
                peak_extra_bytes=plan.peak_extra_bytes,
            )
        )
        self.engine = new
        self.loader.place(new.layout.batch_sharding)

    def _control(self, result: Result | None) -> Control:
        if self.where.process_count == 1:
            return self.requests.take()
        if result is None:
            return Control()
        control = decode(result.control, self.strategies.names)
        then = result.ticket.config
        if control.num_measuring == self.where.process_count:
            self._measuring.add((then.strategy, then.micro_batch_size))
        if then.strategy != self.batch.strategy:
            return control
        # The sum bounds the slowest from below: nobody has settled more sizes than were taken up.
        others = self.where.process_count - 1
        slowest = control.num_ready - others * self.sizes.num_wanted
        settled = self.strategies.settled_everywhere
        assert settled is not None
        settled[then.strategy] = max(settled.get(then.strategy, 0), slowest)
        return control

    def _next_batch(self) -> StepBatch | None:
        try:
            batch = self.loader.next(self.batch)
        except Exception as error:
            if self.where.process_count > 1:
                raise  # the others are told by the collective that this process does not join
            # What was learned so far is saved; then the error is raised.
            self._hook_error, self._outcome = error, "the data set failed"
            return None
        if batch is not None and batch.wait_s > 1e-4:
            self.ledger.add("data_loading_sync", batch.wait_s)
        return batch

    def _dispatch(self, batch: StepBatch) -> None:
        """Start one step; nothing here waits for a device."""
        measured, compiled = self._is_measured(batch), self.compilations.num
        dispatched_s = self.clock.now()
        engine, marks = self.engine, (None, None)
        control = self._wishes(batch.config)
        if engine.world is None:
            work = None
            *some, last = batch.micro_batches
            for micro in some:
                work = engine.accumulate(work or engine.begin(self.state), micro.data, micro.mask)
            self.state, metrics = engine.step(
                self.state, work, last.data, last.mask, measure=measured, control=control
            )
        else:
            work = engine.begin(self.state)
            for micro in batch.micro_batches:
                work = engine.accumulate(work, micro.data, micro.mask)
            total = engine.reduce(work, control)
            assert work.sums is not None
            marks = (work.sums.weight, total)
            self.state, metrics = engine.update(self.state, total, work)
        self.step += 1
        self.samples += batch.num_samples
        timed = self._untimed <= 0 and self.compilations.num == compiled and not batch.num_padded
        self._untimed -= 1
        self.watcher.submit(
            Ticket(
                step=self.step,
                config=batch.config,
                measured=measured,
                dispatched_s=dispatched_s,
                timed=timed,
                busy=self.strategies.is_busy,
                num_samples=batch.num_samples,
                samples=self.samples,
                num_batches_taken=self.requests.num_batches_taken,
                before=batch.before,
                after=batch.after,
                metrics=metrics,
                accumulated=marks[0],
                reduced=marks[1],
            )
        )

    def _wishes(self, config: BatchConfig) -> np.ndarray | None:
        """What this process tells the others along with a step of `config`."""
        if self.where.process_count == 1:
            return None
        wishes = dataclasses.replace(
            self.requests.take(),
            num_ready=self.sizes.num_settled,
            num_measuring=int(self.sizes.can_measure(config.micro_batch_size)),
        )
        return encode(wishes, self.strategies.names)

    def _is_measured(self, batch: StepBatch) -> bool:
        """Whether this step measures gradient noise: one step in `every`."""
        if self.engine.world is not None or len(batch.micro_batches) > 1:
            return True
        size = batch.config.micro_batch_size
        can = self.sizes.can_measure(size)
        if self.where.process_count > 1:  # one decision
            can = (self.batch.strategy, size) in self._measuring
        if not can:
            return False  # what it takes is being compiled
        # By the step's number, so that a resumed run measures where an uninterrupted one would.
        return self.step % self._every == 0

    def _drain(self, first: int) -> None:
        """Wait for every step dispatched."""
        for step in range(max(self.step + 2 - DEPTH, first + 1), self.step + 1):
            self._latest = self.watcher.result(step)

    # -- what the loop does besides stepping -----------------------------------------------------

    def _evaluate(self) -> None:
        assert self.evaluator is not None
        start_s = self.clock.now()
        with self.ledger.bucket("evaluation"):
            summary = self.task.summarize(self.evaluator(self.state))
        end_s = self.clock.now()
        self.analyst.tell(
            EvalEnd(
                step=self.step,
                progress=self._progress(),
                at_s=end_s,
                seconds=end_s - start_s,
                metrics={k: float(v) for k, v in summary.items()},
            )
        )

    def _save(self, *, wait: bool = False) -> None:
        start_s = self.clock.now()
        with self.ledger.bucket("checkpoint_save"), jax.transfer_guard("allow"):
            meta = CheckpointMeta(
                step=self.step,
                samples=self.samples,
                cursor=self.loader.cursor,
                batch=self.batch,
                timings=self.analyst.timings(),
                statistics_every=self.analyst.statistics_every,
                ledger=self.ledger.saved(),
            )
            error = self.checkpoints.save(self.state, meta)
            if wait:
                error = error or self.checkpoints.wait()
        if error is not None:
            logging.warning(
                "a checkpoint was not written (%s). Training goes on, and older checkpoints stay. "
                "Free some space, or make %s writable.",
                error,
                self.config.workdir,
            )
        seconds = self.clock.now() - start_s
        self.analyst.tell(Checkpoint(step=self.step, seconds=seconds, error=error))

    def _progress(self) -> float:
        return self.start.progress if self._latest is None else self._latest.metrics.progress

    def _finish(self, reason: str) -> None:
        self.watcher.close()
        self.analyst.tell(
            FitEnd(
                step=self.step,
                progress=self._progress(),
                samples=self.samples,
                seconds=self.clock.now() - self._began_s,
                reason=reason,
                buckets_s=self.ledger.snapshot(),
            )
        )
        self.analyst.flush()

    # -- called from other threads ---------------------------------------------------------------

    def _hook_failed(self, error: BaseException) -> None:
        """A hook or the analysis failed, not the computation: stop and save, everywhere, then raise."""
        self._hook_error = self._hook_error or error
        self.requests.interrupt("a hook failed")

    def _read(self, metrics: Array) -> tuple[StepMetrics[float], np.ndarray]:
        return self.engine.read(metrics)

    def _on_result(self, result: Result) -> None:
        if not result.metrics.is_finite:
            self.ledger.add("skipped_steps", max(result.parts.step_s, 0.0))
        self.analyst.result(result)


def _refused(weight: float) -> tuple[str, str]:
    """Why an update of this weight was refused, and what to do."""
    if weight == 0:
        return "had samples of weight 0 only", (
            "There is nothing to learn from them: look at what `Loss.weight` is made of, such as a mask of "
            "tokens that leaves none."
        )
    if weight == -math.inf:
        return "had samples of negative weight", (
            "A weight says how much a sample counts, 0 at least. To train away from samples, change the "
            "sign of their loss, not of their weight."
        )
    return "had a loss or gradient that is not finite", (
        "Lower the learning rate, clip gradients, or look at the samples of these steps (the data cursor "
        "is in the checkpoint)."
    )


def _named(error: BaseException) -> str:
    """What the record says of an error."""
    return f"{type(error).__name__}: {error}"
