"""Five recipes as Trainers (`examples/ports/`), each beside a plain optax loop of the same recipe.

    python benchmarks/ports.py --check losses              # the first 50 steps, about 3 minutes
    python benchmarks/ports.py --check time --only resnet  # seconds of 400 steps, 7 pairs in turns
    python benchmarks/ports.py --check quality --seeds 3   # whole runs: loop, port, adapting port
    python benchmarks/ports.py --check lines               # what each of them takes to write

A loop is one donated jit of value_and_grad, update and apply_updates a step, called with rows of NumPy
arrays; its loss is fetched every 100 steps. Loops and ports share the networks, losses and data of
`examples/ports/`, the initial values, the order of the samples and the keys of the steps. Loops call flax and
optax alone.

* `losses` are of the fixed base batch. The difference is relative to the loop's loss; the table has the
  largest of the first 10 and of all steps.
* `time` has the seconds of `--steps` steps after `--warm` others, beside which programs may be compiled (in a
  run of 100,000 steps, a block of several steps pays), of the port with `policy="fixed"` over
  the loop, pair by pair, with the order of the two reversed in every other pair; and the same of CPU seconds
  of all threads. What a recipe does between steps (the games of DQN) belongs to both.
* `quality` is what the recipe's docstring promises, on the same held-out samples. Seconds run from the end of
  the first step to the end of the last, evaluations during training included. Recipes whose batch is fixed
  have no third column.
* `lines` are lines of code without blank ones, comments and docstrings. What both sides share is not counted.

Evaluations at the end, saving and the dashboard are left out of all runs. Seconds of a machine that others
use at the same time say little.
"""

import ast
import functools
import importlib
import inspect
import pathlib
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import jaxgoodput as jg
from jaxgoodput.data.cursor import Cursor, Permutations, take

FLAGS = flags.FLAGS
NAMES = ("resnet", "nanogpt", "ddpm", "clip", "dqn")
flags.DEFINE_enum("check", "losses", ["losses", "time", "quality", "lines"], "What to compare.")
flags.DEFINE_list("only", list(NAMES), "Recipes.")
flags.DEFINE_integer("pairs", 7, "Pairs of `time`.")
flags.DEFINE_integer("steps", 400, "Timed steps of `time`.")
flags.DEFINE_integer("warm", 1500, "Steps before those of `time`.")
flags.DEFINE_integer("seeds", 3, "Seeds of `quality`.")

NUM_LOSSES = 50
QUIET = ["reporting.tensorboard=false", "reporting.progress=false", "saving.every_s=null"]
QUIET += ["saving.at_end=false", "tuning.remember=false"]


# -- the loops ---------------------------------------------------------------------------------------------


class Original:
    """A recipe as a plain loop. `carry` is all that a step changes."""

    def __init__(self, port: Any, config: jg.Config):
        self.port = port
        self.num_steps = int(config.base_steps or 0)
        self.size = config.batch.base
        self.tx = self.optimizer()
        self.step = jax.jit(self._step, donate_argnums=0)

    def batches(self, seed: int) -> Iterator[Any]:
        """Yield batches in a run's order of samples."""
        data, cursor, cache = self.data(), Cursor(seed=seed), Permutations()
        while True:
            size = len(next(iter(data.values())))
            rows, cursor = take(cursor, size, self.size, permutations=cache)
            yield {name: column[rows] for name, column in data.items()}

    def begun(self, key: Any) -> dict[str, Any]:
        variables = dict(self.variables(key))
        params = variables.pop("params")
        carry = {"params": params, "opt": self.tx.init(params), "n": jnp.zeros((), jnp.int32)}
        return {**carry, "state": variables}

    def _step(self, carry: Any, batch: Any, key: Any) -> Any:
        own = functools.reduce(jax.random.fold_in, (carry["n"], 0, 0), key)
        grad = jax.value_and_grad(self.loss, has_aux=True)
        (loss, state), grads = grad(carry["params"], carry["state"], batch, own)
        updates, opt = self.tx.update(grads, carry["opt"], carry["params"])
        params = optax.apply_updates(carry["params"], updates)
        return {"params": params, "opt": opt, "n": carry["n"] + 1, "state": state}, loss

    def between(self, carry: Any, step: int) -> None:
        """Do what the recipe does before a step."""

    def data(self) -> Any:
        raise NotImplementedError

    def variables(self, key: Any) -> Any:
        raise NotImplementedError

    def optimizer(self) -> optax.GradientTransformation:
        raise NotImplementedError

    def loss(self, params: Any, state: Any, batch: Any, key: Any) -> Any:
        raise NotImplementedError

    def quality(self, carry: Any) -> float:
        raise NotImplementedError


def initialised(module: Any, key: Any, *inputs: Any, **options: Any) -> Any:
    """The values that `jg.from_linen` makes of the key."""
    first, rest = jax.random.split(key)
    return module.init(
        {"params": first, "dropout": jax.random.fold_in(rest, 0)}, *inputs, **options
    )


class Resnet(Original):
    """A ResNet with batch statistics."""

    def data(self):
        return self.port.pictures(held_out=False)

    def variables(self, key):
        return initialised(self.port.ResNet(), key, jnp.zeros((1, 8, 8, 1)), train=False)

    def optimizer(self):
        rate = self.port.schedule(self.num_steps)
        decay = optax.add_decayed_weights(self.port.WEIGHT_DECAY, mask=self.port.is_kernel)
        return optax.chain(decay, optax.sgd(rate, momentum=0.9, nesterov=True))

    def loss(self, params, state, batch, key):
        images, variables = self.port.augmented(key, batch["image"]), {"params": params, **state}
        model = self.port.ResNet()
        logits, state = model.apply(variables, images, train=True, mutable=["batch_stats"])
        return self.port.smoothed_loss(logits, batch["label"]).mean(), state

    def quality(self, carry):
        data = self.port.pictures(held_out=True)
        variables = {"params": carry["params"], **carry["state"]}
        guess = self.port.ResNet().apply(variables, data["image"], train=False).argmax(axis=-1)
        return float(jnp.mean(guess == data["label"]))


class Nanogpt(Original):
    """A decoder with dropout."""

    def data(self):
        return self.port.windows(held_out=False)

    def variables(self, key):
        read = jnp.zeros((1, self.port.LENGTH), jnp.int32)
        return initialised(self.port.GPT(), key, read, train=False)

    def optimizer(self):
        rate, decay = self.port.schedule(self.num_steps), self.port.WEIGHT_DECAY
        adam = optax.adamw(rate, b2=0.95, weight_decay=decay, mask=self.port.is_matrix)
        return optax.chain(optax.clip_by_global_norm(1.0), adam)

    def loss(self, params, state, batch, key):
        read = batch["codes"][:, :-1].astype(jnp.int32)
        random = {"dropout": jax.random.fold_in(key, 0)}
        logits = self.port.GPT().apply({"params": params}, read, train=True, rngs=random)
        return self.port.entropy(logits, batch["codes"]).mean(), state

    def quality(self, carry):
        codes, found = self.port.windows(held_out=True)["codes"], []
        for part in np.array_split(codes, -(-len(codes) // 64)):
            read = part[:, :-1].astype(np.int32)
            logits = self.port.GPT().apply({"params": carry["params"]}, read, train=False)
            found.append(self.port.entropy(logits, part))
        return float(jnp.concatenate(found).mean() / np.log(2))


class Ddpm(Original):
    """A diffusion model, whose average of the parameters is part of the step."""

    def data(self):
        return self.port.pictures(held_out=False)

    def variables(self, key):
        made = self.port.NETWORK.init(key, jnp.zeros((1, 8, 8, 1)), jnp.zeros(1, jnp.int32))
        return {**made, "average": jax.tree.map(jnp.zeros_like, made["params"])}

    def optimizer(self):
        return optax.adam(self.port.LEARNING_RATE)

    def loss(self, params, state, batch, key):
        return self.port.random_error({"params": params}, batch["image"], key).mean(), state

    def _step(self, carry, batch, key):
        carry, loss = super()._step(carry, batch, key)
        old, share = carry["state"]["average"], 1 - self.port.EMA
        average = optax.incremental_update(carry["params"], old, share)
        return {**carry, "state": {"average": average}}, loss

    def quality(self, carry):
        weight = 1 - self.port.EMA ** float(carry["n"])
        params = {"params": jax.tree.map(lambda x: x / weight, carry["state"]["average"])}
        return float(jax.jit(self.port.error)(params, **self.port.pictures(held_out=True)).mean())


class Clip(Original):
    """Two towers; the loss is of the whole batch."""

    def data(self):
        return self.port.pairs(held_out=False)

    def variables(self, key):
        one = {name: x[:1] for name, x in self.port.pairs(held_out=True).items()}
        return self.port.TOWERS.init(key, one["image"], one["words"])

    def optimizer(self):
        return optax.adamw(self.port.schedule(self.num_steps), weight_decay=0.01)

    def loss(self, params, state, batch, key):
        return self.port.contrast({"params": params}, batch).mean(), state

    def quality(self, carry):
        params = {"params": carry["params"]}
        seen, read, _ = self.port.towers(params, self.port.pairs(held_out=True))
        return self.port.hits({"seen": seen, "read": read})


class Dqn(Original):
    """DQN, whose games are played between steps."""

    def batches(self, seed):
        self.replay = self.port.begun_replay()
        return self.port.batches(lambda: self.replay)

    def play(self, params, number):
        games = np.arange(self.port.GAMES)
        return self.port.all_played({"params": params}, number, games, self.port.CURIOSITY)

    def variables(self, key):
        made = self.port.NET.init(key, jnp.zeros((1, 4)))
        return {**made, "target": jax.tree.map(jnp.copy, made["params"]), "n": jnp.zeros((), int)}

    def optimizer(self):
        return optax.chain(optax.clip_by_global_norm(10.0), optax.adam(self.port.LEARNING_RATE))

    def loss(self, params, state, batch, key):
        is_due = state["n"] % self.port.REFRESH == 0
        target = jax.tree.map(lambda a, b: jnp.where(is_due, a, b), params, state["target"])
        target = jax.lax.stop_gradient(target)
        each = self.port.surprise({"params": params}, {"params": target}, batch)
        return each.mean(), {"target": target, "n": state["n"] + 1}

    def between(self, carry, step):
        if step and step % self.port.ROUND == 0:
            games = self.play(carry["params"], step)
            self.replay = self.port.added(self.replay, jax.device_get(games))

    def quality(self, carry):
        return self.port.num_stood(self.play(carry["params"], int(carry["n"])))


ORIGINALS = {"resnet": Resnet, "nanogpt": Nanogpt, "ddpm": Ddpm, "clip": Clip, "dqn": Dqn}


def train(
    loop: Original, seed: int, num_steps: int, on_step: Callable[[int, Any], None]
) -> dict[str, Any]:
    """Run a loop; `on_step(number, loss)` is called after each step is dispatched."""
    first, key = jax.random.split(jax.random.key(seed))
    carry, batches = loop.begun(first), loop.batches(seed)
    for step in range(num_steps):
        loop.between(carry, step)
        carry, loss = loop.step(carry, next(batches), key)
        on_step(step + 1, loss)
        if step % 100 == 99:
            float(loss)
    return jax.block_until_ready(carry)


# -- the ports ---------------------------------------------------------------------------------------------


@dataclass
class Marks(jg.Hook):
    """The losses of a run, and the wall and CPU seconds at which some steps were done."""

    stop_after: int | None = None
    at: tuple[int, ...] = ()
    losses: list[float] = field(default_factory=list)
    seconds: dict[int, tuple[float, float]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    trainer: Any = None

    def on_step_end(self, event: jg.events.StepEnd, /) -> None:
        """Note a step, and end the run after the last one."""
        self.losses.append(event.loss)
        size = event.config.global_batch_size
        if not self.sizes or self.sizes[-1] != size:
            self.sizes.append(size)
        self.mark(event.step, event.at_s)
        if event.step == self.stop_after:
            self.trainer.finish()

    def mark(self, step: int, at_s: float) -> None:
        """Keep the times of a step; of the first and the latest in any case."""
        self.seconds[step if step in (1, *self.at) else -1] = (at_s, time.process_time())

    def passed(self, first: int, last: int) -> tuple[float, float]:
        """Wall and CPU seconds between two steps; -1 is the last one."""
        (a, b), (c, d) = self.seconds[first], self.seconds[last]
        return c - a, d - b


def port_of(name: str) -> Any:
    return importlib.import_module(name)


def trainer_of(name: str, marks: Marks, folder: str, *changes: str) -> jg.Trainer:
    """The port's Trainer on one device, with its own settings but for some changes."""
    port = port_of(name)
    (kind,) = (x for x in vars(port).values() if isinstance(x, type) and issubclass(x, jg.Trainer))
    config = jg.with_overrides(port.default_config(folder), [*QUIET, *changes])
    marks.trainer = kind(config, hooks=[marks], devices=jax.devices()[:1])
    return marks.trainer


def original_of(name: str) -> Original:
    port = port_of(name)
    return ORIGINALS[name](port, port.default_config("/tmp/unused"))


# -- the checks --------------------------------------------------------------------------------------------


def losses(name: str) -> str:
    """Largest relative difference of the losses of the first steps."""
    wanted: list[Any] = []
    train(original_of(name), 0, NUM_LOSSES, lambda _, loss: wanted.append(loss))
    with tempfile.TemporaryDirectory() as folder:
        marks = Marks(stop_after=NUM_LOSSES)
        trainer_of(name, marks, folder, 'policy="fixed"').fit()
    ours, theirs = np.array(marks.losses[:NUM_LOSSES]), np.array(jax.device_get(wanted))
    far = np.abs(ours - theirs) / np.abs(theirs)
    return (
        f"| {name} | {theirs[0]:.5f} | {theirs[-1]:.5f} | {far[:10].max():.1e} | {far.max():.1e} |"
    )


def timed(name: str, side: str, cache: str) -> tuple[float, float]:
    """Wall and CPU seconds of the timed steps of one side."""
    first, last = FLAGS.warm, FLAGS.warm + FLAGS.steps
    marks = Marks(stop_after=last, at=(first, last))
    if side == "loop":

        def on_step(step, loss):
            if step in marks.at:
                jax.block_until_ready(loss)
                marks.mark(step, time.monotonic())

        train(original_of(name), 0, last, on_step)
    else:
        with tempfile.TemporaryDirectory() as folder:
            where = f"execution.compilation_cache={cache}"
            trainer_of(name, marks, folder, 'policy="fixed"', "base_steps=100000", where).fit()
    return marks.passed(first, last)


def paired(name: str) -> str:
    """Median and quartiles of the port's seconds over the loop's."""
    ratios: list[tuple[float, float]] = []
    took: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as cache:
        for number in range(FLAGS.pairs):
            sides = ("loop", "port") if number % 2 else ("port", "loop")
            took = {side: timed(name, side, cache) for side in sides}
            ratios.append(tuple(a / b for a, b in zip(took["port"], took["loop"], strict=True)))  # pyright: ignore
            print(f"  {name}: {took}", file=sys.stderr, flush=True)
    wall, cpu = zip(*ratios, strict=True)
    each_ms = took["loop"][0] / FLAGS.steps * 1e3
    return f"| {name} | {FLAGS.pairs} | {each_ms:.2f} | {spread(wall)} | {spread(cpu)} |"


def spread(values: Any) -> str:
    """Median and quartiles; all values if there are fewer than four."""
    if len(values) < 4:
        return ", ".join(f"{x:.3f}" for x in values)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f}..{high:.3f})"


def quality(name: str) -> str:
    """Quality at the end of loop, port and adapting port, and what adapting took."""
    found: dict[str, list[float]] = {"loop": [], "fixed": [], "adapting": []}
    took: dict[str, list[tuple[float, float]]] = {"loop": [], "fixed": [], "adapting": []}
    sizes: list[list[int]] = []
    is_fixed = port_of(name).default_config("/tmp/unused").policy == "fixed"
    for seed in range(FLAGS.seeds):
        loop, marks = original_of(name), Marks()

        def on_step(step, loss, loop=loop, marks=marks):
            if step in (1, loop.num_steps):
                jax.block_until_ready(loss)
                marks.mark(step, time.monotonic())

        carry = train(loop, seed, loop.num_steps, on_step)
        found["loop"].append(loop.quality(carry))
        took["loop"].append(marks.passed(1, -1))
        for side in ("fixed", "adapting")[: 1 if is_fixed else 2]:
            policy = {"fixed": "fixed", "adapting": "goodput"}[side]
            with tempfile.TemporaryDirectory() as folder:
                marks = Marks()
                trainer = trainer_of(name, marks, folder, f'policy="{policy}"', f"seed={seed}")
                (value,) = trainer.evaluate(trainer.fit()).values()
            found[side].append(value)
            took[side].append(marks.passed(1, -1))
        sizes += [] if is_fixed else [marks.sizes]
        print(f"  {name}, seed {seed}: {found} {took} {sizes}", file=sys.stderr, flush=True)
    cells = [spread(found[side]) if found[side] else "-" for side in found]
    for side in ("fixed", "adapting"):
        for which in (0, 1):
            pairs = zip(took[side], took["loop"], strict=False)
            cells.append(spread([a[which] / b[which] for a, b in pairs]) or "-")
    cells.append("; ".join("-".join(map(str, one)) for one in sizes) or "-")
    return f"| {name} | " + " | ".join(cells) + " |"


# Nodes of a syntax tree that are on a line.
_PLACED = (ast.stmt, ast.expr, ast.excepthandler, ast.arg, ast.keyword, ast.alias, ast.pattern)


def code_lines(*objects: Any) -> int:
    """Lines of code of objects or of source texts."""
    return sum(
        len({n.lineno for n in ast.walk(_bare(one)) if isinstance(n, _PLACED)}) for one in objects
    )


def _bare(source: Any) -> ast.AST:
    """Return the syntax tree without docstrings."""
    text = source if isinstance(source, str) else textwrap.dedent(inspect.getsource(source))
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and body:
            if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
                del body[0]
    return tree


def lines(name: str) -> str:
    """Lines of code of the file, of its Trainer and settings, and of the loop."""
    port = port_of(name)
    (kind,) = (x for x in vars(port).values() if isinstance(x, type) and issubclass(x, jg.Trainer))
    whole = code_lines(pathlib.Path(port.__file__).read_text())
    own = code_lines(kind, port.default_config)
    loop = code_lines(ORIGINALS[name], Original._step, Original.begun, Original.batches, train)
    return f"| {name} | {whole} | {own} | {loop} |"


CHECKS: dict[str, tuple[Callable[[str], str], str]] = {
    "losses": (losses, "recipe|first loss|loss of step 50|largest difference of 10|of 50"),
    "time": (paired, "recipe|pairs|loop, ms a step|port over loop, wall|CPU"),
    "quality": (
        quality,
        "recipe|loop|port, fixed|port, adapting|fixed over loop, wall|CPU|adapting over loop, wall|CPU|"
        "batches",
    ),
    "lines": (lines, "recipe|file|Trainer and settings|loop instead"),
}


def main(_: Any) -> None:
    """Print a table."""
    if unknown := set(FLAGS.only) - set(NAMES):
        raise app.UsageError(f"--only: {sorted(unknown)} is not among {list(NAMES)}.")
    check, head = CHECKS[FLAGS.check]
    columns = head.split("|")
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
    for name in FLAGS.only:
        print(check(name), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples" / "ports"))
    app.run(main)
