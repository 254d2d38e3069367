"""A strategy is a plan for placing a model; on real devices it becomes a layout.

Three degrees: `data` copies of the model, each cut into `fsdp` parts that are put together only while
they are used (ZeRO-3), each part cut again over `tensor` devices that compute it together. Every
(data, fsdp) pair is a *replica*: it computes micro-batches of its own. The plan is hashable, JSON-able
and free of devices; `on` is the one place where a mesh is made.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

DATA_AXIS, FSDP_AXIS, TENSOR_AXIS = "data", "fsdp", "tensor"
# The copies vary fastest: a device that holds a part under one strategy then holds a part of that
# part, or all of it, under most others, and need not receive it (benchmarks/reshard.py has the bytes).
MESH_AXES = (FSDP_AXIS, TENSOR_AXIS, DATA_AXIS)
REPLICA_AXES = (FSDP_AXIS, DATA_AXIS)
MODEL_AXES = (FSDP_AXIS, TENSOR_AXIS)  # those that a parameter may be cut over
WHAT_IS_LEFT = -1

Rule = tuple[str, PartitionSpec]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a model is copied and cut over devices. One degree may be -1: what is left of the devices.

    `rules` are (regex, PartitionSpec): the first whose regex is found in a parameter's path, such as
    `layers/0/mlp/kernel`, says which dimension is cut over "fsdp" and which over "tensor". Parameters
    without a rule follow the model's own partitioning metadata, or the defaults of `partition.py`. A spec
    holds for every degree: an axis of degree 1 cuts nothing.

    >>> Strategy(data=2, fsdp=4).num_replicas
    8
    >>> Strategy(data=-1, tensor=2).resolved(8)
    Strategy(data=4, fsdp=1, tensor=2, rules=())
    """

    data: int = 1
    """Copies of the model."""
    fsdp: int = 1
    """Parts of a copy, each whole only while it is used; every part computes samples of its own."""
    tensor: int = 1
    """Devices that compute a part together."""
    rules: Sequence[Rule] = ()
    """(regex, PartitionSpec), the first that is found in a parameter's path."""

    def __post_init__(self):
        """Refuse degrees that no mesh can have, and rules that cannot be followed."""
        for axis, degree in self.degrees.items():
            if degree < 1 and degree != WHAT_IS_LEFT:
                what = "number of copies" if axis == DATA_AXIS else "number of parts"
                raise ValueError(
                    f"Strategy.{axis} is the {what} and must be at least 1, or -1 for what is left "
                    f"of the devices; got {degree}. Leave it at 1 for a single device."
                )
        if list(self.degrees.values()).count(WHAT_IS_LEFT) > 1:
            raise ValueError(
                f"only one degree of a Strategy can be -1, what is left of the devices; got {self.name}. "
                "Give the others a number; 1 cuts nothing."
            )
        for pattern, spec in self.rules:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"the rule ({pattern!r}, {spec}) does not start with a regular expression: {error}. "
                    "It is searched for in paths such as 'layers/0/mlp/kernel'."
                ) from error
            check_axes(spec, f"the rule ({pattern!r}, {spec})")
        # A list, or a plain tuple for a spec, is understood; the plan itself must be hashable.
        rules = tuple((pattern, PartitionSpec(*spec)) for pattern, spec in self.rules)
        object.__setattr__(self, "rules", rules)

    @property
    def degrees(self) -> dict[str, int]:
        """Axis name -> degree."""
        return {DATA_AXIS: self.data, FSDP_AXIS: self.fsdp, TENSOR_AXIS: self.tensor}

    @property
    def logical_rules(self) -> tuple[tuple[str, Any], ...]:
        """Placeholder."""
        return ()

    @property
    def is_cut(self) -> bool:
        """Whether a device holds only a part of the model."""
        return self.num_devices > self.data

    @property
    def name(self) -> str:
        """Short, for tables and charts.

        >>> Strategy(fsdp=4, tensor=2).name, Strategy().name
        ('fsdp4.tensor2', 'single')
        """
        parts = [f"{axis}{degree}" for axis, degree in self.degrees.items() if degree != 1]
        return ".".join(parts) or "single"

    @property
    def num_devices(self) -> int:
        """Devices that the plan needs; a degree of -1 must be resolved first."""
        return math.prod(self._known().values())

    @property
    def num_replicas(self) -> int:
        """Computers of micro-batches of their own: data x fsdp."""
        known = self._known()
        return known[DATA_AXIS] * known[FSDP_AXIS]

    def _known(self) -> dict[str, int]:
        if WHAT_IS_LEFT in self.degrees.values():
            raise ValueError(
                f"{self.name} has a degree of -1, which only a number of devices resolves. Use "
                ".resolved(num_devices) or .on(devices)."
            )
        return self.degrees

    def resolved(self, num_devices: int) -> "Strategy":
        """The same plan without -1, for exactly so many devices; ValueError where it needs others."""
        open_axes = [axis for axis, degree in self.degrees.items() if degree == WHAT_IS_LEFT]
        taken = math.prod(degree for degree in self.degrees.values() if degree != WHAT_IS_LEFT)
        if open_axes and num_devices > 0 and num_devices % taken == 0:
            return replace(self, **{open_axes[0]: num_devices // taken})
        if not open_axes and num_devices == taken:
            return self
        needs = f"a multiple of {taken}" if open_axes else f"{taken}"
        remedy = "Pass exactly that many"
        if num_devices > 0:
            simple = (self.fsdp, self.tensor) == (1, 1)
            other = (
                f"Strategy(data={num_devices})" if simple else f"one of candidates({num_devices})"
            )
            remedy += f", or use {other}"
        raise ValueError(
            f"Strategy({self.name}) needs {needs} devices; got {num_devices}. {remedy}."
        )

    def on(self, devices: Sequence[Any]) -> "Layout":
        """The plan on `devices`, in their order; their number must be `num_devices`."""
        strategy = self.resolved(len(devices))
        shape = [strategy.degrees[axis] for axis in MESH_AXES]
        grid = np.asarray(devices).reshape(shape)
        mesh = Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
        return Layout(strategy=strategy, mesh=mesh)


def check_axes(spec: Iterable[Any], source: str) -> None:
    """Raise ValueError, beginning with `source`, where a spec cannot be followed by parameters."""
    cut = [axis for axis in spec if axis is not None]
    if any(axis not in MODEL_AXES for axis in cut) or len(set(cut)) < len(cut):
        raise ValueError(
            f"{source} must name for each dimension None, 'fsdp' or 'tensor', each axis once and one "
            f"axis per dimension; got {tuple(spec)}. Copies over 'data' are whole: to cut parameters over "
            "those devices, raise fsdp instead."
        )


def candidates(
    num_devices: int, *, max_tensor: int = 8, rules: Sequence[Rule] = ()
) -> tuple[Strategy, ...]:
    """Every strategy that uses all of `num_devices`; plain data parallelism first.

    Not every one of them suits every model: `param_specs` refuses those whose rules do not divide.

    >>> [s.name for s in candidates(4)]
    ['data4', 'data2.fsdp2', 'fsdp4', 'data2.tensor2', 'fsdp2.tensor2', 'tensor4']
    """
    if num_devices < 1:
        raise ValueError(
            f"num_devices must be at least 1; got {num_devices}. Pass the number of devices to use."
        )
    found = []
    for tensor in _divisors(num_devices):
        if tensor > max_tensor:
            continue
        for fsdp in _divisors(num_devices // tensor):
            data = num_devices // tensor // fsdp
            found.append(Strategy(data=data, fsdp=fsdp, tensor=tensor, rules=rules))
    return tuple(found)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclass(frozen=True)
class Layout:
    """A strategy on real devices; passed to whoever needs a mesh, never kept globally."""

    strategy: Strategy
    """Without -1."""
    mesh: Mesh
    """Of the axes of `MESH_AXES`."""

    @property
    def num_replicas(self) -> int:
        """Copies of the model that compute micro-batches of their own."""
        return self.strategy.num_replicas

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.mesh.size

    @property
    def replicated(self) -> NamedSharding:
        """Every device holds the whole value: scalars, model state."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch_sharding(self) -> NamedSharding:
        """The leading axis is cut over the replicas: batches, and sums per replica."""
        return NamedSharding(self.mesh, PartitionSpec(REPLICA_AXES))

    @property
    def row_per_device(self) -> NamedSharding:
        """The leading axis is cut over all devices."""
        return NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """A partition on this mesh."""
        return NamedSharding(self.mesh, spec)
