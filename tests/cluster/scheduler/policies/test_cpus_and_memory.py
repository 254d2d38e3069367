"""CPUs and memory are kept like devices: never exceeded, never a reason to idle, and named by `explain`."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from jaxgoodput.cluster.catalogue import catalogue
from jaxgoodput.cluster.published.baselines import Tiresias
from jaxgoodput.cluster.scheduler.explain import explain
from jaxgoodput.cluster.scheduler.limits import amount_limits
from jaxgoodput.cluster.scheduler.placement.amounts import amounts_of, used_by_node
from jaxgoodput.cluster.scheduler.policies import placeable
from jaxgoodput.cluster.scheduler.policies.goodput import Goodput
from jaxgoodput.cluster.scheduler.policies.placeable import PlacingRules, choose_placeable
from jaxgoodput.cluster.scheduler.policies.promises import Promises
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policy import JobView, Plan
from jaxgoodput.cluster.scheduler.priors import Priors
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.cluster.scheduler.shapes import chunks, node_size, shapes
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node, Shape

GENERAL = {name: one for name, one in catalogue().items() if not one.one_kind and not one.sharing}
AMOUNTS = (("cpus", "cpus_per_device"), ("memory_gib", "memory_gib_per_device"))
ENOUGH = 1e9

# Time for the solver: the laws are not about the speed of this machine.
PATIENT = Goodput(time_limit_s=300.0)


@pytest.fixture(autouse=True, scope="module")
def patient():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placeable, "JOINT_TIME_S", 300.0)
        yield


NODES = st.lists(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["a", "a", "b"]),
            "num_devices": st.sampled_from([2, 4, 8]),
            "cpus": st.sampled_from([None, 4.0, 10.0, 32.0, 64.5]),
            "memory_gib": st.sampled_from([None, 16.0, 100.0, 256.0]),
        }
    ),
    min_size=1,
    max_size=3,
)
JOBS = st.lists(
    st.fixed_dictionaries(
        {
            "min_devices": st.integers(1, 5),
            "more": st.sampled_from([0, 0, 1, 4]),
            "cpus_per_device": st.sampled_from([0.0, 0.5, 1.0, 4.0, 6.3, 12.0]),
            "memory_gib_per_device": st.sampled_from([0.0, 8.0, 30.0]),
            "preferred_kinds": st.sampled_from([None, ("a",), ("b",)]),
        }
    ),
    min_size=1,
    max_size=7,
)


def cluster_of(nodes: list[dict]) -> ClusterSpec:
    return ClusterSpec(
        nodes=tuple(Node(**{"name": f"n{i}", "kind": "a", **n}) for i, n in enumerate(nodes))
    )


def views_of(jobs: list[dict], first: int = 0) -> list[JobView]:
    views = []
    for i, job in enumerate(jobs):
        its = dict(job)
        more = its.pop("more")
        spec = JobSpec(
            id=f"j{first + i}", mode="elastic", max_devices=its["min_devices"] + more, **its
        )
        views.append(JobView(spec=spec, restart_s=10.0))
    return views


def room(cluster: ClusterSpec, views: list[JobView], plan: Plan) -> dict[str, list[float]]:
    """What is left of each node: devices, CPUs, memory."""
    left = {
        n.name: [n.num_devices, *(ENOUGH if has is None else has for has in (n.cpus, n.memory_gib))]
        for n in cluster.nodes
    }
    for view in views:
        for name, local in plan.allocations[view.spec.id].devices.items():
            left[name][0] -= len(local)
            for at, (_, per_device) in enumerate(AMOUNTS, 1):
                left[name][at] -= getattr(view.spec, per_device) * len(local)
    return left


def could_start(
    view: JobView, shape: Shape, left: dict[str, list[float]], cluster: ClusterSpec
) -> bool:
    """Whether the parts of a shape fit on different nodes beside what is there."""
    parts = chunks(shape, node_size(cluster)[shape.kind])
    there = [node.name for node in cluster.nodes if node.kind == shape.kind]
    for where in itertools.permutations(there, len(parts)):
        if all(
            left[name][0] >= part
            and all(
                left[name][at] >= getattr(view.spec, per_device) * part - 1e-6
                for at, (_, per_device) in enumerate(AMOUNTS, 1)
            )
            for name, part in zip(where, parts, strict=True)
        ):
            return True
    return False


def check(cluster: ClusterSpec, views: list[JobView], plan: Plan) -> None:
    left = room(cluster, views, plan)
    for name, its in left.items():
        assert min(its) >= -1e-6, (name, its)
    for view in views:
        if plan.allocations[view.spec.id].devices or plan.reasons[view.spec.id].startswith(
            "refused"
        ):
            continue
        offered = ShapeProblem.of([Priors(cluster).with_table(view)], cluster, 0.0)
        for column in offered.sizes(0):
            assert not could_start(view, offered.shapes[column], left, cluster), view.spec


@pytest.mark.parametrize("programs", [True, False], ids=["exact", "in turn"])
@given(NODES, JOBS, JOBS)
@settings(max_examples=40, deadline=None)
def test_no_amount_is_exceeded_and_nothing_idles_that_a_job_could_use(programs, nodes, jobs, later):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("solve_jointly", "solve_by_node") if not programs else ():
            patch.setattr(placeable, name, lambda *_: None)
        check_twice(nodes, jobs, later)


def check_twice(nodes: list[dict], jobs: list[dict], later: list[dict]) -> None:
    """Check a plan, and the next one after more jobs have come."""
    cluster, views = cluster_of(nodes), views_of(jobs)
    plan = reconcile(views, cluster, PATIENT, 0.0)
    check(cluster, views, plan)
    running = [
        dataclasses.replace(
            view,
            allocation=given,
            since_s=0.0 if given.devices else None,
            received_s={"any": 5000.0 * given.num_devices},
        )
        for view in views
        if (given := plan.allocations[view.spec.id]) is not None
    ]
    both = [
        *running,
        *(dataclasses.replace(v, submitted_s=5000.0) for v in views_of(later, len(views))),
    ]
    check(cluster, both, reconcile(both, cluster, PATIENT, 5000.0))


@pytest.mark.parametrize("name", GENERAL)
@given(NODES, JOBS)
@settings(max_examples=8, deadline=None)
def test_no_policy_exceeds_an_amount(name, nodes, jobs):
    cluster = cluster_of(nodes)
    views = [Priors(cluster).with_table(v) for v in views_of(jobs)]
    if GENERAL[name].largest_gang is not None:
        views = [v for v in views if v.spec.min_devices == 1]
    plan = reconcile(views, cluster, GENERAL[name].policy, 0.0)
    assert all(min(its) >= -1e-6 for its in room(cluster, views, plan).values())


@pytest.mark.parametrize("name", [n for n, entry in catalogue().items() if entry.one_kind])
@pytest.mark.parametrize("needs", [{"cpus_per_device": 1.0}, {"memory_gib_per_device": 2.0}])
def test_a_policy_that_knows_devices_only_refuses_a_job_with_needs_and_plans_the_others(
    name, needs
):
    cluster, policy = cluster_of([{"num_devices": 4, "cpus": 4.0}]), catalogue()[name].policy
    two = {"min_devices": 2, "max_devices": 2}
    views = [job("needs", 1, **needs), job("plain", 2, **two), job("later", 2, **two)]
    views = [dataclasses.replace(Priors(cluster).with_table(v), remaining=100.0) for v in views]
    plan = reconcile(views, cluster, policy, 7200.0)
    assert {id_ for id_, given in plan.allocations.items() if given.devices} == {"plain", "later"}
    assert "knows devices only. Submit it without cpus_per_device" in plan.reasons["needs"]
    found = explain("needs", views, cluster, policy, 7200.0, plan=plan)
    assert found.constraint == "refused" and found.message == plan.reasons["needs"]
    unlimited = cluster_of([{"num_devices": 4}])
    assert reconcile(views[:1], unlimited, policy, 7200.0).start == ("needs",)


def test_a_policy_that_knows_devices_only_lets_a_job_with_needs_end_that_may_not_be_stopped():
    runs = dataclasses.replace(
        job("runs", 1, cpus_per_device=1.0, preemptible=False),
        allocation=Allocation(devices={"n0": (0,)}),
        since_s=0.0,
    )
    cluster = cluster_of([{"num_devices": 4, "cpus": 4.0}])
    plan = reconcile([runs, job("plain", 3)], cluster, Tiresias(), 10.0)
    assert plan.start == ("plain",) and not plan.pause


def test_a_policy_that_knows_devices_only_raises_if_it_is_asked_directly():
    cluster = cluster_of([{"num_devices": 4, "cpus": 4.0}])
    with pytest.raises(ValueError, match="knows devices only, but job 'a' needs CPUs or memory"):
        Tiresias()([job("a", 1, cpus_per_device=1.0)], cluster, 0.0)


@given(NODES, JOBS)
@settings(max_examples=25, deadline=None)
def test_a_job_waits_for_ever_only_if_it_is_refused_at_once(nodes, jobs):
    """Each job that is not refused runs if it is alone, and a refused one does not."""
    cluster = cluster_of(nodes)
    for view in views_of(jobs):
        plan = reconcile([view], cluster, PATIENT, 0.0)
        refused = plan.reasons[view.spec.id].startswith("refused")
        assert bool(plan.allocations[view.spec.id].devices) != refused
        empty = {
            n.name: [n.num_devices, *(ENOUGH if x is None else x for x in (n.cpus, n.memory_gib))]
            for n in cluster.nodes
        }
        table = Priors(cluster).with_table(view).goodput
        fits = any(
            could_start(view, shape, empty, cluster)
            for shape in table
            if view.spec.min_devices <= shape.num_devices <= view.spec.max_devices
        )
        assert fits != refused


@given(NODES, JOBS, st.booleans())
@settings(max_examples=25, deadline=None)
def test_needs_or_numbers_alone_change_nothing(nodes, jobs, without_needs):
    bare = {"cpus_per_device": 0.0, "memory_gib_per_device": 0.0}
    plain_nodes = [{**n, "cpus": None, "memory_gib": None} for n in nodes]
    plain_jobs = [{**job, **bare} for job in jobs]
    expected = reconcile(views_of(plain_jobs), cluster_of(plain_nodes), PATIENT, 0.0)
    found = reconcile(
        views_of(plain_jobs if without_needs else jobs),
        cluster_of(nodes if without_needs else plain_nodes),
        PATIENT,
        0.0,
    )
    assert found == expected


# The objective, against the best of all placements.


def world(seed: int, is_crowded: bool = False) -> ShapeProblem:
    """Up to 3 nodes with different CPUs and memory, and jobs that need them.

    In a crowded world there are many jobs, all of different needs: too many patterns of a node.
    """
    rng = np.random.default_rng([seed, 0x63707573])
    size = 8 if is_crowded else int(rng.choice([4, 8]))
    chance = 0.0 if is_crowded else 0.2
    nodes = tuple(
        Node(
            name=f"n{i}",
            kind="a",
            num_devices=size,
            cpus=None if rng.random() < chance else float(rng.integers(size, 6 * size)),
            memory_gib=None if rng.random() < chance else float(rng.integers(4, 32) * size),
        )
        for i in range(3 if is_crowded else int(rng.integers(1, 4)))
    )
    cluster = ClusterSpec(nodes=nodes)
    views = []
    for i in range(int(rng.integers(10, 20) if is_crowded else rng.integers(2, 8))):
        least = int(rng.integers(1, 6 if is_crowded else size + 1))
        some = (float(rng.choice([0, 1, 2.5, 4, 7])), float(rng.choice([0, 0, 8, 24])))
        any_ = (round(rng.uniform(0.0, 8.0), 1), float(rng.integers(0, 30)))
        cpus, memory_gib = any_ if is_crowded else some
        spec = JobSpec(
            id=f"j{i}",
            mode="elastic",
            min_devices=least,
            max_devices=least + int(rng.choice([0, 1, 3])),
            cpus_per_device=cpus,
            memory_gib_per_device=memory_gib,
        )
        views.append(JobView(spec=spec))
    scale, power = rng.uniform(0.3, 3.0, len(views)), rng.uniform(0.2, 1.0, len(views))
    offered = shapes(cluster, views)
    filled = [
        dataclasses.replace(v, goodput={s: float(a * s.num_devices**p) for s in offered})
        for v, a, p in zip(views, scale, power, strict=True)
    ]
    return ShapeProblem.of(filled, cluster, 0.0)


def best_by_enumeration(problem: ShapeProblem) -> float:
    """The greatest utility of a choice that can be placed: a column for every placement of every shape."""
    nodes, size = problem.cluster.nodes, node_size(problem.cluster)["a"]
    columns: list[tuple[int, float, np.ndarray]] = []
    for job, view in enumerate(problem.jobs):
        needs = np.array([1.0, view.spec.cpus_per_device, view.spec.memory_gib_per_device])
        for index in problem.sizes(job):
            shape, seen = problem.shapes[index], set()
            for where in itertools.permutations(range(len(nodes)), shape.num_nodes):
                use = np.zeros((len(nodes), 3))
                use[list(where)] = np.array(chunks(shape, size))[:, None] * needs
                if use.tobytes() not in seen:
                    seen.add(use.tobytes())
                    columns.append((job, problem.goodput[job, index], use.ravel()))
    if not columns:
        return 0.0
    job = np.array([j for j, _, _ in columns])
    rows = np.vstack(
        [
            np.stack([use for _, _, use in columns], 1),
            job[None, :] == np.arange(len(problem.jobs))[:, None],
        ]
    )
    has = [
        [n.num_usable, *(ENOUGH if x is None else x for x in (n.cpus, n.memory_gib))] for n in nodes
    ]
    found = optimize.milp(
        -np.array([value for _, value, _ in columns]),
        integrality=np.ones(len(columns)),
        bounds=(0, 1),
        constraints=(rows, -np.inf, np.r_[np.ravel(has), np.ones(len(problem.jobs))]),
        options={"mip_rel_gap": 0.0},
    )
    return -float(found.fun)


def gaps(seeds: range, is_crowded: bool = False) -> np.ndarray:
    """How far the choice of each world lies below the best that can be placed, relatively."""
    found = []
    for seed in seeds:
        problem = world(seed, is_crowded)
        nothing = np.full(len(problem.jobs), -1)
        every = np.ones(problem.goodput.shape, bool)
        rules = PlacingRules(
            move_cost=np.zeros(len(problem.jobs)), relative_gap=1e-3, time_limit_s=300.0
        )
        chosen = choose_placeable(
            problem, problem.goodput, Promises(nothing, nothing > 0, every, nothing), rules
        )
        assert len(chosen.allocations) == (chosen.choice.shape >= 0).sum()
        best = best_by_enumeration(problem)
        assert chosen.choice.objective <= best * (1 + 1e-9) + 1e-9, seed
        found.append(1.0 - chosen.choice.objective / best if best > 0 else 0.0)
    return np.array(found)


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 300), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_the_choice_is_the_best_that_can_be_placed(seeds):
    found = gaps(seeds)
    assert (found <= 0.005).all(), np.flatnonzero(found > 0.005)


@pytest.mark.parametrize(
    "seeds", [range(6), pytest.param(range(6, 40), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_so_it_is_for_many_jobs_of_different_needs(seeds, monkeypatch):
    solved = []
    monkeypatch.setattr(
        placeable,
        "solve_by_node",
        lambda *a, real=placeable.solve_by_node: solved.append(a) or real(*a),
    )
    found = gaps(seeds, is_crowded=True)
    assert solved
    assert (found <= 0.005).all(), np.flatnonzero(found > 0.005)


def test_without_the_programs_every_chosen_job_is_still_placed(monkeypatch):
    for name in ("solve_jointly", "solve_by_node"):
        monkeypatch.setattr(placeable, name, lambda *_: None)
    assert gaps(range(30)).mean() <= 0.05


# Single cases.


def job(id_: str, size: int, **fields) -> JobView:
    return JobView(spec=JobSpec(id=id_, mode="rigid", num_devices=size, **fields))


def test_a_gang_is_spread_over_more_nodes_if_one_has_too_few_cpus():
    cluster = cluster_of([{"num_devices": 8, "cpus": 32.0}] * 3)
    plan = reconcile([job("gang", 8, cpus_per_device=8.0)], cluster, PATIENT, 0.0)
    assert sorted(map(len, plan.allocations["gang"].devices.values())) == [4, 4]


@given(st.integers(1, 8), st.integers(1, 200).map(float), st.integers(1, 999).map(float))
@settings(max_examples=25, deadline=None)
def test_an_even_share_of_what_a_node_has_fits_on_it(num_devices, cpus, gib):
    cluster = cluster_of([{"num_devices": num_devices, "cpus": cpus, "memory_gib": gib}])
    share = {
        "cpus_per_device": cpus / num_devices,
        "memory_gib_per_device": gib / num_devices,
    }
    assert reconcile([job("a", num_devices, **share)], cluster, PATIENT, 0.0).start == ("a",)
    for name, has in share.items():  # a thousandth more does not
        more = job("a", num_devices, **{**share, name: 1.001 * has})
        assert not reconcile([more], cluster, PATIENT, 0.0).start


def test_a_job_whose_needs_are_rounded_to_what_a_node_has_runs():
    cluster = cluster_of([{"num_devices": 3, "cpus": 4.0}])
    plan = reconcile([job("a", 3, cpus_per_device=1.3333334)], cluster, PATIENT, 0.0)
    assert plan.start == ("a",), plan.reasons


MILLIONTHS = st.floats(-2.5, 2.5).map(lambda x: x * 1e-6)


@given(
    st.lists(st.tuples(st.integers(1, 8), MILLIONTHS), min_size=1, max_size=4),
    st.floats(0.1, 2000.0),
    st.floats(0.1, 2000.0),
)
def test_no_limit_forbids_what_fits_on_a_node(gangs, cpus, gib):
    """The needs of jobs that fill a node together, each about a millionth more or less for each device."""
    total = sum(size for size, _ in gangs)
    views = [
        job(
            f"j{i}",
            size,
            cpus_per_device=cpus / total + max(more, -cpus / total),
            memory_gib_per_device=gib / total + max(more, -gib / total),
        )
        for i, (size, more) in enumerate(gangs)
    ]
    cluster = cluster_of([{"num_devices": total, "cpus": cpus, "memory_gib": gib}])
    specs = {view.spec.id: view.spec for view in views}
    devices = zip(specs, (tuple(range(size)) for size, _ in gangs), strict=True)
    use = used_by_node(specs, {id_: Allocation(devices={"n0": its}) for id_, its in devices})["n0"]
    limits = amount_limits(cluster, [view.spec for view in views])
    for (limit, needs, _), has, used in zip(limits, amounts_of(cluster.nodes[0]), use, strict=True):
        within = needs @ [size for size, _ in gangs] <= limit.left + 1e-9
        assert within == (used <= has)


def test_a_job_that_no_node_has_cpus_for_is_refused_with_the_numbers():
    cluster = cluster_of([{"num_devices": 8, "cpus": 6.0}])
    views = [job("hungry", 2, cpus_per_device=8.0)]
    found = explain("hungry", views, cluster, PATIENT, 0.0)
    assert found.constraint == "refused"
    assert "needs 8 CPUs per device" in found.message and "'n0' has 6 CPUs" in found.message
    assert found.changes == ("cpus_per_device=3",)


def test_explain_names_the_cpus_that_are_left_and_what_would_be_enough():
    cluster = cluster_of([{"num_devices": 8, "cpus": 12.0, "memory_gib": 64.0}])
    first = job("first", 1, cpus_per_device=8.0, preemptible=False)
    first = dataclasses.replace(first, allocation=Allocation(devices={"n0": (0,)}), since_s=0.0)
    views = [first, job("second", 1, cpus_per_device=8.0)]
    plan = reconcile(views, cluster, PATIENT, 10.0)
    assert not plan.allocations["second"].devices
    found = explain("second", views, cluster, PATIENT, 10.0, plan=plan)
    assert found.constraint == "needs"
    assert "needs 8 CPUs per device; node n0 has 4 CPUs left beside 7 free devices" in found.message
    assert found.changes[0] == "cpus_per_device=4"


def test_small_jobs_make_room_for_one_that_needs_their_cpus():
    """Two jobs hold the CPUs of two nodes; one that needs 8 beside them fits only if one of them moves."""
    cluster = cluster_of([{"num_devices": 8, "cpus": 8.0}] * 2)
    small = [
        dataclasses.replace(
            job(f"s{i}", 1, cpus_per_device=2.0),
            allocation=Allocation(devices={f"n{i}": (0,)}),
            since_s=-5000.0,
            submitted_s=-5000.0,
            restart_s=1.0,
        )
        for i in range(2)
    ]
    plan = reconcile([*small, job("large", 2, cpus_per_device=4.0)], cluster, PATIENT, 0.0)
    assert all(allocation.devices for allocation in plan.allocations.values())
    left = room(cluster, [*small, job("large", 2, cpus_per_device=4.0)], plan)
    assert min(min(its) for its in left.values()) >= 0


def test_a_job_leaves_a_node_that_came_back_with_fewer_cpus():
    nodes = [{"num_devices": 4, "cpus": 2.0}, {"num_devices": 4, "cpus": 16.0}]
    view = dataclasses.replace(
        job("a", 4, cpus_per_device=4.0), allocation=Allocation(devices={"n0": (0, 1, 2, 3)})
    )
    plan = reconcile([view], cluster_of(nodes), PATIENT, 0.0)
    assert plan.allocations["a"].devices == {"n1": (0, 1, 2, 3)}


# Kinds that a job would rather have.

KINDS = ClusterSpec(nodes=tuple(Node(name=k, kind=k, num_devices=1) for k in ("slow", "fast")))


def measured(id_: str, fast: float, **fields) -> JobView:
    """A job that runs `fast` times as fast on one kind as on the other."""
    table = {Shape("slow", 1, 1): 1.0, Shape("fast", 1, 1): fast}
    spec = JobSpec(id=id_, max_devices=1, **fields)
    return JobView(spec=spec, goodput=table, largest_profiled=1)


@pytest.mark.parametrize(("fast", "kind"), [(1.0, "slow"), (1.2, "slow"), (1.3, "fast")])
def test_another_kind_has_to_be_faster_by_the_price_of_the_preference(fast, kind):
    plan = reconcile([measured("a", fast, preferred_kinds=("slow",))], KINDS, PATIENT, 0.0)
    assert set(plan.allocations["a"].devices) == {kind}


def test_of_two_jobs_the_one_that_prefers_a_kind_gets_it():
    views = [measured("a", 1.0, preferred_kinds=("fast",)), measured("b", 1.0)]
    for order in (views, views[::-1]):
        plan = reconcile(order, KINDS, PATIENT, 0.0)
        assert {id_: set(g.devices) for id_, g in plan.allocations.items()} == {
            "a": {"fast"},
            "b": {"slow"},
        }


def test_a_job_takes_another_kind_if_the_preferred_one_is_never_free_and_says_so():
    held = dataclasses.replace(
        measured("held", 1.0, preemptible=False),
        allocation=Allocation(devices={"fast": (0,)}),
        since_s=0.0,
    )
    views = [held, measured("a", 1.0, preferred_kinds=("fast",))]
    plan = reconcile(views, KINDS, PATIENT, 10.0)
    assert set(plan.allocations["a"].devices) == {"slow"}
    found = explain("a", views, KINDS, PATIENT, 10.0, plan=plan)
    assert "it would rather have fast (0 fast free)" in found.message
    assert found.changes == ()  # no price of the preference frees it


def test_explain_says_at_which_price_of_its_preference_a_job_would_get_the_kind():
    views = [measured("a", 3.0, preferred_kinds=("slow",))]
    found = explain("a", views, KINDS, PATIENT, 0.0)
    assert "it would rather have slow (1 slow free)" in found.message
    assert found.changes == ("preference=5 for slow",)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"preferred_kinds": ()}, "prefers no kind"),
        ({"preferred_kinds": ("x",), "kinds": ("y",)}, "prefers .* but allows only"),
        ({"preference": 0.5}, "preference=0.5"),
        ({"cpus_per_device": -1.0}, "cpus_per_device=-1"),
        ({"memory_gib_per_device": float("nan")}, "memory_gib_per_device=nan"),
    ],
)
def test_wrong_numbers_and_kinds_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        JobSpec(id="a", **fields)
