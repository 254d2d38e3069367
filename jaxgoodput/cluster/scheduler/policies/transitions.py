"""What it costs to change, pause and resume a job, and whom it is too early to stop.

Every allocation begins with a restart; what matters is how long it then lasts (`expected_stay_s`). A job
that changes its shape or comes back loses the restart's share of that stay. A job that is paused restarts
once more, so to keep it running is worth that restart, and the more the oftener it has restarted. Without
this the job that waits has the higher weight in every round, since weights fall with service, and two equal
jobs take turns for ever. A first start costs nothing: no decision saves it.
"""

import numpy as np

from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem

MOST_LOST = 0.9  # 1 would stop a job on an empty cluster once its present shape is not offered
STAY_SHARE = 0.8  # of the mean time between changes; tuned, see BUILD_NOTES.md
BEFORE_S = 120.0  # what a job that came just now is taken to have lasted, beside two restarts


def expected_stay_s(problem: ShapeProblem) -> np.ndarray:
    """[jobs] seconds, above 0, in which a change has to pay back its restart: how long the job stays.

    stay = 0.8 (age + 2 restart + 120 s) / (restarts + 1): the mean time between its changes so far is the
    estimate of the next one, as if it had lived a little longer than it has. A fixed horizon is too long
    for a job whose devices others keep taking, and too short for one that is rarely disturbed: on made-up
    days of three kinds with restarts of 25 to 250 s it led to 7.7 restarts per job where this leads to 4.
    Sia's restart factor is built on the same mean, but can reach 0 and freeze the job.
    """
    lived_s = problem.age_s() + 2.0 * problem.restart_s() + BEFORE_S
    return STAY_SHARE * lived_s / (problem.num_restarts() + 1.0)


def lost_by_change(problem: ShapeProblem, kind_change: float) -> np.ndarray:
    """[jobs, shapes] the share of a shape's worth that is lost by changing to it; 0 where the job is.

    Another kind costs `kind_change` restarts.
    """
    held = np.append(problem.kind, -1)[problem.present]  # -1 = none of these
    other = (held >= 0)[:, None] & (problem.kind != held[:, None])
    restart_s = problem.restart_s()[:, None] * np.where(other, kind_change, 1.0)
    lost = np.minimum(restart_s / expected_stay_s(problem)[:, None], MOST_LOST)
    return np.where(problem.changes, lost, 0.0)


def worth_of_no_pause(
    problem: ShapeProblem, worth: np.ndarray, usual: np.ndarray, restarts: float
) -> np.ndarray:
    """[jobs] what is added to all shapes of a job: above 0 where it runs, below 0 where it is paused.

    worth: [jobs, shapes], NaN = not allowed; usual: [jobs] that of the shape it would have by its price.
    A job that runs need not come back, which saves `restarts` of its restarts, and half as much more for
    each that it had; one that comes back loses one. It is the same for all of its shapes, so it decides
    whether the job runs, not on how many devices.
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
    """[jobs] bool: has run for less than so many of its restarts, in a shape that is still offered.

    It may change its shape, but not stop: what a stop would save is less than what it wastes.
    """
    since_s = np.array(
        [problem.now_s if view.since_s is None else view.since_s for view in problem.jobs],
        np.float64,
    )
    offered = ~np.isnan(problem.goodput).all(1) if len(since_s) else np.zeros(0, bool)
    young = problem.now_s - since_s < restarts * problem.restart_s()
    return problem.running & offered & young
