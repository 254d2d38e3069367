"""How long an allocation is expected to last: the mean of the past, a little longer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.scheduler.policies.shape_choice import Problem
from jaxgoodput.scheduler.policies.stay import expected_stay_s
from jaxgoodput.scheduler.policy import JobView
from jaxgoodput.specs import ClusterSpec, JobSpec, Node

CLUSTER = ClusterSpec(nodes=(Node(name="n", kind="k", num_devices=1),))


def stay_s(age_s, restarts, restart_s):
    view = JobView(
        spec=JobSpec(id="a"),
        goodput={},
        num_restarts=restarts,
        restart_s=restart_s,
        submitted_s=50.0,
    )
    return float(expected_stay_s(Problem.of((view,), CLUSTER, 50.0 + age_s))[0])


def test_its_numbers():
    assert stay_s(age_s=0.0, restarts=0, restart_s=0.0) == pytest.approx(96.0)
    assert stay_s(age_s=1780.0, restarts=4, restart_s=50.0) == pytest.approx(320.0)


@given(age_s=st.floats(0, 1e6), restarts=st.integers(0, 100), restart_s=st.floats(0, 1000))
def test_it_grows_with_age_and_falls_with_restarts(age_s, restarts, restart_s):
    now = stay_s(age_s, restarts, restart_s)
    assert now > 0
    assert stay_s(age_s + 60.0, restarts, restart_s) > now > stay_s(age_s, restarts + 1, restart_s)


def test_a_job_from_a_clock_that_is_ahead_counts_as_new():
    assert stay_s(age_s=-30.0, restarts=0, restart_s=10.0) == stay_s(0.0, 0, 10.0)
