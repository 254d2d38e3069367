"""`Saver`: writes checkpoints of a run, and knows whether its last step is safe.

All values of a state are checked before it is written. If any was finite when the run began and is not any
more, the state is written elsewhere, and the run ends as `Diverged`.
"""

import dataclasses
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
from absl import logging

from jaxgoodput._exits import Exit, RunFacts, run_exit
from jaxgoodput.clock import Clock
from jaxgoodput.engine.saved import describe, on_host
from jaxgoodput.engine.state import TrainState
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.events import Checkpoint
from jaxgoodput.train.analyst import Analyst
from jaxgoodput.train.checkpoints.folders import NO_SPACE, SPOILT
from jaxgoodput.train.checkpoints.memory import RunMemory
from jaxgoodput.train.checkpoints.meta import CheckpointMeta
from jaxgoodput.train.checkpoints.writer import ELSEWHERE, Checkpoints
from jaxgoodput.train.config import Config
from jaxgoodput.train.control import Diverged, is_of_a_peer
from jaxgoodput.train.duties.certifying import Certifier
from jaxgoodput.train.prepare import PreparedRun
from jaxgoodput.train.runs.membership import RunSnapshot
from jaxgoodput.workdir.places import workdir_of

LOOKS = 20  # for the checkpoint of another process, half a second apart


@dataclass
class Saver:
    """Owns the checkpoints of a run.

    `done` returns the last step that is known to be done, `memory` what the run remembers besides its state.
    """

    start: PreparedRun
    config: Config
    analyst: Analyst
    ledger: TimeLedger
    clock: Clock
    done: Callable[[], int]
    certifier: Certifier
    memory: Callable[[], RunMemory]
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def save(self, *, wait: bool = False) -> str | None:
        """Save the last step; returns what went wrong with this checkpoint, or the one before it.

        With `wait`, return when it is on the disk. Raises Diverged, in all processes, if the state is not
        worth it.
        """
        start_s, decisions = self.clock.now(), self.start.run.decisions
        with self.ledger.bucket("checkpoint_save"), jax.transfer_guard("allow"), self.lock:
            error = self.certify(rows=self.certifier.has_found)
            is_of_tables, meta = False, self._certified()
            if error is None:
                meta, error = self.with_tables(meta)
                is_of_tables = error is not None  # its own message names the remedy
                if not self.start.feed.agrees(error is None):
                    self.certify()  # the rows may be the reason
                    error = error or f"step {meta.step}: {ELSEWHERE}"
            if error is None:
                state = self.start.run.to_save(self.start.now)
                error = self.start.checkpoints.save(state, meta, paused=self.start.now.paused)
            if wait:  # in every process, even if this one has failed: the others wait for it
                failed = self.start.checkpoints.wait(alone=not decisions.is_together)
                error = error or failed
        if error is not None:
            self._warn(error, goes_on=not wait, is_of_tables=is_of_tables)
        seconds = self.clock.now() - start_s
        self.analyst.tell(Checkpoint(step=self.start.now.step, seconds=seconds, error=error))
        return error

    def certify(self, *, rows: bool = False) -> str | None:
        """Raise Diverged, in all processes, if values of the state or of rows on the disk are lost.

        With `rows`, all rows of tables on the device are checked, too. Returns why the check was not
        possible, or None. Waits for the last step.
        """
        certifier, lost, failure = self.certifier, {}, None
        if not self.start.run.decisions.is_together and self.start.now.engine.spans:
            return "the processes that hold the state are not together any more"
        with jax.transfer_guard("allow"):
            try:
                lost = certifier.lost(rows=rows)
            except Exception as error:
                if is_of_a_peer(error):
                    raise
                failure = f"step {self.start.now.step}: {type(error).__name__}: {error}"
            if certifier.agreed(not lost and failure is None):
                return None
            if certifier.agreed(not lost):
                return failure or f"step {self.start.now.step}: {ELSEWHERE}"
            told, step = certifier.told(lost), self.start.now.step
            aside = self._set_aside(lost)
        raise self.diverged(
            f"values that were finite are not any more, as found at step {step}: {told}.",
            f"{aside} Run again to go on from the last certified checkpoint. First lower the learning rate, "
            "clip gradients, or look at the schedule and at what the optimizer divides by, such as eps.",
        )

    def diverged(self, why: str, remedy: str) -> Diverged:
        """Return the error for a run that cannot go on, which names the last certified checkpoint."""
        # The newest one may still be on its way to the disk.
        with self.start.now.paused():
            error = self.start.checkpoints.wait(alone=True)
        safe = self.safe_step()
        held = "No checkpoint is certified" if safe is None else f"Step {safe} is certified"
        later = f"; a later one could not be written ({error})" if error is not None else ""
        return Diverged(f"{why} {held} in {self.config.workdir}{later}. {remedy}", safe)

    def _set_aside(self, lost: Mapping[str, int]) -> str:
        """Write a state with lost values beside the checkpoints; returns a sentence on where it is."""
        decisions, workdir = self.start.run.decisions, self.config.workdir
        meta = dataclasses.replace(self._snapshot()[1], lost=lost or {ELSEWHERE: 1})
        if self.start.is_chief:  # an earlier run may have left a state of this step
            folder = workdir_of(workdir).folder / SPOILT / str(meta.step)
            shutil.rmtree(folder, ignore_errors=True)
        self.certifier.agreed(True)  # it is gone before another process looks
        aside, error = None, None
        try:
            aside = Checkpoints(
                workdir,
                keep=1,
                spans=self.start.where.spans,
                folder=SPOILT,
                keeper=self.start.checkpoints.keeper,
            )
        except OSError as failure:
            error = f"{type(failure).__name__}: {failure}"
        if not self.certifier.agreed(error is None) or aside is None:
            if aside is not None:
                aside.close()
            return f"The state could not be set aside ({error or ELSEWHERE})."
        with self.start.now.paused():
            error = aside.save(self.start.run.to_save(self.start.now), meta)
            error = aside.wait(alone=not decisions.is_together) or error
            aside.close()
        if error is not None:
            return f"The state could not be set aside ({error})."
        return f"The state is set aside in {workdir}/{SPOILT}/{meta.step}."

    def _warn(self, error: str, *, goes_on: bool, is_of_tables: bool) -> None:
        """Warn of a checkpoint that was not written, with the remedy unless the error names it itself."""
        # The others are of Python and of tensorstore.
        is_of_disk = any(word in error for word in (NO_SPACE, "Errno", "os_error_code"))
        # A store that is away is told of by the keeper.
        is_of_disk = is_of_disk and self.start.checkpoints.keeper.unreachable is None
        folder = workdir_of(self.config.workdir).folder
        remedy = f" Free some space, or make {folder} writable."
        logging.warning(
            "the checkpoint was not written (%s). %solder checkpoints stay.%s",
            error,
            "Training goes on, and " if goes_on else "",
            remedy if is_of_disk and not is_of_tables else "",
        )

    def save_last(self, *, look: bool = True) -> str | None:
        """Save the last step and wait until it is safe; returns None, or why it is not.

        All processes that are together call this together and get one answer. Otherwise process 0 saves by
        itself, and the others look whether it has; with `look`, for some seconds.
        """
        decisions = self.start.run.decisions
        if decisions.is_together:
            error = self.save(wait=True)
            is_safe = decisions.everywhere(not self.start.is_chief or self.is_safe())
        else:
            can_write = self.start.is_chief and not self.start.now.engine.spans
            error = self.save(wait=True) if can_write else None
            for _ in range(LOOKS if look and not self.start.is_chief else 0):
                if self.is_safe():
                    break
                self.clock.sleep(0.5)
            is_safe = self.is_safe()
        return None if is_safe else error or "the process that writes checkpoints did not"

    def save_aside(self) -> None:
        """Save the last step from another thread, if the loop is busy with something else than steps."""
        can_write = (
            self.start.is_chief and not self.start.now.engine.spans and self.start.feed.is_settled
        )
        if not can_write or self.start.now.is_changing or not self.lock.acquire(blocking=False):
            return
        try:
            state, meta = self._snapshot()
            if self.start.now.is_changing or meta.step != self.start.now.step:
                return  # the loop has come back
            with jax.transfer_guard("allow"):
                error = self._save_alone(state, meta)
            logging.warning(
                "the loop does not answer to a stop, so another thread saved step %d: %s",
                meta.step,
                f"this failed ({error}), and the last checkpoint stays the newest"
                if error
                else "done",
            )
        finally:
            self.lock.release()

    def _save_alone(self, state: TrainState, meta: CheckpointMeta) -> str | None:
        """Check and write a state without the other processes; returns what went wrong."""
        if lost := self.certifier.lost():
            return f"values are no longer finite: {self.certifier.told(lost)}"
        checkpoints = self.start.checkpoints
        error = checkpoints.save(state, dataclasses.replace(meta, lost={}))
        return error or checkpoints.wait(alone=True)

    def with_tables(self, meta: CheckpointMeta | None = None) -> tuple[CheckpointMeta, str | None]:
        """Commit the tables; returns the metadata with their commits, and what went wrong."""
        meta = self._snapshot()[1] if meta is None else meta
        commits, error = self.start.feed.commit(meta.step, self.start.checkpoints.steps)
        return dataclasses.replace(meta, tables=commits), error

    def commit_last(self) -> str | None:
        """Check the last step and commit the tables without a checkpoint; returns what went wrong.

        The state is returned to the user. Raises Diverged if it is not good.
        """
        self.certify()
        error = self.with_tables()[1]
        if not self.start.feed.agrees(error is None):
            self.certify()  # the rows may be the reason
        return error

    def kept(self) -> RunSnapshot:
        """Return the run as it is after the last step that was done, in host memory."""
        with jax.transfer_guard("allow"):
            state, meta = self._snapshot()
            leaves = on_host(state)
        return RunSnapshot(leaves, dataclasses.replace(meta, leaves=describe(state)))

    def safe_step(self) -> int | None:
        """Return the step of the newest certified checkpoint; None if there is none."""
        try:
            return self.start.checkpoints.newest()
        except OSError as error:  # the workdir itself is gone
            logging.error(
                "the checkpoints in the workdir cannot be read, so the last step counts as not saved: %s. "
                "Check that the workdir is still mounted.",
                error,
            )
            return None

    def is_safe(self) -> bool:
        """Whether nothing would be lost now: the last step done is saved, or there was none."""
        return (self.safe_step() or 0) >= self.done()

    def farewell(self, stopped_by: str) -> Exit:
        """Return the exit code for what is safe now, and a sentence on it; `stopped_by` asked to stop."""
        return run_exit(
            RunFacts(
                stopped_by=stopped_by,
                last_step=self.done(),
                saved_step=self.safe_step() or 0,
                unsaved_why="it took too long",
            )
        )

    def _certified(self) -> CheckpointMeta:
        """Return the metadata of a state whose values were checked and found good."""
        return dataclasses.replace(self._snapshot()[1], lost={})

    def _snapshot(self) -> tuple[TrainState, CheckpointMeta]:
        now = self.start.now
        step, metrics = now.evaluated
        return now.state, CheckpointMeta(
            step=now.step,
            samples=now.samples,
            cursor=now.cursor,
            stream=now.stream,
            batch=now.batch,
            timings=self.analyst.timings(),
            statistics_every=self.analyst.statistics_every,
            ledger=self.ledger.saved(),
            progress=now.progress,
            metrics=metrics if step == now.step else {},
            data=self.start.data,
            base_batch_size=self.config.batch.base,
            began=self.start.values.origin.packed,
            memory=self.memory(),
        )
