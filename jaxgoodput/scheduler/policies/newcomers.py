"""What others found out about the kinds of devices, for a job that has not run yet.

An adaptive job without a measurement knows every kind alike, so a table that says the same of all of
them is taken for ignorance. To start it on the wrong kind costs a restart as soon as it has measured, so
it begins with the mean ratio that the other jobs of the cluster found.
"""

import numpy as np

from jaxgoodput.scheduler.policies.shape_choice import Problem


def with_usual_kinds(problem: Problem) -> np.ndarray:
    """[jobs, shapes] goodput; rows of jobs that know nothing are scaled by kind, the others as they are.

    A kind's ratio is the geometric mean, over the jobs that know all kinds, of its goodput on one
    device relative to the mean of the kinds. Without such jobs all stays as it is.
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
