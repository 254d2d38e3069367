"""Ours, the default: concave utility of goodput, a price for every change, weights by attained service.

    maximise  sum_i w_i (lambda - G_i^p) (1 - [shape changes] restart_i / horizon)

with G_i the goodput relative to the job's own smallest shape. The published forms (Sia, Pollux) punish
restarts by the job's past; here a change costs the share of the coming horizon that the restart takes,
so that a job that restarted often is not frozen where it is. The weight falls with the device-seconds
that a job has had (who has had little probably needs little more, and leaves soon) and rises with its
age, so that of two that are both large the earlier one is finished first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.scheduler.policies.problem import Problem, normalised
from jaxgoodput.scheduler.policy import Decision, JobView
from jaxgoodput.specs import ClusterSpec


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Who gets which devices, for a low average completion time at few restarts.

    Raises ValueError for settings that cannot be.
    """

    power: float = -0.25  # p below 0: the lower, the more even
    idle_penalty: float = 1.1  # lambda above 1: what running on the smallest shape is worth, plus 1
    horizon_s: float = 600.0  # over which a change must earn back its restart
    service_scale_s: float = 6000.0  # device-seconds at which a job's weight begins to fall
    service_power: float = -0.5  # how fast it falls with service; 0 = all are alike
    age_scale_s: float = 3600.0  # seconds since submission at which the weight begins to rise
    age_power: float = 0.25  # how fast; those that came together do not all finish together
    growth: float | None = None  # times the largest size a job has run on; None = trust its table
    relative_gap: float = 1e-3  # of the objective; solved exactly up to about 100 devices anyway
    time_limit_s: float = 2.0

    def __post_init__(self):
        if not self.power < 0:
            raise ValueError(
                f"Goodput.power={self.power} must be below 0, such as -0.25: the utility has to be "
                "bounded, or one job that scales well would starve all others."
            )
        if not self.idle_penalty > 1:
            raise ValueError(
                f"Goodput.idle_penalty={self.idle_penalty} must be above 1: otherwise running on the "
                "smallest shape is worth nothing, and devices stay idle."
            )
        for name in ("horizon_s", "service_scale_s", "age_scale_s"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"Goodput.{name} must be above 0 and finite, got {value}.")

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """The choice of greatest weighted utility after switching prices; restarting jobs stay."""
        problem = Problem.of(jobs, cluster, now_s, growth=self.growth)
        utility = self.idle_penalty - normalised(problem.goodput) ** self.power
        restart_s = np.array([view.restart_s for view in jobs], np.float64)
        lost = np.minimum(restart_s / self.horizon_s, 1.0)
        utility = np.where(problem.changes, utility * (1.0 - lost[:, None]), utility)
        choice = problem.choose(
            utility * self._weight(problem)[:, None],
            pinned=problem.restoring(),
            relative_gap=self.relative_gap,
            time_limit_s=self.time_limit_s,
        )
        return problem.decide(choice)

    def _weight(self, problem: Problem) -> np.ndarray:
        """[jobs] priority times what the service so far says about how much is left."""
        weight = np.array([view.spec.weight for view in problem.jobs], np.float64)
        service_s = problem.received_s()
        weight *= (1.0 + service_s / self.service_scale_s) ** self.service_power
        submitted_s = np.array([view.submitted_s for view in problem.jobs], np.float64)
        age_s = np.maximum(problem.now_s - submitted_s, 0.0)
        return weight * (1.0 + age_s / self.age_scale_s) ** self.age_power
