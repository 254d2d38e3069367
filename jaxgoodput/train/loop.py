"""One run: the loop, readable in one sitting, and what surrounds it.

The loop's thread dispatches step n while step n - 1 runs, and looks only at results of steps before
that; results, windows, the fit and verdicts are dealt with by the watcher and the analyst behind it.
Whatever is decided elsewhere (a verdict, a stop, a save) arrives as a `Control`, at the same step in
every process.
"""

import contextlib
import dataclasses
import json
import pathlib
import threading
from typing import TYPE_CHECKING, Any

import jax
from absl import logging

from jaxgoodput._jax import Compilation, listen_for_compilations
from jaxgoodput.data.loader import StepBatch
from jaxgoodput.engine import memory
from jaxgoodput.engine.state import Previous, TrainState
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.observe import journal
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.events import Checkpoint, EvalEnd, FitEnd, FitStart, Preempt, Resharded
from jaxgoodput.parallel.move import MoveDoesNotFit
from jaxgoodput.train import process as signals
from jaxgoodput.train import setup
from jaxgoodput.train.analyst import PROBE_STEPS, Analyst
from jaxgoodput.train.checkpoint import quiet_writer
from jaxgoodput.train.config import to_json
from jaxgoodput.train.control import DEPTH, Control, Requests, decode, encode
from jaxgoodput.train.due import Due
from jaxgoodput.train.outcome import Diverged, Preempted, named
from jaxgoodput.train.prepare import Start, prepared
from jaxgoodput.train.rungs import Rungs
from jaxgoodput.train.watcher import Result, Ticket, Watcher

if TYPE_CHECKING:
    from jaxgoodput.train.trainer import Trainer


SETTLED_STEPS = 2 * PROBE_STEPS  # of a size, after which it is more than a trial


class Run:
    """Owns the threads, files and device values of one call of `Trainer.fit`."""

    def __init__(self, trainer: "Trainer"):
        self.trainer = trainer
        self.config = trainer.config
        self.clock = trainer.clock
        self.requests = Requests()
        self.ledger = TimeLedger(self.clock)
        self.compilations: list[Compilation] = []
        self._hook_error: BaseException | None = None
        self._thread_id = threading.get_ident()

    def fit(self) -> TrainState:
        """The whole run. See `Trainer.fit` for what it raises."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(quiet_writer())
            stack.enter_context(setup.persistent_cache(self.config))
            stack.enter_context(setup.prompt_threads())
            stack.callback(listen_for_compilations(self._compiled))
            # Before anything that takes long: what is asked during compilation is done at step 0.
            stack.enter_context(signals.heeded(self.requests))
            with self.ledger.bucket("training_prep"):
                self._prepare(stack)
            return self._train()

    # -- before ----------------------------------------------------------------------------------

    def _prepare(self, stack: contextlib.ExitStack) -> None:
        start = prepared(self.trainer, stack, self.ledger, self.clock)
        self.where, self.is_chief = start.where, start.where.process_index == 0
        self.engine, self.ladders, self.checkpoints = start.engine, start.ladders, start.checkpoints
        self.loader, self.evaluator = start.loader, start.evaluator
        self.state, self.batch = start.state, start.batch
        self.step, self.samples = start.step, start.samples
        self._progress_before = start.progress
        self._start_reporting(stack, start)
        start.where.meet("before the first step")

    def _start_reporting(self, stack: contextlib.ExitStack, start: Start) -> None:
        config, restored = self.config, start.restored
        compile_s = self.ledger.snapshot().get("compilation", 0.0)  # of this start alone
        restart = 0
        if self.is_chief:
            saved = None if restored is None else restored.meta["ledger"]
            restart = journal.resume(config.workdir, self.ledger, saved)
        hooks: list[Any] = []
        if self.is_chief:
            hooks = setup.observers(stack, config, self.ledger, self.clock, self.trainer.hooks)
            settings = to_json(config)
            path = pathlib.Path(config.workdir) / "config.json"
            path.write_text(json.dumps(settings, indent=2) + "\n")
        self.watcher = Watcher(self._read, self._on_result, self.clock)
        self.analyst = Analyst(
            config,
            self.ladders,
            current=self.batch,
            requests=self.requests,
            compile_s=compile_s,
            hooks=hooks,
            clock=self.clock,
            on_error=self._hook_failed,
            book=lambda name, seconds: self.ledger.add(name, seconds),
            learning_rate=self.trainer.learning_rate,
            dataset_size=start.dataset_size,
            adapt=self.is_chief and config.policy == "goodput",
        )
        # Last in, first out: results stop before the analyst does, and both before the files close.
        stack.callback(self.analyst.close)
        stack.callback(self.watcher.close)
        if restored is not None:
            self.analyst.restore(restored.meta["analyst"])
        self.every = self.analyst.statistics_every
        self.analyst.tell(
            FitStart(
                step=self.step,
                progress=self._progress_before,
                restart=restart,
                config=self.batch,
                limits=start.limits,
                device_kind=self.engine.layout.mesh.devices.flat[0].device_kind,
                num_devices=self.engine.layout.num_devices * self.where.process_count,
                num_processes=self.where.process_count,
                settings=to_json(config),
                at_s=self.clock.now(),
            )
        )

    @property
    def rungs(self) -> Rungs:
        """The ladder of the strategy in use."""
        return self.ladders.rungs(self.batch.strategy)

    # -- the loop --------------------------------------------------------------------------------

    def _train(self) -> TrainState:
        start_s, first = self.clock.now(), self.step
        self._due = Due(self.config, start_s, self._progress_before)
        self._previous: Previous | None = None
        self._untimed = DEPTH
        self._stayed = 0  # steps of the present batch
        if self.where.process_count > 1:
            self.ladders.settled_everywhere = 0
        self._latest: Result | None = None
        self._outcome: str | None = None
        reason = "interrupted"
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
            if self._outcome or self.config.save_at_end:
                self._save(wait=True)
            reason = "preempted" if self._outcome else "done"
            if self._hook_error is not None:
                reason = named(self._hook_error)
        except Exception as error:
            reason = named(error)
            raise
        finally:
            self._finish(reason, start_s)
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
        in_a_row = result.metrics["skipped_in_a_row"]
        if in_a_row >= self.config.max_skipped_in_a_row:
            raise Diverged(
                f"{in_a_row:.0f} updates in a row had a loss or gradient that is not finite, the last "
                f"at step {wanted}. None of them was applied, and the checkpoints in "
                f"{self.config.workdir} are from before. Lower the learning rate, clip gradients, or "
                "look at the samples of these steps (the data cursor is in the checkpoint)."
            )
        return result

    def _obey(self, result: Result | None) -> bool:
        """Do what was asked; False to end the loop."""
        if self.is_chief:  # the answer takes effect everywhere
            progress = result and result.metrics["progress"]
            self.requests.post(**self._due.asked(self.clock.now(), progress))
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
            self.every = control.statistics_every
        if control.micro_batch_size and control.num_micro_batches:
            strategy = self.batch.strategy if control.strategy is None else control.strategy
            if strategy != self.batch.strategy and not self._switch(strategy):
                return True  # the batch asked for belongs to the other strategy
            self.batch = BatchConfig(
                micro_batch_size=control.micro_batch_size,
                num_micro_batches=control.num_micro_batches,
                num_replicas=self.engine.num_replicas,
                strategy=strategy,
            )
            self._untimed, self._stayed = 1, 0
            self.ladders.use(self.batch)
        return True

    def _switch(self, strategy: str) -> bool:
        """Move the state to another strategy's layout, in memory; the loop waits for it.

        False, and nothing has moved, where it does not fit into memory.
        """
        try:
            with self.ledger.bucket("compilation"), jax.transfer_guard("allow"):
                self.ladders.require(strategy)
            self._move(strategy)
        except (MoveDoesNotFit, memory.TooLarge) as refusal:
            logging.warning("training goes on under %s: %s", self.batch.strategy, refusal)
            self.ladders.leave_out(strategy)
            return False
        return True

    def _move(self, strategy: str) -> None:
        old, new = self.engine, self.ladders.engine(strategy)
        with self.ledger.bucket("resharding"), jax.transfer_guard("allow"):
            jax.block_until_ready(self.state)  # its computation is no part of the price
            start_s = self.clock.now()
            plan = old.plan_move(new.layout)
            self.state = jax.block_until_ready(old.move(self.state, new.layout))
        seconds = self.clock.now() - start_s
        self.ladders.switched(seconds, plan.bytes_moved)
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
        self.engine, self._previous = new, None
        self.loader.place(new.layout.batch_sharding)

    def _control(self, result: Result | None) -> Control:
        if self.where.process_count == 1:
            return self.requests.take()
        if result is None:
            return Control()
        control = decode(result.control)
        # The sum bounds the slowest from below: nobody has settled more sizes than were taken up.
        others = self.where.process_count - 1
        slowest = control.num_ready - others * self.rungs.num_wanted
        self.ladders.settled_everywhere = max(self.ladders.settled_everywhere or 0, slowest)
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
        measured, compiled = self._is_measured(batch), len(self.compilations)
        dispatched_s = self.clock.now()
        engine, marks = self.engine, (None, None)
        if engine.world is None:
            work = None
            *some, last = batch.micro_batches
            for micro in some:
                work = engine.accumulate(work or engine.begin(self.state), micro.data, micro.mask)
            previous = self._previous if measured and work is None else None
            self.state, metrics, self._previous = engine.step(
                self.state, work, last.data, last.mask, measure=measured, previous=previous
            )
            # A gradient that is only remembered costs nothing; its difference from the next does.
            measured = measured and self._previous is None
        else:
            work = engine.begin(self.state)
            for micro in batch.micro_batches:
                work = engine.accumulate(work, micro.data, micro.mask)
            wishes = self.requests.take(num_ready=self.rungs.num_settled)
            total = engine.reduce(work, encode(wishes))
            assert work.sums is not None
            marks = (work.sums.weight, total)
            self.state, metrics = engine.update(self.state, total, work)
        self.step += 1
        self.samples += batch.num_samples
        timed = self._untimed <= 0 and len(self.compilations) == compiled and not batch.num_padded
        self._untimed -= 1
        self._stayed += 1
        if self._stayed == SETTLED_STEPS:
            self.rungs.settle(self.batch.micro_batch_size)
        self.watcher.submit(
            Ticket(
                step=self.step,
                config=batch.config,
                measured=measured,
                dispatched_s=dispatched_s,
                timed=timed,
                busy=self.ladders.is_busy,
                num_samples=batch.num_samples,
                samples=self.samples,
                before=batch.before,
                after=batch.after,
                metrics=metrics,
                accumulated=marks[0],
                reduced=marks[1],
            )
        )

    def _is_measured(self, batch: StepBatch) -> bool:
        """Whether this step measures gradient noise: one step in `every`, two for a difference."""
        if self.engine.world is not None or len(batch.micro_batches) > 1:
            return True
        if not self.rungs.can_measure(batch.config.micro_batch_size):
            return False  # what it takes is being compiled
        length = 2 if self.engine.needs_two_steps else 1
        # By the step's number, so that a resumed run measures where an uninterrupted one would.
        return self.every <= length or self.step % self.every < length

    def _drain(self, first: int) -> None:
        """Wait for every step dispatched."""
        for step in range(max(self.step + 2 - DEPTH, first + 1), self.step + 1):
            self._latest = self.watcher.result(step)

    # -- what the loop does besides stepping -----------------------------------------------------

    def _evaluate(self) -> None:
        assert self.evaluator is not None
        start_s = self.clock.now()
        with self.ledger.bucket("evaluation"):
            summary = self.trainer.summarize(self.evaluator(self.state))
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
            meta = {
                "step": self.step,
                "samples": self.samples,
                "progress": self._progress(),
                "cursor": self.loader.cursor.to_json(),
                "batch": dataclasses.asdict(self.batch),
                "analyst": self.analyst.to_json(),
                "ledger": self.ledger.to_json(),
            }
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
        return self._progress_before if self._latest is None else self._latest.metrics["progress"]

    def _finish(self, reason: str, start_s: float) -> None:
        self.watcher.close()
        self.analyst.tell(
            FitEnd(
                step=self.step,
                progress=self._progress(),
                samples=self.samples,
                seconds=self.clock.now() - start_s,
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

    def _read(self, metrics: Any) -> tuple[dict[str, float], Any]:
        return self.engine.read(metrics), self.engine.read_control(metrics)

    def _on_result(self, result: Result) -> None:
        if not result.metrics["finite"]:
            self.ledger.add("skipped_steps", max(result.parts.step_s, 0.0))
        self.analyst.result(result)

    def _compiled(self, compilation: Compilation) -> None:
        if compilation.thread_id == self._thread_id:
            self.compilations.append(compilation)
            self.ledger.add("compilation", compilation.seconds)
