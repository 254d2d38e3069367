"""A small model over two tables that are arrays, trained on batches that any other way can be given, too."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgoodput.embedding.hashing import initial_values

SIZES = {"user": (900, 8), "item": (2500, 4)}
NUM_READ = {"user": 1, "item": 3}
SAMPLES, STEPS = 64, 200


def batches(num_batches=STEPS, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(num_batches):
        drawn = {
            name: np.minimum(rng.zipf(1.2, (SAMPLES, NUM_READ[name])) - 1, size - 1)
            for name, (size, _) in SIZES.items()
        }
        yield {**drawn, "label": rng.standard_normal(SAMPLES).astype(np.float32)}


def loss(params, rows, batch):
    x = jnp.concatenate([rows[name].reshape(SAMPLES, -1) for name in sorted(rows)], axis=1)
    hidden = jnp.tanh(x @ params["in"])
    return jnp.mean((hidden @ params["out"] - batch["label"]) ** 2)


def parameters():
    width = sum(NUM_READ[name] * dim for name, (_, dim) in SIZES.items())
    keys = jax.random.split(jax.random.key(0), 2)
    return {"in": jax.random.normal(keys[0], (width, 16)), "out": jax.random.normal(keys[1], (16,))}


def ids_of(batch):
    return {name: batch[name] for name in SIZES}


def dense(optimizer, dtype, num_batches=STEPS):
    """Tables that are arrays of all rows, each changed as a whole where a row was read; and the losses."""
    tables = {
        name: {
            "embedding": jnp.asarray(
                initial_values(np.arange(size), dim, seed=0, scale=0.01)
            ).astype(dtype),
            **{
                field.name: jnp.full(
                    (size, field.width), optimizer.begin()[field.name], field.dtype
                )
                for field in optimizer.fields(dim)
            },
        }
        for name, (size, dim) in SIZES.items()
    }
    tx, params = optax.sgd(0.05), parameters()

    @jax.jit
    def step(tables, params, opt_state, batch):
        wide = {name: table["embedding"].astype(jnp.float32) for name, table in tables.items()}

        def of(params, wide):
            read = jax.lax.optimization_barrier({n: x[batch[n]] for n, x in wide.items()})
            return loss(params, read, batch)

        # As in `row_step`: what the compiler fuses with what decides about roundings.
        value, (grads, row_grads) = jax.lax.optimization_barrier(
            jax.value_and_grad(of, (0, 1))(params, wide)
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        after = {}
        for name, table in tables.items():
            changed = jax.lax.optimization_barrier(optimizer.update(table, row_grads[name], 1.0))
            read = jnp.zeros((len(wide[name]), 1), bool).at[batch[name].ravel()].set(True)
            after[name] = {
                field: jnp.where(read, changed[field].astype(old.dtype), old)
                for field, old in table.items()
            }
        return after, optax.apply_updates(params, updates), opt_state, value

    opt_state, losses = tx.init(params), []
    for batch in batches(num_batches):
        tables, params, opt_state, value = step(tables, params, opt_state, batch)
        losses.append(value)
    return jax.device_get(tables), np.array(jax.device_get(losses))
