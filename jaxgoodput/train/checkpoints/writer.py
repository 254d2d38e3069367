"""`Checkpoints` of a run: written asynchronously and atomically by Orbax, restored onto any layout.

A checkpoint is certified: before it is written, all values of the state were checked, and the metadata says
so (`CheckpointMeta.lost`). Any other is never the newest or the best.

If a save fails, training goes on, the older checkpoints stay, and the error is reported. A checkpoint is
sealed with the checksums of its files before it gets its name. A checkpoint that is damaged is named in a
warning and set aside, and the one before it is used.

Each device reads only its own part, so no device holds more than that and one leaf at a time.

If a state spans processes, all of them write it together, each value once, and it is complete when the last
process is done. Otherwise the state is the same in every process, and process 0 writes it. Every process
reads its own devices' parts and agrees with the others on the result. No reader waits inside Orbax for
another process, because that process may have failed.
"""

import dataclasses
import math
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from jaxgoodput import _disk
from jaxgoodput.engine import saved as on_disk
from jaxgoodput.engine.saved import describe
from jaxgoodput.engine.state import TrainState
from jaxgoodput.train.checkpoints.folders import (
    DAMAGED,
    SPOILT,
    TEMPORARY,
    Label,
    attempt,
    brief,
    folders_by_step,
    is_out_of_memory,
    labels_in,
    meta_in,
)
from jaxgoodput.train.checkpoints.meta import CheckpointMeta, WrongWorkdirError, require_same_model
from jaxgoodput.train.checkpoints.retention import Note, best_step, kept, require_best
from jaxgoodput.train.checkpoints.saved import RestoredCheckpoint, SavedCheckpoint
from jaxgoodput.train.config import Saving
from jaxgoodput.workdir.places import FolderKeeper, Keeper, workdir_of

ELSEWHERE = "it failed in another process"
LOCAL = FolderKeeper()


class Checkpoints:
    """The checkpoints of one workdir: saves, restores and deletes them.

    `spans` says that states lie on devices of several processes. `keep` is the number of newest checkpoints
    to keep, or the full settings. `folder` is the name of another folder for states that are not certified.
    `keeper` keeps what is written: a checkpoint is saved once that says so.
    """

    def __init__(
        self,
        workdir: str,
        *,
        keep: int | Saving,
        spans: bool = False,
        folder: str = "checkpoints",
        keeper: Keeper = LOCAL,
    ):
        self.keeper = keeper
        self._root = workdir_of(workdir).folder.resolve()
        self._directory = self._root / folder
        self._saving = Saving(keep=keep) if isinstance(keep, int) else keep
        self._spans = spans
        self._directory.mkdir(parents=True, exist_ok=True)
        self._notes: dict[int, Note] = {}  # by step, as far as known
        self._steps: dict[int, int] = {}  # recorded steps by the numbers that folders are named by
        self._gone: set[int] = set()  # those of them that neither the folder nor the keeper has
        self._num_opened = 0
        self._together = False  # whether all processes share one manager
        self._has_failed = False  # whether the shared manager has failed in this process
        self._manager = self._open()
        self._writing = 0  # step handed to the writer last

    def save(
        self,
        state: TrainState,
        meta: CheckpointMeta,
        *,
        paused: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> str | None:
        """Hand the state to the writer, and return once its values are copied off the devices.

        Returns None, or what went wrong with this save or the one before. If the keeper still copies the one
        before, this waits within `paused()`, so that checkpoints are not written faster than they are copied;
        but not if it cannot be reached. If the state spans processes, all of them must call this
        together.
        """
        if self._spans:
            error = self._error_anywhere()
        elif jax.process_index() != 0:
            return None
        else:
            # Orbax would wait, too, and raise as this save's failure what was the earlier one's.
            error = self._finish_writing() or self._kept_up(paused)
        step = self._writing = meta.step
        if (
            self._manager.latest_step() == step
        ):  # a run that stops right after resuming saves nothing new
            return error
        refusal = self._refusal()
        if self._spans and not self._everywhere(refusal is None):
            refusal = refusal or ELSEWHERE
        if refusal is not None:
            return f"step {step}: {refusal}"
        meta = dataclasses.replace(meta, leaves=describe(state))
        # Noted before saving, because Orbax asks which steps to keep while it saves.
        self._steps[step], self._notes[step] = step, Note.of(meta, self._saving)
        self._gone.discard(step)
        try:
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(self._outward(state)),  # pyright: ignore[reportCallIssue]
                meta=ocp.args.JsonSave(meta.to_json()),  # pyright: ignore[reportCallIssue]
            )
            if not self._manager.save(step, args=args, force=True):
                return f"step {step}: Orbax refused to save it"
        except Exception as failure:
            return self._failed(failure)
        return error

    def error(self) -> str | None:
        """Return what went wrong in the background since the last call, if anything."""
        try:
            self._manager.check_for_errors()
        except Exception as failure:
            return self._failed(failure)
        return None

    def wait(self, *, alone: bool = False) -> str | None:
        """Wait until everything is on disk; return what went wrong, if anything.

        All processes call this together, and none continues before the writer is done. A process that is
        `alone`, because the others are gone or hang, waits for itself only.
        """
        error = self._finish()
        if alone:
            return error
        if not self._everywhere(error is None) and self._spans:
            error = error or ELSEWHERE
        return error

    def newest(self) -> int | None:
        """Return the newest step whose checkpoint is complete and certified; None if there is none."""
        # A folder gets its final name only when it is complete, checksums included.
        labels = labels_in(self._directory)
        safe = {x.step for x in labels if x.is_certified and self.keeper.is_safe(x.folder)}
        away = {x for x in self._away(labels) if self._notes.get(x, Note()).is_certified}
        return max(safe | away, default=None)

    def best(self) -> int | None:
        """Return the step with the best value of `Saving.best`; None if no checkpoint has one."""
        return best_step(self._noted(self._manager.all_steps()), self._saving)

    def steps(self) -> set[int]:
        """Return the steps of all checkpoints that may be resumed, with the one that is being written."""
        labels = labels_in(self._directory)
        return {*(x.step for x in labels), *self._away(labels), self._writing}

    def _away(self, labels: Sequence[Label]) -> set[int]:
        """Return the steps that were deleted here, and stay with the keeper until newer ones are safe."""
        here = {x.folder.name for x in labels}
        away = set()
        for number, step in [*self._steps.items()]:
            if str(number) in here or step == self._writing or number in self._gone:
                continue
            if self.keeper.is_safe(self._directory / str(number)):
                away.add(step)
            else:
                self._gone.add(number)
        return away

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether an evaluation is better, by `Saving.best`, than all checkpoints.

        Raises ValueError if it does not have that metric.
        """
        name = self._saving.best
        if name is None:
            return False
        require_best(self._saving, metrics)
        notes = self._noted(self._manager.all_steps())
        now = max(notes, default=0) + 1
        return best_step({**notes, now: Note(value=metrics[name])}, self._saving) == now

    def best_progress(self) -> float:
        """Return the base steps at which the best checkpoint was saved; NaN if there is none."""
        notes = self._noted(self._manager.all_steps())
        best = best_step(notes, self._saving)
        return math.nan if best is None else notes[best].progress

    def require_same_model(self, meta: CheckpointMeta, abstract: TrainState) -> None:
        """Raise WrongWorkdirError if the checkpoint of `meta` does not belong to the model of this state."""
        require_same_model(self._directory / str(meta.step), meta, abstract)

    def tidy(self) -> None:
        """Name every folder by the step of its checkpoint, and move away what is not certified.

        So no folder is in the way of a later step. The caller must hold the lock of the workdir.
        """
        if jax.process_index() != 0:
            return
        for label in labels_in(self._directory):
            if label.is_certified is False:
                self.keeper.bring(label.folder)
                self._move_away(label.folder, SPOILT)
        right = folders_by_step(self._directory)
        wrong = {step: x for step, x in right.items() if x.name != str(step)}
        for step, folder in wrong.items():
            logging.warning(
                "the folder %s holds the checkpoint of step %d, and is renamed.", folder, step
            )
            self.keeper.bring(folder)
            # First out of each other's way. This name is a number, too, if the process ends here.
            folder.rename(folder.with_name(f"0{folder.name}"))
        for step, folder in wrong.items():
            target = folder.with_name(str(step))
            if target.exists():
                self._move_away(target, DAMAGED)
            folder.with_name(f"0{folder.name}").rename(target)
        self._manager.reload()

    def remove_leftovers(self) -> None:
        """Delete the folders of interrupted saves; the caller must hold the lock of the workdir."""
        if jax.process_index() == 0:
            for leftover in self._directory.glob(TEMPORARY):
                shutil.rmtree(leftover, ignore_errors=True)

    def restore(
        self,
        abstract_for: Callable[[CheckpointMeta], TrainState],
        open_others: Callable[[CheckpointMeta], None] = lambda meta: None,
    ) -> RestoredCheckpoint | None:
        """Restore the newest checkpoint that can be read; return None if there is none.

        `abstract_for` receives the saved metadata and returns the abstract state to restore into, with the
        shape, type and sharding of every leaf (`Engine.abstract_state`). The layout that the state was saved
        on does not matter. `open_others` is called once the state is read, and opens what was saved with it
        elsewhere. If it raises `DamagedError`, the checkpoint counts as damaged, too.

        Raises WrongWorkdirError if the newest readable checkpoint does not belong to this model.
        """
        # One that cannot be read counts as of the step that its name says, so that it is reported.
        labels = [x for x in labels_in(self._directory) if x.is_certified is not False]
        labels.sort(key=lambda x: x.step, reverse=True)
        for number in self._agreed([int(x.folder.name) for x in labels]):
            if (restored := self._restored(number, abstract_for, open_others)) is not None:
                return restored
        return None

    def _restored(
        self,
        number: int,
        abstract_for: Callable[[CheckpointMeta], TrainState],
        open_others: Callable[[CheckpointMeta], None],
    ) -> RestoredCheckpoint | None:
        """Restore one checkpoint; if any process finds it damaged, set it aside and return None.

        All processes take the same path: each phase ends with an agreement on whether it succeeded
        everywhere.
        """
        folder = self._directory / str(number)
        self.keeper.bring(folder)

        def read_meta() -> SavedCheckpoint:
            if _disk.is_sealed(folder):  # otherwise reading the metadata fails
                _disk.check(folder, share=jax.process_index(), num_shares=jax.process_count())
            return SavedCheckpoint.at(folder)

        saved, failure = attempt(read_meta)
        is_wrong = isinstance(failure, WrongWorkdirError)  # intact, but not for this program
        if not self._everywhere(failure is None or is_wrong):
            return self._set_aside(number, failure)
        if failure is not None:
            raise failure
        assert saved is not None
        # An error of `abstract_for` is about the present settings, not about the checkpoint.
        abstract = abstract_for(saved.meta)
        require_same_model(folder, saved.meta, abstract)
        state, failure = attempt(lambda: saved.state(abstract))
        if is_out_of_memory(failure):
            raise failure
        if failure is None:
            _, failure = attempt(lambda: open_others(saved.meta))
            if failure is not None and not isinstance(failure, _disk.DamagedError):
                raise failure  # what is stored elsewhere is intact, too
        if not self._everywhere(failure is None):
            return self._set_aside(number, failure)
        assert state is not None
        # What is said of the memory is said of a checkpoint that is known to be intact.
        return RestoredCheckpoint(state=state, meta=meta_in(folder, with_memory=True))

    def close(self) -> None:
        """Wait for the writer, warn if the last save failed, and release the directory."""
        error = self._finish()
        if error is not None:
            logging.warning(
                "the last checkpoint could not be written (%s). Older ones are kept.", error
            )
        self._manager.close()

    def _error_anywhere(self) -> str | None:
        """Return what went wrong with the last save in any process, and replace a manager that failed."""
        error = None
        # A failure that is known already first: the others would wait for the process that has it. Then of
        # what is still being written: Orbax would wait for it, too, and raise it as the next save's.
        for ask in (self.error, self._finish):
            error = error or ask()
            if not self._everywhere(not self._has_failed):
                # The manager of a process without a failure waits for the one that failed: abandon it.
                error = error or f"step {self._writing}: {ELSEWHERE}"
                self._has_failed = False
                self.remove_leftovers()
                self._manager = self._open()
                break
        if not self._together:
            self._manager.close()
            self._together = True
            self._manager = self._open()
        return error

    def _open(self) -> ocp.CheckpointManager:
        here = jax.process_index()
        self._num_opened += 1
        return ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_Policy(self._kept),
                enable_async_checkpointing=True,
                # Runs on the writer's thread, when a save is complete except for its final name.
                async_options=ocp.options.AsyncOptions(post_finalization_callback=self._seal),
                create=False,
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    primary_host=0,
                    # A new prefix, because the barriers of an abandoned manager may still be waiting.
                    barrier_sync_key_prefix=f"{self._directory.name}{self._num_opened}",
                )
                if self._together
                else ocp.options.MultiprocessingOptions(
                    primary_host=here,
                    active_processes={here},
                    barrier_sync_key_prefix=f"{self._directory.name} of process{here}",
                ),
            ),
            item_names=("state", "meta"),
        )

    def _finish(self) -> str | None:
        """Wait until the last save is safe; returns what went wrong."""
        return self._finish_writing() or self._secured()

    def _finish_writing(self) -> str | None:
        """Wait until the last save is on the disk; returns what went wrong."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            _disk.sync_folder(self._directory)
        except Exception as failure:
            return self._failed(failure)
        return None

    def _kept_up(self, paused: Callable[[], AbstractContextManager[object]]) -> str | None:
        """Wait until the last save is safe, unless that fails at present; returns what went wrong."""
        if self._is_safe():
            return None
        if (error := self.keeper.unreachable) is not None:
            return f"step {self._writing}: {error}"
        with paused():
            return self._secured()

    def _secured(self) -> str | None:
        """Wait until the last save, which is on the disk, is safe; returns what went wrong."""
        error = None if self._is_safe() else self.keeper.secure()
        return None if error is None or self._is_safe() else f"step {self._writing}: {error}"

    def _is_safe(self) -> bool:
        return not self._writing or self.keeper.is_safe(self._directory / str(self._writing))

    def _seal(self) -> None:
        for folder in self._directory.glob(TEMPORARY):  # one is written at a time
            _disk.seal(folder)

    def _refusal(self) -> str | None:
        """Return why no folder can be made in the directory of checkpoints; None if one can.

        Orbax's threads would wait for it and delay the exit.
        """
        probe = self._directory / f".probe.{jax.process_index()}"
        try:
            probe.mkdir(exist_ok=True)
            probe.rmdir()
        except OSError as failure:
            return brief(failure)
        return None

    def _kept(self, numbers: Sequence[int]) -> set[int]:
        """Return which of the folders named by these numbers are kept."""
        stay = kept(self._noted(numbers), self._saving) | {self._writing}
        return {number for number in numbers if self._steps[number] in stay}

    def _noted(self, numbers: Sequence[int]) -> dict[int, Note]:
        """Return the notes of the folders named by these numbers, by the step that each one records.

        If the metadata cannot be read, the note is empty, and the step is the number.
        """
        for number in numbers:
            if number not in self._steps:
                # Read from disk: the manager would wait for the save in progress.
                folder = self._directory / str(number)
                meta, _ = attempt(lambda folder=folder: meta_in(folder))
                self._steps[number] = step = number if meta is None else meta.step
                self._notes[step] = Note() if meta is None else Note.of(meta, self._saving)
        return {self._steps[number]: self._notes[self._steps[number]] for number in numbers}

    def _agreed(self, steps: list[int]) -> list[int]:
        """Return in every process the steps that process 0 sees."""
        if jax.process_count() == 1:
            return steps
        count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
        padded = np.resize(np.asarray(steps or [0], np.int32), count)
        return multihost_utils.broadcast_one_to_all(padded).tolist() if count else []

    def _everywhere(self, holds: bool) -> bool:
        """Return whether `holds` is true in every process; all of them call this together."""
        if jax.process_count() == 1:
            return holds
        return bool(np.all(multihost_utils.process_allgather(np.float32(holds))))

    def _failed(self, failure: Exception) -> str:
        self._notes.pop(self._writing, None)
        self._steps.pop(self._writing, None)
        if self._together:  # the processes open a new one together, at the next save
            self._has_failed = True
        else:
            self._reopen()
        return f"step {self._writing}: {brief(failure)}"

    def _reopen(self) -> None:
        # A manager whose writer has failed keeps failing. The files of finished steps are not affected.
        try:
            self._manager.close()
        except Exception as failure:
            logging.info(
                "the checkpoint writer, which has failed, could not be closed: %s", failure
            )
        self.remove_leftovers()
        self._manager = self._open()

    def _move_away(self, folder: pathlib.Path, to: str) -> None:
        """Move a folder into another one beside the checkpoints."""
        target = self._root / to / folder.name
        target.parent.mkdir(exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(str(folder), str(target))

    def _set_aside(self, number: int, failure: Exception | None) -> None:
        """Move a damaged checkpoint away, with a warning; without a `failure`, another process found it."""
        folder = self._directory / str(number)
        logging.warning(
            "the checkpoint %s cannot be read (%s). It is moved to %s, and the one before it is used.",
            folder,
            ELSEWHERE if failure is None else brief(failure),
            self._root / DAMAGED / folder.name,
        )
        if jax.process_index() == 0:
            self._move_away(folder, DAMAGED)
        self._everywhere(True)  # a barrier: the folder is moved before any process looks again
        self._manager.reload()

    def _outward(self, state: TrainState) -> dict[str, PyTree]:
        """Return the state as Orbax takes it: plain arrays, with random keys as their data."""
        tree = on_disk.plain(state)
        if self._spans or jax.process_count() == 1:
            return tree
        # With several processes, Orbax accepts arrays of a single process only from the host. They are
        # copied, because the state's own buffers will be donated to the next step.
        return jax.tree.map(np.array, jax.device_get(tree))


@dataclass(frozen=True)
class _Policy:
    """The policy object that Orbax asks which checkpoints to keep; calls a function of this file."""

    kept: Callable[[Sequence[int]], set[int]]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        stay = self.kept([info.step for info in checkpoints])
        return [info.step in stay for info in checkpoints]
