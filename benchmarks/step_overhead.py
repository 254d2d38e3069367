"""Measures what adaptivity costs a step: `Trainer.fit` against a hand-written jitted optax loop, in turns.

    python benchmarks/step_overhead.py                # the table in BUILD_NOTES.md, about 8 minutes
    python benchmarks/step_overhead.py --only "cnn:1"

Each row is a process of its own (the number of virtual devices is fixed at start). Inside it the
loops take turns, round by round: the hand-written loop; the engine's step without statistics, with
statistics, both driven by a bare loop; and `fit`. Ratios are formed within a round; the table gives
their median and range. `fit` is timed in its steady state: after the first verdict with a fit, which draws
pictures, and where the cadence is its own, after those that settle it; the seconds before are the start-up.
Below each row stands what `fit` and the hand-written loop used of the processor, in ms per step of each
thread ("others" are XLA's), medians over rounds. XLA's cost analysis compares flops, and the HLO text
collectives.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app, flags
from threads import cpu_of_threads

from jaxgoodput.launcher.local import keep_freed_pages

FLAGS = flags.FLAGS
flags.DEFINE_string("only", "", "One row, 'model:devices'.")
flags.DEFINE_integer("rounds", 5, "Turns of each loop.")
flags.DEFINE_integer("steps", 12, "Timed steps of a turn; 16 times as many of a cheap model.")
flags.DEFINE_bool("swap", False, "With Execution.swap_cpu_products.")
flags.DEFINE_bool("worker", False, "Internal: measure one row and print it as JSON.")

# model, devices, samples per device, what the issue asks for (at most)
ROWS = (
    ("cnn", 1, 96, 1.02),
    ("byte LM", 1, 32, 1.02),
    ("cnn", 8, 16, 1.05),
    ("byte LM", 8, 4, 1.05),
    ("decoder", 1, 16, 1.02),
    ("decoder", 8, 2, 1.05),
    ("mlp", 1, 512, 1.08),
    ("dlrm", 1, 4096, 1.08),
    ("recommender", 1, 8192, 1.08),
)
CHEAP = ("mlp", "dlrm", "recommender")  # of more steps, and with statistics at every step as well
WARM = 4  # untimed steps of a turn


def measure(name: str, num_devices: int, per_device: int) -> dict:
    """One row, in this process."""
    import jax

    # Must be set before the first use of a device, hence a process per row; ignored beside a GPU.
    jax.config.update("jax_num_cpu_devices", num_devices)
    import jax.numpy as jnp
    import numpy as np
    import optax
    from models import made

    from jaxgoodput import (
        BatchLimits,
        Config,
        Execution,
        Hook,
        Reporting,
        Saving,
        Statistics,
        Strategy,
        Tuning,
        with_overrides,
    )
    from jaxgoodput.data.datasets import as_source
    from jaxgoodput.data.sources import abstract_sample
    from jaxgoodput.engine.engine import Engines
    from jaxgoodput.train.start.problem import problem_of

    devices = jax.devices()[:num_devices]
    base = per_device * num_devices
    many = 1_000_000

    def config(workdir: str, *changes: str) -> Config:
        made = Config(
            workdir=workdir,
            batch=BatchLimits(base=base, max=base),
            base_steps=many,
            policy="fixed",
            tuning=Tuning(accumulate=False),
            reporting=Reporting(progress=False, tensorboard=True, window_s=1.0),
            saving=Saving(at_end=False),
            statistics=Statistics(every_steps=1),
            execution=Execution(swap_cpu_products=FLAGS.swap),
        )
        return with_overrides(made, changes)

    trainer = made(name, config("/tmp"), devices=devices)
    source = as_source(trainer.dataset())
    engines = Engines(problem_of(trainer, trainer.config), abstract_sample(source))
    engine = engines.on(Strategy(data=num_devices).on(devices))
    engine.compile([per_device], accumulate=False)
    rng = np.random.default_rng(0)
    batches = [source.batch(rng.integers(0, len(source), base)) for _ in range(8)]
    mask = jax.device_put(np.ones(base, np.float32), engine.layout.batch_sharding)
    tx: Any = trainer.optimizer()

    # The loop a careful user would write: one jitted step, donated, batches put ahead of use.
    def hand_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(trainer.mean_loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    replicated, sharded = engine.layout.replicated, engine.layout.batch_sharding
    params = jax.jit(trainer.init, out_shardings=replicated)(jax.random.key(0))
    opt_state = jax.jit(tx.init, out_shardings=replicated)(params)
    hand = (
        jax.jit(hand_step, donate_argnums=(0, 1), out_shardings=replicated)
        .lower(params, opt_state, jax.device_put(batches[0], sharded))
        .compile()
    )

    def turn(step, total: int) -> tuple[float, dict[str, float]]:
        """Seconds and CPU seconds per step: dispatch one ahead, wait for the step before."""
        pending, start, cpu = None, 0.0, {}
        for i in range(WARM + total):
            if i == WARM:
                jax.block_until_ready(pending)
                start, cpu = time.perf_counter(), cpu_of_threads()
            done = step(jax.device_put(batches[i % len(batches)], sharded))
            if pending is not None and i != WARM:
                jax.block_until_ready(pending)
            pending = done
        jax.block_until_ready(pending)
        return (time.perf_counter() - start) / total, per_step(cpu, cpu_of_threads(), total)

    hand_state = [params, opt_state]

    def by_hand(batch):
        *hand_state[:], loss = hand(*hand_state, batch)
        return loss

    engine_state = [engine.init(jax.random.key(0))]

    def by_engine(measured: bool):
        def step(batch):
            engine_state[0], metrics = engine.step(
                engine_state[0], None, batch, mask, measure=measured
            )
            return metrics

        return step

    class Stopwatch(Hook):
        """Times `total` steps after the first `skip`, and after start-up: the first fit, drawn."""

        def __init__(self, total: int, skip: int):
            self.times, self.total, self.skip, self.every = [], total, skip, []
            self.cpu: list[dict[str, float]] = []
            self.trainer: Any = None
            self.since_s = math.inf
            self.began_s = 0.0

        def on_fit_start(self, event):
            self.began_s = event.at_s

        def on_step_end(self, event):
            if event.step >= self.skip and event.at_s >= self.since_s:
                self.times.append(event.at_s)
                if len(self.times) in (1, self.total + 1):
                    self.cpu.append(cpu_of_threads())
            if len(self.times) == self.total + 1:
                self.trainer.finish()

        def on_tune_end(self, event):
            self.every.append(event.verdict.statistics_every)
            if event.fit is not None:
                self.since_s = min(self.since_s, self.trainer.clock.now())

        @property
        def per_step(self) -> float:
            return (self.times[self.total] - self.times[0]) / self.total

        @property
        def cpu_per_step(self) -> dict[str, float]:
            first, last = self.cpu
            return per_step(first, last, self.total)

    def by_fit(total: int, skip: int, *changes: str) -> Stopwatch:
        watch = Stopwatch(total, skip)
        with tempfile.TemporaryDirectory() as workdir:
            job = made(
                name,
                config(workdir, f"execution.compilation_cache={cache}", *changes),
                devices=devices,
                hooks=[watch],
            )
            watch.trainer = job
            job.fit()
        return watch

    cache = tempfile.mkdtemp()
    rounds = {"hand": [], "plain": [], "statistics": [], "fit": []}
    cheap = name in CHEAP
    cpu: dict[str, list[dict[str, float]]] = {"fit": [], "hand": []}
    if cheap:
        rounds["fit, always on"] = []
    cadences, start_up = [], []
    steps = FLAGS.steps * (16 if cheap else 1)
    for turn_number in range(FLAGS.rounds + 1):
        before, hand_cpu = turn(by_hand, steps)
        took = {
            "plain": turn(by_engine(False), steps)[0],
            "statistics": turn(by_engine(True), steps)[0],
        }
        if cheap:
            took["fit, always on"] = by_fit(steps, 20).per_step
            # Long enough for the tuner to see both kinds of step, twice, and settle.
            watch = by_fit(steps, 450, "statistics.every_steps=null")
            cadences += watch.every[-1:]
        else:
            # As many steps as the cadence needs to show; before them, two verdicts, which settle it.
            watch = by_fit(4 * steps, 150, "statistics.every_steps=null")
            cadences += watch.every[-1:]
        took["fit"] = watch.per_step
        after, _ = turn(by_hand, steps)
        took["hand"] = (before + after) / 2  # drift cancels
        if turn_number:  # the first turn warms everything up
            for part, seconds in took.items():
                rounds[part].append(seconds)
            cpu["fit"].append(watch.cpu_per_step)
            cpu["hand"].append(hand_cpu)
            start_up.append(watch.times[0] - watch.began_s)

    *_, measured = engine.measuring_programs(per_device)
    mine, known = engine.compiled.cost(measured), hand.cost_analysis()
    theirs: Any = known[0] if isinstance(known, list) else known

    def collectives(text: str | None) -> int:
        assert text is not None
        return sum(
            line.count(f" {kind}(") + line.count(f" {kind}-start(")
            for line in text.splitlines()
            for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
        )

    params_count = sum(x.size for x in jax.tree.leaves(hand_state[0]))
    return {
        "device": jax.devices()[0].device_kind,
        "rounds": rounds,
        "gflop_per_device": theirs["flops"] / 1e9,
        "flops_ratio": mine["flops"] / theirs["flops"],
        "bytes_ratio": mine["bytes accessed"] / theirs["bytes accessed"],
        "collectives": [
            collectives(hand.as_text()),
            collectives(engine.compiled.text(measured)),
        ],
        "parameters": int(params_count),
        "cpu": cpu,
        "start_up_s": statistics.median(start_up),
        "cadence": cadences[-1] if cadences else 1,
        "dtype": str(jnp.float32.dtype),
    }


def per_step(first: dict[str, float], last: dict[str, float], steps: int) -> dict[str, float]:
    """What was used between two readings, per step."""
    return {name: (last[name] - first.get(name, 0.0)) / steps for name in last}


def told(cpu: list[dict[str, float]]) -> str:
    """Medians over rounds, in ms, of threads that did anything."""
    names = dict.fromkeys(name for one in cpu for name in one)
    ms = {n: statistics.median(one.get(n, 0.0) for one in cpu) * 1e3 for n in names}
    return ", ".join(f"{name} {value:.2f}" for name, value in ms.items() if value >= 0.005)


def ratio(rounds: dict, part: str, of: str = "hand") -> str:
    """Median and range of the ratios within rounds."""
    values = [a / b for a, b in zip(rounds[part], rounds[of], strict=True)]
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def main(argv):
    """Run the rows and print the table."""
    del argv
    chosen = [r for r in ROWS if FLAGS.only in ("", f"{r[0]}:{r[1]}")]
    if FLAGS.worker:
        name, num_devices, per_device, _ = chosen[0]
        print(json.dumps(measure(name, num_devices, per_device)))
        return
    lines = []
    for name, num_devices, per_device, most in chosen:
        done = subprocess.run(
            [
                sys.executable,
                __file__,
                f"--only={name}:{num_devices}",
                "--worker",
                f"--rounds={FLAGS.rounds}",
                f"--steps={FLAGS.steps}",
                f"--swap={FLAGS.swap}",
            ],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            # As the launcher sets it; for the hand-written loop too.
            env={**os.environ, **keep_freed_pages(os.environ)},
        )
        row = json.loads(done.stdout.splitlines()[-1])
        rounds = row["rounds"]
        hand_ms = statistics.median(rounds["hand"]) * 1e3
        extra = f"; cadence {row['cadence']}"
        if "fit, always on" in rounds:
            extra = f"; always on {ratio(rounds, 'fit, always on')}" + extra
        lines.append(
            f"{name:12} {num_devices:>2} x {per_device:<5} {hand_ms:8.1f} "
            f"{row['gflop_per_device']:7.2f}  {ratio(rounds, 'fit'):22} <= {most:4.2f}  "
            f"{ratio(rounds, 'plain'):22} {ratio(rounds, 'statistics'):22} "
            f"{row['flops_ratio']:.4f} {row['bytes_ratio']:.3f} "
            f"{row['collectives'][0]}/{row['collectives'][1]}{extra}"
        )
        lines.append(
            f"{'':12} CPU ms a step: fit {told(row['cpu']['fit'])}; by hand {told(row['cpu']['hand'])}; "
            f"start-up {row['start_up_s']:.1f} s"
        )
        print("\n".join(lines[-2:]), file=sys.stderr)
    print(
        f"{'model':12} {'devices':>10} {'hand ms':>8} {'GFLOP':>7}  {'fit / hand':22} {'asked':7}  "
        f"{'step / hand':22} {'step+stats / hand':22} flops  bytes collectives"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    app.run(main)
