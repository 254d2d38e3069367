"""Sia: normalised goodput to a power, in one integer program per round over all kinds of device.

Source: Jayaram Subramanya et al., "Sia: Heterogeneity-aware, goodput-optimized ML-cluster scheduling", SOSP
2023, section 3, with the details of its artifact that change the result (rounding, clipping). Difference:
the program is solved by this package's own solver, to the same gap.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.cluster.published.pollux import reallocation_factor
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem, normalised
from jaxgoodput.cluster.scheduler.policy import Decision, JobView
from jaxgoodput.specs import ClusterSpec

LARGEST = 3000.0  # largest G^power, as in the artifact


def restart_factor(
    age_s: np.ndarray, num_restarts: np.ndarray, restart_s: np.ndarray
) -> np.ndarray:
    """Return [jobs] the factor on a change of shape: Pollux's factor, but 1 while a job is younger than S.

    It is the share of its life in which a job would have worked if it had always restarted this often; 0 if
    that is negative, 1 for 0 / 0.

    >>> float(restart_factor(np.array([120.0]), np.array([1]), np.array([30.0]))[0])
    0.6
    """
    factor = reallocation_factor(age_s, num_restarts, restart_s)
    return np.where(age_s < restart_s, 1.0, factor)


def sia_terms(
    goodput: np.ndarray,
    factor: np.ndarray,
    present: np.ndarray,
    *,
    power: float = -0.5,
    published: bool = True,
) -> np.ndarray:
    """Return [jobs, shapes] G^power, with the restart factor on every shape but the present one.

    `goodput`: [jobs, shapes] normalised, NaN = not allowed; `factor`: [jobs]; `present`: [jobs] index, -1 =
    none, and then no factor applies. `published` rounds to two decimals and clips at 3000, like the
    artifact.
    """
    other = (np.arange(goodput.shape[1]) != present[:, None]) & (present >= 0)[:, None]
    scaled = np.where(other, goodput * factor[:, None], goodput)
    with np.errstate(divide="ignore"):  # 0^-0.5 is infinite: the job cannot change its shape
        terms = scaled**power
    return np.minimum(np.round(terms, 2) if published else terms, LARGEST)


def sia_utility(terms: np.ndarray, *, power: float = -0.5, idle_penalty: float = 1.1) -> np.ndarray:
    """Return [jobs, shapes] what a shape gains over not running, to be maximised.

    The published objective is sum A G^power + idle_penalty * (jobs that do not run), minimised if the power
    is negative and maximised if it is positive.
    """
    return np.sign(power) * (terms - idle_penalty)


@dataclass(frozen=True, kw_only=True)
class Sia:
    """The published policy: goodput relative to each job's smallest shape, to the power -1/2."""

    power: float = -0.5
    idle_penalty: float = 1.1
    """Cost of a job that does not run; above 1, or below 0 for a power above 0."""
    published: bool = True
    """Whether to round and clip as the artifact does."""
    growth: float | None = 2.0
    """Largest size offered, as a multiple of the largest measured size; new jobs start on their smallest."""
    relative_gap: float = 1e-4
    time_limit_s: float = 10.0

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """Return the shapes of least sum of (relative goodput)^power; restarting jobs keep their shape."""
        problem = ShapeProblem.of(jobs, cluster, now_s, growth=self.growth)
        least = np.array([view.spec.min_devices for view in jobs], np.float64)
        factor = restart_factor(problem.age_s(), problem.num_restarts(), problem.restart_s())
        terms = sia_terms(
            normalised(problem.goodput) * least[:, None],
            factor,
            problem.present,
            power=self.power,
            published=self.published,
        )
        utility = sia_utility(terms, power=self.power, idle_penalty=self.idle_penalty)
        choice = problem.choose(
            utility * problem.weight()[:, None],
            pinned=problem.restoring(),
            relative_gap=self.relative_gap,
            time_limit_s=self.time_limit_s,
        )
        return problem.decide(choice)
