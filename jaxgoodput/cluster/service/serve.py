"""`jaxgoodput serve`: the service as a process, from its folder to its socket.

The folder holds everything: the journal, the tokens and the logs of jobs. Only one service uses it at a time.
"""

import asyncio
import contextlib
import gc
import ipaddress
import os
import pathlib
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
import uvloop
from absl import logging

from jaxgoodput import _disk
from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.cluster.service.engines import ENGINE
from jaxgoodput.cluster.service.planning.planners import Planners
from jaxgoodput.cluster.service.record import commands
from jaxgoodput.cluster.service.record.book import Book
from jaxgoodput.cluster.service.record.journal import ClusterJournal
from jaxgoodput.cluster.service.web.api import application
from jaxgoodput.cluster.service.web.connection import HANDSHAKE_S, Connections, PatientProtocol
from jaxgoodput.cluster.service.web.guard import (
    TOKEN_FILE,
    AccessGuard,
    Bounds,
    Tokens,
    own_token,
    read_tokens,
)
from jaxgoodput.cluster.service.web.heartbeats import Heartbeats
from jaxgoodput.cluster.service.web.logs import Logs
from jaxgoodput.cluster.service.web.metrics import RequestMetrics
from jaxgoodput.cluster.service.web.page import Links
from jaxgoodput.cluster.service.web.rates import Questions
from jaxgoodput.cluster.service.web.requests import APART_S, LONGEST_WAIT_S, ServiceParts
from jaxgoodput.cluster.service.wire import PlanOptions

HEADER_BYTES = 16 * 2**10
IDLE_S = 75.0  # an idle connection of a caller with a token is closed after this time
MOST_FILES = 2**16  # open at once, connections included, if the system allows as many
OWN_FILES = 100  # of these, for the journal, logs and planners
LOOK_S = 1.0
LATE_S = 3.0  # if a look is this late, the service could not receive heartbeats meanwhile
# Thresholds of the garbage collector, see `gc.set_threshold`.
COLLECT_AFTER = (20_000, 20, 50)
SWITCH_S = (
    0.0005  # after which a thread that computes lets another go on, see `sys.setswitchinterval`
)
ADDRESS_FILE = "address"  # tells clients on this machine the service's URL


@dataclass(frozen=True, kw_only=True)
class Service:
    """The options of `jaxgoodput serve`."""

    folder: pathlib.Path
    host: str = "127.0.0.1"
    port: int = 8765
    """The port; 0 chooses a free one."""
    tokens: pathlib.Path | None = None
    """The token file; None creates one token for the operator, in the folder."""
    certificate: pathlib.Path | None = None
    key: pathlib.Path | None = None
    silent_s: float = 30.0
    """Seconds without a heartbeat after which a node is down."""
    longest_wait_s: float = LONGEST_WAIT_S
    """Longest time for which an answer waits for a change; a proxy may cut off longer waits."""
    apart_s: float = APART_S
    """Seconds for which a node is kept apart from a job that reports it as slow or broken, at first."""
    plans: PlanOptions = field(default_factory=PlanOptions)
    bounds: Bounds = field(default_factory=Bounds)
    links: Links = field(default_factory=Links)
    local: Sequence[str] = ()
    """The command that runs the agents of this machine; empty if all nodes join by themselves."""

    def __post_init__(self):
        if (self.certificate is None) != (self.key is None):
            raise ValueError(
                "TLS needs both --tls-certificate and --tls-key; one of them is missing."
            )
        if self.certificate is None and not _is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} can be reached by others, who could read the tokens in transit. Give "
                "--tls-certificate and --tls-key, or listen on 127.0.0.1 behind a proxy that speaks TLS."
            )

    @property
    def scheme(self) -> str:
        """The scheme of the service's URL, http or https."""
        return "http" if self.certificate is None else "https"


def run_service(service: Service, *, clock: Clock | None = None) -> int:
    """Serve until told to stop; return the exit code.

    Raises OSError, ValueError or CorruptJournalError if the service cannot start.
    """
    clock = clock or SystemClock()
    service.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _disk.held(service.folder), _short_stops():
        tokens = (
            own_token(service.folder) if service.tokens is None else read_tokens(service.tokens)
        )
        journal = ClusterJournal(service.folder)
        # Closed here, too: a taken port or a damaged journal is found before the book owns it.
        with contextlib.closing(journal), _listener(service) as listener:
            # uvloop takes a quarter less processor time than asyncio's own loop, and gives 2.6 times as many
            # answers per second.
            return uvloop.run(_serve(service, tokens, journal, listener, clock))


@contextlib.contextmanager
def _short_stops() -> Iterator[None]:
    """Collect cyclic garbage rarely, and let the thread of the journal go on quickly.

    With 2,000 jobs a full collection takes 70 ms, without any answers, and the usual thresholds start one
    every second or two. What the service makes has no cycles but for the tracebacks of errors. A transaction
    waits for the interpreter after each of its dozen statements: with the usual interval of 5 ms it took up
    to 100 ms for 1 ms of work.
    """
    before, interval_s = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(*COLLECT_AFTER)
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        gc.set_threshold(*before)


def _listener(service: Service) -> socket.socket:
    """Return the listening socket.

    If any free port will do, the last service's port is tried first, because its agents still use it.
    """
    address = service.folder / ADDRESS_FILE
    if service.port == 0 and address.exists():
        last = address.read_text().strip().rpartition(":")[2]
        if last.isdecimal() and 0 < int(last) < 2**16:
            try:
                return socket.create_server((service.host, int(last)), backlog=1024)
            except OSError as error:
                logging.warning(
                    "port %s, which the last service used, is taken, so a free one is used (%s)",
                    last,
                    error,
                )
    return socket.create_server((service.host, service.port), backlog=1024)


async def _serve(
    service: Service, tokens: Tokens, journal: ClusterJournal, listener: socket.socket, clock: Clock
) -> int:
    book = Book(journal, clock)
    planners = Planners(book, service.folder, service.plans)
    parts = ServiceParts(
        book=book,
        planners=planners,
        logs=Logs(service.folder / "logs"),
        heartbeats=Heartbeats(clock, service.silent_s),
        clock=clock,
        requests=RequestMetrics(),
        questions=Questions(service.bounds.questions_per_minute, clock),
        links=service.links,
        longest_wait_s=service.longest_wait_s,
        apart_s=service.apart_s,
    )
    guard = AccessGuard(application(parts), tokens, service.bounds, clock, parts.requests)
    connections = Connections(_most_connections())
    server = _Server(_config(service, guard), book.release, connections)
    url = f"{service.scheme}://{service.host}:{listener.getsockname()[1]}"
    (service.folder / ADDRESS_FILE).write_text(f"{url}\n")
    print(f"jaxgoodput: the service is at {url}", file=sys.stderr, flush=True)
    if service.tokens is None:
        path = service.folder / TOKEN_FILE
        print(f"jaxgoodput: its token is in {path}", file=sys.stderr, flush=True)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(book.close)
        stack.push_async_callback(planners.close)
        for work in (book.run(), planners.run(), _watch(book, parts.heartbeats, clock)):
            await stack.enter_async_context(_beside(work, server))
        if service.local:
            agents = _LocalAgents(service, url)
            await stack.enter_async_context(_beside(agents.run(), server))
            server.before_end = agents.stop
        await server.serve(sockets=[listener])
    if server.failed is not None:
        raise server.failed
    return 0


def _most_connections() -> int:
    """Raise the limit on open files as far as the system allows; return how many may be connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(most - OWN_FILES, most // 2)


def _config(service: Service, guard: AccessGuard) -> uvicorn.Config:
    return uvicorn.Config(
        guard,
        http="h11",
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,  # any client could claim to have another address
        timeout_keep_alive=int(IDLE_S),
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_graceful_shutdown=2,
        ssl_certfile=service.certificate,
        ssl_keyfile=service.key,
    )


class _Server(uvicorn.Server):
    """An HTTP server that ends if a task that must run beside it, such as planning, fails."""

    def __init__(
        self, config: uvicorn.Config, release: Callable[[], None], connections: Connections
    ):
        super().__init__(config)
        self._release, self._connections = release, connections
        self.failed: BaseException | None = None
        self.before_end: Callable[[], Awaitable[None]] | None = None
        """Called on Ctrl-C and awaited before the end; a second Ctrl-C does not wait for it."""
        self._ending: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets. Unlike with uvicorn, a TLS handshake has to be done in a few seconds."""
        await self.lifespan.startup()
        config = self.config
        handshake_s = None if config.ssl is None else HANDSHAKE_S

        def protocol() -> PatientProtocol:
            return PatientProtocol(
                config=config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                connections=self._connections,
            )

        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                protocol,
                sock=sock,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=handshake_s,
                ssl_shutdown_timeout=handshake_s,
            )
            for sock in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM inside the block; unlike uvicorn, do not raise them again at its end."""
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
        """Note that a task beside the server has ended, which is always a failure unless it was cancelled."""
        if not task.cancelled():
            self.failed = task.exception() or RuntimeError("a part of the service has ended")
            self._end_now()


@contextlib.asynccontextmanager
async def _beside(work: Any, server: _Server) -> AsyncIterator[None]:
    """Run the coroutine `work` as a task inside the block. The server ends if the task does."""
    task = asyncio.create_task(work)
    task.add_done_callback(server.end)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):  # `failed` holds the exception
            await task


async def _watch(book: Book, heartbeats: Heartbeats, clock: Clock) -> None:
    """Mark nodes as down that have sent no heartbeat for too long; goes on until cancelled."""
    while True:
        looked_s = clock.now()
        await asyncio.sleep(LOOK_S)
        if clock.now() - looked_s > LOOK_S + LATE_S:
            logging.warning(
                "the service did not run for %.0f s, so missing heartbeats do not count",
                clock.now() - looked_s,
            )
            heartbeats.record_all()
            continue
        for name, entry in book.state.nodes.items():
            if entry.node.state == "down" or heartbeats.silent_s(name) < heartbeats.limit_s:
                continue
            why = f"it sent no heartbeat for {heartbeats.limit_s:g} s"
            logging.warning(
                "node %s is down: %s. Its jobs lose its devices. It is up again with its next heartbeat.",
                name,
                why,
            )

            def lose(state, name=name, why=why):
                return commands.change_node(state, name, "down", why, silent=True)

            with contextlib.suppress(commands.CommandRefused):  # the next look tries again
                await book.ask(lose, lambda *_: "")


class _LocalAgents:
    """The agents of this machine. They survive the service, and are ended with it only on Ctrl-C."""

    def __init__(self, service: Service, url: str):
        self._token, self._engine = service.folder / TOKEN_FILE, service.folder / ENGINE
        self._command = [*service.local, "--scheduler", url, "--token-file", str(self._token)]
        self._process: asyncio.subprocess.Process | None = None
        self._has_begun = self._is_stopping = False

    async def run(self) -> None:
        """Start the agents, once no agents of an earlier, killed service are left. Never returns."""
        self._has_begun = True
        self._engine.mkdir(parents=True, exist_ok=True)
        if (pid := _holder(self._engine)) is not None:
            logging.warning(
                "agents of an earlier service still run on this machine (process %d); they are used",
                pid,
            )
            while _holder(self._engine) is not None:
                await asyncio.sleep(LOOK_S)
        if self._is_stopping:  # `stop` has just ended those agents
            await asyncio.Event().wait()
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        code = await self._process.wait()
        logging.warning(
            "the agents of this machine have ended with exit code %d. Start the service again to start them.",
            code,
        )
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Let all jobs of this machine save, and end its agents, also if an earlier service started them."""
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


def _holder(folder: pathlib.Path) -> int | None:
    """Return the process of this machine that holds a folder's lock; None if there is none."""
    try:
        with _disk.held(folder):
            return None
    except _disk.InUse:
        _, pid, _, host = (folder / _disk.LOCK).read_text().split()
        if host != socket.gethostname():
            logging.warning(
                "%s is locked by process %s on another machine, %s. That process goes on; end it there if it "
                "is not wanted.",
                folder,
                pid,
                host,
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
