"""What the coordinator hears (`JobEvent`) and what it is told to do about it (`Action`).

`rendezvous.step` turns the first into the second. Agents and workers send some of the events as they stand
here, as JSON; see `coordinator`. A `generation` in an event is the one that its sender was in, so that an
event from a finished generation can be recognised and ignored.
"""

from dataclasses import dataclass

from jaxgoodput.launcher.elastic.fitness import Check, HostDecision, Pace
from jaxgoodput.specs import HostFault

# -- events ------------------------------------------------------------------------------------------


class JobEvent:
    """Base class of events: what the coordinator hears, or notices by itself."""


@dataclass(frozen=True)
class HostArrived(JobEvent):
    """Event: an agent has connected, for the first time or again. Its processes start after a check."""

    host: str
    is_beside: bool = False
    """Whether it runs on the machine of the coordinator."""


@dataclass(frozen=True)
class HostExamined(JobEvent):
    """Event: a host has finished its check of itself."""

    host: str
    check: Check


@dataclass(frozen=True)
class AgentLost(JobEvent):
    """Event: the connection to a host's agent has ended."""

    host: str


@dataclass(frozen=True)
class ProcessJoined(JobEvent):
    """Event: a process is being started on a host."""

    member: str
    host: str


@dataclass(frozen=True)
class Ready(JobEvent):
    """Event: a process waits for the next generation, and says which step's state it holds in memory."""

    member: str
    generation: int
    holds: int
    """Step of the state that it holds; -1 without one."""
    share: int | None = None
    """Number that the next generation's group count must divide; None: any count will do."""
    copies: tuple[tuple[int, int], ...] = ()
    """Older copies that it holds, as (place, step)."""
    place: int | None = None
    """Place in its group whose part of the state it holds; None if it was in no group yet."""
    state_at: str = ""
    """Address at which other processes can fetch that state."""


@dataclass(frozen=True)
class LinksTried(JobEvent):
    """Event: a process has tried to reach others; it names which answered, and which did not."""

    member: str
    reached: tuple[str, ...]
    unreached: tuple[str, ...]


@dataclass(frozen=True)
class SetUp(JobEvent):
    """Event: a process has the state that the generation resumes from, and can connect to the others."""

    member: str
    generation: int


@dataclass(frozen=True)
class Beat(JobEvent):
    """Event: a heartbeat of a process that trains, with its last finished step."""

    member: str
    generation: int
    step: int
    pace: Pace | None = None
    """Recent speed of the process, which only some heartbeats carry."""
    device_s: float = 0.0
    """How long the process has been waiting for its own device; 0 if it does not."""
    is_stuck: bool = False
    """Whether that is much longer than ever before."""
    others_s: float = 0.0
    """How long it has been waiting for the other processes; 0 if it does not."""


@dataclass(frozen=True)
class ProcessDone(JobEvent):
    """Event: the run is complete in this process, and therefore in all of them."""

    member: str


@dataclass(frozen=True)
class ProcessExited(JobEvent):
    """Event: a process has ended with an exit code; -n means killed by signal n."""

    member: str
    code: int


@dataclass(frozen=True)
class Leave(JobEvent):
    """Event: a host leaves the job. Its processes are to end after their step, and the others go on."""

    host: str
    why: str = ""
    """What told it to leave: the name of a signal, or a notice; empty if unknown."""
    within_s: float | None = None
    """Seconds until the host is gone, by that notice; None if unknown."""


@dataclass(frozen=True)
class Stop(JobEvent):
    """Event: the whole job was told to save and stop."""


@dataclass(frozen=True)
class Tick(JobEvent):
    """Event: time has passed, but nothing else has happened."""


# -- actions -----------------------------------------------------------------------------------------


class Action:
    """Base class of actions: what the coordinator does about an event."""


@dataclass(frozen=True)
class EndGeneration(Action):
    """Action: ask these processes to leave the generation after their current step."""

    members: tuple[str, ...]
    generation: int


@dataclass(frozen=True)
class EndLeases(Action):
    """Action: have these processes take no further leases of samples, because they will leave."""

    members: tuple[str, ...]


@dataclass(frozen=True)
class Form(Action):
    """Action: tell these processes their ranks in the next generation, and which state it resumes from."""

    generation: int
    ranks: tuple[str, ...]
    holders: tuple[str, ...]
    """Process that holds each place's part of the state; empty if no process holds any."""
    holds: int
    """Step of that state; -1 if there is none."""
    news: tuple[HostDecision, ...] = ()


@dataclass(frozen=True)
class Go(Action):
    """Action: tell all processes of the generation to connect to each other."""

    generation: int


@dataclass(frozen=True)
class Again(Action):
    """Action: tell these processes that the generation they prepared for is cancelled; they wait anew."""

    generation: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class TryLinks(Action):
    """Action: have these processes try to reach each other; each answers with `LinksTried`."""

    members: tuple[str, ...]


@dataclass(frozen=True)
class HangUp(Action):
    """Action: have a process end its connections to others that it doesn't reach, or it waits for them."""

    member: str
    others: tuple[str, ...]


@dataclass(frozen=True)
class Kill(Action):
    """Action: kill a process that does not answer."""

    member: str
    why: str


@dataclass(frozen=True)
class StartProcess(Action):
    """Action: start a process in place of one that failed."""

    host: str
    after_s: float


@dataclass(frozen=True)
class Examine(Action):
    """Action: have a host check itself, before any of its processes is started."""

    host: str


@dataclass(frozen=True)
class Admit(Action):
    """Action: let a host take part, by starting all of its processes."""

    host: str


@dataclass(frozen=True)
class Refuse(Action):
    """Action: tell a host that it cannot take part, and why."""

    host: str
    why: str


@dataclass(frozen=True)
class LetGo(Action):
    """Action: tell a host that the rest of the run does not need it, and why; its agent ends with 0."""

    host: str
    why: str


@dataclass(frozen=True)
class Tell(Action):
    """Action: print a decision about a host."""

    decision: HostDecision
    fault: HostFault | None = None
    """What is wrong with the host, for the program that started this one; None: nothing to report."""


@dataclass(frozen=True)
class Release(Action):
    """Action: tell these processes that they are no longer needed; each then exits by itself."""

    members: tuple[str, ...]


@dataclass(frozen=True)
class Save(Action):
    """Action: have the first of these processes collect the state from all, write a checkpoint and exit."""

    members: tuple[str, ...]
    holds: int
    """Step of the state that is saved."""


@dataclass(frozen=True)
class EndJob(Action):
    """Action: end the job with this exit code."""

    code: int
    why: str
