"""`jaxgoodput serve`: the service as a process, from its folder to its socket.

The folder holds all there is: the journal, the tokens, the logs of jobs. One service has it at a time.
"""

import asyncio
import contextlib
import ipaddress
import os
import pathlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
import uvloop
from absl import logging
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxgoodput import _disk
from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.cluster.service.engines import ENGINE
from jaxgoodput.cluster.service.planning.planners import Planners, PolicyOptions
from jaxgoodput.cluster.service.record import commands
from jaxgoodput.cluster.service.record.book import Book
from jaxgoodput.cluster.service.record.journal import ClusterJournal
from jaxgoodput.cluster.service.web import metrics
from jaxgoodput.cluster.service.web.api import LONGEST_WAIT_S, LastHeard, application
from jaxgoodput.cluster.service.web.guard import (
    TOKEN_FILE,
    AccessGuard,
    Bounds,
    Tokens,
    own_token,
    read_tokens,
)
from jaxgoodput.cluster.service.web.logs import Logs
from jaxgoodput.cluster.service.web.page import Links

HEADER_S = 10.0  # for the head of a request to come
HEADER_BYTES = 16 * 2**10
IDLE_S = 75.0  # a connection that asks nothing
LOOK_S = 1.0
LATE_S = 3.0  # of a look: nodes may have spoken meanwhile that nobody has heard yet
ADDRESS_FILE = "address"  # where a client of this machine finds the service


@dataclass(frozen=True, kw_only=True)
class Service:
    """What `jaxgoodput serve` was asked for."""

    folder: pathlib.Path
    host: str = "127.0.0.1"
    port: int = 8765
    """0: one that is free."""
    tokens: pathlib.Path | None = None
    """None: one token, the operator's, in the folder."""
    certificate: pathlib.Path | None = None
    key: pathlib.Path | None = None
    silent_s: float = 30.0
    """A node that says nothing for so long is down."""
    longest_wait_s: float = LONGEST_WAIT_S
    """For which an answer waits for something to tell; a proxy between may end what takes longer."""
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    bounds: Bounds = field(default_factory=Bounds)
    links: Links = field(default_factory=Links)
    local: Sequence[str] = ()
    """The command of the agents of this machine; none: all nodes join by themselves."""

    def __post_init__(self):
        if (self.certificate is None) != (self.key is None):
            raise ValueError(
                "TLS needs both --tls-certificate and --tls-key; one of them is missing."
            )
        if self.certificate is None and not _is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} can be reached by others, who could read the tokens on their way. Give "
                "--tls-certificate and --tls-key, or listen on 127.0.0.1 behind something that speaks TLS."
            )

    @property
    def scheme(self) -> str:
        """Of its URL."""
        return "http" if self.certificate is None else "https"


def run_service(service: Service, *, clock: Clock | None = None) -> int:
    """Serve until told to stop; an exit code. Raises OSError, ValueError and Corrupt where it cannot."""
    clock = clock or SystemClock()
    service.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _disk.held(service.folder):
        tokens = (
            own_token(service.folder) if service.tokens is None else read_tokens(service.tokens)
        )
        journal = ClusterJournal(service.folder)
        listener = _listener(service)
        try:
            work = _serve(service, tokens, journal, listener, clock)
            # A quarter less processor time than asyncio's own, and 2.6 times as many answers a second.
            return uvloop.run(work)
        finally:
            listener.close()


def _listener(service: Service) -> socket.socket:
    """The socket; at a free port where the last one was if that can be: agents of then look for it there."""
    address = service.folder / ADDRESS_FILE
    if service.port == 0 and address.exists():
        last = address.read_text().strip().rpartition(":")[2]
        if last.isdecimal() and 0 < int(last) < 2**16:
            try:
                return socket.create_server((service.host, int(last)), backlog=1024)
            except OSError as error:
                logging.warning("port %s, of the service before, is not free (%s)", last, error)
    return socket.create_server((service.host, service.port), backlog=1024)


async def _serve(
    service: Service, tokens: Tokens, journal: ClusterJournal, listener: socket.socket, clock: Clock
) -> int:
    book = Book(journal, clock)
    planners = Planners(book, service.folder, service.policy)
    seen, requests = LastHeard(clock, service.silent_s), metrics.RequestMetrics()
    logs = Logs(service.folder / "logs")
    app = application(
        book, planners, logs, seen, clock, requests, service.links, service.longest_wait_s
    )
    guard = AccessGuard(app, tokens, service.bounds, clock, requests)
    config = uvicorn.Config(
        guard,
        http=Patient,
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,  # by which anybody could say to be another address
        timeout_keep_alive=int(IDLE_S),
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_graceful_shutdown=2,
        ssl_certfile=service.certificate,
        ssl_keyfile=service.key,
    )
    server = _Server(config, book.release)
    url = f"{service.scheme}://{service.host}:{listener.getsockname()[1]}"
    (service.folder / ADDRESS_FILE).write_text(f"{url}\n")
    print(f"jaxgoodput: the service is at {url}", file=sys.stderr, flush=True)
    if service.tokens is None:
        where = service.folder / TOKEN_FILE
        print(f"jaxgoodput: its token is in {where}", file=sys.stderr, flush=True)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(book.close)
        stack.push_async_callback(planners.close)
        for work in (book.run(), planners.run(), _watch(book, seen, clock)):
            await stack.enter_async_context(_beside(work, server))
        if service.local:
            agents = _Agents(service, url)
            await stack.enter_async_context(_beside(agents.run(), server))
            server.before_end = agents.stop
        await server.serve(sockets=[listener])
    if server.failed is not None:
        raise server.failed
    return 0


class _Server(uvicorn.Server):
    """Ends when something beside it fails: a service that cannot write or plan must not seem well."""

    def __init__(self, config: uvicorn.Config, release: Callable[[], None]):
        super().__init__(config)
        self._release = release
        self.failed: BaseException | None = None
        self.before_end: Callable[[], Awaitable[None]] | None = None
        """What a user who presses Ctrl-C waits for; pressed again it is not waited for."""
        self._ending: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take note of signals that ask to stop; they are not raised again at the end."""
        loop = asyncio.get_running_loop()
        kinds = (signal.SIGINT, signal.SIGTERM)
        for kind in kinds:
            loop.add_signal_handler(kind, self._stop, kind)
        try:
            yield
        finally:
            for kind in kinds:
                loop.remove_signal_handler(kind)

    def _stop(self, kind: signal.Signals) -> None:
        if kind is signal.SIGINT and self.before_end is not None and self._ending is None:
            self._ending = asyncio.ensure_future(self._end_after(self.before_end))
        else:
            self._end_now()

    def _end_now(self) -> None:
        self.should_exit = True
        self._release()

    async def _end_after(self, first: Callable[[], Awaitable[None]]) -> None:
        try:
            await first()
        finally:
            self._end_now()

    def end(self, task: "asyncio.Task[Any]") -> None:
        """A task beside the server has ended, which none of them does by itself."""
        if not task.cancelled():
            self.failed = task.exception() or RuntimeError("a part of the service has ended")
            self._end_now()


@contextlib.asynccontextmanager
async def _beside(work: Any, server: _Server) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    task.add_done_callback(server.end)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):  # told by `failed`
            await task


async def _watch(book: Book, seen: LastHeard, clock: Clock) -> None:
    """Nodes that say nothing any more are down."""
    while True:
        looked_s = clock.now()
        await asyncio.sleep(LOOK_S)
        if clock.now() - looked_s > LOOK_S + LATE_S:
            logging.warning("the service stood still for %.0f s", clock.now() - looked_s)
            seen.hear_all()
            continue
        for name, entry in book.state.nodes.items():
            if entry.node.state == "down" or seen.silent_s(name) < seen.limit_s:
                continue
            why = f"nothing was heard of it for {seen.limit_s:g} s"
            logging.warning("node %s: %s", name, why)

            def lose(state, name=name, why=why):
                return commands.change_node(state, name, "down", why, silent=True)

            with contextlib.suppress(commands.CommandRefused):  # tried again at the next look
                await book.ask(lose, lambda *_: "")


class _Agents:
    """The agents of this machine: they outlive the service, and end with it only where a user said so."""

    def __init__(self, service: Service, url: str):
        self._token, self._engine = service.folder / TOKEN_FILE, service.folder / ENGINE
        self._command = [*service.local, "--scheduler", url, "--token-file", str(self._token)]
        self._process: asyncio.subprocess.Process | None = None
        self._has_begun = self._is_stopping = False

    async def run(self) -> None:
        """Start them, where those of a service that was killed are not still there."""
        self._has_begun = True
        self._engine.mkdir(parents=True, exist_ok=True)
        if (pid := _holder(self._engine)) is not None:
            logging.warning(
                "this machine's agents are those that a service before this one has started (process %d)",
                pid,
            )
            while _holder(self._engine) is not None:
                await asyncio.sleep(LOOK_S)
        if self._is_stopping:  # and has ended those: no others are started in their place
            await asyncio.Event().wait()
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        code = await self._process.wait()
        logging.warning(
            "the agents of this machine that were started last have ended with %d", code
        )
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Have them save what runs and end, those that a service before this one started too."""
        self._is_stopping = True
        if not self._has_begun:
            return
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()
        while (pid := _holder(self._engine)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            await asyncio.sleep(LOOK_S)


class Patient(H11Protocol):
    """HTTP/1.1 of a server that does not wait for ever: a head that comes too slowly ends its connection."""

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self._due = self.loop.call_later(HEADER_S, self._too_slow)

    def data_received(self, data: bytes) -> None:
        """More of a request has come."""
        if self._due is None and self._is_between():
            self._due = self.loop.call_later(HEADER_S, self._too_slow)
        super().data_received(data)
        if self._due is not None and not self._is_between():
            self._due.cancel()
            self._due = None

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        super().connection_lost(exc)

    def _is_between(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _too_slow(self) -> None:
        self._due = None
        if self._is_between():
            peer = self.client[0] if self.client else "nobody"
            logging.warning("refused: the head of a request of %s did not come in time", peer)
            self.transport.close()


def _holder(folder: pathlib.Path) -> int | None:
    """The process of this machine that holds a folder; None where none does."""
    try:
        with _disk.held(folder):
            return None
    except _disk.InUse:
        _, pid, _, host = (folder / _disk.LOCK).read_text().split()
        if host != socket.gethostname():
            logging.warning(
                "%s is held by process %s on %s, which is left alone", folder, pid, host
            )
            return None
        return int(pid)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
