"""Which device lacks which part of an array, and which device sends it: integer boxes, no device values.

A sharding gives every device a box: an interval per dimension. What a device needs and does not hold
already comes from other devices, one *piece* per part that it lacks. Where several devices hold a part,
the one that has the least to send so far sends it (greedy list scheduling of the send load; what has to
be received is given).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Sharding

Box = tuple[tuple[int, int], ...]  # per dimension: first index, and one past the last
Device = Any  # a jax.Device: hashed and compared, never used


@dataclass(frozen=True)
class Piece:
    """One part of an array that `receiver` needs and `sender` holds; the same device: it stays there."""

    sender: Device
    receiver: Device
    box: Box


@dataclass(frozen=True)
class Overlap:
    """What one receiver needs: parts of its target box, each with every device that holds it."""

    receiver: Device
    local: Box | None  # what it holds already
    lacking: tuple[tuple[Box, tuple[Device, ...]], ...]


def boxes(sharding: Sharding, shape: Sequence[int]) -> dict[Device, Box]:
    """The box of every device, in the order of the sharding's devices.

    >>> import jax
    >>> from jaxgoodput.parallel.strategy import Strategy
    >>> list(boxes(Strategy().on(jax.devices()[:1]).replicated, (2, 3)).values())
    [((0, 2), (0, 3))]
    """
    found = {}
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        found[device] = tuple(
            (cut.start or 0, length if cut.stop is None else cut.stop)
            for cut, length in zip(index, shape, strict=True)
        )
    return found


def num_elements(box: Box) -> int:
    """Elements of a box; 1 for a scalar's.

    >>> num_elements(((2, 4), (0, 3)))
    6
    """
    return math.prod(stop - start for start, stop in box)


def intersection(one: Box, other: Box) -> Box | None:
    """The common part of two boxes of one array, None where there is none.

    >>> intersection(((0, 4), (0, 2)), ((2, 6), (0, 8)))
    ((2, 4), (0, 2))
    """
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where `box` lies in the shard that holds `outer`.

    >>> within(((4, 6),), ((4, 8),))
    (slice(0, 2, None),)
    """
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, outer, strict=True))


def overlaps(source: Mapping[Device, Box], target: Mapping[Device, Box]) -> tuple[Overlap, ...]:
    """For every device of `target`, what it holds already and who holds the rest.

    Shardings cut an array into boxes that are equal or disjoint, so the distinct source boxes, cut
    to the target's, are the pieces.
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
    """The pieces with a sender each; adds what each sends to `sent_bytes`, which spans many arrays."""
    pieces = []
    for overlap in found:
        if overlap.local is not None:
            pieces.append(Piece(overlap.receiver, overlap.receiver, overlap.local))
        for box, senders in overlap.lacking:
            sender = min(senders, key=lambda device: sent_bytes.get(device, 0))
            sent_bytes[sender] = sent_bytes.get(sender, 0) + num_elements(box) * item_bytes
            pieces.append(Piece(sender, overlap.receiver, box))
    return tuple(pieces)
