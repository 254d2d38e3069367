"""`find_learning_rate`: which learning rate to begin with? Answered by a short run whose rate grows.

Every update of the optimizer is multiplied by a factor that grows from step to step by the same ratio, and
the loss is recorded: the range test of Smith (arXiv 1506.01186). Below some factor nothing is learned; then
the loss falls, faster and faster; then it rises again. A good place to begin is where it falls fastest.
"""

import dataclasses
import math
import tempfile
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from scipy.ndimage import gaussian_filter1d

from jaxgoodput.observe.events import StepEnd
from jaxgoodput.observe.hooks import Hook
from jaxgoodput.train.ask.aside import repeatable, require_alone, set_aside, short_run
from jaxgoodput.train.control import Diverged
from jaxgoodput.train.start.named import turns_of
from jaxgoodput.train.trainer import Trainer

NUM_STEPS, LOWEST, HIGHEST = 200, 1e-4, 1e3
FEWEST_STEPS = 40
# Losses are averaged over so many steps (the deviation of a Gaussian), as a share of all steps.
SMOOTHED = 1 / 40
# The first steps, of which the rate is too low to change anything, tell how much the loss varies by itself.
STILL = 0.1  # of the steps
# Standard errors by which the loss has to fall or rise, so that it is not by chance. The lowest of some
# seventeen averages that differ by chance alone is seldom below four.
CERTAIN = 4.0
# The steepest fall is looked for between these shares of the whole fall: elsewhere slopes are noise.
FALLING = (0.1, 0.9)
# A rate at which the loss was lowest is too high for a run that stays there: it was not there for long.
SAFE = 1 / 3


@dataclass(frozen=True, kw_only=True)
class RateSearch:
    """The loss of a run whose learning rate grew from step to step."""

    factors: Float[np.ndarray, " steps"]
    """Multiples of the optimizer's own learning rate."""
    losses: Float[np.ndarray, " steps"]
    """Mean loss of each step's batch, smoothed."""
    start: float
    """Mean loss of the first steps, whose rate changed nothing."""
    spread: float
    """Standard error of a difference between a smoothed loss and `start`."""
    has_failed: bool = False
    """Whether the step after the last one was not finite."""
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
        return float(self.start - self.losses[self.lowest]) > CERTAIN * self.spread

    @property
    def has_turned(self) -> bool:
        """Whether the loss rose again, or was not finite, so that the highest rate is known too."""
        risen = float(self.losses[-1] - self.losses[self.lowest])
        return self.has_failed or risen > CERTAIN * self.spread

    @property
    def _steepest(self) -> float:
        """The factor at which the loss fell fastest."""
        end = self.lowest + 1
        done = (self.start - self.losses[:end]) / (self.start - self.losses[self.lowest])
        is_falling = (done >= FALLING[0]) & (done <= FALLING[1])
        slopes = np.gradient(self.losses)[:end]
        at = np.argmin(np.where(is_falling, slopes, np.inf)) if is_falling.any() else self.lowest
        return float(self.factors[at])

    @property
    def factor(self) -> float:
        """Where to begin, as a multiple of the optimizer's own learning rate; NaN if it is not known.

        It is where the loss fell fastest, and at most a third of where it was lowest.
        """
        if not self.is_known:
            return math.nan
        return min(self._steepest, float(SAFE * self.factors[self.lowest]))

    def answer(self) -> str:
        """Return what was found, as a few lines for people."""
        if not self.is_known:
            return (
                f"Not known: the loss did not clearly fall in {len(self.losses)} steps, at any learning rate "
                f"up to {self._named(self.factors[-1])}. Take more steps (num_steps), or look at the loss."
            )
        where = "where it fell fastest while the rate grew"
        if self.factor < self._steepest:
            where = "a third of the rate at which it was lowest"
        fell = f"The loss fell from {self.start:.4g} to {self.losses[self.lowest]:.4g}, "
        highest = self._named(self.factors[self.lowest])
        if self.has_turned:
            fell += f"and was lowest at {highest}."
        else:
            fell += f"and still falls at {highest}: a higher rate may do, too."
        lines = [
            f"Begin with a learning rate of about {self._named(self.factor)}: {where}.",
            fell,
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

    Raises what `Trainer.fit` raises; ValueError for fewer than 40 steps, an empty range, optimizers by name,
    or a schedule-free optimizer, which moves parameters of its own; RuntimeError in a job of several
    processes, with tables or live data, or if the data end before, or the loss is not finite from the
    beginning.
    """
    if num_steps < FEWEST_STEPS or not 0 < lowest < highest < math.inf:
        raise ValueError(
            f"find_learning_rate(num_steps={num_steps}, lowest={lowest}, highest={highest}): at least "
            f"{FEWEST_STEPS} steps are needed, and 0 < lowest < highest."
        )
    require_alone(trainer, "find_learning_rate")
    own, ratio = trainer.config, (highest / lowest) ** (1 / (num_steps - 1))
    with set_aside(trainer), tempfile.TemporaryDirectory(prefix="jaxgoodput-rate-") as folder:
        source, tx = repeatable(trainer.dataset(), "find_learning_rate"), trainer.optimizer()
        if turns_of(tx) is not None:
            raise ValueError(
                "find_learning_rate looks for the rate of one optimizer, and optimizer() returned several by "
                "name: how far one may go depends on the rates of the others. Try them in short runs."
            )
        trainer.dataset = lambda: source
        trainer.optimizer = lambda: _growing(tx, lowest, ratio)
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
            if not watch.has_ended:  # not because of the rate
                raise
    _require_enough(watch, own.batch.base, lowest)
    losses, steps = np.array(watch.losses), np.array(watch.progress)
    rates = [trainer.learning_rate(at) for at in (0.0, steps[-1] / 2, steps[-1])]
    known = [float(rate) for rate in rates if rate is not None]
    return searched(
        lowest * ratio ** np.floor(steps),
        losses,
        num_steps,
        has_failed=watch.has_failed,
        base_rate=known[0] if known else None,
        changes=len(known) > 1 and not np.allclose(known, known[0], rtol=0.1, atol=0.0),
    )


def searched(
    factors: Float[np.ndarray, " n"], losses: Float[np.ndarray, " n"], num_steps: int, **more: Any
) -> RateSearch:
    """Return what the losses of steps say, of a search of `num_steps` steps that may have ended before."""
    num_still = _num_still(num_steps)
    still = losses[:num_still]
    # A Gaussian filter of deviation s averages 2 s sqrt(pi) values.
    averaged = 2 * SMOOTHED * num_steps * math.sqrt(math.pi)
    spread = float(np.std(still, ddof=1)) * math.sqrt(1 / num_still + 1 / averaged)
    return RateSearch(
        factors=factors,
        losses=_smoothed(losses, num_steps),
        start=float(still.mean()),
        spread=spread,
        **more,
    )


def _growing(tx: Any, lowest: float, ratio: float) -> Any:
    """Multiply every update by a factor that grows; what is no optimizer is refused later, by `fit`."""
    if not isinstance(tx, optax.GradientTransformation):
        return tx

    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        state = tx.init(params)
        if any(map(_is_schedule_free, jax.tree.leaves(state, is_leaf=_is_schedule_free))):
            raise ValueError(
                "optimizer() is schedule-free: it keeps and moves parameters of its own, whose rate cannot "
                "be seen from outside. Find the rate of the optimizer that it wraps."
            )
        return state

    def factor(step: Any) -> Array:
        return jnp.asarray(lowest * ratio ** jnp.asarray(step, jnp.float32), jnp.float32)

    outer = optax.scale_by_schedule(factor)
    return optax.chain(optax.GradientTransformationExtraArgs(init, inner.update), outer)


def _is_schedule_free(node: Any) -> bool:
    return isinstance(node, optax.contrib.ScheduleFreeState)


def _num_still(num_steps: int) -> int:
    return max(4, int(STILL * num_steps))


def _smoothed(losses: Float[np.ndarray, " n"], num_steps: int) -> Float[np.ndarray, " n"]:
    """Average losses over steps; one that explodes does not lift those before it by more than they fell."""
    still = losses[: _num_still(num_steps)]
    start, by_chance = float(still.mean()), CERTAIN * float(np.std(still, ddof=1))
    top = start + max(start - float(losses.min()), by_chance)
    return gaussian_filter1d(np.minimum(losses, top), SMOOTHED * num_steps, mode="reflect")


class _Watch(Hook):
    """Keeps the losses of a run, and ends it once they have grown beyond where they began."""

    def __init__(self, trainer: Trainer, num_steps: int):
        self.losses: list[float] = []
        self.progress: list[float] = []
        """Base steps done before each."""
        self.has_ended = False
        """Whether the loss has grown, or was not finite."""
        self.has_failed = False
        """Whether it was not finite."""
        self._trainer, self.num_steps = trainer, num_steps
        self.done = 0.0
        """Base steps done."""

    def on_step_end(self, event: StepEnd, /) -> None:
        """Record the loss, until the run is to end."""
        if self.has_ended or event.metrics["weight"] == 0:
            return
        if event.finite and math.isfinite(event.loss):
            self.losses.append(event.loss)
            self.progress.append(self.done)
            self.done = event.progress
        else:
            self.has_failed = True
        if self.has_failed or self._has_risen():
            self.has_ended = True
            self._trainer.finish()

    def _has_risen(self) -> bool:
        """Whether the loss is as far above its beginning as it ever was below, and not by chance."""
        num_still = _num_still(self.num_steps)
        if len(self.losses) < 2 * num_still:
            return False
        still, losses = self.losses[:num_still], _smoothed(np.array(self.losses), self.num_steps)
        start, by_chance = float(np.mean(still)), CERTAIN * float(np.std(still, ddof=1))
        recent = float(np.mean(self.losses[-max(1, num_still // 4) :]))
        return recent - start > max(start - float(losses.min()), by_chance)


def _require_enough(watch: _Watch, base: int, lowest: float) -> None:
    """Raise RuntimeError if the run ended too early for an answer."""
    num_losses = len(watch.losses)
    if watch.has_failed and num_losses < 2 * _num_still(watch.num_steps):
        raise RuntimeError(
            f"step {num_losses + 1} was not finite, at a learning rate of about {lowest:g} times the "
            "optimizer's own. Look at the loss, or begin with a lower one (lowest)."
        )
    if not watch.has_ended and watch.done < watch.num_steps - 0.5:
        raise RuntimeError(
            f"the data ended after {num_losses} of {watch.num_steps} steps of {base:,} samples. Let them "
            "repeat, or take fewer steps (num_steps)."
        )
