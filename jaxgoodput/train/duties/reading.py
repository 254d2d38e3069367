"""`BatchReader`: gets the next batch, keeps account of it, and says why the data end."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
from absl import logging

from jaxgoodput.clock import Clock
from jaxgoodput.data.loader import StepBatch
from jaxgoodput.engine.programs.program import Program
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.events import ReadsRetried
from jaxgoodput.train.analyst import Analyst
from jaxgoodput.train.config import Config
from jaxgoodput.train.duties.blocks import Blocks
from jaxgoodput.train.prepare import PreparedRun

SHORT_WAIT_S = 1e-4  # is not booked
LOOK_S = 0.1  # between two looks at whether the run is to stop


@dataclass
class BatchReader:
    """Gets the batches of a run, ready to be dispatched."""

    start: PreparedRun
    config: Config
    analyst: Analyst
    ledger: TimeLedger
    clock: Clock
    num_retried: int = 0
    """Reads that were retried, as last told."""

    def __post_init__(self):
        self._last_batch = LastBatch(self.start, self.config, self.ledger)
        self._blocks = Blocks(self.start, self.config, self.analyst)

    def next(self, num_free: float, *, meanwhile: Callable[[], None]) -> StepBatch | None:
        """Return the next batch, whose programs are compiled; None at the end of the data.

        If the next `num_free` steps need no attention, it may be a block of them (`StepBatch.count`).
        `meanwhile` is called now and then while it waits, and may raise.
        """
        start = self.start
        self._give_way(meanwhile)
        batch = self._blocks.next(num_free, meanwhile)
        if batch is None:
            return None
        if math.isfinite(feeding_s := start.feed.feeding_s):
            self.analyst.fed(batch.config.global_batch_size, feeding_s)
        if batch.wait_s > SHORT_WAIT_S:
            self.ledger.add(start.feed.wait_bucket, batch.wait_s)
        if (num_retried := start.loader.num_retried) > self.num_retried:
            self.num_retried = num_retried
            self.analyst.tell(ReadsRetried(step=start.now.step, num_retried=num_retried))
        self._last_batch.compile_now(batch)
        self._last_batch.compile_ahead()
        return batch

    def _give_way(self, meanwhile: Callable[[], None]) -> None:
        """Wait while something is being compiled that training should wait for; a stop ends that early."""
        while self.start.strategies.wait_if_hurried(0.0):
            meanwhile()
            with self.start.now.paused(), self.ledger.bucket("compilation"):
                self.start.strategies.wait_if_hurried(LOOK_S)

    def tell_end(self) -> None:
        """Say what was dropped at the end of the data, and warn if they have ended the run too early."""
        start, now, total = self.start, self.start.now, self.config.base_steps
        if start.total_samples is not None and now.samples < start.total_samples:
            left = start.total_samples - now.samples
            logging.info('the last %d samples were dropped, as last_batch="drop" says', left)
        if total is not None and now.progress < total and start.is_chief:
            logging.warning(
                "the data ended at %.0f %% of base_steps=%g, after %d samples: schedules did not come to "
                "their end. Let the stream repeat, or set base_steps to what there is.",
                100 * now.progress / total,
                total,
                now.samples,
            )

    def tell_if_nothing_is_left(self, *, is_complete: bool) -> None:
        """Warn if the run resumes from a checkpoint of its end; `is_complete`: `base_steps` are done."""
        start, now, config = self.start, self.start.now, self.config
        left = math.inf if start.total_samples is None else start.total_samples - now.samples
        by_samples = left < (now.batch.global_batch_size if config.last_batch == "drop" else 1)
        if not start.is_chief or not (by_samples or is_complete):
            return
        name, value = ("epochs", config.epochs) if by_samples else ("base_steps", config.base_steps)
        logging.warning(
            "nothing to do: %s=%g are done, with step %d in %s. Raise %s, or name another workdir.",
            name,
            value,
            now.step,
            config.workdir,
            name,
        )


@dataclass
class LastBatch:
    """Compiles what a run's last batch needs, which may be smaller than the others."""

    start: PreparedRun
    config: Config
    ledger: TimeLedger
    compiled_for: BatchConfig | None = None

    def compile_ahead(self) -> None:
        """Compile in the background what the batch in use leaves at the end, from half of the run on."""
        now, total = self.start.now, self.start.total_samples
        if total is None or 2 * now.samples < total or self.compiled_for == now.batch:
            return
        self.compiled_for = now.batch
        left = (total - now.samples) % now.batch.global_batch_size
        if self.config.last_batch != "drop":
            sizes = self.start.strategies.compiler(now.batch.strategy)
            sizes.compile_soon(self._programs(left))

    def compile_now(self, batch: StepBatch) -> None:
        """Compile on this thread what `batch` needs if it is a smaller one, unless it is compiled already.

        All processes call this together.
        """
        # Parts are padded to the size of others.
        if batch.parts is not None or batch.is_whole:
            return
        now = self.start.now
        with now.paused(), self.ledger.bucket("compilation"), jax.transfer_guard("allow"):
            for program in self._programs(batch.num_samples):
                now.engine.compile_program(program)
            self.start.run.decisions.meet(f"the last batch, step {now.step}")

    def _programs(self, num_samples: int) -> tuple[Callable[[], Program], ...]:
        """Return functions that compile what the last, smaller batch needs; empty if nothing is missing."""
        now = self.start.now
        micro, replicas = now.batch.micro_batch_size, now.batch.num_replicas
        if now.engine.layout.strategy.stage > 1:
            return ()  # it is padded to the size of others
        full, rest = divmod(num_samples, micro * replicas)
        own = -(-rest // replicas)
        return now.engine.last_programs(own, alone=not full) if 0 < own < micro else ()
