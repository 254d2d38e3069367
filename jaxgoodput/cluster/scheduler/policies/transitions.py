"""What it costs to change, pause and resume a job, and which jobs began too recently to be stopped.

Every allocation begins with a restart, so its cost depends on how long the allocation lasts
(`expected_stay_s`): until other jobs want its devices, or as long as the job lives. A job that changes its
shape or comes back loses the restart's share of that stay. A paused job restarts once more, so keeping a job
running is worth that restart, and more the more often it has restarted. Otherwise, since weights fall with
service, the waiting job would have the higher weight in every round, and two equal jobs would take turns for
ever. A first start costs nothing, because no decision avoids it.
"""

import numpy as np

from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem

MOST_LOST = (
    0.9  # 1 would stop a job on an empty cluster as soon as its present shape is not offered
)
STAY_SHARE = 0.8  # of the mean time between changes; tuned in simulations
LEADS = 0.15  # of a doubling: the least that the next one is hoped to bring
BEFORE_S = 120.0  # assumed age of a job that has just come, in addition to two restarts


def expected_stay_s(problem: ShapeProblem, contention: np.ndarray | float = 1.0) -> np.ndarray:
    """Return [jobs] seconds, above 0, that an allocation is expected to last.

    If others want the devices, stay = 0.8 lived / (restarts + 1), lived = age + 2 restart + 120 s: the mean
    time between a job's changes so far, as if it had lived a little longer. A change has to pay back its
    restart within this time. A fixed horizon is too long for a job whose devices other jobs keep taking, and
    too short for one that is rarely disturbed: on synthetic days of three kinds with restarts of 25 to 250 s
    it led to 7.7 restarts per job, this rule to 4. Sia's restart factor builds on the same mean, but can
    reach 0 and freeze the job.

    If devices are free, nothing but the job's own growth ends an allocation, and what a larger size leads to
    lasts as long as the job: for as long again as it has lived, if nothing else is known. Then only restarts
    beyond the doublings up to its largest size count: those of a job whose table moves to and fro.
    `contention` (0 to 1, [jobs] or one for all) says how much of the one and of the other; both are rates of
    changes.
    """
    lived_s = problem.age_s() + 2.0 * problem.restart_s() + BEFORE_S
    restarts = problem.num_restarts()
    by_others = contention * (restarts + 1.0) / STAY_SHARE
    largest = np.array([max(view.largest_profiled, 1) for view in problem.jobs], np.float64)
    its_own = (1.0 - contention) * (np.maximum(restarts - np.log2(largest), 0.0) + 1.0)
    return lived_s / (by_others + its_own)


def lost_by_change(
    problem: ShapeProblem, kind_change: float, contention: np.ndarray | float = 1.0
) -> np.ndarray:
    """Return [jobs, shapes] the share of a shape's worth that is lost by changing to it; 0 for no change.

    A change of kind costs `kind_change` restarts. `contention`: see `expected_stay_s`.
    """
    held = np.append(problem.kind, -1)[problem.present]  # -1 = none of these
    other = (held >= 0)[:, None] & (problem.kind != held[:, None])
    restart_s = problem.restart_s()[:, None] * np.where(other, kind_change, 1.0)
    lost = np.minimum(restart_s / expected_stay_s(problem, contention)[:, None], MOST_LOST)
    return np.where(problem.changes, lost, 0.0)


def leads_further(problem: ShapeProblem) -> np.ndarray:
    """Return [jobs, shapes] the factor on the worth of a size that opens up larger ones; 1 for others.

    A job that may only grow step by step knows larger sizes once it has run on its largest one. So that one
    is worth more than what it achieves itself, if the job and the cluster have room for more, and if its
    table does not say that a smaller size is as good.
    """
    if not problem.goodput.size:
        return np.ones(problem.goodput.shape)
    allowed = ~np.isnan(problem.goodput)
    largest = np.where(allowed, problem.devices, 0).max(1, initial=0)
    measured = np.array([view.largest_profiled for view in problem.jobs], np.int64)
    most = np.array([view.spec.max_devices for view in problem.jobs], np.int64)
    adapts = np.array([view.spec.mode != "rigid" for view in problem.jobs], bool)
    room = np.minimum(most, max(problem.supply.values(), default=0))
    opens = adapts & (measured > 0) & (largest > measured) & (2 * largest <= room)
    at_largest = problem.devices == largest[:, None]
    goodput = np.where(allowed, problem.goodput, 0.0)
    smaller = np.where(at_largest, 0.0, goodput).max(1)
    leads = opens[:, None] & at_largest & (goodput > smaller[:, None])
    return np.where(leads, 2.0**LEADS, 1.0)


def cost_of_move(problem: ShapeProblem, utility: np.ndarray) -> np.ndarray:
    """Return [jobs] what a job loses by moving to other devices of its present shape; 0 if it has none."""
    if not utility.size:
        return np.zeros(len(utility))
    lost = np.minimum(problem.restart_s() / expected_stay_s(problem), MOST_LOST)
    present = utility[np.arange(len(utility)), problem.present]
    held = problem.running & (problem.present >= 0) & ~np.isnan(present)
    return np.where(held, lost * np.maximum(np.nan_to_num(present), 0.0), 0.0)


def worth_of_no_pause(
    problem: ShapeProblem, worth: np.ndarray, usual: np.ndarray, restarts: float
) -> np.ndarray:
    """Return [jobs] a bonus on all shapes of a job: above 0 if it runs, below 0 if it is paused.

    A running job need not come back, which saves `restarts` of its restarts, plus half as much for each
    restart that it had. A paused job loses one. The bonus is the same for all shapes of a job, so it decides
    whether the job runs, not on how many devices.

    `worth`: [jobs, shapes], NaN = not allowed; `usual`: [jobs] worth of the job's best shape at its price.
    """
    if not worth.size:
        return np.zeros(len(worth))
    of_stay = problem.restart_s() / expected_stay_s(problem)
    present = worth[np.arange(len(worth)), problem.present]
    usual = np.nan_to_num(usual)
    kept = np.where((problem.present >= 0) & ~np.isnan(present), present, usual)
    dearer = restarts * (1.0 + problem.num_restarts() / 2.0)
    runs_on = np.minimum(dearer * of_stay, MOST_LOST) * kept
    comes_back = np.minimum(min(restarts, 1.0) * of_stay, MOST_LOST) * usual
    return np.where(problem.running, runs_on, np.where(problem.paused(), -comes_back, 0.0))


def too_young_to_pause(problem: ShapeProblem, restarts: float) -> np.ndarray:
    """Return [jobs] bool: the job ran for less than `restarts` times its restart, and its shape is offered.

    Such a job may change its shape but not stop, because stopping would waste more than it saves.
    """
    since_s = np.array(
        [problem.now_s if view.since_s is None else view.since_s for view in problem.jobs],
        np.float64,
    )
    offered = ~np.isnan(problem.goodput).all(1) if len(since_s) else np.zeros(0, bool)
    young = problem.now_s - since_s < restarts * problem.restart_s()
    return problem.running & offered & young
