"""Estimate what a job's next restart costs, from the user's guess and its own past restarts."""

from collections.abc import Sequence


def estimated_restart_s(told_s: float, took_s: Sequence[float]) -> float:
    """Return the expected seconds of a job's next restart: a weighted median.

    `told_s`, the prior guess, has one vote. Each entry of `took_s` (past restarts and the first start, until
    the job worked again) has two. So one measurement overrules the guess, and one outlier among three
    measurements has no effect.

    >>> estimated_restart_s(150.0, ())
    150.0
    >>> estimated_restart_s(150.0, (31.0, 29.0, 400.0))
    31.0
    """
    votes = sorted([told_s, *took_s, *took_s])
    return votes[len(votes) // 2]
