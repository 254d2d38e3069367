"""Checkpoints: Orbax, asynchronous, atomic, the last few kept, restored onto any layout and any devices.

`<workdir>/checkpoints/<step>/state` holds the device values by the names that they have in `TrainState`, as
nested dicts and lists that any Orbax reads, `/meta` everything the host knows (`CheckpointMeta`) as JSON.
`Checkpoints` is the run's own, `SavedCheckpoint` one of them to read for whoever wants the model. A save
that fails costs nothing:
training goes on, the older checkpoints stay, and the error is reported. Before it gets its name, a
checkpoint is sealed with the sums of its files. One that is no longer what was written, or cannot be
read, is named, set aside, and the one before it is used.

The abstract state that `restore` is given says where every leaf goes: each device reads its own part,
and none ever holds more, besides one leaf at a time.

A state that spans processes is written by all of them together, each value once, and is complete when the
last of them is done. Otherwise it is the same in every process, and process 0 writes. Everyone reads for
itself, its own devices' parts, and agrees with the others on what was read: no reader ever waits inside
Orbax for another, which may have failed.
"""

import dataclasses
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

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
from jaxgoodput.engine.saved import Keys, LeafKind, describe, differences, keys_of, named
from jaxgoodput.engine.state import TrainState, Variables
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.observe.badput import SavedLedger
from jaxgoodput.parallel.partition import leaves_by_name
from jaxgoodput.train.config import Saving
from jaxgoodput.tune.timings import Parts, TimingRow

T = TypeVar("T")


VERSION = 2  # of the metadata
TEMPORARY = "*.orbax-checkpoint-tmp*"  # the name of a save that is not complete
ELSEWHERE = "another process could not"
# Where a state keeps what `adaptive` adds to an optimizer's, and a leaf of it before that was one vector.
OWN_STATE, OWN_BEFORE = ".opt_state.own", ".opt_state.progress"
OPTIMIZER_STATE = ".opt_state"
AVERAGE = ".ema"  # where a state keeps the average of its parameters


class WrongWorkdirError(ValueError):
    """The workdir holds checkpoints of another model."""


@dataclass(frozen=True, kw_only=True)
class CheckpointMeta:
    """Everything that the host knows and a restart needs."""

    step: int
    """Updates attempted."""
    samples: int
    """Real samples applied since the first run began."""
    cursor: Cursor
    """Where in the data to go on."""
    stream: StreamState | None = None
    """Of a data set that is a stream: what it said of itself there, or shortly before."""
    batch: BatchConfig
    """In use when it was saved."""
    timings: Mapping[str, tuple[TimingRow, ...]]
    """Step times by strategy."""
    statistics_every: int
    """Steps between two noise measurements, as last decided."""
    ledger: SavedLedger
    """Where the time went."""
    leaves: Mapping[str, LeafKind] = field(default_factory=dict)
    """What every leaf of the state is, by its path."""
    is_named: bool = False
    """Whether leaves lie there by their names; those of versions before 2, by their number."""
    progress: float = 0.0
    """Base steps done, as last known; 0 before version 2."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the evaluation at this step, if there was one."""
    data: Fingerprint | None = None
    """Of the data set; None before version 2."""
    base_batch_size: int | None = None
    """That the learning rate was tuned for; None before version 2."""
    tables: Mapping[str, int] = field(default_factory=dict)
    """The commit of every table whose rows were trained with it."""
    version: int = VERSION
    """Of this form."""

    @property
    def has_average(self) -> bool:
        """Whether the state holds an average of the parameters."""
        return any(path.startswith(AVERAGE) for path in self.leaves)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return encode(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "CheckpointMeta":
        """What `to_json` wrote, or a version of this package before there were versions.

        Raises WrongWorkdirError for a later version, KeyError, TypeError or ValueError where it is neither.
        """
        saved = dict(saved)
        version = saved.get("version", 0)
        if version > VERSION:
            raise WrongWorkdirError(
                f"the checkpoint's metadata has version {version}, this program reads up to {VERSION}. "
                "Resume with the version of jaxgoodput that wrote it, or a newer one."
            )
        if "leaves" not in saved:
            raise KeyError("its metadata does not say which leaves it holds")
        if version == 0:
            saved = _from_before_versions(saved)
        # Runs from before there were orders go on with the one that they began with.
        saved["cursor"] = {"order": "drawn", **saved["cursor"]}
        return decode({**saved, "version": VERSION}, cls, "checkpoint")


def _from_before_versions(saved: dict[str, Any]) -> dict[str, Any]:
    """Metadata of version 0 in the form of version 1."""
    analyst = saved.pop("analyst")
    tables = analyst["timings"]
    # A run from before there were strategies has one table.
    tables = tables if isinstance(tables, Mapping) else {"": tables}
    names = [f.name for f in dataclasses.fields(Parts)]

    def named(parts: list[list[float | None]]) -> list[dict[str, float | None]]:
        return [dict(zip(names, values, strict=True)) for values in parts]

    saved["timings"] = {
        strategy: [
            {**row, "clean": named(row["clean"]), "busy": named(row["busy"])} for row in rows
        ]
        for strategy, rows in tables.items()
    }
    saved["statistics_every"] = analyst["statistics_every"]
    saved["leaves"] = {
        path: {"shape": shape, "dtype": dtype} for path, (shape, dtype) in saved["leaves"].items()
    }
    saved.pop("progress", None)
    return saved


class Note(NamedTuple):
    """What decides whether a checkpoint stays."""

    progress: float = 0.0  # base steps
    value: float = math.nan  # of `Saving.best`; NaN: there was no evaluation

    @classmethod
    def of(cls, meta: CheckpointMeta, saving: Saving) -> "Note":
        """Of a checkpoint, where `saving` says what the best is."""
        return cls(meta.progress, meta.metrics.get(saving.best or "", math.nan))


def kept(notes: Mapping[int, Note], saving: Saving) -> set[int]:
    """The steps that stay, of all that there are."""
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
    """Raise ValueError where evaluations do not have the metric that says which checkpoint is the best."""
    if saving.best is not None and saving.best not in metrics:
        raise ValueError(
            f"Config.saving.best is {saving.best!r}, and the evaluation has no such metric. It has "
            f"{', '.join(sorted(metrics))}: name one of them."
        )


def best_step(notes: Mapping[int, Note], saving: Saving) -> int | None:
    """The first step with the best value; None where none has a finite one, or none is asked for."""
    if saving.best is None:
        return None
    sign = 1 if saving.best_mode == "min" else -1
    values = {step: sign * notes[step].value for step in sorted(notes)}
    finite = {step: value for step, value in values.items() if math.isfinite(value)}
    return min(finite, key=finite.__getitem__, default=None)


@dataclass(frozen=True)
class RestoredCheckpoint:
    """What a checkpoint gave back."""

    state: TrainState
    meta: CheckpointMeta


class Checkpoints:
    """The checkpoints of one workdir. `spans`: the states lie on devices of several processes.

    `keep` says which stay; a number: the newest so many.
    """

    def __init__(self, workdir: str, *, keep: int | Saving, spans: bool = False):
        self._root = pathlib.Path(workdir).resolve()
        self._directory = self._root / "checkpoints"
        self._saving = Saving(keep=keep) if isinstance(keep, int) else keep
        self._spans = spans
        self._directory.mkdir(parents=True, exist_ok=True)
        self._notes: dict[int, Note] = {}  # by step, as far as they are known
        self._num_opened = 0
        self._together = False  # whether the manager is one of all processes
        self._has_failed = False  # the manager of all processes, in this one
        self._manager = self._open()
        self._writing = 0  # the step that was handed to the writer last

    def save(self, state: TrainState, meta: CheckpointMeta) -> str | None:
        """Hand the state to the writer; returns once the values are copied off the devices.

        Returns None, or what went wrong with this save or the one before it. Where the state spans processes,
        all come here together.
        """
        if self._spans:
            error = self._error_anywhere()
        elif jax.process_index() != 0:
            return None
        else:
            error = self.error()
        step = self._writing = meta.step
        if self._manager.latest_step() == step:
            return error
        refusal = self._refusal()
        if self._spans and not self._everywhere(refusal is None):
            refusal = refusal or ELSEWHERE
        if refusal is not None:
            return f"step {step}: {refusal}"
        meta = dataclasses.replace(meta, leaves=describe(state), is_named=True)
        self._notes[step] = Note.of(meta, self._saving)
        try:
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(self._outward(state)),  # pyright: ignore[reportCallIssue]
                meta=ocp.args.JsonSave(meta.to_json()),  # pyright: ignore[reportCallIssue]
            )
            if not self._manager.save(step, args=args, force=True):
                return f"step {step}: Orbax declined to save it"
        except Exception as failure:
            return self._failed(failure)
        return error

    def error(self) -> str | None:
        """What went wrong in the background since the last call, if anything."""
        try:
            self._manager.check_for_errors()
        except Exception as failure:
            return self._failed(failure)
        return None

    def wait(self, *, alone: bool = False) -> str | None:
        """Wait until everything is on disk; returns what went wrong, if anything.

        All processes come here together, and none goes on before the one that writes is done; but not one
        that is `alone`, because the others have gone or hang.
        """
        error = self._finish()
        if alone:
            return error
        if not self._everywhere(error is None) and self._spans:
            error = error or ELSEWHERE
        return error

    def newest(self) -> int | None:
        """The newest step that is whole on the disk; None: there is none."""
        # A folder gets its name when all of it is there, its sums as well; one of before has none.
        names = (path.name for path in self._directory.iterdir())
        return max((int(name) for name in names if name.isdigit()), default=None)

    def best(self) -> int | None:
        """The step with the best value of `Saving.best`, of those that are there; None: none has one."""
        return best_step(self._noted(self._manager.all_steps()), self._saving)

    def steps(self) -> set[int]:
        """Those of all checkpoints, the one that is being written among them."""
        there = {int(path.name) for path in self._directory.iterdir() if path.name.isdigit()}
        return there | {self._writing}

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluation is better, by `Saving.best`, than those of all checkpoints.

        Raises ValueError where it has no such metric.
        """
        name = self._saving.best
        if name is None:
            return False
        require_best(self._saving, metrics)
        notes = self._noted(self._manager.all_steps())
        now = max(notes, default=0) + 1
        return best_step({**notes, now: Note(value=metrics[name])}, self._saving) == now

    def require_same_model(self, meta: CheckpointMeta, abstract: TrainState) -> None:
        """Raise WrongWorkdirError where the checkpoint of `meta` is of another model than this state."""
        _require_same_model(self._directory / str(meta.step), meta, abstract)

    def remove_leftovers(self) -> None:
        """Delete what saves that were cut off have left; only for who holds the workdir."""
        if jax.process_index() == 0:
            for leftover in self._directory.glob(TEMPORARY):
                shutil.rmtree(leftover, ignore_errors=True)

    def restore(
        self,
        abstract_for: Callable[[CheckpointMeta], TrainState],
        open_others: Callable[[CheckpointMeta], None] = lambda meta: None,
    ) -> RestoredCheckpoint | None:
        """The newest checkpoint that can be read; None where there is none.

        `abstract_for`, given what the host saved, says of every leaf its shape, type and sharding, which
        are the restored state's own (`Engine.abstract_state`); the layout that the state was saved on
        does not matter. `open_others` opens what was saved with it elsewhere, once its state is read; where
        that is `Damaged`, the checkpoint counts as damaged, too.

        Raises WrongWorkdirError where the newest readable one is of another model.
        """
        for step in self._agreed(sorted(self._manager.all_steps(), reverse=True)):
            _, failure = _attempt(lambda step=step: self._check(step))
            if not self._everywhere(failure is None):
                self._set_aside(step, failure)
                continue
            meta, failure = _attempt(lambda step=step: self._read_meta(step))
            if isinstance(failure, WrongWorkdirError):
                raise failure  # it is sound, and not for this program
            if not self._everywhere(failure is None):
                self._set_aside(step, failure)
                continue
            assert meta is not None
            # What it raises is about the present settings, not about the checkpoint.
            abstract = abstract_for(meta)
            _require_same_model(self._directory / str(step), meta, abstract)
            state, failure = _attempt(
                lambda step=step, meta=meta, abstract=abstract: self._read_state(
                    step, meta, abstract
                )
            )
            if failure is not None and "RESOURCE_EXHAUSTED" in str(failure):
                raise failure  # the checkpoint is sound, the devices are too small
            if failure is None:
                _, failure = _attempt(lambda meta=meta: open_others(meta))
                if failure is not None and not isinstance(failure, _disk.DamagedError):
                    raise failure  # both are sound
            if self._everywhere(failure is None):
                assert state is not None
                return RestoredCheckpoint(state=state, meta=meta)
            self._set_aside(step, failure)
        return None

    def close(self) -> None:
        """Finish writing and let go of the directory."""
        error = self._finish()
        if error is not None:
            logging.warning("the last checkpoint was not written (%s). Older ones stay.", error)
        self._manager.close()

    def _error_anywhere(self) -> str | None:
        """What went wrong with the save before this one, in any process; a new writer after that."""
        error = self.error()
        if not self._everywhere(not self._has_failed):
            # Where nothing has failed yet, it waits for the process in which something has: left to itself.
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
                preservation_policy=_Policy(lambda steps: kept(self._noted(steps), self._saving)),
                enable_async_checkpointing=True,
                # On the writer's thread, when all of a save is there but its name.
                async_options=ocp.options.AsyncOptions(post_finalization_callback=self._seal),
                create=False,
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    primary_host=0,
                    # One that failed is left behind, with whatever its barriers still wait for.
                    barrier_sync_key_prefix=f"opened{self._num_opened}",
                )
                if self._together
                else ocp.options.MultiprocessingOptions(
                    primary_host=here,
                    active_processes={here},
                    barrier_sync_key_prefix=f"process{here}",
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

    def _check(self, step: int) -> None:
        """With the other processes, raise where a checkpoint is not what was written."""
        folder = self._directory / str(step)
        if _disk.is_sealed(folder):
            _disk.check(folder, share=jax.process_index(), num_shares=jax.process_count())

    def _refusal(self) -> str | None:
        """Why no folder can be made, if none can: Orbax's threads would wait for it and hold up the exit."""
        probe = self._directory / f".probe.{jax.process_index()}"
        try:
            probe.mkdir(exist_ok=True)
            probe.rmdir()
        except OSError as failure:
            return _told(failure)
        return None

    def _read_meta(self, step: int) -> CheckpointMeta:
        """What the host saved; raises where the checkpoint is damaged."""
        return SavedCheckpoint.at(self._directory / str(step)).meta

    def _noted(self, steps: Sequence[int]) -> dict[int, Note]:
        """The notes of steps; one whose metadata cannot be read has an empty one."""
        for step in steps:
            if step not in self._notes:
                # Not by the manager, which would wait for a save under way.
                path = self._directory / str(step) / "meta" / "metadata"
                meta, _ = _attempt(
                    lambda path=path: CheckpointMeta.from_json(json.loads(path.read_text()))
                )
                self._notes[step] = Note() if meta is None else Note.of(meta, self._saving)
        return {step: self._notes[step] for step in steps}

    def _read_state(self, step: int, meta: CheckpointMeta, abstract: TrainState) -> TrainState:
        """What the devices held; raises where the checkpoint is damaged."""
        return SavedCheckpoint(self._directory / str(step), meta).state(abstract)

    def _agreed(self, steps: list[int]) -> list[int]:
        """The steps that process 0 sees, in every process."""
        if jax.process_count() == 1:
            return steps
        count = int(multihost_utils.broadcast_one_to_all(np.int32(len(steps))))
        padded = np.resize(np.asarray(steps or [0], np.int32), count)
        return multihost_utils.broadcast_one_to_all(padded).tolist() if count else []

    def _everywhere(self, holds: bool) -> bool:
        """Whether it holds in every process; they come here together."""
        if jax.process_count() == 1:
            return holds
        return bool(np.all(multihost_utils.process_allgather(np.float32(holds))))

    def _failed(self, failure: Exception) -> str:
        self._notes.pop(self._writing, None)
        if self._together:  # they open a new one at the next save
            self._has_failed = True
        else:
            self._reopen()
        return f"step {self._writing}: {_told(failure)}"

    def _reopen(self) -> None:
        # A manager whose writer failed keeps failing; the files of finished steps are untouched.
        try:
            self._manager.close()
        except Exception as failure:
            logging.info("closing the failed checkpoint writer: %s", failure)
        self.remove_leftovers()
        self._manager = self._open()

    def _set_aside(self, step: int, failure: Exception | None) -> None:
        damaged = self._root / "damaged_checkpoints"
        target = damaged / f"{step}"
        logging.warning(
            "the checkpoint %s cannot be read (%s). It is moved to %s and the one before it is used.",
            self._directory / str(step),
            ELSEWHERE if failure is None else _told(failure),
            target,
        )
        if jax.process_index() == 0:
            damaged.mkdir(exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            shutil.move(str(self._directory / str(step)), str(target))
        self._everywhere(True)  # moved, before anyone looks again
        self._manager.reload()

    # State on its way out: plain arrays (keys as their data).

    def _outward(self, state: TrainState) -> dict[str, PyTree]:
        tree = on_disk.plain(state)
        if self._spans or jax.process_count() == 1:
            return tree
        # Where there are several processes, Orbax takes arrays of one of them from the host only;
        # copies, because the state's own buffers will be donated to the next step.
        return jax.tree.map(np.array, jax.device_get(tree))


@dataclass(frozen=True)
class _Policy:
    """Has Orbax ask `kept` which steps stay."""

    kept: Callable[[Sequence[int]], set[int]]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        stay = self.kept([info.step for info in checkpoints])
        return [info.step in stay for info in checkpoints]


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint to read; nothing of it, or beside it, changes."""

    folder: pathlib.Path
    meta: CheckpointMeta

    @classmethod
    def at(cls, folder: pathlib.Path) -> "SavedCheckpoint":
        """The one in a folder; raises where its metadata is damaged, or its sums are gone."""
        saved = json.loads((folder / "meta/metadata").read_text())
        meta = CheckpointMeta.from_json(saved)
        if not _disk.is_sealed(folder):
            if meta.is_named:  # sums are there since names are
                raise _disk.DamagedError(f"{_disk.SUMS} is missing")
            logging.warning(
                "the checkpoint %s is from before checkpoints had sums: it is used unchecked.",
                folder,
            )
        return cls(folder, meta)

    @classmethod
    def find(
        cls, workdir: str, step: int | None, *, best: bool, saving: Saving | None = None
    ) -> "SavedCheckpoint":
        """The newest of a workdir, that of `step`, or the best by `saving` (None: as the run there was set).

        Raises FileNotFoundError where there is none, ValueError where it is not what was written.
        """
        root = pathlib.Path(workdir).resolve() / "checkpoints"
        steps = sorted(int(p.name) for p in root.glob("*") if p.name.isdigit())
        if not steps:
            raise FileNotFoundError(
                f"{root} holds no checkpoint. Name the workdir of a run that has saved one."
            )
        if step is not None and step not in steps:
            raise FileNotFoundError(f"{root} holds no checkpoint of step {step}; it has {steps}.")
        if best and step is not None:
            raise ValueError(f"either the best or step {step}: name one of them.")
        if best:
            step = _best_of(root, steps, saving)
        folder = root / str(steps[-1] if step is None else step)
        saved = _or_named(folder, lambda: cls.at(folder))
        if saved.meta.is_named:
            _or_named(folder, lambda: _disk.check(folder))
        return saved

    @property
    def keys(self) -> dict[str, Keys]:
        """Where every leaf lies in the tree on the disk, by its path."""
        if self.meta.is_named:
            return {path: keys_of(path) for path in self.meta.leaves}
        return {path: (f"leaf_{i:05d}",) for i, path in enumerate(self.meta.leaves)}

    @property
    def variables(self) -> dict[Keys, str]:
        """The leaves of parameters and model state, by where they are in `Variables`, and their paths."""
        keys = {path: keys_of(path) for path in self.meta.leaves}
        return {k: path for path, k in keys.items() if k[0] in ("params", "model_state")}

    def averaged(self, path: str) -> str:
        """Where the average of a parameter is; the parameter itself, where there is none of it."""
        average = AVERAGE + path.removeprefix(".params")
        return average if path.startswith(".params") and average in self.meta.leaves else path

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Some leaves, by their paths: see `engine.saved.read`. Raises ValueError where it is damaged."""
        return _or_named(
            self.folder, lambda: on_disk.read(self.folder / "state", self.keys, wanted)
        )

    def state(self, abstract: TrainState) -> TrainState:
        """The whole state, where `abstract` says that its leaves go; raises where it is damaged."""
        return on_disk.read_like(self.folder / "state", self.keys, abstract)


def restore(
    workdir: str,
    abstract_for: Callable[[CheckpointMeta], TrainState],
    *,
    step: int | None,
    best: bool,
    saving: Saving,
) -> RestoredCheckpoint:
    """One checkpoint of a workdir to look at: nothing is written or set aside.

    `step`, `best` and `saving` as for `Saved.find`, `abstract_for` as for `Checkpoints.restore`. Raises
    WrongWorkdirError where it is of another model, and what `Saved.find` raises.
    """
    saved = SavedCheckpoint.find(workdir, step, best=best, saving=saving if saving.best else None)
    abstract = abstract_for(saved.meta)
    _require_same_model(saved.folder, saved.meta, abstract)
    return RestoredCheckpoint(_or_named(saved.folder, lambda: saved.state(abstract)), saved.meta)


def load(
    workdir: str, step: int | None = None, best: bool = False, *, averaged: bool = True
) -> tuple[PyTree, PyTree]:
    """The parameters and the model state of a run, as NumPy arrays, without the class that trained them.

    Of the newest checkpoint, that of `step`, or the best by that run's `Saving.best`. With `averaged`, the
    average in place of those parameters that the run kept one of (`Config.ema`). Containers come as Orbax
    keeps them: dicts with keys that are text, and lists; named tuples and dataclasses as dicts by field.
    Random keys come as their data. The model state is () where there is none.

    Raises FileNotFoundError where there is no such checkpoint, ValueError where it is damaged.
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
    """What another run learned, of any layout, for `Trainer(initial=...)` to begin with.

    `names` goes from the name of a leaf of this model, such as "params/head/kernel" or "model_state/...", to
    that of the leaf there which it begins with, or to None, where `init` makes it; without `names` both are
    the same, and `init` makes what is not there. `step` is of the checkpoint (None: the newest one), `best`
    takes the best by that run's `Saving.best`, and `averaged` the average of the parameters, where there is
    one.
    """

    workdir: str
    """Of that run."""
    names: Callable[[str], str | None] | None = None
    """From the name of a leaf of this model, such as "params/layers/0/kernel" or "model_state/...", to that
    of the one there that it begins with; None: `init` makes it. Without it names are the same, and `init`
    makes what is not there."""
    step: int | None = None
    """Of the checkpoint; None: the newest."""
    best: bool = False
    """Whether to take the best, by that run's `Saving.best`."""
    averaged: bool = True
    """Whether to take the average of the parameters where that run kept one."""


def initial_leaves(initial: Any, variables: Variables) -> dict[str, Array]:
    """The leaves of a fresh model that are given, by their names, each on its devices in a buffer of its own.

    `initial` is a tree of parameters or `Variables`, whole or in part, the workdir of a run or
    `FromCheckpoint`; `variables` are the model's own, abstract with shardings. The rest is left to `init`.

    Raises ValueError, naming the leaf, where shapes or types differ, or `initial` names what is not there;
    and what `load` raises.
    """
    if isinstance(initial, str | os.PathLike):
        initial = FromCheckpoint(os.fspath(initial))
    if not isinstance(initial, FromCheckpoint):
        return on_disk.given_leaves(initial, variables)
    wanted = leaves_by_name(variables)
    saved = SavedCheckpoint.find(initial.workdir, initial.step, best=initial.best)
    there = {"/".join(map(str, keys)): path for keys, path in saved.variables.items()}
    chosen: dict[str, str] = {}
    for name in wanted:
        source = name if initial.names is None else initial.names(name)
        if source in there:
            chosen[name] = there[source]
        elif initial.names is not None and source is not None:
            raise ValueError(
                f"FromCheckpoint.names says that {name} is {source} in {saved.folder}, which has no such "
                f"leaf. It has {on_disk.some([*there])}. Return one of them, or None to have it made."
            )
    kinds = {name: saved.meta.leaves[path] for name, path in chosen.items()}
    is_said = initial.names is not None
    on_disk.require_fit(kinds, variables, str(saved.folder), is_said=is_said)
    if initial.averaged:
        chosen = {name: saved.averaged(path) for name, path in chosen.items()}
    found: dict[str, Array] = {}
    # One leaf there may be several here: each time round, one of them.
    while left := {path: name for name, path in chosen.items() if name not in found}:
        arrays = saved.read({p: on_disk.abstract_data(wanted[name]) for p, name in left.items()})
        found |= {name: on_disk.taken(arrays[p], wanted[name]) for p, name in left.items()}
    return found


def _best_of(root: pathlib.Path, steps: Sequence[int], saving: Saving | None) -> int:
    """The step of the best checkpoint by `saving`; None: by the settings that the run left."""
    if saving is None:
        settings = json.loads((root.parent / "config.json").read_text())
        return _best_of(root, steps, decode(settings["saving"], Saving, "config.json"))
    metas = {
        step: _or_named(root / str(step), lambda f=root / str(step): SavedCheckpoint.at(f)).meta
        for step in steps
    }
    found = best_step({step: Note.of(meta, saving) for step, meta in metas.items()}, saving)
    if found is None:
        raise FileNotFoundError(
            f"no checkpoint in {root} has a value of Saving.best, which is {saving.best!r}. Set it to a "
            "metric of the evaluations while training, or name a step."
        )
    return found


def _or_named(folder: pathlib.Path, read: Callable[[], T]) -> T:
    """What `read` returns; its failure as a ValueError that names the checkpoint."""
    try:
        return read()
    except WrongWorkdirError:
        raise
    except Exception as failure:
        if "RESOURCE_EXHAUSTED" in str(failure):
            raise  # it is sound, the devices are too small
        raise ValueError(
            f"the checkpoint {folder} cannot be read ({_told(failure)}). Name another step: "
            f"{sorted(int(p.name) for p in folder.parent.glob('*') if p.name.isdigit())} are there."
        ) from failure


def _attempt(read: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What `read` returns, or what it raises."""
    try:
        return read(), None
    except Exception as error:
        return None, error


def _require_same_model(folder: pathlib.Path, meta: CheckpointMeta, abstract: TrainState) -> None:
    """Raise WrongWorkdirError where the leaves of a checkpoint are not those of a state."""
    mismatch = differences(meta.leaves, describe(abstract))
    only_own = mismatch and all(one.startswith(OWN_STATE) for one in mismatch)
    if OWN_BEFORE in meta.leaves or only_own:
        raise WrongWorkdirError(
            f"the checkpoint {folder} was written by an earlier version of "
            "jaxgoodput, which kept other statistics of the gradient noise, or with other labels "
            "(`Trainer.labels`). Finish that run with the version that began it and the same labels, "
            "or use another workdir."
        )
    if mismatch and all(sentence.startswith(AVERAGE) for sentence in mismatch):
        raise WrongWorkdirError(
            f"the checkpoint {folder} holds an average of the parameters, which "
            "this run would lose. Set Config.ema to keep it, or use another workdir."
        )
    if mismatch:
        told = "; ".join(mismatch[:5])
        told += f"; and {len(mismatch) - 5} more" if len(mismatch) > 5 else ""
        other = "optimizer" if all(one.startswith(OPTIMIZER_STATE) for one in mismatch) else "model"
        raise WrongWorkdirError(
            f"the checkpoint {folder} is of another {other}: {told}. Use the {other} that this workdir "
            "belongs to, or another workdir: there, initial=jg.FromCheckpoint(...) begins with what was "
            "learned here."
        )


def saveable(make: Callable[[Any], PyTree], what: str) -> Callable[[Any], PyTree]:
    """`make`, refusing a result with anything but arrays and numbers in it; `what` names it."""

    def made(argument: Any) -> PyTree:
        tree = make(argument)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
            if not is_array and not isinstance(leaf, bool | int | float | complex):
                raise TypeError(
                    f"the training state cannot be checkpointed: {what}{jax.tree_util.keystr(path)} "
                    f"is a {type(leaf).__name__} ({leaf!r:.60}), not an array. Keep only arrays in "
                    "parameters, optimizer and model state; make a constant part of the function "
                    "that uses it."
                )
        on_disk.require_names(tree, what)
        return tree

    return made


def _told(failure: Exception) -> str:
    return f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"


def check_writable(root: pathlib.Path) -> None:
    """Make a folder where there is none.

    Raises NotADirectoryError where a file is in its way, PermissionError where nothing can be written.
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
                f"the workdir {root} cannot be made: {at} is a file. Name a folder in Config.workdir."
            ) from failure
        raise PermissionError(
            f"the workdir {root} cannot be written ({failure.strerror or failure}). Checkpoints, events "
            "and the compilation cache go there: name a folder in Config.workdir that you may write to."
        ) from failure
