"""Ours, the default: every device at its price, a price for every change, weights by attained service.

    maximise  sum_i (w_i + price . k_i*) ((G_i / G_i*)^a (1 - [shape changes] restart_i / stay_i)
                                          + [runs on] restart_i / stay_i)

A second of job i costs its user w_i, and others the price of the devices that it holds; so a unit of its
work costs at least c_i = min (w_i + price . k) / G_i(k), at its best shape k_i*, G_i*. What it does in a
second, G_i, is worth c_i G_i: with a = 1 that is the objective; a little below 1, a gain counts less than
proportionally, and fewer changes are worth their restart. The prices are those at which the jobs
together want as many devices as there are (`clearing_prices`), so jobs that scale well get more of them
than a utility that is the same for all would give.

A change costs the restart's share of the time until the next one (`expected_stay_s`), nine tenths at most,
so that nobody is frozen where he is; a job that is paused restarts once more (`transitions.py`). The weight
falls with the device-seconds that a job has had (who has had little probably needs little more, and leaves
soon) and rises with its age, so that of two that are both large the earlier one is finished first; a job
that declares its progress is weighed by what is left instead. One that has not run yet is offered the kinds
at the ratios that others found (`with_usual_kinds`), and tables that contradict themselves are smoothed
(`tables.py`). Whatever it is worth, as many of a tenant's jobs run as it is guaranteed devices
(`tenants.py`), who has to run for its deadline runs (`deadlines.py`), and then who has had far less than an
equal share (`guarantee.py`); where nothing happens nothing changes (`steady.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jaxgoodput.cluster.scheduler.policies.deadlines import deadlines_of
from jaxgoodput.cluster.scheduler.policies.guarantee import claims_of, due
from jaxgoodput.cluster.scheduler.policies.promises import promises
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policies.steady import as_of_last_event
from jaxgoodput.cluster.scheduler.policies.tables import shrunk_tables
from jaxgoodput.cluster.scheduler.policies.tenants import (
    GuaranteedClaims,
    fair_factors,
    guaranteed,
    with_tenants,
)
from jaxgoodput.cluster.scheduler.policies.transitions import (
    lost_by_change,
    too_young_to_pause,
    worth_of_no_pause,
)
from jaxgoodput.cluster.scheduler.policy import Decision, JobView
from jaxgoodput.cluster.scheduler.shapes import capacity
from jaxgoodput.specs import ClusterSpec

STEPS = 36  # of the search for prices; each is one pass over jobs and shapes
SHRINK = 0.86  # of the step, so that the last ones change a price by less than 1 %
HIGHEST = 10.0  # a price is at most so many times the mean weight: beyond, weights would not count


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Who gets which devices, for a low average completion time at few restarts.

    Raises ValueError for settings that cannot be.
    """

    diminishing: float = 0.85
    """The power a above; 1 = every unit of work is worth the same."""
    kind_change: float = 1.5
    """Restarts that another kind costs: what is known of it may be guessed."""
    pause: float = 1.0
    """Restarts that a first pause costs; 0 = pausing and coming back cost nothing."""
    least_run: float = 4.0
    """For so many of its restarts a job that has begun is not paused."""
    guaranteed: float = 0.25
    """The part of an equal share that every job gets, whatever others make of the devices; 0 = none."""
    patience_s: float = 3600.0
    """How old a job is when that begins to hold."""
    fairness: float = 2.0
    """The power of (deserved / had of late) by which the weights of a tenant's jobs are multiplied, 1/8 to 8;
    0 = tenants have guarantees and limits only."""
    service_scale_s: float = 6000.0
    """Device-seconds at which a job's weight begins to fall."""
    service_power: float = -0.75
    """How fast it falls with service; 0 = all are alike."""
    declared_power: float = -1.0
    """The same with the device-seconds left, where they are declared."""
    age_scale_s: float = 3600.0
    """Seconds since submission at which the weight begins to rise."""
    age_power: float = 0.25
    """How fast it rises; those that came together do not all finish together."""
    settle_s: float = 600.0
    """So long after the last event the weights of jobs that all run stand still; nobody may be waiting."""
    growth: float | None = None
    """The most that is offered, in largest sizes that a job has run on; None = trust its table."""
    smooth_tables: bool = True
    """Whether tables whose entries contradict each other are drawn towards smooth curves (`tables.py`)."""
    relative_gap: float = 1e-3
    """The gap to the best objective that is good enough; up to about 100 devices it is 0 anyway."""
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
        for name in ("pause", "least_run", "guaranteed", "patience_s", "settle_s", "fairness"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"Goodput.{name} must be at least 0 and finite, got {value}.")
        for name in ("service_power", "declared_power", "age_power"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"Goodput.{name} must be finite, got {getattr(self, name)}.")
        if not self.relative_gap >= 0:
            raise ValueError(f"Goodput.relative_gap must be at least 0, got {self.relative_gap}.")

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """The choice of greatest weighted utility after switching prices; restarting jobs stay."""
        problem = ShapeProblem.of(jobs, cluster, now_s, growth=self.growth)
        if self.smooth_tables:
            problem = replace(problem, goodput=shrunk_tables(problem))
        problem = replace(problem, goodput=with_usual_kinds(problem))
        then = as_of_last_event(problem, self.settle_s)
        each = capacity(cluster)
        weight = self._weight(then)
        if cluster.tenants and self.fairness > 0:
            weight = weight * fair_factors(problem, self.fairness)
        market = clearing_prices(
            problem.goodput,
            weight,
            problem.devices,
            problem.kind,
            np.array([each[kind] for kind in problem.kinds], np.float64),
        )
        share = problem.goodput / market.best[:, None]
        usual = market.cost * market.best
        worth = usual[:, None] * share**self.diminishing
        utility = worth * (1.0 - lost_by_change(problem, self.kind_change))
        utility += worth_of_no_pause(problem, worth, usual, self.pause)[:, None]
        is_due = due(problem, self.guaranteed, self.patience_s)
        deadlines = deadlines_of(problem)
        own = GuaranteedClaims([], {}, {})
        if any(tenant.guaranteed for tenant in cluster.tenants):
            # These come first, in the order of their deadlines, on shapes that meet them.
            num_due = len(deadlines.claims)
            urgency = np.where(is_due, num_due, num_due + 1)
            for place, claim in enumerate(deadlines.claims):
                urgency[claim.job] = place
            meeting = {claim.job: claim.shapes for claim in deadlines.claims}
            own = guaranteed(problem, utility, urgency, meeting)
        promised = promises(
            problem,
            [*own.claims, *deadlines.claims, *claims_of(problem, is_due)],
            problem.restoring(),
            too_young_to_pause(problem, self.least_run),
        )
        choice = problem.choose(
            np.where(promised.allowed, utility, np.nan),
            pinned=promised.pinned,
            at_least=promised.at_least,
            start=promised.granted if own.claims else None,
            relative_gap=self.relative_gap,
            time_limit_s=self.time_limit_s,
        )
        decision = problem.decide(choice)
        if cluster.tenants:
            decision = with_tenants(decision, problem, own)
        reasons = dict(decision.reasons)
        for i, why in deadlines.given_up.items():
            reasons[problem.jobs[i].spec.id] += f"; {why}"
        for i, shapes in deadlines.claims:
            spec = problem.jobs[i].spec
            left_s = (spec.deadline_s or now_s) - now_s
            if int(choice.shape[i]) not in shapes:
                which = "no shape that is fast enough" if problem.jobs[i].is_measured else "it none"
                reasons[spec.id] += (
                    f"; its deadline is in {left_s:.0f} s, and what others are promised leaves {which}"
                )
            elif spec.id in decision.allocations:
                reasons[spec.id] += f": its deadline is in {left_s:.0f} s"
        for view in (problem.jobs[i] for i in np.flatnonzero(is_due)):
            if view.spec.id in decision.allocations and not view.allocation.devices:
                reasons[view.spec.id] += ": it has had less than its guaranteed share of the time"
        return replace(decision, reasons=reasons)

    def _weight(self, problem: ShapeProblem) -> np.ndarray:
        """[jobs] priority times what service or declared progress says about how much is left."""
        weight = np.array([view.spec.weight for view in problem.jobs], np.float64)
        guessed = (1.0 + problem.received_s() / self.service_scale_s) ** self.service_power
        guessed *= (1.0 + problem.age_s() / self.age_scale_s) ** self.age_power
        left_s = problem.declared_s()
        told = (1.0 + left_s / self.service_scale_s) ** self.declared_power
        return weight * np.where(np.isnan(left_s), guessed, told)


class Market(NamedTuple):
    """What devices cost, and what jobs make of that."""

    prices: np.ndarray  # [kinds] of a device, in units of weight
    cost: np.ndarray  # [jobs] the least cost of a unit of work; NaN = no shape is allowed
    best: np.ndarray  # [jobs] the goodput of the shape that has it


def clearing_prices(
    goodput: np.ndarray,
    weight: np.ndarray,
    devices: np.ndarray,
    kind: np.ndarray,
    capacity: np.ndarray,
) -> Market:
    """The price of a device at which the jobs together want as many as there are.

    A job of weight w that runs at goodput G on k devices costs, per unit of work, (w + price k) / G: it
    keeps its user waiting, and it keeps k devices from others. Its best shape has the lowest cost, whatever
    work is left. Prices rise where more devices are wanted than exist, and fall where fewer are; wants jump
    where a job changes its shape, so that supply is met closely and not exactly.

    goodput: [jobs, shapes], NaN = not allowed; weight: [jobs] > 0; devices, kind: [shapes]; capacity:
    [kinds] devices.

    >>> market = clearing_prices(np.array([[1.0, 1.8]] * 3), np.ones(3), np.array([1, 2]),
    ...     np.array([0, 0]), np.array([4.0]))
    >>> bool(3.9 < market.prices[0] < 4.1)
    True
    """
    job, shape = np.nonzero(goodput > 0.0)
    cost, best = np.full((2, len(goodput)), np.nan)
    prices = np.zeros(len(capacity))
    if not len(job):
        return Market(prices, cost, best)
    start = np.flatnonzero(np.r_[True, np.diff(job) > 0])
    length = np.diff(np.r_[start, len(job)])
    rate, need, of = goodput[job, shape], devices[shape].astype(np.float64), kind[shape]
    own = weight[job]
    log_highest = np.log(HIGHEST * weight[job[start]].mean())
    log_prices = np.full(len(capacity), log_highest - np.log(10.0 * HIGHEST))
    for step in range(STEPS):
        worth = rate / (own + np.exp(log_prices)[of] * need)
        chosen = worth >= np.repeat(np.maximum.reduceat(worth, start), length)
        equal = np.repeat(np.add.reduceat(chosen.astype(np.int64), start), length)
        taken = need[chosen] / equal[chosen]  # of shapes that are equally good, a part of each
        wanted = np.bincount(of[chosen], taken, minlength=len(capacity))
        over = np.log(np.maximum(wanted, 1e-9) / np.maximum(capacity, 1e-9))
        log_prices += np.clip(20.0 * over, -1.0, 1.0) * SHRINK**step
        log_prices = np.minimum(log_prices, log_highest)
    prices = np.exp(log_prices)
    worth = rate / (own + prices[of] * need)
    most = np.maximum.reduceat(worth, start)
    cost[job[start]] = 1.0 / most
    # Of equals the fastest: where a device costs nothing, they differ in nothing else.
    best[job[start]] = np.maximum.reduceat(
        np.where(worth >= np.repeat(most, length), rate, 0.0), start
    )
    return Market(prices, cost, best)


def with_usual_kinds(problem: ShapeProblem) -> np.ndarray:
    """[jobs, shapes] goodput; rows of jobs that know nothing are scaled by kind, the others as they are.

    An adaptive job without a measurement that says the same of all kinds knows none of them. To start it
    on the wrong one costs a restart as soon as it has measured, so it begins with what the others found. A
    kind's ratio is the geometric mean, over the jobs that know all kinds, of its goodput on one device
    relative to the mean of the kinds. Without such jobs all stays as it is.
    """
    goodput = problem.goodput
    new = np.array(
        [v.largest_profiled == 0 and v.spec.mode == "adaptive" for v in problem.jobs], bool
    )
    new &= np.nanmax(goodput, 1, initial=-np.inf) == np.nanmin(goodput, 1, initial=np.inf)
    single = [
        np.flatnonzero((problem.kind == k) & (problem.devices == 1))
        for k in range(len(problem.kinds))
    ]
    if not new.any() or len(single) < 2 or not all(map(len, single)):
        return goodput
    known = goodput[~new][:, [int(columns[0]) for columns in single]]
    known = known[~np.isnan(known).any(1)]
    if not len(known):
        return goodput
    ratio = np.exp(np.log(known / known.mean(1, keepdims=True)).mean(0))
    return np.where(new[:, None], goodput * ratio[problem.kind], goodput)
