"""The same event log gives the same plans: the simulator's, and the service's by its journal."""

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from jaxgoodput.cluster.catalogue import PolicyEntry
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.scheduler import Goodput, Policy, Sia
from jaxgoodput.cluster.service.planning import decide
from jaxgoodput.cluster.service.record.events import (
    CoordinatorEnded,
    HintsReceived,
    JobSubmitted,
    NodeJoined,
)
from jaxgoodput.cluster.service.record.journal import ClusterJournal
from jaxgoodput.cluster.service.record.state import State
from jaxgoodput.cluster.service.wire import Submission
from jaxgoodput.cluster.simulate import simulate
from jaxgoodput.cluster.simulate.jobs.model import ModelApplication, ModelTruth
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.cluster.simulate.simulator import uniform_cluster
from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.goodput.perf import PerfParams
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.specs import Hints, LayoutHints, StepCost

pytestmark = pytest.mark.slow

KIND, RESTART_S = "h200", 20.0
COSTS = {
    "narrow": StepCost(
        compute_base=0.02, compute_per_sample=0.001, intra_base=0.02, intra_per_replica=0.004,
        inter_base=0.08, inter_per_replica=0.01, overlap=1.5, update_s=0.002,
    ),
    "wide": StepCost(
        compute_base=0.05, compute_per_sample=0.004, intra_base=0.005, intra_per_replica=0.0005,
        inter_base=0.02, inter_per_replica=0.002, overlap=2.0, update_s=0.004,
    ),
}  # fmt: skip
GRADS = {"narrow": GradParams(sqr=1.0, var=2.0), "wide": GradParams(sqr=1.0, var=40.0)}
LIMITS = BatchLimits(base=128, max=2048, micro=(8, 128))


@dataclass(frozen=True)
class Recording:
    """A policy that writes down what it was asked and what it answered."""

    policy: Policy
    log: list = field(default_factory=list)

    def __call__(self, jobs, cluster, now_s, /):
        decision = self.policy(jobs, cluster, now_s)
        self.log.append((tuple(jobs), now_s, decision))
        return decision


def truth():
    return ModelTruth(
        {
            name: ModelApplication(
                perf={KIND: PerfParams(**vars(cost))},
                limits=LIMITS,
                first=GRADS[name],
                last=GRADS[name],
                num_samples=3e5,
                num_phases=1,
            )
            for name, cost in COSTS.items()
        }
    )


def workload(seed, num_jobs=12):
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(60.0, num_jobs))
    return tuple(
        TraceJob(
            id=f"job-{i}",
            submit_s=float(times[i]),
            application=("narrow", "wide")[int(rng.integers(2))],
            num_devices=1,
            global_batch_size=128,
        )
        for i in range(num_jobs)
    )


def hints(application, largest, number):
    layout = LayoutHints(
        name="data", devices_per_replica=1, cost=COSTS[application], error=0.0, micro=LIMITS.span
    )
    grad = GRADS[application]
    return Hints(
        generation=0,
        number=number,
        kind=KIND,
        num_devices=1,
        largest=largest,
        progress=float(number),
        base_batch_size=LIMITS.base,
        max_global_batch_size=LIMITS.max,
        max_micro_batches=LIMITS.max_micro_batches,
        layouts=(layout,),
        grad_sqr=(float(grad.sqr),),
        grad_var=(float(grad.var),),
    )


def close(a, b):
    """Equal, but for what sums of floats in another order may differ by."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-6)
    if isinstance(a, dict) and isinstance(b, dict):
        return set(a) == set(b) and all(close(a[key], b[key]) for key in a)
    return a == b


@pytest.mark.parametrize("policy", [Goodput(), Sia()], ids=["goodput", "sia"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_service_plans_as_the_simulator_did(tmp_path, policy, seed):
    cluster = uniform_cluster(KIND, 2, 8)
    jobs = workload(seed)
    recording = Recording(policy)
    settings = Settings(round_s=None, restart_s=RESTART_S, work_left="history")
    result = simulate(jobs, cluster, recording, truth(), settings=settings)
    applications = {job.id: job.application for job in jobs}
    ends = {record.id: record.finish_s for record in result.jobs}
    named = PolicyEntry(policy=policy, says="", mode="adaptive")
    rules = decide.PlanRules(named=named, restart_s=RESTART_S)

    journal = ClusterJournal(tmp_path)
    wall = 1e9

    def write(at_s, *events):
        journal.append(events, at_s, wall + at_s)

    write(0.0, *(NodeJoined(node=node, instance="one") for node in cluster.nodes))
    state = State()
    come, gone, told, by_id = set(), set(), {}, {}
    num_changes = 0
    for number, (views, now_s, decision) in enumerate(recording.log, start=1):
        by_id = {view.spec.id: view for view in views}
        happened: list[tuple[float, CoordinatorEnded | JobSubmitted]] = [
            (ends[id_], CoordinatorEnded(job=id_, attempt=1, code=0))
            for id_ in come - gone - set(by_id)
        ]
        for view in views:
            if view.spec.id not in come:
                submission = Submission(
                    spec=view.spec, command=("python", "-m", applications[view.spec.id])
                )
                submitted = JobSubmitted(submission=submission, secret="s")
                happened.append((view.submitted_s, submitted))
        for at_s, event in sorted(happened, key=lambda pair: pair[0]):
            write(at_s, event)
            if isinstance(event, JobSubmitted):
                come.add(event.submission.spec.id)
            else:
                gone.add(event.job)
        for id_, view in by_id.items():
            if view.largest_profiled != told.get(id_, 0):
                told[id_] = view.largest_profiled
                said = hints(applications[id_], view.largest_profiled, number)
                write(now_s, HintsReceived(job=id_, hints=said))

        state, _ = journal.replay(state)
        for ours in decide.views_of(state, now_s, rules):
            theirs = by_id[ours.spec.id]
            for name in (f.name for f in dataclasses.fields(theirs)):
                a, b = getattr(ours, name), getattr(theirs, name)
                a, b = (dict(x) if hasattr(x, "items") else x for x in (a, b))
                assert close(a, b), (now_s, ours.spec.id, name, a, b)
        plan = decide.plan(state, now_s, rules)
        assert plan is not None
        for id_ in by_id:
            wanted = decision.allocations.get(id_)
            has = {} if wanted is None else dict(wanted.devices)
            assert dict(plan.allocations[id_].devices) == has, (now_s, id_)
        planned, reasoned = decide.as_events(state, plan, now_s)
        num_changes += len(planned.changes)
        write(now_s, planned, *([reasoned] if reasoned.reasons else []))  # as `adopt` does
    # A service that was killed just now knows the same.
    assert ClusterJournal(tmp_path).replay()[0] == journal.replay(state)[0]
    assert len(gone) >= len(jobs) - len(by_id) and num_changes > len(jobs)
