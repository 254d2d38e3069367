"""The published objectives to the last digit, and an allocation at least as good as any other."""

import importlib.util
import itertools
import json
import math
import pathlib

import numpy as np
import pytest

from jaxgoodput.cluster.published.pollux import (
    FLOOR,
    Pollux,
    fair_devices,
    reallocation_factor,
)
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node, Shape

NAMES = ["alpha_c", "beta_c", "alpha_n", "beta_n", "alpha_r", "beta_r", "gamma"]


def power_mean(speedups, factor, power=-1.0, floor=FLOOR):
    """Pollux's fitness, equation 14; the artifact counts speedups in nodes."""
    return float(np.mean((speedups * factor + floor) ** power) ** (1.0 / power))


def published_search():
    """AdaptDL's search under our model, as the tests of the goodput model have it."""
    path = pathlib.Path(__file__).parents[2] / "support" / "adaptdl_golden.py"
    spec = importlib.util.spec_from_file_location("adaptdl_golden_of_pollux", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.adaptdl_best


def published(golden, name):
    """(case, row of states, goodput of a row, goodput of (nodes, replicas)) of every recorded state."""
    data = json.loads((golden / "adaptdl" / f"alloc_objective_{name}.json").read_text())
    best, memory = published_search(), {}

    def goodput(kind, nodes, replicas):
        if not replicas:
            return 0.0
        key = kind, nodes, replicas
        if key not in memory:
            of_kind = data["job_kinds"][kind]
            params = dict(zip(NAMES, of_kind["perf_params"], strict=True))
            memory[key] = best({**of_kind, "perf_params": params}, nodes, replicas)[0]
        return memory[key]

    for case in data["cases"]:
        for index, state in enumerate(case["states"]):
            state = np.array(state)
            rows = zip(case["jobs"], state, strict=True)
            found = [goodput(j["kind"], int((r > 0).sum()), int(r.sum())) for j, r in rows]
            expect = {key: values[index] for key, values in case["expect"].items()}
            changed = (state != np.array(case["base_state"])).any(1)
            yield case, expect, np.array(found), changed, state, goodput


def test_the_objectives_of_the_paper(golden):
    for case, expect, found, changed, _, goodput in published(golden, "artifact"):
        devices = case["num_nodes"] * case["gpus_per_node"]
        share = fair_devices(devices, len(case["jobs"]))
        speedups = found / [goodput(job["kind"], 1, share) for job in case["jobs"]]
        np.testing.assert_allclose(speedups, expect["speedups"], rtol=1e-9)
        factor = reallocation_factor(
            np.array([job["age_s"] for job in case["jobs"]], float),
            np.array([job["num_restarts"] for job in case["jobs"]], float),
        )
        fitness = power_mean(speedups / case["gpus_per_node"], np.where(changed, factor, 1.0))
        utility = float(np.sum(speedups)) / devices
        np.testing.assert_allclose([-fitness, -utility], expect["F"], rtol=1e-9)
        np.testing.assert_allclose(utility, expect["cluster_utility"], rtol=1e-9)


def test_the_objectives_of_the_master_version(golden):
    for case, expect, found, changed, state, goodput in published(golden, "master"):
        speedups = found / [goodput(job["kind"], 1, 1) for job in case["jobs"]]
        np.testing.assert_allclose(speedups, expect["speedups"], rtol=1e-9)
        mean = power_mean(
            speedups / case["gpus_per_node"], np.where(changed, 0.9, 1.0), power=1.0, floor=0.0
        )
        used = np.flatnonzero(state.any(0))
        size = used[-1] + 1 if len(used) else 0
        np.testing.assert_allclose([-mean * len(speedups), size], expect["F"], rtol=1e-9)
        devices = case["num_nodes"] * case["gpus_per_node"]
        utility = float(np.sum(speedups)) / devices
        np.testing.assert_allclose(utility, expect["cluster_utility"], rtol=1e-9)


def small(num_jobs, seed):
    """A cluster of two nodes of four, and jobs of which some run."""
    rng = np.random.default_rng(seed)
    nodes = tuple(Node(name=f"n{i}", kind="k", num_devices=4) for i in range(2))
    shapes = [Shape("k", 1, 1), Shape("k", 1, 2), Shape("k", 1, 4), Shape("k", 2, 8)]
    jobs = []
    for i in range(num_jobs):
        speed = np.array([s.num_devices for s in shapes]) ** rng.uniform(0.3, 0.95)
        runs = i == 0
        jobs.append(
            JobView(
                spec=JobSpec(id=f"j{i}"),
                goodput=dict(zip(shapes, (speed * rng.uniform(1, 50)).tolist(), strict=True)),
                allocation=Allocation(devices={"n0": (0, 1)}) if runs else Allocation(),
                since_s=10.0 if runs else None,
                num_restarts=int(rng.integers(0, 3)),
                largest_profiled=8,
            )
        )
    return jobs, ClusterSpec(nodes=nodes), shapes


@pytest.mark.parametrize("num_jobs", [2, 3, 4])
def test_no_other_allocation_has_a_greater_power_mean(num_jobs):
    jobs, cluster, shapes = small(num_jobs, num_jobs)
    now_s = 500.0
    decision = Pollux()(jobs, cluster, now_s)
    restarts = np.array([job.num_restarts for job in jobs], float)
    factor = reallocation_factor(np.full(num_jobs, now_s), restarts)
    fair = Shape("k", 1, 4) if num_jobs <= 3 else Shape("k", 1, 2)  # the least that holds 8 / jobs

    def mean(chosen):
        speedups, factors = np.zeros(num_jobs), np.ones(num_jobs)
        for i, (job, shape) in enumerate(zip(jobs, chosen, strict=True)):
            if shape is not None:
                speedups[i] = job.goodput[shape] / job.goodput[fair] / 4
                factors[i] = 1.0 if i == 0 and shape == Shape("k", 1, 2) else factor[i]
        return power_mean(speedups, factors)

    best = max(
        mean(chosen)
        for chosen in itertools.product([None, *shapes], repeat=num_jobs)
        if sum(shape.num_devices for shape in chosen if shape) <= 8
    )
    assert decision.objective is not None and decision.bound is not None
    assert math.isclose(decision.objective, best, rel_tol=1e-6)
    assert decision.bound >= decision.objective


def test_no_jobs_and_no_devices_are_no_trouble():
    jobs, cluster, _ = small(2, 0)
    waiting = [JobView(spec=job.spec, goodput=job.goodput) for job in jobs]
    down = ClusterSpec(nodes=(Node(name="n", kind="k", num_devices=4, state="down"),))
    assert Pollux()([], cluster, 0.0).allocations == {}
    assert Pollux()(waiting, down, 0.0).allocations == {}


def test_a_power_that_starves_is_refused():
    with pytest.raises(ValueError, match="must be below 0"):
        Pollux(power=1.0)
