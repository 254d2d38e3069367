"""Callers without a token cannot hold connections, nor keep others out, however many they are."""

import http.client
import json
import pathlib
import resource
import socket
import subprocess
import sys
from typing import Any

import pytest
import services

from jaxgoodput.cluster.service.web.connection import Connections
from jaxgoodput.cluster.service.wire import ClusterShown

BENCHMARK = pathlib.Path(__file__).parents[3] / "benchmarks" / "strangers.py"


class Connection:
    """What `Connections` needs of a connection."""

    def __init__(self, is_known):
        self.is_known, self.is_closed = is_known, False

    def hang_up(self):
        self.is_closed = True


def test_the_oldest_stranger_makes_room():
    connections: Any = Connections(3)  # of fakes
    every = [Connection(is_known) for is_known in (True, False, False, False, False)]
    for one in every:
        connections.opened(one)
    assert [one.is_closed for one in every] == [False, True, True, False, False]
    for one in every[1:3]:
        connections.closed(one)
    later = [Connection(True) for _ in range(3)]
    for one in later:
        connections.opened(one)
    assert all(one.is_closed for one in every[1:]) and not any(one.is_closed for one in later)


@pytest.mark.multihost
@pytest.mark.slow
@pytest.mark.parametrize(
    "count", [200, pytest.param(2000, marks=pytest.mark.nightly, id="nightly")]
)
def test_strangers_of_all_kinds_are_gone_and_others_are_answered(count):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < count + 200:
        pytest.skip(f"this system does not allow {count + 200} open files")
    command = [sys.executable, str(BENCHMARK), "--json", "--count", str(count), "--asks", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr  # a caller with a token was always answered
    found = json.loads(done.stdout)
    assert sum(map(len, found["gone"].values())) == count
    assert all(None not in every for every in found["gone"].values()), found["gone"]
    assert found["during"]["kept"] and found["during"]["new"]


@pytest.mark.multihost
@pytest.mark.slow
def test_more_strangers_than_files_do_not_keep_others_out(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with services.Service(tmp_path / "service", "--local", "0") as made:
        client = made.client()
        assert client.call("GET", "nodes", type_=ClusterShown).nodes == ()
        made.kill()
        program = [sys.executable, "-m", "jaxgoodput.cli", "serve", "--local", "0"]
        program += ["--folder", str(made.folder), "--port", str(made.port)]
        limited = ["bash", "-c", 'ulimit -n 300 && exec "$@"', "bash", *program]
        with made.log.open("ab") as log:
            made.child = subprocess.Popen(limited, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        made.until(made.answers, "it does not answer")
        strangers = []
        try:
            for _ in range(400):
                strangers.append(socket.create_connection(("127.0.0.1", made.port), timeout=30.0))
            for _ in range(3):
                assert client.call("GET", "nodes", type_=ClusterShown).nodes == ()
                fresh = made.client()
                assert fresh.call("GET", "nodes", type_=ClusterShown).nodes == ()
        finally:
            for sock in strangers:
                sock.close()
        made.until(
            lambda: "the oldest ones without a token are closed" in made.log.read_text(), "?"
        )
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


@pytest.mark.multihost
@pytest.mark.slow
def test_a_caller_with_a_token_keeps_its_connection(tmp_path):
    with services.Service(tmp_path / "service", "--local", "0") as made:
        connection = http.client.HTTPConnection("127.0.0.1", made.port, timeout=30)
        connection.connect()
        sock = connection.sock
        for _ in range(3):
            headers = {"Authorization": f"Bearer {made.token}"}
            connection.request("GET", "/v1/nodes", headers=headers)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200 and connection.sock is sock
        connection.close()
