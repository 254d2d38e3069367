"""Gradients with axes of kernels swapped are those of the loss as it is written."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxgoodput as jg
from jaxgoodput.engine.gradients import swapped_value_and_grad


def dense(params, x):
    return jax.nn.gelu(x @ params["up"]) @ params["down"]


def heads(params, x):  # a kernel of three axes
    return jnp.einsum(
        "bthk,hkd->btd", jnp.einsum("btd,dhk->bthk", x, params["heads"]), params["mix"]
    )


def tied(params, x):  # used twice, once transposed
    return (x @ params["up"]) @ params["up"].T


def one_axis(params, x):
    return x[:, 0] @ params["up"]


def checkpointed(params, x):
    return jax.checkpoint(dense)(params, x)


def batched(params, x):  # a product with a batch axis of its own
    return jnp.einsum("btd,bde->bte", x, params["each"]) + jax.jit(dense)(params, x)


MODELS = (dense, heads, tied, one_axis, checkpointed, batched)


@pytest.fixture
def params(key):
    shapes = {"up": (6, 8), "down": (8, 6), "heads": (6, 2, 3), "mix": (2, 3, 6), "each": (4, 6, 6)}
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_swapped_gradients_are_the_gradients(model, dtype, params, key):
    x = jax.random.normal(key, (4, 5, 6), dtype)
    params = jax.tree.map(lambda p: p.astype(dtype), params)

    def loss(params, scale):
        out = model(params, x)  # `x` is of the trace around it
        return jnp.sum(jnp.square(out).astype(jnp.float32)) * scale, {"count": jnp.int32(3)}

    def both(params):
        scale = jnp.float32(0.5)
        expected = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, scale)
        return expected, swapped_value_and_grad(loss, argnums=(0, 1))(params, scale)

    expected, found = jax.jit(both)(params)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize("model, names", [(dense, ("up", "down")), (heads, ("heads", "mix"))])
def test_no_product_is_transposed(model, names, params, key):
    x = jax.random.normal(key, (4, 5, 6))
    chosen = {name: params[name] for name in names}

    def loss(params):
        return jnp.sum(jnp.square(model(params, x))), ()

    jaxpr = jax.make_jaxpr(swapped_value_and_grad(loss))(chosen).jaxpr
    last = {out: one.primitive.name for one in jaxpr.eqns for out in one.outvars}
    assert [last[out] for out in jaxpr.outvars[1:]] == ["dot_general", "dot_general"]


class Sequences(jg.Trainer):
    """Layers over two leading axes."""

    def init(self, key):
        up, down = jax.random.split(key)
        return {"up": jax.random.normal(up, (6, 8)), "down": jax.random.normal(down, (8, 6))}

    def loss(self, params, batch, key):
        return jnp.mean(jnp.square(dense(params, batch) - batch), axis=(1, 2))

    def optimizer(self):
        return optax.adam(0.01)

    def dataset(self):
        return np.random.default_rng(0).normal(size=(64, 5, 6)).astype(np.float32)


@pytest.mark.slow
def test_a_trainer_swaps_them_where_it_is_asked_to(tmp_path):
    """Training is the same but for rounding; without asking for it, programs are as they come."""

    def trained(swaps):
        config = jg.Config(
            workdir=str(tmp_path / str(swaps)),
            batch=jg.BatchLimits(base=16, max=16),
            base_steps=12.0,
            policy="fixed",
            execution=jg.Execution(swap_cpu_products=swaps, compilation_cache=None),
            reporting=jg.Reporting(tensorboard=False, progress=False),
            saving=jg.Saving(at_end=False),
        )
        return Sequences(config).fit().params

    plain, swapped = trained(False), trained(True)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain, swapped
    )
