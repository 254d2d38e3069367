"""Jobs that wait for their input: a job is no faster than the processors of its nodes prepare samples.

Every device of a job waits for its own samples, and all devices wait for each other. So the speed is set by
the node that has the fewest processors for each device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxgoodput.cluster.simulate.conditions.restarts import Seconds, of_application
from jaxgoodput.cluster.simulate.key_numbers import naming, read_numbers
from jaxgoodput.specs import Allocation, Node


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """How fast the processors of nodes prepare samples for training. Policies are not told.

    Raises ValueError for impossible numbers.
    """

    cpus_per_node: float | Mapping[str, float]
    """Processors of every node, or by kind of its devices."""
    samples_per_cpu_s: float | Mapping[str, float]
    """Samples (steps, if the truth knows no samples) that one processor prepares per second, for all
    applications or by application. Applications that are absent never wait."""
    cpus_per_device: Seconds | None = None
    """Processors that a job requests for each device, for all applications or by application. If a node has
    too few, all of its jobs get proportionally less. None: a device's even share of the node."""

    def __post_init__(self):
        for name in ("cpus_per_node", "samples_per_cpu_s", "cpus_per_device"):
            given = getattr(self, name)
            values = given.values() if isinstance(given, Mapping) else (given,)
            for value in values:
                if value is not None and not value > 0:
                    raise ValueError(
                        f"Inputs.{name} must be above 0, got {value}; no sample would ever be prepared. "
                        "Leave Settings.inputs out if jobs do not wait for samples."
                    )


def read_inputs(text: str) -> Inputs:
    """Return the processors of `cpus=NUMBER,APPLICATION=SAMPLES,...`, optionally with `per-device=NUMBER`.

    `cpus` is the number of a node, `per-device` what a job requests for each device, and APPLICATION=SAMPLES
    the samples that one processor prepares per second; other applications never wait. Raises ValueError for
    any other text.

    >>> read_inputs("cpus=32,bert=50").samples_per_cpu_s
    {'bert': 50.0}
    """
    found = read_numbers("--inputs", text, example="cpus=32,bert=50")
    if "cpus" not in found:
        raise ValueError(
            f"--inputs {text!r}: the processors of a node are missing. Add cpus=NUMBER."
        )
    cpus, requested = found.pop("cpus"), found.pop("per-device", None)
    with naming(f"--inputs {text!r}"):
        return Inputs(cpus_per_node=cpus, samples_per_cpu_s=found, cpus_per_device=requested)


def fed(
    inputs: Inputs,
    nodes: Mapping[str, Node],
    running: Sequence[tuple[str, str, Allocation]],
) -> dict[str, float]:
    """Return the samples/s that are prepared for each job, without the jobs that never wait.

    `running` holds (job id, application, allocation).
    """

    def cpus(node: Node) -> float:
        return of_application(inputs.cpus_per_node, node.kind, "Inputs.cpus_per_node")

    def requested(node: Node, application: str) -> float:
        if inputs.cpus_per_device is None:
            return cpus(node) / node.num_devices
        return of_application(inputs.cpus_per_device, application, "Inputs.cpus_per_device")

    wanted: dict[str, dict[str, float]] = {}  # node -> job -> processors
    for job, application, allocation in running:
        for name, local in allocation.devices.items():
            each = requested(nodes[name], application)
            wanted.setdefault(name, {})[job] = each * len(local)
    granted: dict[str, dict[str, float]] = {}
    for name, by_job in wanted.items():
        part = min(1.0, cpus(nodes[name]) / sum(by_job.values()))
        granted[name] = {job: part * count for job, count in by_job.items()}
    found = {}
    for job, application, allocation in running:
        rate = inputs.samples_per_cpu_s
        each = rate.get(application) if isinstance(rate, Mapping) else rate
        if each is not None:
            fewest = min(granted[n][job] / len(local) for n, local in allocation.devices.items())
            found[job] = fewest * allocation.num_devices * each
    return found
