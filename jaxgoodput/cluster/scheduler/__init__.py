"""Who gets which devices: policies, and the one `reconcile` that the service and the simulator call.

A policy is a function from `JobView`s and a `ClusterSpec` to a `Decision`; `reconcile` keeps from it what it
may not change, checks its answer, and makes a `Plan` of it. Policies that give jobs shapes are written with
`ShapeProblem`; a `FractionPolicy` says how much of its time a job has on each kind of device, and
`RoundScheduler` makes a policy of it. `catalogue` names all of them.
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

# Loaded late: published policies import this room, and this room promises them. Its own names are not: some
# are those of its modules, which an import of the module would put in their place.
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
