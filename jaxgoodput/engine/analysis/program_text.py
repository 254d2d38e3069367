"""The optimised HLO of a program, as text: its computations, their instructions, and how often each runs."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    """Its result, such as `f32[8,4]{1,0}`, or a tuple of results."""
    opcode: str
    rest: str
    """Operands and attributes."""
    text: str
    """The line."""

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the instructions whose results it takes."""
        depth, end = 1, len(self.rest)
        for place, letter in enumerate(self.rest):
            depth += (letter == "(") - (letter == ")")
            if depth == 0:
                end = place
                break
        # Each is "%name" or "name", with its shape before it in older forms.
        words = re.sub(r"\{[^{}]*\}|\[[^\]]*\]|/\*.*?\*/", "", self.rest[:end]).split(",")
        return tuple(word.split()[-1].strip("%()") for word in words if word.strip(" ()"))

    @cached_property
    def scope(self) -> str:
        """What JAX was doing, such as `jit(step)/jvp(mlp)/dot_general`; "" if it is not known."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    @property
    def is_root(self) -> bool:
        """Whether it is the result of its computation."""
        return self.text.lstrip().startswith("ROOT ")

    def attribute(self, name: str) -> str:
        """Return the computation that an attribute names, such as `body`; "" if there is none."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return found[1] if found else ""


@dataclass(frozen=True)
class Frame:
    """A place in Python code that was called while JAX traced a program."""

    file: str
    function: str
    line: int


@dataclass(frozen=True)
class ProgramText:
    """A program's computations by name; within one, instructions in the order in which they start."""

    computations: Mapping[str, Sequence[Instruction]]
    entry: str
    frames: Mapping[str, tuple[Frame, str]] = field(default_factory=dict)
    """By number: a place, and the number of the frame that called it."""

    @cached_property
    def runs(self) -> Counter[str]:
        """How often each computation runs, those inside kernels included."""
        return self._runs(_CALLERS)

    @cached_property
    def launches(self) -> Counter[str]:
        """How often each computation runs whose instructions are started one by one."""
        return self._runs(_STARTS)

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """All instructions by name; names are unique in a program."""
        return {one.name: one for lines in self.computations.values() for one in lines}

    def stack(self, one: Instruction) -> list[Frame]:
        """Return the calls that led to an instruction, innermost first; none if they are not known."""
        found = re.search(r"stack_frame_id=(\d+)", one.rest)
        number, calls = found[1] if found else "0", []
        while number in self.frames:
            frame, number = self.frames[number]
            calls.append(frame)
        return calls

    def _runs(self, callers: Mapping[str, str]) -> Counter[str]:
        times: Counter[str] = Counter()

        def visit(name: str, count: int) -> None:
            times[name] += count
            for one in self.computations.get(name, ()):
                pattern = callers.get(one.opcode, callers.get(""))
                called = re.findall(pattern, one.rest) if pattern else []
                trips = self._trips(one) if one.opcode == "while" else 1
                branches = "".join(_BRANCHES.findall(one.rest) if pattern else ()).split(",")
                for inner in (*called, *(branch.strip(" %") for branch in branches)):
                    if inner:
                        visit(inner, count * trips)

        visit(self.entry, 1)
        return times

    def _trips(self, loop: Instruction) -> int:
        told = _TRIPS.search(loop.rest)
        if told:
            return int(told[1])
        # A counting loop compares its counter with a constant.
        condition = self.computations.get(loop.attribute("condition"), ())
        lengths = (_LENGTH.search(one.text) for one in condition)
        return max((int(found[1]) for found in lengths if found), default=1)


def program_text(text: str) -> ProgramText:
    """Read a program's optimised HLO, as `jax.stages.Compiled.as_text()` prints it."""
    computations: dict[str, list[Instruction]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        opened = _COMPUTATION.match(line)
        if opened:
            lines = computations.setdefault(opened[2], [])
            entry = opened[2] if opened[1] else entry
        elif found := _INSTRUCTION.match(line):
            lines.append(Instruction(*found.groups(), text=line))
    return ProgramText(computations, entry, _frames(text))


def _frames(text: str) -> dict[str, tuple[Frame, str]]:
    """Read the tables of files, functions and places at the head of a program's text."""
    files, functions = (
        dict(re.findall(r'^(\d+) "(.*)"$', _table(text, name), re.MULTILINE))
        for name in ("FileNames", "FunctionNames")
    )
    places = {
        number: Frame(files.get(file, ""), functions.get(function, ""), int(line))
        for number, file, function, line in _PLACE.findall(_table(text, "FileLocations"))
    }
    # A frame without a caller names 0, and numbers of callers are written one too high.
    return {
        number: (places[place], str(int(caller) - 1))
        for number, place, caller in _FRAME.findall(_table(text, "StackFrames"))
        if place in places and int(caller) - 1 < int(number)
    }


def _table(text: str, name: str) -> str:
    """Return the lines of a table, which ends at an empty one."""
    _, found, rest = text.partition(f"\n{name}\n")
    return rest.partition("\n\n")[0] if found else ""


_PLACE = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)", re.MULTILINE)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}", re.MULTILINE)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"')
_LENGTH = re.compile(r"[su]32\[\]\S* constant\((\d+)\)")
_ANY = r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
# By opcode, with "" for all others: the attributes that name what an instruction runs.
_CALLERS = {"": _ANY}
_STARTS: dict[str, str] = dict.fromkeys("while conditional call async-start".split(), _ANY)
