"""What fixed batches would have taken to come as far as a run has: the sweep that nobody has to make.

How fast steps go is the clock's. How much faster or slower another batch is at that moment, at its best split
into micro-batches, is the run's own model's. The run's own time is the wall's, with trials, waits and
evaluations in it; that of the others is of steps alone, so that the run is not flattered. But a batch that
was never tried counts as predicted, and the noise is that of the path that the run took.
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
    """Useful samples/s of what a sweep would try: the base batch, its halves and doubles within the limits.

    {} where the model knows the goodput of none.
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
    """Times of fixed batches to where the run is, since its model was first known."""

    seconds: Mapping[int, float] = field(default_factory=dict)
    """By global batch, steps alone."""
    own_s: float = 0.0
    """Wall time of the run itself over the same stretch."""
    progress: float = 0.0
    """The length of that stretch, base steps."""

    @property
    def total_s(self) -> float:
        """All of the fixed batches one after another."""
        return sum(self.seconds.values())

    def after(
        self,
        progress: float,
        wall_s: float,
        steps_s: float,
        goodput: float,
        fixed: Mapping[int, float],
    ) -> "Sweep":
        """With so many base steps more, for which the run's own steps took `steps_s` of `wall_s`.

        `goodput` is what the model gives the run's batch, and `fixed`, as of `fixed_goodput`, the others; the
        stretch is left out where that is not known. A batch that is not always among them is left out.

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
