"""Who is refused, and that it is logged: every case against a real service, over a real socket."""

import base64
import contextlib
import dataclasses
import http.client
import json
import re
import socket
import ssl
import subprocess
import time
import urllib.request

import pytest
import services

from jaxgoodput._fields.serial import encode
from jaxgoodput.cluster.client import Client, RequestRefused, Unreachable
from jaxgoodput.cluster.service.record import commands
from jaxgoodput.cluster.service.record.commands import Caller
from jaxgoodput.cluster.service.serve import Service
from jaxgoodput.cluster.service.web.connection import HEADER_S
from jaxgoodput.cluster.service.web.guard import Token, Tokens
from jaxgoodput.cluster.service.web.logs import Logs
from jaxgoodput.cluster.service.wire import (
    VERSION,
    ClusterShown,
    JobExplanation,
    JobList,
    JobShown,
    Log,
    OutputLines,
    Receipt,
    Report,
    Reports,
    WhatIf,
)

pytestmark = [pytest.mark.multihost, pytest.mark.slow]

TOKENS = {
    "operator": ("operator's-token-1234567", "default"),
    "red": ("red's-token-1234567890", "red"),
    "blue": ("blue's-token-1234567890", "blue"),
    "node": ("node's-token-1234567890", "default"),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("security")
    tokens = [
        {"token": token, "tenant": tenant, "role": "user" if name in ("red", "blue") else name}
        for name, (token, tenant) in TOKENS.items()
    ]
    (folder / "tokens.json").write_text(json.dumps({"tokens": tokens}))
    options = ("--local", "0", "--silent-s", "3600", "--tokens", str(folder / "tokens.json"))
    made = services.Service(folder / "service", *options)
    with made:
        services.join(client(made, "node"))
        client(made, "red").call(
            "POST", "jobs", body=services.submission("reds"), type_=JobShown, changes=True
        )
        yield made


def client(service, name):
    return service.client(TOKENS[name][0])


def ask(service, method, path, *, token=None, body=None, headers=()):
    """Status and answer of a request with these very headers."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)
    sent = dict(headers)
    if token is not None:
        sent["Authorization"] = f"Bearer {token}"
    connection.request(method, path, body, sent)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text else None


def raw(service, data, *, wait_s=30.0):
    """All that comes back for some bytes until the connection ends."""
    found = b""
    with socket.create_connection(("127.0.0.1", service.port), timeout=wait_s) as sock:
        with contextlib.suppress(ConnectionError):  # it need not read all of it
            sock.sendall(data)
        while piece := sock.recv(65536):
            found += piece
    return found


def assert_logged(service, says, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while re.search(says, service.log.read_text()) is None:
        assert time.monotonic() < deadline, f"{says} is not in the log"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "path", ["/v1/jobs", "/v1/nodes", "/metrics", "/", "/page", "/openapi.json"]
)
def test_no_token(service, path):
    status, said = ask(service, "GET", path)
    assert status == 401
    assert "Authorization: Bearer TOKEN" in said["error"]
    assert_logged(service, rf"refused with 401: GET '{path}' from 127.0.0.1")


@pytest.mark.parametrize(
    "header",
    ["Bearer wrong-token-1234567890", "Bearer ", "Basic !!!", "Bearer \x80\xff", "Digest x"],
)
def test_a_wrong_token(service, header):
    status, _ = ask(service, "GET", "/v1/jobs", headers={"Authorization": header.encode("latin-1")})
    assert status == 401


def test_a_password_opens_the_page_and_nothing_else(service):
    said = base64.b64encode(f"x:{TOKENS['red'][0]}".encode()).decode()
    headers = {"Authorization": f"Basic {said}"}
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)
    connection.request("GET", "/", headers=headers)
    answer = connection.getresponse()
    assert answer.status == 200 and b"<h1>jaxgoodput" in answer.read()
    assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
    connection.close()
    assert ask(service, "GET", "/v1/jobs", headers=headers)[0] == 401
    assert ask(service, "POST", "/", headers=headers)[0] == 401


def test_health_needs_no_token_and_tells_nothing_of_jobs(service):
    status, said = ask(service, "GET", "/healthz")
    assert status == 200
    assert set(said or ()) == {"ok", "version", "num_jobs", "plans"}


@pytest.mark.parametrize(
    "method, path, body",
    [
        ("GET", "", None),
        ("POST", "/cancel", None),
        ("GET", "/allocation", None),
        ("GET", "/log", None),
        ("GET", "/explain", None),
        ("POST", "/hints", "{}"),
    ],
)
def test_another_tenants_job_is_as_one_that_is_not_there(service, method, path, body):
    if body is not None:
        body = json.dumps(
            {
                **dict.fromkeys(("generation", "number"), 0),
                **dict.fromkeys(("num_devices", "largest", "base_batch_size"), 1),
                "max_global_batch_size": 1,
                "progress": 0.0,
                "kind": "cpu",
            }
        )
    status, said = ask(service, method, f"/v1/jobs/reds{path}", token=TOKENS["blue"][0], body=body)
    other = ask(service, method, f"/v1/jobs/nobodys{path}", token=TOKENS["blue"][0], body=body)
    assert status == other[0] == 404
    assert said["error"].replace("reds", "nobodys") == other[1]["error"]
    assert_logged(service, f"refused with 404: {method} '/v1/jobs/reds{path}'")
    assert client(service, "red").call("GET", "jobs", "reds", type_=JobShown).phase != "cancelled"


def test_another_tenants_jobs_are_not_listed_nor_on_the_page(service):
    assert client(service, "blue").call("GET", "jobs", type_=JobList).jobs == ()
    assert [j.id for j in client(service, "red").call("GET", "jobs", type_=JobList).jobs] == [
        "reds"
    ]
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)
    for name, sees in (("blue", False), ("red", True), ("operator", True)):
        connection.request("GET", "/page", headers={"Authorization": f"Bearer {TOKENS[name][0]}"})
        assert (b">reds<" in connection.getresponse().read()) == sees, name
    connection.close()


def test_another_tenants_jobs_have_no_names_among_the_devices(service):
    red, blue = client(service, "red"), client(service, "blue")
    service.until(lambda: red.call("GET", "jobs", "reds", type_=JobShown).num_devices, "no plan")
    (shown,) = red.call("GET", "nodes", type_=ClusterShown).nodes
    assert list(shown.jobs) == ["reds"]
    (shown,) = blue.call("GET", "nodes", type_=ClusterShown).nodes
    assert list(shown.jobs) == ["(another tenant's)"]


@pytest.mark.parametrize(
    "who, call",
    [
        ("red", lambda c: services.join(c, "n9")),
        ("red", lambda c: services.work(c)),
        ("red", lambda c: c.call("POST", "nodes", "n0", "drain", type_=Receipt)),
        ("node", lambda c: c.call("POST", "nodes", "n0", "drain", type_=Receipt)),
        ("node", lambda c: c.call("GET", "jobs", type_=JobList)),
        ("node", lambda c: c.call("POST", "jobs", body=services.submission("x"), type_=JobShown)),
    ],
)
def test_a_role_does_what_is_its_own(service, who, call):
    with pytest.raises(RequestRefused) as found:
        call(client(service, who))
    assert found.value.status == 403


def test_a_tenant_cannot_hand_in_jobs_of_another_one(service):
    body = services.submission("stolen", tenant="blue")
    with pytest.raises(RequestRefused, match="says tenant 'blue'"):
        client(service, "red").call("POST", "jobs", body=body, type_=JobShown)


def test_nobody_asks_for_another_tenant(service):
    body = services.submission("asked", tenant="blue")
    with pytest.raises(RequestRefused, match="says tenant 'blue'"):
        client(service, "red").call("POST", "what-if", body=body, type_=WhatIf)
    asked = services.submission("asked")
    assert commands.of_tenant(Caller("red", "user"), asked).spec.tenant == "red"


def test_a_log_is_that_of_one_job_and_a_request_that_comes_again_leaves_it(service):
    red, node = client(service, "red"), client(service, "node")

    def submit(key):
        body = services.as_json(services.submission("writes", min_devices=8))
        headers = {"Idempotency-Key": key}
        return ask(service, "POST", "/v1/jobs", token=TOKENS["red"][0], body=body, headers=headers)

    def text():
        return red.call("GET", "jobs", "writes", "log", type_=Log).text

    assert submit("first")[0] == 201
    said = Reports(instance="one", lines=(OutputLines(job="writes", text="of the first\n"),))
    node.call("POST", "nodes", "n0", "reports", body=said, type_=Receipt)
    assert submit("first")[0] == 201
    assert text() == "of the first\n"
    red.call("POST", "jobs", "writes", "cancel", type_=Receipt)
    assert submit("second")[0] == 201
    assert text() == ""
    red.call("POST", "jobs", "writes", "cancel", type_=Receipt)


def test_logs_of_jobs_that_are_not_known_any_more_are_deleted(tmp_path):
    forgotten = tmp_path / "logs" / "forgotten.log"
    said = Logs(forgotten.parent)
    said.append("forgotten", "a secret")
    assert said.unknown({"reds": 1}) >= {"forgotten"} and not said.unknown({"forgotten": 1})
    assert Logs(forgotten.parent).unknown({}) >= {"forgotten"}  # after a restart
    said.delete("forgotten")
    assert not forgotten.exists() and "forgotten" not in said.unknown({})


def test_a_body_that_says_it_is_too_long(service):
    length = {"Content-Length": str(2**30)}
    status, said = ask(service, "POST", "/v1/jobs", token=TOKENS["red"][0], headers=length)
    assert status == 413 and "1048576" in said["error"]
    assert_logged(service, "refused with 413: POST '/v1/jobs'")


def test_a_body_that_does_not_say_how_long_it_is(service):
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKENS['red'][0]}\r\n"
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    said = raw(service, head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + 20 * chunk)
    assert said.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("num_bytes", [2**20 + 1, 3 * 2**19, 2**21])
def test_who_sends_a_body_that_is_too_long_is_told_so(service, num_bytes):
    """The connection is not reset before the answer has come, if the rest is not much longer."""
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKENS['red'][0]}\r\n"
    said = raw(service, f"{head}Content-Length: {num_bytes}\r\n\r\n".encode() + num_bytes * b"x")
    assert said.startswith(b"HTTP/1.1 413 ")


def test_a_body_without_an_end_is_not_read_for_ever(service):
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKENS['red'][0]}\r\n"
    sent = 0
    with socket.create_connection(("127.0.0.1", service.port), timeout=30.0) as sock:
        sock.sendall(f"{head}Content-Length: {2**40}\r\n\r\n".encode())
        with pytest.raises(ConnectionError):
            while sent < 2**30:
                sent += sock.send(65536 * b"x")
    assert sent < 2**26  # what the kernel holds, too
    assert_logged(service, "request refused with 413")


def test_a_body_that_comes_too_slowly(service):
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKENS['red'][0]}\r\n"
    said = raw(service, head.encode() + b"Content-Length: 100\r\n\r\n{")
    assert said.startswith(b"HTTP/1.1 408 ")
    assert_logged(service, "refused with 408: POST '/v1/jobs'")


@pytest.mark.parametrize("first", [False, True])
def test_a_head_that_comes_too_slowly(service, first):
    begun = time.monotonic()
    found = b""
    with socket.create_connection(("127.0.0.1", service.port), timeout=60.0) as sock:
        if first:
            token = TOKENS["red"][0]
            head = f"GET /v1/nodes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n"
            sock.sendall(head.encode())
            while b'"nodes"' not in found:
                found += sock.recv(65536)
        sock.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(OSError):  # it is closed, however steadily letters come
            while time.monotonic() - begun < 6 * HEADER_S:
                sock.sendall(b"X-a: b\r\n")
                time.sleep(0.5)
    assert_logged(service, r"the head of a request did not arrive in time \(10 s\), from 127.0.0.1")


@pytest.mark.parametrize(
    "head",
    [
        "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /v1/jobs HTTP/1.1\r\nHost: x\r\n\r\n",
        "POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer forged\r\nContent-Length: 9\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n",
    ],
)
def test_a_connection_without_a_token_gets_one_answer_and_ends(service, head):
    said = raw(service, head.encode())  # until the connection ends
    assert said.startswith(b"HTTP/1.1 ") and said.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in said.lower()


@pytest.mark.nightly
def test_who_does_not_read_an_answer_is_not_waited_for(tmp_path):
    with services.Service(tmp_path / "service", "--local", "0") as made:
        client = made.client()
        for number in range(80):
            job = services.submission(f"long-{number}")
            job = dataclasses.replace(job, command=("x" * 9_000,) * 10)
            client.call("POST", "jobs", body=job, type_=JobShown)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(60.0)
            sock.connect(("127.0.0.1", made.port))
            head = f"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {made.token}\r\n\r\n"
            sock.sendall(head.encode())
            assert_logged(made, "the client did not take its answer in time", limit_s=90.0)
            found = 0
            with contextlib.suppress(ConnectionError):
                while piece := sock.recv(65536):
                    found += len(piece)
        assert 0 < found < 80 * 90_000  # what the kernel had taken
        assert len(client.call("GET", "jobs", type_=JobList).jobs) == 80  # who reads gets all of it


def test_one_tenants_questions_leave_room_for_others(tmp_path):
    names = ("red", "other-red", "blue")
    tokens = [
        {"token": f"{name}'s-token-1234567890", "tenant": name.removeprefix("other-")}
        for name in names
    ]
    (tmp_path / "tokens.json").write_text(json.dumps({"tokens": tokens}))
    options = ("--local", "0", "--questions", "3", "--tokens", str(tmp_path / "tokens.json"))
    with services.Service(tmp_path / "service", *options) as made:
        red, other, blue = (made.client(token["token"]) for token in tokens)
        for client in (red, blue):
            job = services.submission("reds" if client is red else "blues")
            client.call("POST", "jobs", body=job, type_=JobShown)

        def asked(client, name):
            try:
                return client.call("GET", "jobs", name, "explain", type_=JobExplanation).job
            except RequestRefused as error:
                assert error.status == 429 and "may ask 3 questions per minute" in str(error)
                return None

        answers = [asked(client, "reds") for client in (red, other) * 3]
        assert answers[:3] == ["reds"] * 3 and None in answers[3:]
        assert asked(blue, "blues") == "blues"
        connection = http.client.HTTPConnection("127.0.0.1", made.port, timeout=30)

        def answered():
            headers = {"Authorization": f"Bearer {tokens[0]['token']}"}
            connection.request("GET", "/v1/jobs/reds/explain", headers=headers)
            answer = connection.getresponse()
            answer.read()
            return answer

        # The bucket of three fills slowly.
        answer = next(a for a in (answered() for _ in range(5)) if a.status == 429)
        assert int(answer.headers["Retry-After"]) >= 1
        connection.close()


def test_a_head_that_is_too_long(service):
    try:
        said = raw(service, b"GET / HTTP/1.1\r\n" + b"X-a: " + b"b" * 2**17 + b"\r\n\r\n")
    except ConnectionResetError:  # the answer is lost where more has been sent than was read
        said = b"HTTP/1.1 4"
    assert said.startswith(b"HTTP/1.1 4")
    assert_logged(service, "Invalid HTTP request")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/jobs/..%2F..%2Fetc%2Fpasswd/log",
        "/v1/jobs/%2Fetc%2Fpasswd/log",
        "/v1/jobs/../../etc/passwd",
        "/v1/jobs/.hidden/log",
        "/v1/jobs/a%00b/log",
        "/v1/jobs/reds%0A/log",
        "/v1/nodes/..%2Fx/drain",
    ],
)
def test_path_tricks_in_names(service, path):
    for method in ("GET", "POST", "DELETE"):
        status, said = ask(service, method, path, token=TOKENS["operator"][0])
        assert status in (404, 405, 422), (method, said)
        assert "root:" not in str(said)


@pytest.mark.parametrize("name", ["../../evil", "a/b", "..", "/etc/passwd", "a\x00"])
def test_path_tricks_in_jobs_and_nodes(service, name):
    good = encode(services.submission("good"))
    body = {**good, "spec": {**good["spec"], "id": name}}
    status, said = ask(
        service, "POST", "/v1/jobs", token=TOKENS["operator"][0], body=json.dumps(body)
    )
    assert status == 409 and "is not a valid name for a job" in said["error"]
    node = {"name": name, "kind": "cpu", "num_devices": 1}
    body = json.dumps({"node": node, "instance": "one", "version": VERSION})
    status, said = ask(service, "POST", "/v1/nodes", token=TOKENS["operator"][0], body=body)
    assert status == 409 and "is not a valid name for a node" in said["error"]


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xfe", b"[", b"[]", b"null", b'{"spec": {"id": "x", "weight": NaN}, "command": ["a"]}',
        b'{"spec": {"id": "x", "weight": 1e999}, "command": ["a"]}', b"[" * 100_000,
        b'{"spec": {"id": "x", "wieght": 2.0}, "command": ["a"]}',
        b'{"spec": {"id": "x", "min_devices": "1"}, "command": ["a"]}',
        b'{"spec": {"id": "x", "min_devices": true}, "command": ["a"]}',
    ],
)  # fmt: skip
def test_bodies_that_are_no_job(service, body):
    status, said = ask(service, "POST", "/v1/jobs", token=TOKENS["red"][0], body=body)
    assert status == 422 and said["error"].startswith("body")


def test_names_on_the_page_are_no_html(service):
    body = services.submission("page", level="<script>alert(1)</script>")
    client(service, "operator").call("POST", "jobs", body=body, type_=JobShown, changes=True)
    node = {"name": "evil", "kind": "<img src=x>", "num_devices": 1}
    body = json.dumps({"node": node, "instance": "one", "version": VERSION})
    assert ask(service, "POST", "/v1/nodes", token=TOKENS["node"][0], body=body)[0] == 200
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)
    token = TOKENS["operator"][0]
    connection.request("GET", "/", headers={"Authorization": f"Bearer {token}"})
    text = connection.getresponse().read()
    connection.close()
    assert b"&lt;img src=x&gt;" in text and b"<img" not in text and b"<script>" not in text


def test_who_guesses_tokens_is_slowed_down(service):
    statuses = [ask(service, "GET", "/v1/jobs", token=f"guess-{i:016d}")[0] for i in range(60)]
    assert set(statuses) == {401, 429}
    assert client(service, "red").call("GET", "jobs", type_=JobList).jobs  # who has one is not


def test_who_guesses_tokens_is_not_another_one_for_saying_so(service):
    statuses = [
        ask(service, "GET", "/v1/jobs", token="a-guess-1234567890",
            headers={"X-Forwarded-For": f"10.0.0.{i}"})[0]
        for i in range(60)
    ]  # fmt: skip
    assert 429 in statuses


def test_who_asks_too_often_is_told_when_to_come_back(tmp_path):
    with services.Service(tmp_path / "service", "--local", "0", "--rate", "5") as made:
        client = made.client()
        statuses = []
        for _ in range(40):
            try:
                client.call("GET", "nodes", type_=ClusterShown)
                statuses.append(200)
            except RequestRefused as error:
                statuses.append(error.status)
                assert "Try again in" in str(error)
        assert set(statuses) == {200, 429}


def test_other_hosts_need_tls(tmp_path):
    with pytest.raises(ValueError, match="can be reached by others"):
        Service(folder=tmp_path, host="0.0.0.0")
    with pytest.raises(ValueError, match="one of them is missing"):
        Service(folder=tmp_path, certificate=tmp_path / "c.pem")


def test_a_tenant_gets_no_more_requests_with_more_tokens(tmp_path):
    tokens = [{"token": f"{number}'s-token-1234567890", "tenant": "red"} for number in range(8)]
    (tmp_path / "tokens.json").write_text(json.dumps({"tokens": tokens}))
    options = ("--local", "0", "--rate", "5", "--tokens", str(tmp_path / "tokens.json"))
    with services.Service(tmp_path / "service", *options) as made:
        statuses = [ask(made, "GET", "/v1/jobs", token=token["token"])[0] for token in tokens * 2]
    assert set(statuses) == {200, 429}


def test_text_of_jobs_is_shown_harmlessly_everywhere(tmp_path):
    """A job that ends with control sequences, and prints them, changes nothing on any terminal or page."""
    dirty = "no such file\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\nroot# "
    with services.Service(tmp_path / "service", "--local", "0", "--silent-s", "3600") as made:
        client = made.client()
        services.join(client)
        client.call("POST", "jobs", body=services.submission("a"), type_=JobShown, changes=True)
        made.until(lambda: made.job("a").num_devices, "no plan")
        (task,) = services.work(client).tasks
        report = Report(job="a", attempt=task.attempt, code=2, why=dirty)
        lines = (OutputLines(job="a", text=f"{dirty}\n"),)
        said = Reports(instance="one", coordinators=(report,), lines=lines)
        client.call("POST", "nodes", "n0", "reports", body=said, type_=Receipt)
        shown = made.job("a")
        assert shown.phase == "failed" and "no such file?]0;owned?" in shown.reason
        commands = (("status", "--once"), ("status", "a"), ("logs", "a"), ("explain", "a"))
        printed = [made.run(*command) for command in commands]
        for path in ("/page", "/metrics", "/v1/jobs", "/v1/jobs/a", "/v1/nodes"):
            request = urllib.request.Request(
                f"http://127.0.0.1:{made.port}{path}",
                headers={"Authorization": f"Bearer {made.token}"},
            )
            with urllib.request.urlopen(request, timeout=30) as answer:
                printed.append(answer.read().decode())
        assert any("no such file" in text for text in printed)
        for text in printed:
            assert re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text) is None, text


def test_text_that_would_change_its_meaning_is_refused(service):
    job = services.submission("evil", level="rack\u202e")
    with pytest.raises(RequestRefused, match="spec.level has the character U\\+202E") as found:
        client(service, "red").call("POST", "jobs", body=job, type_=JobShown)
    assert found.value.status == 409


def test_tls(tmp_path):
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    options = ("--local", "0", "--tls-certificate", str(certificate), "--tls-key", str(key))
    made = services.Service(tmp_path / "service", *options)
    made.ca = certificate
    with made:
        url = (made.folder / "address").read_text().strip()
        assert url.startswith("https://")
        token = (made.folder / "token").read_text().strip()
        trusting = Client(url, token, ca=certificate)
        assert trusting.call("GET", "nodes", type_=ClusterShown).nodes == ()
        trusting.close()
        wary = Client(url, token)  # a certificate that nobody of this system has signed
        with pytest.raises(Unreachable, match="certificate verify failed"):
            wary.call("GET", "nodes", type_=ClusterShown)
        # A handshake that does not go on, and a head after one.
        with socket.create_connection(("127.0.0.1", made.port), timeout=60.0) as sock:
            sock.sendall(b"\x16\x03\x01\x02\x00")
            with contextlib.suppress(ConnectionError):
                while sock.recv(4096):
                    pass
        trusted = ssl.create_default_context(cafile=str(certificate))
        with (
            socket.create_connection(("127.0.0.1", made.port), timeout=60.0) as sock,
            trusted.wrap_socket(sock, server_hostname="127.0.0.1") as wrapped,
            contextlib.suppress(OSError),
        ):
            wrapped.sendall(b"GET / HTTP/1.1\r\n")
            while wrapped.recv(4096):
                pass
        with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
            plain = http.client.HTTPConnection("127.0.0.1", made.port, timeout=5)
            try:
                plain.request("GET", "/healthz")
                plain.getresponse()
            finally:
                plain.close()


def test_the_token_is_for_its_user_alone(tmp_path):
    with services.Service(tmp_path / "service", "--local", "0") as made:
        assert (made.folder / "token").stat().st_mode & 0o077 == 0
        assert (made.folder / "token").read_text().strip() not in made.log.read_text()


def test_tokens_that_are_none():
    with pytest.raises(ValueError, match="shorter than 16"):
        Token(token="short")
    with pytest.raises(ValueError, match="has role 'king'"):
        Token(token="0123456789abcdef", role="king")
    with pytest.raises(ValueError, match="twice"):
        Tokens(tokens=(Token(token="0123456789abcdef"), Token(token="0123456789abcdef")))
    assert "0123456789abcdef" not in repr(Token(token="0123456789abcdef"))
