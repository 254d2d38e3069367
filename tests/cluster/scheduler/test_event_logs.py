"""Random event logs: after every event the plan keeps all laws, and in the end nobody waits."""

import pytest
from event_logs import EventWorld, logs
from hypothesis import HealthCheck, given, settings

from jaxgoodput.cluster.published.pollux import Pollux
from jaxgoodput.cluster.published.sia import Sia
from jaxgoodput.cluster.scheduler.policies.goodput import Goodput

POLICIES = {"goodput": Goodput(), "sia": Sia(), "pollux": Pollux()}
SLOW_TO_DRAW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def live_through(log, policy):
    """The log, event by event, and then on until all is done."""
    nodes, first, events = log
    world = EventWorld.of(nodes, policy)
    for recipe in first:
        world.arrive(recipe)
    world.decide(twice=True)
    for event, value in events:
        world.live(event, value)
    world.run_out()


@pytest.mark.slow
@settings(max_examples=500, deadline=None, suppress_health_check=SLOW_TO_DRAW)
@given(logs(most_events=5))
def test_plans_keep_their_laws_through_any_log(log):
    live_through(log, POLICIES["goodput"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sia", "pollux"])
@settings(max_examples=250, deadline=None, suppress_health_check=SLOW_TO_DRAW)
@given(logs(most_events=5))
def test_so_do_the_plans_of_published_policies(name, log):
    live_through(log, POLICIES[name])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=5000, deadline=None, suppress_health_check=SLOW_TO_DRAW)
@given(logs(most_events=25))
def test_plans_keep_their_laws_through_long_logs(name, log):
    live_through(log, POLICIES[name])
