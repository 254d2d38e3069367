"""Pieces sent one by one between devices: the way to other devices, and where collectives are too dear.

Each sender cuts its pieces in one program, all transfers are handed to the runtime in one call, and
each receiver puts its pieces together in one program. What is held beside source and target are the
pieces themselves: cut on the sender, and received.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxgoodput.parallel.pieces import Box, Device, Piece, num_elements, within
from jaxgoodput.parallel.plan import LeafPlan

Program = Callable[..., Sequence[jax.Array]]
Cut = tuple[int, Box]  # a leaf's position in the group, and the part


@dataclass(frozen=True)
class Transfers:
    """A compiled group: a program per sender, the transfers, a program per receiver."""

    leaves: tuple[LeafPlan, ...]
    senders: Mapping[Device, tuple[tuple[int, ...], Program]]  # leaves whose shards it takes
    sent: tuple[tuple[Device, Piece, int], ...]  # sender, piece, leaf; senders' outputs in order
    receivers: Mapping[Device, tuple[tuple[int, ...], Program]]  # leaves whose own shard it reads
    temporary_bytes: Mapping[Device, int]

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The group's leaves in their target layout; `arrays` stay, and nothing waits."""
        shards = [{s.device: s.data for s in x.addressable_shards} for x in arrays]
        cut: list[jax.Array] = []
        for device, (leaves, program) in self.senders.items():
            cut += program(*(shards[leaf][device] for leaf in leaves))
        places = [SingleDeviceSharding(piece.receiver) for _, piece, _ in self.sent]
        arrived = jax.device_put(cut, places) if cut else []
        del cut
        inbox: dict[Device, list[jax.Array]] = {device: [] for device in self.receivers}
        for (_, piece, _), part in zip(self.sent, arrived, strict=True):
            inbox[piece.receiver].append(part)
        del arrived
        outputs: dict[Device, Sequence[jax.Array]] = {}
        for device, (own, program) in self.receivers.items():
            outputs[device] = program(*inbox.pop(device), *(shards[leaf][device] for leaf in own))
        made = []
        for position, leaf in enumerate(self.leaves):
            parts = [outputs[device][position] for device in leaf.target_boxes]
            made.append(jax.make_array_from_single_device_arrays(leaf.shape, leaf.target, parts))
        return made


def compile_transfers(leaves: Sequence[LeafPlan]) -> Transfers:
    """Compile the programs of every sender and receiver; all leaves have the same devices."""
    sent = [
        (piece.sender, piece, position)
        for position, leaf in enumerate(leaves)
        for piece in leaf.pieces
        if piece.sender != piece.receiver
    ]
    order = {device: i for i, device in enumerate(leaves[0].source_boxes)}
    sent.sort(key=lambda item: order[item[0]])
    temporary: dict[Device, int] = {}
    for sender, piece, position in sent:
        size = num_elements(piece.box) * leaves[position].dtype.itemsize
        for device in (sender, piece.receiver):
            temporary[device] = temporary.get(device, 0) + size
    senders = {}
    for device in order:
        mine: list[Cut] = [(leaf, piece.box) for sender, piece, leaf in sent if sender == device]
        if mine:
            senders[device] = _sender(leaves, device, mine)
    receivers = {}
    for device in leaves[0].target_boxes:
        inbox: list[Cut] = [(leaf, p.box) for _, p, leaf in sent if p.receiver == device]
        receivers[device] = _receiver(leaves, device, inbox)
    return Transfers(
        leaves=tuple(leaves),
        senders=senders,
        sent=tuple(sent),
        receivers=receivers,
        temporary_bytes=temporary,
    )


def _sender(
    leaves: Sequence[LeafPlan], device: Device, cuts: Sequence[Cut]
) -> tuple[tuple[int, ...], Program]:
    """A program from the device's shards to the pieces that it sends."""
    used = sorted({leaf for leaf, _ in cuts})
    held = {leaf: leaves[leaf].source_boxes[device] for leaf in used}

    def cut(*shards: jax.Array) -> list[jax.Array]:
        by_leaf = dict(zip(used, shards, strict=True))
        return [jnp.copy(by_leaf[leaf][within(box, held[leaf])]) for leaf, box in cuts]

    return tuple(used), _compiled(cut, [_abstract(leaves[i], held[i], device) for i in used])


def _receiver(
    leaves: Sequence[LeafPlan], device: Device, inbox: Sequence[Cut]
) -> tuple[tuple[int, ...], Program]:
    """A program from received pieces and the device's own shards to its part of every target."""
    local = {
        position: piece.box
        for position, leaf in enumerate(leaves)
        for piece in leaf.pieces
        if piece.sender == piece.receiver == device
    }
    own = sorted(local)
    held = {leaf: leaves[leaf].source_boxes[device] for leaf in own}
    wanted = [leaf.target_boxes[device] for leaf in leaves]

    def assemble(*values: jax.Array) -> list[jax.Array]:
        parts: list[list[tuple[Box, jax.Array]]] = [[] for _ in leaves]
        for (leaf, box), value in zip(inbox, values[: len(inbox)], strict=True):
            parts[leaf].append((box, value))
        for leaf, shard in zip(own, values[len(inbox) :], strict=True):
            parts[leaf].append((local[leaf], shard[within(local[leaf], held[leaf])]))
        return [_joined(found, box) for found, box in zip(parts, wanted, strict=True)]

    arguments = [_abstract(leaves[leaf], box, device) for leaf, box in inbox]
    arguments += [_abstract(leaves[leaf], held[leaf], device) for leaf in own]
    return tuple(own), _compiled(assemble, arguments)


def _joined(parts: Sequence[tuple[Box, jax.Array]], wanted: Box) -> jax.Array:
    """One array of the parts that tile `wanted`, in memory of its own."""
    if len(parts) == 1:
        return jnp.copy(parts[0][1])
    whole = jax.lax.empty(tuple(b - a for a, b in wanted), parts[0][1].dtype)
    for box, part in parts:
        starts = tuple(cut.start for cut in within(box, wanted))
        whole = jax.lax.dynamic_update_slice(whole, part, starts)
    return whole


def _abstract(leaf: LeafPlan, box: Box, device: Device) -> jax.ShapeDtypeStruct:
    shape = tuple(b - a for a, b in box)
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=SingleDeviceSharding(device))


def _compiled(function: Callable[..., Any], arguments: Sequence[Any]) -> Program:
    return jax.jit(function).lower(*arguments).compile()
