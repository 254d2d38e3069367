"""Live state from one layout to another, in memory: planned and compiled ahead, run without compiling.

`Move.compile` does everything that takes time or can be refused; calling the move runs group after
group and deletes each group's sources before the next one starts. One process: every device of both
layouts must be this process's own.
"""

import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxgoodput.parallel.pieces import Device
from jaxgoodput.parallel.plan import (
    GROUP_BYTES,
    MovePlan,
    Route,
    as_data,
    mebibytes,
    plan_move,
)
from jaxgoodput.parallel.routes import ALL_ROUTES, CompiledGroup, compile_group

_SHOWN = 4  # leaves named in an error


class MoveDoesNotFit(MemoryError):
    """A move was refused before it started: some device has too little memory. The state is intact."""


@dataclass(frozen=True)
class Move:
    """A compiled change of layout for one structure of state; call it as often as that state occurs.

    With `donate` the sources are deleted by the move, group by group; without, they stay. The result
    owns its buffers in both cases, so that a training step may write into them.
    """

    plan: MovePlan  # with the final routes
    groups: tuple[CompiledGroup, ...]
    structure: Any  # the tree's

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
        # They copy and free memory, so more than there are processors would not help.
        num_threads = len(os.sched_getaffinity(0))
        # Threads take longer to start than a small move lasts; copies are worth them.
        copies = any(group.plan.route == "copies" for group in self.groups)
        with ThreadPoolExecutor(num_threads, "reshard") if copies else nullcontext() as pool:
            for group in self.groups:
                positions = group.plan.leaves
                sources = [data[i] for i in positions]
                moved = group.run(sources, pool)
                if self.plan.donate:
                    # Freeing gigabytes takes as long as copying them: by all threads.
                    parts = [sources[i::num_threads] for i in range(num_threads)]
                    list((pool.map if pool else map)(_delete, parts))
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


def _delete(arrays: Sequence[jax.Array]) -> None:
    for array in arrays:
        if not array.is_deleted():  # the program that aliases has done it
            array.delete()


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
