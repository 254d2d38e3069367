"""jaxgoodput's `fit`, by its promised names, and a plain optax loop in turns with it. Started by run.py."""

import argparse
import dataclasses
import math
import pathlib
import sys
import tempfile
import time
from typing import Any

import jax
import optax_loop
import stopwatch
from data import WORKLOADS, Workload, load, value
from jax_models import Problem

import jaxgoodput as jg

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

# From the first fit on, until the statistics have their cadence, and programs that are made ready beside
# training, from the disk after the first turn, are there.
SETTLE_S = 10.0


class Task(jg.Trainer):
    """What `fit` trains."""

    def __init__(self, config: jg.Config, problem: Problem, rate: float, **options: Any):
        super().__init__(config, **options)
        self.problem, self.rate = problem, rate

    def init(self, key):
        return self.problem.init(key)

    def loss(self, params, batch, key):
        return self.problem.losses(params, batch)

    def optimizer(self):
        return self.problem.optimizer(self.rate)

    def dataset(self):
        return self.problem.train


def config_of(name: str, workload: Workload, workdir: str) -> jg.Config:
    """The recommender's is that of examples/recommender.py."""
    limits = jg.BatchLimits(base=workload.base, max=workload.max)
    config = jg.Config(workdir=workdir, batch=limits, base_steps=workload.most / workload.base)
    if name == "recommender":
        sizes = (512, 2048, 8192, 16384)
        return dataclasses.replace(
            config,
            batch=dataclasses.replace(limits, sizes=sizes, max_micro_batches=1),
            rule=jg.rules.square_root,
            tuning=jg.Tuning(every_s=0.25, dwell_steps=10),
        )
    return config


class Evaluated(Task):
    """The same, with its test metric."""

    def eval_dataset(self):
        return self.problem.test

    def metrics(self, params, batch):
        columns = {"label": batch["label"]} if "label" in batch else {}
        return {"outputs": self.problem.outputs(params, batch), **columns}

    def summarize(self, outputs):
        return {"value": value(self.problem.name, outputs["outputs"], dict(outputs))}


def measured(config: jg.Config, cache: str, seed: int) -> jg.Config:
    """`config`, for a measurement: quiet, a first run of its kind, with compiled programs in `cache`."""
    return dataclasses.replace(
        config,
        seed=seed,
        tuning=dataclasses.replace(config.tuning, remember=False),
        execution=jg.Execution(compilation_cache=cache),
        reporting=jg.Reporting(progress=False),
        saving=jg.Saving(at_end=False, every_s=1e9),
    )


class First(jg.Hook):
    """Tells when the first step is done, and ends the run."""

    trainer: jg.Trainer

    def on_step_end(self, event, /):
        if event.step == 1:
            stopwatch.tell(first_step_s=stopwatch.since_start())
            self.trainer.finish()


class Referee(jg.Hook):
    """Ends a run at the target, or after as many samples as it may take."""

    trainer: jg.Trainer

    def __init__(self, workload: Workload):
        self.workload = workload
        self.began_s = math.nan
        self.steps: dict[int, tuple[int, float]] = {0: (0, math.nan)}  # samples, when it was done
        self.batches: list[int] = []
        self.evaluations: list[Any] = []

    def on_fit_start(self, event, /):
        self.began_s = event.at_s

    def on_step_end(self, event, /):
        self.steps[event.step] = event.samples, event.at_s
        if event.config.global_batch_size not in self.batches:
            self.batches.append(event.config.global_batch_size)
        if event.samples >= self.workload.most:
            self.trainer.finish()

    def on_eval_end(self, event, /):
        self.evaluations.append(event)
        if self.workload.is_met(event.metrics["value"]):
            self.trainer.finish()

    def found(self) -> dict[str, Any]:
        """What `stopwatch.to_target` finds of other loops."""
        evaluating_s = 0.0
        for evaluation in self.evaluations:
            samples, done_s = self.steps[evaluation.step]
            # A step that was under way when the evaluation began is training.
            evaluation_began_s = max(evaluation.at_s - evaluation.seconds, done_s)
            seconds = evaluation_began_s - self.began_s - evaluating_s
            evaluating_s += evaluation.at_s - evaluation_began_s
            last = evaluation.metrics["value"]
            if self.workload.is_met(last) or evaluation is self.evaluations[-1]:
                return {
                    "samples": samples,
                    "seconds": seconds,
                    "value": last,
                    "met": self.workload.is_met(last),
                    "batches": self.batches,
                }
        raise RuntimeError("the run ended before its first evaluation")


class Turn(jg.Hook):
    """Times updates in the steady state of a run: some seconds after the first fit."""

    trainer: jg.Trainer

    def __init__(self, updates: int):
        self.updates = updates
        self.begin_s = math.inf
        self.begin = 0
        self.at: list[tuple[float, float]] = []

    def on_tune_end(self, event, /):
        if event.fit is not None and math.isinf(self.begin_s):
            self.begin_s = time.perf_counter() + SETTLE_S

    def on_step_end(self, event, /):
        if event.at_s < self.begin_s or (self.at and event.step < self.begin + self.updates):
            return
        if len(self.at) == 2:  # the rest of a block of steps
            return
        self.at.append((event.at_s, time.process_time()))
        if len(self.at) == 1:
            self.begin = event.step
        else:
            self.trainer.finish()

    def found(self) -> tuple[float, float]:
        """Seconds of an update, by the clock and of the processor."""
        (a, cpu_a), (b, cpu_b) = self.at
        return (b - a) / self.updates, (cpu_b - cpu_a) / self.updates


class Steps(jg.Hook):
    """When every step was done, and its batch."""

    def __init__(self):
        self.steps: list[tuple[float, int]] = []

    def on_step_end(self, event, /):
        self.steps.append((event.at_s, event.config.global_batch_size))


def run(config: jg.Config, problem: Problem, rate: float, hook: Any) -> None:
    """One `fit`."""
    hook.trainer = Evaluated(config, problem, rate, hooks=[hook])
    hook.trainer.fit()


def step(options: Any, workload: Workload, problem: Problem, config: jg.Config) -> None:
    """`fit` at the base batch, in turns with the plain loop."""
    rate, wait = workload.learning_rate, jax.block_until_ready
    plain = optax_loop.train(problem, workload.base, rate, options.seed)
    before, after = [stopwatch.turn(plain, workload.turn, wait)], []
    for _ in range(options.rounds + 1):
        with tempfile.TemporaryDirectory() as workdir:
            hook = Turn(4 * workload.turn)  # its noise is measured every so many steps
            batch = jg.BatchLimits(base=workload.base, max=workload.base)
            alone = dataclasses.replace(
                config,
                workdir=workdir,
                batch=batch,
                base_steps=10**6,
                tuning=jg.Tuning(accumulate=False, remember=False),
            )
            run(alone, problem, rate, hook)
            after.append(hook.found())
        before.append(stopwatch.turn(plain, workload.turn, wait))
    stopwatch.tell(**stopwatch.ratios(before[1:], after[1:]))  # the first turns warm up


def change(options: Any, workload: Workload, problem: Problem, config: jg.Config) -> None:
    """A schedule that changes between the base batch and twice as much."""
    count = options.changes + 3
    batches = [workload.base * (1 + i % 2) for i in range(count)]
    hook = Steps()
    largest = 2 * workload.base
    scheduled = dataclasses.replace(
        config,
        batch=jg.BatchLimits(base=workload.base, max=largest, sizes=(workload.base, largest)),
        base_steps=20 * count,
        policy={i / count: batch for i, batch in enumerate(batches)},
    )
    run(scheduled, problem, workload.learning_rate, hook)
    stopwatch.tell(lost_s=stopwatch.lost(hook.steps, skip=2))


def elastic(options: Any, workload: Workload, problem: Problem, config: jg.Config) -> None:
    """A worker of `jaxgoodput run --nnodes`, as in benchmarks/elasticity.py."""
    import elasticity

    batch = jg.BatchLimits(base=workload.base, max=workload.base)
    lines = elasticity.Lines(pathlib.Path(options.steps))
    endless = dataclasses.replace(config, batch=batch, base_steps=10**6, policy="fixed")
    run(endless, problem, workload.learning_rate, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("step", "target", "start", "change", "elastic"))
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--data", required=True)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--changes", type=int, default=10)
    parser.add_argument("--steps", help="elastic: a folder for the workers' lines")
    options = parser.parse_args()
    name, workload = options.workload, WORKLOADS[options.workload]
    problem = Problem(name, *load(options.data, name))
    with tempfile.TemporaryDirectory() as folder:
        workdir = f"{options.steps or folder}/run"
        config = measured(config_of(name, workload, workdir), options.cache, options.seed)
        if options.mode == "start":
            run(config, problem, workload.learning_rate, First())
        elif options.mode == "target":
            often = workload.every / workload.base
            size = min(8192, len(next(iter(problem.test.values()))))
            evaluation = jg.Evaluation(every_base_steps=often, micro_batch_size=size)
            referee = Referee(workload)
            config = dataclasses.replace(config, evaluation=evaluation)
            run(config, problem, workload.learning_rate, referee)
            stopwatch.tell(**referee.found())
        else:
            modes = {"step": step, "change": change, "elastic": elastic}
            modes[options.mode](options, workload, problem, config)


if __name__ == "__main__":
    main()
