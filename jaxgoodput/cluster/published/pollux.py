"""Pollux: the power mean of fair-share speedups, solved exactly instead of by a genetic algorithm.

Qiao et al., "Pollux", OSDI 2021, sections 4.2 and 4.3, equations 12-15; the constants are those of the
paper's artifact. The mean of power -1 is the same as a sum over jobs, so that the allocation core
maximises it exactly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policy import Decision, JobView
from jaxgoodput.cluster.scheduler.shapes import node_size
from jaxgoodput.specs import ClusterSpec

FLOOR = 1e-3  # added to every speedup: a job that waits is worth little, not minus infinity


def reallocation_factor(
    age_s: np.ndarray, num_restarts: np.ndarray, restart_s: np.ndarray | float = 30.0
) -> np.ndarray:
    """[jobs] what a changed allocation is worth: max(T - R S, 0) / (T + S), equation 15; 1 for 0 / 0.

    >>> float(reallocation_factor(np.array([570.0]), np.array([3]))[0])
    0.8
    """
    worked_s = np.maximum(age_s - num_restarts * restart_s, 0.0)
    total_s = age_s + restart_s
    return np.divide(worked_s, total_s, out=np.ones(np.shape(total_s)), where=total_s > 0.0)


def fair_devices(num_devices: int, num_jobs: int) -> int:
    """The fair share of one job, in devices: equation 12 counts speedups from there.

    >>> fair_devices(64, 24)
    3
    """
    return math.ceil(num_devices / max(num_jobs, 1))


@dataclass(frozen=True, kw_only=True)
class Pollux:
    """The published policy: everybody's speedup over a fair share, as even as `power` says."""

    power: float = -1.0
    """Below 0; the lower, the more even."""
    growth: float | None = 2.0
    """The most that is offered, in largest sizes that a job has run on; new jobs start smallest."""
    one_multi_node_job_per_node: bool = True
    """Whether interference is avoided, as Pollux does."""
    relative_gap: float = 1e-9
    """The gap that is good enough, of a sum in which every job that runs counts 1/floor."""
    time_limit_s: float = 10.0

    def __post_init__(self):
        if not self.power < 0:
            raise ValueError(
                f"Pollux.power={self.power} must be below 0: with a positive one the sum over jobs "
                "starves the small. -1 is what the paper recommends."
            )

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """The allocation of greatest power mean; `objective` is that mean."""
        if not jobs:
            return Decision(allocations={})
        problem = ShapeProblem.of(jobs, cluster, now_s, growth=self.growth)
        speedup = problem.goodput / self._at_fair_share(problem)[:, None]
        factor = reallocation_factor(problem.age_s(), problem.num_restarts(), problem.restart_s())
        # As published, a first start is a change too: a row that was empty.
        changes = np.arange(len(problem.shapes)) != problem.present[:, None]
        scaled = np.where(changes, speedup * factor[:, None], speedup)
        sizes = node_size(cluster)
        per_node = np.array([sizes[shape.kind] for shape in problem.shapes], np.float64)
        terms = (scaled / per_node + FLOOR) ** self.power
        weight = np.array([view.spec.weight for view in jobs], np.float64)[:, None]
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
        """[jobs] goodput on the least shape of one node that holds a fair share, or the nearest."""
        if not problem.shapes:
            return np.ones(len(problem.jobs))
        everything = sum(n.num_usable for n in problem.cluster.nodes if n.state == "up")
        share = fair_devices(everything, len(problem.jobs))
        one_node = np.array([shape.num_nodes == 1 for shape in problem.shapes], bool)
        far = np.where(problem.devices >= share, problem.devices - share, 10**6 - problem.devices)
        order = np.lexsort((far, ~one_node))
        known = ~np.isnan(problem.goodput[:, order])
        first = order[np.argmax(known, 1)]
        rows = np.arange(len(problem.jobs))
        return np.where(known.any(1), problem.goodput[rows, first], 1.0)
