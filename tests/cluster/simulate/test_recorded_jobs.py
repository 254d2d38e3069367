"""Jobs that ran elsewhere are simulated: with enough devices for as long as they ran, else with queues."""

import json
import pathlib
import re
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_files import LAYOUTS, LoggedJob

from jaxgoodput import cli
from jaxgoodput.clock import FakeClock
from jaxgoodput.cluster.catalogue import catalogue
from jaxgoodput.cluster.published.recorded.layout import columns_layout
from jaxgoodput.cluster.published.recorded.read import read_recorded, recorded
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.service.wire import Submission
from jaxgoodput.cluster.simulate import pictures
from jaxgoodput.cluster.simulate.comparison import compare
from jaxgoodput.cluster.simulate.jobs.durations import Amdahl, DurationTruth, read_curve
from jaxgoodput.cluster.simulate.jobs.job import spec_of
from jaxgoodput.cluster.simulate.recorded import (
    TraceOptions,
    cluster_for,
    read_trace_scenario,
    recorded_scenario,
)
from jaxgoodput.cluster.simulate.rules import read_settings
from jaxgoodput.cluster.simulate.scenario import read_cluster
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.cluster.simulate.simulator import simulate
from jaxgoodput.specs import JobSpec, JobTerms, Shape

POLICIES = catalogue()
RULES = read_settings("own", "recorded")
# At least ten minutes, so that five seconds until the next decision are below 1 %.
JOBS = st.lists(
    st.builds(
        LoggedJob,
        submit_s=st.integers(0, 50_000),
        wait_s=st.integers(0, 10**4),
        duration_s=st.integers(600, 10**5),
        num_devices=st.sampled_from([1, 1, 2, 3, 4, 6, 8, 12, 16, 40]),
    ),
    min_size=1,
    max_size=25,
)


def run(capsys, *arguments):
    try:
        code = cli.main(["simulate", *arguments])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    return code, said.out, said.err


def job(id_="a", **changes) -> TraceJob:
    made = TraceJob(id=id_, submit_s=0.0, application="job", num_devices=2, duration_s=1000.0)
    return replace(made, **changes)


def seconds(trace: TraceJob) -> float:
    assert trace.duration_s is not None
    return trace.duration_s


def result(scenario, policy="static", settings=RULES):
    (found,) = compare(scenario, {policy: POLICIES[policy]}, settings)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["static", "tiresias", "goodput"])
@pytest.mark.parametrize("name", LAYOUTS)
@given(jobs=JOBS)
@settings(max_examples=4, deadline=None)
def test_with_devices_for_all_a_job_takes_as_long_as_it_ran(name, policy, jobs, tmp_path_factory):
    path = tmp_path_factory.mktemp(name) / "trace"
    path.write_text(LAYOUTS[name](jobs))
    scenario = read_trace_scenario(TraceOptions(path=str(path), preset=name), "unlimitedx8")
    found = result(scenario, policy)
    for record, trace in zip(found.jobs, scenario.jobs, strict=True):
        assert record.jct_s == pytest.approx(seconds(trace), rel=0.01)
        assert record.restarts == 0
    mean = sum(j.duration_s for j in jobs) / len(jobs)
    assert found.summary()["average_jct_s"] == pytest.approx(mean, rel=0.01)


@given(jobs=JOBS)
@settings(max_examples=15, deadline=None)
def test_with_devices_for_all_there_is_one_decision_for_each_arrival(jobs):
    traces = [
        job(str(i), submit_s=float(j.submit_s), duration_s=float(j.duration_s), num_devices=j.num_devices)
        for i, j in enumerate(jobs)
    ]  # fmt: skip
    scenario = recorded_scenario("t", recorded(traces, {}), "unlimitedx8", None)
    days = max(j.end_s for j in jobs) / 86400
    assert len(result(scenario).decision_s) <= len(jobs) + days + 1


@given(jobs=JOBS, nodes=st.integers(5, 7))
@settings(max_examples=15, deadline=None)
def test_on_few_devices_all_jobs_run_and_none_is_faster(jobs, nodes):
    traces = [
        job(str(i), submit_s=float(j.submit_s), duration_s=float(j.duration_s), num_devices=j.num_devices)
        for i, j in enumerate(jobs)
    ]  # fmt: skip
    scenario = recorded_scenario("t", recorded(traces, {}), f"{nodes}x8", None)
    found = result(scenario, "static")
    assert len(found.jobs) == len(jobs)
    for record, trace in zip(found.jobs, scenario.jobs, strict=True):
        assert record.jct_s >= seconds(trace) - 1e-6
        assert sum(record.device_s.values()) == pytest.approx(
            seconds(trace) * trace.num_devices, rel=1e-6
        )


def test_a_settled_cluster_gives_the_same_completion_times(tmp_path):
    """Decisions that are left out while all jobs run would have changed nothing."""
    traces = [
        job(str(i), submit_s=97.0 * i, duration_s=500.0 + 311 * (i % 7), num_devices=1 + i % 5)
        for i in range(14)
    ]
    scenario = recorded_scenario("t", recorded(traces, {}), "2x8", None)
    often = replace(RULES, settled_gap_s=None)
    for policy in ("static", "tiresias", "goodput"):
        few, many = result(scenario, policy), result(scenario, policy, often)
        assert [j.finish_s for j in few.jobs] == pytest.approx([j.finish_s for j in many.jobs])
        assert len(few.decision_s) < len(many.decision_s)


def test_a_job_of_more_than_a_node_takes_whole_nodes():
    jobs = [job("a", num_devices=12), job("b", num_devices=8), job("c", num_devices=3)]
    scenario = recorded_scenario("t", recorded(jobs, {}), "4x8", None)
    assert [j.num_devices for j in scenario.jobs] == [16, 8, 3]
    assert "1 job of more than one node: rounded up to whole nodes" in scenario.remarks
    elastic = recorded_scenario("t", recorded(jobs, {}), "4x8", Amdahl(0.1))
    assert [j.num_devices for j in elastic.jobs] == [12, 8, 3]


@pytest.mark.parametrize(
    "cluster, size, has",
    [("gpu:1x8,gpu:1x4", 10, 10), ("gpu:1x8,gpu:3x3", 16, None), ("2x8", 10, 16)],
)
def test_a_job_keeps_its_size_where_so_many_whole_nodes_are_not_there(cluster, size, has):
    jobs = [job("a", num_devices=size), job("b")]
    scenario = recorded_scenario("t", recorded(jobs, {}), cluster, None)
    found = {j.id: j.num_devices for j in scenario.jobs}
    assert found.get("a") == has
    assert has is not None or "1 of a size that the nodes do not hold" in scenario.remarks[0]


def test_jobs_that_cannot_run_on_the_cluster_are_counted():
    jobs = [
        job("a"),
        job("b", num_devices=100),
        job("c", num_devices=17),
        job("d", kinds=("a100",)),
        job("e", kinds=("gpu",)),
    ]
    scenario = recorded_scenario("t", recorded(jobs, {"x": 2}), "2x8", None)
    assert [j.id for j in scenario.jobs] == ["a", "e"]
    said = scenario.remarks[0]
    assert "2 larger than the cluster" in said and "2 x" in said
    assert "1 only for kinds of device that the cluster does not have" in said
    with pytest.raises(ValueError, match="no job of t fits on the cluster"):
        recorded_scenario("t", recorded(jobs[1:2], {}), "2x8", None)


def test_kinds_and_domains_that_the_cluster_does_not_know_are_said():
    jobs = [job("a", kinds=("t4",)), job("b", level="rack")]
    scenario = recorded_scenario("t", recorded(jobs, {}), "2x8", None)
    assert [(j.kinds, j.level) for j in scenario.jobs] == [(None, None)] * 2
    assert any("the trace names t4, and the cluster has gpu" in said for said in scenario.remarks)
    assert any("no node has a label rack" in said for said in scenario.remarks)
    known = recorded_scenario("t", recorded(jobs, {}), "t4:4x8/2,gpu:2x8", None)
    assert [(j.kinds, j.level) for j in known.jobs] == [(("t4",), None), (None, "rack")]
    for record in result(known, "goodput").jobs:
        assert record.id != "a" or set(record.device_s) == {"t4"}


@given(st.floats(0, 0.9), st.floats(1, 8), st.integers(1, 64))
def test_a_curve_is_one_on_the_devices_of_the_trace_and_never_more_than_linear(serial, most, size):
    truth = DurationTruth(("gpu",), Amdahl(serial, most))
    made = truth.job(job(num_devices=size), Settings(), 0)
    shapes = tuple(Shape("gpu", 1, count) for count in range(1, 9 * size))
    table = made.goodput(shapes)
    assert max(s.num_devices for s in table) == int(most * size)
    assert table[Shape("gpu", 1, size)] == pytest.approx(1.0)
    for shape, speed in table.items():
        assert speed * size <= max(shape.num_devices, size) * (1 + 1e-9)
    rigid = truth.job(job(num_devices=size), Settings(mode="rigid"), 0)
    assert {s.num_devices for s in rigid.goodput(shapes)} == {size}


@pytest.mark.parametrize(
    "text", ["", "most=2", "serial=1", "serial=-1", "serial=x", "serial=0.1,most=0"]
)
def test_a_curve_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="--elastic"):
        read_curve(text)


def test_an_unlimited_cluster_has_nodes_for_the_jobs_that_run_at_once():
    jobs = [job(str(i), submit_s=5000.0 * i, num_devices=9) for i in range(20)]
    assert len(cluster_for("h200:unlimitedx8", jobs).nodes) == 2
    together = [job(str(i), num_devices=9) for i in range(20)]
    nodes = cluster_for("h200:unlimitedx8", together).nodes
    assert len(nodes) == 40 and {(n.kind, n.num_devices) for n in nodes} == {("h200", 8)}
    assert cluster_for("2x4", jobs) == read_cluster("2x4", kind="gpu")


def test_jobs_of_traces_and_of_the_service_have_the_same_terms():
    terms = {f.name for f in fields(JobTerms)}
    for kind in (TraceJob, JobSpec):
        assert issubclass(kind, JobTerms)
    own = {f.name for f in fields(JobSpec)} - terms
    assert own <= {f.name for f in fields(TraceJob)}
    # What only one of them has, and why.
    assert {f.name for f in fields(TraceJob)} - own - terms == {
        "submit_s",  # the service notes it itself
        "application", "num_steps", "duration_s", "global_batch_size",  # what a real job is, it does
        "slo",  # of Gavel's traces; it becomes `deadline_s`
    }  # fmt: skip
    assert {f.name for f in fields(Submission)} == {
        "spec",
        "command", "cwd", "workdir", "variables",  # nothing is started in a simulation
        "devices_per_process",  # traces count devices, not processes
    }  # fmt: skip
    wanted = {
        "preferred_kinds": ("gpu",), "preference": 2.0, "cpus_per_device": 4.0,
        "memory_gib_per_device": 8.0,
        "weight": 3.0, "tenant": "t", "preemptible": False, "min_run_s": 60.0, "kinds": ("gpu",),
        "level": "rack", "deadline_s": 99.0, "budget": 5.0,
    }  # fmt: skip
    assert wanted.keys() == terms
    trace = job(min_devices=2, max_devices=6, **wanted)
    spec = spec_of(trace, "elastic", 64, ("gpu", "t4"))
    assert {name: getattr(spec, name) for name in terms} == wanted
    assert (spec.min_devices, spec.max_devices) == (2, 6)
    with pytest.raises(ValueError, match="allows only gpu, but its program runs on t4"):
        spec_of(trace, "rigid", 64, ("t4",))


def test_every_term_of_a_job_can_be_a_column_of_a_trace(tmp_path):
    wanted = {
        "cpu": ("12", "cpus_per_device", 4.0),
        "memory": ("24", "memory_gib_per_device", 8.0),
        "kind": ("a|b", "kinds", ("a", "b")),
        "prefer": ("b", "preferred_kinds", ("b",)),
        "preference": ("2", "preference", 2.0),
        "tenant": ("t", "tenant", "t"),
        "min": ("2", "min_devices", 2),
        "max": ("5", "max_devices", 5),
        "weight": ("3", "weight", 3.0),
        "level": ("rack", "level", "rack"),
        "min_run": ("00:01:00", "min_run_s", 60.0),
        "preemptible": ("no", "preemptible", False),
        "deadline": ("300", "deadline_s", 200.0),
        "budget": ("7", "budget", 7.0),
    }
    sizes = {"min_devices", "max_devices"}
    assert {name for _, name, _ in wanted.values()} == {f.name for f in fields(JobTerms)} | sizes
    roles = ["submit", "devices", "duration", *wanted]
    path = tmp_path / "t.csv"
    cells = ["100", "3", "60", *(text for text, _, _ in wanted.values())]
    path.write_text(",".join(roles) + "\n" + ",".join(cells) + "\n")
    layout = columns_layout(",".join(f"{role}={role}" for role in roles))
    (found,) = read_recorded(path, layout).jobs
    assert {name: getattr(found, name) for _, name, _ in wanted.values()} == {
        name: value for _, name, value in wanted.values()
    }
    (path.parent / "w.csv").write_text(path.read_text().replace(",no,", ",maybe,"))
    with pytest.raises(ValueError, match="'preemptible': 'maybe' is neither yes nor no"):
        read_recorded(tmp_path / "w.csv", layout)


def test_cpus_and_memory_limit_what_runs_together(tmp_path):
    """Four jobs of one device, of which the CPUs of the only node are enough for two, or for one."""
    jobs = [job(str(i), num_devices=1, cpus_per_device=4.0) for i in range(4)]
    for text, ends in (("1x8", 1), ("1x8+8cpu", 2), ("1x8+7cpu", 4), ("1x8+100cpu+64gib", 1)):
        scenario = recorded_scenario("t", recorded(jobs, {}), f"gpu:{text}", None)
        found = result(scenario, "goodput")
        last_s = max(one.finish_s for one in found.jobs)
        assert last_s == pytest.approx(1000.0 * ends, rel=0.2), text
    with pytest.raises(ValueError, match="--policy tiresias: does not support CPUs and memory"):
        result(scenario, "tiresias")
    none = recorded_scenario("t", recorded([*jobs, job("x")], {}), "gpu:1x8+3cpu", None)
    assert [j.id for j in none.jobs] == ["x"]
    assert "4 in need of more CPUs or memory than the nodes have" in none.remarks[0]


def test_a_rigid_job_is_spread_if_a_node_has_too_few_cpus():
    jobs = [job("a", num_devices=8, duration_s=1000.0, cpus_per_device=8.0)]
    scenario = recorded_scenario("t", recorded(jobs, {}), "gpu:3x8+32cpu", None)
    found = result(scenario, "goodput")
    assert found.jobs[0].finish_s == pytest.approx(1000.0, rel=0.01)


def test_a_job_that_may_not_be_preempted_keeps_its_devices():
    long = job("long", num_devices=8, duration_s=40_000.0, preemptible=False)
    short = job("short", num_devices=8, submit_s=10.0, duration_s=600.0)
    kept, taken = (
        simulate(
            recorded([replace(long, preemptible=preemptible), short], {}).jobs,
            read_cluster("1x8", kind="gpu"),
            POLICIES["tiresias"].policy,
            DurationTruth(("gpu",)),
            settings=RULES,
            clock=FakeClock(),
        )
        for preemptible in (False, True)
    )
    assert kept.jobs[0].restarts == 0 and kept.jobs[0].finish_s == pytest.approx(40_000.0)
    assert kept.jobs[1].start_s >= 40_000.0
    # Tiresias lets newer jobs pass after 16 device-hours.
    assert taken.jobs[1].start_s < 40_000.0 and taken.jobs[0].finish_s > 40_000.0


# The command line.


@pytest.fixture
def trace(tmp_path) -> pathlib.Path:
    path = tmp_path / "jobs.csv"
    path.write_text(
        "id|at|gpus|ran|how|who\n"
        "a|2024-01-01T00:00:00|1|0-03:00:00|COMPLETED|ann\n"
        "b|2024-01-01T01:00:00|4|02:00:00|FAILED|bob\n"
        "c|2024-01-01T02:00:00|0|02:00:00|COMPLETED|bob\n"
    )
    return path


COLUMNS = ("--columns", "id=id,submit=at,devices=gpus,duration=ran,state=how,user=who")


def test_a_trace_with_named_columns(capsys, tmp_path, trace, monkeypatch):
    monkeypatch.setattr(pictures, "has_matplotlib", lambda: False)
    out = tmp_path / "out"
    code, said, err = run(
        capsys, "--trace", str(trace), *COLUMNS, "--cluster", "2x4", "--policy", "static,tiresias",
        "--out", str(out),
    )  # fmt: skip
    assert code == 0, err
    assert "jobs.csv, 2 jobs on 8 devices" in said and "2 of 3 rows" in said
    assert "left out: 1 without devices" in said
    body = json.loads((out / "results.json").read_text())
    assert body["summaries"]["static"]["average_jct_s"] == pytest.approx(9000.0, rel=1e-3)
    assert any("without devices" in remark for remark in body["remarks"])
    code, said, _ = run(
        capsys, "--trace", str(trace), *COLUMNS, "--cluster", "2x4", "--policy", "goodput",
        "--states", "COMPLETED", "--tenants", "ann,bob",
    )  # fmt: skip
    assert code == 0 and "1 jobs on 8 devices" in said
    assert "1 in state FAILED" in said


def test_elastic_jobs_say_what_was_assumed(capsys, trace):
    code, said, err = run(
        capsys, "--trace", str(trace), *COLUMNS, "--cluster", "2x4", "--policy", "goodput",
        "--elastic", "serial=0.1,most=2",
    )  # fmt: skip
    assert code == 0, err
    assert "assumed: all jobs are elastic" in said and "Amdahl" in said


@pytest.mark.parametrize(
    "options, says",
    [
        ("--deadlines 1:2 --policy goodput,edf", "edf: 2 of 2 deadlines met"),
        ("--prices gpu=1 --budgets all=2 --policy static", "out of money: a, b"),
        ("--rules realistic --restart-s 20 --policy goodput", "goodput"),
        ("--policy optimus --work-left told --elastic serial=0.1", "optimus"),
        ("--explain b@90m", "gets: 4 gpu on 1 node"),
    ],
)
def test_what_holds_for_other_workloads_holds_for_traces(capsys, trace, options, says):
    words = ["--trace", str(trace), *COLUMNS, "--cluster", "2x4", *options.split()]
    code, said, err = run(capsys, *words)
    assert code == 0 and says in said, err


WRONG = {
    "no layout": (["--trace", "T"], "with --preset"),
    "no such preset": (["--trace", "T", "--preset", "moon"], "'moon'.*helios, acme"),
    "both": (["--trace", "T", "--preset", "helios", *COLUMNS], "Leave one out"),
    "no cluster": (["--trace", "T", *COLUMNS], "Add --cluster"),
    "other columns": (
        ["--trace", "T", "--preset", "helios", "--cluster", "1x8"],
        "columns are id, at",
    ),
    "states without a column": (
        ["--trace", "T", "--columns", "submit=at,devices=gpus,duration=ran", "--states", "x"],
        "Add state=NAME",
    ),
    "no such state": (
        ["--trace", "T", *COLUMNS, "--cluster", "1x8", "--states", "x"],
        "no row is a job",
    ),
    "two kinds of workload": (
        ["--trace", "T", *COLUMNS, "--workload", "synthetic:3"],
        "--workload",
    ),
    "hours": (["--trace", "T", *COLUMNS, "--hours", "3"], "--hours"),
    "a preset without a trace": (["--preset", "helios"], "--preset helios: it describes a --trace"),
    "a curve without a trace": (["--elastic", "serial=0.1"], "applies to --trace and --history"),
    "a long delimiter": (["--trace", "T", *COLUMNS, "--delimiter", "ab"], "--delimiter 'ab'"),
    "tenants of others": (
        ["--trace", "T", *COLUMNS, "--cluster", "1x8", "--tenants", "x,y"],
        "belong to ann, bob",
    ),
    "unknown samples": (["--trace", "T", *COLUMNS, "--inputs", "cpus=8"], "--inputs cpus=8"),
    "unknown states": (
        ["--trace", "T", *COLUMNS, "--cluster", "2x4", "--rules", "realistic"],
        "Add --restart-s",
    ),
    "an unknown duration": (
        ["--trace", "T", *COLUMNS, "--cluster", "2x4", "--what-if", "job:2@2h"],
        "has no duration",
    ),
    "no journal": (["--history", "D"], "there is no journal"),
    "a preset for a journal": (["--history", "D", "--preset", "helios"], "layout of its own"),
}


@pytest.mark.parametrize("arguments, says", WRONG.values(), ids=WRONG)
def test_options_that_do_not_fit_are_named(capsys, trace, tmp_path, arguments, says):
    places = {"T": str(trace), "D": str(tmp_path)}
    code, said, err = run(capsys, *(places.get(word, word) for word in arguments))
    assert code == 2 and not said
    assert re.search(says, err), err
