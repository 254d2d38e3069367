"""Planted seconds of a loop of one's own with `jg.Tuner`, over those of `Trainer.fit` on the same problem.

    python benchmarks/own_loop.py                                    # all problems, 500 and 3,000 steps
    python benchmarks/own_loop.py --kinds jumps --lengths 500 --verbose
    python benchmarks/own_loop.py --compile_s 5                      # each new size costs the loop 5 s

The problems, their noise and their clocks are those of `planted_runs.py`, with SGD. Every size is compiled
before the first step, as there, unless `--compile_s` says how long a plain loop waits for a new size; the
trainer's sizes are free all the same. A ratio is the median over seeds; each run draws its own samples.
"""

import math
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import planted_runs
from absl import app, flags, logging
from planted_runs import BASE, KINDS, OPTIMIZERS, SIZES, WIDTH, Noise, Planted

import jaxgoodput as jg
from jaxgoodput.train import compile_ahead

FLAGS = flags.FLAGS
flags.DEFINE_float("compile_s", 0.0, "Planted seconds that the loop waits for each new size.")
NUM_GROUPS = 2


def loss(params: Any, batch: Any) -> jax.Array:
    """Return a loss that is linear in its parameters, so that the gradient is what was planted."""
    return jnp.mean(jnp.sum(params["w"].reshape(-1) * (1 + batch["x"]), axis=1))


def updates_of(planted: Planted) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return `init` of the optimizer, and a step that measures the noise if it is told to."""
    tx = jg.adaptive(
        OPTIMIZERS[planted.optimizer](), jg.rules.adascale, base_batch_size=BASE, smoothing=0.999
    )
    noisy = jg.value_grad_and_noise(loss, num_groups=NUM_GROUPS)

    def step(params: Any, opt_state: Any, batch: Any, measures: bool) -> Any:
        if measures:
            (value, _), grads, sample = noisy(params, batch)
        else:
            value, grads, sample = *jax.value_and_grad(loss)(params, batch), None
        size = len(batch["x"])
        changes, opt_state = tx.update(
            grads, opt_state, params, global_batch_size=size, noise=sample
        )
        return optax.apply_updates(params, changes), opt_state, value

    return tx.init, jax.jit(step, static_argnames="measures", donate_argnums=(0, 1))


def run(
    planted: Planted, seed: int, *, compile_s: float = 0.0
) -> tuple[float, list[int], list[str]]:
    """Return the planted seconds of a run until its true progress is made, its batches and the reasons."""
    source, rng = Noise(planted, seed), np.random.default_rng(seed)
    init, step = updates_of(planted)
    params = {"w": jnp.zeros((WIDTH, WIDTH))}
    opt_state, batches, reasons, seen = init(params), [BASE], [""], {BASE}
    limits = jg.BatchLimits(base=BASE, max=SIZES[-1], sizes=SIZES)
    tuner = jg.Tuner(limits, round(planted.base_steps), compile_s=compile_s or 0.0)
    while source.progress < planted.base_steps:
        size, measures = tuner.batch_size, tuner.measures
        batch = source.batch(rng.integers(0, len(source), size))
        params, opt_state, value = step(params, opt_state, {"x": batch["x"]}, measures)
        waited_s = 0.0 if size in seen else compile_s
        seconds, worth = planted.step_s(size), planted.gain(source.progress, size)
        tuner.step(opt_state, value, seconds=waited_s + seconds)
        share = min((planted.base_steps - source.progress) / worth, 1.0)
        source.seconds += waited_s + seconds * share
        source.progress += worth
        seen.add(size)
        if size != batches[-1]:
            batches.append(size)
        if tuner.why != reasons[-1]:
            reasons.append(tuner.why)
    return source.seconds, batches, reasons[1:]


def compare(name: str, steps: int, cache: str) -> float:
    """Print one row; return the median of the loop's seconds over the median of the trainer's."""
    planted = Planted.of_length(KINDS[name], "sgd", steps)
    seeds = range(FLAGS.seeds)
    own = [run(planted, seed, compile_s=FLAGS.compile_s) for seed in seeds]
    trained = [planted_runs.run(planted, seed, cache) for seed in seeds]
    if FLAGS.verbose:
        print("\n".join([*own[0][2], "-- trainer", *trained[0][1].verdicts]))
    own_s, trained_s = (statistics.median(one[0] for one in runs) for runs in (own, trained))
    best_s = planted.seconds(planted.best)
    print(
        f"| {name} | {steps:,} | {planted.best} | {trained_s / best_s:.3f} | {own_s / best_s:.3f} "
        f"| {own_s / trained_s:.3f} | {' '.join(map(str, trained[0][1].batches))} "
        f"| {' '.join(map(str, own[0][1]))} |",
        flush=True,
    )
    return own_s / trained_s


def main(_: Any) -> None:
    """Print the table."""
    logging.set_verbosity(logging.ERROR)
    compile_ahead.FIXED_ON_CPU_S = math.inf  # see `planted_runs.py`
    print(
        "| noise | steps | best constant | trainer / best | own loop / best | own loop / trainer "
        "| trainer's batches | own loop's batches |"
    )
    print("|---|---|---|---|---|---|---|---|")
    found = []
    names = [name for name in FLAGS.kinds or KINDS if not KINDS[name].has_table]
    with tempfile.TemporaryDirectory() as cache:
        for length in FLAGS.lengths:
            found += [compare(name, int(length), cache) for name in names]
    print(f"own loop / trainer: median {statistics.median(found):.3f}, worst {max(found):.3f}")


if __name__ == "__main__":
    app.run(main)
