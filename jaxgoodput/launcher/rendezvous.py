"""Who trains together, and when that changes: a pure state machine that one coordinator drives.

Processes come (`ProcessJoined`), wait with the state that they hold (`Ready`), are told their places
(`Form`), say that they have what they need (`SetUp`), and are let go all at once (`Go`), as a
*generation*. It ends when somebody waits to be taken in, is to leave, or has died: all are
asked to come back (`EndGeneration`), each with its state in memory, and the next one is formed of those
that did. A process that does not come back, or sends no heartbeat, is killed (`Kill`), and another is started
in its place (`StartProcess`).

Where one copy of the model is cut over several processes, those are a *group*: the processes of ranks 0 to
k - 1, k to 2 k - 1 and so on. Each holds the part of the state that belongs to its *place* in the group, so
that whoever is new to a place takes it from one of the same place in another group.

Every message carries the generation that its sender was in; what comes late, from one that is over, changes
nothing. A host is checked before its processes begin (`Examine`), and is left out for a while where it holds
the others up: its processes leave, its agent stays, and when the time is over it is checked again
(`launcher.fitness`).

`step(state, event, now_s)` gives the next state and what is to be done, and is all there is: the
coordinator acts, tests drive it through any order of events.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxgoodput.launcher import fitness
from jaxgoodput.launcher.fitness import Check, HostDecision, Pace


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many processes a job may have, and for what it waits how long.

    Raises ValueError for numbers that no job can keep.
    """

    least: int
    most: int
    group_size: int = 1
    """Processes that share one copy of the model."""
    max_restarts: int = 10
    """Processes that are started anew after a failure, in all."""
    join_s: float = 10.0
    """For further processes that are starting, before the first generation."""
    admit_every_s: float = 5.0
    """From a generation's begin until it ends only to take somebody in."""
    silent_s: float = 10.0
    """Without a sign of life from a process that trains."""
    patience_s: float = 600.0
    """For a process that gave no sign of life in its generation, to come back: it may be compiling."""
    starting_s: float = 1800.0
    """From a process's begin until it waits to be taken in: it may read much."""
    farewell_s: float = 1.0
    """From a kill until a process counts as gone, though nobody says so: its host may be cut off."""
    exclude_slow: float = 2.0
    """Times the median of the others that a host may need for a sample before it is left out; 0: any."""
    exclude_s: float = 300.0
    """For which a host is left out the first time; twice as long each further time."""
    slow_windows: int = 8
    """In a row, in which it was too slow: each of some steps and a second at least."""

    def __post_init__(self):
        if not 1 <= self.least <= self.most:
            raise ValueError(f"{self.least} to {self.most} processes: give 1 <= MIN <= MAX.")
        if self.group_size < 1 or self.most < self.group_size:
            raise ValueError(
                f"groups of {self.group_size} processes, of at most {self.most}: give a group 1 to MAX."
            )
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts={self.max_restarts}: give 0 or more.")
        if self.exclude_slow and not self.exclude_slow > 1:
            raise ValueError(
                f"exclude_slow={self.exclude_slow:g}: healthy hosts take 1 time the median of the others. "
                "Give more than 1, such as 2, or 0 to leave no host out."
            )

    @property
    def needed(self) -> int:
        """The fewest processes that can train: at least `least`, in whole groups."""
        return -(-self.least // self.group_size) * self.group_size


class Stage(enum.Enum):
    """What the job is doing."""

    GATHERING = "gathering"  # those who are not in a collective wait for the others
    FORMING = "forming"  # a generation has its ranks, and gets ready to connect
    TRAINING = "training"
    OVER = "over"  # somebody is done, or all were told to stop: nobody is taken in any more


@dataclass(frozen=True, kw_only=True)
class KnownProcess:
    """A process, as far as it has been heard of."""

    host: str
    joined_s: float
    generation: int = 0
    """In which it trains, or trained last; 0: none yet."""
    holds: int | None = None
    """The step of the state with which it waits, -1 without one; None: it does not wait."""
    place: int | None = None
    """In a group, whose part of the state it holds; None: it has had none."""
    copies: tuple[tuple[int, int], ...] = ()
    """Copies of parts of the state that it holds, (place, step), its own and a neighbour's."""
    share: int | None = None
    """The number of groups has to divide this: the base batch over a group's replicas. None: any will do."""
    waits_since_s: float = 0.0
    is_set: bool = False
    """Whether it has what it needs for the generation that forms."""
    beat_s: float | None = None
    """Its last sign of life in this generation; None: there was none, it may be loading."""
    killed_s: float | None = None
    leaves: bool = False
    """Whether its host is to be left."""
    pace: Pace | None = None
    """Since the others were last compared with it."""
    num_slow: int = 0
    """Windows in a row in which it was much slower than the others."""
    is_released: bool = False

    @property
    def waits(self) -> bool:
        """Whether it can be part of a generation."""
        return self.holds is not None and self.killed_s is None and not self.is_released


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host whose agent has come, as far as it was judged."""

    is_here: bool = True
    is_asked: bool = False
    """Whether it is being checked."""
    check: Check | None = None
    num_exclusions: int = 0
    until_s: float | None = None
    """When it is checked again, and taken in if it passes; None: it is not left out."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """A job: its processes, and the generation that they are in."""

    limits: Limits
    members: Mapping[str, KnownProcess] = field(default_factory=dict)
    stage: Stage = Stage.GATHERING
    generation: int = 0
    """The newest that was formed."""
    ranks: tuple[str, ...] = ()
    """Its members by rank, also those that have gone since."""
    holders: tuple[str, ...] = ()
    """Who has the state that it goes on from, by place; (): nobody."""
    since_s: float = 0.0
    """When this stage began; of the first, when the first process came."""
    is_told: bool = False
    """Whether all were told to save and stop."""
    is_done: bool = False
    """Whether the run has come to its end in some process, and so in all."""
    savers: tuple[str, ...] = ()
    """Who of those that waited then have the state, by place: the first saves it, with what others hold."""
    leaving: frozenset[str] = frozenset()
    """Hosts that are to be left, or have been."""
    hosts: Mapping[str, Host] = field(default_factory=dict)
    news: tuple[HostDecision, ...] = ()
    """What was decided about hosts, and the next generation is to tell."""
    num_failures: int = 0
    furthest: int = -1
    """The last step that was heard of."""
    furthest_then: int = -2
    """Likewise, at the last failure."""
    num_fruitless: int = 0
    """Failures in a row between which no step was done."""
    code: int = 0
    """Of the first failure that nothing came after."""


# -- what happens ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostArrived:
    """A host has come, or come back; its processes follow once it is checked."""

    host: str


@dataclass(frozen=True)
class HostExamined:
    """What a host's check has measured."""

    host: str
    check: Check


@dataclass(frozen=True)
class AgentLost:
    """The agent of a host does not answer any more."""

    host: str


@dataclass(frozen=True)
class ProcessJoined:
    """A process has begun, and says on which host."""

    member: str
    host: str


@dataclass(frozen=True)
class Ready:
    """It waits for the next generation, with the state after `holds` (-1: none) and older copies of parts.

    In a group, with the part of the state that belongs to `place`.
    """

    member: str
    generation: int
    holds: int
    share: int | None = None
    copies: tuple[tuple[int, int], ...] = ()
    place: int | None = None


@dataclass(frozen=True)
class SetUp:
    """It has the state that the generation goes on from, and can connect."""

    member: str
    generation: int


@dataclass(frozen=True)
class Beat:
    """It lives, and has done this step; now and then it says at which pace."""

    member: str
    generation: int
    step: int
    pace: Pace | None = None


@dataclass(frozen=True)
class Done:
    """The run is over in this process, as in all others."""

    member: str


@dataclass(frozen=True)
class ProcessExited:
    """It has ended, with this code; -n: by signal n."""

    member: str
    code: int


@dataclass(frozen=True)
class Leave:
    """The processes of this host are to end, and the others to go on."""

    host: str


@dataclass(frozen=True)
class Stop:
    """All were told to save and stop."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    HostArrived
    | HostExamined
    | AgentLost
    | ProcessJoined
    | Ready
    | SetUp
    | Beat
    | Done
    | ProcessExited
    | Leave
    | Stop
    | Tick
)


# -- what is to be done ------------------------------------------------------------------------------


@dataclass(frozen=True)
class EndGeneration:
    """Tell these to end their generation at their next step."""

    members: tuple[str, ...]
    generation: int


@dataclass(frozen=True)
class Form:
    """Tell these their ranks, and to take the state of the holder of their place (none: nobody has one)."""

    generation: int
    ranks: tuple[str, ...]
    holders: tuple[str, ...]
    holds: int
    news: tuple[HostDecision, ...] = ()


@dataclass(frozen=True)
class Go:
    """Let all ranks connect."""

    generation: int


@dataclass(frozen=True)
class Again:
    """Tell these that the generation which they got ready for will not be: they are to wait anew."""

    generation: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class Kill:
    """End a process that does not answer."""

    member: str
    why: str


@dataclass(frozen=True)
class StartProcess:
    """Start a process in place of one that failed."""

    host: str
    after_s: float


@dataclass(frozen=True)
class Examine:
    """Have a host check itself."""

    host: str


@dataclass(frozen=True)
class Admit:
    """Start the processes of a host."""

    host: str


@dataclass(frozen=True)
class Refuse:
    """Tell a host that it cannot take part."""

    host: str
    why: str


@dataclass(frozen=True)
class Tell:
    """Say what was decided about a host."""

    decision: HostDecision


@dataclass(frozen=True)
class Release:
    """Tell these that they are not needed: they end by themselves."""

    members: tuple[str, ...]


@dataclass(frozen=True)
class Save:
    """Tell the first to write the state to the disk, of which each of these holds a part, and to end."""

    members: tuple[str, ...]
    holds: int


@dataclass(frozen=True)
class EndJob:
    """The job is over, with this exit code."""

    code: int
    why: str


Action = (
    EndGeneration
    | Form
    | Go
    | Again
    | Kill
    | StartProcess
    | Examine
    | Admit
    | Refuse
    | Tell
    | Release
    | Save
    | EndJob
)

DONE, SAVED = 0, 143
_MOST_NEWS = 20
MOST_FRUITLESS = 3


def step(state: Rendezvous, event: Event, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    """The state after an event, and what is to be done about it."""
    state, first = _take(state, event, now_s)
    state, then = _go_on(state, now_s)
    return state, (*first, *then)


def can_go_on(state: Rendezvous) -> bool:
    """Whether those that do not leave can train by themselves, or wait for others with all of the state."""
    staying = sum(not member.leaves for member in state.members.values())
    if state.limits.group_size == 1:
        return staying > 0  # each of them has all of the state, and can wait for others
    return _usable(state.limits, staying, None) > 0


# -- events ------------------------------------------------------------------------------------------


def _take(state: Rendezvous, event: Event, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    match event:
        case HostArrived(host):
            return _arrived(state, host)
        case HostExamined(host, check):
            return _examined(state, host, check, now_s)
        case AgentLost(host):
            if host not in state.hosts:
                return state, ()
            return _host(state, host, is_here=False, is_asked=False), ()
        case ProcessJoined(name, host):
            if not state.members and state.generation == 0:
                state = dataclasses.replace(state, since_s=now_s)
            leaves = host in state.leaving or is_left_out(state, host)
            return _with(state, name, KnownProcess(host=host, joined_s=now_s, leaves=leaves)), ()
        case Ready():
            return _ready(state, event, now_s)
        case SetUp(name, generation):
            member = state.members.get(name)
            current = state.stage is Stage.FORMING and generation == state.generation
            if member is None or not current or name not in state.ranks:
                return state, ()
            return _changed(state, name, is_set=True), ()
        case Beat(name, generation, done, pace):
            member = state.members.get(name)
            if member is None or generation != member.generation or member.killed_s is not None:
                return state, ()
            state = dataclasses.replace(state, furthest=max(state.furthest, done))
            return _changed(state, name, beat_s=now_s, pace=pace or member.pace), ()
        case Done(name):
            if name not in state.ranks or state.stage is Stage.FORMING:
                return state, ()
            return _over(dataclasses.replace(state, is_done=True), now_s)
        case ProcessExited():
            return _gone(state, event, now_s)
        case Leave(host):
            return _leave(state, host, now_s)
        case Stop():
            return _over(dataclasses.replace(state, is_told=True), now_s)
        case Tick():
            return state, ()


def _ready(state: Rendezvous, event: Ready, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    member = state.members.get(event.member)
    if member is None or event.generation != member.generation:
        return state, ()  # of a generation that is over, or of a process that counts as gone
    state = _changed(
        state,
        event.member,
        holds=event.holds,
        place=event.place,
        copies=event.copies,
        share=event.share,
        waits_since_s=now_s,
        beat_s=None,
        is_set=False,
    )
    if state.stage is Stage.TRAINING and event.member in state.ranks:
        return _gather(state, now_s)  # it has lost somebody, or was asked to come
    if state.stage is Stage.FORMING and event.member in state.ranks:
        return _form_again(state, now_s, but=event.member)  # it could not get the state
    return state, ()


def _gone(
    state: Rendezvous, event: ProcessExited, now_s: float
) -> tuple[Rendezvous, tuple[Action, ...]]:
    member = state.members.get(event.member)
    if member is None:
        return state, ()
    left = {name: one for name, one in state.members.items() if name != event.member}
    state = dataclasses.replace(state, members=left)
    took_part = event.member in state.ranks
    if state.stage is Stage.OVER:
        code, own = state.code, _shell(event.code)
        if member.killed_s is not None and not took_part:
            own = DONE  # nobody needed it any more
        if code in (DONE, SAVED):  # the first failure counts
            code = own if own not in (DONE, SAVED) else max(code, own)
        state = dataclasses.replace(state, code=code)
        if not (state.is_told and took_part):
            return state, ()
        # Who is still getting ready would wait for it, with the state in memory; so would those of a group.
        waits = state.limits.group_size > 1
        names = [n for n in _outstanding(state) if waits or state.members[n].beat_s is None]
        return state, (EndGeneration(tuple(names), state.generation),) if names else ()
    if event.code in (DONE, SAVED) and not member.leaves:
        if took_part or state.generation == 0:
            # Without a word: a script that trains no further, or that was told to stop.
            state, actions = _over(state, now_s)
            code, is_done = max(state.code, event.code), event.code == DONE
            return dataclasses.replace(state, code=code, is_done=is_done), actions
        return state, ()
    actions: tuple[Action, ...] = ()
    if not member.leaves:
        state, actions = _failed(state, member, event.code)
    if took_part and state.stage is Stage.TRAINING:
        state, more = _gather(state, now_s)
        actions += more
    elif state.stage is Stage.FORMING and (took_part or event.member in state.holders):
        state, more = _form_again(state, now_s)
        actions += more
    return state, actions


def _form_again(
    state: Rendezvous, now_s: float, but: str | None = None
) -> tuple[Rendezvous, tuple[Action, ...]]:
    """The generation that forms will not be; `but` waits anew already."""
    others = tuple(name for name in state.ranks if name in state.members and name != but)
    for name in others:
        state = _changed(state, name, holds=None, is_set=False)
    state = dataclasses.replace(state, stage=Stage.GATHERING, since_s=now_s)
    return state, (Again(state.generation, others),)


def _failed(
    state: Rendezvous, member: KnownProcess, code: int
) -> tuple[Rendezvous, tuple[Action, ...]]:
    """Have another process started, while there is any hope.

    Who was killed (by the kernel for memory, by a user, from here) may do better next time; what fails by
    itself again and again, and no step in between, will not.
    """
    has_progressed = state.furthest > state.furthest_then
    num_failures = state.num_failures + 1
    state = dataclasses.replace(
        state,
        num_failures=num_failures,
        num_fruitless=0 if has_progressed else state.num_fruitless + (code != -9),
        furthest_then=state.furthest,
        code=_shell(code),
    )
    if num_failures > state.limits.max_restarts or state.num_fruitless >= MOST_FRUITLESS:
        return state, ()
    pause_s = 0.0 if has_progressed else 2.0**state.num_fruitless
    return state, (StartProcess(member.host, pause_s),)


def _leave(state: Rendezvous, host: str, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    leaving = [name for name, member in state.members.items() if member.host == host]
    for name in leaving:
        state = _changed(state, name, leaves=True)
    return dataclasses.replace(state, leaving=state.leaving | {host}), ()


# -- hosts -------------------------------------------------------------------------------------------


def is_left_out(state: Rendezvous, host: str) -> bool:
    """Whether no process is to be started on it for a while."""
    return host in state.hosts and state.hosts[host].until_s is not None


def _arrived(state: Rendezvous, host: str) -> tuple[Rendezvous, tuple[Action, ...]]:
    state = dataclasses.replace(state, leaving=state.leaving - {host})
    state = _host(state, host, is_here=True, is_asked=not is_left_out(state, host))
    return state, () if is_left_out(state, host) else (Examine(host),)


def _examined(
    state: Rendezvous, host: str, check: Check, now_s: float
) -> tuple[Rendezvous, tuple[Action, ...]]:
    """Take a host in that has passed its check, or that is needed."""
    known = state.hosts.get(host)
    if known is None or not known.is_asked:
        return state, ()
    if check.failure:
        left = {name: one for name, one in state.hosts.items() if name != host}
        state = dataclasses.replace(state, hosts=left)
        state, told = _told(state, HostDecision(host=host, decision="refused", why=check.failure))
        return state, (*told, Refuse(host, check.failure))
    others = [
        one.check
        for name, one in state.hosts.items()
        if name != host and one.check is not None and one.is_here and one.until_s is None
    ]
    why = fitness.unfit(check, others, state.limits.exclude_slow)
    state = _host(state, host, check=check, is_asked=False)
    if why and _suffice(state, but=host):
        return _leave_out(state, host, why, {}, now_s)
    state = _host(state, host, until_s=None)
    if known.until_s is None:
        return state, (Admit(host),)
    passed = why or f"it has passed its check: {check}"
    state, told = _told(state, HostDecision(host=host, decision="taken in again", why=passed))
    return state, (*told, Admit(host))


def _leave_out(
    state: Rendezvous, host: str, why: str, numbers: Mapping[str, float], now_s: float
) -> tuple[Rendezvous, tuple[Action, ...]]:
    """Have the processes of a host leave, and none started on it for a while."""
    before = state.hosts.get(host, Host()).num_exclusions
    seconds = state.limits.exclude_s * 2.0 ** min(before, 16)
    state = _host(state, host, num_exclusions=before + 1, until_s=now_s + seconds)
    for name, member in state.members.items():
        if member.host == host:
            state = _changed(state, name, leaves=True)
    return _told(
        state,
        HostDecision(
            host=host,
            decision="left out",
            why=f"{why}. It is checked again in {seconds:g} s",
            numbers={**numbers, "excluded_s": seconds},
        ),
    )


def _told(state: Rendezvous, decision: HostDecision) -> tuple[Rendezvous, tuple[Action, ...]]:
    news = (*state.news, decision)[-_MOST_NEWS:]  # somebody may come and be refused for days
    return dataclasses.replace(state, news=news), (Tell(decision),)


def _suffice(state: Rendezvous, but: str | None = None) -> bool:
    """Whether there are enough processes for a generation, those of one host aside."""
    there = [m for m in state.members.values() if not m.leaves and m.host != but]
    share = next((m.share for m in there if m.share is not None), None)
    return _usable(state.limits, len(there), share) > 0


def _host(state: Rendezvous, host: str, **fields) -> Rendezvous:
    known = dataclasses.replace(state.hosts.get(host, Host()), **fields)
    return dataclasses.replace(state, hosts={**state.hosts, host: known})


def _gather(state: Rendezvous, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    """End the generation: everybody comes back."""
    state = dataclasses.replace(state, stage=Stage.GATHERING, since_s=now_s)
    return state, (EndGeneration(_outstanding(state), state.generation),)


def _over(state: Rendezvous, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    """Nobody is taken in any more; who waits is let go."""
    if state.stage is Stage.OVER:
        return state, ()
    # Whatever failed on the way has been made good.
    return dataclasses.replace(state, stage=Stage.OVER, since_s=now_s, code=DONE), ()


# -- what follows ------------------------------------------------------------------------------------


def _go_on(state: Rendezvous, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    actions: tuple[Action, ...] = ()
    for follow in (_bury, _silence, _compare, _check_again, _release, _proceed, _end):
        state, more = follow(state, now_s)
        actions += more
    return state, actions


def _bury(state: Rendezvous, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    """Count as gone who was killed and of whom nobody says so."""
    actions: tuple[Action, ...] = ()
    for name, member in list(state.members.items()):
        if member.killed_s is not None and now_s - member.killed_s >= state.limits.farewell_s:
            state, more = _gone(state, ProcessExited(name, -9), now_s)
            actions += more
    return state, actions


def _silence(state: Rendezvous, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    """Kill who takes part and is silent, or does not come back."""
    actions: tuple[Action, ...] = ()
    limits = state.limits
    is_over = state.stage is Stage.OVER
    for name, member in state.members.items() if state.generation or not is_over else ():
        starts = name not in state.ranks and member.holds is None
        since_s = max(member.joined_s, state.since_s) if is_over else member.joined_s
        limit_s = limits.silent_s if is_over else limits.starting_s
        if starts and member.killed_s is None and now_s - since_s >= limit_s:
            state = _changed(state, name, killed_s=now_s)
            why = f"it has not got ready to train within {limit_s:g} s"
            actions += (Kill(name, f"{why}, and the run is over" if is_over else why),)
    for name in _outstanding(state) if not is_over else ():
        member = state.members[name]
        why = ""
        if member.beat_s is not None and now_s - member.beat_s >= limits.silent_s:
            why = f"there was no sign of life from it for {limits.silent_s:g} s"
        elif (
            state.stage is not Stage.TRAINING
            and member.beat_s is None  # one that lives evaluates, saves or compiles, and will come
            and now_s - state.since_s >= limits.patience_s
        ):
            why = f"it has not come back within {limits.patience_s:g} s"
        if why and member.killed_s is None:
            state = _changed(state, name, killed_s=now_s)
            actions += (Kill(name, why),)
    return state, actions


def _compare(state: Rendezvous, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    """When all have said at which pace they go: leave out a host that holds the others up."""
    limits, factor = state.limits, state.limits.exclude_slow
    here = {n: state.members[n] for n in state.ranks if n in state.members}
    paces = {name: member.pace for name, member in here.items() if member.pace is not None}
    if state.stage is not Stage.TRAINING or len(paces) < len(here) or not factor:
        return state, ()
    if limits.group_size > 1:
        return state, ()  # those of a group wait for each other: whose time it is, none can tell
    hosts = {name: member.host for name, member in here.items()}
    samples_s = {name: pace.sample_s for name, pace in paces.items()}
    slow = fitness.are_slow(samples_s, hosts, factor)
    for name, member in here.items():
        num_slow = member.num_slow + 1 if name in slow else 0
        state = _changed(state, name, pace=None, num_slow=num_slow)
    times = fitness.ratios(samples_s, hosts)
    for name in sorted(slow, key=lambda name: -times[name]):
        host, num_slow = hosts[name], state.members[name].num_slow
        gone = {other for other in here if hosts[other] == host}
        count = _usable(limits, len(here) - len(gone), here[name].share)
        if num_slow < limits.slow_windows or not count:
            continue
        saved = fitness.saved(paces, gone, count)
        if saved < fitness.SAVED_AT_LEAST:
            continue
        why = (
            f"{num_slow} times in a row it needed much longer than the others, at last {times[name]:.3g} "
            f"times their median ({1e3 * samples_s[name]:.3g} ms a sample); without it a step takes "
            f"{saved:.0%} less"
        )
        numbers = {"slow_ratio": times[name], "saved": saved, "sample_s": samples_s[name]}
        return _leave_out(state, host, why, numbers, now_s)  # of two, the other one later
    return state, ()


def _check_again(state: Rendezvous, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    """Check the hosts whose time is over, all of them where the others do not suffice."""
    if state.stage is Stage.OVER:
        return state, ()
    actions: tuple[Action, ...] = ()
    for host, known in state.hosts.items():
        if known.until_s is None or known.is_asked or not known.is_here or host in state.leaving:
            continue
        here = [name for name, member in state.members.items() if member.host == host]
        if here and all(state.members[n].waits for n in here) and not _suffice(state, but=host):
            # It has not gone yet, and may hold what the others have not.
            for name in here:
                state = _changed(state, name, leaves=False)
            state = _host(state, host, until_s=None)
            continue
        has_left = not here
        if has_left and (now_s >= known.until_s or not _suffice(state, but=host)):
            state = _host(state, host, is_asked=True)
            actions += (Examine(host),)
    return state, actions


def _release(state: Rendezvous, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    """Let go of those who wait and are to leave; where the job is over, of all who wait.

    Not of one whose state nobody else has yet, nor, where all were told to stop, of one that may have to
    save it.
    """
    staying = [m for m in state.members.values() if m.waits and not m.leaves]

    def may_go(member: KnownProcess) -> bool:
        kept = max((_holds(m) for m in staying if m.place == member.place), default=-1)
        return state.stage is Stage.TRAINING or _holds(member) <= kept

    trains = any(
        not m.waits and not m.is_released and name in state.ranks
        for name, m in state.members.items()
    )
    may_save = state.is_told and not state.savers and trains
    free = tuple(
        name
        for name, member in state.members.items()
        if member.waits
        and not (may_save and _holds(member) >= 0)
        and (state.stage is Stage.OVER or (member.leaves and may_go(member)))
        and not (state.stage is Stage.FORMING and name in state.ranks)
        and not (name in state.savers and state.savers[0] in state.members)
    )
    actions: tuple[Action, ...] = ()
    if state.is_told and not state.savers and not trains:
        savers, holds = _held(state, free)
        if savers:
            state = dataclasses.replace(state, savers=savers)
            actions += (Save(savers, holds),)
        elif any(_holds(state.members[name]) >= 0 for name in free):
            # Parts of it only: it goes on from the last checkpoint.
            state = dataclasses.replace(state, code=max(state.code, SAVED))
        free = tuple(name for name in free if name not in savers)
    for name in (*free, *state.savers[:1]):
        if name in state.members:
            state = _changed(state, name, is_released=True, leaves=True)
    return state, (*actions, Release(free)) if free else actions


def _proceed(state: Rendezvous, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    limits = state.limits
    waiting = [name for name, m in state.members.items() if m.waits and not m.leaves]
    if state.stage is Stage.TRAINING:
        here = [name for name in state.ranks if name in state.members]
        joiners = [name for name in waiting if name not in state.ranks]
        share = None if not joiners else state.members[joiners[0]].share
        more = _usable(limits, len(here) + len(joiners), share)
        if any(state.members[name].leaves for name in here):
            return _gather(state, now_s)
        if more > len(here) and now_s - state.since_s >= limits.admit_every_s:
            return _gather(state, now_s)
        return state, ()
    if state.stage is Stage.GATHERING:
        share = None if not waiting else state.members[waiting[0]].share
        if _outstanding(state) or not _usable(limits, len(waiting), share):
            return state, ()
        some_start = any(not m.waits and not m.leaves for m in state.members.values())
        some_start |= any(host.is_asked for host in state.hosts.values())
        if state.generation == 0 and len(waiting) < limits.most:
            if some_start and now_s - state.since_s < limits.join_s:
                return state, ()
        return _form(state, waiting, now_s)
    if state.stage is Stage.FORMING and all(state.members[name].is_set for name in state.ranks):
        for name in state.ranks:
            state = _changed(
                state,
                name,
                generation=state.generation,
                place=state.ranks.index(name) % limits.group_size,
                holds=None,
                is_set=False,
                beat_s=None,
                pace=None,
                num_slow=0,
            )
        state = dataclasses.replace(state, stage=Stage.TRAINING, since_s=now_s, news=())
        return state, (Go(state.generation),)
    return state, ()


def _form(
    state: Rendezvous, waiting: list[str], now_s: float
) -> tuple[Rendezvous, tuple[Action, ...]]:
    """The next generation: those of the last one keep their order, others follow as they came."""

    def order(name: str) -> tuple[int, float]:
        last = state.ranks.index(name) if name in state.ranks else len(state.ranks)
        return last, state.members[name].waits_since_s

    count = _usable(state.limits, len(waiting), state.members[waiting[0]].share)
    ranks = _placed(state, sorted(waiting, key=order), count)
    # Of those that came furthest; it may be one that leaves, or is one too many.
    others = [name for name, m in state.members.items() if m.waits and name not in ranks]
    holders, holds = _held(state, [*ranks, *others])
    state = dataclasses.replace(
        state,
        stage=Stage.FORMING,
        since_s=now_s,
        generation=state.generation + 1,
        ranks=ranks,
        holders=holders,
    )
    for name in ranks:
        state = _changed(state, name, is_set=False)
    return state, (Form(state.generation, ranks, holders, holds, state.news),)


def _placed(state: Rendezvous, names: list[str], count: int) -> tuple[str, ...]:
    """The ranks of so many of these: who has had a place in a group keeps it, if there is one to keep."""
    size = state.limits.group_size
    by_place = [[n for n in names if state.members[n].place == place] for place in range(size)]
    kept = [of_place[: count // size] for of_place in by_place]
    free = iter([name for name in names if not any(name in of_place for of_place in kept)])
    groups = range(count // size)
    return tuple(
        kept[place][group] if group < len(kept[place]) else next(free)
        for group in groups
        for place in range(size)
    )


def _held(state: Rendezvous, names: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """Who has the newest state of which every place is there, and its step; ((), -1): nobody."""
    places = range(state.limits.group_size)
    held: list[dict[int, str]] = [{} for _ in places]
    for name in reversed(names):
        for place, step in state.members[name].copies:
            held[place].setdefault(step, name)
    for name in reversed(names):
        member = state.members[name]
        # Where each has the whole of it, whose place does not matter.
        place = 0 if len(places) == 1 else member.place
        if place is not None:
            held[place][_holds(member)] = name
    newest = max(set.intersection(*(set(of_place) for of_place in held)) - {-1}, default=-1)
    return (tuple(of_place[newest] for of_place in held), newest) if newest >= 0 else ((), -1)


def _end(state: Rendezvous, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    limits = state.limits
    if state.stage is Stage.OVER:
        if state.members:
            return state, ()
        # Told to stop before its end, it wants a restart, whoever was there to hear it.
        is_stopped = state.is_told and not state.is_done and state.code == DONE
        return state, (EndJob(SAVED if is_stopped else state.code, "all processes have ended"),)
    if state.num_fruitless >= MOST_FRUITLESS:
        why = f"it has failed {state.num_fruitless} times without doing a step in between"
        return dataclasses.replace(state, stage=Stage.OVER), (EndJob(state.code, why),)
    living = sum(not member.leaves for member in state.members.values())
    spare = any(host.is_here and host.until_s is not None for host in state.hosts.values())
    if state.num_failures > limits.max_restarts and living < limits.needed and not spare:
        why = (
            f"{state.num_failures} processes have failed, and {limits.max_restarts} may be replaced"
        )
        return dataclasses.replace(state, stage=Stage.OVER), (EndJob(state.code, why),)
    return state, ()


# -- small things ------------------------------------------------------------------------------------


def _outstanding(state: Rendezvous) -> tuple[str, ...]:
    """Those of the newest generation that have not come back, or, while it forms, are not set."""
    forming = state.stage is Stage.FORMING

    def lacks(member: KnownProcess) -> bool:
        return not member.is_set if forming else member.holds is None

    present = (name for name in state.ranks if name in state.members)
    return tuple(
        name
        for name in present
        if lacks(state.members[name]) and not state.members[name].is_released
    )


def _holds(member: KnownProcess) -> int:
    return -1 if member.holds is None else member.holds


def _usable(limits: Limits, count: int, share: int | None) -> int:
    """How many of so many processes can train together, in whole groups; 0: none.

    >>> _usable(Limits(least=1, most=8), 5, 12), _usable(Limits(least=5, most=8), 5, 12)
    (4, 0)
    >>> _usable(Limits(least=2, most=8, group_size=2), 7, 12)
    6
    """
    size = limits.group_size
    groups = range(min(count, limits.most) // size, limits.needed // size - 1, -1)
    return next((size * n for n in groups if n and (share is None or share % n == 0)), 0)


def _with(state: Rendezvous, name: str, member: KnownProcess) -> Rendezvous:
    return dataclasses.replace(state, members={**state.members, name: member})


def _changed(state: Rendezvous, name: str, **fields) -> Rendezvous:
    return _with(state, name, dataclasses.replace(state.members[name], **fields))


def _shell(code: int) -> int:
    return 128 - code if code < 0 else code
