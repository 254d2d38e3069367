"""Lowers the learning-rate gain at once when the loss leaps, in the step itself.

The noise says how large the gain of a batch may be if noise is all that limits the learning rate. It does
not know which rate a network bears. Where that is less, the loss leaps, and some tens of updates later the
network may be lost. The tuner hears of a loss a few steps later, which may be hundreds of short steps. So the
step compares the loss with its own past: once it is far above, the gain is halved at every update until it is
not, down to 1. From then on the gain has a ceiling that rises slowly, as in the congestion control of
networks.

At a gain of 1 nothing is done: the user's own learning rate is the user's own.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxgoodput._pytree import struct

MEMORY, LEAST = 64.0, 16.0  # losses that the mean remembers, and how many it needs
NEWEST = 4.0  # losses that the newest are an average over
# Mean deviations above the mean that are a leap, 13 standard deviations of an average over `NEWEST` normal
# losses; and a share of the mean that it also exceeds, since losses may hardly vary.
WIDTH, SHARE = 6.0, 0.05
# Most that a single loss counts, in leaps: it takes three in a row.
OUTLIER = 2.0
SLOWLY = 0.001  # weight of a loss that may be one of a leap
FALL, RISE = 0.5, 1.001  # of the ceiling, per update: it doubles in 700 updates
NONE = 1e9  # no ceiling


@struct
class GainCeiling:
    """The largest gain that the loss seems to bear, and the past of the loss. Scalars."""

    mean: Any
    """Mean loss."""
    deviation: Any
    """Mean distance from it."""
    newest: Any
    """Mean of the newest losses above it."""
    num_losses: Any
    """Losses that `mean` is over, up to `MEMORY`."""
    gain: Any
    """The ceiling."""

    @classmethod
    def none(cls) -> "GainCeiling":
        """Return no ceiling, before any loss."""
        zero = jnp.zeros(())
        return cls(
            mean=zero,
            deviation=zero,
            newest=zero,
            num_losses=zero,
            gain=jnp.asarray(NONE, zero.dtype),
        )

    def after(self, loss: Any, gain: Array) -> "GainCeiling":
        """Return the ceiling after a loss, which updates with factors up to `gain` have led to."""
        loss = jnp.asarray(loss, self.mean.dtype)
        first, is_judged = self.num_losses < 1, (gain > 1) & (self.num_losses >= LEAST)
        mean = jnp.where(first, loss, self.mean)
        leap = WIDTH * self.deviation + SHARE * jnp.abs(mean)
        above = loss - mean
        above = jnp.where(is_judged, jnp.clip(above, -OUTLIER * leap, OUTLIER * leap), above)
        newest = self.newest + (above - self.newest) / NEWEST
        leaps = is_judged & (newest > leap)
        num_losses = jnp.minimum(self.num_losses + 1, MEMORY)
        # What may become a leap must not change what it is compared with.
        is_odd = is_judged & (newest > leap / 2)
        share = jnp.where(is_odd, jnp.where(leaps, 0, SLOWLY), 1 / num_losses)
        return dataclasses.replace(
            self,
            mean=mean + share * above,
            deviation=self.deviation + share * (jnp.abs(above) - self.deviation),
            newest=newest,
            num_losses=num_losses,
            gain=jnp.where(leaps, jnp.maximum(FALL * gain, 1), jnp.minimum(RISE * self.gain, NONE)),
        )
