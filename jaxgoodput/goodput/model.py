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
    """Predicts the useful samples per second of any configuration, from a job's measurements.

    A prediction is NaN if a link or the gradient noise was never measured.
    """

    perf: PerfParams
    """Cost of a step."""
    grad: Grad
    """Gradient moments, which tell the worth of a sample."""
    base_batch_size: int = static()
    """Batch that the learning rate was tuned for, in samples."""
    residuals: tuple[tuple[int, float], ...] = static(default=())
    """(micro-batch size, measured / modelled step time), by size: corrections of the model at measured sizes,
    interpolated between them."""
    feeding: Feeding | None = None
    """Time to prepare a batch, which no step can be shorter than; None to ignore it."""

    def throughput(
        self, placement: Placement, micro_batch_size: Numeric, num_micro_batches: Numeric = 1
    ) -> Numeric:
        """Return the samples per second over all replicas."""
        num_samples = placement.num_replicas * micro_batch_size * num_micro_batches
        seconds = step_time(self.perf, placement, micro_batch_size, num_micro_batches)
        seconds = seconds * self.residual(micro_batch_size)
        if self.feeding is not None:
            xp = namespace(seconds, num_samples)
            seconds = xp.maximum(seconds, feeding_time(self.feeding, num_samples))
        return num_samples / seconds

    def residual(self, micro_batch_size: Numeric) -> Numeric:
        """Return the factor that corrects the modelled step time; 1 without measured sizes.

        It is interpolated between measured sizes in log-log, and constant beyond them. With `residuals`,
        sizes must be host numbers.
        """
        if not self.residuals:
            return 1.0
        sizes, ratios = np.log(self.residuals).T
        return np.exp(np.interp(np.log(micro_batch_size), sizes, ratios))

    def efficiency(self, global_batch_size: Numeric) -> Numeric:
        """Return the progress per sample relative to the base batch: 1 at the base, above 1 below it."""
        return efficiency(self.grad, global_batch_size / self.base_batch_size)

    def goodput(
        self, placement: Placement, micro_batch_size: Numeric, num_micro_batches: Numeric = 1
    ) -> Numeric:
        """Return the useful samples per second: throughput, counted in samples of the base batch."""
        num_samples = placement.num_replicas * micro_batch_size * num_micro_batches
        return self.throughput(placement, micro_batch_size, num_micro_batches) * self.efficiency(
            num_samples
        )
