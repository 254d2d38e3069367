"""Memory that a compiled program needs, by XLA's own analysis, and memory that a device has."""

import os
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxgoodput.goodput.memory import StepBytes


def step_bytes(executable: jax.stages.Compiled) -> StepBytes:
    """Return the bytes that one execution needs, per device."""
    stats: Any = executable.memory_analysis()  # backends have different types
    return StepBytes(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
    )


def device_budget(device: Any, *, num_local_devices: int, stated: int | None, margin: float) -> int:
    """Return the bytes that a step may use on `device`.

    `stated` (bytes) wins. Otherwise it is the backend's own limit or, if it reports none (CPU), an equal
    share of half the host's memory; less the fraction `margin` for memory that XLA does not count.
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
    """Return the smallest budget of all processes, so that all plan the same. All must call it."""
    everyone = multihost_utils.process_allgather(np.float32(budget))
    return int(np.min(everyone))
