"""The coordinator of a job: it drives `rendezvous.step` and carries out the actions that follow.

Agents and workers connect to it. Each connection has a thread that reads, and puts what it reads on one
queue as events. A single thread takes the events off the queue, so no decision races with another.
"""

import dataclasses
import queue
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxgoodput import _wire as wire
from jaxgoodput.clock import Clock
from jaxgoodput.launcher.elastic import events as ev
from jaxgoodput.launcher.elastic import fitness, messages, rendezvous
from jaxgoodput.launcher.elastic.jax_service import JaxService
from jaxgoodput.launcher.elastic.listener import Listener
from jaxgoodput.launcher.elastic.state import Limits, Rendezvous, Stage
from jaxgoodput.launcher.supervise import SAVED, UsageError, say

TICK_S = 0.1
_REPORT_EVERY_S = 30.0
_NO_FAILURE_YET_S = 3600.0  # added to a job's age, so that a young job does not seem to fail often
CAME_BACK = "it has come back"


@dataclass(frozen=True)
class HostJoined:
    """An agent has connected, for the first time or again."""

    hello: messages.AgentHello
    channel: wire.Channel


@dataclass(frozen=True)
class HostLost:
    """An agent's connection has ended; without a channel, whichever connection it has."""

    host: str
    why: str
    channel: wire.Channel | None = None


@dataclass(frozen=True)
class WorkerCame:
    """A worker has connected."""

    member: str
    channel: wire.Channel


@dataclass(frozen=True)
class WorkerLost:
    """A worker's connection has ended. Whether the worker has ended too, its agent will report."""

    member: str
    channel: wire.Channel


class Coordinator:
    """Serves one job at `address` until it is over.

    `facts` must be the same on all hosts. Raises UsageError if it cannot listen at `host:port`.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        host: str,
        port: int | None,
        secret: str,
        facts: Mapping[str, str],
        clock: Clock,
    ):
        self._facts = facts
        self._clock = clock
        self._began_s = clock.now()
        self._state = Rendezvous(limits=limits, since_s=self._began_s)
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._agents: dict[str, HostJoined] = {}
        self._ever_came: set[str] = set()  # hosts
        self._workers: dict[str, wire.Channel] = {}
        self._state_at: dict[str, str] = {}  # address at which each worker serves its state
        self._starts: list[tuple[float, str]] = []  # processes to start: when, and on which host
        self._num_started = 0
        self._reported_s = 0.0
        self._end: ev.EndJob | None = None
        self._jax = JaxService(host)
        try:
            self._listener = Listener(
                host,
                port,
                secret,
                self._greet,
                name="coordinator",
                on_error=lambda error: say(f"a connection was refused: {error}"),
            )
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"the coordinator cannot listen at {host}:{port}: {error}. Choose another "
                "--rdzv-endpoint, or none for a free port."
            ) from None

    @property
    def address(self) -> str:
        """Where agents and workers connect, as HOST:PORT."""
        return self._listener.address

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts whose agents are connected."""
        return tuple(self._agents)

    def run(self, told: Callable[[], str | None]) -> int:
        """Serve until the job is over; return its exit code.

        `told` is polled for the name of a signal that this process received, or None. The first signal saves
        and stops the job; a second SIGINT ends it at once.
        """
        is_told = False
        while self._end is None and not (is_told and not self._agents and not self._state.members):
            try:
                self._take(self._events.get(timeout=TICK_S))
            except queue.Empty:
                self._happen(ev.Tick())
            name = told()
            if is_told and name == "SIGINT":
                self._end = ev.EndJob(128 + signal.SIGINT, "it was interrupted twice")
            elif not is_told and name is not None:
                is_told = True
                say(f"{name}: telling all processes to save and stop")
                self._stop()
            self._start_due()
            self._report_waiting()
        return SAVED if self._end is None else self._end.code

    def close(self) -> None:
        """Tell the agents that the job is over, and close all connections."""
        end = self._end or ev.EndJob(1, "the coordinator has ended")
        for agent in list(self._agents.values()):
            _send(agent.channel, end)
        self._jax.close()
        channels = [agent.channel for agent in list(self._agents.values())]
        for channel in [*channels, *list(self._workers.values())]:
            channel.close()
        self._listener.close()

    def give_up(self, code: int, why: str) -> None:
        """End the job because too few hosts are left and no other can come. Thread-safe."""
        self._events.put(ev.EndJob(code, why))

    def lost(self, host: str, why: str) -> None:
        """Report that the agent of a host has ended. Thread-safe."""
        self._events.put(HostLost(host, why))

    # -- events ----------------------------------------------------------------------------------

    def _take(self, event: Any) -> None:
        _EVENTS.get(type(event), Coordinator._happen)(self, event)

    def _happen(self, event: ev.Event) -> None:
        self._state, actions = rendezvous.step(self._state, event, self._clock.now())
        for action in actions:
            _ACTIONS[type(action)](self, action)

    def _host_joined(self, event: HostJoined) -> None:
        host, slots = event.hello.host, event.hello.slots
        if host in self._agents:
            self._lose(HostLost(host, CAME_BACK))
        self._agents[host] = event
        self._ever_came.add(host)
        _send(event.channel, messages.Accepted())
        say(f"{host} has joined, with {slots} process{'es' * (slots > 1)}")
        self._happen(ev.HostArrived(host))

    def _lose(self, event: HostLost) -> None:
        known = self._agents.get(event.host)
        if known is None or event.channel not in (None, known.channel):
            if event.host not in self._ever_came and event.channel is None:
                say(f"{event.host} did not join: {event.why}")
            return
        del self._agents[event.host]
        known.channel.close()
        say(f"{event.host} has left: {event.why}")
        for name, member in list(self._state.members.items()):
            if member.host == event.host:
                self._take(ev.ProcessExited(name, -9))
        self._forget_starts(event.host)
        self._happen(ev.AgentLost(event.host))

    def _leave(self, event: ev.Leave) -> None:
        self._happen(event)
        if self._state.members and not self._state.can_go_on:
            self._stop()  # the last processes leave: they save, and the job ends

    def _stop(self) -> None:
        self._happen(ev.Stop())
        for agent in self._agents.values():
            _send(agent.channel, messages.StopWorkers())

    def _ready(self, event: ev.Ready) -> None:
        self._state_at[event.member] = event.state_at
        self._happen(event)

    def _exited(self, event: ev.ProcessExited) -> None:
        state = self._state
        self._happen(event)
        if state.stage is Stage.TRAINING and not self._jax.has_connected:
            if event.member in state.ranks:
                self._jax.stand_in(state.ranks.index(event.member))

    def _worker_came(self, event: WorkerCame) -> None:
        self._workers[event.member] = event.channel

    def _worker_lost(self, event: WorkerLost) -> None:
        event.channel.close()
        if self._workers.get(event.member) is event.channel:
            del self._workers[event.member]

    def _connected(self, event: messages.Connected) -> None:
        # One worker returns from JAX's registration only after all others have registered.
        if event.generation == self._state.generation:
            self._jax.has_connected = True

    # -- actions ---------------------------------------------------------------------------------

    def _end_generation(self, action: ev.EndGeneration) -> None:
        self._tell_all(action.members, action)

    def _form(self, action: ev.Form) -> None:
        since = f"step {action.holds}" if action.holders else "the newest checkpoint, if any"
        say(f"generation {action.generation}: {', '.join(action.ranks)}, from {since}")
        past_s = self._clock.now() - self._began_s + _NO_FAILURE_YET_S
        for rank, name in enumerate(action.ranks):
            holder = action.holders[rank % len(action.holders)] if action.holders else ""
            self._tell(
                name,
                messages.Assignment(
                    generation=action.generation,
                    rank=rank,
                    count=len(action.ranks),
                    holds=action.holds,
                    state_at=self._state_at.get(holder),
                    neighbour_at=self._state_at.get(_neighbour(action.ranks, rank)),
                    failure_every_s=past_s / (self._state.num_failures + 1),
                    news=action.news,
                ),
            )

    def _go(self, action: ev.Go) -> None:
        service = self._jax.begin(len(self._state.ranks))
        self._tell_all(self._state.ranks, messages.Connect(action.generation, service))

    def _again(self, action: ev.Again) -> None:
        self._tell_all(action.members, action)

    def _kill(self, action: ev.Kill) -> None:
        say(f"SIGKILL to {action.member}: {action.why}")
        self._tell_agent(_host_of(action.member), action)

    def _start_process(self, action: ev.StartProcess) -> None:
        if action.host in self._agents:
            say(f"another process starts on {action.host} in {action.after_s:g} s")
            self._starts.append((self._clock.now() + action.after_s, action.host))

    def _examine(self, action: ev.Examine) -> None:
        peers = [self._state_at[n] for n in self._state.present_ranks if n in self._state_at]
        self._tell_agent(action.host, messages.CheckHost(tuple(peers)))

    def _admit(self, action: ev.Admit) -> None:
        self._forget_starts(action.host)  # all of its processes start now
        agent = self._agents.get(action.host)
        for _ in range(0 if agent is None else agent.hello.slots):
            self._start(action.host)

    def _refuse(self, action: ev.Refuse) -> None:
        self._tell_agent(action.host, action)

    def _report_decision(self, action: ev.Tell) -> None:
        say(str(action.decision))

    def _release(self, action: ev.Release) -> None:
        self._tell_all(action.members, action)

    def _save(self, action: ev.Save) -> None:
        parts_at = tuple(self._state_at.get(name) for name in action.members)
        self._tell(action.members[0], messages.SaveParts(parts_at, action.holds))

    def _end_job(self, action: ev.EndJob) -> None:
        if action.code:
            say(f"the job ends with exit code {action.code}: {action.why}")
        self._end = action

    def _start_due(self) -> None:
        now_s = self._clock.now()
        due = [host for at_s, host in self._starts if at_s <= now_s]
        self._starts = [(at_s, host) for at_s, host in self._starts if at_s > now_s]
        for host in due:
            self._start(host)

    def _forget_starts(self, host: str) -> None:
        self._starts = [(at_s, other) for at_s, other in self._starts if other != host]

    def _start(self, host: str) -> None:
        state = self._state
        is_over = state.stage is Stage.OVER
        # All processes of a host that is left out start together when it is taken in again.
        if host not in self._agents or is_over or host in state.leaving or state.is_left_out(host):
            return
        self._num_started += 1
        name = f"{host}.{self._num_started}"
        self._happen(ev.ProcessJoined(name, host))
        self._tell_agent(host, messages.StartWorker(name))

    def _report_waiting(self) -> None:
        """Say now and then why the job does not train."""
        state, now_s = self._state, self._clock.now()
        since_s = max(self._reported_s, state.since_s)
        if state.stage is not Stage.GATHERING or now_s - since_s < _REPORT_EVERY_S:
            return
        self._reported_s = now_s
        waiting = sum(member.waits for member in state.members.values())
        shares = {member.share for member in state.members.values()} - {None}
        say(
            f"{waiting} processes are ready, and {state.limits.needed} are needed to train"
            + "".join(f", in a number of groups that divides {share}" for share in shares)
            + f"; connected hosts: {', '.join(self._agents) or 'none'}"
        )

    def _tell(self, member: str, message: Any) -> None:
        if member in self._workers:
            _send(self._workers[member], message)

    def _tell_all(self, members: Sequence[str], message: Any) -> None:
        for member in members:
            self._tell(member, message)

    def _tell_agent(self, host: str, message: Any) -> None:
        if host in self._agents:
            _send(self._agents[host].channel, message)

    # -- threads that read -----------------------------------------------------------------------

    def _greet(self, channel: wire.Channel, hello: Mapping[str, Any]) -> None:
        if hello.get("type") == "probe":
            fitness.answer(channel)
            return
        try:
            told = messages.decoded(hello, (messages.AgentHello, messages.WorkerHello))
        except ValueError:
            channel.close()
            raise
        if isinstance(told, messages.AgentHello):
            self._hear_agent(channel, told)
        else:
            self._hear_worker(channel, told.member)

    def _hear_agent(self, channel: wire.Channel, hello: messages.AgentHello) -> None:
        refusal = self._refusal(hello)
        if refusal is not None:
            say(f"{hello.host} was refused: {refusal}")
            _send(channel, ev.Refuse(hello.host, refusal))
            channel.close()
            return
        self._events.put(HostJoined(hello, channel))
        for message in messages.received(channel, messages.FROM_AGENTS, _say_refused(channel)):
            if isinstance(message, ev.HostExamined):
                say(f"{message.host} was checked: {message.check.failure or message.check}")
            self._events.put(message)
        self._events.put(HostLost(hello.host, "its agent does not answer", channel))

    def _hear_worker(self, channel: wire.Channel, member: str) -> None:
        state = self._state
        _send(channel, messages.Welcome(len(state.present_ranks), state.limits.group_size))
        self._events.put(WorkerCame(member, channel))
        for message in messages.received(channel, messages.FROM_WORKERS, _say_refused(channel)):
            self._events.put(message)
        self._events.put(WorkerLost(member, channel))

    def _refusal(self, hello: messages.AgentHello) -> str | None:
        """Return why an agent cannot take part; None if it can."""
        known = self._agents.get(hello.host)
        if known is not None and known.hello.instance != hello.instance:
            return f"there is an agent of the name {hello.host} already. Give each its own --name."
        for name, own in self._facts.items():
            other = hello.facts.get(name)
            if other != own:
                return (
                    f"{name} is {other} there and {own} on the host of the coordinator. All hosts of a job "
                    "need the same code and the same command."
                )
        return None


_EVENTS: Mapping[type, Callable] = {
    HostJoined: Coordinator._host_joined,
    HostLost: Coordinator._lose,
    WorkerCame: Coordinator._worker_came,
    WorkerLost: Coordinator._worker_lost,
    messages.Connected: Coordinator._connected,
    ev.Leave: Coordinator._leave,
    ev.Ready: Coordinator._ready,
    ev.ProcessExited: Coordinator._exited,
    ev.EndJob: Coordinator._end_job,
}  # other events go to the state machine as they are
_ACTIONS: Mapping[type[ev.Action], Callable] = {
    ev.EndGeneration: Coordinator._end_generation,
    ev.Form: Coordinator._form,
    ev.Go: Coordinator._go,
    ev.Again: Coordinator._again,
    ev.Kill: Coordinator._kill,
    ev.StartProcess: Coordinator._start_process,
    ev.Examine: Coordinator._examine,
    ev.Admit: Coordinator._admit,
    ev.Refuse: Coordinator._refuse,
    ev.Tell: Coordinator._report_decision,
    ev.Release: Coordinator._release,
    ev.Save: Coordinator._save,
    ev.EndJob: Coordinator._end_job,
}


def _send(channel: wire.Channel, message: Any) -> None:
    try:
        channel.send(messages.encoded(message))
    except OSError:
        pass  # the thread that reads this channel notices that it has ended


def _say_refused(channel: wire.Channel) -> Callable[[Exception], None]:
    return lambda error: say(f"{channel.peer} was refused: {error}")


def _host_of(member: str) -> str:
    return member.rpartition(".")[0]


def _neighbour(ranks: Sequence[str], rank: int) -> str:
    """Return the next process on another host, which keeps copies for this one; "" if there is none."""
    following = (*ranks[rank + 1 :], *ranks[:rank])
    return next((name for name in following if _host_of(name) != _host_of(ranks[rank])), "")


def with_slots(limits: Limits, slots: int, *, grouped: bool = False) -> Limits:
    """Convert limits in hosts into limits in processes, with `slots` processes per host.

    If `grouped`, all processes of a host belong to one group; otherwise each is a group of its own.
    """
    return dataclasses.replace(
        limits,
        least=limits.least * slots,
        most=limits.most * slots,
        group_size=limits.group_size * slots if grouped else 1,
    )
