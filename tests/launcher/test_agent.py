"""The agent of one host: its workers are shells, and the test is the coordinator."""

import contextlib
import queue
import signal
import threading
import time

import pytest

from jaxgoodput import _wire as wire
from jaxgoodput.launcher.elastic import agent as agents
from jaxgoodput.launcher.elastic import events as ev
from jaxgoodput.launcher.elastic import messages
from jaxgoodput.launcher.elastic.agent import Agent, AgentSettings, HostWorkers, run_agent
from jaxgoodput.launcher.elastic.listener import Listener
from jaxgoodput.launcher.notices.notice import Notice
from jaxgoodput.launcher.supervise import StopSignal

SECRET = "of these tests"
LIMIT_S = 60.0
GRACE_S = 60.0


class OneHost:
    """An agent with a worker that has reported a step, and the coordinator's end of its connection."""

    def __init__(self, folder, clock, *, step=7, ends_run=False):
        self.folder, self.clock, self.step = folder, clock, step
        self.told, self.events = queue.SimpleQueue(), queue.SimpleQueue()
        self.code = None
        # The pipe for heartbeats is FD:DEVICE:INODE.
        script = f"""
            trap 'touch {folder}/told' TERM
            beats=${{JAXGOODPUT_BEATS%%:*}}
            echo {step} >/proc/self/fd/$beats
            {"echo >/proc/self/fd/$beats" * ends_run}
            touch {folder}/began
            while [ ! -e {folder}/end ]; do sleep 0.02; done
            exit 143
        """
        self.command = ["sh", "-c", script]
        self.settings = AgentSettings(
            address="127.0.0.1:1",
            secret=SECRET,
            name="a",
            grace_s=GRACE_S,
            silent_s=0.5,
            connect_s=1e9,
        )

    @contextlib.contextmanager
    def at_work(self):
        """While the agent is connected; its exit code is in `code` at the end."""
        came = queue.SimpleQueue()
        failed = []
        with contextlib.closing(
            Listener(
                "127.0.0.1", None, SECRET, self._hear(came), name="test", on_error=failed.append
            )
        ) as listener:
            channel = wire.connect(listener.address, SECRET, timeout_s=LIMIT_S)
            channel.send({"type": "hello"})
            self.channel = came.get(timeout=LIMIT_S)
            self.agent = Agent(channel, self.command, self.settings, self.events, self.clock)

            def run():
                self.code = self.agent.run()

            thread = threading.Thread(target=run)
            thread.start()
            try:
                self.send(messages.StartWorker("a.1"))
                until(lambda: self.child is not None and self.child.step == self.step)
                until((self.folder / "began").exists)
                yield self
                thread.join(LIMIT_S)
                assert not thread.is_alive()
            finally:
                self.channel.close()
                (self.folder / "end").touch()
                thread.join(LIMIT_S)
        assert not failed

    @property
    def child(self):
        """The worker; None before it has started."""
        return self.agent._workers._running.get("a.1", (0, None))[1]

    def _hear(self, came):
        def hear(channel, hello):
            came.put(channel)
            for message in messages.received(channel, messages.FROM_AGENTS, failing):
                self.told.put(message)

        return hear

    def send(self, message):
        self.channel.send(messages.encoded(message))

    def hears(self, kind):
        """The next message of this kind that the agent sends."""
        while not isinstance(message := self.told.get(timeout=LIMIT_S), kind):
            pass
        return message


def failing(error):
    raise error


def until(what):
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def host(tmp_path, clock):
    return OneHost(tmp_path, clock)


def test_workers_that_are_told_to_stop_while_their_host_leaves_get_the_grace_period_in_full(clock):
    settings = AgentSettings(address="127.0.0.1:1", secret="", name="a", grace_s=60.0)
    with HostWorkers(["true"], settings, queue.SimpleQueue(), clock) as workers:
        assert workers.look_after() is None and not workers.is_grace_running
        workers.kill_after_grace()  # the host leaves
        clock.advance(50.0)
        assert workers.is_grace_running
        workers.kill_after_grace()  # the whole job stops: its state must be saved
        assert workers.look_after() == 60.0
        clock.advance(60.0)
        assert workers.look_after() is None and not workers.is_grace_running


def test_a_stop_does_not_put_off_when_the_machine_will_be_gone(clock):
    settings = AgentSettings(address="127.0.0.1:1", secret="", name="a", grace_s=60.0)
    with HostWorkers(["true"], settings, queue.SimpleQueue(), clock) as workers:
        workers.kill_after_grace()
        workers.kill_within(25.0)  # a notice
        clock.advance(10.0)
        workers.kill_after_grace()  # the whole job stops
        assert workers.look_after() == 15.0


def test_a_host_that_is_released_may_take_as_long_as_its_step_takes(host, tmp_path):
    with host.at_work():
        host.send(ev.LetGo("a", "it is not needed"))
        until(lambda: host.agent._is_leaving)
        host.clock.advance(100 * GRACE_S)
        time.sleep(0.5)  # it looks after its workers several times
        assert host.told.empty(), "it still works"
        (tmp_path / "end").touch()
    assert host.hears(ev.ProcessExited).code == 143
    assert host.code == 143


def test_a_host_that_is_released_and_then_told_to_stop_ends_in_time(host):
    with host.at_work():
        host.send(ev.LetGo("a", "it is not needed"))
        until(lambda: host.agent._is_leaving)
        host.events.put(StopSignal(signal.SIGTERM))
        until(lambda: host.agent._workers.is_grace_running)
        host.clock.advance(GRACE_S)
    assert host.hears(ev.ProcessExited).code == -9
    assert host.code == 0, "the others hold the state"


def leave_late(host, *, notice_s=None):
    """The host is to leave, and its worker is killed because it does not in time."""
    host.events.put(
        StopSignal(signal.SIGTERM) if notice_s is None else Notice("it", "goes", notice_s)
    )
    host.hears(ev.Leave)
    until(lambda: host.agent._workers.is_grace_running)


@pytest.mark.parametrize("notice_s", [None, 6.0])
def test_a_host_that_leaves_too_late_loses_nothing_as_the_others_hold_the_state(host, notice_s):
    with host.at_work():
        leave_late(host, notice_s=notice_s)
        host.clock.advance(GRACE_S)
    assert host.hears(ev.ProcessExited).code == -9
    assert host.code == 143


def test_if_a_leaving_host_is_to_save_a_worker_that_is_killed_has_not(host, tmp_path):
    with host.at_work():
        leave_late(host)
        host.send(messages.StopWorkers())  # there is no other host
        until((tmp_path / "told").exists)
        host.clock.advance(GRACE_S)
    assert host.code == 137


def test_a_worker_that_is_killed_before_the_coordinator_has_answered_may_have_lost_the_state(host):
    with host.at_work():
        host.events.put(Notice("it", "goes", 0.0))  # nothing is left of the time
    assert host.hears(ev.ProcessExited).code == -9
    assert host.code == 137


def test_steps_are_lost_with_the_coordinator_before_the_first_heartbeat_that_tells_of_them(
    tmp_path, clock, capfd
):
    """A run that has begun reports step 0, and for a second nothing else, however many steps it does."""
    host = OneHost(tmp_path, clock, step=0)
    with host.at_work():
        host.channel.close()
    assert host.code is None and host.agent.lost_step == 0
    assert agents._without_coordinator("a", 0) == 75
    assert "what was done may not be saved" in capfd.readouterr().err
    assert agents._without_coordinator("a", None) == 143


@pytest.mark.parametrize("ends_run, lost", [(False, 7), (True, None)])
def test_only_a_run_that_is_not_over_loses_steps_with_its_coordinator(
    tmp_path, clock, ends_run, lost
):
    host = OneHost(tmp_path, clock, ends_run=ends_run)
    with host.at_work():
        until(lambda: host.child.run_step == (None if ends_run else 7))
        host.channel.close()
    assert host.code is None and host.agent.lost_step == lost


@pytest.mark.parametrize("later_s, lost", [(0.3, 7), (10.0, None)])
def test_workers_that_see_the_coordinator_go_before_the_agent_does_lose_their_steps(
    host, later_s, lost
):
    """Workers end within moments of the coordinator; what ended long before has another reason."""
    with host.at_work():
        host.child.send(signal.SIGKILL)
        assert host.hears(ev.ProcessExited).code == -9
        host.clock.advance(later_s)
        host.channel.close()
    assert host.code is None and host.agent.lost_step == lost


def test_a_coordinator_that_comes_later_does_not_hide_what_was_lost_with_the_first(
    monkeypatch, clock, capfd
):
    steps = [7, None]

    class Connection:
        was_accepted = True

        def __init__(self, *_):
            self.lost_step = steps.pop(0)

        def run(self):
            return None

    def connected(*_):
        if not steps:
            clock.advance(1e6)
            raise OSError("nobody is there")

    monkeypatch.setattr(agents, "Agent", Connection)
    monkeypatch.setattr(agents, "_connected", connected)
    monkeypatch.setattr(agents, "_RETRY_S", 0.01)
    settings = AgentSettings(address="127.0.0.1:1", secret=SECRET, name="a")
    assert run_agent(["true"], settings, clock=clock) == 75
    assert "step 7 and what came after it may not be saved" in capfd.readouterr().err
