"""`BatchSwitcher`: takes up another batch or strategy between two steps."""

import dataclasses
from dataclasses import dataclass

import jax
from absl import logging

from jaxgoodput.clock import Clock
from jaxgoodput.goodput.memory import TooLarge
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.events import Resharded
from jaxgoodput.parallel.move import MoveDoesNotFit
from jaxgoodput.train.analyst import Analyst
from jaxgoodput.train.config import Config
from jaxgoodput.train.prepare import PreparedRun


@dataclass
class BatchSwitcher:
    """Changes the batch and the strategy of a run; nothing changes if the new ones do not fit."""

    start: PreparedRun
    config: Config
    analyst: Analyst
    ledger: TimeLedger
    clock: Clock

    def take_up(self, batch: BatchConfig) -> bool:
        """Use this batch from the next step on; False, after a warning, if it cannot be used."""
        now = self.start.now
        # The wish may be of an earlier generation, which had more or fewer processes.
        replicas = self.start.strategies.engine(batch.strategy).num_replicas
        batch = dataclasses.replace(batch, num_replicas=replicas)
        with now.paused():
            refusal = self._refusal(batch)
            if refusal is not None:
                logging.warning(
                    "training goes on with batches of %d samples: %d in %d micro-batches of %d on each of "
                    "%d replicas %s.",
                    now.batch.global_batch_size,
                    batch.global_batch_size,
                    batch.num_micro_batches,
                    batch.micro_batch_size,
                    batch.num_replicas,
                    refusal,
                )
                return False
            if batch.strategy != now.batch.strategy and not self._switch(batch.strategy):
                return False
            if now.engine.spans:
                self._compile_everywhere(batch)
            now.batch = batch
            with self.ledger.bucket("compilation"), jax.transfer_guard("allow"):
                # Compiles on this thread only if nothing is compiled in the background.
                self.start.strategies.use(batch)
        return True

    def _refusal(self, batch: BatchConfig) -> str | None:
        """Return why a requested batch cannot be used; None if it can."""
        if not self.config.batch.allows(batch):
            return "are not what Config.batch allows"
        if batch.num_micro_batches > 1 and not self.config.accumulates:
            return "would be split, which Config does not allow"
        with self.ledger.bucket("compilation"), jax.transfer_guard("allow"):
            fits = self.start.strategies.fits(batch)
            self.start.run.decisions.meet(f"a batch, step {self.start.now.step}")
        return None if self.start.run.decisions.everywhere(fits) else "do not fit into memory"

    def _switch(self, strategy: str) -> bool:
        """Move the state to the layout of a strategy, in memory, while the loop waits.

        If it does not fit into the memory of some process, nothing moves, and False is returned.
        """
        now, refusal = self.start.now, None
        try:
            with self.ledger.bucket("compilation"), jax.transfer_guard("allow"):
                self.start.strategies.require(strategy)
                jax.block_until_ready(now.state)  # steps under way take memory
                new = self.start.strategies.engine(strategy).layout
                now.engine.engines.require_room(now.engine.layout, new)
        except (MoveDoesNotFit, TooLarge) as error:
            refusal = error
        if not self.start.run.decisions.everywhere(refusal is None):
            return self._stay(strategy, refusal or "it does not fit in another process")
        try:
            self._move(strategy)
        except (MoveDoesNotFit, TooLarge) as error:
            return self._stay(strategy, error)
        return True

    def _stay(self, strategy: str, why: object) -> bool:
        logging.warning(
            "the strategy %s cannot be used and is not tried again: %s. Training goes on under %s.",
            strategy,
            why,
            self.start.now.batch.strategy,
        )
        self.start.strategies.leave_out(strategy)
        return False

    def _compile_everywhere(self, batch: BatchConfig) -> None:
        """Have every process compile a batch's steps before one of them waits in a collective."""
        with self.ledger.bucket("compilation"), jax.transfer_guard("allow"):
            engine, splits = (
                self.start.strategies.engine(batch.strategy),
                batch.num_micro_batches > 1,
            )
            programs = engine.training_programs(batch.micro_batch_size, accumulate=splits)
            shared = engine.shared_programs(accumulate=True) if splits else ()
            for program in (*programs, *shared):
                engine.compile_program(program)
            self.start.run.decisions.meet(f"step {self.start.now.step}")

    def _move(self, strategy: str) -> None:
        now = self.start.now
        old, new = now.engine, self.start.strategies.engine(strategy)
        with self.ledger.bucket("resharding"), jax.transfer_guard("allow"):
            jax.block_until_ready(now.state)  # its computation is not part of the price
            start_s = self.clock.now()
            plan = old.plan_move(new.layout)
            now.state = jax.block_until_ready(old.move(now.state, new.layout))
        seconds = self.clock.now() - start_s
        self.start.strategies.switched(seconds, plan.bytes_moved)
        self.analyst.tell(
            Resharded(
                step=now.step,
                before=now.batch.strategy,
                after=strategy,
                seconds=seconds,
                bytes_moved=plan.bytes_moved,
                largest_send_bytes=plan.largest_send_bytes,
                peak_extra_bytes=plan.peak_extra_bytes,
            )
        )
        now.engine = new
        self.start.loader.place(new.layout.batch_sharding)
