"""The order in which a run uses its samples, as pure integers: equal on every process without a message.

The order of a run is the concatenation of its epochs. Each epoch is a permutation of the dataset, drawn from
(seed, epoch). A cursor is a place in that order, and a batch holds the next `count` samples, of any number,
across epoch borders. Nothing here depends on processes or batch sizes, so a run may resume with different
ones. The permutations are part of the checkpoint format; a test pins them.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxgoodput.data.shuffle import shuffled

PART = 8192  # places whose permutation is computed at once, in 0.3 ms


@dataclass(frozen=True)
class Cursor:
    """A place in a run's order of samples: the whole state of the data pipeline.

    Equal cursors are followed by equal samples, whatever the batch sizes or process counts.

    Raises:
      TypeError: a number is not a Python int (a numpy integer cannot be written as JSON).
      ValueError: a number is negative.
    """

    seed: int
    """Seed of the permutations."""
    epoch: int = 0
    """Number of complete epochs."""
    offset: int = 0
    """Number of samples of this epoch that were used."""

    def __post_init__(self):
        numbers = (self.seed, self.epoch, self.offset)
        if all(type(x) is int for x in numbers) and min(numbers) >= 0:
            return
        for name in ("seed", "epoch", "offset"):
            _check_field(name, getattr(self, name))

    def num_samples(self, dataset_size: int) -> int:
        """Return the number of samples before this cursor, over all epochs.

        >>> Cursor(seed=0, epoch=2, offset=5).num_samples(100)
        205
        """
        return self.epoch * dataset_size + self.offset

    def later(self, num_samples: int, dataset_size: int) -> "Cursor":
        """Return the cursor so many samples later.

        >>> Cursor(seed=0, offset=8).later(4, 10)
        Cursor(seed=0, epoch=1, offset=2)
        """
        epoch, offset = divmod(self.num_samples(dataset_size) + num_samples, dataset_size)
        return Cursor(self.seed, epoch, offset)


def _check_field(name: str, value: Any) -> None:
    if type(value) is not int:
        raise TypeError(
            f"Cursor.{name}={value!r} is a {type(value).__name__}. A cursor's numbers must be Python "
            f"ints, which JSON keeps exactly; pass int(...)."
        )
    if value < 0:
        raise ValueError(
            f"Cursor.{name}={value} is negative. Seeds, epochs and offsets count from 0; a new run "
            f"starts at Cursor(seed=0)."
        )


class Permutations:
    """A cache of the two parts of shuffled orders that were used last, so that they are computed once.

    Hold one if you call `take` in a loop. Two parts are kept because a batch may straddle a border.
    """

    def __init__(self):
        self._parts: dict[tuple[int, int, int, int], np.ndarray] = {}

    def after(self, cursor: Cursor, dataset_size: int) -> Int[np.ndarray, " part"]:
        """Return the order of the cursor's epoch from its offset on; read-only.

        It has at least one place, and ends with its part of `PART` places.
        """
        first = cursor.offset // PART * PART
        key = (cursor.seed, cursor.epoch, first, dataset_size)
        if key not in self._parts:
            while len(self._parts) >= 2:
                del self._parts[next(iter(self._parts))]
            places = np.arange(first, min(first + PART, dataset_size))
            part = shuffled(places, dataset_size, seed=cursor.seed, epoch=cursor.epoch)
            part.flags.writeable = False
            self._parts[key] = part
        return self._parts[key][cursor.offset - first :]


def epochs_of(cursor: Cursor, dataset_size: int, count: int) -> Int[np.ndarray, " count"]:
    """Return the epoch of each of the next `count` samples.

    >>> epochs_of(Cursor(seed=0, epoch=1, offset=2), 4, 5)
    array([1, 1, 2, 2, 2])
    """
    return cursor.epoch + (cursor.offset + np.arange(count)) // dataset_size


def take(
    cursor: Cursor,
    dataset_size: int,
    count: int,
    *,
    shuffle: bool = True,
    permutations: Permutations | None = None,
) -> tuple[Int[np.ndarray, " count"], Cursor]:
    """Return the next `count` sample indices, across epoch borders, and the cursor behind them.

    The end of an epoch is returned as offset 0 of the next one. With `shuffle=False` every epoch is
    `0 .. dataset_size - 1`. `permutations` is a cache that saves time.

    Raises:
      ValueError: the dataset is empty, `count` is negative, or the cursor is behind the dataset's end.

    >>> take(Cursor(seed=0, offset=2), 4, 5, shuffle=False)
    (array([2, 3, 0, 1, 2]), Cursor(seed=0, epoch=1, offset=3))
    """
    if dataset_size < 1:
        raise ValueError(
            f"The dataset has {dataset_size} samples, so there is nothing to take. Check the path, "
            f"split or filter that produced it."
        )
    if count < 0:
        raise ValueError(f"count={count} samples cannot be taken. Pass 0 or more.")
    if cursor.offset > dataset_size:
        raise ValueError(
            f"The cursor stands at sample {cursor.offset} of epoch {cursor.epoch}, but the "
            f"dataset has only {dataset_size} samples. It was written for a larger dataset: "
            f"restore that one, or start a new run with Cursor(seed={cursor.seed}, "
            f"epoch={cursor.epoch})."
        )
    permutations = Permutations() if permutations is None else permutations
    pieces = []
    while True:
        if cursor.offset == dataset_size:
            cursor = dataclasses.replace(cursor, epoch=cursor.epoch + 1, offset=0)
        if count == 0:
            break
        if shuffle:
            piece = permutations.after(cursor, dataset_size)[:count]
        else:
            piece = np.arange(cursor.offset, min(cursor.offset + count, dataset_size))
        pieces.append(piece)
        cursor = dataclasses.replace(cursor, offset=cursor.offset + len(piece))
        count -= len(piece)
    # Concatenation copies, so that a caller cannot write into the cache or keep a whole epoch alive.
    indices = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
    return indices, cursor
