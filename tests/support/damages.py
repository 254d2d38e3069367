"""Damages of a file's bytes, drawn at random."""

import random
from collections.abc import Mapping, Sequence

PAGE_BYTES = 4096
KINDS = (
    "one bit",
    "one bit of the first page",
    "twenty bits",
    "cut",
    "zeros",
    "rubbish",
    "two pages swapped",
    "tail twice",
)


def _flip(data: bytearray, draw: random.Random, count: int) -> None:
    for _ in range(count):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def damaged(whole: bytes, kind: str, draw: random.Random) -> bytes:
    """Return the bytes of a file, of 512 at least, with a damage of one of `KINDS`."""
    data = bytearray(whole)
    size = PAGE_BYTES if len(data) > PAGE_BYTES else 512
    start = draw.randrange(len(data) // size) * size
    if kind == "one bit":
        _flip(data, draw, 1)
    elif kind == "one bit of the first page":
        _flip(head := data[:200], draw, 1)
        data[:200] = head
    elif kind == "twenty bits":
        _flip(data, draw, 20)
    elif kind == "cut":
        del data[draw.randrange(len(data)) :]
    elif kind == "zeros":
        data[start : start + size] = bytes(size)
    elif kind == "rubbish":
        data[start : start + size] = draw.randbytes(size)
    elif kind == "two pages swapped":
        other = draw.randrange(len(data) // size) * size
        data[start : start + size], data[other : other + size] = (
            data[other : other + size],
            data[start : start + size],
        )
    elif kind == "tail twice":
        data += data[-draw.choice([1, 24, size, 24 + PAGE_BYTES]) :]
    else:
        raise ValueError(kind)
    return bytes(data)


def as_table(
    found: Mapping[tuple[str, str], int], kinds: Sequence[str], outcomes: Sequence[str]
) -> str:
    """Return how often each kind of damage had each outcome as a table, with the sums."""
    lines = [f"| damage | {' | '.join(outcomes)} |", f"|{' --- |' * (1 + len(outcomes))}"]
    rows = {kind: [found.get((kind, told), 0) for told in outcomes] for kind in kinds}
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    lines += [f"| {kind} | {' | '.join(map(str, counts))} |" for kind, counts in rows.items()]
    return "\n".join(lines)
