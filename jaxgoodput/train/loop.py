"""The loop: get a batch, dispatch step n, look at the result of step n - 2, obey.

The loop's thread dispatches step n while step n - 1 runs, and looks only at results of earlier steps. The
watcher and the analyst behind it deal with results, windows, the fit and verdicts. A verdict, a stop or a
request to save reaches the loop as a `Control`, at the same step in every process. How batches come, how a
step is made and how processes agree is up to the kind of run (`runs/`); saving, evaluating and changing the
batch have an object each (`duties/`).
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from absl import logging
from jaxtyping import Array

from jaxgoodput._exits import DONE, SAVED, Exit
from jaxgoodput._fields import serial
from jaxgoodput.clock import Clock
from jaxgoodput.data.loader import StepBatch
from jaxgoodput.engine.state import StepMetrics, TrainState, host_copy
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.events import (
    REGROUPED,
    FitEnd,
    FitStart,
    Preempt,
    Regrouped,
    StateShown,
)
from jaxgoodput.train.analyst import Analyst
from jaxgoodput.train.checkpoints.memory import RunMemory, explored_in, findings_in
from jaxgoodput.train.config import Config
from jaxgoodput.train.control import (
    Control,
    Diverged,
    Due,
    NotSaved,
    Preempted,
    Requests,
    Stopping,
    explained,
)
from jaxgoodput.train.decider import BatchFindings
from jaxgoodput.train.duties.certifying import Certifier
from jaxgoodput.train.duties.evaluating import Evaluations
from jaxgoodput.train.duties.reading import BatchReader
from jaxgoodput.train.duties.refusals import Refusals
from jaxgoodput.train.duties.remembering import MemoryKeeper
from jaxgoodput.train.duties.saving import Saver
from jaxgoodput.train.duties.switching import BatchSwitcher
from jaxgoodput.train.in_flight import StepsInFlight
from jaxgoodput.train.prepare import PreparedRun
from jaxgoodput.train.process import Compilations
from jaxgoodput.train.runs.membership import Regroup
from jaxgoodput.train.runs.processes import peer_lost
from jaxgoodput.train.task import Task
from jaxgoodput.train.watcher import StepResult, Watcher
from jaxgoodput.tune.exploring import Explored
from jaxgoodput.tune.tuner import TunerThread


@dataclass
class Ending:
    """Why a run ends before its last step: a stop, a regrouping or an error; none of them if it does not."""

    stopped_by: str | None = None
    """The signal or request that asked to stop."""
    regroup: str | None = None
    """Why this generation of processes is over; the run is not."""
    error: BaseException | None = None
    """What a hook or the task's own code raised."""
    reason: str = "interrupted"
    """What the record says of the end."""

    @property
    def is_early(self) -> bool:
        """Whether the run, or its generation, was told to end."""
        return self.stopped_by is not None or self.regroup is not None


class Loop:
    """One call of `Trainer.fit`, or one generation of it: owns the state, and the threads behind it."""

    def __init__(
        self,
        task: Task,
        config: Config,
        start: PreparedRun,
        *,
        requests: Requests,
        due: Due,
        remembered: RunMemory | None = None,
        ledger: TimeLedger,
        compilations: Compilations,
        clock: Clock,
        tuner: Callable[..., TunerThread] = TunerThread,
    ):
        self.task = task
        self.config = config
        self.start = start
        self.now = start.now
        self.kind = start.run
        self.requests = requests
        self.ledger = ledger
        self.compilations = compilations
        self.clock = clock
        self._ending = Ending()
        self._began_s = clock.now()  # set again at the first step
        self.watcher = Watcher(self._read, self._on_result, clock)
        explored, _ = explored_in(remembered, start.earlier)
        findings = findings_in(start.earlier, remembered, start.first_step)
        self.analyst = _analyst_of(self, findings, explored, self._hook_failed, tuner)
        self.now.statistics_every = self.analyst.statistics_every
        self._in_flight = StepsInFlight(start, requests, self.watcher)
        given = (start, config, self.analyst, ledger, clock)
        self._reader = BatchReader(*given)
        self._switcher = BatchSwitcher(*given)
        finish = partial(requests.post, Control(finish=True))
        self._evaluations = Evaluations(*given, summarize=task.summarize, finish=finish)
        self.keeper = MemoryKeeper(start, self.analyst, self._evaluations, due, clock, remembered)
        certifier = Certifier(start, requests)
        self._saver = Saver(
            *given, done=lambda: self.done, certifier=certifier, memory=self.keeper.memory
        )
        self._refusals = Refusals(start, config, ledger, self._saver)

    # -- what others ask of it -------------------------------------------------------------------

    def announce(self, regrouped: Regrouped | None = None) -> None:
        """Tell the hooks that the run begins, and with which processes."""
        now, where = self.now, self.start.where
        layout = now.engine.layout
        self.analyst.tell(
            FitStart(
                step=now.step,
                progress=now.progress,
                restart=self.start.restart,
                config=now.batch,
                limits=self.start.limits,
                device_kind=layout.mesh.devices.flat[0].device_kind,
                num_devices=where.num_devices,
                num_processes=where.process_count,
                settings=serial.encode(self.config),
                at_s=self.clock.now(),
                groups=now.engine.programs.param_groups,
            )
        )
        if regrouped is not None:  # only now is the step known at which the run goes on
            self.analyst.tell(dataclasses.replace(regrouped, step=now.step))

    def close(self) -> None:
        """End the threads: results stop before the analyst does."""
        if self.requests.signal is not None:  # don't wait for what is being read or compiled
            self.start.loader.close(wait=False)
            self.start.strategies.abandon()
        self.watcher.close()
        self.analyst.close()

    # -- the run ---------------------------------------------------------------------------------

    def run(self) -> TrainState:
        """Train to the end. See `Trainer.fit` for what it raises."""
        first, ending = self.now.step, self._ending
        self._began_s = self.clock.now()
        self.keeper.begin()
        try:
            is_best = self._train_or_note_error(first)
            if ending.regroup is not None:
                self._regroup(ending.regroup)
            must_save = is_best or self._must_save(first)
            if must_save:
                with self.keeper.due.saving():
                    unsaved = self._saver.save_last(look=ending.error is None)
            else:
                unsaved = self._saver.commit_last()
            failure = self._tell_hooks(unsaved)
        except Diverged as error:  # while it saved, perhaps because of an error, which is the cause
            ending.reason = _named(error)
            raise error from (ending.error or error.__cause__)
        except Exception as error:
            if not isinstance(error, Regroup):
                ending.reason = _named(error)
            raise
        finally:
            self._finish(ending.reason)
        if ending.error is not None and not (failure and _says_safe(ending.error)):
            self._raise_error(ending.error, is_saved=must_save or self.now.step == first)
        if failure is not None:
            logging.error("%s", failure)  # Python prints nothing for a SystemExit
            raise failure from ending.error
        if ending.stopped_by:
            raise Preempted(self.now.step, ending.stopped_by)
        return self.now.state

    def _regroup(self, why: str) -> None:
        """Hand the state to the next generation, unless a hook has failed here, which ends the run."""
        self._ending.reason = f"{REGROUPED}{why}"
        self.analyst.flush()
        if self._ending.error is None:
            raise Regroup(self._saver.kept(), why)
        self.kind.decisions.leave()  # the others go on

    def _tell_hooks(self, unsaved: str | None) -> NotSaved | None:
        """Tell the hooks how the run has ended; returns the error to raise if the last step is not safe."""
        ending, failure = self._ending, None
        if ending.stopped_by and ending.error is None:
            self.analyst.tell(Preempt(step=self.now.step, signal=ending.stopped_by))
        self.analyst.flush()  # the hooks have heard of every step
        ending.reason = "preempted" if ending.stopped_by else "done"
        if unsaved is not None:
            failure = NotSaved(self.now.step, self._saver.safe_step(), unsaved, self.now.state)
            ending.reason = _named(failure)
        if ending.error is not None:
            ending.reason = _named(ending.error)
        elif self.start.memory is not None:
            self.start.memory.write(self.analyst.remembered(self.now.step))
        return failure

    def _train_or_note_error(self, first: int) -> bool:
        """Train, and note what was raised: the state may still be saved. Returns what `_train` does."""
        try:
            return self._train(first)
        except Diverged:
            raise  # the state is not worth saving
        except (Exception, SystemExit) as error:  # a script may call sys.exit() in a hook
            # A lost peer comes first, even if a stop was requested: the processes that wait for each other
            # then have one of them save.
            ended_by = self.kind.ended_by(error)
            if ended_by is not None:
                self._ending.regroup = ended_by
            else:
                self._ending.error = (
                    self._explained(error) if isinstance(error, Exception) else error
                )
                self.kind.decisions.leave()
            return False

    def _explained(self, error: Exception) -> Exception:
        """Return what to raise for an error of the steps or their data; see `control.explained`."""
        batch = self.now.batch
        return explained(
            error,
            f"step {self.now.step} or the next one (batches of {batch.global_batch_size} samples, "
            f"{batch.micro_batch_size} per replica at once, under {batch.strategy})",
        )

    def _must_save(self, first: int) -> bool:
        """Whether to save the last step at the end; the same in all processes that are together."""
        if self._ending.error is not None and not self.kind.decisions.is_together:
            return self.now.step > first
        return self._ending.stopped_by is not None or self.config.saving.at_end

    def _raise_error(self, error: BaseException, *, is_saved: bool) -> None:
        """Raise what ended the run, unless the others have left first because of a stop."""
        ending, run = self._ending, self.kind
        if not is_saved and not run.decisions.is_together:
            try:
                self._saver.save(wait=True)  # a hook failed after the last step
            except Diverged as diverged:
                raise diverged from error
        if not run.decisions.blames_a_peer(error):
            raise error
        ending.stopped_by = ending.stopped_by or self.requests.signal
        if ending.stopped_by is None:
            raise peer_lost(self.start.where, self.clock, self._saver.safe_step()) from error
        logging.warning(
            "another process has left before the last step, as this run was told to stop: %s", error
        )

    def _train(self, first: int) -> bool:
        """Step to the end, or until a stop is due; True if the last evaluation is the best."""
        has_data = True
        if self.start.restored is not None:
            self._reader.tell_if_nothing_is_left(is_complete=self._is_complete())
        self.now.expects_steps = True
        try:
            with jax.transfer_guard("disallow"):
                while self._obey(self._settled()):
                    batch = self._next_batch()
                    if batch is None:
                        has_data = False
                        break
                    with jax.profiler.StepTraceAnnotation("train", step_num=self.now.step + 1):
                        self._dispatch(batch)
                    del batch  # the watcher lets go of it
            for result in self._in_flight.rest():
                self.now.look_at(result)
            if not has_data and not self._ending.is_early:
                self._reader.tell_end()
            return not self._ending.is_early and self._evaluate(at_end=True)
        finally:
            self.now.expects_steps = False

    def _settled(self) -> StepResult | None:
        """Return the newest result that every process has by now, after a look at each; None without one."""
        newest = None
        for newest in self._in_flight.settled():
            self.now.look_at(newest)
            self._refusals.check(newest)
        return newest

    def _obey(self, result: StepResult | None) -> bool:
        """Carry out the requests that take effect now, such as a save; return False to end the loop."""
        self._post_what_is_due(result)
        control = self.kind.decisions.received(result, self.now.batch)
        if self._ends(control):
            return False
        is_best = control.evaluate and self._evaluate()
        if self._ending.stopped_by:
            return False
        if control.evaluate:
            self.keeper.due.evaluated()
        if control.save or is_best:
            with self.keeper.due.saving():
                self._saver.save()
        if not self.start.is_chief:
            self.keeper.due.obeyed(control, self.clock.now())
        self._obey_quietly(control)
        return True

    def _ends(self, control: Control) -> bool:
        """Whether the loop ends here, by request or because it is done."""
        if control.stop:
            self._ending.stopped_by = self.requests.signal or "peer"
            return True
        if control.finish or self._is_complete():
            return True
        if control.regroup:
            self._ending.regroup = "processes are about to join or leave"
        return control.regroup

    def _post_what_is_due(self, result: StepResult | None) -> None:
        """Request the checkpoints, copies and evaluations that are due; process 0 does it for all.

        The timers of the other processes run along: one of them may be process 0 of the next generation. They
        restart by time when what process 0 asked for is done, because clocks differ by what a regroup took.
        """
        now_s = self.clock.now() if self.start.is_chief else -math.inf
        progress = None if result is None else result.metrics.progress
        skipping = result is not None and result.metrics.skipped_in_a_row > 0
        wish = self.keeper.due.asked(now_s, progress, skipping=skipping)
        if wish is not None and self.start.is_chief:
            self.requests.post(wish)

    def _obey_quietly(self, control: Control) -> None:
        """Carry out requests that never end the loop: copy, show, noise cadence and batch."""
        if control.keep:
            self._keep_copy()
        if control.show:
            self._show()
        if control.statistics_every:
            self.now.statistics_every = control.statistics_every
        batch = control.batch_after(self.now.batch)
        if batch is not None and self._switcher.take_up(batch):
            self._in_flight.has_changed()

    def _is_complete(self) -> bool:
        """Whether `base_steps` are done. If the steps in flight may do the rest, wait for them."""
        total, progress = self.config.base_steps, self.now.progress
        if total is None:
            return False
        num_unseen, most = self._unseen()
        if progress < total <= progress + most * num_unseen:
            progress = self.watcher.result(self.now.step).metrics.progress
        return progress >= total

    def _next_batch(self) -> StepBatch | None:
        try:
            return self._reader.next(self._num_free(), meanwhile=self._unless_stopping)
        except Stopping:
            self._give_up()
            return None

    def _num_free(self) -> float:
        """Return how many steps need no attention before the next one that does.

        That is one that measures the noise, or after which a save, an evaluation or the end may be due. While
        what measures is being compiled, no step does.
        """
        now, total = self.now, self.config.base_steps
        num_unseen, most = self._unseen()
        left = self.keeper.due.progress_left(now.progress)
        if total is not None:
            left = min(left, total - now.progress)
        left = max(left / most - num_unseen - 1, 0)
        if self.kind.decisions.can_measure(now.batch):
            left = min(left, -now.step % now.measured_every)
        return float(left)

    def _unseen(self) -> tuple[int, float]:
        """Return how many steps' progress is not known yet, and the most base steps that each is worth."""
        now = self.now
        most = max(now.batch.global_batch_size / self.config.batch.base, 1.0)
        return now.step - now.progress_step, most

    def _dispatch(self, batch: StepBatch) -> None:
        """Start a step, or a block of steps. Alone, nothing here waits for a device."""
        now, num_compiled = self.now, self.compilations.num
        now.is_changing = True
        dispatched_s = self.clock.now()
        measured = self._is_measured(batch)
        done = self.kind.dispatch(now, batch, measured=measured)
        used, now.state = now.state, done.state
        now.step += batch.count
        now.samples += batch.num_samples
        now.cursor, now.stream = batch.after, self.start.loader.used(batch.after)
        now.is_changing = False
        is_steady = self._in_flight.is_steady and self.compilations.num == num_compiled
        about = {"timed": is_steady and batch.is_whole, "busy": self.start.strategies.is_busy}
        self.kind.stepped(now.step, timed=about["timed"] and not about["busy"])
        # A step that waits for its batch takes as long as reading it does.
        began_s = dispatched_s - batch.wait_s
        self._in_flight.add(batch, done, measured=measured, began_s=began_s, **about)
        self.watcher.let_go(batch, used if used.is_donated else None)
        self._saver.certifier.stepped(batch.count)

    def _is_measured(self, batch: StepBatch) -> bool:
        """Return whether this step measures gradient noise.

        A step of several micro-batches or leased parts, or beside other groups of devices, always does. One
        micro-batch alone is measured in one step of `measured_every`, and only if its batch is whole and
        the program for it is compiled.
        """
        if batch.count > 1:
            return False  # none of its steps is one that measures
        if self.now.engine.has_groups or batch.parts is not None or len(batch.micro_batches) > 1:
            return True  # its micro-batches, or other groups, tell the noise anyway
        if batch.num_samples < batch.config.global_batch_size:
            return False  # the run's last batch, for which nothing that measures is compiled
        if not self.kind.decisions.can_measure(batch.config):
            return False  # what it takes is being compiled
        # The step's number decides: if the user has fixed `every_steps`, a resumed run measures at the steps
        # of an uninterrupted one.
        return self.now.step % self.now.measured_every == 0

    # -- what the loop does besides stepping -----------------------------------------------------

    def _evaluate(self, *, at_end: bool = False) -> bool:
        try:
            is_best = self._evaluations.evaluate(meanwhile=self._unless_stopping, at_end=at_end)
            if at_end:
                self.keeper.complete()
            return is_best
        except Stopping:
            logging.info(
                "the evaluation of step %d is skipped: a stop was requested", self.now.step
            )
            self._give_up()
            return False

    def _unless_stopping(self) -> None:
        """Raise Stopping if a stop is due now; called while the loop waits for data, or evaluates."""
        if self.kind.decisions.is_stop_due():
            raise Stopping

    def _give_up(self) -> None:
        """Stop without the other processes, which wait in a step, or hear of the stop along with it."""
        self._ending.stopped_by = self.requests.signal
        self.kind.decisions.leave()

    def _keep_copy(self) -> None:
        """Copy this process's part of the state into memory, here and on another host."""
        began_s = self.clock.now()
        with self.ledger.bucket("checkpoint_save"):
            failure_every_s = self.kind.keep(self._saver.kept())
        self.keeper.due.kept(self.clock.now() - began_s, failure_every_s)

    def _show(self) -> None:
        """Give the parameters to the hooks, copied to the host: the next step takes the state's buffers."""
        with self.ledger.bucket("other"), jax.transfer_guard("allow"):
            state, own = self.now.state, self.now.state.params
            params = jax.tree.map(lambda x, own: host_copy(x, own.dtype), state.averaged, own)
            model_state = jax.tree.map(host_copy, state.model_state)
        if self.start.is_chief:
            self.analyst.tell(
                StateShown(
                    step=self.now.step,
                    progress=self.now.progress,
                    params=params,
                    model_state=model_state,
                )
            )

    def _finish(self, reason: str) -> None:
        self.watcher.close()
        self.analyst.tell(
            FitEnd(
                step=self.now.step,
                progress=self.now.progress,
                samples=self.now.samples,
                seconds=self.clock.now() - self._began_s,
                reason=reason,
                buckets_s=self.ledger.snapshot(),
            )
        )
        self.analyst.flush()

    # -- called from other threads ---------------------------------------------------------------

    @property
    def done(self) -> int:
        """The last step that is known to be done."""
        newest = self.watcher.newest
        return self.start.first_step if newest is None else newest

    def pulse(self) -> tuple[int, int] | None:
        """Return (last step done, evaluation batches begun), a sign of life; None if it may stand still."""
        if not self.now.expects_steps or self.analyst.is_awaited:
            return None
        return self.done, self._evaluations.num_batches

    def save_aside(self) -> None:
        """Save the last step from another thread; see `Saver.save_aside`."""
        self._saver.save_aside()

    def farewell(self) -> Exit:
        """Return the exit code for what is safe now, and a sentence on it."""
        return self._saver.farewell(self.requests.signal or "peer")

    def _hook_failed(self, error: BaseException) -> None:
        """Stop and save in all processes, then raise: a hook or the analysis failed, not the computation."""
        self._ending.error = self._ending.error or error
        self.requests.interrupt("a hook failed")

    def _read(self, metrics: Array, count: int) -> list[tuple[StepMetrics[float], np.ndarray]]:
        return self.now.engine.read_all(metrics, count)

    def _on_result(self, result: StepResult) -> None:
        self._refusals.note(result)
        self.analyst.result(result)


def _analyst_of(
    loop: Loop,
    findings: BatchFindings | None,
    explored: Explored | None,
    on_error: Callable[[BaseException], None],
    tuner: Callable[..., TunerThread],
) -> Analyst:
    """Return the `Analyst` of a loop, with the measurements of its checkpoint or of earlier runs."""
    start, policy = loop.start, loop.config.policy
    analyst = Analyst(
        loop.config,
        start.strategies,
        current=start.now.batch,
        requests=loop.requests,
        compile_s=start.compile_s,
        hooks=start.hooks,
        clock=loop.clock,
        on_error=on_error,
        book=loop.ledger.add,
        learning_rate=loop.task.learning_rate,
        dataset_size=start.dataset_size,
        adapt=start.is_chief and policy == "goodput",
        schedule=policy if start.is_chief and not isinstance(policy, str) else None,
        tuner=tuner,
    )
    if start.memory is not None and start.memory.earlier is not None:
        analyst.recall(start.memory.earlier)
    if start.restored is not None:  # what this run has measured itself takes precedence
        known = start.restored
        analyst.restore(known.timings, known.statistics_every, findings, explored, known.samples)
    return analyst


def _says_safe(error: BaseException) -> bool:
    """Whether an error ends the process with the exit code of a run that is done or saved: `sys.exit()`."""
    return isinstance(error, SystemExit) and error.code in (None, DONE, SAVED)


def _named(error: BaseException) -> str:
    """Return an error as text for the journal: its type and message."""
    return f"{type(error).__name__}: {error}"
