"""Decides which tier each row of a table is in, and what a batch moves, before anything moves.

A directory plans batch after batch as if each plan were carried out at once. Plans may be carried out later,
at any pace, as long as their order stays: every row is then where the plan says. Nothing here reads a row, a
clock or a device.

A row is in one tier at a time. A batch's rows go to device slots. To make room, the coldest rows are evicted
to RAM, and from there, if RAM is full, dumped to the disk. The heat of a row is the logarithm of its reads,
each of which counts half as much after `half_life` batches: least frequently used with aging, and least
recently used among rows that were read once. Rows that a batch of the look-ahead reads stay.

If several processes share a table, each has a directory of the device slots, which are the same in all, and
of its own part of RAM. They exchange the heats of arriving rows. Decisions must then be the same on every
processor: ties are broken by slot, and heat uses only sums, products and a lookup table.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64

from jaxgoodput.embedding.index import MISSING, index_for
from jaxgoodput.embedding.peers import Share

NO_ID = -1
NEVER = -1
# 1 in 16 slots is queued for eviction at once, because finding the coldest reads the heat of all slots.
SHARE_QUEUED = 16
PER_UNIT, FARTHEST = (
    256,
    40,
)  # table entries per unit of heat; gap beyond which a read changes nothing
# log2(1 + 2**-gap) by gap, rounded because the last bits depend on the C library. No entry is near a
# rounding edge.
_ADDED = np.round(np.log2(1 + np.exp2(-np.arange(FARTHEST * PER_UNIT + 2) / PER_UNIT)) * 2**30)
_ADDED /= 2**30


def warmer(heat: Float64[np.ndarray, " n"], read: float) -> Float64[np.ndarray, " n"]:
    """Return log2(2**heat + 2**read) to 6 places: the heat of a row after another read.

    The bits are the same on every processor.

    >>> warmer(np.array([3.0, -np.inf]), 3.0).tolist()
    [4.0, 3.0]
    """
    gap = np.minimum(np.abs(heat - read), FARTHEST) * PER_UNIT
    place = gap.astype(np.int64)
    low, high = _ADDED[place], _ADDED[place + 1]
    return np.maximum(heat, read) + (low + (gap - place) * (high - low))


@dataclass(frozen=True)
class SlotPlan:
    """What one batch needs of a table: which rows to move between tiers, and the slots of its rows."""

    number: int
    """Number of the batch, from 0."""
    slots: Int32[np.ndarray, " unique"]
    """Device slots of the batch's rows, after the missing ones have arrived."""
    is_often: Bool[np.ndarray, " unique"]
    """Whether a large share of recent batches has read the row."""
    missing: Int64[np.ndarray, " missing"]
    """Ids whose rows have to be moved to the device."""
    targets: Int32[np.ndarray, " missing"]
    """Device slots that the missing rows are moved to."""
    in_ram: Bool[np.ndarray, " missing"]
    """Whether each missing row is in RAM; otherwise it is on the disk, or new."""
    from_ram: Int64[np.ndarray, " in_ram"]
    """RAM slots of the missing rows that are in RAM."""
    evicted: Int64[np.ndarray, " evicted"]
    """Ids whose rows are evicted from the device."""
    evicted_slots: Int32[np.ndarray, " evicted"]
    """Device slots of the evicted rows, all of them among `targets`."""
    is_kept: Bool[np.ndarray, " evicted"]
    """Whether this process owns the evicted row and keeps it in RAM."""
    evicted_targets: Int64[np.ndarray, " kept"]
    """RAM slots of the evicted rows that are kept."""
    dumped: Int64[np.ndarray, " dumped"]
    """Ids whose rows are moved from RAM to the disk before an evicted row takes their slot."""
    dumped_slots: Int64[np.ndarray, " dumped"]
    """RAM slots of the dumped rows."""
    waits_for: int
    """Newest batch whose evicted rows must be in RAM before this plan reads RAM; -1 = none."""


class Tier:
    """The row slots of one tier (device or RAM): which row each holds, its heat, and until when it stays."""

    def __init__(self, num_slots: int, num_ids: int | None):
        self.index = index_for(num_ids, num_slots)
        self.num_slots = num_slots
        self.ids = np.full(num_slots, NO_ID, np.int64)
        self.heat = np.full(num_slots, -np.inf)
        # Newest batch of the look-ahead that reads it.
        self.needed = np.full(num_slots, NEVER, np.int64)
        self.last = np.full(num_slots, NEVER, np.int64)  # newest planned batch that reads it
        self.num_free = num_slots
        self._free = np.arange(num_slots - 1, -1, -1)
        # Slots in order of eviction, with the heat that they had when they were queued.
        self._queue, self._queue_heat = np.empty(0, np.int64), np.empty(0)

    def find(self, ids: Int64[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray]:
        """Return whether each id is in this tier, and the slots of the ids that are."""
        numbers = self.index.get(ids)
        here = numbers != MISSING
        return here, numbers[here].astype(np.int64)

    def place(self, slots: np.ndarray, ids: np.ndarray, heat: np.ndarray, number: int) -> None:
        """Record that batch `number` moves rows into these slots, which `take_free` has returned."""
        self.index.put(ids, slots.astype(np.uint32))
        self.ids[slots], self.heat[slots] = ids, heat
        self.needed[slots] = self.last[slots] = number

    def occupy(self, slots: np.ndarray, ids: np.ndarray, heat: np.ndarray, number: int) -> None:
        """Record which rows fill a tier that was empty; their slots may be any."""
        free = np.ones(self.num_slots, bool)
        free[slots] = False
        self.num_free = self.num_slots - len(slots)
        self._free[: self.num_free] = np.flatnonzero(free)
        self.place(slots, ids, heat, number)

    def release(self, slots: np.ndarray) -> None:
        """Remove the rows in these slots from the tier, which frees the slots."""
        self._leave(slots)
        self._free[self.num_free : self.num_free + len(slots)] = slots
        self.num_free += len(slots)

    def take_free(self, count: int) -> Int64[np.ndarray, " n"]:
        """Take up to `count` free slots, and return them."""
        count = min(count, self.num_free)
        self.num_free -= count
        return self._free[self.num_free : self.num_free + count].copy()

    def victims(self, count: int, now: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Remove the `count` coldest rows; return their slots, which the caller takes, ids and heats.

        Rows that batch `now` reads stay. Rows that only later batches read are evicted if others are too few.
        """
        parts = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]
        while count > 0:
            if not len(self._queue):
                self._queue = queue = self._coldest(count, now)
                self._queue_heat = self.heat[queue]
                if (self.needed[queue] >= now).any():  # too few others: these may be evicted too
                    self.needed[queue] = NEVER
            # The queue may be old. Skip slots that are empty by now, whose row was read since (its heat is
            # another), or whose row a batch needs.
            slots, heat = self._queue[:count], self._queue_heat[:count]
            self._queue, self._queue_heat = self._queue[count:], self._queue_heat[count:]
            unread = (self.ids[slots] != NO_ID) & (self.heat[slots] == heat)
            good = slots[unread & (self.needed[slots] < now)]
            parts.append((good, self.ids[good], self.heat[good]))
            self._leave(good)
            count -= len(good)
        slots, ids, heats = (np.concatenate(part) for part in zip(*parts, strict=True))
        return slots, ids, heats

    def _coldest(self, count: int, now: int) -> Int64[np.ndarray, " n"]:
        """Return at least `count` slots, if so many rows may be evicted, the least used rows first."""
        slots = np.flatnonzero((self.ids != NO_ID) & (self.needed < now))
        if len(slots) < count:
            # The look-ahead reads more rows than there is room for: evict the ones needed last.
            slots = np.flatnonzero((self.ids != NO_ID) & (self.last < now))
            needed = self.needed[slots]
            order = np.lexsort((-needed, needed >= now))  # rows that are not needed go first
            return slots[order][:count]
        # Partition before sorting: most slots are not among the coldest.
        most = min(len(slots), max(count, self.num_slots // SHARE_QUEUED))
        heat = self.heat[slots]
        limit = np.partition(heat, most - 1)[most - 1]
        # Argpartition would pick among ties differently on other processors.
        tied = np.flatnonzero(heat == limit)
        below = np.flatnonzero(heat < limit)
        slots = slots[np.sort(np.concatenate([below, tied[: most - len(below)]]))]
        return slots[np.argsort(self.heat[slots], kind="stable")]

    def _leave(self, slots: np.ndarray) -> None:
        self.index.remove(self.ids[slots])
        self.ids[slots] = NO_ID


class Directory:
    """Plans the batches of one table, in order.

    `share` is this process's part of the table if several processes share it.
    """

    def __init__(
        self,
        *,
        device_rows: int,
        ram_rows: int,
        num_ids: int | None,
        half_life: float,
        share: Share | None = None,
    ):
        self.device, self.ram = Tier(device_rows, num_ids), Tier(ram_rows, num_ids)
        self._share, self._is_settled = share, False
        self._half_life, self._num_ids = half_life, num_ids
        # By RAM slot: the batch that evicts a row to it.
        self._written_by = np.full(ram_rows, NEVER, np.int64)
        self._ahead: list[Int64[np.ndarray, " unique"]] = []
        self._number = 0
        self.often = 0.5  # share of the batches

    def settled(
        self,
        device_ids: Int64[np.ndarray, " slots"],
        ram_ids: Int64[np.ndarray, " ram_slots"],
        placed: int,
    ) -> "Directory":
        """Return a directory that continues after batch `placed`, with the rows where they are now.

        Use this if plans after `placed` were dropped. The rows keep the heat that this directory knows.
        """
        found = Directory(
            device_rows=len(device_ids),
            ram_rows=len(ram_ids),
            num_ids=self._num_ids,
            half_life=self._half_life,
            share=self._share,
        )
        found._number, found._is_settled = placed + 1, True
        found.often = self.often
        for tier, old, ids in (
            (found.device, self.device, device_ids),
            (found.ram, self.ram, ram_ids),
        ):
            slots = np.flatnonzero(ids != NO_ID)
            heat = np.where(old.ids[slots] == ids[slots], old.heat[slots], placed / self._half_life)
            tier.occupy(slots, ids[slots], heat, placed)
        return found

    def look_ahead(self, ids: Int64[np.ndarray, " unique"]) -> None:
        """Announce the next batch by its ascending ids, so that its rows stay where they are."""
        number = self._number + len(self._ahead)
        self._ahead.append(ids)
        on_device, slots = self.device.find(ids)
        self.device.needed[slots] = number
        _, slots = self.ram.find(ids[~on_device])
        self.ram.needed[slots] = number

    def plan(self) -> SlotPlan:
        """Return how the rows of the next announced batch get into slots on the device."""
        number, ids = self._number, self._ahead.pop(0)
        self._number += 1
        heat = number / self._half_life
        device, ram, share = self.device, self.ram, self._share
        if share is not None and self._is_settled:
            # The processes had planned different numbers of batches ahead, so their heats differ.
            device.heat = share.most("heat", number, device.heat, device.ids)
            self._is_settled = False
        # 1. Which rows are on the device already, which come from RAM, and how warm they are now.
        hit, slots = device.find(ids)
        device.last[slots] = number
        device.heat[slots] = warmer(device.heat[slots], heat)
        missing = ids[~hit]
        in_ram, from_ram = ram.find(missing)
        heats = np.full(len(missing), heat)
        heats[in_ram] = warmer(ram.heat[from_ram], heat)
        if share is not None and len(missing):
            heats = share.most("coming", number, heats, missing)
        waits_for = self._written_by[from_ram].max(initial=NEVER)
        ram.release(from_ram)

        # 2. Slots on the device for the missing rows: free ones, then the slots of the coldest rows.
        free = device.take_free(len(missing))
        leaving, evicted, evicted_heats = device.victims(len(missing) - len(free), number)
        targets = np.concatenate([free, leaving])
        device.place(targets, missing, heats, number)
        # The look-ahead marked only rows that were on the device; mark the ones that have just arrived.
        for later, others in enumerate(self._ahead, number + 1):
            device.needed[targets[_within(missing, others)]] = later

        # 3. Slots in RAM for the evicted rows, with whatever has to leave RAM for them.
        is_kept = np.ones(len(evicted), bool) if share is None else share.owned(evicted)
        kept = evicted[is_kept]
        free = ram.take_free(len(kept))
        dumped_slots, dumped, _ = ram.victims(len(kept) - len(free), number)
        waits_for = int(max(waits_for, self._written_by[dumped_slots].max(initial=NEVER)))
        evicted_targets = np.concatenate([free, dumped_slots])
        ram.place(evicted_targets, kept, evicted_heats[is_kept], number)
        self._written_by[evicted_targets] = number
        all_slots = np.empty(len(ids), np.int32)
        all_slots[hit], all_slots[~hit] = slots, targets
        # Batches so far, each weighted down with its age like a read.
        decay = 2.0 ** (-1 / self._half_life)
        batches = (1 - decay ** (number + 1)) / (1 - decay)
        return SlotPlan(
            number=number,
            slots=all_slots,
            is_often=device.heat[all_slots] - heat >= np.log2(self.often * batches),
            missing=missing,
            targets=targets.astype(np.int32),
            in_ram=in_ram,
            from_ram=from_ram,
            evicted=evicted,
            evicted_slots=leaving.astype(np.int32),
            is_kept=is_kept,
            evicted_targets=evicted_targets,
            dumped=dumped,
            dumped_slots=dumped_slots,
            waits_for=waits_for,
        )


def _within(ids: np.ndarray, others: np.ndarray) -> Bool[np.ndarray, " n"]:
    """Return for each of `ids` whether it is among `others`; both are in ascending order."""
    if not len(others):
        return np.zeros(len(ids), bool)
    return others[np.minimum(np.searchsorted(others, ids), len(others) - 1)] == ids
