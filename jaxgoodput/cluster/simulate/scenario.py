"""What to simulate, from short texts: `--cluster`, `--workload` and `--rules` of the command line.

Everything is read and checked before anything runs; what is wrong is a ValueError that says what was
expected. `specs.ClusterSpec` as JSON and the folders of the public artifacts are read from files.
"""

import math
import pathlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxgoodput._serial import loads
from jaxgoodput.cluster.catalogue import PolicyEntry
from jaxgoodput.cluster.published import traces
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.scheduler.limits import limits_of
from jaxgoodput.cluster.simulate.conditions.due import read_deadlines, with_deadlines
from jaxgoodput.cluster.simulate.conditions.faults import (
    Cancellations,
    Faults,
    FaultScript,
    Outages,
    Slowdowns,
)
from jaxgoodput.cluster.simulate.conditions.inputs import Inputs
from jaxgoodput.cluster.simulate.conditions.restarts import RestartCosts, Storage
from jaxgoodput.cluster.simulate.conditions.tenants import (
    deal_out,
    parts,
    read_tenants,
    with_budgets,
)
from jaxgoodput.cluster.simulate.gavel_jobs import GavelTruth
from jaxgoodput.cluster.simulate.generator import (
    FAMILIES,
    synthetic_applications,
    synthetic_workload,
)
from jaxgoodput.cluster.simulate.job import Truth
from jaxgoodput.cluster.simulate.model_jobs import ModelTruth
from jaxgoodput.cluster.simulate.settings import (
    RESTART_BASE_S,
    Settings,
    gavel_settings,
    pollux_settings,
    realistic,
    restart_by_state,
    sia_settings,
)
from jaxgoodput.cluster.simulate.table_jobs import TableTruth
from jaxgoodput.specs import ClusterSpec, Node

Origin = Literal["synthetic", "pollux", "sia", "gavel"]

# What the artifacts ran on, where the user does not say.
CLUSTERS: Mapping[Origin, str] = {
    "synthetic": "t4:16x4",
    "pollux": "t4:16x4",
    "sia": "aws:6x4,dgx-ext:2x8,rtx:3x8",
    "gavel": "v100:9x4,p100:9x4,k80:9x4",
}
# Assumed speeds of kinds for synthetic jobs, relative to a T4; `--speed` says otherwise.
SPEEDS: Mapping[str, float] = {
    "k80": 0.5, "t4": 1.0, "aws": 1.0, "p100": 1.2, "rtx": 1.5, "quad": 1.7, "v100": 2.0,
    "azure": 2.0, "a100": 4.0, "dgx": 4.0, "dgx-ext": 4.0, "h100": 8.0, "h200": 8.5,
}  # fmt: skip
# Parameters and optimizer state in 32 bits: of the artifacts' models from their public sizes, of made-up
# families as the generator says.
STATE_BYTES: Mapping[str, float] = {
    "cifar10": 9e7, "imagenet": 2.05e8, "yolov3": 5e8, "deepspeech2": 3e8, "bert": 1.3e9, "ncf": 3.8e8,
    **{name: family.state_bytes for name, family in FAMILIES.items()},
}  # fmt: skip
SETTINGS = ("own", "pollux", "sia", "gavel", "events", "realistic")

_PART = re.compile(
    r"(?:(?P<kind>[A-Za-z0-9_.-]+):)?(?P<nodes>[0-9]{1,6})x(?P<each>[0-9]{1,6})"
    r"(?:/(?P<rack>[1-9][0-9]{0,5}))?"
)
_MOST_DEVICES = 100_000
# Of `--faults`: how many numbers each takes.
_FAULTS = {"node": 2, "rack": 2, "slow": 3, "crash": 1, "cancel": 2, "checkpoint": 1}
_GAVEL_TABLES = ("simulation_throughputs.json", "tacc_throughputs.json")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Jobs, the truth about them, and the cluster that they run on."""

    name: str
    origin: Origin
    jobs: tuple[TraceJob, ...]
    cluster: ClusterSpec
    truth: Truth


def read_cluster(text: str, *, kind: str = "t4") -> ClusterSpec:
    """A cluster from `KIND:NODESxDEVICES[/N],...`, or from a JSON file of a `ClusterSpec`.

    A part without a kind is of `kind`; `/N` puts N nodes into each rack. Raises ValueError where it is
    neither.

    >>> [node.name for node in read_cluster("2x4,rtx:1x8").nodes]
    ['t4-000', 't4-001', 'rtx-000']
    """
    if text.endswith(".json"):
        try:
            spec = loads(pathlib.Path(text).read_text(encoding="utf-8"), ClusterSpec)
        except OSError as error:
            raise ValueError(f"--cluster {text}: cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise ValueError(f"--cluster {text}: {error}") from error
        if sum(node.num_devices for node in spec.nodes) > _MOST_DEVICES:
            raise ValueError(f"--cluster {text}: has more than {_MOST_DEVICES} devices.")
        return spec
    nodes = []
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
        name = found["kind"] or kind
        first = sum(node.kind == name for node in nodes)
        nodes += [
            Node(
                name=f"{name}-{first + i:03d}",
                kind=name,
                num_devices=int(found["each"]),
                labels=_rack(name, first + i, found["rack"]),
            )
            for i in range(int(found["nodes"]))
        ]
    return ClusterSpec(nodes=tuple(nodes))


def _rack(kind: str, index: int, nodes_each: str | None) -> dict[str, str]:
    return {} if nodes_each is None else {"rack": f"{kind}-rack-{index // int(nodes_each):03d}"}


def read_speeds(text: str | None) -> dict[str, float]:
    """`KIND=SPEED,...` over the assumed speeds. Raises ValueError where it is something else."""
    speeds = dict(SPEEDS)
    for part in (text or "").split(",") if text else ():
        kind, _, number = part.partition("=")
        try:
            speeds[kind.strip()] = float(number)
        except ValueError:
            raise ValueError(
                f"--speed {text!r}: {part!r} is not of the form KIND=NUMBER, such as a100=4."
            ) from None
    return speeds


def read_faults(text: str) -> Faults:
    """Faults from `WHAT=NUMBER[:NUMBER...],...`, in hours; `slow` may be said more than once.

    `node` and `rack`: from a repair to the next failure, and the repair. `slow`: from one slow stay of a
    node to the next, its length, and the speed that is left. `crash`: a job's work between two crashes.
    `cancel`: the share of jobs, and the time from the submission. `checkpoint`: from one to the next.
    Raises ValueError where it is something else.

    >>> read_faults("node=720:0.5,crash=48").mean_to_crash_s
    172800.0
    """
    hour = 3600.0
    found: dict[str, list[list[float]]] = {}
    for part in text.split(","):
        what, _, rest = part.strip().partition("=")
        try:
            numbers = [float(number) for number in rest.split(":")]
        except ValueError:
            numbers = []
        if len(numbers) != _FAULTS.get(what):
            raise ValueError(
                f"--faults {text!r}: {part!r} is not one of node=HOURS:REPAIR, rack=HOURS:REPAIR, "
                "slow=HOURS:LENGTH:SPEED, crash=HOURS, cancel=SHARE:HOURS and checkpoint=HOURS, such as "
                "node=720:0.5,crash=48."
            )
        if what in found and what != "slow":
            raise ValueError(f"--faults {text!r}: {what} is there twice; leave one of them out.")
        found.setdefault(what, []).append(numbers)

    def outages(what: str) -> Outages | None:
        for between, repair in found.get(what, []):
            return Outages(mean_between_s=between * hour, mean_repair_s=repair * hour)
        return None

    slow = tuple(
        Slowdowns(mean_between_s=between * hour, mean_length_s=length * hour, speed=speed)
        for between, length, speed in found.get("slow", [])
    )
    cancelled = [
        Cancellations(share=share, mean_after_s=after * hour)
        for share, after in found.get("cancel", [])
    ]
    try:
        return Faults(
            nodes=outages("node"),
            racks=outages("rack"),
            slow=slow,
            mean_to_crash_s=found["crash"][0][0] * hour if "crash" in found else None,
            cancellations=cancelled[0] if cancelled else None,
            checkpoint_s=found["checkpoint"][0][0] * hour if "checkpoint" in found else 600.0,
        )
    except ValueError as error:
        raise ValueError(f"--faults {text!r}: {error}") from error


def read_costs(text: str) -> RestartCosts:
    """Costs by kind of change from `WHAT=NUMBER,...`.

    `start`, `resume`, `move`, `shape` and `kind` in units of the restart seconds, `compile` in seconds, and
    `storage`, which those that restart together share, in GiB/s; the sizes of checkpoints are
    `STATE_BYTES`. Raises ValueError where it is something else.

    >>> read_costs("resume=0.5,compile=60").resume
    0.5
    """
    known = ("start", "resume", "move", "shape", "kind", "compile", "storage")
    found = _numbers("--costs", text, known, "resume=0.5,compile=60,storage=2")
    changes: dict[str, Any] = {k: v for k, v in found.items() if k not in ("compile", "storage")}
    if "compile" in found:
        changes["compile_s"] = found["compile"]
    try:
        if "storage" in found:
            bytes_per_s = found["storage"] * 2**30
            changes["storage"] = Storage(bytes_per_s=bytes_per_s, state_bytes=STATE_BYTES)
        return RestartCosts(**changes)
    except ValueError as error:
        raise ValueError(f"--costs {text!r}: {error}") from error


def read_inputs(text: str) -> Inputs:
    """Processors from `cpus=NUMBER,APPLICATION=SAMPLES,...`, and `per-device=NUMBER`.

    `cpus` are those of a node, `per-device` what a job asks for, and the others what one processor
    prepares of an application in a second; those that are not named never wait. Raises ValueError where
    it is something else.

    >>> read_inputs("cpus=32,bert=50").samples_per_cpu_s
    {'bert': 50.0}
    """
    found = _numbers("--inputs", text, None, "cpus=32,bert=50")
    if "cpus" not in found:
        raise ValueError(
            f"--inputs {text!r}: how many processors a node has is not said; add cpus=NUMBER."
        )
    cpus, asked = found.pop("cpus"), found.pop("per-device", None)
    try:
        return Inputs(cpus_per_node=cpus, samples_per_cpu_s=found, cpus_per_device=asked)
    except ValueError as error:
        raise ValueError(f"--inputs {text!r}: {error}") from error


def _numbers(
    option: str, text: str, known: tuple[str, ...] | None, example: str
) -> dict[str, float]:
    """`NAME=NUMBER,...`, each once; `known` None = any names."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not name or name in found or not math.isfinite(value):
            raise ValueError(
                f"{option} {text!r}: {part!r} is not of the form NAME=NUMBER, each name once, such as "
                f"{example}."
            )
        if known is not None and name not in known:
            raise ValueError(f"{option} {text!r}: {name!r} is not one of {', '.join(known)}.")
        found[name] = value
    return found


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
    """The jobs of `synthetic[:JOBS]`, or of a file or folder in an artifact's layout.

    `seed`, `hours` (None = 8) and `speed` (see `read_speeds`) are of synthetic jobs; the last two are
    refused elsewhere. `tenants` (see `read_tenants`) among whom the jobs are dealt out by the seed;
    `prices` of a device per hour by kind, `KIND=NUMBER,...`; `budgets` of jobs, `NAME=NUMBER,...` by id,
    application or `all`; `deadlines` of some of them (see `read_deadlines`). Raises ValueError, with what
    is wrong where, for anything that cannot be simulated.
    """
    scenario = _read(workload, cluster, seed, hours, speed)
    scenario = _shared(scenario, seed, tenants, prices, budgets)
    if deadlines is not None:
        share, multiple = read_deadlines(deadlines)
        due = with_deadlines(
            scenario.jobs,
            scenario.cluster,
            scenario.truth,
            share=share,
            multiple=multiple,
            seed=seed,
        )
        scenario = replace(scenario, jobs=due)
    return scenario


def _shared(
    scenario: Scenario, seed: int, tenants: str | None, prices: str | None, budgets: str | None
) -> Scenario:
    """With tenants, prices and budgets, where they are given."""
    spec, jobs = scenario.cluster, scenario.jobs
    try:
        if prices is not None:
            found = _numbers("--prices", prices, None, "t4=0.35,a100=3")
            unknown = sorted(set(found) - {node.kind for node in spec.nodes})
            if unknown:
                raise ValueError(f"--prices: the cluster has no {unknown[0]!r}.")
            spec = replace(spec, price_per_hour=found)
        part = parts(spec.tenants, {})
        if tenants is not None:
            if spec.tenants:
                raise ValueError("--tenants: the cluster's file has tenants already; leave it out.")
            whose, part = read_tenants(tenants)
            spec = replace(spec, tenants=whose)
        if part:
            jobs = deal_out(jobs, part, seed)
    except ValueError as error:
        said = str(error)
        raise ValueError(said if said.startswith("--") else f"--tenants: {said}") from error
    if budgets is not None:
        if not spec.price_per_hour:
            raise ValueError(
                f"--budgets {budgets!r}: nobody knows what devices cost; add --prices, such as t4=0.35."
            )
        found = _numbers("--budgets", budgets, None, "all=5,bert=20")
        jobs = with_budgets(jobs, found)
    return replace(scenario, cluster=spec, jobs=jobs)


def _read(
    workload: str, cluster: str | None, seed: int, hours: float | None, speed: str | None
) -> Scenario:
    if workload.partition(":")[0] == "synthetic":
        return _synthetic(workload, cluster, seed, 8.0 if hours is None else hours, speed)
    path = pathlib.Path(workload)
    if not path.exists():
        raise ValueError(
            f"--workload {workload!r}: there is no such file or folder. Give synthetic:JOBS, or a "
            "workload in the layout that Pollux, Sia or Gavel ship."
        )
    for option, given in (("--hours", hours), ("--speed", speed)):
        if given is not None:
            raise ValueError(
                f"{option} {given}: is of synthetic jobs only; when the jobs of {workload} arrive and "
                "how fast they run is in its files. Leave it out."
            )
    path = _one_file(path) if path.is_dir() else path
    if path.suffix == ".trace":
        return _gavel(path, cluster)
    return _measured(path, cluster)


def _synthetic(
    workload: str, cluster: str | None, seed: int, hours: float, speed: str | None
) -> Scenario:
    _, _, number = workload.partition(":")
    if number and not re.fullmatch("[0-9]{1,6}", number):
        raise ValueError(
            f"--workload {workload!r}: behind synthetic: comes the number of jobs, below a million, such "
            "as synthetic:160."
        )
    spec = read_cluster(cluster or CLUSTERS["synthetic"])
    speeds = read_speeds(speed)
    unknown = sorted({node.kind for node in spec.nodes} - speeds.keys())
    if unknown:
        raise ValueError(
            f"--cluster: nobody knows how fast a {unknown[0]!r} is; add --speed {unknown[0]}=2 (1 = a "
            f"T4). Known: {', '.join(sorted(speeds))}."
        )
    kinds = {node.kind: speeds[node.kind] for node in spec.nodes}
    widest = max(node.num_devices for node in spec.nodes)
    fits = min(sum(node.num_devices for node in spec.nodes if node.kind == kind) for kind in kinds)
    jobs = synthetic_workload(
        int(number or 160), hours=hours, seed=seed, largest=min(16, fits), per_node=widest
    )
    return Scenario(
        name=f"{len(jobs)} synthetic jobs, seed {seed}",
        origin="synthetic",
        jobs=jobs,
        cluster=spec,
        truth=ModelTruth(synthetic_applications(kinds)),
    )


def _one_file(folder: pathlib.Path) -> pathlib.Path:
    """The one workload below a folder."""
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


def _measured(path: pathlib.Path, cluster: str | None) -> Scenario:
    """A workload of Pollux or Sia; its tables are in `traces` beside or above it."""
    tables = next((p / "traces" for p in path.resolve().parents if (p / "traces").is_dir()), None)
    if tables is None:
        raise ValueError(
            f"--workload {path}: there is no folder traces/ beside or above it, where the artifacts "
            "of Pollux and Sia keep their measured tables."
        )
    origin: Origin = "pollux" if any(tables.glob("*/placements.csv")) else "sia"
    kind = "t4" if origin == "pollux" else "aws"
    spec = read_cluster(cluster or CLUSTERS[origin], kind=kind)
    kinds = sorted({node.kind for node in spec.nodes})
    if origin == "sia":
        for kind in kinds:
            if not any(tables.glob(f"*/placements-{kind}.csv")):
                known = {p.stem.removeprefix("placements-") for p in tables.glob("*/placements-*")}
                raise ValueError(
                    f"--cluster: nothing was measured on {kind!r}; {tables} has "
                    f"{', '.join(sorted(known))}."
                )
        applications = traces.read_sia_applications(tables, kinds)
    elif len(kinds) > 1:
        raise ValueError(
            f"--cluster: Pollux measured one kind of device, but this cluster has {', '.join(kinds)}."
        )
    else:
        applications = traces.read_pollux_applications(tables, kind=kinds[0])
    jobs = traces.read_sia_workload(path)
    return Scenario(
        name=f"{path.parent.name}/{path.stem}",
        origin=origin,
        jobs=jobs,
        cluster=spec,
        truth=TableTruth(applications),
    )


def _gavel(path: pathlib.Path, cluster: str | None) -> Scenario:
    folders = path.resolve().parents[:4]
    tables = [p / name for p in folders for name in _GAVEL_TABLES if (p / name).is_file()]
    if not tables:
        raise ValueError(
            f"--workload {path}: found none of {', '.join(_GAVEL_TABLES)} beside or above it; the "
            "speeds of its jobs are in there."
        )
    throughputs = traces.read_gavel_throughputs(tables[0])
    spec = read_cluster(cluster or CLUSTERS["gavel"], kind="v100")
    unknown = sorted({node.kind for node in spec.nodes} - throughputs.keys())
    if unknown:
        raise ValueError(
            f"--cluster: nothing was measured on {unknown[0]!r}; {tables[0]} has "
            f"{', '.join(sorted(throughputs))}."
        )
    kinds = {node.kind for node in spec.nodes}
    return Scenario(
        name=path.stem,
        origin="gavel",
        jobs=traces.read_gavel_trace(path),
        cluster=spec,
        truth=GavelTruth({k: table for k, table in throughputs.items() if k in kinds}),
    )


def read_settings(
    name: str,
    origin: Origin,
    *,
    restart_s: float | None = None,
    seed: int = 0,
    declared_progress: bool = False,
    faults: str | None = None,
    costs: str | None = None,
    inputs: str | None = None,
) -> Settings:
    """One of `SETTINGS`: the published ones of an artifact, or those of the workload's own on events.

    "own" = those of the workload's artifact; events for synthetic jobs. "events": decisions follow
    arrivals and ends, and jobs may be offered any size at once. "realistic": events, with noisy
    measurements, interference, nodes that break, and restarts that cost what saving and reading the
    state was measured to cost; Gavel's jobs, whose states are not known, need `restart_s`. `faults`,
    `costs` and `inputs`: see `read_faults`, `read_costs` and `read_inputs`. Raises ValueError for
    what cannot be.
    """
    if restart_s is not None and not (restart_s >= 0 and math.isfinite(restart_s)):
        raise ValueError(f"--restart-s {restart_s}: must be at least 0 seconds, and finite.")
    published = {"pollux": pollux_settings(), "sia": sia_settings(), "gavel": gavel_settings()}
    own = published.get(origin, Settings())
    if name == "own":
        name = origin if origin != "synthetic" else "events"
    if name in published:
        settings = published[name]
    elif name in ("events", "realistic"):
        events = replace(own, round_s=None, growth=None, rounding=False)
        settings = realistic(own) if name == "realistic" else events
    else:
        raise ValueError(f"--rules {name!r}: expected one of {', '.join(SETTINGS)}.")
    if origin == "synthetic":  # other applications than the artifacts' have no numbers of their own
        settings = replace(settings, restart_s=30.0, told_restart_s=None, slowdown={}, pins={})
    if name == "realistic" and restart_s is None:
        if origin == "gavel":
            raise ValueError(
                "--rules realistic: nobody knows how large the states of Gavel's jobs are, so nor what "
                "their restarts cost; add --restart-s SECONDS."
            )
        settings = replace(settings, restart_s=restart_by_state(STATE_BYTES), told_restart_s=None)
    if restart_s is not None:
        settings = replace(settings, restart_s=restart_s, told_restart_s=None)
    if faults is not None:
        settings = replace(settings, faults=read_faults(faults))
    if inputs is not None:
        settings = replace(settings, inputs=read_inputs(inputs))
    if costs is not None:
        read = read_costs(costs)
        settings = replace(settings, costs=read)
        if read.storage is not None and name == "realistic" and restart_s is None:
            # What is written and read goes by the storage now; the rest is what a process takes to start.
            told = settings.restart_s
            settings = replace(settings, restart_s=RESTART_BASE_S, told_restart_s=told)
    return replace(settings, seed=seed, declared_progress=declared_progress)


def check(scenario: Scenario, settings: Settings, name: str, named: PolicyEntry) -> None:
    """Raises ValueError where a policy could not run the scenario to its end."""
    if not scenario.jobs:
        raise ValueError(f"--workload: {scenario.name} has no jobs; there is nothing to simulate.")
    sizes: dict[str, int] = {}
    for node in scenario.cluster.nodes:
        if node.state == "up":
            sizes[node.kind] = sizes.get(node.kind, 0) + node.num_usable
    if not any(sizes.values()):
        raise ValueError("--cluster: no node has a device that may be used; nothing could run.")
    if named.one_kind and len(sizes) > 1:
        raise ValueError(
            f"--policy {name}: knows one kind of device only, but the cluster has "
            f"{', '.join(sorted(sizes))}. Leave it out, or choose a cluster of one kind."
        )
    if named.one_kind and scenario.cluster.quota:
        raise ValueError(
            f"--policy {name}: knows no quotas, but the cluster has them for "
            f"{', '.join(sorted(scenario.cluster.quota))}. Leave it out, or the quotas."
        )
    if named.one_kind and scenario.cluster.tenants:
        raise ValueError(
            f"--policy {name}: knows no tenants. Leave it out, or --tenants "
            f"({', '.join(tenant.name for tenant in scenario.cluster.tenants)})."
        )
    top = [tenant for tenant in scenario.cluster.tenants if tenant.parent is None]
    if sum(tenant.guaranteed for tenant in top) > sum(sizes.values()):
        raise ValueError(
            f"--tenants: {' and '.join(f'{t.name!r} ({t.guaranteed})' for t in top if t.guaranteed)} are "
            f"guaranteed more than the {sum(sizes.values())} devices that there are. Guarantee less."
        )
    if named.largest_gang is not None:
        wide = [job for job in scenario.jobs if job.num_devices > named.largest_gang]
        if wide:
            raise ValueError(
                f"--policy {name}: runs jobs of one device only, but {len(wide)} of "
                f"{len(scenario.jobs)} jobs ask for more, such as {wide[0].id!r}. Leave it out."
            )
    settings = replace(settings, mode=named.mode)
    if settings.faults is not None:
        FaultScript(settings.faults, scenario.cluster.nodes, settings.seed)
    for application in {job.application for job in scenario.jobs}:
        settings.restart_of(application)
        settings.told_restart_of(application)
        if settings.costs is not None:
            settings.costs.bytes("move", application)
            settings.costs.seconds("move", application, 0.0, True)
    if settings.inputs is not None and isinstance(settings.inputs.samples_per_cpu_s, Mapping):
        known = {job.application for job in scenario.jobs}
        unknown = sorted(settings.inputs.samples_per_cpu_s.keys() - known)
        if unknown:
            raise ValueError(
                f"--inputs: no job runs {unknown[0]!r}; they run {', '.join(sorted(known))}."
            )
    limits = limits_of(scenario.cluster)
    for index, trace in enumerate(scenario.jobs):
        spec = scenario.truth.job(trace, settings, index).spec
        most = max(sizes.get(kind, 0) for kind in spec.kinds or sizes)
        if spec.min_devices > most:
            raise ValueError(
                f"--policy {name}: job {trace.id!r} needs {spec.min_devices} devices of one kind, "
                f"but the cluster has {most}; it would wait for ever. Enlarge the cluster, or take "
                "the job out."
            )
        for limit in (one for one in limits if spec.tenant in one.tenants):
            fitting = [k for k in spec.kinds or sizes if sizes.get(k, 0) >= spec.min_devices]
            least = min(spec.min_devices * limit.per_device(kind) for kind in fitting)
            if least > limit.left:
                raise ValueError(
                    f"--policy {name}: job {trace.id!r} needs {spec.min_devices} devices, which is more than "
                    f"{limit.said}; it would wait for ever. Raise that, or take the job out."
                )
