"""Policies that allocate devices to jobs, and `reconcile`, which the service and the simulator both call.

A policy is a function from `JobView`s and a `ClusterSpec` to a `Decision`. `reconcile` keeps from it what it
may not change, checks its answer, and turns it into a `Plan`. Use `ShapeProblem` to write a policy that
chooses shapes. A `FractionPolicy` instead says how much of its time a job should have on each kind of
device; `RoundScheduler` makes a policy of it. `catalogue` lists all policies by name.
"""

from jaxgoodput._lazy import lazy_names
from jaxgoodput.cluster.scheduler.alternatives import (
    Alternative,
    Change,
    alternatives,
    changes,
    with_job,
)
from jaxgoodput.cluster.scheduler.explain import Explanation, explain
from jaxgoodput.cluster.scheduler.placement.placement import place
from jaxgoodput.cluster.scheduler.policies.goodput import Goodput
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policy import (
    Decision,
    JobView,
    Plan,
    Policy,
    SolverError,
    SolverTimeout,
)
from jaxgoodput.cluster.scheduler.reconcile import PlanError, reconcile
from jaxgoodput.cluster.scheduler.shapes import capacity, shape_of, shapes

# Published policies are loaded on first use, because they import this room. Its own names are bound at once:
# some are also names of modules, and importing such a module later would put it in the function's place.
__getattr__, __dir__, _PUBLISHED = lazy_names(
    __name__,
    {
        "catalogue": "PolicyEntry catalogue",
        "published.baselines": "Optimus Static Tiresias",
        "published.gavel.discrete": "AlloX FirstInFirstOut GandivaLike IsolatedShares Proportional",
        "published.gavel.fairness": "FinishTimeFairness Hierarchical Makespan MaxMinFairness WaterFilling",
        "published.gavel.fractions": "FractionPolicy FractionProblem Fractions",
        "published.gavel.rounds": "RoundScheduler",
        "published.gavel.throughput": "TotalThroughput",
        "published.pollux": "Pollux",
        "published.sia": "Sia",
    },
    root="jaxgoodput.cluster",
)

__all__ = [
    "Alternative",
    "Change",
    "Decision",
    "Explanation",
    "Goodput",
    "JobView",
    "Plan",
    "PlanError",
    "Policy",
    "ShapeProblem",
    "SolverError",
    "SolverTimeout",
    "alternatives",
    "capacity",
    "changes",
    "explain",
    "place",
    "reconcile",
    "shape_of",
    "shapes",
    "with_job",
    *_PUBLISHED,
]  # pyright: ignore[reportUnsupportedDunderAll]
