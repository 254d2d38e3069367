"""The one place that knows all processes of a job: drives `rendezvous.step`, and does what it says.

Agents and workers connect to it, each with a thread that reads; what they say becomes events on one queue,
and one thread takes those, one after the other. JAX's coordination service lives here, one for each
generation, so that no worker is missed by the others.
"""

import dataclasses
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxgoodput import _jax
from jaxgoodput import _wire as wire
from jaxgoodput.clock import Clock
from jaxgoodput.launcher import fitness, rendezvous
from jaxgoodput.launcher.supervise import UsageError, say

TICK_S = 0.1
_NO_FAILURE_YET_S = 3600.0  # as if a job had run for so long before, without a failure
COME_BACK = "it has come back"


@dataclass(frozen=True)
class HostJoined:
    """An agent has come, or come back."""

    host: str
    slots: int
    instance: str
    channel: wire.Channel


@dataclass(frozen=True)
class HostLost:
    """An agent does not answer any more; without a channel, whichever it has."""

    host: str
    why: str
    channel: wire.Channel | None = None


@dataclass(frozen=True)
class WorkerConnected:
    """A worker has come through JAX's registration, and so have all of its generation."""

    generation: int


@dataclass(frozen=True)
class WorkerCame:
    """A worker has a connection."""

    member: str
    channel: wire.Channel


@dataclass(frozen=True)
class WorkerLost:
    """That connection is over; that the worker has ended is for its agent to say."""

    member: str
    channel: wire.Channel


class Coordinator:
    """Serves one job at `address`; `run` returns its exit code.

    `slots` processes of each host take part. Raises UsageError where the port is taken.
    """

    def __init__(
        self,
        limits: rendezvous.Limits,
        *,
        host: str,
        port: int | None,
        secret: str,
        facts: Mapping[str, str],
        clock: Clock,
    ):
        self._secret = secret
        self._facts = facts
        self._clock = clock
        self._host = host
        self._began_s = clock.now()
        self._state = rendezvous.Rendezvous(limits=limits, since_s=self._began_s)
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._agents: dict[str, wire.Channel] = {}
        self._instances: dict[str, str] = {}  # of the agents: one that comes back is the same
        self._slots: dict[str, int] = {}  # processes of each host
        self._workers: dict[str, wire.Channel] = {}
        self._state_at: dict[str, str] = {}  # where a worker serves its state
        self._services: list[_jax.CoordinationService] = []
        self._has_connected = True  # all of the newest generation, with each other
        self._stand_ins: list[subprocess.Popen[bytes]] = []
        self._starts: list[tuple[float, str]] = []  # when, and on which host
        self._num_started = 0
        self._told_s = 0.0
        self._is_closed = False
        self._end: rendezvous.EndJob | None = None
        try:
            self._listener = socket.create_server((host, port or 0), reuse_port=False)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"the coordinator cannot listen at {host}:{port}: {error}. Choose another "
                "--rdzv-endpoint, or none for a free port."
            ) from None
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="jaxgoodput-accept", daemon=True).start()

    # -- the one thread that decides -------------------------------------------------------------

    def run(self, told: Callable[[], str | None]) -> int:
        """Until the job is over; `told` says which signal asked to stop, if any; a second SIGINT ends it."""
        is_told = False
        while self._end is None:
            try:
                self._take(self._events.get(timeout=TICK_S))
            except queue.Empty:
                self._happen(rendezvous.Tick())
            name = told()
            if is_told and name == "SIGINT":
                self._end = rendezvous.EndJob(128 + signal.SIGINT, "told so twice")
            elif not is_told and name is not None:
                is_told = True
                say(f"{name}: all processes are told to save and stop")
                self._happen(rendezvous.Stop())
                for agent in list(self._agents.values()):
                    self._send(agent, {"type": "stop", "signal": name})
            now_s = self._clock.now()
            due = [host for at_s, host in self._starts if at_s <= now_s]
            self._starts = [(at_s, host) for at_s, host in self._starts if at_s > now_s]
            for host in due:
                self._start(host)
            self._tell_of_waiting(now_s)
            if is_told and not self._agents and not self._state.members:
                break
        return rendezvous.SAVED if self._end is None else self._end.code

    def close(self) -> None:
        """Tell the agents that the job is over, and let go of everything."""
        self._is_closed = True
        code = 1 if self._end is None else self._end.code
        for channel in list(self._agents.values()):
            self._send(channel, {"type": "end", "code": code})
        self._dismiss()
        for service in self._services:
            service.shutdown()
        # A thread that waits in accept() would hold the port until somebody comes.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for channel in [*self._agents.values(), *self._workers.values()]:
            channel.close()

    def give_up(self, code: int, why: str) -> None:
        """End the job: nobody is left, and nobody can come. From any thread."""
        self._events.put(rendezvous.EndJob(code, why))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Those whose agents are here."""
        return tuple(self._agents)

    def lost(self, host: str, why: str) -> None:
        """The agent of a host has ended, as whoever started it knows. From any thread."""
        self._events.put(HostLost(host, why))

    def _take(self, event: Any) -> None:
        match event:
            case HostJoined(host, slots, instance, channel):
                self._lose(host, COME_BACK, None)
                self._agents[host], self._instances[host] = channel, instance
                self._slots[host] = slots
                self._send(channel, {"type": "accepted"})
                say(f"{host} has joined, with {slots} process{'es' * (slots > 1)}")
                self._happen(rendezvous.HostArrived(host))
            case HostLost(host, why, channel):
                self._lose(host, why, channel)
            case rendezvous.Leave(host):
                self._happen(event)
                if self._state.members and not rendezvous.can_go_on(self._state):
                    # Nobody goes on: the last to leave saves.
                    self._happen(rendezvous.Stop())
                    for agent in self._agents.values():
                        self._send(agent, {"type": "stop"})
            case rendezvous.EndJob():
                self._act(event)
            case WorkerCame(name, channel):
                self._workers[name] = channel
            case WorkerLost(name, channel):
                channel.close()
                if self._workers.get(name) is channel:
                    del self._workers[name]
            case WorkerConnected(generation):
                self._has_connected |= generation == self._state.generation
            case rendezvous.ProcessExited(name, _):
                rank = self._state.ranks.index(name) if name in self._state.ranks else None
                trains = self._state.stage is rendezvous.Stage.TRAINING
                self._happen(event)
                if rank is not None and trains and not self._has_connected:
                    self._stand_in(rank)
            case _:
                self._happen(event)

    def _happen(self, event: rendezvous.Event) -> None:
        self._state, actions = rendezvous.step(self._state, event, self._clock.now())
        for action in actions:
            self._act(action)

    def _act(self, action: rendezvous.Action) -> None:
        match action:
            case rendezvous.EndGeneration(members, generation):
                for name in members:
                    self._tell(name, {"type": "regroup", "generation": generation})
            case rendezvous.Form(generation, ranks, holders, holds, news):
                since = f"step {holds}" if holders else "the newest checkpoint, if any"
                say(f"generation {generation}: {', '.join(ranks)}, from {since}")
                past_s = self._clock.now() - self._began_s + _NO_FAILURE_YET_S
                failure_every_s = past_s / (self._state.num_failures + 1)
                for rank, name in enumerate(ranks):
                    holder = holders[rank % len(holders)] if holders else None
                    self._tell(
                        name,
                        {
                            "type": "form",
                            "generation": generation,
                            "rank": rank,
                            "count": len(ranks),
                            "holds": holds,
                            "state_at": None if holder is None else self._state_at.get(holder),
                            "neighbour_at": self._state_at.get(_neighbour(ranks, rank)),
                            "failure_every_s": failure_every_s,
                            "news": [decision.to_message() for decision in news],
                        },
                    )
            case rendezvous.Go(generation):
                address = self._serve_jax(len(self._state.ranks))
                for name in self._state.ranks:
                    self._tell(name, {"type": "go", "generation": generation, "jax": address})
            case rendezvous.Again(generation, members):
                for name in members:
                    self._tell(name, {"type": "again", "generation": generation})
            case rendezvous.Kill(name, why):
                say(f"SIGKILL to {name}: {why}")
                agent = self._agents.get(name.rpartition(".")[0])
                if agent is not None:
                    self._send(agent, {"type": "kill", "member": name})
            case rendezvous.StartProcess(host, after_s):
                if host in self._agents:
                    say(f"another process is started on {host} in {after_s:g} s")
                    self._starts.append((self._clock.now() + after_s, host))
            case rendezvous.Examine(host):
                peers = [
                    self._state_at[name]
                    for name in self._state.ranks
                    if name in self._state.members and name in self._state_at
                ]
                if host in self._agents:
                    self._send(self._agents[host], {"type": "check", "peers": peers})
            case rendezvous.Admit(host):
                self._starts = [one for one in self._starts if one[1] != host]  # of before
                for _ in range(self._slots[host]):
                    self._start(host)
            case rendezvous.Refuse(host, why):
                if host in self._agents:
                    self._send(self._agents[host], {"type": "refused", "why": why})
            case rendezvous.Tell(decision):
                say(str(decision))
            case rendezvous.Release(members):
                for name in members:
                    self._tell(name, {"type": "release"})
            case rendezvous.Save(members, holds):
                parts_at = [self._state_at.get(name) for name in members]
                self._tell(members[0], {"type": "save", "parts_at": parts_at, "holds": holds})
            case rendezvous.EndJob(code, why):
                if code:
                    say(f"the job ends with {code}: {why}")
                self._end = action

    def _serve_jax(self, count: int) -> str:
        """A service for one generation; those of before are not used any more, since all have left them."""
        self._dismiss()
        for service in self._services:
            # It waits 5 s for a client that is cut off, and nobody waits for it.
            threading.Thread(target=service.shutdown, daemon=True).start()
        self._services = []
        self._has_connected = count == 1
        if count == 1:
            return ""
        service = _jax.start_coordination_service(count, host=self._host)
        self._services.append(service)
        return service.address

    def _stand_in(self, rank: int) -> None:
        """Let the others past the registration that a worker which died will not come to."""
        say(f"rank {rank} died before all had connected: another process registers in its place")
        address, count = self._services[-1].address, len(self._state.ranks)
        command = [sys.executable, "-m", "jaxgoodput.launcher.stand_in"]
        self._stand_ins.append(
            subprocess.Popen(
                [*command, address, str(count), str(rank)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )

    def _dismiss(self) -> None:
        for child in self._stand_ins:
            child.kill()
            child.wait()
        self._stand_ins = []

    def _start(self, host: str) -> None:
        agent = self._agents.get(host)
        is_over = self._state.stage is rendezvous.Stage.OVER
        if agent is None or is_over or host in self._state.leaving:
            return
        if rendezvous.is_left_out(self._state, host):
            return  # all of them are started when it is taken in again
        self._num_started += 1
        name = f"{host}.{self._num_started}"
        self._happen(rendezvous.ProcessJoined(name, host))
        self._send(agent, {"type": "start", "member": name})

    def _lose(self, host: str, why: str, channel: wire.Channel | None) -> None:
        known = self._agents.get(host)
        if known is None or channel not in (None, known):
            if host not in self._instances and channel is None and why != COME_BACK:
                say(f"{host} has not come: {why}")
            return
        del self._agents[host]
        known.close()
        say(f"{host} has gone: {why}")
        for name, member in list(self._state.members.items()):
            if member.host == host:
                self._take(rendezvous.ProcessExited(name, -9))
        self._starts = [(at_s, other) for at_s, other in self._starts if other != host]
        self._happen(rendezvous.AgentLost(host))

    def _tell_of_waiting(self, now_s: float) -> None:
        """Now and then, why nothing happens."""
        state = self._state
        if state.stage is not rendezvous.Stage.GATHERING or now_s - self._told_s < 30.0:
            return
        if now_s - state.since_s < 30.0:
            return
        self._told_s = now_s
        waiting = sum(member.waits for member in state.members.values())
        shares = {member.share for member in state.members.values()} - {None}
        say(
            f"{waiting} processes wait, and {state.limits.needed} are needed"
            + "".join(f", a number that divides {share}" for share in shares)
            + f"; hosts: {', '.join(self._agents) or 'none'}"
        )

    def _tell(self, member: str, message: Mapping[str, Any]) -> None:
        channel = self._workers.get(member)
        if channel is not None:
            self._send(channel, message)

    def _send(self, channel: wire.Channel, message: Mapping[str, Any]) -> None:
        try:
            channel.send(message)
        except OSError:
            return  # its reader finds out, and says so

    # -- threads that read -----------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                say(f"a connection could not be taken: {error}")
                self._clock.sleep(TICK_S)
                continue
            threading.Thread(target=self._greet, args=(sock,), daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        try:
            channel, hello = wire.accepted(sock, self._secret)
        except OSError as error:
            say(f"somebody was refused: {error}")
            return
        if hello["type"] == "agent":
            self._hear_agent(channel, hello)
        elif hello["type"] == "worker":
            self._hear_worker(channel, hello)
        elif hello["type"] == "probe":
            fitness.answer(channel)

    def _hear_agent(self, channel: wire.Channel, hello: Mapping[str, Any]) -> None:
        host = hello["host"]
        refusal = self._refusal(host, hello["instance"], hello["facts"])
        if refusal is not None:
            say(f"{host} was refused: {refusal}")
            self._send(channel, {"type": "refused", "why": refusal})
            channel.close()
            return
        self._events.put(HostJoined(host, hello["slots"], hello["instance"], channel))
        while (message := self._receive(channel)) is not None:
            if message["type"] == "exit":
                self._events.put(rendezvous.ProcessExited(message["member"], message["code"]))
            elif message["type"] == "leave":
                self._events.put(rendezvous.Leave(host))
            elif message["type"] == "checked":
                check = fitness.Check(**message["check"])
                say(f"{host} was checked: {check.failure or check}")
                self._events.put(rendezvous.HostExamined(host, check))
        self._events.put(HostLost(host, "its agent does not answer", channel))

    def _hear_worker(self, channel: wire.Channel, hello: Mapping[str, Any]) -> None:
        name = hello["member"]
        state = self._state
        known = {
            "num_training": sum(other in state.members for other in state.ranks),
            "group_size": state.limits.group_size,
        }
        self._send(channel, {"type": "known", **known})
        self._events.put(WorkerCame(name, channel))
        while (message := self._receive(channel)) is not None:
            match message["type"]:
                case "ready":
                    self._state_at[name] = message["state_at"]
                    holds = int(message["holds"])
                    copies = tuple((place, step) for place, step in message["copies"])
                    self._events.put(
                        rendezvous.Ready(
                            name,
                            message["generation"],
                            holds,
                            share=message["share"],
                            copies=copies,
                            place=message["place"],
                        )
                    )
                case "set":
                    self._events.put(rendezvous.SetUp(name, message["generation"]))
                case "beat":
                    said = message.get("pace")
                    pace = None if said is None else fitness.Pace(**said)
                    generation, done = message["generation"], message["step"]
                    self._events.put(rendezvous.Beat(name, generation, done, pace))
                case "connected":
                    self._events.put(WorkerConnected(message["generation"]))
                case "done":
                    self._events.put(rendezvous.Done(name))
        self._events.put(WorkerLost(name, channel))

    def _receive(self, channel: wire.Channel) -> dict[str, Any] | None:
        try:
            return channel.receive()
        except (wire.WrongSecret, ValueError) as error:
            say(f"{channel.peer} was refused: {error}")
            channel.close()
            return None

    def _refusal(self, host: str, instance: str, facts: Mapping[str, str]) -> str | None:
        """Why an agent cannot take part."""
        if host in self._agents and self._instances[host] != instance:
            return f"there is an agent of the name {host} already. Give each its own --name."
        for name, own in self._facts.items():
            other = facts.get(name)
            if other != own:
                return f"{name} is {other} there and {own} on the host of the coordinator"
        return None


def _neighbour(ranks: Sequence[str], rank: int) -> str:
    """The next process that is on another host, for copies; "" where there is none."""
    own = ranks[rank].rpartition(".")[0]
    following = (*ranks[rank + 1 :], *ranks[:rank])
    return next((name for name in following if name.rpartition(".")[0] != own), "")


def with_slots(
    limits: rendezvous.Limits, slots: int, *, grouped: bool = False
) -> rendezvous.Limits:
    """Limits in processes, of limits in hosts with so many processes each.

    Those of a host belong to one group where it is `grouped`; else each is one of its own.
    """
    return dataclasses.replace(
        limits,
        least=limits.least * slots,
        most=limits.most * slots,
        group_size=limits.group_size * slots if grouped else 1,
    )
