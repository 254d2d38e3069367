"""An HTTP client of the scheduler, for commands and agents. It needs the standard library alone.

If the scheduler does not answer, calls raise `Unreachable`. No job ends because of that: the caller keeps
what it has and tries again later.
"""

import contextlib
import http.client
import json
import pathlib
import secrets
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from jaxgoodput._fields.serial import decode, encode

T = TypeVar("T")

_PREFIX = "/v1"


class Unreachable(OSError):
    """The scheduler does not answer, or another program answers at its address."""


class RequestRefused(Exception):
    """The scheduler understood the request and refused it. The message says why."""

    def __init__(self, status: int, message: str):
        self.status = status
        super().__init__(message)


class _Deadline:
    """Ends the exchange on a socket inside the block if it takes too long, however many bytes pass."""

    def __init__(self, sock: socket.socket, limit_s: float):
        self.is_over = False
        self._sock = sock
        self._timer = threading.Timer(limit_s, self._hang_up)
        self._timer.daemon = True

    def __enter__(self) -> "_Deadline":
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _hang_up(self) -> None:
        self.is_over = True
        with contextlib.suppress(OSError):  # it is closed already
            # Not the method of a TLS socket, which would also take the cipher from the thread that reads.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)


class Client:
    """A connection to a scheduler that is kept open between calls. Not thread-safe.

    A call raises Unreachable if no whole answer has come after `timeout_s`, and the time for which the
    scheduler may hold it back.
    """

    def __init__(
        self, url: str, token: str, *, timeout_s: float = 30.0, ca: pathlib.Path | None = None
    ):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise ValueError(
                f"--scheduler {url}: expected http://HOST:PORT or https://HOST:PORT, as `jaxgoodput serve` "
                "prints it."
            )
        self.url = url.rstrip("/")
        self._host, self._port = parts.hostname, parts.port
        self._token = token
        self._timeout_s = timeout_s
        self._context = None
        if parts.scheme == "https":
            self._context = ssl.create_default_context(cafile=None if ca is None else str(ca))
        self._connection: http.client.HTTPConnection | None = None

    def call(
        self,
        method: str,
        *path: str,
        type_: type[T],
        body: Any = None,
        changes: bool = False,
        wait_s: float = 0.0,
        **query: Any,
    ) -> T:
        """Send `method /v1/path...` and return the answer as a `type_`.

        Set `changes` for a request that changes something: it then carries an idempotency key, so that it can
        be sent again after a broken connection without being carried out twice. `wait_s` is the time for
        which the scheduler may hold the answer back until something changes. Raises Unreachable and
        RequestRefused.
        """
        query = {name: value for name, value in query.items() if value is not None}
        if wait_s:
            query["wait_s"] = wait_s
        target = "/".join([_PREFIX, *(quote(part, safe="") for part in path)])
        target += f"?{urlencode(query)}" if query else ""
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        data = None
        if body is not None:
            data = json.dumps(encode(body), allow_nan=False).encode()
            headers["Content-Type"] = "application/json"
        if changes:
            headers["Idempotency-Key"] = secrets.token_hex(16)
        status, text = self._send(method, target, data, headers, wait_s)
        try:
            answer = json.loads(text)
        except ValueError:
            raise Unreachable(
                f"{self.url} answers {status}, but not as a scheduler does. Check the URL."
            ) from None
        if status >= 400:
            why = answer.get("error", "") if isinstance(answer, dict) else ""
            raise RequestRefused(status, why or f"{self.url} refuses with status {status}")
        try:
            return decode(answer, type_, type_.__name__)
        except ValueError as error:
            raise Unreachable(
                f"{self.url} answers what this program cannot read ({error}). Does it run another version?"
            ) from None

    def pages(self, *path: str, type_: type[T], **query: Any) -> Iterator[T]:
        """Yield all answers to `GET /v1/path...` whose list is too long for one answer, the newest first.

        Each answer says in `next_before` with which `before` the next one is asked for; None ends the list.
        Raises Unreachable and RequestRefused.
        """
        before: int | None = None
        while True:
            found: Any = self.call("GET", *path, type_=type_, before=before, **query)
            yield found
            before = found.next_before
            if before is None:
                return

    def close(self) -> None:
        """Close the connection. The next call opens a new one."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            self._connection = None

    def _send(
        self, method: str, target: str, data: bytes | None, headers: dict[str, str], wait_s: float
    ) -> tuple[int, bytes]:
        may_repeat = method == "GET" or "Idempotency-Key" in headers
        limit_s = self._timeout_s + wait_s
        for attempt in (1, 2):
            was_kept, deadline = self._connection is not None, None
            try:
                connection = self._connected(limit_s)
                with _Deadline(connection.sock, limit_s) as deadline:
                    connection.request(method, target, data, headers)
                    response = connection.getresponse()
                    text = response.read()
                if deadline.is_over:  # an answer without a length may have been cut off
                    raise TimeoutError
                if connection.sock is None:  # the answer announced the end of the connection
                    self._connection = None
                return response.status, text
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if deadline is not None and deadline.is_over:
                    raise Unreachable(
                        f"{self.url} did not send a whole answer within {limit_s:g} s. Try again later, or "
                        "check the network and any proxy in between."
                    ) from None
                # The scheduler may have closed an idle connection; it has not read the request then.
                if attempt == 2 or not was_kept or not may_repeat:
                    raise Unreachable(f"no scheduler answers at {self.url}: {error}") from None
        raise AssertionError("the second attempt returns or raises")

    def _connected(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._connection is None:
            if self._context is None:
                made = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
            else:
                made = http.client.HTTPSConnection(
                    self._host, self._port, timeout=timeout_s, context=self._context
                )
            made.connect()
            made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection = made
        self._connection.sock.settimeout(timeout_s)
        return self._connection


def read_token(path: pathlib.Path) -> str:
    """Return the token in a file. Raises ValueError if the file cannot be read or holds no token."""
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ValueError(
            f"the token cannot be read: {error}. Give --token-file; `jaxgoodput serve` prints where its own "
            "token is."
        ) from None
    if not token or not token.isascii() or not token.isprintable():
        raise ValueError(f"{path} holds no token. Expected one line of printable ASCII characters.")
    return token
