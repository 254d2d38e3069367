"""A worker's side of a job whose processes come and go: it waits, takes the state, connects, and tells.

One connection to the coordinator, read by a thread of its own, so that a worker which waits in a collective
still hears that its generation is over. The state of a run goes from worker to worker: whoever holds the
newest serves it while the others come.
"""

import dataclasses
import math
import os
import queue
import socket
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from absl import logging

from jaxgoodput import _jax
from jaxgoodput import _wire as wire
from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.launcher import fitness
from jaxgoodput.train.runs.membership import (
    Generation,
    OwnPart,
    ReleasedExit,
    RunSnapshot,
    SaveHere,
)

_FETCH_S = 60.0  # for anything at all from whoever holds the state
_LOST = {"type": "lost"}
_WINDOW = 5  # steps at least, whose median is told: one that something came between is no pace


@dataclass(frozen=True)
class RendezvousAddress:
    """Where a worker finds the others of its job."""

    address: str  # of the coordinator, host:port
    secret: str
    member: str  # this worker's name, once in a job
    host: str


class JobMembership:
    """This worker among those of its job; a `train.runs.membership.Membership`."""

    def __init__(self, where: RendezvousAddress, clock: Clock | None = None):
        self._where = where
        self._clock = clock or SystemClock()
        self._generation = 0
        self._place: int | None = None  # in a group, whose part of the state is kept here
        self._is_over = False  # the present generation
        self._neighbour_at: str | None = None  # of another host, for copies
        self._failure_every_s = math.inf
        self._sending: threading.Thread | None = None
        self._is_done = False  # the run
        self._ask: Callable[[], None] = lambda: None
        self._window = threading.Lock()
        self._steps: list[tuple[float, OwnPart]] = []  # when they were told, since the last pace
        self._answers: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._channel = wire.connect(where.address, where.secret, timeout_s=_FETCH_S)
        self._channel.send({"type": "worker", "member": where.member, "host": where.host})
        known = self._channel.receive()
        if known is None:
            raise ConnectionError(f"the coordinator at {where.address} has gone at the first word")
        self._known = known
        self._server = _StateServer(self._channel.own, where.secret)
        threading.Thread(target=self._listen, name="jaxgoodput-member", daemon=True).start()

    # -- what the run asks for -------------------------------------------------------------------

    @property
    def group_size(self) -> int:
        """Processes that share one copy of the model: they come and go together."""
        return self._known["group_size"]

    @property
    def num_others(self) -> int:
        """Processes that train already, and are to wait as little as possible for this one."""
        return self._known["num_training"]

    def on_regroup(self, ask: Callable[[], None]) -> None:
        """Have `ask` called, from another thread, when the present generation is to end."""
        self._ask = ask

    def is_broken(self) -> bool:
        """Whether the present generation is to end, or has lost one of its processes."""
        return self._is_over

    def beat(self, step: int | None) -> None:
        """Tell that this process lives, and how far it has come."""
        if step is not None:
            pace = self._pace()
            said = {} if pace is None else {"pace": dataclasses.asdict(pace)}
            self._tell({"type": "beat", "generation": self._generation, "step": step, **said})

    def computed(self, own: OwnPart) -> None:
        """Tell what this process's part of a step took; it goes with one of the next beats."""
        with self._window:
            if self._steps and not _are_alike(self._steps[-1][1], own):
                self._steps.clear()
            self._steps.append((self._clock.now(), own))

    def keep(self, kept: RunSnapshot) -> None:
        """Keep a copy of this state here and, behind the caller, on a process of another host."""
        assert self._place is not None
        self._server.keep(self._place, kept.step, kept.to_bytes())
        if self._neighbour_at is None:
            return
        if self._sending is not None:
            self._sending.join()  # one after the other
        self._sending = threading.Thread(
            target=self._send_copy,
            args=(self._neighbour_at, self._generation, self._place, kept.step),
            name="jaxgoodput-copy",
            daemon=True,
        )
        self._sending.start()

    @property
    def failure_every_s(self) -> float:
        """Seconds between two failures in this job, as far as they are known."""
        return self._failure_every_s

    def done(self) -> None:
        """Tell that the run is over: nobody is to be waited for."""
        self._is_done = True
        self._tell({"type": "done"})

    def enter(self, kept: RunSnapshot | None, share: int | None) -> Generation:
        """Leave the present generation and wait for the next one, which JAX then knows.

        The number of its processes divides `share`, unless that is None.

        Raises:
            Released: this process is not needed any more.
            SaveHere: all were told to stop, and this one is to save.
            ConnectionError: the coordinator has gone.
            RuntimeError: a run of this process is over: others may have ended, and do not come again.
        """
        if self._is_done:
            raise RuntimeError(
                "fit() was called a second time in a job whose hosts come and go (run --nnodes), and such "
                "a job is one run. Give each fit() a job of its own, or use --nproc-per-node instead."
            )
        with self._window:
            self._steps.clear()
        began_s = self._clock.now()
        _jax.forget_devices()
        left_s = self._clock.now()
        while True:
            self._server.offer(kept, self._place)
            self._tell(
                {
                    "type": "ready",
                    "generation": self._generation,
                    "holds": -1 if kept is None else kept.step,
                    "place": self._place,
                    "share": share,
                    "copies": self._server.copies,
                    "state_at": self._server.address,
                }
            )
            formed = self._await("form", kept=kept)
            formed_s = self._clock.now()
            try:
                newest = self._newest(kept, formed)
                if newest is not None:  # who had it may be gone when it is needed again
                    self._keep_what_changes_place(kept, formed["rank"] % self.group_size)
                    kept, self._place = newest, formed["rank"] % self.group_size
            except OSError as error:
                logging.warning(
                    "the state of the run could not be fetched, and is again: %s", error
                )
                continue
            self._tell({"type": "set", "generation": formed["generation"]})
            fetched_s = self._clock.now()
            go = self._await("go", "again", kept=kept)
            if go["type"] == "go":
                break
        self._server.offer(None, None)  # all have it
        set_s = self._clock.now()
        rank, count = formed["rank"], formed["count"]
        self._place = rank % self.group_size
        # What was kept of steps that are done again is of another course of the run.
        self._server.begin(self._generation, formed["holds"])
        self._neighbour_at = formed["neighbour_at"]
        self._failure_every_s = formed["failure_every_s"]
        if count > 1:
            _jax.connect(go["jax"], count, rank, clock=self._clock)
            self._tell({"type": "connected", "generation": self._generation})
        return Generation(
            number=self._generation,
            process_index=rank,
            process_count=count,
            kept=newest,
            seconds={
                "leave": left_s - began_s,
                "wait": formed_s - left_s + (set_s - fetched_s),
                "fetch": fetched_s - formed_s,
                "connect": self._clock.now() - set_s,
            },
            news=tuple(formed["news"]),
        )

    # -- how -------------------------------------------------------------------------------------

    def _pace(self) -> fitness.Pace | None:
        """That of the steps since it was told last, if they are enough."""
        with self._window:
            if len(self._steps) <= _WINDOW:
                return None
            steps, self._steps = self._steps, self._steps[-1:]
        at_s = [when_s for when_s, _ in steps]
        first, *_ = (own for _, own in steps)
        return fitness.Pace(
            sample_s=statistics.median(own.seconds / own.num_samples for _, own in steps[1:]),
            step_s=statistics.median(b - a for a, b in zip(at_s, at_s[1:], strict=False)),
            part=first.part,
            whole=first.whole,
            is_leased=first.is_leased,
        )

    def _newest(self, kept: RunSnapshot | None, formed: Mapping[str, Any]) -> RunSnapshot | None:
        """The state that all go on from: this process's own, or that of the one who came furthest.

        In a group of several, of the same place. None: nobody has it, or not all of it.
        """
        if formed["state_at"] is None:
            return None
        return self._part(
            kept, formed["rank"] % self.group_size, formed["holds"], formed["state_at"]
        )

    def _keep_what_changes_place(self, kept: RunSnapshot | None, place: int) -> None:
        """What this process held of another place may be needed, too, if the others do not come."""
        if kept is not None and self._place not in (None, place):
            self._server.keep(self._place, kept.step, kept.to_bytes())

    def _part(self, kept: RunSnapshot | None, place: int, step: int, address: str) -> RunSnapshot:
        """The part of a place after a step: the one that is here, a copy, or from elsewhere."""
        if kept is not None and kept.step == step and place == self._place:
            return kept
        if address == self._server.address:
            return RunSnapshot.from_bytes(self._server.part(place, step))
        return fetch(address, self._where.secret, place, step)

    def _whole(self, kept: RunSnapshot, parts_at: Sequence[str], step: int) -> RunSnapshot:
        """The state after a step, of the parts that this process and others hold."""
        first, *others = [
            self._part(kept, place, step, address) for place, address in enumerate(parts_at)
        ]
        for other in others:
            first = first.with_parts_of(other)
        return first

    def _await(self, *kinds: str, kept: RunSnapshot | None = None) -> Mapping[str, Any]:
        while True:
            message = self._answers.get()
            if message["type"] == "release":
                raise ReleasedExit("the job goes on without this process, or is over")
            if message["type"] == "save" and kept is not None:
                raise SaveHere(self._whole(kept, message["parts_at"], message["holds"]))
            if message["type"] == "lost":
                raise ConnectionError(
                    f"the coordinator of this job at {self._where.address} has gone. Its own output says why."
                )
            if message["type"] in kinds:
                return message
            if message["type"] == "again":  # too late for it: it will be told once more
                continue

    def _send_copy(self, address: str, generation: int, place: int, step: int) -> None:
        try:
            channel = wire.connect(address, self._where.secret, timeout_s=_FETCH_S)
            try:
                told = {"type": "copy", "generation": generation, "place": place, "step": step}
                channel.send(told, self._server.part(place, step))
            finally:
                channel.close()
        except OSError as error:
            logging.warning("step %d was not copied to a neighbour: %s", step, error)

    def _tell(self, message: Mapping[str, Any]) -> None:
        try:
            self._channel.send(message)
        except OSError:
            self._answers.put(_LOST)

    def _listen(self) -> None:
        while True:
            try:
                message = self._channel.receive()
            except wire.WrongSecret as error:
                logging.error("%s", error)
                message = None
            if message is None:
                self._is_over = True
                self._answers.put(_LOST)
                return
            if message["type"] == "go":  # what is said of it next must not come too early
                self._generation, self._is_over = message["generation"], False
            if message["type"] == "regroup":
                if message["generation"] == self._generation:
                    self._is_over = True
                    self._ask()
            else:
                self._answers.put(message)


def _are_alike(one: OwnPart, other: OwnPart) -> bool:
    """Whether they are parts of batches of one kind."""
    kinds = [(own.part, own.whole, own.is_leased) for own in (one, other)]
    return kinds[0] == kinds[1]


class _StateServer:
    """Gives the state that this process holds to whoever comes with the job's secret, and takes copies.

    Of every part the two newest copies stay: one of them is whole while the other is being made.
    """

    def __init__(self, host: str, secret: str):
        self._secret = secret
        self._lock = threading.Lock()
        self._kept: RunSnapshot | None = None
        self._place: int | None = None  # of what is offered
        self._bytes: bytes | None = None
        self._generation = 0
        self._copies: dict[tuple[int, int], bytes] = {}  # by place and step
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        os.set_inheritable(self._listener.fileno(), False)
        threading.Thread(target=self._serve, name="jaxgoodput-state", daemon=True).start()

    @property
    def copies(self) -> list[tuple[int, int]]:
        """(place, step) of each that is whole."""
        with self._lock:
            return sorted(self._copies)

    def offer(self, kept: RunSnapshot | None, place: int | None) -> None:
        """Serve this one from now on."""
        with self._lock:
            self._kept, self._place, self._bytes = kept, place, None

    def begin(self, generation: int, step: int) -> None:
        """Go on from this step: copies of later ones are of a course that the run has left."""
        with self._lock:
            self._generation = generation
            self._copies = {key: data for key, data in self._copies.items() if key[1] <= step}

    def keep(self, place: int, step: int, data: bytes, generation: int | None = None) -> None:
        """Keep a copy, unless it is of a generation that is over."""
        with self._lock:
            if generation not in (None, self._generation):
                return
            self._copies[place, step] = data
            of_place = sorted(done for other, done in self._copies if other == place)
            for old in of_place[:-2]:
                del self._copies[place, old]

    def part(self, place: int, step: int) -> bytes:
        """What this process holds of a place after a step; empty: nothing. Any, where states are whole."""
        with self._lock:
            if (place, step) in self._copies:
                return self._copies[place, step]
            if self._kept is None or self._kept.step != step or self._place not in (None, place):
                return b""
            if self._bytes is None:
                self._bytes = self._kept.to_bytes()
            return self._bytes

    def _serve(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        try:
            channel, asked = wire.accepted(sock, self._secret)
            if asked["type"] == "probe":
                fitness.give(channel)
                channel.close()
                return
            if asked["type"] == "copy":
                data = channel.receive_bytes(asked)
                self.keep(asked["place"], asked["step"], data, asked["generation"])
            else:
                channel.send({"type": "state"}, self.part(asked["place"], asked["step"]))
            channel.close()
        except OSError as error:
            logging.info("nobody took the state: %s", error)


def fetch(address: str, secret: str, place: int, step: int) -> RunSnapshot:
    """The part of the state that a worker offers. Raises OSError where it has gone, or has none."""
    channel = wire.connect(address, secret, timeout_s=_FETCH_S)
    try:
        channel.be_patient(_FETCH_S)
        channel.send({"type": "fetch", "place": place, "step": step})
        message = channel.receive()
        data = b"" if message is None else channel.receive_bytes(message)
    finally:
        channel.close()
    if not data:
        raise ConnectionError(f"the process at {address} has no state to give")
    return RunSnapshot.from_bytes(data)
