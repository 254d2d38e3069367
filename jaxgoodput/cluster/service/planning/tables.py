"""What a job would do on every shape of devices, from what it told of itself: the tables of a policy.

Each of its layouts keeps the devices that share one replica and has as many replicas as there is room for;
on each shape the best of them counts, with the batch that is best there. Where a job cannot be asked, or has
not measured enough yet, more devices are taken to be worth as much more, up to twice as many as it has been
seen on; one that is to tell of itself gets no more before its first steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.cluster.service.record.state import JobEntry
from jaxgoodput.goodput.efficiency import Grad, GradGroups, GradParams
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import PerfParams, Placement
from jaxgoodput.goodput.search import BatchLimits, goodput_table
from jaxgoodput.specs import Hints, LayoutHints, Shape

GROWTH = 2.0  # of the largest size that was seen: the most that is believed
SEEN_S = 30.0  # a job that tells nothing has been seen on a size that it held for so long


@dataclass(frozen=True, kw_only=True)
class GoodputTable:
    """A job's goodput by shape, and how wrong it may be where that is known."""

    goodput: Mapping[Shape, float]
    error: Mapping[Shape, float]
    largest: int
    """The largest size, in devices, that it has been seen on; 0: none."""


def table_of(entry: JobEntry, offered: Sequence[Shape], now_s: float) -> GoodputTable:
    """What a job would do on the shapes that it may have."""
    spec, hints = entry.spec, entry.hints
    each = entry.submission.devices_per_process
    least = spec.num_devices if spec.mode == "rigid" else spec.min_devices
    most = spec.num_devices if spec.mode == "rigid" else spec.max_devices
    assert least is not None and most is not None  # as JobSpec checks
    mine = [
        shape
        for shape in offered
        if least <= shape.num_devices <= most
        and shape.num_devices % shape.num_nodes == 0
        and shape.num_devices // shape.num_nodes % each == 0
        and (spec.kinds is None or shape.kind in spec.kinds)
    ]
    largest = max(_seen(entry, now_s), 0 if hints is None else hints.largest)
    if spec.mode != "adaptive":
        return GoodputTable(
            goodput={s: float(s.num_devices) for s in mine}, error={}, largest=largest
        )
    if hints is None or not hints.layouts or not hints.grad_sqr:
        smallest = min((s.num_devices for s in mine), default=0)
        # One that compiles has measured nothing, and would have to begin that anew.
        tells = entry.submission.workdir is not None
        begins = tells and (hints is None or hints.progress == 0)
        widest = max(largest if begins else GROWTH * largest, smallest)
        found = {s: float(s.num_devices) for s in mine if s.num_devices <= widest}
        if not largest:
            found = {s: 1.0 for s in found if s.num_devices == smallest}
        return GoodputTable(goodput=found, error={}, largest=largest)
    return _told(hints, mine, largest)


def _seen(entry: JobEntry, now_s: float) -> int:
    """The largest size that a job has held for a while."""
    sizes = [
        sum(map(len, held.devices.values()))
        for held in entry.past
        if (now_s if held.end_s is None else held.end_s) - held.start_s >= SEEN_S
    ]
    return max(sizes, default=0)


def _told(hints: Hints, mine: Sequence[Shape], largest: int) -> GoodputTable:
    smallest = min((s.num_devices for s in mine), default=0)
    widest = max(GROWTH * largest, smallest)
    asked = [shape for shape in mine if shape.num_devices <= widest]
    best: dict[Shape, tuple[float, float]] = {}
    for layout in hints.layouts:
        fits = [
            s
            for s in asked
            if s.num_devices % layout.devices_per_replica == 0
            and s.num_devices // layout.devices_per_replica >= s.num_nodes
        ]
        if not fits:
            continue
        model, limits = _model(hints, layout)
        placements = Placement(
            num_nodes=np.array([s.num_nodes for s in fits]),
            num_replicas=np.array([s.num_devices // layout.devices_per_replica for s in fits]),
        )
        for shape, value in zip(fits, goodput_table(model, limits, placements), strict=True):
            if np.isfinite(value) and value > best.get(shape, (0.0, 0.0))[0]:
                best[shape] = float(value), layout.error
    known = {s: e for s, (_, e) in best.items() if s.kind == hints.kind and e > 0}
    return GoodputTable(goodput={s: g for s, (g, _) in best.items()}, error=known, largest=largest)


def _model(hints: Hints, layout: LayoutHints) -> tuple[GoodputModel, BatchLimits]:
    if len(hints.grad_sqr) == 1:
        grad: Grad = GradParams(sqr=hints.grad_sqr[0], var=hints.grad_var[0])
    else:
        grad = GradGroups(sqr=np.array(hints.grad_sqr), var=np.array(hints.grad_var))
    model = GoodputModel(
        perf=PerfParams(**vars(layout.cost)),
        grad=grad,
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
