"""Streams of batches that are joined with tables and reduced by key, over one process or many.

A batch is a dict of arrays with one row per sample. `lookup` adds what a table holds for a column of ids.
`aggregate` reduces a column by the keys of another, as in counting how often each word occurs: every process
reduces what it reads, sends each key's result to the process that the key's hash names, and that one reduces
what it was sent. Integers come out with the same bits for any number of processes, whoever reads what.
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
MOST_PENDING = 2**20  # samples that are kept before they are reduced
FACTOR = 0x100000001B3  # of the polynomial that hashes text


@runtime_checkable
class RowReader(Protocol):
    """What can be looked up: a `TieredTable`, or anything else that reads rows by id."""

    def read(self, ids: Int[np.ndarray, " n"]) -> np.ndarray:
        """A row for each id."""
        ...


@runtime_checkable
class Exchange(Protocol):
    """How processes hand each other arrays; all call it the same number of times."""

    index: int
    count: int

    def all_to_all(self, parts: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        """Hand part i to process i; returns what each process had for this one."""
        ...


@dataclass(frozen=True)
class ReducedKeys:
    """Keys, ascending, and what their values were reduced to; of the keys that are this process's."""

    keys: np.ndarray
    values: np.ndarray

    def everywhere(self, exchange: Exchange | None = None) -> "ReducedKeys":
        """The keys of all processes, on each of them."""
        if exchange is None:
            return self
        part = {"keys": self.keys, "values": self.values}
        return _joined(exchange.all_to_all([part] * exchange.count), None)

    def most(self, count: int) -> "ReducedKeys":
        """The keys of the largest values, largest first; of equal values the smaller keys."""
        _, ranks = np.unique(self.values, return_inverse=True)
        order = np.lexsort((self.keys, -ranks))[:count]
        return ReducedKeys(self.keys[order], self.values[order])


class Flow:
    """Batches that are read once, from front to back; `batches` is called for them when they are needed."""

    def __init__(self, batches: Callable[[], Iterable[Batch]]):
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        """The batches, from the first."""
        return iter(self._batches())

    def lookup(self, table: RowReader, *, ids: str, into: str) -> "Flow":
        """Add a column `into` with the table's row for each id of the column `ids`; a batch reads a row once.

        Raises KeyError, when it is read, for a batch without that column.
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
        """Reduce the column `value` (None: a one for each) by the column `key`, over all batches.

        Keys are integers or text; memory is that of the different keys that this process reads. Sums are of
        64 bits, and wrap around beyond them. With an `exchange` all processes come here, each with batches of
        its own, and each gets the keys that their hash gives it.

        Raises:
          TypeError: keys that are neither, or floats to be added: their sum depends on who adds them when.
          ValueError: an unknown reducer, columns of different lengths, or keys, smallest or largest values
            from 2**63 on.
          KeyError: a batch without one of the columns.
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
    """Arrays handed over as files in a folder that all processes see; each file is there as a whole or not.

    Use a folder once. A process that hears nothing of another for `patience_s` raises TimeoutError.
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
        """Hand part i to process i; returns what each process had for this one."""
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
                    f"{path} did not come within {self._patience_s:g} s: that process has ended, or reads "
                    "longer than that. See what it says, or give more patience_s."
                )
            self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.2)
        try:
            with np.load(path, allow_pickle=False) as found:
                part = {name: found[name] for name in found.files}
        except (ValueError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{path} is not what another process wrote ({error}). Run all processes again with an empty "
                "folder."
            ) from error
        path.unlink()
        return part


def _column(batch: Batch, name: str) -> np.ndarray:
    if name not in batch:
        raise KeyError(f"A batch has no column {name!r}; it has {sorted(batch)}.")
    return np.asarray(batch[name])


def _checked(keys: np.ndarray, values: np.ndarray, reduce: str) -> tuple[np.ndarray, np.ndarray]:
    """Both as columns of one length, of the types that are reduced."""
    if keys.dtype.kind not in "iuUS":
        raise TypeError(
            f"Keys of dtype {keys.dtype}: pass integers or text, which equal others exactly."
        )
    if values.shape != keys.shape:
        raise ValueError(
            f"Keys of shape {keys.shape} and values of shape {values.shape}: each key has one value."
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
    if values.dtype.kind in "iu":  # sums wrap around, and bits are bits
        values = _int64(values, "Values") if reduce in ("min", "max") else values.astype(np.int64)
    return keys.ravel(), values.ravel()


def _int64(numbers: np.ndarray, what: str) -> np.ndarray:
    """Integers as the type that signed and unsigned ones have in common."""
    if numbers.dtype == np.uint64 and numbers.max(initial=0) >= 2**63:
        raise ValueError(
            f"{what} hold {numbers.max()}, and integers are below 2**63 here, so that signed and unsigned "
            "ones equal each other. Pass x.view(np.int64): the same bits, large ones as negative ones."
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
    """What processes sent; without a reducer no key is in two parts."""
    found = [ReducedKeys(part["keys"], part["values"]) for part in parts]
    kinds = {part.keys.dtype.kind for part in found if len(part.keys)}
    if len(kinds) > 1 and not kinds <= {"i", "u"}:
        raise TypeError(
            f"Processes have keys of different kinds, {sorted(kinds)}: read the same column."
        )
    return _merged(found, reducer or np.add)


def _hashes(keys: np.ndarray) -> np.ndarray:
    """A hash of each key that does not depend on how wide the array's text is."""
    if keys.dtype.kind in "iu":
        return mixed(keys)
    letters = np.ascontiguousarray(keys).view(np.uint32 if keys.dtype.kind == "U" else np.uint8)
    found = np.zeros(len(keys), np.uint64)
    power = 1
    for letter in letters.reshape(len(keys), -1).T:  # what text is padded with is 0
        power = power * FACTOR % 2**64
        found += letter.astype(np.uint64) * np.uint64(power)
    return mixed(found)
