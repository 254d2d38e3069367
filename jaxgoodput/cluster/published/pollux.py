"""Pollux: maximise the power mean of the jobs' speedups over a fair share.

Source: Qiao et al., "Pollux: Co-adaptive cluster scheduling for goodput-optimized deep learning", OSDI 2021,
sections 4.2 and 4.3, equations 12 to 15, with the constants of its artifact. Difference: the artifact
searches with a genetic algorithm. Here the solution is exact, because a power mean orders allocations as a
sum over jobs does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policy import Decision, JobView
from jaxgoodput.cluster.scheduler.shapes import capacity, node_size
from jaxgoodput.specs import ClusterSpec

FLOOR = 1e-3  # added to every speedup, so that a waiting job is worth little, not minus infinity


def reallocation_factor(
    age_s: np.ndarray, num_restarts: np.ndarray, restart_s: np.ndarray | float = 30.0
) -> np.ndarray:
    """Return [jobs] the factor on the worth of a new allocation: max(T - R S, 0) / (T + S), equation 15.

    >>> float(reallocation_factor(np.array([570.0]), np.array([3]))[0])
    0.8
    """
    worked_s = np.maximum(age_s - num_restarts * restart_s, 0.0)
    total_s = age_s + restart_s
    return np.divide(worked_s, total_s, out=np.ones(np.shape(total_s)), where=total_s > 0.0)


def fair_devices(num_devices: int, num_jobs: int) -> int:
    """Return the fair share of one job in devices, relative to which equation 12 measures speedups.

    >>> fair_devices(64, 24)
    3
    """
    return math.ceil(num_devices / max(num_jobs, 1))


@dataclass(frozen=True, kw_only=True)
class Pollux:
    """The published policy: speedups over a fair share, as even as `power` demands."""

    power: float = -1.0
    """Power of the mean, below 0; the lower, the more even are the speedups."""
    growth: float | None = 2.0
    """Largest size offered, as a multiple of the largest measured size; new jobs start on their smallest."""
    one_multi_node_job_per_node: bool = True
    """Whether at most one job of several nodes may use a node, to avoid interference on its network."""
    relative_gap: float = 1e-9
    """Acceptable gap of the sum, in which every running job counts about 1 / FLOOR."""
    time_limit_s: float = 10.0

    def __post_init__(self):
        if not self.power < 0:
            raise ValueError(
                f"Pollux.power={self.power} must be below 0: with a positive one the sum over jobs "
                "starves the small. -1 is what the paper recommends."
            )

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """Return the allocations of greatest power mean of speedups; `objective` is that mean."""
        if not jobs:
            return Decision(allocations={})
        problem = ShapeProblem.of(jobs, cluster, now_s, growth=self.growth)
        speedup = problem.goodput / self._at_fair_share(problem)[:, None]
        factor = reallocation_factor(problem.age_s(), problem.num_restarts(), problem.restart_s())
        # As published, a first start counts as a change too, from an empty row.
        changes = np.arange(len(problem.shapes)) != problem.present[:, None]
        scaled = np.where(changes, speedup * factor[:, None], speedup)
        sizes = node_size(cluster)
        per_node = np.array([sizes[shape.kind] for shape in problem.shapes], np.float64)
        terms = (scaled / per_node + FLOOR) ** self.power
        weight = problem.weight()[:, None]
        nothing = FLOOR**self.power
        choice = problem.choose(
            (nothing - terms) * weight,
            relative_gap=self.relative_gap,
            time_limit_s=self.time_limit_s,
        )
        total = nothing * float(weight.sum())
        decision = problem.decide(
            choice, one_multi_node_job_per_node=self.one_multi_node_job_per_node
        )
        return Decision(
            allocations=decision.allocations,
            reasons=decision.reasons,
            objective=self._mean(total - choice.objective, weight),
            bound=self._mean(total - choice.bound, weight),
        )

    def _mean(self, total: float, weight: np.ndarray) -> float:
        return (max(total, 1e-12) / float(weight.sum())) ** (1.0 / self.power)

    def _at_fair_share(self, problem: ShapeProblem) -> np.ndarray:
        """Return [jobs] goodput on the smallest one-node shape with a fair share, or the nearest one."""
        if not problem.shapes:
            return np.ones(len(problem.jobs))
        share = fair_devices(sum(capacity(problem.cluster).values()), len(problem.jobs))
        one_node = np.array([shape.num_nodes == 1 for shape in problem.shapes], bool)
        far = np.where(problem.devices >= share, problem.devices - share, 10**6 - problem.devices)
        order = np.lexsort((far, ~one_node))
        known = ~np.isnan(problem.goodput[:, order])
        first = order[np.argmax(known, 1)]
        rows = np.arange(len(problem.jobs))
        return np.where(known.any(1), problem.goodput[rows, first], 1.0)
