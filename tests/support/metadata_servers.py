"""A metadata server as the clouds have them, on the loopback interface, for tests of notices."""

import contextlib
import http.server
import threading
import urllib.parse
from collections.abc import Iterator

GCE = "/computeMetadata/v1/instance/"
AWS = "/latest/meta-data/"
TOKEN = "AQAEANtKZ2=="


class MetadataServer:
    """What one machine's metadata server says; a test changes it while it is asked."""

    def __init__(self):
        self.gce = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.aws = {}  # bodies by path; what is not there is not found
        self.raw = None  # bytes to answer whatever the question
        self.status = None  # the same of a status
        self.trickles = False  # a byte at a time, for ever
        self.is_silent = False  # no answer at all
        self.asked = []  # (method, path, headers in small letters)
        self.closing = threading.Event()
        self.changed = threading.Condition()
        self.address = ""

    def set(self, **values):
        """Change the values of GCE's keys, with _ for -; questions that wait for a change are answered."""
        with self.changed:
            self.gce.update({key.replace("_", "-"): value for key, value in values.items()})
            self.changed.notify_all()

    def etag(self, key):
        return format(hash((key, self.gce[key])) & 0xFFFFFFFF, "08x")

    def answer(self, method, path, headers):
        """Status, headers and body of an answer."""
        parts = urllib.parse.urlsplit(path)
        asked = dict(urllib.parse.parse_qsl(parts.query))
        if parts.path.startswith(GCE):
            return self.answer_gce(parts.path.removeprefix(GCE), asked, headers)
        if (method, parts.path) == ("PUT", "/latest/api/token"):
            if int(headers.get("x-aws-ec2-metadata-token-ttl-seconds", "0")) not in range(1, 21601):
                return 400, {}, ""
            return 200, {}, TOKEN
        if headers.get("x-aws-ec2-metadata-token") != TOKEN:
            return 401, {}, ""
        body = self.aws.get(parts.path.removeprefix(AWS))
        return (404, {}, "") if body is None else (200, {}, body)

    def answer_gce(self, key, asked, headers):
        if headers.get("metadata-flavor") != "Google":
            return 403, {}, ""
        with self.changed:
            if asked.get("wait_for_change") == "true":
                self.changed.wait_for(
                    lambda: self.closing.is_set() or self.etag(key) != asked["last_etag"],
                    float(asked["timeout_sec"]),
                )
            return 200, {"Metadata-Flavor": "Google", "ETag": self.etag(key)}, self.gce[key]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    made: MetadataServer

    def do_GET(self):
        made, headers = self.made, {name.lower(): value for name, value in self.headers.items()}
        made.asked.append((self.command, self.path, headers))
        if made.is_silent:
            made.closing.wait()
        while made.trickles and not made.closing.wait(0.05):
            self.wfile.write(b"x")
        if made.raw is not None:
            self.wfile.write(made.raw)
            self.close_connection = True
            return
        status, more, body = made.answer(self.command, self.path, headers)
        self.send_response(made.status or status)
        for name, value in {**more, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    do_PUT = do_GET

    def log_message(self, format, *args):
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = False  # so that no thread outlives the test
    block_on_close = True

    def handle_error(self, request, client_address):
        pass  # who has asked does not wait any more


@contextlib.contextmanager
def metadata_server() -> Iterator[MetadataServer]:
    """A server that runs until the end of the block."""
    made = MetadataServer()
    handler = type("Handler", (_Handler,), {"made": made})
    with _Server(("127.0.0.1", 0), handler) as server:
        made.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield made
        finally:
            with made.changed:
                made.closing.set()
                made.changed.notify_all()
            server.shutdown()
            thread.join()
