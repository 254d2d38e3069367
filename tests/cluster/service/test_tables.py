"""What a job tells and what is made of it: tables are the forecast of its own journal, to the last digit."""

import dataclasses
import subprocess
import sys
from typing import Annotated

import pydantic
import pytest
import services
import synthetic

from jaxgoodput.cluster.catalogue import catalogue
from jaxgoodput.cluster.scheduler.priors import assumed_goodput
from jaxgoodput.cluster.scheduler.reconcile import PlanError
from jaxgoodput.cluster.scheduler.shapes import shapes
from jaxgoodput.cluster.service.node.hints import hints_of
from jaxgoodput.cluster.service.planning import decide
from jaxgoodput.cluster.service.planning.follow import Planner
from jaxgoodput.cluster.service.planning.tables import table_of, work_left
from jaxgoodput.cluster.service.record.events import (
    HintsReceived,
    JobSubmitted,
    JournalEntry,
    NodeJoined,
    PlanMade,
)
from jaxgoodput.cluster.service.record.journal import ClusterJournal as Events
from jaxgoodput.cluster.service.record.state import JobEntry, NodeEntry, State, step
from jaxgoodput.cluster.service.web.requests import StrictJson
from jaxgoodput.cluster.service.wire import Sharing
from jaxgoodput.cluster.simulate.simulator import uniform_cluster
from jaxgoodput.observe import events
from jaxgoodput.observe.forecast import forecast, shapes_up_to
from jaxgoodput.observe.journal import Journal
from jaxgoodput.specs import Allocation, ClusterSpec, Hints, Node, Shape, StepCost

KIND = "cpu"


def write(folder, clock, *events_):
    writer = Journal(folder, clock=clock)
    for event in events_:
        writer.write(event)
    writer.close()
    return folder


@pytest.fixture
def run(tmp_path, clock):
    """A run on 8 devices of one node whose fit is the truth."""
    return write(
        tmp_path / "run",
        clock,
        synthetic.fit_start(),
        synthetic.tune_end(100, 200.0, synthetic.START),
        synthetic.window(110, 220.0, 7040, synthetic.START),
    )


def told(*arguments):
    """The hints of a run that has some."""
    hints = hints_of(*arguments)
    assert hints is not None
    return hints


def entry_of(hints, **spec):
    made = services.submission("a", **{"max_devices": 16, **spec})
    return JobEntry(submission=made, secret="", submitted_s=0.0, hints=hints)


def test_a_table_is_the_forecast_of_the_journal(run):
    hints = told(run, KIND, 3, 1)
    assert (hints.generation, hints.num_devices, hints.largest) == (3, 8, 8)
    assert hints.progress == 220.0
    offered = shapes_up_to(KIND, 16, 2)
    forecasts = {one.shape: one.goodput for one in forecast(run, offered).expected}
    table = table_of(entry_of(hints), offered, 0.0)
    assert set(table.goodput) == set(forecasts)
    for shape, goodput in forecasts.items():
        assert table.goodput[shape] == pytest.approx(goodput, rel=1e-12), shape
    assert table.largest == 8


def test_a_limit_after_an_explosion_holds_in_the_tables_too(tmp_path, clock, run):
    grad = dataclasses.replace(synthetic.tune_end(100, 200.0, synthetic.START).grad, most_gain=1.5)
    limited = write(
        tmp_path / "limited",
        clock,
        synthetic.fit_start(),
        synthetic.tune_end(100, 200.0, synthetic.START, grad=grad),
        synthetic.window(110, 220.0, 7040, synthetic.START),
    )
    hints = told(limited, KIND, 3, 1)
    assert hints.most_gain == 1.5 and told(run, KIND, 3, 1).most_gain is None
    offered = shapes_up_to(KIND, 16, 2)
    forecasts = {one.shape: one.goodput for one in forecast(limited, offered).expected}
    table = table_of(entry_of(hints), offered, 0.0).goodput
    assert table == pytest.approx(forecasts, rel=1e-12)
    free = table_of(entry_of(told(run, KIND, 3, 1)), offered, 0.0).goodput
    assert all(table[shape] <= free[shape] for shape in free)
    assert max(table.values()) < 0.9 * max(free.values())


def test_hints_come_through_the_wire_as_they_are(run):
    hints = told(run, KIND, 3, 1)
    text = services.as_json(hints)
    body = pydantic.TypeAdapter(Annotated[Hints, StrictJson()])  # as a route reads it
    assert body.validate_python(text) == hints


def test_no_more_is_believed_than_twice_what_was_seen(run):
    hints = dataclasses.replace(told(run, KIND, 0, 1), largest=2)
    offered = shapes_up_to(KIND, 16, 2)
    table = table_of(entry_of(hints), offered, 0.0)
    assert {shape.num_devices for shape in table.goodput} == {1, 2, 4}


def test_processes_of_several_devices_have_whole_ones(run):
    hints = told(run, KIND, 0, 1)
    made = services.submission("a", min_devices=2, max_devices=16)
    made = dataclasses.replace(made, devices_per_process=2)
    entry = JobEntry(submission=made, secret="", submitted_s=0.0, hints=hints)
    offered = (*shapes_up_to(KIND, 16, 2), Shape(KIND, 1, 3))
    assert {s.num_devices for s in table_of(entry, offered, 0.0).goodput} == {2, 4, 8, 16}


def test_a_job_that_tells_nothing_grows_by_what_it_was_seen_on():
    cluster = uniform_cluster(KIND, 1, 8)
    new = entry_of(None)
    assert table_of(new, shapes(cluster), 0.0).goodput == {Shape(KIND, 1, 1): 1.0}
    rules = decide.PlanRules(named=catalogue()["goodput"])
    state = None
    found = []
    for at_s in (0.0, 100.0, 200.0, 300.0):
        state, plan = lived(state, cluster, rules, at_s)
        found.append(plan.allocations["a"].num_devices)
    assert found == [1, 2, 4, 8]


def test_a_job_that_is_to_tell_of_itself_gets_no_more_before_its_first_steps(run):
    offered = shapes_up_to(KIND, 16, 2)
    begun = dataclasses.replace(told(run, KIND, 0, 1), layouts=(), progress=0.0, largest=1)
    trains = dataclasses.replace(begun, progress=5.0)
    for hints, widest in ((None, 1), (begun, 1), (trains, 2)):
        entry = entry_of(hints)
        made = services.with_workdir(entry.submission, "/runs/a")
        entry = dataclasses.replace(entry, submission=made)
        found = table_of(entry, offered, 0.0).goodput
        assert max(shape.num_devices for shape in found) == widest, hints


@pytest.mark.parametrize("mode", ["adaptive", "elastic"])
@pytest.mark.parametrize(("least", "most"), [(3, 3), (5, 7)])
def test_a_job_of_any_size_runs_and_grows_to_its_limit(mode, least, most):
    cluster = uniform_cluster(KIND, 1, 8)
    rules = decide.PlanRules(named=catalogue()["goodput"])
    spec = {"mode": mode, "min_devices": least, "max_devices": most}
    state, found = None, []
    for at_s in (0.0, 100.0):
        state, plan = lived(state, cluster, rules, at_s, **spec)
        found.append(plan.allocations["a"].num_devices)
    assert found == [least if mode == "adaptive" else most, most]


def lived(state, cluster, rules, at_s, **spec):
    """The state after another decision, carried out."""

    def happen(state, event):
        return step(state, JournalEntry(state.seq + 1, at_s, 1e9, event))

    if state is None:
        state = State()
        for node in cluster.nodes:
            state = happen(state, NodeJoined(node=node, instance="one"))
        submission = services.submission("a", **{"max_devices": 8, **spec})
        state = happen(state, JobSubmitted(submission=submission, secret="s"))
    plan = decide.plan(state, at_s, rules)
    assert plan is not None
    planned, _ = decide.as_events(state, plan, at_s)
    return happen(state, planned), plan


def test_elastic_and_rigid_jobs():
    offered = (*shapes(uniform_cluster(KIND, 2, 4)), Shape(KIND, 1, 3))
    elastic = table_of(entry_of(None, mode="elastic", max_devices=8), offered, 0.0)
    assert elastic.goodput == {s: assumed_goodput(s) for s in offered}
    rigid = table_of(entry_of(None, mode="rigid", num_devices=3), offered, 0.0)
    assert set(rigid.goodput) == {Shape(KIND, 1, 3)}


@pytest.mark.parametrize("mode", ["rigid", "elastic", "adaptive"])
@pytest.mark.parametrize("has_layouts", [True, False])
@pytest.mark.parametrize("is_measured", [True, False])
def test_the_work_left_is_in_the_unit_of_the_table(run, mode, has_layouts, is_measured):
    """Left work over goodput on the present devices is the same time, whatever the table is made of."""
    hints = dataclasses.replace(
        told(run, KIND, 8, 1), total=1e4, goodput=500.0 if is_measured else None, throughput=None
    )
    hints = hints if has_layouts else dataclasses.replace(hints, layouts=())
    shape = Shape(KIND, 1, 8)
    entry = entry_of(hints, mode=mode, num_devices=8 if mode == "rigid" else None)
    table = table_of(entry, [shape], 0.0)
    left = work_left(hints, table)
    in_samples = has_layouts and mode != "rigid"
    assert table.in_samples == in_samples
    if in_samples:
        assert left == hints.remaining
    elif is_measured:
        assert left is not None and hints.remaining is not None
        assert left / table.goodput[shape] == pytest.approx(hints.remaining / 500.0)
    else:
        assert left is None


def test_an_elastic_job_that_has_measured_is_planned_by_its_measurements(run):
    hints = told(run, KIND, 3, 1)
    offered = shapes_up_to(KIND, 16, 2)
    elastic = table_of(entry_of(hints, mode="elastic"), offered, 0.0)
    # On 8 devices it was measured; its fixed batch is worth no more there than the best one.
    best = table_of(entry_of(hints), offered, 0.0).goodput[Shape(KIND, 1, 8)]
    assert 0 < elastic.goodput[Shape(KIND, 1, 8)] <= best * (1 + 1e-9)
    assert elastic.goodput != {s: assumed_goodput(s) for s in elastic.goodput}


@pytest.mark.parametrize(
    ("each", "least", "whole", "sizes"),
    [(1, 9, 8, {9, 10, 11, 12}), (4, 12, 8, {12}), (3, 9, 6, {9, 12}), (3, 9, 8, set())],
)
def test_a_process_is_not_split_over_nodes(each, least, whole, sizes):
    submission = dataclasses.replace(
        services.submission("a", mode="elastic", min_devices=least, max_devices=12),
        devices_per_process=each,
    )
    entry = JobEntry(submission=submission, secret="", submitted_s=0.0)
    offered = [Shape(KIND, 1, whole), *(Shape(KIND, 2, n) for n in (9, 10, 11, 12))]
    assert {s.num_devices for s in table_of(entry, offered, 0.0).goodput} == sizes


def test_before_its_first_fit_a_run_says_how_far_it_is(tmp_path, clock):
    folder = write(
        tmp_path / "run",
        clock,
        synthetic.fit_start(),
        synthetic.window(10, 20.0, 640, synthetic.START),
    )
    hints = told(folder, KIND, 1, 1)
    assert hints.layouts == () and hints.progress == 20.0
    assert hints_of(tmp_path / "nothing", KIND, 1, 1) is None


def test_processes_that_came_and_went_are_counted(run, clock):
    def regrouped(before, after, **seconds):
        return events.Regrouped(
            step=120, generation=2, num_processes_before=before, num_processes=after,
            reason="", seconds=seconds,
        )  # fmt: skip

    write(run, clock, regrouped(0, 2, joined=9.0), regrouped(2, 3, state=0.5, compile=1.5))
    hints = told(run, KIND, 1, 2)
    assert hints.num_devices == 6
    assert hints.restarts_s == (2.0,)  # what a newcomer took says nothing of a change
    # The next fit was measured on those.
    batch = dataclasses.replace(synthetic.START, num_replicas=24)
    write(run, clock, synthetic.tune_end(130, 260.0, batch))
    assert told(run, KIND, 1, 2).layouts[0].devices_per_replica == 1


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"progress": float("nan")}, "progress"),
        ({"progress": float("inf")}, "progress"),
        ({"grad_sqr": (1.0,)}, "1 grad_sqr and 0 grad_var"),
        ({"num_devices": 0}, "num_devices=0"),
        ({"max_global_batch_size": 1}, "max_global_batch_size=1"),
        ({"min_global_batch_size": 10**6}, "min_global_batch_size"),
        ({"restarts_s": (-1.0,)}, "restarts_s"),
        ({"largest": 2**30}, "largest"),
        ({"number": 10**400}, "number"),
        ({"generation": 10**400}, "generation"),
        ({"num_devices": 10**400}, "num_devices"),
        ({"global_batch_size": 10**400}, "global_batch_size"),
        ({"max_micro_batches": 4096}, "max_micro_batches"),
    ],
)
def test_hints_that_cannot_be(changes, says):
    fields = {
        "generation": 0, "number": 0, "kind": KIND, "num_devices": 1, "largest": 1,
        "progress": 0.0, "base_batch_size": 32, "max_global_batch_size": 64,
    }  # fmt: skip
    with pytest.raises(ValueError, match=says):
        Hints(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"micro": (1, 10**30)}, "micro"),
        ({"residuals": ((10**30, 1e30),)}, "residual"),
        ({"residuals": ((1, 1.0),) * 257}, "257 residuals"),
        ({"devices_per_replica": 10**400}, "devices_per_replica"),
    ],
)
def test_layouts_that_no_table_can_be_made_of(run, changes, says):
    (layout,) = told(run, KIND, 0, 1).layouts
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(layout, **changes)


def test_many_layouts_have_few_micro_batches(run):
    hints = told(run, KIND, 0, 1)
    with pytest.raises(ValueError, match="max_micro_batches=33.* from 1 to 32"):
        dataclasses.replace(hints, layouts=hints.layouts * 64, max_micro_batches=33)


def test_a_job_whose_hints_make_no_table_costs_the_others_nothing(run):
    def broken(entry, offered, now_s):
        if entry.hints is not None:
            raise TypeError("no table")
        return table_of(entry, offered, now_s)

    state, happens = State(), (
        NodeJoined(node=Node(name="n0", kind=KIND, num_devices=4), instance="one"),
        JobSubmitted(submission=services.submission("a"), secret="s"),
        JobSubmitted(submission=services.submission("b"), secret="s"),
        HintsReceived(job="a", hints=told(run, KIND, 0, 1)),
    )  # fmt: skip
    for place, event in enumerate(happens, 1):
        state = step(state, JournalEntry(place, 0.0, 1e9, event))
    plan = decide.plan(state, 10.0, decide.PlanRules(named=catalogue()["goodput"]), broken)
    assert plan is not None
    assert all(plan.allocations[job].num_devices for job in "ab")


def test_what_a_library_prints_is_no_answer():
    program = (
        "import os; from jaxgoodput.cluster.service.planning.follow import answers_apart; "
        "out = answers_apart(); os.write(1, b'noise'); print('an answer', file=out, flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"an answer\n"
    assert b"noise" in done.stderr


def test_a_question_that_no_plan_answers_is_refused_and_not_the_end(tmp_path, monkeypatch):
    Events(tmp_path).close()
    planner = Planner(tmp_path, decide.PlanRules(named=catalogue()["goodput"]))

    def broken(*_):
        raise PlanError("impossible")

    monkeypatch.setattr(decide, "explained", broken)
    said = planner.answer({"do": "explain", "job": "a", "now_s": 0.0})
    assert said == {"status": 409, "error": "impossible"}


def test_costs_that_cannot_be():
    good = {name: 0.1 for name in ("compute_base", "compute_per_sample", "intra_base")}
    good |= {name: 0.1 for name in ("intra_per_replica", "inter_base", "inter_per_replica")}
    with pytest.raises(ValueError, match="numbers from 0"):
        StepCost(**good, overlap=float("nan"))


def test_what_if_is_the_plan_that_a_submission_gets():
    """Also if earlier runs of the script decide who comes first."""
    cluster = uniform_cluster(KIND, 1, 8)
    state = lived_with_history(cluster)
    rules = decide.PlanRules(named=catalogue()["goodput"])
    asked = dataclasses.replace(
        services.submission("new", mode="rigid", num_devices=8), command=("python", "short.py")
    )
    found = decide.what_if(state, asked, 1e5, rules)
    entry = JobEntry(submission=asked, secret="", submitted_s=1e5, settled_s=1e5)
    after = dataclasses.replace(state, jobs={**state.jobs, "new": entry})
    plan = decide.plan(after, 1e5, rules)
    assert plan is not None and plan.allocations["new"].num_devices == 8
    assert found.gets != "no devices"


def lived_with_history(cluster):
    """A state in which short runs of one script and long ones of another have ended, and a long one waits."""
    nodes = {n.name: NodeEntry(node=n, instance="i", version=0) for n in cluster.nodes}
    jobs = {}
    for script, device_s, count in (("short.py", 480.0, 30), ("long.py", 8e6, 60)):
        for i in range(count):
            id_ = f"{script}-{i}"
            made = services.submission(id_, mode="rigid", num_devices=8)
            made = dataclasses.replace(made, command=("python", script))
            jobs[id_] = JobEntry(
                submission=made,
                secret="",
                submitted_s=0.0,
                phase="done",
                received_s={KIND: device_s},
            )
    waits = services.submission("waits", mode="rigid", num_devices=8)
    waits = dataclasses.replace(waits, command=("python", "long.py"))
    jobs["waits"] = JobEntry(submission=waits, secret="", submitted_s=9.99e4, settled_s=9.99e4)
    return State(nodes=nodes, jobs=jobs)


def test_what_if_and_explain_answer_from_the_journal(tmp_path, run):
    journal = Events(tmp_path)
    node = Node(name="n0", kind=KIND, num_devices=4)
    allocation = Allocation(devices={"n0": (0, 1, 2, 3)}, generation=1)
    big = services.submission("big", min_devices=4, max_devices=4, preemptible=False)
    small = services.submission("small", min_devices=2, max_devices=4)
    journal.append(
        [
            NodeJoined(node=node, instance="one"),
            JobSubmitted(submission=big, secret="s"),
            JobSubmitted(submission=small, secret="s"),
            PlanMade(changes={"big": allocation}, solved_s=1.0, next_solve_s=60.0),
            HintsReceived(job="big", hints=told(run, KIND, 1, 1)),
        ],
        1.0,
        1e9,
    )
    state, _ = journal.replay()
    rules = decide.PlanRules(named=catalogue()["goodput"])
    said = decide.explained(state, "small", 10.0, rules)
    assert said.message.startswith("waits: ") and said.changes
    assert decide.explained(state, "big", 10.0, rules).constraint == "none"
    found = decide.what_if(state, services.submission("more", max_devices=1), 10.0, rules)
    assert found.gets == "no devices" and found.job == "more"
    assert isinstance(decide.cluster_of(state, Sharing()), ClusterSpec)
