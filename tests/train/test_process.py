"""What a run may change in the process for good, and only where it is asked to."""

import subprocess
import sys
import textwrap

import pytest

from jaxgoodput.train.process import keep_freed_pages

# In a process of its own, because the C library has no way back.
FAULTS = """
    import resource, sys
    import numpy as np
    from jaxgoodput.train.process import keep_freed_pages

    assert sys.argv[1] == "no" or keep_freed_pages("cpu")

    def faults(times):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(times):
            np.ones(2**22).sum()  # 32 MiB: 8192 pages, or 16 huge ones
        return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / times

    faults(3)
    print(faults(20))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
@pytest.mark.parametrize("told", ["yes", "no"])
def test_freed_pages_are_used_again_where_that_is_asked_for(told):
    # A block of 32 MiB is else mapped and unmapped each time.
    environ = {"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin", "MALLOC_MMAP_THRESHOLD_": "1048576"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FAULTS), told],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (float(done.stdout) < 8) == (told == "yes"), done.stdout


def test_an_accelerators_host_memory_is_left_alone():
    assert not keep_freed_pages("gpu")
