"""Laws of faults: they follow from seeds, are the same for every policy, and only work is lost."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Shuffle, cluster, truth, workload

from jaxgoodput import cli
from jaxgoodput._fields.serial import dumps, loads
from jaxgoodput.clock import FakeClock
from jaxgoodput.cluster.published.baselines import Static
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.simulate.conditions.faults import (
    Cancellations,
    Faults,
    FaultScript,
    Outages,
    Slowdowns,
    read_faults,
)
from jaxgoodput.cluster.simulate.records import Result
from jaxgoodput.cluster.simulate.scenario import read_cluster
from jaxgoodput.cluster.simulate.settings import Failures, Settings
from jaxgoodput.cluster.simulate.simulator import simulate

ROUNDS = st.sampled_from([60.0, None])
OFTEN = Faults(
    nodes=Outages(mean_between_s=1000.0, mean_repair_s=100.0),
    racks=Outages(mean_between_s=3000.0, mean_repair_s=100.0),
    slow=(Slowdowns(mean_between_s=200.0, mean_length_s=50.0, speed=0.5),),
    mean_to_crash_s=150.0,
    cancellations=Cancellations(share=0.3, mean_after_s=300.0),
    checkpoint_s=60.0,
)
JOBS = workload(6)


def racks(where=None):
    """A cluster with two racks: the first and the last node of every kind."""
    where = cluster() if where is None else where
    nodes = (dataclasses.replace(n, labels={"rack": n.name[-1]}) for n in where.nodes)
    return dataclasses.replace(where, nodes=tuple(nodes))


class Noting:
    """Wraps a policy, and records the nodes that were down at each decision."""

    def __init__(self, policy):
        self.policy, self.down = policy, {}

    def __call__(self, jobs, cluster, now_s, /):
        self.down[now_s] = {node.name for node in cluster.nodes if node.state == "down"}
        return self.policy(jobs, cluster, now_s)


def run(rules, policy, *, jobs=None, where=None):
    return simulate(
        JOBS if jobs is None else jobs,
        racks() if where is None else where,
        policy,
        truth(),
        settings=rules,
        clock=FakeClock(),
    )


def down_at(times, seed):
    """Return the nodes that are down at each of some moments, for a seed."""
    script, found = FaultScript(OFTEN, racks().nodes, seed), {}
    for now_s in sorted(times):
        script.pass_to(now_s)
        found[now_s] = script.down
    return found


@given(st.integers(0, 1000), ROUNDS)
@settings(max_examples=3, deadline=None)
def test_every_policy_meets_the_same_faults(seed, round_s):
    rules = Settings(mode="rigid", round_s=round_s, faults=OFTEN, seed=seed)
    seen = [Noting(Shuffle(seed)), Noting(Shuffle(seed + 1, keep=0.9))]
    results = [run(rules, policy) for policy in seen]
    for policy in seen:
        assert policy.down == down_at(policy.down, seed)
    jobs = zip(JOBS, results[0].jobs, results[1].jobs, strict=True)
    script = FaultScript(OFTEN, racks().nodes, seed)
    for index, (trace, *both) in enumerate(jobs):
        given_up = trace.submit_s + script.cancelled_after_s(index)
        for job in both:
            late_s = 60.0 if round_s else 1e-6  # in rounds, users cancel at the end of a round
            assert job.finish_s <= given_up + late_s
            assert not job.cancelled or job.finish_s >= given_up - 1e-6


@given(st.integers(0, 1000), ROUNDS)
@settings(max_examples=3, deadline=None)
def test_equal_seeds_give_equal_results_and_jobs_end(seed, round_s):
    rules = Settings(mode="rigid", round_s=round_s, faults=OFTEN, seed=seed)
    first, second = (run(rules, Shuffle(seed)) for _ in range(2))
    assert first == second and len(first.jobs) == len(JOBS)
    stays = sorted(
        (node, local, i.start_s, i.end_s)
        for job in first.jobs
        for i in job.intervals
        for node, devices in i.devices.items()
        for local in devices
    )
    for before, after in itertools.pairwise(stays):
        assert before[:2] != after[:2] or before[3] <= after[2] + 1e-6
    if round_s is None:  # on events, a job leaves a node at the very moment at which the node fails
        long = [stay for stay in stays if stay[3] - stay[2] > 0.1]
        within = {t for _, _, a, b in long for t in (a + 0.01, (a + b) / 2, b - 0.01)}
        down = down_at(within, seed)
        for node, _, a, b in long:
            assert not any(node in down[t] for t in (a + 0.01, (a + b) / 2, b - 0.01))
    assert loads(dumps(first), Result) == first


@pytest.mark.parametrize("round_s", [60.0, None])
def test_nothing_changes_where_nothing_goes_wrong(round_s):
    without, with_none = (
        run(Settings(mode="rigid", round_s=round_s, faults=faults), Shuffle(3))
        for faults in (None, Faults())
    )
    assert without == with_none and not without.faults()
    failures = Failures(mean_between_s=3000.0)
    both = [
        run(Settings(mode="rigid", round_s=round_s, failures=failures, faults=faults), Shuffle(3))
        for faults in (None, Faults())
    ]
    assert both[0] == both[1]


def alone(**changes):
    """Simulate one rigid job of two devices, from time 0, on events."""
    job = TraceJob(id="only", submit_s=0.0, application="toy", num_devices=2, global_batch_size=64)
    rules = Settings(mode="rigid", round_s=None, rounding=False, restart_s=10.0, **changes)
    (found,) = run(rules, Static(), jobs=(job,), where=cluster("a")).jobs
    return found, truth().job(job, rules, 0).isolated_s("a", (2,))


def test_a_crash_costs_a_restart_and_the_work_since_the_last_checkpoint():
    calm, needed = alone()
    assert calm.finish_s == pytest.approx(10 + needed)
    faults = Faults(mean_to_crash_s=150.0, checkpoint_s=60.0)
    crashed, _ = alone(faults=faults, seed=2)
    assert crashed.crashes > 2 and crashed.restarts == 0
    extra = crashed.finish_s - calm.finish_s
    # Saved at the first event after 60 s; there is at least one event every 60 s.
    assert 10 * crashed.crashes < extra <= (10 + 120) * crashed.crashes
    assert len(crashed.intervals) == 1


def test_a_slow_node_slows_the_job_and_other_nodes_do_not():
    always = Faults(slow=(Slowdowns(mean_between_s=1e-3, mean_length_s=1e9, speed=0.25),))
    found, needed = alone(faults=always)
    assert found.finish_s == pytest.approx(10 + 4 * needed, rel=1e-3)
    script = FaultScript(OFTEN, racks().nodes, 0)
    at = next(
        t for t in range(0, 100000, 50) if script.pass_to(float(t)) or script.speed(["a0"]) < 1
    )
    slow = script.speed(["a0"])
    assert at > 0 and script.speed(["a0", "a1"]) == min(slow, script.speed(["a1"]))


def test_the_cancelled_count_for_devices_and_not_for_completion():
    faults = Faults(cancellations=Cancellations(share=1.0, mean_after_s=300.0))
    result = run(Settings(mode="rigid", round_s=None, faults=faults), Shuffle(1))
    given_up = [job for job in result.jobs if job.cancelled]
    done = [job for job in result.jobs if not job.cancelled]
    assert given_up and done
    assert all(job.rho is None and job.start_s <= job.finish_s for job in given_up)
    average = sum(job.jct_s for job in done) / len(done)
    assert result.summary()["average_jct_s"] == pytest.approx(average)
    assert result.faults() == f"{len(given_up)} jobs cancelled"


def test_the_means_are_those_that_were_asked_for():
    nodes = read_cluster("40x4/8").nodes
    assert len({node.labels["rack"] for node in nodes}) == 5
    script, down, failed, end_s = FaultScript(OFTEN, nodes, 1), 0, 0, 100_000
    for now_s in range(0, end_s, 50):
        failed += len(script.pass_to(float(now_s)))
        down += len(script.down)
    by_node = 1000 / 1100 * (3000 / 3100)
    assert down / (end_s / 50) / len(nodes) == pytest.approx(1 - by_node, rel=0.2)
    assert failed / len(nodes) == pytest.approx(end_s * (1 / 1100 + 1 / 3100), rel=0.2)
    crashes = list(itertools.islice(script.crashes(3), 2000))
    assert sum(crashes) / 2000 == pytest.approx(150, rel=0.1)
    gone = [script.cancelled_after_s(i) for i in range(2000)]
    assert sum(t < math.inf for t in gone) == pytest.approx(600, rel=0.1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("node=720", "node=HOURS:REPAIR"),
        ("fire=3", "node=HOURS:REPAIR"),
        ("crash=often", "such as node=720"),
        ("node=1:1,node=2:1", "twice"),
        ("crash=0.01", "never finishes"),
        ("slow=1:1:2", "below 1"),
        ("node=0:1", "above 0"),
        ("cancel=2:1", "at most 1"),
    ],
)
def test_impossible_faults_are_refused(capsys, text, says):
    with pytest.raises(ValueError, match=says):
        read_faults(text)
    code = cli.main(["simulate", "--workload", "synthetic:2", "--faults", text])
    assert code == 2 and says in capsys.readouterr().err


@pytest.mark.slow
def test_faults_from_the_command_line(capsys):
    small = ["simulate", "--workload", "synthetic:5", "--hours", "0.2", "--seed", "7"]
    text = "node=2:0.1,rack=9:0.1,slow=1:0.1:0.5,slow=9:1:0.1,crash=0.5,checkpoint=0.1"
    small += ["--policy", "goodput,static", "--faults", text]
    assert cli.main([*small, "--cluster", "2x4"]) == 2
    assert "16x4/8" in capsys.readouterr().err
    assert cli.main([*small, "--cluster", "2x4/1"]) == 0
    said = capsys.readouterr().out
    assert "goodput: " in said and "failures of nodes" in said and "crashes of jobs" in said
