"""What follows from an id alone: whose row it is, and with what the row begins.

All of it is part of the format of tables: a test pins the numbers.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int, Int32

from jaxgoodput._hash import STEP, mixed

WORD = 2**64


def owners(ids: Int[np.ndarray, " n"], hosts: Sequence[int]) -> Int32[np.ndarray, " n"]:
    """Which of `hosts` has the row of each id: the one whose hash together with the id's is the largest.

    A host that leaves gives its rows to the others and changes nothing between those; one that comes
    takes 1 in N from each (Thaler and Ravishankar, "rendezvous hashing", 1998).

    Raises ValueError where there are no hosts, or one is named twice.
    """
    if not hosts or len(set(hosts)) < len(hosts):
        raise ValueError(
            f"hosts={list(hosts)}: rows need at least one host, and each may be named once. Pass the numbers "
            "of those that hold rows, such as range(4)."
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
    """What the rows of `ids` begin with: numbers spread evenly over -scale to scale.

    Exact on every machine: multiples of scale * 2^-23, without a rounding in between where `scale` is a
    power of two and with one where it is not.
    """
    rows = mixed(ids.astype(np.uint64) + np.uint64((seed + 1) * STEP % WORD))
    places = np.arange(1, -(-dim // 2) + 1, dtype=np.uint64) * np.uint64(STEP)
    bits = mixed(rows[:, None] ^ places[None, :]).view(np.uint32)[:, :dim]  # two numbers from each
    whole = (bits >> np.uint32(8)).astype(np.int32) - np.int32(2**23)
    return whole.astype(np.float32) * np.float32(scale * 2.0**-23)
