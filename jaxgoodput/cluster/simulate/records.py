"""What a simulation found, job by job and in total; JSON by `_serial`.

Finish-time fairness: rho of a job is its completion time over the time that it would take alone on
its fair share of the cluster. The share is the cluster's devices over the average number of
unfinished jobs while it was in the system, rounded down, at least one and at most what the job can
use. On several kinds of device, its isolated speed is the average of the speeds that so many
devices of each kind, packed on as few nodes as hold them, give it, weighted by the kind's part of
the cluster. The isolated job uses the best batch of its limits in every epoch and never restarts.
Above 1, sharing was worse than a cluster of one's own. (Mahajan et al., "Themis", NSDI 2020; the
average contention as in Jayaram Subramanya et al., "Sia", SOSP 2023.)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A stay of a job on some devices."""

    start_s: float
    end_s: float
    kind: str
    devices: Mapping[str, tuple[int, ...]]
    """Local indices by node name."""

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return sum(map(len, self.devices.values()))


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """What happened to one job."""

    id: str
    application: str
    submit_s: float
    start_s: float
    """When its first allocation began; `finish_s` where it was cancelled before."""
    finish_s: float
    restarts: int
    """How often its allocation changed after the first; pauses do not count."""
    device_s: Mapping[str, float]
    """Device-seconds that it used, by kind."""
    intervals: tuple[Interval, ...]
    rho: float | None = None
    """Finish-time fairness; None = the isolated time is unknown, or it was cancelled."""
    crashes: int = 0
    cancelled: bool = False
    """Its user gave up, or its budget was spent; `finish_s` is when."""
    tenant: str = "default"
    cost: float | None = None
    """Of its devices, by the cluster's prices; None = these are not known."""
    out_of_money: bool = False
    """Its budget was spent before its work was done."""
    deadline_s: float | None = None

    @property
    def jct_s(self) -> float:
        """Job completion time: from submission to the end."""
        return self.finish_s - self.submit_s

    @property
    def is_in_time(self) -> bool:
        """Whether it ended by its deadline; True where it has none."""
        return self.late_s <= 0.0

    @property
    def late_s(self) -> float:
        """Seconds after its deadline, below 0 before it; a job that was cancelled missed it for good."""
        if self.deadline_s is None:
            return -math.inf
        return math.inf if self.cancelled else self.finish_s - self.deadline_s


@dataclass(frozen=True, kw_only=True)
class TenantRecord:
    """What a tenant, with all below it, had and deserved while jobs of it were there."""

    name: str
    parent: str | None = None
    num_jobs: int
    average_jct_s: float
    """Of the jobs that were not cancelled; NaN = of none."""
    device_s: float
    deserved_s: float
    """Device-seconds, by `fair_share.deserved` at every moment."""
    cost: float | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a simulation found."""

    policy: str
    jobs: tuple[JobRecord, ...]
    decision_s: tuple[float, ...]
    """Time that each decision took."""
    num_failures: int = 0
    """Of nodes."""
    tenants: tuple[TenantRecord, ...] = ()
    """In the order of the cluster, then others that have jobs; empty where the cluster has none."""

    def faults(self) -> str:
        """What went wrong, in words; empty where nothing did."""
        counts = {
            "failures of nodes": self.num_failures,
            "crashes of jobs": sum(job.crashes for job in self.jobs),
            "jobs cancelled": sum(job.cancelled for job in self.jobs),
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)

    def summary(self) -> dict[str, float]:
        """The numbers that schedulers are compared by, in seconds unless their name says otherwise.

        Completion times are of the jobs that were not cancelled, devices and restarts of all.
        """
        done = [job for job in self.jobs if not job.cancelled]
        jct = np.array([job.jct_s for job in done])
        rho = np.array([job.rho for job in self.jobs if job.rho is not None])
        made = np.array(self.decision_s) if self.decision_s else np.zeros(1)
        start = min((job.submit_s for job in self.jobs), default=0.0)
        hours = [sum(job.device_s.values()) / 3600 for job in self.jobs]
        return {
            "average_jct_s": float(jct.mean()) if len(jct) else math.nan,
            "median_jct_s": float(np.median(jct)) if len(jct) else math.nan,
            "p99_jct_s": float(np.percentile(jct, 99)) if len(jct) else math.nan,
            "makespan_s": max((job.finish_s for job in done), default=start) - start,
            "restarts_per_job": sum(job.restarts for job in self.jobs) / max(len(self.jobs), 1),
            "device_hours": float(sum(hours)),
            "worst_rho": float(rho.max()) if len(rho) else math.nan,
            "unfair_share": float((rho > 1).mean()) if len(rho) else math.nan,
            "num_decisions": float(len(self.decision_s)),
            "median_decision_s": float(np.median(made)),
            "p95_decision_s": float(np.percentile(made, 95)),
            "max_decision_s": float(made.max()),
        }
