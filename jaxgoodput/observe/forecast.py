"""What other devices would do for a run, by what the run itself measured: `jaxgoodput plan WORKDIR`.

From the journal alone: the last fit of every strategy, the last noise, and the limits of the batch. On every
shape each strategy keeps the devices that share one replica, and has as many replicas as there is room for.
The model is asked where the run never was, so every line says how much of it was seen.
"""

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxgoodput._serial import decode
from jaxgoodput.goodput.efficiency import Grad, GradGroups, GradParams, is_known, noise_scale
from jaxgoodput.goodput.fit import PerfFit
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import Feeding, PerfParams, Placement, step_time
from jaxgoodput.goodput.search import BatchConfig, BatchLimits, best_batch
from jaxgoodput.observe import journal
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.specs import Shape

Known = Literal["measured", "fitted", "extrapolated", "guessed"]


@dataclass(frozen=True, kw_only=True)
class ExpectedRun:
    """A run on other devices, with the strategy and the batch that are best there."""

    shape: Shape
    strategy: str
    """That of the run with as many copies as the shape has room for; "" where it has no name."""
    config: BatchConfig
    step_s: float
    """Seconds of an update."""
    throughput: float
    """Samples per second."""
    efficiency: float
    """Progress per sample relative to the base batch."""
    goodput: float
    """Useful samples per second."""
    speed_up: float
    """Goodput over that of the run as it was last."""
    known: Known
    """Measured: this batch was timed there. Fitted: other batches were. Extrapolated: the run had another
    number of replicas. Guessed: it never used such a link, which is taken to be as good as can be."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a run was last, and what it would be elsewhere."""

    workdir: pathlib.Path
    device_kind: str
    num_devices: int
    """That the run had last."""
    num_processes: int
    config: BatchConfig
    """In use last."""
    goodput: float
    """Of that, by the model; useful samples per second."""
    noise_scale: float
    """In samples."""
    fit_error: float
    """RMS log error of the fit of the strategy in use."""
    expected: tuple[ExpectedRun, ...]
    """One for each shape on which the limits allow a batch, in the order asked for."""
    left_out: Mapping[Shape, str]
    """The other shapes, and why."""

    @property
    def best(self) -> ExpectedRun | None:
        """The greatest goodput; of equals the one on the fewest devices."""
        return max(self.expected, key=lambda e: (e.goodput, -e.shape.num_devices), default=None)


@dataclass(frozen=True, kw_only=True)
class Record(journal.RecordFields):
    """What every line of a journal has."""

    event: str
    wall: float
    step: int
    restart: int


@dataclass(frozen=True, kw_only=True)
class _Batch(journal.RecordFields):
    """The user's own limits; those of the run are narrowed to its devices."""

    base: int
    max: int
    micro: tuple[int, int] | None = None
    min_global: int | None = None
    max_micro_batches: int = 16


@dataclass(frozen=True, kw_only=True)
class _Settings(journal.RecordFields):
    batch: _Batch
    policy: str | Mapping[str, int] = "goodput"
    base_steps: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Limits(journal.RecordFields):
    base: int
    max: int
    micro: tuple[int, int]
    max_micro_batches: int = 16


@dataclass(frozen=True, kw_only=True)
class RunStart(Record):
    """A run began."""

    config: BatchConfig
    settings: _Settings
    device_kind: str
    num_devices: int
    num_processes: int


@dataclass(frozen=True, kw_only=True)
class Span(Record):
    """Averages over some steps."""

    config: BatchConfig
    measured_step_s: float
    memory_limit: int = 0
    progress: float = 0.0
    throughput: float = math.nan
    goodput_measured: float = math.nan
    noise_confidence: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Params(journal.RecordFields):
    compute_base: float
    compute_per_sample: float
    intra_base: float
    intra_per_replica: float
    inter_base: float
    inter_per_replica: float
    overlap: float
    update_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Fit(journal.RecordFields):
    params: _Params
    error: float
    links: tuple[str, ...] = ()
    unidentified: tuple[str, ...] = ()
    num_rows: int = 0
    max_replicas: int = 1


@dataclass(frozen=True, kw_only=True)
class _Grad(journal.RecordFields):
    sqr: float | tuple[float, ...]
    var: float | tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class VerdictRecord(Record):
    """A verdict was reached."""

    before: BatchConfig
    fit: _Fit | None
    grad: _Grad
    limits: _Limits
    residuals: tuple[tuple[int, float], ...] = field(default=())
    feeding: Feeding | None = None


@dataclass(frozen=True, kw_only=True)
class Regrouping(Record):
    """Processes came or went."""

    num_processes_before: int
    num_processes: int
    seconds: Mapping[str, float]


_KINDS: Mapping[str, type[Record]] = {
    "FitStart": RunStart,
    "Window": Span,
    "TuneEnd": VerdictRecord,
    "Regrouped": Regrouping,
}


@dataclass(frozen=True, kw_only=True)
class StrategyRecord:
    """A strategy as the run knows it."""

    name: str
    model: GoodputModel
    """Links that were never used are as good as can be."""
    fit: PerfFit
    share: int
    """Devices of one replica."""
    micro: tuple[int, int]
    """Of the run, on `num_replicas`."""
    num_replicas: int


def forecast(workdir: str | os.PathLike[str], shapes: Sequence[Shape]) -> Forecast:
    """What the run under `workdir` would do on each of `shapes`, whose kind is that of the run's own devices.

    Raises:
      FileNotFoundError: there is no such folder, or no run has written its journal there.
      ValueError: the journal holds no run, or the run has not measured enough to tell.
    """
    folder = pathlib.Path(workdir)
    records = records_of(folder)
    start = next((r for r in reversed(records) if isinstance(r, RunStart)), None)
    if start is None:
        raise ValueError(
            f"{folder / journal.FILE_NAME} holds no start of a run that can be read, so there is nothing to "
            "plan by. Was it cut or edited?"
        )
    windows = [r for r in records if isinstance(r, Span)]
    learnt = learnt_of(folder, records, start)
    limits = limits_of(start, windows, learnt)
    last = windows[-1].config if windows else start.config
    present = learnt.get(last.strategy) or next(iter(learnt.values()))
    at = Placement(num_nodes=1, num_replicas=last.num_replicas)
    now = float(present.model.goodput(at, last.micro_batch_size, last.num_micro_batches))
    timed = {w.config for w in windows if math.isfinite(w.measured_step_s)}
    expected, left_out = [], {}
    for shape in shapes:
        found, why = [], "no strategy of the run divides it"
        for one in learnt.values():
            made = _expected(one, shape, limits[one.name], timed, now)
            if isinstance(made, ExpectedRun):
                found.append(made)
            else:
                why = made
        if found:
            expected.append(max(found, key=lambda e: e.goodput))
        else:
            left_out[shape] = why
    return Forecast(
        workdir=folder,
        device_kind=start.device_kind,
        num_devices=start.num_devices,
        num_processes=start.num_processes,
        config=last,
        goodput=now,
        noise_scale=float(noise_scale(present.model.grad, present.model.base_batch_size)),
        fit_error=present.fit.error,
        expected=tuple(expected),
        left_out=left_out,
    )


def records_of(folder: pathlib.Path) -> list[Record]:
    """The records that a forecast needs, without what a restart has undone and what cannot be read.

    Raises FileNotFoundError where there is no folder, or no run has written its journal there.
    """
    path = folder / journal.FILE_NAME
    if not folder.is_dir():
        raise FileNotFoundError(
            f"There is no folder {folder}. Pass the --workdir that the training was started with."
        )
    if not journal.segments(path):
        raise FileNotFoundError(
            f"{folder} holds no {journal.FILE_NAME}, so no jaxgoodput run has started there. Pass the "
            "--workdir that the training was started with, or the script that trains."
        )
    records = []
    for record in journal.read(path, on_torn=lambda where, text: None):
        try:
            records.append(decode(record, _KINDS.get(record["event"], Record), record["event"]))
        except ValueError:  # a line that was edited; the others still tell
            continue
    return records


def learnt_of(
    folder: pathlib.Path, records: Sequence[Record], start: RunStart
) -> dict[str, StrategyRecord]:
    """By name, each strategy that has a fit, with the last noise that was known.

    Raises ValueError where the run has not measured enough.
    """
    tunes = [r for r in records if isinstance(r, VerdictRecord)]
    grads = [g for g in (_grad(t.grad) for t in tunes) if g is not None]
    fitted = {t.before.strategy: t for t in tunes if t.fit is not None}
    if not fitted:
        raise ValueError(
            f"the run in {folder} has not fitted its step times yet ({len(tunes)} verdicts), so it says "
            "nothing of other devices. Let it train on: the first fit comes a few seconds after the start."
        )
    if not grads:
        raise ValueError(
            f"the run in {folder} does not know its gradient noise yet, so it cannot say what a larger batch "
            "is worth. Let it train on; a run with policy='fixed' may not measure any."
        )
    devices = _devices_at(records)
    found = {}
    for name, tune in fitted.items():
        assert tune.fit is not None
        has = devices.get(id(tune), start.num_devices)
        params = PerfParams(**dataclasses.asdict(tune.fit.params))
        fit = PerfFit(
            params=params,
            error=tune.fit.error,
            unidentified=tune.fit.unidentified,
            links=tune.fit.links,
            num_rows=tune.fit.num_rows,
            max_replicas=tune.fit.max_replicas,
        )
        model = GoodputModel(
            perf=fit.explore(),
            grad=grads[-1],
            base_batch_size=tune.limits.base,
            residuals=tune.residuals,
            feeding=tune.feeding,
        )
        replicas = tune.before.num_replicas
        found[name] = StrategyRecord(
            name=name,
            model=model,
            fit=fit,
            share=max(has // replicas, 1),
            micro=tune.limits.micro,
            num_replicas=replicas,
        )
    return found


def _devices_at(records: Sequence[Record]) -> dict[int, int]:
    """How many devices the run had when each verdict was reached, by the verdict's `id`."""
    found, count, each = {}, 1, 1
    for record in records:
        if isinstance(record, RunStart):
            count, each = (
                record.num_devices,
                max(record.num_devices // max(record.num_processes, 1), 1),
            )
        elif isinstance(record, Regrouping):
            count = record.num_processes * each
        elif isinstance(record, VerdictRecord):
            found[id(record)] = count
    return found


def _grad(saved: _Grad) -> Grad | None:
    """The moments, of groups where there are several; None where they were not known."""
    if isinstance(saved.sqr, tuple) or isinstance(saved.var, tuple):
        grad: Grad = GradGroups(sqr=np.array(saved.sqr), var=np.array(saved.var))
    else:
        grad = GradParams(sqr=saved.sqr, var=saved.var)
    return grad if is_known(grad) else None


def limits_of(
    start: RunStart, windows: Sequence[Span], learnt: Mapping[str, StrategyRecord]
) -> dict[str, BatchLimits]:
    """What the user allows, by strategy: the batches of his own limits, in micro-batches that fit.

    Where memory was what limited a micro-batch in the run, it does so elsewhere.
    """
    batch, policy = start.settings.batch, start.settings.policy
    fixed = policy == "fixed"
    most = batch.base if fixed else batch.max
    if not isinstance(policy, str):
        most = max([most, *policy.values()])
    found = {}
    for name, one in learnt.items():
        its = [w.memory_limit for w in windows if w.config.strategy == name and w.memory_limit > 0]
        high = most if batch.micro is None else batch.micro[1]
        if its and its[-1] < min(one.micro[1], most // one.num_replicas):
            high = its[-1]
        low = 1 if batch.micro is None else min(batch.micro[0], high)
        found[name] = BatchLimits(
            base=batch.base,
            max=most,
            micro=(low, max(min(high, most), low)),
            min_global=batch.base if fixed else batch.min_global,
            max_micro_batches=batch.max_micro_batches,
        )
    return found


def _expected(
    one: StrategyRecord, shape: Shape, limits: BatchLimits, timed: set[BatchConfig], now: float
) -> ExpectedRun | str:
    """A strategy on a shape, or why it cannot be."""
    replicas, rest = divmod(shape.num_devices, one.share)
    if rest or replicas < shape.num_nodes:
        return f"a replica takes {one.share} devices of one node"
    strategy = _scaled(one.name, shape.num_devices)
    if strategy is None:
        return f"{one.name} cannot be cut over {shape.num_devices} devices"
    at = Placement(num_nodes=shape.num_nodes, num_replicas=replicas)
    try:
        config, goodput = best_batch(one.model, at, limits)
    except ValueError as error:
        return str(error).splitlines()[0]
    config = dataclasses.replace(config, strategy=one.name)
    size, count = config.micro_batch_size, config.num_micro_batches
    throughput = float(one.model.throughput(at, size, count))
    on_one = shape.num_nodes == 1
    if on_one and config in timed:
        known: Known = "measured"
    elif on_one and any((c.num_replicas, c.strategy) == (replicas, one.name) for c in timed):
        known = "fitted"
    elif math.isfinite(float(step_time(one.fit.params, at, size, count))):
        known = "extrapolated"
    else:
        known = "guessed"
    return ExpectedRun(
        shape=shape,
        strategy=strategy,
        config=config,
        step_s=config.global_batch_size / throughput,
        throughput=throughput,
        efficiency=float(one.model.efficiency(config.global_batch_size)),
        goodput=goodput,
        speed_up=goodput / now,
        known=known,
    )


def _scaled(name: str, num_devices: int) -> str | None:
    """The strategy of that name with other copies, or other parts where it has none; None: it cannot be.

    >>> _scaled("data8", 2), _scaled("data2.tensor2", 8), _scaled("fsdp4", 8), _scaled("tensor4", 2)
    ('data2', 'data4.tensor2', 'fsdp8', None)
    """
    parts = [re.fullmatch(r"([a-z]+)(\d+)", part) for part in name.split(".")]
    degrees = {part[1]: int(part[2]) for part in parts if part is not None}
    axes = {field.name for field in dataclasses.fields(Strategy) if field.type is int}
    if name != "single" and (len(degrees) < len(parts) or not set(degrees) <= axes):
        return name  # a title of the user's
    grows = "fsdp" if "fsdp" in degrees and "data" not in degrees else "data"
    try:
        made: dict[str, Any] = {**degrees, grows: -1}
        return Strategy(**made).resolved(num_devices).name
    except ValueError:
        return None


def shapes_up_to(kind: str, num_devices: int, num_nodes: int) -> tuple[Shape, ...]:
    """1, 2, 4, ... devices of one node, all of it, and as many whole nodes as there are, smallest first.

    Raises ValueError where the devices cannot be spread evenly over the nodes.

    >>> [(s.num_nodes, s.num_devices) for s in shapes_up_to("h200", 12, 2)]
    [(1, 1), (1, 2), (1, 4), (1, 6), (2, 12)]
    """
    each, rest = divmod(num_devices, num_nodes)
    if rest or not each:
        near = max(each, 1) * num_nodes
        raise ValueError(
            f"--devices {num_devices} cannot be spread evenly over --nodes {num_nodes}. {near} devices can."
        )
    one = sorted({each, *(1 << power for power in range(each.bit_length()))})
    return (
        *(Shape(kind, 1, size) for size in one if size <= each),
        *(Shape(kind, count, count * each) for count in range(2, num_nodes + 1)),
    )
