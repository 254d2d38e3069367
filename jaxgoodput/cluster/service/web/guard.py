"""Access control in front of the application: tokens, request sizes and request rates.

Without a token only `/healthz` answers. The guard soon stops reading a body that is too long or too slow, and
tells a caller that sends too many requests when to retry. It logs every refusal.
"""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import json
import math
import pathlib
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from absl import logging

from jaxgoodput._fields.serial import decode, parse
from jaxgoodput.clock import Clock
from jaxgoodput.cluster.service.record.commands import Caller, CommandRefused
from jaxgoodput.cluster.service.web.metrics import RequestMetrics
from jaxgoodput.cluster.service.web.rates import TokenBucket

TOKEN_FILE = "token"
LEAST_TOKEN = 16
ROLES = ("user", "node", "operator")
OPEN = frozenset({"/healthz"})
# Browsers can send a password, but no bearer token.
PAGES = frozenset({"/", "/page", "/page.js"})
LINGER_S = 1.0  # for the rest of a body that is refused
MOST_STRANGERS = 1000  # addresses whose wrong tokens are counted
STRANGER_BYTES = 2**16  # of a body that comes without a valid token, to be dropped
CLOSE = (b"connection", b"close")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Token:
    """One entry of the token file: whose token it is, and what it allows."""

    token: str = field(repr=False)
    tenant: str = "default"
    role: str = "user"
    """"user" may act on the jobs of its tenant, "node" may do what agents do, "operator" everything."""

    def __post_init__(self):
        if len(self.token) < LEAST_TOKEN or not re.fullmatch(r"[\x21-\x7e]+", self.token):
            raise ValueError(
                f"a token of tenant {self.tenant!r} is shorter than {LEAST_TOKEN} characters or contains "
                "characters other than printable ASCII. Create one with "
                "`python -c 'import secrets; print(secrets.token_hex(32))'`."
            )
        if self.role not in ROLES:
            raise ValueError(
                f"a token of tenant {self.tenant!r} has role {self.role!r}. Use one of {', '.join(ROLES)}."
            )


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The content of the file that `--tokens` names."""

    tokens: tuple[Token, ...]

    def __post_init__(self):
        if len({token.token for token in self.tokens}) < len(self.tokens):
            raise ValueError(
                "the same token occurs twice. Give each tenant and role its own token."
            )


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits on the size, duration and rate of requests."""

    body_bytes: int = 2**20
    body_s: float = 10.0
    """The longest time in which a whole body must arrive."""
    per_second: float = 1000.0
    """Requests per second of all users of a tenant, or with one token of another role, on average."""
    wrong_per_minute: float = 30.0
    """Requests per minute without a valid token, from one address."""
    questions_per_minute: float = 60.0
    """Questions per minute of one tenant, on average."""


def read_tokens(path: pathlib.Path) -> Tokens:
    """Read a token file. Raises OSError, or ValueError that says what is wrong with the file."""
    try:
        return decode(parse(path.read_bytes()), Tokens, "tokens")
    except ValueError as error:
        raise ValueError(f"--tokens {path}: {error}") from None


def own_token(folder: pathlib.Path) -> Tokens:
    """Return the operator's token from a service's folder; create it at the first start."""
    path = folder / TOKEN_FILE
    if not path.exists():
        aside = (
            folder / f"{TOKEN_FILE}.new"
        )  # renamed when complete: a kill leaves no partial token
        aside.touch(mode=0o600)
        aside.write_text(secrets.token_urlsafe(32) + "\n")
        aside.replace(path)
    return Tokens(tokens=(Token(token=path.read_text().strip(), role="operator"),))


@dataclass(frozen=True)
class _Refused:
    """An answer by which the guard refuses a request, without asking the application."""

    status: int
    why: str
    headers: Mapping[bytes, bytes]


class AccessGuard:
    """An ASGI application in front of another one, which finds the `Caller` in `scope["state"]["caller"]`."""

    def __init__(
        self, app: App, tokens: Tokens, bounds: Bounds, clock: Clock, requests: RequestMetrics
    ):
        self._app, self._bounds, self._clock, self._requests = app, bounds, clock, requests
        self._callers = {
            _digest(token.token.encode()): Caller(token.tenant, token.role)
            for token in tokens.tokens
        }
        self._buckets: dict[str, TokenBucket] = {}
        self._strangers: dict[str, TokenBucket] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on to the application."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        refused = self._refusal(scope)
        if refused is not None:
            if b"connection" in refused.headers and self._sends_on(scope):
                is_known = self._key(scope) is not None
                await _discard(receive, 2 * self._bounds.body_bytes if is_known else STRANGER_BYTES)
            await self._refuse(scope, send, refused)
            return
        body = _LimitedBody(receive, self._bounds, asyncio.get_running_loop().time)
        begun_s = self._clock.now()

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "none")
                waits = b"wait_s=" in scope["query_string"]
                took_s, status = self._clock.now() - begun_s, message["status"]
                self._requests.count(route, status, took_s, waits=waits)
                if status >= 400:
                    logging.warning("request refused with %d: %s", status, _in_words(scope))
                if "caller" not in scope.get("state", {}):  # see `_stranger`
                    message["headers"] = [*message.get("headers", ()), CLOSE]
            await send(message)

        await self._app(scope, body.receive, tell)

    def _refusal(self, scope: Scope) -> _Refused | None:
        length = _headers(scope).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._bounds.body_bytes:
            said = f"a body of {length[:20].decode('ascii', 'replace')} bytes is too long"
            why = f"{said}. Send at most {self._bounds.body_bytes} bytes."
            return _Refused(413, why, dict([CLOSE]))
        if scope["path"] in OPEN:
            return None
        key = self._key(scope)
        if key is None:
            return self._stranger(scope)
        now_s, most, caller = self._clock.now(), self._bounds.per_second, self._callers[key]
        scope.setdefault("state", {})["caller"] = caller
        # Another token does not give a tenant more. Agents have no tenant of their own.
        whose = f"tenant {caller.tenant!r}" if caller.role == "user" else key
        bucket = self._buckets.setdefault(whose, TokenBucket(most, max(most, 1.0), now_s))
        if wait_s := bucket.takes_s(now_s):
            who = whose if caller.role == "user" else "one token"
            return _too_many(f"{who} may send {most:g} requests per second", wait_s)
        return None

    def _sends_on(self, scope: Scope) -> bool:
        """Whether a refused request has a body, and its sender does not wait to be asked for it."""
        headers = _headers(scope)
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        return has_body and b"expect" not in headers

    def _key(self, scope: Scope) -> str | None:
        """Return the digest of a request's token, or None if the token is not known."""
        kind, _, said = _headers(scope).get(b"authorization", b"").partition(b" ")
        token = said.strip()
        if kind.lower() == b"basic" and scope["path"] in PAGES and scope["method"] == "GET":
            try:
                token = base64.b64decode(token, validate=True).partition(b":")[2]
            except binascii.Error:
                return None
        elif kind.lower() != b"bearer":
            return None
        # Tokens are compared by digest, so that the time of a comparison reveals nothing about them.
        key = _digest(token)
        return key if key in self._callers else None

    def _stranger(self, scope: Scope) -> _Refused:
        """Return the answer to a request without a valid token: 401, or 429 if its address sends too many.

        The connection ends with the answer: only callers with a token may keep one open.
        """
        address = (scope.get("client") or ("unknown", 0))[0]
        now_s = self._clock.now()
        if address not in self._strangers and len(self._strangers) >= MOST_STRANGERS:
            self._strangers.pop(next(iter(self._strangers)))
        most = self._bounds.wrong_per_minute
        bucket = self._strangers.setdefault(address, TokenBucket(most / 60.0, most, now_s))
        if wait_s := bucket.takes_s(now_s):
            said = "this address sent too many requests without a valid token"
            return _too_many(said, wait_s, dict([CLOSE]))
        scheme = b"Basic" if scope["path"] in PAGES else b"Bearer"
        said = (
            "the token is missing or wrong. Send it as `Authorization: Bearer TOKEN`; `jaxgoodput serve` "
            "prints where its token is."
        )
        headers: dict[bytes, bytes] = dict(
            [CLOSE, (b"www-authenticate", scheme + b' realm="jaxgoodput"')]
        )
        return _Refused(401, said, headers)

    async def _refuse(self, scope: Scope, send: Send, refused: _Refused) -> None:
        status, why = refused.status, refused.why
        self._requests.count("none", status, 0.0, waits=True)
        if status == 429:  # a flood of requests must not flood the log
            logging.log_every_n_seconds(
                logging.WARNING, "request refused with 429: %s: %s", 1.0, _in_words(scope), why
            )
        else:
            logging.warning("request refused with %d: %s: %s", status, _in_words(scope), why)
        body = json.dumps({"error": why}).encode()
        headers = [(b"content-type", b"application/json"), *refused.headers.items()]
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class BodyRefused(CommandRefused):
    """A body that is too long or too slow. The rest is not read, so the connection must be closed."""


class _LimitedBody:
    """Reads the body of a request. Refuses it if it is too long, or takes too much time."""

    def __init__(self, receive: Receive, bounds: Bounds, now: Callable[[], float]):
        self._receive, self._bounds, self._now = receive, bounds, now
        self._due_s = now() + bounds.body_s
        self._num_bytes = 0
        self._is_whole = False

    async def receive(self) -> Message:
        """Return the next ASGI message. Raises BodyRefused."""
        if self._is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout(max(self._due_s - self._now(), 0.001)):
                message = await self._receive()
        except TimeoutError:
            raise BodyRefused(
                408, f"the body did not arrive within {self._bounds.body_s:g} s."
            ) from None
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._bounds.body_bytes:
            if message.get("more_body", False):
                await _discard(self._receive, 2 * self._bounds.body_bytes)
            raise BodyRefused(
                413, f"the body is too long. Send at most {self._bounds.body_bytes} bytes."
            )
        self._is_whole = not message.get("more_body", False)
        return message


async def _discard(receive: Receive, most_bytes: int) -> None:
    """Read the rest of a body that is refused, for a moment, and drop it.

    A connection that is closed with unread bytes is reset, and the answer that says why may be lost with it.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while most_bytes > 0:
                message = await receive()
                most_bytes -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _too_many(said: str, wait_s: float, headers: Mapping[bytes, bytes] | None = None) -> _Refused:
    after = {b"retry-after": str(math.ceil(wait_s)).encode()}
    return _Refused(429, f"{said}. Try again in {wait_s:.2f} s.", {**after, **(headers or {})})


def _headers(scope: Scope) -> dict[bytes, bytes]:
    return {name.lower(): value for name, value in scope["headers"]}


def _in_words(scope: Scope) -> str:
    """Describe a request for the log. The path is escaped, so that it cannot break the line."""
    address = (scope.get("client") or ("unknown", 0))[0]
    return f"{scope['method']} {scope['path'][:100]!a} from {address}"


def _digest(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()
