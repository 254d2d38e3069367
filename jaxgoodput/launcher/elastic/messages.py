"""Messages between the coordinator, the agents and the workers of a job.

Each is a dataclass that crosses the wire as a JSON object with the name of its class. Some events and actions
of `events` are sent as they are. Probes and states, which carry bytes, are not among these messages.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxgoodput import _wire as wire
from jaxgoodput._fields.serial import decode, encode
from jaxgoodput.launcher.elastic import events as ev
from jaxgoodput.launcher.elastic.fitness import HostDecision


@dataclass(frozen=True)
class AgentHello:
    """The first message that an agent sends to the coordinator."""

    host: str
    slots: int
    """Number of processes that its host runs."""
    instance: str
    """Random name of this agent process, which tells a reconnection from a second agent of the same name."""
    facts: Mapping[str, str]
    """Versions and digests that must be equal on all hosts."""


@dataclass(frozen=True)
class WorkerHello:
    """The first message that a worker sends to the coordinator."""

    member: str


@dataclass(frozen=True)
class Connected:
    """Message of a worker: JAX's coordination service has connected it to its whole generation."""

    generation: int


@dataclass(frozen=True)
class Accepted:
    """Message to an agent: the coordinator has accepted it."""


@dataclass(frozen=True)
class CheckHost:
    """Message to an agent: it is to check its host, also against training processes at these addresses."""

    peers: tuple[str, ...]


@dataclass(frozen=True)
class StartWorker:
    """Message to an agent: it is to start a worker."""

    member: str


@dataclass(frozen=True)
class StopWorkers:
    """Message to an agent: it is to send SIGTERM to its workers, which then save and stop."""


@dataclass(frozen=True)
class Welcome:
    """Message to a worker: the coordinator's answer to its `WorkerHello`."""

    num_training: int
    """Number of processes that train already."""
    group_size: int
    """Number of processes that share one copy of the model."""


@dataclass(frozen=True)
class Assignment:
    """Message to a worker: its rank in the generation that forms, and the state that it starts from."""

    generation: int
    rank: int
    count: int
    """Number of processes in the generation."""
    holds: int
    """Step of the state that all resume from; -1 if there is none."""
    state_at: str | None
    """Address of the worker that holds this worker's part of that state; None if there is no state."""
    holder: str
    """Name of that worker; empty if there is no state."""
    neighbour_at: str | None
    """Address of a worker on another host, which keeps copies for this one; None if there is none."""
    failure_every_s: float
    """Mean seconds between failures of the job so far."""
    news: tuple[HostDecision, ...] = ()
    """Decisions about hosts since the last generation, for the hooks."""


@dataclass(frozen=True)
class Connect:
    """Message to workers: the generation begins, so connect to JAX's service, unless you are alone."""

    generation: int
    service: str
    """Address of the service; empty for a single process."""


@dataclass(frozen=True)
class StateAddresses:
    """Message to a worker: it is to try to reach other workers, and to answer with `events.LinksTried`."""

    state_at: Mapping[str, str]
    """Addresses at which they serve their state, by name."""


@dataclass(frozen=True)
class HangUpOn:
    """Message to a worker: it is to end all connections to the hosts of these addresses."""

    state_at: tuple[str, ...]


@dataclass(frozen=True)
class SaveParts:
    """Message to a worker: collect the parts of the state after a step from these addresses, and save it."""

    parts_at: tuple[str | None, ...]
    holds: int
    """Step of that state."""


FROM_AGENTS = (ev.ProcessExited, ev.Leave, ev.HostExamined)
FROM_WORKERS = (ev.Ready, ev.LinksTried, ev.SetUp, ev.Beat, ev.ProcessDone, Connected)
TO_AGENTS = (Accepted, ev.Refuse, ev.LetGo, CheckHost, StartWorker, ev.Kill, StopWorkers, ev.EndJob)
TO_WORKERS = (Welcome, Assignment, Connect, ev.Again, ev.EndGeneration, ev.Release, SaveParts)
TO_WORKERS += (StateAddresses, HangUpOn, ev.EndLeases)


def encoded(message: Any) -> dict[str, Any]:
    """Return a message as the dictionary that `Channel.send` takes."""
    return {"type": type(message).__name__} | encode(message)


def decoded(body: Mapping[str, Any], kinds: tuple[type, ...]) -> Any:
    """Return the message that `encoded` wrote. Raises ValueError if it is of none of these kinds.

    >>> decoded(encoded(ev.Leave("a")), FROM_AGENTS)
    Leave(host='a', why='', within_s=None)
    """
    fields = dict(body)
    name = fields.pop("type", None)
    for kind in kinds:
        if kind.__name__ == name:
            return decode(fields, kind, kind.__name__)
    raise ValueError(
        f"a message of type {name!r} is not expected here; do all hosts run the same jaxgoodput?"
    )


def received(
    channel: wire.Channel, kinds: tuple[type, ...], on_refusal: Callable[[Exception], None]
) -> Iterator[Any]:
    """Yield the messages of a connection until it ends.

    An invalid message ends the connection too, and is reported to `on_refusal`.
    """
    try:
        while (body := channel.receive()) is not None:
            yield decoded(body, kinds)
    except (wire.WrongSecret, ValueError) as error:
        on_refusal(error)
        channel.close()
