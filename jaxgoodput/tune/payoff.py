"""Estimates how much of the run is left, and whether that repays compiling other strategies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxgoodput.goodput.efficiency import Grad, gain
from jaxgoodput.tune.plan import scheduled
from jaxgoodput.tune.verdict import Situation


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """The length of the run; exactly one of `base_steps` and `epochs` is given."""

    base_steps: float | None
    """Length in base steps."""
    epochs: int | None
    """Length in passes over the data."""
    dataset_size: int
    """Samples of the data set."""
    schedule: Mapping[int | float, int] | None = None
    """The user's own schedule: global batches by the share of the run at which they begin."""
    learning_rate: Callable[[float], Any] = lambda at: None
    """The user's own schedule of the learning rate; it may return None."""

    @property
    def num_samples(self) -> int:
        """Length in samples; 0 if the run ends by progress."""
        return (self.epochs or 0) * self.dataset_size

    def share_done(self, progress: float, samples: int) -> float:
        """Return how much of the run is done after `progress` base steps and `samples`."""
        if self.base_steps is not None:
            return progress / self.base_steps
        return samples / self.num_samples

    def rate(self, progress: float, samples: int, base: int) -> float | None:
        """Return the user's own learning rate now; None if unknown."""
        # The argument that the optimizer's schedules are called with: see `Task.optimizer`.
        rate = self.learning_rate(progress if self.epochs is None else samples / base)
        return None if rate is None else float(rate)

    def scheduled(self, progress: float, samples: int) -> int | None:
        """Return the global batch that the user's schedule asks for now; None without a schedule."""
        if self.schedule is None:
            return None
        return scheduled(self.schedule, self.share_done(progress, samples))

    def left_s(
        self,
        grad: Grad,
        progress: float,
        samples: int,
        *,
        global_batch_size: int,
        base: int,
        step_s: float,
    ) -> float:
        """Return the seconds to the end of the run at a batch; NaN before any step was timed."""
        if self.base_steps is not None:
            return (
                (self.base_steps - progress) * step_s / float(gain(grad, global_batch_size / base))
            )
        return (self.num_samples - samples) / global_batch_size * step_s


def strategies_pay(situation: Situation, *, compile_s: float, num_strategies: int) -> bool:
    """Return whether the time left repays compiling other strategies, at `compile_s` seconds each.

    Their gain is unknown; it is taken to be one that barely justifies a change.
    """
    return situation.left_s * situation.caution.min_gain > compile_s * num_strategies
