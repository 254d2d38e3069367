"""Laws of the simulation: no device is given twice, no work is lost, the same seed gives the same result."""

import dataclasses
import json
import math
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Shuffle, cluster, truth, workload

from jaxgoodput._fields.serial import dumps, loads
from jaxgoodput.clock import FakeClock
from jaxgoodput.cluster.published import traces
from jaxgoodput.cluster.published.baselines import Optimus, Static, Tiresias
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.scheduler.policy import Decision
from jaxgoodput.cluster.simulate.jobs.gavel import GavelTruth
from jaxgoodput.cluster.simulate.jobs.tables import TableTruth
from jaxgoodput.cluster.simulate.records import Result
from jaxgoodput.cluster.simulate.settings import (
    Failures,
    Settings,
    gavel_settings,
    pollux_settings,
    realistic,
    restart_by_state,
    sia_settings,
)
from jaxgoodput.cluster.simulate.simulator import simulate, uniform_cluster
from jaxgoodput.specs import Allocation

MODES = st.sampled_from(["adaptive", "elastic", "rigid"])
ROUNDS = st.sampled_from([60.0, 30.0, None])


def run(settings, *, seed=0, policy=None, jobs=None, where=None):
    return simulate(
        workload(seed=seed) if jobs is None else jobs,
        cluster() if where is None else where,
        Shuffle(seed) if policy is None else policy,
        truth(),
        settings=settings,
        clock=FakeClock(),
    )


@pytest.mark.slow
@given(st.integers(0, 1000), MODES, ROUNDS, st.sampled_from([None, 3000.0]))
@settings(max_examples=12, deadline=None)
def test_every_job_finishes_and_no_device_is_given_twice(seed, mode, round_s, between_s):
    failures = None if between_s is None else Failures(mean_between_s=between_s, repair_s=300.0)
    settings = Settings(mode=mode, round_s=round_s, failures=failures, interference=0.2, seed=seed)
    result = run(settings, seed=seed)
    stays = defaultdict(list)
    for job, trace in zip(result.jobs, workload(seed=seed), strict=True):
        assert job.id == trace.id and trace.submit_s <= job.start_s < job.finish_s
        assert all(i.start_s <= i.end_s <= job.finish_s for i in job.intervals)
        by_kind = defaultdict(float)
        for interval in job.intervals:
            by_kind[interval.kind] += (interval.end_s - interval.start_s) * interval.num_devices
            for node, local in interval.devices.items():
                for i in local:
                    stays[node, i].append((interval.start_s, interval.end_s, job.id))
        assert job.device_s == pytest.approx(dict(by_kind), abs=1e-3)
    for stay in stays.values():
        for before, after in pairwise(sorted(stay)):
            assert before[1] <= after[0] + 1e-6, (before, after)


@pytest.mark.slow
@given(st.integers(0, 1000), MODES, ROUNDS)
@settings(max_examples=6, deadline=None)
def test_equal_inputs_give_equal_results(seed, mode, round_s):
    settings = Settings(
        mode=mode,
        round_s=round_s,
        step_noise=0.1,
        gradient_noise=0.1,
        failures=Failures(mean_between_s=5000.0),
        seed=seed,
    )
    assert run(settings, seed=seed) == run(settings, seed=seed)


@pytest.mark.slow
def test_another_seed_gives_other_failures():
    jobs = workload(24)
    failures = Failures(mean_between_s=1000.0, repair_s=100.0)
    first, second = (run(Settings(failures=failures, seed=seed), jobs=jobs) for seed in (1, 2))
    assert first.num_failures and second.num_failures
    assert first.jobs != second.jobs
    calm = [run(Settings(seed=seed), jobs=jobs) for seed in (1, 2)]
    assert calm[0] == calm[1]  # the seed only draws the failures here


class Watched:
    """A truth whose jobs record the work done whenever they are placed."""

    def __init__(self):
        self.inner, self.seen = truth(), defaultdict(list)

    def job(self, trace, settings, index):
        job = self.inner.job(trace, settings, index)
        place, seen = job.place, self.seen[trace.id]

        def watched(kind, counts):
            place(kind, counts)
            seen.append(job.save())

        job.place = watched
        return job


@pytest.mark.slow
@given(st.integers(0, 1000), ROUNDS)
@settings(max_examples=6, deadline=None)
def test_a_restart_costs_time_but_no_work(seed, round_s):
    watched = Watched()
    settings = Settings(round_s=round_s)
    result = simulate(workload(seed=seed), cluster(), Shuffle(seed), watched, settings=settings)
    assert sum(job.restarts for job in result.jobs) > 0
    for seen in watched.seen.values():
        assert seen == sorted(seen)


def one_job(settings, devices=2):
    job = TraceJob(
        id="only", submit_s=7.0, application="toy", num_devices=devices, global_batch_size=64
    )
    where = cluster("a")
    alone = truth().job(job, settings, 0).isolated_s("a", (devices,))
    return run(settings, policy=Static(), jobs=(job,), where=where).jobs[0], alone


def test_a_single_job_takes_what_its_tables_say():
    exact = {"mode": "rigid", "rounding": False, "restart_s": 30.0}
    event, alone = one_job(Settings(round_s=None, **exact))
    assert (event.start_s, event.restarts) == (7.0, 0)
    assert event.jct_s == pytest.approx(30 + alone)
    rounds, _ = one_job(Settings(round_s=60.0, **exact))
    assert rounds.start_s == 60.0
    assert rounds.jct_s == pytest.approx(53 + 30 + alone)
    assert rounds.device_s == pytest.approx({"a": 2 * (30 + alone)})
    rounded, _ = one_job(Settings(mode="rigid"))
    assert rounded.jct_s == int(rounded.jct_s)


def test_finish_time_fairness_of_a_job_alone_is_its_overhead():
    settings = Settings(mode="rigid", rounding=False, round_s=None)
    job, alone = one_job(settings, devices=4)
    assert job.rho == pytest.approx((30 + alone) / alone)


class Moving:
    """A policy that runs every job on one device, which changes with every decision."""

    def __call__(self, jobs, cluster, now_s, /):
        nodes = cluster.nodes
        taken = {}
        for i, job in enumerate(jobs[: len(nodes)]):
            node = nodes[(i + int(now_s / 60)) % len(nodes)]
            taken[job.spec.id] = Allocation(devices={node.name: (0,)})
        return Decision(allocations=taken)


def test_every_change_costs_a_restart():
    job = TraceJob(id="only", submit_s=0.0, application="toy", num_devices=1, global_batch_size=64)
    took = {}
    for restart_s in (0.0, 10.0, 20.0, 30.0):
        settings = Settings(mode="rigid", restart_s=restart_s, rounding=False)
        (moved,) = run(settings, policy=Moving(), jobs=(job,), where=cluster("a")).jobs
        assert moved.restarts == len(moved.intervals) - 1 > 5
        took[restart_s] = moved.finish_s - moved.start_s
        # Only restarts cost time, and their devices are paid for.
        assert took[restart_s] == pytest.approx(took[0.0] + restart_s * len(moved.intervals))
        assert moved.device_s == pytest.approx({"a": took[restart_s]})
    assert took[30.0] == pytest.approx(2 * took[0.0], abs=30)  # 30 s of every 60 s


def test_events_keep_the_gaps_and_rounds_the_round():
    times = []

    class Noting:
        def __call__(self, jobs, cluster, now_s, /):
            times.append(now_s)
            return Static()(jobs, cluster, now_s)

    settings = Settings(mode="rigid", round_s=None, min_gap_s=5.0, max_gap_s=40.0)
    run(settings, policy=Noting(), jobs=workload(12, gap_s=3.0), where=cluster("a"))
    gaps = [b - a for a, b in pairwise(times)]
    assert min(gaps) >= 5.0 - 1e-6 and max(gaps) <= 40.0 + 1e-6
    times.clear()
    run(Settings(mode="rigid"), policy=Noting(), jobs=workload(3), where=cluster("a"))
    assert all(t % 60 == 0 for t in times) and min(times) >= 60


def test_jobs_of_an_event_driven_cluster_start_as_they_come_and_end_between_decisions():
    decided = []

    class Noting:
        def __call__(self, jobs, cluster, now_s, /):
            decided.append(now_s)
            return Static()(jobs, cluster, now_s)

    settings = Settings(mode="rigid", round_s=None, rounding=False)
    jobs = workload(6, gap_s=5000.0)
    where = uniform_cluster("a", len(jobs), 4)  # room for all of them at once
    result = run(settings, policy=Noting(), jobs=jobs, where=where)
    for job, trace in zip(result.jobs, jobs, strict=True):
        # At once, unless the last decision was less than the minimum gap ago.
        before = max((t for t in decided if t < trace.submit_s), default=-math.inf)
        expected = max(trace.submit_s, before + settings.min_gap_s)
        assert job.start_s == pytest.approx(expected, rel=0, abs=1e-5)
        alone = truth().job(trace, settings, 0)
        alone.place(job.intervals[0].kind, (trace.num_devices,))
        stay = job.finish_s - job.start_s
        assert stay == pytest.approx(30 + alone.advance(1e9), rel=0, abs=1e-3)
    assert any(job.start_s == trace.submit_s for job, trace in zip(result.jobs, jobs, strict=True))


def test_interference_and_failures_cost_time():
    def average(jobs, where, **changes):
        result = run(Settings(mode="rigid", **changes), policy=Tiresias(), jobs=jobs, where=where)
        return result.summary()["average_jct_s"], result

    # Jobs of one and a half nodes: two of them meet on the node between theirs.
    three = uniform_cluster("a", 3, 4)
    wide = tuple(dataclasses.replace(job, num_devices=6) for job in workload(seed=1))
    calm, slowed = (average(wide, three, interference=f)[0] for f in (0.0, 0.5))
    assert slowed > calm
    # Jobs that fit on a node do not interfere.
    narrow = tuple(dataclasses.replace(job, num_devices=4) for job in wide)
    assert average(narrow, three)[1] == average(narrow, three, interference=0.5)[1]

    jobs = workload(24)
    failures = Failures(mean_between_s=1500.0, repair_s=600.0)
    calm, _ = average(jobs, cluster("a"))
    failing, result = average(jobs, cluster("a"), failures=failures)
    assert result.num_failures > 0
    assert failing > calm


@pytest.mark.slow
def test_a_policy_that_starts_nothing_is_found_out():
    class Idle:
        def __call__(self, jobs, cluster, now_s, /):
            return Decision(allocations={})

    with pytest.raises(RuntimeError, match=r"8 jobs wait and nothing runs"):
        run(Settings(), policy=Idle())


def test_packed_jobs_share_devices_at_the_speed_of_the_pair():
    a, b = ("A", 1), ("B", 1)
    table = {"v100": {a: {None: 10.0, b: (8.0, 3.0)}, b: {None: 5.0, a: (3.0, 8.0)}}}

    class Together:
        def __call__(self, jobs, cluster, now_s, /):
            assert all(j.shared_goodput for j in jobs) or len(jobs) == 1
            shared = Allocation(devices={"v100-000": (0,)}, share_group="pair")
            return Decision(allocations={j.spec.id: shared for j in jobs})

    jobs = [
        TraceJob(id=x, submit_s=0.0, application=x, num_steps=n)
        for x, n in (("A", 8000), ("B", 4000))
    ]
    settings = gavel_settings(sharing=True, rounding=False)
    where = uniform_cluster("v100", 1, 1)
    first, second = simulate(jobs, where, Together(), GavelTruth(table), settings=settings).jobs
    assert first.finish_s == pytest.approx(1000.0)  # at 8 steps/s
    # Beside the other until the end of its last round, then alone.
    assert second.finish_s == pytest.approx(1080 + (4000 - 1080 * 3) / 5)


def test_results_survive_json_and_add_up():
    result = run(Settings(mode="rigid"), policy=Static(), where=cluster("a"))
    for job in result.jobs:
        times = (job.finish_s, job.rho, *job.device_s.values())
        ends = (t for i in job.intervals for t in (i.start_s, i.end_s))
        assert {type(x) for x in (*times, *ends)} == {float}
    again = loads(dumps(result), Result)
    assert again == result
    summary = result.summary()
    jct = sorted(job.finish_s - job.submit_s for job in result.jobs)
    assert summary["average_jct_s"] == pytest.approx(sum(jct) / len(jct))
    assert summary["median_jct_s"] == pytest.approx((jct[3] + jct[4]) / 2)
    start = min(job.submit_s for job in result.jobs)
    assert summary["makespan_s"] == max(job.finish_s for job in result.jobs) - start
    hours = sum(sum(job.device_s.values()) for job in result.jobs) / 3600
    assert summary["device_hours"] == pytest.approx(hours)
    rho = [job.rho for job in result.jobs if job.rho is not None]
    assert len(rho) == len(result.jobs) and summary["worst_rho"] == max(rho)


def test_an_empty_workload_is_a_result_too():
    summary = run(Settings(), jobs=()).summary()
    assert math.isnan(summary["average_jct_s"]) and summary["makespan_s"] == 0.0


def test_decisions_are_timed_with_the_clock_that_is_given():
    clock = FakeClock()

    class Slow:
        def __call__(self, jobs, cluster, now_s, /):
            clock.advance(0.25)
            return Static()(jobs, cluster, now_s)

    jobs = workload(2)
    settings = Settings(mode="rigid")
    result = simulate(jobs, cluster("a"), Slow(), truth(), settings=settings, clock=clock)
    assert set(result.decision_s) == {0.25}
    seen = []
    simulate(jobs, cluster("a"), Static(), truth(), settings=settings, on_progress=seen.append)
    assert seen[-1].num_done == seen[-1].num_jobs == 2
    assert [p.now_s for p in seen] == sorted(p.now_s for p in seen)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"round_s": 0.0}, "round_s"),
        ({"interference": 1.0}, "interference"),
        ({"step_noise": -1.0}, "step_noise"),
        ({"min_gap_s": 70.0}, "swap"),
        ({"growth": 0.0}, "growth"),
        ({"slowdown": {"x": 0.0}}, "slowdown"),
    ],
)
def test_impossible_rules_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Settings(**changes)


def test_nodes_cannot_fail_all_the_time():
    with pytest.raises(ValueError, match="mean_between_s"):
        Failures(mean_between_s=0.0)


def test_restart_costs_by_application():
    settings = sia_settings()
    assert (settings.restart_of("imagenet"), settings.told_restart_of("cifar10")) == (250.0, 30.0)
    assert Settings(restart_s=5.0).told_restart_of("anything") == 5.0
    with pytest.raises(ValueError, match="'gpt'"):
        settings.restart_of("gpt")


def test_a_realistic_cluster_runs_to_the_end():
    costs = restart_by_state({"toy": 4e9, "tiny": 1e8}, base_s=2.0, bytes_per_s=1e9)
    assert costs == {"toy": 10.0, "tiny": 2.2}
    settings = realistic(
        Settings(restart_s=costs), failures=Failures(mean_between_s=3000.0, repair_s=200.0)
    )
    result = run(settings)
    assert len(result.jobs) == 8 and result.num_failures > 0
    with pytest.raises(ValueError, match="bytes_per_s"):
        restart_by_state({}, base_s=1.0, bytes_per_s=0.0)


@pytest.fixture(scope="module")
def pollux(shared_data):
    return TableTruth(traces.read_pollux_applications(shared_data / "pollux" / "traces"))


NIGHTLY = (pytest.mark.slow, pytest.mark.nightly)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "mode", "number"),
    [
        (Tiresias(), "rigid", 3),
        (Optimus(), "elastic", 6),
        pytest.param(Tiresias(), "rigid", 6, marks=NIGHTLY),
        pytest.param(Optimus(), "elastic", 3, marks=NIGHTLY),
    ],
)
def test_published_completion_times_are_met_to_the_second(
    shared_data, pollux, policy, mode, number
):
    """Every one of the 160 jobs ends when the artifact's simulator says."""
    folder = shared_data / "pollux"
    name = f"{type(policy).__name__.lower()}-1.0"
    published = json.loads((folder / "results-jobload" / name / "summary.json").read_text())
    jobs = traces.read_pollux_workload(folder / "workloads" / f"workload-{number}.csv")
    where = uniform_cluster("t4", 16, 4)
    result = simulate(jobs, where, policy, pollux, settings=pollux_settings(mode=mode))
    assert {job.id: job.jct_s for job in result.jobs} == published["jcts"][f"workload-{number}"]
