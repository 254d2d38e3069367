"""A table whose rows are on the device while they are read, and otherwise in RAM or on a disk.

A batch goes through the table in steps, each of which another thread may do: `plan` decides what moves;
`pull` takes rows out of RAM; `load` takes rows from the disk, makes new ones, writes those that RAM has no
room for, and sends the rows to the device; `place` puts them into their slots, and takes out those that
leave; `write_back` has these arrive in RAM. Plans are made in order, and every step is done for batch after
batch, so that the only thing that one batch can have to wait for is a row that another has just evicted.

What the table says and saves is as of the last batch that was placed, however far the others are.
"""

import contextlib
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array, Float32, Int, Int64, UInt32

from jaxgoodput._pytree import struct
from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.embedding.directory import NOBODY, Directory, SlotPlan
from jaxgoodput.embedding.hashing import initial_values
from jaxgoodput.embedding.optimizers import RowOptimizer
from jaxgoodput.embedding.peers import Share
from jaxgoodput.embedding.rows import DTYPES, EMBEDDING, Field, RowLayout, padded_size
from jaxgoodput.embedding.store import RowStore

FETCHED_AT_ONCE = 2**16  # rows that are copied from the device in one piece
FORMAT = 1


@struct
class Lookup:
    """Where the rows of a batch are: what a step reads them by."""

    slots: Any
    """`int32 [padded]`: of each different id; behind them, places that no slot has."""
    inverse: Any
    """`int32` in the shape of the ids: which of those each id is."""
    is_often: Any = ()
    """`bool [padded]`: which of those so large a share of the batches reads as `TieredTable.often` says."""


@dataclass(frozen=True)
class PulledPlan:
    """A plan with what was taken out of RAM for it."""

    plan: SlotPlan
    inverse: np.ndarray
    rows: UInt32[np.ndarray, "missing words"]
    """Of the missing ids; those that were not in RAM are still to be filled in."""
    dumped: Int64[np.ndarray, " dumped"]
    """Ids whose rows RAM has no room for, without those that the disk has as they are."""
    dumped_rows: UInt32[np.ndarray, "dumped words"]


@dataclass(frozen=True)
class LoadedPlan:
    """A plan with all rows that it needs on the device, though not in their slots."""

    plan: SlotPlan
    lookup: Lookup
    rows: Array | None
    targets: Array | None
    evicted_slots: Array | None


@dataclass(frozen=True)
class EvictedRows:
    """Rows that left the device; `rows` is there when the device has come so far."""

    plan: SlotPlan
    rows: Array | None
    is_dirty: np.ndarray


@dataclass
class Counts:
    """Where the rows of all batches were found, since the table was opened."""

    batches: int = 0
    on_device: int = 0
    in_ram: int = 0
    on_disk: int = 0
    new: int = 0
    dumped: int = 0
    waits: int = 0
    """Batches that had to wait for a row that another had just evicted."""
    waited_s: float = 0.0


class TieredTable:
    """Rows by id, `dim` numbers each, of which any number may be there; a context manager.

    `num_rows`: ids are below it; None: any 63-bit numbers. `device_rows` slots on the device hold the rows
    of a batch and the warmest others, `ram_rows` more are in RAM, `folder` has the rest. A row that nobody
    has read takes no place anywhere: it begins as a hash of its id. `half_life`: batches after which a read
    counts for half as much when it is decided which rows stay. `device`: where the slots are, or, as a
    sharding, all devices that have a copy of them. `share`: of several processes that train with one table
    and name the same ids in every batch, RAM and `folder` of each have the rows that it owns; slots are the
    same in all.

    Raises:
      ValueError: sizes that cannot work, or a folder that holds another table.
      InUse: another process has the folder.
      Damaged: the folder is not what was written; the message names the file and the commit before it.
    """

    def __init__(
        self,
        folder: Any,
        *,
        dim: int,
        optimizer: RowOptimizer,
        device_rows: int,
        ram_rows: int,
        num_rows: int | None = None,
        dtype: str = "float32",
        scale: float = 0.01,
        seed: int = 0,
        half_life: float = 1000.0,
        device: Any = None,
        clock: Clock | None = None,
        at: int | None = None,
        checks_rows: bool = True,
        share: Share | None = None,
        **store: Any,
    ):
        if num_rows is not None and device_rows >= num_rows:
            device_rows, ram_rows = num_rows, 0  # nothing ever leaves the device
        elif ram_rows < device_rows:
            raise ValueError(
                f"ram_rows={ram_rows} is less than device_rows={device_rows}: a batch may evict all rows of "
                "the device at once, and RAM has to take them. Give ram_rows at least as many."
            )
        if dim < 1 or device_rows < 1 or dtype not in DTYPES:
            raise ValueError(
                f"dim={dim}, device_rows={device_rows}, dtype={dtype!r}: a table has at least one number in "
                f"a row and one slot, and rows of {' or '.join(DTYPES)}."
            )
        self.dim, self.dtype, self.num_rows = dim, dtype, num_rows
        self.optimizer = optimizer
        self.layout = RowLayout((Field(EMBEDDING, dim, dtype), *optimizer.fields(dim)))
        self.device_rows, self.ram_rows = device_rows, ram_rows
        self.counts = Counts()
        self._seed, self._scale = seed, scale
        self._clock = clock or SystemClock()
        device = jax.local_devices()[0] if device is None else device
        self._sharding = device if isinstance(device, Sharding) else SingleDeviceSharding(device)
        self._share, self._num_asked = share, 0
        self.directory = Directory(
            device_rows=device_rows,
            ram_rows=ram_rows,
            num_ids=num_rows,
            half_life=half_life,
            share=share,
        )
        words = self.layout.num_words
        self.store = RowStore(
            folder,
            row_bytes=4 * words,
            num_ids=num_rows,
            at=at,
            checks_rows=checks_rows,
            **store,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(self.store.close)
            self._check_same_table()
            self.slots: Array = jnp.zeros((device_rows, words), jnp.uint32, device=self._sharding)
            """The device's rows, `uint32 [slots, words]`; a step that changes them gives them back."""
            self._ram = np.zeros(
                (ram_rows, words), np.uint32
            )  # takes memory where it is written to
            undo.pop_all()
        # As of the last batch placed, unlike the directory, which is ahead.
        self._device_ids = np.full(device_rows, NOBODY, np.int64)
        self._device_dirty = np.zeros(device_rows, bool)
        self._ram_ids = np.full(ram_rows, NOBODY, np.int64)
        self._ram_dirty = np.zeros(ram_rows, bool)
        self._placed = -1
        self._written = -1  # the last batch whose evicted rows are in RAM
        self._arrived = threading.Condition()
        self._stopped: str | None = None

    def __enter__(self) -> "TieredTable":
        """The table."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder. What was not saved is gone."""
        self.stop("the table was closed")
        self.store.close()

    def stop(self, why: str) -> None:
        """Have those that wait for rows give up."""
        with self._arrived:
            self._stopped = why
            self._arrived.notify_all()

    def settle(self) -> None:
        """Go on from the last batch that was placed, whatever was planned behind it."""
        with self._arrived:
            self._stopped = None
            if self._written < self._placed:
                self._stopped = (
                    f"those that left the device for batch {self._placed} were not written back. Open the "
                    "table again; it is as it was saved last"
                )
        self.directory = self.directory.settled(self._device_ids, self._ram_ids, self._placed)

    @property
    def often(self) -> float:
        """The share of batches by which a row that is in so many counts as read often."""
        return self.directory.often

    @often.setter
    def often(self, share: float) -> None:
        self.directory.often = share

    @property
    def about(self) -> dict[str, Any]:
        """What a commit says of the table, and has to be the same when it is opened again."""
        fields = [[f.name, f.width, f.dtype] for f in self.layout.fields]
        return {"format": FORMAT, "fields": fields, "seed": self._seed, "scale": self._scale}

    @property
    def saved(self) -> Mapping[str, Any]:
        """What was written down with the commit that the table was opened with, or has made since."""
        return self.store.newest.about.get("with", {}) if self.store.newest else {}

    def commits(self) -> dict[int, Mapping[str, Any]]:
        """What was written down with every commit that lies there, by number."""
        return {n: about.get("with", {}) for n, about in self.store.commits().items()}

    def _check_same_table(self) -> None:
        if self.store.newest is None:
            return
        there = {name: self.store.newest.about.get(name) for name in self.about}
        if there != self.about:
            raise ValueError(
                f"{self.store.folder} holds a table that was made with {there}, and it was opened as one "
                f"with {self.about}. Open it with the same dim, optimizer, dtype, seed and scale, or use "
                "another folder."
            )

    # -- the steps of a batch ------------------------------------------------------------------------

    def checked(self, ids: Any) -> np.ndarray:
        """Ids as int64; raises TypeError or ValueError, saying where, for what are not ids of this table."""
        ids = np.asarray(ids)
        if ids.dtype.kind not in "iu":
            raise TypeError(
                f"ids of dtype {ids.dtype} are not ids: pass integers, 0 to num_rows - 1. Hash or enumerate "
                "whatever else names a row."
            )
        limit = self.num_rows if self.num_rows is not None else 2**63 - 2
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= limit):
            first = np.flatnonzero((ids.ravel() < 0) | (ids.ravel() >= limit))[0]
            place = tuple(map(int, np.unravel_index(first, ids.shape)))
            raise ValueError(
                f"id {ids.ravel()[first]} at {place} of the batch is outside of 0 to {limit - 1}. Nothing "
                "was changed; give the table more rows, or map ids to those that it has."
            )
        return ids.astype(np.int64)

    def unique(self, ids: Any) -> tuple[Int64[np.ndarray, " unique"], np.ndarray]:
        """The different ids of a batch, ascending, and which of them each id is."""
        ids = self.checked(ids)
        found, inverse = np.unique(ids, return_inverse=True)
        if len(found) > self.device_rows:
            raise ValueError(
                f"A batch reads {len(found)} different rows, and the table has device_rows="
                f"{self.device_rows} slots. Give it more, or make batches smaller."
            )
        return found, inverse.reshape(ids.shape).astype(np.int32)

    def pull(self, plan: SlotPlan, inverse: np.ndarray) -> PulledPlan:
        """Take rows out of RAM; waits for those that are on their way there."""
        self._wait(plan.waits_for)
        rows = np.zeros((len(plan.missing), self.layout.num_words), np.uint32)
        rows[plan.in_ram] = self._ram[plan.from_ram]
        dirty = self._ram_dirty[plan.dumped_slots]
        return PulledPlan(
            plan, inverse, rows, plan.dumped[dirty], self._ram[plan.dumped_slots[dirty]]
        )

    def load(
        self, pulled: PulledPlan, *, room_for_all: bool = False, batch: Sharding | None = None
    ) -> LoadedPlan:
        """Write rows to the disk, fetch others or make them, and send all that the batch needs.

        `room_for_all`: the lookup is as long as the batch has ids, however many of them differ. `batch`: how
        a batch lies, and so the places of its ids; None: where the slots are.
        """
        plan, rows = pulled.plan, pulled.rows
        if len(pulled.dumped):
            self.store.put(pulled.dumped, pulled.dumped_rows.view(np.uint64))
        mine = np.ones(len(rows), bool) if self._share is None else self._share.owned(plan.missing)
        wanted = np.flatnonzero(mine & ~plan.in_ram)
        found = 0
        if len(wanted):
            rows[wanted], is_there = self._from_disk(plan.missing[wanted])
            found = int(is_there.sum())
        if self._share is not None and len(rows):
            rows = self._share.rows(plan.number, plan.missing, plan.targets, rows[mine])
        counts = self.counts
        counts.batches += 1
        counts.on_device += len(plan.slots) - len(plan.missing)
        counts.in_ram += len(plan.from_ram)
        counts.on_disk += found
        counts.new += len(wanted) - found
        counts.dumped += len(pulled.dumped)
        size = padded_size(max(len(plan.missing), len(plan.evicted)))
        put = partial(_put, sharding=self._sharding)
        most = min(pulled.inverse.size, self.device_rows)
        length = most if room_for_all else padded_size(len(plan.slots))
        lookup = Lookup(
            slots=put(self._padded(plan.slots, length)),
            inverse=_put(pulled.inverse, sharding=batch or self._sharding),
            is_often=put(np.pad(plan.is_often, (0, length - len(plan.slots)))),
        )
        if not len(plan.missing):
            return LoadedPlan(plan, lookup, None, None, None)
        padded = np.zeros((size, rows.shape[1]), np.uint32)
        padded[: len(rows)] = rows
        return LoadedPlan(
            plan,
            lookup,
            put(padded),
            put(self._padded(plan.targets, size)),
            put(self._padded(plan.evicted_slots, size)) if len(plan.evicted) else None,
        )

    def place(self, loaded: LoadedPlan) -> tuple[Lookup, EvictedRows]:
        """Put a batch's rows into their slots; returns where they are, and what has left for them."""
        plan, evicted = loaded.plan, None
        if loaded.evicted_slots is not None:
            self.slots, evicted = _swapped(
                self.slots, loaded.evicted_slots, loaded.targets, loaded.rows
            )
        elif loaded.rows is not None:
            self.slots = _filled(self.slots, loaded.targets, loaded.rows)
        is_dirty = self._device_dirty[plan.evicted_slots]
        self._device_ids[plan.targets] = plan.missing
        self._device_dirty[plan.slots] = True
        self._ram_ids[plan.from_ram] = NOBODY
        self._placed = plan.number
        return loaded.lookup, EvictedRows(plan, evicted, is_dirty)

    def write_back(self, evicted: EvictedRows) -> None:
        """Have rows that left the device arrive in RAM."""
        plan = evicted.plan
        if evicted.rows is not None:
            targets = plan.evicted_targets
            rows, kept = np.asarray(evicted.rows)[: len(plan.evicted)], plan.is_kept
            self._ram[targets] = rows if kept.all() else rows[kept]
            self._ram_ids[targets] = plan.evicted[kept]
            self._ram_dirty[targets] = evicted.is_dirty[kept]
        with self._arrived:
            self._written = plan.number
            self._arrived.notify_all()

    def _wait(self, number: int) -> None:
        with self._arrived:
            if self._written >= number or self._stopped:
                self._raise_if_stopped()
                return
            start_s = self._clock.now()
            self._arrived.wait_for(lambda: self._written >= number or self._stopped)
            self.counts.waits += 1
            self.counts.waited_s += self._clock.now() - start_s
            self._raise_if_stopped()

    def _raise_if_stopped(self) -> None:
        if self._stopped:
            raise RuntimeError(f"No rows will come any more: {self._stopped}.")

    def _padded(self, slots: np.ndarray, size: int) -> np.ndarray:
        """Slots, and behind them numbers that no slot has, each once."""
        padded = np.arange(self.device_rows, self.device_rows + size, dtype=np.int32)
        padded[: len(slots)] = slots
        return padded

    def _from_disk(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows of ids that are neither on the device nor in RAM, and which of them were on the disk."""
        got = self.store.get(ids)
        if got.found.all():
            return got.rows.view(np.uint32), got.found
        rows = np.empty((len(ids), self.layout.num_words), np.uint32)
        rows[got.found] = got.rows.view(np.uint32)
        rows[~got.found] = self.initial(ids[~got.found])
        return rows, got.found

    def initial(self, ids: Int64[np.ndarray, " n"]) -> UInt32[np.ndarray, "n words"]:
        """The rows that ids begin with."""
        values = initial_values(ids, self.dim, seed=self._seed, scale=self._scale)
        fields = {EMBEDDING: values, **self.optimizer.begin()}
        return self.layout.pack_host(fields, len(ids))

    # -- what the table holds ------------------------------------------------------------------------

    def read(self, ids: Int[np.ndarray, " n"]) -> Float32[np.ndarray, "n dim"]:
        """The embeddings of ids, wherever they are; nothing moves. Called between batches, like `save`."""
        fields = self.layout.unpack_host(self.rows(ids))
        return fields[EMBEDDING].astype(np.float32)

    def rows(self, ids: Int[np.ndarray, " n"]) -> UInt32[np.ndarray, "n words"]:
        """Whole rows of ids, as of the last batch that was placed and trained.

        Processes that share the table come here together, each with ids of its own.
        """
        ids = self.checked(ids)
        self._wait(self._placed)
        different, inverse = np.unique(ids, return_inverse=True)
        rows = np.empty((len(different), self.layout.num_words), np.uint32)
        here, slots = _held(self._device_ids, different)
        rows[here] = self._fetched(slots)
        if self._share is None:
            rows[~here] = self._kept(different[~here])
        else:
            self._num_asked += 1
            rows[~here] = self._share.asked(self._num_asked, different[~here], self._kept)
        return rows[inverse]

    def _kept(self, ids: Int64[np.ndarray, " n"]) -> UInt32[np.ndarray, "n words"]:
        """Rows of ids that are not on the device."""
        rows = np.empty((len(ids), self.layout.num_words), np.uint32)
        here, slots = _held(self._ram_ids, ids)
        rows[here] = self._ram[slots]
        rows[~here] = self._from_disk(ids[~here])[0]
        return rows

    def _fetched(self, slots: np.ndarray) -> UInt32[np.ndarray, "n words"]:
        """Copies of the device's rows."""
        if self.slots.is_deleted():
            raise RuntimeError(
                "The device's rows are gone: a step that was given them has failed, or its result was not "
                "given to `trained`. Open the table again; it is as it was saved last."
            )
        parts = [np.empty((0, self.layout.num_words), np.uint32)]
        copy = self.slots.addressable_data(0)  # of several processes, each asks for other rows
        for start in range(0, len(slots), FETCHED_AT_ONCE):
            some = slots[start : start + FETCHED_AT_ONCE].astype(np.int32)
            wanted = self._padded(some, padded_size(len(some)))
            rows = _gathered(copy, jax.device_put(wanted, copy.sharding))
            parts.append(np.asarray(rows)[: len(some)])
        return np.concatenate(parts)

    def save(self, about: Mapping[str, Any] | None = None, *, keep: Collection[int] = ()) -> int:
        """Put every row that has changed on the disk for good, and commit; returns the commit's number.

        Of the commits before, those of `keep` stay beside the newest ones.
        `about` is found as `saved` when the table is opened again. Call it between batches: the rows are
        as of the last one that was trained. Batches that are already on their way go on.
        """
        self._wait(self._placed)
        for holders, dirty, take in (
            (self._ram_ids, self._ram_dirty, self._ram.__getitem__),
            (self._device_ids, self._device_dirty, self._fetched),
        ):
            slots = np.flatnonzero(dirty & (holders != NOBODY))
            mine = slots
            if self._share is not None:
                mine = slots[self._share.owned(holders[slots])]
            for start in range(0, len(mine), FETCHED_AT_ONCE):
                some = mine[start : start + FETCHED_AT_ONCE]
                self.store.put(holders[some], take(some).view(np.uint64))
            dirty[slots] = False
        return self.store.commit({**self.about, "with": dict(about or {})}, keep=keep)


def _put(x: np.ndarray, *, sharding: Sharding) -> Array:
    """An array that every process has whole, on its devices."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    with jax.transfer_guard("allow"):  # it is meant
        return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


def _held(holders: np.ndarray, ids: Int64[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray]:
    """Which of ids some slot holds, and the slots of those."""
    slots = np.flatnonzero(holders != NOBODY)
    order = slots[np.argsort(holders[slots], kind="stable")]
    if not len(order):
        return np.zeros(len(ids), bool), order
    at = np.minimum(np.searchsorted(holders[order], ids), len(order) - 1)
    here = holders[order[at]] == ids
    return here, order[at[here]]


@partial(jax.jit, donate_argnums=0)
def _swapped(slots: Array, evicted: Array, targets: Array, rows: Array) -> tuple[Array, Array]:
    """Slots with other rows in some of them, and the rows that leave."""
    leaving = slots.at[evicted].get(mode="clip")
    return slots.at[targets].set(rows, mode="drop", unique_indices=True), leaving


@partial(jax.jit, donate_argnums=0)
def _filled(slots: Array, targets: Array, rows: Array) -> Array:
    return slots.at[targets].set(rows, mode="drop", unique_indices=True)


@jax.jit
def _gathered(slots: Array, wanted: Array) -> Array:
    return slots.at[wanted].get(mode="clip")
