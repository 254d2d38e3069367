"""A real coordinator, as a node's agent starts it, reports hosts; the processes that train are the test's."""

import time

import pytest

from jaxgoodput import _wire as wire
from jaxgoodput.clock import SystemClock
from jaxgoodput.cluster.service.node.jobs import Jobs, LaunchSettings
from jaxgoodput.cluster.service.wire import JobTask, NodeReport, NodeWork, Report
from jaxgoodput.launcher.elastic import events as ev
from jaxgoodput.launcher.elastic import messages
from jaxgoodput.launcher.elastic.agent import facts_of
from jaxgoodput.launcher.elastic.fitness import Check, Pace

# Agents do not load JAX; a test's own process may have, which warns of every fork then.
pytestmark = [
    *(pytest.mark.multihost, pytest.mark.slow),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
]

COMMAND, SECRET, LIMIT_S = ("python", "train.py"), "a secret of tests", 300.0


class Host:
    """A host of one process, which says what it is told to say."""

    def __init__(self, address, name):
        self.address, self.agent = address, wire.connect(address, SECRET, timeout_s=LIMIT_S)
        self.agent.be_patient(LIMIT_S)
        hello = messages.AgentHello(name, 1, f"instance of {name}", facts_of(COMMAND))
        self.agent.send(messages.encoded(hello))
        self.hear(self.agent, messages.Accepted, messages.TO_AGENTS)
        self.hear(self.agent, messages.CheckHost, messages.TO_AGENTS)
        passed = Check(product_s=1e-3, round_trip_s=1e-3, send_s=1e-3)
        self.agent.send(messages.encoded(ev.HostExamined(name, passed)))
        started = self.hear(self.agent, messages.StartWorker, messages.TO_AGENTS)
        self.member = started.member
        self.worker = wire.connect(address, SECRET, timeout_s=LIMIT_S)
        self.worker.be_patient(LIMIT_S)
        self.say(messages.WorkerHello(self.member))
        self.hear(self.worker, messages.Welcome, messages.TO_WORKERS)
        self.say(ev.Ready(self.member, 0, -1, 12, state_at="127.0.0.1:9"))

    def hear(self, channel, kind, kinds):
        """The next message of a type."""
        while (body := channel.receive()) is not None:
            message = messages.decoded(body, kinds)
            if isinstance(message, kind):
                return message
            assert not isinstance(message, ev.Refuse), message.why
        raise AssertionError(f"the coordinator has ended before it sent a {kind.__name__}")

    def say(self, message):
        self.worker.send(messages.encoded(message))

    def set_up(self):
        formed = self.hear(self.worker, messages.Assignment, messages.TO_WORKERS)
        self.say(ev.SetUp(self.member, formed.generation))

    def connect(self):
        go = self.hear(self.worker, messages.Connect, messages.TO_WORKERS)
        self.say(messages.Connected(go.generation))

    def beat(self, step, sample_s):
        pace = Pace(sample_s=sample_s, step_s=20 * sample_s, part=4, whole=12, is_leased=False)
        self.say(ev.Beat(self.member, 1, step, pace))

    def close(self):
        self.worker.close()
        self.agent.close()


def until(look, what):
    deadline = time.monotonic() + LIMIT_S
    while not (found := look()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


def test_a_coordinator_reports_a_slow_host_that_the_job_needs_and_one_that_is_not_reached(tmp_path):
    jobs, hosts, told, log = (
        Jobs(LaunchSettings(node="n0", host="127.0.0.1"), SystemClock()),
        list[Host](),
        list[Report | NodeReport](),
        list[str](),
    )
    task = JobTask(
        job="a", generation=1, devices=(), command=COMMAND, cwd=str(tmp_path), workdir=None,
        devices_per_process=1, min_processes=3, max_processes=3, attempt=1, coordinates=True,
        address=None, runs=True, secret=SECRET,
    )  # fmt: skip

    def look():
        jobs.look()
        told.extend(jobs.reports())
        log.extend(text for _, _, text in jobs.lines(10_000))
        return told

    try:
        jobs.take(NodeWork(node="n0", version=1, tasks=(task,)))
        until(look, "the coordinator does not listen")
        (heard,) = told
        assert isinstance(heard, Report) and heard.address is not None
        hosts += [Host(heard.address, f"n{i}:0") for i in range(3)]
        for host in hosts:
            host.set_up()
        for host in hosts:
            host.connect()
        steps = iter(range(1, 10**6))

        def train():
            for host, sample_s in zip(hosts, (0.1, 0.11, 0.5), strict=True):
                host.beat(step, sample_s)

        while len(look()) < 2:
            step = next(steps)
            train()
            time.sleep(0.1)
        slow = told[1]
        assert isinstance(slow, NodeReport)
        assert (slow.job, slow.attempt, slow.node, slow.fault) == ("a", 1, "n2", "slow")
        assert slow.slow_ratio == pytest.approx(0.5 / 0.105)
        assert "in 8 windows in a row" in slow.why and "61% less time" in slow.why

        def unreached():
            hosts[0].say(ev.LinksTried(hosts[0].member, (hosts[1].member,), (hosts[2].member,)))
            train()
            look()
            return [x for x in told[2:] if isinstance(x, NodeReport) and x.fault != "slow"]

        (cut, *_) = until(unreached, "the broken link is not reported")
        assert cut.node in ("n0", "n2") and "n0:0 did not reach n2:0" in cut.why
        assert cut.fault == "unreachable" and "n2:0 is slow" in "".join(log)
        assert "host report" not in "".join(log), "that is for the service"
    finally:
        for host in hosts:
            host.close()
        jobs.stop()
        until(lambda: jobs.look() or jobs.is_idle, "the coordinator does not end")
