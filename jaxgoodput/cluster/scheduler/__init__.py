"""Policies that allocate devices to jobs, and `reconcile`, which the service and the simulator both call.

A policy is a function from `JobView`s and a `ClusterSpec` to a `Decision`. `reconcile` keeps from it what it
may not change, checks its answer, and turns it into a `Plan`. Use `ShapeProblem` to write a policy that
chooses shapes. A `FractionPolicy` instead says how much of its time a job should have on each kind of
device; `RoundScheduler` makes a policy of it. `catalogue` lists all policies by name.
"""

from jaxgoodput._lazy import lazy_names

# These functions share their names with modules. They are bound at once, because importing such a module
# later would put the module in the function's place.
from jaxgoodput.cluster.scheduler.alternatives import alternatives as alternatives
from jaxgoodput.cluster.scheduler.explain import explain as explain
from jaxgoodput.cluster.scheduler.reconcile import reconcile as reconcile
from jaxgoodput.cluster.scheduler.shapes import shapes as shapes

# The other names are loaded on first use, because published policies, which this room promises, import it.
__getattr__, __dir__, __all__ = lazy_names(
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
        "scheduler.alternatives": "Alternative Change alternatives changes with_job",
        "scheduler.explain": "Explanation explain",
        "scheduler.placement.placement": "place",
        "scheduler.policies.goodput": "Goodput",
        "scheduler.policies.shape_choice": "ShapeProblem",
        "scheduler.policy": "Decision JobView Plan Policy SolverError SolverTimeout",
        "scheduler.reconcile": "PlanError reconcile",
        "scheduler.shapes": "capacity shape_of shapes",
    },
    root="jaxgoodput.cluster",
)
