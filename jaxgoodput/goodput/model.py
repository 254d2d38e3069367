"""Goodput = throughput x statistical efficiency: the number that every decision maximises."""

from jaxgoodput._struct import static, struct
from jaxgoodput.goodput.efficiency import GradParams, efficiency
from jaxgoodput.goodput.perf import Numeric, PerfParams, Placement, step_time


@struct
class GoodputModel:
    """Useful samples per second of any configuration, from what a job measured.

    NaN is an answer: it says that a link or the gradient noise was never measured.
    """

    perf: PerfParams
    grad: GradParams
    base_batch_size: int = static()  # samples; what the learning rate was tuned for

    def throughput(
        self, placement: Placement, micro_batch_size: Numeric, num_micro_batches: Numeric = 1
    ) -> Numeric:
        """Samples per second over all replicas."""
        num_samples = placement.num_replicas * micro_batch_size * num_micro_batches
        return num_samples / step_time(self.perf, placement, micro_batch_size, num_micro_batches)

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
