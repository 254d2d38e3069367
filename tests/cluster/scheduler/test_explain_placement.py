"""If enough devices are free but do not lie together, explain says so, and what it names lets the job run."""

import dataclasses
import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.cluster.scheduler.explain import explain
from jaxgoodput.cluster.scheduler.policies.goodput import Goodput
from jaxgoodput.cluster.scheduler.policy import JobView, Plan
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.cluster.scheduler.work_left import EndedJob, Experience
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node


def even(count: int, size: int, per_rack: int = 2) -> ClusterSpec:
    return ClusterSpec(
        nodes=tuple(
            Node(name=f"n{i}", kind="a", num_devices=size, labels={"rack": f"r{i // per_rack}"})
            for i in range(count)
        )
    )


def rigid(id_: str, size: int, level: str | None = None, **fields) -> JobView:
    spec = JobSpec(id=id_, mode="rigid", num_devices=size, level=level)
    return JobView(spec=spec, **fields)


def settled(jobs: list[JobView], cluster: ClusterSpec) -> tuple[list[JobView], Plan]:
    """The jobs after two plans, the second of which changes little, and that plan."""
    plan = reconcile(jobs, cluster, Goodput(), 0.0)
    running = [
        dataclasses.replace(
            v,
            allocation=plan.allocations[v.spec.id],
            since_s=0.0 if plan.allocations[v.spec.id].devices else None,
        )
        for v in jobs
    ]
    return running, reconcile(running, cluster, Goodput(), 60.0)


def test_it_says_how_much_longer_what_is_in_the_way_will_run_as_runs_before_it_did():
    guess = Experience([EndedJob("a.py", "ana", 5, 4500.0)] * 40).guess("a.py", "ana", 5)
    jobs = [rigid(f"g{i}", 5, work_guess=guess) for i in range(5)]
    jobs, plan = settled(jobs, even(4, 8))
    (waits,) = [v.spec.id for v in jobs if not plan.allocations[v.spec.id].devices]
    said = explain(waits, jobs, even(4, 8), Goodput(), 60.0, plan=plan).message
    (left,) = re.findall(r"perhaps (\d+) s more, the median of 40 earlier runs of its script", said)
    assert 0.9 * 4500 / 5 <= int(left) <= 1.2 * 4500 / 5


def test_it_says_which_nodes_what_is_free_and_what_is_in_the_way():
    cluster = even(4, 8)
    jobs, plan = settled([rigid(f"g{i}", 5) for i in range(5)], cluster)
    (waits,) = [v.spec.id for v in jobs if not plan.allocations[v.spec.id].devices]
    said = explain(waits, jobs, cluster, Goodput(), 60.0, plan=plan)
    assert said.constraint == "placement"
    assert (
        "12 devices of kind a are free, but not together (3 on n0, 3 on n1, 3 on n2, 3 on n3); "
        "it needs 5 a on 1 node. In the way: 'g" in said.message
    )
    assert said.changes[0].startswith("the end of 'g")


def test_a_rack_is_named_and_how_long_the_other_job_takes():
    cluster = even(4, 8)
    holder = rigid(
        "small",
        2,
        allocation=Allocation(devices={"n0": (0, 1)}),
        since_s=0.0,
        remaining=600.0,
        largest_profiled=2,
    )
    holder = dataclasses.replace(holder, spec=dataclasses.replace(holder.spec, preemptible=False))
    other = rigid("other", 8, allocation=Allocation(devices={"n2": tuple(range(8))}), since_s=0.0)
    other = dataclasses.replace(other, spec=dataclasses.replace(other.spec, preemptible=False))
    jobs = [holder, other, rigid("gang", 16, "rack")]
    said = explain("gang", jobs, cluster, Goodput(), 60.0)
    assert said.constraint == "placement"
    assert "it needs 16 a on 2 nodes within one rack" in said.message
    assert "'small' (2 on n0" in said.message
    assert said.changes[0] == "the end of 'small'"


def random_jobs(seed: int) -> tuple[ClusterSpec, list[JobView]]:
    rng = np.random.default_rng([seed, 0x6578706C])
    size = int(rng.choice([4, 8]))
    cluster = even(int(rng.integers(2, 5)), size)
    jobs = [
        rigid(
            f"j{i}",
            int(rng.integers(1, 2 * size + 1)),
            "rack" if rng.random() < 0.3 else None,
            restart_s=float(rng.choice([1.0, 30.0, 2000.0])),
        )
        for i in range(int(rng.integers(2, 8)))
    ]
    return cluster, jobs


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_what_the_reason_names_lets_the_job_run(seed):
    cluster, jobs = random_jobs(seed)
    jobs, plan = settled(jobs, cluster)
    total = sum(node.num_devices for node in cluster.nodes)
    idle = total - sum(given.num_devices for given in plan.allocations.values())
    for view in jobs:
        said = explain(view.spec.id, jobs, cluster, Goodput(), 60.0, plan=plan)
        assert "leaves devices idle that it could use" not in said.message
        size = view.spec.num_devices or 0
        waits = said.constraint not in ("none", "refused")
        if waits and size <= idle:
            assert said.constraint == "placement", said
            assert "of more use to others" not in said.message
        if said.constraint == "placement" and said.changes[0].startswith("the end of"):
            ended = re.findall(r"'([^']+)'", said.changes[0])
            rest = [v for v in jobs if v.spec.id not in ended]
            after = reconcile(rest, cluster, Goodput(), 60.0)
            assert after.allocations[view.spec.id].devices
