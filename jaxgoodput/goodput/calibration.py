"""Corrects the forecast of a sample's worth in a larger batch, upwards or downwards, by the measured loss.

The gradient noise forecasts how much less a sample is worth in a larger batch. When the batch changes, the
loss tells it too: a sample is worth as much less as the loss then falls less per e-fold of samples. The
correction is a factor on the noise, with which the forecast would have been what the loss told. What is
known of it is a distribution. At first it lies around 1; its width (`SPREAD`) was chosen, as expected noise
was 0.5 to 1.1 times the exact one in most models. Every change of the batch
sharpens it by as much as the slopes of the loss are certain. It fades as training goes on, because the
estimate of the noise moves: after an e-fold of samples, it counts for a third.

Only decisions use the corrected noise. Learning rate and progress keep the measured one: a slope of the loss
says little about a single update.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from jaxgoodput.goodput.efficiency import Grad, efficiency

SPREAD = 0.7  # standard deviation of the logarithm of the factor, before any change
LOGS = np.linspace(-2.1, 2.1, 43)  # logarithms of the factors that are considered
# The slope of the loss varies by itself around a change: the least error of a measured ratio.
LEAST_ERROR = 0.1
FREEDOM = 4.0  # degrees of freedom of Student's t, by which a ratio that is far off counts little


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What the loss has said so far about the factor on the measured noise."""

    likelihood: tuple[float, ...] = (0.0,) * len(LOGS)
    """Logarithm of the likelihood of each factor of `LOGS`."""
    num_changes: int = 0
    """Changes of the batch that it rests on."""

    def __post_init__(self):
        """Raise ValueError for another number of factors, as from a checkpoint of another version."""
        if len(self.likelihood) != len(LOGS):
            raise ValueError(
                f"{len(self.likelihood)} likelihoods are given for {len(LOGS)} factors"
            )

    @property
    def factor(self) -> float:
        """The factor on the measured noise: the posterior mean, of logarithms; 1 before any change."""
        if not self.num_changes:
            return 1.0
        posterior = np.array(self.likelihood) - 0.5 * (LOGS / SPREAD) ** 2
        weights = np.exp(posterior - posterior.max())
        return math.exp(float(weights @ LOGS / weights.sum()))

    def corrected(self, grad: Grad) -> Grad:
        """Return the moments for decisions, with corrected noise."""
        return dataclasses.replace(grad, var=self.factor * grad.var)

    def faded(self, weight: float) -> "Calibration":
        """Return what is left of it if it counts for a share `weight` of what it did."""
        return dataclasses.replace(self, likelihood=tuple(weight * x for x in self.likelihood))

    def after(
        self,
        *,
        batches: tuple[int, int],
        gained: tuple[float, float],
        errors: tuple[float, float],
        grad: Grad,
        base: int,
    ) -> "Calibration":
        """Return what is known after a change of the batch.

        All pairs are of what was before the change and after it: global batches, the decrease of the loss
        per e-fold of samples, and its standard errors. `grad` are the measured moments, in units of the
        `base` batch. Nothing is learnt if they are unknown, or if the loss did not clearly fall before.
        """
        if not np.isfinite([*gained, *errors]).all() or not gained[0] > 2 * errors[0]:
            return self
        factors = np.exp(LOGS).reshape(-1, *[1] * np.ndim(grad.var))
        each = dataclasses.replace(grad, var=factors * grad.var)
        old, new = (np.asarray(efficiency(each, batch / base)) for batch in batches)
        ratio = new / old
        if not np.isfinite(ratio).all():
            return self
        error = np.sqrt(errors[1] ** 2 + (ratio * errors[0]) ** 2 + (LEAST_ERROR * gained[0]) ** 2)
        off = (gained[1] - ratio * gained[0]) / error
        seen = -(FREEDOM + 1) / 2 * np.log1p(off**2 / FREEDOM)
        likelihood = tuple((np.array(self.likelihood) + seen).tolist())
        return Calibration(likelihood=likelihood, num_changes=self.num_changes + 1)
