"""Synthetic workloads: the same seed gives the same jobs, with the documented distributions."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.cluster.published.baselines import Static
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.scheduler.policies.goodput import Goodput
from jaxgoodput.cluster.simulate.generator import (
    FAMILIES,
    synthetic_applications,
    synthetic_workload,
)
from jaxgoodput.cluster.simulate.jobs.model import ModelTruth
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.cluster.simulate.simulator import simulate, uniform_cluster
from jaxgoodput.specs import Shape


@given(
    num_jobs=st.integers(1, 60),
    hours=st.floats(0.1, 60.0),
    seed=st.integers(0, 2**32),
    largest=st.integers(1, 40),
    per_node=st.integers(1, 8),
)
@settings(max_examples=10, deadline=None)
def test_jobs_stay_within_what_was_asked(num_jobs, hours, seed, largest, per_node):
    jobs = synthetic_workload(num_jobs, hours=hours, seed=seed, largest=largest, per_node=per_node)
    assert jobs == synthetic_workload(
        num_jobs, hours=hours, seed=seed, largest=largest, per_node=per_node
    )
    assert len({job.id for job in jobs}) == num_jobs
    times = [job.submit_s for job in jobs]
    assert times == sorted(times) and 0 <= times[0] and times[-1] <= hours * 3600
    for job in jobs:
        limits = FAMILIES[job.application].limits
        assert 1 <= job.num_devices <= largest and (job.num_steps or 0) >= 1
        assert limits.base <= (job.global_batch_size or 0) <= limits.max


def test_another_seed_gives_other_jobs():
    assert synthetic_workload(20, seed=1) != synthetic_workload(20, seed=2)


def test_the_rate_swells_to_its_peak():
    """In a long day, the arrivals per hour around the peak are three times those in a quiet hour."""
    jobs = synthetic_workload(12000, hours=24.0, seed=1, peak=3.0)
    hour = Counter(int(job.submit_s // 3600) for job in jobs)
    quiet = np.mean([hour[h] for h in range(8, 24)])
    # 3 at the middle of the peak, less at its ends.
    assert hour[3] / quiet == pytest.approx(2.92, rel=0.1)
    flat = synthetic_workload(12000, hours=24.0, seed=1, peak=1.0)
    count = Counter(int(job.submit_s // 3600) for job in flat)
    assert max(count.values()) < 1.25 * min(count.values())


def test_most_jobs_are_short_and_few_have_most_of_the_work():
    jobs = synthetic_workload(4000, seed=2)
    truth = ModelTruth(synthetic_applications({"t4": 1.0}))
    settings = Settings()
    alone = np.sort([truth.job(j, settings, i).isolated_s("t4", (1,)) for i, j in enumerate(jobs)])
    assert np.median(alone) < 3600 < 24 * 3600 < alone[-1]
    assert alone[-len(alone) // 10 :].sum() > 0.6 * alone.sum()


def test_users_ask_for_what_scales_half_well():
    """With the requested devices, at its best batch size, no job is slower than on one device."""
    truth = ModelTruth(synthetic_applications({"t4": 1.0}))
    for job in synthetic_workload(200, seed=3):
        rate = truth.goodput(
            job.application, "t4", 5, ((-(-job.num_devices // 4), job.num_devices),)
        )[0]
        base = FAMILIES[job.application].limits.base
        alone = truth.goodput(job.application, "t4", 5, ((1, 1),), base)[0]
        assert rate >= alone


def test_faster_kinds_are_faster_but_not_for_what_waits_for_its_input():
    truth = ModelTruth(synthetic_applications({"slow": 1.0, "fast": 4.0}))

    def ratio(name):
        speed = [truth.goodput(name, kind, 5, ((1, 1),))[0] for kind in ("slow", "fast")]
        return speed[1] / speed[0]

    assert ratio("language-tune") == pytest.approx(4.0, rel=0.02)
    assert 1.2 < ratio("recommender") < 2.0
    assert {name: ratio(name) > 1 for name in FAMILIES} == dict.fromkeys(FAMILIES, True)


def test_the_steps_of_a_line_are_the_work_of_its_job():
    truth = ModelTruth(synthetic_applications({"t4": 1.0}))

    def alone(steps, **line):
        trace = TraceJob(id="x", submit_s=0.0, application="speech", num_steps=steps, **line)
        return truth.job(trace, Settings(), 0).isolated_s("t4", (2,))

    assert alone(4000) == pytest.approx(2 * alone(2000))
    fixed = alone(2000, mode="elastic", global_batch_size=48)
    assert fixed > alone(2000)  # the best batch of every phase is better than any one batch


def test_rigid_and_elastic_jobs_keep_size_and_batch():
    truth = ModelTruth(synthetic_applications({"t4": 1.0}))
    shapes = tuple(Shape("t4", -(-k // 4), k) for k in range(1, 17))
    line = {"id": "x", "submit_s": 0.0, "application": "speech", "num_devices": 4}
    rigid = truth.job(TraceJob(**line, mode="rigid", global_batch_size=96), Settings(), 0)
    assert [s.num_devices for s in rigid.goodput(shapes)] == [4]
    assert rigid.spec.min_devices == rigid.spec.max_devices == 4 and (rigid.remaining() or 0) > 0
    elastic = truth.job(TraceJob(**line, mode="elastic", global_batch_size=96), Settings(), 0)
    offered = elastic.goodput(shapes)
    assert max(s.num_devices for s in offered) == 16 and elastic.spec.max_devices == 24
    elastic.place("t4", (4,))
    before = elastic.remaining() or 0.0
    elastic.advance(10.0)
    assert before - (elastic.remaining() or 0.0) == pytest.approx(10 * offered[Shape("t4", 1, 4)])
    with pytest.raises(ValueError, match="needs a global batch size"):
        truth.job(TraceJob(**line, mode="rigid"), Settings(), 0)


def test_a_made_up_day_runs_to_its_end():
    drawn = synthetic_workload(16, hours=0.5, seed=4)
    jobs = tuple(job for job in drawn if FAMILIES[job.application].median_h < 1)
    truth = ModelTruth(synthetic_applications({"t4": 1.0}))
    cluster = uniform_cluster("t4", 4, 4)
    ours = simulate(jobs, cluster, Goodput(), truth, settings=Settings(growth=None))
    static = simulate(jobs, cluster, Static(), truth, settings=Settings(mode="rigid"))
    assert len(ours.jobs) == len(static.jobs) == len(jobs) > 5
    assert ours.summary()["average_jct_s"] < static.summary()["average_jct_s"]


@pytest.mark.parametrize(
    "wrong",
    [{"num_jobs": 0}, {"hours": 0.0}, {"hours": float("nan")}, {"peak": 0.5}, {"largest": 0}]
    + [{"per_node": 0}],
)
def test_impossible_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        synthetic_workload(**wrong)


def test_impossible_speeds_are_refused():
    with pytest.raises(ValueError, match="speeds"):
        synthetic_applications({"t4": 0.0})
