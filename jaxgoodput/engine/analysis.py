"""What a compiled program does, read from it before it has run: arithmetic, collectives, memory.

XLA's cost analysis counts the body of a loop once and mixes traffic with memory. So arithmetic is counted in
the traced program, whose scans have known lengths. Traffic is counted in the optimised HLO, whose collectives
name their results and groups, multiplied by the trips of the loops around them.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from jaxgoodput.engine.arithmetic import matrix_flops
from jaxgoodput.engine.memory import step_bytes
from jaxgoodput.engine.programs.program import Program
from jaxgoodput.goodput.memory import StepBytes
from jaxgoodput.parallel.move import received_bytes


@dataclass(frozen=True)
class Analysis:
    """What one run of a program costs on each device."""

    bytes: StepBytes
    """Memory of one device."""
    flops: float
    """Multiplications and additions in matrix products and convolutions, on all devices together."""
    traffic: Mapping[str, float]
    """Bytes that a device receives, by kind of collective."""
    num_collectives: int
    """Collectives in the text; a loop's count once."""
    num_asynchronous: int
    """Collectives that overlap with computing, because start and end are separate operations."""


def analyse(program: Program, executable: jax.stages.Compiled, num_devices: int) -> Analysis:
    """Return what `executable`, compiled from `program`, does on each of `num_devices`."""
    text = executable.as_text() or ""
    traffic = received_by_kind(text, num_devices)
    kinds = re.findall(rf" ({_KINDS}|async)(-start)?\(", text)
    started = sum(bool(start) for _, start in kinds)
    return Analysis(
        bytes=step_bytes(executable),
        flops=matrix_flops(program.traced.jaxpr.jaxpr),
        traffic={kind: total / num_devices for kind, total in traffic.items()},
        num_collectives=sum(kind != "async" or bool(start) for kind, start in kinds),
        num_asynchronous=started,
    )


# -- traffic -----------------------------------------------------------------------------------------

_KINDS = (
    "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all|"
    "collective-broadcast"
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CALLED = re.compile(
    r"(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_TRIPS = re.compile(r'known_trip_count"?:\{"n":"(\d+)"')
_LENGTH = re.compile(r"[su]32\[\]\S* constant\((\d+)\)")


def received_by_kind(hlo_text: str, num_devices: int) -> dict[str, float]:
    """Return the bytes that all devices together receive in one run, by kind of collective.

    A loop counts as often as it runs if its trip count can be read, otherwise once. Raises ValueError for an
    unknown collective.
    """
    bodies, entry = _computations(hlo_text)
    times = _times(bodies, entry)
    # On TPUs an asynchronous collective appears several times: in the fusions that start, carry and end it.
    found: dict[tuple[str, str], float] = {}
    for name, lines in bodies.items():
        for number, line in enumerate(lines):
            kind = re.search(rf" ({_KINDS})(-start)?\(", line)
            if kind and times[name]:
                channel = _CHANNEL.search(line)
                key = kind[1], channel[1] if channel else f"{name}:{number}"
                received = times[name] * received_bytes(line, num_devices)
                found[key] = max(found.get(key, 0.0), float(received))
    totals: dict[str, float] = {}
    for (kind, _), received in found.items():
        totals[kind] = totals.get(kind, 0.0) + received
    return totals


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Return the lines of each computation by name, and the name of the entry computation."""
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        opened = _COMPUTATION.match(line)
        if opened:
            lines = bodies.setdefault(opened[2], [])
            entry = opened[2] if opened[1] else entry
        else:
            lines.append(line)
    return bodies, entry


def _times(bodies: Mapping[str, list[str]], entry: str) -> Counter[str]:
    """Return how often each computation runs."""
    times: Counter[str] = Counter()

    def visit(name: str, count: int) -> None:
        times[name] += count
        for line in bodies.get(name, ()):
            called = dict(_CALLED.findall(line))
            trips = _trips(bodies, line, called.get("condition", "")) if "body" in called else 1
            branches = [b.strip(" %") for b in "".join(_BRANCHES.findall(line)).split(",") if b]
            for inner in (*called.values(), *branches):
                visit(inner, count * trips)

    visit(entry, 1)
    return times


def _trips(bodies: Mapping[str, list[str]], line: str, condition: str) -> int:
    told = _TRIPS.search(line)
    if told:
        return int(told[1])
    # A counting loop compares its counter with a constant.
    return max(map(int, _LENGTH.findall("\n".join(bodies.get(condition, ())))), default=1)
