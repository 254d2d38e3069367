"""The coordinator of a job: it drives `rendezvous.step` and carries out the actions that follow.

Agents and workers connect to it. Each connection has a thread that reads; what it reads becomes calls on one
queue. A single thread makes these calls, one after the other, so no decision races with another.
"""

import dataclasses
import queue
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxgoodput import _wire as wire
from jaxgoodput._exits import DONE, FAILED, INTERRUPTED, SAVED, exit_code
from jaxgoodput.clock import Clock
from jaxgoodput.launcher.elastic import events as ev
from jaxgoodput.launcher.elastic import fitness, messages, rendezvous
from jaxgoodput.launcher.elastic.jax_service import JaxService
from jaxgoodput.launcher.elastic.listener import Listener
from jaxgoodput.launcher.elastic.state import Limits, Rendezvous, Stage
from jaxgoodput.launcher.host_list import num_processes
from jaxgoodput.launcher.supervise import UsageError, say

TICK_S = 0.1
_REPORT_EVERY_S = 30.0
_LONGEST_WHY = 500  # characters of a report about a host, which has to fit into a line
_NO_FAILURE_YET_S = 3600.0  # added to a job's age, so that a young job does not seem to fail often


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
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._agents: dict[str, tuple[messages.AgentHello, wire.Channel]] = {}  # by host
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
        """The address that agents and workers connect to, as HOST:PORT."""
        return self._listener.address

    @property
    def slots(self) -> dict[str, int]:
        """The number of processes of each host whose agent is connected."""
        return {host: hello.slots for host, (hello, _) in self._agents.items()}

    def run(self, told: Callable[[], str | None]) -> int:
        """Serve until the job is over; return its exit code.

        `told` is polled for why the job is to stop, such as the name of a signal that this process received,
        or None. The first reason saves and stops the job; a second SIGINT ends it at once.
        """
        is_told = is_interrupted = False
        while self._end is None:
            try:
                self._calls.get(timeout=TICK_S)()
            except queue.Empty:
                self._happen(ev.Tick())
            name = told()
            if name is not None:
                if not is_told:
                    say(f"{name}: telling all processes to save and stop")
                    self._stop()
                elif name == "SIGINT" and is_interrupted:
                    self._end_job(ev.EndJob(INTERRUPTED, "it was interrupted twice"))
                is_told, is_interrupted = True, is_interrupted or name == "SIGINT"
            self._start_due()
            self._report_waiting()
        return self._end.code

    def close(self) -> None:
        """Tell the agents that the job is over, and close all connections."""
        end = self._end or ev.EndJob(FAILED, "the coordinator has ended")
        channels = [channel for _, channel in self._agents.values()]
        for channel in channels:
            _send(channel, end)
        self._jax.close()
        for channel in [*channels, *self._workers.values()]:
            channel.close()
        self._listener.close()

    def give_up(self, codes: Sequence[int], why: str) -> None:
        """End the job because too few hosts are left and no other can come. Thread-safe.

        `codes` are the exit codes of the agents that have ended, in the order of their ends.
        """
        self._calls.put(partial(self._give_up, exit_code(codes), why))

    def lost(self, host: str, why: str) -> None:
        """Tell the coordinator that the agent of a host has ended. Thread-safe."""
        self._calls.put(partial(self._lose, host, why))

    def _give_up(self, code: int, why: str) -> None:
        """End the job with the code of its agents, unless that would claim what this job has not done."""
        state = self._state
        if code in (DONE, SAVED) and not state.is_done and state.code != SAVED:
            end = rendezvous.end_unsaved(state)
            code, why = end.code, f"{why}: {end.why}"
        self._end_job(ev.EndJob(code, why))

    # -- events ----------------------------------------------------------------------------------

    def _heard(self, message: Any) -> None:
        """Act on a message that an agent or a worker has sent."""
        match message:
            case messages.Connected(generation):
                # One worker returns from JAX's registration only after all others have registered.
                self._jax.has_connected |= generation == self._state.generation
            case ev.Ready(member, state_at=state_at):
                self._state_at[member] = state_at
                self._happen(message)
            case ev.ProcessExited():
                self._exited(message)
            case ev.Leave():
                self._happen(message)
                if self._state.members and not self._state.can_go_on:
                    self._stop()  # the last processes leave: they save, and the job ends
            case _:
                self._happen(message)

    def _happen(self, event: ev.JobEvent) -> None:
        self._state, actions = rendezvous.step(self._state, event, self._clock.now())
        for action in actions:
            _ACTIONS[type(action)](self, action)

    def _stop(self) -> None:
        self._happen(ev.Stop())
        for host in self._agents:
            self._tell_agent(host, messages.StopWorkers())

    def _exited(self, event: ev.ProcessExited) -> None:
        state = self._state
        self._happen(event)
        if state.stage is Stage.TRAINING and not self._jax.has_connected:
            if event.member in state.ranks:
                self._jax.stand_in(state.ranks.index(event.member))

    def _host_joined(self, hello: messages.AgentHello, channel: wire.Channel) -> None:
        host, slots = hello.host, hello.slots
        if host in self._agents:
            self._lose(host, "it has come back")
        self._agents[host] = hello, channel
        self._ever_came.add(host)
        self._tell_agent(host, messages.Accepted())
        say(f"{host} has joined, with {slots} process{'es' * (slots > 1)}")
        self._happen(ev.HostArrived(host, is_beside=channel.own == channel.peer))

    def _lose(self, host: str, why: str, channel: wire.Channel | None = None) -> None:
        """Close the connection to a host, and treat its processes as ended.

        Does nothing if `channel` is given but is no longer the connection to the host.
        """
        _, known = self._agents.get(host, (None, None))
        if known is None or channel not in (None, known):
            if host not in self._ever_came and channel is None:
                say(f"{host} did not join: {why}")
            return
        del self._agents[host]
        known.close()
        lost = [name for name, member in self._state.members.items() if member.host == host]
        is_planned = channel is not None and host in self._state.leaving and not lost
        say(f"{host} has left{', as planned' if is_planned else f': {why}'}")
        for name in lost:
            self._exited(ev.ProcessExited(name, -9))
        self._forget_starts(host)
        self._happen(ev.AgentLost(host))

    def _worker_lost(self, member: str, channel: wire.Channel) -> None:
        # Whether the worker itself has ended, its agent will report.
        channel.close()
        if self._workers.get(member) is channel:
            del self._workers[member]

    # -- actions ---------------------------------------------------------------------------------

    def _pass_on(self, action: ev.EndGeneration | ev.EndLeases | ev.Again | ev.Release) -> None:
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
                    holder=holder,
                    neighbour_at=self._state_at.get(_neighbour(action.ranks, rank)),
                    failure_every_s=past_s / (self._state.num_failures + 1),
                    news=action.news,
                ),
            )

    def _go(self, action: ev.Go) -> None:
        service = self._jax.begin(len(self._state.ranks))
        self._tell_all(self._state.ranks, messages.Connect(action.generation, service))

    def _try_links(self, action: ev.TryLinks) -> None:
        state_at = {n: self._state_at[n] for n in action.members if n in self._state_at}
        for name in action.members:
            others = {n: at for n, at in state_at.items() if _host_of(n) != _host_of(name)}
            self._tell(name, messages.StateAddresses(others))

    def _hang_up(self, action: ev.HangUp) -> None:
        known = tuple(self._state_at[name] for name in action.others if name in self._state_at)
        self._tell(action.member, messages.HangUpOn(known))

    def _kill(self, action: ev.Kill) -> None:
        say(f"SIGKILL to {action.member}: {action.why}")
        self._tell_agent(_host_of(action.member), action)

    def _start_process(self, action: ev.StartProcess) -> None:
        if action.host in self._agents:
            say(f"another process starts on {action.host} in {action.after_s:g} s")
            self._starts.append((self._clock.now() + action.after_s, action.host))

    def _examine(self, action: ev.Examine) -> None:
        here = [n for n in self._state.present_ranks if _host_of(n) != action.host]
        peers = {_host_of(n): self._state_at[n] for n in here if n in self._state_at}
        self._tell_agent(action.host, messages.CheckHost(tuple(peers.values())))

    def _admit(self, action: ev.Admit) -> None:
        self._forget_starts(action.host)  # all of its processes start now
        hello, _ = self._agents.get(action.host, (None, None))
        for _ in range(0 if hello is None else hello.slots):
            self._start(action.host)

    def _turn_away(self, action: ev.Refuse | ev.LetGo) -> None:
        self._tell_agent(action.host, action)

    def _report_decision(self, action: ev.Tell) -> None:
        decision = action.decision
        say(str(decision))
        if action.fault is not None and self._state.limits.reports_hosts:
            report = fitness.HostReport(
                host=decision.host,
                fault=action.fault,
                why=decision.why[:_LONGEST_WHY],
                numbers=decision.numbers,
            )
            say(fitness.to_line(report))

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
        """While too few processes are ready to train, print from time to time how many are needed."""
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
            + "".join(f"; {a} does not reach {b}" for a, b in sorted(state.cuts))
        )

    def _tell(self, member: str, message: Any) -> None:
        if member in self._workers:
            _send(self._workers[member], message)

    def _tell_all(self, members: Sequence[str], message: Any) -> None:
        for member in members:
            self._tell(member, message)

    def _tell_agent(self, host: str, message: Any) -> None:
        if host in self._agents:
            _send(self._agents[host][1], message)

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
        self._calls.put(partial(self._host_joined, hello, channel))
        for message in messages.received(channel, messages.FROM_AGENTS, _say_refused(channel)):
            if isinstance(message, ev.HostExamined):
                say(f"{message.host} was checked: {message.check.failure or message.check}")
            self._calls.put(partial(self._heard, message))
        self._calls.put(partial(self._lose, hello.host, "its agent does not answer", channel))

    def _hear_worker(self, channel: wire.Channel, member: str) -> None:
        state = self._state
        _send(channel, messages.Welcome(len(state.present_ranks), state.limits.group_size))
        self._calls.put(partial(self._workers.__setitem__, member, channel))
        for message in messages.received(channel, messages.FROM_WORKERS, _say_refused(channel)):
            self._calls.put(partial(self._heard, message))
        self._calls.put(partial(self._worker_lost, member, channel))

    def _refusal(self, hello: messages.AgentHello) -> str | None:
        """Return why the agent that sent this first message cannot take part; None if it can."""
        known, _ = self._agents.get(hello.host, (None, None))
        if known is not None and known.instance != hello.instance:
            return f"there is an agent of the name {hello.host} already. Give each its own --name."
        for name, own in self._facts.items():
            other = hello.facts.get(name)
            if other != own:
                return (
                    f"{name} is {other} there and {own} on the host of the coordinator. All hosts of a job "
                    "need the same code and the same command."
                )
        return None


_ACTIONS: Mapping[type[ev.Action], Callable] = {
    ev.EndGeneration: Coordinator._pass_on,
    ev.EndLeases: Coordinator._pass_on,
    ev.Form: Coordinator._form,
    ev.Go: Coordinator._go,
    ev.Again: Coordinator._pass_on,
    ev.TryLinks: Coordinator._try_links,
    ev.HangUp: Coordinator._hang_up,
    ev.Kill: Coordinator._kill,
    ev.StartProcess: Coordinator._start_process,
    ev.Examine: Coordinator._examine,
    ev.Admit: Coordinator._admit,
    ev.Refuse: Coordinator._turn_away,
    ev.LetGo: Coordinator._turn_away,
    ev.Tell: Coordinator._report_decision,
    ev.Release: Coordinator._pass_on,
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
    """Return the name of the next process on another host, to keep copies for this one; "" if none."""
    following = (*ranks[rank + 1 :], *ranks[:rank])
    return next((name for name in following if _host_of(name) != _host_of(ranks[rank])), "")


def with_slots(
    limits: Limits, slots: int, *, named: Sequence[int] = (), grouped: bool = False
) -> Limits:
    """Convert limits in hosts into limits in processes, with `slots` processes per host.

    `named` are the processes of hosts that are known in advance. If they differ, the fewest processes are
    counted on the smallest hosts, and the most on the largest.

    If `grouped`, all processes of a host belong to one group; otherwise each is a group of its own.
    """
    return dataclasses.replace(
        limits,
        least=num_processes(limits.least, named, slots, largest=False),
        most=num_processes(limits.most, named, slots, largest=True),
        group_size=limits.group_size * slots if grouped else 1,
    )
