"""Programs and moves between layouts, each compiled once, by the first thread that needs it.

An executable is named by a builder and its arguments, as in `compiled(programs.step, shape, measure=False)`:
a method that an editor can open. The builder runs only if nothing was compiled under that name, so the hot
path may use the same call.
"""

import functools
import hashlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

from jaxtyping import PyTree

from jaxgoodput._jax import settings_here
from jaxgoodput.clock import SystemClock
from jaxgoodput.engine.arithmetic import matrix_flops
from jaxgoodput.engine.programs.families import Programs
from jaxgoodput.engine.programs.program import Program, shardings_of
from jaxgoodput.parallel.move import Move
from jaxgoodput.parallel.once import Once

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Compilable(Protocol[T_co]):
    """What `ProgramCache` can compile: a program, or a move of values between layouts."""

    def compile(self) -> T_co:
        """Compile the executable on this thread."""
        ...


class ProgramCache:
    """Executables by (builder, arguments). Thread-safe.

    A second thread that asks for the same executable waits for the first; others do not wait. Whichever
    thread it is, a program is traced under the settings of JAX that `with` statements had changed where the
    cache was made (`settings`).
    """

    def __init__(self):
        self.settings = settings_here()
        self._once = Once()
        self._digests = Once()
        self._flops: dict[Hashable, float] = {}
        self._seconds: dict[Hashable, float] = {}
        self._traced: dict[Hashable, tuple[Program, float]] = {}  # and the seconds that took
        self._clock = SystemClock()

    def __call__(
        self, build: Callable[P, Compilable[T_co]], *args: P.args, **kwargs: P.kwargs
    ) -> T_co:
        """Return the executable of what `build` builds; the first call compiles it on its own thread.

        If compiling raises, nothing is kept.
        """
        key = _key(build, args, kwargs)
        return self._once(key, lambda: self._made(key, lambda: build(*args, **kwargs)))

    def look_at(self, program: functools.partial[Program]) -> Program:
        """Return what `program` builds, traced. If it is compiled next, it is not traced again."""
        key, began_s = _key(program, (), {}), self._clock.now()
        with self.settings():
            made = program()
            assert made.traced is not None
        self._traced[key] = made, self._clock.now() - began_s
        return made

    def forget(self, program: functools.partial[Program]) -> None:
        """Forget that `program` was traced, as it will not be compiled."""
        self._traced.pop(_key(program, (), {}), None)

    def _made(self, key: Hashable, build: Callable[[], Compilable[T_co]]) -> T_co:
        """Return the executable of what `build` returns, and note what is known of it under `key`."""
        began_s = self._clock.now()
        with self.settings():
            program, traced_s = self._built(key, build)
            made = program.compile()
        self._seconds[key] = self._clock.now() - began_s + traced_s
        if isinstance(program, Program):  # it is traced already, so counting is cheap
            self._flops[key] = matrix_flops(program.traced.jaxpr.jaxpr)
        return made

    def _built(self, key: Hashable, build: Callable[[], T]) -> tuple[T, float]:
        """Return what `build` builds, and how long it took if `look_at` has traced it before."""
        found: Any = self._traced.pop(key, None)
        return (build(), 0.0) if found is None else found

    def peek(
        self, build: Callable[P, Compilable[T_co]], *args: P.args, **kwargs: P.kwargs
    ) -> T_co | None:
        """Return the executable if it was compiled before; None otherwise. Compiles nothing."""
        return self._once.peek(_key(build, args, kwargs))

    def flops(self, program: functools.partial[Program]) -> float | None:
        """Return a program's matrix-product operations on all its devices; None if it was not compiled."""
        return self._flops.get(_key(program, (), {}))

    def seconds(self, program: functools.partial[Program]) -> float | None:
        """Return how long tracing and compiling a program took; None if it was not compiled."""
        return self._seconds.get(_key(program, (), {}))

    def cost(
        self, build: Callable[P, Program], *args: P.args, **kwargs: P.kwargs
    ) -> Mapping[str, float]:
        """Return XLA's own cost analysis of a program: flops and bytes accessed, per device."""
        analysis: Any = self(build, *args, **kwargs).cost_analysis()
        return analysis[0] if isinstance(analysis, list) else analysis

    def text(self, build: Callable[P, Program], *args: P.args, **kwargs: P.kwargs) -> str:
        """Return the optimized HLO of a program."""
        return self(build, *args, **kwargs).as_text() or ""

    def digest(self, program: functools.partial[Program]) -> str:
        """Return a hash of the lowered program. Compiles it too, so that it is traced only once."""
        key = _key(program, (), {})

        def make() -> str:
            began_s = self._clock.now()
            with self.settings():
                made, traced_s = self._built(key, program)
                lowered = made.lower()
                self._flops[key] = matrix_flops(made.traced.jaxpr.jaxpr)
                self._once(key, functools.partial(made.compiled, lowered))
            self._seconds.setdefault(key, self._clock.now() - began_s + traced_s)
            return hashlib.sha256(lowered.as_text().encode()).hexdigest()

        return self._digests(key, make)


def _key(build: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    if isinstance(build, functools.partial):  # the call may be wrapped
        args, kwargs, build = (*build.args, *args), {**build.keywords, **kwargs}, build.func
    return build, args, frozenset(kwargs.items())


@dataclass(frozen=True)
class LayoutMove:
    """Abstract values on one layout, and the shardings that they move to."""

    tree: PyTree
    shardings: PyTree
    donate: bool
    memory_bytes: int | None
    programs: Once

    def compile(self) -> Move:
        """Plan and compile the move."""
        return Move.compile(
            self.tree,
            self.shardings,
            donate=self.donate,
            memory_bytes=self.memory_bytes,
            programs=self.programs,
        )


@dataclass(frozen=True)
class Moves:
    """Builders of the moves between two layouts of one problem.

    A batch moves its bf16 compute parameters without their fp32 masters; a state moves whole.
    """

    memory_bytes: int | None
    """Most that a device may hold of the moved values; None: the device's own limit."""
    programs: Once = field(default_factory=Once)
    """Programs shared by the moves: equal groups of leaves run the same one."""

    def state(self, old: Programs, new: Programs) -> LayoutMove:
        """Build the move of a whole training state; deletes the source."""
        return self._move(old.abstract_state(), new.abstract_state(), donate=True)

    def work(self, old: Programs, new: Programs, *, donate: bool) -> LayoutMove:
        """Build the move of a batch's (params, scale). Without `donate` the source stays."""
        return self._move(old.abstract_work[:2], new.abstract_work[:2], donate=donate)

    def fixed(self, old: Programs, new: Programs) -> LayoutMove:
        """Build the move of a batch's (model state, key, step); the source stays."""
        return self._move(old.abstract_work[2:], new.abstract_work[2:], donate=False)

    def sums(self, old: Programs, new: Programs) -> LayoutMove:
        """Build the move of a batch's reduced sums; deletes the source."""
        return self._move(old.reduced_sums(), new.reduced_sums(), donate=True)

    def _move(self, old: PyTree, new: PyTree, *, donate: bool) -> LayoutMove:
        return LayoutMove(old, shardings_of(new), donate, self.memory_bytes, self.programs)
