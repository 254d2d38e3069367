"""A strategy is a plan for placing a model; on real devices it becomes a layout.

A strategy has six degrees. There are `data` copies of the model. Each is cut into `fsdp` parts that are put
together only while they are used (ZeRO-3), and each part again over `tensor` devices that compute it
together. `context` cuts sequences and no parameter; `expert` cuts the experts of a mixture, and rows as
well; `stage` cuts a stack of layers into the stages of a pipeline (`pipeline.py`). Every (fsdp, expert,
data) triple is a *replica*: it computes its own micro-batches.

The plan is hashable, JSON-able and free of devices; `on` is the one place where a mesh is made. The mesh has
all six axes, so a model's own constraints may name any of them: an axis of degree 1 cuts nothing.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ParamSpec, TypeVar

import jax
import numpy as np
from absl import logging
from flax.core.spmd import logical_axis_rules
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgoodput._fields.typed import Conversion, typed

DATA_AXIS, FSDP_AXIS, TENSOR_AXIS = "data", "fsdp", "tensor"
CONTEXT_AXIS, EXPERT_AXIS, STAGE_AXIS = "context", "expert", "stage"
# The copies vary fastest. A device that holds a part under one strategy then holds some or all of that part
# under most others, and need not receive it (benchmarks/reshard.py has the bytes).
MESH_AXES = (STAGE_AXIS, FSDP_AXIS, EXPERT_AXIS, CONTEXT_AXIS, TENSOR_AXIS, DATA_AXIS)
REPLICA_AXES = (FSDP_AXIS, EXPERT_AXIS, DATA_AXIS)
# Axes that a parameter may be cut over.
MODEL_AXES = (FSDP_AXIS, TENSOR_AXIS, EXPERT_AXIS, STAGE_AXIS)
# Over several hosts, the axis with the most traffic varies fastest instead, so it stays within a host.
BY_TRAFFIC = (DATA_AXIS, STAGE_AXIS, FSDP_AXIS, EXPERT_AXIS, CONTEXT_AXIS, TENSOR_AXIS)
WHAT_IS_LEFT = -1

# A mesh of all axes with one device each: constraints are valid in it, and cut nothing. (In jax 0.11, axes
# would be explicit by default, and constraints would be assertions.)
UNCUT = AbstractMesh((1,) * len(MESH_AXES), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))

P = ParamSpec("P")
T = TypeVar("T")
Rule = tuple[str, PartitionSpec]
_AS_SPEC = Conversion((list, tuple), lambda entries: PartitionSpec(*entries))
Activation = tuple[str, str | tuple[str, ...] | None]

# The axes that logical names of activations stand for, by the names that flax, T5X and MaxText use.
DEFAULT_ACTIVATIONS: tuple[Activation, ...] = tuple(
    (name, axes)
    for axes, names in (
        (REPLICA_AXES, "batch activation_batch"),
        (CONTEXT_AXIS, "length activation_length activation_norm_length sequence"),
        (TENSOR_AXIS, "heads activation_heads q_heads kv_heads activation_kv_heads"),
        (TENSOR_AXIS, "mlp activation_mlp vocab activation_vocab joined_kv"),
        (EXPERT_AXIS, "exp expert activation_exp"),
        (STAGE_AXIS, "stage activation_stage"),
        (None, "embed activation_embed kv activation_kv kv_length activation_kv_length"),
        (None, "relpos_buckets abspos_buckets layers stack norm"),
    )
    for name in names.split()
)


@typed
@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a model is copied and cut over devices. One degree may be -1: the rest of the devices.

    `rules` are (regex, PartitionSpec). The first whose regex is found in a parameter's path, such as
    `layers/0/mlp/kernel`, says which dimension is cut over "fsdp", "tensor", "expert", "stage", or a tuple
    of them. Parameters without a rule follow the model's own partitioning metadata, or the defaults of
    `partition.py`. A spec holds for every degree: an axis of degree 1 cuts nothing.

    >>> Strategy(data=2, fsdp=4).num_replicas
    8
    >>> Strategy(data=-1, tensor=2).resolved(8).name
    'data4.tensor2'
    """

    data: int = 1
    """Copies of the model."""
    fsdp: int = 1
    """Parts of a copy, gathered only while they are used; every part computes its own samples."""
    tensor: int = 1
    """Devices that compute a part together."""
    context: int = 1
    """Parts of a sequence; parameters are whole in each."""
    expert: int = 1
    """Parts of the experts; every part computes its own samples."""
    stage: int = 1
    """Parts of a stack of layers, each on its own devices (`pipeline`)."""
    rules: Sequence[tuple[str, Annotated[PartitionSpec, _AS_SPEC]]] = ()
    """(regex, PartitionSpec) pairs; the first whose regex is found in a parameter's path counts."""
    activations: Sequence[Activation] = ()
    """(logical name, mesh axis, tuple of axes or None) pairs, ahead of `DEFAULT_ACTIVATIONS`."""
    title: str = ""
    """Name to use instead of the degrees, to tell strategies apart that differ only in their rules."""

    def __post_init__(self):
        """Refuse degrees that no mesh can have, and rules that cannot be followed."""
        self._check_degrees()
        for pattern, spec in self.rules:
            _check_rule(pattern, spec)
        for logical, entry in self.activations:
            _check_activation(logical, entry)
        if self.title and not re.fullmatch(r"[A-Za-z0-9_.-]+", self.title):
            raise ValueError(
                f"Strategy.title is {self.title!r}; it names files and charts and may have letters, digits "
                "and _ . - only. Shorten it, or leave it empty for a name made of the degrees."
            )

    def _check_degrees(self) -> None:
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
                f"{self._computed_name}. Give the others a number; 1 cuts nothing."
            )

    @property
    def degrees(self) -> dict[str, int]:
        """Degree by axis name, in the order in which names list them."""
        axes = (DATA_AXIS, FSDP_AXIS, TENSOR_AXIS, CONTEXT_AXIS, EXPERT_AXIS, STAGE_AXIS)
        return {axis: getattr(self, axis) for axis in axes}

    @property
    def logical_rules(self) -> tuple[Activation, ...]:
        """Rules for `flax.linen.logical_axis_rules`: the strategy's own activations, then the defaults.

        flax takes the first rule of a name whose axes are free. Axes of degree 1 stay in: they cut nothing.
        """
        return (*self.activations, *DEFAULT_ACTIVATIONS)

    @property
    def is_cut(self) -> bool:
        """Whether each device holds only a part of the model."""
        return self.num_devices > self.data

    @property
    def name(self) -> str:
        """Short name for tables and charts: the title, or the degrees other than 1.

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
        """Devices that the plan needs. Raises ValueError if a degree is still -1."""
        return math.prod(self._known().values())

    @property
    def num_replicas(self) -> int:
        """Replicas, each of which computes its own micro-batches: data x fsdp x expert."""
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
        """Return the plan for exactly `num_devices`, with a number in place of -1.

        Raises ValueError if it needs another number of devices.
        """
        open_axes = [axis for axis, degree in self.degrees.items() if degree == WHAT_IS_LEFT]
        # The product of the known degrees, times -1 if one is open.
        taken = abs(math.prod(self.degrees.values()))
        if open_axes and num_devices > 0 and num_devices % taken == 0:
            return replace(self, **{open_axes[0]: num_devices // taken})
        if not open_axes and num_devices == taken:
            return self
        needs = f"a multiple of {taken}" if open_axes else f"{taken}"
        remedy = "Pass exactly that many"
        if num_devices > 0:
            is_plain = not open_axes and taken == self.data
            others = "Strategy(data={})" if is_plain else "one of candidates({})"
            remedy += f", or use {others.format(num_devices)}"
        raise ValueError(
            f"Strategy({self.name}) needs {needs} devices; got {num_devices}. {remedy}."
        )

    def on(self, devices: Sequence[Any]) -> "Layout":
        """Put the plan on `devices`, as many as it needs (`num_devices`).

        Devices of one process keep their order. Devices of several hosts are laid out so that the axis with
        the most traffic stays within a host; on TPUs it stays among neighbours (`device_grid`).
        """
        strategy = self.resolved(len(devices))
        grid, axes = device_grid(strategy, devices), MESH_AXES
        if len({getattr(d, "process_index", 0) for d in devices}) > 1:
            # A single program can move a state between two layouts if both have the same device order.
            axes = BY_TRAFFIC
            grid = grid.transpose([MESH_AXES.index(axis) for axis in axes])
        mesh = Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes))
        return Layout(strategy=strategy, mesh=mesh)


def device_grid(strategy: Strategy, devices: Sequence[Any]) -> np.ndarray:
    """Arrange `devices` along the axes of `MESH_AXES`, so that traffic is cheap.

    One process without TPUs keeps its order. Several processes are sorted by slice and process, then
    `BY_TRAFFIC`. TPUs are arranged by their torus, with "data" over slices. Raises ValueError if slices
    cannot hold whole copies.
    """
    hosts = [(getattr(d, "slice_index", 0) or 0, getattr(d, "process_index", 0)) for d in devices]
    is_tpu = any(getattr(d, "platform", "") == "tpu" for d in devices[:1])
    if not is_tpu and len(set(hosts)) == 1:
        return _array(devices).reshape([strategy.degrees[axis] for axis in MESH_AXES])
    shape = [strategy.degrees[axis] for axis in BY_TRAFFIC]
    ordered = [devices[i] for i in sorted(range(len(devices)), key=hosts.__getitem__)]
    grid = _array(ordered).reshape(shape)
    if is_tpu:
        slices = [index for index, _ in hosts]
        _require_whole_copies(strategy, slices)
        grid = _on_torus(shape, len(set(slices)), ordered, grid)
    return grid.transpose([BY_TRAFFIC.index(axis) for axis in MESH_AXES])


def _require_whole_copies(strategy: Strategy, slices: Sequence[int]) -> None:
    """Raise ValueError unless every slice of TPUs (given by device) holds the same whole copies."""
    num_slices = len(set(slices))
    if strategy.data % num_slices or len({slices.count(index) for index in slices}) > 1:
        raise ValueError(
            f"Strategy({strategy.name}) has data={strategy.data} copies on {num_slices} slices of TPUs; "
            "slices must be of one size and each must hold whole copies, because only copies send little "
            f"enough for the network between slices. Make data a multiple of {num_slices}, or use one "
            "slice."
        )


def _array(devices: Sequence[Any]) -> np.ndarray:
    found = np.empty(len(devices), dtype=object)
    found[:] = devices
    return found


def _on_torus(
    shape: Sequence[int], num_slices: int, devices: Sequence[Any], otherwise: np.ndarray
) -> np.ndarray:
    """Arrange TPUs by their coordinates; return `otherwise` if they form no full box.

    A part of a slice may not. `shape` is in the order of `BY_TRAFFIC`.
    """
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
            "the %d TPUs are laid out by host, not by their torus, so steps may send more between them: %s",
            len(devices),
            str(error) or type(error).__name__,
        )
        return otherwise


def axes_of(entry: Any) -> tuple[Any, ...]:
    """Return the mesh axes of one entry of a PartitionSpec.

    >>> axes_of(None), axes_of("fsdp"), axes_of(("fsdp", "tensor"))
    ((), ('fsdp',), ('fsdp', 'tensor'))
    """
    return () if entry is None else tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def _check_rule(pattern: str, spec: Iterable[Any]) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"Strategy.rules: the rule ({pattern!r}, {spec}) does not start with a regular expression: "
            f"{error}. It is searched for in paths such as 'layers/0/mlp/kernel'."
        ) from error
    check_axes(spec, f"Strategy.rules: the rule ({pattern!r}, {spec})")


def _check_activation(logical: str, entry: Any) -> None:
    axes = axes_of(entry)
    if not logical or not set(axes) <= set(MESH_AXES) or len(set(axes)) < len(axes):
        raise ValueError(
            f"Strategy.activations gives {logical!r} the axes {entry!r}; they must be None, one of "
            f"{', '.join(MESH_AXES)}, or a tuple of those, each once. Correct the axes, or leave "
            "the name to DEFAULT_ACTIVATIONS."
        )


def check_axes(spec: Iterable[Any], source: str) -> None:
    """Raise ValueError, starting with `source`, if parameters cannot be cut by a spec."""
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
    """Return every strategy that uses all of `num_devices`, plain data parallelism first.

    Not all of them suit a given model: `partition.suitable` tells which do. Context, expert and stage cut
    only a model that names them, in its constraints or in rules for its parameters. Under any other they
    would repeat the same work, so they are left out unless you raise their limits. `jaxgoodput plan` tries
    all six degrees and says why it leaves a strategy out.

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
    """A strategy on real devices. Pass it to the code that needs a mesh; it is never kept globally."""

    strategy: Strategy
    """Plan without a degree of -1."""
    mesh: Mesh
    """Mesh of all axes in `MESH_AXES`."""

    @cached_property
    def num_replicas(self) -> int:
        """Replicas, each of which computes its own micro-batches."""
        return self.strategy.num_replicas

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.mesh.size

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of scalars and model state: every device holds the whole value."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of batches, and of sums per replica: the leading axis is cut over the replicas."""
        return NamedSharding(self.mesh, PartitionSpec(REPLICA_AXES))

    @property
    def row_per_device(self) -> NamedSharding:
        """Sharding whose leading axis is cut over all devices."""
        return NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Return a sharding on this mesh."""
        return NamedSharding(self.mesh, spec)

    def put(self, value: np.ndarray, sharding: NamedSharding) -> jax.Array:
        """Put a value on the devices; in each process only its own part of `value` must be right."""
        if sharding.is_fully_addressable:
            return jax.device_put(value, sharding)
        with jax.transfer_guard("allow"):  # this transfer is intended
            return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def in_mesh(function: Callable[P, T], mesh: AbstractMesh, strategy: Strategy) -> Callable[P, T]:
    """Wrap a model function so that it runs with `mesh` set, and flax knows the logical names."""

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.sharding.use_abstract_mesh(mesh), logical_axis_rules(strategy.logical_rules):
            return function(*args, **kwargs)

    return run


def anywhere(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a model function for inspection: it runs under a mesh of all axes that cuts nothing."""
    return in_mesh(function, UNCUT, Strategy())
