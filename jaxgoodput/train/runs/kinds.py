"""Chooses the kind of a run, once: `run_of`. What is asked of processes before that is here, too."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxgoodput.clock import Clock
from jaxgoodput.data.loader import Loader
from jaxgoodput.engine import memory
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.parallel.place import Place, place
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.compile_ahead import StrategyCompiler
from jaxgoodput.train.control import (
    CONTROL_SIZE,
    OwnDecisions,
    Requests,
    SharedDecisions,
)
from jaxgoodput.train.process import launched
from jaxgoodput.train.runs.alone import Alone
from jaxgoodput.train.runs.elastic import Elastic
from jaxgoodput.train.runs.membership import Membership, WorkSharing
from jaxgoodput.train.runs.processes import Processes, Spanning, agreement_of
from jaxgoodput.train.tables.feed import Feed

Run = Alone | Processes | Elastic
"""What the loop talks to. `Alone` says what each method is for."""


def run_of(
    where: Place,
    requests: Requests,
    strategies: StrategyCompiler,
    *,
    first: BatchConfig,
    feed: Feed,
    loader: Loader,
    sharing: WorkSharing,
    membership: Membership | None,
    clock: Clock,
) -> Run:
    """Return the run of the kind that these processes make: alone, of a fixed number, or elastic.

    `first` is the batch to begin with.
    """
    if has_others(where):
        decisions = SharedDecisions(requests, strategies, where, first)
    else:
        decisions = OwnDecisions(requests, strategies)
    agreement = agreement_of(where)
    if membership is not None:
        return Elastic(feed, decisions, loader, agreement, where, membership, clock, sharing)
    if where.spans:
        return Spanning(feed, decisions)
    if has_others(where):
        return Processes(feed, decisions, loader, agreement, sharing.leases)
    return Alone(feed, decisions)


# -- what is asked before there is a run -------------------------------------------------------------


def place_of(
    devices: Sequence[Any] | None, strategies: Sequence[Strategy], membership: Membership | None
) -> Place:
    """Return which devices a run has, and who shares them; `membership` if processes come and go."""
    if membership is None:
        return place(devices, strategies)
    found = place(devices, strategies, group_size=membership.group_size)
    return dataclasses.replace(found, is_broken=membership.is_broken)


def hosts_may_change() -> bool:
    """Whether a launcher has started this process in a job whose hosts come and go."""
    return launched().membership is not None


def control_size(where: Place) -> int:
    """Return the length of the vector that rides along with a step: 0 if there are no others to tell."""
    return 0 if is_alone(where) else CONTROL_SIZE


def is_alone(where: Place) -> bool:
    """Whether a run has one process, and no other can join it."""
    return where.process_count == 1 and where.world is None


def has_others(where: Place) -> bool:
    """Whether the job has other processes now, which may wait for this one."""
    return where.process_count > 1


def least_everywhere(where: Place, budget: int) -> int:
    """Return the least memory budget of all processes, so that all plan the same; they call this together."""
    where.meet("before the plan")
    return memory.least(budget) if has_others(where) else budget
