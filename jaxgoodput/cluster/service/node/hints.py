"""Hints of a run, read from the journal in its workdir. The training program need not know of the service.

They are the numbers that `jaxgoodput plan WORKDIR` uses; the service makes its tables from them.
"""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxgoodput.goodput.efficiency import GradGroups
from jaxgoodput.observe import journal
from jaxgoodput.observe.events import FitStart, Regrouped, Window
from jaxgoodput.observe.forecast import StrategyRecord, learnt_of, limits_of, records_of
from jaxgoodput.observe.journal import Record, of_kind
from jaxgoodput.specs import LARGEST, MOST_COUNTS, Hints, LayoutHints, StepCost

MOST_RESTARTS = 16


def hints_of(
    workdir: pathlib.Path, kind: str, generation: int, devices_per_process: int
) -> Hints | None:
    """Return the hints (measurements) of the run in `workdir`; None if no run has started there.

    Before its first fit a run reports only how far it is.
    """
    if not journal.segments(workdir / journal.FILE_NAME):
        return None
    records = records_of(workdir)
    starts, windows = of_kind(records, FitStart), of_kind(records, Window)
    if not starts:
        return None
    start = starts[-1]
    try:
        learnt = learnt_of(workdir, records, start)
    except ValueError:  # not enough has been measured
        learnt = {}
    limits = limits_of(start, windows, learnt)
    layouts = tuple(_layout(one, limits[name].span) for name, one in learnt.items())
    sizes = [one.fit.max_replicas * one.share for one in learnt.values()]
    count = _num_devices(records, devices_per_process)
    now: dict[str, Any] = _now(windows[-1]) if windows else {"progress": 0.0}
    return Hints(
        generation=generation,
        number=max(int(1000 * records[-1].wall), 0),
        kind=kind,
        num_devices=count,
        largest=max([1, *sizes, count if _has_trained(records) else 1]),
        total=start.known_settings.base_steps,
        layouts=layouts,
        restarts_s=tuple(_restarts(records)[-MOST_RESTARTS:]),
        **_batch_limits(start, len(layouts)),
        **_noise(learnt),
        **now,
    )


def _batch_limits(start: FitStart, num_layouts: int) -> dict[str, Any]:
    settings = start.known_settings
    batch, is_fixed = settings.batch, settings.policy == "fixed"
    return {
        "base_batch_size": batch.base,
        "max_global_batch_size": batch.base if is_fixed else max(batch.max, batch.base),
        "min_global_batch_size": None if is_fixed else batch.min_global,
        "max_micro_batches": min(batch.max_micro_batches, MOST_COUNTS // max(num_layouts, 1)),
    }


def _noise(learnt: Mapping[str, StrategyRecord]) -> dict[str, Any]:
    """Return what limits the worth of a batch, the same for all strategies; {} if nothing was learnt."""
    if not learnt:
        return {}
    grad = next(iter(learnt.values())).model.grad
    most = grad.most_gain if isinstance(grad, GradGroups) else None
    return {
        "grad_sqr": _numbers(grad.sqr),
        "grad_var": _numbers(grad.var),
        "most_gain": None if most is None else _number(most),
    }


def _now(last: Window) -> dict[str, Any]:
    """Return progress, batch size, throughput and goodput of a run, as measured in its last window."""
    return {
        "progress": last.progress,
        "noise_confidence": _number(last.noise_confidence) or 0.0,
        "global_batch_size": last.config.global_batch_size,
        "throughput": _number(last.throughput),
        "goodput": _number(last.goodput_measured),
    }


def _layout(one: StrategyRecord, span: tuple[int, int]) -> LayoutHints:
    cost = {name: float(value) for name, value in vars(one.model.perf).items()}
    return LayoutHints(
        name=one.name,
        devices_per_replica=one.share,
        cost=StepCost(**{name: min(max(value, 0.0), LARGEST) for name, value in cost.items()}),
        error=_number(one.fit.error) or 0.0,
        micro=span,
        residuals=tuple((int(size), float(ratio)) for size, ratio in one.model.residuals)[:256],
        links=tuple(one.fit.links),
    )


def _num_devices(records: list[Record], each: int) -> int:
    """Return the number of devices that the run uses now; `each` is the number per process."""
    for record in reversed(records):
        if isinstance(record.event, Regrouped):
            return max(record.event.num_processes * each, 1)
        if isinstance(record.event, FitStart):
            return max(record.event.num_devices, 1)
    return 1


def _has_trained(records: list[Record]) -> bool:
    """Whether the run has trained since its processes last changed."""
    events = [record.event for record in reversed(records)]
    last = next((e for e in events if isinstance(e, Window | Regrouped | FitStart)), None)
    return isinstance(last, Window)


def _restarts(records: list[Record]) -> list[float]:
    """Return the seconds that each change of processes took, as the processes that stayed measured them."""
    return [
        total
        for change in of_kind(records, Regrouped)
        if change.num_processes_before
        for total in (_number(sum(change.seconds.values())),)
        if total is not None
    ]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) and 0 <= value <= LARGEST else None


def _numbers(value: object) -> tuple[float, ...]:
    """Return moments by group, clipped to what hints may hold: an estimate below 0 is noise around 0."""
    return tuple(min(max(float(x), 0.0), LARGEST) for x in np.atleast_1d(np.asarray(value)))
