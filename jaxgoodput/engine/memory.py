"""How large a micro-batch fits, from XLA's own analysis of the compiled step, before it ever runs.

The bytes of a step grow almost linearly with the micro-batch: two compiled sizes predict the others,
and every size is checked against its own analysis before it is used, so a wrong prediction costs a
compilation and never an allocation failure.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.experimental import multihost_utils


class TooLarge(ValueError):
    """No step of the model fits into memory under a strategy."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes per device that one execution needs."""

    arguments: int  # state and batch
    outputs: int  # what is not written in place
    temporaries: int  # activations, gradients

    @property
    def peak(self) -> int:
        """All three: an upper bound on what the device holds during the step."""
        return self.arguments + self.outputs + self.temporaries


def step_bytes(compiled: Any) -> StepBytes:
    """The analysis of a compiled executable, per device."""
    stats = compiled.memory_analysis()
    return StepBytes(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
    )


def device_budget(device: Any, *, num_local_devices: int, stated: int | None, margin: float) -> int:
    """Bytes that a step may use on `device`.

    `stated` (bytes) wins. Otherwise the backend's own limit, or, where it reports none (CPU), an
    equal share of half the host's memory; less the fraction `margin` for what XLA does not count.
    """
    if stated is not None:
        if stated <= 0:
            raise ValueError(
                f"memory_bytes must be positive; got {stated}. Leave it None to use the device's "
                "own limit."
            )
        return stated
    reported = (device.memory_stats() or {}).get("bytes_limit")
    if reported is None:
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        reported = host // 2 // num_local_devices
    return int(reported * (1 - margin))


def least(budget: int) -> int:
    """The least budget of all processes, so that all of them plan the same; they call it together."""
    everyone = multihost_utils.process_allgather(np.float32(budget))
    return int(np.min(everyone))


def largest_that_fits(sizes: Sequence[int], known: dict[int, StepBytes], budget: int) -> int:
    """The largest of `sizes` whose bytes, known or extrapolated from the known, are within budget.

    Returns 0 where none fits. With one known size, bytes beyond the arguments are taken as
    proportional to the size. Raises ValueError where none is known.

    >>> one = {8: StepBytes(arguments=100, outputs=0, temporaries=80)}
    >>> largest_that_fits([4, 8, 16, 32], one, budget=300)
    16
    """
    if not known:
        raise ValueError("no compiled size to predict from; compile one micro-batch size first.")
    return max((s for s in sizes if predicted_peak(s, known) <= budget), default=0)


def predicted_peak(size: int, known: dict[int, StepBytes]) -> int:
    """Peak bytes at `size`: its own analysis, or a line through the two nearest known sizes."""
    if size in known:
        return known[size].peak
    near = sorted(known, key=lambda s: abs(s - size))[:2]
    if len(near) == 1:
        base = known[near[0]]
        moving = base.outputs + base.temporaries
        return base.arguments + int(moving * size / near[0])
    a, b = sorted(near)
    slope = (known[b].peak - known[a].peak) / (b - a)
    return int(known[a].peak + slope * (size - a))
