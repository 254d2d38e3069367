"""What is chosen is placed, and is as good as the best that can be placed; moves cost their restarts."""

import dataclasses
import itertools

import numpy as np
import pytest
from scipy import optimize

from jaxgoodput.cluster.scheduler.policies import placeable
from jaxgoodput.cluster.scheduler.policies.goodput import Goodput
from jaxgoodput.cluster.scheduler.policies.placeable import PlacingRules, choose_placeable
from jaxgoodput.cluster.scheduler.policies.promises import Promises
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.cluster.scheduler.shapes import chunks, domain_of, node_size, shapes
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node


def world(seed: int) -> ShapeProblem:
    """Up to 4 nodes, not all equal, some partly taken, in racks; jobs of any size, some bound to a rack."""
    rng = np.random.default_rng([seed, 0x706C6163])
    size = int(rng.choice([4, 6, 8]))
    nodes = tuple(
        Node(
            name=f"n{i}",
            kind="a",
            num_devices=size,
            withheld=tuple(range(int(rng.integers(0, size)))) if rng.random() < 0.3 else (),
            labels={"rack": f"r{i // 2}"},
        )
        for i in range(int(rng.integers(1, 5)))
    )
    cluster = ClusterSpec(nodes=nodes)
    views = []
    for i in range(int(rng.integers(2, 9))):
        least = int(rng.integers(1, 2 * size + 1))
        most = least + int(rng.choice([0, 0, 1, 3]))
        level = "rack" if rng.random() < 0.3 else None
        spec = JobSpec(id=f"j{i}", min_devices=least, max_devices=most, level=level)
        views.append(JobView(spec=spec))
    scale = rng.uniform(0.3, 3.0, len(views))
    power = rng.uniform(0.2, 1.0, len(views))
    offered = shapes(cluster, views)
    filled = [
        dataclasses.replace(v, goodput={s: float(a * s.num_devices**p) for s in offered})
        for v, a, p in zip(views, scale, power, strict=True)
    ]
    return ShapeProblem.of(filled, cluster, 0.0)


def best_by_enumeration(problem: ShapeProblem, utility: np.ndarray) -> float:
    """The greatest utility of a choice that can be placed: a column for every placement of every shape."""
    nodes = problem.cluster.nodes
    size = node_size(problem.cluster)["a"]
    columns: list[tuple[int, float, np.ndarray]] = []
    for job, view in enumerate(problem.jobs):
        for index, shape in enumerate(problem.shapes):
            if np.isnan(utility[job, index]):
                continue
            seen = set()
            for where in itertools.permutations(range(len(nodes)), shape.num_nodes):
                racks = {domain_of(nodes[n], "rack") for n in where}
                if view.spec.level and len(racks) > 1:
                    continue
                use = np.zeros(len(nodes))
                use[list(where)] = chunks(shape, size)
                if tuple(use) not in seen:
                    seen.add(tuple(use))
                    columns.append((job, utility[job, index], use))
    if not columns:
        return 0.0
    job = np.array([j for j, _, _ in columns])
    rows = np.vstack(
        [
            np.stack([use for _, _, use in columns], 1),
            job[None, :] == np.arange(len(problem.jobs))[:, None],
        ]
    )
    most = np.r_[[n.num_usable for n in nodes], np.ones(len(problem.jobs))]
    found = optimize.milp(
        -np.array([value for _, value, _ in columns]),
        integrality=np.ones(len(columns)),
        bounds=(0, 1),
        constraints=(rows, -np.inf, most),
        options={"mip_rel_gap": 0.0},
    )
    return -float(found.fun)


def free_choice(problem: ShapeProblem) -> Promises:
    nothing = np.full(len(problem.jobs), -1)
    return Promises(nothing, nothing > 0, np.ones(problem.goodput.shape, bool), nothing)


def rules(problem: ShapeProblem) -> PlacingRules:
    return PlacingRules(move_cost=np.zeros(len(problem.jobs)), relative_gap=1e-3, time_limit_s=5.0)


def check_placed(problem: ShapeProblem, found: placeable.PlacedChoice) -> None:
    nodes = {node.name: node for node in problem.cluster.nodes}
    taken: set[tuple[str, int]] = set()
    for view, index in zip(problem.jobs, found.choice.shape, strict=True):
        given = found.allocations.get(view.spec.id)
        assert (given is not None) == (index >= 0)
        if given is None:
            continue
        assert given.num_devices == problem.shapes[index].num_devices
        assert given.num_nodes == problem.shapes[index].num_nodes
        here = {(name, i) for name, local in given.devices.items() for i in local}
        assert not here & taken
        assert all(i not in nodes[name].withheld for name, i in here)
        taken |= here
        if view.spec.level:
            assert len({domain_of(nodes[name], view.spec.level) for name in given.devices}) == 1


def gaps(seeds: range) -> np.ndarray:
    """How far the choice of each world lies below the best that can be placed, relatively."""
    found = []
    for seed in seeds:
        problem = world(seed)
        utility = problem.goodput
        placed = choose_placeable(problem, utility, free_choice(problem), rules(problem))
        check_placed(problem, placed)
        best = best_by_enumeration(problem, utility)
        assert placed.choice.objective <= best * (1 + 1e-9) + 1e-9, seed
        found.append(1.0 - placed.choice.objective / best if best > 0 else 0.0)
    return np.array(found)


@pytest.mark.parametrize(
    "seeds", [range(50), pytest.param(range(50, 300), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_the_choice_is_the_best_that_can_be_placed(seeds):
    found = gaps(seeds)
    assert (found <= 0.005).all(), np.flatnonzero(found > 0.005)
    assert (found <= 1e-9).mean() >= 0.95


def test_without_the_program_every_chosen_job_is_still_placed(monkeypatch):
    monkeypatch.setattr(placeable, "solve_jointly", lambda *_: None)
    found = gaps(range(40))
    assert found.mean() <= 0.03


def four(**labels) -> ClusterSpec:
    return ClusterSpec(
        nodes=tuple(Node(name=f"n{i}", kind="a", num_devices=4, labels=labels) for i in range(4))
    )


def rigid(id_: str, size: int, devices: dict | None = None, **fields) -> JobView:
    spec = JobSpec(id=id_, mode="rigid", num_devices=size)
    began = {"since_s": -5000.0, "submitted_s": -5000.0} if devices else {}
    return JobView(spec=spec, allocation=Allocation(devices=devices or {}), **{**began, **fields})


@pytest.mark.parametrize("restart_s", [10.0, 20000.0])
def test_small_jobs_move_for_a_gang_only_if_it_is_worth_their_restarts(restart_s):
    small = [rigid(f"s{i}", 1, {f"n{i}": (0,)}, restart_s=restart_s) for i in range(4)]
    plan = reconcile([*small, rigid("gang", 4)], four(), Goodput(), 0.0)
    assert bool(plan.allocations["gang"].devices) == (restart_s < 100.0)
    moved = [v for v in small if plan.allocations[v.spec.id].devices != v.allocation.devices]
    assert len(moved) == (1 if restart_s < 100.0 else 0)
    assert restart_s < 100.0 or "not together" in plan.reasons["gang"]


def test_a_job_that_restarts_keeps_its_shape_when_others_are_chosen_again(monkeypatch):
    """Gangs of two nodes in racks of three, beside a job that is restarting and could grow."""
    seen = []
    monkeypatch.setattr(
        placeable,
        "solve_jointly",
        lambda *a, real=placeable.solve_jointly: seen.append(a) or real(*a),
    )
    spec = JobSpec(id="restarts", mode="elastic", min_devices=2, max_devices=4)
    restarts = JobView(
        spec=spec,
        allocation=Allocation(devices={"n0": (0, 1)}),
        since_s=-5.0,
        restoring_until_s=60.0,
        restart_s=65.0,
    )
    racks = ClusterSpec(
        nodes=tuple(
            Node(name=f"n{i}", kind="a", num_devices=4, labels={"rack": f"r{i // 3}"})
            for i in range(7)
        )
    )
    gangs = [rigid(f"g{i}", 8) for i in range(3)]
    gangs = [dataclasses.replace(v, spec=dataclasses.replace(v.spec, level="rack")) for v in gangs]
    plan = reconcile([restarts, *gangs], racks, Goodput(), 0.0)
    assert seen  # the first choice has three gangs, of which one fits into each rack
    assert plan.allocations["restarts"] is restarts.allocation
    assert sum(bool(plan.allocations[v.spec.id].devices) for v in gangs) == 2
