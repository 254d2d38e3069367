"""Programs and moves, each compiled once, by whichever thread needs it first.

What is compiled is named by a builder and its arguments, `compiled(programs.step, shape,
measure=False)`: a method that an editor can open. It is built only where it was not compiled before, so
that the door is open on the hot path too.
"""

import functools
import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

import jax
from jaxtyping import PyTree

from jaxgoodput.engine.analysis import matrix_flops
from jaxgoodput.engine.programs import Program, Programs
from jaxgoodput.parallel.move import Move
from jaxgoodput.parallel.once import Once

P = ParamSpec("P")
T_co = TypeVar("T_co", covariant=True)


class Compilable(Protocol[T_co]):
    """A program, or a move between layouts, that is still to be compiled."""

    def compile(self) -> T_co:
        """The executable, compiled on this thread."""
        ...


class ProgramCache:
    """What was compiled, by (builder, arguments). Safe from any thread.

    A second thread that asks for the same waits for the first; one that asks for another does not.
    """

    def __init__(self):
        self._once = Once()
        self._digests = Once()
        self._flops: dict[Hashable, float] = {}

    def __call__(
        self, build: Callable[P, Compilable[T_co]], *args: P.args, **kwargs: P.kwargs
    ) -> T_co:
        """The executable of what `build` builds, compiled on this thread where nobody has done so yet.

        Where compiling raises, nothing is kept.
        """
        key = _key(build, args, kwargs)

        def make() -> T_co:
            program = build(*args, **kwargs)
            made = program.compile()
            if isinstance(program, Program):  # traced to be compiled: here it costs nothing more
                self._flops[key] = matrix_flops(program.traced.jaxpr.jaxpr)
            return made

        return self._once(key, make)

    def peek(
        self, build: Callable[P, Compilable[T_co]], *args: P.args, **kwargs: P.kwargs
    ) -> T_co | None:
        """What is compiled already; None before."""
        return self._once.peek(_key(build, args, kwargs))

    def flops(self, program: functools.partial[Program]) -> float | None:
        """Of the matrix products of a program, on all of its devices; None where it is not compiled."""
        return self._flops.get(_key(program, (), {}))

    def digest(self, program: functools.partial[Program]) -> str:
        """A hash of what the compiler is asked for. Compiles it, so that it is not traced a second time."""
        key = _key(program, (), {})

        def make() -> str:
            made = program()
            lowered = made.lower()
            self._flops[key] = matrix_flops(made.traced.jaxpr.jaxpr)
            self._once(key, lowered.compile)
            return hashlib.sha256(lowered.as_text().encode()).hexdigest()

        return self._digests(key, make)


def _key(build: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    if isinstance(build, functools.partial):  # a call that is not made yet
        args, kwargs, build = (*build.args, *args), {**build.keywords, **kwargs}, build.func
    return build, args, frozenset(kwargs.items())


@dataclass(frozen=True)
class LayoutMove:
    """Values on one layout, abstract, and where they go."""

    tree: PyTree
    shardings: PyTree
    donate: bool
    memory_bytes: int | None
    programs: Once

    def compile(self) -> Move:
        """The move, planned and compiled."""
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

    A bf16 compute copy moves without its fp32 master; a state moves whole.
    """

    memory_bytes: int | None
    """The most that a device may hold of what is moved; None: the device's own limit."""
    programs: Once = field(default_factory=Once)
    """Shared by the moves: equal groups of leaves run the same one."""

    def state(self, old: Programs, new: Programs) -> LayoutMove:
        """A whole training state; the source is deleted."""
        return self._move(old.abstract_state(), new.abstract_state(), donate=True)

    def work(self, old: Programs, new: Programs, *, donate: bool) -> LayoutMove:
        """(params, scale) of a batch; the source stays where it belongs to the state."""
        return self._move(old.abstract_work[:2], new.abstract_work[:2], donate=donate)

    def fixed(self, old: Programs, new: Programs) -> LayoutMove:
        """(model state, key, step) of a batch; the source stays."""
        return self._move(old.abstract_work[2:], new.abstract_work[2:], donate=False)

    def sums(self, old: Programs, new: Programs) -> LayoutMove:
        """The reduced sums of a batch; the source is deleted."""
        return self._move(old.reduced_sums(), new.reduced_sums(), donate=True)

    def _move(self, old: PyTree, new: PyTree, *, donate: bool) -> LayoutMove:
        shardings = jax.tree.map(lambda x: x.sharding, new)
        return LayoutMove(old, shardings, donate, self.memory_bytes, self.programs)
