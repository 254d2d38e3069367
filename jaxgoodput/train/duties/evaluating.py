"""`Evaluations`: evaluates the state of a run between two steps, and tells whether it is the best so far."""

from collections.abc import Callable, Mapping

import jax
import numpy as np

from jaxgoodput.clock import Clock
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.events import EvalEnd
from jaxgoodput.train.analyst import Analyst
from jaxgoodput.train.config import Config
from jaxgoodput.train.prepare import PreparedRun


class Evaluations:
    """The evaluations of a run; `summarize` makes numbers of the outputs of all samples."""

    def __init__(
        self,
        start: PreparedRun,
        config: Config,
        analyst: Analyst,
        ledger: TimeLedger,
        clock: Clock,
        *,
        summarize: Callable[[Mapping[str, np.ndarray]], Mapping[str, float]],
    ):
        self._now = start.now
        self._run = start.run
        self._evaluator = start.evaluator  # None if there are no held-out samples
        self._checkpoints = start.checkpoints
        self._is_chief = start.is_chief
        self._wants_best = config.saving.best is not None
        self._analyst = analyst
        self._ledger = ledger
        self._clock = clock
        self._summarize = summarize

    @property
    def num_batches(self) -> int:
        """Batches of evaluations begun so far: a sign of life."""
        return 0 if self._evaluator is None else self._evaluator.num_batches

    def evaluate(self, *, meanwhile: Callable[[], None]) -> bool:
        """Evaluate the state, if there is anything to evaluate on; True if it is the best by `Saving.best`.

        `meanwhile` is called before every batch, and may raise.
        """
        if self._evaluator is None:
            return False
        now, start_s = self._now, self._clock.now()
        # The user's own code here (samples, `summarize`) may transfer as it likes.
        with self._ledger.bucket("evaluation"), jax.transfer_guard("allow"):
            with now.paused():
                self._evaluator.compile(now.engine.abstract_state())
            outputs = self._evaluator(now.state, meanwhile=meanwhile)
            summary = self._summarize(outputs)
            metrics = {name: float(value) for name, value in summary.items()}
        end_s = self._clock.now()
        now.evaluated = now.step, metrics
        self._analyst.tell(
            EvalEnd(
                step=now.step,
                progress=now.progress,
                at_s=end_s,
                seconds=end_s - start_s,
                metrics=metrics,
            )
        )
        is_best = self._checkpoints.is_best(metrics)
        # Only process 0 knows all checkpoints, so that its answer counts.
        return self._wants_best and self._run.decisions.everywhere(is_best or not self._is_chief)
