"""Collectives of a compiled program: what they send in a step, and which of them delay it.

A collective delays a step if the device computes nothing meanwhile: it is synchronous, or nothing is
scheduled between its start and its end.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxgoodput.engine.analysis.names import Names
from jaxgoodput.engine.analysis.program_text import Instruction, ProgramText
from jaxgoodput.parallel.collectives import Received, received

_KINDS = frozenset(
    "all-gather all-reduce reduce-scatter all-to-all collective-permute ragged-all-to-all "
    "collective-broadcast".split()
)
# Instructions that start nothing on a device. Loops and calls start what they hold.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all partition-id "
    "replica-id opt-barrier add-dependency domain async-start async-update".split()
)
_CHANNEL = re.compile(r"channel_id=(\d+)")
_IS_SYNC = re.compile(r'"is_sync"?:true')


@dataclass(frozen=True)
class CollectiveUse:
    """A collective in the text of a program, and what it does in one run of it."""

    kind: str
    received: Received
    """What a device receives, in all runs of the loops around it."""
    times: int
    """How often it runs."""
    is_exposed: bool
    """Whether the device computes nothing meanwhile."""
    names: tuple[str, ...]
    """What it sends, by the names that a user knows."""


def collective_uses(program: ProgramText, nodes: Sequence[int]) -> tuple[CollectiveUse, ...]:
    """Return the collectives of a program; `nodes` has the node of each device.

    A loop counts as often as it runs if its trip count can be read, otherwise once. Raises ValueError for an
    unknown collective.
    """
    exposed, names = _exposed(program), Names(program)
    # On TPUs an asynchronous collective appears several times: in the fusions that start, carry and end it.
    found: dict[tuple[str, str], CollectiveUse] = {}
    for name, lines in program.computations.items():
        times = program.runs[name]
        for one in lines if times else ():
            kind = _kind(one)
            if not kind:
                continue
            arrived = received(one.text, nodes).times(times / len(nodes))
            labels = tuple(dict.fromkeys(map(names.label, one.operands)))
            use = CollectiveUse(kind, arrived, times, one.name in exposed, labels)
            channel = _CHANNEL.search(one.rest)
            key = kind, channel[1] if channel else one.name
            if key not in found or found[key].received.total < arrived.total:
                found[key] = use
    return tuple(found.values())


def is_kernel(one: Instruction) -> bool:
    """Whether an instruction starts something on a device: a kernel, a copy, a collective."""
    return one.opcode not in _FREE and not one.opcode.endswith("-done")


def _kind(one: Instruction) -> str:
    kind = one.opcode.removesuffix("-start")
    return kind if kind in _KINDS else ""


def _exposed(program: ProgramText) -> set[str]:
    """Return the names of the collectives during which nothing is computed."""
    # What `async-start` runs is looked at there.
    wrapped = {
        one.attribute("calls") for one in program.by_name.values() if one.opcode == "async-start"
    }
    exposed: set[str] = set()
    for name in set(program.launches) - wrapped:
        exposed |= _exposed_in(program, program.computations.get(name, ()))
    return exposed


def _exposed_in(program: ProgramText, lines: Sequence[Instruction]) -> set[str]:
    """Return the same of one computation."""
    exposed: set[str] = set()
    hidden: set[str] = set()
    # Collectives under way, by the instruction that stands for them.
    running: dict[str, list[str]] = {}
    for one in lines:
        started, first = _started(program, one), next(iter(one.operands), "")
        if started and _is_asynchronous(one):
            running[one.name] = started
        elif started:
            exposed.update(started)
        elif first in running and one.opcode == "async-update":
            running[one.name] = running.pop(first)
        elif first in running and one.opcode.endswith("-done"):
            exposed |= set(running.pop(first)) - hidden
        elif _computes(one):
            hidden.update(*running.values())
    return exposed


def _is_asynchronous(one: Instruction) -> bool:
    return one.opcode.endswith("-start") and not _IS_SYNC.search(one.rest)


def _started(program: ProgramText, one: Instruction) -> list[str]:
    """Return the names of the collectives that an instruction starts or is."""
    if one.opcode == "async-start":
        inner = program.computations.get(one.attribute("calls"), ())
        return [each.name for each in inner if _kind(each)]
    return [one.name] if _kind(one) else []


def _computes(one: Instruction) -> bool:
    """Whether an instruction computes, other than by moving data."""
    if one.opcode in ("while", "conditional", "call"):
        return True
    return is_kernel(one) and not one.opcode.startswith("copy")
