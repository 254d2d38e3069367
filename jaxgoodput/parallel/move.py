"""Live state from one layout to another, in memory: planned and compiled ahead, run without compiling.

`Move.compile` does everything that takes time or can be refused; calling the move runs group after
group and deletes each group's sources before the next one starts. One process: every device of both
layouts must be this process's own.

Which way a group of leaves goes is read from XLA's memory analysis and the bytes in the program's
collectives, never timed, so that every process and every run picks the same.
"""

import math
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from jaxgoodput.parallel.plan import (
    GROUP_BYTES,
    Device,
    GroupPlan,
    LeafPlan,
    MovePlan,
    Route,
    as_data,
    mebibytes,
    plan_move,
)
from jaxgoodput.parallel.transfers import compile_transfers, only_relocates

ALL_ROUTES: tuple[Route, ...] = ("alias", "direct", "hop", "pieces")
# A jitted move is taken where its temporaries on a device are at most this part of the group's leaves,
# each counted once, and it sends at most this many times what has to be sent. XLA's moves either stay
# well within both or build whole arrays on every device, so the limits are not delicate.
MAX_TEMPORARY_RATIO = 0.5
MAX_EXCESS_TRAFFIC = 2.0


class MoveDoesNotFit(MemoryError):
    """A move was refused before it started: some device has too little memory. The state is intact."""


@dataclass(frozen=True)
class CompiledGroup:
    """A group with its final route, and what runs it."""

    plan: GroupPlan
    """With the final route."""
    run: Callable[[Sequence[jax.Array]], list[jax.Array]]
    """From leaves to leaves; leaves its inputs alone unless it aliases."""
    collective_bytes: int | None = None
    """What XLA's program sends; None where the pieces are ours."""
    xla_temporary_bytes: int = 0
    """What XLA's program needs besides, per device."""


@dataclass(frozen=True)
class Move:
    """A compiled change of layout for one structure of state; call it as often as that state occurs.

    With `donate` the sources are deleted by the move, group by group; without, they stay. The result
    owns its buffers in both cases, so that a training step may write into them.
    """

    plan: MovePlan
    """With the final routes."""
    groups: tuple[CompiledGroup, ...]
    """In the order in which they run."""
    structure: Hashable
    """The tree's."""

    @classmethod
    def compile(
        cls,
        tree: PyTree,
        shardings: PyTree,
        *,
        group_bytes: int = GROUP_BYTES,
        memory_bytes: int | None = None,
        donate: bool = True,
        routes: Collection[Route] = ALL_ROUTES,
    ) -> "Move":
        """Plan and compile the move of `tree` (arrays, or shapes with shardings) to `shardings`.

        `memory_bytes` is the most that any device may hold of this state during the move, source,
        target and temporaries together; None takes the device's own limit, where it reports one.
        `routes` leaves out ways that shall not be used.

        Raises:
            MoveDoesNotFit: the move needs more memory than there is.
            ValueError: structures differ, a target does not divide a leaf, devices of other
                processes, or no allowed route.
        """
        plan = plan_move(tree, shardings, group_bytes=group_bytes, donate=donate)
        for leaf in plan.leaves:
            if not (leaf.source.is_fully_addressable and leaf.target.is_fully_addressable):
                raise ValueError(
                    f"{leaf.name} lies on devices of other processes. Moves work inside one process: "
                    "between processes, save and restore a checkpoint."
                )
        groups = tuple(
            compile_group(
                group, [plan.leaves[i] for i in group.leaves], donate=donate, allowed=routes
            )
            for group in plan.groups
        )
        plan = plan.with_groups([group.plan for group in groups])
        _require_limit(plan, memory_bytes)
        return cls(plan=plan, groups=groups, structure=jax.tree.structure(tree))

    def __call__(self, tree: PyTree) -> PyTree:
        """The same values in the target layout. Compiles nothing.

        Raises, before anything has moved:
            ValueError: `tree` is not what the move was compiled for, or two leaves share a buffer.
            MoveDoesNotFit: a device reports less free memory than the move needs.
        """
        leaves, structure = jax.tree.flatten(tree)
        if structure != self.structure:
            raise ValueError(
                f"this move was compiled for {self.structure}; got {structure}. Compile one for this "
                "state."
            )
        data = [self._checked(position, leaf) for position, leaf in enumerate(leaves)]
        if self.plan.donate:
            self._require_own_buffers(data)
        self.require_room()
        results: list[Any] = [None] * len(leaves)
        for group in self.groups:
            positions = group.plan.leaves
            sources = [data[i] for i in positions]
            moved = group.run(sources)
            if self.plan.donate:
                for array in sources:
                    if not array.is_deleted():  # the program that aliases has done it
                        array.delete()
            for position, value in zip(positions, moved, strict=True):
                results[position] = _as_before(leaves[position], value)
            del sources, moved
        return jax.tree.unflatten(self.structure, results)

    def require_room(self) -> None:
        """Raise MoveDoesNotFit where a device reports less free memory than the move needs."""
        _require_room(self.plan)

    def _checked(self, position: int, leaf: Any) -> jax.Array:
        """The leaf's data, known to be what the move was compiled for."""
        plan = self.plan.leaves[position]
        if not isinstance(leaf, jax.Array):
            raise ValueError(
                f"{plan.name} must be a jax.Array; got {type(leaf).__name__}. Put it on its devices "
                "with jax.device_put first."
            )
        if leaf.is_deleted():
            raise ValueError(
                f"{plan.name} has been deleted: it was donated to a step or to another move. Pass the "
                "state that came out of it."
            )
        shape, dtype, source, _ = as_data(plan.name, leaf, leaf.sharding)
        same = source == plan.source or source.is_equivalent_to(plan.source, len(shape))
        if (shape, dtype) != (plan.shape, plan.dtype) or not same:
            raise ValueError(
                f"this move was compiled for {plan.name} as {plan.dtype}{list(plan.shape)} under "
                f"{plan.source}; got {dtype}{list(shape)} under {source}. Compile a move for this state."
            )
        return jax.random.key_data(leaf) if _is_key(leaf) else leaf

    def _require_own_buffers(self, data: Sequence[jax.Array]) -> None:
        """A source is deleted with its group; another leaf in its memory would be lost with it."""
        owner: dict[tuple[Device, int], int] = {}
        for position, array in enumerate(data):
            if not array.size:
                continue
            for index in range(len(array.sharding.addressable_devices)):
                # One that is the same everywhere gives its first shard each time, which does.
                shard: Any = array.addressable_data(index)
                place = next(iter(shard.devices())), shard.unsafe_buffer_pointer()
                first = owner.setdefault(place, position)
                if first != position:
                    names = [self.plan.leaves[i].name for i in (first, position)]
                    raise ValueError(
                        f"{names[0]} and {names[1]} share a buffer, so that a move which deletes its "
                        "sources would lose one of them. Copy one with jnp.copy, or make the state "
                        "inside one jitted function; or compile the move with donate=False."
                    )


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_before(leaf: Any, data: jax.Array) -> jax.Array:
    """`data`, as PRNG keys where the leaf was made of them."""
    if not _is_key(leaf):
        return data
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))


def _require_limit(plan: MovePlan, memory_bytes: int | None) -> None:
    peak, before, after = plan.peak_bytes, plan.before_bytes, plan.after_bytes
    for device, needed in peak.items():
        limit = memory_bytes if memory_bytes is not None else _reported(device, "bytes_limit")
        if limit is not None and needed > limit:
            raise MoveDoesNotFit(
                f"the move needs {mebibytes(needed)} on {device} at its peak "
                f"({mebibytes(before.get(device, 0))} before, {mebibytes(after.get(device, 0))} after, "
                f"{mebibytes(plan.peak_extra_bytes)} extra at most) and {mebibytes(limit)} are allowed. "
                "Nothing was moved. Use a smaller group_bytes, or a layout that cuts the state further."
            )


def _require_room(plan: MovePlan) -> None:
    before = plan.before_bytes
    for device, needed in plan.peak_bytes.items():
        limit, used = _reported(device, "bytes_limit"), _reported(device, "bytes_in_use")
        if limit is None or used is None:
            continue  # CPUs report neither
        new = needed - before.get(device, 0)
        if new > limit - used:
            raise MoveDoesNotFit(
                f"the move needs {mebibytes(new)} more on {device} than it holds now, and "
                f"{mebibytes(limit - used)} of {mebibytes(limit)} are free. Nothing was moved. Free "
                "memory there, or use a smaller group_bytes."
            )


def _reported(device: Device, name: str) -> int | None:
    return (device.memory_stats() or {}).get(name)


# -- the ways a group can go -------------------------------------------------------------------------


def compile_group(
    group: GroupPlan, leaves: Sequence[LeafPlan], *, donate: bool, allowed: Collection[Route]
) -> CompiledGroup:
    """Compile the ways that may be best for `group`, in order of preference, and keep the first good one.

    `leaves` are the group's own. Raises ValueError where no allowed route can take the group.
    """
    if group.route == "alias":
        return _compile_alias(group, leaves, donate)
    same_devices = _same_devices(leaves)
    # The runtime has to do no more than one copy of each shard where shards only change devices.
    relocates = "pieces" in allowed and only_relocates(leaves)
    tried: list[CompiledGroup] = []
    for route in ("direct", "hop"):
        if route in allowed and same_devices and not relocates:
            jitted = _compile_jitted(group, leaves, hop=route == "hop")
            if is_good(jitted):
                return jitted
            tried.append(jitted)
    if "pieces" in allowed:
        transfers = compile_transfers(leaves)
        plan = replace(group, route="pieces", temporary_bytes=transfers.temporary_bytes)
        return CompiledGroup(plan, transfers)
    if not tried:
        raise ValueError(
            f"none of the routes {sorted(allowed)} can take {leaves[0].name} from {leaves[0].source} to "
            f'{leaves[0].target}: other devices need "pieces".'
        )
    return min(tried, key=lambda one: (one.xla_temporary_bytes, one.collective_bytes))


def is_good(jitted: CompiledGroup) -> bool:
    """Whether a jitted move stays within the limits on temporaries and traffic."""
    plan, sent = jitted.plan, jitted.collective_bytes or 0
    return (
        jitted.xla_temporary_bytes <= MAX_TEMPORARY_RATIO * plan.whole_bytes
        and sent <= MAX_EXCESS_TRAFFIC * plan.bytes_moved
    )


def _compile_alias(group: GroupPlan, leaves: Sequence[LeafPlan], donate: bool) -> CompiledGroup:
    """An identity whose outputs are its inputs' buffers; copies of them where the sources stay."""

    def same(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return arrays if donate else tuple(jnp.copy(x) for x in arrays)

    numbers = tuple(range(len(leaves))) if donate else ()
    sources = tuple(leaf.source for leaf in leaves)
    jitted = jax.jit(same, donate_argnums=numbers, out_shardings=sources)
    program = jitted.lower(*(_abstract(leaf) for leaf in leaves)).compile()

    def run(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        outputs = program(*arrays)
        return [_under(x, leaf.target) for x, leaf in zip(outputs, leaves, strict=True)]

    return CompiledGroup(group, run)


def _under(array: jax.Array, target: Sharding) -> jax.Array:
    """The same buffers under another name for the same boxes."""
    if array.sharding == target:
        return array
    shards = {s.device: s.data for s in array.addressable_shards}
    order = target.devices_indices_map(array.shape)
    return jax.make_array_from_single_device_arrays(
        array.shape, target, [shards[device] for device in order]
    )


def _compile_jitted(group: GroupPlan, leaves: Sequence[LeafPlan], *, hop: bool) -> CompiledGroup:
    """One identity for the whole group, directly or through a layout cut along one dimension."""

    def moved(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        if not hop:
            return arrays
        return tuple(
            jax.lax.with_sharding_constraint(x, along) if along is not None else x
            for x, along in zip(arrays, (one_dimensional(leaf) for leaf in leaves), strict=True)
        )

    jitted = jax.jit(moved, out_shardings=tuple(leaf.target for leaf in leaves))
    program = jitted.lower(*(_abstract(leaf) for leaf in leaves)).compile()
    temporary = int(_analysis(program).temp_size_in_bytes)
    devices: Sequence[Device] = tuple(leaves[0].target_boxes)
    plan = replace(
        group,
        route="hop" if hop else "direct",
        temporary_bytes={device: temporary for device in devices},
    )
    sent = received_bytes(program.as_text() or "", len(devices))
    # XLA:CPU runs the collectives of several programs on one pool of threads, where they can wait for
    # each other for ever.
    waits = sent > 0 and _all_cpu(leaves)

    def run(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        outputs = list(program(*arrays))
        return jax.block_until_ready(outputs) if waits else outputs

    return CompiledGroup(
        plan,
        run,
        collective_bytes=sent,
        xla_temporary_bytes=temporary,
    )


def one_dimensional(leaf: LeafPlan) -> NamedSharding | None:
    """A layout that cuts one dimension over all devices; None where none is divisible, or no mesh."""
    if not isinstance(leaf.target, NamedSharding):
        return None
    mesh = leaf.target.mesh
    fits = [dim for dim, length in enumerate(leaf.shape) if length and length % mesh.size == 0]
    if not fits:
        return None
    dim = max(fits, key=lambda d: (leaf.shape[d], -d))
    return NamedSharding(mesh, PartitionSpec(*([None] * dim), mesh.axis_names))


def _analysis(program: Any) -> Any:
    stats = program.memory_analysis()
    if stats is None:
        raise RuntimeError(
            "this backend does not tell how much memory a program needs, so a jitted move cannot be "
            'judged. Use Move.compile(..., routes=("alias", "pieces")).'
        )
    return stats


def _abstract(leaf: LeafPlan) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.source)


def _same_devices(leaves: Sequence[LeafPlan]) -> bool:
    """A jitted program runs on one set of devices in one order."""
    return all(tuple(leaf.source_boxes) == tuple(leaf.target_boxes) for leaf in leaves)


def _all_cpu(leaves: Sequence[LeafPlan]) -> bool:
    devices: Mapping[Device, Any] = {**leaves[0].source_boxes, **leaves[0].target_boxes}
    return all(device.platform == "cpu" for device in devices)


# -- what a compiled program sends -------------------------------------------------------------------

# "%name = f32[4,8]{1,0} all-gather(...), replica_groups={{0,1},{2,3}}, ..." and tuple results.
_OPERATION = re.compile(
    r"= (?P<result>\(.*?\)|\S+) "
    r"(?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all)"
    r"(?P<start>-start)?\((?P<rest>.*)$",
    re.MULTILINE,
)
_NAMED = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast)"
    r"(-start)?\("
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d*[a-z0-9]*)\[(?P<dims>[\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{(?P<groups>\{.*?\})\}")
_IOTA = re.compile(r"replica_groups=\[(?P<count>\d+),(?P<size>\d+)\]<=")
_PAIRS = re.compile(r"source_target_pairs=\{(?P<pairs>.*?)\}\}")
_BITS = re.compile(r"\d+")


def received_bytes(hlo_text: str, num_devices: int) -> int:
    """Bytes that arrive on all `num_devices` together in one run of the program, loops counted once.

    XLA's memory analysis tells temporaries but not traffic, and its cost analysis mixes traffic with
    memory. The optimised HLO names every collective with its result shape and its groups, which is enough:
    the bytes that arrive on a device and did not lie there before. Raises ValueError for a collective that
    is not known here, which no jitted identity holds.

    >>> line = "%x = f32[8]{0} all-gather(f32[2]{0} %p), replica_groups=[2,4]<=[8], dimensions={0}"
    >>> received_bytes(line, 8)
    192
    """
    arrived = 0
    operations = list(_OPERATION.finditer(hlo_text))
    if len(operations) != len(_NAMED.findall(hlo_text)):
        raise ValueError(
            "this program holds collectives in a form that is not known here, so its traffic cannot be "
            'told. Use Move.compile(..., routes=("alias", "pieces")).'
        )
    for found in operations:
        kind, rest = found["kind"], found["rest"]
        text = found["result"]
        if found["start"] and kind in ("all-gather", "collective-permute"):
            # The asynchronous form returns its operands too: (operand, result, contexts), or, of
            # several, ((operands), (results)).
            several = re.findall(r"\(([^()]*)\)", text[1:-1]) if text.startswith("((") else []
            text = several[1] if several else _SHAPE.findall(text)[1:2]
            text = text if isinstance(text, str) else "{}[{}]".format(*text[0])
        result = sum(_shape_bytes(shape) for shape in _SHAPE.finditer(text))
        if kind == "collective-permute":
            pairs = _PAIRS.search(rest)
            if pairs is None:
                raise ValueError(
                    f"no source_target_pairs in {found[0]!r}: this HLO is not known here."
                )
            numbers = [int(n) for n in re.findall(r"\d+", pairs["pairs"])]
            moves = sum(a != b for a, b in zip(numbers[::2], numbers[1::2], strict=True))
            arrived += result * moves
            continue
        size = _group_size(rest, num_devices)
        if kind in ("all-gather", "all-to-all"):
            # Each holds one part in `size` of its result already.
            arrived += num_devices * result * (size - 1) // size
        elif kind == "all-reduce":
            arrived += 2 * num_devices * result * (size - 1) // size
        elif kind == "reduce-scatter":
            arrived += num_devices * result * (size - 1)
        else:
            raise ValueError(f"{kind} has no fixed traffic: {found[0]!r}.")
    return arrived


def _shape_bytes(shape: re.Match[str]) -> int:
    dims = [int(n) for n in shape["dims"].split(",") if n]
    bits = _BITS.search(shape["dtype"])
    width = 8 if bits is None or shape["dtype"] == "pred" else int(bits[0])
    return math.prod(dims) * width // 8


def _group_size(rest: str, num_devices: int) -> int:
    iota = _IOTA.search(rest)
    if iota is not None:
        return int(iota["size"])
    listed = _LISTED.search(rest)
    if listed is None:
        return num_devices
    groups = re.findall(r"\{([\d,]*)\}", listed["groups"])
    sizes = np.unique([len(group.split(",")) for group in groups])
    return int(sizes.max())
