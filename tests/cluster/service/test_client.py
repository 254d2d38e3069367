"""The client: what does not answer is `Unreachable`, what refuses says why, and nothing is done twice."""

import contextlib
import http.server
import json
import socket
import subprocess
import sys
import threading

import pytest

from jaxgoodput.cluster.client import Client, RequestRefused, Unreachable, read_token
from jaxgoodput.cluster.service.wire import Receipt


class Server(http.server.ThreadingHTTPServer):
    """A server with what it is to answer, and what it was asked."""

    def __init__(self, answers):
        super().__init__(("127.0.0.1", 0), Script)
        self.answers, self.seen = list(answers), []


class Script(http.server.BaseHTTPRequestHandler):
    """Answers as the server's `answers` say, one each; None: it closes the connection."""

    protocol_version = "HTTP/1.1"

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self):
        self.server.seen.append((self.command, self.path, dict(self.headers)))
        answer = self.server.answers.pop(0)
        if answer is None:
            self.close_connection = True
            return
        status, text, *headers = answer
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        for header in headers:
            self.send_header(*header)  # with Connection: close, that is done too
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_DELETE = do_GET

    def log_message(self, format, *args):
        pass


@contextlib.contextmanager
def serving(*answers):
    server = Server(answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    client = Client(f"http://127.0.0.1:{server.server_port}", "a-token", timeout_s=5.0)
    try:
        yield client, server
    finally:
        client.close()
        server.shutdown()
        server.server_close()
        thread.join()


OK = 200, json.dumps({"ok": True, "note": "done"}).encode()


def test_an_answer():
    with serving(OK) as (client, server):
        assert client.call("GET", "a b", "c/d", type_=Receipt, after=3).note == "done"
        ((_, path, headers),) = server.seen
        assert path == "/v1/a%20b/c%2Fd?after=3"
        assert headers["Authorization"] == "Bearer a-token"


def test_a_connection_that_was_closed_meanwhile_is_made_again_with_the_same_id():
    with serving(OK, None, OK) as (client, server):
        client.call("GET", "x", type_=Receipt)
        client.call("POST", "x", body={}, changes=True, type_=Receipt)
        first, second = (headers["Idempotency-Key"] for _, _, headers in server.seen[1:])
        assert first == second


@pytest.mark.parametrize("status", [200, 408])
def test_a_server_that_ends_the_connection_with_its_answer_is_asked_over_another(status):
    with serving((status, OK[1], ("Connection", "close")), OK) as (client, server):
        with contextlib.suppress(RequestRefused):
            client.call("GET", "x", type_=Receipt)
        client.call("POST", "x", body={}, type_=Receipt)  # which would not be repeated
        assert len(server.seen) == 2


def test_what_cannot_be_done_twice_is_not_sent_again():
    with serving(OK, None) as (client, server):
        client.call("GET", "x", type_=Receipt)
        with pytest.raises(Unreachable):
            client.call("POST", "x", body={}, type_=Receipt)
        assert len(server.seen) == 2


def test_a_refusal_says_why():
    with serving((409, b'{"error": "because"}')) as (client, _):
        with pytest.raises(RequestRefused, match="because") as found:
            client.call("GET", "x", type_=Receipt)
        assert found.value.status == 409


@pytest.mark.parametrize(
    "slow", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n"]
)
def test_an_answer_that_comes_a_byte_at_a_time_is_not_waited_for_for_ever(slow):
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle():
            with listener.accept()[0] as sock, contextlib.suppress(OSError):
                sock.sendall(slow)
                while not done.wait(0.05):
                    sock.sendall(b"x")

        thread = threading.Thread(target=trickle)
        thread.start()
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}", "a-token", timeout_s=1.0)
        try:
            with pytest.raises(Unreachable, match="did not send a whole answer within 1 s"):
                client.call("GET", "x", type_=Receipt)
        finally:
            done.set()
            thread.join()
            client.close()


@pytest.mark.parametrize("text", [b"<html>", b"[]", b'{"ok": 1}', b'{"other": true}'])
def test_what_is_no_scheduler(text):
    with serving((200, text)) as (client, _):
        with pytest.raises(Unreachable, match="answers"):
            client.call("GET", "x", type_=Receipt)


def test_nobody_there():
    client = Client("http://127.0.0.1:1", "a-token", timeout_s=1.0)
    with pytest.raises(Unreachable, match="no scheduler answers at http://127.0.0.1:1"):
        client.call("GET", "x", type_=Receipt)


@pytest.mark.parametrize("url", ["127.0.0.1:8765", "ftp://x", "http://", "http://x/path"])
def test_addresses_that_are_none(url):
    with pytest.raises(ValueError, match="expected http://HOST:PORT"):
        Client(url, "a-token")


def test_tokens(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_token(tmp_path / "token")
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ValueError, match="holds no token"):
        read_token(tmp_path / "token")
    (tmp_path / "token").write_text("abc\n")
    assert read_token(tmp_path / "token") == "abc"


@pytest.mark.slow
def test_agents_and_clients_run_without_the_packages_of_the_service():
    missing = ("pydantic", "pydantic_core", "fastapi", "starlette", "uvicorn", "uvloop")
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({missing})); "
        "import jaxgoodput.cluster.client, jaxgoodput.cluster.service.wire, "
        "jaxgoodput.cluster.service.terminal, jaxgoodput.cluster.service.node.agent"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
