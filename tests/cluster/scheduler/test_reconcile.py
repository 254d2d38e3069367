"""Laws of plans: whatever policy, jobs and cluster, nothing impossible and nothing unexplained."""

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import Fifo, after, check_plan, cluster_of, job_recipes, jobs_of, nodes, table

from jaxgoodput.cluster.published.sia import Sia
from jaxgoodput.cluster.scheduler.constraints import constraints_of
from jaxgoodput.cluster.scheduler.policies.goodput import Goodput
from jaxgoodput.cluster.scheduler.policy import Decision, JobView, SolverTimeout
from jaxgoodput.cluster.scheduler.reconcile import PlanError, reconcile
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node, Reservation, Shape

NAN = float("nan")
TWO = ClusterSpec(
    nodes=(Node(name="n0", kind="a", num_devices=4), Node(name="n1", kind="a", num_devices=4))
)


def view(id_: str, cluster: ClusterSpec = TWO, *, submitted_s: float = 0.0, **spec) -> JobView:
    return JobView(spec=JobSpec(id=id_, **spec), goodput=table(cluster), submitted_s=submitted_s)


def running(view_: JobView, devices: dict[str, tuple[int, ...]], since_s: float = 0.0) -> JobView:
    allocation = Allocation(devices=devices, generation=3)
    return dataclasses.replace(view_, allocation=allocation, since_s=since_s)


@dataclasses.dataclass(frozen=True)
class Says:
    """Answers always the same."""

    allocations: tuple[tuple[str, Allocation], ...]

    def __call__(self, jobs, cluster, now_s):
        return Decision(allocations=dict(self.allocations))


@dataclasses.dataclass(frozen=True)
class Late:
    """Never finds anything in time."""

    def __call__(self, jobs, cluster, now_s):
        raise SolverTimeout("0.1 s were not enough")


states = st.lists(st.sampled_from(["up", "down", "draining"]), max_size=8)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(nodes(), job_recipes(), states)
def test_no_plan_breaks_a_law(nodes, recipes, states):
    cluster = cluster_of(nodes)
    jobs = jobs_of(recipes, cluster)
    plan = reconcile(jobs, cluster, Fifo(), 0.0)
    check_plan(plan, jobs, cluster)
    assert plan == reconcile(jobs, cluster, Fifo(), 0.0)
    jobs = after(plan, jobs, 0.0)
    later_nodes = tuple(
        dataclasses.replace(node, state=states[i] if i < len(states) else node.state)
        for i, node in enumerate(cluster.nodes)
    )
    changed = dataclasses.replace(cluster, nodes=later_nodes)
    for policy, now_s in ((Fifo(), 50.0), (Late(), 50.0), (Fifo(), 200.0)):
        later = reconcile(jobs, changed, policy, now_s)
        check_plan(later, jobs, changed)
        assert later == reconcile(jobs, changed, policy, now_s)
        for v in jobs:
            alive = all(
                node.state != "down" for node in changed.nodes if node.name in v.allocation.devices
            )
            held = not v.spec.preemptible or (
                v.since_s is not None and now_s < v.since_s + v.spec.min_run_s
            )
            if v.allocation.devices and alive and held:
                assert later.allocations[v.spec.id] is v.allocation


@pytest.mark.parametrize("left", [-6000.0, float("inf"), NAN])
def test_work_that_cannot_be_left_is_reported_and_harms_nobody(left):
    odd = dataclasses.replace(view("odd"), remaining=left, largest_profiled=4)
    plan = reconcile([odd, view("other")], TWO, Goodput(), 0.0)
    assert set(plan.start) == {"odd", "other"} and "is no number" in plan.reasons["odd"]


@pytest.mark.parametrize("policy", [Goodput(), Sia()], ids=["goodput", "sia"])
@pytest.mark.parametrize(
    "cut",
    [
        {"quota": {"t": 3}},
        {
            "reservations": (
                Reservation(node="n0", num_devices=4, start_s=0.0, end_s=9e9, tenant="other"),
            )
        },
    ],
    ids=["quota", "reservation"],
)
def test_jobs_that_restart_give_way_to_new_limits(policy, cut):
    jobs = [
        dataclasses.replace(
            running(view(id_, tenant="t"), {node: (0, 1)}),
            restoring_until_s=50.0,
            restart_s=60.0,
            largest_profiled=2,
        )
        for id_, node in (("x", "n0"), ("y", "n1"))
    ]
    cluster = dataclasses.replace(TWO, **cut)
    plan = reconcile(jobs, cluster, policy, 10.0)
    check_plan(plan, jobs, cluster)
    assert reconcile(jobs, TWO, policy, 10.0).resize == ()


@settings(max_examples=100, deadline=None)
@given(nodes(), job_recipes())
def test_a_job_that_fits_nowhere_is_named_and_starves_nobody(nodes, recipes):
    cluster = cluster_of(nodes)
    jobs = jobs_of(recipes, cluster)
    hopeless = (
        JobView(
            spec=JobSpec(id="huge", min_devices=1000, max_devices=1000), goodput=table(cluster)
        ),
        JobView(spec=JobSpec(id="exotic", kinds=("vaporware",)), goodput=table(cluster)),
        JobView(spec=JobSpec(id="nothing"), largest_profiled=1),
        JobView(spec=JobSpec(id="nan"), goodput=dict.fromkeys(table(cluster), NAN)),
    )
    hopeless = tuple(dataclasses.replace(v, submitted_s=-1.0) for v in hopeless)
    without = reconcile(jobs, cluster, Fifo(), 0.0)
    plan = reconcile((*hopeless, *jobs), cluster, Fifo(), 0.0)
    for v in hopeless:
        assert not plan.allocations[v.spec.id].devices
        assert plan.reasons[v.spec.id].startswith("refused: ")
    for v in jobs:
        assert plan.allocations[v.spec.id] == without.allocations[v.spec.id]
        assert plan.reasons[v.spec.id] == without.reasons[v.spec.id]


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (
            view("x", min_devices=16),
            "at least 16 devices of one kind, and the cluster has 8 a in service",
        ),
        (view("x", kinds=("b",)), r"only devices of kind \['b'\], and the cluster has \['a'\]"),
        (JobView(spec=JobSpec(id="x"), goodput={Shape("a", 1, 1): NAN}), "no usable entry"),
        (view("x", mode="rigid", num_devices=3), "no entry between 3 and 3 devices"),
    ],
)
def test_refusals_say_what_is_wrong(job, words):
    reason = reconcile([job], TWO, Fifo(), 0.0).reasons["x"]
    assert re.search(words, reason), reason


def test_entries_that_are_not_positive_numbers_are_reported_and_not_used():
    one, two = Shape("a", 1, 1), Shape("a", 1, 2)
    job = JobView(spec=JobSpec(id="x"), goodput={one: NAN, two: 1.0, Shape("a", 1, 4): -1.0})
    plan = reconcile([job], TWO, Fifo(), 0.0)
    assert plan.allocations["x"].num_devices == 2
    assert "2 of 3 entries of its goodput table are not positive numbers" in plan.reasons["x"]
    assert "nan on 1 a on 1 node" in plan.reasons["x"]


def test_a_job_loses_what_was_on_a_node_that_is_down():
    job = running(view("x", min_devices=8), {"n0": (0, 1, 2, 3), "n1": (0, 1, 2, 3)})
    broken = dataclasses.replace(
        TWO, nodes=(TWO.nodes[0], dataclasses.replace(TWO.nodes[1], state="down"))
    )
    plan = reconcile([job], broken, Fifo(), 10.0)
    assert plan.pause == ("x",) and plan.allocations["x"] == Allocation(generation=4)
    assert "node n1 is down" in plan.reasons["x"]
    again = reconcile([running(view("y"), {"n1": (2,)})], broken, Fifo(), 10.0)
    assert again.resize == ("y",)
    assert set(again.allocations["y"].devices) == {"n0"}


def test_minimum_run_time_and_no_preemption_hold_against_any_policy():
    young = running(view("young", min_run_s=100.0), {"n0": (0,)}, since_s=0.0)
    fixed = running(view("fixed", preemptible=False), {"n1": (1, 2)}, since_s=0.0)
    nobody = Says(allocations=())
    plan = reconcile([young, fixed], TWO, nobody, 50.0)
    assert plan.allocations["young"] is young.allocation
    assert plan.allocations["fixed"] is fixed.allocation
    assert plan.next_solve_s == 100.0
    later = reconcile([young, fixed], TWO, nobody, 100.0)
    assert later.pause == ("young",)


def test_a_draining_node_keeps_its_jobs_and_gets_no_new_ones():
    draining = dataclasses.replace(
        TWO, nodes=(dataclasses.replace(TWO.nodes[0], state="draining"), TWO.nodes[1])
    )
    old = running(view("old"), {"n0": (0,)})
    new = [view(f"new{i}", min_devices=4, submitted_s=1.0) for i in range(2)]
    plan = reconcile([old, *new], draining, Fifo(), 10.0)
    assert plan.allocations["old"] is old.allocation
    assert plan.start == ("new0",) and set(plan.allocations["new0"].devices) == {"n1"}


def test_reserved_devices_are_for_their_tenant_only():
    reserved = dataclasses.replace(
        TWO,
        reservations=(
            Reservation(node="n0", num_devices=4, start_s=10.0, end_s=20.0, tenant="red"),
        ),
    )
    blue = [view(f"b{i}", tenant="blue", min_devices=4) for i in range(2)]
    red = view("red", tenant="red", min_devices=4, submitted_s=5.0)
    before = reconcile([*blue, red], reserved, Fifo(), 5.0)
    assert before.start == ("b0", "b1") and before.next_solve_s == 10.0
    during = reconcile([*blue, red], reserved, Fifo(), 10.0)
    assert set(during.allocations["red"].devices) == {"n0"}
    assert during.start == ("b0", "red") and during.next_solve_s == 20.0
    stays = running(red, {"n0": (0, 1, 2, 3)}, since_s=10.0)
    assert reconcile([*blue, stays], reserved, Fifo(), 12.0).allocations["red"] is stays.allocation
    maintenance = dataclasses.replace(
        TWO, reservations=(Reservation(node="n0", num_devices=4, start_s=0.0, end_s=20.0),)
    )
    assert reconcile([*blue, red], maintenance, Fifo(), 10.0).start == ("b0",)


def test_a_device_is_not_reserved_while_one_of_those_that_share_it_stays():
    cluster = dataclasses.replace(
        TWO,
        reservations=(Reservation(node="n0", num_devices=4, start_s=0.0, end_s=20.0),),
        price_per_hour={"a": 1.0},
    )
    both = Allocation(devices={"n0": (0, 1, 2, 3)}, share_group="g")
    stays = dataclasses.replace(view("x", preemptible=False), allocation=both, since_s=0.0)
    broke = dataclasses.replace(
        view("y", budget=1.0), allocation=both, since_s=0.0, received_s={"a": 7200.0}
    )
    for jobs in ([stays, broke], [broke, stays]):
        found = constraints_of(jobs, cluster, 10.0)
        assert set(found.held) == {"x"} and found.reserved == {None: {"n0": set()}}


def test_a_solver_that_is_too_late_changes_nothing_and_says_so():
    job, new = running(view("x"), {"n1": (3,)}), view("y")
    plan = reconcile([job, new], TWO, Late(), 10.0)
    assert plan.allocations["x"] is job.allocation and not plan.allocations["y"].devices
    assert "Late found no decision (0.1 s were not enough)" in plan.reasons["x"]
    assert (plan.start, plan.resize, plan.pause) == ((), (), ())


def test_other_errors_of_a_policy_are_not_swallowed():
    @dataclasses.dataclass(frozen=True)
    class Broken:
        def __call__(self, jobs, cluster, now_s):
            raise ZeroDivisionError("a defect")

    with pytest.raises(ZeroDivisionError):
        reconcile([view("x")], TWO, Broken(), 0.0)


def on(**devices: tuple[int, ...]) -> Allocation:
    return Allocation(devices=devices)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((("x", on(n0=(0,))), ("y", on(n0=(0,)))), "which it also gives to 'x'"),
        ((("x", on(n9=(0,))),), "does not exist"),
        ((("x", on(n0=(7,))),), "not all of which may be given"),
        ((("z", on(n0=(0,))),), "was not asked about it"),
        ((("y", on(n0=(0,), n1=(0, 1, 2, 3))),), "5 devices, but it takes 1 to 4"),
        ((("b", on(n0=(0,))),), "allows only"),
        ((("r", on(n0=(0,))),), "is rigid and takes 2"),
        ((("q", on(n0=(0, 1))),), "more than the quota of tenant 'poor', 1 devices"),
    ],
)
def test_an_impossible_answer_names_the_policy(answer, words):
    cluster = dataclasses.replace(
        TWO, nodes=(*TWO.nodes, Node(name="n2", kind="b", num_devices=1)), quota={"poor": 1}
    )
    jobs = [
        view("x"),
        view("y", max_devices=4),
        dataclasses.replace(view("b", cluster, kinds=("b",))),
        view("r", mode="rigid", num_devices=2),
        view("q", tenant="poor"),
    ]
    with pytest.raises(PlanError, match=words) as error:
        reconcile(jobs, cluster, Says(allocations=answer), 0.0)
    assert "policy Says" in str(error.value)


def test_jobs_that_share_a_group_share_devices():
    both = tuple((i, Allocation(devices={"n0": (0, 1)}, share_group="g")) for i in ("x", "y"))
    plan = reconcile([view("x"), view("y")], TWO, Says(allocations=both), 0.0)
    assert plan.start == ("x", "y")
    assert plan.allocations["x"].devices == plan.allocations["y"].devices
    jobs = after(plan, [view("x", preemptible=False), view("y")], 0.0)
    held = reconcile(jobs, TWO, Says(allocations=()), 10.0)
    assert held.pause == () and "shares its devices with x" in held.reasons["y"]


def test_jobs_that_contradict_one_another_are_an_error():
    one, other = running(view("x"), {"n0": (0,)}), running(view("y"), {"n0": (0,)})
    with pytest.raises(ValueError, match="both hold device 0 of node 'n0'"):
        reconcile([one, other], TWO, Fifo(), 0.0)
    with pytest.raises(ValueError, match="two jobs have the id 'x'"):
        reconcile([view("x"), view("x")], TWO, Fifo(), 0.0)


def test_between_two_decisions_lies_a_gap_but_losses_are_seen_at_once():
    jobs = [view("x")]
    first = reconcile(jobs, TWO, Fifo(), 100.0, min_gap_s=5.0, max_gap_s=60.0)
    assert first.next_solve_s == 160.0
    jobs = [*after(first, jobs, 100.0), view("new")]
    soon = reconcile(jobs, TWO, Fifo(), 102.0, last=first)
    assert soon.start == () and soon.next_solve_s == 105.0
    node = next(iter(first.allocations["x"].devices))
    broken = dataclasses.replace(
        TWO,
        nodes=tuple(
            dataclasses.replace(n, state="down" if n.name == node else "up") for n in TWO.nodes
        ),
    )
    assert reconcile(jobs, broken, Fifo(), 102.0, last=soon).pause == ("x",)
    assert reconcile(jobs, TWO, Fifo(), 105.0, last=soon).start == ("new",)
    with pytest.raises(ValueError, match="min_gap_s=70"):
        reconcile(jobs, TWO, Fifo(), 0.0, min_gap_s=70.0)


def test_deadlines_that_cannot_be_met_are_reported_and_the_job_runs():
    best = max(table(TWO).values())
    late = dataclasses.replace(view("late", deadline_s=5.0))
    tight = view("tight", deadline_s=20.0)
    tight = dataclasses.replace(tight, remaining=100 * best, largest_profiled=1)
    easy = dataclasses.replace(view("easy", deadline_s=1e6), remaining=100 * best)
    plan = reconcile([late, tight, easy], TWO, Fifo(), 10.0)
    assert "its deadline passed 5 s ago" in plan.reasons["late"]
    assert (
        "its deadline cannot be met: it needs 100 s on its best shape, 10 s are left"
        in plan.reasons["tight"]
    )
    assert "deadline" not in plan.reasons["easy"]
    assert plan.start == ("late", "tight", "easy")


def test_policies_see_neither_jobs_that_stay_nor_their_devices():
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Watch:
        def __call__(self, jobs, cluster, now_s):
            seen.append(
                (
                    [v.spec.id for v in jobs],
                    {n.name: n.withheld for n in cluster.nodes},
                    cluster.quota,
                )
            )
            return Decision(allocations={})

    fixed = running(view("fixed", preemptible=False, tenant="t"), {"n1": (1, 2)})
    cluster = dataclasses.replace(TWO, quota={"t": 5})
    reconcile([fixed, view("x")], cluster, Watch(), 0.0)
    assert seen == [(["x"], {"n0": (), "n1": (1, 2)}, {"t": 3})]
