"""A planted run: the events that a trainer would send, from a model whose parameters are known."""

import math
from typing import Any

import numpy as np

from jaxgoodput.goodput.efficiency import GradGroups, GradParams
from jaxgoodput.goodput.fit import PerfFit, StepTimings
from jaxgoodput.goodput.intervals import UNKNOWN_INTERVAL, NoiseInterval
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import PerfParams, Placement, compute_time, step_time
from jaxgoodput.goodput.search import BatchConfig, BatchLimits, best_batch
from jaxgoodput.observe.events import (
    Checkpoint,
    EvalEnd,
    FitEnd,
    FitStart,
    HostJudged,
    Preempt,
    ReadsRetried,
    Regrouped,
    Resharded,
    TuneEnd,
    Window,
)
from jaxgoodput.observe.race import Contender
from jaxgoodput.tune.exploring import AccountState
from jaxgoodput.tune.verdict import Verdict

PERF = PerfParams(
    compute_base=0.004,
    compute_per_sample=0.0004,
    intra_base=0.006,
    intra_per_replica=0.0005,
    inter_base=math.nan,
    inter_per_replica=math.nan,
    overlap=1.5,
    update_s=0.012,
)
ERROR = 0.07
REPLICAS = 8
LIMITS = BatchLimits(base=64, max=4096, micro=(4, 128), max_micro_batches=8)
PLACEMENT = Placement(num_nodes=1, num_replicas=REPLICAS)
START = BatchConfig(micro_batch_size=8, num_micro_batches=1, num_replicas=REPLICAS)
SETTINGS = {
    "policy": "goodput",
    "rule": "adascale",
    "base_steps": 4000.0,
    "seed": 0,
    "memory_bytes": None,
    "batch": {"base": 64, "max": 4096, "micro": [4, 128]},
}
UNKNOWN = GradParams(sqr=math.nan, var=math.nan)


def grad_at(progress):
    """The signal fades while the noise stays: the noise scale grows from 100 to 1500 samples."""
    critical = 100.0 * (1.0 + progress / 280.0)
    return GradParams(sqr=1.0, var=critical / LIMITS.base)


def timings(rng, num_rows=12, noise=0.05):
    sizes = np.unique(np.geomspace(4, 128, num_rows).round().astype(int))
    jitter = np.exp(noise * rng.standard_normal((2, len(sizes))))
    return StepTimings(
        num_nodes=np.ones(len(sizes), int),
        num_replicas=np.full(len(sizes), REPLICAS),
        micro_batch_size=sizes,
        accumulate_s=np.asarray(compute_time(PERF, sizes)) * jitter[0],
        reduce_s=np.full(len(sizes), math.nan),
        update_s=np.full(len(sizes), math.nan),
        step_s=np.asarray(step_time(PERF, PLACEMENT, sizes)) * jitter[1],
        weight=np.ones(len(sizes)),
    )


def fit():
    return PerfFit(
        params=PERF,
        error=ERROR,
        unidentified=("inter_base", "inter_per_replica"),
        links=("none", "intra"),
        num_rows=12,
        max_replicas=REPLICAS,
    )


def fit_start(step=0, progress=0.0, restart=0, config=START):
    return FitStart(
        step=step,
        progress=progress,
        restart=restart,
        config=config,
        limits=LIMITS,
        device_kind="cpu",
        num_devices=REPLICAS,
        num_processes=1,
        settings=SETTINGS,
        at_s=0.0,
        groups=("table", "dense"),
    )


def race(model, before):
    """Batches of 1 to 128 samples per replica: two were timed, one of them in use for long."""
    found = []
    for size in (4, 8, 16, 32, 64, 128):
        config = BatchConfig(micro_batch_size=size, num_micro_batches=1, num_replicas=REPLICAS)
        in_use, timed = config == before, size in (8, 16) or config == before
        found.append(
            Contender(
                config=config,
                standing="in use" if in_use else "tried" if timed else "not compiled",
                gained=0.3 if in_use else math.nan,
                gained_error=0.02 if in_use else math.nan,
                num_steps=100 if in_use else 0,
                step_s=float(step_time(PERF, PLACEMENT, size)),
                basis="measured" if timed else "modelled",
                goodput=float(model.goodput(PLACEMENT, size)),
            )
        )
    return tuple(found)


def tune_end(step, progress, before, rng=None, *, grad=None, known=True):
    if grad is None:  # told apart, although both have the same noise scale
        whole = grad_at(progress)
        parts = np.array([0.75, 0.25])
        grad = GradGroups(sqr=whole.sqr * parts, var=whole.var * parts)
    model = GoodputModel(perf=PERF, grad=grad, base_batch_size=LIMITS.base)
    if known:
        config, goodput = best_batch(model, PLACEMENT, LIMITS)
        now = float(model.goodput(PLACEMENT, before.micro_batch_size, before.num_micro_batches))
        gain = goodput / now
        if gain < 1.05:
            config, reason = before, f"keep: would gain {gain - 1:.1%}, below the 5%"
        else:
            reason = (
                f"change: {before.global_batch_size} -> {config.global_batch_size} "
                f"samples gains {gain - 1:.1%} goodput"
            )
    else:
        config, goodput, gain, reason = before, math.nan, 1.0, "keep: no step times yet"
    return TuneEnd(
        step=step,
        before=before,
        verdict=Verdict(config=config, goodput=goodput, gain=gain, reason=reason),
        fit=fit() if known else None,
        timings=timings(rng or np.random.default_rng(0)) if known else None,
        grad=grad,
        num_nodes=1,
        num_replicas=REPLICAS,
        limits=LIMITS,
        residuals=(),
        switched=config != before,
        race=race(model, before),
    )


def window(step, progress, samples, config=START, *, num_steps=10, known=True, slow=1.03, **over):
    """A window of `num_steps` steps that took `slow` times what the model says."""
    grad = grad_at(progress) if known else UNKNOWN
    model = GoodputModel(perf=PERF, grad=grad, base_batch_size=LIMITS.base)
    critical = grad.var / grad.sqr * LIMITS.base
    interval = NoiseInterval(lower=0.6 * critical, middle=1.1 * critical, upper=2.1 * critical)
    predicted_s = float(
        step_time(PERF, PLACEMENT, config.micro_batch_size, config.num_micro_batches)
    )
    efficiency = float(model.efficiency(config.global_batch_size))
    throughput = config.global_batch_size / (predicted_s * slow)
    fields: dict[str, Any] = dict(
        step=step,
        progress=progress,
        samples=samples,
        epoch=samples // 50_000,
        config=config,
        num_steps=num_steps,
        seconds=num_steps * predicted_s * slow,
        metrics={"loss": 2.3 * math.exp(-progress / 1500), "grad_norm": 1.0},
        measured_step_s=predicted_s * slow,
        predicted_step_s=predicted_s if known else math.nan,
        predicted_error=ERROR if known else math.nan,
        goodput_measured=throughput * efficiency,
        goodput_predicted=config.global_batch_size / predicted_s * efficiency
        if known
        else math.nan,
        throughput=throughput,
        efficiency=efficiency,
        grad=grad,
        noise_scale=critical,
        noise_interval=interval if known else UNKNOWN_INTERVAL,
        noise_is_guess=False,
        noise_age_steps=3.0,
        noise_confidence=12.0,
        gain=efficiency * config.global_batch_size / LIMITS.base if known else 1.0,
        learning_rate=0.1,
        statistics_every=1,
        skipped_steps=0,
        memory_limit=128,
        eta_s=192.0,
        loss_gained=0.3 if known else math.nan,
        loss_gained_error=0.02 if known else math.nan,
        loss_gained_expected=0.28 if known else math.nan,
        tflops_per_device=1e-5 * throughput,
        account=AccountState(earned_s=0.02 * samples, spent_s=3.0, loan_s=1.5),
    )
    return Window(**(fields | over))


def run(receive, clock, *, steps=600, start_step=0, restart=0, rng=None, state=None, end=True):
    """Send a whole run's events to `receive(event)`; returns the state at the end.

    `state` is (progress, samples, config) at `start_step`.
    """
    rng = rng or np.random.default_rng(1)
    progress, samples, config = state or (0.0, 0, START)
    receive(fit_start(start_step, progress, restart, config))
    for step in range(start_step + 10, steps + 1, 10):
        one = window(step, progress, samples, config, known=step > 20)
        samples += 10 * config.global_batch_size
        progress += 10 * one.gain
        noisy = float(np.exp(0.05 * rng.standard_normal()))
        one = window(step, progress, samples, config, known=step > 20, slow=1.03 * noisy)
        clock.advance(one.seconds)
        receive(one)
        if step % 50 == 0:
            tune = tune_end(step, progress, config, rng, known=step > 20)
            receive(tune)
            config = tune.verdict.config
        if step % 200 == 0:
            clock.advance(0.5)
            accuracy = {"accuracy": 1 - math.exp(-progress / 800)}
            receive(
                EvalEnd(
                    step=step, progress=progress, at_s=clock.now(), seconds=0.5, metrics=accuracy
                )
            )
            clock.advance(0.02)
            receive(Checkpoint(step=step, seconds=0.02))
            clock.advance(0.1)
            receive(
                Resharded(
                    step=step,
                    before="data8",
                    after="fsdp8",
                    seconds=0.1,
                    bytes_moved=7 * 2**20,
                    largest_send_bytes=2**20,
                    peak_extra_bytes=2**18,
                )
            )
            receive(
                Regrouped(
                    step=step,
                    generation=2,
                    num_processes_before=1,
                    num_processes=2,
                    reason="processes are about to join or leave",
                    seconds={"leave": 0.1, "wait": 0.2},
                )
            )
            receive(
                HostJudged(
                    step=step,
                    host="b",
                    decision="left out",
                    why="it is slow",
                    numbers={"slow_ratio": 4.0, "excluded_s": 300.0, "saved": 0.5},
                )
            )
    if end:
        receive(ReadsRetried(step=steps, num_retried=1))
        receive(Preempt(step=steps, signal="SIGTERM"))
        receive(
            FitEnd(
                step=steps,
                progress=progress,
                samples=samples,
                seconds=clock.now(),
                reason="preempted",
                buckets_s={"compilation": 3.25, "evaluation": 1.5, "productive": 40.0},
            )
        )
    return progress, samples, config
