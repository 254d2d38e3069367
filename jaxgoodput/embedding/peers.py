"""Exchange between processes that share tables. A row in RAM or on the disk belongs to its owner.

All processes plan the same batches, so their device slots hold the same rows. What only one of them knows,
such as a row that it owns, it sends to the others in a *round* that all of them join. A round is identified
by a lane (table and purpose) and a batch number. Any thread may join a round; none waits for a device.
"""

import collections
import contextlib
import functools
import queue
import socket
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Float64, Int32, Int64, UInt32

from jaxgoodput import _wire
from jaxgoodput._worker import Worker, Workers
from jaxgoodput.clock import SystemClock
from jaxgoodput.embedding.hashing import owners

CONNECT_S = 60.0  # until all processes of a job have connected
ACCEPT_S = 0.05  # between two looks at who has connected


class Peers:
    """Connections from this process, `rank`, to the others that share its tables. Close it.

    `addresses` are the listeners of all processes by rank; `listener` is this one's. All share `secret`.

    Raises (by the constructor):
      ConnectionError: a process does not connect in time, or has another secret.
    """

    def __init__(
        self, rank: int, addresses: Sequence[str], secret: str, listener: socket.socket
    ) -> None:
        self.rank, self.count = rank, len(addresses)
        self._changed = threading.Condition()
        # Round -> rank -> what that process sent, and the checksum of what it sent it for.
        self._heard: dict[tuple[Any, ...], dict[int, tuple[np.ndarray, int]]] = (
            collections.defaultdict(dict)
        )
        self._lost: set[int] = set()  # ranks whose connection has ended
        self._generation = 0
        self._stopped: str | None = None
        self._channels: dict[int, _wire.Channel] = {}
        self._workers: list[Worker] = []
        try:
            self._connect(addresses, secret, listener)
        except OSError as error:
            self.close()
            raise ConnectionError(
                f"process {rank} could not reach the processes that share its tables, at "
                f"{', '.join(addresses)}: {error}. They need to reach each other on any port."
            ) from error
        self._workers = [
            Worker(f"peer {other}", functools.partial(self._hear, other=other))
            for other in self._channels
        ]

    def _connect(self, addresses: Sequence[str], secret: str, listener: socket.socket) -> None:
        """Call the processes of lower rank, and accept calls from the ones of higher rank."""
        for other in range(self.rank):
            channel = _wire.connect(addresses[other], secret, timeout_s=CONNECT_S)
            self._channels[other] = channel
            channel.send({"type": "peer", "rank": self.rank})
        came: queue.SimpleQueue[tuple[int, _wire.Channel]] = queue.SimpleQueue()

        def greet(sock: socket.socket, _: Worker) -> None:
            with contextlib.suppress(ConnectionError):  # a stranger
                channel, hello = _wire.accepted(sock, secret)
                if hello.get("rank") in range(self.rank + 1, self.count):
                    came.put((hello["rank"], channel))
                else:
                    channel.close()

        # On threads of their own: a stranger that says nothing must not keep the others waiting.
        greeters = Workers("peer greeting", lambda error: logging.error("%s", error))
        clock = SystemClock()
        end_s = clock.now() + CONNECT_S
        listener.settimeout(ACCEPT_S)
        try:
            while len(self._channels) < self.count - 1:
                if clock.now() >= end_s:
                    missing = sorted(set(range(self.count)) - {self.rank} - self._channels.keys())
                    raise TimeoutError(f"no call from process {missing} within {CONNECT_S:g} s")
                with contextlib.suppress(TimeoutError):
                    greeters.start(functools.partial(greet, listener.accept()[0]))
                while not came.empty():
                    other, channel = came.get()
                    if self._channels.setdefault(other, channel) is not channel:
                        channel.close()
        finally:
            while not came.empty():  # they came after the deadline
                came.get()[1].close()

    def gather(
        self, lane: str, number: int, own: np.ndarray, *, about: Sequence[np.ndarray] = ()
    ) -> list[np.ndarray]:
        """Send `own` in a round, wait for all processes, and return what each sent, by rank.

        `about` holds the arrays that all processes must agree on, such as ids; their checksum is compared.

        Raises:
          ConnectionError: the connection to a process has ended.
          RuntimeError: `stop` was called, or a process sent another shape or was asked about other ids.
        """
        with self._changed:
            self._raise_if_stopped()
            generation = self._generation
        round_ = (generation, lane, number)
        total = zlib.crc32(b"".join(np.ascontiguousarray(x).tobytes() for x in about))
        head = {"round": round_, "dtype": own.dtype.str, "shape": own.shape, "about": total}
        blob = np.ascontiguousarray(own).tobytes()
        for other, channel in self._channels.items():
            try:
                channel.send(head, blob)
            except OSError as error:
                raise _lost_error(other) from error
        found = self._wait(round_)
        for other, (data, others) in found.items():
            if (data.dtype, data.shape[1:], others) != (own.dtype, own.shape[1:], total):
                raise RuntimeError(
                    f"In round {number} of {lane!r} process {other} sent {data.dtype}{list(data.shape)} for "
                    f"{others:08x}, and process {self.rank} {own.dtype}{list(own.shape)} for {total:08x}: "
                    "they planned differently, so no row can be trusted. Check that all have the same "
                    "versions and data, and start the job again; it resumes from its last checkpoint."
                )
        return [own if rank == self.rank else found[rank][0] for rank in range(self.count)]

    def _wait(self, round_: tuple[Any, ...]) -> dict[int, tuple[np.ndarray, int]]:
        """Wait until all others have sent their part of an exchange, and return the parts by rank."""
        with self._changed:
            heard = self._heard[round_]
            self._changed.wait_for(
                lambda: (
                    len(heard) == len(self._channels) or self._stopped or self._lost - heard.keys()
                )
            )
            self._raise_if_stopped()
            # A process may have sent its part and ended afterwards, so only missing parts are an error.
            found = self._heard.pop(round_)
            for other in self._lost - found.keys():
                raise _lost_error(other)
            return found

    def stop(self, why: str) -> None:
        """Make all exchanges raise RuntimeError, also the ones in progress, until `begin` is called."""
        with self._changed:
            self._stopped = why
            self._changed.notify_all()

    def begin(self) -> None:
        """Forget old exchanges, and begin again. Each process does so at its own time."""
        with self._changed:
            self._stopped = None
            self._generation += 1
            for old in [r for r in self._heard if r[0] < self._generation]:
                del self._heard[old]

    def close(self) -> None:
        """End the connections to the other processes, and their threads."""
        self.stop("the connections were closed")
        for channel in self._channels.values():
            channel.close()
        for worker in self._workers:
            worker.close()

    def _hear(self, _: Worker, other: int) -> None:
        """Receive what the process of rank `other` sends, until its connection ends."""
        channel = self._channels[other]
        try:
            while (message := channel.receive()) is not None:
                generation, lane, number = message["round"]
                data = np.frombuffer(channel.receive_bytes(message), np.dtype(message["dtype"]))
                with self._changed:
                    # Processes begin a generation at different times: keep what is early, drop what is late.
                    if generation >= self._generation:
                        sent = data.reshape(message["shape"]), int(message["about"])
                        self._heard[generation, lane, number][other] = sent
                        self._changed.notify_all()
        except (OSError, ValueError):
            pass  # the connection has ended or timed out, perhaps in the middle of a message
        finally:
            with self._changed:
                self._lost.add(other)
                self._changed.notify_all()

    def _raise_if_stopped(self) -> None:
        if self._stopped:
            raise RuntimeError(
                f"This process has ended the exchange of rows itself: {self._stopped}. No process has "
                "failed. Call begin() to exchange again; after close(), make new Peers."
            )


def _lost_error(other: int) -> ConnectionError:
    return ConnectionError(
        f"the connection to process {other}, which holds a part of the tables, has ended. See its output; "
        "the job resumes from its last checkpoint when it is started again."
    )


@dataclass(frozen=True)
class Share:
    """Which rows of a table this process owns, if several processes share the table."""

    peers: Peers
    name: str
    """Name of the table, the same in all processes."""

    def owner(self, ids: Int64[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
        """Return the rank of the process that owns each row."""
        return owners(ids, range(self.peers.count))

    def owned(self, ids: Int64[np.ndarray, " n"]) -> np.ndarray:
        """Return whether this process owns each row."""
        return self.owner(ids) == self.peers.rank

    def most(
        self,
        what: str,
        number: int,
        values: Float64[np.ndarray, " n"],
        ids: Int64[np.ndarray, " n"],
    ) -> Float64[np.ndarray, " n"]:
        """Return the largest value over all processes for each of `ids`, which must be the same in all."""
        lane = f"{self.name}: {what}"
        return np.max(self.peers.gather(lane, number, values, about=[ids]), axis=0)

    def rows(
        self,
        number: int,
        ids: Int64[np.ndarray, " n"],
        slots: Int32[np.ndarray, " n"],
        own: UInt32[np.ndarray, "own words"],
    ) -> UInt32[np.ndarray, "n words"]:
        """Return the rows of ids that all processes name, each from its owner.

        `own` holds the rows that this process owns, in order. `slots` are their targets on the device; ids
        and slots must be the same in all processes.
        """
        owner = self.owner(ids)
        rows = np.empty((len(ids), own.shape[1]), np.uint32)
        sent = self.peers.gather(f"{self.name}: rows", number, own, about=[ids, slots])
        for rank, some in enumerate(sent):
            rows[owner == rank] = some
        return rows

    def asked(
        self,
        number: int,
        ids: Int64[np.ndarray, " n"],
        answer: Callable[[Int64[np.ndarray, " m"]], UInt32[np.ndarray, "m words"]],
    ) -> UInt32[np.ndarray, "n words"]:
        """Return the rows of this process's `ids`, while the other processes ask for theirs.

        `answer` returns rows that this process owns, for itself and the others.
        """
        wanted = self.peers.gather(f"{self.name}: asked", number, ids)
        mine = [some[self.owned(some)] for some in wanted]
        answers = self.peers.gather(f"{self.name}: answer", number, answer(np.concatenate(mine)))
        owner = self.owner(ids)
        rows = np.empty((len(ids), answers[0].shape[1]), np.uint32)
        for rank, sent in enumerate(answers):
            # An answer holds the rows for all processes that asked, in order of their rank.
            before = sum(int(np.sum(self.owner(w) == rank)) for w in wanted[: self.peers.rank])
            here = owner == rank
            rows[here] = sent[before : before + int(here.sum())]
        return rows
