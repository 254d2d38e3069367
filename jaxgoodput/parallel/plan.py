"""What a change of layout has to move, in which groups and with how much memory, before anything runs.

A sharding gives every device a box: an interval per dimension. The parts of its new box that a device does
not hold yet come from other devices, one *piece* per part. If several devices hold a part, the one that has
the least to send so far sends it (greedy list scheduling of the send load; the load of receiving is fixed).

The plan is pure: shapes, dtypes and shardings go in, numbers and pieces come out. `bytes_moved`, what devices
need and do not hold, is a lower bound for every route. Leaves move in *groups*, and the sources of a group
are gone before the next group starts, so a move needs extra memory for one group, not for a second state.
How a group moves is its *route*:

* "alias": every device holds its target already; the buffers change hands (a copy if the source stays);
* "direct": one jitted identity; XLA picks the collectives;
* "hop": an identity through a layout cut along one dimension, for groups that XLA's direct way would build
  whole on every device ("involuntary full rematerialization");
* "pieces": one transfer per piece, put together on the receiver; the way to other devices.
"""

import collections
import functools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import PyTree

Box = tuple[tuple[int, int], ...]  # per dimension: first index, and one past the last
Device = Any  # a jax.Device: hashed and compared, never used
Route = Literal["alias", "direct", "hop", "pieces"]
GROUP_BYTES = 32 * 2**20
GROUP_LEAVES = 64  # a program with more takes long to compile
# Buffers change hands in groups of these sizes, of one kind of leaf: few programs, few calls.
ALIASED = (64, 8, 1)


@dataclass(frozen=True)
class Piece:
    """Part of an array that `receiver` needs and `sender` holds; it stays if both are the same device."""

    sender: Device
    """Device that holds it."""
    receiver: Device
    """Device that needs it."""
    box: Box
    """Box within the whole array."""


@dataclass(frozen=True)
class Overlap:
    """What one device needs of an array: the part that it holds already, and the parts that others hold."""

    receiver: Device
    """Device that needs them."""
    local: Box | None
    """Part that it holds already."""
    lacking: tuple[tuple[Box, tuple[Device, ...]], ...]
    """Parts that it lacks, and the devices that hold each."""


@dataclass(frozen=True)
class LeafPlan:
    """How one leaf lies before and after, and the pieces that take it there."""

    name: str
    """Path of the leaf, for errors."""
    shape: tuple[int, ...]
    """Shape of the array, or of its key data if it holds PRNG keys."""
    dtype: np.dtype
    """Type of the array, or of its key data."""
    source: Sharding
    """Sharding before the move."""
    target: Sharding
    """Sharding after the move."""
    pieces: tuple[Piece, ...]
    """Parts that every device needs, sent or held already."""
    source_boxes: Mapping[Device, Box] = field(repr=False)
    """Box that each device holds before."""
    target_boxes: Mapping[Device, Box] = field(repr=False)
    """Box that each device holds afterwards."""

    @property
    def keeps_devices(self) -> bool:
        """Whether source and target have the same devices in the same order."""
        return tuple(self.source_boxes) == tuple(self.target_boxes)

    @functools.cached_property
    def kind(self) -> Hashable:
        """Key that is equal for leaves that one program can move, whatever their shardings are called."""
        held, wanted = tuple(self.source_boxes.values()), tuple(self.target_boxes.values())
        return self.shape, str(self.dtype), held, wanted


@dataclass(frozen=True)
class GroupPlan:
    """Leaves that move together, on one route. Bytes by device cover the whole group."""

    leaves: tuple[int, ...]
    """Positions in the flattened tree."""
    route: Route
    """Route on which they move."""
    bytes_moved: int
    """Sum of what devices need and lack."""
    whole_bytes: int
    """Bytes of the leaves, each counted once."""
    source_bytes: Mapping[Device, int]
    """Bytes by device, before."""
    target_bytes: Mapping[Device, int]
    """Bytes by device, afterwards."""
    temporary_bytes: Mapping[Device, int] = field(default_factory=dict)
    """Bytes by device, besides source and target."""


@dataclass(frozen=True)
class MovePlan:
    """The plan of moving a tree to other shardings: groups of leaves that move one after another."""

    leaves: tuple[LeafPlan, ...]
    """Leaves in the tree's order."""
    groups: tuple[GroupPlan, ...]
    """Groups in the order in which they run."""
    donate: bool
    """Whether sources are deleted on the way."""
    bytes_moved: int
    """Sum of what devices need and lack: no route sends less."""
    largest_send_bytes: int
    """Most bytes that one device sends, if the least loaded holder of each piece sends it."""

    @property
    def before_bytes(self) -> dict[Device, int]:
        """Bytes that each device holds before."""
        return total(group.source_bytes for group in self.groups)

    @property
    def after_bytes(self) -> dict[Device, int]:
        """Bytes that each device holds afterwards: with `donate` only the target."""
        targets = total(group.target_bytes for group in self.groups)
        return targets if self.donate else total([targets, self.before_bytes])

    @property
    def peak_bytes(self) -> dict[Device, int]:
        """Most bytes that each device holds at any time: source, target and temporaries together."""
        held = self.before_bytes
        peak = dict(held)
        for group in self.groups:
            in_place = self.donate and group.route == "alias"
            new = {} if in_place else group.target_bytes
            for device, size in total([held, new, group.temporary_bytes]).items():
                peak[device] = max(peak.get(device, 0), size)
            held = total([held, group.target_bytes])
            if self.donate:
                held = {d: size - group.source_bytes.get(d, 0) for d, size in held.items()}
        return peak

    @property
    def peak_extra_bytes(self) -> int:
        """Most bytes that any device needs beyond what it holds before or after, whichever is more."""
        before, after = self.before_bytes, self.after_bytes
        return max(
            (
                size - max(before.get(device, 0), after.get(device, 0))
                for device, size in self.peak_bytes.items()
            ),
            default=0,
        )

    def with_groups(self, groups: Sequence[GroupPlan]) -> "MovePlan":
        """Return the same move with other groups or routes."""
        return replace(self, groups=tuple(groups))

    def __str__(self) -> str:
        """Return a line with bytes, the largest sender, extra memory and routes."""
        counts = collections.Counter(group.route for group in self.groups)
        ways = ", ".join(f"{route} x {count}" for route, count in counts.items()) or "nothing"
        return (
            f"{mebibytes(self.bytes_moved)} moved, {mebibytes(self.largest_send_bytes)} by the largest "
            f"sender, {mebibytes(self.peak_extra_bytes)} extra on a device at the peak; groups: {ways}"
        )


def plan_move(
    tree: PyTree, shardings: PyTree, *, group_bytes: int = GROUP_BYTES, donate: bool = True
) -> MovePlan:
    """Plan the move of `tree` (arrays, or shapes with a sharding) to `shardings` (same structure).

    Every group has one leaf, or up to `group_bytes` on the device that holds most of it. Leaves are dealt out
    evenly by kind, so most groups are equal and share their programs. Routes are "alias" or "pieces", which
    need no compilation to plan; `Move.compile` replaces "pieces" if XLA's analysis of a jitted move is as
    good.

    Raises ValueError if structures differ, a leaf has no sharding, or a target does not divide a leaf.
    """
    if group_bytes < 1:
        raise ValueError(
            f"group_bytes must be at least 1; got {group_bytes}. Use {GROUP_BYTES} if unsure."
        )
    sent: dict[Device, int] = {}
    known: dict[Any, tuple[dict[Device, Box], dict[Device, Box], tuple[Overlap, ...]]] = {}
    leaves = []
    for name, value, sharding in _paired(tree, shardings):
        shape, dtype, source, target = as_data(name, value, sharding)
        key = shape, source, target
        if key not in known:
            held, wanted = boxes(source, shape), _divided(name, shape, target)
            known[key] = held, wanted, overlaps(held, wanted)
        held, wanted, found = known[key]
        pieces = assigned(found, dtype.itemsize, sent)
        leaves.append(LeafPlan(name, shape, dtype, source, target, pieces, held, wanted))
    groups = _grouped(leaves, group_bytes)
    return MovePlan(
        leaves=tuple(leaves),
        groups=tuple(groups),
        donate=donate,
        bytes_moved=sum(sent.values()),
        largest_send_bytes=max(sent.values(), default=0),
    )


def mebibytes(size: int) -> str:
    """Return a size as text, for messages.

    >>> mebibytes(3 * 2**19)
    '1.5 MiB'
    """
    return f"{size / 2**20:.1f} MiB"


def total(parts: Iterable[Mapping[Device, int]]) -> dict[Device, int]:
    """Return the sum of each device's numbers over several mappings.

    >>> total([{"a": 1}, {"a": 2, "b": 3}])
    {'a': 3, 'b': 3}
    """
    sums: dict[Device, int] = {}
    for part in parts:
        for device, size in part.items():
            sums[device] = sums.get(device, 0) + size
    return sums


def as_data(
    name: str, value: Any, target: Any
) -> tuple[tuple[int, ...], np.dtype, Sharding, Sharding]:
    """Return shape and dtype of the numbers of a leaf, and its shardings before and after a move.

    `value` may be abstract. PRNG keys become the integers that they consist of. Raises ValueError if `value`
    has no sharding, or `target` is not one.
    """
    source = getattr(value, "sharding", None)
    if not isinstance(source, Sharding):
        raise ValueError(
            f"{name or 'the value'} has no sharding: it is a {type(value).__name__}. Pass a jax.Array, "
            "or a jax.ShapeDtypeStruct with sharding=."
        )
    if not isinstance(target, Sharding):
        raise ValueError(
            f"the target of {name or 'the value'} must be a sharding; got {target!r}. Pass a tree of "
            "shardings of the same structure as the state."
        )
    if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return tuple(value.shape), np.dtype(value.dtype), source, target
    abstract = jax.ShapeDtypeStruct(value.shape, value.dtype)
    data = jax.eval_shape(jax.random.key_data, abstract)
    # The last dimensions of key data are whole, so the keys' shorter spec is valid for them.
    return tuple(data.shape), np.dtype(data.dtype), source, target


def _paired(tree: PyTree, shardings: PyTree) -> list[tuple[str, Any, Any]]:
    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    targets, wanted = jax.tree.flatten(shardings)
    if structure != wanted:
        raise ValueError(
            f"the state has the structure {structure} and its shardings {wanted}. Make them with "
            "jax.tree.map over the state."
        )
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf, target)
        for (path, leaf), target in zip(flat, targets, strict=True)
    ]


def _divided(name: str, shape: tuple[int, ...], target: Sharding) -> dict[Device, Box]:
    try:
        target.shard_shape(shape)
    except ValueError as error:
        raise ValueError(
            f"{name} of shape {shape} cannot be cut as {target}: {error}. "
            "Use a sharding whose axes divide it."
        ) from error
    return boxes(target, shape)


def shard_bytes(boxes_held: Mapping[Device, Box], item_bytes: int) -> dict[Device, int]:
    """Return the bytes of each device's box."""
    return {device: num_elements(box) * item_bytes for device, box in boxes_held.items()}


def _grouped(leaves: Sequence[LeafPlan], group_bytes: int) -> list[GroupPlan]:
    """Group leaves on the same devices, separately if they stay or move, ordered by what they free."""
    kinds: dict[Any, dict[Any, list[int]]] = {}
    for position, leaf in enumerate(leaves):
        held, wanted = leaf.source_boxes, leaf.target_boxes
        devices = held == wanted, tuple(held), tuple(wanted)
        kinds.setdefault(devices, {}).setdefault(leaf.kind, []).append(position)
    groups: list[GroupPlan] = []
    for (stays, *_), found in kinds.items():
        # In an order that does not depend on the tree, so that equal groups are equal programs.
        by_kind = [found[kind] for kind in sorted(found)]
        if stays:
            dealt = [part for kind in by_kind for part in _aliased(kind)]
        else:
            dealt = _dealt([(kind, _cost(leaves[kind[0]])) for kind in by_kind], group_bytes)
        groups += [_group(positions, [leaves[i] for i in positions], stays) for positions in dealt]
    # Groups that free the most come first, which makes room for later ones.
    return sorted(groups, key=_growth)


def _aliased(positions: Sequence[int]) -> Iterable[list[int]]:
    for size in ALIASED:
        while len(positions) >= size:
            yield list(positions[:size])
            positions = positions[size:]


def _dealt(kinds: Sequence[tuple[Sequence[int], int]], group_bytes: int) -> list[list[int]]:
    """Deal leaves of several kinds, (positions, bytes of one), into as many equal groups as possible.

    Every group of a round gets as many leaves of a kind as every other; the rest is dealt in another round.

    >>> _dealt([([0, 1, 2, 3, 4, 5], 1), ([6, 7, 8], 2)], 4)
    [[0, 1, 6], [2, 3, 7], [4, 5, 8]]
    """
    kinds = [(positions, size) for positions, size in kinds if positions]
    if not kinds:
        return []
    count = _num_groups(kinds, group_bytes)
    if count is None:
        return [group for kind in kinds for group in _dealt([kind], group_bytes)]
    dealt = [(positions, len(positions) // count) for positions, _ in kinds]
    groups = [
        [p for positions, each in dealt for p in positions[i * each : (i + 1) * each]]
        for i in range(count)
    ]
    rest = [(positions[len(positions) // count * count :], size) for positions, size in kinds]
    return groups + _dealt(rest, group_bytes)


def _num_groups(kinds: Sequence[tuple[Sequence[int], int]], group_bytes: int) -> int | None:
    """Return how many groups to deal leaves to; None if kinds have too few leaves to share groups.

    Groups stay within `group_bytes` and `GROUP_LEAVES`. There are up to twice as many groups as that needs,
    if fewer leaves are then left over.
    """
    lengths = [len(positions) for positions, _ in kinds]
    num_bytes = sum(len(positions) * size for positions, size in kinds)
    needed, most = max(-(-num_bytes // group_bytes), -(-sum(lengths) // GROUP_LEAVES)), max(lengths)
    if needed > most and len(kinds) > 1:
        return None
    counts = range(min(needed, most), min(2 * needed, most) + 1)
    return min(counts, key=lambda n: sum(length % n for length in lengths))


def _cost(leaf: LeafPlan) -> int:
    """Return the most bytes that one device holds of the leaf, before or after."""
    held = [*leaf.source_boxes.values(), *leaf.target_boxes.values()]
    return max(map(num_elements, held)) * leaf.dtype.itemsize


def _group(positions: Sequence[int], leaves: Sequence[LeafPlan], stays: bool) -> GroupPlan:
    return GroupPlan(
        leaves=tuple(positions),
        route="alias" if stays else "pieces",
        bytes_moved=sum(
            num_elements(p.box) * leaf.dtype.itemsize
            for leaf in leaves
            for p in leaf.pieces
            if p.sender != p.receiver
        ),
        whole_bytes=sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves),
        source_bytes=total(shard_bytes(x.source_boxes, x.dtype.itemsize) for x in leaves),
        target_bytes=total(shard_bytes(x.target_boxes, x.dtype.itemsize) for x in leaves),
    )


def _growth(group: GroupPlan) -> int:
    """Return the most bytes that a device gains by the group's move."""
    return max(size - group.source_bytes.get(d, 0) for d, size in group.target_bytes.items())


# -- which device lacks which part, and which one sends it: integer boxes, no device values ----------


def boxes(sharding: Sharding, shape: Sequence[int]) -> dict[Device, Box]:
    """Return each device's box, the ranges of indices that it holds, in the sharding's order of devices.

    >>> import jax
    >>> from jaxgoodput.parallel.strategy import Strategy
    >>> list(boxes(Strategy().on(jax.devices()[:1]).replicated, (2, 3)).values())
    [((0, 2), (0, 3))]
    """
    return {
        device: tuple(cut.indices(n)[:2] for cut, n in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(tuple(shape)).items()
    }


def num_elements(box: Box) -> int:
    """Return the number of elements in a box; 1 for a scalar.

    >>> num_elements(((2, 4), (0, 3)))
    6
    """
    return math.prod(stop - start for start, stop in box)


def intersection(one: Box, other: Box) -> Box | None:
    """Return the common part of two boxes (ranges of indices) of one array; None if they do not overlap.

    >>> intersection(((0, 4), (0, 2)), ((2, 6), (0, 8)))
    ((2, 4), (0, 2))
    """
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that cut `box` out of a device's shard, which holds the box `outer`.

    >>> within(((4, 6),), ((4, 8),))
    (slice(0, 2, None),)
    """
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, outer, strict=True))


def overlaps(source: Mapping[Device, Box], target: Mapping[Device, Box]) -> tuple[Overlap, ...]:
    """Return, for every device of `target`, what it holds already and which devices hold the rest.

    Shardings cut an array into boxes that are equal or disjoint, so the pieces are the distinct source boxes,
    each intersected with the target box.
    """
    owners: dict[Box, list[Device]] = {}
    for device, box in source.items():
        owners.setdefault(box, []).append(device)
    found = []
    for receiver, wanted in target.items():
        own = source.get(receiver)
        lacking = []
        for box, senders in owners.items():
            common = intersection(wanted, box) if box != own else None
            if common is not None:
                lacking.append((common, tuple(senders)))
        local = None if own is None else intersection(wanted, own)
        found.append(Overlap(receiver=receiver, local=local, lacking=tuple(lacking)))
    return tuple(found)


def assigned(
    found: Sequence[Overlap], item_bytes: int, sent_bytes: dict[Device, int]
) -> tuple[Piece, ...]:
    """Choose a sender for every piece; add its bytes to `sent_bytes`, which covers many arrays."""
    pieces = []
    for overlap in found:
        if overlap.local is not None:
            pieces.append(Piece(overlap.receiver, overlap.receiver, overlap.local))
        for box, senders in overlap.lacking:
            sender = min(senders, key=lambda device: sent_bytes.get(device, 0))
            sent_bytes[sender] = sent_bytes.get(sender, 0) + num_elements(box) * item_bytes
            pieces.append(Piece(sender, overlap.receiver, box))
    return tuple(pieces)
