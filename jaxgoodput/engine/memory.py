"""Memory that a compiled program needs, by XLA's own analysis, and memory that a device has."""

import os
import pathlib
import resource
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxgoodput.goodput.memory import StepBytes
from jaxgoodput.parallel.move import MoveDoesNotFit

# What Linux keeps a container's limit in, by versions of control groups.
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class OutOfMemory(MemoryError):
    """A device or the host had too little memory; the message says for what, and what needs less."""


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
    share of half the memory that the process may use; less the fraction `margin` for memory that XLA does not
    count.
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
        reported = host_bytes() // 2 // num_local_devices
    return int(reported * (1 - margin))


def host_bytes() -> int:
    """Return the memory that this process may use: the host's, or the limit of its container or shell."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits()])


def _limits() -> Iterator[int]:
    """Yield the limits that are set on this process, by its container and by `ulimit -v`."""
    for name in _CGROUP_LIMITS:
        path = pathlib.Path(name)
        text = path.read_text().strip() if path.is_file() else "max"
        if text != "max":
            yield int(text)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        yield soft


def shortage_in(error: BaseException | None) -> str | None:
    """Return what an error says of memory that ran out, on a device or the host; None for other errors."""
    while error is not None:
        if isinstance(error, OutOfMemory | MoveDoesNotFit):
            return None  # it is explained already
        text = str(error).partition("\n")[0]
        if isinstance(error, MemoryError):
            return text or "the host has no memory left"
        # XLA:CPU reports it as an internal error if a computation cannot be dispatched for want of memory.
        is_said = "RESOURCE_EXHAUSTED" in text or "Out of memory" in text
        if isinstance(error, jax.errors.JaxRuntimeError) and is_said:
            return text
        error = error.__cause__
    return None


def least(budget: int) -> int:
    """Return the smallest budget of all processes, so that all plan the same. All must call it."""
    everyone = multihost_utils.process_allgather(np.float32(budget))
    return int(np.min(everyone))
