"""`jaxgoodput decide` answers JSON with JSON: the service's own plan, for clusters that others run."""

import ctypes
import io
import json
import sys

import pages
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput import cli
from jaxgoodput._fields.serial import dumps, encode
from jaxgoodput.cluster.catalogue import catalogue
from jaxgoodput.cluster.scheduler.work_left import EndedJob
from jaxgoodput.cluster.service.decisions.answer import DecisionPlan, decide
from jaxgoodput.cluster.service.decisions.command import output_to_stderr
from jaxgoodput.cluster.service.decisions.request import (
    DecisionRequest,
    RequestedJob,
    read_request,
)
from jaxgoodput.cluster.service.planning.decide import PlanRules, plan, script_of
from jaxgoodput.cluster.service.record.state import JobEntry, NodeEntry, State
from jaxgoodput.cluster.service.wire import HeldDevices, Submission
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node

PAGE = pages.TOP / "docs" / "howto" / "decide.md"


def asked(monkeypatch, capsys, text, *arguments):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    code = cli.main(["decide", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def example() -> tuple[str, str]:
    """The request and the plan that the page shows."""
    request, answer = (b.text for b in pages.blocks(PAGE) if b.language == "text")
    return request, answer


def test_the_example_of_the_page_is_answered_as_it_says(monkeypatch, capsys, tmp_path):
    request, answer = example()
    code, said, err = asked(monkeypatch, capsys, request)
    assert code == 0, err
    found, shown = json.loads(said), json.loads(answer)
    for body in (found, shown):  # values of the objective depend on the policy's inner scale
        del body["objective"], body["bound"]
    assert found == shown
    path = tmp_path / "request.json"
    path.write_text(request)
    code, again, _ = asked(monkeypatch, capsys, "", str(path))
    assert code == 0 and again == said


def test_the_page_describes_every_field():
    text = PAGE.read_text()
    for kind in (DecisionRequest, RequestedJob, DecisionPlan, Node, ClusterSpec, EndedJob):
        missing = [name for name in kind.__dataclass_fields__ if f"`{name}`" not in text]
        assert set(missing) <= {"in_use"}, (kind, missing)


CHANGES = {
    "no JSON": (lambda r: "{", "not JSON"),
    "no object": (lambda r: "[]", "expected a JSON object"),
    "another version": (lambda r: r | {"version": 2}, "version 2, this program reads version 1"),
    "no version": (lambda r: {k: r[k] for k in r if k != "version"}, "version None"),
    "an unknown field": (lambda r: r | {"partition": "x"}, "no field 'partition'"),
    "memory": (lambda r: job_with(r, memory=3), r"jobs\[0\] has no field 'memory'"),
    "cpus of a job": (lambda r: job_with(r, cpus=3), r"jobs\[0\] has no field 'cpus'"),
    "memory of a node": (lambda r: node_with(r, memory=3), r"nodes\[0\] has no field 'memory'"),
    "too few cpus": (lambda r: node_with(r, cpus=-3), "cpus=-3"),
    "a preference for nothing": (lambda r: job_with(r, preferred_kinds=[]), "prefers no kind"),
    "a wrong type": (lambda r: job_with(r, min_devices="2"), "must be a whole number"),
    "a wrong policy": (lambda r: r | {"policy": "wizard"}, "policy is 'wizard'"),
    "packing": (lambda r: r | {"policy": "max-min-packed"}, "Choose another one"),
    "a wrong setting": (lambda r: r | {"settings": {"a": 1}}, "policy 'goodput' has no 'a'"),
    "a value that is none": (lambda r: r | {"settings": {"pause": "x"}}, "settings.pause is 'x'"),
    "a node that is not there": (
        lambda r: job_with(r, allocation={"x": [0]}, since_s=1.0),
        "node 'x', which is not one",
    ),
    "a device that is not there": (
        lambda r: job_with(r, allocation={"a1": [99]}, since_s=1.0),
        "Local indices are from 0",
    ),
    "devices since never": (lambda r: job_with(r, allocation={"a1": [0]}), "needs both"),
    "half a process": (lambda r: job_with(r, devices_per_process=3), "not a multiple"),
    "another clock": (lambda r: job_with(r, submitted_s=1e9), "which is after now_s"),
    "goodput on more nodes than it gets": (
        lambda r: job_with(r, goodput=[entry(num_nodes=2, num_devices=2)]),
        "the scheduler gives a job of this size",
    ),
    "an ended job of no devices": (
        lambda r: r | {"ended": [ended(num_devices=0)]},
        "an ended job of 'train.py' has num_devices=0",
    ),
    "less than no time": (lambda r: r | {"ended": [ended(device_s=-1)]}, "device_s=-1"),
    "a budget without prices": (lambda r: job_with(r, budget=5), "no prices"),
    "two of a name": (lambda r: r | {"jobs": r["jobs"][:1] * 2}, "train-7"),
    "used devices": (
        lambda r: r | {"cluster": r["cluster"] | {"in_use": {"a": {"b": 1}}}},
        "Leave it out",
    ),
}


def entry(**changes):
    return {"kind": "h200", "num_nodes": 1, "num_devices": 1, "goodput": 1.0} | changes


def ended(**changes):
    return {"script": "train.py", "owner": "default", "num_devices": 1, "device_s": 9.0} | changes


def request_of(num_nodes, each, *jobs, policy="goodput", **cluster):
    nodes = [{"name": f"n{i}", "kind": "h200", "num_devices": each} for i in range(num_nodes)]
    body = {"version": 1, "now_s": 7200.0, "cluster": {"nodes": nodes, **cluster}, "jobs": jobs}
    body["policy"] = policy
    return read_request(json.dumps(body))


def test_processes_are_not_split_over_nodes():
    asks = {"id": "x", "min_devices": 4, "max_devices": 8, "devices_per_process": 4}
    (job,) = decide(request_of(4, 2, asks)).jobs
    assert not job.allocation and "whole processes" in job.reason
    fixed = {"id": "x", "mode": "rigid", "num_devices": 4, "devices_per_process": 4}
    (job,) = decide(request_of(2, 4, fixed)).jobs
    assert job.num_devices == 4 and len(job.allocation) == 1


def test_goodput_of_a_kind_that_is_not_there_is_no_error():
    held = [
        {"id": f"h{i}", "mode": "rigid", "num_devices": 5, "preemptible": False, "since_s": 0.0}
        | {"allocation": {f"n{i}": [0, 1, 2, 3, 4]}}
        for i in range(2)
    ]
    table = [entry(num_devices=4), entry(kind="a100", num_devices=4)]
    waits = {"id": "w", "mode": "rigid", "num_devices": 4, "goodput": table}
    *_, job = decide(request_of(2, 8, *held, waits)).jobs
    assert job.explanation is not None and not job.allocation


def job_with(request, **changes):
    first = {k: v for k, v in request["jobs"][0].items() if k not in ("allocation", "since_s")}
    return request | {"jobs": [first | changes, *request["jobs"][1:]]}


def node_with(request, **changes):
    cluster = request["cluster"]
    nodes = [cluster["nodes"][0] | changes, *cluster["nodes"][1:]]
    return request | {"cluster": cluster | {"nodes": nodes}}


@pytest.mark.parametrize("change, says", CHANGES.values(), ids=CHANGES)
def test_a_wrong_request_is_named_and_ends_with_2(monkeypatch, capsys, change, says):
    body = change(json.loads(example()[0]))
    text = body if isinstance(body, str) else json.dumps(body)
    code, said, err = asked(monkeypatch, capsys, text)
    assert code == 2 and not said and "Traceback" not in err
    with pytest.raises(ValueError, match=says):
        decide(read_request(text))


def nodes_of(sizes):
    return tuple(Node(name=f"n{i}", kind="h200", num_devices=n) for i, n in enumerate(sizes))


@given(
    sizes=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4),
    jobs=st.lists(
        st.tuples(
            st.sampled_from(["adaptive", "elastic", "rigid"]),
            st.sampled_from([1, 2, 4]),
            st.integers(0, 900),
            st.booleans(),
            st.sampled_from(["a.py", "b.py", "c.sh"]),
        ),
        max_size=6,
    ),
    over=st.lists(
        st.tuples(
            st.sampled_from(["a.py", "b.py", "c.sh"]),
            st.sampled_from([1, 2, 8]),
            st.one_of(st.just(0.0), st.floats(1.0, 1e6)),
        ),
        max_size=5,
    ),
    policy=st.sampled_from(["goodput", "static", "tiresias", "sia"]),
)
@settings(max_examples=25, deadline=None)
def test_the_plan_is_the_one_that_the_service_makes(sizes, jobs, over, policy):
    """Of jobs that have reported nothing, some of which run, after others have ended."""
    nodes, now_s, free = nodes_of(sizes), 1000.0, sizes[0]
    entries, requested = {}, []
    for number, (script, size, used_s) in enumerate(over):
        spec = JobSpec(id=f"over{number}", max_devices=size)
        submission = Submission(spec=spec, command=("python", script))
        entries[spec.id] = JobEntry(
            submission=submission, secret="s", submitted_s=0.0, phase="done",
            finished_s=500.0, received_s={"h200": used_s} if used_s else {},
        )  # fmt: skip
    for number, (mode, size, since_s, runs, script) in enumerate(jobs):
        most = size if mode == "rigid" else 2 * size
        spec = JobSpec(
            id=f"j{number}", mode=mode, min_devices=size, max_devices=most,
            num_devices=size if mode == "rigid" else None,
        )  # fmt: skip
        devices = {}
        if runs and size <= free:
            free -= size
            devices = {"n0": tuple(range(free, free + size))}
        held = (
            (HeldDevices(start_s=float(since_s), end_s=None, devices=devices),) if devices else ()
        )
        entries[spec.id] = JobEntry(
            submission=Submission(spec=spec, command=("python", script)),
            secret="s",
            submitted_s=float(since_s),
            settled_s=now_s,
            allocation=Allocation(devices=devices),
            since_s=float(since_s) if devices else None,
            past=held,
        )
        requested.append(
            RequestedJob(
                **vars(spec), submitted_s=float(since_s), allocation=devices, restart_s=10.0,
                script=script_of(("python", script)),
                since_s=float(since_s) if devices else None,
            )
        )  # fmt: skip
    state = State(
        nodes={n.name: NodeEntry(node=n, instance="i", version=0) for n in nodes}, jobs=entries
    )
    rules = PlanRules(policy=policy, named=catalogue()[policy], restart_s=10.0)
    request = DecisionRequest(
        now_s=now_s,
        cluster=ClusterSpec(nodes=nodes),
        jobs=tuple(requested),
        ended=tuple(EndedJob(script_of((s,)), "default", size, used_s) for s, size, used_s in over),
        policy=policy,
        explain=False,
    )
    assert read_request(dumps(request)) == request
    expected = plan(state, now_s, rules)
    found = decide(request)
    assert (expected is None) == (not found.jobs)
    for job in found.jobs:
        assert expected is not None
        assert dict(job.allocation) == dict(expected.allocations[job.id].devices)
        assert job.reason == expected.reasons[job.id]
        assert job.change == ("none" if job.allocation == _had(entries, job.id) else job.change)


def _had(entries, id_):
    return entries[id_].allocation.devices


def test_tables_hints_and_settings_reach_the_policy():
    cluster = ClusterSpec(nodes=nodes_of([8]))
    flat = {"kind": "h200", "num_nodes": 1}
    steep = [flat | {"num_devices": n, "goodput": float(n)} for n in (1, 2, 4, 8)]
    level = [flat | {"num_devices": n, "goodput": 1.0 + 0.01 * n} for n in (1, 2, 4, 8)]
    common = {"max_devices": 8, "largest_profiled": 8}
    body = {
        "version": 1, "now_s": 0, "cluster": encode(cluster), "explain": False,
        "jobs": [{"id": "steep", "goodput": steep, **common}, {"id": "level", "goodput": level, **common}],
    }  # fmt: skip
    body["cluster"].pop("in_use")
    found = {job.id: job.num_devices for job in decide(read_request(json.dumps(body))).jobs}
    assert found["steep"] > found["level"]
    # The first job has had more than a threshold of a few seconds, so the second passes it.
    had = [{"id": id_, "submitted_s": at, "received_s": {"h200": s}, **common}
           for id_, at, s in (("a", 0, 100), ("b", 1, 3))]  # fmt: skip
    body |= {"now_s": 2, "jobs": had, "policy": "tiresias"}
    for settings_, first in (({}, "a"), ({"threshold_device_s": 5.0}, "b")):
        plan = decide(read_request(json.dumps(body | {"settings": settings_})))
        assert [job.id for job in plan.jobs if job.num_devices == 8] == [first]


def test_a_job_whose_script_ended_soon_before_goes_first():
    past = [ended(script="short.py", device_s=60.0)] * 9 + [
        ended(script="long.py", device_s=1e5)
    ] * 9
    jobs = [
        {"id": script, "mode": "rigid", "num_devices": 4, "script": script}
        for script in ("long.py", "short.py")
    ]
    nodes = {"nodes": encode(nodes_of([4]))}
    body = {"version": 1, "now_s": 0, "cluster": nodes, "jobs": jobs}
    for over, first in ((past, "short.py"), ([], "long.py")):
        long, short = decide(read_request(json.dumps(body | {"ended": over}))).jobs
        assert [job.id for job in (long, short) if job.allocation] == [first]


@pytest.mark.parametrize("remaining", [9.0, None])
@pytest.mark.parametrize(
    "policy", [name for name, entry in catalogue().items() if not entry.sharing]
)
def test_a_job_of_another_size_or_of_unknown_work_costs_no_plan(policy, remaining):
    """Policies that resize no job leave it at its size, also if more would fit by now."""
    waits = [{"id": f"w{i}", "max_devices": 2, "remaining": remaining} for i in range(3)]
    held = {"id": "h", "max_devices": 2, "remaining": 9.0, "since_s": 0.0}
    held |= {"allocation": {"n0": [0]}}
    plan = decide(request_of(1, 4, *waits, held, policy=policy))
    *_, h = plan.jobs
    if catalogue()[policy].mode != "adaptive":
        assert h.num_devices in (0, 1)
    if policy == "static":
        assert h.change == "none" and dict(h.allocation) == {"n0": (0,)}


def test_cpus_memory_and_preferred_kinds_are_kept_and_explained():
    node = {"num_devices": 4, "cpus": 20, "memory_gib": 100}
    needs = {"mode": "rigid", "num_devices": 2, "cpus_per_device": 4, "memory_gib_per_device": 10}
    body = {
        "version": 1, "now_s": 0,
        "cluster": {"nodes": [{"name": "a0", "kind": "a", **node}, {"name": "b0", "kind": "b", **node}]},
        "jobs": [{"id": f"j{i}", "preferred_kinds": ["b"], **needs} for i in range(3)]
        + [{"id": "large", **needs, "cpus_per_device": 8, "weight": 0.3}],
    }  # fmt: skip
    found = {job.id: job for job in decide(read_request(json.dumps(body))).jobs}
    assert [set(found[f"j{i}"].allocation) for i in range(3)].count({"b0"}) == 2
    assert sum("would rather have b" in job.reason for job in found.values()) == 1
    assert "2 a on 1 node with 8 CPUs and 10 GiB of memory per device" in found["large"].reason
    # Two jobs leave 4 of 20 CPUs, one leaves 12; the last job needs 16.
    why = found["large"].explanation
    assert why is not None and why.constraint == "needs"
    assert "needs 8 CPUs and 10 GiB of memory per device" in why.message
    assert "node a0 has 12 CPUs and 80 GiB of memory left beside 2 free devices" in why.message


def test_what_the_solver_prints_is_not_part_of_the_answer(capfd):
    """It is written in C++, whose output Python does not see."""
    c = ctypes.CDLL(None)
    with output_to_stderr():
        c.printf(b"from C\n")
        print("from Python")
    c.printf(b"later\n")
    c.fflush(None)
    print("{}")
    said = capfd.readouterr()
    assert "from C" in said.err and "from C" not in said.out
    assert "later" in said.out and "{}" in said.out
