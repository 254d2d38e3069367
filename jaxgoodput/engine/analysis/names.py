"""Names that a user knows for what a compiler made: parameters, and the scopes and layers of the model.

JAX writes into a program what each instruction came from, such as `jit(run)/jvp(mlp)/while/body/dot_general`,
and the names of arguments, such as `state.params['mlp']['kernel']`.
"""

import pathlib
import re
from dataclasses import dataclass
from functools import cached_property

from jaxgoodput.engine.analysis.program_text import Instruction, ProgramText
from jaxgoodput.parallel.collectives import shape_bytes

# What JAX's transformations add to a scope, which is no part of the model.
_WRAPPERS = frozenset(
    "while body cond closed_call checkpoint rematted_computation remat pjit branch_0_fun branch_1_fun "
    "custom_jvp_call custom_vjp_call shard_map".split()
)
_MOVES = frozenset(
    "bitcast copy transpose convert reshape slice dynamic-slice broadcast copy-start copy-done "
    "all-gather all-gather-start all-gather-done optimization-barrier opt-barrier".split()
)
_PACKAGE = str(pathlib.Path(__file__).parents[2])
_PASSIVE = _MOVES | {"parameter", "constant", "tuple"}
SMALL = 8  # bytes of a loop's counter, which says nothing of where data comes from


@dataclass(frozen=True)
class Argument:
    """An argument of a program that a value came from."""

    path: str
    """Such as `state.params['mlp']['kernel']`."""

    @property
    def name(self) -> str:
        """Return the path as a user writes it.

        >>> Argument("state.params['mlp']['kernel']").name, Argument("inputs[0]['tokens']").name
        ('mlp/kernel', 'tokens')
        >>> Argument("state.opt_state.inner[0].mu['mlp']['kernel']").name
        'mu of mlp/kernel'
        """
        keys = "/".join(re.findall(r"\['([^']*)'\]", self.path)) or "/".join(
            re.findall(r"\[(\d+)\]", self.path)
        )
        part = re.findall(r"\.(\w+)", re.sub(r"\['[^']*'\]", "", self.path))
        if self.is_parameter or not part:
            return keys or self.path
        return f"{part[-1]} of {keys}" if keys and "['" in self.path else part[-1]

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter of the model."""
        return bool(re.match(r"(\w+\.)?params\b", self.path))

    @property
    def is_state(self) -> bool:
        """Whether it is part of the state that is kept between steps."""
        return self.path.startswith("state")


@dataclass(frozen=True)
class Names:
    """Finds what the values of a program are to its user."""

    program: ProgramText

    @cached_property
    def _callers(self) -> dict[str, Instruction]:
        """Loops by the computations that they run."""
        return {
            one.attribute(part): one
            for one in self.program.by_name.values()
            for part in ("body", "condition")
            if one.opcode == "while"
        }

    @cached_property
    def _homes(self) -> dict[str, str]:
        """Computations by the names of their instructions."""
        return {
            one.name: name for name, lines in self.program.computations.items() for one in lines
        }

    def argument(self, name: str, index: int | None = None) -> Argument | None:
        """Return the argument that a value is a copy or a part of; None if it was computed otherwise.

        `index` chooses an element of a tuple.
        """
        one, _ = self._followed(name, index, through_loops=False)
        is_entry = one is not None and self._homes[one.name] == self.program.entry
        if one is None or one.opcode != "parameter" or not is_entry or not one.scope:
            return None
        return Argument(one.scope.replace("\\'", "'"))

    def _followed(
        self, name: str, index: int | None, *, through_loops: bool
    ) -> tuple[Instruction | None, int | None]:
        """Follow a value back through what only moves it: to an argument, or to what computes it.

        What a loop carries is followed to its value before the loop, or with `through_loops` to what a turn
        of the loop makes of it.
        """
        one = self.program.by_name.get(name)
        for _ in range(200):  # a chain is much shorter, and no circle is followed for ever
            if one is None:
                break
            name, before = self._before(one, index, through_loops)
            if not name:
                break
            one, index = self.program.by_name.get(name), before
        return one, index

    def _before(
        self, one: Instruction, index: int | None, through_loops: bool
    ) -> tuple[str, int | None]:
        """Return the value that an instruction passes on, and which element of it; "" if it computes."""
        if one.opcode == "get-tuple-element":
            found = re.search(r"index=(\d+)", one.rest)
            return one.operands[0], int(found[1]) if found else None
        if one.opcode == "tuple":
            if index is None or index >= len(one.operands):
                return "", index
            return one.operands[index], None
        if loop := self._loop_of(one):
            return (self._turn(loop) if through_loops else loop.operands[0]), index
        sources = self._sources(one)
        return (sources[0], index) if len(sources) == 1 else ("", index)

    def _loop_of(self, one: Instruction) -> Instruction | None:
        """Return the loop whose result, or whose body's argument, an instruction is."""
        if one.opcode == "parameter":
            return self._callers.get(self._homes[one.name])
        return one if one.opcode == "while" else None

    def _turn(self, loop: Instruction) -> str:
        """Return what a turn of a loop makes; what it starts with if the text does not say."""
        body = self.program.computations.get(loop.attribute("body"), ())
        return next((each.name for each in body if each.is_root), loop.operands[0])

    def _sources(self, one: Instruction) -> list[str]:
        """Return the operands that an instruction passes on; none if it computes."""
        if one.opcode == "fusion":
            inner = self.program.computations.get(one.attribute("calls"), ())
            if any(each.opcode not in _PASSIVE and _is_large(each) for each in inner):
                return []
        elif one.opcode not in _MOVES:
            return []
        by_name = self.program.by_name
        return [name for name in one.operands if name in by_name and _is_large(by_name[name])]

    def label(self, name: str, index: int | None = None) -> str:
        """Return what a value is to the user: an argument, or the scope and the line that computed it."""
        found = self.argument(name, index)
        if found:
            return found.name
        scope, place = self.scope(name, index), self.place(name, index)
        return f"{scope} ({place})" if place else scope

    def scope(self, name: str, index: int | None = None) -> str:
        """Return the pass and the scope that computed a value, such as `backward mlp/dot_general`."""
        one = self._computing(name, index)
        return readable(one.scope) if one else name

    def place(self, name: str, index: int | None = None) -> str:
        """Return the user's line that computed a value, such as `model.py:12`; "" if it is not known."""
        one = self._computing(name, index)
        own = [
            frame
            for frame in (self.program.stack(one) if one else ())
            if not frame.file.startswith(_PACKAGE) and "site-packages" not in frame.file
        ]
        return f"{pathlib.PurePath(own[0].file).name}:{own[0].line}" if own else ""

    def _computing(self, name: str, index: int | None) -> Instruction | None:
        """Return the instruction that computed a value and of which JAX wrote what it came from."""
        one = self.program.by_name.get(name)
        if one is not None and (index is not None or not one.scope):
            one, _ = self._followed(name, index, through_loops=True)
        for _ in range(20):
            if one is None or one.scope:
                return one
            one = self.program.by_name.get(one.operands[0]) if one.operands else None
        return None


def readable(scope: str) -> str:
    """Return the pass of a step and the user's own part of a scope.

    >>> readable("jit(run)/transpose(jvp(mlp))/while/body/checkpoint/dot_general")
    'backward mlp/dot_general'
    >>> readable("jit(run)/jvp()/while/body/(attention/exp:sub)"), readable("jit(run)/add")
    ('forward attention/exp', 'update add')
    """
    first = re.sub(r"/\(([^:()]*(?:\(\))?[^:]*):.*$", r"/\1", scope.split(";")[0])
    step = "backward" if "transpose(" in first else "forward" if "jvp(" in first else "update"
    parts = []
    for part in re.sub(r"\b(jit|pjit)\([^()]*\)/", "", first).split("/"):
        inner = re.sub(r"^(?:(?:transpose|jvp|vmap|jit)\()*([^()]*)\)*$", r"\1", part)
        parts += [inner] if inner and inner not in _WRAPPERS else []
    return f"{step} {'/'.join(parts)}".strip()


def _is_large(one: Instruction) -> bool:
    return shape_bytes(one.shape) > SMALL
