"""Which gradients are compared to measure the noise, by layout: a rule, not a setting.

Noise is the disagreement between the gradients of groups of samples. What a group is depends on what a
layout can see without sending or keeping more than a step does anyway:

* "replica": one replica's micro-batch; where parameters are whole in a replica, or the noise is measured
  without a preconditioner. No bias. No memory: under FSDP the gradient of one leaf at a time is whole,
  as in any FSDP step.
* "copy": one micro-batch of all replicas of a copy; under FSDP with a preconditioner, which is cut like the
  parameters and would have to be gathered for each replica's own gradient. No bias, but fewer groups, so
  noisier estimates. No memory.
* the difference of two updates' gradients, where a batch is one group only. Biased by what the parameters
  moved between the two updates, which adds to the noise. Memory: one gradient, cut like the parameters.

Groups of any kind add up within a batch, for the moments only need squared norms of gradients that share
the batch among them (`step.py`). With several micro-batches there are several groups under every
layout. Law tested: where two of them work, they estimate the same moments.
"""

from dataclasses import dataclass
from typing import Literal

from jaxgoodput.parallel.strategy import Strategy


@dataclass(frozen=True)
class NoiseGroups:
    """What a group is, and how many of them one micro-batch on every replica makes."""

    group: Literal["replica", "copy"]
    """Whose gradients are compared."""
    num_groups: int
    """At least 1; a single one has to be compared with the batch before."""

    @property
    def needs_two_steps(self) -> bool:
        """Whether a batch of one micro-batch is one group, to be compared with the batch before."""
        return self.num_groups == 1


def noise_groups(strategy: Strategy, *, preconditioned: bool) -> NoiseGroups:
    """The rule, for a strategy.

    >>> noise_groups(Strategy(fsdp=8), preconditioned=False)
    NoiseGroups(group='replica', num_groups=8)
    >>> noise_groups(Strategy(data=2, fsdp=4), preconditioned=True)
    NoiseGroups(group='copy', num_groups=2)
    """
    if strategy.fsdp > 1 and preconditioned:
        return NoiseGroups(group="copy", num_groups=strategy.data)
    return NoiseGroups(group="replica", num_groups=strategy.num_replicas)
