"""Faults of nodes, racks and jobs. They are drawn from seeds alone, so every policy meets the same ones.

The history of a node or rack follows from the seed and its name, that of a job from the seed and its line in
the workload. Nodes fail and slow down at moments of the clock. A job crashes after a number of seconds of
its own work, so its n-th crash comes at the same point of its work under every policy. A job is cancelled at
a given time after its submission, unless it is done by then.
"""

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxgoodput.cluster.simulate.key_numbers import check_above_zero, key_numbers, naming
from jaxgoodput.specs import Node

HOUR_S = 3600.0
# How many numbers each part of `--faults` takes.
_NUM_NUMBERS = {"node": 2, "rack": 2, "slow": 3, "crash": 1, "cancel": 2, "checkpoint": 1}


@dataclass(frozen=True, kw_only=True)
class Outages:
    """Failures that occur independently; the times until failure and until repair are exponential."""

    mean_between_s: float
    """Mean seconds from a repair to the next failure."""
    mean_repair_s: float

    def __post_init__(self):
        check_above_zero("Outages", self, "mean_between_s", "mean_repair_s")


@dataclass(frozen=True, kw_only=True)
class Slowdowns:
    """Periods in which a node is slow; a job is as slow as its slowest node.

    Rare and long periods stand for a node with a defect, frequent and short ones for a straggler.
    """

    mean_between_s: float
    """Mean seconds from the end of a period to the start of the next, on one node."""
    mean_length_s: float
    speed: float
    """Share of the speed that remains, below 1."""

    def __post_init__(self):
        check_above_zero("Slowdowns", self, "mean_between_s", "mean_length_s")
        if not 0 < self.speed < 1:
            raise ValueError(
                f"Slowdowns.speed={self.speed} must be above 0 and below 1: it is the share of the speed "
                "that remains. Use Outages for a node that stops working."
            )


@dataclass(frozen=True, kw_only=True)
class Cancellations:
    """Users who cancel their jobs: the time until they do is exponentially distributed."""

    share: float
    """Share of the jobs that are cancelled, unless they are done in time."""
    mean_after_s: float
    """Mean seconds from the submission to the cancellation."""

    def __post_init__(self):
        check_above_zero("Cancellations", self, "mean_after_s")
        if not 0 < self.share <= 1:
            raise ValueError(
                f"Cancellations.share={self.share} must be above 0 and at most 1. If no job is cancelled, "
                "leave Faults.cancellations out."
            )


@dataclass(frozen=True, kw_only=True)
class Faults:
    """All that goes wrong in a simulation. By default, nothing does.

    Raises ValueError for impossible times.
    """

    nodes: Outages | None = None
    racks: Outages | None = None
    """Outages of racks: all nodes with the same label at `rack_level` fail together."""
    rack_level: str = "rack"
    slow: tuple[Slowdowns, ...] = ()
    """Kinds of slow periods; if several hold for a node at once, their speeds multiply."""
    mean_to_crash_s: float | None = None
    """Mean seconds of a job's own work between its crashes; it restarts on the same devices."""
    cancellations: Cancellations | None = None
    checkpoint_s: float = 600.0
    """Seconds between checkpoints of a job; a failure loses the work since the last one."""

    def __post_init__(self):
        check_above_zero("Faults", self, "checkpoint_s")
        crash_s = self.mean_to_crash_s
        if crash_s is not None and not crash_s >= self.checkpoint_s:
            raise ValueError(
                f"Faults.mean_to_crash_s={crash_s} must be at least checkpoint_s={self.checkpoint_s}: a job "
                "that crashes more often than it saves never finishes. Save more often."
            )

    @property
    def lose_work(self) -> bool:
        """Whether any of these faults makes a job fall back to a checkpoint."""
        return any(x is not None for x in (self.nodes, self.racks, self.mean_to_crash_s))


def read_faults(text: str) -> Faults:
    """Return the faults of `WHAT=NUMBER[:NUMBER...],...`, with all times in hours.

    `node` and `rack`: hours between failures, and hours of a repair. `slow` (may be repeated): hours between
    slow periods, their length, and the speed that remains. `crash`: hours of a job's work between crashes.
    `cancel`: share of the jobs, and hours after the submission. `checkpoint`: hours between checkpoints.
    Raises ValueError for any other text.

    >>> read_faults("node=720:0.5,crash=48").mean_to_crash_s
    172800.0
    """
    found: dict[str, list[tuple[float, ...]]] = {}
    for part in text.split(","):
        what, numbers = key_numbers(part)
        if len(numbers) != _NUM_NUMBERS.get(what) or any(map(math.isnan, numbers)):
            raise ValueError(
                f"--faults {text!r}: {part!r} is not one of node=HOURS:REPAIR, rack=HOURS:REPAIR, "
                "slow=HOURS:LENGTH:SPEED, crash=HOURS, cancel=SHARE:HOURS and checkpoint=HOURS, such as "
                "node=720:0.5,crash=48."
            )
        if what in found and what != "slow":
            raise ValueError(f"--faults {text!r}: {what} occurs twice. Leave one of them out.")
        found.setdefault(what, []).append(numbers)

    def outages(what: str) -> Outages | None:
        for between_h, repair_h in found.get(what, []):
            return Outages(mean_between_s=between_h * HOUR_S, mean_repair_s=repair_h * HOUR_S)
        return None

    with naming(f"--faults {text!r}"):
        slow = tuple(
            Slowdowns(mean_between_s=between * HOUR_S, mean_length_s=length * HOUR_S, speed=speed)
            for between, length, speed in found.get("slow", [])
        )
        cancelled = [
            Cancellations(share=share, mean_after_s=after * HOUR_S)
            for share, after in found.get("cancel", [])
        ]
        seconds = {w: found[w][0][0] * HOUR_S for w in ("crash", "checkpoint") if w in found}
        return Faults(
            nodes=outages("node"),
            racks=outages("rack"),
            slow=slow,
            mean_to_crash_s=seconds.get("crash"),
            cancellations=cancelled[0] if cancelled else None,
            checkpoint_s=seconds.get("checkpoint", 600.0),
        )


def _draws(seed: int, *what: str | int) -> np.random.Generator:
    """Return a random generator that depends only on the seed and on `what` it is used for."""
    key = [zlib.crc32(w.encode()) if isinstance(w, str) else w for w in what]
    return np.random.default_rng([seed, *key])


def windows(
    rng: np.random.Generator, mean_between_s: float, mean_length_s: float
) -> Iterator[tuple[float, float]]:
    """Yield (begin, end), times in seconds, of random intervals one after the other, for ever."""
    end_s = 0.0
    while True:
        begin_s = end_s + float(rng.exponential(mean_between_s))
        end_s = begin_s + float(rng.exponential(mean_length_s))
        yield begin_s, end_s


@dataclass
class IntervalTimeline:
    """Recurring intervals of several things, such as outages by node, as time passes."""

    ahead: dict[str, Iterator[tuple[float, float]]]
    """Future intervals by name, in order."""
    now: dict[str, tuple[float, float]] = field(init=False)
    """Current interval by name, or the next one."""
    next_s: float = field(init=False)
    """Time at which the next interval begins or ends."""
    active: frozenset[str] = field(init=False, default=frozenset())
    """Names whose interval is current."""

    def __post_init__(self):
        self.now = {name: next(coming) for name, coming in self.ahead.items()}
        self.next_s = min((begin for begin, _ in self.now.values()), default=math.inf)

    def pass_to(self, before_s: float, now_s: float) -> frozenset[str]:
        """Let time pass; return the names of which an interval began, even if it has ended again."""
        if now_s < self.next_s:
            return frozenset()
        began = set()
        for name, (begin, end) in self.now.items():
            while begin <= now_s:
                if begin > before_s:
                    began.add(name)
                if end > now_s:
                    break
                begin, end = next(self.ahead[name])
            self.now[name] = begin, end
        self.active = frozenset(name for name, (begin, _) in self.now.items() if begin <= now_s)
        self.next_s = min(end if begin <= now_s else begin for begin, end in self.now.values())
        return frozenset(began)


class FaultScript:
    """The faults of one cluster over time, the same for all policies. Call `pass_to` to let time pass."""

    def __init__(self, faults: Faults, nodes: Sequence[Node], seed: int):
        self._faults, self._seed = faults, seed
        self._now_s = 0.0
        self._racks = _racks(nodes, faults)
        names = [node.name for node in nodes]
        self._nodes = self._timeline("node", names, faults.nodes)
        self._dark = self._timeline("rack", list(self._racks), faults.racks)
        self._slow = [
            (
                slow.speed,
                self._intervals(("slow", i), names, slow.mean_between_s, slow.mean_length_s),
            )
            for i, slow in enumerate(faults.slow)
        ]
        self.down: frozenset[str] = frozenset()

    def _timeline(
        self, what: str, names: Sequence[str], outages: Outages | None
    ) -> IntervalTimeline:
        if outages is None:
            return IntervalTimeline({})
        return self._intervals((what,), names, outages.mean_between_s, outages.mean_repair_s)

    def _intervals(
        self, what: tuple[str | int, ...], names: Sequence[str], between_s: float, length_s: float
    ) -> IntervalTimeline:
        return IntervalTimeline(
            {n: windows(_draws(self._seed, *what, n), between_s, length_s) for n in names}
        )

    @property
    def next_s(self) -> float:
        """Time at which a node next fails, is repaired, or changes its speed."""
        return min(line.next_s for line in (self._nodes, self._dark, *(x for _, x in self._slow)))

    def pass_to(self, now_s: float) -> frozenset[str]:
        """Let time pass, and return the nodes that have failed. `down` then holds the nodes that are down."""
        failed = set(self._nodes.pass_to(self._now_s, now_s))
        for rack in self._dark.pass_to(self._now_s, now_s):
            failed |= self._racks[rack]
        for _, slow in self._slow:
            slow.pass_to(self._now_s, now_s)
        dark = {name for rack in self._dark.active for name in self._racks[rack]}
        self.down = self._nodes.active | dark
        self._now_s = now_s
        return frozenset(failed)

    def speed(self, nodes: Iterable[str]) -> float:
        """Return the share of the speed that remains for a job on these nodes: the one of the slowest."""
        held = [(speed, line.active) for speed, line in self._slow if line.active]
        if not held:
            return 1.0
        return min(
            math.prod((speed for speed, slow in held if node in slow), start=1.0) for node in nodes
        )

    def crashes(self, index: int) -> Iterator[float]:
        """Yield the seconds of work before each crash of the job on line `index` of the workload."""
        if self._faults.mean_to_crash_s is None:
            return
        rng = _draws(self._seed, "crash", index)
        while True:
            yield float(rng.exponential(self._faults.mean_to_crash_s))

    def cancelled_after_s(self, index: int) -> float:
        """Return the seconds from a job's submission until its user cancels it; infinite = never."""
        wanted = self._faults.cancellations
        if wanted is None:
            return math.inf
        rng = _draws(self._seed, "cancel", index)
        gives_up, after_s = rng.random() < wanted.share, rng.exponential(wanted.mean_after_s)
        return float(after_s) if gives_up else math.inf


def _racks(nodes: Sequence[Node], faults: Faults) -> Mapping[str, set[str]]:
    """Return the names of the nodes of each rack; {} if racks do not fail.

    Raises ValueError if a node has no label that names its rack.
    """
    if faults.racks is None:
        return {}
    racks: dict[str, set[str]] = {}
    for node in nodes:
        if faults.rack_level not in node.labels:
            raise ValueError(
                f"racks are to fail, but node {node.name!r} has no label {faults.rack_level!r}; its "
                f"labels are {dict(node.labels)}. Label all nodes (in the text of a cluster, 16x4/8 puts "
                "8 nodes into each rack), or let only nodes fail."
            )
        racks.setdefault(node.labels[faults.rack_level], set()).add(node.name)
    return racks
