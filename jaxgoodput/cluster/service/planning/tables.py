"""Goodput tables: what a job would do on every shape, from what it has reported of itself.

Each layout that a job has measured keeps the number of devices that share one replica, and uses as many
replicas as there is room for. The table takes, for each shape, the best layout with its best batch.

A job that cannot report, or has not measured enough yet, is assumed to scale linearly, up to twice the
largest number of devices that it has run on. If the job will report, it grows only after its first steps. An
elastic job, whose batch is fixed, may have any of its sizes at once: until it has measured, it is assumed to
scale like most jobs (`scheduler/priors.py`).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxgoodput.cluster.scheduler.priors import assumed_goodput
from jaxgoodput.cluster.scheduler.shapes import chunks
from jaxgoodput.cluster.service.record.state import JobEntry
from jaxgoodput.goodput.efficiency import GradGroups
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import PerfParams, Placement
from jaxgoodput.goodput.search import BatchLimits, goodput_table
from jaxgoodput.specs import Hints, LayoutHints, Shape

GROWTH = 2.0  # a table extends to this multiple of the largest size that a job has run on
SEEN_S = 30.0  # a job that reports nothing has run on a size if it held it this long
SAME_BATCH = 0.1  # by which an elastic job's batch may differ, since not all devices divide it


@dataclass(frozen=True, kw_only=True)
class GoodputTable:
    """A job's goodput by shape, with the error of the model if that is known."""

    goodput: Mapping[Shape, float]
    largest: int
    """The largest number of devices that the job has run on; 0 if it has not run."""
    in_samples: bool = False
    """Whether goodput is in useful samples per second; otherwise only its ratios mean something."""
    error: Mapping[Shape, float] = field(default_factory=dict)
    """RMS log error, for shapes whose goodput follows from measurements on their kind of device."""


def table_of(entry: JobEntry, offered: Sequence[Shape], now_s: float) -> GoodputTable:
    """Return the table of a job over all offered shapes that the job may have."""
    hints = entry.hints
    shapes = _allowed(entry, offered)
    largest = max(_seen(entry, now_s), 0 if hints is None else hints.largest)
    if entry.spec.mode == "rigid":
        return _linear(shapes, largest)
    if entry.spec.mode == "elastic":
        return _elastic(hints, shapes, largest)
    if hints is not None and hints.layouts and hints.grad_sqr:
        return _measured(hints, shapes, largest)
    return _unmeasured(entry, shapes, largest)


def _elastic(hints: Hints | None, shapes: Sequence[Shape], largest: int) -> GoodputTable:
    """Return the table of a job whose batch is fixed: as measured, or as it is assumed before."""
    if hints is not None and hints.layouts:
        batch = hints.global_batch_size or hints.base_batch_size
        fixed = dataclasses.replace(
            hints,
            base_batch_size=batch,
            min_global_batch_size=max(math.ceil((1.0 - SAME_BATCH) * batch), 1),
            max_global_batch_size=math.floor((1.0 + SAME_BATCH) * batch),
            # Without noise all batches this close are worth the same.
            grad_sqr=hints.grad_sqr or (1.0,),
            grad_var=hints.grad_var or (0.0,),
        )
        found = _measured(fixed, shapes, largest)
        if found.goodput:
            return found
    assumed = {shape: assumed_goodput(shape) for shape in shapes}
    return GoodputTable(goodput=assumed, largest=largest)


def _unmeasured(entry: JobEntry, shapes: Sequence[Shape], largest: int) -> GoodputTable:
    """Return the table of a job without enough measurements: linear, up to a size that limits the risk."""
    hints = entry.hints
    smallest = min((shape.num_devices for shape in shapes), default=0)
    if not largest:
        first = {shape: 1.0 for shape in shapes if shape.num_devices == smallest}
        return GoodputTable(goodput=first, largest=largest)
    # A job that still compiles has measured nothing; on other devices it would have to compile again.
    reports = entry.submission.workdir is not None
    is_compiling = reports and (hints is None or hints.progress == 0)
    widest = max(largest if is_compiling else GROWTH * largest, smallest)
    return _linear([shape for shape in shapes if shape.num_devices <= widest], largest)


def work_left(hints: Hints, table: GoodputTable) -> float | None:
    """Return the work left in the unit of the table times seconds; None if it is not known in that unit."""
    if hints.remaining is None or table.in_samples:
        return hints.remaining
    # The table is in units of its own: what was measured on the present devices converts them.
    samples_per_s = hints.goodput or hints.throughput
    present = (hints.kind, hints.num_devices)
    known = [rate for s, rate in table.goodput.items() if (s.kind, s.num_devices) == present]
    return hints.remaining / samples_per_s * max(known) if samples_per_s and known else None


def _allowed(entry: JobEntry, offered: Sequence[Shape]) -> list[Shape]:
    """Return the shapes that hold a whole number of processes on every node and fit the job's limits."""
    spec, each = entry.spec, entry.submission.devices_per_process
    is_rigid = spec.mode == "rigid"
    least = spec.num_devices if is_rigid else spec.min_devices
    most = spec.num_devices if is_rigid else spec.max_devices
    assert least is not None and most is not None  # JobSpec checks this
    node_size: dict[str, int] = {}
    for shape in offered:
        if shape.num_nodes == 1:
            node_size[shape.kind] = max(shape.num_devices, node_size.get(shape.kind, 0))

    def parts(shape: Shape) -> list[int]:
        even = -(-shape.num_devices // shape.num_nodes)
        return chunks(shape, node_size.get(shape.kind, even))

    return [
        shape
        for shape in offered
        if least <= shape.num_devices <= most
        and (spec.kinds is None or shape.kind in spec.kinds)
        and all(part % each == 0 for part in parts(shape))
    ]


def _linear(shapes: Sequence[Shape], largest: int) -> GoodputTable:
    """Return the table of a job whose speed is assumed to grow in proportion to its devices."""
    goodput = {shape: float(shape.num_devices) for shape in shapes}
    return GoodputTable(goodput=goodput, largest=largest)


def _seen(entry: JobEntry, now_s: float) -> int:
    """Return the largest number of devices that a job has held for `SEEN_S` seconds; 0 if none."""
    sizes = [
        sum(map(len, held.devices.values()))
        for held in entry.past
        if (now_s if held.end_s is None else held.end_s) - held.start_s >= SEEN_S
    ]
    return max(sizes, default=0)


def _measured(hints: Hints, shapes: Sequence[Shape], largest: int) -> GoodputTable:
    """Return the table that follows from a job's measurements, up to `GROWTH` times its largest size."""
    smallest = min((shape.num_devices for shape in shapes), default=0)
    widest = max(GROWTH * largest, smallest)
    asked = [shape for shape in shapes if shape.num_devices <= widest]
    best: dict[Shape, tuple[float, float]] = {}
    for layout in hints.layouts:
        each = layout.devices_per_replica
        # Every node of a shape must hold at least one whole replica.
        fits = [
            shape
            for shape in asked
            if shape.num_devices % each == 0 and shape.num_devices // each >= shape.num_nodes
        ]
        if not fits:
            continue
        model, limits = _model(hints, layout)
        placements = Placement(
            num_nodes=np.array([shape.num_nodes for shape in fits]),
            num_replicas=np.array([shape.num_devices // each for shape in fits]),
        )
        for shape, value in zip(fits, goodput_table(model, limits, placements), strict=True):
            if np.isfinite(value) and value > best.get(shape, (0.0, 0.0))[0]:
                best[shape] = float(value), layout.error
    error = {s: e for s, (_, e) in best.items() if s.kind == hints.kind and e > 0}
    goodput = {s: g for s, (g, _) in best.items()}
    return GoodputTable(goodput=goodput, in_samples=True, error=error, largest=largest)


def _model(hints: Hints, layout: LayoutHints) -> tuple[GoodputModel, BatchLimits]:
    moments = {"sqr": np.array(hints.grad_sqr), "var": np.array(hints.grad_var)}
    model = GoodputModel(
        perf=PerfParams(**vars(layout.cost)),
        grad=GradGroups(**moments, most_gain=hints.most_gain),
        base_batch_size=hints.base_batch_size,
        residuals=layout.residuals,
    )
    limits = BatchLimits(
        base=hints.base_batch_size,
        max=hints.max_global_batch_size,
        micro=layout.micro,
        min_global=hints.min_global_batch_size,
        max_micro_batches=hints.max_micro_batches,
    )
    return model, limits
