"""Reads what to simulate: the workload, the cluster, and who owns, pays for and waits for the jobs.

All texts are read and checked before anything runs; if one is wrong, a ValueError says what was expected. A
`ClusterSpec` as JSON and the folders of the public artifacts are read from files.
"""

import pathlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from jaxgoodput._fields.serial import loads
from jaxgoodput._fields.typed import path_in_words
from jaxgoodput.cluster.published import traces
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.simulate.conditions.due import read_deadlines, with_deadlines
from jaxgoodput.cluster.simulate.conditions.tenants import (
    deal_out,
    parts,
    read_tenants,
    with_budgets,
)
from jaxgoodput.cluster.simulate.generator import synthetic_applications, synthetic_workload
from jaxgoodput.cluster.simulate.jobs.gavel import GavelTruth
from jaxgoodput.cluster.simulate.jobs.job import Truth
from jaxgoodput.cluster.simulate.jobs.model import ModelTruth
from jaxgoodput.cluster.simulate.jobs.tables import TableTruth
from jaxgoodput.cluster.simulate.key_numbers import naming, read_numbers
from jaxgoodput.specs import ClusterSpec, Node

Origin = Literal["synthetic", "pollux", "sia", "gavel", "recorded"]

# The clusters that the artifacts ran on: the default if the user names none.
CLUSTERS: Mapping[Origin, str] = {  # a recorded trace does not say on which cluster its jobs ran
    "synthetic": "t4:16x4",
    "pollux": "t4:16x4",
    "sia": "aws:6x4,dgx-ext:2x8,rtx:3x8",
    "gavel": "v100:9x4,p100:9x4,k80:9x4",
}
# Assumed speeds of kinds for synthetic jobs, relative to a T4; `--speed` replaces them.
SPEEDS: Mapping[str, float] = {
    "k80": 0.5, "t4": 1.0, "aws": 1.0, "p100": 1.2, "rtx": 1.5, "quad": 1.7, "v100": 2.0,
    "azure": 2.0, "a100": 4.0, "dgx": 4.0, "dgx-ext": 4.0, "h100": 8.0, "h200": 8.5,
}  # fmt: skip

_PART = re.compile(
    r"(?:(?P<kind>[A-Za-z0-9_.-]+):)?(?P<nodes>[0-9]{1,6})x(?P<each>[0-9]{1,6})"
    r"(?:/(?P<rack>[1-9][0-9]{0,5}))?"
    r"(?:\+(?P<cpus>[0-9]{1,6}(?:\.[0-9]{1,3})?)cpu)?(?:\+(?P<memory>[0-9]{1,7}(?:\.[0-9]{1,3})?)gib)?"
)
_MOST_DEVICES = 100_000
_GAVEL_TABLES = ("simulation_throughputs.json", "tacc_throughputs.json")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The jobs of a simulation, the truth about them, and the cluster that they run on."""

    name: str
    origin: Origin
    jobs: tuple[TraceJob, ...]
    cluster: ClusterSpec
    truth: Truth
    remarks: tuple[str, ...] = ()
    """What a reader of the results has to know of the workload, such as rows that were left out."""


def read_cluster(text: str, *, kind: str = "t4") -> ClusterSpec:
    """Return the cluster of `KIND:NODESxDEVICES[/N][+Ccpu][+Ggib],...`, or of a JSON `ClusterSpec`.

    A part without a kind has kind `kind`; `/N` puts N nodes into each rack, and `+64cpu+512gib` gives each
    node 64 CPUs and 512 GiB of memory; without them it never lacks any. Raises ValueError for any other
    text.

    >>> [node.name for node in read_cluster("2x4,rtx:1x8").nodes]
    ['t4-000', 't4-001', 'rtx-000']
    """
    if text.endswith(".json"):
        return _cluster_file(text)
    nodes: list[Node] = []
    for part in text.split(","):
        found = _PART.fullmatch(part.strip())
        num_devices = 0 if found is None else int(found["nodes"]) * int(found["each"])
        room = _MOST_DEVICES - sum(node.num_devices for node in nodes)
        if found is None or not 0 < num_devices <= room:
            raise ValueError(
                f"--cluster {text!r}: {part!r} is not of the form [KIND:]NODESxDEVICES with both at "
                f"least 1 and at most {_MOST_DEVICES} devices, such as 16x4 or aws:6x4,rtx:3x8; or give a "
                ".json file of a ClusterSpec."
            )
        nodes += _nodes(found, found["kind"] or kind, nodes)
    return ClusterSpec(nodes=tuple(nodes))


def _cluster_file(path: str) -> ClusterSpec:
    with naming(f"--cluster {path}"):
        try:
            spec = loads(pathlib.Path(path).read_text(encoding="utf-8"), ClusterSpec)
        except OSError as error:
            raise ValueError(
                f"the file cannot be read: {error.strerror}. Name a .json file of a ClusterSpec."
            ) from error
        if sum(node.num_devices for node in spec.nodes) > _MOST_DEVICES:
            raise ValueError(
                f"the file has more than {_MOST_DEVICES} devices. Describe a smaller cluster."
            )
        return spec


def _nodes(found: re.Match[str], kind: str, before: Iterable[Node]) -> Iterable[Node]:
    """Yield the nodes of one part of a cluster's text, such as 16x4, numbered after the nodes `before`."""
    first = sum(node.kind == kind for node in before)
    for index in range(first, first + int(found["nodes"])):
        labels = {}
        if found["rack"] is not None:
            labels["rack"] = f"{kind}-rack-{index // int(found['rack']):03d}"
        name, num_devices = f"{kind}-{index:03d}", int(found["each"])
        cpus, memory = (
            None if found[key] is None else float(found[key]) for key in ("cpus", "memory")
        )
        yield Node(
            name=name,
            kind=kind,
            num_devices=num_devices,
            labels=labels,
            cpus=cpus,
            memory_gib=memory,
        )


def read_speeds(text: str | None) -> dict[str, float]:
    """Return the assumed speeds, updated by `KIND=SPEED,...`. Raises ValueError for any other text."""
    return {
        **SPEEDS,
        **(read_numbers("--speed", text, key="KIND", example="a100=4") if text else {}),
    }


def read_scenario(
    workload: str,
    cluster: str | None = None,
    *,
    seed: int = 0,
    hours: float | None = None,
    speed: str | None = None,
    tenants: str | None = None,
    prices: str | None = None,
    budgets: str | None = None,
    deadlines: str | None = None,
) -> Scenario:
    """Return the scenario of `synthetic[:JOBS]`, or of a file or folder in an artifact's layout.

    Args:
      workload: text of the workload, or path.
      cluster: see `read_cluster`; None = the cluster that the artifact ran on.
      seed: seed of synthetic jobs, tenants and deadlines.
      hours: hours in which synthetic jobs arrive, by default 8; refused for other workloads.
      speed: speeds of kinds for synthetic jobs (see `read_speeds`); refused for other workloads.
      tenants: tenants that the jobs are assigned to (see `read_tenants`).
      prices: prices of a device per hour by kind, `KIND=NUMBER,...`.
      budgets: budgets of jobs, `NAME=NUMBER,...`, where NAME is a job id, an application or `all`.
      deadlines: deadlines for some jobs (see `read_deadlines`).

    Raises ValueError, naming the option, for anything that cannot be simulated.
    """
    if workload.partition(":")[0] == "synthetic":
        scenario = _synthetic(workload, cluster, seed, 8.0 if hours is None else hours, speed)
    else:
        for option, given in (("--hours", hours), ("--speed", speed)):
            if given is not None and pathlib.Path(workload).exists():
                raise ValueError(
                    f"{option} {given}: applies to synthetic jobs only; the files of {workload} say when "
                    "jobs arrive and how fast they run. Leave it out."
                )
        scenario = _published(workload, cluster)
    return with_conditions(
        scenario, seed=seed, tenants=tenants, prices=prices, budgets=budgets, deadlines=deadlines
    )


def with_conditions(
    scenario: Scenario,
    *,
    seed: int = 0,
    tenants: str | None = None,
    prices: str | None = None,
    budgets: str | None = None,
    deadlines: str | None = None,
) -> Scenario:
    """Return a scenario with the tenants, prices, budgets and deadlines that `read_scenario` describes.

    Raises ValueError, naming the option, for anything that cannot be simulated.
    """
    if prices is not None:
        scenario = _with_prices(scenario, prices)
    scenario = _with_tenants(scenario, tenants, seed)
    if budgets is not None:
        if not scenario.cluster.price_per_hour:
            raise ValueError(
                f"--budgets {budgets!r}: the devices have no prices. Add --prices, such as t4=0.35."
            )
        found = read_numbers("--budgets", budgets, example="all=5,bert=20")
        scenario = replace(scenario, jobs=with_budgets(scenario.jobs, found))
    if deadlines is not None:
        share, multiple = read_deadlines(deadlines)
        jobs, spec, truth = scenario.jobs, scenario.cluster, scenario.truth
        due = with_deadlines(jobs, spec, truth, share=share, multiple=multiple, seed=seed)
        scenario = replace(scenario, jobs=due)
    return scenario


def _with_prices(scenario: Scenario, text: str) -> Scenario:
    found = read_numbers("--prices", text, key="KIND", example="t4=0.35,a100=3")
    with naming("--prices"):
        unknown = sorted(set(found) - {node.kind for node in scenario.cluster.nodes})
        if unknown:
            raise ValueError(f"the cluster has no {unknown[0]!r} devices. Leave their price out.")
        return replace(scenario, cluster=replace(scenario.cluster, price_per_hour=found))


def _with_tenants(scenario: Scenario, text: str | None, seed: int) -> Scenario:
    """Assign the jobs to tenants of `text`, or of the cluster's file, if there are any."""
    spec = scenario.cluster
    part = parts(spec.tenants, {})
    if text is not None:
        if spec.tenants:
            raise ValueError("--tenants: the cluster's file already has tenants. Leave it out.")
        tenants, part = read_tenants(text)
        with naming("--tenants"):
            spec = replace(spec, tenants=tenants)
    # The jobs of a recorded trace may say whose they are; other jobs are assigned.
    own = {job.tenant for job in scenario.jobs} - {"default"}
    if part and own and own.isdisjoint(part):
        raise ValueError(
            f"--tenants: the jobs belong to {', '.join(sorted(own)[:5])} ..., none of which is among "
            f"{', '.join(part)}. Name tenants of the trace."
        )
    jobs = deal_out(scenario.jobs, part, seed) if part and not own else scenario.jobs
    return replace(scenario, cluster=spec, jobs=jobs)


def _synthetic(
    workload: str, cluster: str | None, seed: int, hours: float, speed: str | None
) -> Scenario:
    number = workload.partition(":")[2]
    if number and not re.fullmatch("0*[1-9][0-9]{0,5}", number):
        raise ValueError(
            f"--workload {workload!r}: the number of jobs, below a million, comes after synthetic:, such as "
            "synthetic:160."
        )
    spec, speeds = read_cluster(cluster or CLUSTERS["synthetic"]), read_speeds(speed)
    sizes: dict[str, int] = {}  # devices by kind
    for node in spec.nodes:
        sizes[node.kind] = sizes.get(node.kind, 0) + node.num_devices
    unknown = sorted(sizes.keys() - speeds.keys())
    if unknown:
        raise ValueError(
            f"--cluster: the speed of a {unknown[0]!r} is not known. Add --speed {unknown[0]}=2 (1 = a "
            f"T4). Known: {', '.join(sorted(speeds))}."
        )
    jobs = synthetic_workload(
        int(number or 160),
        hours=hours,
        seed=seed,
        largest=min(16, *sizes.values()),
        per_node=max(node.num_devices for node in spec.nodes),
    )
    return Scenario(
        name=f"{len(jobs)} synthetic jobs, seed {seed}",
        origin="synthetic",
        jobs=jobs,
        cluster=spec,
        truth=ModelTruth(synthetic_applications({kind: speeds[kind] for kind in sizes})),
    )


def _published(workload: str, cluster: str | None) -> Scenario:
    """Read a workload in the layout that Pollux, Sia or Gavel ship."""
    path = pathlib.Path(workload)
    try:
        is_there = path.exists()
    except OSError:  # a name that is too long
        is_there = False
    if not is_there:
        raise ValueError(
            f"--workload {path_in_words(workload)}: there is no such file or folder. Give "
            "synthetic:JOBS, or a workload in the layout that Pollux, Sia or Gavel ship."
        )
    path = _one_file(path) if path.is_dir() else path
    if path.suffix == ".trace":
        return _gavel(path, cluster)
    tables = next((p / "traces" for p in path.resolve().parents if (p / "traces").is_dir()), None)
    if tables is None:
        raise ValueError(
            f"--workload {path}: there is no folder traces/ beside or above it, where the artifacts "
            "of Pollux and Sia keep their measured tables."
        )
    read = _pollux if any(tables.glob("*/placements.csv")) else _sia
    return read(path, tables, cluster)


def _one_file(folder: pathlib.Path) -> pathlib.Path:
    """Return the only workload file in a folder or below. Raises ValueError if there is not exactly one."""
    below = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    found = [p for p in below if p.suffix == ".trace" or p.match("workload-*.csv")]
    if len(found) == 1:
        return found[0]
    names = ", ".join(str(p.relative_to(folder)) for p in found[:8])
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    raise ValueError(
        f"--workload {folder}: expected one workload in this folder, found {len(found)}"
        + (f": {names}{more}. Name one of them." if found else " (workload-*.csv or *.trace).")
    )


def _kinds(spec: ClusterSpec, tables: pathlib.Path, known: Collection[str]) -> list[str]:
    """Return the kinds of device of a cluster, sorted. Raises ValueError for a kind without measurements."""
    kinds = sorted({node.kind for node in spec.nodes})
    for kind in kinds:
        if kind not in known:
            raise ValueError(
                f"--cluster: nothing was measured on {kind!r}; {tables} has {', '.join(sorted(known))}."
            )
    return kinds


def _pollux(path: pathlib.Path, tables: pathlib.Path, cluster: str | None) -> Scenario:
    spec = read_cluster(cluster or CLUSTERS["pollux"], kind="t4")
    kinds = sorted({node.kind for node in spec.nodes})
    if len(kinds) > 1:
        raise ValueError(
            f"--cluster: Pollux measured one kind of device, but this cluster has {', '.join(kinds)}. Give a "
            "cluster of one kind."
        )
    applications = traces.read_pollux_applications(tables, kind=kinds[0])
    return _with_tables("pollux", path, spec, TableTruth(applications))


def _sia(path: pathlib.Path, tables: pathlib.Path, cluster: str | None) -> Scenario:
    spec = read_cluster(cluster or CLUSTERS["sia"], kind="aws")
    known = {p.stem.removeprefix("placements-") for p in tables.glob("*/placements-*.csv")}
    kinds = _kinds(spec, tables, known)
    applications = traces.read_sia_applications(tables, kinds)
    return _with_tables("sia", path, spec, TableTruth(applications))


def _with_tables(
    origin: Origin, path: pathlib.Path, cluster: ClusterSpec, truth: TableTruth
) -> Scenario:
    name, jobs = f"{path.parent.name}/{path.stem}", traces.read_sia_workload(path)
    return Scenario(name=name, origin=origin, jobs=jobs, cluster=cluster, truth=truth)


def _gavel(path: pathlib.Path, cluster: str | None) -> Scenario:
    folders = path.resolve().parents[:4]
    measured = [p / name for p in folders for name in _GAVEL_TABLES if (p / name).is_file()]
    if not measured:
        raise ValueError(
            f"--workload {path}: found none of {', '.join(_GAVEL_TABLES)} beside or above it, which have the "
            "speeds of its jobs."
        )
    throughputs = traces.read_gavel_throughputs(measured[0])
    spec = read_cluster(cluster or CLUSTERS["gavel"], kind="v100")
    kinds = _kinds(spec, measured[0], throughputs)
    return Scenario(
        name=path.stem,
        origin="gavel",
        jobs=traces.read_gavel_trace(path),
        cluster=spec,
        truth=GavelTruth({k: table for k, table in throughputs.items() if k in kinds}),
    )
