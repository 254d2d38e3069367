"""XLA's compiler threads are found by their work, and yield to the threads that execute."""

import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.train.start.compiler_threads import LEAST_S, busy_seconds, lower_priority, working

pytestmark = pytest.mark.skipif(not busy_seconds(), reason="this kernel counts no thread's seconds")

SECONDS = st.dictionaries(st.integers(10**8, 10**8 + 9), st.floats(0, 1))  # ids that no thread has


@given(SECONDS, SECONDS)
def test_threads_that_work_are_those_whose_seconds_grow(before, grown):
    after = {one: before.get(one, 0.0) + seconds for one, seconds in grown.items()}
    found = working(before, after)
    assert found <= set(grown)
    for one, seconds in grown.items():
        if abs(seconds - LEAST_S) > 1e-9:
            assert (one in found) == (seconds > LEAST_S)


def test_threads_of_python_are_never_among_them():
    own = threading.get_native_id()
    assert not working({}, {own: 1.0})


def spin(until):
    while not until.is_set():
        pass


def test_a_python_thread_is_left_out_however_much_it_works():
    done = threading.Event()
    thread = threading.Thread(target=spin, args=(done,))
    before = busy_seconds()
    thread.start()
    time.sleep(0.05)
    after = busy_seconds()
    found = working(before, after)
    done.set()
    thread.join()
    spinning = thread.native_id
    assert spinning is not None and after[spinning] - before.get(spinning, 0.0) > LEAST_S
    assert spinning not in found


def test_a_priority_is_lowered_once_and_never_raised():
    """In threads that end: an ordinary user cannot raise a priority again."""
    first = os.getpriority(os.PRIO_PROCESS, 0)
    seen = []

    def body():
        own = threading.get_native_id()
        for niceness in (1, 3, 2):
            lower_priority([own], first + niceness)
            seen.append(os.getpriority(os.PRIO_PROCESS, own) - first)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [1, 3, 3]
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        time.sleep(0.01)
    assert thread.native_id is not None
    lower_priority([thread.native_id])  # it has ended


def test_what_compiles_is_found_and_what_executes_is_not():
    """In a process of its own. On a busy machine one thread of two may be missed."""
    code = """

        import jax, jax.numpy as jnp
        from jaxgoodput.train.start.compiler_threads import busy_seconds, compiler_threads, working

        found = compiler_threads()
        before = busy_seconds()
        program = jax.jit(lambda x: [jnp.sum(jnp.exp(x @ x * i), i % 2) for i in range(20)])
        program = program.lower(jnp.ones((400, 400))).compile()
        compiled = busy_seconds()
        x = jnp.ones((400, 400))
        for _ in range(20):
            jax.block_until_ready(program(x))
        executed = busy_seconds()

        def share(one, other):
            spent = {k: v - one.get(k, 0.0) for k, v in other.items() if k in working(one, other)}
            return sum(v for k, v in spent.items() if k in found) / sum(spent.values())

        print(len(found), share(before, compiled), share(compiled, executed))
    """
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=env,
        check=True,
    )
    num, compiling, executing = map(float, done.stdout.split())
    assert num > 0 and compiling > 0.4 and executing < 0.1, done.stdout
