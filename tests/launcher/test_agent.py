"""The workers of one host, without any process."""

import queue

from jaxgoodput.launcher.elastic.agent import AgentSettings, HostWorkers


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
