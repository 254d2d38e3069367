"""Ours, the default."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.scheduler.policies.problem import Problem, normalised
from jaxgoodput.scheduler.policy import Decision, JobView
from jaxgoodput.specs import ClusterSpec


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Concave utility of normalised goodput, an additive price for switching, young jobs first."""

    power: float = -0.5
    idle_penalty: float = 1.1
    horizon_s: float = 600.0  # over which a change must pay its restart
    age_scale_s: float = 600.0  # device-seconds of service at which a job's weight begins to fall
    age_power: float = -0.25
    growth: float | None = None
    relative_gap: float = 1e-3
    time_limit_s: float = 2.0

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """The choice of greatest weighted utility after switching prices."""
        problem = Problem.of(jobs, cluster, now_s, growth=self.growth)
        utility = self.idle_penalty - normalised(problem.goodput) ** self.power
        restart = np.array([view.restart_s for view in jobs], np.float64)
        price = np.minimum(restart / self.horizon_s, 1.0)
        utility = np.where(problem.changes, utility * (1.0 - price[:, None]), utility)
        weight = np.array([view.spec.weight for view in jobs], np.float64)
        weight *= (1.0 + problem.received_s() / self.age_scale_s) ** self.age_power
        choice = problem.choose(
            utility * weight[:, None],
            pinned=problem.restoring(),
            relative_gap=self.relative_gap,
            time_limit_s=self.time_limit_s,
        )
        return problem.decide(choice)
