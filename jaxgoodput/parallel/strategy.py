"""A strategy is a plan for placing a model; on real devices it becomes a layout.

Six degrees. `data` copies of the model, each cut into `fsdp` parts that are put together only while they
are used (ZeRO-3), each part cut again over `tensor` devices that compute it together. `context` cuts
sequences and no parameter; `expert` cuts the experts of a mixture, and rows besides; `stage` cuts a stack
of layers into the stages of a pipeline (`pipeline.py`). Every (fsdp, expert, data) triple is a
*replica*: it computes micro-batches of its own. The plan is hashable, JSON-able and free of devices; `on`
is the one place where a mesh is made. Its mesh has all six axes, so that a model's own constraints may
name any of them: an axis of degree 1 cuts nothing.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from absl import logging
from flax.core.spmd import logical_axis_rules
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

DATA_AXIS, FSDP_AXIS, TENSOR_AXIS = "data", "fsdp", "tensor"
CONTEXT_AXIS, EXPERT_AXIS, STAGE_AXIS = "context", "expert", "stage"
# The copies vary fastest: a device that holds a part under one strategy then holds a part of that
# part, or all of it, under most others, and need not receive it (benchmarks/reshard.py has the bytes).
MESH_AXES = (STAGE_AXIS, FSDP_AXIS, EXPERT_AXIS, CONTEXT_AXIS, TENSOR_AXIS, DATA_AXIS)
REPLICA_AXES = (FSDP_AXIS, EXPERT_AXIS, DATA_AXIS)
# Those that a parameter may be cut over.
MODEL_AXES = (FSDP_AXIS, TENSOR_AXIS, EXPERT_AXIS, STAGE_AXIS)
# Over several hosts what sends most varies fastest instead: it stays within a host.
BY_TRAFFIC = (DATA_AXIS, STAGE_AXIS, FSDP_AXIS, EXPERT_AXIS, CONTEXT_AXIS, TENSOR_AXIS)
WHAT_IS_LEFT = -1

# A mesh of all axes, over nothing: constraints mean something in it, and cut nothing. (Axes of jax 0.11 would
# be explicit by default, and constraints assertions.)
UNCUT = AbstractMesh((1,) * len(MESH_AXES), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))

P = ParamSpec("P")
T = TypeVar("T")
Rule = tuple[str, PartitionSpec]
Activation = tuple[str, str | tuple[str, ...] | None]

# What logical names of activations stand for, as flax, T5X and MaxText call them.
DEFAULT_ACTIVATIONS: tuple[Activation, ...] = (
    *((name, REPLICA_AXES) for name in ("batch", "activation_batch")),
    *(
        (name, CONTEXT_AXIS)
        for name in ("length", "activation_length", "activation_norm_length", "sequence")
    ),
    *(
        (name, TENSOR_AXIS)
        for name in (
            *("heads", "activation_heads", "q_heads", "kv_heads", "activation_kv_heads"),
            *("mlp", "activation_mlp", "vocab", "activation_vocab", "joined_kv"),
        )
    ),
    *((name, EXPERT_AXIS) for name in ("exp", "expert", "activation_exp")),
    *((name, STAGE_AXIS) for name in ("stage", "activation_stage")),
    *(
        (name, None)
        for name in (
            *(
                "embed",
                "activation_embed",
                "kv",
                "activation_kv",
                "kv_length",
                "activation_kv_length",
            ),
            *("relpos_buckets", "abspos_buckets", "layers", "stack", "norm"),
        )
    ),
)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a model is copied and cut over devices. One degree may be -1: what is left of the devices.

    `rules` are (regex, PartitionSpec): the first whose regex is found in a parameter's path, such as
    `layers/0/mlp/kernel`, says which dimension is cut over which of "fsdp", "tensor", "expert", "stage",
    or a tuple of them. Parameters without a rule follow the model's own partitioning metadata, or the
    defaults of `partition.py`. A spec holds for every degree: an axis of degree 1 cuts nothing.

    >>> Strategy(data=2, fsdp=4).num_replicas
    8
    >>> Strategy(data=-1, tensor=2).resolved(8).name
    'data4.tensor2'
    """

    data: int = 1
    """Copies of the model."""
    fsdp: int = 1
    """Parts of a copy, each whole only while it is used; every part computes samples of its own."""
    tensor: int = 1
    """Devices that compute a part together."""
    context: int = 1
    """Parts of a sequence; parameters are whole in each."""
    expert: int = 1
    """Parts of the experts; every part computes samples of its own."""
    stage: int = 1
    """Parts of a stack of layers, each computed by devices of its own (`pipeline`)."""
    rules: Sequence[Rule] = ()
    """(regex, PartitionSpec), the first that is found in a parameter's path."""
    activations: Sequence[Activation] = ()
    """(logical name, mesh axis, tuple of axes or None), before `DEFAULT_ACTIVATIONS`."""
    title: str = ""
    """The name, instead of one made of the degrees: for two strategies that differ in rules only."""

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
                f"only one degree of a Strategy can be -1, what is left of the devices; got "
                f"{self._computed_name}. "
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
        for logical, entry in self.activations:
            axes = axes_of(entry)
            if not logical or not set(axes) <= set(MESH_AXES) or len(set(axes)) < len(axes):
                raise ValueError(
                    f"Strategy.activations gives {logical!r} the axes {entry!r}; they must be None, one of "
                    f"{', '.join(MESH_AXES)}, or a tuple of those, each once. Correct the axes, or leave "
                    "the name to DEFAULT_ACTIVATIONS."
                )
        if self.title and not re.fullmatch(r"[A-Za-z0-9_.-]+", self.title):
            raise ValueError(
                f"Strategy.title is {self.title!r}; it names files and charts and may have letters, digits "
                "and _ . - only. Shorten it, or leave it empty for a name made of the degrees."
            )
        # A list, or a plain tuple for a spec, is understood; the plan itself must be hashable.
        rules = tuple((pattern, PartitionSpec(*spec)) for pattern, spec in self.rules)
        object.__setattr__(self, "rules", rules)
        activations = tuple(
            (n, tuple(a) if isinstance(a, list) else a) for n, a in self.activations
        )
        object.__setattr__(self, "activations", activations)

    @property
    def degrees(self) -> dict[str, int]:
        """Axis name -> degree, in the order of names."""
        axes = (DATA_AXIS, FSDP_AXIS, TENSOR_AXIS, CONTEXT_AXIS, EXPERT_AXIS, STAGE_AXIS)
        return {axis: getattr(self, axis) for axis in axes}

    @property
    def logical_rules(self) -> tuple[Activation, ...]:
        """What `flax.linen.logical_axis_rules` takes: the strategy's own activations, then the defaults.

        flax takes the first rule of a name whose axes are free. Axes of degree 1 stay in: they cut nothing.
        """
        return (*self.activations, *DEFAULT_ACTIVATIONS)

    @property
    def is_cut(self) -> bool:
        """Whether a device holds only a part of the model."""
        return self.num_devices > self.data

    @property
    def name(self) -> str:
        """Short, for tables and charts: the title, or the degrees other than 1.

        >>> Strategy(fsdp=4, tensor=2).name, Strategy(stage=4, data=2).name, Strategy().name
        ('fsdp4.tensor2', 'data2.stage4', 'single')
        """
        return self.title or self._computed_name

    @property
    def _computed_name(self) -> str:
        parts = [f"{axis}{degree}" for axis, degree in self.degrees.items() if degree != 1]
        return ".".join(parts) or "single"

    @property
    def num_devices(self) -> int:
        """Devices that the plan needs; a degree of -1 must be resolved first."""
        return math.prod(self._known().values())

    @property
    def num_replicas(self) -> int:
        """Computers of micro-batches of their own: data x fsdp x expert."""
        known = self._known()
        return math.prod(known[axis] for axis in REPLICA_AXES)

    def _known(self) -> dict[str, int]:
        if WHAT_IS_LEFT in self.degrees.values():
            raise ValueError(
                f"{self._computed_name} has a degree of -1, which only a number of devices resolves. Use "
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
            simple = all(degree == 1 for axis, degree in self.degrees.items() if axis != DATA_AXIS)
            other = (
                f"Strategy(data={num_devices})" if simple else f"one of candidates({num_devices})"
            )
            remedy += f", or use {other}"
        raise ValueError(
            f"Strategy({self.name}) needs {needs} devices; got {num_devices}. {remedy}."
        )

    def on(self, devices: Sequence[Any]) -> "Layout":
        """The plan on `devices`, whose number must be `num_devices`.

        Their order is kept where they belong to one process. Devices of several hosts are laid out so that
        what sends most stays within a host, TPUs so that it stays among neighbours (`device_grid`).
        """
        strategy = self.resolved(len(devices))
        grid, axes = device_grid(strategy, devices), MESH_AXES
        if len({getattr(d, "process_index", 0) for d in devices}) > 1:
            # One program moves a state between two layouts, if both have the devices in one order.
            axes = BY_TRAFFIC
            grid = grid.transpose([MESH_AXES.index(axis) for axis in axes])
        mesh = Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))
        return Layout(strategy=strategy, mesh=mesh)


def device_grid(strategy: Strategy, devices: Sequence[Any]) -> np.ndarray:
    """`devices` as an array of the axes of `MESH_AXES`, each where its traffic is cheap.

    One process without TPUs: their order. Several: by slice and process, then `BY_TRAFFIC`. TPUs: by their
    torus, with "data" over slices; ValueError where that does not go.
    """
    hosts = [(getattr(d, "slice_index", 0) or 0, getattr(d, "process_index", 0)) for d in devices]
    is_tpu = bool(devices) and getattr(devices[0], "platform", "") == "tpu"
    if not is_tpu and len(set(hosts)) == 1:
        return _array(devices).reshape([strategy.degrees[axis] for axis in MESH_AXES])
    shape = [strategy.degrees[axis] for axis in BY_TRAFFIC]
    ordered = [devices[i] for i in sorted(range(len(devices)), key=hosts.__getitem__)]
    grid = _array(ordered).reshape(shape)
    if is_tpu:
        slices = [index for index, _ in hosts]
        num_slices = len(set(slices))
        if strategy.data % num_slices or len({slices.count(index) for index in slices}) > 1:
            raise ValueError(
                f"Strategy({strategy.name}) has data={strategy.data} copies on {num_slices} slices of TPUs; "
                "slices must be of one size and each must hold whole copies, for only copies send little "
                f"enough for the network between slices. Make data a multiple of {num_slices}, or use one "
                "slice."
            )
        grid = _on_torus(shape, num_slices, ordered, grid)
    return grid.transpose([BY_TRAFFIC.index(axis) for axis in MESH_AXES])


def _array(devices: Sequence[Any]) -> np.ndarray:
    found = np.empty(len(devices), dtype=object)
    found[:] = devices
    return found


def _on_torus(
    shape: Sequence[int], num_slices: int, devices: Sequence[Any], otherwise: np.ndarray
) -> np.ndarray:
    """TPUs by their coordinates; `otherwise` where they are no full box, such as part of a slice."""
    within = [shape[0] // num_slices, *shape[1:]]
    across = [num_slices, *(1 for _ in shape[1:])]
    try:
        if num_slices == 1:
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return mesh_utils.create_hybrid_device_mesh(
            within, across, devices, allow_split_physical_axes=True
        )
    except (AssertionError, NotImplementedError, ValueError) as error:
        logging.warning(
            "the %d TPUs are laid out by host, not by their torus, which may send more: %s",
            len(devices),
            str(error) or type(error).__name__,
        )
        return otherwise


def axes_of(entry: Any) -> tuple[Any, ...]:
    """The mesh axes of one entry of a PartitionSpec.

    >>> axes_of(None), axes_of("fsdp"), axes_of(("fsdp", "tensor"))
    ((), ('fsdp',), ('fsdp', 'tensor'))
    """
    return () if entry is None else tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def check_axes(spec: Iterable[Any], source: str) -> None:
    """Raise ValueError, beginning with `source`, where a spec cannot be followed by parameters."""
    cut = [axis for entry in spec for axis in axes_of(entry)]
    if any(axis not in MODEL_AXES for axis in cut) or len(set(cut)) < len(cut):
        raise ValueError(
            f"{source} must name for each dimension None, 'fsdp', 'tensor', 'expert', 'stage' or a tuple of "
            f"those, each axis once; got {tuple(spec)}. Copies over 'data' and 'context' are whole: to cut "
            "parameters over those devices, raise fsdp instead."
        )


def candidates(
    num_devices: int,
    *,
    max_tensor: int = 8,
    max_context: int = 1,
    max_expert: int = 1,
    max_stage: int = 1,
    rules: Sequence[Rule] = (),
) -> tuple[Strategy, ...]:
    """Every strategy that uses all of `num_devices`; plain data parallelism first.

    Not every one of them suits every model: `partition.suitable` tells which do.

    >>> [s.name for s in candidates(4)]
    ['data4', 'data2.fsdp2', 'fsdp4', 'data2.tensor2', 'fsdp2.tensor2', 'tensor4']
    >>> [s.name for s in candidates(2, max_stage=2)]
    ['data2', 'fsdp2', 'tensor2', 'stage2']
    """
    if num_devices < 1:
        raise ValueError(
            f"num_devices must be at least 1; got {num_devices}. Pass the number of devices to use."
        )
    limits = {
        STAGE_AXIS: max_stage,
        EXPERT_AXIS: max_expert,
        CONTEXT_AXIS: max_context,
        TENSOR_AXIS: max_tensor,
        FSDP_AXIS: num_devices,
    }
    found: list[dict[str, Any]] = [{}]
    for axis, limit in limits.items():
        found = [
            {**degrees, axis: degree}
            for degrees in found
            for degree in _divisors(num_devices // math.prod(degrees.values()))
            if degree <= limit
        ]
    return tuple(
        Strategy(data=num_devices // math.prod(degrees.values()), **degrees, rules=rules)
        for degrees in found
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@dataclass(frozen=True)
class Layout:
    """A strategy on real devices; passed to whoever needs a mesh, never kept globally."""

    strategy: Strategy
    """Without -1."""
    mesh: Mesh
    """Of the axes of `MESH_AXES`."""

    @cached_property
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


def in_mesh(function: Callable[P, T], mesh: AbstractMesh, strategy: Strategy) -> Callable[P, T]:
    """A function of the model, traced with `mesh` set and the strategy's logical names known to flax."""

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.sharding.use_abstract_mesh(mesh), logical_axis_rules(strategy.logical_rules):
            return function(*args, **kwargs)

    return run


def anywhere(function: Callable[P, T]) -> Callable[P, T]:
    """A function of the model for looking at, traced under a mesh of all axes that cuts nothing."""
    return in_mesh(function, UNCUT, Strategy())
