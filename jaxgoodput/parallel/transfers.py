"""Pieces sent one by one between devices: the way to other devices, and where collectives are too dear.

Shards are split into *tiles*, the largest boxes that divide the shards of both layouts alike. One program
over all senders splits a group, all tiles that others need are handed to the runtime in one call, and
one program over all receivers joins the group. A shard that is a tile is sent as it is; a tile
that is a shard of the target is the target. What is held beside source and target are the tiles.

Split and join depend on shapes alone, not on who sends what: equal groups share them.
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
# A function, and the shapes and types of its arguments.
Built = tuple[Callable[..., list[jax.Array]], list[tuple[tuple[int, ...], Any]]]


@dataclass(frozen=True)
class Transfer:
    """How one leaf goes."""

    leaf: LeafPlan
    """Where from, where to."""
    is_split: bool
    """Whether a shard is more than a tile."""
    is_joined: bool
    """Whether a shard of the target is made of tiles, or must be a copy of one."""
    tiles: Mapping[Device, tuple[tuple[Device, int], ...]]
    """Receiver -> the sender of each of its tiles, and which of the sender's tiles it is."""

    @property
    def held(self) -> tuple[int, ...]:
        """The shape of a shard before."""
        return _shape(self.leaf.source_boxes)

    @property
    def wanted(self) -> tuple[int, ...]:
        """The shape of a shard afterwards."""
        return _shape(self.leaf.target_boxes)

    @property
    def tile(self) -> tuple[int, ...]:
        """The shape of a tile."""
        return _tile(self.leaf)


@dataclass(frozen=True)
class Transfers:
    """A compiled group."""

    leaves: tuple[Transfer, ...]
    """The group's own."""
    split: Program | None
    """From the shards of all senders to their tiles, of the leaves that are split."""
    join: Program | None
    """From tiles to the shards of all receivers, of the leaves that are joined."""
    temporary_bytes: Mapping[Device, int]
    """By device, beside source and target."""

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The group's leaves in their target layout; `arrays` stay, and nothing waits."""
        leaves = [one.leaf for one in self.leaves]
        senders, receivers = tuple(leaves[0].source_boxes), tuple(leaves[0].target_boxes)
        held = [[shards(array)] for array in arrays]
        if self.split is not None:
            chosen = [i for i, one in enumerate(self.leaves) if one.is_split]
            found = iter(self.split(*(same_everywhere(held[i][0], senders) for i in chosen)))
            for i in chosen:
                count = len(_slices(self.leaves[i].held, self.leaves[i].tile))
                held[i] = [shards(tile) for tile in itertools.islice(found, count)]
        remote = [
            (tiles[number][sender], SingleDeviceSharding(receiver))
            for one, tiles in zip(self.leaves, held, strict=True)
            for receiver, wanted in one.tiles.items()
            for sender, number in wanted
            if sender != receiver
        ]
        sent, places = zip(*remote, strict=True) if remote else ((), ())
        arrived = iter(jax.device_put(list(sent), list(places)) if sent else [])
        del remote, sent
        inbox = [
            [
                [
                    tiles[number][sender] if sender == receiver else next(arrived)
                    for sender, number in wanted
                ]
                for receiver, wanted in one.tiles.items()
            ]
            for one, tiles in zip(self.leaves, held, strict=True)
        ]
        del held
        shares = [[tiles[0] for tiles in got] if got[0] else [] for got in inbox]
        if self.join is not None:
            chosen = [i for i, one in enumerate(self.leaves) if one.is_joined]
            columns = [c for i in chosen for c in zip(*inbox[i], strict=True)]
            parts = [dict(zip(receivers, column, strict=True)) for column in columns]
            made = self.join(*(same_everywhere(part, receivers) for part in parts))
            for i, joined in zip(chosen, map(shards, made), strict=True):
                shares[i] = [joined[device] for device in receivers]
        return [
            jax.make_array_from_single_device_arrays(leaf.shape, leaf.target, parts)
            for leaf, parts in zip(leaves, shares, strict=True)
        ]


def shards(array: jax.Array) -> dict[Device, jax.Array]:
    """Device -> what it holds."""
    return {shard.device: shard.data for shard in array.addressable_shards}


def same_everywhere(parts: Shards, devices: tuple[Device, ...]) -> jax.Array:
    """Arrays of one shape, one on each of `devices` that is this process's, as one array.

    It passes for replicated, though every device holds something else: a program without collectives
    reads nothing but its own.
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
    """One program for all `devices`, each of which runs `function` on what it holds: (shape, dtype) each."""
    here = _whole(devices)
    abstract = [jax.ShapeDtypeStruct(shape, dtype, sharding=here) for shape, dtype in arguments]
    numbers = tuple(range(len(arguments))) if donate else ()
    return jax.jit(function, out_shardings=here, donate_argnums=numbers).lower(*abstract).compile()


def only_relocates(leaves: Sequence[LeafPlan]) -> bool:
    """Whether every device receives one whole shard of another's per leaf: nothing to cut or join."""
    return all(
        len(leaf.pieces) == len(leaf.target_boxes)
        and all(
            p.sender != p.receiver and p.box == leaf.source_boxes[p.sender] for p in leaf.pieces
        )
        for leaf in leaves
    )


def compile_transfers(leaves: Sequence[LeafPlan], programs: Once) -> Transfers:
    """Compile what `programs` does not hold yet; all leaves have the same devices."""
    transfers = [_transfer(leaf) for leaf in leaves]
    splitting = [one for one in transfers if one.is_split]
    joining = [one for one in transfers if one.is_joined]
    temporary: dict[Device, int] = {}
    for one in transfers:
        if one.is_split:
            size = math.prod(one.held) * one.leaf.dtype.itemsize
            temporary = total([temporary, dict.fromkeys(one.leaf.source_boxes, size)])
        if one.is_joined:
            size = math.prod(one.tile) * one.leaf.dtype.itemsize
            received = {r: sum(s != r for s, _ in found) for r, found in one.tiles.items()}
            temporary = total([temporary, {r: size * count for r, count in received.items()}])

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

    return Transfers(
        leaves=tuple(transfers),
        split=compiled(_split, splitting, tuple(leaves[0].source_boxes)),
        join=compiled(_join, joining, tuple(leaves[0].target_boxes)),
        temporary_bytes=temporary,
    )


def _split(transfers: Sequence[Transfer]) -> Built:
    """From shards to tiles: the function, and the shapes and types of its arguments."""

    def split(*held: jax.Array) -> list[jax.Array]:
        return [
            shard[cut]
            for one, shard in zip(transfers, held, strict=True)
            for cut in _slices(one.held, one.tile)
        ]

    return split, [(one.held, one.leaf.dtype) for one in transfers]


def _join(transfers: Sequence[Transfer]) -> Built:
    """From tiles to shards in memory of their own."""

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
    """Of one shard; all have the same."""
    return tuple(stop - start for start, stop in next(iter(held.values())))


def _tile(leaf: LeafPlan) -> tuple[int, ...]:
    return tuple(map(math.gcd, _shape(leaf.source_boxes), _shape(leaf.target_boxes)))


def _boxes(box: Box, tile: tuple[int, ...]) -> list[Box]:
    """The tiles of a box, row by row; none of an empty one.

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
    tile, wanted = _tile(leaf), _shape(leaf.target_boxes)
    numbers = {
        sender: {box: number for number, box in enumerate(_boxes(held, tile))}
        for sender, held in leaf.source_boxes.items()
    }
    tiles = {
        receiver: tuple(
            (sender, numbers[sender][box])
            for box in _boxes(target, tile)
            for sender in [
                p.sender
                for p in leaf.pieces
                if p.receiver == receiver and intersection(p.box, box) == box
            ]
        )
        for receiver, target in leaf.target_boxes.items()
    }

    is_split = tile != _shape(leaf.source_boxes)
    # A tile that stays is a part of the source, which the move deletes, unless it was cut out of it.
    stays = any(sender == receiver for receiver, found in tiles.items() for sender, _ in found)
    is_joined = tile != wanted or not math.prod(wanted) or (stays and not is_split)
    return Transfer(leaf, is_split, is_joined, tiles)
