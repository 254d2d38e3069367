"""Pipelines over batches that join columns with tables and reduce them by key, on one process or many.

A batch is a dict of arrays with one row per sample. `lookup` adds the rows that a table holds for a column of
ids. `aggregate` reduces a column by the keys of another, for example to count how often each word occurs:
every process reduces what it reads, then sends each key's result to the process that the key's hash selects,
which reduces what it receives. Integer results are bit-identical for any number of processes, however they
share the reading.
"""

import os
import pathlib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from jaxgoodput._hash import mixed
from jaxgoodput.clock import Clock, SystemClock

Batch = Mapping[str, np.ndarray]
REDUCERS: Mapping[str, np.ufunc] = {
    "sum": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "any": np.bitwise_or,
    "all": np.bitwise_and,
}
MOST_PENDING = 2**20  # keys that are collected before they are merged
FACTOR = 0x100000001B3  # multiplier of the polynomial hash of text


@runtime_checkable
class RowReader(Protocol):
    """A table whose rows can be read by id, such as a `TieredTable`."""

    def read(self, ids: Int[np.ndarray, " n"]) -> np.ndarray:
        """Return the row of each id, in the same order."""
        ...


@runtime_checkable
class Exchange(Protocol):
    """Sends arrays between processes. All processes must call it equally often."""

    index: int
    count: int

    def all_to_all(self, parts: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        """Send `parts[i]` to process i; return what each process has sent to this one, by its number."""
        ...


@dataclass(frozen=True)
class ReducedKeys:
    """This process's keys, in ascending order, and the reduced value of each."""

    keys: np.ndarray
    values: np.ndarray

    def everywhere(self, exchange: Exchange | None = None) -> "ReducedKeys":
        """Return the keys of all processes and their values, the same on each process."""
        if exchange is None:
            return self
        part = {"keys": self.keys, "values": self.values}
        return _joined(exchange.all_to_all([part] * exchange.count), None)

    def most(self, count: int) -> "ReducedKeys":
        """Return the `count` keys with the largest values, largest first; ties favour smaller keys."""
        _, ranks = np.unique(self.values, return_inverse=True)
        order = np.lexsort((self.keys, -ranks))[:count]
        return ReducedKeys(self.keys[order], self.values[order])


class Flow:
    """A lazy pipeline over batches. Each iteration calls the function `batches` anew."""

    def __init__(self, batches: Callable[[], Iterable[Batch]]):
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over all batches, beginning with the first."""
        return iter(self._batches())

    def lookup(self, table: RowReader, *, ids: str, into: str) -> "Flow":
        """Add a column `into` with the table's row for each id in the column `ids`.

        Each batch reads a row once, however often its id occurs. Iteration raises KeyError for a batch
        without the column `ids`.
        """

        def joined() -> Iterator[Batch]:
            for batch in self:
                column = _column(batch, ids)
                different, inverse = np.unique(column, return_inverse=True)
                rows = table.read(different)
                yield {**batch, into: rows[inverse.reshape(column.shape)]}

        return Flow(joined)

    def aggregate(
        self,
        key: str,
        value: str | None,
        reduce: str = "sum",
        *,
        exchange: Exchange | None = None,
    ) -> ReducedKeys:
        """Reduce the column `value` by the column `key`, over all batches.

        If `value` is None, each sample counts as 1. Keys are integers or text. Memory grows with the number
        of distinct keys that this process reads. Sums have 64 bits, and wrap around on overflow. With an
        `exchange`, all processes must call this, each with batches of its own; each gets the keys that their
        hash assigns to it.

        Raises:
          TypeError: keys are neither integers nor text, or floats are summed, whose sum depends on the order.
          ValueError: the reducer is unknown, columns differ in length, or a key, minimum or maximum is 2**63
            or larger.
          KeyError: a batch lacks one of the columns.
        """
        if reduce not in REDUCERS:
            raise ValueError(f"reduce={reduce!r} is not known; use one of {sorted(REDUCERS)}.")
        pending: list[ReducedKeys] = []
        num_pending, limit = 0, MOST_PENDING
        for batch in self:
            keys = _column(batch, key)
            values = np.ones(keys.shape, np.int64) if value is None else _column(batch, value)
            pending.append(_combined(*_checked(keys, values, reduce), REDUCERS[reduce]))
            num_pending += len(pending[-1].keys)
            if num_pending > limit:
                pending = [_merged(pending, REDUCERS[reduce])]
                num_pending = len(pending[0].keys)
                limit = max(MOST_PENDING, 2 * num_pending)
        local = _merged(pending, REDUCERS[reduce])
        if exchange is None:
            return local
        owner = _hashes(local.keys) % np.uint64(exchange.count)
        parts = [
            {"keys": local.keys[owner == i], "values": local.values[owner == i]}
            for i in range(exchange.count)
        ]
        return _joined(exchange.all_to_all(parts), REDUCERS[reduce])


class FolderExchange:
    """An exchange by files, in a folder that all processes see. Files appear atomically.

    Use a new folder for each job. If another process sends nothing for `patience_s`, TimeoutError is raised.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        *,
        index: int,
        count: int,
        patience_s: float = 600.0,
        clock: Clock | None = None,
    ):
        if not 0 <= index < count:
            raise ValueError(
                f"index={index}, count={count}: processes are numbered 0 to count - 1."
            )
        self.index, self.count = index, count
        self._folder, self._patience_s = pathlib.Path(folder), patience_s
        self._clock = clock or SystemClock()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._round = 0

    def all_to_all(self, parts: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        """Send `parts[i]` to process i; return what each process has sent to this one, by its number."""
        number = self._round
        self._round += 1
        for other, part in enumerate(parts):
            path = self._path(number, self.index, other)
            unfinished = path.with_suffix(".unfinished")
            with open(unfinished, "wb") as file:
                np.savez(file, **dict[str, Any](part))
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(path)
        return [
            self._received(self._path(number, other, self.index)) for other in range(self.count)
        ]

    def _path(self, number: int, source: int, target: int) -> pathlib.Path:
        return self._folder / f"{number:06d}-{source}-to-{target}.npz"

    def _received(self, path: pathlib.Path) -> dict[str, np.ndarray]:
        start_s, pause_s = self._clock.now(), 0.001
        while not path.exists():
            if self._clock.now() - start_s > self._patience_s:
                raise TimeoutError(
                    f"{path} did not appear within {self._patience_s:g} s: the process that writes it has "
                    "ended, or needs longer. Check its output, or raise patience_s."
                )
            self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.2)
        try:
            with np.load(path, allow_pickle=False) as found:
                part = {name: found[name] for name in found.files}
        except (ValueError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{path} is damaged, or was not written by this job ({error}). Run all processes again with "
                "an empty folder."
            ) from error
        path.unlink()
        return part


def _column(batch: Batch, name: str) -> np.ndarray:
    if name not in batch:
        raise KeyError(f"A batch has no column {name!r}; it has {sorted(batch)}.")
    return np.asarray(batch[name])


def _checked(keys: np.ndarray, values: np.ndarray, reduce: str) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values as one-dimensional arrays of the types in which they are reduced."""
    if keys.dtype.kind not in "iuUS":
        raise TypeError(
            f"Keys of dtype {keys.dtype} cannot be compared exactly. Pass integers or text."
        )
    if values.shape != keys.shape:
        raise ValueError(
            f"Keys of shape {keys.shape} do not match values of shape {values.shape}. Pass one value per key."
        )
    if values.dtype.kind == "b":
        values = values.astype(np.int64)
    if values.dtype.kind not in "iu" and not (
        reduce in ("min", "max") and values.dtype.kind == "f"
    ):
        raise TypeError(
            f"Values of dtype {values.dtype} cannot be reduced by {reduce!r} to the same bits everywhere: a "
            "sum of floats depends on its order. Scale them to integers, such as (x * 2**20).astype(int64)."
        )
    if keys.dtype.kind in "iu":
        keys = _int64(keys, "Keys")
    if (
        values.dtype.kind in "iu"
    ):  # sums may wrap around, and bit operations do not care about the sign
        values = _int64(values, "Values") if reduce in ("min", "max") else values.astype(np.int64)
    return keys.ravel(), values.ravel()


def _int64(numbers: np.ndarray, what: str) -> np.ndarray:
    """Convert integers to int64, so that signed and unsigned ones can be compared."""
    if numbers.dtype == np.uint64 and numbers.max(initial=0) >= 2**63:
        raise ValueError(
            f"{what} contain {numbers.max()}. Integers must be below 2**63, so that signed and unsigned ones "
            "compare equal. Pass x.view(np.int64), which has the same bits; large numbers become negative."
        )
    return numbers.astype(np.int64)


def _combined(keys: np.ndarray, values: np.ndarray, reducer: np.ufunc) -> ReducedKeys:
    if not len(keys):
        return ReducedKeys(keys, values)
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
    return ReducedKeys(keys[first], reducer.reduceat(values, first))


def _merged(parts: Sequence[ReducedKeys], reducer: np.ufunc) -> ReducedKeys:
    parts = [part for part in parts if len(part.keys)]
    if not parts:
        return ReducedKeys(np.empty(0, np.int64), np.empty(0, np.int64))
    keys = np.concatenate([part.keys for part in parts])
    return _combined(keys, np.concatenate([part.values for part in parts]), reducer)


def _joined(parts: Sequence[Mapping[str, np.ndarray]], reducer: np.ufunc | None) -> ReducedKeys:
    """Merge the keys and values that processes have sent. Without a reducer, no key may be in two of them."""
    found = [ReducedKeys(part["keys"], part["values"]) for part in parts]
    kinds = {part.keys.dtype.kind for part in found if len(part.keys)}
    if len(kinds) > 1 and not kinds <= {"i", "u"}:
        raise TypeError(
            f"Processes have keys of different kinds, {sorted(kinds)}. Read the same column everywhere."
        )
    return _merged(found, reducer or np.add)


def _hashes(keys: np.ndarray) -> np.ndarray:
    """Return a hash of each key; the same text has the same hash in arrays of any width."""
    if keys.dtype.kind in "iu":
        return mixed(keys)
    letters = np.ascontiguousarray(keys).view(np.uint32 if keys.dtype.kind == "U" else np.uint8)
    found = np.zeros(len(keys), np.uint64)
    power = 1
    for letter in letters.reshape(len(keys), -1).T:  # padding is 0, and adds nothing
        power = power * FACTOR % 2**64
        found += letter.astype(np.uint64) * np.uint64(power)
    return mixed(found)
