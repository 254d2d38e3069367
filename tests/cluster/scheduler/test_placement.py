"""Placement: the theorem of no fragmentation, and that nobody moves without need."""

import dataclasses
import importlib
import itertools
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from worlds import cluster_of, nodes

from jaxgoodput.cluster.scheduler.placement import board, placement
from jaxgoodput.cluster.scheduler.placement.board import Board, Request
from jaxgoodput.cluster.scheduler.placement.fewest_moves import fewest_moves
from jaxgoodput.cluster.scheduler.placement.least_price import least_price
from jaxgoodput.cluster.scheduler.placement.placement import place
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.shapes import capacity_rows, chunks, shape_of, shapes
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node, Shape


def even(count: int, size: int = 8, kind: str = "a") -> ClusterSpec:
    return ClusterSpec(
        nodes=tuple(Node(name=f"{kind}{i:03}", kind=kind, num_devices=size) for i in range(count))
    )


def view(
    id_: str, allocation: Allocation | None = None, *, restart_s: float = 30.0, **spec
) -> JobView:
    return JobView(
        spec=JobSpec(id=id_, **spec),
        allocation=allocation or Allocation(),
        restart_s=restart_s,
    )


def on(generation: int = 1, /, **devices: tuple[int, ...]) -> Allocation:
    return Allocation(devices=devices, generation=generation)


def check(placed, wanted, cluster):
    """Exactly the wanted shapes, on devices that exist, none twice."""
    kinds = {node.name: node.kind for node in cluster.nodes}
    by_name = {node.name: node for node in cluster.nodes}
    taken: set[tuple[str, int]] = set()
    for job, allocation in placed.items():
        assert shape_of(allocation.devices, kinds) == wanted[job]
        for name, local in allocation.devices.items():
            assert by_name[name].state != "down"
            assert set(local) <= set(range(by_name[name].num_devices)) - set(by_name[name].withheld)
            assert not taken & {(name, i) for i in local}
            taken |= {(name, i) for i in local}


def choose(cluster: ClusterSpec, columns: list[int], prefix: str = "j") -> dict[str, Shape]:
    """As many of these shapes, by index, as the rows say can be placed."""
    offered = shapes(cluster)
    if not offered:
        return {}
    rows = capacity_rows(cluster, offered)
    left = rows.limits.copy()
    wanted = {}
    for number, column in enumerate(columns):
        column %= len(offered)
        if (rows.matrix[:, column] <= left).all():
            left -= rows.matrix[:, column]
            wanted[f"{prefix}{number}"] = offered[column]
    return wanted


@settings(max_examples=300, deadline=None)
@given(nodes(), st.lists(st.lists(st.integers(0, 60), max_size=30), min_size=1, max_size=4))
def test_whatever_satisfies_the_rows_is_placed_without_fragmentation(nodes, rounds):
    """The theorem, afresh and with all that was there before; odd nodes and defects included."""
    cluster = cluster_of(nodes)
    present: dict[str, Allocation] = {}
    for columns in rounds:
        wanted = choose(cluster, columns)
        jobs = [view(job, present.get(job)) for job in wanted]
        placed = place(wanted, jobs, cluster)
        assert placed.keys() == wanted.keys()
        check(placed, wanted, cluster)
        assert placed == place(wanted, jobs, cluster)
        for job, allocation in placed.items():
            before = present.get(job, Allocation())
            assert allocation.generation == before.generation + (
                allocation.devices != before.devices
            )
        present = placed


def test_nobody_moves_where_the_rest_fits():
    cluster = even(2, 4)
    jobs = [view("stays", on(a000=(1,))), view("new")]
    placed = place({"stays": Shape("a", 1, 1), "new": Shape("a", 1, 4)}, jobs, cluster)
    assert placed["stays"] is jobs[0].allocation
    assert placed["new"] == on(1, a001=(0, 1, 2, 3))


def test_the_cheaper_job_gives_way():
    cluster = even(2, 4)
    jobs = [
        view("dear", on(a000=(0,)), restart_s=300.0),
        view("cheap", on(a001=(2,)), restart_s=5.0),
        view("new"),
    ]
    wanted = {"dear": Shape("a", 1, 1), "cheap": Shape("a", 1, 1), "new": Shape("a", 1, 4)}
    placed = place(wanted, jobs, cluster)
    assert placed["dear"] is jobs[0].allocation
    assert placed["cheap"] == Allocation(
        devices={"a000": placed["cheap"].devices["a000"]}, generation=2
    )
    assert set(placed["new"].devices) == {"a001"}


def fewest_by_search(wanted, jobs, cluster):
    """The least total price of moves, by trying all sets of jobs that stay."""
    stays = [v for v in jobs if v.allocation.devices and v.spec.id in wanted]
    best = np.inf
    for flags in itertools.product([True, False], repeat=len(stays)):
        price = sum(v.restart_s for v, stay in zip(stays, flags, strict=True) if not stay)
        if price >= best:
            continue
        used: dict[str, set[int]] = {}
        for v, stay in zip(stays, flags, strict=True):
            if stay:
                for name, local in v.allocation.devices.items():
                    used.setdefault(name, set()).update(local)
        left = ClusterSpec(
            nodes=tuple(
                dataclasses.replace(n, withheld=tuple(sorted(used.get(n.name, ()))))
                for n in cluster.nodes
            )
        )
        fixed = {v.spec.id for v, stay in zip(stays, flags, strict=True) if stay}
        rest = {job: shape for job, shape in wanted.items() if job not in fixed}
        if len(place(rest, [view(job) for job in rest], left)) == len(rest):
            best = price
    return best


def scattered(draw: random.Random, cluster: ClusterSpec, most_old: int, most_new: int):
    """Jobs on devices here and there, and new ones for all that is free: which, and their shapes."""
    size_of_node = cluster.nodes[0].num_devices
    free = [(node.name, i) for node in cluster.nodes for i in range(size_of_node)]
    jobs, wanted = [], {}
    for number in range(draw.randint(2, most_old)):
        if not free:
            break
        name, i = free.pop(draw.randrange(len(free)))
        count = draw.choice([1, 1, 2])
        mine = [i] + [j for n, j in free if n == name][: count - 1]
        free = [(n, j) for n, j in free if n != name or j not in mine]
        jobs.append(
            view(
                f"old{number}",
                on(1, **{name: tuple(sorted(mine))}),
                restart_s=draw.choice([1.0, 5.0, 7.0]),
            )
        )
        wanted[f"old{number}"] = Shape("a", 1, len(mine))
    left = len(free)
    for number in range(most_new):
        size = draw.choice([4, 4, 2, 8, 1])
        if size <= left:
            left -= size
            wanted[f"new{number}"] = Shape("a", max(1, size // size_of_node), size)
            jobs.append(view(f"new{number}"))
    return jobs, wanted


@settings(max_examples=60, deadline=None)
@example(1953)  # so many jobs that nothing is free
@given(st.integers(0, 10**6))
def test_moves_are_the_cheapest(seed):
    cluster = even(3, 4)
    jobs, wanted = scattered(random.Random(seed), cluster, 7, 4)
    placed = place(wanted, jobs, cluster)
    assert placed.keys() == wanted.keys()
    check(placed, wanted, cluster)
    price = sum(
        v.restart_s for v in jobs if v.allocation.devices and placed[v.spec.id] is not v.allocation
    )
    assert price == fewest_by_search(wanted, jobs, cluster)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([4, 6, 8]), st.booleans())
def test_no_moves_that_make_room_cost_less_than_the_least_price(seed, size, odd):
    draw = random.Random(seed)
    cluster = even(draw.randint(2, 6), size)
    board = Board(cluster.nodes)
    for node in cluster.nodes:
        left = list(range(size))
        while left and draw.random() < 0.8:
            mine, left = left[: (n := draw.choice([1, 1, 2, 3 if odd else 4]))], left[n:]
            key = f"{node.name}-{len(left)}"
            shape = Shape("a", 1, len(mine))
            price, its = draw.choice([1.0, 5.0, 7.0]), {node.name: tuple(mine)}
            assert board.keep(Request(key=key, shape=shape, price=price, previous=its, keeps=True))
    room, pending = int(board.free.sum()), []
    while room and len(pending) < 8:
        n = min(room, draw.choice([size, 4, 4, 2, 3 if odd else 2, 1]))
        room, key = room - n, f"new-{len(pending)}"
        shape = Shape("a", 1, n)
        pending.append(Request(key=key, shape=shape, price=1.0, previous={}, keeps=False))
    gone = fewest_moves(board, pending, time_limit_s=60.0) if pending else None
    if gone is not None:
        price = float(sum(board.requests[key].price for key in gone))
        for most in (np.inf, price, 6.0):
            assert least_price(board, pending, most) <= min(price, most)


def test_fewer_programs_are_solved_and_everything_is_placed_as_with_all_of_them(monkeypatch):
    """A program that cannot find cheaper moves, by the least price, would not have changed anything."""
    module = importlib.import_module(fewest_moves.__module__)
    solve, programs, cluster, answers = module._solve, [], even(30), {}
    monkeypatch.setattr(module, "_solve", lambda **its: programs.append(1) or solve(**its))
    for is_bounded in (True, False):
        if not is_bounded:
            monkeypatch.setattr(module, "least_price", lambda *_: 0.0)
        programs.clear()
        worlds = [scattered(random.Random(seed), cluster, 100, 60) for seed in range(5)]
        placed = [place(wanted, jobs, cluster, time_limit_s=60.0) for jobs, wanted in worlds]
        answers[is_bounded] = len(programs), placed
    assert answers[True][0] < answers[False][0]
    assert answers[True][1] == answers[False][1]


def churn(cluster: ClusterSpec, count: int, rounds: int, seed: int):
    """Jobs come, go, grow and shrink on a full cluster; how many keep shape, and how many of them devices."""
    draw = random.Random(seed)
    kinds = {node.name: node.kind for node in cluster.nodes}
    capacity = sum(node.num_devices for node in cluster.nodes)
    jobs: dict[str, tuple[int, Allocation]] = {}
    number = stayed = kept = 0
    for _ in range(rounds):
        jobs = {job: entry for job, entry in jobs.items() if draw.random() > 0.1}
        while len(jobs) < count:
            jobs[f"j{number}"] = (draw.choice([1, 1, 1, 1, 2, 2, 2, 4, 4, 8, 16]), Allocation())
            number += 1
        for job, (size, allocation) in jobs.items():
            if draw.random() < 0.1:
                jobs[job] = (max(1, min(64, draw.choice([2 * size, size // 2]))), allocation)
        wanted, left = {}, capacity
        for job, (size, _) in sorted(jobs.items(), key=lambda e: not e[1][1].devices):
            if size <= left:
                left -= size
                wanted[job] = Shape("a", max(1, size // 8), size)
        placed = place(wanted, [view(job, entry[1]) for job, entry in jobs.items()], cluster)
        check(placed, wanted, cluster)
        assert placed.keys() == wanted.keys()
        for job in wanted:
            allocation = jobs[job][1]
            if allocation.devices and shape_of(allocation.devices, kinds) == wanted[job]:
                stayed += 1
                kept += placed[job] is allocation
        jobs = {job: (size, placed.get(job, Allocation())) for job, (size, _) in jobs.items()}
    return kept / stayed


def test_at_least_95_of_100_jobs_that_keep_their_shape_keep_their_devices():
    assert churn(even(8), 40, 60, seed=0) >= 0.95


def test_the_greedy_way_also_places_everything(monkeypatch):
    monkeypatch.setattr(placement, "fewest_moves", lambda *_, **__: None)
    assert churn(even(8), 40, 30, seed=1) >= 0.93


def test_a_draining_node_is_only_for_those_who_are_there():
    draining = dataclasses.replace(even(1, 4).nodes[0], state="draining")
    cluster = ClusterSpec(nodes=(draining, Node(name="up", kind="a", num_devices=4)))
    jobs = [view("old", on(a000=(3,))), view("new"), view("newer")]
    wanted = dict.fromkeys(("old", "new", "newer"), Shape("a", 1, 1)) | {"new": Shape("a", 1, 4)}
    placed = place(wanted, jobs, cluster)
    assert placed["old"] is jobs[0].allocation
    assert set(placed["new"].devices) == {"up"} and "newer" not in placed


def test_a_resized_job_stays_on_its_node_and_devices_where_it_costs_nothing():
    cluster = even(4, 4)
    placed = place({"x": Shape("a", 1, 2)}, [view("x", on(a002=(3,)))], cluster)
    assert placed["x"] == on(2, a002=(2, 3))
    placed = place({"x": Shape("a", 1, 2)}, [view("x", on(a002=(0, 1, 2, 3)))], cluster)
    assert placed["x"].devices in ({"a002": (0, 1)}, {"a002": (2, 3)})


def test_afresh_nothing_is_kept():
    jobs = [view("x", on(a001=(3,)))]
    assert place({"x": Shape("a", 1, 1)}, jobs, even(2), keep=False)["x"] == on(2, a000=(0,))


def test_a_job_spread_over_more_nodes_than_its_shape_is_gathered():
    jobs = [view("x", on(a000=(0,), a001=(0,)))]
    assert place({"x": Shape("a", 1, 2)}, jobs, even(2))["x"].num_nodes == 1
    spread = place({"x": Shape("a", 2, 2)}, jobs, even(2))
    assert spread["x"] is jobs[0].allocation


def test_what_does_not_fit_is_left_out_and_the_rest_is_placed():
    jobs = [view(f"j{i}") for i in range(4)]
    placed = place({f"j{i}": Shape("a", 1, 3) for i in range(4)}, jobs, even(3, 4))
    assert len(placed) == 3
    assert place({"j0": Shape("z", 1, 1), "j1": Shape("a", 1, 1)}, jobs, even(1)).keys() == {"j1"}
    with pytest.raises(ValueError, match="'k', which is not among the 4 jobs"):
        place({"k": Shape("a", 1, 1)}, jobs, even(1))


def test_a_share_group_has_one_set_of_devices():
    jobs = [view("x"), view("y", on(a000=(5,))), view("z")]
    wanted: dict[str, Shape] = dict.fromkeys(["x", "y", "z"], Shape("a", 1, 1))
    placed = place(wanted, jobs, even(1), share_groups={"x": "g", "y": "g"})
    assert placed["x"].devices == placed["y"].devices == {"a000": (5,)}
    assert placed["x"].share_group == "g" and placed["y"].generation == 2
    assert placed["z"].devices != placed["x"].devices
    with pytest.raises(ValueError, match="give all of them one shape"):
        place(wanted | {"x": Shape("a", 1, 2)}, jobs, even(1), share_groups={"x": "g", "y": "g"})


def racks(*labels: str) -> ClusterSpec:
    return ClusterSpec(
        nodes=tuple(
            dataclasses.replace(node, labels={"rack": label})
            for node, label in zip(even(len(labels), 4).nodes, labels, strict=True)
        )
    )


def test_a_level_keeps_a_job_within_one_domain():
    cluster = racks("r", "s", "r", "s", "s")
    jobs = [view("x", level="rack"), view("small", on(a000=(0,)))]
    wanted = {"x": Shape("a", 2, 8), "small": Shape("a", 1, 1)}
    placed = place(wanted, jobs, cluster)
    assert {int(name[1:]) % 2 if name != "a004" else 1 for name in placed["x"].devices} == {1}
    assert placed["small"] is jobs[1].allocation


def test_a_level_makes_others_give_way():
    cluster = racks("r", "s", "r", "s")
    jobs = [
        view("x", level="rack"),
        view("one", on(a000=(0,))),
        view("two", on(a001=(0,)), restart_s=1.0),
    ]
    wanted = {"x": Shape("a", 2, 8), "one": Shape("a", 1, 1), "two": Shape("a", 1, 1)}
    placed = place(wanted, jobs, cluster)
    assert set(placed["x"].devices) == {"a001", "a003"}
    assert placed["one"] is jobs[1].allocation and placed["two"].devices.keys() <= {"a000", "a002"}


def test_one_job_of_several_nodes_per_node():
    jobs = [view("x"), view("y")]
    wanted = {"x": Shape("a", 2, 6), "y": Shape("a", 2, 6)}  # 4 + 2 each
    shared = place(wanted, jobs, even(3, 4))
    assert len(shared) == 2 and len(shared["x"].devices.keys() & shared["y"].devices.keys()) == 1
    alone = place(wanted, jobs, even(4, 4), one_multi_node_job_per_node=True)
    assert not alone["x"].devices.keys() & alone["y"].devices.keys()
    assert len(place(wanted, jobs, even(3, 4), one_multi_node_job_per_node=True)) == 1


def test_parts_of_shapes():
    assert chunks(Shape("a", 1, 3), 8) == [3]
    assert chunks(Shape("a", 3, 24), 8) == [8, 8, 8]
    assert chunks(Shape("a", 2, 12), 8) == [8, 4]
    assert chunks(Shape("a", 4, 6), 8) == [2, 2, 1, 1]


# Which holders of devices, CPUs and memory to evict.

HOLDERS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9), st.integers(0, 5)),
    max_size=8,
)


@pytest.mark.parametrize("few", [0, 100])
@given(HOLDERS, st.tuples(*[st.integers(0, 15)] * 3))
@settings(max_examples=60, deadline=None)
def test_the_cheapest_holders_with_what_is_lacking_are_evicted(few, holders, lacks):
    named = [(f"h{i}", its[:3], float(its[3])) for i, its in enumerate(holders)]
    enough = [
        sum(price for _, _, price in some)
        for count in range(len(named) + 1)
        for some in itertools.combinations(named, count)
        if all(sum(its[at] for _, its, _ in some) >= lacks[at] for at in range(3))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(board, "_FEW_STATES", few)
        found = board._cheapest_of(named, lacks)
    if found is None:
        assert not enough
        return
    price, keys = found
    assert price == min(enough) == sum(cost for key, _, cost in named if key in keys)
    assert all(sum(its[at] for key, its, _ in named if key in keys) >= lacks[at] for at in range(3))


@pytest.mark.parametrize("most", [board.MOST_STATES, 20])
def test_the_number_of_states_is_bounded_however_many_jobs_hold_devices(monkeypatch, most):
    rng = np.random.default_rng(0)
    holders = [
        (f"h{i:02}", tuple(map(int, rng.integers(1, (5, 10**7, 10**6)))), float(rng.uniform(1, 9)))
        for i in range(24)
    ]
    lacks = tuple(sum(its[at] for _, its, _ in holders) // 2 for at in range(3))
    best = board._cheapest_of(holders, lacks)
    sizes: list[int] = []
    real = board._undominated

    def counted(states):
        kept = real(states)
        sizes.append(len(kept))
        return kept

    monkeypatch.setattr(board, "MOST_STATES", most)
    monkeypatch.setattr(board, "_FEW_STATES", 10)
    monkeypatch.setattr(board, "_undominated", counted)
    found = board._cheapest_of(holders, lacks)
    assert best is not None and found is not None
    price, keys = found
    assert len(sizes) == 24 and max(sizes) <= most
    assert price == best[0] if most > 20 else best[0] <= price <= 1.5 * best[0]
    assert all(
        sum(its[at] for key, its, _ in holders if key in keys) >= lacks[at] for at in range(3)
    )
