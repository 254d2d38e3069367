"""Lets XLA's compiler yield to training: its threads get a lower priority than the threads of steps.

XLA compiles on threads of its own, as many as there are cores, with the priority of the threads that execute.
On two cores, a step of a small decoder took twice as long while another program was compiled. On more than
eight cores some of them are not found; there they are in the way of fewer.

XLA names no thread of its compiler. They are found by their work: the native threads that use the processor
while a throw-away program is compiled, before anything is executed. Linux only. Their priority stays low when
training is over, because an ordinary user may not raise one. That costs nothing unless something else wants
the processors.
"""

import functools
import itertools
import math
import os
import pathlib
import threading
import time
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

NICENESS = 4  # of nice(1): a thread of normal priority gets two and a half times as much of a core
LEAST_S = 5e-4  # of a core, by which a thread has had a part in something
IDLE_S = 0.02

TASKS = pathlib.Path("/proc/self/task")


@functools.cache  # in a later run something may be executing
def make_compiler_yield() -> None:
    """Lower the priority of XLA's compiler threads, once in a process, before anything is executed."""
    if busy_seconds():
        lower_priority(compiler_threads())


def compiler_threads() -> set[int]:
    """Return the native ids of the threads that work while a program is compiled, and otherwise do not."""
    marks = [busy_seconds()]
    for do in (_wait, _compile_throwaway, _wait):
        do()
        marks.append(busy_seconds())
    before, meanwhile, after = (working(a, b) for a, b in itertools.pairwise(marks))
    return meanwhile - before - after


def busy_seconds(tasks: pathlib.Path = TASKS) -> dict[int, float]:
    """Return the processor seconds of each thread of this process by native id; empty if unknown."""
    found = {}
    for path in tasks.glob("*/schedstat"):
        try:
            found[int(path.parent.name)] = int(path.read_text().split()[0]) * 1e-9
        except (OSError, IndexError):  # it has ended, or the kernel keeps no such account
            continue
    return found


def working(before: Mapping[int, float], after: Mapping[int, float]) -> set[int]:
    """Return the threads that have worked in between, without those of Python."""
    python = {x.native_id for x in threading.enumerate()}
    grown = {one: seconds - before.get(one, 0.0) for one, seconds in after.items()}
    return {one for one, seconds in grown.items() if seconds >= LEAST_S and one not in python}


def lower_priority(threads: Iterable[int], niceness: int = NICENESS) -> None:
    """Lower the priority of threads of this process; one that has ended is left out."""
    for one in threads:
        try:
            if os.getpriority(os.PRIO_PROCESS, one) < niceness:
                os.setpriority(os.PRIO_PROCESS, one, niceness)
        except ProcessLookupError:
            continue


def _wait() -> None:
    time.sleep(IDLE_S)


def _compile_throwaway() -> None:
    num_kernels = min(2 * (os.cpu_count() or 1), 16)  # work for several threads

    def many(x: jax.Array) -> list[jax.Array]:
        return [jnp.sum(jnp.sin(x * k), axis=k % 2) for k in range(num_kernels)]

    # A program that is never kept is compiled in every run.
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, math.inf)
    try:
        jax.jit(many).lower(jax.ShapeDtypeStruct((3, 5), jnp.float32)).compile()
    finally:
        jax.config.update(name, before)
