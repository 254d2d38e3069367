"""Ours, the default: every device at its price, a price for every change, weights by attained service.

    maximise  sum_i (w_i + price . k_i*) G_i / G_i* (1 - [shape changes] restart_i / horizon)

A second of job i costs its user w_i, and others the price of the devices that it holds; so a unit of its
work costs at least c_i = min (w_i + price . k) / G_i(k), at its best shape k_i*, G_i*. What it does in a
second, G_i, is worth c_i G_i: that is the objective. The prices are those at which the jobs together
want as many devices as there are (`clearing.py`), so jobs that scale well get more of them than a utility
that is the same for all would give. The published forms (Sia, Pollux) punish restarts by the job's past;
here a change costs the share of the coming horizon that the restart takes, so that a job that restarted
often is not frozen where it is. The weight falls with the device-seconds that a job has had (who has
had little probably needs little more, and leaves soon) and rises with its age, so that of two that are
both large the earlier one is finished first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.scheduler.policies.clearing import clearing_prices
from jaxgoodput.scheduler.policies.problem import Problem
from jaxgoodput.scheduler.policy import Decision, JobView
from jaxgoodput.scheduler.shapes import capacity
from jaxgoodput.specs import ClusterSpec


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Who gets which devices, for a low average completion time at few restarts.

    Raises ValueError for settings that cannot be.
    """

    horizon_s: float = 600.0  # over which a change must earn back its restart
    service_scale_s: float = 6000.0  # device-seconds at which a job's weight begins to fall
    service_power: float = -0.75  # how fast it falls with service; 0 = all are alike
    age_scale_s: float = 3600.0  # seconds since submission at which the weight begins to rise
    age_power: float = 0.25  # how fast; those that came together do not all finish together
    growth: float | None = None  # times the largest size a job has run on; None = trust its table
    relative_gap: float = 1e-3  # of the objective; solved exactly up to about 100 devices anyway
    time_limit_s: float = 2.0

    def __post_init__(self):
        for name in ("horizon_s", "service_scale_s", "age_scale_s"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"Goodput.{name} must be above 0 and finite, got {value}.")

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """The choice of greatest weighted utility after switching prices; restarting jobs stay."""
        problem = Problem.of(jobs, cluster, now_s, growth=self.growth)
        each = capacity(cluster)
        _, cost = clearing_prices(
            problem.goodput,
            self._weight(problem),
            problem.devices,
            problem.kind,
            np.array([each[kind] for kind in problem.kinds], np.float64),
        )
        utility = problem.goodput * cost[:, None]
        restart_s = np.array([view.restart_s for view in jobs], np.float64)
        lost = np.minimum(restart_s / self.horizon_s, 1.0)
        utility = np.where(problem.changes, utility * (1.0 - lost[:, None]), utility)
        choice = problem.choose(
            utility,
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
