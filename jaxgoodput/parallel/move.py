"""Moves of live state from one layout to another, in memory: planned and compiled ahead.

`Move.compile` does everything that takes time or may be refused. Calling the move runs group after group and
deletes each group's sources before the next one starts. Equal groups run one program, inside a move and
between moves that share a `Once`. Over several processes, all must compile and call the same moves in the
same order, and both layouts need the same devices in the same order.

The route of a group of leaves is chosen from XLA's memory analysis and the bytes in the program's
collectives, never from timings, so every process and every run picks the same.
"""

import collections
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from jaxgoodput.parallel.collectives import received_bytes
from jaxgoodput.parallel.once import Once
from jaxgoodput.parallel.plan import (
    GROUP_BYTES,
    Device,
    GroupPlan,
    LeafPlan,
    MovePlan,
    Route,
    as_data,
    boxes,
    mebibytes,
    plan_move,
    shard_bytes,
    total,
)
from jaxgoodput.parallel.transfers import (
    compile_locally,
    compile_transfers,
    only_relocates,
    same_everywhere,
    shards,
)

ALL_ROUTES: tuple[Route, ...] = ("alias", "direct", "hop", "pieces")
# A jitted move is good if its temporaries on a device are at most this fraction of the group's leaves, each
# counted once, and if it sends at most this many times the bytes that have to be sent. XLA's moves either
# stay well within both limits or build whole arrays on every device, so the limits are not delicate.
MAX_TEMPORARY_RATIO = 0.5
MAX_EXCESS_TRAFFIC = 2.0
# A group that occurs once, with few leaves and a small part of the bytes, is not worth its own program. It
# takes two programs that moves from or to other layouts run too.
FEW_LEAVES, SMALL_PART = 16, 1 / 8


class MoveDoesNotFit(MemoryError):
    """A move was refused before it started, because a device has too little memory. The state is intact."""


@dataclass(frozen=True)
class CompiledGroup:
    """A group with its final route, and the function that runs it."""

    plan: GroupPlan
    """Plan with the final route."""
    run: Callable[[Sequence[jax.Array]], list[jax.Array]]
    """Function from leaves to moved leaves; only the alias route takes its inputs over."""
    collective_bytes: int | None = None
    """Bytes that XLA's program sends; None if pieces are sent."""
    xla_temporary_bytes: int = 0
    """Bytes that XLA's program needs besides its arguments and results, per device."""


@dataclass(frozen=True)
class Move:
    """A compiled change of layout for one structure of state. Call it for every such state.

    With `donate` the move deletes the sources, group by group; without, they stay. The result owns its
    buffers in both cases, so a training step may write into them.
    """

    plan: MovePlan
    """Plan with the final routes."""
    groups: tuple[CompiledGroup, ...]
    """Groups in the order in which they run."""
    structure: Hashable
    """Structure of the state's tree."""

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
        programs: Once | None = None,
    ) -> "Move":
        """Plan and compile the move of `tree` (arrays, or shapes with shardings) to `shardings`.

        `memory_bytes` is the most that any device may hold of this state during the move: source, target
        and temporaries together. None takes the device's own limit, if it reports one. `routes` are the
        allowed routes. Pass one `programs` to all moves that may have groups in common.

        Raises:
            MoveDoesNotFit: the move needs more memory than a device has.
            ValueError: structures differ, a target does not divide a leaf, no allowed route can take a
                group, or layouts over several processes have different devices.
        """
        plan = plan_move(tree, shardings, group_bytes=group_bytes, donate=donate)
        programs = Once() if programs is None else programs
        leaves = [[plan.leaves[i] for i in group.leaves] for group in plan.groups]
        times = collections.Counter(map(_kinds, leaves))
        most = SMALL_PART * sum(g.whole_bytes for g in plan.groups if g.route != "alias")
        groups = [
            compile_group(
                group,
                own,
                donate=donate,
                allowed=routes,
                programs=programs,
                is_rest=times[_kinds(own)] == 1
                and len(own) <= FEW_LEAVES
                and group.whole_bytes < most,
            )
            for group, own in zip(plan.groups, leaves, strict=True)
        ]
        plan = plan.with_groups([group.plan for group in groups])
        _require_limit(plan, memory_bytes)
        return cls(plan=plan, groups=tuple(groups), structure=jax.tree.structure(tree))

    def __call__(self, tree: PyTree) -> PyTree:
        """Return the same values in the target layout. Compiles nothing.

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
                    if not array.is_deleted():  # an alias has taken it over already
                        array.delete()
            for position, value in zip(positions, moved, strict=True):
                results[position] = _as_before(leaves[position], value)
            del sources, moved
        return jax.tree.unflatten(self.structure, results)

    def require_room(self) -> None:
        """Raise MoveDoesNotFit if a device reports less free memory than the move needs."""
        before = self.plan.before_bytes
        for device, needed in self.plan.peak_bytes.items():
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

    def _checked(self, position: int, leaf: Any) -> jax.Array:
        """Return the leaf's data; raise ValueError unless the move was compiled for it."""
        plan = self.plan.leaves[position]
        if not isinstance(leaf, jax.Array):
            raise ValueError(
                f"{plan.name} must be a jax.Array; got {type(leaf).__name__}. Put it on its devices "
                "with jax.device_put first."
            )
        if leaf.is_deleted():
            raise ValueError(
                f"{plan.name} has been deleted: it was donated to a step or to another move. Pass the "
                "state that was returned instead."
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
        """Raise ValueError if leaves share a buffer: deleting one would delete the other before it moves."""
        owner: dict[tuple[Device, int], int] = {}
        for position, array in enumerate(data):
            if not array.size:
                continue
            for index in range(len(array.sharding.addressable_devices)):
                # A replicated array returns its first shard every time, which is enough to find its buffer.
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
    """Return `data` as PRNG keys if the leaf holds keys."""
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


def _reported(device: Device, name: str) -> int | None:
    if device.process_index != jax.process_index():
        return None  # only its own process can ask
    return (device.memory_stats() or {}).get(name)


# -- routes of a group -------------------------------------------------------------------------------


@dataclass(frozen=True)
class IdentityProgram:
    """A jitted identity between two layouts, for any leaves of certain kinds."""

    program: Callable[..., Sequence[jax.Array]]
    """Executable."""
    leaves: tuple[LeafPlan, ...]
    """Leaves that it was compiled for."""
    temporary_bytes: int | None
    """Temporary bytes per device; None if the backend does not report them."""
    sent_bytes: int | None
    """Bytes sent by its collectives; None if they cannot be read."""
    problem: str = ""
    """Reason why one of the two is not known."""


def _kinds(leaves: Sequence[LeafPlan]) -> Hashable:
    return tuple(leaves[0].source_boxes), tuple(leaf.kind for leaf in leaves)


def compile_group(
    group: GroupPlan,
    leaves: Sequence[LeafPlan],
    *,
    donate: bool,
    allowed: Collection[Route],
    programs: Once,
    is_rest: bool = False,
) -> CompiledGroup:
    """Compile the routes that may be best for `group`, in order of preference; return the first good one.

    `leaves` are the group's own. `is_rest` takes a hop in two programs, which many moves share. Otherwise a
    hop is tried only if pieces are not allowed, because pieces send less and need less memory. Raises
    ValueError if no allowed route can take the group.
    """
    if group.route == "alias":
        return _compile_alias(group, leaves, donate, programs)
    may_send = _may_send_pieces(leaves, allowed)
    routes = _jitted_routes(leaves, allowed, may_send)
    if is_rest and routes and {"direct", "hop"} <= set(allowed):
        return _compile_rest(group, leaves, programs)
    good, tried = _try_jitted(group, leaves, routes, programs, falls_back=may_send)
    if good is not None:
        return good
    if may_send:
        transfers = compile_transfers(leaves, programs)
        plan = replace(group, route="pieces", temporary_bytes=transfers.temporary_bytes)
        return CompiledGroup(plan, transfers)
    if not tried:
        raise ValueError(
            f"none of the routes {sorted(allowed)} can take {leaves[0].name} from {leaves[0].source} to "
            f'{leaves[0].target}: other devices need "pieces" among the routes.'
        )
    return min(tried, key=lambda one: (one.xla_temporary_bytes, one.collective_bytes or 0))


def _may_send_pieces(leaves: Sequence[LeafPlan], allowed: Collection[Route]) -> bool:
    """Return whether pieces may be sent; raise ValueError if nothing else would work between processes."""
    if all(x.source.is_fully_addressable and x.target.is_fully_addressable for x in leaves):
        return "pieces" in allowed
    if all(leaf.keeps_devices for leaf in leaves):
        return False
    raise ValueError(
        f"{leaves[0].name} would go from {leaves[0].source} to {leaves[0].target}, to other devices or "
        "another order of them. Between processes a move keeps both: save and restore a checkpoint."
    )


def _jitted_routes(
    leaves: Sequence[LeafPlan], allowed: Collection[Route], may_send: bool
) -> list[Route]:
    """Return the allowed routes that XLA may compile, in order of preference."""
    # If shards only change devices, pieces need no more than one copy of each shard.
    is_for_pieces = may_send and only_relocates(leaves)
    if is_for_pieces or not all(leaf.keeps_devices for leaf in leaves):
        return []
    order: tuple[Route, ...] = ("direct",) if may_send else ("direct", "hop")
    return [route for route in order if route in allowed]


def _try_jitted(
    group: GroupPlan,
    leaves: Sequence[LeafPlan],
    routes: Sequence[Route],
    programs: Once,
    *,
    falls_back: bool,
) -> tuple[CompiledGroup | None, list[CompiledGroup]]:
    """Compile jitted moves until one is good; return it, if any, and the others that were tried."""
    tried: list[CompiledGroup] = []
    for route in routes:
        jitted = _jitted(leaves, programs, hop=route == "hop")
        found = _jitted_group(group, leaves, jitted, route)
        if not jitted.problem and is_good(found):
            return found, tried
        tried.append(found)
        if jitted.problem:
            way = '"pieces"' if falls_back else "the program that needs the least memory"
            logging.warning(
                "the move of %s and %d more leaves to another layout is not compiled as planned: %s It uses "
                "%s instead, which may be slower; the values are the same.",
                *(leaves[0].name, len(leaves) - 1, jitted.problem, way),
            )
            break
    return None, tried


def is_good(jitted: CompiledGroup) -> bool:
    """Return whether a jitted move stays within the limits on temporaries and traffic."""
    plan, sent = jitted.plan, jitted.collective_bytes or 0
    return (
        jitted.xla_temporary_bytes <= MAX_TEMPORARY_RATIO * plan.whole_bytes
        and sent <= MAX_EXCESS_TRAFFIC * plan.bytes_moved
    )


def _compile_alias(
    group: GroupPlan, leaves: Sequence[LeafPlan], donate: bool, programs: Once
) -> CompiledGroup:
    """Compile an identity that hands its inputs' buffers on, or copies them if the sources stay."""

    def same(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return arrays if donate else tuple(jnp.copy(x) for x in arrays)

    shapes = [(leaf.source.shard_shape(leaf.shape), leaf.dtype) for leaf in leaves]
    devices = tuple(leaves[0].source_boxes)
    program = programs(
        ("alias", donate, devices, tuple((shape, str(dtype)) for shape, dtype in shapes)),
        lambda: compile_locally(same, shapes, devices, donate=donate),
    )

    def run(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        outputs = program(*(same_everywhere(shards(x), devices) for x in arrays))
        return [_under(x, leaf.target, leaf) for x, leaf in zip(outputs, leaves, strict=True)]

    return CompiledGroup(group, run)


def _under(array: jax.Array, sharding: Sharding, leaf: LeafPlan) -> jax.Array:
    """Return an array of the same buffers under another sharding that cuts it in the same way."""
    if array.sharding == sharding and array.shape == leaf.shape:
        return array
    held = shards(array)
    order = [device for device in sharding.devices_indices_map(leaf.shape) if device in held]
    return jax.make_array_from_single_device_arrays(
        leaf.shape, sharding, [held[device] for device in order]
    )


def _jitted(leaves: Sequence[LeafPlan], programs: Once, *, hop: bool = False) -> IdentityProgram:
    return programs((hop, _kinds(leaves)), lambda: _compile_jitted(leaves, hop=hop))


def _compile_jitted(leaves: Sequence[LeafPlan], *, hop: bool) -> IdentityProgram:
    """Compile an identity for a group; with `hop` through a layout that cuts a single dimension."""

    def moved(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        if not hop:
            return arrays
        return tuple(
            jax.lax.with_sharding_constraint(x, along) if along is not None else x
            for x, along in zip(arrays, (one_dimensional(leaf) for leaf in leaves), strict=True)
        )

    jitted = jax.jit(moved, out_shardings=tuple(leaf.target for leaf in leaves))
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.source) for x in leaves]
    program = jitted.lower(*abstract).compile()
    stats: Any = program.memory_analysis()
    problem = ""
    if stats is None:
        problem = "this backend does not report how much memory a program needs."
    sent = None
    try:
        sent = received_bytes(program.as_text() or "", len(leaves[0].target_boxes))
    except ValueError as error:
        problem = str(error)
    temporary = None if stats is None else int(stats.temp_size_in_bytes)
    return IdentityProgram(program, tuple(leaves), temporary, sent, problem)


def _jitted_group(
    group: GroupPlan, leaves: Sequence[LeafPlan], jitted: IdentityProgram, route: Route
) -> CompiledGroup:
    devices = tuple(leaves[0].target_boxes)
    # If it is not known, assume the most that is possible.
    temporary = group.whole_bytes if jitted.temporary_bytes is None else jitted.temporary_bytes
    # XLA:CPU runs the collectives of several programs on one thread pool, and they may deadlock there.
    waits = jitted.sent_bytes != 0 and all(device.platform == "cpu" for device in devices)

    def run(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        named = zip(arrays, jitted.leaves, strict=True)
        outputs = list(jitted.program(*(_under(x, leaf.source, leaf) for x, leaf in named)))
        if waits:
            jax.block_until_ready(outputs)
        return [_under(x, leaf.target, leaf) for x, leaf in zip(outputs, leaves, strict=True)]

    plan = replace(group, route=route, temporary_bytes=dict.fromkeys(devices, temporary))
    return CompiledGroup(plan, run, jitted.sent_bytes, temporary)


def _compile_rest(group: GroupPlan, leaves: Sequence[LeafPlan], programs: Once) -> CompiledGroup:
    """Compile a move through a middle layout as two programs, which other moves share.

    n layouts need 2 n such programs, but have n (n - 1) pairs.
    """
    there, on = zip(*map(_through_middle, leaves), strict=True)
    steps = [_jitted_group(group, half, _jitted(half, programs), "hop") for half in (there, on)]

    def run(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return steps[1].run(steps[0].run(arrays))

    between = total(shard_bytes(x.target_boxes, x.dtype.itemsize) for x in there)
    temporary = max(step.xla_temporary_bytes for step in steps)
    devices = tuple(leaves[0].source_boxes)
    plan = replace(
        group, route="hop", temporary_bytes=total([between, dict.fromkeys(devices, temporary)])
    )
    return CompiledGroup(plan, run, sum(step.collective_bytes or 0 for step in steps), temporary)


def _through_middle(leaf: LeafPlan) -> tuple[LeafPlan, LeafPlan]:
    """Split a leaf's move in two, through a layout cut along one dimension (whole if none divides)."""
    middle = one_dimensional(leaf) or NamedSharding(_flat(leaf), PartitionSpec())
    held = boxes(middle, leaf.shape)
    return (
        replace(leaf, target=middle, target_boxes=held),
        replace(leaf, source=middle, source_boxes=held),
    )


def _flat(leaf: LeafPlan) -> Mesh:
    return Mesh(np.array(list(leaf.source_boxes)), ("device",))


def one_dimensional(leaf: LeafPlan) -> NamedSharding | None:
    """Return a sharding that cuts one dimension over all devices; None if no dimension is divisible."""
    mesh = _flat(leaf)
    fits = [dim for dim, length in enumerate(leaf.shape) if length and length % mesh.size == 0]
    if not fits:
        return None
    dim = max(fits, key=lambda d: (leaf.shape[d], -d))
    return NamedSharding(mesh, PartitionSpec(*([None] * dim), "device"))
