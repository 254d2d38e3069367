"""Who gets which devices: policies, and the one `reconcile` that the service and the simulator call.

A policy is a function from `JobView`s and a `ClusterSpec` to a `Decision`; `reconcile` keeps from it what it
may not change, checks its answer, and makes a `Plan` of it. Policies that give jobs shapes are written with
`ShapeProblem`; a `FractionPolicy` says how much of its time a job has on each kind of device, and
`RoundScheduler` makes a policy of it. `catalogue` names all of them.
"""

from jaxgoodput.scheduler.alternatives import Alternative, Change, alternatives, changes, with_job
from jaxgoodput.scheduler.explain import Explanation, explain
from jaxgoodput.scheduler.gavel.discrete import (
    AlloX,
    FirstInFirstOut,
    GandivaLike,
    Isolated,
    Proportional,
)
from jaxgoodput.scheduler.gavel.fairness import (
    FinishTimeFairness,
    Hierarchical,
    Makespan,
    MaxMinFairness,
    WaterFilling,
)
from jaxgoodput.scheduler.gavel.fractions import FractionPolicy, FractionProblem, Fractions
from jaxgoodput.scheduler.gavel.rounds import RoundScheduler
from jaxgoodput.scheduler.gavel.throughput import TotalThroughput
from jaxgoodput.scheduler.placement.placement import place
from jaxgoodput.scheduler.policies.baselines import Optimus, Static, Tiresias
from jaxgoodput.scheduler.policies.catalogue import Named, catalogue
from jaxgoodput.scheduler.policies.goodput import Goodput
from jaxgoodput.scheduler.policies.pollux import Pollux
from jaxgoodput.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.scheduler.policies.sia import Sia
from jaxgoodput.scheduler.policy import Decision, JobView, Plan, Policy, SolverError, SolverTimeout
from jaxgoodput.scheduler.reconcile import PlanError, reconcile
from jaxgoodput.scheduler.shapes import capacity, shape_of, shapes

__all__ = [
    "AlloX", "Alternative", "Change", "Decision", "Explanation", "FinishTimeFairness",
    "FirstInFirstOut", "FractionPolicy", "FractionProblem", "Fractions", "GandivaLike", "Goodput",
    "Hierarchical", "Isolated", "JobView", "Makespan", "MaxMinFairness", "Named", "Optimus", "Plan",
    "PlanError", "Policy", "Pollux", "Proportional", "RoundScheduler", "ShapeProblem", "Sia",
    "SolverError", "SolverTimeout", "Static", "Tiresias", "TotalThroughput", "WaterFilling",
    "alternatives", "capacity", "catalogue", "changes", "explain", "place", "reconcile", "shape_of",
    "shapes", "with_job",
]  # fmt: skip
