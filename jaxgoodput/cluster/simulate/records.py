"""The results of a simulation, job by job and in total. `_fields.serial` writes them as JSON.

Finish-time fairness: the rho of a job is its completion time, divided by the time that it would take alone
on its fair share of the cluster. Above 1, sharing was worse than having a cluster of its own. The fair share
is the number of devices divided by the average number of unfinished jobs while the job was in the system,
rounded down, at least one and at most what the job can use. If there are several kinds of device, the
isolated speed is an average over the kinds, weighted by their part of the cluster, with the share packed on
as few nodes as possible. The isolated job uses its best batch size in every epoch and never restarts.
(Mahajan et al., "Themis", NSDI 2020; the average number of jobs as in Jayaram Subramanya et al., "Sia", SOSP
2023.)
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A period in which a job held the same devices."""

    start_s: float
    end_s: float
    kind: str
    devices: Mapping[str, tuple[int, ...]]
    """Local device indices by node name."""

    @property
    def num_devices(self) -> int:
        """Number of devices on all nodes."""
        return sum(map(len, self.devices.values()))


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What happened to one job of a simulation: its times, its devices and its restarts."""

    id: str
    application: str
    submit_s: float
    start_s: float
    """Start of the first allocation; `finish_s` if the job was cancelled before."""
    finish_s: float
    restarts: int
    """Changes of the allocation after the first; pauses do not count."""
    device_s: Mapping[str, float]
    """Device-seconds used, by kind."""
    intervals: tuple[Interval, ...]
    rho: float | None = None
    """Finish-time fairness; None = the isolated time is unknown, or the job was cancelled."""
    crashes: int = 0
    cancelled: bool = False
    """Whether the user cancelled the job, or its budget was used up, at `finish_s`."""
    tenant: str = "default"
    cost: float | None = None
    """Cost of the devices by the cluster's prices; None = there are no prices."""
    out_of_money: bool = False
    """Whether the budget was used up before the work was done."""
    deadline_s: float | None = None

    @property
    def jct_s(self) -> float:
        """Job completion time: the seconds from the job's submission to its end."""
        return self.finish_s - self.submit_s

    @property
    def device_hours(self) -> float:
        """Device-hours used, over all kinds."""
        return sum(self.device_s.values()) / 3600

    @property
    def is_in_time(self) -> bool:
        """Whether the job met its deadline; True if it has none."""
        return self.late_s <= 0.0

    @property
    def late_s(self) -> float:
        """Seconds after the deadline, negative before it; infinite if the job was cancelled."""
        if self.deadline_s is None:
            return -math.inf
        return math.inf if self.cancelled else self.finish_s - self.deadline_s


@dataclass(frozen=True, kw_only=True)
class TenantRecord:
    """How much a tenant, with all tenants below it, received, and how much it deserved."""

    name: str
    parent: str | None = None
    num_jobs: int
    """Jobs that were submitted, cancelled ones included."""
    average_jct_s: float
    """Average completion time of the jobs that were not cancelled; NaN = there are none."""
    device_s: float
    """Device-seconds received."""
    deserved_s: float
    """Device-seconds deserved, by `fair_share.deserved` while the tenant had jobs."""
    cost: float | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of simulating one policy: what happened to all jobs and tenants."""

    policy: str
    jobs: tuple[JobRecord, ...]
    decision_s: tuple[float, ...]
    """Seconds of computation for each decision."""
    num_failures: int = 0
    """Number of failures of nodes."""
    tenants: tuple[TenantRecord, ...] = ()
    """Tenants in the order of the cluster, then others that have jobs; empty if the cluster has none."""

    def faults(self) -> str:
        """Return the number of faults of each kind, in words; empty if there were none."""
        counts = {
            "failures of nodes": self.num_failures,
            "crashes of jobs": sum(job.crashes for job in self.jobs),
            "jobs cancelled": sum(job.cancelled for job in self.jobs),
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)

    def summary(self) -> dict[str, float]:
        """Return the numbers that schedulers are compared by, in seconds unless the name says otherwise.

        Completion times cover the jobs that were not cancelled, devices and restarts all jobs.
        """
        done = [job for job in self.jobs if not job.cancelled]
        jct = array_of(job.jct_s for job in done)
        rho = array_of(job.rho for job in self.jobs if job.rho is not None)
        made = np.array(self.decision_s or [0.0])
        start = min((job.submit_s for job in self.jobs), default=0.0)
        return {
            "average_jct_s": float(jct.mean()),
            "median_jct_s": float(np.median(jct)),
            "p99_jct_s": float(np.percentile(jct, 99)),
            "makespan_s": max((job.finish_s for job in done), default=start) - start,
            "restarts_per_job": sum(job.restarts for job in self.jobs) / max(len(self.jobs), 1),
            "device_hours": float(sum(job.device_hours for job in self.jobs)),
            "worst_rho": float(rho.max()),
            "unfair_share": math.nan if np.isnan(rho).any() else float((rho > 1).mean()),
            "num_decisions": float(len(self.decision_s)),
            "median_decision_s": float(np.median(made)),
            "p95_decision_s": float(np.percentile(made, 95)),
            "max_decision_s": float(made.max()),
        }


def array_of(values: Iterable[float]) -> np.ndarray:
    """Return an array of values; if there are none, of a single NaN."""
    return np.array(list(values) or [math.nan])
