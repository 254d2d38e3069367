"""Estimates how long fixed batches would have taken to come as far as a run has, in place of a sweep.

The time of the run's steps is measured. How much faster or slower another batch would be at that moment, at
its best split into micro-batches, is predicted by the run's own model. The comparison does not flatter the
run: its own time is wall time, with trials, waits and evaluations, but the others are charged for steps
alone. Two caveats remain: the goodput of a batch that was never tried is only predicted, and the noise is
measured along the path that the run took.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import Placement
from jaxgoodput.goodput.search import BatchLimits


def fixed_goodput(
    model: GoodputModel, placement: Placement, limits: BatchLimits
) -> dict[int, float]:
    """Return the useful samples/s of the base batch and of its halves and doubles within the limits.

    These are the batches that a sweep would try. Batches of unknown goodput are left out.
    """
    replicas = int(placement.num_replicas)
    low, high = limits.span
    found = {}
    batch = limits.base
    while batch % 2 == 0 and batch // 2 >= limits.smallest:
        batch //= 2
    while batch <= limits.max:
        counts = np.arange(1, limits.max_micro_batches + 1)
        micro = batch / replicas / counts
        fits = (micro >= low) & (micro <= high) & (micro % 1 == 0)
        if limits.sizes is not None:
            fits &= np.isin(micro, limits.sizes)
        if fits.any():
            speed = np.max(model.goodput(placement, micro[fits], counts[fits]))
            if np.isfinite(speed):
                found[batch] = float(speed)
        batch *= 2
    return found


@dataclass(frozen=True)
class Sweep:
    """Estimated times of fixed batches over the stretch of a run in which its model was known."""

    seconds: Mapping[int, float] = field(default_factory=dict)
    """Seconds of steps by global batch."""
    own_s: float = 0.0
    """Wall time of the run itself over the same stretch."""
    progress: float = 0.0
    """Length of the stretch, in base steps."""

    @property
    def total_s(self) -> float:
        """Seconds for all fixed batches, one after another."""
        return sum(self.seconds.values())

    def after(
        self,
        progress: float,
        wall_s: float,
        steps_s: float,
        goodput: float,
        fixed: Mapping[int, float],
    ) -> "Sweep":
        """Return the sweep after `progress` more base steps, whose steps took `steps_s` of `wall_s` seconds.

        `goodput` is the predicted goodput of the run's batch; `fixed` holds the others, from `fixed_goodput`.
        The stretch is left out if they are unknown, and a batch is left out if it is not in every `fixed`.

        >>> one = Sweep().after(10.0, 6.0, 4.0, 80.0, {32: 40.0, 64: 80.0})
        >>> one.seconds, one.own_s, one.after(10.0, 6.0, 5.0, 80.0, {32: 80.0}).seconds
        ({32: 8.0, 64: 4.0}, 6.0, {32: 13.0})
        """
        if not fixed or not goodput > 0 or progress < 0:
            return self
        names = fixed.keys() & self.seconds.keys() if self.seconds else fixed.keys()
        return dataclasses.replace(
            self,
            seconds={
                b: self.seconds.get(b, 0.0) + steps_s * goodput / fixed[b] for b in sorted(names)
            },
            own_s=self.own_s + wall_s,
            progress=self.progress + progress,
        )
