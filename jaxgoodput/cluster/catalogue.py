"""All policies by name, with what each needs of jobs and cluster; for commands, benchmarks and tables.

Policies that resize jobs are given adaptive jobs. Optimus keeps the batch, so it is given elastic ones. All
other policies run jobs on the devices that users asked for, as published.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxgoodput.cluster.published.baselines import (
    EarliestDeadline,
    LeastRemaining,
    Optimus,
    Static,
    Tiresias,
)
from jaxgoodput.cluster.published.gavel.discrete import (
    AlloX,
    FirstInFirstOut,
    GandivaLike,
    IsolatedShares,
    Proportional,
)
from jaxgoodput.cluster.published.gavel.fairness import (
    FinishTimeFairness,
    Hierarchical,
    Makespan,
    MaxMinFairness,
    WaterFilling,
)
from jaxgoodput.cluster.published.gavel.fractions import FractionPolicy
from jaxgoodput.cluster.published.gavel.rounds import RoundScheduler
from jaxgoodput.cluster.published.gavel.throughput import TotalThroughput
from jaxgoodput.cluster.published.pollux import Pollux
from jaxgoodput.cluster.published.sia import Sia
from jaxgoodput.cluster.scheduler.policies.goodput import Goodput
from jaxgoodput.cluster.scheduler.policy import Policy


@dataclass(frozen=True, kw_only=True)
class PolicyEntry:
    """A policy with its published settings, and its requirements."""

    policy: Policy
    says: str
    """Summary of the policy in one line."""
    mode: Literal["adaptive", "elastic", "rigid"] = "rigid"
    """Mode in which the policy is given all jobs, whatever they could do."""
    one_kind: bool = False
    """Whether the policy knows one kind of device only."""
    largest_gang: int | None = None
    """Most devices of a job that the policy ever starts; None = any."""
    sharing: bool = False
    """Whether the policy may put two jobs on the same devices."""


def _gavel(fractions: FractionPolicy, says: str, **needs) -> PolicyEntry:
    sharing = needs.get("sharing", False)
    return PolicyEntry(policy=RoundScheduler(fraction_policy=fractions, share_devices=sharing),
                 says=f"Gavel's rounds: {says}", **needs)  # fmt: skip


def catalogue() -> Mapping[str, PolicyEntry]:
    """Return every policy by its name in commands; this package's own comes first."""
    agnostic = "as if all kinds were equally fast"
    pairs = "pairs of jobs may share devices"
    return {
        "goodput": PolicyEntry(policy=Goodput(), mode="adaptive", says="ours, the default"),
        "sia": PolicyEntry(policy=Sia(), mode="adaptive", says="normalised goodput over all kinds"),
        "pollux": PolicyEntry(
            policy=Pollux(), mode="adaptive", says="even speedups over a fair share"
        ),
        "optimus": PolicyEntry(
            policy=Optimus(), mode="elastic", one_kind=True, says="devices to the job they help most"
        ),
        "tiresias": PolicyEntry(policy=Tiresias(), one_kind=True, says="two queues by attained service"),
        "least-remaining": PolicyEntry(
            policy=LeastRemaining(by_time=True), one_kind=True,
            says="least time left first, preemptive; an oracle with --work-left told",
        ),
        "edf": PolicyEntry(
            policy=EarliestDeadline(), one_kind=True, says="earliest deadline first, preemptive"
        ),
        "static": PolicyEntry(
            policy=Static(), one_kind=True, says="first in, first out, never interrupted"
        ),
        "max-min": _gavel(MaxMinFairness(), "largest smallest share"),
        "max-min-agnostic": _gavel(
            MaxMinFairness(heterogeneous=False), f"largest smallest share, {agnostic}"
        ),
        "max-min-packed": _gavel(
            MaxMinFairness(), f"largest smallest share; {pairs}", sharing=True
        ),
        "water-filling": _gavel(WaterFilling(), "smallest share largest, then the next"),
        "water-filling-packed": _gavel(
            WaterFilling(), f"smallest share largest, then the next; {pairs}", sharing=True
        ),
        "hierarchical": _gavel(Hierarchical(), "water filling over tenants"),
        "finish-time-fairness": _gavel(FinishTimeFairness(), "smallest worst finish-time ratio"),
        "finish-time-fairness-agnostic": _gavel(
            FinishTimeFairness(heterogeneous=False), f"smallest worst finish-time ratio, {agnostic}"
        ),
        "total-throughput": _gavel(TotalThroughput(), "largest sum of steps per second"),
        "total-throughput-packed": _gavel(
            TotalThroughput(), f"largest sum of steps per second; {pairs}", sharing=True
        ),
        "min-cost": _gavel(TotalThroughput(per_price=True), "most steps per price of devices"),
        "min-cost-deadlines": _gavel(
            TotalThroughput(per_price=True, deadlines=True), "cheapest, with soft deadlines"
        ),
        "makespan": _gavel(Makespan(), "earliest end of the last job"),
        "makespan-agnostic": _gavel(
            Makespan(heterogeneous=False), f"earliest end of the last job, {agnostic}"
        ),
        "fifo": _gavel(FirstInFirstOut(), "in order of arrival, on the fastest free kind"),
        "fifo-agnostic": _gavel(FirstInFirstOut(kinds="any"), f"in order of arrival, {agnostic}"),
        "fifo-packed": _gavel(FirstInFirstOut(), f"in order of arrival; {pairs}", sharing=True),
        "allox": _gavel(
            AlloX(), "best order and kinds for single-device jobs", largest_gang=1
        ),
        "gandiva": _gavel(GandivaLike(), f"equal time; {pairs}", sharing=True),
        "isolated": _gavel(IsolatedShares(), "an equal part of every kind"),
        "proportional": _gavel(Proportional(), "time on kinds by their numbers"),
    }  # fmt: skip
