"""Which row is where, and what a batch has moved: decided from arrays on the host, before anything moves.

A directory plans batch after batch as if each plan were carried out at once. Whoever carries them out, in
order, at whatever pace, finds every row where the plan says: nothing here reads a row, a clock or a device.

A row is in one tier at a time. A batch's rows go to device slots; for those that come, the coldest leave to
RAM, and from there, where it is full, to the disk. Heat is the logarithm of a row's reads, each of which
counts for half as much after `half_life` batches: the least frequently used first, with age, and of rows
that were read once the least recently used. Rows that a batch of the look-ahead reads stay where they are.

Where several processes share a table, each has a directory: of the device slots, which are the same in all,
and of its own part of RAM. They tell each other how warm the rows are that come. What is decided then has to
be the same on every processor: ties are broken by slot, and heat is sums, products and a table of its own.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64

from jaxgoodput.embedding.index import MISSING, index_for
from jaxgoodput.embedding.peers import Share

NOBODY = -1
NEVER = -1
SHARE_QUEUED = (
    16  # 1 in so many slots is queued for leaving at once: to find the coldest reads all heats
)
PER_UNIT, FARTHEST = 256, 40  # places of a unit of heat, and units in which a read still counts
# log2(1 + 2**-gap) by gap. Rounded: the last bits are the C library's own. No number of it is at an edge.
_ADDED = np.round(np.log2(1 + np.exp2(-np.arange(FARTHEST * PER_UNIT + 2) / PER_UNIT)) * 2**30)
_ADDED /= 2**30


def warmer(heat: Float64[np.ndarray, " n"], read: float) -> Float64[np.ndarray, " n"]:
    """log2(2**heat + 2**read) to 6 places, with the same bits on every processor.

    >>> warmer(np.array([3.0, -np.inf]), 3.0).tolist()
    [4.0, 3.0]
    """
    gap = np.minimum(np.abs(heat - read), FARTHEST) * PER_UNIT
    place = gap.astype(np.int64)
    low, high = _ADDED[place], _ADDED[place + 1]
    return np.maximum(heat, read) + (low + (gap - place) * (high - low))


@dataclass(frozen=True)
class SlotPlan:
    """What one batch has moved in one table, and where its rows are then."""

    number: int
    """Of the batch, from 0."""
    slots: Int32[np.ndarray, " unique"]
    """Where the rows of the batch's ids are, once those that are missing have come."""
    is_often: Bool[np.ndarray, " unique"]
    """Which of them a large share of batches has read lately."""
    missing: Int64[np.ndarray, " missing"]
    """Ids whose rows have to come to the device."""
    targets: Int32[np.ndarray, " missing"]
    """The slots that they come to."""
    in_ram: Bool[np.ndarray, " missing"]
    """Which of them are in RAM; the others are on the disk, or new."""
    from_ram: Int64[np.ndarray, " in_ram"]
    """Where in RAM those are."""
    evicted: Int64[np.ndarray, " evicted"]
    """Ids whose rows leave the device for RAM."""
    evicted_slots: Int32[np.ndarray, " evicted"]
    """From where; all of these are among `targets`."""
    is_kept: Bool[np.ndarray, " evicted"]
    """Which of them RAM takes; the others are other processes'."""
    evicted_targets: Int64[np.ndarray, " kept"]
    """To where in RAM."""
    dumped: Int64[np.ndarray, " dumped"]
    """Ids whose rows leave RAM for the disk, before any evicted row is written there."""
    dumped_slots: Int64[np.ndarray, " dumped"]
    waits_for: int
    """The last batch whose evicted rows have to be in RAM before rows are taken from there; -1: none."""


class Tier:
    """The slots of one tier: whose row each holds, how warm it is, and until which batch it is needed."""

    def __init__(self, num_slots: int, num_ids: int | None):
        self.index = index_for(num_ids, num_slots)
        self.num_slots = num_slots
        self.ids = np.full(num_slots, NOBODY, np.int64)
        self.heat = np.full(num_slots, -np.inf)
        self.needed = np.full(num_slots, NEVER, np.int64)  # the last batch in sight that reads it
        self.last = np.full(num_slots, NEVER, np.int64)  # the last batch planned that reads it
        self.num_free = num_slots
        self._free = np.arange(num_slots - 1, -1, -1)
        # Slots in the order in which they may leave, with the heat that they had when they were queued.
        self._queue, self._queue_heat = np.empty(0, np.int64), np.empty(0)

    def find(self, ids: Int64[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray]:
        """Which ids are here, and the slots of those."""
        numbers = self.index.get(ids)
        here = numbers != MISSING
        return here, numbers[here].astype(np.int64)

    def place(self, slots: np.ndarray, ids: np.ndarray, heat: np.ndarray, number: int) -> None:
        """Put rows that batch `number` moves into slots that nobody has."""
        self.index.put(ids, slots.astype(np.uint32))
        self.ids[slots], self.heat[slots] = ids, heat
        self.needed[slots] = self.last[slots] = number

    def occupy(self, slots: np.ndarray, ids: np.ndarray, heat: np.ndarray, number: int) -> None:
        """`place`, into any slots of a tier that holds nothing."""
        free = np.ones(self.num_slots, bool)
        free[slots] = False
        self.num_free = self.num_slots - len(slots)
        self._free[: self.num_free] = np.flatnonzero(free)
        self.place(slots, ids, heat, number)

    def release(self, slots: np.ndarray) -> None:
        """Rows leave their slots, which are free then."""
        self._leave(slots)
        self._free[self.num_free : self.num_free + len(slots)] = slots
        self.num_free += len(slots)

    def take_free(self, count: int) -> Int64[np.ndarray, " n"]:
        """Up to `count` free slots, which are the caller's to fill."""
        count = min(count, self.num_free)
        self.num_free -= count
        return self._free[self.num_free : self.num_free + count].copy()

    def victims(self, count: int, now: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The slots of the coldest rows, which leave them, their ids and heats; the slots are the caller's.

        Rows that batch `now` reads stay; those that only later ones do leave where others are too few.
        """
        parts = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]
        while count > 0:
            if not len(self._queue):
                self._queue = queue = self._coldest(count, now)
                self._queue_heat = self.heat[queue]
                if (self.needed[queue] >= now).any():  # not enough others: these may leave, too
                    self.needed[queue] = NEVER
            slots, heat = self._queue[:count], self._queue_heat[:count]
            self._queue, self._queue_heat = self._queue[count:], self._queue_heat[count:]
            unread = (self.ids[slots] != NOBODY) & (self.heat[slots] == heat)
            good = slots[unread & (self.needed[slots] < now)]
            parts.append((good, self.ids[good], self.heat[good]))
            self._leave(good)
            count -= len(good)
        slots, ids, heats = (np.concatenate(part) for part in zip(*parts, strict=True))
        return slots, ids, heats

    def _coldest(self, count: int, now: int) -> Int64[np.ndarray, " n"]:
        """At least `count` slots whose rows may leave, coldest first."""
        slots = np.flatnonzero((self.ids != NOBODY) & (self.needed < now))
        if (
            len(slots) < count
        ):  # the look-ahead reads more than there is room for: the farthest first
            slots = np.flatnonzero((self.ids != NOBODY) & (self.last < now))
            needed = self.needed[slots]
            order = np.lexsort((-needed, needed >= now))  # behind those that nobody in sight needs
            return slots[order][:count]
        most = min(len(slots), max(count, self.num_slots // SHARE_QUEUED))
        heat = self.heat[slots]
        limit = np.partition(heat, most - 1)[most - 1]
        tied = np.flatnonzero(heat == limit)  # of which argpartition takes some, by the processor
        below = np.flatnonzero(heat < limit)
        slots = slots[np.sort(np.concatenate([below, tied[: most - len(below)]]))]
        return slots[np.argsort(self.heat[slots], kind="stable")]

    def _leave(self, slots: np.ndarray) -> None:
        self.index.remove(self.ids[slots])
        self.ids[slots] = NOBODY


class Directory:
    """Plans the batches of one table, in their order; `share`: this process's part of one of several."""

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
        self._written_by = np.full(
            ram_rows, NEVER, np.int64
        )  # the batch that evicts a row to this slot
        self._ahead: list[Int64[np.ndarray, " unique"]] = []
        self._number = 0
        self.often = 0.5  # of the batches

    def settled(
        self,
        device_ids: Int64[np.ndarray, " slots"],
        ram_ids: Int64[np.ndarray, " ram_slots"],
        placed: int,
    ) -> "Directory":
        """A directory that goes on behind batch `placed` from where rows are; knows their heat."""
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
            slots = np.flatnonzero(ids != NOBODY)
            heat = np.where(old.ids[slots] == ids[slots], old.heat[slots], placed / self._half_life)
            tier.occupy(slots, ids[slots], heat, placed)
        return found

    def look_ahead(self, ids: Int64[np.ndarray, " unique"]) -> None:
        """The ascending ids of the batch behind all that were told: its rows are not to leave."""
        number = self._number + len(self._ahead)
        self._ahead.append(ids)
        on_device, slots = self.device.find(ids)
        self.device.needed[slots] = number
        _, slots = self.ram.find(ids[~on_device])
        self.ram.needed[slots] = number

    def plan(self) -> SlotPlan:
        """What the next of the batches that were told has moved."""
        number, ids = self._number, self._ahead.pop(0)
        self._number += 1
        heat = number / self._half_life
        device, ram, share = self.device, self.ram, self._share
        if share is not None and self._is_settled:
            # Each was ahead of the batches that were placed by some: what it knows of heat is its own.
            device.heat = share.most("heat", number, device.heat, device.ids)
            self._is_settled = False
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

        free = device.take_free(len(missing))
        leaving, evicted, evicted_heats = device.victims(len(missing) - len(free), number)
        targets = np.concatenate([free, leaving])
        device.place(targets, missing, heats, number)
        for later, others in enumerate(self._ahead, number + 1):
            device.needed[targets[_within(missing, others)]] = later

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
        # Batches count for as much less as their reads do.
        share = 2.0 ** (-1 / self._half_life)
        batches = (1 - share ** (number + 1)) / (1 - share)
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
    """Which of `ids` are among `others`; both ascend."""
    if not len(others):
        return np.zeros(len(ids), bool)
    return others[np.minimum(np.searchsorted(others, ids), len(others) - 1)] == ids
