"""Trials: a few real steps with a size or a strategy that was never timed, which end with a verdict."""

import math
from dataclasses import dataclass, field

from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.tune.verdict import Situation, Verdict


@dataclass
class Trials:
    """The trial that is running, if any, and the strategies that have had theirs."""

    is_running: bool = False
    home: BatchConfig | None = None
    """In use before the trial, until the trial has succeeded."""
    strategies: list[str] = field(default_factory=list)
    """Strategies that were ever switched to."""

    def resumed(self, current: BatchConfig) -> None:
        """Go on with `current`, perhaps on other devices. A trial ends if there is no way back to its home.

        Times of other strategies are not known any more, so that each may be tried again.
        """
        here = current.strategy, current.num_replicas
        if self.home is not None and (self.home.strategy, self.home.num_replicas) != here:
            self.is_running, self.home = False, None
        self.strategies = []

    def switched(self, situation: Situation, verdict: Verdict) -> None:
        """Note that the run switches to the configuration of a verdict, and whether as a trial."""
        here, config = situation.here, verdict.config
        home = None if situation.home is None else situation.home.config
        # A size that was never timed is on trial, whatever the model predicts for it. Beside a compilation
        # every time is disturbed, and a trial that changes nothing would teach nothing.
        is_untimed = (
            config.strategy == here.config.strategy and config.micro_batch_size not in here.timed
        )
        is_untried = math.isnan(verdict.goodput) or (is_untimed and not situation.disturbed)
        # A batch that the user's own schedule asks for is never on trial.
        # Nor is a batch that the run goes back to because of its losses.
        is_chosen = situation.scheduled is None and not verdict.denied
        self.is_running = is_chosen and config != home and is_untried
        self.home = here.config if self.is_running else None
        if config.strategy not in self.strategies:
            self.strategies.append(config.strategy)

    def kept(self, situation: Situation, verdict: Verdict) -> None:
        """Note that a verdict keeps the present configuration, which ends a trial."""
        self.is_running = False
        if situation.home is not None and verdict.gain > 1:
            self.home = None  # the trial has succeeded
