"""Seconds to a held-out loss: `fit` beside a loop by hand, at the base batch and at larger ones.

    python benchmarks/by_hand.py --only flights               # one problem, one seed, about 3 minutes
    python benchmarks/by_hand.py --seeds 5                    # all problems of everyday.py
    python benchmarks/by_hand.py --only flights --sides base,fit --scale data:1,model:4,length:3

By hand is one donated jit of value_and_grad, update and apply_updates, one dispatch a step; batches are
indexed from NumPy by a shuffled permutation; the loss is fetched every 100 steps.

* `base`: by hand at the base batch.
* `hand`: by hand at larger batches, twice each: with the learning rate times the square root of the batch
  over the base (for SGD: times that ratio), as a careful user would have it, and with the rate unchanged.
* `fixed`: `fit` with `policy="fixed"`.
* `fit`: `fit` with its defaults, no memory of earlier runs and an empty compilation cache.
* `second`: the same once more, with the memory and the compiled programs of `fit`.

All sides have the same model, initial values, held-out samples, settings of threads and target, and a random
order without replacement. The target is the lowest held-out loss that a run by hand at the base batch, with a
seed of its own, had reached at 80 % of its length (of the part until its minimum, if the loss rises again).
The clock runs from the first step's compilation to the end of the evaluation that meets the target; all sides
evaluate after the same samples, and none saves. `start-up` is what comes before, from the call of `fit`, or
of the model's `init` by hand, data being there (`fit` makes the initial values after that compilation).
`fit` is told the length of that run (`base_steps`), and may
end without the target; loops by hand end after four times as many samples.

Sides take turns, each run in a process of its own; ratios are formed within a turn. `hit` counts runs that
met the target. Wall seconds say little on a machine that others use at the same time; CPU seconds are of all
threads, and include compiling beside training.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import multiprocessing
import pathlib
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
from absl import app, flags, logging
from everyday import WORKLOADS, Everyday, Scale, Workload
from threads import cpu_of_threads

import jaxgoodput as jg
from jaxgoodput.engine.programs.blocks import BlockPrograms
from jaxgoodput.engine.programs.families import Programs
from jaxgoodput.goodput.efficiency import noise_scale
from jaxgoodput.observe.events import TuneEnd
from jaxgoodput.train.control import Control
from jaxgoodput.train.loop import Loop

FLAGS = flags.FLAGS
flags.DEFINE_list("only", list(WORKLOADS), "Problems.")
flags.DEFINE_list("sides", ["base", "hand", "fixed", "fit", "second"], "What to run.")
flags.DEFINE_integer("seeds", 1, "Turns.")
flags.DEFINE_list("grid", [], "Larger batches by hand, instead of each problem's own.")
flags.DEFINE_list("scale", [], "Factors such as data:4,model:2,length:3, or one for all.")
flags.DEFINE_bool("verdicts", False, "Print every verdict of every run of `fit`.")

REFERENCE_SEED = 1000
AT = 0.8  # of the length of the run that sets the target
MOST = 4  # times the samples of that run, for a loop by hand


@dataclass(frozen=True, kw_only=True)
class Told:
    """A verdict of the tuner, and when it came."""

    step: int
    at_s: float
    """Since the clock began."""
    batch: int
    noise: float
    """Noise scale, samples."""
    ready: tuple[int, ...]
    """Compiled sizes."""
    reason: str
    switched: bool


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps with one batch."""

    batch: int
    step: int
    """Steps before it."""
    samples: int
    """Samples before it."""
    at_s: float
    """When its first step was dispatched, since the clock began."""
    measured: int | None = None
    """Steps of this stretch before the first that measured the noise; None: none did."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run. Seconds are up to the target, or to the end if it was not met."""

    is_met: bool
    seconds: float
    cpu_s: float
    start_s: float
    start_cpu_s: float
    steps: int
    samples: int
    first_s: float
    """Seconds until the first step, for compiling above all."""
    first_cpu_s: float
    """CPU seconds until then."""
    evaluating_s: float
    losses: tuple[tuple[int, float], ...]
    """Samples and held-out loss of every evaluation."""
    compiling_s: dict[str, float] = field(default_factory=dict)
    """Wall seconds of XLA's compilations by thread, from the start of the process to its end."""
    threads: dict[str, float] = field(default_factory=dict)
    """CPU seconds of each thread."""
    buckets: dict[str, float] = field(default_factory=dict)
    """Wall seconds by bucket of the time ledger, since the clock began."""
    stretches: tuple[Stretch, ...] = ()
    verdicts: tuple[Told, ...] = ()


class Clock:
    """Time and CPU time since the first step's compilation began."""

    def __init__(self):
        self.made = self._now()
        self.began = (math.nan, math.nan)

    def begin(self) -> None:
        """Begin, unless it has begun."""
        if math.isnan(self.began[0]):
            self.began = self._now()

    def passed(self) -> tuple[float, float]:
        """Seconds and CPU seconds since it began."""
        return self._since(self.began)

    def start_up(self) -> tuple[float, float]:
        """Seconds and CPU seconds until it began."""
        return tuple(b - a for a, b in zip(self.made, self.began, strict=True))  # pyright: ignore[reportReturnType]

    def _since(self, then: tuple[float, float]) -> tuple[float, float]:
        now = self._now()
        return now[0] - then[0], now[1] - then[1]

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


@dataclass
class Referee:
    """Says after which samples to evaluate, and when a run is over."""

    every: int
    target: float
    clock: Clock
    losses: list[tuple[int, float]] = field(default_factory=list)
    evaluating_s: float = 0.0
    is_met: bool = False
    first: tuple[float, float] = (math.nan, math.nan)
    final: tuple[float, float] = (math.nan, math.nan)

    def left(self, samples: int) -> int:
        """Samples until the next evaluation; 0 or less if it is due."""
        last = self.losses[-1][0] if self.losses else 0
        return (last // self.every + 1) * self.every - samples

    def judge(self, samples: int, loss: float, seconds: float) -> None:
        """Take note of an evaluation that is done."""
        self.losses.append((samples, loss))
        self.evaluating_s += seconds
        self.final = self.clock.passed()
        self.is_met = loss <= self.target

    def outcome(self, *, steps: int, samples: int, **more: Any) -> Outcome:
        """The run so far."""
        start_s, start_cpu_s = self.clock.start_up()
        return Outcome(
            is_met=self.is_met,
            seconds=self.final[0],
            cpu_s=self.final[1],
            start_s=start_s,
            start_cpu_s=start_cpu_s,
            steps=steps,
            samples=samples,
            first_s=self.first[0],
            first_cpu_s=self.first[1],
            evaluating_s=self.evaluating_s,
            losses=tuple(self.losses),
            **more,
        )


# -- by hand ----------------------------------------------------------------------------------------------


def rows_of(size: int, batch: int, seed: int) -> Iterator[np.ndarray]:
    """The rows of one batch after another: permutations, one behind the other."""
    rng = np.random.default_rng(seed)
    left = rng.permutation(size)
    while True:
        while len(left) < batch:
            left = np.concatenate([left, rng.permutation(size)])
        yield left[:batch]
        left = left[batch:]


def train_by_hand(
    task: Everyday, batch: int, seed: int, *, every: int, target: float, most: int
) -> Outcome:
    """One run of the loop by hand."""
    data, held_out = task.dataset(), task.eval_dataset()
    rows = rows_of(len(next(iter(data.values()))), batch, seed)
    clock = Clock()
    referee = Referee(every, target, clock)
    tx: Any = task.optimizer()
    params = task.init(jax.random.split(jax.random.key(seed))[0])  # the same values as in `fit`
    opt_state = tx.init(params)
    held_out = jax.device_put(held_out)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, part):
        loss, grads = jax.value_and_grad(task.mean_loss)(params, part)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    @jax.jit
    def evaluate(params):
        return task.metrics(params, held_out)["held_out"].mean()

    steps = samples = 0
    clock.begin()
    while samples < most and not referee.is_met:
        chosen = next(rows)
        part = {name: column[chosen] for name, column in data.items()}
        params, opt_state, loss = step(params, opt_state, part)
        steps, samples = steps + 1, samples + batch
        if steps == 1:
            referee.first = clock.passed()
        if steps % 100 == 0:
            float(loss)
        if referee.left(samples) <= 0:
            jax.block_until_ready(params)
            began_s = time.perf_counter()
            value = float(evaluate(params))
            referee.judge(samples, value, time.perf_counter() - began_s)
    return referee.outcome(steps=steps, samples=samples)


# -- fit --------------------------------------------------------------------------------------------------


class RefereedLoop(Loop):
    """The loop of `fit`, which evaluates when the referee says so, and notes when the batch changes."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        task: Any = self.task
        self.referee: Referee = task.referee
        self.stretches: list[Stretch] = []
        self.over: dict[str, Any] = {}
        task.own_loop = self

    def _post_what_is_due(self, result):
        super()._post_what_is_due(result)
        if self.referee.left(self.now.samples) <= 0:
            self.requests.post(Control(evaluate=True))
        if self.referee.is_met:
            self.requests.post(Control(finish=True))

    def _num_free(self):
        steps = self.referee.left(self.now.samples) / self.now.batch.global_batch_size
        return min(super()._num_free(), math.ceil(steps))

    def _dispatch(self, batch):
        size = batch.config.global_batch_size
        if not self.stretches or self.stretches[-1].batch != size:
            done, passed = self.now, self.referee.clock.passed()
            if not self.stretches:
                self.referee.first = passed
            self.stretches.append(
                Stretch(batch=size, step=done.step, samples=done.samples, at_s=passed[0])
            )
        super()._dispatch(batch)

    def _is_measured(self, batch):
        is_measured, last = super()._is_measured(batch), self.stretches[-1]
        if is_measured and last.measured is None:
            self.stretches[-1] = dataclasses.replace(last, measured=self.now.step - last.step)
        return is_measured

    def _evaluate(self, *, at_end=False):
        if self.over or self.referee.left(self.now.samples) > 0:
            return super()._evaluate(at_end=at_end)  # beyond the clock
        jax.block_until_ready(self.now.state)
        began_s = time.perf_counter()
        is_best = super()._evaluate(at_end=at_end)
        assert self.now.evaluated is not None
        loss = self.now.evaluated[1]["held_out"]
        self.referee.judge(self.now.samples, loss, time.perf_counter() - began_s)
        if self.referee.is_met:
            self.note_end()
        return is_best

    def note_end(self) -> None:
        """Keep what is known when the clock stops."""
        self.over = {
            "steps": self.now.step,
            "samples": self.now.samples,
            "threads": cpu_of_threads(),
            "buckets": self.ledger.snapshot(),
        }


class Listener(jg.Hook):
    """Notes the verdicts."""

    def __init__(self, referee: Referee):
        self.referee = referee
        self.trainer: Any = None
        self.verdicts: list[Told] = []

    def on_tune_end(self, event: TuneEnd, /) -> None:
        strategies = self.trainer.own_loop.start.strategies
        self.verdicts.append(
            Told(
                step=event.step,
                at_s=self.referee.clock.passed()[0],
                batch=event.before.global_batch_size,
                noise=float(noise_scale(event.grad, event.limits.base)),
                ready=tuple(sorted(strategies.ready(event.before.strategy))),
                reason=event.verdict.reason,
                switched=event.switched,
            )
        )


def train_by_fit(
    workload: Workload, policy: Any, seed: int, *, target: float, cache: str, parent: str
) -> Outcome:
    """One run of `fit` under a policy."""
    config = jg.Config(
        workdir=str(pathlib.Path(parent) / "run"),
        seed=seed,
        batch=jg.BatchLimits(base=workload.base, max=workload.most),
        base_steps=workload.base_steps,
        policy=policy,
        execution=jg.Execution(compilation_cache=cache),
        reporting=jg.Reporting(progress=False),
        saving=jg.Saving(at_end=False, every_s=None),
    )
    task: Any = workload.task(config, loop=RefereedLoop)
    assert task.samples  # made before the clock begins
    clock = Clock()
    referee = task.referee = Referee(workload.every, target, clock)
    listener = Listener(referee)
    listener.trainer, task.hooks = task, (listener,)

    def beginning(build: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(build)
        def build_first(*args: Any, **kwargs: Any) -> Any:
            clock.begin()
            return build(*args, **kwargs)

        return build_first

    with contextlib.ExitStack() as patches:
        for owner, name in ((Programs, "step"), (BlockPrograms, "steps")):
            build = beginning(getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, build))
        task.fit()
    loop: RefereedLoop = task.own_loop
    if not loop.over:
        loop.note_end()
    return referee.outcome(
        **loop.over, stretches=tuple(loop.stretches), verdicts=tuple(listener.verdicts)
    )


# -- the comparison ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Side:
    """A row of the table."""

    kind: str
    """One of `--sides`, or "reference", the run that sets the target."""
    batch: int
    power: float = 0.0
    """The learning rate is multiplied by this power of the batch over the base."""

    @property
    def name(self) -> str:
        """What the row is called."""
        if self.kind != "hand":
            return self.kind
        return f"hand {self.batch}" + (", same rate" if not self.power else "")


def run(
    name: str, scale: Scale, side: Side, seed: int, target: float = -math.inf, cache: str = ""
) -> Outcome:
    """One run, in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(run_here, name, scale, side, seed, target, cache).result()


def run_here(name: str, scale: Scale, side: Side, seed: int, target: float, cache: str) -> Outcome:
    """One run, in this process."""
    logging.set_verbosity(logging.ERROR)
    compiling_s: dict[str, float] = {}

    def listen(done: Any) -> None:
        thread = threading.current_thread().name.removeprefix("jaxgoodput-").lower()
        compiling_s[thread] = compiling_s.get(thread, 0.0) + done.seconds

    stop = jg.listen_for_compilations(listen)
    outcome = train(WORKLOADS[name].scaled(scale), side, seed, target, cache)
    stop()
    return dataclasses.replace(outcome, compiling_s=compiling_s)


def train(workload: Workload, side: Side, seed: int, target: float, cache: str) -> Outcome:
    """One run of one side."""
    if side.kind in ("fixed", "fit", "second"):
        policy = "fixed" if side.kind == "fixed" else "goodput"
        with tempfile.TemporaryDirectory() as parent:
            return train_by_fit(workload, policy, seed, target=target, cache=cache, parent=parent)
    limits = jg.BatchLimits(base=workload.base, max=workload.base)
    task = workload.task(jg.Config(workdir="/tmp", batch=limits, base_steps=1))
    task.times = (side.batch / workload.base) ** side.power
    length = workload.base * workload.base_steps
    most = length if side.kind == "reference" else MOST * length
    return train_by_hand(task, side.batch, seed, every=workload.every, target=target, most=most)


def target_of(losses: Sequence[tuple[int, float]]) -> tuple[float, int]:
    """The target, from a run at the base batch, and the samples after which that run had met it."""
    lowest = min(range(len(losses)), key=lambda i: losses[i][1])
    until = [x for x in losses if x[0] <= AT * losses[lowest][0]]
    samples, loss = min(until, key=lambda x: x[1])
    return loss, samples


def sides_of(workload: Workload) -> list[Side]:
    """The rows, in order."""
    sides = []
    for kind in FLAGS.sides:
        if kind != "hand":
            sides.append(Side(kind=kind, batch=workload.base))
            continue
        for batch in map(int, FLAGS.grid or workload.grid):
            sides += [Side(kind=kind, batch=batch, power=p) for p in (workload.power, 0.0)]
    return sides


def compare(name: str, scale: Scale) -> None:
    """Print the table of one problem as it grows, with the runs of `fit` in words."""
    workload = WORKLOADS[name].scaled(scale)
    reference = run(name, scale, Side(kind="reference", batch=workload.base), REFERENCE_SEED)
    target, met_at = target_of(reference.losses)
    print(
        f"{name}: held-out loss {target:.4f}, which a run by hand at {workload.base} had after {met_at} "
        f"samples; it ended with {reference.losses[-1][1]:.4f} after {reference.samples}",
        flush=True,
    )
    sides = sides_of(workload)
    found: dict[str, list[Outcome]] = {side.name: [] for side in sides}
    with tempfile.TemporaryDirectory() as caches:
        for seed in range(FLAGS.seeds):
            turn = seed % len(sides)
            order = sides[turn:] + sides[:turn]
            order.sort(key=lambda side: side.kind == "second")  # it needs what `fit` leaves
            for side in order:
                cache = pathlib.Path(caches, f"{seed}-{side.kind.replace('second', 'fit')}")
                outcome = run(name, scale, side, seed, target, str(cache))
                found[side.name].append(outcome)
                print(told(side, seed, outcome), flush=True)
            shutil.rmtree(caches, ignore_errors=True)
            print(table(f"{name}, {seed + 1} seeds", found), flush=True)


def table(title: str, found: dict[str, list[Outcome]]) -> str:
    """The table of one problem."""
    lines = [
        title,
        "| side | hit | wall, s | / base | CPU, s | / base | CPU s until step 1 | CPU us a step after "
        "| samples | steps | evaluating, s | start-up, s | start-up, CPU s |",
        "|---" * 13 + "|",
    ]
    base = found.get("base", [])
    for name, runs in found.items():
        hits = [one.is_met for one in runs]
        cells = [
            name,
            f"{sum(hits)}/{len(hits)}",
            spread([met(one.seconds, one) for one in runs]),
            spread([met(a.seconds, a) / b.seconds for a, b in zip(runs, base, strict=False)]),
            spread([met(one.cpu_s, one) for one in runs]),
            spread([met(a.cpu_s, a) / b.cpu_s for a, b in zip(runs, base, strict=False)]),
            spread([one.first_cpu_s for one in runs]),
            f"{statistics.median(map(per_step_us, runs)):.0f}",
            f"{statistics.median(one.samples for one in runs):.3g}",
            f"{statistics.median(one.steps for one in runs):.0f}",
            spread([one.evaluating_s for one in runs]),
            spread([one.start_s for one in runs]),
            spread([one.start_cpu_s for one in runs]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def per_step_us(outcome: Outcome) -> float:
    """CPU microseconds for each step after the first, evaluations and compilation meanwhile included."""
    return (outcome.cpu_s - outcome.first_cpu_s) / max(outcome.steps - 1, 1) * 1e6


def met(seconds: float, outcome: Outcome) -> float:
    """The seconds, infinite if the target was not met."""
    return seconds if outcome.is_met else math.inf


def spread(values: Sequence[float]) -> str:
    """Median and quartiles; the values themselves if there are fewer than three."""
    if not values:
        return "-"
    if len(values) < 3:
        return ", ".join(f"{x:.2f}" for x in values)
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75), method="nearest")
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def told(side: Side, seed: int, outcome: Outcome) -> str:
    """A run in words: its time and, if it was of `fit`, its batches and verdicts."""
    head = (
        f"{side.name}, seed {seed}: {outcome.seconds:.2f} s, {outcome.cpu_s:.2f} CPU s, {outcome.samples} "
        f"samples, {outcome.steps} steps"
    )
    if not outcome.is_met:
        head += f"; target not met: {outcome.losses[-1][1]:.4f}"
    if not outcome.stretches:
        return head
    ends = [*outcome.stretches[1:], None]
    parts = []
    for begin, end in zip(outcome.stretches, ends, strict=True):
        steps = (outcome.steps if end is None else end.step) - begin.step
        seconds = (outcome.seconds if end is None else end.at_s) - begin.at_s
        each_ms = seconds / steps * 1e3 if steps else math.nan
        parts.append(
            f"{begin.batch} from {begin.at_s:.2f} s (sample {begin.samples}) for {steps} steps of "
            f"{each_ms:.2f} ms, "
            + ("no noise" if begin.measured is None else f"noise after {begin.measured}")
        )
    buckets = {k: v for k, v in outcome.buckets.items() if v > 0.005}
    lines = [
        f"{head}, {len(outcome.stretches) - 1} changes of the batch",
        f"  batches: {'; '.join(parts)}",
        "  buckets, s, with the start-up: "
        + ", ".join(f"{name} {seconds:.2f}" for name, seconds in buckets.items()),
        "  threads, CPU s: "
        + ", ".join(f"{name} {s:.2f}" for name, s in outcome.threads.items() if s > 0.005),
        "  compiling, wall s: "
        + ", ".join(f"{name} {s:.2f}" for name, s in outcome.compiling_s.items()),
    ]
    for one in outcome.verdicts:
        if FLAGS.verdicts or one.switched:
            lines.append(
                f"  step {one.step}, {one.at_s:.2f} s, ready {list(one.ready)}, noise {one.noise:.0f}: "
                f"{one.reason}"
            )
    return "\n".join(lines)


def parsed(factors: Sequence[str]) -> Scale:
    """The scale that `--scale` means."""
    pairs = [one.partition(":") for one in factors]
    names = [x.name for x in dataclasses.fields(Scale)]
    if len(factors) == 1 and not pairs[0][1]:
        return Scale(**dict.fromkeys(names, float(factors[0])))
    if wrong := [one for one in factors if one.partition(":")[0] not in names]:
        raise app.UsageError(f"--scale: {wrong} does not name one of {names}")
    return Scale(**{name: float(value) for name, _, value in pairs})


def main(_: Any) -> None:
    """Print a table for each problem."""
    unknown = set(FLAGS.only) - set(WORKLOADS)
    if unknown:
        raise app.UsageError(f"--only: {sorted(unknown)} is not among {sorted(WORKLOADS)}.")
    scale = parsed(FLAGS.scale)
    for name in FLAGS.only:
        compare(name, scale)


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    app.run(main)
