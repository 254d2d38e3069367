"""The default policy keeps every limit, prefers the young, and moves a job only where it pays."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.cluster.scheduler.policies.goodput import Goodput
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policies.transitions import lost_by_change
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.reconcile import check_decision
from jaxgoodput.cluster.scheduler.shapes import shapes
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node


def cluster_of(sizes):
    nodes = [
        Node(name=f"n{i}", kind=kind, num_devices=size) for i, (kind, size) in enumerate(sizes)
    ]
    return ClusterSpec(nodes=tuple(nodes), quota={"small": 3})


def jobs_of(cluster, count, seed):
    rng = np.random.default_rng(seed)
    offered = shapes(cluster)
    jobs = []
    for i in range(count):
        table = {
            s: float(rng.uniform(1, 9) * s.num_devices ** rng.uniform(0.3, 1.0)) for s in offered
        }
        spec = JobSpec(
            id=f"j{i}",
            max_devices=int(rng.integers(1, 20)),
            weight=float(rng.uniform(0.5, 2.0)),
            tenant=str(rng.choice(["small", "large"])),
        )
        jobs.append(JobView(spec=spec, goodput=table, largest_profiled=16))
    return jobs


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from([1, 2, 4, 6, 8])), min_size=1, max_size=6
    ),
    count=st.integers(0, 12),
    seed=st.integers(0, 10**6),
)
def test_every_limit_holds_over_a_run_of_decisions(sizes, count, seed):
    cluster = cluster_of(sizes)
    jobs = jobs_of(cluster, count, seed)
    for turn in range(3):
        now_s = 600.0 * turn
        decision = Goodput()(jobs, cluster, now_s)
        check_decision(decision, jobs, cluster, "Goodput")
        assert set(decision.reasons) == {job.spec.id for job in jobs}
        again = Goodput()(jobs, cluster, now_s)
        assert again.allocations == decision.allocations
        jobs = [
            dataclasses.replace(
                job,
                allocation=decision.allocations.get(job.spec.id, Allocation()),
                received_s={"a": 600.0 * turn},
            )
            for job in jobs
        ]


ONE_NODE = ClusterSpec(nodes=(Node(name="n", kind="k", num_devices=4),))


def job(id_, exponent, devices=(), **fields):
    table = {s: s.num_devices**exponent for s in shapes(ONE_NODE)}
    return JobView(
        spec=JobSpec(id=id_),
        goodput=table,
        allocation=Allocation(devices={"n": tuple(devices)}) if devices else Allocation(),
        since_s=0.0 if devices else None,
        largest_profiled=4,
        **fields,
    )


def test_of_equal_jobs_the_one_served_less_gets_more():
    old, young = job("old", 0.8, received_s={"k": 36000.0}), job("young", 0.8)
    others = [job("third", 0.8, received_s={"k": 36000.0})]
    given = Goodput()([old, young, *others], ONE_NODE, 0.0).allocations
    assert given["young"].num_devices >= 2
    assert all(given[id_].num_devices <= 1 for id_ in ("old", "third") if id_ in given)


def test_of_equal_jobs_the_earlier_one_gets_more():
    late = [job(id_, 0.8, submitted_s=90000.0) for id_ in ("a", "b")]
    given = Goodput()([*late, job("early", 0.8)], ONE_NODE, 90000.0).allocations
    assert given["early"].num_devices >= 2


def test_a_dear_restart_is_paid_only_for_a_large_gain():
    little = job("a", 0.1, [0, 1], restart_s=120.0)
    much = job("a", 1.0, [0, 1], restart_s=30.0)
    assert Goodput()([little], ONE_NODE, 0.0).allocations["a"] == little.allocation
    assert Goodput()([much], ONE_NODE, 0.0).allocations["a"].num_devices == 4


def test_restarts_so_far_make_a_change_dearer_only_if_others_want_the_devices():
    def lost(contention, **fields):
        job_ = job("a", 0.5, [0, 1], restart_s=30.0, **fields)
        job_ = dataclasses.replace(job_, largest_profiled=2**9)
        problem = ShapeProblem.of((job_,), ONE_NODE, 600.0)
        return lost_by_change(problem, 1.5, contention).max()

    assert lost(1.0, num_restarts=9) > 3 * lost(1.0, num_restarts=2)
    assert lost(0.0, num_restarts=9) == lost(0.0, num_restarts=2) < lost(1.0)
    # The same number of restarts over a longer life leaves it free.
    assert lost(1.0, num_restarts=9, submitted_s=-6000.0) < lost(1.0, num_restarts=2)

    def moves(**fields):
        job_ = job("a", 0.5, [0, 1], restart_s=30.0, **fields)
        job_ = dataclasses.replace(job_, largest_profiled=2**9)
        return Goodput()([job_], ONE_NODE, 600.0).allocations["a"] != job_.allocation

    assert moves()
    assert moves(num_restarts=9)  # it is alone, and grew by its restarts


def test_another_kind_must_promise_more_than_another_size():
    cluster = ClusterSpec(
        nodes=tuple(Node(name=k, kind=k, num_devices=1) for k in ("slow", "fast"))
    )
    one, other = shapes(cluster) if shapes(cluster)[0].kind == "slow" else shapes(cluster)[::-1]

    def kind_of(gain, **settings):
        view = JobView(
            spec=JobSpec(id="a"),
            goodput={one: 1.0, other: gain},
            allocation=Allocation(devices={"slow": (0,)}),
            since_s=0.0,
            restart_s=100.0,
            largest_profiled=1,
        )
        given = Goodput(diminishing=1.0, **settings)([view], cluster, 180.0)
        return next(iter(given.allocations["a"].devices))

    # Alone it stays 180 + 200 + 120 = 500 s: a restart takes a fifth of it, one and a half 3/10.
    assert kind_of(1.35) == "slow"
    assert kind_of(1.35, kind_change=1.0) == "fast"
    assert kind_of(1.5) == "fast"


def test_a_job_that_declares_that_it_is_nearly_done_goes_first():
    served = job("nearly", 0.8, received_s={"k": 360000.0}, remaining=100.0)
    long = job("long", 0.8, remaining=1e6)
    given = Goodput()([served, long], ONE_NODE, 0.0).allocations
    assert given["nearly"].num_devices > given.get("long", Allocation()).num_devices
    silent = [dataclasses.replace(view, remaining=None) for view in (served, long)]
    given = Goodput()(silent, ONE_NODE, 0.0).allocations
    nearly = given.get("nearly", Allocation()).num_devices
    assert given["long"].num_devices >= nearly


@pytest.mark.parametrize("held", [(0, 1), (0, 1, 2)], ids=["without a number", "not offered"])
def test_however_often_it_restarted_no_job_is_stopped_for_nothing(held):
    view = job("a", 0.8, held, restart_s=250.0, num_restarts=60)
    table = {s: g for s, g in view.goodput.items() if s.num_devices != len(held)}
    view = dataclasses.replace(view, goodput=table)
    assert Goodput()([view], ONE_NODE, 900.0).allocations["a"].num_devices == 4


def test_a_gain_counts_less_than_proportionally():
    # A restart takes a fifth, as above: 1.28 x 0.8 is above 1, 1.28^0.85 x 0.8 is not.
    sizes = {s.num_devices: s for s in shapes(ONE_NODE)}
    view = JobView(
        spec=JobSpec(id="a"),
        goodput={sizes[1]: 1.0, sizes[2]: 1.28},
        allocation=Allocation(devices={"n": (0,)}),
        since_s=0.0,
        restart_s=100.0,
        largest_profiled=2,
    )
    assert Goodput()([view], ONE_NODE, 180.0).allocations["a"].num_devices == 1
    assert Goodput(diminishing=1.0)([view], ONE_NODE, 180.0).allocations["a"].num_devices == 2


def test_a_job_that_is_restarting_stays():
    busy = job("a", 1.0, [0, 1], restart_s=1.0, restoring_until_s=50.0)
    assert Goodput()([busy], ONE_NODE, 40.0).allocations["a"] == busy.allocation
    assert Goodput()([busy], ONE_NODE, 60.0).allocations["a"].num_devices == 4


def test_a_growth_limit_holds_where_it_is_asked_for():
    new = dataclasses.replace(job("a", 1.0), largest_profiled=0)
    ran = dataclasses.replace(job("a", 1.0), largest_profiled=1)
    assert Goodput(growth=2.0)([new], ONE_NODE, 0.0).allocations["a"].num_devices == 1
    assert Goodput(growth=2.0)([ran], ONE_NODE, 0.0).allocations["a"].num_devices == 2
    assert Goodput()([new], ONE_NODE, 0.0).allocations["a"].num_devices == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"diminishing": 0.0},
        {"kind_change": 0.0},
        {"age_power": float("nan")},
        {"pause": -1.0},
        {"least_run": float("inf")},
        {"relative_gap": -1.0},
        {"time_limit_s": -1.0},
        {"age_scale_s": -1.0},
        {"service_scale_s": float("inf")},
    ],
)
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Goodput(**wrong)


def on_one_device(now_s, **settings):
    """Who has the only device: one that was served for an hour and began 60 s ago, or one that came now."""
    cluster = ClusterSpec(nodes=(Node(name="n", kind="k", num_devices=1),))
    (shape,) = shapes(cluster)
    runs = JobView(
        spec=JobSpec(id="runs"),
        goodput={shape: 1.0},
        allocation=Allocation(devices={"n": (0,)}),
        submitted_s=-3600.0,
        since_s=0.0,
        received_s={"k": 36000.0},
        largest_profiled=1,
    )
    waits = JobView(spec=JobSpec(id="waits"), goodput={shape: 1.0}, largest_profiled=1)
    (given,) = Goodput(**settings)([runs, waits], cluster, now_s).allocations
    return given


def test_a_job_that_has_just_begun_is_left_in_peace_and_then_gives_way():
    assert on_one_device(60.0) == "runs"
    assert on_one_device(60.0, least_run=1.0) == "waits"
    assert on_one_device(300.0) == "waits"


def test_a_pause_must_be_worth_the_restarts_that_it_causes():
    assert on_one_device(300.0, pause=200.0) == "runs"
