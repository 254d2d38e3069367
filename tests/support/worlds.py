"""A policy that anybody can predict, and random clusters and jobs for properties."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from jaxgoodput.cluster.scheduler.placement.placement import place
from jaxgoodput.cluster.scheduler.policy import Decision, JobView
from jaxgoodput.cluster.scheduler.shapes import capacity_rows, domain_of, goodput_matrix, shapes
from jaxgoodput.specs import ClusterSpec, JobSpec, Node, Shape


@dataclass(frozen=True)
class Fifo:
    """Work-conserving: in order of submission, each job gets the smallest shape that fits, or is skipped."""

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float) -> Decision:
        offered = shapes(cluster, jobs)
        matrix = goodput_matrix(jobs, offered, cluster)
        rows = capacity_rows(cluster, offered)
        left, quota = rows.limits.copy(), dict(cluster.quota)
        sizes = np.array([shape.num_devices for shape in offered], dtype=int)
        wanted: dict[str, Shape] = {}
        order = sorted(range(len(jobs)), key=lambda i: (jobs[i].submitted_s, jobs[i].spec.id))
        for i in order:
            spec = jobs[i].spec
            fits = (matrix[i] > 0) & (rows.matrix <= left[:, None]).all(axis=0)
            fits &= sizes <= quota.get(spec.tenant, 10**9)
            if fits.any():
                column = int(np.where(fits, sizes, 10**9).argmin())
                wanted[spec.id] = offered[column]
                left -= rows.matrix[:, column]
                if spec.tenant in quota:
                    quota[spec.tenant] -= int(sizes[column])
        return Decision(allocations=place(wanted, jobs, cluster))


def table(cluster: ClusterSpec, **rate: float) -> dict[Shape, float]:
    """A goodput for every shape of the cluster: devices^0.8, times the rate of the kind."""
    nodes = tuple(dataclasses.replace(n, state="up", withheld=()) for n in cluster.nodes)
    every = shapes(ClusterSpec(nodes=nodes))
    return {s: rate.get(s.kind, 1.0) * s.num_devices**0.8 for s in every}


# Strategies draw plain recipes: the checks of argument types pick random items of containers, which
# hypothesis forbids while it draws.


def cluster_of(recipe: list[dict], **more) -> ClusterSpec:
    return ClusterSpec(nodes=tuple(Node(**node) for node in recipe), **more)


def jobs_of(recipes: list[dict], cluster: ClusterSpec) -> tuple[JobView, ...]:
    """Jobs j0, j1, ... in order of submission, each with a complete table of its own scale."""
    every = table(cluster)
    return tuple(
        JobView(
            spec=JobSpec(id=f"j{i}", **{k: v for k, v in recipe.items() if k != "restart_s"}),
            goodput=every,
            submitted_s=float(i),
            restart_s=recipe["restart_s"],
        )
        for i, recipe in enumerate(recipes)
    )


@st.composite
def nodes(draw, *, healthy: bool = False) -> list[dict]:
    """One or two kinds, nodes of 4, 6 or 8 devices (some of 3), not all in order unless `healthy`."""
    recipe: list[dict] = []
    for kind in draw(st.sampled_from([("a",), ("a", "b")])):
        size = draw(st.sampled_from([4, 6, 8]))
        for i in range(draw(st.integers(1, 4))):
            states = ["up"] if healthy else ["up", "up", "up", "draining", "down"]
            broken = [()] if healthy else [(), (), (), (1,)]
            recipe.append(
                {
                    "name": f"{kind}{i}",
                    "kind": kind,
                    "num_devices": draw(st.sampled_from([size, size, size, 3])),
                    "state": draw(st.sampled_from(states)),
                    "withheld": draw(st.sampled_from(broken)),
                    "labels": {"rack": f"r{i // 2}"},
                }
            )
    return recipe


@st.composite
def job_recipes(draw) -> list[dict]:
    """Any jobs, also ones that no cluster can run."""
    return [draw(_job()) for _ in range(draw(st.integers(1, 8)))]


@st.composite
def _job(draw) -> dict:
    low = draw(st.sampled_from([1, 1, 1, 2, 4, 8, 500]))
    rigid = draw(st.booleans())
    return {
        "mode": "rigid" if rigid else "adaptive",
        "num_devices": draw(st.sampled_from([1, 2, 4, 8, 12, 16, 3])) if rigid else None,
        "min_devices": low,
        "max_devices": max(low, draw(st.sampled_from([1, 4, 16, 64]))),
        "kinds": draw(st.sampled_from([None, None, None, ("a",), ("b",), ("c",)])),
        "level": draw(st.sampled_from([None, None, None, "rack"])),
        "preemptible": draw(st.sampled_from([True, True, True, False])),
        "min_run_s": draw(st.sampled_from([0.0, 0.0, 100.0])),
        "tenant": draw(st.sampled_from(["red", "blue"])),
        "restart_s": draw(st.sampled_from([1.0, 30.0])),
    }


def check_plan(plan, jobs, cluster):
    """The laws of every plan: nothing impossible, nothing unexplained, no quota exceeded."""
    nodes = {node.name: node for node in cluster.nodes}
    assert set(plan.allocations) == set(plan.reasons) == {v.spec.id for v in jobs}
    assert all(plan.reasons.values())
    given_: set[tuple[str, int]] = set()
    for v in jobs:
        now, before = plan.allocations[v.spec.id], v.allocation
        assert now.generation == before.generation + (now.devices != before.devices)
        kinds = set()
        for name, local in now.devices.items():
            node = nodes[name]
            assert node.state == "up" or (node.state == "draining" and now == before)
            assert not set(local) & set(node.withheld)
            assert set(local) <= set(range(node.num_devices))
            assert not given_ & {(name, i) for i in local}
            given_ |= {(name, i) for i in local}
            kinds.add(node.kind)
        if now.devices:
            if v.spec.mode == "rigid":
                assert now.num_devices == v.spec.num_devices
            else:
                assert v.spec.min_devices <= now.num_devices <= v.spec.max_devices
            assert v.spec.kinds is None or kinds <= set(v.spec.kinds)
            if v.spec.level is not None:
                assert len({domain_of(nodes[n], v.spec.level) for n in now.devices}) == 1
    for tenant, limit in cluster.quota.items():
        held = [v for v in jobs if v.spec.tenant == tenant]
        assert sum(plan.allocations[v.spec.id].num_devices for v in held) <= limit


def after(plan, jobs, now_s):
    """The jobs as they are when the plan has been carried out."""
    return tuple(
        dataclasses.replace(
            v,
            allocation=plan.allocations[v.spec.id],
            since_s=now_s if v.spec.id in plan.start + plan.resize else v.since_s,
        )
        for v in jobs
    )
