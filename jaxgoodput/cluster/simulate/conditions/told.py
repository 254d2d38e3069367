"""What jobs tell of themselves and is not so: every entry of a table is wrong by a factor of its own.

The factor belongs to a job and a shape and never changes, so that no later measurement of another shape
repairs it, and no average over time does.
"""

import math
import zlib

import numpy as np

from jaxgoodput.specs import Shape


def told_factor(deviation: float, seed: int, job: int, shape: Shape) -> float:
    """The log-normal factor of a job's entry for a shape; `deviation` is that of its log.

    The same arguments give the same factor, whatever else was asked before, and the normal draw behind it
    does not depend on the deviation.

    >>> told_factor(0.0, 0, 3, Shape("t4", 1, 2))
    1.0
    """
    of_kind = zlib.crc32(shape.kind.encode())
    rng = np.random.default_rng(
        [seed, 0x746F6C64, job, of_kind, shape.num_nodes, shape.num_devices]
    )
    return math.exp(deviation * float(rng.standard_normal()))
