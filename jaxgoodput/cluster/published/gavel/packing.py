"""Pairs of jobs that share devices (space sharing): which are worth running.

Source: Gavel (OSDI 2020, sections 3.1 and 4.4). Unlike the artifact, pairs that never beat taking turns are
dropped first, so that the linear programs shrink.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from jaxgoodput.cluster.published.gavel.fractions import FractionProblem, gang_shape
from jaxgoodput.cluster.scheduler.policy import JobView


def combined_speed(problem: FractionProblem) -> Float[np.ndarray, "pairs kinds"]:
    """Return the sum of the two members' speeds together, each relative to its speed alone.

    It is 0 if one of them cannot run. Above 1, sharing devices beats taking turns.
    """
    pairs = np.asarray(problem.pairs, dtype=int).reshape(-1, 2)
    alone = problem.throughput[pairs]
    both = (problem.pair_throughput > 0).all(axis=1) & (alone > 0).all(axis=1)
    relative = problem.pair_throughput / np.where(alone > 0, alone, 1.0)
    return np.where(both, relative.sum(axis=1), 0.0)


def best_partners(problem: FractionProblem, least_speed: float = 1.0) -> tuple[int, ...]:
    """Choose disjoint pairs, the best combined speed (averaged over kinds that both can use) first."""
    speeds = combined_speed(problem)
    kinds = (speeds > 0).sum(axis=1)
    mean = speeds.sum(axis=1) / np.maximum(kinds, 1)
    chosen, taken = [], set()
    for k in np.argsort(-mean, kind="stable"):
        if mean[k] >= least_speed and kinds[k] and not taken & set(problem.pairs[k]):
            chosen.append(int(k))
            taken |= set(problem.pairs[k])
    return tuple(chosen)


def worth_pairing(problem: FractionProblem, least_speed: float = 1.0) -> FractionProblem:
    """Drop pairs whose combined speed is at most `least_speed` on every kind, and such kinds of other pairs.

    A pair whose combined speed is at most 1 on a kind is never better there than taking turns, so the default
    loses no optimum.
    """
    speeds = combined_speed(problem)
    useful = speeds > least_speed
    keep = np.flatnonzero(useful.any(axis=1))
    return dataclasses.replace(
        problem,
        pairs=tuple(problem.pairs[k] for k in keep),
        pair_throughput=np.where(useful[keep, None, :], problem.pair_throughput[keep], 0.0),
    )


def with_pairs_of_views(
    problem: FractionProblem,
    jobs: Sequence[JobView],
    per_node: Mapping[str, int],
    *,
    least_speed: float = 1.0,
) -> FractionProblem:
    """Add each pair of jobs whose speeds side by side are known to both (`JobView.shared_goodput`).

    Both must have gangs of one size. Speeds are looked up at the gang's shape on each kind that both can use.
    `per_node`: devices of a whole node, by kind.
    """
    number = {job: i for i, job in enumerate(problem.job_ids)}
    pairs, speeds = [], []
    for i, job in enumerate(jobs):
        for partner in sorted({other for other, _ in job.shared_goodput}):
            j = number.get(partner, -1)
            if j <= i or problem.scale_factor[i] != problem.scale_factor[j]:
                continue
            speed = np.array(
                [
                    _shared(jobs[i], jobs[j], problem, i, per_node),
                    _shared(jobs[j], jobs[i], problem, j, per_node),
                ]
            )
            if (speed > 0).all(axis=0).any():
                pairs.append((i, j))
                speeds.append(speed)
    shape = (len(pairs), 2, len(problem.kinds))
    paired = dataclasses.replace(
        problem, pairs=tuple(pairs), pair_throughput=np.array(speeds, float).reshape(shape)
    )
    return worth_pairing(paired, least_speed)


def _shared(job, partner, problem, row, per_node):
    """Return [kinds] a job's speed beside its partner; 0 if unknown, or if the job cannot run alone."""
    speeds = np.zeros(len(problem.kinds))
    for j, kind in enumerate(problem.kinds):
        shape = gang_shape(job, kind, int(problem.scale_factor[row]), per_node.get(kind, 0))
        if shape is not None and problem.throughput[row, j] > 0:
            speed = job.shared_goodput.get((partner.spec.id, shape), 0.0)
            speeds[j] = speed if np.isfinite(speed) and speed > 0 else 0.0
    return speeds
