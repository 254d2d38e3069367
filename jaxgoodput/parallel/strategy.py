"""A strategy is a plan for placing a model; on real devices it becomes a layout.

Data parallelism only: every device holds one replica. The plan is hashable and free of devices, so
that it can be compared, stored and sent; `on` is the one place where a mesh is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA_AXIS = "data"


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How many replicas hold the model.

    >>> Strategy(data=8).num_replicas
    8
    """

    data: int = 1

    def __post_init__(self):
        """Refuse a degree that no mesh can have."""
        if self.data < 1:
            raise ValueError(
                f"Strategy.data is the number of replicas and must be at least 1; got {self.data}. "
                "Leave it at 1 for a single device."
            )

    @property
    def num_devices(self) -> int:
        """Devices that the plan needs."""
        return self.data

    @property
    def num_replicas(self) -> int:
        """Copies of the model, each computing its own micro-batches."""
        return self.data

    def on(self, devices: Sequence[Any]) -> "Layout":
        """The plan on `devices`, in their order; their number must be `num_devices`."""
        if len(devices) != self.num_devices:
            raise ValueError(
                f"Strategy(data={self.data}) needs {self.num_devices} devices; got {len(devices)}. "
                f"Pass exactly that many, or use Strategy(data={len(devices)})."
            )
        return Layout(
            strategy=self,
            mesh=Mesh(np.asarray(devices), (DATA_AXIS,), axis_types=(AxisType.Auto,)),
        )


@dataclass(frozen=True)
class Layout:
    """A strategy on real devices; passed to whoever needs a mesh, never kept globally."""

    strategy: Strategy
    mesh: Mesh

    @property
    def num_replicas(self) -> int:
        """Copies of the model."""
        return self.strategy.num_replicas

    @property
    def replicated(self) -> NamedSharding:
        """Every device holds the whole value: parameters and optimizer state."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch_sharding(self) -> NamedSharding:
        """The leading axis is cut over the replicas: batches, and sums per replica."""
        return NamedSharding(self.mesh, PartitionSpec(DATA_AXIS))
