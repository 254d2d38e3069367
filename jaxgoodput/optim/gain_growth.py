"""How fast the learning-rate gain may grow, and that it falls at once when the gradient explodes.

The noise says how large the gain of a batch may be if noise is all that limits the learning rate. It does
not know which rate a network bears. Where that is less, parameters swing ever farther along the directions
of the largest curvature. The gradient shows that first, and ten updates later the network may be lost. The
loss may leap all the same, and has come back. The tuner hears of a step a few steps later, which may be
hundreds of short ones. So the step itself compares the norm with its own past. Once it is far above, the
gain falls to 1, where the swinging ends.

For that to be in time, the gain must not be far beyond what is borne by then. It grows quickly only up to
the largest gain that it had before. Beyond, the more slowly the longer the run is: four times the gain
takes a twentieth of the progress so far.

After an explosion the gain stays at 1 for `HOLD` updates. If the norm is as large at their end as at their
beginning, it is the noise of the gradient that has grown: nothing is left of the explosion. If the norm
still falls, another `HOLD` updates follow. If it is as before, the explosion leaves a limit: half of the
gain that it had. The limit grows in proportion to the progress, with whatever batch, and is gone once it
has doubled. Until then it is reported (`most_worth`), because a larger batch is worth no more than the
limit allows.

At a gain of 1 nothing is done: the user's own learning rate is the user's own.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxgoodput._pytree import struct

MEMORY, LEAST = 64.0, 16.0  # norms that the mean remembers, and how many it needs
# Above the mean by so many mean deviations, and by such a share of the mean: far above.
WIDTH, SHARE = 8.0, 2.0
# Most that a norm counts above the mean, as a share of that: what may become an explosion must not move it.
# The gain does not grow while the norm is above.
MOST = 0.25
HOLD = 32  # updates with a gain of 1 after an explosion; the halves are compared
# The share of a norm that is left if it does not fall, and how many times as large as before it may then be.
KEPT, ANOTHER = 0.8, 10.0
FALL = 0.5  # of the gain, to which it rises quickly again
# The share of the largest growth that an update may have, for each share of the progress that it is worth. If
# the largest growth is 5 %, the gain grows by 30 % while the progress grows by 1 %.
UNTRIED = 600.0


@struct
class GainGrowth:
    """What the next update may do with the gain, and what that rests on. Scalars."""

    mean: Any
    """Mean norm of the gradient."""
    deviation: Any
    """Mean distance from it."""
    num_norms: Any
    """Norms that `mean` is over, up to `MEMORY`."""
    scale: Any
    """Batch size of the last one, over the base batch size."""
    borne: Any
    """Gain up to which it grows quickly. After an explosion it grows no further than this times `regrown`."""
    worth: Any
    """Base steps that an update is worth with that gain."""
    exploded: Any
    """Gain of the last explosion; 0 once the limit is as large."""
    exploded_at: Any
    """Progress then."""
    regrown: Any
    """Progress over what it was then; 1 without an explosion."""
    pace: Any
    """Share of the largest growth per update that the next one may have."""
    explodes: Any
    """Whether the gradient explodes, a bool: the next update has a gain of at most 1."""
    held: Any
    """Updates with a gain of 1 since it has exploded, counted from 1; 0 once it is clear what follows."""
    early: Any
    """Sum of their norms, in the first half of `HOLD`."""
    late: Any
    """The same in the second half."""

    @classmethod
    def first(cls) -> "GainGrowth":
        """Return what holds before any gradient."""
        zero = jnp.zeros(())
        return cls(
            mean=zero,
            deviation=zero,
            num_norms=zero,
            scale=zero,
            borne=zero + 1,
            worth=zero + 1,
            exploded=zero,
            exploded_at=zero + 1,
            regrown=zero + 1,
            pace=zero + 1,
            explodes=zero > 1,
            held=zero,
            early=zero,
            late=zero,
        )

    def limit(self, gain: Array, largest_growth: float) -> Array:
        """Return the largest gain of the next update, after one with `gain`; no limit if growth has none."""
        # Growth from 1, not from a gain that is smaller: a warm-up starts at 0.
        now = jnp.maximum(gain, 1)
        if math.isinf(largest_growth):
            return jnp.full_like(now, jnp.inf)
        grown = now * (1 + self.pace * (largest_growth - 1))
        grown = jnp.where(self.exploded > 0, jnp.minimum(grown, self.borne * self.regrown), grown)
        return jnp.where(self.held > 0, 1, jnp.where(self.pace > 0, grown, now))

    @property
    def most_worth(self) -> Array:
        """Base steps that an update may be worth, at most; 0 if no explosion limits it for long."""
        # Not infinity: a step returns this, and under `jax_debug_infs` nothing may return one.
        return jnp.where((self.exploded > 0) & (self.held <= 0), self.worth * self.regrown, 0)

    def after(
        self, grad_norm: Any, gain: Array, scale: Array, progressed: Array, progress: Array
    ) -> "GainGrowth":
        """Return what holds after an update with factors up to `gain`.

        `grad_norm` is of the batch's mean gradient, and `scale` the batch size over the base batch size. The
        update was worth `progressed` base steps of the `progress` so far.
        """
        norm = jnp.asarray(grad_norm, self.mean.dtype)
        is_finite = jnp.isfinite(norm)
        norm = jnp.where(is_finite, norm, self.mean)
        # A smaller batch has larger norms. A larger one has smaller ones, which the mean comes to follow.
        # Gradients of zero say nothing.
        is_new = (scale < self.scale) | (self.mean <= 0)
        count = jnp.where(is_new, 0, self.num_norms)
        mean = jnp.where(count < 1, norm, self.mean)
        is_known = count >= LEAST
        far = jnp.maximum(WIDTH * self.deviation, SHARE * mean)
        above = norm - mean
        held = jnp.where(is_new, 0, self.held)
        is_held = held > 0
        explodes = (gain > 1) & ((is_known & (above > far)) | ~is_finite) & ~is_held
        early = self.early + jnp.where(held <= HOLD / 2, norm, 0)
        late = self.late + jnp.where(held > HOLD / 2, norm, 0)
        level = late / (HOLD / 2)  # of the norm, at the end
        is_high = (held >= HOLD) & (level > mean + MOST * far)
        falls = is_high & (late < KEPT * early)
        has_moved = is_high & ~falls  # to another level
        is_noise = has_moved & (level <= ANOTHER * mean)
        goes_on = is_held & (held < HOLD)
        held = jnp.where(explodes | falls, 1, jnp.where(goes_on, held + 1, 0))
        is_calm = (above <= MOST * far) | ~is_known
        # What is compared afterwards is the level before.
        above = jnp.where(is_held, 0, jnp.where(is_calm, above, MOST * far))
        times = jnp.where(has_moved, level / jnp.where(mean > 0, mean, 1), 1)
        count = jnp.minimum(count + 1, jnp.where(has_moved, LEAST, MEMORY))
        progress = jnp.maximum(progress, 1)
        exploded_at = jnp.where(explodes, progress, self.exploded_at)
        exploded = jnp.where(explodes, gain, jnp.where(is_noise, 0, self.exploded))
        regrown = jnp.where(exploded > 0, progress / exploded_at, 1)

        def limited(now: Array, most: Array) -> Array:
            """Return what is borne, without its regrowth while there is a limit."""
            left = jnp.where(is_noise, most / FALL, most)
            left = jnp.where(exploded > 0, left, jnp.maximum(left, now))
            return jnp.where(explodes, jnp.maximum(FALL * now, 1), left)

        borne, worth = limited(gain, self.borne), limited(progressed, self.worth)
        is_over = (exploded > 0) & (borne * regrown >= exploded)
        borne, worth = (jnp.where(is_over, x * regrown, x) for x in (borne, worth))
        exploded, regrown = jnp.where(is_over, 0, exploded), jnp.where(is_over, 1, regrown)
        slowly = jnp.minimum(UNTRIED * progressed / progress, 1)
        return dataclasses.replace(
            self,
            mean=times * (mean + above / count),
            deviation=times * self.deviation
            + jnp.where(is_held, 0, jnp.abs(above) - self.deviation) / count,
            num_norms=count,
            scale=scale,
            borne=borne,
            worth=worth,
            exploded=exploded,
            exploded_at=exploded_at,
            regrown=regrown,
            pace=jnp.where(is_calm, jnp.where(gain < borne * regrown, 1, slowly), 0),
            explodes=explodes,
            held=held,
            early=jnp.where(held > 1, early, 0),
            late=jnp.where(held > 1, late, 0),
        )
