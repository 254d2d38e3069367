"""What the coordinator knows of a job: its limits, processes, hosts, and the current generation.

All of it is frozen values. Rules change them through a `Turn`, which also collects the actions that
follow from one event.
"""

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxgoodput._exits import DONE
from jaxgoodput.launcher.elastic import events as ev
from jaxgoodput.launcher.elastic.fitness import Check, HostDecision, Pace
from jaxgoodput.launcher.release_plan import ReleaseRecord
from jaxgoodput.specs import HostFault

_MOST_NEWS = 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many processes a job may have, and how long the coordinator waits for what.

    Raises ValueError for numbers that no job can satisfy.
    """

    least: int
    """Fewest processes that may train."""
    most: int
    """Most processes that may train."""
    group_size: int = 1
    """Number of processes that share one copy of the model."""
    max_restarts: int = 10
    """Number of failed processes that are replaced, over the whole job."""
    join_s: float = 10.0
    """How long the first generation waits for processes that are still starting."""
    admit_every_s: float = 5.0
    """Shortest time after which a generation ends only to let new processes in."""
    silent_s: float = 10.0
    """Heartbeat timeout of a process that trains."""
    patience_s: float = 600.0
    """How long to wait for a process that has not sent a heartbeat yet; it may still be compiling."""
    starting_s: float = 1800.0
    """How long a process may take from its start until it is ready to train; it may read much data."""
    farewell_s: float = 1.0
    """How long after its kill a process counts as gone without confirmation; its host may be cut off."""
    exclude_slow: float = 2.0
    """Slowdown against the median of the other hosts at which a host is left out; 0 leaves none out."""
    reports_hosts: bool = False
    """Whether slow hosts stay, and hosts in trouble are reported to the program that started this one."""
    keep_hosts: bool = False
    """Whether no host is let go before the end of the run."""
    exclude_s: float = 300.0
    """How long a host is left out the first time; the time doubles with each repetition."""
    slow_windows: int = 8
    """Consecutive slow windows after which a host is left out; a window lasts several steps."""
    cut_s: float = 60.0
    """How long two hosts count as cut off from each other after an attempt to connect them has failed."""

    def __post_init__(self):
        if not 1 <= self.least <= self.most:
            raise ValueError(
                f"{self.least} to {self.most} processes is no valid range: give 1 <= MIN <= MAX."
            )
        if self.group_size < 1 or self.most < self.group_size:
            raise ValueError(
                f"--hosts-per-group {self.group_size}: such a group does not fit into a job of at most "
                f"{self.most}. Give a group 1 to {self.most} processes, or raise MAX."
            )
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts={self.max_restarts} is negative. Give 0 or more.")
        if self.exclude_slow and not self.exclude_slow > 1:
            raise ValueError(
                f"--exclude-slow {self.exclude_slow:g} would leave out healthy hosts, which need about 1 "
                "times the median of the others. Give more than 1, such as 2, or 0 to leave no host out."
            )

    @property
    def needed(self) -> int:
        """The fewest processes that can train: at least `least`, in whole groups."""
        return -(-self.least // self.group_size) * self.group_size

    def usable(self, count: int, share: int | None) -> int:
        """Return how many of `count` processes can train together, in whole groups; 0 if none can.

        The number of groups must divide `share`, unless that is None.

        >>> Limits(least=1, most=8).usable(5, 12), Limits(least=5, most=8).usable(5, 12)
        (4, 0)
        >>> Limits(least=2, most=8, group_size=2).usable(7, 12)
        6
        """
        size = self.group_size
        groups = range(min(count, self.most) // size, self.needed // size - 1, -1)
        return next((size * n for n in groups if n and (share is None or share % n == 0)), 0)


class Stage(enum.Enum):
    """What the job does: it gathers processes, forms a generation of them, trains, or is over."""

    GATHERING = "gathering"  # waiting for processes to come back, or for more to come
    FORMING = "forming"  # ranks are assigned, and processes fetch the state
    TRAINING = "training"
    OVER = "over"  # the run is complete or was told to stop; no process is taken in any more


@dataclass(frozen=True, kw_only=True)
class KnownProcess:
    """What the coordinator knows of one process of the job."""

    host: str
    joined_s: float
    """Time at which it was started."""
    generation: int = 0
    """Generation that it trains in, or trained in last; 0 before its first."""
    holds: int | None = None
    """Step of the state that it waits with, -1 without a state; None if it does not wait."""
    place: int | None = None
    """Place in its group, whose part of the state it holds; None before its first generation."""
    copies: tuple[tuple[int, int], ...] = ()
    """Copies of parts of the state that it holds, as (place, step): its own and a neighbour's."""
    share: int | None = None
    """Number that the group count must divide, so that the base batch splits evenly; None: no limit."""
    waits_since_s: float = 0.0
    """Time since which it waits for the next generation."""
    is_set: bool = False
    """Whether it has the state that the forming generation resumes from."""
    beat_s: float | None = None
    """Time of its last heartbeat in this generation; None before the first."""
    step: int | None = None
    """Step of that heartbeat."""
    device_s: float = 0.0
    """How long it had been waiting for its own device then; 0 if it did not."""
    is_stuck: bool = False
    """Whether that is much longer than ever before."""
    others_s: float = 0.0
    """How long it had been waiting for the other processes then; 0 if it did not."""
    is_trying: bool = False
    """Whether it was asked to try to reach others, and has not answered."""
    asked_s: float = 0.0
    """When it was asked the first question that it has not answered, or the last that it has."""
    asked_again_s: float = 0.0
    """When it was asked last. Its answer is of then: an attempt takes less than the time between."""
    tried_s: float = 0.0
    """When it answered last."""
    hung_up_on: tuple[str, ...] = ()
    """Processes of this generation to which it was told to end its connections."""
    hung_up_s: float | None = None
    """When it was told so first; None if it was not."""
    hung_up_again_s: float = 0.0
    """When it was told so last."""
    killed_s: float | None = None
    """Time at which it was sent SIGKILL; None if it was not."""
    leaves: bool = False
    """Whether it is to end because its host leaves or is left out."""
    pace: Pace | None = None
    """Speed that it reported since the hosts were last compared."""
    num_slow: int = 0
    """Consecutive windows in which it was much slower than the others."""
    is_released: bool = False
    """Whether it was told that it is not needed any more."""

    @property
    def waits(self) -> bool:
        """Whether the process waits, and can be part of the next generation."""
        return self.holds is not None and self.killed_s is None and not self.is_released

    @property
    def held_step(self) -> int:
        """The step of the training state that the waiting process holds; -1 if it holds none."""
        return -1 if self.holds is None else self.holds


@dataclass(frozen=True, kw_only=True)
class Host:
    """What the coordinator knows of a host whose agent has connected."""

    is_here: bool = True
    """Whether its agent is connected now."""
    is_beside: bool = False
    """Whether it is the machine on which the coordinator runs."""
    is_asked: bool = False
    """Whether it is being checked."""
    check: Check | None = None
    """Result of its last check."""
    num_exclusions: int = 0
    """How often it was left out so far."""
    num_cut_off: int = 0
    """How often in a row it was left out because it did not reach others."""
    cut_off_s: float = 0.0
    """When it was left out for that last."""
    until_s: float | None = None
    """Time at which it is checked again and may come back; None if it is not left out."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """A job: its processes, its hosts, and the generation that trains or forms."""

    limits: Limits
    members: Mapping[str, KnownProcess] = field(default_factory=dict)
    stage: Stage = Stage.GATHERING
    generation: int = 0
    """Number of the newest generation that was formed."""
    ranks: tuple[str, ...] = ()
    """Processes of that generation by rank, including any that have ended since."""
    holders: tuple[str, ...] = ()
    """Process that holds each place's part of the state to resume from; empty if there is no state."""
    since_s: float = 0.0
    """Time at which this stage began."""
    is_told: bool = False
    """Whether the job was told to save and stop."""
    is_done: bool = False
    """Whether the run is complete."""
    savers: tuple[str, ...] = ()
    """Processes that hold the state to save, by place; the first one collects the parts and saves."""
    leaving: frozenset[str] = frozenset()
    """Hosts that leave the job, or have left it."""
    hosts: Mapping[str, Host] = field(default_factory=dict)
    news: tuple[HostDecision, ...] = ()
    """Decisions about hosts that the next generation will report."""
    cuts: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """When one host did not reach another, by (from, to)."""
    moved_s: float = 0.0
    """Time at which a step was last seen to end."""
    tried_s: float = 0.0
    """Time at which processes were last asked to try to reach each other."""
    num_tried: int = 0
    """How often they were asked since a step ended."""
    num_barren: int = 0
    """Generations in a row that ended by themselves without a step."""
    pause_until_s: float = 0.0
    """Time before which no generation is formed."""
    release: ReleaseRecord = field(default_factory=ReleaseRecord)
    """What decides which hosts may leave before the run ends."""
    num_failures: int = 0
    """Processes that have failed since the job began."""
    furthest: int = -1
    """Last step that any process has reported."""
    furthest_then: int = -2
    """Value of `furthest` at the last failure."""
    num_fruitless: int = 0
    """Consecutive failures without a finished step between them."""
    code: int = DONE
    """Exit code of the job so far."""

    @property
    def has_trained(self) -> bool:
        """Whether a process has begun to train, so that steps may be done of which no heartbeat tells yet."""
        return self.furthest >= 0

    @property
    def outstanding(self) -> tuple[str, ...]:
        """Processes of the generation that are waited for: they train, or fetch the state of a new one."""
        is_forming = self.stage is Stage.FORMING

        def lacks(member: KnownProcess) -> bool:
            return not member.is_set if is_forming else member.holds is None

        return tuple(
            name
            for name in self.present_ranks
            if lacks(self.members[name]) and not self.members[name].is_released
        )

    @property
    def present_ranks(self) -> tuple[str, ...]:
        """Names of the newest generation's processes that have not ended, in the order of ranks."""
        return tuple(name for name in self.ranks if name in self.members)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Processes that wait for the next generation and do not leave."""
        return tuple(name for name, m in self.members.items() if m.waits and not m.leaves)

    @property
    def can_go_on(self) -> bool:
        """Whether the processes that do not leave hold all parts of the state, and are enough or can wait."""
        staying = sum(not member.leaves for member in self.members.values())
        if self.limits.group_size == 1:
            return staying > 0  # each process has the whole state
        return self.limits.usable(staying, None) > 0

    def is_left_out(self, host: str) -> bool:
        """Return whether a host is excluded for a while, so that no process may start on it."""
        return host in self.hosts and self.hosts[host].until_s is not None

    def is_cut(self, host: str, other: str) -> bool:
        """Whether one of two hosts did not reach the other lately."""
        return (host, other) in self.cuts or (other, host) in self.cuts

    def cut_off_from(self, name: str, others: Iterable[str]) -> tuple[str, ...]:
        """Return the processes among `others` whose hosts are cut off from the host of this one."""
        host = self.members[name].host
        return tuple(n for n in others if self.is_cut(host, self.members[n].host))

    def newest_held(self, names: Sequence[str]) -> tuple[tuple[str, ...], int]:
        """Find the newest state of which these processes together hold every part.

        Returns the holder of each part and the step; ((), -1) if no state is complete. Earlier names are
        preferred, and a process's own state is preferred to a copy of it.
        """
        places = range(self.limits.group_size)
        held: list[dict[int, str]] = [{} for _ in places]
        # Later entries overwrite earlier ones, so the order is reversed.
        for name in reversed(names):
            for place, step in self.members[name].copies:
                held[place].setdefault(step, name)
        for name in reversed(names):
            member = self.members[name]
            place = 0 if len(places) == 1 else member.place  # each process holds the whole state
            if place is not None:
                held[place][member.held_step] = name
        newest = max(set.intersection(*(set(of_place) for of_place in held)) - {-1}, default=-1)
        return (tuple(of_place[newest] for of_place in held), newest) if newest >= 0 else ((), -1)


class Turn:
    """What follows from one event: the new state of the job, and actions for the coordinator."""

    def __init__(self, state: Rendezvous, now_s: float):
        self.state = state
        self.now_s = now_s
        self.actions: list[ev.Action] = []

    def act(self, action: ev.Action) -> None:
        """Add an action that the coordinator is to carry out."""
        self.actions.append(action)

    def change(self, **fields) -> None:
        """Replace these fields of the job's state."""
        self.state = dataclasses.replace(self.state, **fields)

    def put_process(self, name: str, member: KnownProcess) -> None:
        """Add a process to the job's state, or replace what is known of it."""
        self.change(members={**self.state.members, name: member})

    def change_process(self, name: str, **fields) -> None:
        """Replace these fields of what is known of a process."""
        self.put_process(name, dataclasses.replace(self.state.members[name], **fields))

    def change_host(self, host: str, **fields) -> None:
        """Replace these fields of what is known of a host, which is added if it is new."""
        known = dataclasses.replace(self.state.hosts.get(host, Host()), **fields)
        self.change(hosts={**self.state.hosts, host: known})

    def dismiss(self, host: str) -> None:
        """Mark all processes of a host as leaving: no further generation, and no further leases."""
        names = tuple(name for name, m in self.state.members.items() if m.host == host)
        for name in names:
            self.change_process(name, leaves=True)
        training = tuple(name for name in names if name in self.state.ranks)
        if training and self.state.stage is not Stage.OVER:
            self.act(ev.EndLeases(training))

    def enter(self, stage: Stage, **fields) -> None:
        """Begin another stage now; also replace these fields of the job's state."""
        self.change(stage=stage, since_s=self.now_s, **fields)

    def gather(self) -> None:
        """End the generation that trains: its processes are asked to come back and wait for the next one."""
        self.enter(Stage.GATHERING)
        self.act(ev.EndGeneration(self.state.outstanding, self.state.generation))

    def cancel_forming(self, but: Iterable[str] = ()) -> None:
        """Cancel the generation that forms: its processes wait anew; the ones in `but` do so already."""
        others = tuple(name for name in self.state.present_ranks if name not in but)
        for name in others:
            self.change_process(name, holds=None, is_set=False)
        self.enter(Stage.GATHERING)
        self.act(ev.Again(self.state.generation, others))

    def end_run(self) -> None:
        """Note that the run is over: no process may join, and processes that wait are released."""
        if self.state.stage is not Stage.OVER:
            self.enter(Stage.OVER, code=DONE)

    def announce(self, decision: HostDecision, fault: HostFault | None = None) -> None:
        """Have a decision about a host printed, and passed to the hooks of the next generation.

        `fault` is also reported to the program that started this one, if `Limits.reports_hosts`.
        """
        # A faulty host may come and be refused for days; keep the newest decisions only.
        self.change(news=(*self.state.news, decision)[-_MOST_NEWS:])
        self.act(ev.Tell(decision, fault))
