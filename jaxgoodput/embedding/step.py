"""A training step that reads rows of tables and updates only these rows. The functions are pure.

    step = jax.jit(row_step(loss, tables, tx), donate_argnums=(0, 1, 2))
    slots, params, opt_state, value = step(placed.slots, params, opt_state, placed.lookups, placed.batch)

`loss(params, rows, batch)` gets the embeddings of each table with the shape of its ids plus one axis.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from jaxgoodput.embedding.optimizers import RowOptimizer
from jaxgoodput.embedding.rows import EMBEDDING, RowLayout
from jaxgoodput.embedding.table import Lookup

Slots = Mapping[str, Array]
Lookups = Mapping[str, Lookup]


@runtime_checkable
class HasRows(Protocol):
    """The properties of a table that a training step needs; `TieredTable` has them."""

    layout: RowLayout
    optimizer: RowOptimizer


def read_rows(slots: Array, lookup: Lookup, layout: RowLayout) -> dict[str, Array]:
    """Return, by field, the rows that a batch reads, each row once."""
    return layout.unpack(slots.at[lookup.slots].get(mode="clip"))


def write_rows(slots: Array, lookup: Lookup, layout: RowLayout, fields: dict[str, Array]) -> Array:
    """Return the slots with new values for the rows that a batch reads."""
    return slots.at[lookup.slots].set(layout.pack(fields), mode="drop", unique_indices=True)


def row_step(
    loss: Callable[[PyTree, dict[str, Array], Any], Array],
    tables: Mapping[str, HasRows],
    tx: optax.GradientTransformation,
    *,
    factor: float = 1.0,
) -> Callable[..., tuple[dict[str, Array], PyTree, PyTree, Array]]:
    """Return a training step for tables and parameters; use this to train tables without a Trainer.

    The result is `step(slots, params, opt_state, lookups, batch) -> (slots, params, opt_state, loss)`, for
    you to jit. `tx` updates the parameters. Rows use their table's optimizer; `factor` multiplies its
    learning rate.
    """

    def step(slots: Slots, params: PyTree, opt_state: PyTree, lookups: Lookups, batch: Any):
        rows = jax.lax.optimization_barrier(
            {n: read_rows(slots[n], lookups[n], tables[n].layout) for n in tables}
        )
        embeddings = {n: fields[EMBEDDING].astype(jnp.float32) for n, fields in rows.items()}

        def loss_of(params: PyTree, embeddings: dict[str, Array]) -> Array:
            read = {n: embeddings[n][lookups[n].inverse] for n in tables}
            return loss(params, jax.lax.optimization_barrier(read), batch)

        # The barriers stop the compiler from fusing the row arithmetic with its neighbours. Fused, its
        # rounding would depend on the number of rows. With them, a row has the same bits as in a dense
        # table.
        value, (grads, row_grads) = jax.lax.optimization_barrier(
            jax.value_and_grad(loss_of, (0, 1))(params, embeddings)
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        after = {}
        for name, table in tables.items():
            changed = table.optimizer.update(rows[name], row_grads[name], factor)
            changed = jax.lax.optimization_barrier(changed)
            after[name] = write_rows(slots[name], lookups[name], table.layout, changed)
        return after, optax.apply_updates(params, updates), opt_state, value

    return step
