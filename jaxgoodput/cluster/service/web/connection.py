"""One HTTP connection: every part of an exchange has a deadline for the whole of it.

A time limit that begins anew with each byte holds off no peer that sends, or reads, a byte every few seconds.
So the head of a request, its body (`guard.py`), the making of the answer and the taking of the answer each
have one deadline, however many bytes pass. The head's deadline counts from the start of the connection; a TLS
handshake before it has one of its own.
"""

import asyncio
import enum
from typing import Any

import h11
from absl import logging
from uvicorn.protocols.http.h11_impl import H11Protocol

HANDSHAKE_S = 4.0  # for a TLS handshake
HEADER_S = 10.0  # for the head of a request; on a new connection, for its handshake as well
EXCHANGE_S = (
    120.0  # for the body and the answer, longer than the longest wait for news and any question
)
ANSWER_S = 20.0  # for the client to take a whole answer, and more if it is long:
SLOWEST = 50_000.0  # bytes per second at which it is taken


class Phase(enum.Enum):
    """The part of an exchange for which a connection has a deadline, as it is named in the log."""

    HEAD = "the head of a request did not arrive"
    EXCHANGE = "a request was not answered"
    ANSWER = "the client did not take its answer"


class Connections:
    """The open connections, of which there may be `most`. If there are more, the oldest stranger's ends.

    A stranger's connection is one over which no valid token has come.
    """

    def __init__(self, most: int):
        self.most = most
        self._strangers: dict[PatientProtocol, None] = {}
        self._num_open = 0

    def opened(self, connection: "PatientProtocol") -> None:
        """Count a new connection; end another one if they are too many, or this one if all are known."""
        self._num_open += 1
        self._strangers[connection] = None
        while self._num_open > self.most and self._strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            if not oldest.is_known:
                logging.log_every_n_seconds(
                    logging.WARNING,
                    "more than %d connections are open, so the oldest ones without a token are closed",
                    1.0,
                    self.most,
                )
                oldest.hang_up()
                return

    def closed(self, connection: "PatientProtocol") -> None:
        """Note that a connection has ended."""
        self._num_open -= 1
        self._strangers.pop(connection, None)


class PatientProtocol(H11Protocol):
    """HTTP/1.1 with a limited patience: a connection ends if a part of an exchange takes too long."""

    def __init__(self, *arguments: Any, connections: Connections, **settings: Any):
        super().__init__(*arguments, **settings)
        self._connections = connections
        self._phase: Phase | None = None
        self._due: asyncio.TimerHandle | None = None

    @property
    def is_known(self) -> bool:
        """Whether a valid token has come over this connection."""
        return self.scope is not None and "caller" in self.scope.get("state", {})

    def hang_up(self) -> None:
        """End the connection now, also if the client has not taken all of its answer."""
        self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        """Start the deadline of the first request's head."""
        super().connection_made(transport)
        self._begin(Phase.HEAD, HEADER_S - (HANDSHAKE_S if self.scheme == "https" else 0.0))
        self._connections.opened(self)

    def data_received(self, data: bytes) -> None:
        """Handle data, which may begin a head, and may complete it."""
        # What comes of a body after its request was answered begins no head.
        is_next = self._is_between() and self.conn.their_state is h11.IDLE
        if is_next and self._phase is not Phase.HEAD:
            self._begin(Phase.HEAD, HEADER_S)
        super().data_received(data)
        if self._phase is Phase.HEAD and not self._is_between():
            self._begin(Phase.EXCHANGE, EXCHANGE_S)

    def on_response_complete(self) -> None:
        """Start the deadline by which the client must have taken the answer that was just written."""
        self._begin(Phase.ANSWER, ANSWER_S + self.transport.get_write_buffer_size() / SLOWEST)
        super().on_response_complete()
        if not self._is_between():  # the next request was there already
            self._begin(Phase.EXCHANGE, EXCHANGE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, as the connection has ended."""
        self._stop_timer()
        self._connections.closed(self)
        super().connection_lost(exc)

    def _begin(self, phase: Phase, limit_s: float) -> None:
        self._stop_timer()
        self._phase = phase
        self._due = self.loop.call_later(limit_s, self._too_slow, phase, limit_s)

    def _stop_timer(self) -> None:
        self._phase = None
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _is_between(self) -> bool:
        """Whether the connection is between two requests: none is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _too_slow(self, phase: Phase, limit_s: float) -> None:
        self._stop_timer()
        if phase is Phase.ANSWER and not self.transport.get_write_buffer_size():
            return  # the client has all of it, and may ask again
        peer = self.client[0] if self.client else "an unknown address"
        logging.warning("refused: %s in time (%g s), from %s", phase.value, limit_s, peer)
        self.hang_up()
