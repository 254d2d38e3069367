"""How many bytes a compiled program sends between devices, read from its own text.

XLA's memory analysis tells temporaries but not traffic, and its cost analysis mixes traffic with
memory. The optimised HLO names every collective with its result shape and its groups, which is enough:
the bytes that arrive on a device and did not lie there before.
"""

import math
import re

import numpy as np

# "%name = f32[4,8]{1,0} all-gather(...), replica_groups={{0,1},{2,3}}, ..." and tuple results.
_OPERATION = re.compile(
    r"= (?P<result>\(.*?\)|\S+) "
    r"(?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all)"
    r"(?P<start>-start)?\((?P<rest>.*)$",
    re.MULTILINE,
)
_NAMED = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast)"
    r"(-start)?\("
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d*[a-z0-9]*)\[(?P<dims>[\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{(?P<groups>\{.*?\})\}")
_IOTA = re.compile(r"replica_groups=\[(?P<count>\d+),(?P<size>\d+)\]<=")
_PAIRS = re.compile(r"source_target_pairs=\{(?P<pairs>.*?)\}\}")
_BITS = re.compile(r"\d+")


def received_bytes(hlo_text: str, num_devices: int) -> int:
    """Bytes that arrive on all `num_devices` together in one run of the program, loops counted once.

    Raises ValueError for a collective that this file does not know, which no jitted identity holds.

    >>> line = "%x = f32[8]{0} all-gather(f32[2]{0} %p), replica_groups=[2,4]<=[8], dimensions={0}"
    >>> received_bytes(line, 8)
    192
    """
    arrived = 0
    operations = list(_OPERATION.finditer(hlo_text))
    if len(operations) != len(_NAMED.findall(hlo_text)):
        raise ValueError(
            "this program holds collectives in a form that is not known here, so its traffic cannot be "
            'told. Use Move.compile(..., routes=("alias", "copies", "pieces")).'
        )
    for found in operations:
        kind, rest = found["kind"], found["rest"]
        text = found["result"]
        if found["start"] and kind in ("all-gather", "collective-permute"):
            # The asynchronous form returns its operands too: (operand, result, contexts), or, of
            # several, ((operands), (results)).
            several = re.findall(r"\(([^()]*)\)", text[1:-1]) if text.startswith("((") else []
            text = several[1] if several else _SHAPE.findall(text)[1:2]
            text = text if isinstance(text, str) else "{}[{}]".format(*text[0])
        result = sum(_shape_bytes(shape) for shape in _SHAPE.finditer(text))
        if kind == "collective-permute":
            pairs = _PAIRS.search(rest)
            if pairs is None:
                raise ValueError(
                    f"no source_target_pairs in {found[0]!r}: this HLO is not known here."
                )
            numbers = [int(n) for n in re.findall(r"\d+", pairs["pairs"])]
            moves = sum(a != b for a, b in zip(numbers[::2], numbers[1::2], strict=True))
            arrived += result * moves
            continue
        size = _group_size(rest, num_devices)
        if kind in ("all-gather", "all-to-all"):
            # Each holds one part in `size` of its result already.
            arrived += num_devices * result * (size - 1) // size
        elif kind == "all-reduce":
            arrived += 2 * num_devices * result * (size - 1) // size
        elif kind == "reduce-scatter":
            arrived += num_devices * result * (size - 1)
        else:
            raise ValueError(f"{kind} has no fixed traffic: {found[0]!r}.")
    return arrived


def _shape_bytes(shape: re.Match[str]) -> int:
    dims = [int(n) for n in shape["dims"].split(",") if n]
    bits = _BITS.search(shape["dtype"])
    width = 8 if bits is None or shape["dtype"] == "pred" else int(bits[0])
    return math.prod(dims) * width // 8


def _group_size(rest: str, num_devices: int) -> int:
    iota = _IOTA.search(rest)
    if iota is not None:
        return int(iota["size"])
    listed = _LISTED.search(rest)
    if listed is None:
        return num_devices
    groups = re.findall(r"\{([\d,]*)\}", listed["groups"])
    sizes = np.unique([len(group.split(",")) for group in groups])
    return int(sizes.max())
