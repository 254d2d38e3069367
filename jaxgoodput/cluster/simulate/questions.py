"""Answers `--explain JOB@TIME` and `--what-if SPEC@TIME` with tables about one decision of a simulation.

Both run the workload under one policy up to that time, take the last decision before it, and ask the policy
again with one thing changed (`scheduler.explain`, `scheduler.alternatives`).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from jaxgoodput.cluster.catalogue import PolicyEntry
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.scheduler.alternatives import (
    Change,
    alternatives,
    changes,
    lost,
    shapes_of,
    speed,
    with_job,
)
from jaxgoodput.cluster.scheduler.explain import explain
from jaxgoodput.cluster.scheduler.policy import JobView, Mode
from jaxgoodput.cluster.scheduler.shapes import shape_in_words
from jaxgoodput.cluster.simulate.checks import check
from jaxgoodput.cluster.simulate.comparison import plain_table
from jaxgoodput.cluster.simulate.key_numbers import naming
from jaxgoodput.cluster.simulate.scenario import Scenario
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.cluster.simulate.simulator import SimulatedDecision, decision_at
from jaxgoodput.specs import Shape

MOST_ROWS = 24  # jobs that are listed with their devices; smaller ones are only counted
MOST_NAMED = 3  # jobs that are named beside an alternative
_TIME = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>[smhd]?)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def read_moment(text: str, option: str) -> tuple[str, float]:
    """Return (what, seconds) of `WHAT@TIME`; TIME is in seconds, or a number with s, m, h or d.

    >>> read_moment("job-3@1.5h", "--explain")
    ('job-3', 5400.0)
    """
    what, _, time = text.rpartition("@")
    found = _TIME.fullmatch(time)
    if not what or found is None:
        raise ValueError(
            f"{option} {text!r}: expected {'JOB' if option == '--explain' else 'SPEC'}@TIME. TIME is "
            "counted from the start of the workload, in seconds or as 90m, 1.5h or 2d."
        )
    return what, float(found["number"]) * _SECONDS[found["unit"]]


def explanation(
    scenario: Scenario, name: str, named: PolicyEntry, settings: Settings, text: str
) -> str:
    """Return why a job had its devices at a time: the reason, the alternatives, and who had the devices.

    Raises ValueError if there is no such job or time.
    """
    job, at_s = read_moment(text, "--explain")
    with naming(f"--explain {text!r}"):
        decided, _ = _decided(scenario, name, named, settings, at_s, None)
    view = next((v for v in decided.jobs if v.spec.id == job), None)
    if view is None:
        raise ValueError(f"--explain {text!r}: {_absent(job, at_s, decided)}")
    plan, policy = decided.plan, named.policy
    has = shapes_of(plan, decided.cluster)
    others = alternatives(job, decided.jobs, decided.cluster, policy, decided.now_s, plan)
    said = explain(job, decided.jobs, decided.cluster, policy, decided.now_s, plan=plan)
    lines = [
        f"{name} at {_time(at_s)}: {job}, {decided.applications[job]}, {view.spec.mode}, weight "
        f"{view.spec.weight:g}, arrived at {_time(view.submitted_s)}; decided at {_time(decided.now_s)}",
        f"had:  {_had(view, decided)}",
        f"gets: {_in_words(has[job])}",
        f"why:  {plan.reasons[job]}",
    ]
    if said.constraint != "none":
        lines.append(f"      {said.message}")
        lines += [f"it would run with: {change}" for change in said.changes]
    lines += [
        "",
        "Alternatives. Speed: relative to the best shape of the job. Price: the speed that other jobs",
        "would lose, in units of a job at its best; a shape in brackets needs a far higher weight.",
        "",
    ]
    rows = [("now: " + _in_words(has[job]), _share(speed(view, has[job])), "", "")]
    for other in others:
        shape = shape_in_words(other.shape)
        price = "0.00" if abs(other.price) < 5e-3 else f"{other.price:.2f}"
        rows.append(
            (
                shape if other.given else f"({shape})",
                _share(other.speed),
                price,
                _named(other.others),
            )
        )
    lines += [plain_table(("shape", "speed", "price", "who would change"), rows), ""]
    lines += ["Jobs with devices.", "", _holders(decided, job)]
    return "\n".join(lines)


def what_if(
    scenario: Scenario, name: str, named: PolicyEntry, settings: Settings, text: str
) -> str:
    """Return what would change at a time if there were one more job.

    Raises ValueError if the text describes no job.
    """
    what, at_s = read_moment(text, "--what-if")
    trace = read_job(what, at_s)
    with naming(f"--what-if {text!r}"):
        decided, view = _decided(scenario, name, named, settings, at_s, trace)
    assert view is not None  # it was asked for
    plan = with_job(view, decided.jobs, decided.cluster, named.policy, decided.now_s)
    found = changes(decided.jobs, decided.cluster, decided.plan, plan)
    given = shapes_of(plan, decided.cluster)[trace.id]
    lines = [
        f"{name} at {_time(at_s)}: if {trace.id!r} ({trace.application}, {view.spec.mode}) arrived then; "
        f"decided at {_time(decided.now_s)}",
        f"gets: {_in_words(given)}, {_share(speed(view, given))} of its best speed",
        f"why:  {plan.reasons[trace.id]}",
        f"{len(found)} of {len(decided.jobs)} jobs would change; together they lose {lost(found):.2f} "
        "jobs at their best speed",
    ]
    if found:
        rows = [
            (
                change.job,
                _in_words(change.before),
                _in_words(change.after),
                _share(change.speed_before),
                _share(change.speed_after),
            )
            for change in found
        ]
        heads = ("job", "now", "then", "speed now", "then")
        lines += ["", plain_table(heads, rows, left=3)]
    return "\n".join(lines)


def read_job(text: str, at_s: float) -> TraceJob:
    """Return the job of `APPLICATION[:DEVICES][,NAME=VALUE...]` with the names mode, batch, weight and id.

    Raises ValueError for any other text.
    """
    first, *rest = (part.strip() for part in text.split(","))
    application, _, devices = first.partition(":")
    found: dict[str, Any] = {"id": "what-if", "num_devices": 1, "global_batch_size": None}
    readers = {"mode": str, "batch": int, "weight": float, "id": str}
    names = {"batch": "global_batch_size"}
    try:
        if devices:
            found["num_devices"] = int(devices)
        for part in rest:
            key, _, value = part.partition("=")
            found[names.get(key, key)] = readers[key](value)
        if found["num_devices"] < 1 or found.get("mode", "rigid") not in get_args(Mode):
            raise ValueError
        if not 0 < found.get("weight", 1.0) < math.inf or (found["global_batch_size"] or 1) < 1:
            raise ValueError
        return TraceJob(application=application, submit_s=at_s, **found)
    except (ValueError, KeyError):
        raise ValueError(
            f"--what-if {text!r}: expected APPLICATION[:DEVICES][,mode={'|'.join(get_args(Mode))}]"
            "[,batch=SAMPLES][,weight=NUMBER][,id=NAME]@TIME, such as bert:8,weight=2@3h."
        ) from None


def _decided(
    scenario: Scenario,
    name: str,
    named: PolicyEntry,
    settings: Settings,
    at_s: float,
    added: TraceJob | None,
) -> tuple[SimulatedDecision, JobView | None]:
    check(scenario, settings, name, named)
    return decision_at(
        scenario.jobs,
        scenario.cluster,
        named.policy,
        scenario.truth,
        at_s,
        settings=replace(settings, mode=named.mode, sharing=named.sharing),
        added=added,
    )


def _absent(job: str, at_s: float, decided: SimulatedDecision) -> str:
    came = decided.submitted_s.get(job)
    if came is None:
        near = sorted(decided.submitted_s, key=lambda other: (other[:1] != job[:1], other))[:6]
        return f"there is no job {job!r} in this workload; there are {', '.join(near)} ..."
    here = ", ".join(view.spec.id for view in decided.jobs[:6])
    if came > at_s:
        return (
            f"{job!r} arrives only at {_time(came)}. Name a later time. Unfinished then: {here} ..."
        )
    if came > decided.now_s:
        return (
            f"{job!r} arrived at {_time(came)}, and no decision was made since. Name a later time."
        )
    return f"{job!r} was done by {_time(decided.now_s)}. Name an earlier time. Unfinished then: {here} ..."


def _had(view: JobView, decided: SimulatedDecision) -> str:
    kinds = {node.name: node.kind for node in decided.cluster.nodes}
    past = f"{view.num_restarts} restarts and {_hours(view):.1f} device-hours so far"
    if not view.allocation.devices:
        return f"no devices; {past}"
    kind = kinds[next(iter(view.allocation.devices))]
    shape = Shape(kind, view.allocation.num_nodes, view.allocation.num_devices)
    since = "" if view.since_s is None else f" since {_time(view.since_s)}"
    busy = ", still restarting" if view.restoring_until_s is not None else ""
    return f"{shape_in_words(shape)}{since}{busy}; {past}"


def _holders(decided: SimulatedDecision, job: str) -> str:
    has = shapes_of(decided.plan, decided.cluster)
    running = [(v, s) for v in decided.jobs if (s := has[v.spec.id]) is not None]
    running.sort(key=lambda pair: (-pair[1].num_devices, pair[0].spec.id))
    rows = [
        (
            ("> " if view.spec.id == job else "") + view.spec.id,
            shape_in_words(shape),
            _share(speed(view, shape)),
            f"{view.spec.weight:g}",
            f"{_hours(view):.1f}",
            f"{view.num_restarts}",
        )
        for view, shape in running[:MOST_ROWS]
    ]
    held = sum(shape.num_devices for _, shape in running)
    usable = sum(node.num_usable for node in decided.cluster.nodes if node.state == "up")
    waiting = sum(shape is None for shape in has.values())
    heads = ("job", "devices", "speed", "weight", "device-hours", "restarts")
    rest = running[MOST_ROWS:]
    more = (
        [f"and {len(rest)} more on {sum(s.num_devices for _, s in rest)} devices"] if rest else []
    )
    last = f"{held} of {usable} devices are taken; {waiting} jobs wait"
    return "\n".join([plain_table(heads, rows, left=2), *more, last])


def _hours(view: JobView) -> float:
    return sum(view.received_s.values()) / 3600


def _named(found: Sequence[Change]) -> str:
    said = [f"{c.job}: {_short(c.before)} -> {_short(c.after)}" for c in found[:MOST_NAMED]]
    more = len(found) - MOST_NAMED
    return ", ".join(said) + (f" and {more} more" if more > 0 else "")


def _short(shape: Shape | None) -> str:
    return "none" if shape is None else f"{shape.num_devices} {shape.kind}"


def _in_words(shape: Shape | None) -> str:
    return "no devices" if shape is None else shape_in_words(shape)


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.0f} %"


def _time(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds < 3600 else f"{seconds / 3600:.2f} h"
