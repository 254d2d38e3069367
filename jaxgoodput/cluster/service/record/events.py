"""What can happen to a cluster: the records of the journal, of which its state is the sum.

An event is what was decided, never a wish: it is written once it is certain to be allowed, and reading it
again changes the state in the same way, whatever the clock then says.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from jaxgoodput._serial import decode, encode, parse
from jaxgoodput.cluster.service.wire import Submission
from jaxgoodput.specs import Allocation, Hints, Node


@dataclass(frozen=True, kw_only=True)
class NodeJoined:
    """The agent of a node has come, or come back."""

    node: Node
    instance: str


@dataclass(frozen=True, kw_only=True)
class NodeChanged:
    """A node is up, draining or down; its jobs lose what was on one that is down."""

    name: str
    state: Literal["up", "draining", "down"]
    why: str
    silent: bool = False
    """Down because nothing was heard of it: up again as soon as something is."""


@dataclass(frozen=True, kw_only=True)
class JobSubmitted:
    """A job has come."""

    submission: Submission
    secret: str
    """Of its processes."""


@dataclass(frozen=True, kw_only=True)
class JobCancelled:
    """Its user takes a job away."""

    job: str


@dataclass(frozen=True, kw_only=True)
class HintsReceived:
    """A job has told of itself; only its newest hints are kept."""

    job: str
    hints: Hints


@dataclass(frozen=True, kw_only=True)
class PlanMade:
    """A plan is being carried out: jobs that get other devices than they had."""

    changes: Mapping[str, Allocation]
    solved_s: float
    next_solve_s: float


@dataclass(frozen=True, kw_only=True)
class ReasonsGiven:
    """Why every job has what it has, by the last plan."""

    reasons: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class CoordinatorListening:
    """The coordinator of a job listens."""

    job: str
    attempt: int
    address: str


@dataclass(frozen=True, kw_only=True)
class CoordinatorEnded:
    """The coordinator of a job has ended, and with it the job, or this attempt at it."""

    job: str
    attempt: int
    code: int
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class RequestAnswered:
    """A request that may come again has been answered: then it gets the same answer."""

    request: str
    """With who made it."""
    digest: str
    """Of what it asked for."""
    status: int
    body: str


Event: TypeAlias = (
    NodeJoined
    | NodeChanged
    | JobSubmitted
    | JobCancelled
    | HintsReceived
    | PlanMade
    | ReasonsGiven
    | CoordinatorListening
    | CoordinatorEnded
    | RequestAnswered
)

KINDS: Mapping[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        *(NodeJoined, NodeChanged, JobSubmitted, JobCancelled, HintsReceived),
        *(PlanMade, ReasonsGiven, CoordinatorListening, CoordinatorEnded, RequestAnswered),
    )
}


@dataclass(frozen=True)
class JournalEntry:
    """An event with its place in the journal, and when it was."""

    seq: int
    at_s: float
    """Seconds of the service's own clock."""
    wall: float
    """Unix time, for people."""
    event: Event


def to_text(event: Event) -> str:
    """An event as JSON."""
    return json.dumps(encode(event), allow_nan=False, separators=(",", ":"))


def from_text(kind: str, text: str) -> Event:
    """What `to_text` wrote. Raises ValueError where it is something else."""
    if kind not in KINDS:
        raise ValueError(f"there is no event {kind!r}; there are {', '.join(KINDS)}")
    return decode(parse(text), KINDS[kind], kind)


def key_of(event: Event) -> str | None:
    """Events of one key take each other's place: only the newest is kept.

    >>> key_of(Reasoned(reasons={}))
    'reasons'
    """
    if isinstance(event, HintsReceived):
        return f"hints {event.job}"
    if isinstance(event, PlanMade) and not event.changes:  # it says when it was made only
        return "plan"
    return "reasons" if isinstance(event, ReasonsGiven) else None
