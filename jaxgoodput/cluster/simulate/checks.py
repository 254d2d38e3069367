"""Checks that a policy can run a scenario to its end, before anything is simulated."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxgoodput.cluster.catalogue import PolicyEntry
from jaxgoodput.cluster.scheduler.limits import limits_of
from jaxgoodput.cluster.scheduler.placement.amounts import needs_of, some_limited
from jaxgoodput.cluster.simulate.conditions.faults import FaultScript
from jaxgoodput.cluster.simulate.scenario import Scenario
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.specs import ClusterSpec, JobSpec


def check(scenario: Scenario, settings: Settings, name: str, entry: PolicyEntry) -> None:
    """Raise ValueError, naming the option, if the policy `name` could not run the scenario to its end."""
    if not scenario.jobs:
        raise ValueError(
            f"--workload: {scenario.name} has no jobs; there is nothing to simulate. Name another one."
        )
    sizes = _sizes(scenario.cluster)
    if not any(sizes.values()):
        raise ValueError(
            "--cluster: no node has a usable device; nothing could run. Give another cluster."
        )
    _check_policy(scenario, sizes, name, entry)
    _check_guarantees(scenario.cluster, sum(sizes.values()))
    settings = replace(settings, mode=entry.mode)
    _check_settings(scenario, settings)
    specs = [
        scenario.truth.job(trace, settings, index).spec for index, trace in enumerate(scenario.jobs)
    ]
    _check_sizes(scenario, specs, sizes, name)


def knows(scenario: Scenario, entry: PolicyEntry) -> bool:
    """Return whether a policy knows everything that the cluster and the jobs have, such as tenants."""
    return not _unknown(scenario, _sizes(scenario.cluster), entry)


def _sizes(cluster: ClusterSpec) -> dict[str, int]:
    """Return the usable devices by kind."""
    sizes: dict[str, int] = {}
    for node in cluster.nodes:
        if node.state == "up":
            sizes[node.kind] = sizes.get(node.kind, 0) + node.num_usable
    return sizes


def _check_guarantees(cluster: ClusterSpec, num_devices: int) -> None:
    top = [tenant for tenant in cluster.tenants if tenant.parent is None and tenant.guaranteed]
    if sum(tenant.guaranteed for tenant in top) > num_devices:
        names = " and ".join(f"{tenant.name!r} ({tenant.guaranteed})" for tenant in top)
        raise ValueError(
            f"--tenants: {names} are guaranteed more than the {num_devices} devices of the cluster. "
            "Guarantee less."
        )


def _check_policy(
    scenario: Scenario, sizes: Mapping[str, int], name: str, entry: PolicyEntry
) -> None:
    """Refuse policies that do not know a property of the cluster or of the jobs."""
    if unknown := _unknown(scenario, sizes, entry):
        raise ValueError(f"--policy {name}: {unknown}")


def _unknown(scenario: Scenario, sizes: Mapping[str, int], entry: PolicyEntry) -> str:
    """Return what a policy does not know, and what to do about it; "" if it knows all there is."""
    cluster, unknown = scenario.cluster, ""
    if entry.one_kind and len(sizes) > 1:
        unknown = (
            f"supports one kind of device only, but the cluster has {', '.join(sorted(sizes))}. Leave it "
            "out, or choose a cluster of one kind."
        )
    elif entry.one_kind and cluster.quota:
        unknown = (
            f"does not support quotas, but the cluster has some for {', '.join(sorted(cluster.quota))}. "
            "Leave it out, or the quotas."
        )
    elif entry.one_kind and cluster.tenants:
        names = ", ".join(tenant.name for tenant in cluster.tenants)
        unknown = f"does not support tenants ({names}). Leave it out, or --tenants."
    elif entry.one_kind and some_limited(cluster) and any(map(needs_of, scenario.jobs)):
        unknown = (
            "does not support CPUs and memory, which jobs need and nodes have a number of. Leave it out, or "
            "these numbers of the --cluster."
        )
    elif entry.largest_gang is not None:
        wide = [job for job in scenario.jobs if job.num_devices > entry.largest_gang]
        if wide:
            unknown = (
                f"runs jobs of one device only, but {len(wide)} of {len(scenario.jobs)} jobs request more, "
                f"such as {wide[0].id!r}. Leave it out."
            )
    return unknown


def _check_settings(scenario: Scenario, settings: Settings) -> None:
    """Refuse settings by rack or application that do not cover the cluster or the jobs."""
    if settings.faults is not None:
        FaultScript(settings.faults, scenario.cluster.nodes, settings.seed)
    applications = {job.application for job in scenario.jobs}
    for application in applications:
        settings.restart_of(application)
        settings.told_restart_of(application)
        if settings.costs is not None:
            settings.costs.bytes("move", application)
            settings.costs.seconds("move", application, 0.0, True)
    if settings.inputs is not None and isinstance(settings.inputs.samples_per_cpu_s, Mapping):
        unknown = sorted(settings.inputs.samples_per_cpu_s.keys() - applications)
        if unknown:
            raise ValueError(
                f"--inputs: no job runs {unknown[0]!r}; they run {', '.join(sorted(applications))}."
            )


def _check_sizes(
    scenario: Scenario, specs: Sequence[JobSpec], sizes: Mapping[str, int], name: str
) -> None:
    """Refuse jobs that are larger than the cluster, or than the limits of their tenant."""
    limits = limits_of(scenario.cluster)
    for spec in specs:
        own = {kind: sizes.get(kind, 0) for kind in spec.kinds or sizes}
        most = max(own.values())
        if spec.min_devices > most:
            raise ValueError(
                f"--policy {name}: job {spec.id!r} needs {spec.min_devices} devices of one kind, "
                f"but the cluster has {most}; it would wait for ever. Enlarge the cluster, or remove the job."
            )
        fitting = [kind for kind, size in own.items() if size >= spec.min_devices]
        for limit in limits:
            least = spec.min_devices * min(map(limit.per_device, fitting))
            if spec.tenant in limit.tenants and least > limit.left:
                raise ValueError(
                    f"--policy {name}: job {spec.id!r} needs {spec.min_devices} devices, which is more than "
                    f"{limit.said}; it would wait for ever. Raise that limit, or remove the job."
                )
