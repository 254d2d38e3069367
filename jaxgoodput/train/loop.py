"""The loop: dispatch step n, look at step n - 2, obey; and what surrounds it, readable in one sitting.

The loop's thread dispatches step n while step n - 1 runs, and looks only at results of steps before
that; results, windows, the fit and verdicts are dealt with by the watcher and the analyst behind it.
Whatever is decided elsewhere (a verdict, a stop, a save) arrives as a `Control`, at the same step in
every process.
"""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator

import jax
import numpy as np
from absl import logging
from jaxtyping import Array

from jaxgoodput import _serial
from jaxgoodput._jax import PeerGone, shared_store
from jaxgoodput.clock import Clock
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.data.loader import StepBatch
from jaxgoodput.data.sources import StreamState
from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.programs import Program
from jaxgoodput.engine.saved import describe, on_host
from jaxgoodput.engine.state import StepMetrics, TrainState, host_copy
from jaxgoodput.goodput.memory import TooLarge
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.events import (
    REGROUPED,
    Checkpoint,
    EvalEnd,
    FitEnd,
    FitStart,
    Preempt,
    ReadsRetried,
    Regrouped,
    Resharded,
    StateShown,
)
from jaxgoodput.parallel.move import MoveDoesNotFit
from jaxgoodput.train.analyst import Analyst
from jaxgoodput.train.checkpoint import ELSEWHERE, CheckpointMeta
from jaxgoodput.train.compile_ahead import SizeCompiler
from jaxgoodput.train.config import Config
from jaxgoodput.train.control import (
    DEPTH,
    SAVED,
    UNSAVED,
    BatchWish,
    Control,
    Diverged,
    Due,
    NotSaved,
    PeerLost,
    Preempted,
    Requests,
    Stopping,
    decode,
    encode,
)
from jaxgoodput.train.membership import Agreement, Membership, OwnPart, Regroup, RunSnapshot
from jaxgoodput.train.prepare import PreparedRun
from jaxgoodput.train.process import Compilations
from jaxgoodput.train.tables.commits import committed
from jaxgoodput.train.task import Task
from jaxgoodput.train.watcher import StepResult, Ticket, Watcher
from jaxgoodput.tune.tuner import Tuner

FIRST_COPY_S = 2.0  # into a generation, of a state that nobody else has


class Loop:
    """One call of `Trainer.fit`: owns the state, and the threads behind it."""

    def __init__(
        self,
        task: Task,
        config: Config,
        start: PreparedRun,
        *,
        requests: Requests,
        ledger: TimeLedger,
        compilations: Compilations,
        clock: Clock,
        membership: Membership | None = None,
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
        self.feed = start.feed
        self.evaluator = start.evaluator
        # What the next step goes on from.
        self.engine: Engine = start.engine
        self.state: TrainState = start.state
        self.batch: BatchConfig = start.batch
        self.step: int = start.step
        self.samples: int = start.samples
        self.cursor: Cursor = start.loader.cursor  # behind the last step; the loader may be ahead
        self.stream: StreamState | None = start.loader.stream  # the same, where the data are one
        # What the loop remembers between steps.
        self._latest: StepResult | None = None
        self._evaluated: tuple[int, dict[str, float]] = (
            -1,
            {},
        )  # the step of the newest one, and its metrics
        self._untimed = DEPTH  # steps that are not to be timed
        self._num_retried = 0  # reads, as last told
        self._rest_of: BatchConfig | None = None  # batch whose rest at the end was asked for
        self._outcome: str | None = None  # what ended the run before its end
        self._agreement: Agreement | None = None  # with the other processes of an elastic job
        self._membership = membership
        self._regroups: str | None = None  # why this set of them is over
        self._error: BaseException | None = None  # of a hook or of the task
        self._is_alone = False  # whether other processes may have gone, or wait in a step
        self._is_dispatching = False  # whether state, step, samples and cursor may disagree
        self._expects_steps = False  # whether a run without steps hangs
        self._saving = threading.Lock()
        self._began_s = clock.now()  # made anew at the first step
        # Where no other group has the state, parts of it are copied.
        only_group = self.where.is_elastic and 1 < self.where.group_size == self.where.process_count
        self._keep_s = FIRST_COPY_S if only_group else math.inf
        self._due = Due(config, self._began_s, start.progress, keep_s=self._keep_s)
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

    def announce(self, regrouped: Regrouped | None = None) -> None:
        """Tell the hooks that the run begins, and with which processes."""
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
                groups=self.engine.programs.param_groups,
            )
        )
        if regrouped is not None:  # by now it is known where the run goes on
            self.analyst.tell(dataclasses.replace(regrouped, step=self.step))

    def close(self) -> None:
        """End the threads: results stop before the analyst does."""
        if self.requests.signal is not None:  # what is being read or compiled is not waited for
            self.loader.close(wait=False)
            self.strategies.abandon()
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
        must_save = is_best = False
        self._began_s = self.clock.now()
        self._due = Due(self.config, self._began_s, self.start.progress, keep_s=self._keep_s)
        unsaved: str | None = None
        failure: NotSaved | None = None
        try:
            try:
                is_best = self._train(first)
            except Diverged:
                raise  # what came of it is not worth keeping
            except Exception as error:
                if not (self.where.is_elastic and is_of_a_peer(error)):
                    self._error, self._is_alone = error, self.where.process_count > 1
                else:  # also where this one is told to stop: those who wait have one of them save
                    self._regroups = f"a process was lost: {error}"
            if self._regroups is not None:
                reason = f"{REGROUPED}{self._regroups}"
                self.analyst.flush()
                if self._error is None:
                    raise Regroup(self._kept(), self._regroups)
                self._is_alone = self.where.process_count > 1  # a hook has failed; the others go on
            if must_save := is_best or self._must_save(first):
                unsaved = self._save_last()
            elif self.feed is not None:  # what is returned goes with rows
                _, unsaved = self._with_tables(self._snapshot()[1])
            if self._outcome and self._error is None:
                self.analyst.tell(Preempt(step=self.step, signal=self._outcome))
            self.analyst.flush()  # the hooks have heard of every step
            reason = "preempted" if self._outcome else "done"
            if unsaved is not None:
                failure = NotSaved(self.step, self._safe_step(), unsaved, self.state)
                reason = _named(failure)
            if self._error is not None:
                reason = _named(self._error)
            elif self.start.memory is not None:
                self.start.memory.write(self.analyst.remembered(self.step))
        except Regroup:
            raise
        except Exception as error:
            reason = _named(error)
            raise
        finally:
            self._finish(reason)
        if self._error is not None:
            if not must_save and self.where.process_count == 1 and self.step > first:
                self._save(wait=True)  # a hook failed at the very end
            if not is_of_a_peer(self._error) or self.where.process_count == 1:
                raise self._error
            if self._outcome is None and self.requests.signal is None:
                raise self._peer_lost() from self._error
            self._outcome = self._outcome or self.requests.signal  # the others have left already
            logging.warning("another process has left before the last step: %s", self._error)
        if failure is not None:
            logging.error("%s", failure)  # a SystemExit says nothing
            raise failure
        if self._outcome:
            raise Preempted(self.step, self._outcome)
        return self.state

    def _train(self, first: int) -> bool:
        """Step to the end, or to where a stop is due; True where the evaluation at the end is the best."""
        has_ended = False  # the data have
        if self.start.restored is not None:
            self._tell_nothing_to_do()
        self._expects_steps = True
        try:
            with jax.transfer_guard("disallow"):
                while self._obey(self._settled(first)):
                    batch = self._next_batch()
                    if batch is None:
                        self._tell_dropped()
                        has_ended = True
                        break
                    with jax.profiler.StepTraceAnnotation("train", step_num=self.step + 1):
                        self._dispatch(batch)
            self._drain(first)
            if has_ended:
                self._tell_cut_short()
            if self.evaluator is not None and self._outcome is None and self._regroups is None:
                return self._evaluate()
            return False
        finally:
            self._expects_steps = False

    def _settled(self, first: int) -> StepResult | None:
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
                f"and the checkpoints in {self.config.workdir} are from before. Of the last, "
                f"{_fault(result)}. {remedy}"
            )
        return result

    def _obey(self, result: StepResult | None) -> bool:
        """Do what was asked; False to end the loop."""
        if self.is_chief:  # the answer takes effect everywhere
            progress = None if result is None else result.metrics.progress
            skipping = result is not None and result.metrics.skipped_in_a_row > 0
            wish = self._due.asked(self.clock.now(), progress, skipping=skipping)
            if wish is not None:
                self.requests.post(wish)
        control = self._control(result)
        if control.stop:
            self._outcome = self.requests.signal or "peer"
            return False
        if control.finish or self._is_complete():
            return False
        if control.regroup and self.where.is_elastic:
            self._regroups = "processes are to come or go"
            return False
        is_best = control.evaluate and self._evaluate()
        if self._outcome:
            return False
        if control.save or is_best:
            self._save()
        if control.keep:
            self._keep_copy()
        if control.show:
            self._show()
        if control.statistics_every:
            self._every = control.statistics_every
        if control.batch is not None:
            self._take_up(control.batch)
        return True

    def _is_complete(self) -> bool:
        """Whether `base_steps` are done. Where the steps in flight may do the rest, it waits for them."""
        total, progress = self.config.base_steps, self._progress()
        if total is None:
            return False
        seen = self.start.step if self._latest is None else self._latest.ticket.step
        most = max(self.batch.global_batch_size / self.config.batch.base, 1) * (self.step - seen)
        if progress < total <= progress + most:
            progress = self.watcher.result(self.step, keep=True).metrics.progress
        return progress >= total

    def _take_up(self, wish: BatchConfig | BatchWish) -> None:
        with self._pausing():
            self._change(wish)

    @contextlib.contextmanager
    def _pausing(self) -> Iterator[None]:
        """No step is expected while the block lasts: a compilation may take any time."""
        before, self._expects_steps = self._expects_steps, False
        try:
            yield
        finally:
            self._expects_steps = before

    def _change(self, wish: BatchConfig | BatchWish) -> None:
        strategy = self.batch.strategy if wish.strategy is None else wish.strategy
        batch = BatchConfig(
            micro_batch_size=wish.micro_batch_size,
            num_micro_batches=wish.num_micro_batches,
            num_replicas=self.strategies.engine(strategy).num_replicas,
            strategy=strategy,
        )
        refusal = self._refusal(batch)
        if refusal is not None:
            logging.warning(
                "training goes on with batches of %d samples: %d in %d micro-batches of %d on each of %d "
                "replicas %s.",
                self.batch.global_batch_size,
                batch.global_batch_size,
                batch.num_micro_batches,
                batch.micro_batch_size,
                batch.num_replicas,
                refusal,
            )
            return
        if batch.strategy != self.batch.strategy and not self._switch(batch):
            return  # the batch asked for belongs to the other strategy
        if self.engine.spans:
            self._compile_everywhere(batch)
        self.batch = batch
        self._untimed = 1
        with self.ledger.bucket("compilation"), jax.transfer_guard("allow"):
            self.strategies.use(
                batch
            )  # compiles here only where nothing is compiled in the background

    def _refusal(self, batch: BatchConfig) -> str | None:
        """Why a batch that is asked for cannot be used; None where it can."""
        if not self.config.batch.allows(batch):
            return "are not what Config.batch allows"
        if batch.num_micro_batches > 1 and not self.config.accumulates:
            return "would be split, which Config does not allow"
        with self.ledger.bucket("compilation"), jax.transfer_guard("allow"):
            fits = self.strategies.fits(batch)
            self.where.meet(f"a batch, step {self.step}")
        return None if self._everywhere(fits) else "do not fit into memory"

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

    def _control(self, result: StepResult | None) -> Control:
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
        if self._takes_leases:
            return self.loader.next_in_parts(self.batch, lambda: self._agreed.lease(self.step))
        try:
            feed = self.feed or self.loader
            batch = feed.next(self.batch, meanwhile=self._unless_stopping)
        except Stopping:
            self._give_up()
            return None
        if batch is None:
            return None
        if self.feed is not None and math.isfinite(feeding_s := self.feed.feeding_s):
            self.analyst.fed(batch.config.global_batch_size, feeding_s)
        if batch.wait_s > 1e-4:
            bucket = "data_loading_sync" if self.feed is None else "embedding"
            self.ledger.add(bucket, batch.wait_s)
        if self.loader.num_retried > self._num_retried:
            self._num_retried = self.loader.num_retried
            self.analyst.tell(ReadsRetried(step=self.step, num_retried=self._num_retried))
        if batch.num_samples < batch.config.global_batch_size:
            with (
                self._pausing(),
                self.ledger.bucket("compilation"),
                jax.transfer_guard("allow"),
            ):
                for program in self._last_programs(batch.num_samples):
                    self.engine.compile_program(program)  # it is there, unless the run was short
                self.where.meet(f"the last batch, step {self.step}")
        return batch

    @property
    def _takes_leases(self) -> bool:
        """Whether micro-batches go to whichever process is free."""
        wanted = self.config.execution.leases and self.engine.world is not None
        return wanted and self.where.process_count > 1 and self.batch.num_micro_batches > 1

    @property
    def _agreed(self) -> Agreement:
        if self._agreement is None:
            store = shared_store()
            assert store is not None
            where = self.where
            self._agreement = Agreement(
                store,
                where.process_index,
                where.process_count,
                group_size=where.group_size,
                is_broken=where.is_broken,
            )
        return self._agreement

    def _tell_dropped(self) -> None:
        total = self.start.total_samples
        if total is not None and self._outcome is None and self.samples < total:
            left = total - self.samples
            logging.info('the last %d samples were dropped, as last_batch="drop" says', left)

    def _tell_cut_short(self) -> None:
        """Warn where the data, not the length that was asked for, have ended the run."""
        total, progress = self.config.base_steps, self._progress()
        is_told = self.is_chief and self._outcome is None and self._regroups is None
        if total is not None and progress < total and is_told:
            logging.warning(
                "the data ended at %.0f %% of base_steps=%g, after %d samples: schedules did not come to "
                "their end. Let the stream repeat, or set base_steps to what there is.",
                100 * progress / total,
                total,
                self.samples,
            )

    def _tell_nothing_to_do(self) -> None:
        """Warn where the checkpoint that the run goes on from is of its end."""
        total, config = self.start.total_samples, self.config
        left = math.inf if total is None else total - self.samples
        by_samples = left < (self.batch.global_batch_size if config.last_batch == "drop" else 1)
        if self.is_chief and (by_samples or self._is_complete()):
            name, value = (
                ("epochs", config.epochs) if by_samples else ("base_steps", config.base_steps)
            )
            logging.warning(
                "nothing to do: %s=%g are done, with step %d in %s. Raise %s, or name another workdir.",
                name,
                value,
                self.step,
                config.workdir,
                name,
            )

    def _compile_last_batch(self) -> None:
        """From half of the run on, have what the batch in use leaves at the end compiled behind the loop."""
        total = self.start.total_samples
        if total is None or 2 * self.samples < total or self._rest_of == self.batch:
            return
        self._rest_of = self.batch
        left = (total - self.samples) % self.batch.global_batch_size
        if self.config.last_batch != "drop":
            self.sizes.compile_soon(self._last_programs(left))

    def _last_programs(self, num_samples: int) -> tuple[Callable[[], Program], ...]:
        """What a last batch of so many samples takes besides the programs of the batch in use."""
        micro, replicas = self.batch.micro_batch_size, self.batch.num_replicas
        if self.engine.layout.strategy.stage > 1:
            return ()  # it is padded to the size of others
        full, rest = divmod(num_samples, micro * replicas)
        own = -(-rest // replicas)
        return self.engine.last_programs(own, alone=not full) if 0 < own < micro else ()

    def _unless_stopping(self) -> None:
        """Raise Stopping where a stop is due now: called while the loop waits for data, or evaluates."""
        # Others hear of it along with the next step: left alone only where that does not come.
        if self.requests.is_overdue or (self.requests.signal and self.where.process_count == 1):
            raise Stopping

    def _give_up(self) -> None:
        self._outcome, self._is_alone = self.requests.signal, self.where.process_count > 1

    def _dispatch(self, batch: StepBatch) -> None:
        """Start one step; nothing here waits for a device."""
        self._compile_last_batch()
        self._is_dispatching = True
        measured, compiled = self._is_measured(batch), self.compilations.num
        dispatched_s = self.clock.now()
        engine, marks, own = self.engine, (None, None), None
        control = self._wishes(batch.config)
        if self.feed is not None:
            (micro,) = batch.micro_batches
            self.state, slots, metrics = engine.step_with_rows(
                self.state,
                self.feed.slots,
                self.feed.lookups,
                micro.data,
                micro.mask,
                measure=measured,
                control=control,
            )
            self.feed.trained(slots)
        elif engine.world is None:
            work = None
            *some, last = batch.micro_batches
            for micro in some:
                work = engine.accumulate(work or engine.begin(self.state), micro.data, micro.mask)
            self.state, metrics = engine.step(
                self.state, work, last.data, last.mask, measure=measured, control=control
            )
        else:
            work, num_rows = engine.begin(self.state), 0
            compares = measured and batch.parts is None and len(batch.micro_batches) == 1
            compares = compares and not engine.has_groups
            for micro in batch.micro_batches if batch.parts is None else batch.parts:
                work = engine.accumulate(work, micro.data, micro.mask, measure=compares)
                num_rows += len(micro.mask)
                if batch.parts is not None:  # the next one is for whoever is done first
                    assert work.sums is not None
                    jax.block_until_ready(work.sums.weight)
            assert work.sums is not None
            if not self.where.is_elastic:
                total = engine.reduce(work, control)
                marks = (work.sums.weight, total)
            else:
                jax.block_until_ready(work.sums.weight)
                own_end_s = self.clock.now()
                own = self._own_part(batch, num_rows, own_end_s - dispatched_s)
                # The update would take the state along into a sum that failed.
                total = jax.block_until_ready(engine.reduce(work, control))
                if self.where.group_size > 1 and self.where.process_count > 1:
                    self._agreed.commit(self.step)
                marks = (own_end_s, self.clock.now())
            self.state, metrics = engine.update(self.state, total, work)
        self.step += 1
        self.samples += batch.num_samples
        self.cursor, self.stream = batch.after, self.loader.stream
        self._is_dispatching = False
        if self._agreement is not None and self.is_chief:
            self._agreement.forget(self.step)
        is_whole = batch.num_samples == batch.config.global_batch_size
        timed = self._untimed <= 0 and self.compilations.num == compiled and is_whole
        self._untimed -= 1
        if own is not None and timed and not self.strategies.is_busy:
            assert self._membership is not None
            self._membership.computed(own)
        self.watcher.submit(
            Ticket(
                step=self.step,
                config=batch.config,
                measured=measured,
                # A step that waits for its batch takes as long as reading it does.
                began_s=dispatched_s - batch.wait_s,
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

    def _own_part(self, batch: StepBatch, num_rows: int, seconds: float) -> OwnPart:
        """What of a step is this process's own; what is read ahead goes on beside it."""
        config = batch.config
        num_parts = 1 if batch.parts is not None else config.num_micro_batches
        replicas = self.engine.layout.num_replicas
        return OwnPart(
            seconds=max(seconds, batch.read_s),
            num_samples=num_rows,
            part=replicas * config.micro_batch_size * num_parts,
            whole=config.global_batch_size,
            is_leased=batch.parts is not None,
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
        if self.engine.has_groups or batch.parts is not None or len(batch.micro_batches) > 1:
            return True
        if batch.num_samples < batch.config.global_batch_size:
            return False  # the run's last, for which nothing that measures is compiled
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

    def _evaluate(self) -> bool:
        """Evaluate the state; True where it is the best so far, by `Saving.best`."""
        assert self.evaluator is not None
        start_s = self.clock.now()
        try:
            # What is the user's (samples, `summarize`) may use jnp as it likes.
            with self.ledger.bucket("evaluation"), jax.transfer_guard("allow"):
                with self._pausing():
                    self.evaluator.compile(self.engine.abstract_state())
                outputs = self.evaluator(self.state, meanwhile=self._unless_stopping)
                summary = self.task.summarize(outputs)
                metrics = {name: float(value) for name, value in summary.items()}
        except Stopping:
            logging.info("the evaluation of step %d is left out: a stop was asked for", self.step)
            self._give_up()
            return False
        end_s = self.clock.now()
        self._evaluated = self.step, metrics
        self.analyst.tell(
            EvalEnd(
                step=self.step,
                progress=self._progress(),
                at_s=end_s,
                seconds=end_s - start_s,
                metrics=metrics,
            )
        )
        is_best = self.checkpoints.is_best(metrics)
        if self.config.saving.best is None:
            return False
        return self._everywhere(is_best or not self.is_chief)  # who knows all checkpoints decides

    def _must_save(self, first: int) -> bool:
        """Whether the last step is to be saved at the end; the same in all processes that are not alone."""
        if self._error is not None and (self._is_alone or self.where.process_count == 1):
            return self.step > first
        return self._outcome is not None or self.config.saving.at_end

    def _save_last(self) -> str | None:
        """Save the last step and wait for it; None, or why it is not safe.

        All processes come here together and get one answer, unless they are alone: then the one that writes
        does it by itself, and the others look whether it has.
        """
        if not self._is_alone:
            error = self._save(wait=True)
            is_safe = self._everywhere(not self.is_chief or self._is_safe())
        else:
            error = self._save(wait=True) if self.is_chief and not self.engine.spans else None
            for _ in range(0 if self.is_chief or self._error else 20):
                if self._is_safe():
                    break
                self.clock.sleep(0.5)
            is_safe = self._is_safe()
        return None if is_safe else error or "the process that writes did not"

    def _save(self, *, wait: bool = False) -> str | None:
        """Save this step; what went wrong with it, or with the one before."""
        start_s = self.clock.now()
        with self.ledger.bucket("checkpoint_save"), jax.transfer_guard("allow"), self._saving:
            state, meta = self._snapshot()
            meta, error = self._with_tables(meta)
            is_of_tables = error is not None  # which says itself where there is no room
            if self.feed is not None and not self._everywhere(error is None):
                error = error or f"step {meta.step}: {ELSEWHERE}"
            if self.engine.spans and not self.where.spans and self.where.writes:
                state = jax.tree.map(host_copy, state)  # one of its processes writes for all
            if error is None:
                error = self.checkpoints.save(state, meta)
            if wait:  # in every process, whatever has failed in this one
                failed = self.checkpoints.wait(alone=self._is_alone)
                error = error or failed
        if error is not None:
            logging.warning(
                "a checkpoint was not written (%s). %solder checkpoints stay.%s",
                error,
                "" if wait else "Training goes on, and ",
                f" Free some space, or make {self.config.workdir} writable."
                if not is_of_tables
                and ("Errno" in error or "os_error_code" in error)  # of Python, of tensorstore
                else "",
            )
        seconds = self.clock.now() - start_s
        self.analyst.tell(Checkpoint(step=self.step, seconds=seconds, error=error))
        return error

    def _with_tables(self, meta: CheckpointMeta) -> tuple[CheckpointMeta, str | None]:
        """The metadata of a checkpoint with the commits of tables, made first; and what went wrong."""
        if self.feed is None:
            return meta, None
        try:
            kept, workdir = self.checkpoints.steps(), self.config.workdir
            hosts = self.where.process_count
            commits = committed(self.feed.tables, workdir, meta.step, kept, hosts)
        except (OSError, RuntimeError) as error:
            return meta, f"step {meta.step}: {error}"
        return dataclasses.replace(meta, tables=commits), None

    def _snapshot(self) -> tuple[TrainState, CheckpointMeta]:
        return self.state, CheckpointMeta(
            step=self.step,
            samples=self.samples,
            cursor=self.cursor,
            stream=self.stream,
            batch=self.batch,
            timings=self.analyst.timings(),
            statistics_every=self.analyst.statistics_every,
            ledger=self.ledger.saved(),
            progress=self._progress(),
            metrics=self._evaluated[1] if self._evaluated[0] == self.step else {},
            data=self.start.data,
            base_batch_size=self.config.batch.base,
        )

    def _kept(self) -> RunSnapshot:
        """The run as it is after the last step that was done, in host memory."""
        with jax.transfer_guard("allow"):
            state, meta = self._snapshot()
            leaves = on_host(state)
        return RunSnapshot(leaves, dataclasses.replace(meta, leaves=describe(state)))

    def _keep_copy(self) -> None:
        """Have a copy of this process's part of the state in memory, here and on another host."""
        assert self._membership is not None
        began_s = self.clock.now()
        with self.ledger.bucket("checkpoint_save"):
            self._membership.keep(self._kept())
        self._due.kept(self.clock.now() - began_s, self._membership.failure_every_s)

    def _safe_step(self) -> int | None:
        """The step of the newest checkpoint."""
        try:
            return self.checkpoints.newest()
        except OSError as error:  # the workdir itself has gone
            logging.error("there is no telling what is saved: %s", error)
            return None

    def _is_safe(self) -> bool:
        """Whether nothing would be lost now: the last step done is saved, or there was none."""
        return (self._safe_step() or 0) >= self.done

    def _peer_lost(self) -> PeerLost:
        silent = self.where.silent(self.clock)
        who = ", ".join(map(str, silent)) or "unknown"
        return PeerLost(
            f"another process of this job has gone or does not answer; of {self.where.process_count} there "
            f"is no word from: {who}. Its own output says why, and the launcher names the first to fail. "
            f"Start the job again: it goes on from step {self._safe_step() or 0}."
        )

    def _show(self) -> None:
        """Tell the hooks the parameters, on the host: the state's buffers go to the next step."""
        with self.ledger.bucket("other"), jax.transfer_guard("allow"):
            state, own = self.state, self.state.params
            params = jax.tree.map(lambda x, own: host_copy(x, own.dtype), state.averaged, own)
            model_state = jax.tree.map(host_copy, state.model_state)
        if self.is_chief:
            self.analyst.tell(
                StateShown(
                    step=self.step,
                    progress=self._progress(),
                    params=params,
                    model_state=model_state,
                )
            )

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

    @property
    def done(self) -> int:
        """The last step that is done, as far as is known."""
        newest = self.watcher.newest
        return self.start.step if newest is None else newest

    def pulse(self) -> tuple[int, int] | None:
        """Something that changes while the loop lives; None where it may stand still."""
        if not self._expects_steps or self.analyst.is_awaited:
            return None
        return self.done, 0 if self.evaluator is None else self.evaluator.num_batches

    def save_aside(self) -> None:
        """Save the last step from another thread, where the loop is busy with something else than steps."""
        # Rows are on their way between batches of which the loop alone knows.
        can_write = self.is_chief and not self.engine.spans and self.feed is None
        if not can_write or self._is_dispatching or not self._saving.acquire(blocking=False):
            return
        try:
            state, meta = self._snapshot()
            if self._is_dispatching or meta.step != self.step:
                return  # the loop has come back
            with jax.transfer_guard("allow"):
                error = self.checkpoints.save(state, meta) or self.checkpoints.wait(alone=True)
            logging.warning("step %d, saved beside the loop: %s", meta.step, error or "done")
        finally:
            self._saving.release()

    def farewell(self) -> tuple[int, str]:
        """The exit code by what is safe now, and a sentence on it."""
        if self._is_safe():
            return SAVED, f"step {self._safe_step() or 0} is saved"
        return UNSAVED, str(NotSaved(self.done, self._safe_step(), "it took too long"))

    def _hook_failed(self, error: BaseException) -> None:
        """A hook or the analysis failed, not the computation: stop and save, everywhere, then raise."""
        self._error = self._error or error
        self.requests.interrupt("a hook failed")

    def _read(self, metrics: Array) -> tuple[StepMetrics[float], np.ndarray]:
        return self.engine.read(metrics)

    def _on_result(self, result: StepResult) -> None:
        if not result.metrics.is_finite:
            self.ledger.add("skipped_steps", max(result.parts.step_s, 0.0))
            if result.metrics.skipped_in_a_row == 1 and self.is_chief:  # once for those that follow
                logging.warning(
                    "step %d was not applied: %s. Its batch: %d samples from place %d of epoch %d on.",
                    result.ticket.step,
                    _fault(result),
                    result.ticket.num_samples,
                    result.ticket.before.offset,
                    result.ticket.before.epoch,
                )
        self.analyst.result(result)


def _fault(result: StepResult) -> str:
    """What was wrong with a step that was refused, as far as its numbers tell."""
    found = result.metrics
    if found.weight == 0 or found.weight == -math.inf:
        return (
            "its samples have no weight" if found.weight == 0 else "a sample's weight is negative"
        )
    if not math.isfinite(found.loss):
        return f"its loss is {found.loss}"
    if not math.isfinite(found.grad_norm):
        return f"its loss is {found.loss:.6g}, and its gradient is not finite"
    return "loss and gradient are finite, and its update or the model state is not"


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
    return "had a loss, gradient, update or model state that is not finite", (
        "Lower the learning rate, clip gradients, or look at the samples of these steps (the data cursor "
        "is in the checkpoint). Where the loss is finite, look at the schedule and the optimizer, or at "
        "what loss_and_state returns as the new state."
    )


def is_of_a_peer(error: BaseException) -> bool:
    """Whether it looks like a collective that failed because another process has gone."""
    if isinstance(error, PeerGone):
        return True
    if not isinstance(error, jax.errors.JaxRuntimeError | ValueError):
        return False
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "connection", "heartbeat", "coordination"))


def _named(error: BaseException) -> str:
    """What the record says of an error."""
    return f"{type(error).__name__}: {error}"
