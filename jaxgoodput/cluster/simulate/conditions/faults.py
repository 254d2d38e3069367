"""What befalls nodes, racks and jobs, drawn from seeds alone: every policy meets the same.

A node's or a rack's history follows from the seed and its name, a job's from the seed and its line of the
workload. Nodes break and slow down at moments of the clock. A job crashes after so many seconds of its own
work, so that the n-th crash of a job comes at the same point of its work whoever schedules it, and is
cancelled so many seconds after it was submitted, if it is not done by then.
"""

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxgoodput.specs import Node


@dataclass(frozen=True, kw_only=True)
class Outages:
    """Things break and are repaired, each by itself; both times are exponentially distributed."""

    mean_between_s: float
    """From a repair to the next failure."""
    mean_repair_s: float

    def __post_init__(self):
        _check_above_zero("Outages", self, "mean_between_s", "mean_repair_s")


@dataclass(frozen=True, kw_only=True)
class Slowdowns:
    """Nodes become slow for a while; a job is as slow as the slowest of its nodes.

    Rare and long is a node with a defect, frequent and short a straggler.
    """

    mean_between_s: float
    """From the end of one to the beginning of the next, on one node."""
    mean_length_s: float
    speed: float
    """What is left of the speed; below 1."""

    def __post_init__(self):
        _check_above_zero("Slowdowns", self, "mean_between_s", "mean_length_s")
        if not 0 < self.speed < 1:
            raise ValueError(
                f"Slowdowns.speed={self.speed} must be above 0 and below 1: it is the share of the "
                "speed that is left. A node that does nothing at all is an outage."
            )


@dataclass(frozen=True, kw_only=True)
class Cancellations:
    """Users who give up: a share of the jobs, each after an exponentially distributed time."""

    share: float
    """Of all jobs; one that is done in time is not cancelled."""
    mean_after_s: float
    """From its submission."""

    def __post_init__(self):
        _check_above_zero("Cancellations", self, "mean_after_s")
        if not 0 < self.share <= 1:
            raise ValueError(
                f"Cancellations.share={self.share} must be above 0 and at most 1; for none at all, leave "
                "Faults.cancellations out."
            )


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Everything that goes wrong; all of it is off where it is not given.

    Raises ValueError for times that cannot be.
    """

    nodes: Outages | None = None
    racks: Outages | None = None
    """All nodes with the same label at `rack_level` break together."""
    rack_level: str = "rack"
    slow: tuple[Slowdowns, ...] = ()
    """Their factors multiply where several hold a node at once."""
    mean_to_crash_s: float | None = None
    """Seconds of a job's own work between two of its crashes; it restarts where it is."""
    cancellations: Cancellations | None = None
    checkpoint_s: float = 600.0
    """Seconds between two checkpoints of a job; what breaks loses the work since the last one."""

    def __post_init__(self):
        _check_above_zero("Faults", self, "checkpoint_s")
        crash_s = self.mean_to_crash_s
        if crash_s is not None and not crash_s >= self.checkpoint_s:
            raise ValueError(
                f"Faults.mean_to_crash_s={crash_s} must be at least checkpoint_s={self.checkpoint_s}: jobs "
                "that crash more often than they save get nowhere. Save more often."
            )

    @property
    def lose_work(self) -> bool:
        """Whether anything makes a job fall back to a checkpoint."""
        return any(x is not None for x in (self.nodes, self.racks, self.mean_to_crash_s))


def _check_above_zero(kind: str, value: object, *names: str) -> None:
    for name in names:
        number = getattr(value, name)
        if not (number > 0 and math.isfinite(number)):
            raise ValueError(f"{kind}.{name} must be above 0 and finite, got {number}.")


def _draws(seed: int, *what: str | int) -> np.random.Generator:
    """Random numbers that depend on the seed and on what they are of, and on nothing else."""
    key = [zlib.crc32(w.encode()) if isinstance(w, str) else w for w in what]
    return np.random.default_rng([seed, *key])


def windows(
    rng: np.random.Generator, mean_between_s: float, mean_length_s: float
) -> Iterator[tuple[float, float]]:
    """(begin, end) of one interval after the other, for ever."""
    end_s = 0.0
    while True:
        begin_s = end_s + float(rng.exponential(mean_between_s))
        end_s = begin_s + float(rng.exponential(mean_length_s))
        yield begin_s, end_s


@dataclass
class IntervalTimeline:
    """Intervals on each of some things, as time goes by."""

    ahead: dict[str, Iterator[tuple[float, float]]]
    """The intervals of each thing, in order."""
    now: dict[str, tuple[float, float]] = field(init=False)
    """The interval of each thing that holds at present, or is the next."""
    next_s: float = field(init=False)
    """When the next one begins or ends."""
    active: frozenset[str] = field(init=False, default=frozenset())
    """The things that are within one."""

    def __post_init__(self):
        self.now = {name: next(coming) for name, coming in self.ahead.items()}
        self.next_s = min((begin for begin, _ in self.now.values()), default=math.inf)

    def pass_to(self, before_s: float, now_s: float) -> frozenset[str]:
        """Let time pass; the things of which one began since, even where it is over again."""
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
    """What goes wrong when, on one cluster. `pass_to` moves it on; nothing that policies do changes it."""

    def __init__(self, faults: Faults, nodes: Sequence[Node], seed: int):
        self._faults, self._seed = faults, seed
        self._now_s = 0.0
        self._racks = _racks(nodes, faults)
        names = [node.name for node in nodes]
        self._broken = _comings(seed, "node", names, faults.nodes)
        self._dark = _comings(seed, "rack", list(self._racks), faults.racks)
        self._slow = [
            (
                one.speed,
                IntervalTimeline(
                    {
                        name: windows(
                            _draws(seed, "slow", i, name), one.mean_between_s, one.mean_length_s
                        )
                        for name in names
                    }
                ),
            )
            for i, one in enumerate(faults.slow)
        ]
        self.down: frozenset[str] = frozenset()

    @property
    def next_s(self) -> float:
        """When a node next breaks, comes back, or changes its speed."""
        kinds = (self._broken, self._dark, *(comings for _, comings in self._slow))
        return min(comings.next_s for comings in kinds)

    def pass_to(self, now_s: float) -> frozenset[str]:
        """Let time pass; the nodes that broke since. `down` holds those that are not back yet."""
        failed = set(self._broken.pass_to(self._now_s, now_s))
        for rack in self._dark.pass_to(self._now_s, now_s):
            failed |= self._racks[rack]
        for _, comings in self._slow:
            comings.pass_to(self._now_s, now_s)
        dark = {name for rack in self._dark.active for name in self._racks[rack]}
        self.down = self._broken.active | dark
        self._now_s = now_s
        return frozenset(failed)

    def speed(self, nodes: Iterable[str]) -> float:
        """What is left of the speed of a job on these nodes: that of the slowest."""
        held = [(speed, comings.active) for speed, comings in self._slow if comings.active]
        if not held:
            return 1.0
        return min(
            math.prod((speed for speed, slow in held if node in slow), start=1.0) for node in nodes
        )

    def crashes(self, index: int) -> Iterator[float]:
        """Seconds of work before each of a job's crashes; `index` is its line in the workload."""
        if self._faults.mean_to_crash_s is None:
            return
        rng = _draws(self._seed, "crash", index)
        while True:
            yield float(rng.exponential(self._faults.mean_to_crash_s))

    def cancelled_after_s(self, index: int) -> float:
        """Seconds after its submission when a job's user gives up; infinite where he never does."""
        wanted = self._faults.cancellations
        if wanted is None:
            return math.inf
        rng = _draws(self._seed, "cancel", index)
        gives_up, after_s = rng.random() < wanted.share, rng.exponential(wanted.mean_after_s)
        return float(after_s) if gives_up else math.inf


def _comings(
    seed: int, what: str, names: Sequence[str], outages: Outages | None
) -> IntervalTimeline:
    if outages is None:
        return IntervalTimeline({})
    between_s, repair_s = outages.mean_between_s, outages.mean_repair_s
    return IntervalTimeline({n: windows(_draws(seed, what, n), between_s, repair_s) for n in names})


def _racks(nodes: Sequence[Node], faults: Faults) -> Mapping[str, set[str]]:
    if faults.racks is None:
        return {}
    racks: dict[str, set[str]] = {}
    for node in nodes:
        if faults.rack_level not in node.labels:
            raise ValueError(
                f"racks are to fail, but node {node.name!r} has no label {faults.rack_level!r}; its "
                f"labels are {dict(node.labels)}. Label all nodes (in the text of a cluster, 16x4/8 puts "
                "8 nodes into each rack), or let nodes fail only."
            )
        racks.setdefault(node.labels[faults.rack_level], set()).add(node.name)
    return racks
