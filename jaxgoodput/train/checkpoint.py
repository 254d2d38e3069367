"""Checkpoints: Orbax, asynchronous, atomic, the last few kept, restored onto any layout and any devices.

`<workdir>/checkpoints/<step>/state` holds the device values, `/meta` everything the host knows
(`CheckpointMeta`) as JSON. A save that fails costs nothing:
training goes on, the older checkpoints stay, and the error is reported. A checkpoint that cannot be
read is named, set aside, and the one before it is used.

The abstract state that `restore` is given says where every leaf goes: each device reads its own part,
and none ever holds more, besides one leaf at a time.

A state that spans processes is written by all of them together, each value once, and is complete when the
last of them is done. Otherwise it is the same in every process, and process 0 writes. Everyone reads for
itself, its own devices' parts, and agrees with the others on what was read: no reader ever waits inside
Orbax for another, which may have failed.
"""

import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from jaxgoodput._serial import decode, encode
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.engine.state import TrainState
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.observe.badput import SavedLedger
from jaxgoodput.tune.timings import Parts, TimingRow

T = TypeVar("T")


VERSION = 1  # of the metadata
ELSEWHERE = "another process could not"
# Where a state keeps what `adaptive` adds to an optimizer's, and a leaf of it before that was one vector.
OWN_STATE, OWN_BEFORE = ".opt_state.own", ".opt_state.progress"
AVERAGE = ".ema"  # where a state keeps the average of its parameters


class WrongWorkdirError(ValueError):
    """The workdir holds checkpoints of another model."""


@dataclass(frozen=True)
class LeafKind:
    """What a leaf of the state is."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{self.shape}"


@dataclass(frozen=True, kw_only=True)
class CheckpointMeta:
    """Everything that the host knows and a restart needs."""

    step: int
    """Updates attempted."""
    samples: int
    """Real samples applied since the first run began."""
    cursor: Cursor
    """Where in the data to go on."""
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


@dataclass(frozen=True)
class Restored:
    """What a checkpoint gave back."""

    state: TrainState
    meta: CheckpointMeta


class Checkpoints:
    """The checkpoints of one workdir. `spans`: the states lie on devices of several processes."""

    def __init__(self, workdir: str, *, keep: int, spans: bool = False):
        self._root = pathlib.Path(workdir).resolve()
        self._directory = self._root / "checkpoints"
        self._keep = keep
        self._spans = spans
        _check_writable(self._root)
        self._directory.mkdir(exist_ok=True)
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
        meta = dataclasses.replace(meta, leaves=describe(state))
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

    def wait(self) -> str | None:
        """Wait until everything is on disk; returns what went wrong, if anything.

        All processes come here together, and none goes on before the one that writes is done.
        """
        error = self._finish()
        if not self._everywhere(error is None) and self._spans:
            error = error or ELSEWHERE
        return error

    def restore(self, abstract_for: Callable[[CheckpointMeta], TrainState]) -> Restored | None:
        """The newest checkpoint that can be read; None where there is none.

        `abstract_for`, given what the host saved, says of every leaf its shape, type and sharding, which
        are the restored state's own (`Engine.abstract_state`); the layout that the state was saved on
        does not matter.

        Raises WrongWorkdirError where the newest readable one is of another model.
        """
        for step in self._agreed(sorted(self._manager.all_steps(), reverse=True)):
            meta, failure = _attempt(lambda step=step: self._read_meta(step))
            if isinstance(failure, WrongWorkdirError):
                raise failure  # it is sound, and not for this program
            if not self._everywhere(failure is None):
                self._set_aside(step, failure)
                continue
            assert meta is not None
            # What it raises is about the present settings, not about the checkpoint.
            abstract = abstract_for(meta)
            wanted = describe(abstract)
            mismatch = differences(meta.leaves, wanted)
            only_own = mismatch and all(one.startswith(OWN_STATE) for one in mismatch)
            if OWN_BEFORE in meta.leaves or only_own:
                raise WrongWorkdirError(
                    f"the checkpoint {self._directory / str(step)} was written by an earlier version of "
                    "jaxgoodput, which kept other statistics of the gradient noise, or with other labels "
                    "(`Trainer.labels`). Finish that run with the version that began it and the same labels, "
                    "or use another workdir."
                )
            if mismatch and all(sentence.startswith(AVERAGE) for sentence in mismatch):
                raise WrongWorkdirError(
                    f"the checkpoint {self._directory / str(step)} holds an average of the parameters, which "
                    "this run would lose. Set Config.ema to keep it, or use another workdir."
                )
            if mismatch:
                raise WrongWorkdirError(
                    f"the checkpoint {self._directory / str(step)} is of another model: "
                    + "; ".join(mismatch[:5])
                    + (f"; and {len(mismatch) - 5} more" if len(mismatch) > 5 else "")
                    + ". Use another workdir, or the model that this one belongs to."
                )
            state, failure = _attempt(
                lambda step=step, abstract=abstract: self._read_state(step, abstract)
            )
            if failure is not None and "RESOURCE_EXHAUSTED" in str(failure):
                raise failure  # the checkpoint is sound, the devices are too small
            if self._everywhere(failure is None):
                assert state is not None
                return Restored(state=state, meta=meta)
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
            self._remove_leftovers()
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
                max_to_keep=self._keep,
                enable_async_checkpointing=True,
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
        except Exception as failure:
            return self._failed(failure)
        return None

    def _read_meta(self, step: int) -> CheckpointMeta:
        """What the host saved; raises where the checkpoint is damaged."""
        args = ocp.args.Composite(meta=ocp.args.JsonRestore())  # pyright: ignore[reportCallIssue]
        return CheckpointMeta.from_json(self._manager.restore(step, args=args)["meta"])

    def _read_state(self, step: int, abstract: TrainState) -> TrainState:
        """What the devices held; raises where the checkpoint is damaged."""
        tree = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(_inward(abstract))  # pyright: ignore[reportCallIssue]
            ),
        )["state"]
        return _owned(tree, abstract)

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
        self._remove_leftovers()
        self._manager = self._open()

    def _remove_leftovers(self) -> None:
        if jax.process_index() == 0:
            for leftover in self._directory.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(leftover, ignore_errors=True)

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
        tree = _plain(state)
        if self._spans or jax.process_count() == 1:
            return tree
        # Where there are several processes, Orbax takes arrays of one of them from the host only;
        # copies, because the state's own buffers will be donated to the next step.
        return jax.tree.map(np.array, jax.device_get(tree))


def _attempt(read: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What `read` returns, or what it raises."""
    try:
        return read(), None
    except Exception as error:
        return None, error


def describe(state: PyTree) -> dict[str, LeafKind]:
    """What every leaf is, by its path: tells one model's state from another's."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {
        jax.tree_util.keystr(path): LeafKind(tuple(x.shape), str(x.dtype)) for path, x in leaves
    }


def differences(saved: Mapping[str, LeafKind], wanted: Mapping[str, LeafKind]) -> list[str]:
    """How two descriptions differ, one sentence a leaf."""
    found = []
    for path in sorted(saved.keys() | wanted.keys()):
        a, b = saved.get(path), wanted.get(path)
        if a is None:
            found.append(f"{path} is not in the checkpoint, the model has {b}")
        elif b is None:
            found.append(f"{path} is {a} in the checkpoint, the model has no such leaf")
        elif a != b:
            found.append(f"{path} is {a} in the checkpoint, {b} in the model")
    return found


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
        return tree

    return made


def _plain(state: TrainState) -> dict[str, PyTree]:
    leaves = jax.tree.leaves(state)
    return {
        f"leaf_{i:05d}": jax.random.key_data(x) if _is_key(x) else x for i, x in enumerate(leaves)
    }


def _inward(abstract: TrainState) -> dict[str, PyTree]:
    """What to ask the reader for: plain arrays, each on its leaf's sharding."""
    plain = jax.eval_shape(_plain, abstract)
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=leaf.sharding)
        for (name, x), leaf in zip(plain.items(), jax.tree.leaves(abstract), strict=True)
    }


def _owned(tree: dict[str, PyTree], abstract: TrainState) -> TrainState:
    """What was read as a state with buffers of its own; the reader's are let go one by one.

    The reader may share them with the host, and a state is donated to steps.
    """
    wanted, structure = jax.tree.flatten(abstract)
    put = []
    for x, leaf in zip(tree.values(), wanted, strict=True):
        own = jax.block_until_ready(jax.device_put(x, leaf.sharding, may_alias=False))
        x.delete()
        impl = jax.random.key_impl(_key_like(leaf)) if _is_key(leaf) else None
        put.append(own if impl is None else jax.random.wrap_key_data(own, impl=impl))
    return jax.tree.unflatten(structure, put)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _key_like(x: Any) -> Any:
    return x if isinstance(x, jax.Array) else jax.random.key(0)


def _told(failure: Exception) -> str:
    return f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"


def _check_writable(root: pathlib.Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".writable.{jax.process_index()}"
        probe.write_bytes(np.zeros(1).tobytes())
        probe.unlink()
    except OSError as failure:
        raise PermissionError(
            f"the workdir {root} cannot be written ({failure.strerror or failure}). Checkpoints, events "
            "and the compilation cache go there: pass a --workdir that you may write to."
        ) from failure
