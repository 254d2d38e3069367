"""Estimates how much of the run is left, and whether compiling other batches pays off in that time."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.goodput.efficiency import Grad, gain
from jaxgoodput.tune.batch import hoped_gain
from jaxgoodput.tune.plan import scheduled
from jaxgoodput.tune.timings import TimingTable
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

    @property
    def num_samples(self) -> int:
        """Length in samples; 0 if the run ends by progress."""
        return (self.epochs or 0) * self.dataset_size

    def share_done(self, progress: float, samples: int) -> float:
        """Return how much of the run is done after `progress` base steps and `samples`."""
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
    situation: Situation,
    sizes: Sequence[int],
    table: TimingTable,
    *,
    compile_s: float,
    num_strategies: int,
) -> bool:
    """Return whether other batches may save more of the time left than compiling them takes.

    `sizes` are all micro-batch sizes that may be used, `table` has the step times of the present strategy,
    and `compile_s` is the time that one size takes. `num_strategies` above 1 says that other strategies may
    be compiled, too.
    """
    current, limits, min_gain = situation.current, situation.here.limits, situation.caution.min_gain
    batches = np.multiply.outer(sizes, np.arange(1, limits.max_micro_batches + 1))
    batches *= current.num_replicas
    hopes = hoped_gain(situation.grad, limits, current.global_batch_size, batches)
    hopes *= _correction(situation, sizes, batches, table)
    is_ready = np.isin(sizes, list(situation.here.ready))
    hope = float(hopes[~is_ready].max(initial=0.0) / hopes[is_ready].max(initial=1.0))
    price_s = compile_s * max(len(sizes) - 1, 1)
    if num_strategies > 1:
        # The gain of another strategy is unknown; assume one that barely justifies a change.
        price_s = compile_s * num_strategies
        if situation.left_s * min_gain > price_s:
            return True
    return hope >= 1 + min_gain and situation.left_s * (1 - 1 / hope) > price_s


def _correction(
    situation: Situation, sizes: Sequence[int], batches: np.ndarray, table: TimingTable
) -> np.ndarray:
    """Return the factor that corrects each `hoped_gain`, [sizes, counts], by timed steps; 1 if not timed."""
    current, num_nodes = situation.current, situation.here.placement.num_nodes
    one = [dataclasses.replace(current, micro_batch_size=s, num_micro_batches=1) for s in sizes]
    there_s = np.array([table.step_s(num_nodes, c) for c in one])
    there_s[np.asarray(sizes) == current.micro_batch_size] = math.nan
    counts = batches / batches[:, :1]  # a micro-batch never takes longer than a whole step of one
    known = (
        situation.step_s
        / (there_s[:, None] * counts)
        * np.sqrt(batches / current.global_batch_size)
    )
    return np.nan_to_num(known, nan=1.0)
