"""Compares all estimators of the gradient noise along one training run of a language model.

    python benchmarks/noise_estimators.py                    # adamw and sgd, 3 seeds

A decoder of flax linen on the bytes of Python's standard library. All estimators see the same batches and
the same parameters, since the learning rate does not change:

* micro-batches: eight parts of each batch, all parameters, unbiased: the reference.
* part: the gradient of a quarter of the rows beside that of all, all parameters (what a global loss has by
  itself, where a batch is one micro-batch).
* norm layers: single samples, on normalisation layers alone (`Statistics.from_norm_layers`).

Printed are noise scales in samples, pooled over parameters, mean +- standard deviation over seeds; and
what a step that measures takes, over a plain one, as the median of turns in one process.
"""

import importlib
import pathlib
import statistics
import sys
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

from jaxgoodput.data.datasets import as_source
from jaxgoodput.data.sources import abstract_sample
from jaxgoodput.engine.engine import Engine, Engines
from jaxgoodput.engine.step import Problem
from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.optim.adaptive import adaptive
from jaxgoodput.parallel.strategy import Strategy

corpora: Any = importlib.import_module("corpora")

FLAGS = flags.FLAGS
flags.DEFINE_integer("seeds", 3, "Runs of each optimizer.")
flags.DEFINE_integer("steps", 300, "Updates of a run.")

BATCH, PARTS, DIM, LAYERS, LENGTH = 32, 8, 64, 2, 64


class Decoder(nn.Module):
    """Pre-norm, causal."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, DIM)(tokens) + nn.Embed(LENGTH, DIM)(jnp.arange(tokens.shape[1]))[None]
        for _ in range(LAYERS):
            mask = nn.make_causal_mask(tokens)
            x = x + nn.SelfAttention(4)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(DIM)(nn.gelu(nn.Dense(4 * DIM)(nn.LayerNorm()(x))))
        return nn.Dense(256)(nn.LayerNorm()(x))


def loss(params, model_state, batch, key):
    """The mean over positions of every sample's nats."""
    del key
    tokens = batch["tokens"].astype(jnp.int32)
    logits: Any = Decoder().apply({"params": params}, tokens[:, :-1])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.mean(nats, axis=1), model_state


def engine_of(
    tx: optax.GradientTransformationExtraArgs, source: Any, *, adam: bool, norms: bool
) -> Engine:
    """On one device."""
    problem = Problem(
        init=lambda key: Decoder().init(key, jnp.zeros((1, LENGTH), jnp.int32))["params"],
        loss_and_state=loss,
        tx=adaptive(tx, rules.none, base_batch_size=BATCH, smoothing=0.99),
        base_batch_size=BATCH,
        preconditioned=adam and not norms,
        from_norm_layers=norms,
    )
    return Engines(problem, abstract_sample(source)).on(Strategy().on(jax.devices()[:1]))


def noise_scale(metrics: Any) -> float:
    """In samples; plain averages."""
    return metrics.noise.var / max(metrics.noise.sqr, 1e-30) * BATCH


def train(name: str, source: Any, seed: int) -> dict[str, list[float]]:
    """Estimator -> noise scale after each third of the run."""
    adam = name == "adamw"
    tx = optax.adamw(2e-3) if adam else optax.sgd(0.3, momentum=0.9)
    found: dict[str, list[float]] = {}
    for side in ("micro-batches", "part", "norm layers"):
        engine = engine_of(tx, source, adam=adam, norms=side == "norm layers")
        rng, state = np.random.default_rng(seed), engine.init(jax.random.key(seed))
        found[side] = []
        for step in range(1, FLAGS.steps + 1):
            rows = source.batch(rng.integers(0, len(source), BATCH))
            work = None
            parts = PARTS if side == "micro-batches" else 1
            pieces = [
                jax.device_put(
                    {k: x[i::parts] for k, x in rows.items()}, engine.layout.batch_sharding
                )
                for i in range(parts)
            ]
            mask = jax.device_put(np.ones(BATCH // parts, np.float32), engine.layout.batch_sharding)
            for piece in pieces[:-1]:
                work = engine.accumulate(work or engine.begin(state), piece, mask)
            state, packed = engine.step(state, work, pieces[-1], mask)
            if step % (FLAGS.steps // 3) == 0:
                found[side].append(noise_scale(engine.read(packed)[0]))
    return found


def overhead(source: Any) -> dict[str, float]:
    """Estimator -> a measuring step over a plain one."""
    ratios: dict[str, list[float]] = {"part": [], "norm layers": []}
    rows = source.batch(np.arange(BATCH))
    for side, norms in (("part", False), ("norm layers", True)):
        engine = engine_of(optax.adamw(1e-3), source, adam=True, norms=norms)
        batch = jax.device_put(rows, engine.layout.batch_sharding)
        mask = jax.device_put(np.ones(BATCH, np.float32), engine.layout.batch_sharding)
        state = engine.init(jax.random.key(0))

        def turn(state: Any, measure: bool, engine: Engine = engine, given: Any = (batch, mask)):
            began_s = 0.0
            for i in range(24):
                if i == 4:
                    jax.block_until_ready(state.step)
                    began_s = time.perf_counter()
                state, _ = engine.step(state, None, *given, measure=measure)
            jax.block_until_ready(state.step)
            return state, time.perf_counter() - began_s

        for round_ in range(8):
            state, plain_s = turn(state, False)
            state, measured_s = turn(state, True)
            if round_:  # what comes first, compiles
                ratios[side].append(measured_s / plain_s)
    return {side: statistics.median(found) for side, found in ratios.items()}


def main(_: Any) -> None:
    """Print the tables."""
    logging.set_verbosity(logging.ERROR)
    source = as_source({"tokens": corpora.byte_windows(LENGTH)[0]})
    third = FLAGS.steps // 3
    steps = [third, 2 * third, 3 * third]
    print("| optimizer | estimator | " + " | ".join(f"after {s} steps" for s in steps) + " |")
    print("|---|---|---|---|---|")
    for name in ("sgd", "adamw"):
        runs = [train(name, source, seed) for seed in range(FLAGS.seeds)]
        for side in runs[0]:
            rows = np.array([run[side] for run in runs])
            cells = [f"{m:.3g} +- {s:.2g}" for m, s in zip(rows.mean(0), rows.std(0), strict=True)]
            print(f"| {name} | {side} | " + " | ".join(cells) + " |", flush=True)
    for side, ratio in overhead(source).items():
        print(f"a step that measures by {side}, over a plain one: {ratio:.3f}")


if __name__ == "__main__":
    app.run(main)
