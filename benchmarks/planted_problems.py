"""Compares the batch size that a run settles on with the best constant one, on problems with a known answer.

    python benchmarks/planted_problems.py                    # 18 problems: a spanning set
    python benchmarks/planted_problems.py --all              # all 36
    python benchmarks/planted_problems.py --optimizers adam --kinds sparse,mixed --verbose

A problem is a linear regression with known noise (dense features, rows of a table that are read with
Zipf's frequencies, or both), an optimizer and a planted step time as a function of the batch. What is
tested is the whole of `Trainer.fit` with the settings that users have; only its clock is planted: every
step takes as long as the problem says. It starts at the base batch and ends after so many base steps.

The truth is taken from the state in which the run ended, for every batch of the ladder: training goes on
at that batch, with the learning rate by the project's rule from *exact* noise moments (a pass over many
samples; the run's own estimates play no part), until the exact expected loss has fallen to where the base
batch brings it within an eighth of the run's length. The loss is the mean of many draws, which share the
state and differ in their samples. True goodput is progress, in base steps, per planted second.

regret = 1 - true goodput of the batch settled on / that of the best batch of the ladder. "settled" is the
batch under which most progress was made in the last fifth of the run. "model error" is the largest
difference, over the ladder, of the efficiency predicted from exact moments and that measured: what the
estimators cannot be blamed for. The estimate is what verdicts rest on: expected values, of averages over some
1000 base batches, in which the exact noise scale, that of the last state, has grown.
"""

import dataclasses
import functools
import itertools
import pathlib
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging
from planted_loop import PlantedLoop

import jaxgoodput as jg
from jaxgoodput.clock import FakeClock
from jaxgoodput.goodput.efficiency import GradGroups, efficiency, noise_scale
from jaxgoodput.observe.events import StepEnd
from jaxgoodput.optim import adaptation
from jaxgoodput.optim import noise as noises
from jaxgoodput.train.start.problem import problem_of

FLAGS = flags.FLAGS
flags.DEFINE_bool("all", False, "All combinations instead of a spanning set.")
flags.DEFINE_list("optimizers", [], "Only these.")
flags.DEFINE_list("kinds", [], "Only these kinds of parameters.")
flags.DEFINE_list("times", [], "Only these shapes of step time.")
flags.DEFINE_integer("base_steps", 4000, "Length of a run.")
flags.DEFINE_integer("draws", 32, "Continuations of each batch whose mean is the truth.")
flags.DEFINE_integer("seed", 0, "Of the problems and the runs.")
flags.DEFINE_bool("verbose", False, "Print the truth for every batch.")

BASE, SIZES = 16, (16, 32, 64, 128, 256, 512)
NUM_SAMPLES = 2**17
LABEL_NOISE = 1.0  # standard deviation
WIDTH = 4  # of a row of the table
Batch = dict[str, jax.Array]

# Planted seconds of a step by its samples.
TIMES: dict[str, Callable[[int], float]] = {
    "latency": lambda batch: 1e-3 * max(1.0, batch / 96),  # flat, then in proportion
    "line": lambda batch: 1e-3 * (1 + batch / 48),
    "root": lambda batch: 1e-3 * (batch / 16) ** 0.6,  # never as bad as in proportion
}
OPTIMIZERS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
    "adam": optax.adam,
    "adagrad": lambda rate: optax.adagrad(rate, initial_accumulator_value=1e-7),
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A linear regression: features of falling variance, rows read with falling frequency."""

    num_features: int
    num_rows: int

    @property
    def variances(self) -> np.ndarray:
        """[features]"""
        return 1 / np.arange(1, self.num_features + 1)

    @property
    def frequencies(self) -> np.ndarray:
        """[rows]"""
        weights = np.arange(1, self.num_rows + 1) ** -1.1
        return weights / weights.sum()

    def truth(self) -> Any:
        """The parameters that made the labels."""
        rng = np.random.default_rng(FLAGS.seed)
        first = self.num_features // 8
        w = rng.normal(size=self.num_features)
        made = {}
        if self.num_features:
            made |= {"strong": w[:first], "weak": w[first:]}
        if self.num_rows:
            made["table"] = rng.normal(size=(self.num_rows, WIDTH))
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), made)

    def draw(self, key: jax.Array, num_samples: int) -> Batch:
        """Fresh samples."""
        keys = jax.random.split(key, 4)
        batch = {"noise": LABEL_NOISE * jax.random.normal(keys[0], (num_samples,))}
        if self.num_features:
            deviations = jnp.sqrt(jnp.asarray(self.variances, jnp.float32))
            shape = (num_samples, self.num_features)
            batch["features"] = deviations * jax.random.normal(keys[1], shape)
        if self.num_rows:
            edges = jnp.asarray(np.cumsum(self.frequencies), jnp.float32)
            at = jnp.searchsorted(edges, jax.random.uniform(keys[2], (num_samples,)))
            batch["row"] = jnp.minimum(at, self.num_rows - 1).astype(jnp.int32)
            batch["direction"] = jax.random.normal(keys[3], (num_samples, WIDTH))
        return batch

    def guess(self, params: Any, batch: Batch) -> jax.Array:
        """[batch]"""
        total = jnp.zeros_like(batch["noise"])
        if self.num_features:
            total += batch["features"] @ jnp.concatenate([params["strong"], params["weak"]])
        if self.num_rows:
            total += jnp.sum(params["table"][batch["row"]] * batch["direction"], axis=1)
        return total

    def losses(self, params: Any, batch: Batch) -> jax.Array:
        """[batch]"""
        off = jax.tree.map(jnp.subtract, params, self.truth())
        return 0.5 * (self.guess(off, batch) - batch["noise"]) ** 2

    def excess(self, params: Any) -> jax.Array:
        """The expected loss above that of the truth, exact."""
        off = jax.tree.map(jnp.subtract, params, self.truth())
        total = jnp.zeros(())
        if self.num_features:
            w = jnp.concatenate([off["strong"], off["weak"]])
            total += 0.5 * jnp.sum(jnp.asarray(self.variances, jnp.float32) * w**2)
        if self.num_rows:
            p = jnp.asarray(self.frequencies, jnp.float32)
            total += 0.5 * jnp.sum(p[:, None] * off["table"] ** 2)
        return total


KINDS = {"dense": Kind(128, 0), "sparse": Kind(0, 2048), "mixed": Kind(32, 1024)}
# At the base batch, a half to an eighth of what is best after 4000 steps, so that a gain has room: at the
# limit of curvature no statistic of the noise knows that there is none, and Adagrad's first step in a row
# that is hardly ever read is the rate times the gain, whatever the gradient.
RATES = {
    "dense": {"sgd": 0.01, "momentum": 0.001, "adam": 0.001, "adagrad": 0.03},
    "sparse": {"sgd": 0.16, "momentum": 0.016, "adam": 0.006, "adagrad": 0.2},
    "mixed": {"sgd": 0.12, "momentum": 0.012, "adam": 0.006, "adagrad": 0.2},
}


@dataclasses.dataclass(frozen=True)
class Planted:
    """One problem."""

    optimizer: str
    kind: str
    time: str

    def step_s(self, global_batch_size: int) -> float:
        """Planted seconds of a step."""
        return TIMES[self.time](global_batch_size)


class Regression(jg.Trainer):
    """A planted problem as a user would write it."""

    def __init__(self, config: jg.Config, planted: Planted, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.planted, self.kind = planted, KINDS[planted.kind]

    def init(self, key):
        return jax.tree.map(jnp.zeros_like, self.kind.truth())

    def loss(self, params, batch, key):
        return self.kind.losses(params, batch)

    def optimizer(self):
        rate = RATES[self.planted.kind][self.planted.optimizer]
        return OPTIMIZERS[self.planted.optimizer](rate)

    def dataset(self):
        return jax.tree.map(np.asarray, self.kind.draw(jax.random.key(FLAGS.seed), NUM_SAMPLES))


class Batches(jg.Hook):
    """Which batches made the progress."""

    def __init__(self):
        self.steps: list[tuple[float, int]] = []

    def on_step_end(self, event: StepEnd, /) -> None:
        self.steps.append((event.progress, event.config.global_batch_size))

    def settled(self) -> int:
        """Under which most progress was made in the last fifth."""
        done = dict.fromkeys(SIZES, 0.0)
        for (before, _), (after, batch) in itertools.pairwise(self.steps):
            if before >= 0.8 * self.steps[-1][0]:
                done[batch] += after - before
        return max(done, key=lambda batch: done[batch])


def train(planted: Planted, cache: str) -> tuple[Regression, Any, Batches]:
    """The run that is judged."""
    with tempfile.TemporaryDirectory() as parent:
        config = jg.Config(
            workdir=str(pathlib.Path(parent) / "run"),
            seed=FLAGS.seed,
            batch=jg.BatchLimits(base=BASE, max=SIZES[-1], sizes=SIZES, max_micro_batches=1),
            base_steps=FLAGS.base_steps,
            # Compiled before the first step: planted seconds know nothing of compilations.
            execution=jg.Execution(background_compile=False, compilation_cache=cache),
            reporting=jg.Reporting(tensorboard=False, progress=False),
            saving=jg.Saving(at_end=False, every_s=1e9),
        )
        heard = Batches()
        trainer = Regression(
            config,
            planted,
            clock=FakeClock(),
            loop=PlantedLoop,
            hooks=[heard],
            devices=jax.devices()[:1],
        )
        return trainer, trainer.fit(), heard


@functools.cache
def programs(optimizer: str, kind: str) -> Any:
    """(exact moments, continuation) of a kind and an optimizer: jitted, the same for all step times."""
    task = Regression(_any_config(), Planted(optimizer, kind, "line"))
    problem = problem_of(task, task.config)
    law = KINDS[kind]

    @jax.jit
    def moments(params: Any, opt_state: Any, key: jax.Array) -> GradGroups:
        """By group, from the exact gradient and 2^16 samples, at the base batch."""
        factor = problem.preconditioner(opt_state, params)
        mean = jax.grad(law.excess)(params)

        def one(key):
            def own(key):
                sample = law.draw(key, 1)
                grad = jax.grad(lambda p: law.losses(p, sample).sum())(params)
                return noises.squared_norms(jax.tree.map(jnp.subtract, grad, mean), factor)

            return jax.vmap(own)(jax.random.split(key, 64)).mean(0)

        spread = jax.lax.map(one, jax.random.split(key, 1024)).mean(0)
        return GradGroups(sqr=noises.squared_norms(mean, factor), var=spread / BASE)

    @functools.partial(jax.jit, static_argnames="batch")
    def go_on(params, opt_state, key, least, most, level, *, batch: int):
        """Mean losses before and after the last update, and the updates it took to get to `level`."""

        def one(carry, key):
            params, opt_state = carry
            grads = jax.grad(lambda p: law.losses(p, law.draw(key, batch)).mean())(params)
            updates, opt_state = problem.tx.update(
                grads, opt_state, params, global_batch_size=batch
            )
            return optax.apply_updates(params, updates), opt_state

        def step(carry):
            states, key, _, now, taken = carry
            key, own = jax.random.split(key)
            states = jax.vmap(one)(states, jax.random.split(own, FLAGS.draws))
            return states, key, now, jax.vmap(law.excess)(states[0]).mean(), taken + 1

        def wants_more(carry):
            *_, now, taken = carry
            return (taken < least) | ((now > level) & (taken < most))

        states = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (FLAGS.draws, *x.shape)), (params, opt_state)
        )
        start = law.excess(params)
        return jax.lax.while_loop(wants_more, step, (states, key, start, start, 0))[2:]

    return moments, go_on


def _any_config() -> jg.Config:
    return jg.Config(workdir="", batch=jg.BatchLimits(base=BASE, max=SIZES[-1]), base_steps=1)


def with_exact_moments(opt_state: Any, exact: GradGroups) -> Any:
    """The optimizer's state, knowing the noise and settled at whatever batch it is given."""

    def known(old: adaptation.Adaptation) -> adaptation.Adaptation:
        total = jax.tree.map(lambda x: jnp.append(x, x.sum()), exact)
        zeros = jnp.zeros_like(total.sqr)
        averages = noises.Averages(
            sqr=total.sqr,
            var=total.var,
            sqr_deviation=zeros,
            var_deviation=zeros,
            weight=jnp.ones(()),
            heaviest=jnp.full((), 1e-3),
        )
        return dataclasses.replace(
            old,
            groups=dataclasses.replace(old.groups, current=averages),
            gain=jnp.full_like(old.gain, jnp.inf),  # nothing left that it has to grow from
        )

    return adaptation.with_own(opt_state, known)


def true_efficiencies(planted: Planted, state: Any) -> tuple[GradGroups, dict[int, float]]:
    """Exact moments, and the progress per sample of every batch of the ladder over that of the base."""
    moments, go_on = programs(planted.optimizer, planted.kind)
    keys = jax.random.split(jax.random.key(FLAGS.seed + 1), 1 + len(SIZES))
    exact = jax.device_get(moments(state.params, state.opt_state, keys[0]))
    opt_state = with_exact_moments(state.opt_state, exact)
    stretch = FLAGS.base_steps // 8
    found: dict[int, float] = {}
    level = 0.0
    for key, batch in zip(keys[1:], SIZES, strict=True):
        least = stretch if batch == BASE else 1
        before, now, taken = map(
            float, go_on(state.params, opt_state, key, least, stretch, level, batch=batch)
        )
        if batch == BASE:
            level = now
        steps = taken - (level - now) / (before - now) if before > now else taken
        found[batch] = stretch * BASE / (steps * batch)
        if FLAGS.verbose:
            print(f"    {batch}: loss {now:.4f} (level {level:.4f}) after {taken:.0f} updates")
    return exact, found


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One row."""

    estimated: float  # noise scales, samples
    exact: float
    settled: int
    best: int
    regret: float
    model_error: float


def judge(planted: Planted, cache: str) -> Outcome:
    """Train, find the truth and compare."""
    _, state, heard = train(planted, cache)
    exact, worth = true_efficiencies(planted, state)
    goodput = {batch: worth[batch] * batch / planted.step_s(batch) for batch in SIZES}
    best = max(goodput, key=lambda batch: goodput[batch])
    predicted = {batch: float(efficiency(exact, np.asarray(batch / BASE))) for batch in SIZES}
    if FLAGS.verbose:
        for batch in SIZES:
            print(
                f"    {batch}: efficiency {worth[batch]:.3f}, predicted {predicted[batch]:.3f}, "
                f"goodput {goodput[batch] / goodput[best]:.3f} of the best"
            )
    settled = heard.settled()
    estimated = jax.device_get(adaptation.grad_groups(state.opt_state))
    return Outcome(
        estimated=float(noise_scale(estimated, BASE)),
        exact=float(noise_scale(exact, BASE)),
        settled=settled,
        best=best,
        regret=1 - goodput[settled] / goodput[best],
        model_error=max(abs(predicted[batch] - worth[batch]) for batch in SIZES),
    )


def chosen() -> list[Planted]:
    """All combinations, or a set in which every two of the three properties meet."""
    every = []
    for (i, optimizer), (j, kind), (k, time) in itertools.product(
        enumerate(OPTIMIZERS), enumerate(KINDS), enumerate(TIMES)
    ):
        if FLAGS.all or (i + j + k) % 2 == 0:
            every.append(Planted(optimizer, kind, time))
    wanted = (("optimizer", FLAGS.optimizers), ("kind", FLAGS.kinds), ("time", FLAGS.times))
    return [p for p in every if all(not only or getattr(p, name) in only for name, only in wanted)]


def main(_: Any) -> None:
    """Print the table."""
    logging.set_verbosity(logging.ERROR)
    print(
        "| optimizer | parameters | step time | noise scale, estimated | exact | settled on | best | "
        "regret | model error |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for planted in chosen():
            row = judge(planted, cache)
            rows.append(row)
            print(
                f"| {planted.optimizer} | {planted.kind} | {planted.time} | {row.estimated:.0f} | "
                f"{row.exact:.0f} | {row.settled} | {row.best} | {row.regret:.1%} | "
                f"{row.model_error:.2f} |",
                flush=True,
            )
    regrets = [row.regret for row in rows]
    print(
        f"{len(rows)} problems: median regret {statistics.median(regrets):.1%}, worst {max(regrets):.1%}"
    )


if __name__ == "__main__":
    app.run(main)
