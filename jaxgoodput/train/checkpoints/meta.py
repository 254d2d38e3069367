"""`CheckpointMeta`: what a checkpoint says of itself; and which states can be saved, or belong to it."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from absl import logging
from jaxtyping import PyTree

from jaxgoodput._fields.serial import decode, encode
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.data.fingerprint import Fingerprint
from jaxgoodput.data.streams import StreamState
from jaxgoodput.engine import saved as on_disk
from jaxgoodput.engine.saved import LeafKind, describe, differences
from jaxgoodput.engine.state import TrainState
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.observe.badput import SavedLedger
from jaxgoodput.train.checkpoints.memory import RunMemory
from jaxgoodput.tune.timings import TimingRow

OLDEST, VERSION = 7, 8  # of the metadata: what is read, and written
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
    memory: RunMemory | None = None
    """What the run remembers besides its state; None in older checkpoints."""
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
    def from_json(cls, saved: Mapping[str, Any], *, with_memory: bool = True) -> "CheckpointMeta":
        """Read what `to_json` wrote.

        What the run remembered is left out if this program cannot read it, with a warning: training does not
        depend on it. `with_memory=False` leaves it out unread, for those who do not go on with the run.

        Raises WrongWorkdirError for another version, KeyError, TypeError or ValueError for anything else.
        """
        # The first metadata had no version.
        if not OLDEST <= (version := saved.get("version", 0)) <= VERSION:
            raise WrongWorkdirError(
                f"the checkpoint's metadata has version {version}, but this program reads versions {OLDEST} "
                f"to {VERSION}. Resume with the version of jaxgoodput that wrote it."
            )
        meta = decode({**saved, "memory": None}, cls, "checkpoint")
        if not with_memory:
            return meta
        try:
            memory = decode(saved.get("memory"), RunMemory | None, "memory")
        except ValueError as error:
            logging.warning(
                "what the run remembered besides its state cannot be read (%s). Its timers begin anew, and "
                "it finds out anew which batches pay.",
                error,
            )
            memory = None
        return dataclasses.replace(meta, memory=memory)


def require_same_model(folder: pathlib.Path, meta: CheckpointMeta, abstract: TrainState) -> None:
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
