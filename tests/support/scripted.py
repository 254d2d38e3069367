"""An engine that compiles nothing, and notes what is asked of it."""

import contextlib
import threading
from functools import partial
from typing import Any

from jaxgoodput.engine.engine import Engine
from jaxgoodput.goodput.memory import StepBytes
from jaxgoodput.train.compile_sizes import SizeCompiler

WAIT_S = 30.0  # only a failing test waits this long


class Compiled(list):
    """What was compiled, as (kind, size), in order."""

    settings = contextlib.nullcontext


class Scripted(Engine):
    """An engine whose sizes need 10 bytes a sample, and that records what is asked of it."""

    world = None  # no job whose processes come and go

    def __init__(self, broken=None):
        self.compiled: Any = Compiled()
        self.rehearsed: list[tuple[str, int]] = []
        self.shared = 0
        self.broken = broken
        self.may_go = threading.Event()
        self.may_go.set()
        self.entered = threading.Event()

    def can_measure(self, size: Any) -> bool:
        return True

    def stop_looping(self, size: Any) -> bool:
        return False

    def measuring_programs(self, size: Any) -> Any:
        return (partial(self._program, "step_measured", size),)

    def training_programs(self, size: Any, *, accumulate) -> Any:
        names = ("step", "first", "more") if accumulate else ("step",)
        return tuple(partial(self._program, name, size) for name in names)

    def shared_programs(self, *, accumulate) -> Any:
        return (partial(self._program, "begin", None),)

    def _program(self, name, size):
        raise AssertionError("a fake has no programs")

    def compile_program(self, program: Any):
        name, size = program.args
        if name == "begin":
            self.shared += 1
            return
        self.entered.set()
        assert self.may_go.wait(WAIT_S)
        if size == self.broken:
            raise RuntimeError("the compiler gave up")
        self.compiled.append((name, size))

    def bytes_of(self, size: Any):
        return StepBytes(arguments=0, outputs=0, temporaries=10 * size)

    def measuring_bytes_of(self, size: Any):
        return StepBytes(arguments=0, outputs=0, temporaries=15 * size)

    def rehearse(self, size: Any, *, accumulate):
        self.rehearsed.append(("step", size))

    def rehearse_measuring(self, size: Any):
        self.rehearsed.append(("step_measured", size))


SIZES = (1, 2, 4, 8, 16, 32, 64)


def sizes_of(engine, *, accumulate=False, budget=10**9, reach=1000.0, **kind):
    return SizeCompiler(engine, SIZES, accumulate=accumulate, budget=budget, reach=reach, **kind)
