"""Speaks HTTP to the scheduler, for commands and agents, with the standard library alone.

A scheduler that is gone is an `Unreachable`, which no job ends of: whoever asks goes on with what it has and
asks again later.
"""

import contextlib
import http.client
import json
import pathlib
import secrets
import socket
import ssl
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from jaxgoodput._serial import decode, encode

T = TypeVar("T")

_PREFIX = "/v1"


class Unreachable(OSError):
    """The scheduler does not answer, or something else answers in its place."""


class RequestRefused(Exception):
    """The scheduler understood, and refuses; the message says why."""

    def __init__(self, status: int, message: str):
        self.status = status
        super().__init__(message)


class Client:
    """One connection to a scheduler, kept between calls; for one thread at a time."""

    def __init__(
        self, url: str, token: str, *, timeout_s: float = 30.0, ca: pathlib.Path | None = None
    ):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise ValueError(
                f"--scheduler {url}: expected http://HOST:PORT or https://HOST:PORT, as `jaxgoodput serve` "
                "says it."
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
        """What the scheduler answers to `method /v1/path...`, as a `type_`.

        `changes`: the request is given an id of its own, so that sending it again where the connection broke
        does nothing twice. `wait_s`: for how long the answer may wait for a change. Raises Unreachable and
        Refused.
        """
        query = {name: value for name, value in query.items() if value is not None}
        if wait_s:
            query["wait_s"] = wait_s
        where = "/".join([_PREFIX, *(quote(part, safe="") for part in path)])
        where += f"?{urlencode(query)}" if query else ""
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        data = None
        if body is not None:
            data = json.dumps(encode(body), allow_nan=False).encode()
            headers["Content-Type"] = "application/json"
        if changes:
            headers["Idempotency-Key"] = secrets.token_hex(16)
        may_repeat = method == "GET" or changes
        status, text = self._send(method, where, data, headers, wait_s, may_repeat)
        try:
            answer = json.loads(text)
        except ValueError:
            raise Unreachable(f"{self.url} answers {status}, and not as a scheduler does") from None
        if status >= 400:
            why = answer.get("error", "") if isinstance(answer, dict) else ""
            raise RequestRefused(status, why or f"{self.url} refuses with {status}")
        try:
            return decode(answer, type_, type_.__name__)
        except ValueError as error:
            raise Unreachable(
                f"{self.url} answers what this program cannot read ({error}). Is it another version?"
            ) from None

    def close(self) -> None:
        """Let go of the connection; the next call makes another one."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            self._connection = None

    def _send(
        self,
        method: str,
        where: str,
        data: bytes | None,
        headers: dict[str, str],
        wait_s: float,
        may_repeat: bool,
    ) -> tuple[int, bytes]:
        for attempt in (1, 2):
            was_kept = self._connection is not None
            try:
                connection = self._connected(self._timeout_s + wait_s)
                connection.request(method, where, data, headers)
                response = connection.getresponse()
                text = response.read()
                if connection.sock is None:  # the answer said that no other one comes over it
                    self._connection = None
                return response.status, text
            except (OSError, http.client.HTTPException) as error:
                self.close()
                # A connection that was kept may have been closed since; the request has then not been read.
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
    """The token in a file. Raises ValueError where there is none."""
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ValueError(
            f"the token cannot be read: {error}. Give --token-file; `jaxgoodput serve` says where its own is."
        ) from None
    if not token or not token.isascii() or not token.isprintable():
        raise ValueError(f"{path} holds no token: one line of printable letters is expected.")
    return token
