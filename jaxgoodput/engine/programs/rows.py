"""Programs of a step that reads rows of embedding tables and changes only those rows.

A table's slots are not part of the state: they come with every step, donated, and leave it with the batch's
rows changed. For gradients and their noise, the rows of a batch are a leaf of the parameters, with one row
per id of the micro-batch, so one executable serves all batches of a size. `WithRows` holds a tree beside its
rows: parameters, their gradients and scales, and batches, whose `rows` say which row each id reads.

Rows that most batches read, and rows that few batches read, are separate noise groups. The first learn like
the rest of the model; the second hold most of the variance, and a larger batch costs them nothing.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from jaxgoodput._pytree import struct
from jaxgoodput.embedding.plan import Table
from jaxgoodput.embedding.rows import EMBEDDING
from jaxgoodput.embedding.step import read_rows, write_rows
from jaxgoodput.embedding.table import Lookup
from jaxgoodput.engine import step as pure
from jaxgoodput.engine.programs.families import GlobalPrograms
from jaxgoodput.engine.programs.program import Program, SampleShape
from jaxgoodput.engine.state import StepMetrics, Sums, TrainState, cast, split
from jaxgoodput.optim import adaptation
from jaxgoodput.optim.adaptive import AdaptiveOptimizer
from jaxgoodput.optim.noise import leaf_groups
from jaxgoodput.parallel.strategy import Layout

T = TypeVar("T")
OFTEN, SELDOM = "often", "seldom"


@struct
class WithRows:
    """Values for dense parameters (`own`), and for the table rows that a batch reads, by table (`rows`)."""

    own: PyTree
    rows: Mapping[str, Any]


@dataclass(frozen=True)
class RowProblem(pure.Problem):
    """A problem whose loss reads rows of tables. Made by `with_tables`.

    `loss_and_state` gets the rows as `rows=`, and `tx` is a `rows_apart`. A state's parameters have no rows;
    if the loss is only traced for inspection, rows are zeros.
    """

    tables: Mapping[str, Table] = field(default_factory=dict)
    divisors: Mapping[str, Array] | None = None
    """What the tables' optimizers divide row gradients by; None outside a step."""
    is_often: Mapping[str, Array] | None = None
    """Which of a batch's rows are read often, bool `[rows]`; None outside a step."""

    def mask(self, params: PyTree) -> PyTree:
        """Return a tree of bool: which leaves train. Rows of tables always do."""
        if not isinstance(params, WithRows):
            return super().mask(params)
        return WithRows(own=super().mask(params.own), rows=dict.fromkeys(params.rows, True))

    def preconditioner(self, opt_state: PyTree, kept: PyTree) -> PyTree | None:
        """Return what the optimizers multiply gradients by, for parameters and rows."""
        if not isinstance(kept, WithRows):
            return super().preconditioner(opt_state, kept)
        own = super().preconditioner(opt_state, kept.own)
        if not self.preconditioned:
            return None
        if own is None:  # the dense optimizer takes them as they are, the tables' own do not
            own = jax.tree.map(lambda x: jnp.ones(x.shape), kept.own)
        assert self.divisors is not None
        return WithRows(own=own, rows=jax.tree.map(lambda x: 1 / x, self.divisors))

    def apart(self, norms_of: Callable[[pure.Pick], T]) -> T:
        """Return the norms of all leaves; tables come last, with rows read often and others apart."""
        is_often = self.is_often
        if is_often is None:
            return super().apart(norms_of)

        def often(tree: WithRows, fill: float) -> PyTree:
            return {n: jnp.where(is_often[n][:, None], x, fill) for n, x in tree.rows.items()}

        def put_together(whole: Array, of_often: Array) -> Array:
            own, of_tables = whole[: -len(is_often)], whole[-len(is_often) :]
            pairs = jnp.stack([of_often, of_tables - of_often], axis=1)
            return jnp.concatenate([own, pairs.ravel()])

        whole = norms_of(lambda tree, fill: self.moving(tree))
        return jax.tree.map(put_together, whole, norms_of(often))


def as_seen(tree: PyTree) -> PyTree:
    """Return gradients with a leaf for each norm of `RowProblem.apart`: two leaves for each table."""
    if not isinstance(tree, WithRows):
        return tree
    return WithRows(own=tree.own, rows={n: {OFTEN: x, SELDOM: x} for n, x in tree.rows.items()})


def with_tables(problem: pure.Problem, tables: Mapping[str, Table]) -> RowProblem:
    """Return `problem` for steps that read rows; its loss takes `rows=`, embeddings by table."""
    given = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem)}
    loss, tx = problem.loss_and_state, problem.tx

    def loss_and_state(
        params: PyTree, model_state: PyTree, batch: WithRows, key: Array, **asked: Any
    ) -> tuple[Any, PyTree]:
        places = batch.rows
        if isinstance(params, WithRows):
            read = {name: params.rows[name][places[name]] for name in tables}
            params = params.own
        else:
            read = {n: jnp.zeros((*places[n].shape, t.dim)) for n, t in tables.items()}
        # XLA must not fuse reading rows with the loss: see `row_step`.
        read = jax.lax.optimization_barrier(read)
        return loss(params, model_state, batch.own, key, rows=read, **asked)

    def init(params: PyTree) -> PyTree:
        rows = {name: jnp.zeros((1, table.dim)) for name, table in tables.items()}
        together: Any = WithRows(own=params, rows=rows)  # optax's types know only trees of arrays
        return tx.init(together)

    given["loss_and_state"] = loss_and_state
    given["tx"] = AdaptiveOptimizer.of(init, tx.update, tx.decide)
    return RowProblem(**given, tables=tables)


def rows_apart(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wrap `tx` for parameters beside rows. Tables have their own optimizers, so rows get no update here."""
    inner = optax.with_extra_args_support(tx)

    # optax's types know only trees of arrays.
    def init(params: Any) -> PyTree:
        return inner.init(params.own)

    def update(updates: Any, state: PyTree, params: Any = None, **extra: Any) -> tuple[Any, PyTree]:
        own, state = inner.update(
            updates.own, state, None if params is None else params.own, **extra
        )
        return WithRows(own=own, rows={name: jnp.zeros(()) for name in updates.rows}), state

    return optax.GradientTransformationExtraArgs(init, update)


class RowPrograms(GlobalPrograms):
    """`GlobalPrograms` whose steps also take the slots of tables, and the places of a batch's rows in them.

    Every device has all slots, reads the rows of its part of the batch, and changes all rows of the batch.
    """

    problem: RowProblem

    def __init__(self, problem: RowProblem, layout: Layout, **kwargs: Any):
        super().__init__(problem, layout, **kwargs)
        self.tables = problem.tables

    def rehearsals(self, *, accumulate: bool) -> tuple[int, ...]:
        """Return no batches to rehearse: devices have no room for a second set of slots."""
        return ()

    @cached_property
    def param_groups(self) -> tuple[str, ...]:
        """Names of the parameter groups whose noise is measured separately: each table adds two."""
        rows = {n: jax.ShapeDtypeStruct((1, t.dim), jnp.float32) for n, t in self.tables.items()}
        kept = self.problem.moving(WithRows(own=self._kept, rows=rows))
        return leaf_groups(as_seen(kept))[0]

    def abstract_slots(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the slots (rows on the device) of all tables as abstract arrays, on every device."""
        whole = self.layout.replicated

        def one(table: Table) -> jax.ShapeDtypeStruct:
            shape = (table.num_slots, table.layout.num_words)
            return jax.ShapeDtypeStruct(shape, jnp.uint32, sharding=whole)

        return {name: one(table) for name, table in self.tables.items()}

    def num_rows(self, shape: SampleShape) -> dict[str, int]:
        """Return how many rows of each table a micro-batch may read: one per id."""
        batch = shape.batch(self.layout.num_replicas * shape.micro_batch_size)
        return {
            name: min(math.prod(batch.rows[name].shape), table.num_slots)
            for name, table in self.tables.items()
        }

    def abstract_lookups(self, shape: SampleShape) -> dict[str, Lookup]:
        """Return the abstract slots of a micro-batch's rows, and which of them are read often."""
        whole = self.layout.replicated
        return {
            name: Lookup(
                slots=jax.ShapeDtypeStruct((count,), jnp.int32, sharding=whole),
                inverse=(),
                is_often=jax.ShapeDtypeStruct((count,), jnp.bool_, sharding=whole),
            )
            for name, count in self.num_rows(shape).items()
        }

    def step(self, shape: SampleShape, *, measure: bool) -> Program:
        """Build the step of one micro-batch; donates state and slots.

        It goes from (state, key, slots, lookups, batch, mask, control) to (state, slots, packed metrics).
        """

        def run(state: TrainState, slots: Any, lookups: Any, *inputs: PyTree):
            rows = self._read(slots, lookups)
            problem = self._knowing(rows, lookups)
            begun = self._begun(problem, state, rows, measure=measure)
            batch = self._split(inputs)[0]
            total = self._all_rows(begun, batch, None, measure=False, alone=True)
            # Measuring must not change how gradients are compiled.
            total = jax.lax.optimization_barrier(total)
            if measure:
                part = self._part(begun, *batch)
                total = pure.in_two(problem, total, part, begun[1], cut=False)
            state, slots, metrics = self._changed(
                problem, state, slots, lookups, rows, total, measure
            )
            return state, slots, self._packed(metrics, inputs)

        slots, whole = self.abstract_slots(), self.layout.replicated
        batch = (*self.abstract_batch(shape), *self.abstract_control())
        inputs = (slots, self.abstract_lookups(shape), *batch)
        return self.keyless.program(run, (0, 2), inputs, (dict.fromkeys(slots, whole), whole))

    # -- inside a program --------------------------------------------------------------------------

    def _read(self, slots: Any, lookups: Any) -> dict[str, dict[str, Array]]:
        """Read the fields of a micro-batch's rows from the slots."""
        return jax.lax.optimization_barrier(
            {n: read_rows(slots[n], lookups[n], t.layout) for n, t in self.tables.items()}
        )

    def _begun(
        self, problem: RowProblem, state: TrainState, rows: Any, *, measure: bool
    ) -> tuple[PyTree, ...]:
        """Return values in the form of `abstract_work`, with a micro-batch's rows among the parameters."""
        params = WithRows(own=state.params, rows=_embeddings(rows))
        scale = ()
        if measure and self.problem.preconditioned:
            kept, _ = split(params, self.problem.mask(params))
            scale = problem.preconditioner(state.opt_state, kept)
        params = cast(params, self.problem.compute_dtype)
        return params, scale, state.model_state, state.key, state.step

    def _knowing(self, rows: Any, lookups: Any) -> RowProblem:
        """Return the problem with the divisors of these rows' gradients, and which rows are read often."""
        found = {name: t.optimizer.divisor(rows[name]) for name, t in self.tables.items()}
        is_often = {name: lookups[name].is_often for name in self.tables}
        return dataclasses.replace(self.problem, divisors=found, is_often=is_often)

    def _changed(
        self,
        problem: RowProblem,
        state: TrainState,
        slots: Any,
        lookups: Any,
        rows: Any,
        total: Sums,
        measure: bool,
    ) -> tuple[TrainState, dict[str, Array], StepMetrics[Array]]:
        """Return the next state, the slots with a batch's rows changed, and metrics."""
        total = jax.lax.optimization_barrier(total)
        params = WithRows(own=state.params, rows=_embeddings(rows))
        before = dataclasses.replace(state, params=params)
        after, metrics = pure.update(problem, before, total, measure=measure)
        share = 1.0 / jnp.maximum(total.weight, 1e-30)
        factor = adaptation.gain(after.opt_state)[0]
        changed_slots = {}
        for name, table in self.tables.items():
            grads = jax.lax.optimization_barrier(total.grads.rows[name] * share)
            changed = table.optimizer.update(rows[name], grads, factor)
            changed = jax.lax.optimization_barrier(changed)
            # A refused update is written outside the slots, which drops it.
            own = lookups[name].slots
            outside = table.num_slots + jnp.arange(len(own), dtype=jnp.int32)
            places = Lookup(slots=jnp.where(metrics.is_finite, own, outside), inverse=())
            changed_slots[name] = write_rows(slots[name], places, table.layout, changed)
        return dataclasses.replace(after, params=after.params.own), changed_slots, metrics


def _embeddings(rows: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    return {name: fields[EMBEDDING].astype(jnp.float32) for name, fields in rows.items()}
