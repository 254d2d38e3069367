"""A hash of integers that never changes, so that files and checkpoints may depend on it."""

import numpy as np
from jaxtyping import Integer, UInt64

# Odd constants without a pattern, from SplitMix64.
STEP = 0x9E3779B97F4A7C15
FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def mixed(numbers: Integer[np.ndarray, " *shape"]) -> UInt64[np.ndarray, " *shape"]:
    """Return the hash of each number: a permutation of 64-bit numbers that mixes all bits.

    >>> mixed(np.arange(2)).tolist()
    [0, 6238072747940578789]
    """
    x = numbers.astype(np.uint64)
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        x ^= x >> shift
        x *= factor
    x ^= x >> SHIFTS[2]
    return x
