"""Memory that a compiled program needs, by XLA's own analysis, and memory that a device has."""

import errno
import os
import pathlib
import re
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

# What XLA's allocators, the host's, the drivers of GPUs and their libraries, and Python say.
_SHORTAGE = re.compile(
    r"RESOURCE_EXHAUSTED|out[ _]of[ _]memory|bad_alloc|ALLOC_FAILED|^MemoryError", re.IGNORECASE
)


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
        if (said := _shortage_of(error)) is not None:
            return said
        error = error.__cause__
    return None


def _shortage_of(error: BaseException) -> str | None:
    lines = str(error).splitlines() or [""]
    if isinstance(error, MemoryError):
        return lines[0] or "the host has no memory left"
    if isinstance(error, OSError):
        return lines[0] if error.errno == errno.ENOMEM else None
    # XLA reports a shortage under other codes, too: INTERNAL while it dispatches, UNKNOWN if a library of its
    # own has none left, and INTERNAL, with a traceback that ends in MemoryError, if a callback has none.
    if isinstance(error, jax.errors.JaxRuntimeError):
        return next((line for line in (lines[0], lines[-1]) if _SHORTAGE.search(line)), None)
    # Copying an array raises XLA's report as a ValueError. A full disk is a ValueError of the same code.
    is_xla = lines[0].startswith("RESOURCE_EXHAUSTED: Out of memory")
    return lines[0] if isinstance(error, ValueError) and is_xla else None


def least(budget: int) -> int:
    """Return the smallest budget of all processes, so that all plan the same. All must call it."""
    everyone = multihost_utils.process_allgather(np.float32(budget))
    return int(np.min(everyone))
