"""All policies by name, with what each needs of its jobs: for commands, benchmarks and tables.

Policies that resize jobs see adaptive ones; Optimus keeps the batch and sees elastic ones; all
others run jobs on the devices that their users asked for, as they were published.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jaxgoodput.scheduler.gavel.discrete import (
    AlloX,
    FirstInFirstOut,
    GandivaLike,
    Isolated,
    Proportional,
)
from jaxgoodput.scheduler.gavel.fairness import (
    FinishTimeFairness,
    Hierarchical,
    Makespan,
    MaxMinFairness,
    WaterFilling,
)
from jaxgoodput.scheduler.gavel.fractions import FractionPolicy
from jaxgoodput.scheduler.gavel.rounds import RoundScheduler
from jaxgoodput.scheduler.gavel.throughput import TotalThroughput
from jaxgoodput.scheduler.policies.baselines import EarliestDeadline, Optimus, Static, Tiresias
from jaxgoodput.scheduler.policies.goodput import Goodput
from jaxgoodput.scheduler.policies.pollux import Pollux
from jaxgoodput.scheduler.policies.sia import Sia
from jaxgoodput.scheduler.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Named:
    """A policy with its published settings, and what it asks of jobs and cluster."""

    policy: Policy
    says: str
    """What it does, in one line."""
    mode: Literal["adaptive", "elastic", "rigid"] = "rigid"
    """What jobs are to it, whatever they could do."""
    one_kind: bool = False
    """Whether it knows one kind of device only."""
    largest_gang: int | None = None
    """It never starts a job that asks for more devices; None = any."""
    sharing: bool = False
    """Whether it may put two jobs on the same devices."""


def _gavel(fractions: FractionPolicy, says: str, **needs) -> Named:
    sharing = needs.get("sharing", False)
    return Named(policy=RoundScheduler(fraction_policy=fractions, share_devices=sharing),
                 says=f"Gavel's rounds: {says}", **needs)  # fmt: skip


def catalogue() -> Mapping[str, Named]:
    """Every policy by the name that commands know it by; ours first."""
    agnostic = "as if all kinds were equally fast"
    pairs = "pairs of jobs may share devices"
    return {
        "goodput": Named(policy=Goodput(), mode="adaptive", says="ours, the default"),
        "sia": Named(policy=Sia(), mode="adaptive", says="normalised goodput over all kinds"),
        "pollux": Named(
            policy=Pollux(), mode="adaptive", says="even speedups over a fair share"
        ),
        "optimus": Named(
            policy=Optimus(), mode="elastic", one_kind=True, says="devices where they save most time"
        ),
        "tiresias": Named(policy=Tiresias(), one_kind=True, says="two queues by attained service"),
        "edf": Named(
            policy=EarliestDeadline(), one_kind=True, says="earliest deadline first, preemptive"
        ),
        "static": Named(
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
        "isolated": _gavel(Isolated(), "an equal part of every kind"),
        "proportional": _gavel(Proportional(), "time on kinds by their numbers"),
    }  # fmt: skip
