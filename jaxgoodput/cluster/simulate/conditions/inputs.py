"""How fast the processors of the nodes feed jobs: a job is no faster than its samples are prepared.

Every device of a job waits for its own samples, and all devices for one another: what counts is the node on
which a device has the fewest processors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxgoodput.cluster.simulate.conditions.restarts import Seconds, of_application
from jaxgoodput.specs import Allocation, Node


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Processors, and what one of them does. Policies are not told.

    Raises ValueError for numbers that cannot be.
    """

    cpus_per_node: float | Mapping[str, float]
    """Of every node, or by kind of its devices."""
    samples_per_cpu_s: float | Mapping[str, float]
    """Samples (steps, for a truth that knows no samples) that one processor prepares in a second, for every
    application or by application; those that are absent never wait."""
    cpus_per_device: Seconds | None = None
    """What a job asks for; where a node has fewer for those that are on it, all get less in proportion.
    None: its devices' part of the node."""

    def __post_init__(self):
        for name in ("cpus_per_node", "samples_per_cpu_s", "cpus_per_device"):
            given = getattr(self, name)
            values = given.values() if isinstance(given, Mapping) else (given,)
            for value in values:
                if value is not None and not value > 0:
                    raise ValueError(
                        f"Inputs.{name} must be above 0, got {value}; nothing would ever be prepared. Leave "
                        "Settings.inputs out for jobs that do not wait for samples."
                    )


def fed(
    inputs: Inputs,
    nodes: Mapping[str, Node],
    running: Sequence[tuple[str, str, Allocation]],
) -> dict[str, float]:
    """Samples/s that are prepared for each job that may wait for them.

    `running` is (id, application, devices).
    """
    asked: dict[str, dict[str, float]] = {}  # node -> job -> processors
    for job, application, allocation in running:
        for name, local in allocation.devices.items():
            each = _asked_per_device(inputs, nodes[name], application)
            asked.setdefault(name, {})[job] = each * len(local)
    granted: dict[str, dict[str, float]] = {}
    for name, by_job in asked.items():
        part = min(1.0, _cpus(inputs, nodes[name]) / sum(by_job.values()))
        granted[name] = {job: part * cpus for job, cpus in by_job.items()}
    found = {}
    for job, application, allocation in running:
        rate = inputs.samples_per_cpu_s
        each = rate.get(application) if isinstance(rate, Mapping) else rate
        if each is not None:
            fewest = min(granted[n][job] / len(local) for n, local in allocation.devices.items())
            found[job] = fewest * allocation.num_devices * each
    return found


def _cpus(inputs: Inputs, node: Node) -> float:
    return of_application(inputs.cpus_per_node, node.kind, "Inputs.cpus_per_node")


def _asked_per_device(inputs: Inputs, node: Node, application: str) -> float:
    if inputs.cpus_per_device is None:
        return _cpus(inputs, node) / node.num_devices
    return of_application(inputs.cpus_per_device, application, "Inputs.cpus_per_device")
