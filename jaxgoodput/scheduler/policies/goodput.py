"""Ours, the default: every device at its price, a price for every change, weights by attained service.

    maximise  sum_i (w_i + price . k_i*) (G_i / G_i*)^a (1 - [shape changes] restart_i / stay_i)

A second of job i costs its user w_i, and others the price of the devices that it holds; so a unit of its
work costs at least c_i = min (w_i + price . k) / G_i(k), at its best shape k_i*, G_i*. What it does in a
second, G_i, is worth c_i G_i: with a = 1 that is the objective; a little below 1, a gain counts less than
proportionally, and fewer changes are worth their restart. The prices are those at which the jobs
together want as many devices as there are (`clearing.py`), so jobs that scale well get more of them than
a utility that is the same for all would give.

A change costs the restart's share of the time until the next one (`stay.py`), nine tenths at most, so
that nobody is frozen where he is. The weight falls with the device-seconds that a job has had (who has had
little probably needs little more, and leaves soon) and rises with its age, so that of two that are both
large the earlier one is finished first; a job that declares its progress is weighed by what is left
instead. One that has not run yet is offered the kinds at the ratios that others found (`newcomers.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxgoodput.scheduler.policies.clearing import clearing_prices
from jaxgoodput.scheduler.policies.newcomers import with_usual_kinds
from jaxgoodput.scheduler.policies.shape_choice import Problem
from jaxgoodput.scheduler.policies.stay import expected_stay_s
from jaxgoodput.scheduler.policy import Decision, JobView
from jaxgoodput.scheduler.shapes import capacity
from jaxgoodput.specs import ClusterSpec

MOST_LOST = (
    0.9  # 1 would stop a job on an empty cluster once its present shape is no longer offered
)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Who gets which devices, for a low average completion time at few restarts.

    Raises ValueError for settings that cannot be.
    """

    diminishing: float = 0.85  # the power a above; 1 = every unit of work is worth the same
    kind_change: float = 1.5  # restarts that another kind costs: what is known of it may be guessed
    service_scale_s: float = 6000.0  # device-seconds at which a job's weight begins to fall
    service_power: float = -0.75  # how fast it falls with service; 0 = all are alike
    declared_power: float = -1.0  # the same with the device-seconds left, where they are declared
    age_scale_s: float = 3600.0  # seconds since submission at which the weight begins to rise
    age_power: float = 0.25  # how fast; those that came together do not all finish together
    growth: float | None = None  # times the largest size a job has run on; None = trust its table
    relative_gap: float = 1e-3  # of the objective; solved exactly up to about 100 devices anyway
    time_limit_s: float = 2.0

    def __post_init__(self):
        for name in (
            "diminishing",
            "service_scale_s",
            "age_scale_s",
            "kind_change",
            "time_limit_s",
        ):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"Goodput.{name} must be above 0 and finite, got {value}.")
        for name in ("service_power", "declared_power", "age_power"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"Goodput.{name} must be finite, got {getattr(self, name)}.")
        if not self.relative_gap >= 0:
            raise ValueError(f"Goodput.relative_gap must be at least 0, got {self.relative_gap}.")

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """The choice of greatest weighted utility after switching prices; restarting jobs stay."""
        problem = Problem.of(jobs, cluster, now_s, growth=self.growth)
        problem = replace(problem, goodput=with_usual_kinds(problem))
        each = capacity(cluster)
        market = clearing_prices(
            problem.goodput,
            self._weight(problem),
            problem.devices,
            problem.kind,
            np.array([each[kind] for kind in problem.kinds], np.float64),
        )
        share = problem.goodput / market.best[:, None]
        utility = (market.cost * market.best)[:, None] * share**self.diminishing
        choice = problem.choose(
            utility * (1.0 - self._lost(problem)),
            pinned=problem.restoring(),
            relative_gap=self.relative_gap,
            time_limit_s=self.time_limit_s,
        )
        return problem.decide(choice)

    def _lost(self, problem: Problem) -> np.ndarray:
        """[jobs, shapes] the share of a shape's worth that changing to it costs."""
        held = np.append(problem.kind, -1)[problem.present]  # -1 = none of these
        other = (held >= 0)[:, None] & (problem.kind != held[:, None])
        restart_s = problem.restart_s()[:, None] * np.where(other, self.kind_change, 1.0)
        lost = np.minimum(restart_s / expected_stay_s(problem)[:, None], MOST_LOST)
        return np.where(problem.changes, lost, 0.0)

    def _weight(self, problem: Problem) -> np.ndarray:
        """[jobs] priority times what service or declared progress says about how much is left."""
        weight = np.array([view.spec.weight for view in problem.jobs], np.float64)
        guessed = (1.0 + problem.received_s() / self.service_scale_s) ** self.service_power
        guessed *= (1.0 + problem.age_s() / self.age_scale_s) ** self.age_power
        left_s = problem.declared_s()
        told = (1.0 + left_s / self.service_scale_s) ** self.declared_power
        return weight * np.where(np.isnan(left_s), guessed, told)
