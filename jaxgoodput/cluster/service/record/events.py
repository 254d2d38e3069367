"""The events of a cluster. The journal stores them in order, and together they make up the state.

An event is a decision, not a request: it is written only once it is allowed. Applying it again changes the
state in the same way, whatever the clock says by then.
"""

import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from jaxgoodput._fields.serial import decode, encode, parse
from jaxgoodput.cluster.service.wire import Submission
from jaxgoodput.specs import Allocation, Hints, HostFault, Node


@dataclass(frozen=True, kw_only=True)
class NodeJoined:
    """An event of the journal: the agent of a node has joined, or joined again."""

    node: Node
    instance: str


@dataclass(frozen=True, kw_only=True)
class NodeChanged:
    """An event of the journal: a node is now up, draining or down. If down, jobs lose its devices."""

    name: str
    state: Literal["up", "draining", "down"]
    why: str
    silent: bool = False
    """Whether it is down only because it sent no heartbeat; the next one brings it back."""
    forgets: bool = False
    """Whether what jobs have reported of the node is forgotten, because an operator says that it is well."""


@dataclass(frozen=True, kw_only=True)
class NodeReported:
    """An event of the journal: a job has reported a node, which is kept apart from it for a while."""

    node: str
    job: str
    fault: HostFault
    why: str
    slow_ratio: float | None
    until_s: float
    """Time until which the node is kept apart from the job, in seconds of the service's own clock."""
    all_until_s: float | None
    """Time until which it is kept apart from all jobs; None if no other job has reported it lately."""


@dataclass(frozen=True, kw_only=True)
class JobSubmitted:
    """An event of the journal: a user has submitted a job."""

    submission: Submission
    secret: str
    """The secret that the job's processes share."""


@dataclass(frozen=True, kw_only=True)
class JobCancelled:
    """An event of the journal: a user has cancelled a job."""

    job: str


@dataclass(frozen=True, kw_only=True)
class HintsReceived:
    """An event of the journal: a job has reported measurements. Only a job's newest ones are stored."""

    job: str
    hints: Hints


@dataclass(frozen=True, kw_only=True)
class PlanMade:
    """An event of the journal: a new plan is in force, by which some jobs hold other devices."""

    changes: Mapping[str, Allocation]
    """New devices of the jobs that get others, by job."""
    solved_s: float
    """Time of the policy's decision, in seconds of the service's own clock."""
    next_solve_s: float
    """Latest time of the next decision."""


@dataclass(frozen=True, kw_only=True)
class ReasonsGiven:
    """An event of the journal: the reasons that the last plan gives for what each job has."""

    reasons: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class CoordinatorListening:
    """An event of the journal: the coordinator of a job now listens at an address for its processes."""

    job: str
    attempt: int
    address: str


@dataclass(frozen=True, kw_only=True)
class CoordinatorEnded:
    """An event of the journal: a job's coordinator has ended, and so the job or one attempt to run it."""

    job: str
    attempt: int
    code: int
    why: str = ""
    retries_unsaved: bool = False
    """Whether 75 calls for another attempt. Earlier versions ended the job, and their journals stay true."""


@dataclass(frozen=True, kw_only=True)
class DevicesReleased:
    """An event of the journal: a job goes on without these devices of a node, and gets no others for them."""

    job: str
    attempt: int
    node: str
    devices: tuple[int, ...]
    """Local indices."""


@dataclass(frozen=True, kw_only=True)
class RequestAnswered:
    """An event of the journal: a request with an idempotency key got this answer, also for repetitions."""

    request: str
    """The idempotency key, with the caller and the path."""
    digest: str
    """The digest of the request's body."""
    status: int
    body: str


Event: TypeAlias = (
    NodeJoined
    | NodeChanged
    | NodeReported
    | JobSubmitted
    | JobCancelled
    | HintsReceived
    | PlanMade
    | ReasonsGiven
    | CoordinatorListening
    | CoordinatorEnded
    | DevicesReleased
    | RequestAnswered
)

KINDS: Mapping[str, type[Event]] = {kind.__name__: kind for kind in typing.get_args(Event)}


@dataclass(frozen=True)
class JournalEntry:
    """An event with its position in the journal and the time when it happened."""

    seq: int
    at_s: float
    """Seconds of the service's own clock."""
    wall: float
    """Unix time, for people."""
    event: Event


def to_text(event: Event) -> str:
    """Return an event as JSON."""
    return json.dumps(encode(event), allow_nan=False, separators=(",", ":"))


def from_text(kind: str, text: str) -> Event:
    """Read an event of a given kind from its JSON. Raises ValueError if the text is not such an event."""
    if kind not in KINDS:
        raise ValueError(
            f"there is no event {kind!r}; the events are {', '.join(KINDS)}. "
            "Is the program older than the journal?"
        )
    return decode(parse(text), KINDS[kind], kind)


def key_of(event: Event) -> str | None:
    """Return the key of an event that replaces earlier events of the same key, or None.

    >>> key_of(ReasonsGiven(reasons={}))
    'reasons'
    """
    if isinstance(event, HintsReceived):
        return f"hints {event.job}"
    if isinstance(event, PlanMade) and not event.changes:  # it only tells when it was made
        return "plan"
    return "reasons" if isinstance(event, ReasonsGiven) else None
