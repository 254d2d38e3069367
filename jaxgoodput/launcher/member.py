"""A worker's side of a job whose processes come and go: it waits, takes the state, connects, and tells.

One connection to the coordinator, read by a thread of its own, so that a worker which waits in a collective
still hears that its generation is over. The state of a run goes from worker to worker: whoever holds the
newest serves it while the others come.
"""

import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from absl import logging

from jaxgoodput import _jax
from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.launcher import wire
from jaxgoodput.train.membership import Generation, Kept, Released, SaveHere

_FETCH_S = 60.0  # for anything at all from whoever holds the state
_LOST = {"type": "lost"}


@dataclass(frozen=True)
class Rendezvous:
    """Where a worker finds the others of its job."""

    address: str  # of the coordinator, host:port
    secret: str
    member: str  # this worker's name, once in a job
    host: str


class Member:
    """This worker among those of its job; a `train.membership.Membership`."""

    def __init__(self, where: Rendezvous, clock: Clock | None = None):
        self._where = where
        self._clock = clock or SystemClock()
        self._generation = 0
        self._is_over = False  # the present generation
        self._is_done = False  # the run
        self._ask: Callable[[], None] = lambda: None
        self._answers: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._channel = wire.connect(where.address, where.secret, timeout_s=_FETCH_S)
        self._channel.send({"type": "worker", "member": where.member, "host": where.host})
        self._known = self._channel.receive() or {"generation": 0}
        self._server = _StateServer(self._channel.own, where.secret)
        threading.Thread(target=self._listen, name="jaxgoodput-member", daemon=True).start()

    # -- what the run asks for -------------------------------------------------------------------

    @property
    def is_late(self) -> bool:
        """Whether others train already, and are to wait as little as possible for this process."""
        return self._known["generation"] > 0

    def on_regroup(self, ask: Callable[[], None]) -> None:
        """Have `ask` called, from another thread, when the present generation is to end."""
        self._ask = ask

    def is_broken(self) -> bool:
        """Whether the present generation is to end, or has lost one of its processes."""
        return self._is_over

    def beat(self, step: int | None) -> None:
        """Tell that this process lives, and how far it has come."""
        if step is not None:
            self._tell({"type": "beat", "generation": self._generation, "step": step})

    def done(self) -> None:
        """Tell that the run is over: nobody is to be waited for."""
        self._is_done = True
        self._tell({"type": "done"})

    def enter(self, kept: Kept | None, share: int | None) -> Generation:
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
        began_s = self._clock.now()
        _jax.forget_devices()
        left_s = self._clock.now()
        while True:
            self._server.offer(kept)
            self._tell(
                {
                    "type": "ready",
                    "generation": self._generation,
                    "holds": -1 if kept is None else kept.step,
                    "share": share,
                    "state_at": self._server.address,
                }
            )
            formed = self._await("form")
            formed_s = self._clock.now()
            try:
                newest = self._newest(kept, formed)
            except OSError as error:
                logging.warning(
                    "the state of the run could not be fetched, and is again: %s", error
                )
                continue
            self._tell({"type": "set", "generation": formed["generation"]})
            fetched_s = self._clock.now()
            go = self._await("go", "again")
            if go["type"] == "go":
                break
        self._server.offer(None)  # all have it
        set_s = self._clock.now()
        rank, count = formed["rank"], formed["count"]
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
        )

    # -- how -------------------------------------------------------------------------------------

    def _newest(self, kept: Kept | None, formed: Mapping[str, Any]) -> Kept | None:
        """The state that all go on from: this process's own, or that of the one who came furthest."""
        holds = formed["holds"]
        if formed["state_at"] is None or (kept is not None and kept.step == holds):
            return kept
        return fetch(formed["state_at"], self._where.secret)

    def _await(self, *kinds: str) -> Mapping[str, Any]:
        while True:
            message = self._answers.get()
            if message["type"] == "release":
                raise Released("the job goes on without this process, or is over")
            if message["type"] == "save":
                raise SaveHere
            if message["type"] == "lost":
                raise ConnectionError(
                    f"the coordinator of this job at {self._where.address} has gone. Its own output says why."
                )
            if message["type"] in kinds:
                return message
            if message["type"] == "again":  # too late for it: it will be told once more
                continue

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


class _StateServer:
    """Gives the state that this process holds to whoever comes with the job's secret."""

    def __init__(self, host: str, secret: str):
        self._secret = secret
        self._lock = threading.Lock()
        self._kept: Kept | None = None
        self._bytes: bytes | None = None
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        os.set_inheritable(self._listener.fileno(), False)
        threading.Thread(target=self._serve, name="jaxgoodput-state", daemon=True).start()

    def offer(self, kept: Kept | None) -> None:
        """Serve this one from now on."""
        with self._lock:
            self._kept, self._bytes = kept, None

    def _serve(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        try:
            channel, _ = wire.accepted(sock, self._secret)
            with self._lock:
                if self._bytes is None and self._kept is not None:
                    self._bytes = self._kept.to_bytes()
                data = self._bytes
            channel.send({"type": "state"}, data or b"")
            channel.close()
        except OSError as error:
            logging.info("nobody took the state: %s", error)


def fetch(address: str, secret: str) -> Kept:
    """The state that a worker offers. Raises OSError where it has gone, or has none."""
    channel = wire.connect(address, secret, timeout_s=_FETCH_S)
    try:
        channel.be_patient(_FETCH_S)
        channel.send({"type": "fetch"})
        message = channel.receive()
        data = b"" if message is None else channel.receive_bytes(message)
    finally:
        channel.close()
    if not data:
        raise ConnectionError(f"the process at {address} has no state to give")
    return Kept.from_bytes(data)
