"""What a run would do on other devices, predicted from what it measured itself: `jaxgoodput plan WORKDIR`.

Everything comes from the journal: the last fit of each strategy, the last gradient noise, and the limits of
the batch. On a shape, each strategy keeps its number of devices per replica and gets as many replicas as
there is room for. The model is also asked about placements that the run never had, so every prediction says
how much of it was measured.
"""

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxgoodput.goodput.efficiency import is_known, noise_scale
from jaxgoodput.goodput.fit import PerfFit
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import Placement, step_time
from jaxgoodput.goodput.search import BatchConfig, BatchLimits, best_batch
from jaxgoodput.observe import journal
from jaxgoodput.observe.events import FitStart, Regrouped, TuneEnd, Window
from jaxgoodput.observe.journal import Record, of_kind
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.specs import Shape
from jaxgoodput.workdir.places import workdir_of

Known = Literal["measured", "fitted", "extrapolated", "guessed"]


@dataclass(frozen=True, kw_only=True)
class ExpectedRun:
    """A run on other devices, with the strategy and the batch that are best there."""

    shape: Shape
    strategy: str
    """The run's strategy with as many copies as the shape has room for; "" if it has no name."""
    config: BatchConfig
    step_s: float
    """Seconds per update."""
    throughput: float
    """Samples per second."""
    efficiency: float
    """Progress per sample, relative to the base batch."""
    goodput: float
    """Useful samples per second."""
    speed_up: float
    """Goodput divided by the run's latest goodput."""
    known: Known
    """How much was measured. measured: this batch, on this shape. fitted: other batches on this shape.
    extrapolated: other numbers of replicas. guessed: the run never used such a link between devices, and the
    best possible one is assumed."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The latest state of a run, and predictions of its goodput on other devices."""

    workdir: str
    device_kind: str
    num_devices: int
    num_processes: int
    config: BatchConfig
    """Latest batch."""
    goodput: float
    """Goodput of that batch by the model, useful samples per second."""
    noise_scale: float
    """Noise scale, samples."""
    fit_error: float
    """RMS log error of the fit of the latest strategy."""
    expected: tuple[ExpectedRun, ...]
    """One prediction for each shape on which the limits allow a batch, in the order of the request."""
    left_out: Mapping[Shape, str]
    """The other shapes, each with the reason."""

    @property
    def best(self) -> ExpectedRun | None:
        """The prediction with the highest goodput; if equal, the one with the fewest devices."""
        return max(self.expected, key=lambda e: (e.goodput, -e.shape.num_devices), default=None)


@dataclass(frozen=True, kw_only=True)
class StrategyRecord:
    """What a run has measured about one strategy."""

    name: str
    model: GoodputModel
    """Model of the strategy; it assumes that links that were never used are as good as possible."""
    fit: PerfFit
    share: int
    """Devices of one replica."""
    micro: tuple[int, int]
    """Smallest and largest micro-batch on `num_replicas`."""
    num_replicas: int


def forecast(workdir: str | os.PathLike[str], shapes: Sequence[Shape]) -> Forecast:
    """Predict what the run in `workdir` would do on each of `shapes`, with devices of its present kind.

    Raises:
      FileNotFoundError: there is no such folder, or no run has written its journal there.
      ValueError: the journal contains no run, or the run has not measured enough.
    """
    workdir = os.fspath(workdir)
    with workdir_of(workdir).viewed(journal.FILES) as view:
        records = records_of(view.folder)
    starts, windows = of_kind(records, FitStart), of_kind(records, Window)
    if not starts:
        raise ValueError(
            f"{os.path.join(workdir, journal.FILE_NAME)} holds no start of a run that can be read, so there "
            "is nothing to plan from. Was it cut or edited?"
        )
    start = starts[-1]
    learnt = learnt_of(workdir, records, start)
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
            prediction = _expected(one, shape, limits[one.name], timed, now)
            if isinstance(prediction, ExpectedRun):
                found.append(prediction)
            else:
                why = prediction
        if found:
            expected.append(max(found, key=lambda e: e.goodput))
        else:
            left_out[shape] = why
    return Forecast(
        workdir=workdir,
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
    """Return the records of a run, except undone ones; damages are logged.

    Raises FileNotFoundError if there is no folder, or no run has written its journal there.
    """
    return journal.read_workdir(folder)


def learnt_of(
    workdir: str | os.PathLike[str], records: Sequence[Record], start: FitStart
) -> dict[str, StrategyRecord]:
    """Return, by name, each strategy whose step times were fitted, with the latest known gradient noise.

    Raises ValueError if the run has not measured enough.
    """
    tunes = of_kind(records, TuneEnd)
    noisy = [tune for tune in tunes if is_known(tune.grad)]
    fitted = {tune.before.strategy: tune for tune in tunes if tune.fit is not None}
    if not fitted:
        raise ValueError(
            f"the run in {workdir} has not fitted its step times yet ({len(tunes)} verdicts), so nothing "
            f"can be predicted for other devices. Let it train longer: the first fit comes a few seconds "
            f"after the start."
        )
    if not noisy:
        raise ValueError(
            f"the run in {workdir} does not know its gradient noise yet, so it cannot say what a larger "
            "batch is worth. Let it train longer; a run with policy='fixed' may not measure any noise."
        )
    devices = _devices_at(records)
    found = {}
    for name, tune in fitted.items():
        assert tune.fit is not None
        # The latest noise holds for all strategies: it depends on the gradient alone.
        model = dataclasses.replace(tune, grad=noisy[-1].grad).model
        assert model is not None
        replicas = tune.before.num_replicas
        found[name] = StrategyRecord(
            name=name,
            model=dataclasses.replace(model, perf=tune.fit.explore()),
            fit=tune.fit,
            share=max(devices.get(id(tune), start.num_devices) // replicas, 1),
            micro=tune.limits.span,
            num_replicas=replicas,
        )
    return found


def _devices_at(records: Sequence[Record]) -> dict[int, int]:
    """Return how many devices the run had at each verdict, by the `id` of the event."""
    found, num_devices, per_process = {}, 1, 1
    for record in records:
        event = record.event
        if isinstance(event, FitStart):
            num_devices = event.num_devices
            per_process = max(event.num_devices // max(event.num_processes, 1), 1)
        elif isinstance(event, Regrouped):
            num_devices = event.num_processes * per_process
        elif isinstance(event, TuneEnd):
            found[id(event)] = num_devices
    return found


def limits_of(
    start: FitStart, windows: Sequence[Window], learnt: Mapping[str, StrategyRecord]
) -> dict[str, BatchLimits]:
    """Return the user's limits of the batch for each strategy, with micro-batches that fit into memory.

    If memory limited the micro-batch in the run, the same limit is assumed on other devices.
    """
    settings = start.known_settings
    batch, policy = settings.batch, settings.policy
    fixed = policy == "fixed"
    most = batch.base if fixed else batch.max
    if not isinstance(policy, str):
        most = max([most, *policy.values()])
    found = {}
    for name, one in learnt.items():
        in_memory = [
            w.memory_limit for w in windows if w.config.strategy == name and w.memory_limit > 0
        ]
        high = most if batch.micro is None else batch.micro[1]
        # The largest micro-batch that was compiled is limited by memory, by the user or by the batch. Only
        # if it is smaller than the latter two allow, it was memory.
        if in_memory and in_memory[-1] < min(one.micro[1], most // one.num_replicas):
            high = in_memory[-1]
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
    """Predict a strategy's run on a shape, or say why it cannot run there."""
    replicas, rest = divmod(shape.num_devices, one.share)
    if rest or replicas < shape.num_nodes:
        return f"a replica takes {one.share} devices of one node"
    strategy = _scaled(one.name, shape.num_devices)
    if strategy is None:
        return f"{one.name} cannot be split over {shape.num_devices} devices"
    at = Placement(num_nodes=shape.num_nodes, num_replicas=replicas)
    try:
        config, goodput = best_batch(one.model, at, limits)
    except ValueError as error:
        return str(error).splitlines()[0]
    config = dataclasses.replace(config, strategy=one.name)
    throughput = float(one.model.throughput(at, config.micro_batch_size, config.num_micro_batches))
    return ExpectedRun(
        shape=shape,
        strategy=strategy,
        config=config,
        step_s=config.global_batch_size / throughput,
        throughput=throughput,
        efficiency=float(one.model.efficiency(config.global_batch_size)),
        goodput=goodput,
        speed_up=goodput / now,
        known=_known(one, at, config, timed),
    )


def _known(
    one: StrategyRecord, at: Placement, config: BatchConfig, timed: set[BatchConfig]
) -> Known:
    """Return how a step time is known: "measured", "fitted", "extrapolated" or "guessed"."""
    if at.num_nodes == 1:  # the journal does not say how many nodes a step was timed on
        if config in timed:
            return "measured"
        if any((c.num_replicas, c.strategy) == (at.num_replicas, one.name) for c in timed):
            return "fitted"
    step_s = step_time(one.fit.params, at, config.micro_batch_size, config.num_micro_batches)
    return "extrapolated" if math.isfinite(float(step_s)) else "guessed"


def _scaled(name: str, num_devices: int) -> str | None:
    """Return the strategy of this name scaled to `num_devices`, or None if impossible.

    >>> _scaled("data8", 2), _scaled("data2.tensor2", 8), _scaled("fsdp4", 8), _scaled("tensor4", 2)
    ('data2', 'data4.tensor2', 'fsdp8', None)
    """
    parts = [re.fullmatch(r"([a-z]+)(\d+)", part) for part in name.split(".")]
    degrees = {part[1]: int(part[2]) for part in parts if part is not None}
    axes = {field.name for field in dataclasses.fields(Strategy) if field.type is int}
    if name != "single" and (len(degrees) < len(parts) or not set(degrees) <= axes):
        return name  # the user's own name
    # Replicas are copies unless the parameters are sharded over all of them.
    grows = "fsdp" if "fsdp" in degrees and "data" not in degrees else "data"
    try:
        made: dict[str, Any] = {**degrees, grows: -1}
        return Strategy(**made).resolved(num_devices).name
    except ValueError:
        return None


def shapes_up_to(kind: str, num_devices: int, num_nodes: int) -> tuple[Shape, ...]:
    """Return 1, 2, 4, ... devices of one node, the whole node, then 2, 3, ... whole nodes.

    Raises ValueError if the devices cannot be spread evenly over the nodes.

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
