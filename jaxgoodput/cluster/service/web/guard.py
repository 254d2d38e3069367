"""Who may ask, how much and how often: in front of everything that the service answers.

Without a token only `/healthz` answers. A body that is too long, or too slow, is not read to its end; who
asks too often is told when to come back. All that is refused here is logged.
"""

import asyncio
import base64
import binascii
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

from jaxgoodput._serial import decode, parse
from jaxgoodput.clock import Clock
from jaxgoodput.cluster.service.record.commands import Caller, CommandRefused
from jaxgoodput.cluster.service.web.metrics import RequestMetrics

TOKEN_FILE = "token"
LEAST_TOKEN = 16
ROLES = ("user", "node", "operator")
OPEN = frozenset({"/healthz"})
PAGES = frozenset(
    {"/", "/page", "/page.js"}
)  # for browsers, which can send a password but no bearer token
MOST_STRANGERS = 1000  # addresses whose wrong tokens are counted

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Token:
    """One line of the file of tokens."""

    token: str = field(repr=False)
    tenant: str = "default"
    role: str = "user"
    """"user": the jobs of its tenant; "node": what agents do; "operator": everything."""

    def __post_init__(self):
        if len(self.token) < LEAST_TOKEN or not re.fullmatch(r"[\x21-\x7e]+", self.token):
            raise ValueError(
                f"a token of tenant {self.tenant!r} is shorter than {LEAST_TOKEN} letters or holds others "
                "than printable ASCII. Make one: `python -c 'import secrets; print(secrets.token_hex(32))'`."
            )
        if self.role not in ROLES:
            raise ValueError(
                f"a token of tenant {self.tenant!r} has role {self.role!r}. It is one of {', '.join(ROLES)}."
            )


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The file of `--tokens`."""

    tokens: tuple[Token, ...]

    def __post_init__(self):
        if len({token.token for token in self.tokens}) < len(self.tokens):
            raise ValueError("the same token is there twice. Give each tenant and role its own.")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much one may ask for."""

    body_bytes: int = 2**20
    body_s: float = 10.0
    """For the whole body to come."""
    per_second: float = 1000.0
    """Requests of one token, on average."""
    wrong_per_minute: float = 30.0
    """Requests without a right token, of one address."""


def read_tokens(path: pathlib.Path) -> Tokens:
    """The tokens in a file. Raises ValueError and OSError, saying what is wrong with it."""
    try:
        return decode(parse(path.read_bytes()), Tokens, "tokens")
    except ValueError as error:
        raise ValueError(f"--tokens {path}: {error}") from None


def own_token(folder: pathlib.Path) -> Tokens:
    """The operator's token of a service whose tokens nobody wrote: made at its first start, and kept."""
    path = folder / TOKEN_FILE
    if not path.exists():
        aside = folder / f"{TOKEN_FILE}.new"  # a kill never leaves a part of it
        aside.touch(mode=0o600)
        aside.write_text(secrets.token_urlsafe(32) + "\n")
        aside.replace(path)
    return Tokens(tokens=(Token(token=path.read_text().strip(), role="operator"),))


class Bucket:
    """Lets so many through a second, and as many at once."""

    def __init__(self, per_second: float, most: float, now_s: float):
        self._per_second, self._most = per_second, most
        self._left, self._at_s = most, now_s

    def takes_s(self, now_s: float) -> float:
        """0 where one more may go now; else in how many seconds."""
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_second)
        self._at_s = now_s
        if self._left >= 1.0:
            self._left -= 1.0
            return 0.0
        return (1.0 - self._left) / self._per_second


class AccessGuard:
    """An ASGI application in front of another one; `scope["state"]["caller"]` says to that one who asks."""

    def __init__(
        self, app: App, tokens: Tokens, bounds: Bounds, clock: Clock, requests: RequestMetrics
    ):
        self._app, self._bounds, self._clock, self._requests = app, bounds, clock, requests
        self._callers = {
            _digest(token.token): Caller(token.tenant, token.role) for token in tokens.tokens
        }
        self._buckets: dict[str, Bucket] = {}
        self._strangers: dict[str, Bucket] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        refused = self._refusal(scope)
        if refused is not None:
            await self._refuse(scope, send, *refused)
            return
        body = _Body(receive, self._bounds, asyncio.get_running_loop().time)
        begun_s, answered = self._clock.now(), False

        async def tell(message: Message) -> None:
            nonlocal answered
            if not answered:
                answered = True
                route = getattr(scope.get("route"), "path", "none")
                waits = b"wait_s=" in scope["query_string"]
                took_s, status = self._clock.now() - begun_s, message["status"]
                self._requests.count(route, status, took_s, waits=waits)
                if status >= 400:
                    logging.warning("refused with %d: %s", status, _in_words(scope))
            await send(message)

        await self._app(scope, body.receive, tell)

    def _refusal(self, scope: Scope) -> tuple[int, str, Mapping[bytes, bytes]] | None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._bounds.body_bytes:
            said = f"a body of {length[:20].decode('ascii', 'replace')} bytes is too long"
            return 413, f"{said}; {self._bounds.body_bytes} are taken.", {b"connection": b"close"}
        if scope["path"] in OPEN:
            return None
        key = self._key(scope, headers)
        if key is None:
            return self._stranger(scope)
        bucket = self._buckets.get(key)
        now_s = self._clock.now()
        if bucket is None:
            most = self._bounds.per_second
            bucket = self._buckets.setdefault(key, Bucket(most, max(most, 1.0), now_s))
        wait_s = bucket.takes_s(now_s)
        if wait_s:
            after = str(math.ceil(wait_s)).encode()
            most = f"{self._bounds.per_second:g} requests a second are answered for one token"
            return 429, f"{most}. Come back in {wait_s:.2f} s.", {b"retry-after": after}
        scope.setdefault("state", {})["caller"] = self._callers[key]
        return None

    def _key(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str | None:
        """Of whom the token is; None where it is nobody's."""
        kind, _, said = headers.get(b"authorization", b"").partition(b" ")
        token = said.strip()
        if kind.lower() == b"basic" and scope["path"] in PAGES and scope["method"] == "GET":
            try:
                token = base64.b64decode(token, validate=True).partition(b":")[2]
            except binascii.Error:
                return None
        elif kind.lower() != b"bearer":
            return None
        key = hashlib.sha256(
            token
        ).hexdigest()  # compared by digest: how long it takes tells nothing
        return key if key in self._callers else None

    def _stranger(self, scope: Scope) -> tuple[int, str, Mapping[bytes, bytes]]:
        address = (scope.get("client") or ("nobody", 0))[0]
        now_s = self._clock.now()
        if address not in self._strangers and len(self._strangers) >= MOST_STRANGERS:
            self._strangers.pop(next(iter(self._strangers)))
        most = self._bounds.wrong_per_minute
        bucket = self._strangers.setdefault(address, Bucket(most / 60.0, most, now_s))
        wait_s = bucket.takes_s(now_s)
        if wait_s:
            said = "too many requests without a right token came from this address"
            after = str(math.ceil(wait_s)).encode()
            return 429, f"{said}. Come back in {wait_s:.0f} s.", {b"retry-after": after}
        scheme = b"Basic" if scope["path"] in PAGES else b"Bearer"
        said = (
            "no token, or a wrong one. Send it as `Authorization: Bearer TOKEN`; `jaxgoodput serve` says "
            "where its own is."
        )
        return 401, said, {b"www-authenticate": scheme + b' realm="jaxgoodput"'}

    async def _refuse(
        self, scope: Scope, send: Send, status: int, why: str, more: Mapping[bytes, bytes]
    ) -> None:
        self._requests.count("none", status, 0.0, waits=True)
        if status == 429:  # of these there are many
            logging.log_every_n_seconds(
                logging.WARNING, "refused with 429: %s: %s", 1.0, _in_words(scope), why
            )
        else:
            logging.warning("refused with %d: %s: %s", status, _in_words(scope), why)
        body = json.dumps({"error": why}).encode()
        headers = [(b"content-type", b"application/json"), *more.items()]
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class BodyRefused(CommandRefused):
    """The body is too long or too slow; what is left of it is not read, so the connection is over."""


class _Body:
    """Reads a body that is neither too long nor too slow."""

    def __init__(self, receive: Receive, bounds: Bounds, now: Callable[[], float]):
        self._receive, self._bounds, self._now = receive, bounds, now
        self._due_s = now() + bounds.body_s
        self._num_bytes = 0
        self._is_whole = False

    async def receive(self) -> Message:
        """The next message. Raises BodyRefused."""
        if self._is_whole:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), max(self._due_s - self._now(), 0.001))
        except TimeoutError:
            raise BodyRefused(
                408, f"the body did not come within {self._bounds.body_s:g} s."
            ) from None
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._bounds.body_bytes:
            raise BodyRefused(
                413, f"the body is too long; {self._bounds.body_bytes} bytes are taken."
            )
        self._is_whole = not message.get("more_body", False)
        return message


def _in_words(scope: Scope) -> str:
    """Of what is written to a log nothing can break its line."""
    address = (scope.get("client") or ("nobody", 0))[0]
    return f"{scope['method']} {scope['path'][:100]!a} of {address}"


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
