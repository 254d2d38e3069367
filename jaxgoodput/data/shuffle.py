"""A permutation that nobody has to store: where any place of an epoch goes, from the key alone.

A Feistel network over pairs (left, right), place = left * num_right + right, whose rounds add a hash of
one half to the other (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Every round can
be undone, so the whole is a permutation of all pairs. There are at most twice the square root of the size
more pairs than places; a place that lands on one of those goes through again until it does not, which
keeps it a permutation. What it gives is part of the checkpoint format: a test pins it.
"""

import math

import numpy as np
from jaxtyping import Int, UInt64

# Fewer show in data sets of a handful of samples, some of whose orders then come more often than others.
NUM_ROUNDS = 16
HALF = np.uint64(32)
# Odd, without a pattern: those of SplitMix64.
FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def shuffled(
    places: Int[np.ndarray, " n"], size: int, *, seed: int, epoch: int
) -> Int[np.ndarray, " n"]:
    """Where the permutation of `range(size)` drawn from (seed, epoch) takes each of `places`.

    Memory and time are those of `places`, whatever the size (up to 2^63 - 1).

    >>> shuffled(np.arange(10), 10, seed=0, epoch=0).tolist()
    [0, 5, 6, 9, 2, 7, 4, 3, 1, 8]
    """
    num_left = math.isqrt(size - 1) + 1
    num_right = -(-size // num_left)
    sides = np.uint64(num_left), np.uint64(num_right)
    keys = np.random.SeedSequence(seed, spawn_key=(epoch,)).generate_state(NUM_ROUNDS, np.uint64)
    found = _through(places.astype(np.uint64), sides, keys)
    while len(outside := np.flatnonzero(found >= size)):
        found[outside] = _through(found[outside], sides, keys)
    return found.astype(np.int64)


def _through(
    pairs: UInt64[np.ndarray, " n"],
    sides: tuple[np.uint64, np.uint64],
    keys: UInt64[np.ndarray, " rounds"],
) -> UInt64[np.ndarray, " n"]:
    """All rounds once: a permutation of `range(sides[0] * sides[1])`."""
    halves = list(np.divmod(pairs, sides[1]))
    for i, key in enumerate(keys):
        here, other = i % 2, 1 - i % 2
        halves[here] = _added(halves[here], halves[other], key, sides[here])
    return halves[0] * sides[1] + halves[1]


def _added(
    half: UInt64[np.ndarray, " n"],
    other: UInt64[np.ndarray, " n"],
    key: np.uint64,
    side: np.uint64,
) -> UInt64[np.ndarray, " n"]:
    """(half + hash of other) modulo `side`, which is below 2^32."""
    mixed = other + key
    mixed *= FACTORS[0]
    mixed ^= mixed >> HALF
    mixed *= FACTORS[1]
    mixed >>= HALF  # its better half
    mixed *= side
    mixed >>= HALF  # below side, without a division
    mixed += half
    # In unsigned numbers, where it is below side, what is left after taking side away is huge.
    return np.minimum(mixed, mixed - side, out=mixed)
