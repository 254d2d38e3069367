"""What a run tells of itself, read from the journal in its workdir: the training program need not know.

It is what `jaxgoodput plan WORKDIR` reads, as the numbers from which the service makes its tables.
"""

import math
import pathlib

import numpy as np

from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.observe import journal
from jaxgoodput.observe.events import FitStart, Regrouped, Window
from jaxgoodput.observe.forecast import StrategyRecord, learnt_of, limits_of, records_of
from jaxgoodput.observe.journal import Record, of_kind
from jaxgoodput.specs import LARGEST, MOST_COUNTS, Hints, LayoutHints, StepCost

MOST_RESTARTS = 16


def hints_of(
    workdir: pathlib.Path, kind: str, generation: int, devices_per_process: int
) -> Hints | None:
    """What the run under `workdir` says now, on devices of a kind; None where none has started there.

    Before its first fit it says how far it is only.
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
    except ValueError:  # not measured enough
        learnt = {}
    limits = limits_of(start, windows, learnt)
    settings = start.known_settings
    batch = settings.batch
    last = windows[-1] if windows else None
    layouts = tuple(_layout(one, limits[name].span) for name, one in learnt.items())
    grad = next(iter(learnt.values())).model.grad if learnt else None
    sizes = [one.fit.max_replicas * one.share for one in learnt.values()]
    fixed = settings.policy == "fixed"
    count = _num_devices(records, devices_per_process)
    return Hints(
        generation=generation,
        number=max(int(1000 * records[-1].wall), 0),
        kind=kind,
        num_devices=count,
        largest=max([1, *sizes, count if _has_trained(records) else 1]),
        progress=0.0 if last is None else last.progress,
        total=settings.base_steps,
        base_batch_size=batch.base,
        max_global_batch_size=batch.base if fixed else max(batch.max, batch.base),
        min_global_batch_size=None if fixed else batch.min_global,
        max_micro_batches=min(batch.max_micro_batches, MOST_COUNTS // max(len(layouts), 1)),
        layouts=layouts,
        grad_sqr=() if grad is None else _numbers(grad.sqr),
        grad_var=() if grad is None else _numbers(grad.var),
        noise_confidence=0.0 if last is None else _number(last.noise_confidence) or 0.0,
        global_batch_size=None if last is None else _size(last.config),
        throughput=None if last is None else _number(last.throughput),
        goodput=None if last is None else _number(last.goodput_measured),
        restarts_s=tuple(_restarts(records)[-MOST_RESTARTS:]),
    )


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
    """That the run has now."""
    for record in reversed(records):
        if isinstance(record.event, Regrouped):
            return max(record.event.num_processes * each, 1)
        if isinstance(record.event, FitStart):
            return max(record.event.num_devices, 1)
    return 1


def _has_trained(records: list[Record]) -> bool:
    """Whether steps were averaged since its processes changed last."""
    for record in reversed(records):
        if isinstance(record.event, Window):
            return True
        if isinstance(record.event, Regrouped | FitStart):
            return False
    return False


def _restarts(records: list[Record]) -> list[float]:
    """What changes of its processes took, where the one that tells was there before."""
    return [
        total
        for change in of_kind(records, Regrouped)
        if change.num_processes_before
        for total in (_number(sum(change.seconds.values())),)
        if total is not None
    ]


def _size(config: BatchConfig) -> int:
    return config.global_batch_size


def _number(value: float) -> float | None:
    return value if math.isfinite(value) and 0 <= value <= LARGEST else None


def _numbers(value: object) -> tuple[float, ...]:
    """Moments by group; an estimate below 0 is noise about nothing."""
    return tuple(min(max(float(x), 0.0), LARGEST) for x in np.atleast_1d(np.asarray(value)))
