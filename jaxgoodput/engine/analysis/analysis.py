"""What a compiled program does, read from it before it has run: arithmetic, kernels, collectives, memory.

XLA's cost analysis counts the body of a loop once and mixes traffic with memory. So arithmetic is counted in
the traced program, whose scans have known lengths. Kernels and traffic are counted in the optimised HLO,
whose collectives name their results and groups, multiplied by the trips of the loops around them.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from jaxgoodput.engine.analysis.collectives import CollectiveUse, collective_uses, is_kernel
from jaxgoodput.engine.analysis.peak import PeakMemory, dumped_live_ranges, peak_memory
from jaxgoodput.engine.analysis.program_text import ProgramText, program_text
from jaxgoodput.engine.arithmetic import matrix_flops_by_type
from jaxgoodput.engine.memory import step_bytes
from jaxgoodput.engine.programs.program import Program
from jaxgoodput.goodput.memory import StepBytes
from jaxgoodput.parallel.collectives import Received


@dataclass(frozen=True)
class Analysis:
    """What one run of a program costs on each device."""

    bytes: StepBytes
    """Memory of one device."""
    flops_by_type: Mapping[str, float]
    """Multiplications and additions in matrix products and convolutions, on all devices together, by the
    type of the factors."""
    num_kernels: int
    """Kernels, copies and collectives that are started: in a loop as often as it runs, and in a
    conditional in all of its branches."""
    collectives: tuple[CollectiveUse, ...]
    """Collectives in the text; a loop's once, with the bytes of all its runs."""
    peak: PeakMemory
    """What a device holds when it needs most."""

    @property
    def flops(self) -> float:
        """Return the multiplications and additions of all types."""
        return sum(self.flops_by_type.values())

    @property
    def traffic(self) -> Mapping[str, float]:
        """Return the bytes that a device receives, by kind of collective."""
        totals: dict[str, float] = {}
        for one in self.collectives:
            totals[one.kind] = totals.get(one.kind, 0.0) + one.received.total
        return totals

    @property
    def received(self) -> Received:
        """Return the bytes that a device receives."""
        return _sum(self.collectives)

    @property
    def exposed(self) -> Received:
        """Return the bytes that a device receives while it computes nothing."""
        return _sum(self.exposed_collectives)

    @property
    def exposed_collectives(self) -> tuple[CollectiveUse, ...]:
        """Return the collectives during which a device computes nothing."""
        return tuple(one for one in self.collectives if one.is_exposed)


def compiled_analysis(program: Program, nodes: Sequence[int]) -> Analysis:
    """Compile a program and return what it does; `nodes` has the node of each device.

    What is alive at the peak is not known if JAX finds the program in its cache of compilations.
    """
    with tempfile.TemporaryDirectory() as folder:
        executable = program.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        return analyse(program, executable, nodes, live_ranges=dumped_live_ranges(folder))


def analyse(
    program: Program,
    executable: jax.stages.Compiled,
    nodes: Sequence[int],
    *,
    live_ranges: str = "",
) -> Analysis:
    """Return what `executable`, compiled from `program`, does; `nodes` has the node of each device.

    `live_ranges` is what XLA dumped of the values alive at the peak, "" if nothing.
    """
    text, need = program_text(executable.as_text() or ""), step_bytes(executable)
    return Analysis(
        bytes=need,
        flops_by_type=matrix_flops_by_type(program.traced.jaxpr.jaxpr),
        num_kernels=num_kernels(text),
        collectives=collective_uses(text, nodes),
        peak=peak_memory(text, need, live_ranges),
    )


def num_kernels(program: ProgramText) -> int:
    """Return how many kernels, copies and collectives one run of a program starts."""
    return sum(
        times * sum(map(is_kernel, program.computations.get(name, ())))
        for name, times in program.launches.items()
    )


def _sum(uses: Sequence[CollectiveUse]) -> Received:
    total = Received()
    for one in uses:
        total = total.plus(one.received)
    return total
