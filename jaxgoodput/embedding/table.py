"""A table whose rows are on the device while they are read, and otherwise in RAM or on a disk.

A batch passes through the table in steps, each of which may run on another thread: `directory.plan` decides
what moves; `pull` takes rows out of RAM; `load` reads rows from the disk, creates new ones, writes the rows
that RAM has no room for, and sends the batch's rows to the device; `place` puts them into their slots and
evicts others; `write_back` puts the evicted rows into RAM. Every step takes the batches in order, so a batch
can only ever wait for a row that an earlier batch has just evicted.

What the table reads and saves is its state after the last batch that was placed, however far ahead plans are.
"""

import contextlib
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array, Float32, Int, Int64, UInt32

from jaxgoodput._pytree import struct
from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.embedding.directory import NO_ID, Directory, SlotPlan
from jaxgoodput.embedding.hashing import initial_values
from jaxgoodput.embedding.optimizers import RowOptimizer
from jaxgoodput.embedding.peers import Share
from jaxgoodput.embedding.rows import DTYPES, EMBEDDING, Field, RowLayout, padded_size
from jaxgoodput.embedding.store import RowStore

FETCHED_AT_ONCE = 2**16  # rows copied from the device in one piece
FORMAT = 1


@struct
class Lookup:
    """The slots on the device of the rows that a batch reads; a step reads and writes rows with it."""

    slots: Any
    """`int32 [padded]`: the slot of each different id, then padding that is no slot."""
    inverse: Any
    """`int32` with the shape of the ids: the index into `slots` of each id."""
    is_often: Any = ()
    """`bool [padded]`: whether a large share of the batches reads the row (see `TieredTable.often`)."""


@dataclass(frozen=True)
class PulledPlan:
    """A plan, and the rows that `pull` took out of RAM for it."""

    plan: SlotPlan
    inverse: np.ndarray
    rows: UInt32[np.ndarray, "missing words"]
    """Rows of the missing ids; the ones that were not in RAM are still zero."""
    dumped: Int64[np.ndarray, " dumped"]
    """Ids whose rows have to be written to the disk, without rows that did not change."""
    dumped_rows: UInt32[np.ndarray, "dumped words"]


@dataclass(frozen=True)
class LoadedPlan:
    """A plan whose rows have been copied to the device, but are not in their slots yet."""

    plan: SlotPlan
    lookup: Lookup
    rows: Array | None
    targets: Array | None
    evicted_slots: Array | None


@dataclass(frozen=True)
class EvictedRows:
    """Rows that `place` took out of their slots; the array may not be computed yet."""

    plan: SlotPlan
    rows: Array | None
    is_dirty: np.ndarray


@dataclass
class Counts:
    """How many rows batches have read since the table was opened, by the tier that they were found in.

    If several processes share the table, `on_disk` and `new` count the rows that this process owns.
    """

    batches: int = 0
    """Batches that were loaded."""
    on_device: int = 0
    in_ram: int = 0
    on_disk: int = 0
    new: int = 0
    """Rows that no tier had, so that they got their initial values."""
    dumped: int = 0
    """Rows that were written from RAM to the disk, to make room."""
    waits: int = 0
    """Batches that waited for a row that another batch had just evicted."""
    waited_s: float = 0.0
    """Seconds that these batches waited."""
    lost: dict[str, int] = field(default_factory=dict)
    """Values that are not finite, by field, of the rows that were written to the disk or checked."""


class TierRows:
    """Which row each slot of a tier holds after the last placed batch, and whether the disk has it too.

    The directory is different: it is ahead, at the last planned batch.
    """

    def __init__(self, num_slots: int):
        self.ids = np.full(num_slots, NO_ID, np.int64)
        self.dirty = np.zeros(num_slots, bool)

    def find(self, ids: Int64[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray]:
        """Return whether each id is in this tier, and the slots of the ids that are."""
        slots = np.flatnonzero(self.ids != NO_ID)
        order = slots[np.argsort(self.ids[slots], kind="stable")]
        if not len(order):
            return np.zeros(len(ids), bool), order
        at = np.minimum(np.searchsorted(self.ids[order], ids), len(order) - 1)
        here = self.ids[order[at]] == ids
        return here, order[at[here]]


class Arrivals:
    """The newest batch whose evicted rows have arrived in RAM; threads can wait for a batch. Thread-safe."""

    def __init__(self):
        self.newest = -1
        self._changed = threading.Condition()
        self._stopped: str | None = None

    def arrived(self, number: int) -> None:
        """Record that the rows which batch `number` evicted from the device are in RAM."""
        with self._changed:
            self.newest = number
            self._changed.notify_all()

    def stop(self, why: str | None) -> None:
        """Make all waits raise RuntimeError, also the current ones; None allows waiting again."""
        with self._changed:
            self._stopped = why
            self._changed.notify_all()

    def wait(self, number: int, clock: Clock) -> float | None:
        """Wait until the rows that batch `number` evicted are in RAM; return the seconds that it took.

        None if they were there already. Raises RuntimeError once `stop` was called with a reason.
        """
        with self._changed:
            waited_s = None
            if self.newest < number and not self._stopped:
                start_s = clock.now()
                self._changed.wait_for(lambda: self.newest >= number or self._stopped)
                waited_s = clock.now() - start_s
            if self._stopped:
                raise RuntimeError(f"The rows of this batch will not arrive: {self._stopped}.")
            return waited_s


class TieredTable:
    """A table of rows by id that may be larger than the device, and larger than RAM. A context manager.

    `device_rows` slots on the device hold the rows of the current batches and the most frequently read
    others. `ram_rows` more are in RAM, and the rest is in `folder`. A row that was never read takes no space
    anywhere: it starts as a hash of its id.

    Args:
      folder: folder of the rows on disk.
      dim: elements of an embedding.
      optimizer: update rule of the rows.
      device_rows: slots on the device.
      ram_rows: rows in RAM, at least `device_rows`, unless the device has room for all rows.
      num_rows: limit of ids; None = any 63-bit number.
      dtype: "float32" or "bfloat16", of the embeddings.
      scale: a row starts uniform in -scale to scale.
      seed: seed of the initial values.
      half_life: batches after which a read counts half as much in the choice of the rows that stay.
      device: the device of the slots, or a sharding over all devices that hold a copy of them.
      clock: measures waits.
      at: commit to open; None = the newest.
      checks_rows: whether to verify every row on the disk now.
      share: this process's part, if several processes train with the table and name the same ids in every
        batch. RAM and `folder` of each process then hold the rows that it owns; slots are the same in all.
      store: further arguments of `RowStore`.

    Raises:
      ValueError: sizes are inconsistent, or the folder holds another table.
      InUse: another process holds the folder.
      DamagedError: a file in the folder is damaged. The message names the file and the last whole commit.
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
                f"ram_rows={ram_rows} is less than device_rows={device_rows}, but one batch may evict all "
                "rows of the device to RAM. Set ram_rows to at least device_rows."
            )
        if dim < 1 or device_rows < 1 or dtype not in DTYPES:
            raise ValueError(
                f"dim={dim} and device_rows={device_rows} must be at least 1, and dtype={dtype!r} must be "
                f"{' or '.join(map(repr, DTYPES))}."
            )
        self.dim, self.num_rows = dim, num_rows
        self.optimizer = optimizer
        self.layout = RowLayout((Field(EMBEDDING, dim, dtype), *optimizer.fields(dim)))
        self.device_rows, self.ram_rows = device_rows, ram_rows
        self.counts = Counts()
        self._initial: dict[str, Any] = {"seed": seed, "scale": scale}
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
            folder, row_bytes=4 * words, num_ids=num_rows, at=at, checks_rows=checks_rows, **store
        )
        with contextlib.ExitStack() as undo:
            undo.callback(self.store.close)
            self._check_same_table()
            self.slots: Array = jnp.zeros((device_rows, words), jnp.uint32, device=self._sharding)
            """Device rows, `uint32 [slots, words]`. A step that updates them returns new ones."""
            self._ram = np.zeros((ram_rows, words), np.uint32)  # untouched pages take no memory
            undo.pop_all()
        self._on_device, self._in_ram = TierRows(device_rows), TierRows(ram_rows)
        self._placed = -1
        self._arrivals = Arrivals()

    def __enter__(self) -> "TieredTable":
        """Return the table."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder. Changes that were not saved are lost."""
        self.stop("the table was closed")
        self.store.close()

    def stop(self, why: str) -> None:
        """Wake all threads that wait for rows; they raise RuntimeError, and so do waits until `settle`."""
        self._arrivals.stop(why)

    def settle(self) -> None:
        """Forget the plans of batches after the last one placed, so that planning can start from there.

        If rows that left the device for that batch were not written back, waits for rows raise RuntimeError
        from now on.
        """
        lost = self._arrivals.newest < self._placed
        self._arrivals.stop(
            f"the rows that left the device for batch {self._placed} were not written back. Open the table "
            "again; it is as it was saved last"
            if lost
            else None
        )
        self.directory = self.directory.settled(self._on_device.ids, self._in_ram.ids, self._placed)

    @property
    def often(self) -> float:
        """The share of batches above which `Lookup.is_often` is true for a row that they read."""
        return self.directory.often

    @often.setter
    def often(self, share: float) -> None:
        self.directory.often = share

    @property
    def about(self) -> dict[str, Any]:
        """The properties of the table that a commit stores, and that must be equal when it is reopened."""
        fields = [[f.name, f.width, f.dtype] for f in self.layout.fields]
        return {"format": FORMAT, "fields": fields, **self._initial}

    @property
    def saved(self) -> Mapping[str, Any]:
        """The metadata of the commit that was opened, or of the last `save` since."""
        return self.store.newest.about.get("with", {}) if self.store.newest else {}

    @property
    def lost(self) -> dict[str, int]:
        """How many values that are not finite were found in rows, by field; see `Counts.lost`."""
        return self.counts.lost

    def commits(self) -> dict[int, Mapping[str, Any]]:
        """Return the metadata of every readable commit by number, newest first."""
        return {n: about.get("with", {}) for n, about in self.store.commits().items()}

    def _check_same_table(self) -> None:
        if self.store.newest is None:
            return
        there = {name: self.store.newest.about.get(name) for name in self.about}
        if there != self.about:
            raise ValueError(
                f"{self.store.folder} holds a table that was made with {there}, but it was opened with "
                f"{self.about}. Open it with the same dim, optimizer, dtype, seed and scale, or use another "
                "folder."
            )

    # -- the steps of a batch ------------------------------------------------------------------------

    def checked(self, ids: Any) -> np.ndarray:
        """Return ids as int64. Raises TypeError or ValueError if one is not an id of this table."""
        ids = np.asarray(ids)
        if ids.dtype.kind not in "iu":
            raise TypeError(
                f"ids have dtype {ids.dtype}, but must be integers from 0 to num_rows - 1. Hash or enumerate "
                "other kinds of key."
            )
        limit = self.num_rows if self.num_rows is not None else 2**63 - 2
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= limit):
            first = np.flatnonzero((ids.ravel() < 0) | (ids.ravel() >= limit))[0]
            place = tuple(map(int, np.unravel_index(first, ids.shape)))
            raise ValueError(
                f"id {ids.ravel()[first]} at {place} of the batch is not in 0 to {limit - 1}. Nothing was "
                "changed. Give the table more rows, or map the ids to smaller ones."
            )
        return ids.astype(np.int64)

    def unique(self, ids: Any) -> tuple[Int64[np.ndarray, " unique"], np.ndarray]:
        """Return the different ids of a batch in ascending order, and the index of each id among them."""
        ids = self.checked(ids)
        found, inverse = np.unique(ids, return_inverse=True)
        if len(found) > self.device_rows:
            raise ValueError(
                f"A batch reads {len(found)} different rows, but the table has only device_rows="
                f"{self.device_rows} slots. Increase device_rows, or make batches smaller."
            )
        return found, inverse.reshape(ids.shape).astype(np.int32)

    def pull(self, plan: SlotPlan, inverse: np.ndarray) -> PulledPlan:
        """Take a plan's rows out of RAM, after waiting for rows that are still on their way there."""
        waited_s = self._arrivals.wait(plan.waits_for, self._clock)
        if waited_s is not None:
            self.counts.waits += 1
            self.counts.waited_s += waited_s
        rows = np.zeros((len(plan.missing), self.layout.num_words), np.uint32)
        rows[plan.in_ram] = self._ram[plan.from_ram]
        dirty = self._in_ram.dirty[plan.dumped_slots]
        return PulledPlan(
            plan, inverse, rows, plan.dumped[dirty], self._ram[plan.dumped_slots[dirty]]
        )

    def load(
        self, pulled: PulledPlan, *, room_for_all: bool = False, batch: Sharding | None = None
    ) -> LoadedPlan:
        """Write dumped rows to the disk, read or create missing ones, and send the batch's to the device.

        `room_for_all` makes the lookup as long as the batch has ids, however many differ. `batch` is the
        sharding of the batch, and so of `Lookup.inverse`; None = like the slots.
        """
        plan = pulled.plan
        if len(pulled.dumped):
            self._to_disk(pulled.dumped, pulled.dumped_rows)
        rows = self._completed(pulled)
        # Arrays are padded to few sizes, so that few programs are compiled.
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

    def _completed(self, pulled: PulledPlan) -> UInt32[np.ndarray, "missing words"]:
        """Return all rows that the device lacks: from RAM, disk or their owners, or new. Counts each kind."""
        plan, rows, share = pulled.plan, pulled.rows, self._share
        mine = np.ones(len(rows), bool) if share is None else share.owned(plan.missing)
        wanted = np.flatnonzero(mine & ~plan.in_ram)
        found = 0
        if len(wanted):
            rows[wanted], is_there = self._from_disk(plan.missing[wanted])
            found = int(is_there.sum())
        if share is not None and len(rows):
            rows = share.rows(plan.number, plan.missing, plan.targets, rows[mine])
        counts = self.counts
        counts.batches += 1
        counts.on_device += len(plan.slots) - len(plan.missing)
        counts.in_ram += len(plan.from_ram)
        counts.on_disk += found
        counts.new += len(wanted) - found
        counts.dumped += len(pulled.dumped)
        return rows

    def place(self, loaded: LoadedPlan) -> tuple[Lookup, EvictedRows]:
        """Put a batch's rows into their slots; return the lookup, and the rows that were evicted for them."""
        plan, evicted = loaded.plan, None
        if loaded.evicted_slots is not None:
            self.slots, evicted = _swapped(
                self.slots, loaded.evicted_slots, loaded.targets, loaded.rows
            )
        elif loaded.rows is not None:
            self.slots = _filled(self.slots, loaded.targets, loaded.rows)
        # Read before it is overwritten: evicted rows leave the slots that the missing ones take.
        is_dirty = self._on_device.dirty[plan.evicted_slots]
        self._on_device.ids[plan.targets] = plan.missing
        self._on_device.dirty[plan.slots] = True
        self._in_ram.ids[plan.from_ram] = NO_ID
        self._placed = plan.number
        return loaded.lookup, EvictedRows(plan, evicted, is_dirty)

    def write_back(self, evicted: EvictedRows) -> None:
        """Put rows that were evicted from the device into RAM, and wake threads that wait for them."""
        plan = evicted.plan
        if evicted.rows is not None:
            targets = plan.evicted_targets
            rows, kept = jax.device_get(evicted.rows)[: len(plan.evicted)], plan.is_kept
            self._ram[targets] = rows if kept.all() else rows[kept]
            self._in_ram.ids[targets] = plan.evicted[kept]
            self._in_ram.dirty[targets] = evicted.is_dirty[kept]
        self._arrivals.arrived(plan.number)

    def _padded(self, slots: np.ndarray, size: int) -> np.ndarray:
        """Return `size` numbers: the slots, then different numbers that are no slots of the device."""
        padded = np.arange(self.device_rows, self.device_rows + size, dtype=np.int32)
        padded[: len(slots)] = slots
        return padded

    def _from_disk(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return rows that are in no other tier, new ones if need be, and whether each was on the disk."""
        got = self.store.get(ids)
        if got.found.all():
            return got.rows.view(np.uint32), got.found
        rows = np.empty((len(ids), self.layout.num_words), np.uint32)
        rows[got.found] = got.rows.view(np.uint32)
        rows[~got.found] = self.initial(ids[~got.found])
        return rows, got.found

    def initial(self, ids: Int64[np.ndarray, " n"]) -> UInt32[np.ndarray, "n words"]:
        """Return the rows that these ids have before any training."""
        values = initial_values(ids, self.dim, **self._initial)
        fields = {EMBEDDING: values, **self.optimizer.begin()}
        return self.layout.pack_host(fields, len(ids))

    def _to_disk(self, ids: Int64[np.ndarray, " n"], rows: UInt32[np.ndarray, "n words"]) -> None:
        """Write rows to the disk, and note if they hold values that are not finite."""
        self._note_lost(ids, rows)
        self.store.put(ids, rows.view(np.uint64))

    def check_slots(self) -> None:
        """Note in `lost` if rows on the device hold values that are not finite. Call it between batches."""
        slots = np.flatnonzero(self._on_device.ids != NO_ID)
        for start in range(0, len(slots), FETCHED_AT_ONCE):
            some = slots[start : start + FETCHED_AT_ONCE]
            self._note_lost(self._on_device.ids[some], self._fetched(some))

    def _note_lost(self, ids: Int64[np.ndarray, " n"], rows: UInt32[np.ndarray, "n words"]) -> None:
        for name, x in self.layout.unpack_host(rows).items():
            if not jnp.issubdtype(x.dtype, jnp.inexact) or (is_finite := np.isfinite(x)).all():
                continue
            row = int(ids[np.argmin(is_finite.all(axis=1))])
            what = next((key for key in self.lost if key.startswith(f"{name} ")), None)
            what = what or f"{name} from row {row} on"
            self.lost[what] = self.lost.get(what, 0) + int(np.sum(~is_finite))

    # -- what the table holds ------------------------------------------------------------------------

    def read(self, ids: Int[np.ndarray, " n"]) -> Float32[np.ndarray, "n dim"]:
        """Return the embeddings of ids, whatever tier they are in; nothing moves. Call it between batches."""
        fields = self.layout.unpack_host(self.rows(ids))
        return fields[EMBEDDING].astype(np.float32)

    def rows(self, ids: Int[np.ndarray, " n"]) -> UInt32[np.ndarray, "n words"]:
        """Return whole rows, including optimizer state, after the last batch that was placed and trained.

        Processes that share the table must call this together; each may pass other ids.
        """
        ids = self.checked(ids)
        self._arrivals.wait(self._placed, self._clock)
        different, inverse = np.unique(ids, return_inverse=True)
        rows = np.empty((len(different), self.layout.num_words), np.uint32)
        here, slots = self._on_device.find(different)
        rows[here] = self._fetched(slots)
        if self._share is None:
            rows[~here] = self._below_device(different[~here])
        else:
            self._num_asked += 1
            rows[~here] = self._share.asked(self._num_asked, different[~here], self._below_device)
        return rows[inverse]

    def _below_device(self, ids: Int64[np.ndarray, " n"]) -> UInt32[np.ndarray, "n words"]:
        """Return the rows of ids that are not on the device: from RAM, from the disk, or new ones."""
        rows = np.empty((len(ids), self.layout.num_words), np.uint32)
        here, slots = self._in_ram.find(ids)
        rows[here] = self._ram[slots]
        rows[~here] = self._from_disk(ids[~here])[0]
        return rows

    def _fetched(self, slots: np.ndarray) -> UInt32[np.ndarray, "n words"]:
        """Return copies on the host of the rows in these device slots; RuntimeError if they are lost."""
        if self.slots.is_deleted():
            raise RuntimeError(
                "The device's rows are lost: a step that they were donated to has failed, or its result was "
                "not given to `trained`. Open the table again; it is as it was saved last."
            )
        parts = [np.empty((0, self.layout.num_words), np.uint32)]
        copy = self.slots.addressable_data(0)  # a local copy: processes may ask for different rows
        for start in range(0, len(slots), FETCHED_AT_ONCE):
            some = slots[start : start + FETCHED_AT_ONCE].astype(np.int32)
            wanted = self._padded(some, padded_size(len(some)))
            rows = _gathered(copy, jax.device_put(wanted, copy.sharding))
            parts.append(jax.device_get(rows)[: len(some)])
        return np.concatenate(parts)

    def save(self, about: Mapping[str, Any] | None = None, *, keep: Collection[int] = ()) -> int:
        """Write every row that has changed to the disk, commit, and return the commit's number.

        Call it between batches: rows are saved as the last trained batch left them, and batches that are
        being prepared continue. `about` is metadata, which `saved` returns when the table is opened again.
        Commits that `keep` names stay beside the newest ones. Raises RuntimeError, and commits nothing, if a
        row holds a value that is not finite (`lost`).
        """
        self._arrivals.wait(self._placed, self._clock)
        for tier, take in ((self._in_ram, self._ram.__getitem__), (self._on_device, self._fetched)):
            # The device slots of all processes hold the same rows, but only its owner saves a row.
            slots = np.flatnonzero(tier.dirty & (tier.ids != NO_ID))
            mine = slots
            if self._share is not None:
                mine = slots[self._share.owned(tier.ids[slots])]
            for start in range(0, len(mine), FETCHED_AT_ONCE):
                some = mine[start : start + FETCHED_AT_ONCE]
                self._to_disk(tier.ids[some], take(some))
            tier.dirty[slots] = False
        if self.lost:
            raise RuntimeError(
                f"rows hold values that are not finite, so they are not committed: {self.lost}. Open the "
                "table again; it is as it was saved last."
            )
        return self.store.commit({**self.about, "with": dict(about or {})}, keep=keep)


def _put(x: np.ndarray, *, sharding: Sharding) -> Array:
    """Put an array that every process has whole onto the devices of `sharding`."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    with jax.transfer_guard("allow"):  # this transfer is intended
        return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


@partial(jax.jit, donate_argnums=0)
def _swapped(slots: Array, evicted: Array, targets: Array, rows: Array) -> tuple[Array, Array]:
    """Return slots into which new rows were put, and the rows that were there before."""
    leaving = slots.at[evicted].get(mode="clip")
    return slots.at[targets].set(rows, mode="drop", unique_indices=True), leaving


@partial(jax.jit, donate_argnums=0)
def _filled(slots: Array, targets: Array, rows: Array) -> Array:
    return slots.at[targets].set(rows, mode="drop", unique_indices=True)


@jax.jit
def _gathered(slots: Array, wanted: Array) -> Array:
    return slots.at[wanted].get(mode="clip")
