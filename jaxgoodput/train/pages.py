"""On CPU backends, memory that a step frees is kept for the next step.

XLA:CPU allocates a step's temporaries with `malloc` and frees them at its end. glibc gives large blocks
back to the kernel at once, so every step gets fresh pages, each zeroed at its first touch: 13,000 page
faults and 40 % of the step at 8192 samples of the recommender. Told to keep what is freed, there are
300. Blocks over 64 MiB still come and go: keeping them too would need a single arena for all threads,
and then the compiler's threads wait for each other (start-up 4.0 -> 4.9 s, and slower steps after it).
"""

import ctypes
import os
import sys
from collections.abc import Mapping

from absl import logging

# <malloc.h>
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST = (1 << 30, 1 << 25)  # blocks to keep, bytes; older versions refuse more than 32 MiB
KEEP = {M_TRIM_THRESHOLD: (1 << 31) - 1, M_TOP_PAD: 1 << 26}
# Whoever sets one of these has made up his mind.
SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


def _is_decided(environ: Mapping[str, str]) -> bool:
    return any(s in environ for s in SETTINGS) or "glibc.malloc" in environ.get(
        "GLIBC_TUNABLES", ""
    )


def keep_freed_pages(platform: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Ask the C library to keep freed memory; True where it will.

    For the whole process and for good: glibc has no way back to its own moving threshold. Left alone
    where steps do not run on the CPU (`platform` of their devices), where the C library is not glibc,
    and where the user has set one of its variables, `MALLOC_TRIM_THRESHOLD_=131072` for instance.
    """
    if platform != "cpu" or sys.platform != "linux" or _is_decided(environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    # The threshold first: without it, the others would only freeze it where it is.
    if mallopt is None or not any(mallopt(M_MMAP_THRESHOLD, size) == 1 for size in LARGEST):
        logging.info("the C library does not keep freed memory; steps will take fresh pages")
        return False
    for name, value in KEEP.items():
        mallopt(name, value)
    return True
