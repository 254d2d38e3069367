"""Steps on the CPU find the pages that earlier ones freed; other backends are left alone."""

import subprocess
import sys
import textwrap

import pytest
from jaxgoodput.train.pages import keep_freed_pages

from jaxgoodput.train import pages

# In a process of its own, because the C library has no way back.
FAULTS = """
    import resource, sys
    import numpy as np
    from jaxgoodput.train.pages import keep_freed_pages

    assert keep_freed_pages("cpu") == (sys.argv[1] == "yes")

    def faults(times):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(times):
            np.ones(2**22).sum()  # 32 MiB: 8192 pages, or 16 huge ones
        return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / times

    faults(3)
    print(faults(20))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
@pytest.mark.parametrize("told, setting", [("yes", None), ("no", pages.SETTINGS[0])])
def test_freed_pages_are_used_again_unless_the_user_has_said_otherwise(told, setting):
    environ = {"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin"}
    if setting is not None:
        environ[setting] = "1048576"  # a block of 32 MiB is then mapped and unmapped each time
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FAULTS), told],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (float(done.stdout) < 8) == (told == "yes"), done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_an_accelerators_host_memory_is_left_alone(monkeypatch):
    calls = []

    class Library:
        def mallopt(self, name, value):
            calls.append((name, value))
            return int(value <= 1 << 25 or name != pages.M_MMAP_THRESHOLD)

    monkeypatch.setattr(pages.ctypes, "CDLL", lambda name: Library())
    assert not keep_freed_pages("gpu", {})
    assert not keep_freed_pages("cpu", {pages.SETTINGS[1]: "1"})
    assert not keep_freed_pages("cpu", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})
    assert not calls
    assert keep_freed_pages("cpu", {}), "an old version takes the smaller threshold"
    assert calls[:2] == [(pages.M_MMAP_THRESHOLD, size) for size in pages.LARGEST]
    assert dict(calls[2:]) == pages.KEEP
