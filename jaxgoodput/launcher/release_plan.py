"""Which hosts a run can do without in the rest of its last epoch: a pure decision.

If a step's samples are split evenly, the slowest host decides how long it takes, and fewer hosts may be as
fast. If micro-batches are leased, a slow host helps unless one micro-batch takes it longer than the others
need for the whole batch. Near the end, a step may have fewer micro-batches than there are hosts.

Letting hosts go costs a regroup, in which no process trains. So `best_release` compares two times until the
last sample is done: with all hosts, and with fewer after a regroup.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from jaxgoodput.launcher.elastic import fitness
from jaxgoodput.launcher.elastic.fitness import Pace

MOST_DELAY = 0.01  # of the run's time, by which all releases together may delay its end
LEAST_REGROUP_S = 2.0  # what a regroup costs at least; measured pauses were 1 to 3 s
FEWEST_HOSTS = 2  # that stay: one alone would have the only copy of the state in memory
FEWEST_WINDOWS, MOST_WINDOWS = 3, 5  # of several steps each, whose median speed counts


@dataclass(frozen=True, kw_only=True)
class RestOfRun:
    """What is left of a run, and how fast its processes are."""

    samples_s: Mapping[str, float]
    """Seconds that each process needs per sample, by name."""
    hosts: Mapping[str, str]
    """Host of each process."""
    kind: Pace
    """How a step is divided among the processes, and what is left of the run."""
    trained_s: float
    """How long the run has trained so far."""
    delayed_s: float = 0.0
    """By how much earlier releases delay its end."""

    @property
    def other_s(self) -> float:
        """Seconds of a step besides the slowest process's own part: the sum over processes, the update."""
        own_s = part_s([*self.samples_s.values()], self.kind, self.kind.whole)
        return max(self.kind.step_s - own_s, 0.0)

    def seconds(self, names: Collection[str]) -> float:
        """Return how long these processes take for the samples that are left."""
        num_steps, rest = divmod(self.kind.left or 0, self.kind.whole)
        samples_s = [self.samples_s[name] for name in names]
        whole_s = part_s(samples_s, self.kind, self.kind.whole) + self.other_s
        rest_s = part_s(samples_s, self.kind, rest) + self.other_s if rest else 0.0
        return num_steps * whole_s + rest_s

    def evaluation_s(self, names: Collection[str]) -> float:
        """Return the seconds per sample of an evaluation, which processes share evenly."""
        return max(self.samples_s[name] for name in names) / len(names)


@dataclass(frozen=True, kw_only=True)
class ReleasePlan:
    """Hosts to let go, and what follows from it."""

    hosts: tuple[str, ...]
    """Hosts that the run does not need any more, slowest first."""
    num_hosts: int
    """Number of hosts that stay."""
    num_processes: int
    """Number of processes that stay."""
    samples_left: int
    """Samples that are left of the run."""
    later_s: float
    """How much later the run ends for it; negative if earlier."""
    saved_host_s: float
    """Host-seconds that it saves."""

    @property
    def why(self) -> str:
        """The reason, as a sentence for the host's log and the scheduler."""
        when = f"{abs(self.later_s):.2g} s {'later' if self.later_s > 0 else 'earlier'}"
        return (
            f"the remaining {self.samples_left} samples need no more than {self.num_hosts} host"
            f"{'s' * (self.num_hosts > 1)}. Without {', '.join(self.hosts)} the run ends about {when}, and "
            f"{self.saved_host_s:.0f} host-seconds are saved"
        )


def part_s(samples_s: Sequence[float], kind: Pace, count: int) -> float:
    """Return the seconds after which the last process has done its own part of a step of `count` samples.

    >>> kind = Pace(sample_s=1.0, step_s=9.0, part=2, whole=8, is_leased=False)
    >>> part_s([1.0, 1.0, 3.0], kind, 9), part_s([1.0, 1.0], kind, 9)
    (9.0, 5.0)
    >>> leased = dataclasses.replace(kind, is_leased=True)
    >>> part_s([1.0, 1.0, 3.0], leased, 8), part_s([1.0, 1.0], leased, 8)
    (6.0, 4.0)
    """
    if not kind.is_leased:
        return max(samples_s) * -(-count // len(samples_s))
    own_s = fitness.own_s(samples_s, dataclasses.replace(kind, whole=count))
    return max(own_s, max(samples_s) * kind.part)  # each computes one part, if only an empty one


def best_release(
    rest: RestOfRun,
    regroup_s: Callable[[int], float],
    *,
    is_usable: Callable[[int], bool],
    kept: Collection[str] = (),
) -> ReleasePlan | None:
    """Return the hosts to let go now, such that most host-seconds are saved; None to keep all.

    `regroup_s` says what a regroup to a number of processes costs, `is_usable` whether so many can train, and
    the hosts in `kept` stay in any case.

    Hosts go only if all releases together delay the end of the run by at most `MOST_DELAY`, compared with the
    number of hosts with which it ends soonest; if what is saved is more than a regroup costs on all hosts;
    if evaluations take no longer; and if `FEWEST_HOSTS` stay. Speeds that were measured for a while are not
    trusted for longer than the run has trained.
    """
    now_s = rest.seconds(rest.samples_s)
    if not rest.kind.left or now_s > rest.trained_s:
        return None
    slowest: dict[str, float] = {}
    for name, sample_s in rest.samples_s.items():
        host = rest.hosts[name]
        slowest[host] = max(slowest.get(host, 0.0), sample_s)
    order = sorted((host for host in slowest if host not in kept), key=lambda h: (-slowest[h], h))
    plans = []
    for count in range(1, min(len(order), len(slowest) - FEWEST_HOSTS) + 1):
        names = [name for name in rest.samples_s if rest.hosts[name] not in order[:count]]
        if not is_usable(len(names)):
            continue
        if rest.kind.evaluates and rest.evaluation_s(names) > rest.evaluation_s(rest.samples_s):
            continue
        cost_s, num_hosts = regroup_s(len(names)), len(slowest) - count
        then_s = cost_s + rest.seconds(names)
        found = ReleasePlan(
            hosts=tuple(order[:count]),
            num_hosts=num_hosts,
            num_processes=len(names),
            samples_left=rest.kind.left,
            later_s=then_s - now_s,
            saved_host_s=len(slowest) * now_s - num_hosts * then_s,
        )
        if found.saved_host_s >= len(slowest) * cost_s:
            plans.append(found)
    # Without the slowest host the run may end much earlier; that is not given away for fewer hosts.
    soonest_s = min((plan.later_s for plan in plans), default=0.0)
    most_s = MOST_DELAY * (rest.trained_s + now_s) - rest.delayed_s
    in_time = [plan for plan in plans if plan.later_s - min(soonest_s, 0.0) <= most_s]
    return max(in_time, key=lambda plan: plan.saved_host_s, default=None)


# -- what the coordinator remembers for it -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReleaseRecord:
    """What was measured for releases, and what they have promised so far."""

    began_s: float | None = None
    """Time at which the first processes began to train."""
    paces: Mapping[str, tuple[Pace, ...]] = field(default_factory=dict)
    """Newest speeds that each process of the generation has reported."""
    paused_s: float | None = None
    """Time since which no process trains, or at which a generation began that has not finished a step."""
    pauses_s: Mapping[int, float] = field(default_factory=dict)
    """Longest such pause by the number of processes afterwards."""
    delayed_s: float = 0.0
    """By how much releases delay the end of the run."""
    num_enough: int = 0
    """Number of processes that are enough since the last release; 0 if none counts."""
    samples_left: int = 0
    """Samples that were left of the run then."""
    why: str = ""
    """Reason for the last release."""

    def regroup_s(self, num_processes: int) -> float:
        """Return what it costs to go on with so many processes.

        If there were never so many, their programs may have to be compiled, as at the start of the job.
        """
        longest_s = max(self.pauses_s.values(), default=math.inf)
        return max(self.pauses_s.get(num_processes, longest_s), LEAST_REGROUP_S)

    def with_pace(self, name: str, pace: Pace) -> "ReleaseRecord":
        """Return the record with a process's newest speed; of another division of steps, older ones go."""
        same = tuple(one for one in self.paces.get(name, ()) if _kind(one) == _kind(pace))
        paces = {**self.paces, name: (*same, pace)[-MOST_WINDOWS:]}
        return dataclasses.replace(self, paces=paces)

    def rest_of_run(self, hosts: Mapping[str, str], trained_s: float) -> RestOfRun | None:
        """Return what is left for the processes in `hosts`; None if too little is known of it or of them."""
        paces = {name: self.paces.get(name, ()) for name in hosts}
        newest = [of_process[-1] for of_process in paces.values() if of_process]
        if len(newest) < len(paces) or len({_kind(pace) for pace in newest}) != 1:
            return None
        lefts = [pace.left for pace in newest if pace.left is not None]
        if len(lefts) < len(newest) or min(map(len, paces.values())) < FEWEST_WINDOWS:
            return None
        samples_s = {
            name: statistics.median(pace.sample_s for pace in of_process)
            for name, of_process in paces.items()
        }
        steps_s = [pace.step_s for of_process in paces.values() for pace in of_process]
        kind = dataclasses.replace(
            newest[0],
            step_s=statistics.median(steps_s),
            left=min(lefts),
            evaluates=any(pace.evaluates for pace in newest),
        )
        return RestOfRun(
            samples_s=samples_s,
            hosts=hosts,
            kind=kind,
            trained_s=trained_s,
            delayed_s=self.delayed_s,
        )


def _kind(pace: Pace) -> tuple[int, int, bool]:
    return pace.part, pace.whole, pace.is_leased
