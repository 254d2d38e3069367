"""Checkpoints: written asynchronously and atomically by Orbax, restored onto any layout and any devices.

`<workdir>/checkpoints/<step>/state` holds the device values as nested dicts and lists that any Orbax can
read, by their names in `TrainState`. `/meta` holds everything that the host knows (`CheckpointMeta`) as JSON.
`Checkpoints` belongs to the run; `SavedCheckpoint` reads one of them for anyone who wants the model.

A checkpoint is certified: before it is written, all values of the state were checked, and the metadata says
so (`CheckpointMeta.lost`). Any other is never the newest or the best. The metadata also says of which step it
is. The folder's name is only a label.

If a save fails, training goes on, the older checkpoints stay, and the error is reported. A checkpoint is
sealed with the checksums of its files before it gets its name. A checkpoint that is damaged is named in a
warning and set aside, and the one before it is used.

`restore` is given an abstract state, which says where each leaf goes. Each device reads only its own part, so
no device holds more than that and one leaf at a time.

If a state spans processes, all of them write it together, each value once, and it is complete when the last
process is done. Otherwise the state is the same in every process, and process 0 writes it. Every process
reads its own devices' parts and agrees with the others on the result. No reader waits inside Orbax for
another process, because that process may have failed.
"""

import dataclasses
import errno
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils
from jaxtyping import Array, PyTree

from jaxgoodput import _disk
from jaxgoodput._serial import decode, encode
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.data.fingerprint import Fingerprint
from jaxgoodput.data.sources import StreamState
from jaxgoodput.engine import saved as on_disk
from jaxgoodput.engine.memory import shortage_in
from jaxgoodput.engine.saved import Keys, LeafKind, describe, differences, keys_of, named
from jaxgoodput.engine.state import TrainState, Variables
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.observe.badput import SavedLedger
from jaxgoodput.parallel.partition import leaves_by_name
from jaxgoodput.train.config import Saving
from jaxgoodput.tune.timings import TimingRow

T = TypeVar("T")


VERSION = 4  # of the metadata
DAMAGED = "damaged_checkpoints"  # folder beside "checkpoints", for damaged ones
SPOILT = "spoilt_checkpoints"  # folder beside "checkpoints", for a state that failed its check
TEMPORARY = "*.orbax-checkpoint-tmp*"  # folder name of a save that is not complete
NO_SPACE = os.strerror(errno.ENOSPC)
ELSEWHERE = "it failed in another process"
OWN_STATE = ".opt_state.own"  # path of what `adaptive` adds to the optimizer's state
OPTIMIZER_STATE = ".opt_state"
AVERAGE = ".ema"  # path of the average of the parameters


class WrongWorkdirError(ValueError):
    """The checkpoints in the workdir do not belong to this model, data or version."""


@dataclass(frozen=True, kw_only=True)
class CheckpointMeta:
    """A checkpoint's metadata: what a restart needs besides the arrays, such as step and batch."""

    step: int
    """Updates attempted."""
    samples: int
    """Samples trained on since the first run began, without padding."""
    cursor: Cursor
    """Place in the data to resume at."""
    stream: StreamState | None = None
    """State of a streamed data set at that place, or shortly before; None for other data sets."""
    batch: BatchConfig
    """Batch in use."""
    timings: Mapping[str, tuple[TimingRow, ...]]
    """Step times by strategy."""
    statistics_every: int
    """Steps between two noise measurements."""
    ledger: SavedLedger
    """Account of where the wall time went."""
    leaves: Mapping[str, LeafKind] = field(default_factory=dict)
    """Shape and type of every leaf of the state, by its path."""
    progress: float = 0.0
    """Base steps done, as last known."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the evaluation at this step, if there was one."""
    data: Fingerprint | None = None
    """Fingerprint of the data set."""
    base_batch_size: int | None = None
    """Batch that the learning rate was tuned for."""
    tables: Mapping[str, int] = field(default_factory=dict)
    """Commit of every embedding table that belongs to this state."""
    lost: Mapping[str, int] | None = None
    """How many values of each leaf are no longer finite; {} if the state is good, None if not checked."""
    began: Mapping[str, str] = field(default_factory=dict)
    """The values that were not finite when the run began, as `Origin.packed` gives them."""
    version: int = VERSION
    """Version of the metadata."""

    @property
    def is_certified(self) -> bool:
        """Whether all values of the state were checked and found good."""
        return self.lost is not None and not self.lost

    @property
    def has_average(self) -> bool:
        """Whether the state holds an average of the parameters."""
        return any(path.startswith(AVERAGE) for path in self.leaves)

    def to_json(self) -> dict[str, Any]:
        """Return the metadata as JSON values."""
        return encode(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "CheckpointMeta":
        """Read what `to_json` wrote.

        Raises WrongWorkdirError for another version, KeyError, TypeError or ValueError for anything else.
        """
        # The first metadata had no version.
        if (version := saved.get("version", 0)) != VERSION:
            raise WrongWorkdirError(
                f"the checkpoint's metadata has version {version}, but this program reads version {VERSION}. "
                "Resume with the version of jaxgoodput that wrote it."
            )
        return decode(saved, cls, "checkpoint")


class Note(NamedTuple):
    """The facts about a checkpoint that decide whether it is kept."""

    progress: float = 0.0  # base steps
    value: float = math.nan  # of the metric `Saving.best`; NaN without an evaluation

    @classmethod
    def of(cls, meta: CheckpointMeta, saving: Saving) -> "Note":
        """Return the note of a checkpoint; `saving` names the metric."""
        return cls(meta.progress, meta.metrics.get(saving.best or "", math.nan))


def kept(notes: Mapping[int, Note], saving: Saving) -> set[int]:
    """Return the steps whose checkpoints are kept, out of all in `notes`."""
    steps = sorted(notes)
    stay = {*steps[-saving.keep :]}
    best = best_step(notes, saving)
    if best is not None:
        stay.add(best)
    if saving.keep_every_base_steps is not None:
        firsts: dict[float, int] = {}
        for step in steps:
            firsts.setdefault(notes[step].progress // saving.keep_every_base_steps, step)
        stay.update(step for stretch, step in firsts.items() if stretch > 0)
    return stay


def require_best(saving: Saving, metrics: Collection[str]) -> None:
    """Raise ValueError if evaluations do not have the metric named by `Saving.best`."""
    if saving.best is not None and saving.best not in metrics:
        raise ValueError(
            f"Config.saving.best is {saving.best!r}, but the evaluation has no such metric. Choose one of "
            f"{', '.join(sorted(metrics))}."
        )


def best_step(notes: Mapping[int, Note], saving: Saving) -> int | None:
    """Return the first step with the best finite value of `Saving.best`; None if there is none."""
    if saving.best is None:
        return None
    sign = 1 if saving.best_mode == "min" else -1
    values = {step: sign * notes[step].value for step in sorted(notes)}
    finite = {step: value for step, value in values.items() if math.isfinite(value)}
    return min(finite, key=finite.__getitem__, default=None)


@dataclass(frozen=True)
class RestoredCheckpoint:
    """The training state and the metadata that were read from a checkpoint."""

    state: TrainState
    meta: CheckpointMeta


class Checkpoints:
    """The checkpoints of one workdir: saves, restores and deletes them.

    `spans` says that states lie on devices of several processes. `keep` is the number of newest checkpoints
    to keep, or the full settings. `folder` is the name of another folder for states that are not certified.
    """

    def __init__(
        self,
        workdir: str,
        *,
        keep: int | Saving,
        spans: bool = False,
        folder: str = "checkpoints",
    ):
        self._root = pathlib.Path(workdir).resolve()
        self._directory = self._root / folder
        self._saving = Saving(keep=keep) if isinstance(keep, int) else keep
        self._spans = spans
        self._directory.mkdir(parents=True, exist_ok=True)
        self._notes: dict[int, Note] = {}  # by step, as far as known
        self._steps: dict[int, int] = {}  # recorded steps by the numbers that folders are named by
        self._num_opened = 0
        self._together = False  # whether all processes share one manager
        self._has_failed = False  # whether the shared manager has failed in this process
        self._manager = self._open()
        self._writing = 0  # step handed to the writer last

    def save(self, state: TrainState, meta: CheckpointMeta) -> str | None:
        """Hand the state to the writer, and return once its values are copied off the devices.

        Returns None, or what went wrong with this save or the one before. If the state spans processes, all
        of them must call this together.
        """
        if self._spans:
            error = self._error_anywhere()
        elif jax.process_index() != 0:
            return None
        else:
            error = self.error()
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
        return max((x.step for x in labels_in(self._directory) if x.is_certified), default=None)

    def best(self) -> int | None:
        """Return the step with the best value of `Saving.best`; None if no checkpoint has one."""
        return best_step(self._noted(self._manager.all_steps()), self._saving)

    def steps(self) -> set[int]:
        """Return the steps of all checkpoints, including the one that is being written."""
        return {*(x.step for x in labels_in(self._directory)), self._writing}

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

    def require_same_model(self, meta: CheckpointMeta, abstract: TrainState) -> None:
        """Raise WrongWorkdirError if the checkpoint of `meta` does not belong to the model of this state."""
        _require_same_model(self._directory / str(meta.step), meta, abstract)

    def tidy(self) -> None:
        """Name every folder by the step of its checkpoint, and move away what is not certified.

        So no folder is in the way of a later step. The caller must hold the lock of the workdir.
        """
        if jax.process_index() != 0:
            return
        for label in labels_in(self._directory):
            if label.is_certified is False:
                self._move_away(label.folder, SPOILT)
        right = folders_by_step(self._directory)
        wrong = {step: x for step, x in right.items() if x.name != str(step)}
        for step, folder in wrong.items():
            logging.warning(
                "the folder %s holds the checkpoint of step %d, and is renamed.", folder, step
            )
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

        def read_meta() -> SavedCheckpoint:
            if _disk.is_sealed(folder):  # otherwise reading the metadata fails
                _disk.check(folder, share=jax.process_index(), num_shares=jax.process_count())
            return SavedCheckpoint.at(folder)

        saved, failure = _attempt(read_meta)
        is_wrong = isinstance(failure, WrongWorkdirError)  # intact, but not for this program
        if not self._everywhere(failure is None or is_wrong):
            return self._set_aside(number, failure)
        if failure is not None:
            raise failure
        assert saved is not None
        # An error of `abstract_for` is about the present settings, not about the checkpoint.
        abstract = abstract_for(saved.meta)
        _require_same_model(folder, saved.meta, abstract)
        state, failure = _attempt(lambda: saved.state(abstract))
        if _is_out_of_memory(failure):
            raise failure
        if failure is None:
            _, failure = _attempt(lambda: open_others(saved.meta))
            if failure is not None and not isinstance(failure, _disk.DamagedError):
                raise failure  # what is stored elsewhere is intact, too
        if not self._everywhere(failure is None):
            return self._set_aside(number, failure)
        assert state is not None
        return RestoredCheckpoint(state=state, meta=saved.meta)

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
        error = self.error()
        if not self._everywhere(not self._has_failed):
            # The manager of a process without a failure waits for the process that failed: abandon it.
            error = error or f"step {self._writing}: {ELSEWHERE}"
            self._has_failed = False
            self.remove_leftovers()
            self._manager = self._open()
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
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            _disk.sync_folder(self._directory)
        except Exception as failure:
            return self._failed(failure)
        return None

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
            return _brief(failure)
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
                meta, _ = _attempt(lambda folder=folder: _meta_in(folder))
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
        return f"step {self._writing}: {_brief(failure)}"

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
            ELSEWHERE if failure is None else _brief(failure),
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


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint, for reading only: no file is changed."""

    folder: pathlib.Path
    meta: CheckpointMeta

    @classmethod
    def at(cls, folder: pathlib.Path) -> "SavedCheckpoint":
        """Open the checkpoint in a folder; raises if its metadata is damaged or its checksums are missing."""
        meta = _meta_in(folder)
        if not _disk.is_sealed(folder):
            raise _disk.DamagedError(f"the file of checksums, {_disk.SUMS}, is missing")
        return cls(folder, meta)

    @classmethod
    def find(
        cls, workdir: str, step: int | None, *, best: bool, saving: Saving | None = None
    ) -> "SavedCheckpoint":
        """Find a certified checkpoint of a workdir: the newest, the one of `step`, or the best.

        The best is chosen by `saving`; if None, by the settings of the run that wrote it.
        Raises FileNotFoundError if there is no such checkpoint, ValueError if it is damaged.
        """
        root = pathlib.Path(workdir).resolve() / "checkpoints"
        folders = folders_by_step(root)
        if not folders:
            raise FileNotFoundError(
                f"{root} holds no checkpoint. Name the workdir of a run that has saved one."
            )
        if step is not None and step not in folders:
            raise FileNotFoundError(
                f"{root} holds no checkpoint of step {step}; it has {[*folders]}. Name one of them."
            )
        if best and step is not None:
            raise ValueError(
                f"best=True and step={step} exclude each other: give one of them to choose a checkpoint."
            )
        if best:
            step = _best_of(root, folders, saving)
        folder = folders[max(folders) if step is None else step]
        saved = _or_named(folder, lambda: cls.at(folder))
        _or_named(folder, lambda: _disk.check(folder))
        return saved

    @property
    def keys(self) -> dict[str, Keys]:
        """The keys that lead to each leaf in the tree on disk, by the leaf's path."""
        return {path: keys_of(path) for path in self.meta.leaves}

    @property
    def variables(self) -> dict[Keys, str]:
        """The paths of the leaves of parameters and model state, by their keys in `Variables`."""
        return {k: path for path, k in self.keys.items() if k[0] in ("params", "model_state")}

    def averaged(self, path: str) -> str:
        """Return the path of a parameter's average, or `path` itself if it has none."""
        average = AVERAGE + path.removeprefix(".params")
        return average if path.startswith(".params") and average in self.meta.leaves else path

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Read some leaves by their paths: see `engine.saved.read`. Raises ValueError if it is damaged."""
        return _or_named(
            self.folder, lambda: on_disk.read(self.folder / "state", self.keys, wanted)
        )

    def state(self, abstract: TrainState) -> TrainState:
        """Read the whole state into the places that `abstract` gives; raises if it is damaged."""
        return on_disk.read_like(self.folder / "state", self.keys, abstract)


def restore(
    workdir: str,
    abstract_for: Callable[[CheckpointMeta], TrainState],
    *,
    step: int | None,
    best: bool,
    saving: Saving,
) -> RestoredCheckpoint:
    """Restore one checkpoint of a workdir without changing any file.

    `step`, `best` and `saving` select it as in `SavedCheckpoint.find`; `abstract_for` is the same as in
    `Checkpoints.restore`. Raises WrongWorkdirError if it does not belong to the model, and the errors of
    `SavedCheckpoint.find`.
    """
    saved = SavedCheckpoint.find(workdir, step, best=best, saving=saving if saving.best else None)
    abstract = abstract_for(saved.meta)
    _require_same_model(saved.folder, saved.meta, abstract)
    return RestoredCheckpoint(_or_named(saved.folder, lambda: saved.state(abstract)), saved.meta)


def load(
    workdir: str, step: int | None = None, best: bool = False, *, averaged: bool = True
) -> tuple[PyTree, PyTree]:
    """Load the parameters and the model state of a run as NumPy arrays, without the class that trained them.

    Use this for inference or export. It reads the newest checkpoint, the one of `step`, or the `best` one by
    that run's `Saving.best`. With `averaged`, parameters that the run kept an average of (`Config.ema`) are
    replaced by it. Containers have Orbax's form: dicts with text keys, and lists; named tuples and
    dataclasses become dicts by field. Random keys become their data. The model state is () if there is none.

    Raises FileNotFoundError if there is no such checkpoint, ValueError if it is damaged.
    """
    saved = SavedCheckpoint.find(workdir, step, best=best)
    found, wanted = {}, {}
    for keys, path in saved.variables.items():
        kind = saved.meta.leaves[path]
        found[keys] = saved.averaged(path) if averaged else path
        dtype = jnp.uint32 if kind.is_key else jnp.dtype(kind.dtype)
        wanted[found[keys]] = jax.ShapeDtypeStruct(kind.shape, dtype)
    arrays = saved.read(wanted)
    tree = named({keys: arrays[path] for keys, path in found.items()})
    return tree["params"], tree.get("model_state", ())


@dataclass(frozen=True)
class FromCheckpoint:
    """Initial values from another run, for `Trainer(initial=...)`; its layout does not matter."""

    workdir: str
    """Workdir of the other run."""
    names: Callable[[str], str | None] | None = None
    """Function from the name of a leaf of this model, such as "params/layers/0/kernel" or "model_state/...",
    to the name of the saved leaf that it begins with, or to None if `init` should make it. Without `names`,
    leaves of the same name are used, and `init` makes the others."""
    step: int | None = None
    """Step of the checkpoint; None for the newest."""
    best: bool = False
    """Whether to use the best checkpoint by that run's `Saving.best`."""
    averaged: bool = True
    """Whether to use the average of the parameters, if that run kept one."""


def initial_leaves(initial: Any, variables: Variables) -> dict[str, Array]:
    """Return the leaves of a fresh model that `initial` gives, by name, on their devices in new buffers.

    `initial` is a tree of parameters or `Variables`, complete or partial, the workdir of a run, or
    `FromCheckpoint`. `variables` are the model's own, abstract with shardings. `init` makes all other leaves.

    Raises ValueError with the leaf's name if shapes or types differ or if `initial` names an unknown leaf,
    and the errors of `load`.
    """
    if isinstance(initial, str | os.PathLike):
        initial = FromCheckpoint(os.fspath(initial))
    if not isinstance(initial, FromCheckpoint):
        return on_disk.given_leaves(initial, variables)
    wanted = leaves_by_name(variables)
    saved = SavedCheckpoint.find(initial.workdir, initial.step, best=initial.best)
    chosen = _sources(initial, saved, wanted)
    kinds = {name: saved.meta.leaves[path] for name, path in chosen.items()}
    is_said = initial.names is not None
    on_disk.require_fit(kinds, variables, str(saved.folder), is_said=is_said)
    if initial.averaged:
        chosen = {name: saved.averaged(path) for name, path in chosen.items()}
    found: dict[str, Array] = {}
    # Several of our leaves may share one saved leaf; take one of them per pass.
    while left := {path: name for name, path in chosen.items() if name not in found}:
        arrays = saved.read({p: on_disk.abstract_data(wanted[name]) for p, name in left.items()})
        found |= {name: on_disk.taken(arrays[p], wanted[name]) for p, name in left.items()}
    return found


def _sources(
    initial: FromCheckpoint, saved: SavedCheckpoint, wanted: Iterable[str]
) -> dict[str, str]:
    """Return by leaf name the path of the saved leaf that replaces it; leaves left to `init` are absent."""
    there = {"/".join(map(str, keys)): path for keys, path in saved.variables.items()}
    if initial.names is None:
        return {name: there[name] for name in wanted if name in there}
    sources = {name: source for name in wanted if (source := initial.names(name)) is not None}
    for name, source in sources.items():
        if source not in there:
            raise ValueError(
                f"FromCheckpoint.names maps {name} to {source}, but {saved.folder} has no such leaf. It has "
                f"{on_disk.some([*there])}. Return one of them, or None to have init() make the leaf."
            )
    return {name: there[source] for name, source in sources.items()}


class Label(NamedTuple):
    """A folder of a checkpoint, and what a glance at its metadata tells."""

    folder: pathlib.Path
    step: int  # as recorded; if that cannot be read, the number that the folder is named by
    is_certified: bool | None  # None if it cannot be read


def labels_in(root: pathlib.Path) -> list[Label]:
    """Return the complete checkpoints in a folder, whatever their steps, in no order."""
    found = []
    for folder in root.iterdir():
        if folder.name.isdigit():
            meta, _ = _attempt(lambda folder=folder: _meta_in(folder))
            step = int(folder.name) if meta is None else meta.step
            found.append(Label(folder, step, None if meta is None else meta.is_certified))
    return found


def folders_by_step(root: pathlib.Path) -> dict[int, pathlib.Path]:
    """Return the folders of the checkpoints in a folder by their steps, in order of these.

    Spoilt ones are left out. If a checkpoint cannot be read, the number in the folder's name is its step.
    """
    labels = labels_in(root) if root.is_dir() else []
    # If several claim one step, the last one in this order counts.
    labels.sort(key=lambda x: (x.is_certified is True, x.folder.name == str(x.step)))
    return dict(sorted((x.step, x.folder) for x in labels if x.is_certified is not False))


def _meta_in(folder: pathlib.Path) -> CheckpointMeta:
    """Read the metadata in the folder of a checkpoint."""
    return CheckpointMeta.from_json(json.loads((folder / "meta/metadata").read_text()))


def _best_of(root: pathlib.Path, folders: Mapping[int, pathlib.Path], saving: Saving | None) -> int:
    """Return the step of the best checkpoint by `saving`; if None, by the settings that the run left."""
    if saving is None:
        settings = json.loads((root.parent / "config.json").read_text())
        return _best_of(root, folders, decode(settings["saving"], Saving, "config.json"))
    metas = {
        step: _or_named(folder, lambda folder=folder: SavedCheckpoint.at(folder)).meta
        for step, folder in folders.items()
    }
    found = best_step({step: Note.of(meta, saving) for step, meta in metas.items()}, saving)
    if found is None:
        raise FileNotFoundError(
            f"no checkpoint in {root} has a value of Saving.best, which is {saving.best!r}. Set it to a "
            "metric of the evaluations during training, or name a step."
        )
    return found


def _or_named(folder: pathlib.Path, read: Callable[[], T]) -> T:
    """Return what `read` returns; turn its failure into a ValueError that names the checkpoint."""
    try:
        return read()
    except WrongWorkdirError:
        raise
    except Exception as failure:
        if _is_out_of_memory(failure):
            raise
        raise ValueError(
            f"the checkpoint {folder} cannot be read ({_brief(failure)}). Choose another step; "
            f"{[*folders_by_step(folder.parent)]} are there."
        ) from failure


def _is_out_of_memory(failure: Exception | None) -> TypeGuard[Exception]:
    """Return whether memory ran out, which says nothing against the checkpoint."""
    return shortage_in(failure) is not None


def _attempt(read: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return (what `read` returns, None), or (None, the exception) if it raises."""
    try:
        return read(), None
    except Exception as error:
        return None, error


def _require_same_model(folder: pathlib.Path, meta: CheckpointMeta, abstract: TrainState) -> None:
    """Raise WrongWorkdirError if a checkpoint and a state have different leaves."""
    mismatch = differences(meta.leaves, describe(abstract))
    if not mismatch:
        return

    def all_are(prefix: str) -> bool:
        return all(sentence.startswith(prefix) for sentence in mismatch)

    if all_are(OWN_STATE):
        raise WrongWorkdirError(
            f"the checkpoint {folder} has other statistics of the gradient noise: it was written with other "
            "labels (`Trainer.labels`). Use the same labels, or another workdir."
        )
    if all_are(AVERAGE):
        raise WrongWorkdirError(
            f"the checkpoint {folder} holds an average of the parameters, which this run would lose. Set "
            "Config.ema to keep it, or use another workdir."
        )
    listed = "; ".join(mismatch[:5])
    listed += f"; and {len(mismatch) - 5} more" if len(mismatch) > 5 else ""
    other = "optimizer" if all_are(OPTIMIZER_STATE) else "model"
    raise WrongWorkdirError(
        f"the checkpoint {folder} belongs to another {other}: {listed}. Use the {other} that this workdir "
        "was begun with, or another workdir. There, initial=jg.FromCheckpoint(...) starts from the "
        "parameters saved here."
    )


def saveable(make: Callable[[Any], PyTree], what: str) -> Callable[[Any], PyTree]:
    """Wrap `make` so that it refuses a result that holds anything but arrays and numbers; `what` names it."""

    def made(argument: Any) -> PyTree:
        tree = make(argument)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
            if not is_array and not isinstance(leaf, bool | int | float | complex):
                raise TypeError(
                    f"the training state cannot be checkpointed: {what}{jax.tree_util.keystr(path)} "
                    f"is a {type(leaf).__name__} ({leaf!r:.60}), not an array. Keep only arrays in "
                    "parameters, optimizer and model state; move a constant into the function that "
                    "uses it."
                )
        on_disk.require_names(tree, what)
        return tree

    return made


def _brief(failure: Exception) -> str:
    """Return the type of an exception and the first line of its message; a few words for a full disk."""
    if NO_SPACE in str(failure):
        return NO_SPACE
    return f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"


def check_writable(root: pathlib.Path) -> None:
    """Make the folder, if it does not exist, and check that files can be written to it.

    Raises NotADirectoryError if a file is in the way, PermissionError if nothing can be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".writable.{jax.process_index()}"
        probe.write_bytes(np.zeros(1).tobytes())
        probe.unlink()
    except OSError as failure:
        at = next((p for p in (root, *root.parents) if p.exists()), root)
        if not at.is_dir():
            raise NotADirectoryError(
                f"cannot create the workdir {root}: {at} is a file. Name a folder in Config.workdir."
            ) from failure
        raise PermissionError(
            f"cannot write to the workdir {root} ({failure.strerror or failure}). Checkpoints, events and "
            "the compilation cache go there: name a writable folder in Config.workdir."
        ) from failure
