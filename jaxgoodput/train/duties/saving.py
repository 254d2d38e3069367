"""`Saver`: writes checkpoints of a run, and knows whether its last step is safe."""

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
from absl import logging

from jaxgoodput.clock import Clock
from jaxgoodput.engine.saved import describe, on_host
from jaxgoodput.engine.state import TrainState
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.events import Checkpoint
from jaxgoodput.train.analyst import Analyst
from jaxgoodput.train.checkpoint import ELSEWHERE, CheckpointMeta
from jaxgoodput.train.config import Config
from jaxgoodput.train.control import SAVED, UNSAVED, NotSaved
from jaxgoodput.train.prepare import PreparedRun
from jaxgoodput.train.runs.membership import RunSnapshot

LOOKS = 20  # for the checkpoint of another process, half a second apart


@dataclass
class Saver:
    """Owns the checkpoints of a run. `done` returns the last step that is known to be done."""

    start: PreparedRun
    config: Config
    analyst: Analyst
    ledger: TimeLedger
    clock: Clock
    done: Callable[[], int]
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def save(self, *, wait: bool = False) -> str | None:
        """Save the last step; returns what went wrong with this checkpoint, or the one before it.

        With `wait`, return when it is on the disk.
        """
        start_s, decisions = self.clock.now(), self.start.run.decisions
        with self.ledger.bucket("checkpoint_save"), jax.transfer_guard("allow"), self.lock:
            _, meta = self._snapshot()
            meta, error = self.with_tables(meta)
            is_of_tables = error is not None  # its own message names the remedy
            if not self.start.feed.agrees(error is None):
                error = error or f"step {meta.step}: {ELSEWHERE}"
            state = self.start.run.to_save(self.start.now)
            if error is None:
                error = self.start.checkpoints.save(state, meta)
            if wait:  # in every process, even if this one has failed: the others wait for it
                failed = self.start.checkpoints.wait(alone=not decisions.is_together)
                error = error or failed
        if error is not None:
            self._warn(error, goes_on=not wait, is_of_tables=is_of_tables)
        seconds = self.clock.now() - start_s
        self.analyst.tell(Checkpoint(step=self.start.now.step, seconds=seconds, error=error))
        return error

    def _warn(self, error: str, *, goes_on: bool, is_of_tables: bool) -> None:
        """Warn of a checkpoint that was not written, with the remedy unless the error names it itself."""
        is_of_disk = "Errno" in error or "os_error_code" in error  # of Python, of tensorstore
        remedy = f" Free some space, or make {self.config.workdir} writable."
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
                error = self.start.checkpoints.save(state, meta) or self.start.checkpoints.wait(
                    alone=True
                )
            logging.warning(
                "step %d, saved by another thread because the loop is busy: %s",
                meta.step,
                error or "done",
            )
        finally:
            self.lock.release()

    def with_tables(self, meta: CheckpointMeta | None = None) -> tuple[CheckpointMeta, str | None]:
        """Commit the tables; returns the metadata with their commits, and what went wrong."""
        meta = self._snapshot()[1] if meta is None else meta
        commits, error = self.start.feed.commit(meta.step, self.start.checkpoints.steps)
        return dataclasses.replace(meta, tables=commits), error

    def kept(self) -> RunSnapshot:
        """Return the run as it is after the last step that was done, in host memory."""
        with jax.transfer_guard("allow"):
            state, meta = self._snapshot()
            leaves = on_host(state)
        return RunSnapshot(leaves, dataclasses.replace(meta, leaves=describe(state)))

    def safe_step(self) -> int | None:
        """Return the step of the newest checkpoint; None if there is none."""
        try:
            return self.start.checkpoints.newest()
        except OSError as error:  # the workdir itself is gone
            logging.error("cannot tell which step is saved: %s", error)
            return None

    def is_safe(self) -> bool:
        """Whether nothing would be lost now: the last step done is saved, or there was none."""
        return (self.safe_step() or 0) >= self.done()

    def farewell(self) -> tuple[int, str]:
        """Return the exit code for what is safe now, and a sentence on it."""
        if self.is_safe():
            return SAVED, f"step {self.safe_step() or 0} is saved"
        return UNSAVED, str(NotSaved(self.done(), self.safe_step(), "it took too long"))

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
        )
