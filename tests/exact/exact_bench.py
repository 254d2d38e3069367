"""Runs a cell of the exactness bench: one row in one column, beside a plain optax loop.

The loop has the same samples in the same groups with the same keys, and both sides compute in float64. At
the large batch the loop multiplies its updates by the gains that the run recorded, its schedules read the
recorded progress, and long averages forget by it (`docs/inside/optim.md`). The difference of a leaf is
relative to how far the leaf moved; one that moved less than a millionth of what others did is measured by
those, because a bias in front of a BatchNorm moves by rounding errors alone.
"""

import contextlib
import dataclasses
import functools
import pathlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import exact_models as models
import jax
import jax.numpy as jnp
import numpy as np
import optax
from exact_columns import NUM_UPDATES, Column
from exact_rows import Row

import jaxgoodput as jg
from jaxgoodput.data.cursor import Cursor, take
from jaxgoodput.engine.state import split
from jaxgoodput.optim import adaptation
from jaxgoodput.train.loop import Loop

TOLERANCE = 1e-5
SMALLEST = 1e-6  # of how far the parameters moved
SEED = 0
PACKAGE = pathlib.Path(jg.__file__).parent


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a cell shows."""

    kind: Literal["equal", "differs", "refused", "crashed"]
    difference: float = float("nan")
    gain: float = 1.0
    """The largest factor of an update."""
    what: str = ""
    """The leaf that differs most, or the error."""

    def __str__(self) -> str:
        """Return the cell as a table shows it."""
        if self.kind == "differs":
            return f"**differs by {self.difference:.1e}**"
        return {"equal": "=", "refused": "refused", "crashed": "**crashed**"}[self.kind]


@dataclass(frozen=True, kw_only=True)
class Update:
    """What a run recorded of one update."""

    progress: np.ndarray
    """Base steps done after it."""
    gains: np.ndarray
    """Factors of its leaves."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Where a run or a loop ended."""

    params: Any
    model_state: Any


# -- the run -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def settings(**values: Any) -> Iterator[None]:
    """Set options of JAX for all threads, and restore them."""
    before = {name: jax.config.values[name] for name in values}
    try:
        for name, value in values.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


class Stateless(jg.Trainer):
    """Trains a row whose model has no state."""

    def __init__(self, row: Row, config: jg.Config, **options: Any):
        super().__init__(config, **options)
        self.row = row

    def init(self, key: Any) -> Any:
        return self.row.model.init(key)

    def loss(self, params: Any, batch: Any, key: Any) -> Any:
        return self.row.model.loss(params, batch, key)

    def optimizer(self) -> Any:
        return self.row.tx(lambda schedule: schedule)

    def dataset(self) -> Any:
        return models.samples()

    def trainable(self, params: Any) -> Any:
        return None if self.row.trainable is None else self.row.trainable(params)


class Stateful(Stateless):
    """Trains a row whose model has a state."""

    def loss_and_state(self, params: Any, model_state: Any, batch: Any, key: Any) -> Any:
        return self.row.model.loss(params, model_state, batch, key)


class Recording(Loop):
    """A loop that records the gain and the progress of each update, and stops the run after some of them."""

    updates: list[Update]
    stop_after: int | None = None

    def _dispatch(self, batch: Any) -> None:
        super()._dispatch(batch)
        own = adaptation.find(self.now.state.opt_state)
        done, rest, gains = jax.device_get((own.progress, own.progress_rest, own.gain))
        tx: Any = self.now.engine.problem.tx
        of_leaf = tx.init.__self__._factors_of(self._trained())[1]
        each = np.asarray([gains[i] for i in jax.tree.leaves(of_leaf)])
        type(self).updates.append(Update(progress=done + rest, gains=each))
        if self.stop_after is not None and len(self.updates) >= self.stop_after:
            trainer: Any = self.task
            trainer.request_stop()

    def _trained(self) -> Any:
        problem, params = self.now.engine.problem, self.now.state.params
        return split(params, problem.mask(params))[0]


def trained(row: Row, column: Column, workdir: pathlib.Path, updates: list[Update]) -> Trained:
    """Train a row in a column; returns where it ended, and adds its updates to `updates`."""
    kind = Stateful if row.model.has_state else Stateless
    loop = type("Recording", (Recording,), {"updates": updates})
    config, devices = column.config(str(workdir)), jax.devices()[: column.num_devices]
    if column.stop_after is not None:
        stopping = type("Stopping", (loop,), {"stop_after": column.stop_after})
        with contextlib.suppress(jg.Preempted):
            kind(row, config, devices=devices, loop=stopping).fit()
        assert len(updates) < NUM_UPDATES, "the run was over before it was stopped"
    state = kind(row, config, devices=devices, loop=loop).fit()
    return Trained(
        params=jax.device_get(state.params), model_state=jax.device_get(state.model_state)
    )


# -- the plain loop --------------------------------------------------------------------------------------


def groups_of(column: Column, num_updates: int) -> Iterator[list[list[np.ndarray]]]:
    """Yield the samples of each update: for every replica, those of each of its micro-batches."""
    cursor, replicas = Cursor(seed=SEED), 1 if column.is_global else column.num_replicas
    for _ in range(num_updates):
        rows, cursor = take(cursor, models.NUM_SAMPLES, column.batch)
        yield [
            list(part)
            for part in rows.reshape(column.num_micro_batches, replicas, -1).swapaxes(0, 1)
        ]


class Plain:
    """A plain loop: gradients of groups, added up, and an optax update."""

    def __init__(self, row: Row):
        self.row = row
        self.sums = jax.jit(self._sums)
        self.update = jax.jit(self._update)

    def _sums(
        self, kept: Any, rest: Any, model_state: Any, batch: Any, key: Any
    ) -> tuple[Any, ...]:
        """Return the gradient of the summed loss, that sum, its weight and the new state."""

        def total(kept: Any) -> tuple[Any, Any]:
            params, changed = _joined(kept, rest), model_state
            call = self.row.model.plain or self.row.model.loss
            if self.row.model.has_state:
                out, changed = call(params, model_state, batch, key)
            else:
                out = call(params, batch, key)
            if isinstance(out, jg.Loss):
                return jnp.sum(out.sum), (jnp.sum(out.weight), changed)
            count = float(len(batch["x"]))
            return (jnp.sum(out) if out.ndim else out * count), (jnp.asarray(count), changed)

        (loss, (weight, model_state)), grads = jax.value_and_grad(total, has_aux=True)(kept)
        return grads, loss, weight, model_state

    def _update(
        self, kept: Any, opt_state: Any, grads: Any, value: Any, at: Any
    ) -> tuple[Any, Any]:
        """Return the parameters and the state after an update; `at` is None, or what was recorded."""
        done, progress, factors = (0.0, 0.0, None) if at is None else at
        if at is None:
            tx = self.row.tx(lambda schedule: schedule)
        else:
            tx = self.row.tx(lambda schedule: lambda count: schedule(jnp.floor(done)))
        extra = {"value": value} if "value" in self.row.extra else {}
        tx = optax.with_extra_args_support(tx)
        updates, changed = tx.update(grads, opt_state, kept, **extra)
        if at is not None:
            updates = jax.tree.map(jnp.multiply, updates, factors)
            changed = forgetting(opt_state, changed, self.row.decays, done, progress)
        return optax.apply_updates(kept, updates), changed


def plain(row: Row, column: Column, updates: Sequence[Update] | None) -> tuple[Trained, Any]:
    """Return where a plain loop ends, and the parameters that it began with."""
    loop, data = _loop(row.name, row), models.samples()
    first, key = jax.random.split(jax.random.key(SEED))
    made = row.model.init(first)
    params, model_state = made, ()
    if isinstance(made, jg.Variables):
        params, model_state = made.params, made.model_state
    kept, rest = _parted(params, row.trainable)
    opt_state = row.tx(lambda schedule: schedule).init(kept)
    before = 0.0
    for step, groups in enumerate(groups_of(column, len(updates or range(NUM_UPDATES)))):
        found, states = [], []
        for replica, micro_batches in enumerate(groups):
            state = model_state
            for count, rows in enumerate(micro_batches):
                own = functools.reduce(jax.random.fold_in, (step, replica, count), key)
                batch = jax.tree.map(lambda x, rows=rows: x[rows], data)
                *sums, state = loop.sums(kept, rest, state, batch, own)
                found.append(sums)
            states.append(state)
        grads, loss, weight = jax.tree.map(lambda *each: sum(each), *found)
        at = None
        if updates is not None:
            progress, gains = updates[step].progress, updates[step].gains
            at = before, progress, factors_of(gains, kept)
            before = progress
        mean = jax.tree.map(lambda g, w=weight: g / w, grads)
        kept, opt_state = loop.update(kept, opt_state, mean, loss / weight, at)
        model_state = merged(model_state, states, row.model.summed)
    ended = Trained(
        params=jax.device_get(_joined(kept, rest)), model_state=jax.device_get(model_state)
    )
    return ended, jax.device_get(params)


def switches_for(row: Row, column: Column) -> dict[str, Any]:
    """Return the column's switches, without strict types if the plain loop's own code fails under them."""
    found, strict = dict(column.switches), "jax_numpy_dtype_promotion"
    if strict not in found:
        return found

    def step(key: Any) -> Any:
        made = row.model.init(key)
        state = made.model_state if isinstance(made, jg.Variables) else ()
        kept, rest = _parted(made.params if isinstance(made, jg.Variables) else made, row.trainable)
        batch = jax.tree.map(lambda x: x[:2], models.samples())
        grads, loss, _, _ = Plain(row)._sums(kept, rest, state, batch, key)
        return Plain(row)._update(kept, row.tx(lambda s: s).init(kept), grads, loss, None)

    try:
        with settings(**{strict: found[strict]}):
            jax.eval_shape(step, jax.eval_shape(lambda: jax.random.key(0)))
    except Exception as error:
        if type(error).__name__ == "TypePromotionError":  # the run shows what becomes of others
            del found[strict]
    return found


@functools.lru_cache(maxsize=1)
def _loop(name: str, row: Row) -> Plain:
    del name
    return Plain(row)


def factors_of(gains: np.ndarray, kept: Any) -> Any:
    """Return the factor of each leaf."""
    leaves, structure = jax.tree.flatten(kept)
    assert len(gains) == len(leaves)
    return jax.tree.unflatten(structure, list(gains))


def merged(before: Any, states: Sequence[Any], summed: Sequence[str]) -> Any:
    """Return the state after an update: sums, means of other floats, and all else of the first replica."""

    def of(path: Any, old: Any, *each: Any) -> Any:
        if jax.tree_util.keystr(path, simple=True, separator="/") in summed:
            return old + sum(new - old for new in each)
        return sum(each) / len(each) if jnp.issubdtype(old.dtype, jnp.floating) else each[0]

    return jax.tree_util.tree_map_with_path(of, before, *states)


def forgetting(
    before: Any, after: Any, decays: Sequence[float | None], done: Any, progress: Any
) -> Any:
    """Return the optimizer's state with long averages that keep `decay` of themselves per base step.

    optax divides Adam's second moment by the weight of `count` updates; it is stored so that this gives the
    average over the base steps.
    """
    kinds = {optax.ScaleByAdamState: "nu", optax.ScaleByLionState: "mu"}
    old = [
        x for x in jax.tree.leaves(before, is_leaf=lambda x: type(x) in kinds) if type(x) in kinds
    ]
    pairs = iter(zip(old, (*decays, *[None] * len(old)), strict=False))

    def aged(node: Any) -> Any:
        if type(node) not in kinds:
            return node
        previous, decay = next(pairs)
        if decay is None:
            return node
        name, kept = kinds[type(node)], decay ** (progress - done)

        def mixed(x: Any, new: Any) -> Any:
            was = now = 1.0
            if name == "nu":
                count = jnp.asarray(node.count, jnp.float64)
                started = (count > 1) & (done > 0)
                was = jnp.where(
                    started,
                    (1 - decay ** (count - 1)) / (1 - decay ** jnp.where(started, done, 1)),
                    1,
                )
                now = (1 - decay**count) / (1 - decay**progress)
            newest = (new - decay * x) / (1 - decay)
            return now * (kept * x / was + (1 - kept) * newest)

        values = jax.tree.map(mixed, getattr(previous, name), getattr(node, name))
        return node._replace(**{name: values})

    return jax.tree.map(aged, after, is_leaf=lambda x: type(x) in kinds)


def _parted(params: Any, trainable: Callable[[Any], Any] | None) -> tuple[Any, Any]:
    mask = jax.tree.map(lambda _: True, params) if trainable is None else trainable(params)
    kept = jax.tree.map(lambda m, x: x if m else None, mask, params)
    return kept, jax.tree.map(lambda m, x: None if m else x, mask, params)


def _joined(kept: Any, rest: Any) -> Any:
    return jax.tree.map(lambda a, b: b if a is None else a, kept, rest, is_leaf=lambda x: x is None)


# -- a cell ------------------------------------------------------------------------------------------


def outcome(row: Row, column: Column, workdir: pathlib.Path) -> Outcome:
    """Run a cell."""
    updates: list[Update] = []
    with settings(jax_enable_x64=True, jax_numpy_rank_promotion="allow"):
        try:
            with settings(**switches_for(row, column)):
                got = trained(row, column, workdir, updates)
        except Exception as error:
            return failed(error, has_begun=bool(updates))
        wanted, first = plain(row, column, updates if column.is_large else None)
    gain = max((float(np.max(update.gains)) for update in updates), default=1.0)
    return dataclasses.replace(compared(got, wanted, first), gain=gain)


def failed(error: BaseException, *, has_begun: bool) -> Outcome:
    """Return whether an error is a sentence of ours before the first step, or anything else."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    is_ours = type(error).__module__.startswith(jg.__name__) or type(error) in (
        ValueError,
        TypeError,
    )
    is_ours &= PACKAGE in pathlib.Path(last.filename).parents and not has_begun
    text = " ".join(f"{type(error).__name__}: {error}".split())[:900]
    if not is_ours:
        ours = [frame for frame in frames if PACKAGE in pathlib.Path(frame.filename).parents]
        text += "".join(
            f" [{pathlib.Path(f.filename).name}:{f.lineno}]" for f in (*ours[-1:], last)
        )
    return Outcome(kind="refused" if is_ours else "crashed", what=text)


def compared(got: Trained, wanted: Trained, first: Any) -> Outcome:
    """Compare where a run ended with where the loop did."""
    moved = jax.tree.map(lambda a, b: _largest(a, b), wanted.params, first)
    whole = max(jax.tree.leaves(moved), default=0.0)
    if not whole > 1e-6:
        return Outcome(
            kind="crashed", what=f"the plain loop moved by {whole}: the row shows nothing"
        )
    worst, where = 0.0, ""
    for part in ("params", "model_state"):
        a, b = getattr(got, part), getattr(wanted, part)
        if jax.tree.structure(a) != jax.tree.structure(b):
            return Outcome(kind="differs", difference=np.inf, what=f"the structure of {part}")
        for (path, x), y in zip(
            jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
        ):
            if part == "params":
                size = max(_own(moved, path), SMALLEST * whole)
            else:
                size = max(np.max(np.abs(np.asarray(y, np.float64)), initial=0.0), SMALLEST)
            difference = _largest(x, y) / size
            if not difference <= worst:
                worst, where = difference, f"{part}{jax.tree_util.keystr(path)}"
    kind = "equal" if worst <= TOLERANCE else "differs"
    return Outcome(kind=kind, difference=worst, what=where)


def _largest(a: Any, b: Any) -> float:
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    both = np.asarray(a), np.asarray(b)
    wide = [x.astype(np.result_type(x.dtype, np.float64)) for x in both]
    return float(np.max(np.abs(wide[0] - wide[1]), initial=0.0))


def _own(tree: Any, path: Any) -> float:
    return dict(jax.tree_util.tree_leaves_with_path(tree))[path]
