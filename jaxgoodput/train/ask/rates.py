"""`find_learning_rate`: which learning rate to begin with? Answered by a short run whose rate grows.

Every update of the optimizer is multiplied by a factor that grows from step to step by the same ratio, and
the loss is recorded: the range test of Smith (arXiv 1506.01186). Below some factor nothing is learned; then
the loss falls, faster and faster; then it rises again. A good place to begin is where it falls fastest.
"""

import dataclasses
import math
import tempfile
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float
from scipy.ndimage import gaussian_filter1d

from jaxgoodput.observe.events import StepEnd
from jaxgoodput.observe.hooks import Hook
from jaxgoodput.train.ask.aside import repeatable, require_alone, set_aside, short_run
from jaxgoodput.train.control import Diverged
from jaxgoodput.train.trainer import Trainer

NUM_STEPS, LOWEST, HIGHEST = 200, 1e-4, 1e3
# Losses are averaged over so many steps (the deviation of a Gaussian), as a share of all steps.
SMOOTHED = 1 / 40
# The first steps, of which the rate is too low to change anything, tell how much the loss varies by itself.
STILL = 0.1  # of the steps
# Deviations of a smoothed loss by which it has to fall, so that it is not by chance.
CERTAIN = 4.0
FEWEST_STEPS = 40
# Beyond this share of the rate with the lowest loss, a run that stays there would not be safe: the loss is
# only so low because the rate has not been there for long.
SAFE = 1 / 3


@dataclass(frozen=True, kw_only=True)
class RateSearch:
    """The loss of a run whose learning rate grew from step to step."""

    factors: Float[np.ndarray, " steps"]
    """Multiples of the optimizer's own learning rate."""
    losses: Float[np.ndarray, " steps"]
    """Mean loss of each step's batch, smoothed."""
    spread: float
    """Standard deviation of a smoothed loss, by chance."""
    base_rate: float | None = None
    """The optimizer's own learning rate, if `Trainer.learning_rate` tells it."""
    changes: bool = False
    """Whether it changes within so many steps, by a warm-up for example."""

    @property
    def lowest(self) -> int:
        """Index of the step with the lowest loss."""
        return int(np.argmin(self.losses))

    @property
    def is_known(self) -> bool:
        """Whether the loss fell by more than by chance."""
        return float(self.losses[0] - self.losses[self.lowest]) > CERTAIN * self.spread

    @property
    def factor(self) -> float:
        """Where to begin, as a multiple of the optimizer's own learning rate; NaN if it is not known.

        It is where the loss fell fastest, and at most a third of where it was lowest.
        """
        if not self.is_known:
            return math.nan
        slopes = np.diff(self.losses[: self.lowest + 1])
        steepest = self.factors[int(np.argmin(slopes))]
        return float(min(steepest, SAFE * self.factors[self.lowest]))

    @property
    def has_turned(self) -> bool:
        """Whether the loss rose again, so that the highest rate is known too."""
        return float(self.losses[-1] - self.losses[self.lowest]) > CERTAIN * self.spread

    def answer(self) -> str:
        """Return what was found, as a few lines for people."""
        if not self.is_known:
            return (
                f"Not known: the loss did not fall in {len(self.losses)} steps, at any learning rate up to "
                f"{self._named(self.factors[-1])}. Take more steps (num_steps), or look at the loss."
            )
        first, best = self.losses[0], self.losses[self.lowest]
        highest = self._named(self.factors[self.lowest])
        lines = [
            f"Begin with a learning rate of about {self._named(self.factor)}: there the loss fell fastest "
            "while the rate grew.",
            f"The loss fell from {first:.4g} to {best:.4g}, and was lowest at {highest}."
            if self.has_turned
            else f"The loss fell from {first:.4g} to {best:.4g}, and still falls at {highest}: a higher rate "
            "may do, too.",
        ]
        if self.changes:
            lines.append(
                "The optimizer's own learning rate changes within these steps. Try with a constant one."
            )
        return "\n".join(
            [*lines, "It is one short run: a place to begin a search, not its result."]
        )

    def _named(self, factor: float) -> str:
        if self.base_rate is not None and not self.changes:
            return f"{factor * self.base_rate:.2g}"
        return f"{factor:.2g} times the optimizer's own"


def find_learning_rate(
    trainer: Trainer,
    *,
    num_steps: int = NUM_STEPS,
    lowest: float = LOWEST,
    highest: float = HIGHEST,
) -> RateSearch:
    """Find out which learning rate to begin with, from `num_steps` steps whose rate grows.

    The rate grows from `lowest` to `highest` times the optimizer's own, and the run ends early if the loss
    grows beyond its start. It trains with the base batch in a temporary folder: the trainer's own workdir is
    not touched, hooks are not called, and nothing is evaluated. The answer in words is `answer()`.

    Raises what `Trainer.fit` raises; ValueError for fewer than 40 steps or an empty range; RuntimeError in a
    job of several processes, with tables or live data, or if the data end before.
    """
    if num_steps < FEWEST_STEPS or not 0 < lowest < highest < math.inf:
        raise ValueError(
            f"find_learning_rate(num_steps={num_steps}, lowest={lowest}, highest={highest}): at least "
            f"{FEWEST_STEPS} steps are needed, and 0 < lowest < highest."
        )
    require_alone(trainer, "find_learning_rate")
    own = trainer.config
    factors = np.geomspace(lowest, highest, num_steps)
    with set_aside(trainer), tempfile.TemporaryDirectory(prefix="jaxgoodput-rate-") as folder:
        source, tx = repeatable(trainer.dataset(), "find_learning_rate"), trainer.optimizer()
        trainer.dataset = lambda: source
        trainer.optimizer = lambda: optax.chain(tx, _growing(factors))
        trainer.config = short_run(
            own,
            folder,
            "rates",
            statistics=dataclasses.replace(own.statistics, every_steps=None),
            batch=dataclasses.replace(own.batch, max=own.batch.base, min_global=None, sizes=None),
            base_steps=float(num_steps),
            epochs=None,
        )
        watch = _Watch(trainer, num_steps)
        trainer.hooks = (watch,)
        try:
            trainer.fit()
        except Diverged:
            pass  # the rate has become too high, as it was to be
    losses = np.array(watch.losses)
    if len(losses) < num_steps and not watch.has_ended:
        raise RuntimeError(
            f"the data ended after {len(losses)} of {num_steps} steps of {own.batch.base:,} samples. Let "
            "them repeat, or take fewer steps (num_steps)."
        )
    rates = [trainer.learning_rate(at) for at in (0.0, len(losses) / 2, float(len(losses)))]
    known = [float(rate) for rate in rates if rate is not None]
    return RateSearch(
        factors=factors[: len(losses)],
        losses=_smoothed(losses, num_steps),
        spread=_spread(losses, num_steps),
        base_rate=known[0] if known else None,
        changes=len(known) > 1 and not np.allclose(known, known[0]),
    )


def _growing(factors: Float[np.ndarray, " steps"]) -> optax.GradientTransformation:
    """Multiply the n-th update by the n-th factor, and later ones by the last."""
    ratio, last = factors[1] / factors[0], len(factors) - 1
    return optax.scale_by_schedule(
        lambda step: jnp.asarray(factors[0] * ratio ** jnp.minimum(step, last), jnp.float32)
    )


def _smoothed(losses: Float[np.ndarray, " n"], num_steps: int) -> Float[np.ndarray, " n"]:
    return gaussian_filter1d(losses, SMOOTHED * num_steps, mode="nearest")


def _spread(losses: Float[np.ndarray, " n"], num_steps: int) -> float:
    """Return the standard deviation of a smoothed loss, from the first steps."""
    still = losses[: max(3, int(STILL * num_steps))]
    # A Gaussian filter of deviation s averages 2 s sqrt(pi) values.
    return float(np.std(still, ddof=1) / math.sqrt(2 * SMOOTHED * num_steps * math.sqrt(math.pi)))


class _Watch(Hook):
    """Keeps the losses of a run, and ends it once they have grown beyond where they began."""

    def __init__(self, trainer: Trainer, num_steps: int):
        self.losses: list[float] = []
        self.has_ended = False
        self._trainer, self._num_steps = trainer, num_steps
        self._num_still = max(3, int(STILL * num_steps))

    def on_step_end(self, event: StepEnd, /) -> None:
        """Record the loss, until the run is to end."""
        if self.has_ended:
            return
        if event.finite and math.isfinite(event.loss):
            self.losses.append(event.loss)
        if not event.finite or self._has_risen():
            self.has_ended = True
            self._trainer.finish()

    def _has_risen(self) -> bool:
        """Whether the loss is as far above its beginning as it ever was below, and not by chance."""
        if len(self.losses) <= 2 * self._num_still:
            return False
        losses = np.array(self.losses)
        smooth = _smoothed(losses, self._num_steps)
        by_chance = CERTAIN * float(np.std(losses[: self._num_still], ddof=1))
        return float(smooth[-1] - smooth[0]) > max(float(smooth[0] - smooth.min()), by_chance)
