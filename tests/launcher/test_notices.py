"""Notices of clouds, signals and files: read exactly, said once, and harmless if nothing answers."""

import argparse
import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import metadata_servers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.clock import SystemClock
from jaxgoodput.launcher.elastic.agent import AgentSettings, HostWorkers, run_agent
from jaxgoodput.launcher.notices import exchange, metadata, watch
from jaxgoodput.launcher.notices.metadata import QUERIES, Answer, NoticeReading, Question
from jaxgoodput.launcher.notices.notice import (
    CloudSource,
    FileSource,
    Notice,
    NoticeSettings,
    SignalSource,
    metadata_server,
    notice_source,
    seconds_to_leave,
    settings_of,
)

PREEMPTED, MAINTENANCE = QUERIES["gce"]
SPOT, REBALANCE = QUERIES["aws"]
NOON = 1_700_049_600.0  # 2023-11-15 12:00:00 UTC


def gce(value, status=200, flavor="Google"):
    return Answer(status, value, {"metadata-flavor": flavor, "etag": "3f"})


# -- what answers mean -------------------------------------------------------------------------------


def test_gce_is_asked_at_once_and_then_waits_for_a_change():
    first = PREEMPTED.question("")
    assert first.path == "/computeMetadata/v1/instance/preempted"
    assert first.headers == {"Metadata-Flavor": "Google"}
    reading = PREEMPTED.read("", gce("FALSE\n"), NOON)
    assert reading.notice is None and reading.memory == "3f"
    later = PREEMPTED.question(reading.memory)
    assert later.path == first.path + "?wait_for_change=true&last_etag=3f&timeout_sec=60"
    assert later.limit_s > 60, "the server may wait that long"
    notice = PREEMPTED.read("3f", gce("TRUE"), NOON).notice
    assert notice == Notice("GCE", "the machine is preempted", 30.0)


def test_gce_maintenance_is_a_notice_unless_the_machine_migrates():
    assert MAINTENANCE.read("", gce("NONE"), NOON).notice is None
    assert MAINTENANCE.read("", gce("MIGRATE_ON_HOST_MAINTENANCE"), NOON).notice is None
    notice = MAINTENANCE.read("", gce("TERMINATE_ON_HOST_MAINTENANCE"), NOON).notice
    assert notice is not None and notice.within_s == 60.0 and not notice.is_warning


@pytest.mark.parametrize(
    "answer", [gce("TRUE", status=503), gce("TRUE", flavor=""), gce("<html>"), gce("true")]
)
def test_what_is_no_answer_of_gce_is_no_notice(answer):
    with pytest.raises(ValueError):
        PREEMPTED.read("", answer, NOON)


def test_aws_is_asked_with_a_token_which_is_fetched_first_and_again_when_it_has_expired():
    ask = SPOT.question("")
    assert (ask.method, ask.path) == ("PUT", "/latest/api/token")
    assert ask.headers == {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
    token = SPOT.read("", Answer(200, "AQ=="), NOON)
    assert token.memory == "AQ==" and not token.is_known and token.pause_s == 0
    ask = SPOT.question(token.memory)
    assert (ask.method, ask.path) == ("GET", "/latest/meta-data/spot/instance-action")
    assert ask.headers == {"X-aws-ec2-metadata-token": "AQ=="}
    none = SPOT.read("AQ==", Answer(404), NOON)
    assert none.notice is None and none.memory == "AQ==" and none.is_known
    expired = SPOT.read("AQ==", Answer(401), NOON)
    assert expired.memory == "" and not expired.is_known and expired.pause_s > 0


@pytest.mark.parametrize(
    "action, at, what, within_s",
    [
        ("terminate", "2023-11-15T12:02:00Z", "terminated", 120.0),
        ("stop", "2023-11-15T12:00:30Z", "stopped", 30.0),
        ("stop", "2023-11-15T11:00:00Z", "stopped", 0.0),  # it is late
        ("hibernate", "2023-11-15T12:02:00Z", "hibernated", 0.0),  # it begins at once
    ],
)
def test_aws_says_what_will_happen_and_when(action, at, what, within_s):
    body = json.dumps({"action": action, "time": at})
    notice = SPOT.read("AQ==", Answer(200, body), NOON).notice
    assert notice == Notice("AWS", f"the machine will be {what}", within_s)


def test_a_rebalance_recommendation_is_a_mere_warning():
    body = json.dumps({"noticeTime": "2023-11-15T12:00:00Z"})
    notice = REBALANCE.read("AQ==", Answer(200, body), NOON).notice
    assert notice is not None and notice.is_warning


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda x: (
        st.lists(x, max_size=3)
        | st.dictionaries(st.sampled_from(["action", "time", "noticeTime", "x"]), x, max_size=4)
    ),
    max_leaves=6,
).map(json.dumps)


@given(
    st.sampled_from([PREEMPTED, MAINTENANCE, SPOT, REBALANCE]),
    st.sampled_from(["", "AQ=="]),
    st.integers(100, 599) | st.sampled_from([200, 401, 404]),
    st.text(max_size=40) | JSON,
    st.booleans(),
)
def test_any_answer_is_read_or_refused_and_garbage_is_no_notice(query, memory, code, body, is_gce):
    answer = Answer(code, body, {"metadata-flavor": "Google"} if is_gce else {})
    with contextlib.suppress(ValueError):
        reading = query.read(memory, answer, NOON)
        assert code in (200, 401, 404)
        if reading.notice is not None:
            assert code == 200 and (body.strip() in ("TRUE",) or json.loads(body))
        request = exchange._request("host", query.question(reading.memory))
        assert request.count(b"\r\n\r\n") == 1 and request.endswith(b"\r\n\r\n"), "one question"


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda b: b"HTTP/1.1 200 OK\r\n" + b))
def test_any_bytes_are_an_answer_or_refused(data):
    with contextlib.suppress(ValueError):
        assert isinstance(exchange.parsed(data), Answer)


# -- what follows ------------------------------------------------------------------------------------

SOON = Notice("AWS", "the machine will be stopped", 120.0)
READINGS = st.sampled_from(
    [
        NoticeReading(),
        NoticeReading(is_known=False, memory="token"),
        NoticeReading(SOON),
        NoticeReading(Notice("AWS", "the machine will be stopped", 115.0)),
        NoticeReading(Notice("AWS", "the machine will be terminated", 100.0)),
        OSError("refused"),
    ]
)


@given(st.lists(READINGS, max_size=30))
def test_each_notice_is_passed_on_once_and_failures_are_said_once(readings):
    polling, passed, lines, pauses = watch.Polling(), [], [], []
    for reading in readings:
        if isinstance(reading, OSError):
            result = watch.after_failure(polling, "AWS", str(reading))
            pauses.append(result.pause_s)
            assert result.notice is None and result.polling.memory == ""
        else:
            result = watch.after_reading(polling, "AWS", reading)
            pauses = []
        assert pauses == [min(2.0**i, 10.0) for i in range(len(pauses))], "ever more rarely"
        polling = result.polling
        passed += [result.notice] if result.notice is not None else []
        lines += [result.line] if result.line else []
    known = [r.notice for r in readings if isinstance(r, NoticeReading) and r.is_known]
    whats = [None if notice is None else notice.what for notice in known]
    changes = [b for a, b in zip([None, *whats], whats, strict=False) if a != b]
    assert [notice.what for notice in passed] == [what for what in changes if what is not None]
    assert sum("withdrawn" in line for line in lines) == changes.count(None)
    has_failed = any(isinstance(r, OSError) for r in readings)
    assert sum("cannot be asked" in line for line in lines) == has_failed


@given(st.none() | st.floats(-1e9, 1e9), st.floats(0, 1e6))
def test_workers_are_killed_before_the_host_is_gone_and_never_after_the_grace_period(
    within_s, grace_s
):
    seconds = seconds_to_leave(within_s, grace_s)
    assert 0 <= seconds <= grace_s
    assert within_s is None or seconds < within_s or (within_s <= 0 and seconds == 0)
    assert seconds == grace_s or seconds >= min(within_s or 0, 10.0) / 2


def test_a_notice_shortens_the_time_to_leave_and_nothing_makes_it_longer(clock):
    settings = AgentSettings(address="127.0.0.1:1", secret="", name="a", grace_s=60.0)
    with HostWorkers(["true"], settings, queue.SimpleQueue(), clock) as workers:
        workers.kill_after_grace()  # a signal came first
        workers.kill_within(25.0)
        assert workers.look_after() == 25.0
        workers.kill_within(40.0)
        assert workers.look_after() == 25.0


# -- options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["gce", "aws", "signal:USR1", "signal:XCPU@60", "file:/run/x@1"])
def test_a_source_is_written_as_it_is_read(text):
    assert str(notice_source(text)) == text


@pytest.mark.parametrize(
    "text",
    "azure gce:x signal: signal:TERM signal:KILL@3 signal:USR1@ signal:USR1@-1 signal:USR1@inf file:"
    " http://x AWS".split()
    + [""],
)
def test_what_is_no_source_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no source of notices. Give gce, aws"):
        notice_source(text)


@pytest.mark.parametrize(
    "text", ["x", "https://a", "http://", "http://a/b", "http://a:x", "http://a b", "http://u@a"]
)
def test_what_is_no_address_of_a_metadata_server_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no address of a metadata server"):
        metadata_server(text)


def test_settings_reach_agents_as_the_same_options():
    sources = [CloudSource("aws"), SignalSource("USR1", 90.0), FileSource("a b")]
    settings = settings_of(sources, "http://127.0.0.1:8000")
    words = settings.to_arguments()
    assert words == [
        *["--notices", "aws", "--notices", "signal:USR1@90", "--notices", "file:a b"],
        *["--metadata-server", "http://127.0.0.1:8000"],
    ]
    assert NoticeSettings().to_arguments() == []


def test_contradicting_settings_are_refused():
    with pytest.raises(ValueError, match="is given twice"):
        settings_of([SignalSource("USR1"), SignalSource("USR1", 3.0)], None)
    with pytest.raises(ValueError, match="no cloud is named"):
        settings_of([FileSource("x")], "http://a")


# -- real sources ------------------------------------------------------------------------------------


@contextlib.contextmanager
def watching(*sources, server=None):
    events = queue.SimpleQueue()
    with watch.notices_to(events, NoticeSettings(sources, server), SystemClock()):
        yield events
    until(lambda: not [t for t in threading.enumerate() if t.name == "jaxgoodput-notices"])


def until(what, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nothing_is_asked_or_received_unless_it_is_named(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket, "create_connection", refuse)
    before = signal.getsignal(signal.SIGUSR1)
    with watching() as events:
        assert signal.getsignal(signal.SIGUSR1) is before
    assert events.empty()


def test_a_notice_of_gce_arrives_when_it_is_given():
    with metadata_servers.metadata_server() as server:
        with watching(CloudSource("gce"), server=server.address) as events:
            until(lambda: any("wait_for_change" in path for _, path, _ in server.asked))
            assert events.empty()
            server.set(preempted="TRUE")
            assert events.get(timeout=20.0) == Notice("GCE", "the machine is preempted", 30.0)
    hosts = {headers["host"] for _, _, headers in server.asked}
    assert hosts == {"127.0.0.1"}


def test_a_notice_that_is_there_from_the_beginning_counts():
    with metadata_servers.metadata_server() as server:
        server.set(preempted="TRUE")
        with watching(CloudSource("gce"), server=server.address) as events:
            assert events.get(timeout=20.0).by == "GCE"


def test_a_notice_of_aws_arrives_and_a_warning_before_it(monkeypatch):
    monkeypatch.setattr(metadata, "_AWS_PAUSE_S", 0.05)
    later = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 120))
    with metadata_servers.metadata_server() as server:
        with watching(CloudSource("aws"), server=server.address) as events:
            until(lambda: sum(path.endswith("action") for _, path, _ in server.asked) > 2)
            assert events.empty()
            body = json.dumps({"noticeTime": later})
            server.aws["events/recommendations/rebalance"] = body
            assert events.get(timeout=20.0).is_warning
            body = json.dumps({"action": "stop", "time": later})
            server.aws["spot/instance-action"] = body
            notice = events.get(timeout=20.0)
            assert notice.what == "the machine will be stopped" and 60 < notice.within_s <= 120
    assert sum(method == "PUT" for method, _, _ in server.asked) == 2, "one token for each"


def broken(server, how):
    match how:
        case "refused":
            with socket.create_server(("127.0.0.1", 0)) as free:
                return f"http://127.0.0.1:{free.getsockname()[1]}"
        case "500":
            server.status = 500
        case "garbage":
            server.raw = b"\x00\xff garbage\r\n\r\n"
        case "cut":
            server.raw = (
                b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\nContent-Length: 9\r\n\r\nTRUE"
            )
        case "endless":
            server.raw = b"HTTP/1.1 200 OK\r\n\r\n" + b"TRUE" * 2**15
        case "silent":
            server.is_silent = True
        case "trickling":
            server.trickles = True
    return server.address


HOWS = ("refused", "500", "garbage", "cut", "endless", "silent", "trickling")


@pytest.mark.parametrize("how", HOWS)
def test_a_server_that_fails_is_said_once_and_asked_again(how, monkeypatch, capfd):
    monkeypatch.setattr(watch, "_LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(metadata, "_GCE_PAUSE_S", 0.01)
    short = {"limit_s": 0.3}
    monkeypatch.setattr(
        metadata, "Question", lambda *args, **kw: Question(*args, **{**kw, **short})
    )
    with metadata_servers.metadata_server() as server:
        address = broken(server, how)
        with watching(CloudSource("gce"), server=address) as events:
            if how == "refused":
                time.sleep(0.2)
            else:
                until(lambda: len(server.asked) >= 6)
            assert events.empty()
            if how in ("500", "garbage", "cut", "endless"):
                server.status = server.raw = None
                server.set(preempted="TRUE")
                assert events.get(timeout=20.0).by == "GCE", "when it answers again, it is heard"
    said = capfd.readouterr().err
    for key in ("preempted", "maintenance-event"):
        found = re.findall(f"GCE's {key} at {address} cannot be asked for notices: (.*)", said)
        assert len(found) == 1 and "Training goes on" in found[0]


def test_a_stop_does_not_wait_for_a_server_that_waits_for_a_change():
    with metadata_servers.metadata_server() as server:
        with watching(CloudSource("gce"), server=server.address):
            until(lambda: sum("wait_for_change" in path for _, path, _ in server.asked) == 2)
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 20.0, "the server would answer after 60 s"


def test_a_withdrawn_notice_is_said_and_another_one_arrives(monkeypatch, capfd):
    monkeypatch.setattr(metadata, "_GCE_PAUSE_S", 0.01)
    with metadata_servers.metadata_server() as server:
        with watching(CloudSource("gce"), server=server.address) as events:
            for _ in range(2):
                server.set(maintenance_event="TERMINATE_ON_HOST_MAINTENANCE")
                assert "maintenance" in events.get(timeout=20.0).what
                num_asked = len(server.asked)
                server.set(maintenance_event="NONE")
                until(lambda num=num_asked: len(server.asked) > num + 1)
            assert events.empty()
    assert capfd.readouterr().err.count("the notice is withdrawn") == 2


def test_a_signal_is_a_notice_and_the_handler_before_comes_back():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with watching(SignalSource("USR1", 90.0)) as events:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert events.get(timeout=20.0) == Notice("SIGUSR1", "this host is to leave", 90.0)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_comes_while_python_shuts_down_does_not_end_the_process():
    """Its exit code would be 138, although what the command did is known by then."""
    script = """
import atexit, os, queue, signal
from jaxgoodput.clock import SystemClock
from jaxgoodput.launcher.notices import watch
from jaxgoodput.launcher.notices.notice import NoticeSettings, SignalSource
atexit.register(lambda: os.kill(os.getpid(), signal.SIGUSR1))
with watch.notices_to(queue.SimpleQueue(), NoticeSettings((SignalSource("USR1"),)), SystemClock()):
    pass
raise SystemExit(7)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 7


@pytest.mark.parametrize(
    "text, within_s, says", [("", None, ""), ("45\n", 45.0, ""), ("drain", None, " says 'drain'")]
)
def test_a_file_is_a_notice_once_it_is_there(text, within_s, says, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_FILE_PAUSE_S", 0.02)
    path = tmp_path / "going"
    with watching(FileSource(str(path))) as events:
        assert events.empty()
        written = tmp_path / "written"
        written.write_text(text)
        written.rename(path)
        notice = events.get(timeout=20.0)
        assert notice.within_s == within_s and says in str(notice) and str(path) in str(notice)


def test_a_notice_while_no_coordinator_answers_ends_the_agent(tmp_path, capfd):
    (tmp_path / "going").write_text("20")
    settings = AgentSettings(
        address="127.0.0.1:1",
        secret="of these tests",
        name="a",
        notices=NoticeSettings((FileSource(str(tmp_path / "going")),)),
    )
    assert run_agent([sys.executable, __file__], settings, clock=SystemClock()) == 143
    assert "no coordinator answers" not in capfd.readouterr().err, "it does not try for 60 s first"
