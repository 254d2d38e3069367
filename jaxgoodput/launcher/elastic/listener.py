"""Accepts the connections of a job's processes, each handled by a thread of its own."""

import contextlib
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxgoodput import _wire as wire
from jaxgoodput._worker import Worker, Workers

_RETRY_S = 0.1
_CLOSE_S = 0.1  # per thread; one that waits for a peer which is cut off would take much longer


class Listener:
    """A server for processes that have the job's secret.

    Each connection calls `handle(channel, hello)` on a thread of its own, where `hello` is the first message;
    `handle` closes the channel. `on_error` receives the exception of every connection that fails, from its
    thread. Raises OSError or OverflowError if it cannot listen at `host:port`.
    """

    def __init__(
        self,
        host: str,
        port: int | None,
        secret: str,
        handle: Callable[[wire.Channel, Mapping[str, Any]], None],
        *,
        name: str,
        on_error: Callable[[BaseException], None],
    ):
        self._secret = secret
        self._handle = handle
        self._on_error = on_error
        self._socket = socket.create_server((host, port or 0), reuse_port=False)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._connections = Workers(f"{name}-connection", on_error)
        self._accepting = Worker(f"{name}-accept", self._accept, on_error=on_error)

    def close(self) -> None:
        """Accept no further connection. Close the open channels first, so that their threads can end."""
        self._accepting.stop()
        # Without this, the thread that waits in accept() would hold the port until the next connection.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._accepting.join(_CLOSE_S)
        self._connections.join(_CLOSE_S)

    def _accept(self, worker: Worker) -> None:
        while not worker.is_stopping:
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if not worker.is_stopping:
                    self._on_error(error)  # such as too many open files, which may pass
                    worker.wait_stopping(_RETRY_S)
                continue
            self._connections.start(partial(self._greet, sock))

    def _greet(self, sock: socket.socket, worker: Worker) -> None:
        self._handle(*wire.accepted(sock, self._secret))
