"""Compares the seconds to a target: adaptive batch size, fixed ones, Seesaw, and the best constant one.

    python benchmarks/time_to_target.py                          # all three tables, 5 seeds
    python benchmarks/time_to_target.py --workloads recommender --seeds 7 --grid 512,4096,8192

Every side is the same `Trainer` with the same learning-rate rule, whose start value was tuned at the
base batch:

* fixed B: `policy="fixed"`; the rule scales the learning rate to B from the first step, and the
  optimizer's schedule lasts as many samples as at the base batch.
* adaptive: the example's own configuration, started at the base batch; it remembers no earlier run.
* remembered: the same, each run as the second after one first run with an empty cache.
* cold: adaptive, each run with an empty compilation cache of its own; only if it is named (`--sides`).
* Seesaw (2510.14717): starts at the base batch; wherever a cosine over the run would have cut the
  learning rate by alpha = 2, cuts it by sqrt(alpha) and doubles the batch. Its learning rate has no
  other schedule than a warm-up.

The clock runs from the first dispatched step to the completion of the step whose evaluation first meets
the target; evaluations, every k seconds, are taken out. Sides take turns within a seed, in an order
that rotates from seed to seed, and ratios are formed within a seed, so that a drift of the machine
cancels. The compilation cache of the other sides is warm: each is run once before, for a moment, with an
empty cache; those cold start-up times are printed too.
"""

import concurrent.futures
import dataclasses
import importlib
import math
import multiprocessing
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from absl import app, flags, logging

import jaxgoodput as jg
from jaxgoodput.launcher.local import keep_freed_pages
from jaxgoodput.observe.events import EvalEnd, FitStart, StepEnd
from jaxgoodput.tune.remembered import FOLDER

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

language_model: Any = importlib.import_module("language_model")
quickstart: Any = importlib.import_module("quickstart")
recommender: Any = importlib.import_module("recommender")

FLAGS = flags.FLAGS

ALPHA = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A trainer, its target, and how it is measured."""

    trainer: type[jg.Trainer]
    config: Callable[[str], jg.Config]
    constant: Callable[
        [], optax.GradientTransformation
    ]  # the optimizer without its schedule, for Seesaw
    metric: str
    target: float
    higher_is_better: bool
    every_s: float  # seconds between evaluations
    num_test: int  # held-out samples of an evaluation, spread over all of them
    grid: tuple[int, ...]
    horizon: int  # base steps of the run, and of its schedules where it has any
    seesaw_horizon: int  # base steps of the cosine that Seesaw follows


def _lm_constant() -> optax.GradientTransformation:
    return optax.adamw(
        optax.linear_schedule(0, language_model.LEARNING_RATE, 100), b2=0.99, weight_decay=0.01
    )


WORKLOADS = {
    "recommender": Workload(
        trainer=recommender.Recommender,
        config=recommender.default_config,
        constant=lambda: optax.adagrad(recommender.LEARNING_RATE, initial_accumulator_value=1e-7),
        metric="auc",
        target=recommender.TARGET_AUC,
        higher_is_better=True,
        every_s=0.5,
        num_test=50_000,
        grid=(512, 2048, 4096, 8192, 16384),
        horizon=8000,
        seesaw_horizon=3000,
    ),
    "digits": Workload(
        trainer=quickstart.Digits,
        config=quickstart.default_config,
        constant=lambda: optax.sgd(quickstart.LEARNING_RATE, momentum=0.9, nesterov=True),
        metric="accuracy",
        target=0.98,
        higher_is_better=True,
        every_s=0.1,
        num_test=360,
        grid=(16, 32, 64, 128),
        horizon=600,
        seesaw_horizon=600,
    ),
    "lm": Workload(
        trainer=language_model.ByteModel,
        config=language_model.default_config,
        constant=_lm_constant,
        metric="bits_per_byte",
        target=language_model.TARGET_BITS,
        higher_is_better=False,
        every_s=1.0,
        num_test=256,
        grid=(8, 16, 32, 64),
        horizon=1000,
        seesaw_horizon=1000,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run. Times are NaN where the target was not met."""

    seconds: float  # of training, from the first step to the target
    start_up_s: float  # before the first step: data, compilation, initial state
    samples: int
    value: float  # of the metric, at the target or at the end
    test_loss: float
    batches: tuple[int, ...]  # global batches in the order of their first use


class Referee(jg.Hook):
    """Keeps the clock without evaluations, and ends the run at the target."""

    def __init__(self, workload: Workload, max_samples: int):
        self.workload, self.max_samples = workload, max_samples
        self.trainer: Any = None
        self.evaluating_s = 0.0
        self.evaluation = (math.inf, math.inf)  # the latest: from, to
        self.started_s = self.completed_s = self.seconds = math.nan
        self.metrics: dict[str, float] = {}
        self.samples = 0
        self.batches: list[int] = []
        self.met = False

    def on_fit_start(self, event: FitStart, /) -> None:
        self.started_s = self.completed_s = event.at_s

    def on_step_end(self, event: StepEnd, /) -> None:
        self.completed_s = event.at_s
        began_s, ended_s = self.evaluation
        if began_s < event.at_s <= ended_s:
            # Heard of after the evaluation that it completed inside of: this was training.
            self.evaluating_s -= event.at_s - began_s
            self.seconds += event.at_s - began_s
            self.evaluation = event.at_s, ended_s
        if self.met:
            return
        self.samples = event.samples
        if event.config.global_batch_size not in self.batches:
            self.batches.append(event.config.global_batch_size)
        if event.samples >= self.max_samples:
            self.trainer.finish()

    def on_eval_end(self, event: EvalEnd, /) -> None:
        if self.met:
            return
        # Steps in flight when the evaluation was asked for complete inside it; they are training.
        began_s = max(event.at_s - event.seconds, self.completed_s)
        self.seconds = began_s - self.started_s - self.evaluating_s
        self.evaluating_s += event.at_s - began_s
        self.evaluation = began_s, event.at_s
        self.metrics = dict(event.metrics)
        better = self.metrics[self.workload.metric] - self.workload.target
        if better * (1 if self.workload.higher_is_better else -1) >= 0:
            self.met = True
            self.trainer.finish()


class Seesaw(jg.Hook):
    """Doubles the batch where a cosine over `horizon` samples would have halved the learning rate."""

    def __init__(self, base: int, most: int, horizon: int):
        self.base, self.most, self.horizon = base, most, horizon
        self.trainer: Any = None
        self.now = base

    def on_fit_start(self, event: FitStart, /) -> None:
        self.trainer.compile_sizes()

    def on_step_end(self, event: StepEnd, /) -> None:
        cosine = math.cos(math.pi / 2 * min(event.samples / self.horizon, 1 - 1e-9))
        cuts = math.floor(-math.log(cosine) / math.log(ALPHA) + 1e-9)
        wanted = min(int(self.base * ALPHA**cuts), self.most)
        if wanted != self.now:
            self.now = wanted
            self.trainer.request_batch(wanted)


def measured(workload: Workload, *, constant: bool) -> type[Any]:
    """The workload's trainer, which also evaluates its loss; `constant`: without a schedule."""

    class Measured(workload.trainer):
        def optimizer(self) -> Any:
            return workload.constant() if constant else super().optimizer()

        def eval_dataset(self) -> Any:
            data = super().eval_dataset()
            return {k: v[:: max(len(v) // workload.num_test, 1)] for k, v in data.items()}

        def metrics(self, params: Any, batch: Any) -> dict[str, Any]:
            loss: Any = self.loss(params, batch, jax.random.key(0))
            return {**super().metrics(params, batch), "test_loss": loss}

        def summarize(self, outputs: Any) -> dict[str, float]:
            return {**super().summarize(outputs), "test_loss": float(np.mean(outputs["test_loss"]))}

    return Measured


def side_config(workload: Workload, side: str, config: jg.Config) -> jg.Config:
    """The configuration of a side (see above), from the example's own."""
    base, most = config.batch.base, config.batch.max
    if side in ("adaptive", "remembered", "cold"):
        return dataclasses.replace(
            config,
            base_steps=workload.horizon,
            tuning=dataclasses.replace(config.tuning, remember=side == "remembered"),
        )
    if side == "seesaw":
        return dataclasses.replace(
            config,
            base_steps=workload.horizon,
            batch=jg.BatchLimits(
                base=base, max=most, sizes=doublings(base, most), max_micro_batches=1
            ),
            rule=lambda scale, grad, progress: scale**-0.5,
            tuning=dataclasses.replace(
                config.tuning,
                warm_up_steps=10**9,  # its schedule decides, not the tuner
            ),
            statistics=dataclasses.replace(config.statistics, every_steps=64),
        )
    batch = int(side.split()[1])
    return dataclasses.replace(
        config,
        batch=jg.BatchLimits(base=batch, max=batch),
        policy="fixed",
        rule=shifted(config.rule or default_rule(workload, config), batch / base),
        base_steps=workload.horizon * base / batch,
    )


def doublings(base: int, most: int) -> tuple[int, ...]:
    """base, 2 base, 4 base, ... up to `most`."""
    return tuple(base * 2**k for k in range(int(math.log2(most / base) + 1e-9) + 1))


def default_rule(workload: Workload, config: jg.Config) -> Any:
    """The rule that the Trainer picks where the configuration names none."""
    del config
    return jg.rules.adascale if workload.metric == "accuracy" else jg.rules.adam_scale


def shifted(rule: Any, shift: float) -> Any:
    """`rule` for a run whose base batch is `shift` times the one that the learning rate was tuned for."""

    def shifted_rule(scale: Any, grad: jg.GradParams, progress: Any) -> Any:
        at_base = jg.GradParams(sqr=grad.sqr, var=grad.var * shift)
        return rule(scale * shift, at_base, progress * shift)

    return shifted_rule


def run(name: str, side: str, seed: int, cache: str, *, max_samples: int | None = None) -> Outcome:
    """One run of one side, in a process of its own: what another has left in memory is a third of a step."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(run_here, name, side, seed, cache, max_samples).result()


def run_here(
    name: str, side: str, seed: int, cache: str, max_samples: int | None = None
) -> Outcome:
    """One run of one side, in this process."""
    logging.set_verbosity(logging.WARNING)
    workload = WORKLOADS[name]
    with tempfile.TemporaryDirectory() as parent:
        config = workload.config(str(pathlib.Path(parent) / "run"))
        samples = max_samples or workload.horizon * config.batch.base
        config = side_config(workload, side, config)
        config = dataclasses.replace(
            config,
            seed=seed,
            execution=dataclasses.replace(config.execution, compilation_cache=cache),
            evaluation=dataclasses.replace(
                config.evaluation, every_s=workload.every_s, every_base_steps=None
            ),
            reporting=dataclasses.replace(config.reporting, tensorboard=False, progress=False),
            saving=dataclasses.replace(config.saving, at_end=False, every_s=1e9),
        )
        referee = Referee(workload, samples)
        hooks: list[Any] = [referee]
        if side == "seesaw":
            base = config.batch.base
            hooks.append(Seesaw(base, config.batch.max, workload.seesaw_horizon * base))
        trainer = measured(workload, constant=side == "seesaw")(config, hooks=hooks)
        for hook in hooks:
            hook.trainer = trainer
        began_s = trainer.clock.now()
        trainer.fit()
    return Outcome(
        seconds=referee.seconds if referee.met else math.nan,
        start_up_s=referee.started_s - began_s,
        samples=referee.samples,
        value=referee.metrics.get(workload.metric, math.nan),
        test_loss=referee.metrics.get("test_loss", math.nan),
        batches=tuple(referee.batches),
    )


def sides_of(workload: Workload) -> list[str]:
    """The rows of the table."""
    grid = [int(b) for b in FLAGS.grid] or list(workload.grid)
    every = ["adaptive", "remembered", "cold", "seesaw", *(f"fixed {b}" for b in grid)]
    if not FLAGS.sides:
        return [s for s in every if s != "cold"]
    return [s for s in every if any(wanted in s for wanted in FLAGS.sides)]


def compare(name: str, workload: Workload, caches: pathlib.Path) -> None:
    """Measure all sides of one workload and print its table."""
    sides = sides_of(workload)
    cold, outcomes = {}, {side: [] for side in sides}

    def cache(side: str, seed: int) -> str:
        of = f"cold-{seed}" if side == "cold" else side.replace(" ", "-")
        return str(caches / f"{name}-{of}")

    for side in (s for s in sides if s != "cold"):
        # Sides that compile while they train have a whole first run.
        brief = 4 * int(side.split()[1]) if side.startswith("fixed") else None
        cold[side] = run(name, side, FLAGS.seeds, cache(side, FLAGS.seeds), max_samples=brief)
        log(f"{name}, {side}, cold: {cold[side]}")
    for seed in range(FLAGS.seeds):
        turn = seed % len(sides)
        for side in sides[turn:] + sides[:turn]:
            if side == "remembered":  # of the first run only
                left = pathlib.Path(cache(side, seed), FOLDER)
                first = left.with_name("first-run")
                shutil.copytree(*((first, left) if seed else (left, first)), dirs_exist_ok=True)
            outcomes[side].append(run(name, side, seed, cache(side, seed)))
            log(f"{name}, {side}, seed {seed}: {outcomes[side][-1]}")
    cold |= {side: outcomes[side][0] for side in sides if side == "cold"}
    print(table(name, workload, outcomes, cold), flush=True)


def table(
    name: str,
    workload: Workload,
    outcomes: dict[str, list[Outcome]],
    cold: dict[str, Outcome],
) -> str:
    """The figures of one workload, as text."""

    def median_s(side: str) -> float:
        # A run that never met the target took longer than any that did.
        return statistics.median(_or_inf(o.seconds) for o in outcomes[side])

    def num_missed(side: str) -> int:
        return sum(math.isnan(o.seconds) for o in outcomes[side])

    fixed = [s for s in outcomes if s.startswith("fixed")]
    # A batch that does not always get there is not the best, however fast it is when it does.
    best = min(fixed, key=lambda s: (num_missed(s), median_s(s)), default=next(iter(outcomes)))
    smallest = fixed[0] if fixed else best
    lines = [
        f"{name}: seconds of training to {workload.metric} {workload.target} on {_device()}, "
        f"{len(outcomes[best])} seeds; best constant batch: {best}",
        f"{'side':>12} {'median s':>9} {'min..max':>14} {'met':>4} {'samples':>9} {workload.metric:>13} "
        f"{'test loss':>9} {'/best fixed':>11} {'/' + smallest:>11} {'start-up s':>10} {'cold s':>7}",
    ]
    for side, runs in outcomes.items():
        times = [_or_inf(o.seconds) for o in runs]
        met = [t for t in times if math.isfinite(t)]
        spread = f"{min(times):.1f}..{max(times):.1f}"
        lines.append(
            f"{side:>12} {median_s(side):9.2f} {spread:>14} {len(met):2d}/{len(times)} "
            f"{_median(o.samples for o in runs):9.3g} {_median(o.value for o in runs):13.4f} "
            f"{_median(o.test_loss for o in runs):9.4f} {_ratio(runs, outcomes[best]):11.2f} "
            f"{_ratio(runs, outcomes[smallest]):11.2f} {_median(o.start_up_s for o in runs):10.1f} "
            f"{cold[side].start_up_s:7.1f}"
        )
    if "adaptive" in outcomes:
        first, runs = cold["adaptive"], outcomes["adaptive"]
        lines.append(
            f"adaptive, cold cache: {first.seconds:.2f} s to the target after {first.start_up_s:.1f} s of "
            f"start-up. Batches used: {', '.join(map(str, runs[0].batches))} (seed 0)"
        )
    return "\n".join(lines)


def _or_inf(seconds: float) -> float:
    return math.inf if math.isnan(seconds) else seconds


def _median(values: Any) -> float:
    return float(np.median(list(values)))


def _ratio(runs: Sequence[Outcome], others: Sequence[Outcome]) -> float:
    """The median over seeds of one side's time over another's; a run against a failed one counts as 0."""
    ratios = []
    for run_, other in zip(runs, others, strict=True):
        a, b = _or_inf(run_.seconds), _or_inf(other.seconds)
        ratios.append(math.inf if math.isinf(a) else a / b)
    return statistics.median(ratios)


def _device() -> str:
    device = jax.devices()[0]
    return f"{device.device_kind} x {jax.device_count()}"


def log(text: str) -> None:
    if FLAGS.verbose:
        print(text, file=sys.stderr, flush=True)


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    unknown = set(FLAGS.workloads) - set(WORKLOADS)
    if unknown:
        raise app.UsageError(f"--workloads: {sorted(unknown)} is not among {sorted(WORKLOADS)}.")
    os.environ.update(keep_freed_pages(os.environ))  # as `jaxgoodput run` has it, for every side
    with tempfile.TemporaryDirectory() as caches:
        for name in FLAGS.workloads:
            compare(name, WORKLOADS[name], pathlib.Path(caches))


if __name__ == "__main__":
    flags.DEFINE_list("workloads", ["recommender", "digits", "lm"], "Which tables.")
    flags.DEFINE_integer("seeds", 5, "Runs of each side.")
    flags.DEFINE_list("grid", [], "Fixed global batches, instead of each workload's own grid.")
    flags.DEFINE_list(
        "sides", [], "Only sides whose name contains one of these; all but cold by default."
    )
    flags.DEFINE_bool("verbose", False, "Print every run and every change of the batch.")
    app.run(main)
