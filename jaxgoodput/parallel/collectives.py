"""What collectives in a compiled program bring to its devices, from inside their node and from other nodes.

XLA's memory analysis reports temporaries but no traffic, and its cost analysis mixes traffic with memory. The
optimised HLO names every collective with its result shape and its groups, which is enough: it gives the bytes
that arrive on a device and were not there before.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Received:
    """Bytes that arrive on all devices together."""

    inside: float = 0.0
    """From devices of the same node."""
    between: float = 0.0
    """From other nodes."""

    @property
    def total(self) -> float:
        """Return the bytes from anywhere."""
        return self.inside + self.between

    def times(self, factor: float) -> "Received":
        """Return a multiple, such as the part of a device or a loop's runs."""
        return Received(self.inside * factor, self.between * factor)

    def plus(self, other: "Received") -> "Received":
        """Return the sum."""
        return Received(self.inside + other.inside, self.between + other.between)


def node_of(device: Any) -> int:
    """Return the number of a device's node, or of its slice of TPUs: inside it, links are fast."""
    if getattr(device, "platform", "") == "tpu":
        return getattr(device, "slice_index", 0) or 0
    return getattr(device, "process_index", 0)


# "%name = f32[4,8]{1,0} all-gather(...), replica_groups={{0,1},{2,3}}, ..." and tuple results.
_OPERATION = re.compile(
    r"= (?P<result>\(.*?\)|\S+) "
    r"(?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all)"
    r"(?P<start>-start)?\((?P<rest>.*)$",
    re.MULTILINE,
)
_NAMED = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all"
    r"|collective-broadcast)(-start)?\("
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d*[a-z0-9]*)\[(?P<dims>[\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{(?P<groups>(\{[\d,]*\},?)*)\}")
_ARRANGED = r"\[(?P<dims>[\d,]+)\](T\((?P<order>[\d,]+)\))?"
_IOTA = re.compile(rf"replica_groups=\[(?P<count>\d+),(?P<size>\d+)\]<={_ARRANGED}")
# mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}
_MESH = re.compile(
    rf"replica_groups=mesh\[(?P<axes>[^\]]*)\](, device_ids=\(({_ARRANGED}|(?P<listed>[\d,]+))\))? "
    r"\{(?P<over>[^}]*)\}"
)
_AXIS = re.compile(r"'([^']+)'(:\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{(?P<pairs>.*?)\}\}")
_BITS = re.compile(r"\d+")


def received_bytes(hlo_text: str, num_devices: int) -> int:
    """Return the bytes that all `num_devices` together receive in one run of a program, loops counted once.

    Raises ValueError for an unknown collective, which no jitted identity holds.

    >>> line = "%x = f32[8]{0} all-gather(f32[2]{0} %p), replica_groups=[2,4]<=[8], dimensions={0}"
    >>> received_bytes(line, 8)
    192
    """
    return round(received(hlo_text, [0] * num_devices).total)


def received(hlo_text: str, nodes: Sequence[int]) -> Received:
    """Return what arrives on all devices together in one run of a program, loops counted once.

    `nodes` has the node of each device, in the order of the program's device numbers. What several devices of
    a node need from another node crosses once, a part to each, and is handed on inside: the least that any
    algorithm sends between nodes. Raises ValueError for an unknown collective.

    >>> line = "%x = f32[8]{0} all-gather(f32[2]{0} %p), replica_groups=[1,4]<=[4], dimensions={0}"
    >>> received(line, [0, 0, 1, 1])
    Received(inside=64.0, between=32.0)
    """
    operations = list(_OPERATION.finditer(hlo_text))
    read = {found.start("kind") for found in operations}
    unread = [found[1] for found in _NAMED.finditer(hlo_text) if found.start(1) not in read]
    if unread:
        raise ValueError(
            f"this program holds a {unread[0]} in a form that is not known, so the bytes that it sends "
            "cannot be counted. Use a version of jax that this package supports."
        )
    total = Received()
    for found in operations:
        total = total.plus(_received_by(found, nodes))
    return total


def _received_by(found: re.Match[str], nodes: Sequence[int]) -> Received:
    """Return the bytes that one collective brings to all devices."""
    kind, rest, result = found["kind"], found["rest"], float(result_bytes(found))
    if kind == "collective-permute":
        return _permuted(found, result, nodes)
    groups = _groups(rest, len(nodes))
    total = Received()
    for group in groups:
        size = len(group)
        # Bytes of one device's part in a whole that each of the group has, or had, all of.
        part = result if kind == "reduce-scatter" else result / size
        members = np.unique([nodes[device] for device in group], return_counts=True)[1]
        if kind in ("all-gather", "reduce-scatter"):
            total = total.plus(_shared(part, size, members))
        elif kind == "all-reduce":
            total = total.plus(_shared(part, size, members).times(2.0))
        elif kind == "all-to-all":
            total = total.plus(_exchanged(part, size, members))
        else:
            raise ValueError(
                f"how much a {kind} sends is decided while the program runs, so the bytes that it sends "
                "cannot be counted beforehand. jax.lax.all_to_all sends blocks of one size, which can."
            )
    return total


def _permuted(found: re.Match[str], result: float, nodes: Sequence[int]) -> Received:
    pairs = _PAIRS.search(found["rest"])
    if pairs is None:
        raise ValueError(
            f"no source_target_pairs in {found[0]!r}: XLA writes programs in another form here. "
            "Use a version of jax that this package supports."
        )
    numbers = [int(n) for n in re.findall(r"\d+", pairs["pairs"])]
    moved = [(a, b) for a, b in zip(numbers[::2], numbers[1::2], strict=True) if a != b]
    between = sum(nodes[a] != nodes[b] for a, b in moved)
    return Received(result * (len(moved) - between), result * between)


def _shared(part: float, size: int, members: np.ndarray) -> Received:
    """Return what arrives if every device gets all other parts; `members` has the devices of each node."""
    between = float(sum(part * (size - members))) if len(members) > 1 else 0.0
    return Received(part * size * (size - 1) - between, between)


def _exchanged(part: float, size: int, members: np.ndarray) -> Received:
    """Return what arrives if every device gets a part of its own from every other."""
    between = float(sum(part * members * (size - members)))
    return Received(part * size * (size - 1) - between, between)


def result_bytes(found: re.Match[str]) -> int:
    """Return the bytes of one device's result, without what an asynchronous form returns besides."""
    text = found["result"]
    if found["start"] and found["kind"] != "all-reduce":
        # The start returns its operands too: (operand, result, contexts), or for several operands
        # ((operands), (results)).
        text = _elements(text)[1]
    return shape_bytes(text)


def _elements(tuple_shape: str) -> list[str]:
    """Return the shapes in a tuple.

    >>> _elements("((f32[2]{0}, s32[]), f32[16]{0:T(8,128)})")
    ['(f32[2]{0}, s32[])', 'f32[16]{0:T(8,128)}']
    """
    found, depth = [""], 0
    for letter in tuple_shape[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [one.strip() for one in found]


def shape_bytes(text: str) -> int:
    """Return the bytes of the arrays that a shape in HLO names.

    >>> shape_bytes("(bf16[4,8]{1,0}, pred[3]{0}, f32[])")
    71
    """
    return sum(_array_bytes(shape) for shape in _SHAPE.finditer(text))


def _array_bytes(shape: re.Match[str]) -> int:
    dims = [int(n) for n in shape["dims"].split(",") if n]
    bits = _BITS.search(shape["dtype"])
    width = 8 if bits is None or shape["dtype"] == "pred" else int(bits[0])
    return math.prod(dims) * width // 8


def _groups(rest: str, num_devices: int) -> list[list[int]]:
    """Return the devices of each group of a collective; one of all devices if it names none."""
    if found := _IOTA.search(rest):
        return _arranged(found["dims"], found["order"]).reshape(-1, int(found["size"])).tolist()
    if found := _MESH.search(rest):
        return _mesh_groups(found)
    listed = _LISTED.search(rest)
    if listed is None and "replica_groups=" in rest:
        raise ValueError(
            f"replica groups in a form that is not known: {rest[rest.index('replica_groups=') :][:80]!r}. "
            "Use a version of jax that this package supports."
        )
    if listed is None or not listed["groups"]:
        return [list(range(num_devices))]
    groups = re.findall(r"\{([\d,]*)\}", listed["groups"])
    return [[int(n) for n in group.split(",")] for group in groups]


def _mesh_groups(found: re.Match[str]) -> list[list[int]]:
    """Return the groups along some axes of a mesh.

    An axis may be split: 'x':(2)4 are the 4 pieces that follow one another within each of its first 2.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found["axes"])}
    devices = _mesh_devices(found, math.prod(sizes.values()))
    over = {name: (before, part) for name, _, before, part in _AXIS.findall(found["over"])}
    pieces = [piece for name, size in sizes.items() for piece in _pieces(size, over.get(name))]
    order = sorted(range(len(pieces)), key=lambda axis: pieces[axis][1])
    size = math.prod(piece for piece, is_along in pieces if is_along)
    return (
        devices.reshape([piece for piece, _ in pieces]).transpose(order).reshape(-1, size).tolist()
    )


def _mesh_devices(found: re.Match[str], count: int) -> np.ndarray:
    """Return the device numbers of a mesh, in its own order."""
    if found["dims"]:
        return _arranged(found["dims"], found["order"])
    return np.array(found["listed"].split(","), int) if found["listed"] else np.arange(count)


def _pieces(size: int, taken: tuple[str, str] | None) -> list[tuple[int, bool]]:
    """Return the pieces of an axis, and whether the groups run along each.

    `taken` are the numbers of ('2', '4') if they run along the 4 pieces within each of its first 2, two empty
    texts for the whole axis, and None if they do not run along it.
    """
    if taken is None or not taken[0]:
        return [(size, taken is not None)]
    before, part = int(taken[0]), int(taken[1])
    return [(before, False), (part, True), (size // before // part, False)]


def _arranged(dims: str, order: str | None) -> np.ndarray:
    """Return device numbers in the order that [dims]T(order) stands for."""
    lengths = [int(n) for n in dims.split(",")]
    numbers = np.arange(math.prod(lengths)).reshape(lengths)
    return numbers.transpose([int(n) for n in order.split(",")] if order else None).reshape(-1)
