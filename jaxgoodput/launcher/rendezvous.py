"""Who trains together, and when that changes: a pure state machine that one coordinator drives.

Processes come (`Joined`), wait with the state that they hold (`Ready`), are told their places (`Form`), say
that they have what they need (`SetUp`), and are let go all at once (`Go`), as a *generation*. It ends when
somebody waits to be taken in, is to leave, or has died: all are asked to come back (`Regroup`), each with its
state in memory, and the next one is formed of those that did. A process that does not come back, or from
which no sign of life comes, is killed (`Kill`), and another is started in its place (`Start`).

Every message carries the generation that its sender was in; what comes late, from one that is over, changes
nothing. `step(state, event, now_s)` gives the next state and what is to be done, and is all there is: the
coordinator acts, tests drive it through any order of events.
"""

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many processes a job may have, and for what it waits how long.

    Raises ValueError for numbers that no job can keep.
    """

    least: int
    most: int
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
    farewell_s: float = 2.0
    """From a kill until a process counts as gone, though nobody says so: its host may be cut off."""

    def __post_init__(self):
        if not 1 <= self.least <= self.most:
            raise ValueError(f"{self.least} to {self.most} processes: give 1 <= MIN <= MAX.")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts={self.max_restarts}: give 0 or more.")


class Stage(enum.Enum):
    """What the job is doing."""

    GATHERING = "gathering"  # those who are not in a collective wait for the others
    FORMING = "forming"  # a generation has its ranks, and gets ready to connect
    TRAINING = "training"
    OVER = "over"  # somebody is done, or all were told to stop: nobody is taken in any more


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process, as far as it has been heard of."""

    host: str
    joined_s: float
    generation: int = 0
    """In which it trains, or trained last; 0: none yet."""
    holds: int | None = None
    """The step of the state with which it waits, -1 without one; None: it does not wait."""
    share: int | None = None
    """The number of processes has to divide this: its base batch over its devices. None: any will do."""
    waits_since_s: float = 0.0
    is_set: bool = False
    """Whether it has what it needs for the generation that forms."""
    beat_s: float | None = None
    """Its last sign of life in this generation; None: there was none, it may be loading."""
    killed_s: float | None = None
    leaves: bool = False
    """Whether its host is to be left."""
    is_released: bool = False

    @property
    def waits(self) -> bool:
        """Whether it can be part of a generation."""
        return self.holds is not None and self.killed_s is None and not self.is_released


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """A job: its processes, and the generation that they are in."""

    limits: Limits
    members: Mapping[str, Member] = field(default_factory=dict)
    stage: Stage = Stage.GATHERING
    generation: int = 0
    """The newest that was formed."""
    ranks: tuple[str, ...] = ()
    """Its members by rank, also those that have gone since."""
    holder: str | None = None
    """Who has the state that it goes on from."""
    since_s: float = 0.0
    """When this stage began; of the first, when the first process came."""
    is_told: bool = False
    """Whether all were told to save and stop."""
    saver: str | None = None
    """Who of those that waited then is to save what it holds."""
    leaving: frozenset[str] = frozenset()
    """Hosts that are to be left, or have been."""
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
class Arrived:
    """A host has come, or come back; its processes follow."""

    host: str


@dataclass(frozen=True)
class Joined:
    """A process has begun, and says on which host."""

    member: str
    host: str


@dataclass(frozen=True)
class Ready:
    """It waits for the next generation, with the state after `holds` (-1: none)."""

    member: str
    generation: int
    holds: int
    share: int | None = None


@dataclass(frozen=True)
class SetUp:
    """It has the state that the generation goes on from, and can connect."""

    member: str
    generation: int


@dataclass(frozen=True)
class Beat:
    """It lives, and has done this step."""

    member: str
    generation: int
    step: int


@dataclass(frozen=True)
class Done:
    """The run is over in this process, as in all others."""

    member: str


@dataclass(frozen=True)
class Gone:
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


Event = Arrived | Joined | Ready | SetUp | Beat | Done | Gone | Leave | Stop | Tick


# -- what is to be done ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Regroup:
    """Tell these to end their generation at their next step."""

    members: tuple[str, ...]
    generation: int


@dataclass(frozen=True)
class Form:
    """Tell these their ranks, and to take the state of `holder` (None: nobody has one)."""

    generation: int
    ranks: tuple[str, ...]
    holder: str | None
    holds: int


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
class Start:
    """Start a process in place of one that failed."""

    host: str
    after_s: float


@dataclass(frozen=True)
class Release:
    """Tell these that they are not needed: they end by themselves."""

    members: tuple[str, ...]


@dataclass(frozen=True)
class Save:
    """Tell this one to write the state that it holds to the disk, and to end."""

    member: str


@dataclass(frozen=True)
class End:
    """The job is over, with this exit code."""

    code: int
    why: str


Action = Regroup | Form | Go | Again | Kill | Start | Release | Save | End

DONE, SAVED = 0, 143
MOST_FRUITLESS = 3


def step(state: Rendezvous, event: Event, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    """The state after an event, and what is to be done about it."""
    state, first = _take(state, event, now_s)
    state, then = _go_on(state, now_s)
    return state, (*first, *then)


# -- events ------------------------------------------------------------------------------------------


def _take(state: Rendezvous, event: Event, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    match event:
        case Arrived(host):
            return dataclasses.replace(state, leaving=state.leaving - {host}), ()
        case Joined(name, host):
            if not state.members and state.generation == 0:
                state = dataclasses.replace(state, since_s=now_s)
            leaves = host in state.leaving
            return _with(state, name, Member(host=host, joined_s=now_s, leaves=leaves)), ()
        case Ready():
            return _ready(state, event, now_s)
        case SetUp(name, generation):
            member = state.members.get(name)
            current = state.stage is Stage.FORMING and generation == state.generation
            if member is None or not current or name not in state.ranks:
                return state, ()
            return _changed(state, name, is_set=True), ()
        case Beat(name, generation, done):
            member = state.members.get(name)
            if member is None or generation != member.generation or member.killed_s is not None:
                return state, ()
            state = dataclasses.replace(state, furthest=max(state.furthest, done))
            return _changed(state, name, beat_s=now_s), ()
        case Done(name):
            if name not in state.ranks or state.stage is Stage.FORMING:
                return state, ()
            return _over(state, now_s)
        case Gone():
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


def _gone(state: Rendezvous, event: Gone, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    member = state.members.get(event.member)
    if member is None:
        return state, ()
    left = {name: one for name, one in state.members.items() if name != event.member}
    state = dataclasses.replace(state, members=left)
    took_part = event.member in state.ranks
    if state.stage is Stage.OVER:
        code, own = state.code, _shell(event.code)
        if code in (DONE, SAVED):  # the first failure counts
            code = own if own not in (DONE, SAVED) else max(code, own)
        state = dataclasses.replace(state, code=code)
        if not (state.is_told and took_part):
            return state, ()
        # Who is still getting ready would wait for it, with the state in memory.
        names = [n for n in _outstanding(state) if state.members[n].beat_s is None]
        return state, (Regroup(tuple(names), state.generation),) if names else ()
    if event.code in (DONE, SAVED) and not member.leaves:
        if took_part or state.generation == 0:
            # Without a word: a script that trains no further, or that was told to stop.
            state, actions = _over(state, now_s)
            return dataclasses.replace(state, code=max(state.code, event.code)), actions
        return state, ()
    actions: tuple[Action, ...] = ()
    if not member.leaves:
        state, actions = _failed(state, member, event.code)
    if took_part and state.stage is Stage.TRAINING:
        state, more = _gather(state, now_s)
        actions += more
    elif state.stage is Stage.FORMING and (took_part or event.member == state.holder):
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


def _failed(state: Rendezvous, member: Member, code: int) -> tuple[Rendezvous, tuple[Action, ...]]:
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
    return state, (Start(member.host, pause_s),)


def _leave(state: Rendezvous, host: str, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    leaving = [name for name, member in state.members.items() if member.host == host]
    for name in leaving:
        state = _changed(state, name, leaves=True)
    return dataclasses.replace(state, leaving=state.leaving | {host}), ()


def _gather(state: Rendezvous, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    """End the generation: everybody comes back."""
    state = dataclasses.replace(state, stage=Stage.GATHERING, since_s=now_s)
    return state, (Regroup(_outstanding(state), state.generation),)


def _over(state: Rendezvous, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    """Nobody is taken in any more; who waits is let go."""
    if state.stage is Stage.OVER:
        return state, ()
    # Whatever failed on the way has been made good.
    return dataclasses.replace(state, stage=Stage.OVER, since_s=now_s, code=DONE), ()


# -- what follows ------------------------------------------------------------------------------------


def _go_on(state: Rendezvous, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    actions: tuple[Action, ...] = ()
    for follow in (_bury, _silence, _release, _proceed, _end):
        state, more = follow(state, now_s)
        actions += more
    return state, actions


def _bury(state: Rendezvous, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    """Count as gone who was killed and of whom nobody says so."""
    actions: tuple[Action, ...] = ()
    for name, member in list(state.members.items()):
        if member.killed_s is not None and now_s - member.killed_s >= state.limits.farewell_s:
            state, more = _gone(state, Gone(name, -9), now_s)
            actions += more
    return state, actions


def _silence(state: Rendezvous, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    """Kill who takes part and is silent, or does not come back."""
    actions: tuple[Action, ...] = ()
    limits = state.limits
    is_over = state.stage is Stage.OVER
    for name, member in state.members.items() if not is_over else ():
        starts = name not in state.ranks and member.holds is None
        if starts and member.killed_s is None and now_s - member.joined_s >= limits.starting_s:
            state = _changed(state, name, killed_s=now_s)
            why = f"it has not got ready to train within {limits.starting_s:g} s"
            actions += (Kill(name, why),)
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


def _release(state: Rendezvous, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    """Let go of those who wait and are to leave; where the job is over, of all who wait.

    Not of one whose state nobody else has yet.
    """
    kept = max((_holds(m) for m in state.members.values() if m.waits and not m.leaves), default=-1)

    def may_go(member: Member) -> bool:
        return state.stage is Stage.TRAINING or _holds(member) <= kept

    free = tuple(
        name
        for name, member in state.members.items()
        if member.waits
        and (state.stage is Stage.OVER or (member.leaves and may_go(member)))
        and not (state.stage is Stage.FORMING and name in state.ranks)
    )
    holders = [name for name in free if _holds(state.members[name]) >= 0]
    trains = any(not m.waits and name in state.ranks for name, m in state.members.items())
    for name in free:
        state = _changed(state, name, is_released=True, leaves=True)
    actions: tuple[Action, ...] = ()
    if state.is_told and state.saver is None and holders and not trains:
        saver = max(holders, key=lambda name: _holds(state.members[name]))
        state = dataclasses.replace(state, saver=saver)
        actions += (Save(saver),)
        free = tuple(name for name in free if name != saver)
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
        if state.generation == 0 and len(waiting) < limits.most:
            if some_start and now_s - state.since_s < limits.join_s:
                return state, ()
        return _form(state, waiting, now_s)
    if state.stage is Stage.FORMING and all(state.members[name].is_set for name in state.ranks):
        for name in state.ranks:
            state = _changed(
                state, name, generation=state.generation, holds=None, is_set=False, beat_s=None
            )
        state = dataclasses.replace(state, stage=Stage.TRAINING, since_s=now_s)
        return state, (Go(state.generation),)
    return state, ()


def _form(
    state: Rendezvous, waiting: list[str], now_s: float
) -> tuple[Rendezvous, tuple[Action, ...]]:
    """The next generation: those of the last one keep their order, others follow as they came."""

    def place(name: str) -> tuple[int, float]:
        last = state.ranks.index(name) if name in state.ranks else len(state.ranks)
        return last, state.members[name].waits_since_s

    count = _usable(state.limits, len(waiting), state.members[waiting[0]].share)
    ranks = tuple(sorted(waiting, key=place)[:count])
    # The first of those that came furthest; it may be one that leaves, or is one too many.
    others = [name for name, m in state.members.items() if m.waits and name not in ranks]
    holder = max([*ranks, *others], key=lambda name: _holds(state.members[name]))
    state = dataclasses.replace(
        state,
        stage=Stage.FORMING,
        since_s=now_s,
        generation=state.generation + 1,
        ranks=ranks,
        holder=holder,
    )
    for name in ranks:
        state = _changed(state, name, is_set=False)
    furthest = _holds(state.members[holder])
    return state, (Form(state.generation, ranks, holder if furthest >= 0 else None, furthest),)


def _end(state: Rendezvous, now_s: float) -> tuple[Rendezvous, tuple[Action, ...]]:
    limits = state.limits
    if state.stage is Stage.OVER:
        if state.members:
            return state, ()
        return state, (End(state.code, "all processes have ended"),)
    if state.num_fruitless >= MOST_FRUITLESS:
        why = f"it has failed {state.num_fruitless} times without doing a step in between"
        return dataclasses.replace(state, stage=Stage.OVER), (End(state.code, why),)
    living = sum(not member.leaves for member in state.members.values())
    if state.num_failures > limits.max_restarts and living < limits.least:
        why = (
            f"{state.num_failures} processes have failed, and {limits.max_restarts} may be replaced"
        )
        return dataclasses.replace(state, stage=Stage.OVER), (End(state.code, why),)
    return state, ()


# -- small things ------------------------------------------------------------------------------------


def _outstanding(state: Rendezvous) -> tuple[str, ...]:
    """Those of the newest generation that have not come back, or, while it forms, are not set."""
    forming = state.stage is Stage.FORMING

    def lacks(member: Member) -> bool:
        return not member.is_set if forming else member.holds is None

    present = (name for name in state.ranks if name in state.members)
    return tuple(
        name
        for name in present
        if lacks(state.members[name]) and not state.members[name].is_released
    )


def _holds(member: Member) -> int:
    return -1 if member.holds is None else member.holds


def _usable(limits: Limits, count: int, share: int | None) -> int:
    """How many of so many processes can train together; 0: none.

    >>> _usable(Limits(least=1, most=8), 5, 12), _usable(Limits(least=5, most=8), 5, 12)
    (4, 0)
    """
    sizes = range(min(count, limits.most), limits.least - 1, -1)
    return next((size for size in sizes if share is None or share % size == 0), 0)


def _with(state: Rendezvous, name: str, member: Member) -> Rendezvous:
    return dataclasses.replace(state, members={**state.members, name: member})


def _changed(state: Rendezvous, name: str, **fields) -> Rendezvous:
    return _with(state, name, dataclasses.replace(state.members[name], **fields))


def _shell(code: int) -> int:
    return 128 - code if code < 0 else code
