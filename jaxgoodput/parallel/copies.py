"""Pieces copied straight into the target's buffers, among devices that share the host's memory.

On a CPU every virtual device is a part of the same memory: a piece needs one copy and no transfer.
XLA allocates the target, so that it owns the buffers and later steps may write into them in place (an
array made from NumPy memory is copied when it is first donated: a second state, at the wrong time).
They are filled through their addresses before anybody else has seen them.
"""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxgoodput.parallel.pieces import Device, within
from jaxgoodput.parallel.plan import LeafPlan

# Below it, handing work to threads costs more than copying.
MIN_THREADED_BYTES = 2**20
Indices = tuple[slice, ...]


@dataclass(frozen=True)
class Copy:
    """One piece of one leaf, for one receiver."""

    leaf: int  # position in the group
    sender: Device
    from_: Indices
    to: Indices


@dataclass(frozen=True)
class Copies:
    """A compiled group: an allocation, and what to copy where."""

    allocate: Callable[[], Sequence[jax.Array]]
    by_receiver: dict[Device, tuple[Copy, ...]]
    target_bytes: int  # over all devices

    def __call__(self, arrays: Sequence[jax.Array], pool: Executor | None) -> list[jax.Array]:
        """The group's leaves in their target layout, filled when this returns; `arrays` stay."""
        targets = list(self.allocate())
        jax.block_until_ready([*arrays, *targets])
        sources = [{s.device: np.asarray(s.data) for s in x.addressable_shards} for x in arrays]
        written = [
            {s.device: _writable(s.data) for s in x.addressable_shards if x.size} for x in targets
        ]
        addresses = [view.ctypes.data for views in written for view in views.values()]
        if len(set(addresses)) < len(addresses):
            raise RuntimeError(
                "XLA gave two outputs of one allocation the same memory, which this version of "
                "jaxgoodput does not expect. Nothing was moved. Choose another route: "
                'Move.compile(..., routes=("alias", "direct", "hop", "pieces")).'
            )

        def fill(receiver: Device) -> None:
            for copy in self.by_receiver[receiver]:
                if targets[copy.leaf].size:
                    part = sources[copy.leaf][copy.sender][copy.from_]
                    written[copy.leaf][receiver][copy.to] = part

        if pool is None or self.target_bytes < MIN_THREADED_BYTES:
            for receiver in self.by_receiver:
                fill(receiver)
        else:
            list(pool.map(fill, self.by_receiver))
        return targets


def compile_copies(leaves: Sequence[LeafPlan]) -> Copies:
    """Compile the allocation of the leaves' targets; all devices must be CPUs of this process."""

    def allocated() -> tuple[jax.Array, ...]:
        return tuple(jax.lax.empty(leaf.shape, leaf.dtype) for leaf in leaves)

    shardings = tuple(leaf.target for leaf in leaves)
    by_receiver: dict[Device, list[Copy]] = {}
    size = 0
    for position, leaf in enumerate(leaves):
        source, target = leaf.source_boxes, leaf.target_boxes
        for piece in leaf.pieces:
            copy = Copy(
                leaf=position,
                sender=piece.sender,
                from_=within(piece.box, source[piece.sender]),
                to=within(piece.box, target[piece.receiver]),
            )
            by_receiver.setdefault(piece.receiver, []).append(copy)
            size += leaf.dtype.itemsize * int(np.prod([b - a for a, b in piece.box]))
    return Copies(
        allocate=jax.jit(allocated, out_shardings=shardings).lower().compile(),
        by_receiver={device: tuple(copies) for device, copies in by_receiver.items()},
        target_bytes=size,
    )


def _writable(shard: Any) -> np.ndarray:
    """The shard's own memory, to be written before anybody reads it."""
    memory = (ctypes.c_byte * shard.nbytes).from_address(shard.unsafe_buffer_pointer())
    return np.frombuffer(memory, dtype=np.uint8).view(shard.dtype).reshape(shard.shape)
