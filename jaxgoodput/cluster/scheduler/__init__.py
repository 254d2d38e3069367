"""Who gets which devices: policies, and the one `reconcile` that the service and the simulator call.

A policy is a function from `JobView`s and a `ClusterSpec` to a `Decision`; `reconcile` keeps from it what it
may not change, checks its answer, and makes a `Plan` of it. Policies that give jobs shapes are written with
`ShapeProblem`; a `FractionPolicy` says how much of its time a job has on each kind of device, and
`RoundScheduler` makes a policy of it. `catalogue` names all of them.
"""

from jaxgoodput._lazy import lazy_names

# Loaded late: published policies import this room, and this room promises them.
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
