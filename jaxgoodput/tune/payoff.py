"""What the rest of the run is worth: how much is left, and whether compiling other batches pays off."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.goodput.efficiency import Grad, gain
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.tune.batch import hoped_gain
from jaxgoodput.tune.plan import scheduled
from jaxgoodput.tune.timings import TimingTable


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """How long the run is; exactly one of `base_steps` and `epochs` is given."""

    base_steps: float | None
    """Length in base steps."""
    epochs: int | None
    """Length in passes over the data."""
    dataset_size: int
    """Samples of the data set."""
    schedule: Mapping[int | float, int] | None = None
    """The user's own schedule: global batches by the share of the run at which they begin."""

    @property
    def num_samples(self) -> int:
        """Length in samples; 0 if the run ends by progress."""
        return (self.epochs or 0) * self.dataset_size

    def share_done(self, progress: float, samples: int) -> float:
        """Return how much of the run is done after so many base steps and samples."""
        if self.base_steps is not None:
            return progress / self.base_steps
        return samples / self.num_samples

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


def compiling_pays(
    grad: Grad,
    limits: BatchLimits,
    current: BatchConfig,
    *,
    sizes: Sequence[int],
    ready: Collection[int],
    table: TimingTable,
    num_nodes: int,
    left_s: float,
    compile_s: float,
    min_gain: float,
    num_strategies: int,
) -> bool:
    """Return whether other batches may save more of the time left than compiling them takes.

    `sizes` are all micro-batch sizes that may be used, `ready` those that are compiled, and `compile_s` the
    seconds that one size takes. `num_strategies` above 1 says that other strategies may be compiled, too.
    """
    batches = np.multiply.outer(sizes, np.arange(1, limits.max_micro_batches + 1))
    batches *= current.num_replicas
    hopes = hoped_gain(grad, limits, current.global_batch_size, batches)
    hopes *= _correction(current, sizes, batches, table, num_nodes)
    is_ready = np.isin(sizes, list(ready))
    hope = float(hopes[~is_ready].max(initial=0.0) / hopes[is_ready].max(initial=1.0))
    price_s = compile_s * max(len(sizes) - 1, 1)
    if num_strategies > 1:
        # The gain of another strategy is unknown; assume one that barely justifies a change.
        price_s = compile_s * num_strategies
        if left_s * min_gain > price_s:
            return True
    return hope >= 1 + min_gain and left_s * (1 - 1 / hope) > price_s


def _correction(
    current: BatchConfig,
    sizes: Sequence[int],
    batches: np.ndarray,
    table: TimingTable,
    num_nodes: int,
) -> np.ndarray:
    """Return by what factor each hope, [sizes, counts], must be corrected; 1 for sizes not timed."""
    now_s = table.step_s(num_nodes, current)
    one = [dataclasses.replace(current, micro_batch_size=s, num_micro_batches=1) for s in sizes]
    there_s = np.array([table.step_s(num_nodes, c) for c in one])
    there_s[np.asarray(sizes) == current.micro_batch_size] = math.nan
    counts = batches / batches[:, :1]  # a micro-batch never takes longer than a whole step of one
    known = now_s / (there_s[:, None] * counts) * np.sqrt(batches / current.global_batch_size)
    return np.nan_to_num(known, nan=1.0)
