"""Two-level water filling: the reference's levels, and what entities owe one another."""

import dataclasses

import numpy as np
import pytest
from gavel_worlds import random_problem
from golden_problems import instances
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.cluster.published.gavel.fairness import Hierarchical, WaterFilling


def levels(policy, problem):
    answer = policy(problem)
    assert answer.excess(problem) <= 1e-9
    return answer.rate(problem) / problem.proportional_rate()


def test_golden_levels(golden):
    found = list(instances(golden, "gavel_hier_*.json"))
    assert found
    for name, problem, instance, results in found:
        policy = Hierarchical(
            weights=instance["entity_weights"], orders=instance["entity_policies"]
        )
        ours = levels(policy, problem)
        expected = results[0]["normalized_throughput_reference"]
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-8, err_msg=name)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 15))
def test_one_fair_entity_of_equal_weights_is_plain_water_filling(seed, num_jobs):
    problem = random_problem(np.random.default_rng(seed), num_jobs)
    problem = dataclasses.replace(
        problem,
        tenant=("a",) * num_jobs,
        weight=np.ones(num_jobs),
        throughput=np.where(problem.throughput > 0, problem.throughput, 0.1),
    )
    one, plain = levels(Hierarchical(), problem), levels(WaterFilling(), problem)
    np.testing.assert_allclose(one, plain, rtol=1e-6, atol=1e-8)


def test_entities_share_by_weight_and_fifo_serves_the_oldest_first():
    # Eight equal jobs, one kind, three devices: tenant a is to have twice what b has.
    problem = dataclasses.replace(
        random_problem(np.random.default_rng(0), 8, 1, gangs=False),
        throughput=np.ones((8, 1)),
        capacity=np.array([3]),
        weight=np.ones(8),
        tenant=("a",) * 4 + ("b",) * 4,
        since_arrival_s=np.array([0.0, 1, 2, 3, 3, 2, 1, 0]),
    )
    x = levels(Hierarchical(weights={"a": 2.0}, orders={"b": "fifo"}), problem)
    np.testing.assert_allclose(x, [0.5, 0.5, 0.5, 0.5, 1, 0, 0, 0], atol=1e-7)


def test_what_one_entity_cannot_use_goes_to_the_others():
    problem = dataclasses.replace(
        random_problem(np.random.default_rng(0), 4, 1, gangs=False),
        throughput=np.ones((4, 1)),
        capacity=np.array([3]),
        weight=np.ones(4),
        tenant=("a", "b", "b", "b"),
    )
    x = levels(Hierarchical(weights={"a": 100.0}), problem)
    np.testing.assert_allclose(x, [1, 2 / 3, 2 / 3, 2 / 3], atol=1e-7)


def test_a_bad_entity_is_named():
    problem = random_problem(np.random.default_rng(0), 4)
    with pytest.raises(ValueError, match="weight 0"):
        Hierarchical(weights=dict.fromkeys("abc", 0.0))(problem)
