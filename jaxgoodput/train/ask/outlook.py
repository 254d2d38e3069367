"""Predicts how each strategy would run a task; programs are compiled, not run, and need no devices.

The engine's step is compiled for each strategy from abstract values. The executable tells how much memory it
needs, how much it sends, and how much of that overlaps with computation. The step time is a roofline estimate
(Williams et al. 2009): the slower of arithmetic and memory, plus the collectives during which nothing is
computed, and at least what the links take, each at the chip's peak rate. No program reaches peak rates, so
only the order of the strategies is meaningful.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxgoodput.data.datasets import as_source
from jaxgoodput.data.sources import abstract_sample
from jaxgoodput.engine.analysis.analysis import Analysis, compiled_analysis
from jaxgoodput.engine.chips import Chip, chip_of
from jaxgoodput.engine.engine import Engine, Engines
from jaxgoodput.engine.loss_checks import constrained_axes
from jaxgoodput.engine.programs.program import SampleShape
from jaxgoodput.engine.state import TrainState
from jaxgoodput.engine.step import Problem, own_specs
from jaxgoodput.goodput.memory import largest_that_fits
from jaxgoodput.parallel.collectives import Received, node_of
from jaxgoodput.parallel.partition import suitable
from jaxgoodput.parallel.strategy import CONTEXT_AXIS, Strategy, candidates
from jaxgoodput.train.config import Config
from jaxgoodput.train.start.problem import as_loaded, problem_of
from jaxgoodput.train.task import Task

# Parts of sequences, experts or stacks, unless the configuration has strategies with more.
MOST_PARTS = 8
_NO_SEQUENCES = (
    "the model constrains no activation over context, so every part would compute whole sequences; see "
    "jax.lax.with_sharding_constraint"
)


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Predicted memory and time of a step under one strategy, from its compiled program."""

    strategy: Strategy
    micro_batch_size: int
    """Samples per replica that the step was compiled for."""
    num_micro_batches: int
    """Number of micro-batches of a global batch near the base, at least 1."""
    largest_micro_batch_size: int
    """Largest micro-batch size that fits, extrapolated from the compiled ones; 0 if none fits."""
    budget: float
    """Bytes that a step may use on a device."""
    analysis: Analysis
    """Analysis of the step of one micro-batch."""
    rooflines_s: dict[str, float]
    """Seconds that arithmetic, memory, the links inside nodes and the network between them each need for a
    micro-batch; empty for an unknown chip."""
    exposed_s: float
    """Seconds of a micro-batch in which a device waits for collectives, by the roofline."""
    compile_s: float
    """Seconds that compiling took."""

    @property
    def fits(self) -> bool:
        """Whether the compiled step fits into memory."""
        return self.analysis.bytes.peak <= self.budget

    @property
    def global_batch_size(self) -> int:
        """Samples of a step."""
        return self.micro_batch_size * self.num_micro_batches * self.strategy.num_replicas

    @property
    def step_s(self) -> float:
        """Seconds of a step of all micro-batches, by the roofline; NaN as for `micro_batch_s`."""
        return self.micro_batch_s * self.num_micro_batches

    @property
    def micro_batch_s(self) -> float:
        """Seconds of a micro-batch, by the roofline; NaN if the chip, or its rate for a type, is unknown."""
        times = self.rooflines_s
        if not times or math.isnan(times["arithmetic"]):
            return math.nan
        busy_s = max(times["arithmetic"], times["memory"])
        return max(busy_s + self.exposed_s, times["links"], times["network"])

    @property
    def bound_by(self) -> str:
        """The largest part of `micro_batch_s`; "" if that is NaN.

        A roofline, or "collectives" if the device waits for them longer than it computes.
        """
        times, total_s = self.rooflines_s, self.micro_batch_s
        if math.isnan(total_s):
            return ""
        sending = max(("links", "network"), key=times.__getitem__)
        if times[sending] >= total_s:
            return sending
        busy = max(("arithmetic", "memory"), key=times.__getitem__)
        return "collectives" if self.exposed_s > times[busy] else busy

    @property
    def samples_per_s(self) -> float:
        """Samples per second, by the roofline; NaN as for `micro_batch_s`."""
        return self.global_batch_size / self.step_s


@dataclass(frozen=True)
class LeftOut:
    """A strategy that cannot be used, and the reason."""

    strategy: Strategy
    reason: str


def candidates_for(
    task: Task, config: Config, num_devices: int, *, memory_bytes: float | None
) -> tuple[tuple[Strategy, ...], tuple[LeftOut, ...]]:
    """Return the strategies to compare, and those left out.

    They come from the configuration; if it has none, all strategies that suit the model are considered, with
    every degree but data and fsdp up to `MOST_PARTS`.
    """
    parts = dict.fromkeys(("max_context", "max_expert", "max_stage"), MOST_PARTS)
    asked = config.strategies or candidates(num_devices, **parts)
    resolved = dict.fromkeys(strategy.resolved(num_devices) for strategy in asked)
    problem = problem_of(task, config)
    state = Engines(problem, None).state
    idle = () if config.strategies else _idle(resolved, task, config, problem, state)
    kept, others = suitable(
        [strategy for strategy in resolved if strategy not in idle],
        state,
        state.params,
        own_specs(problem),
        memory_bytes=None if memory_bytes is None else int(memory_bytes),
        compute_dtype=problem.compute_dtype,
    )
    reasons = [*others, *((strategy, _NO_SEQUENCES) for strategy in idle)]
    return kept, tuple(LeftOut(strategy, reason) for strategy, reason in reasons)


def _idle(
    strategies: Iterable[Strategy], task: Task, config: Config, problem: Problem, state: TrainState
) -> tuple[Strategy, ...]:
    """Return the strategies with a degree of context, unless the model constrains an activation over it."""
    sample = as_loaded(abstract_sample(as_source(task.dataset())), config)
    batch = SampleShape.of(sample, micro_batch_size=2).batch(2)
    if CONTEXT_AXIS in constrained_axes(problem, state, batch):
        return ()
    return tuple(strategy for strategy in strategies if strategy.context > 1)


def outlooks(
    task: Task,
    config: Config,
    devices: Sequence[Any],
    strategies: Sequence[Strategy],
    *,
    budget: float,
    micro_batch_size: int | None = None,
) -> Iterator[Outlook | LeftOut]:
    """Yield the prediction of each strategy as soon as it is compiled; `devices` may come from a topology.

    If `micro_batch_size` is None, the share of the base batch is used, or the largest size that fits. A
    strategy that cannot be compiled, or whose program sends an unknown amount, is `LeftOut`.
    """
    engines = Engines(
        problem_of(task, config),
        as_loaded(abstract_sample(as_source(task.dataset())), config),
        memory_bytes=int(budget),
        loss=config.loss,
    )
    chip = chip_of(devices[0])
    for strategy in strategies:
        try:
            engine = engines.on(strategy.on(devices))
            found = _outlook(engine, strategy, config.batch.base, micro_batch_size, budget, chip)
        except ValueError as error:
            found = LeftOut(strategy, str(error))
        yield found


def _outlook(
    engine: Engine,
    strategy: Strategy,
    base: int,
    micro_batch_size: int | None,
    budget: float,
    chip: Chip | None,
) -> Outlook:
    start_s = time.perf_counter()
    known = {}
    nodes = [node_of(device) for device in engine.layout.mesh.devices.flat]
    size = micro_batch_size or max(base // engine.num_replicas, 1)
    while True:
        program = engine.programs.step(engine.shape(size), measure=False)
        found = compiled_analysis(program, nodes)
        known[size] = found.bytes
        if found.bytes.peak <= budget or micro_batch_size is not None or size == 1:
            break
        size = max(largest_that_fits(range(1, size), known, int(budget)), 1)
    sizes = [size * k // 4 for k in range(1, 2**16) if size * k // 4] + [1]
    return Outlook(
        strategy=strategy,
        micro_batch_size=size,
        num_micro_batches=1
        if micro_batch_size is not None
        else max(round(base / (size * engine.num_replicas)), 1),
        largest_micro_batch_size=largest_that_fits(sizes, known, int(budget)),
        budget=budget,
        analysis=found,
        rooflines_s={} if chip is None else _rooflines(found, chip, engine.layout.num_devices),
        exposed_s=float("nan") if chip is None else sum(_sending_s(found.exposed, chip).values()),
        compile_s=time.perf_counter() - start_s,
    )


def _rooflines(found: Analysis, chip: Chip, num_devices: int) -> dict[str, float]:
    need = found.bytes
    return {
        "arithmetic": chip.seconds_of(found.flops_by_type) / num_devices,
        # The state is read and written; temporaries are written and read.
        "memory": 2 * (need.arguments + need.temporaries) / chip.memory_bandwidth,
        **_sending_s(found.received, chip),
    }


def _sending_s(received: Received, chip: Chip) -> dict[str, float]:
    """Return the seconds that links inside a node and the network between nodes need."""
    return {
        "links": received.inside / chip.network_bandwidth,
        "network": received.between / chip.node_bandwidth,
    }


def by_throughput(found: Sequence[Outlook]) -> list[Outlook]:
    """Sort predictions: first what fits, then by samples per second, or if unknown by bytes sent."""

    def order(one: Outlook) -> tuple[Any, ...]:
        sent = sum(one.analysis.traffic.values()) * one.num_micro_batches
        pace = one.step_s / one.global_batch_size
        return not one.fits, math.inf if math.isnan(pace) else pace, sent / one.global_batch_size

    return sorted(found, key=order)
