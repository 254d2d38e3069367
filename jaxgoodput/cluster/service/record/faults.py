"""Nodes that jobs have reported as slow or broken: how long each is kept apart from which jobs.

A node is kept apart from the job that reported it for a term, which doubles with each repetition. If another
job has reported it as well within `WINDOW_S`, it is kept apart from all jobs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxgoodput.cluster.service.record.events import NodeReported
from jaxgoodput.specs import HostFault

WINDOW_S = 3600.0  # for which a report of one job confirms the report of another
LONGEST_S = 24 * 3600.0  # of a term, unless the first one is longer
FORGET_S = 24 * 3600.0  # after a term, before the next one is a first one again
MOST_FAULTS = 1000  # that are remembered

Faults = Mapping[tuple[str, str], "NodeFault"]
"""The newest report of each node by each job, by names of node and job, the oldest first."""


@dataclass(frozen=True, kw_only=True)
class NodeFault:
    """A job's newest report of a node, and until when the node is kept apart."""

    fault: HostFault
    why: str
    slow_ratio: float | None
    at_s: float
    """Time of the report."""
    until_s: float
    all_until_s: float | None
    num_reports: int = 1
    """How often the job has reported the node without forgetting it in between."""

    def end_s(self, own: bool) -> float:
        """Return until when the node is kept apart from the job itself (`own`), or from other jobs."""
        return max(self.until_s if own else 0.0, self.all_until_s or 0.0)


def with_report(faults: Faults, event: NodeReported, at_s: float) -> Faults:
    """Return the faults with one more report, without those that are old enough to be forgotten."""
    key = event.node, event.job
    known = faults.get(key)
    found = {k: one for k, one in faults.items() if k != key and at_s < one.until_s + FORGET_S}
    found[key] = NodeFault(
        fault=event.fault,
        why=event.why,
        slow_ratio=event.slow_ratio,
        at_s=at_s,
        until_s=event.until_s,
        all_until_s=event.all_until_s,
        num_reports=_num_before(known, at_s) + 1,
    )
    return dict(list(found.items())[-MOST_FAULTS:])


def without_node(faults: Faults, node: str) -> Faults:
    """Return the faults without the ones of a node."""
    return {key: one for key, one in faults.items() if key[0] != node}


def terms(
    faults: Faults, node: str, job: str, now_s: float, first_s: float
) -> tuple[float, float | None]:
    """Return until when a node is kept apart from a job that reports it now, and from all jobs.

    `first_s` is the first term. The second time is None if no other job has reported the node lately.
    """
    count = _num_before(faults.get((node, job)), now_s)
    until_s = now_s + min(first_s * 2.0 ** min(count, 60), max(first_s, LONGEST_S))
    others = [
        one.until_s
        for (name, other), one in faults.items()
        if name == node and other != job and now_s - one.at_s <= WINDOW_S
    ]
    return until_s, max(until_s, *others) if others else None


def is_known(faults: Faults, node: str, job: str, fault: HostFault, now_s: float) -> bool:
    """Whether a report says nothing new: the node is kept apart from the job already, as strictly."""
    known = faults.get((node, job))
    if known is None or now_s >= known.until_s:
        return False
    return known.fault == fault or known.fault != "slow"


def in_force(faults: Faults, now_s: float) -> dict[tuple[str, str], NodeFault]:
    """Return the faults for which a node is kept apart from some job now."""
    return {key: one for key, one in faults.items() if now_s < one.end_s(own=True)}


def of_job(faults: Faults, job: str, now_s: float) -> dict[tuple[str, str], NodeFault]:
    """Return the faults for which a node is kept apart from this job now."""
    return {
        (node, other): one
        for (node, other), one in faults.items()
        if now_s < one.end_s(own=other == job)
    }


def _num_before(known: NodeFault | None, now_s: float) -> int:
    return 0 if known is None or now_s >= known.until_s + FORGET_S else known.num_reports
