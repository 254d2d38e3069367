"""What a run may change in the process for good, and only where it is asked to."""

import asyncio
import subprocess
import sys
import textwrap
import threading

import pytest
import tensorstore

from jaxgoodput.train.process import keep_freed_pages, quiet_writer

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


class FailsInTheEnd:
    def __del__(self):
        raise RuntimeError("Event loop is closed")


def test_only_what_tensorstore_says_too_late_is_hidden(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: told.append(type(one.object)))

    def end_late():
        """A write ends after the event loop that waited for it was closed, as after one that failed."""
        promise, future = tensorstore.Promise.new()

        async def wait():
            await future

        async def begin():
            waiting = asyncio.ensure_future(wait())
            await asyncio.sleep(0.01)
            return waiting

        loop = asyncio.new_event_loop()
        waiting = loop.run_until_complete(begin())
        waiting._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
        loop.close()
        thread = threading.Thread(target=promise.set_result, args=(1,))
        thread.start()
        thread.join()

    with quiet_writer():
        end_late()
        assert told == []
        FailsInTheEnd()
        # It is printed with the name of what raised it, a function.
        assert len(told) == 1 and told.pop() is not type(None)
    end_late()
    assert told == [type(None)]
