"""The jobs of a simulation: the ones to come, the active ones, and all of them.

Most jobs of a long trace are done or not submitted yet. What happens again and again in a simulation looks at
the active ones only, so that a long trace costs no more per event than a short one.
"""

import bisect
from collections.abc import Sequence

from jaxgoodput.cluster.simulate.jobs.tracked import TrackedJob


class Workload:
    """Tracks which jobs are active, from their submission to their end."""

    def __init__(self, jobs: Sequence[TrackedJob]):
        self.jobs = tuple(jobs)
        self.active: list[TrackedJob] = []
        """Jobs that are submitted and not done, in the order of the workload."""
        self.applications = {job.id: job.work.application for job in jobs}
        """Application of each job, by id."""
        self.submitted_s = {job.id: job.trace.submit_s for job in jobs}
        """Submission time of each job, by id."""
        # The next one is the last.
        self._coming = sorted(jobs, key=lambda job: (-job.trace.submit_s, -job.index))

    @property
    def num_left(self) -> int:
        """Number of jobs that are not done."""
        return len(self.active) + len(self._coming)

    @property
    def next_submit_s(self) -> float | None:
        """Submission time of the next job; None if all are submitted."""
        return self._coming[-1].trace.submit_s if self._coming else None

    def admit(self, end_s: float, *, inclusive: bool) -> None:
        """Let the jobs that are submitted before a time, or at it if `inclusive`, become active."""
        while (next_s := self.next_submit_s) is not None and (
            next_s < end_s or (inclusive and next_s == end_s)
        ):
            bisect.insort(self.active, self._coming.pop(), key=lambda job: job.index)

    def forget_finished(self) -> list[TrackedJob]:
        """Drop the jobs that are done from the active ones, and return them."""
        ended = [job for job in self.active if job.finish_s is not None]
        if ended:
            self.active = [job for job in self.active if job.finish_s is None]
        return ended
