"""What a device holds when a step needs most memory, by kind, and the largest buffers by name.

XLA writes which values are alive at the peak, if it is asked to dump what it assigns to memory. The libraries
for CPUs and NVIDIA GPUs do; for others, activations are not told from temporaries.
"""

import math
import pathlib
import re
from dataclasses import dataclass

from jaxgoodput.engine.analysis.names import Argument, Names
from jaxgoodput.engine.analysis.program_text import Instruction, ProgramText
from jaxgoodput.goodput.memory import StepBytes
from jaxgoodput.parallel.collectives import shape_bytes


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A value that a device holds at the peak."""

    name: str
    """The user's name for it, or the scope that computed it."""
    kind: str
    """"parameters", "optimizer", "activations" or "temporaries"."""
    shape: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Bytes of one device by kind, which add up to the peak of `StepBytes`."""

    parameters: float
    optimizer: float
    """State of the optimizer, and whatever else is kept between steps."""
    activations: float
    """The batch, and what the forward pass keeps for the backward pass; NaN if they are not told apart."""
    temporaries: float
    """All else: gradients, parameters that were gathered or cast, and gaps between buffers."""
    buffers: tuple[Buffer, ...]
    """What is alive at the peak, largest first; only the arguments if nothing else is known."""


def peak_memory(program: ProgramText, need: StepBytes, live_ranges: str) -> PeakMemory:
    """Return what a device holds at the peak; `live_ranges` is what XLA dumped of it, "" if nothing."""
    names = Names(program)
    arguments = [
        _argument_buffer(one, found)
        for one in program.computations.get(program.entry, ())
        if one.opcode == "parameter" and (found := names.argument(one.name))
    ]
    others = _others_alive(names, live_ranges)
    size = {
        kind: float(sum(one.size_bytes for one in (*arguments, *others) if one.kind == kind))
        for kind in ("parameters", "optimizer", "activations")
    }
    # XLA rounds sizes up, and drops arguments that are not used.
    left = max(need.peak - size["parameters"] - size["optimizer"], 0.0)
    activations = min(size["activations"], left) if live_ranges else math.nan
    return PeakMemory(
        parameters=size["parameters"],
        optimizer=size["optimizer"],
        activations=activations,
        temporaries=left - activations if live_ranges else left,
        buffers=tuple(sorted((*arguments, *others), key=lambda one: -one.size_bytes)),
    )


def dumped_live_ranges(folder: str) -> str:
    """Return what XLA dumped of the values alive over the program compiled last; "" if it dumped nothing."""
    found = sorted(pathlib.Path(folder).glob("*after_optimizations-live-range.txt"))
    return found[-1].read_text() if found else ""


_ALIVE = re.compile(r"^\s+([\w.\-]+)\{([\d,]*)\}: (\d+) bytes", re.MULTILINE)


def _others_alive(names: Names, live_ranges: str) -> list[Buffer]:
    """Return what is alive at the peak besides the program's arguments."""
    _, _, listed = live_ranges.partition(" (peak):")
    by_name, entry = names.program.by_name, names.program.computations[names.program.entry]
    known = {one.name for one in entry if one.opcode == "parameter"}
    found = []
    for name, index, size in _ALIVE.findall(listed.partition("Stack trace breakdown")[0]):
        if name in known or name not in by_name or by_name[name].opcode == "constant":
            continue
        element = _element(index)
        origin = names.argument(name, element)
        is_activation = origin is None and names.scope(name, element).startswith("forward")
        found.append(
            Buffer(
                name=f"copy of {origin.name}" if origin else names.label(name, element),
                kind="activations" if is_activation else "temporaries",
                shape=_shape(by_name[name], element),
                size_bytes=int(size),
            )
        )
    return found


def _element(index: str) -> int | None:
    """Return the element of a tuple that an index such as "2,0" is in; None for the empty index."""
    return int(index.split(",")[0]) if index else None


def _argument_buffer(one: Instruction, argument: Argument) -> Buffer:
    kind = "activations"
    if argument.is_state:
        kind = "parameters" if argument.is_parameter else "optimizer"
    return Buffer(
        name=argument.name, kind=kind, shape=_shape(one, None), size_bytes=shape_bytes(one.shape)
    )


def _shape(one: Instruction, element: int | None) -> str:
    """Return the shape of a result without its layout, such as f32[8,4]."""
    shapes = re.findall(r"[a-z]+\d*[a-z0-9]*\[[\d,]*\]", one.shape)
    if element is not None and element < len(shapes):
        return shapes[element]
    return shapes[0] if len(shapes) == 1 else f"{len(shapes)} arrays"
