"""`Evaluations`: evaluates the state of a run between two steps, and tells whether it is the best so far."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np

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

    @property
    def num_batches(self) -> int:
        """Batches of evaluations begun so far: a sign of life."""
        return 0 if self.start.evaluator is None else self.start.evaluator.num_batches

    def evaluate(self, *, meanwhile: Callable[[], None]) -> bool:
        """Evaluate the state, if there is anything to evaluate on; True if it is the best by `Saving.best`.

        `meanwhile` is called before every batch, and may raise.
        """
        if self.start.evaluator is None:
            return False
        now, start_s = self.start.now, self.clock.now()
        # The user's own code here (samples, `summarize`) may transfer as it likes.
        with self.ledger.bucket("evaluation"), jax.transfer_guard("allow"):
            with now.paused():
                self.start.evaluator.compile(now.engine.abstract_state())
            outputs = self.start.evaluator(now.state, meanwhile=meanwhile)
            summary = self.summarize(outputs)
            metrics = {name: float(value) for name, value in summary.items()}
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
        return self.start.run.decisions.everywhere(is_best or not self.start.is_chief)
