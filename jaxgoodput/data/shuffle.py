"""A permutation that need not be stored: any place of an epoch's order is computed from the key alone.

It is a Feistel network over pairs (left, right), place = left * num_right + right, whose rounds add a hash of
one half to the other half (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Every round is
invertible, so the whole is a permutation of all pairs. The number of pairs exceeds the number of places by at
most twice the square root of the size. A place that maps to a surplus pair goes through the network again,
until it does not; the result is still a permutation. It is part of the checkpoint format, and a test pins it.
"""

import math

import numpy as np
from jaxtyping import Int, UInt64

# With fewer rounds, some orders of very small data sets come measurably more often than others.
NUM_ROUNDS = 16
HALF = np.uint64(32)
# Odd multipliers with well-mixed bits, from SplitMix64.
FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def shuffled(
    places: Int[np.ndarray, " n"], size: int, *, seed: int, epoch: int
) -> Int[np.ndarray, " n"]:
    """Return where the permutation of `range(size)` for (seed, epoch) sends each of `places`.

    Memory and time depend on the number of places only, not on the size (up to 2^63 - 1).

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
    """Apply all rounds of the cipher once to numbers below `sides[0] * sides[1]`, a permutation of them."""
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
    """Return `half` plus a hash of `other`, modulo `side`, which is below 2^32."""
    mixed = other + key
    mixed *= FACTORS[0]
    mixed ^= mixed >> HALF
    mixed *= FACTORS[1]
    mixed >>= HALF  # keep the high bits, which are mixed best
    mixed *= side
    mixed >>= HALF  # now below `side`, without a division
    mixed += half
    # `mixed` is below 2 * side. If it is below `side`, the unsigned difference wraps around to a huge number.
    return np.minimum(mixed, mixed - side, out=mixed)
