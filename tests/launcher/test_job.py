"""The command that starts an elastic job: where it listens, when it gives up, and how it closes."""

import os
import pathlib
import signal
import socket

import pytest

from jaxgoodput.clock import FakeClock
from jaxgoodput.launcher.elastic import job as jobs
from jaxgoodput.launcher.elastic.coordinator import Coordinator
from jaxgoodput.launcher.elastic.job import Job, NamedHosts, run_elastic
from jaxgoodput.launcher.host_list import NamedHost
from jaxgoodput.launcher.notices.notice import NoticeSettings, SignalSource
from jaxgoodput.launcher.supervise import UsageError

ELSEWHERE = "192.0.2.7"  # an address of documentation


# -- where it listens --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, is_alone",
    [
        ({}, True),
        ({"join_file": pathlib.Path("job.join")}, False),
        ({"hosts": (NamedHost("a"),)}, False),
    ],
)
def test_only_a_job_that_no_other_host_joins_listens_at_the_loopback_interface(
    given, is_alone, monkeypatch
):
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(socket, "gethostbyname", lambda _: ELSEWHERE)
    job = Job(least=1, most=2, **given)
    assert jobs._endpoint(job) == ("127.0.0.1" if is_alone else "here", None)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    if is_alone:
        assert jobs._endpoint(job) == ("127.0.0.1", None)
    else:
        with pytest.raises(UsageError, match="Say how they can: --rdzv-endpoint ADDRESS:0"):
            jobs._endpoint(job)
    named = Job(least=1, most=2, endpoint="127.0.0.1:0", **given)
    assert jobs._endpoint(named) == ("127.0.0.1", None)


# -- when it gives up --------------------------------------------------------------------------------


class Connected(Coordinator):
    """A coordinator of which only the hosts matter, by name and number of processes."""

    def __init__(self, **slots):
        self.joined = slots
        self.ends = []

    @property
    def slots(self):
        return self.joined

    def lost(self, host, why):
        self.joined.pop(host, None)

    def give_up(self, codes, why):
        self.ends.append((codes, why))


def watched(least, *, may_grow=False, **slots):
    coordinator = Connected(**slots)
    named = NamedHosts(slots, coordinator, least, may_grow=may_grow)
    assert named.look() is None
    return coordinator, named


def test_hosts_of_few_processes_may_be_released_while_one_of_many_has_the_least():
    """`--nnodes 2:3` with 4, 1 and 1 processes is a job of at least two processes."""
    coordinator, named = watched(2, a=4, b=1, c=1)
    named.ended("b", 0)
    named.ended("c", 0)
    assert named.look() is None and not coordinator.ends
    named.ended("a", -9)
    assert named.look() is None
    assert coordinator.ends == [([0, 0, -9], "all agents have ended")]


def test_a_released_host_is_missing_once_the_others_are_too_few(capfd):
    coordinator, named = watched(3, a=4, b=1, c=1, d=1)
    named.ended("b", 0)
    named.ended("c", 0)
    assert named.look() is None
    named.ended("a", -9)
    assert named.look() == "SIGTERM" and not coordinator.ends
    why = "the agents of b, c, a have ended, and it needs 3 processes"
    assert f"the job cannot go on: {why}" in capfd.readouterr().err
    assert named.look() is None, "said once"


@pytest.mark.parametrize("slots", [1, 4])
def test_of_hosts_that_are_all_the_same_the_fewest_hosts_are_named(slots, capfd):
    _, named = watched(2 * slots, a=slots, b=slots)
    named.ended("b", -9)
    assert named.look() == "SIGTERM"
    assert "it needs 2 hosts" in capfd.readouterr().err


def test_a_host_that_has_joined_by_itself_counts_with_its_processes():
    coordinator, named = watched(2, a=1, b=1)
    coordinator.joined["more"] = 2
    named.ended("a", -9)
    named.ended("b", -9)
    assert named.look() is None and not coordinator.ends


# -- how it closes -----------------------------------------------------------------------------------


def test_a_signal_that_is_a_notice_is_received_until_all_has_been_closed(monkeypatch):
    """Its default is to end the process, which is still telling its agents that the job is over."""
    missed, closed = [], []

    class Closing(Connected):
        def __init__(self, *_, **__):
            super().__init__()

        def run(self, told):
            return 0

        def start(self, arguments, on_end):
            pass

        @property
        def names(self):
            return ()

        @property
        def address(self):
            return "127.0.0.1:1"

        def close(self):
            os.kill(os.getpid(), signal.SIGUSR1)
            closed.append(self)

    monkeypatch.setattr(jobs, "Coordinator", Closing)
    monkeypatch.setattr(jobs.hosts, "local", Closing)
    before = signal.signal(signal.SIGUSR1, lambda *_: missed.append(1))
    try:
        notices = NoticeSettings((SignalSource("USR1", 60.0),))
        job = Job(least=1, most=1, notices=notices)
        assert run_elastic(["true"], job, clock=FakeClock()) == 0
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(closed) == 2 and not missed
