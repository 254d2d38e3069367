"""What is assumed of a job of which nothing was measured and no goodput table is known.

A rigid job has one size, so its speed there decides nothing; it counts as many units of work per second as it
has devices. Any other job is assumed to become 1.87 times as fast with each doubling of its devices, and a
tenth slower on several nodes: the mean of what tables of measured jobs show (`policies/tables.py`). Its own
measurements replace these numbers.
"""

import dataclasses
from collections.abc import Iterable

from jaxgoodput.cluster.scheduler.placement.amounts import needs_of
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.shapes import (
    chunks,
    node_size,
    own_shapes,
    shapes,
    size_limits,
    takes,
)
from jaxgoodput.specs import ClusterSpec, Shape

POWER = 0.9  # goodput grows with devices to this power
SEVERAL_NODES = 0.9  # factor on it if the network is used


def assumed_goodput(shape: Shape) -> float:
    """Return the goodput that is assumed on a shape, in units of the goodput on one device.

    >>> assumed_goodput(Shape("h200", 1, 1)), round(assumed_goodput(Shape("h200", 1, 2)), 2)
    (1.0, 1.87)
    """
    return shape.num_devices**POWER * (1.0 if shape.num_nodes == 1 else SEVERAL_NODES)


class Priors:
    """Gives jobs without a goodput table the one that is assumed of them, on the shapes of one cluster."""

    def __init__(self, cluster: ClusterSpec):
        self._cluster = cluster
        self._sizes = node_size(cluster)
        self._default: tuple[Shape, ...] | None = None
        self._tables: dict[tuple, dict[Shape, float]] = {}

    def with_table(self, view: JobView) -> JobView:
        """Return the job with the assumed table if it has none, and has not measured that none is of use."""
        has_measured = view.spec.mode == "adaptive" and view.largest_profiled > 0
        if view.goodput or has_measured:
            return view
        spec = view.spec
        alike = (
            size_limits(spec),
            spec.kinds,
            spec.mode == "rigid",
            view.devices_per_process,
            needs_of(spec),
        )
        if alike not in self._tables:
            self._tables[alike] = self._table(view)
        return dataclasses.replace(view, goodput=self._tables[alike])

    def _table(self, view: JobView) -> dict[Shape, float]:
        is_rigid = view.spec.mode == "rigid"
        return {
            shape: float(shape.num_devices) if is_rigid else assumed_goodput(shape)
            for shape in self._offered(view)
            if takes(view.spec, shape) and self._holds_whole_processes(view, shape)
        }

    def _offered(self, view: JobView) -> Iterable[Shape]:
        if self._default is None:
            self._default = shapes(self._cluster)
        return sorted({*self._default, *own_shapes(self._cluster, view.spec)})

    def _holds_whole_processes(self, view: JobView, shape: Shape) -> bool:
        parts = chunks(shape, self._sizes[shape.kind])
        return all(part % view.devices_per_process == 0 for part in parts)
