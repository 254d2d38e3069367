"""Scenarios of jobs that ran elsewhere: traces with durations, and the journal of our own service.

Nothing in such a trace says how fast a job would be on other devices. So its jobs are rigid, unless a scaling
curve is assumed (`--elastic`), which the results then say. A rigid job that does not fit on one node takes
whole nodes.
"""

import heapq
import pathlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace

from jaxgoodput.cluster.published.recorded.layout import TraceLayout, columns_layout
from jaxgoodput.cluster.published.recorded.presets import PRESETS
from jaxgoodput.cluster.published.recorded.read import RecordedTrace, read_recorded, recorded
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.scheduler.placement.amounts import NOTHING, Amounts, needs_of, usable
from jaxgoodput.cluster.scheduler.shapes import packed
from jaxgoodput.cluster.service.record.history import PastJob, read_history
from jaxgoodput.cluster.service.wire import OVER
from jaxgoodput.cluster.simulate.jobs.durations import Amdahl, DurationTruth, read_curve
from jaxgoodput.cluster.simulate.key_numbers import naming
from jaxgoodput.cluster.simulate.scenario import Scenario, read_cluster
from jaxgoodput.specs import ClusterSpec, JobTerms

KIND = "gpu"  # of a cluster whose kind is not named
_UNLIMITED = re.compile(r"(?:(?P<kind>[A-Za-z0-9_.-]+):)?unlimitedx(?P<each>[1-9][0-9]{0,4})")
_SLACK_S = 600.0  # for which jobs may wait on an unlimited cluster, for the next decision
_DELIMITERS = {"tab": "\t", "space": " "}


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """The options of `jaxgoodput simulate` about a trace; see its help for what each of them means."""

    path: str
    preset: str | None = None
    columns: str | None = None
    states: str | None = None
    delimiter: str | None = None


def layout_of(options: TraceOptions) -> TraceLayout:
    """Return the layout that the options describe. Raises ValueError, naming the option."""
    states = None if options.states is None else tuple(s.strip() for s in options.states.split(","))
    delimiter = options.delimiter and _DELIMITERS.get(options.delimiter, options.delimiter)
    if delimiter is not None and len(delimiter) != 1:
        raise ValueError(
            f"--delimiter {options.delimiter!r}: expected one character, or tab or space."
        )
    if options.preset is not None:
        layout = _preset(options, options.preset)
        _require_state(layout, states)
        return replace(
            layout,
            states=layout.states if states is None else states,
            delimiter=delimiter or layout.delimiter,
        )
    if options.columns is None:
        raise ValueError(
            f"--trace {options.path}: say what its columns hold, with --preset ({', '.join(PRESETS)}) or "
            "with --columns, such as submit=submit_time,devices=gpu_num,duration=duration."
        )
    layout = columns_layout(options.columns, delimiter=delimiter)
    _require_state(layout, states)
    return replace(layout, states=states or ())


def _require_state(layout: TraceLayout, states: tuple[str, ...] | None) -> None:
    if states is not None and "state" not in layout.columns:
        raise ValueError(
            "--states: no column says in which state a job ended. Add state=NAME to --columns, or leave the "
            "states out."
        )


def _preset(options: TraceOptions, name: str) -> TraceLayout:
    if options.columns is not None:
        raise ValueError("--columns: the --preset says what the columns are. Leave one out.")
    if name not in PRESETS:
        raise ValueError(
            f"--preset {name!r}: there is none of this name. There are: {', '.join(PRESETS)}; or name the "
            "columns with --columns."
        )
    return PRESETS[name]


def read_trace_scenario(
    options: TraceOptions, cluster: str | None, *, elastic: str | None = None
) -> Scenario:
    """Return the scenario of a trace. Raises ValueError for what cannot be read or simulated."""
    layout = layout_of(options)
    if cluster is None:
        raise ValueError(
            f"--trace {options.path}: it does not say on which cluster its jobs ran. Add --cluster, such as "
            "--cluster 143x8, or --cluster unlimitedx8 for nodes of 8 devices that are never short."
        )
    trace = read_recorded(options.path, layout)
    name = pathlib.Path(options.path).name
    return recorded_scenario(name, trace, cluster, None if elastic is None else read_curve(elastic))


def recorded_scenario(
    name: str, trace: RecordedTrace, cluster: str | ClusterSpec, curve: Amdahl | None
) -> Scenario:
    """Return the scenario of recorded jobs on a cluster, given as text (see `cluster_for`) or as itself.

    Raises ValueError if no job fits on the cluster.
    """
    spec = cluster_for(cluster, trace.jobs, curve) if isinstance(cluster, str) else cluster
    trace, remarks = _on_cluster(trace, spec)
    nodes = _Usable(spec)
    trace = trace.without(lambda job: _misfit(job, nodes, is_rigid=curve is None))
    if not trace.jobs:
        raise ValueError(f"no job of {name} fits on the cluster: {trace.in_words()}.")
    jobs = trace.jobs
    if curve is None:
        jobs = tuple(_with_whole_nodes(job, nodes) for job in jobs)
        count = sum(a is not b for a, b in zip(jobs, trace.jobs, strict=True))
        if count:
            remarks.append(f"{_jobs(count)} of more than one node: rounded up to whole nodes")
    else:
        remarks.append(curve.in_words())
    return Scenario(
        name=name,
        origin="recorded",
        jobs=jobs,
        cluster=spec,
        truth=DurationTruth(tuple(sorted({node.kind for node in spec.nodes})), curve),
        remarks=(trace.in_words(), *remarks),
    )


def _on_cluster(trace: RecordedTrace, spec: ClusterSpec) -> tuple[RecordedTrace, list[str]]:
    """Return the trace without kinds and topology levels that mean nothing on a cluster, and remarks."""
    remarks: list[str] = []
    named = {kind for job in trace.jobs for kind in job.kinds or ()}
    has = {node.kind for node in spec.nodes}
    if named and not named & has:
        jobs = tuple(replace(job, kinds=None) for job in trace.jobs)
        trace = replace(trace, jobs=jobs)
        remarks.append(
            f"jobs run on any device: the trace names {_listed(named)}, and the cluster has {_listed(has)}"
        )
    levels = {level for node in spec.nodes for level in node.labels}
    if unknown := {job.level for job in trace.jobs if job.level is not None} - levels:
        jobs = (replace(j, level=None) if j.level in unknown else j for j in trace.jobs)
        trace = replace(trace, jobs=tuple(jobs))
        remarks.append(f"jobs may lie anywhere: no node has a label {_listed(unknown)}")
    return trace, remarks


def cluster_for(text: str, jobs: Sequence[TraceJob], curve: Amdahl | None = None) -> ClusterSpec:
    """Return the cluster of a text for `read_cluster`, or of `[KIND:]unlimitedxDEVICES`.

    An unlimited cluster has as many nodes as the jobs would use at most if each ran from its submission, on
    nodes of its own.
    """
    found = _UNLIMITED.fullmatch(text.strip())
    if found is None:
        return read_cluster(text, kind=KIND)
    each = int(found["each"])
    most = 1.0 if curve is None else curve.most
    nodes = _most_nodes(jobs, each, most)
    return read_cluster(f"{found['kind'] or KIND}:{nodes}x{each}")


def _most_nodes(jobs: Iterable[TraceJob], each: int, most: float) -> int:
    """Return the greatest number of nodes in use at once if every job ran on nodes of its own."""
    running: list[tuple[float, int]] = []  # end, nodes
    in_use = greatest = 0
    for job in sorted(jobs, key=lambda j: j.submit_s):
        while running and running[0][0] < job.submit_s:
            in_use -= heapq.heappop(running)[1]
        nodes = -(-int(job.num_devices * most) // each)
        heapq.heappush(running, (job.submit_s + (job.duration_s or 0.0) + _SLACK_S, nodes))
        in_use += nodes
        greatest = max(greatest, in_use)
    return max(greatest, 1)


class _Usable:
    """The devices of each node that is up, by kind, that a job could use, given what it needs beside them."""

    def __init__(self, cluster: ClusterSpec):
        self._nodes = [node for node in cluster.nodes if node.state == "up" and node.num_usable]
        self._known: dict[Amounts, dict[str, list[int]]] = {}

    def of(self, job: TraceJob, *, bare: bool = False) -> dict[str, list[int]]:
        """Return the devices by kind of those that the job may use; `bare`: as if it needed nothing else."""
        needs = NOTHING if bare else needs_of(job)
        if needs not in self._known:
            found: dict[str, list[int]] = {}
            for node in self._nodes:
                found.setdefault(node.kind, []).append(usable(node, needs))
            self._known[needs] = found
        return {k: its for k, its in self._known[needs].items() if _may_use(job, k)}


def _with_whole_nodes(job: TraceJob, nodes: _Usable) -> TraceJob:
    """Return a job that takes whole nodes if it does not fit on the largest one, where so many are there."""
    each = max(map(max, nodes.of(job).values()))
    rest = job.num_devices % each if each else 0
    if job.num_devices <= each or not rest:
        return job
    whole = replace(job, num_devices=job.num_devices + each - rest)
    return whole if _fits(whole, nodes) else job


def _fits(job: TraceJob, nodes: _Usable) -> bool:
    """Return whether a cluster of which nothing is used holds a job."""
    largest = {kind: max(its) for kind, its in nodes.of(job, bare=True).items()}
    return any(
        packed(kind, job.num_devices, largest[kind], its) is not None
        for kind, its in nodes.of(job).items()
    )


def _misfit(job: TraceJob, nodes: _Usable, *, is_rigid: bool) -> str | None:
    """Return why a job could never run on a cluster; None if it could."""
    totals = [sum(its) for its in nodes.of(job, bare=True).values()]
    if not totals:
        return "only for kinds of device that the cluster does not have"
    if job.num_devices > max(totals):
        return "larger than the cluster"
    least = job.num_devices if is_rigid else 1
    if least > max(sum(its) for its in nodes.of(job).values()):
        return "in need of more CPUs or memory than the nodes have"
    if is_rigid and not _fits(_with_whole_nodes(job, nodes), nodes):
        return "of a size that the nodes do not hold"
    return None


def _may_use(job: TraceJob, kind: str) -> bool:
    return job.kinds is None or kind in job.kinds


def _jobs(count: int) -> str:
    return f"{count:,} {'job' if count == 1 else 'jobs'}"


def _listed(names: Collection[str]) -> str:
    some = sorted(names)[:5]
    return ", ".join(some) + (" and others" if len(names) > len(some) else "")


def read_history_scenario(
    folder: pathlib.Path,
    cluster: str | None = None,
    *,
    states: str | None = None,
    elastic: str | None = None,
) -> Scenario:
    """Return the jobs of a service's journal on its own nodes, or on another cluster.

    Raises ValueError if there is no journal, or nothing in it that can be simulated.
    """
    with naming(f"--history {folder}"):
        found = read_history(folder)
    phases = None if states is None else {state.strip() for state in states.split(",")}
    curve = None if elastic is None else read_curve(elastic)
    pairs = [(past, _past_job(past, phases, curve)) for past in found.jobs]
    unusable = Counter(why for _, why in pairs if isinstance(why, str))
    trace = recorded([job for _, job in pairs if not isinstance(job, str)], unusable)
    if not trace.jobs:
        counts = ", ".join(f"{count:,} {why}" for why, count in sorted(unusable.items()))
        raise ValueError(
            f"--history {folder}: no job of the journal can be simulated: {counts or 'it has no jobs'}."
        )
    spec = cluster if cluster is not None else ClusterSpec(nodes=found.nodes)
    scenario = recorded_scenario(f"history of {folder}", trace, spec, curve)
    used = [past for past, job in pairs if not isinstance(job, str)]
    remarks = (*scenario.remarks, *(_resized_in_words(used) if curve is None else ()))
    return replace(scenario, remarks=remarks)


def _resized_in_words(jobs: Sequence[PastJob]) -> list[str]:
    """Return how many jobs had different numbers of devices and are simulated as rigid; [] if none."""
    count = sum(len({devices for _, devices in job.held}) > 1 for job in jobs)
    if not count:
        return []
    return [
        f"{_jobs(count)} with other numbers of devices at different times: simulated with the average "
        "number, for as many device-seconds"
    ]


def _past_job(
    past: PastJob, phases: Collection[str] | None, curve: Amdahl | None
) -> TraceJob | str:
    """Return a job of the journal as one of a trace, or the reason that it cannot be one."""
    spec = past.spec
    if past.phase not in OVER:
        return f"still {past.phase}"
    if phases is not None and past.phase not in phases:
        return f"in state {past.phase}"
    ran_s = sum(seconds for seconds, _ in past.held)
    if not ran_s > 0:
        return "without a start"
    used_s = sum(seconds * devices for seconds, devices in past.held)
    size = spec.num_devices or round(used_s / ran_s)
    if curve is None or spec.mode == "rigid":
        duration_s = used_s / size
    else:
        work = sum(seconds * curve.speedup(devices) for seconds, devices in past.held)
        duration_s = work / curve.speedup(size)
    terms = {field.name: getattr(spec, field.name) for field in fields(JobTerms)}
    return TraceJob(
        id=spec.id,
        submit_s=past.submitted_s,
        application="job",
        num_devices=size,
        min_devices=spec.min_devices,
        max_devices=max(spec.max_devices, size),
        mode="rigid" if spec.mode == "rigid" else None,
        duration_s=duration_s,
        **terms,
    )
