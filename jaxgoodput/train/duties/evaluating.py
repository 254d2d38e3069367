"""`Evaluations`: evaluates the state of a run between two steps, and tells whether it is the best so far."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
import numpy as np
from absl import logging

from jaxgoodput.clock import Clock
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.events import EvalEnd
from jaxgoodput.train.analyst import Analyst
from jaxgoodput.train.config import Config
from jaxgoodput.train.prepare import PreparedRun


@dataclass
class Evaluations:
    """The evaluations of a run; `summarize` makes numbers of the outputs of all samples."""

    start: PreparedRun
    config: Config
    analyst: Analyst
    ledger: TimeLedger
    clock: Clock
    summarize: Callable[[Mapping[str, np.ndarray]], Mapping[str, float]]
    finish: Callable[[], None]
    """Ends the run at its next step as if it were complete."""
    best_at: float = field(init=False)
    """Base steps at the best evaluation, which may not be saved yet; at first the beginning of the run."""

    def __post_init__(self):
        """Go on from the best evaluation before this start."""
        earlier = self.start.earlier
        is_same = earlier is not None and earlier.best_of == self.config.saving.best
        self.best_at = earlier.best_at if earlier is not None and is_same else 0.0

    @property
    def num_batches(self) -> int:
        """Batches of evaluations begun so far: a sign of life."""
        return 0 if self.start.evaluator is None else self.start.evaluator.num_batches

    def evaluate(self, *, meanwhile: Callable[[], None], at_end: bool = False) -> bool:
        """Evaluate the state, if there is anything to evaluate on; True if it is the best by `Saving.best`.

        `meanwhile` is called before every batch, and may raise. `at_end` says that the run is complete.
        """
        if self.start.evaluator is None:
            return False
        now, start_s = self.start.now, self.clock.now()
        # The user's own code here (samples, `summarize`) may transfer as it likes.
        with self.ledger.bucket("evaluation"), jax.transfer_guard("allow"):
            with now.paused():
                self.start.evaluator.compile(now.engine.abstract_state())
            metrics = self.start.evaluator(now.state, self.summarize, meanwhile=meanwhile)
        end_s = self.clock.now()
        now.evaluated = now.step, metrics
        self.analyst.tell(
            EvalEnd(
                step=now.step,
                progress=now.progress,
                at_s=end_s,
                seconds=end_s - start_s,
                metrics=metrics,
            )
        )
        is_best = self.start.checkpoints.is_best(metrics)
        if self.config.saving.best is None:
            return False
        # Only process 0 knows all checkpoints, so that its answer counts.
        is_best = self.start.run.decisions.everywhere(is_best or not self.start.is_chief)
        if is_best:
            self.best_at = now.progress
        elif self.start.is_chief and not at_end:
            self._lose_patience()
        return is_best

    def _lose_patience(self) -> None:
        """End the run if no evaluation has been the best for as long as the settings say."""
        patience, now = self.config.evaluation.patience_base_steps, self.start.now
        if patience is None:
            return
        saved_at = self.start.checkpoints.best_progress()
        best_at = self.best_at if math.isnan(saved_at) else max(saved_at, self.best_at)
        if now.progress - best_at >= patience:
            logging.info(
                "%s has not improved since base step %.0f, and this is base step %.0f: the run ends "
                "(evaluation.patience_base_steps=%g). The best state is in trainer.restore(best=True).",
                self.config.saving.best,
                best_at,
                now.progress,
                patience,
            )
            self.finish()
