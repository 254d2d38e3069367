"""The ways a group of leaves can go, compiled, and the rule that picks one.

The rule reads the backend, XLA's memory analysis and the bytes in the program's collectives; it never
times anything, so that every process and every run picks the same.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxgoodput.parallel.collectives import received_bytes
from jaxgoodput.parallel.copies import compile_copies
from jaxgoodput.parallel.pieces import Device
from jaxgoodput.parallel.plan import GroupPlan, LeafPlan, Route
from jaxgoodput.parallel.transfers import compile_transfers, only_relocates

ALL_ROUTES: tuple[Route, ...] = ("alias", "copies", "direct", "hop", "pieces")
# A jitted move is taken where its temporaries on a device are at most this part of the group's leaves,
# each counted once, and it sends at most this many times what has to be sent. XLA's moves either stay
# well within both or build whole arrays on every device, so the limits are not delicate.
MAX_TEMPORARY_RATIO = 0.5
MAX_EXCESS_TRAFFIC = 2.0

# The threads are there for copies.
Run = Callable[[Sequence[jax.Array], Executor | None], list[jax.Array]]


@dataclass(frozen=True)
class CompiledGroup:
    """A group with its final route, and what runs it. `run` leaves its inputs alone unless it aliases."""

    plan: GroupPlan
    run: Run
    collective_bytes: int | None = None  # in XLA's program; None where the pieces are ours
    xla_temporary_bytes: int = 0  # per device


def compile_group(
    group: GroupPlan, leaves: Sequence[LeafPlan], *, donate: bool, allowed: Collection[Route]
) -> CompiledGroup:
    """Compile the ways that may be best for `group`, in order of preference, and keep the first good one.

    `leaves` are the group's own. Raises ValueError where no allowed route can take the group.
    """
    if group.route == "alias":
        return _compile_alias(group, leaves, donate)
    same_devices = _same_devices(leaves)
    # Without anything to send, XLA's slices write the targets once; copies write them twice.
    local = group.bytes_moved == 0 and same_devices and "direct" in allowed
    # Nor has the runtime to do more than one copy of each shard where shards only change devices.
    relocates = "pieces" in allowed and only_relocates(leaves)
    if "copies" in allowed and _all_cpu(leaves) and not local and not relocates:
        copies = compile_copies(leaves)
        return CompiledGroup(replace(group, route="copies"), copies)
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
        return CompiledGroup(plan, lambda arrays, _: transfers(arrays))
    if not tried:
        raise ValueError(
            f"none of the routes {sorted(allowed)} can take {leaves[0].name} from {leaves[0].source} to "
            f'{leaves[0].target}: other devices need "pieces", or "copies" where all are CPUs.'
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

    def run(arrays: Sequence[jax.Array], _: Executor | None) -> list[jax.Array]:
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

    def run(arrays: Sequence[jax.Array], _: Executor | None) -> list[jax.Array]:
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
