"""What follows from an id alone: which host owns its row, and the values that the row starts with.

Both are part of the format of saved tables; a test pins the numbers.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int, Int32

from jaxgoodput._hash import STEP, mixed

WORD = 2**64


def owners(ids: Int[np.ndarray, " n"], hosts: Sequence[int]) -> Int32[np.ndarray, " n"]:
    """Return which of `hosts` owns the row of each id: the one whose hash with the id is the largest.

    If a host leaves, its rows go to the others, and no other row moves. A host that joins takes 1 in N from
    each (Thaler and Ravishankar, "rendezvous hashing", 1998).

    Raises ValueError if there are no hosts, or if one is named twice.
    """
    if not hosts or len(set(hosts)) < len(hosts):
        raise ValueError(
            f"hosts={list(hosts)} must name at least one host, and each host once. Pass the numbers of the "
            "hosts that hold rows, such as range(4)."
        )
    keys = mixed(ids)
    best, most = np.full(len(ids), hosts[0], np.int32), np.zeros(len(ids), np.uint64)
    for host in sorted(hosts):
        weight = mixed(keys ^ np.uint64((host + 1) * STEP % WORD))
        wins = weight > most
        best[wins], most[wins] = host, weight[wins]
    return best


def initial_values(
    ids: Int[np.ndarray, " n"], dim: int, *, seed: int, scale: float
) -> Float32[np.ndarray, "n {dim}"]:
    """Return the embeddings that rows start with: uniform in -scale to scale, a hash of id and seed.

    The result is the same on every machine: multiples of scale * 2^-23, rounded once, and not at all if
    `scale` is a power of two.
    """
    rows = mixed(ids.astype(np.uint64) + np.uint64((seed + 1) * STEP % WORD))
    columns = np.arange(1, -(-dim // 2) + 1, dtype=np.uint64) * np.uint64(STEP)
    bits = mixed(rows[:, None] ^ columns[None, :]).view(np.uint32)[:, :dim]  # two values from each
    whole = (bits >> np.uint32(8)).astype(np.int32) - np.int32(2**23)
    return whole.astype(np.float32) * np.float32(scale * 2.0**-23)
