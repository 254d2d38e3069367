"""Alternatives are plans that the policy makes, and their price is what the others lose in them."""

import dataclasses

import pytest
from hypothesis import given, settings
from worlds import Fifo, cluster_of, job_recipes, jobs_of, nodes

from jaxgoodput.cluster.scheduler.alternatives import (
    alternatives,
    changes,
    lost,
    shapes_of,
    speed,
    with_job,
)
from jaxgoodput.cluster.scheduler.policies.goodput import Goodput
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.specs import ClusterSpec, JobSpec, Node, Shape

EIGHT = ClusterSpec(nodes=tuple(Node(name=f"n{i}", kind="a", num_devices=4) for i in range(2)))
SIZES = [Shape("a", 1 if n <= 4 else 2, n) for n in (1, 2, 4, 8)]


def view(id_: str, scaling: float = 0.9, submitted_s: float = 0.0, **spec) -> JobView:
    """A job whose goodput is the number of its devices to the power of `scaling`."""
    return JobView(
        spec=JobSpec(id=id_, max_devices=8, **spec),
        goodput={shape: float(shape.num_devices) ** scaling for shape in SIZES},
        submitted_s=submitted_s,
        largest_profiled=8,
    )


class ByWeight:
    """The heaviest first, each on its smallest shape."""

    def __call__(self, jobs, cluster, now_s, /):
        order = [dataclasses.replace(job, submitted_s=-job.spec.weight) for job in jobs]
        return Fifo()(order, cluster, now_s)


def test_what_only_a_far_higher_weight_would_give():
    jobs = [view("x"), view("y", weight=2.0)]
    plan = reconcile(jobs, EIGHT, ByWeight(), 0.0)
    everything, *smaller = alternatives("x", jobs, EIGHT, ByWeight(), 0.0, plan)
    assert everything.shape == SIZES[3] and not everything.given
    assert everything.price == pytest.approx(1 / 8**0.9)
    assert all(one.given and one.price == 0.0 for one in smaller)


@settings(max_examples=15, deadline=None)
@given(nodes(), job_recipes())
def test_every_alternative_is_a_plan_of_the_policy(nodes, recipes):
    cluster = cluster_of(nodes)
    jobs = jobs_of(recipes, cluster)
    plan = reconcile(jobs, cluster, Fifo(), 0.0)
    for job in jobs[:2]:
        found = alternatives(job.spec.id, jobs, cluster, Fifo(), 0.0, plan)
        assert len({one.shape for one in found}) == len(found) <= 8
        for one in found:
            assert one.given  # weights are nothing to this policy
            assert one.shape in job.goodput and 0 < one.speed <= 1
            assert one.shape != shapes_of(plan, cluster)[job.spec.id]
            assert job.spec.id not in {change.job for change in one.others}
            assert one.price == pytest.approx(lost(one.others))


def test_a_larger_share_has_its_price_and_names_who_pays():
    jobs = [view("x"), view("y")]
    plan = reconcile(jobs, EIGHT, Goodput(), 0.0)
    assert [s.num_devices for s in shapes_of(plan, EIGHT).values() if s] == [4, 4]
    found = {
        one.shape.num_devices: one for one in alternatives("x", jobs, EIGHT, Goodput(), 0.0, plan)
    }
    assert set(found) == {1, 2, 8}
    half = 4**0.9 / 8**0.9
    everything = found[8]
    assert everything.price == pytest.approx(half) and everything.speed == 1.0
    (loser,) = everything.others
    assert (loser.job, loser.after, loser.speed_after) == ("y", None, 0.0)
    assert found[1].price <= 0.0 and found[2].price <= 0.0


def test_one_job_more_takes_from_the_others():
    jobs = [view("x")]
    plan = reconcile(jobs, EIGHT, Goodput(), 0.0)
    more = with_job(view("new"), jobs, EIGHT, Goodput(), 0.0)
    (change,) = changes(jobs, EIGHT, plan, more)
    assert (change.job, change.before, change.after) == ("x", SIZES[3], SIZES[2])
    assert lost([change]) == pytest.approx(1 - 4**0.9 / 8**0.9)
    with pytest.raises(ValueError, match="two jobs have the id 'x'"):
        with_job(view("x"), jobs, EIGHT, Goodput(), 0.0)


def test_speeds_and_unknown_jobs():
    one = view("x")
    assert speed(one, None) == 0.0 and speed(one, SIZES[3]) == 1.0
    unknown = speed(one, Shape("b", 1, 1))
    assert unknown != unknown
    empty = dataclasses.replace(one, goodput={})
    assert speed(empty, SIZES[0]) != speed(empty, SIZES[0])
    plan = reconcile([one], EIGHT, Goodput(), 0.0)
    with pytest.raises(ValueError, match="no job 'z' among the 1"):
        alternatives("z", [one], EIGHT, Goodput(), 0.0, plan)
