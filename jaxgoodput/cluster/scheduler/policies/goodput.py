"""Goodput, the default policy: devices and changes have prices, and service received lowers a job's weight.

    maximise  sum_i (w_i + price . k_i*) ((G_i / G_i*)^a (1 - [shape changes] restart_i / stay_i)
                                          + [runs on] restart_i / stay_i)

A second of job i costs its user w_i, and other jobs the price of the devices it holds. So a unit of its work
costs at least c_i = min (w_i + price . k) / G_i(k), on its best shape k_i*, G_i*, and what it does in a
second, G_i, is worth c_i G_i. That is the objective for a = 1. With a a little below 1, gains count less
than proportionally, and fewer changes are worth their restart. The prices are such that the jobs together
want as many devices as there are (`clearing_prices`), so jobs that scale well get more of them than equal
utilities for all would give.

A change costs the restart's share of the time until the next one (`expected_stay_s`), at most nine tenths,
so that no job is frozen. A paused job restarts once more (`transitions.py`). Jobs that leave
soon have a high weight: it falls with the device-seconds left, if a job declares its progress; or else with
what jobs that have ended say of them (`work_left.py`); or else with the device-seconds that it has had,
because a job that has had little probably needs little more. The weight of a guess rises with age, so the
earlier one of two large jobs finishes first. A job that has not run yet is offered kinds at the ratios that
other jobs measured (`with_usual_kinds`). Tables that contradict themselves are smoothed, and far from what
was measured they count for less (`tables.py`). If devices are free, a size is worth more for what it leads
to.

Some jobs run whatever they are worth: as many of a tenant's jobs as it is guaranteed devices (`tenants.py`),
jobs that must run to meet their deadlines (`deadlines.py`), and jobs that have had far less than an equal
share (`guarantee.py`). What is chosen is placed, and moving a job so that others fit costs its restart
(`placeable.py`). While nothing happens, nothing changes (`steady.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jaxgoodput.cluster.scheduler.policies.deadlines import (
    Deadlines,
    deadlines_of,
    with_deadlines,
)
from jaxgoodput.cluster.scheduler.policies.guarantee import (
    DueJobs,
    claims_of,
    due,
    with_due,
    with_ended_turns,
)
from jaxgoodput.cluster.scheduler.policies.placeable import PlacingRules, choose_placeable
from jaxgoodput.cluster.scheduler.policies.promises import promises
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policies.steady import (
    Standing,
    changes,
    some_wait,
    standing,
    starts,
    unchanged,
    with_ended_promises,
    with_turns,
)
from jaxgoodput.cluster.scheduler.policies.tables import shrunk_tables, with_doubt
from jaxgoodput.cluster.scheduler.policies.tenants import (
    GuaranteedClaims,
    fair_factors,
    guaranteed,
    with_tenants,
)
from jaxgoodput.cluster.scheduler.policies.transitions import (
    cost_of_move,
    leads_further,
    lost_by_change,
    too_young_to_pause,
    worth_of_no_pause,
)
from jaxgoodput.cluster.scheduler.policy import Decision, JobView
from jaxgoodput.specs import ClusterSpec

STEPS = 36  # passes over jobs and shapes in the search for prices
SHRINK = 0.86  # per step, so that the last steps change a price by less than 1 %
SHORT_S = 300.0  # device-seconds that are added to the work left, so that no weight is infinite
HIGHEST = 10.0  # largest price in mean weights; with higher prices weights would not count


class _Owed(NamedTuple):
    """What jobs may claim now, whatever weights and prices are."""

    turns: DueJobs
    deadlines: Deadlines
    restoring: np.ndarray  # [jobs] shape that a restarting job keeps, -1 = none
    young: np.ndarray  # [jobs] bool: began too lately to be paused


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Allocates devices for a low average completion time with few restarts.

    Raises ValueError for impossible settings.
    """

    diminishing: float = 0.85
    """Power a of the objective; 1 = every unit of work is worth the same."""
    kind_change: float = 1.5
    """Price of a change of kind, in restarts; above 1, because goodput on the other kind may be a guess."""
    pause: float = 1.0
    """Price of a first pause, in restarts; 0 = pausing and coming back cost nothing."""
    least_run: float = 4.0
    """Time for which a job that has begun is not paused, in restarts of the job."""
    guaranteed: float = 0.25
    """Part of an equal share that every job gets, however useful devices are to others; 0 = none."""
    patience_s: float = 3600.0
    """Age of a job from which `guaranteed` holds."""
    fairness: float = 2.0
    """Power of (deserved / recent share) that multiplies the weights of a tenant's jobs, 1/8 to 8; 0 =
    tenants have guarantees and limits only."""
    service_scale_s: float = 6000.0
    """Device-seconds at which a job's weight begins to fall."""
    service_power: float = -0.75
    """Power with which the weight falls with service; 0 = all jobs are alike."""
    declared_power: float = -1.0
    """Power with which the weight falls with the device-seconds left, if a job declares them."""
    age_scale_s: float = 3600.0
    """Seconds since submission at which the weight begins to rise."""
    age_power: float = 0.25
    """Power with which it rises, so that jobs that came together do not all finish together."""
    settle_s: float = 600.0
    """Time after the last arrival or change of devices from which weights stand still, while all jobs run."""
    growth: float | None = None
    """Largest size offered, as a multiple of the largest measured size; None = trust the job's table."""
    smooth_tables: bool = True
    """Whether tables whose entries contradict each other are drawn towards smooth curves (`tables.py`)."""
    relative_gap: float = 1e-3
    """Acceptable gap to the best objective; up to about 100 devices the solution is exact anyway."""
    time_limit_s: float = 2.0

    def __post_init__(self):
        for names, is_valid, valid in (
            (
                "diminishing service_scale_s age_scale_s kind_change time_limit_s",
                lambda value: value > 0 and math.isfinite(value),
                "above 0 and finite",
            ),
            (
                "pause least_run guaranteed patience_s settle_s fairness",
                lambda value: value >= 0 and math.isfinite(value),
                "at least 0 and finite",
            ),
            ("service_power declared_power age_power", math.isfinite, "finite"),
            ("relative_gap", lambda value: value >= 0, "at least 0"),
        ):
            for name in names.split():
                if not is_valid(getattr(self, name)):
                    raise ValueError(f"Goodput.{name} must be {valid}, got {getattr(self, name)}.")

    def __call__(self, jobs: Sequence[JobView], cluster: ClusterSpec, now_s: float, /) -> Decision:
        """Return the decision of greatest total utility. Changes cost utility; promises are kept."""
        problem = ShapeProblem.of(jobs, cluster, now_s, growth=self.growth)
        if self.smooth_tables:
            problem = replace(problem, goodput=shrunk_tables(problem))
        problem = replace(problem, goodput=with_usual_kinds(problem))
        then, owed = standing(problem, self.settle_s), self._owed(problem)
        is_news = all(it is problem for it in then)
        by_present = not is_news and some_wait(problem)
        decision = self._decide(problem, Standing(problem, problem) if by_present else then, owed)
        if by_present and not starts(decision, problem) and changes(decision, problem):
            # No waiting job gets its turn, and without one running jobs exchange no devices.
            decision = self._decide(problem, then, owed)
        return with_turns(decision, problem, owed.turns.due, is_news)

    def _owed(self, problem: ShapeProblem) -> _Owed:
        return _Owed(
            turns=due(problem, self.guaranteed, self.patience_s),
            deadlines=deadlines_of(problem),
            restoring=problem.restoring(),
            young=too_young_to_pause(problem, self.least_run),
        )

    def _decide(self, problem: ShapeProblem, then: Standing, owed: _Owed) -> Decision:
        """Return the decision by weights and prices as they were `then`."""
        utility = self._utility(problem, then)
        turns, deadlines = owed.turns, owed.deadlines
        own = _guaranteed_claims(problem, utility, turns.due, deadlines)
        promised = promises(
            problem,
            [*own.claims, *deadlines.claims, *claims_of(problem, turns)],
            owed.restoring,
            owed.young,
        )
        rules = PlacingRules(
            move_cost=cost_of_move(then.prices, utility),
            relative_gap=self.relative_gap,
            time_limit_s=self.time_limit_s,
        )
        start = promised.granted if own.claims else None
        choice, placed = choose_placeable(problem, utility, promised, rules, start=start)
        gap = self.relative_gap * abs(choice.objective)
        if still := unchanged(problem, utility, promised, choice, gap):
            choice, placed = still
        decision = problem.decide(choice, placed=placed)
        if problem.cluster.tenants:
            decision = with_tenants(decision, problem, own)
        decision = with_deadlines(decision, problem, choice, deadlines)
        decision = with_due(decision, problem, turns)
        if then.prices is problem:
            return decision
        before = due(then.prices, self.guaranteed, self.patience_s)
        decision = with_ended_turns(decision, problem, before.due, turns.due)
        return with_ended_promises(decision, problem, then.prices.now_s, self.least_run)

    def _utility(self, problem: ShapeProblem, then: Standing) -> np.ndarray:
        """Return [jobs, shapes] what each job adds to the objective with each shape; NaN = not allowed."""
        cluster = problem.cluster
        weight = self._weight(then.weights)
        if cluster.tenants and self.fairness > 0:
            weight = weight * fair_factors(problem, self.fairness)
        goodput = with_preferences(with_doubt(problem), problem)
        market = clearing_prices(
            goodput,
            weight,
            problem.devices,
            problem.kind,
            np.array([problem.supply[kind] for kind in problem.kinds], np.float64),
        )
        share = goodput / market.best[:, None]
        usual = market.cost * market.best
        worth = usual[:, None] * share**self.diminishing
        # Of what a unit of work costs, the part that is due to the devices which other jobs want.
        contention = 1.0 - np.nan_to_num(weight / usual)
        worth = worth * leads_further(problem) ** (1.0 - contention)[:, None]
        utility = worth * (1.0 - lost_by_change(then.prices, self.kind_change, contention))
        utility += worth_of_no_pause(then.prices, worth, usual, self.pause)[:, None]
        return utility

    def _weight(self, problem: ShapeProblem) -> np.ndarray:
        """Return [jobs] the users' weights, times what past or declared work says about the work left."""
        had_s, left_s = problem.received_s(), problem.declared_s()
        # Ends per device-second; if nothing is known of a job, as of jobs of any length.
        rate = 1.0 / (self.service_scale_s + had_s)
        alike: dict[int, list[int]] = {}  # jobs that share a guess
        for i, view in enumerate(problem.jobs):
            if view.work_guess is not None:
                alike.setdefault(id(view.work_guess), []).append(i)
        for rows in alike.values():
            guess = problem.jobs[rows[0]].work_guess
            assert guess is not None  # only such jobs were collected
            rate[rows] = guess.rates_at(had_s[rows])
        guessed = (self.service_scale_s * rate) ** -self.service_power
        guessed *= (1.0 + problem.age_s() / self.age_scale_s) ** self.age_power
        told = (self.service_scale_s / (SHORT_S + left_s)) ** -self.declared_power
        return problem.weight() * np.where(np.isnan(left_s), guessed, told)


def _guaranteed_claims(
    problem: ShapeProblem, utility: np.ndarray, is_due: np.ndarray, deadlines: Deadlines
) -> GuaranteedClaims:
    """Return the jobs that must run by a tenant's guarantee: first for deadlines, then due ones, then all."""
    if not any(tenant.guaranteed for tenant in problem.cluster.tenants):
        return GuaranteedClaims([], {}, {})
    num_deadlines = len(deadlines.claims)
    urgency = np.where(is_due, num_deadlines, num_deadlines + 1)
    for rank, claim in enumerate(deadlines.claims):
        urgency[claim.job] = rank
    # A job with a deadline is to have one of the shapes that meet it.
    meeting = {claim.job: claim.shapes for claim in deadlines.claims}
    return guaranteed(problem, utility, urgency, meeting)


class Market(NamedTuple):
    """Prices of devices, and what each job's cheapest shape costs and achieves at these prices."""

    prices: np.ndarray  # [kinds] price of one device, in units of weight
    cost: np.ndarray  # [jobs] cost of a unit of work with the cheapest shape; NaN = none allowed
    best: np.ndarray  # [jobs] goodput of the cheapest shape; NaN = none allowed


def clearing_prices(
    goodput: np.ndarray,
    weight: np.ndarray,
    devices: np.ndarray,
    kind: np.ndarray,
    capacity: np.ndarray,
) -> Market:
    """Return the prices of devices at which the jobs together want as many as there are.

    A unit of work of a job of weight w that runs at goodput G on k devices costs (w + price k) / G, because
    the job keeps its user waiting and k devices from other jobs. Its best shape has the lowest cost,
    whatever work is left. The price of a kind rises if more devices are wanted than exist, and falls if
    fewer are. Demand jumps whenever a job's best shape changes, so it meets supply closely, not exactly.

    `goodput`: [jobs, shapes], NaN = not allowed; `weight`: [jobs] > 0; `devices`, `kind`: [shapes];
    `capacity`: [kinds] devices.

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
    first = np.r_[True, np.diff(job) > 0]
    start = np.flatnonzero(first)
    length, position = np.diff(np.r_[start, len(job)]), np.cumsum(first) - 1  # of each pair's job
    rate, own = goodput[job, shape], weight[job]

    def worths(prices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return [pairs] goodput per cost, and the pairs that are the best of their jobs."""
        worth = rate / (own + (prices[kind] * devices)[shape])
        return worth, np.flatnonzero(worth >= np.repeat(np.maximum.reduceat(worth, start), length))

    log_highest = np.log(HIGHEST * weight[job[start]].mean())
    log_prices = np.full(len(capacity), log_highest - np.log(10.0 * HIGHEST))
    for step in range(STEPS):
        _, chosen = worths(np.exp(log_prices))
        its, of = position[chosen], shape[chosen]
        equal = np.bincount(its, minlength=len(start))[its]
        taken = devices[of] / equal  # equally good shapes share the demand
        wanted = np.bincount(kind[of], taken, minlength=len(capacity))
        over = np.log(np.maximum(wanted, 1e-9) / np.maximum(capacity, 1e-9))
        # Excess demand moves prices by a factor e at most; shrinking steps make the search converge although
        # demand jumps.
        log_prices += np.clip(20.0 * over, -1.0, 1.0) * SHRINK**step
        log_prices = np.minimum(log_prices, log_highest)
    prices = np.exp(log_prices)
    worth, chosen = worths(prices)
    cost[job[start]] = 1.0 / np.maximum.reduceat(worth, start)
    # Among equally good shapes take the fastest; if devices are free, they differ in nothing else.
    fastest = np.zeros(len(start))
    np.maximum.at(fastest, position[chosen], rate[chosen])
    best[job[start]] = fastest
    return Market(prices, cost, best)


def with_preferences(goodput: np.ndarray, problem: ShapeProblem) -> np.ndarray:
    """Return [jobs, shapes] goodput, divided by `JobSpec.preference` on kinds that a job does not prefer."""
    likes = [i for i, view in enumerate(problem.jobs) if view.spec.preferred_kinds is not None]
    if not likes:
        return goodput
    found = goodput.copy()
    for row in likes:
        spec = problem.jobs[row].spec
        liked = np.array([kind in (spec.preferred_kinds or ()) for kind in problem.kinds], bool)
        found[row, ~liked[problem.kind]] /= spec.preference
    return found


def with_usual_kinds(problem: ShapeProblem) -> np.ndarray:
    """Return [jobs, shapes] goodput, with the rows of unmeasured jobs scaled by usual ratios of kinds.

    An adaptive job without measurements, whose table says the same for all kinds, knows none of them.
    Starting it on the wrong kind costs a restart as soon as it has measured, so it begins with what other
    jobs found. A kind's ratio is the geometric mean, over the jobs that know all kinds, of its goodput on
    one device relative to the mean of the kinds. If there are no such jobs, nothing changes.
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
