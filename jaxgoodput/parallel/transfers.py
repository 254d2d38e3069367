"""Pieces sent one by one between devices: the way to other devices, and if collectives cost too much.

Shards are split into *tiles*, the largest boxes that divide the shards of both layouts. One program over all
senders splits a group, one call hands all tiles that other devices need to the runtime, and one program over
all receivers joins the group. A shard that is a single tile is sent as it is, and a tile that is a whole
shard of the target needs no joining. Only the tiles are held besides source and target.

Split and join depend on shapes alone, not on which device sends what, so equal groups share them.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxgoodput.parallel.once import Once
from jaxgoodput.parallel.plan import Box, Device, LeafPlan, intersection, total

Program = Callable[..., Sequence[jax.Array]]
Shards = Mapping[Device, jax.Array]
# A function, with the shapes and types of its arguments.
Built = tuple[Callable[..., list[jax.Array]], list[tuple[tuple[int, ...], Any]]]


@dataclass(frozen=True)
class Transfer:
    """How one leaf moves: shards are split into tiles, which are sent and joined to other shards."""

    leaf: LeafPlan
    """Plan of the leaf, with its boxes."""
    is_split: bool
    """Whether a shard has several tiles."""
    is_joined: bool
    """Whether a shard of the target is joined from tiles, or must be a copy of one."""
    tiles: Mapping[Device, tuple[tuple[Device, int], ...]]
    """Tiles of each receiver in order, as the sender and the number among its tiles."""

    @property
    def held(self) -> tuple[int, ...]:
        """Shape of a shard before the move."""
        return _shape(self.leaf.source_boxes)

    @property
    def wanted(self) -> tuple[int, ...]:
        """Shape of a shard after the move."""
        return _shape(self.leaf.target_boxes)

    @property
    def tile(self) -> tuple[int, ...]:
        """Shape of a tile, the equal parts in which shards are sent."""
        return _tile(self.leaf)

    @property
    def temporary_bytes(self) -> dict[Device, int]:
        """Bytes that each device holds besides source and target."""
        parts, item = [], self.leaf.dtype.itemsize
        if self.is_split:
            parts.append(dict.fromkeys(self.leaf.source_boxes, math.prod(self.held) * item))
        if self.is_joined:
            size = math.prod(self.tile) * item
            parts.append(
                {r: size * sum(s != r for s, _ in tiles) for r, tiles in self.tiles.items()}
            )
        return total(parts)


@dataclass(frozen=True)
class Transfers:
    """A compiled move of a group of leaves in pieces: split into tiles, send, join."""

    leaves: tuple[Transfer, ...]
    """Leaves of the group."""
    split: Program | None
    """Program from the shards of all senders to their tiles, for leaves that are split."""
    join: Program | None
    """Program from tiles to the shards of all receivers, for leaves that are joined."""
    temporary_bytes: Mapping[Device, int]
    """Bytes by device, besides source and target."""

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the group's leaves in their target layout; `arrays` stay, and nothing waits."""
        # Tiles are passed on without a name, so that senders can free them once they have arrived.
        joined = self._joined(self._arrived(self._tiles(arrays)))
        return [
            jax.make_array_from_single_device_arrays(one.leaf.shape, one.leaf.target, parts)
            for one, parts in zip(self.leaves, joined, strict=True)
        ]

    def _tiles(self, arrays: Sequence[jax.Array]) -> list[list[Shards]]:
        """Return the tiles of each leaf on their senders."""
        held: list[list[Shards]] = [[shards(array)] for array in arrays]
        if self.split is not None:
            senders = tuple(self.leaves[0].leaf.source_boxes)
            chosen = [i for i, one in enumerate(self.leaves) if one.is_split]
            found = iter(self.split(*(same_everywhere(held[i][0], senders) for i in chosen)))
            for i in chosen:
                count = len(_slices(self.leaves[i].held, self.leaves[i].tile))
                held[i] = [shards(tile) for tile in itertools.islice(found, count)]
        return held

    def _arrived(self, tiles: list[list[Shards]]) -> list[list[list[jax.Array]]]:
        """Send tiles to other devices; return the tiles of each leaf for each receiver."""
        remote = [
            (held[number][sender], SingleDeviceSharding(receiver))
            for one, held in zip(self.leaves, tiles, strict=True)
            for receiver, wanted in one.tiles.items()
            for sender, number in wanted
            if sender != receiver
        ]
        sent, places = [x for x, _ in remote], [place for _, place in remote]
        arrived = iter(jax.device_put(sent, places) if sent else [])

        def received(held: list[Shards], receiver: Device, wanted: Any) -> list[jax.Array]:
            return [
                held[number][sender] if sender == receiver else next(arrived)
                for sender, number in wanted
            ]

        return [
            [received(held, receiver, wanted) for receiver, wanted in one.tiles.items()]
            for one, held in zip(self.leaves, tiles, strict=True)
        ]

    def _joined(self, inbox: list[list[list[jax.Array]]]) -> list[list[jax.Array]]:
        """Return the shards of each leaf on their receivers."""
        made: Iterator[jax.Array] = iter(())
        receivers = tuple(self.leaves[0].leaf.target_boxes)
        if self.join is not None:
            joining = [got for one, got in zip(self.leaves, inbox, strict=True) if one.is_joined]
            columns = [column for got in joining for column in zip(*got, strict=True)]
            parts = [dict(zip(receivers, column, strict=True)) for column in columns]
            made = iter(self.join(*(same_everywhere(part, receivers) for part in parts)))
        return [
            list(map(shards(next(made)).__getitem__, receivers))
            if one.is_joined
            else [tiles[0] for tiles in got]
            for one, got in zip(self.leaves, inbox, strict=True)
        ]


def shards(array: jax.Array) -> dict[Device, jax.Array]:
    """Return the part of the array that each device of this process holds, by device."""
    return {shard.device: shard.data for shard in array.addressable_shards}


def same_everywhere(parts: Shards, devices: tuple[Device, ...]) -> jax.Array:
    """Return one array made of `parts`, which have one shape, on this process's share of `devices`.

    It is declared replicated, though every device holds something else: in a program without collectives,
    each device reads only its own part.
    """
    mine = [parts[device] for device in devices if device in parts]
    return jax.make_array_from_single_device_arrays(mine[0].shape, _whole(devices), mine)


def _whole(devices: tuple[Device, ...]) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec())


def compile_locally(
    function: Callable[..., Any],
    arguments: Sequence[tuple[tuple[int, ...], Any]],
    devices: tuple[Device, ...],
    *,
    donate: bool = False,
) -> Program:
    """Compile a program in which each device applies `function` to its own values, of (shape, dtype)."""
    here = _whole(devices)
    abstract = [jax.ShapeDtypeStruct(shape, dtype, sharding=here) for shape, dtype in arguments]
    numbers = tuple(range(len(arguments))) if donate else ()
    return jax.jit(function, out_shardings=here, donate_argnums=numbers).lower(*abstract).compile()


def only_relocates(leaves: Sequence[LeafPlan]) -> bool:
    """Return whether every device receives one whole shard per leaf, so nothing is split or joined."""
    return all(
        len(leaf.pieces) == len(leaf.target_boxes)
        and all(
            p.sender != p.receiver and p.box == leaf.source_boxes[p.sender] for p in leaf.pieces
        )
        for leaf in leaves
    )


def compile_transfers(leaves: Sequence[LeafPlan], programs: Once) -> Transfers:
    """Compile the programs that `programs` does not hold yet. All leaves must have the same devices."""
    transfers = [_transfer(leaf) for leaf in leaves]

    def compiled(
        build: Callable[[Sequence[Transfer]], Built],
        ones: list[Transfer],
        devices: tuple[Device, ...],
    ) -> Program | None:
        if not ones:
            return None
        shapes = tuple((x.held, x.wanted, str(x.leaf.dtype)) for x in ones)
        function, arguments = build(ones)
        return programs(
            (build, shapes, devices), lambda: compile_locally(function, arguments, devices)
        )

    splitting = [one for one in transfers if one.is_split]
    joining = [one for one in transfers if one.is_joined]
    return Transfers(
        leaves=tuple(transfers),
        split=compiled(_split, splitting, tuple(leaves[0].source_boxes)),
        join=compiled(_join, joining, tuple(leaves[0].target_boxes)),
        temporary_bytes=total(one.temporary_bytes for one in transfers),
    )


def _split(transfers: Sequence[Transfer]) -> Built:
    """Build the function that splits a device's shards, one for each transfer, into tiles."""

    def split(*held: jax.Array) -> list[jax.Array]:
        return [
            shard[cut]
            for one, shard in zip(transfers, held, strict=True)
            for cut in _slices(one.held, one.tile)
        ]

    return split, [(one.held, one.leaf.dtype) for one in transfers]


def _join(transfers: Sequence[Transfer]) -> Built:
    """Build the function that joins the tiles on a device to shards, in buffers of their own."""

    def join(*tiles: jax.Array) -> list[jax.Array]:
        rest = iter(tiles)
        return [joined(one, rest) for one in transfers]

    def joined(one: Transfer, rest: Iterator[jax.Array]) -> jax.Array:
        if one.wanted == one.tile and math.prod(one.tile):
            return jnp.copy(next(rest))
        whole = jax.lax.empty(one.wanted, one.leaf.dtype)
        for cut in _slices(one.wanted, one.tile):
            whole = jax.lax.dynamic_update_slice(whole, next(rest), tuple(c.start for c in cut))
        return whole

    return join, [
        (one.tile, one.leaf.dtype) for one in transfers for _ in _slices(one.wanted, one.tile)
    ]


def _shape(held: Mapping[Device, Box]) -> tuple[int, ...]:
    """Return the shape of a device's box; all have the same."""
    return tuple(stop - start for start, stop in next(iter(held.values())))


def _tile(leaf: LeafPlan) -> tuple[int, ...]:
    return tuple(map(math.gcd, _shape(leaf.source_boxes), _shape(leaf.target_boxes)))


def _boxes(box: Box, tile: tuple[int, ...]) -> list[Box]:
    """Return the tiles of a box, row by row; an empty box has none.

    >>> _boxes(((0, 2), (4, 8)), (2, 2))
    [((0, 2), (4, 6)), ((0, 2), (6, 8))]
    """
    cuts = [
        [(at, at + step) for at in range(start, stop, max(step, 1))]
        for (start, stop), step in zip(box, tile, strict=True)
    ]
    return list(itertools.product(*cuts))


def _slices(shape: tuple[int, ...], tile: tuple[int, ...]) -> list[tuple[slice, ...]]:
    boxes = _boxes(tuple((0, length) for length in shape), tile)
    return [tuple(slice(*cut) for cut in box) for box in boxes]


def _transfer(leaf: LeafPlan) -> Transfer:
    """Plan how a leaf is split into tiles, which tile comes from which device, and how they are joined."""
    tile, wanted = _tile(leaf), _shape(leaf.target_boxes)
    numbers = {
        sender: {box: number for number, box in enumerate(_boxes(held, tile))}
        for sender, held in leaf.source_boxes.items()
    }

    def source(receiver: Device, box: Box) -> tuple[Device, int]:
        sender = next(
            p.sender
            for p in leaf.pieces
            if p.receiver == receiver and intersection(p.box, box) == box
        )
        return sender, numbers[sender][box]

    tiles = {
        receiver: tuple(source(receiver, box) for box in _boxes(target, tile))
        for receiver, target in leaf.target_boxes.items()
    }
    is_split = tile != _shape(leaf.source_boxes)
    # A tile that stays is a part of the source, which the move deletes, unless it was cut out of it.
    stays = any(sender == receiver for receiver, found in tiles.items() for sender, _ in found)
    is_joined = tile != wanted or not math.prod(wanted) or (stays and not is_split)
    return Transfer(leaf, is_split, is_joined, tiles)
