"""Goodput = throughput x statistical efficiency: the number that every decision maximises."""

import numpy as np

from jaxgoodput._pytree import static, struct
from jaxgoodput.goodput.efficiency import Grad, efficiency
from jaxgoodput.goodput.perf import (
    Feeding,
    Numeric,
    PerfParams,
    Placement,
    feeding_time,
    namespace,
    step_time,
)


@struct
class GoodputModel:
    """Useful samples per second of any configuration, from what a job measured.

    NaN is an answer: it says that a link or the gradient noise was never measured.
    """

    perf: PerfParams
    """What a step costs."""
    grad: Grad
    """What a sample is worth."""
    base_batch_size: int = static()
    """Samples; what the learning rate was tuned for."""
    residuals: tuple[tuple[int, float], ...] = static(default=())
    """(micro-batch size, measured / modelled step time), by size: a size that was measured counts as
    it was measured, and its neighbours lean on it."""
    feeding: Feeding | None = None
    """What prepares batches while others train: no step is shorter. None: nothing takes its time."""

    def throughput(
        self, placement: Placement, micro_batch_size: Numeric, num_micro_batches: Numeric = 1
    ) -> Numeric:
        """Samples per second over all replicas."""
        num_samples = placement.num_replicas * micro_batch_size * num_micro_batches
        seconds = step_time(self.perf, placement, micro_batch_size, num_micro_batches)
        seconds = seconds * self.residual(micro_batch_size)
        if self.feeding is not None:
            xp = namespace(seconds, num_samples)
            seconds = xp.maximum(seconds, feeding_time(self.feeding, num_samples))
        return num_samples / seconds

    def residual(self, micro_batch_size: Numeric) -> Numeric:
        """What the modelled step time must be multiplied by: 1 where nothing is known better.

        Interpolated between measured sizes in log-log, constant beyond them. With `residuals`, sizes
        must be numbers of the host.
        """
        if not self.residuals:
            return 1.0
        sizes, ratios = np.log(self.residuals).T
        return np.exp(np.interp(np.log(micro_batch_size), sizes, ratios))

    def efficiency(self, global_batch_size: Numeric) -> Numeric:
        """Progress per sample relative to the base batch: 1 at the base, above 1 below it."""
        return efficiency(self.grad, global_batch_size / self.base_batch_size)

    def goodput(
        self, placement: Placement, micro_batch_size: Numeric, num_micro_batches: Numeric = 1
    ) -> Numeric:
        """Useful samples per second: throughput in the coin of the base batch."""
        num_samples = placement.num_replicas * micro_batch_size * num_micro_batches
        return self.throughput(placement, micro_batch_size, num_micro_batches) * self.efficiency(
            num_samples
        )
