"""Pieces sent one by one between devices: the way to other devices, and where collectives are too dear.

Each sender cuts its pieces in one program, all transfers are handed to the runtime in one call, and
each receiver puts its pieces together in one program. What is held beside source and target are the
pieces themselves: cut on the sender, and received. A shard that is needed whole is sent as it is, and
where it is all that the receiver needs, it is the target.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxgoodput.parallel.plan import Box, Device, LeafPlan, Piece, num_elements, within

Program = Callable[..., Sequence[jax.Array]]
Cut = tuple[int, Box]  # a leaf's position in the group, and the part


@dataclass(frozen=True)
class Transfers:
    """A compiled group: a program per sender, the transfers, a program per receiver."""

    leaves: tuple[LeafPlan, ...]
    """The group's own."""
    senders: Mapping[Device, tuple[tuple[int, ...], Program]]
    """Leaves whose shards a device cuts, and how."""
    sent: tuple[tuple[Piece, int], ...]
    """Piece and leaf: what senders cut, in order, then whole shards."""
    num_cut: int
    """How many of them are cut."""
    receivers: Mapping[Device, tuple[tuple[int, ...], Program]]
    """Leaves whose own shard a device reads, and what puts its part together."""
    finished: frozenset[tuple[Device, int]]
    """Receiver and leaf: what arrives is the target."""
    temporary_bytes: Mapping[Device, int]
    """By device, beside source and target."""

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The group's leaves in their target layout; `arrays` stay, and nothing waits."""
        shards = [{s.device: s.data for s in x.addressable_shards} for x in arrays]
        parts: list[jax.Array] = []
        for device, (leaves, program) in self.senders.items():
            parts += program(*(shards[leaf][device] for leaf in leaves))
        parts += [shards[leaf][piece.sender] for piece, leaf in self.sent[self.num_cut :]]
        places = [SingleDeviceSharding(piece.receiver) for piece, _ in self.sent]
        arrived = jax.device_put(parts, places) if parts else []
        del parts
        inbox: dict[Device, list[jax.Array]] = {device: [] for device in self.receivers}
        outputs: dict[tuple[Device, int], jax.Array] = {}
        for (piece, leaf), part in zip(self.sent, arrived, strict=True):
            if (piece.receiver, leaf) in self.finished:
                outputs[piece.receiver, leaf] = part
            else:
                inbox[piece.receiver].append(part)
        del arrived
        for device, (own, program) in self.receivers.items():
            made_here = program(*inbox.pop(device), *(shards[leaf][device] for leaf in own))
            missing = self._assembled(device)
            outputs |= {(device, leaf): x for leaf, x in zip(missing, made_here, strict=True)}
        made = []
        for position, leaf in enumerate(self.leaves):
            shares = [outputs[device, position] for device in leaf.target_boxes]
            made.append(jax.make_array_from_single_device_arrays(leaf.shape, leaf.target, shares))
        return made

    def _assembled(self, device: Device) -> list[int]:
        """The leaves that the device's program puts together."""
        return [i for i in range(len(self.leaves)) if (device, i) not in self.finished]


def only_relocates(leaves: Sequence[LeafPlan]) -> bool:
    """Whether every device receives one whole shard of another's per leaf: nothing to cut or join."""
    return all(
        len(leaf.pieces) == len(leaf.target_boxes)
        and all(
            p.sender != p.receiver and p.box == leaf.source_boxes[p.sender] for p in leaf.pieces
        )
        for leaf in leaves
    )


def compile_transfers(leaves: Sequence[LeafPlan]) -> Transfers:
    """Compile the programs of every sender and receiver; all leaves have the same devices."""
    remote = [
        (piece, position)
        for position, leaf in enumerate(leaves)
        for piece in leaf.pieces
        if piece.sender != piece.receiver
    ]
    held = [leaf.source_boxes for leaf in leaves]
    order = {device: i for i, device in enumerate(held[0])}
    cut = [(piece, i) for piece, i in remote if piece.box != held[i][piece.sender]]
    cut.sort(key=lambda item: order[item[0].sender])
    whole = [(piece, i) for piece, i in remote if piece.box == held[i][piece.sender]]
    sent = [*cut, *whole]
    wanted = [leaf.target_boxes for leaf in leaves]
    finished = frozenset(
        (piece.receiver, i) for piece, i in sent if piece.box == wanted[i][piece.receiver]
    )
    temporary: dict[Device, int] = {}
    for piece, i in sent:
        size = num_elements(piece.box) * leaves[i].dtype.itemsize
        if piece.box != held[i][piece.sender]:
            temporary[piece.sender] = temporary.get(piece.sender, 0) + size
        if (piece.receiver, i) not in finished:
            temporary[piece.receiver] = temporary.get(piece.receiver, 0) + size
    senders = {}
    for device in order:
        mine: list[Cut] = [(leaf, piece.box) for piece, leaf in cut if piece.sender == device]
        if mine:
            senders[device] = _sender(leaves, device, mine)
    receivers = {}
    for device in wanted[0]:
        assembled = [i for i in range(len(leaves)) if (device, i) not in finished]
        inbox: list[Cut] = [
            (leaf, piece.box)
            for piece, leaf in sent
            if piece.receiver == device and (device, leaf) not in finished
        ]
        if assembled:
            receivers[device] = _receiver(leaves, device, assembled, inbox)
    return Transfers(
        leaves=tuple(leaves),
        senders=senders,
        sent=tuple(sent),
        num_cut=len(cut),
        receivers=receivers,
        finished=finished,
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

    arguments = [_abstract(leaves[i], held[i], device) for i in used]
    return tuple(used), _compiled(cut, arguments, device)


def _receiver(
    leaves: Sequence[LeafPlan], device: Device, assembled: Sequence[int], inbox: Sequence[Cut]
) -> tuple[tuple[int, ...], Program]:
    """A program from received pieces and the device's own shards to its part of `assembled` leaves."""
    local = {
        position: piece.box
        for position in assembled
        for piece in leaves[position].pieces
        if piece.sender == piece.receiver == device
    }
    own = sorted(local)
    held = {leaf: leaves[leaf].source_boxes[device] for leaf in own}
    wanted = {leaf: leaves[leaf].target_boxes[device] for leaf in assembled}

    def assemble(*values: jax.Array) -> list[jax.Array]:
        parts: dict[int, list[tuple[Box, jax.Array]]] = {leaf: [] for leaf in assembled}
        for (leaf, box), value in zip(inbox, values[: len(inbox)], strict=True):
            parts[leaf].append((box, value))
        for leaf, shard in zip(own, values[len(inbox) :], strict=True):
            parts[leaf].append((local[leaf], shard[within(local[leaf], held[leaf])]))
        return [_joined(parts[leaf], wanted[leaf], leaves[leaf].dtype) for leaf in assembled]

    arguments = [_abstract(leaves[leaf], box, device) for leaf, box in inbox]
    arguments += [_abstract(leaves[leaf], held[leaf], device) for leaf in own]
    return tuple(own), _compiled(assemble, arguments, device)


def _joined(parts: Sequence[tuple[Box, jax.Array]], wanted: Box, dtype: Any) -> jax.Array:
    """One array of the parts that tile `wanted`, in memory of its own; none of them where it is empty."""
    if len(parts) == 1:
        return jnp.copy(parts[0][1])
    whole = jax.lax.empty(tuple(b - a for a, b in wanted), dtype)
    for box, part in parts:
        starts = tuple(cut.start for cut in within(box, wanted))
        whole = jax.lax.dynamic_update_slice(whole, part, starts)
    return whole


def _abstract(leaf: LeafPlan, box: Box, device: Device) -> jax.ShapeDtypeStruct:
    shape = tuple(b - a for a, b in box)
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=SingleDeviceSharding(device))


def _compiled(function: Callable[..., Any], arguments: Sequence[Any], device: Device) -> Program:
    # A program for empty leaves has no argument that would say where it runs.
    here = SingleDeviceSharding(device)
    return jax.jit(function, out_shardings=here).lower(*arguments).compile()
