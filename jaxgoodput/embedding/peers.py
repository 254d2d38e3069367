"""Processes that hold one table together: each row in RAM or on the disk is one process's, its owner's.

All of them plan the same batches, so that the device slots of all hold the same rows; what one of them alone
knows, such as a row that it owns, it tells the others in a round that all come to. A round is named by its
table, what it is for and the number of its batch. Any thread may come to one: nothing waits for a device.
"""

import collections
import socket
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int32, Int64, UInt32

from jaxgoodput import _wire
from jaxgoodput.embedding.hashing import owners

CONNECT_S = 60.0  # until all processes of a job are there


class Peers:
    """The channels between this process, `rank`, and the others; close it.

    `addresses`: of the listeners of all, by rank; `listener` is this one's. All share `secret`.

    Raises (when it is made):
      ConnectionError: one of them does not come, or has another secret.
    """

    def __init__(
        self, rank: int, addresses: Sequence[str], secret: str, listener: socket.socket
    ) -> None:
        self.rank, self.count = rank, len(addresses)
        self._changed = threading.Condition()
        self._heard: dict[tuple[Any, ...], dict[int, tuple[np.ndarray, int]]] = (
            collections.defaultdict(dict)
        )
        self._gone: set[int] = set()
        self._generation = 0
        self._stopped: str | None = None
        self._channels: dict[int, _wire.Channel] = {}
        self._threads: list[threading.Thread] = []
        try:
            self._connect(addresses, secret, listener)
        except OSError as error:
            self.close()
            raise ConnectionError(
                f"process {rank} could not reach those that hold its tables with it, at "
                f"{', '.join(addresses)}: {error}. They need to reach each other on any port."
            ) from error
        self._threads = [
            threading.Thread(target=self._hear, args=(other,), name=f"peer {other}", daemon=True)
            for other in self._channels
        ]
        for thread in self._threads:
            thread.start()

    def _connect(self, addresses: Sequence[str], secret: str, listener: socket.socket) -> None:
        """Those of lower rank are called, those of higher rank call."""
        for other in range(self.rank):
            channel = _wire.connect(addresses[other], secret, timeout_s=CONNECT_S)
            self._channels[other] = channel
            channel.send({"type": "peer", "rank": self.rank})
        listener.settimeout(CONNECT_S)
        while len(self._channels) < self.count - 1:
            sock, _ = listener.accept()
            try:
                channel, hello = _wire.accepted(sock, secret)
            except ConnectionError:
                continue  # a stranger
            self._channels[int(hello["rank"])] = channel

    def gather(
        self, lane: str, number: int, own: np.ndarray, *, about: Sequence[np.ndarray] = ()
    ) -> list[np.ndarray]:
        """What every process gives for this round, by rank; waits for all.

        `about`: what it is given for, which has to be the same in all; its sum goes along.

        Raises:
          ConnectionError: one of them has gone.
          RuntimeError: `stop` was called, or another gives rows of another shape or for something else.
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
                raise _gone(other) from error
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    len(self._heard[round_]) == len(self._channels)
                    or self._stopped
                    or self._gone - self._heard[round_].keys()
                )
            )
            self._raise_if_stopped()
            found = self._heard.pop(round_)
            for other in self._gone - found.keys():
                raise _gone(other)
        for other, (data, others) in found.items():
            if (data.dtype, data.shape[1:], others) != (own.dtype, own.shape[1:], total):
                raise RuntimeError(
                    f"In round {number} of {lane!r} process {other} gives {data.dtype}{list(data.shape)} for "
                    f"{others:08x}, and process {self.rank} {own.dtype}{list(own.shape)} for {total:08x}: "
                    "they have planned differently, and no row can be trusted. Look whether all have the "
                    "same versions and data, and start the job again; it goes on from its last checkpoint."
                )
        return [own if rank == self.rank else found[rank][0] for rank in range(self.count)]

    def stop(self, why: str) -> None:
        """Have those that wait in rounds give up, until `begin`."""
        with self._changed:
            self._stopped = why
            self._changed.notify_all()

    def begin(self) -> None:
        """Forget all rounds: the processes, each in its own time, begin anew."""
        with self._changed:
            self._stopped = None
            self._generation += 1
            for old in [r for r in self._heard if r[0] < self._generation]:
                del self._heard[old]

    def close(self) -> None:
        """End the connections and the threads."""
        self.stop("the connections were closed")
        for channel in self._channels.values():
            channel.close()
        for thread in self._threads:
            thread.join()

    def _hear(self, other: int) -> None:
        channel = self._channels[other]
        try:
            while (message := channel.receive()) is not None:
                generation, lane, number = message["round"]
                data = np.frombuffer(channel.receive_bytes(message), np.dtype(message["dtype"]))
                with self._changed:
                    if generation >= self._generation:
                        given = data.reshape(message["shape"]), int(message["about"])
                        self._heard[generation, lane, number][other] = given
                        self._changed.notify_all()
        except (ConnectionError, ValueError):
            pass  # it is gone, whatever it said last
        with self._changed:
            self._gone.add(other)
            self._changed.notify_all()

    def _raise_if_stopped(self) -> None:
        if self._stopped:
            raise RuntimeError(f"No process is asked any more: {self._stopped}.")


def _gone(other: int) -> ConnectionError:
    return ConnectionError(
        f"process {other}, which holds a part of the tables, has gone. See its output; the job goes on from "
        "its last checkpoint when it is started again."
    )


@dataclass(frozen=True)
class Share:
    """This process's part of one table."""

    peers: Peers
    name: str
    """Of the table, the same in all processes."""

    def owner(self, ids: Int64[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
        """The rank of the process that owns each row."""
        return owners(ids, range(self.peers.count))

    def owned(self, ids: Int64[np.ndarray, " n"]) -> np.ndarray:
        """Which rows are this process's."""
        return self.owner(ids) == self.peers.rank

    def most(
        self,
        what: str,
        number: int,
        values: Float64[np.ndarray, " n"],
        ids: Int64[np.ndarray, " n"],
    ) -> Float64[np.ndarray, " n"]:
        """The largest that any process has, of each of the ids, which are the same in all."""
        lane = f"{self.name}: {what}"
        return np.max(self.peers.gather(lane, number, values, about=[ids]), axis=0)

    def rows(
        self,
        number: int,
        ids: Int64[np.ndarray, " n"],
        slots: Int32[np.ndarray, " n"],
        own: UInt32[np.ndarray, "own words"],
    ) -> UInt32[np.ndarray, "n words"]:
        """The rows of ids that all processes name, from their owners; `own`: those of this one, in order.

        `slots`: where they come to, the same in all.
        """
        owner = self.owner(ids)
        rows = np.empty((len(ids), own.shape[1]), np.uint32)
        given = self.peers.gather(f"{self.name}: rows", number, own, about=[ids, slots])
        for rank, some in enumerate(given):
            rows[owner == rank] = some
        return rows

    def asked(
        self,
        number: int,
        ids: Int64[np.ndarray, " n"],
        answer: Callable[[Int64[np.ndarray, " m"]], UInt32[np.ndarray, "m words"]],
    ) -> UInt32[np.ndarray, "n words"]:
        """The rows of ids that this process asks for, while the others ask for theirs.

        `answer`: the rows of those that this process owns.
        """
        wanted = self.peers.gather(f"{self.name}: asked", number, ids)
        mine = [some[self.owned(some)] for some in wanted]
        answers = self.peers.gather(f"{self.name}: answer", number, answer(np.concatenate(mine)))
        owner = self.owner(ids)
        rows = np.empty((len(ids), answers[0].shape[1]), np.uint32)
        for rank, given in enumerate(answers):
            # What it answers comes by who has asked.
            before = sum(int(np.sum(self.owner(w) == rank)) for w in wanted[: self.peers.rank])
            here = owner == rank
            rows[here] = given[before : before + int(here.sum())]
        return rows
