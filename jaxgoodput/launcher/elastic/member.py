"""A worker's side of a job on hosts that come and go.

A worker has one connection to the coordinator. A thread of its own reads it, so that a worker which waits in
a collective still hears that its generation is over. The state of a run goes directly from worker to worker:
holders of the newest state serve it while others fetch it.
"""

import contextlib
import dataclasses
import math
import queue
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from absl import logging

from jaxgoodput import _jax
from jaxgoodput import _wire as wire
from jaxgoodput._worker import QueueWorker, Worker, Workers
from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.launcher.elastic import events as ev
from jaxgoodput.launcher.elastic import fitness, messages
from jaxgoodput.launcher.elastic.listener import Listener
from jaxgoodput.train.runs.membership import (
    Generation,
    OwnPart,
    ReleasedExit,
    RunSnapshot,
    SaveHere,
)

_FETCH_S = 60.0  # timeout of every message about a state
_REACH_S = 5.0  # the same of the connection for it
_UNUSUAL, _NUM_WAITS = (
    5.0,
    16,
)  # times the longest of so many waits for the device: a batch may grow
_WINDOW = 5  # least number of steps whose median is reported; a few odd steps then do not count


class JobMembership:
    """This worker's membership in its job: a `train.runs.membership.Membership`.

    `address` is the coordinator's, HOST:PORT; `member` is this worker's name, unique in the job. Raises
    ConnectionError if the coordinator does not answer.
    """

    def __init__(self, address: str, secret: str, member: str, clock: Clock | None = None):
        self._address = address
        self._secret = secret
        self._member = member
        self._clock = clock or SystemClock()
        self._generation = 0
        self._place: int | None = (
            None  # place in the group whose part of the state this process holds
        )
        self._is_over = False  # whether the current generation is to end
        self._assignment: messages.Assignment | None = None
        self._is_done = False  # whether the run is complete
        self._ask: Callable[[], None] = lambda: None
        self._takes_leases = True
        self._pace = _PaceMeter(self._clock)
        self._waits = _Waits(_WaitMeter(self._clock), _WaitMeter(self._clock))
        self._answers: queue.SimpleQueue[Any] = (
            queue.SimpleQueue()
        )  # None: the connection has ended
        self._channel = wire.connect(address, secret, timeout_s=_FETCH_S)
        self._channel.send(messages.encoded(messages.WorkerHello(member)))
        body = self._channel.receive()
        if body is None:
            raise ConnectionError(
                f"the coordinator at {address} has gone. Its own output says why."
            )
        self._welcome: messages.Welcome = messages.decoded(body, (messages.Welcome,))
        self._server = StateServer(self._channel.own, secret)
        self._copier = QueueWorker(
            "copy",
            self._send_copy,
            # A copy that was not sent must not stop the training, which may never need it.
            on_error=partial(logging.warning, "the state was not copied to another host: %r"),
        )
        self._links = Workers("links", partial(logging.error, "trying links failed: %r"))
        self._listener = Worker(
            "member", self._listen, on_error=partial(logging.error, "reading failed: %r")
        )

    # -- what the run asks for -------------------------------------------------------------------

    @property
    def group_size(self) -> int:
        """Number of processes that share one copy of the model, and come and go together."""
        return self._welcome.group_size

    @property
    def num_others(self) -> int:
        """Number of processes that train already, and that must not wait long for this one."""
        return self._welcome.num_training

    def on_regroup(self, ask: Callable[[], None]) -> None:
        """Have `ask` called, from another thread, when the current generation is to end."""
        self._ask = ask

    def is_broken(self) -> bool:
        """Return whether the current generation is to end, or has lost one of its processes."""
        return self._is_over

    def takes_leases(self) -> bool:
        """Whether this process may take leases of samples; one that is about to leave takes no more."""
        return self._takes_leases

    def beat(self, step: int | None) -> None:
        """Send a heartbeat with the last finished step; None: this process trains no more."""
        if step is not None:
            device_s, is_stuck = self._waits.device.seconds()
            others_s, _ = self._waits.others.seconds()
            pace = self._pace.take()
            waits = device_s, is_stuck, others_s
            self._tell(ev.Beat(self._member, self._generation, step, pace, *waits))

    def device_at_work(self, num_samples: int) -> contextlib.AbstractContextManager[None]:
        """While this process waits for its own device; heartbeats tell how long that takes."""
        return self._waits.device.at_work(num_samples)

    def others_at_work(self) -> contextlib.AbstractContextManager[None]:
        """While this process waits for the others; heartbeats tell how long that takes."""
        return self._waits.others.at_work(1)

    def computed(self, own: OwnPart) -> None:
        """Record how long this process's part of a step took; a later heartbeat reports it."""
        self._pace.add(own)

    def keep(self, kept: RunSnapshot) -> None:
        """Keep a copy of this process's state in its memory and, if it can, on a process of another host."""
        assert self._place is not None and self._assignment is not None
        self._server.keep(self._place, kept.step, kept.to_bytes())
        neighbour_at = self._assignment.neighbour_at
        if neighbour_at is not None:
            self._copier.flush()  # one copy at a time: a slow neighbour slows the copies down
            self._copier.put((neighbour_at, self._generation, self._place, kept.step))

    @property
    def failure_every_s(self) -> float:
        """Mean seconds between failures of this job so far."""
        return math.inf if self._assignment is None else self._assignment.failure_every_s

    def done(self) -> None:
        """Report that the run is complete, so that the coordinator waits for no further process."""
        self._is_done = True
        self._tell(ev.ProcessDone(self._member))

    def enter(self, kept: RunSnapshot | None, share: int | None) -> Generation:
        """Leave the current generation, wait for the next one, and connect JAX to its processes.

        The number of its groups divides `share`, unless that is None.

        Raises:
            ReleasedExit: this process is not needed any more.
            SaveHere: all processes were told to stop, and this one is to save.
            ConnectionError: the coordinator has gone.
            RuntimeError: a run of this process was completed before; others may have ended with it.
        """
        if self._is_done:
            raise RuntimeError(
                "fit() was called a second time in a job whose hosts come and go (run --nnodes), and such "
                "a job is one run. Give each fit() a job of its own, or use --nproc-per-node instead."
            )
        self._pace.clear()
        self._waits.device.clear()
        began_s = self._clock.now()
        _jax.forget_devices()
        left_s = self._clock.now()
        while True:
            self._server.offer(kept, self._place)
            self._tell(self._ready(kept, share))
            formed = self._await(messages.Assignment, kept=kept)
            place = formed.rank % self.group_size
            formed_s = self._clock.now()
            try:
                newest = self._fetch(kept, place, formed)
            except OSError as error:
                logging.warning(
                    "the state of the run could not be fetched, trying again: %s", error
                )
                self._try_links({formed.holder: formed.state_at or ""})
                continue
            if newest is not None:
                self._keep_other_place(kept, place)
                kept, self._place = newest, place
            self._tell(ev.SetUp(self._member, formed.generation))
            fetched_s = self._clock.now()
            go = self._await(messages.Connect, ev.Again, kept=kept)
            if isinstance(go, messages.Connect):
                break
        set_s = self._clock.now()
        self._begin(go, formed, place)
        return Generation(
            number=self._generation,
            process_index=formed.rank,
            process_count=formed.count,
            kept=newest,
            seconds={
                "leave": left_s - began_s,
                "wait": formed_s - left_s + (set_s - fetched_s),
                "fetch": fetched_s - formed_s,
                "connect": self._clock.now() - set_s,
            },
            news=tuple(dataclasses.asdict(decision) for decision in formed.news),
        )

    # -- how -------------------------------------------------------------------------------------

    def _ready(self, kept: RunSnapshot | None, share: int | None) -> ev.Ready:
        return ev.Ready(
            self._member,
            self._generation,
            -1 if kept is None else kept.step,
            share=share,
            copies=self._server.copies,
            place=self._place,
            state_at=self._server.address,
        )

    def _begin(self, go: messages.Connect, formed: messages.Assignment, place: int) -> None:
        """Join the generation with this assignment: connect JAX to the other processes, if there are any."""
        self._server.offer(None, None)  # all processes have the state now
        self._place, self._assignment = place, formed
        self._server.begin(self._generation, formed.holds)
        if formed.count > 1:
            _jax.connect(go.service, formed.count, formed.rank, clock=self._clock)
            self._tell(messages.Connected(self._generation))

    def _fetch(
        self, kept: RunSnapshot | None, place: int, formed: messages.Assignment
    ) -> RunSnapshot | None:
        """Return part number `place` of the state that all resume from; None if there is no such state."""
        if formed.state_at is None:
            return None
        return self._part(kept, place, formed.holds, formed.state_at)

    def _keep_other_place(self, kept: RunSnapshot | None, place: int) -> None:
        """Keep a copy of the part of the state that this process has held until now, if it gets another."""
        if kept is not None and self._place is not None and self._place != place:
            self._server.keep(self._place, kept.step, kept.to_bytes())

    def _part(
        self, kept: RunSnapshot | None, place: int, step: int, address: str | None
    ) -> RunSnapshot:
        """Return part number `place` of the state after a step: this process's, a copy, or another's."""
        if kept is not None and kept.step == step and place == self._place:
            return kept
        if address == self._server.address:
            return RunSnapshot.from_bytes(self._server.part(place, step))
        if address is None:
            raise ConnectionError(
                f"The state after step {step} cannot be saved: no process is left that holds part {place} of "
                "it. Start the job again; it resumes from the last checkpoint."
            )
        return fetch(address, self._secret, place, step)

    def _whole(self, kept: RunSnapshot, asked: messages.SaveParts) -> RunSnapshot:
        """Return the whole state after a step, put together from parts that this and other processes hold."""
        first, *others = [
            self._part(kept, place, asked.holds, address)
            for place, address in enumerate(asked.parts_at)
        ]
        for other in others:
            first = first.with_parts_of(other)
        return first

    def _await(self, *kinds: type, kept: RunSnapshot | None) -> Any:
        """Wait for a message of one of these types and return it; messages that come too late are skipped.

        Raises ReleasedExit, SaveHere or ConnectionError if this process is to end instead.
        """
        while True:
            message = self._answers.get()
            if isinstance(message, kinds):
                return message
            if isinstance(message, ev.Release):
                raise ReleasedExit("the job goes on without this process, or is over")
            if isinstance(message, messages.SaveParts) and kept is not None:
                raise SaveHere(self._whole(kept, message))
            if message is None:
                raise ConnectionError(
                    f"the coordinator of this job at {self._address} has gone. Its own output says why."
                )

    def _send_copy(self, copy: tuple[str, int, int, int]) -> None:
        address, generation, place, step = copy
        try:
            with contextlib.closing(
                wire.connect(address, self._secret, timeout_s=_FETCH_S)
            ) as channel:
                told = {"type": "copy", "generation": generation, "place": place, "step": step}
                channel.send(told, self._server.part(place, step))
        except OSError as error:
            logging.warning(
                "the state after step %d was not copied to another host, so it is lost if this one fails: %s",
                step,
                error,
            )

    def _try_links(self, state_at: Mapping[str, str]) -> None:
        """Tell the coordinator which of some processes this one reaches, given with their addresses."""
        unreached = fitness.unreached_of(state_at, self._secret)
        for name, why in unreached.items():
            logging.warning("%s does not answer at %s: %s", name, state_at[name], why)
        reached = tuple(name for name in state_at if name not in unreached)
        self._tell(ev.LinksTried(self._member, reached, tuple(unreached)))

    def _hang_up(self, state_at: Sequence[str]) -> None:
        """End all connections to the hosts of these addresses, or a collective waits for them."""
        hosts = {address.rpartition(":")[0].strip("[]") for address in state_at}
        num_ended = wire.end_connections(hosts - {self._channel.own, self._channel.peer})
        if num_ended:
            logging.warning(
                "%d connections to %s were ended, which this process does not reach any more",
                num_ended,
                ", ".join(sorted(hosts)),
            )

    def _tell(self, message: Any) -> None:
        try:
            self._channel.send(messages.encoded(message))
        except OSError:
            self._answers.put(None)

    def _listen(self, worker: Worker) -> None:
        try:
            for message in messages.received(
                self._channel,
                messages.TO_WORKERS,
                lambda error: logging.error(
                    "the coordinator sent an invalid message, so this process leaves the job: %s",
                    error,
                ),
            ):
                self._heard(message)
        finally:
            self._is_over = True
            self._answers.put(None)

    def _heard(self, message: Any) -> None:
        if isinstance(message, ev.EndGeneration):
            if message.generation == self._generation:
                self._is_over = True
                self._ask()
            return
        if isinstance(message, ev.EndLeases):
            self._takes_leases = False
            return
        if isinstance(message, messages.StateAddresses):
            self._links.start(lambda worker: self._try_links(message.state_at))
            return
        if isinstance(message, messages.HangUpOn):
            self._links.start(lambda worker: self._hang_up(message.state_at))
            return
        if isinstance(message, messages.Assignment):
            self._takes_leases = True  # it stays after all
        if isinstance(message, messages.Connect):
            # Set here, not in `enter`: the next message may already end this generation.
            self._generation, self._is_over = message.generation, False
        self._answers.put(message)


class _WaitMeter:
    """How long this process has been waiting for something in a step. Read from another thread."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._began: tuple[float, int] | None = None  # when, and for how many samples
        self._sample_s: deque[float] = deque(maxlen=_NUM_WAITS)  # of this generation

    def clear(self) -> None:
        """Forget how long it took: the first step of a generation may compile its program."""
        self._sample_s.clear()

    @contextlib.contextmanager
    def at_work(self, num_samples: int) -> Iterator[None]:
        """While it waits for the work on so many samples."""
        began_s = self._clock.now()
        self._began = began_s, num_samples
        try:
            yield
        finally:
            self._began = None
        self._sample_s.append((self._clock.now() - began_s) / num_samples)

    def seconds(self) -> tuple[float, bool]:
        """Return how long it has been waiting, 0 if it does not, and whether much longer than ever before."""
        began = self._began
        if began is None:
            return 0.0, False
        seconds = self._clock.now() - began[0]
        usual_s = max(tuple(self._sample_s), default=0.0) * began[1]
        return seconds, 0 < _UNUSUAL * usual_s < seconds


@dataclasses.dataclass(frozen=True)
class _Waits:
    """How long this process has been waiting for its own device, and for the other processes."""

    device: _WaitMeter
    others: _WaitMeter


class _PaceMeter:
    """Collects how long the parts of steps took, for the next heartbeat. Thread-safe."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._lock = threading.Lock()
        self._steps: list[tuple[float, OwnPart]] = []  # when each was added

    def clear(self) -> None:
        """Forget the times of all steps."""
        with self._lock:
            self._steps.clear()

    def add(self, own: OwnPart) -> None:
        """Add the times of a step. Earlier steps with another kind of batch are forgotten."""
        with self._lock:
            if self._steps and _kind(self._steps[-1][1]) != _kind(own):
                self._steps.clear()
            self._steps.append((self._clock.now(), own))

    def take(self) -> fitness.Pace | None:
        """Return the medians of the steps since the last call; None if they are too few."""
        with self._lock:
            if len(self._steps) <= _WINDOW:
                return None
            steps, self._steps = self._steps, self._steps[-1:]
        at_s = [when_s for when_s, _ in steps]
        part, whole, is_leased = _kind(steps[0][1])
        return fitness.Pace(
            sample_s=statistics.median(own.seconds / own.num_samples for _, own in steps[1:]),
            step_s=statistics.median(b - a for a, b in zip(at_s, at_s[1:], strict=False)),
            part=part,
            whole=whole,
            is_leased=is_leased,
            left=steps[-1][1].left,
            evaluates=steps[-1][1].evaluates,
        )


def _kind(own: OwnPart) -> tuple[int, int, bool]:
    return own.part, own.whole, own.is_leased


class StateServer:
    """Serves the state that this process holds to other workers, and takes copies of theirs.

    The two newest copies of each part are kept: one is complete while the other is being made.
    """

    def __init__(self, host: str, secret: str):
        self._lock = threading.Lock()
        self._kept: RunSnapshot | None = None
        self._place: int | None = None  # place of `_kept`
        self._bytes: bytes | None = None  # of `_kept`, once they have been asked for
        self._generation = 0
        self._copies: dict[tuple[int, int], bytes] = {}  # by place and step
        self._listener = Listener(
            host,
            None,
            secret,
            self._answer,
            name="state",
            on_error=partial(logging.info, "another worker did not get a state: %s"),
        )
        self.address = self._listener.address

    @property
    def copies(self) -> tuple[tuple[int, int], ...]:
        """(Number of the part of the state, step) of each complete copy that is kept for another process."""
        with self._lock:
            return tuple(sorted(self._copies))

    def offer(self, kept: RunSnapshot | None, place: int | None) -> None:
        """Send this state to processes that ask for it from now on; None: send none."""
        with self._lock:
            self._kept, self._place, self._bytes = kept, place, None

    def begin(self, generation: int, step: int) -> None:
        """Note that training resumes from this step, and drop copies of later steps, which are done again."""
        with self._lock:
            self._generation = generation
            self._copies = {key: data for key, data in self._copies.items() if key[1] <= step}

    def keep(self, place: int, step: int, data: bytes, generation: int | None = None) -> None:
        """Keep a copy of part `place` of the state, the two newest of each; none of an earlier generation."""
        with self._lock:
            if generation not in (None, self._generation):
                return
            self._copies[place, step] = data
            of_place = sorted(done for other, done in self._copies if other == place)
            for old in of_place[:-2]:
                del self._copies[place, old]

    def part(self, place: int, step: int) -> bytes:
        """Return part number `place` of the state after a step, b"" if this process does not hold it."""
        with self._lock:
            if (place, step) in self._copies:
                return self._copies[place, step]
            if self._kept is None or self._kept.step != step or self._place not in (None, place):
                return b""
            if self._bytes is None:
                self._bytes = self._kept.to_bytes()
            return self._bytes

    def _answer(self, channel: wire.Channel, asked: Mapping[str, Any]) -> None:
        with contextlib.closing(channel):
            match asked["type"]:
                case "ping":
                    pass  # that there was an answer to its greeting is all that it wanted to know
                case "probe":
                    fitness.give(channel)
                case "copy":
                    data = channel.receive_bytes(asked)
                    self.keep(asked["place"], asked["step"], data, asked["generation"])
                case _:
                    channel.send({"type": "state"}, self.part(asked["place"], asked["step"]))


def fetch(address: str, secret: str, place: int, step: int) -> RunSnapshot:
    """Fetch part number `place` of the state from another worker. Raises OSError if it does not have it."""
    with contextlib.closing(wire.connect(address, secret, timeout_s=_REACH_S)) as channel:
        channel.be_patient(_FETCH_S)
        channel.send({"type": "fetch", "place": place, "step": step})
        message = channel.receive()
        data = b"" if message is None else channel.receive_bytes(message)
    if not data:
        raise ConnectionError(
            f"the process at {address} does not hold part {place} of the state after step {step} any more"
        )
    return RunSnapshot.from_bytes(data)
