"""The models of the exactness bench: small, in float64, one for each thing that users put into a model."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxgoodput as jg

WIDTH, HIDDEN, OUTPUTS, TOKENS = (
    16,
    64,
    4,
    6,
)  # WIDTH * HIDDEN is the smallest matrix that fsdp cuts
NUM_SAMPLES = 512
F64 = {"dtype": jnp.float64, "param_dtype": jnp.float64}


def samples() -> dict[str, np.ndarray]:
    """Return the data set of all rows; each model reads the fields that it needs."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(NUM_SAMPLES, WIDTH))
    lengths = rng.integers(1, TOKENS + 1, size=NUM_SAMPLES)
    return {
        "x": x,
        "y": np.tanh(x @ rng.normal(size=(WIDTH, OUTPUTS))),
        "tokens": rng.integers(0, HIDDEN, size=(NUM_SAMPLES, TOKENS)).astype(np.int32),
        "kept": (np.arange(TOKENS) < lengths[:, None]).astype(np.float64),
    }


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a row trains."""

    init: Callable[[Any], Any]
    """Function from a key to the parameters, or to `jg.Variables`."""
    loss: Callable[..., Any]
    """(params, batch, key) -> loss; with state, (params, model_state, batch, key) -> (loss, model_state)."""
    has_state: bool = False
    plain: Callable[..., Any] | None = None
    """What a plain loop calls instead of `loss`, with no help of this package; None for `loss` itself."""
    summed: tuple[str, ...] = ()
    """Leaves of the state that are added up over replicas."""


def waves(*shape: int, scale: float = 0.3) -> jax.Array:
    """Return numbers that look random and compile at once."""
    size = int(np.prod(shape))
    return scale * jnp.sin(jnp.arange(1.0, 1.0 + size, dtype=jnp.float64)).reshape(shape)


def squares(out: jax.Array, batch: Any) -> jax.Array:
    """Return the squared error of each sample."""
    return jnp.mean((out - batch["y"]) ** 2, axis=-1)


# -- plain functions ---------------------------------------------------------------------------------


def two_layers(key: Any) -> dict[str, Any]:
    """Return a matrix that is cut, a vector and a matrix that are not."""
    del key
    return {
        "up": {"kernel": waves(WIDTH, HIDDEN), "bias": jnp.zeros(HIDDEN)},
        "down": {"kernel": waves(HIDDEN, OUTPUTS, scale=0.1)},
    }


def hidden(params: Any, batch: Any) -> jax.Array:
    return jnp.tanh(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"][None])


def predicted(params: Any, batch: Any) -> jax.Array:
    return hidden(params, batch) @ params["down"]["kernel"]


PLAIN = Model(
    init=two_layers, loss=lambda params, batch, key: squares(predicted(params, batch), batch)
)
MEAN = Model(
    init=two_layers, loss=lambda p, batch, key: jnp.mean(squares(predicted(p, batch), batch))
)


def _weighted(params: Any, batch: Any, key: Any) -> jg.Loss:
    kept = batch["kept"].sum(axis=1)
    return jg.Loss(squares(predicted(params, batch), batch) * kept, kept, {"kept": kept})


def _weighted_in_total(params: Any, batch: Any, key: Any) -> jg.Loss:
    loss = _weighted(params, batch, key)
    return jg.Loss(jnp.sum(loss.sum), jnp.sum(loss.weight))


WEIGHTED = Model(init=two_layers, loss=_weighted)
WEIGHTED_IN_TOTAL = Model(init=two_layers, loss=_weighted_in_total)


def _stopped(params: Any, batch: Any, key: Any) -> jax.Array:
    return squares(predicted({**params, "up": jax.lax.stop_gradient(params["up"])}, batch), batch)


def _mean_of_tokens(params: Any, batch: Any, key: Any) -> jax.Array:
    kept = batch["kept"].sum(axis=1)
    return jnp.sum(squares(predicted(params, batch), batch) * kept) / jnp.sum(kept)


MEAN_OF_TOKENS = Model(init=two_layers, loss=_mean_of_tokens)
STOPPED = Model(init=two_layers, loss=_stopped)


def _dropped(params: Any, batch: Any, key: Any) -> jax.Array:
    h = hidden(params, batch)
    h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0.0)
    return squares(h @ params["down"]["kernel"], batch)


DROPOUT = Model(init=two_layers, loss=_dropped)


def _odd_tree(key: Any) -> Any:
    return {
        "layers": [two_layers(key), ()],
        "empty": {},
        "none": None,
        "scale": jnp.ones(()),
        "no rows": jnp.zeros((0, 3)),
        "table": jnp.arange(WIDTH, dtype=jnp.int32),
    }


def _odd_loss(params: Any, batch: Any, key: Any) -> jax.Array:
    ordered = {**batch, "x": batch["x"][:, params["table"]]}
    nothing = jnp.sum(params["no rows"])
    return squares(predicted(params["layers"][0], ordered) * params["scale"] + nothing, batch)


ODD_TREE = Model(init=_odd_tree, loss=_odd_loss)


def but_integers(params: Any) -> Any:
    """Return which leaves have a gradient."""
    return jax.tree.map(lambda x: bool(jnp.issubdtype(x.dtype, jnp.inexact)), params)


def _complex_init(key: Any) -> Any:
    return {**two_layers(key), "phase": waves(HIDDEN) + 1j * waves(HIDDEN)[::-1]}


def _complex_loss(params: Any, batch: Any, key: Any) -> jax.Array:
    turned = hidden(params, batch) * params["phase"][None]
    return squares((turned.real + 0.5 * turned.imag) @ params["down"]["kernel"], batch)


COMPLEX = Model(init=_complex_init, loss=_complex_loss)


def _tied_init(key: Any) -> Any:
    return {"embedding": waves(HIDDEN, WIDTH), "head": waves(WIDTH, WIDTH)}


def _tied_loss(params: Any, batch: Any, key: Any) -> jg.Loss:
    read = params["embedding"][batch["tokens"]]
    logits = jnp.tanh(read @ params["head"]) @ params["embedding"].T
    targets = jnp.roll(batch["tokens"], -1, axis=1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jg.Loss(jnp.sum(losses * batch["kept"], axis=1), jnp.sum(batch["kept"], axis=1))


TIED = Model(init=_tied_init, loss=_tied_loss)


def _scanned_init(key: Any) -> Any:
    return {
        "layers": waves(3, WIDTH, 4 * WIDTH),
        "out": waves(3, 4 * WIDTH, WIDTH),
        "head": waves(WIDTH, 4),
    }


def _scanned(layer_of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Model:
    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        into, out = weights
        return x + jnp.tanh(x @ into) @ out / HIDDEN, None

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        x, _ = jax.lax.scan(layer_of(layer), batch["x"], (params["layers"], params["out"]))
        return squares(x @ params["head"], batch)

    return Model(init=_scanned_init, loss=loss)


SCANNED = _scanned(lambda layer: layer)
REMAT = _scanned(lambda layer: jax.checkpoint(layer))


# -- states that are not Flax's ------------------------------------------------------------------------


def _with_state(
    state: Any, change: Callable[[Any, Any], Any], summed: tuple[str, ...] = ()
) -> Model:
    def loss(params: Any, model_state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        return squares(predicted(params, batch), batch), change(model_state, batch)

    def init(key: Any) -> jg.Variables:
        return jg.Variables(params=two_layers(key), model_state=state(), summed=summed)

    return Model(init=init, loss=loss, has_state=True, summed=summed)


RUNNING_MEAN = _with_state(
    lambda: {"mean": jnp.zeros(WIDTH), "calls": jnp.zeros((), jnp.int32)},
    lambda s, batch: {
        "mean": 0.9 * s["mean"] + 0.1 * batch["x"].mean(axis=0),
        "calls": s["calls"] + 1,
    },
)


def _counted(s: Any, batch: Any) -> Any:
    return {
        "tokens": s["tokens"] + batch["kept"].sum(),
        "seen": s["seen"].at[batch["tokens"]].add(1),
    }


def _uncounted() -> Any:
    return {"tokens": jnp.zeros(()), "seen": jnp.zeros(HIDDEN, jnp.int32)}


COUNTS = _with_state(_uncounted, _counted, summed=("tokens", "seen"))
UNDECLARED_COUNTS = _with_state(_uncounted, _counted)


# -- Flax ----------------------------------------------------------------------------------------------


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.Dense(HIDDEN, **F64)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.8, **F64)(x))
        return nn.Dense(OUTPUTS, **F64)(x)


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.LayerNorm(**F64)(nn.tanh(nn.Dense(HIDDEN, **F64)(x)))
        return nn.Dense(OUTPUTS, **F64)(nn.Dropout(0.2, deterministic=not train)(x))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return x + nn.Dense(WIDTH, **F64)(nn.tanh(nn.Dense(HIDDEN, **F64)(x))), None


class Stacked(nn.Module):
    """Scanned and rematerialised layers."""

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        scanned = nn.scan(
            nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        x, _ = scanned(name="layers")(x, None)
        return nn.Dense(OUTPUTS, **F64)(x)


class Experts(nn.Module):
    """A mixture of two experts, which sows how unevenly it used them."""

    settings: Any = None

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        shares = nn.softmax(nn.Dense(2, **F64)(x))
        self.sow("losses", "balance", jnp.sum(shares.mean(axis=0) ** 2), **(self.settings or {}))
        self.sow("intermediates", "shares", shares)
        each = [nn.Dense(OUTPUTS, **F64)(nn.tanh(nn.Dense(HIDDEN, **F64)(x))) for _ in range(2)]
        return jnp.einsum("nek,ne->nk", jnp.stack(each, axis=1), shares)


ADDING = {"reduce_fn": jnp.add, "init_fn": lambda: jnp.zeros(())}


def of_linen(module: nn.Module, **options: Any) -> Model:
    """Return a linen model that is called with `train=`, whose sown losses are added to the loss."""
    made = jg.from_linen(
        module, train_kwargs={"train": True}, predict_kwargs={"train": False}, **options
    )

    def init(key: Any) -> jg.Variables:
        return made.init(key, jnp.zeros((1, WIDTH)))

    def loss(params: Any, model_state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        out, model_state = made.train(params, model_state, key, batch["x"])
        return squares(out, batch) + _sown(model_state), model_state

    def plain(params: Any, model_state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        out, changed = module.apply(
            {"params": params, **model_state},
            batch["x"],
            train=True,
            rngs={"dropout": jax.random.fold_in(key, 0)},
            mutable=["batch_stats", "losses"],
        )
        kept = {name: changed[name] for name in model_state}
        return squares(out, batch) + _sown(changed), kept

    return Model(init=init, loss=loss, has_state=True, plain=plain)


def _sown(found: Any) -> Any:
    return 0.1 * sum(jax.tree.leaves(found.get("losses", ())))


LINEN_BATCH_NORM = of_linen(Normalised())
LINEN_DROPOUT = of_linen(Dropping())
LINEN_STACKED = of_linen(Stacked())
LINEN_SOWS = of_linen(Experts())
LINEN_SOWS_SUMS = of_linen(Experts(settings=ADDING), sown=("losses",))


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, **F64, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, momentum=0.8, **F64, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, OUTPUTS, **F64, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


class NnxExperts(nnx.Module):
    """The same in nnx."""

    def __init__(self, rngs: nnx.Rngs):
        self.router = nnx.Linear(WIDTH, 2, **F64, rngs=rngs)
        self.up = nnx.List([nnx.Linear(WIDTH, HIDDEN, **F64, rngs=rngs) for _ in range(2)])
        self.down = nnx.List([nnx.Linear(HIDDEN, OUTPUTS, **F64, rngs=rngs) for _ in range(2)])

    def __call__(self, x: Any) -> Any:
        shares = nnx.softmax(self.router(x))
        self.sow(nnx.Intermediate, "balance", jnp.sum(shares.mean(axis=0) ** 2))
        each = [down(nnx.tanh(up(x))) for up, down in zip(self.up, self.down, strict=True)]
        return jnp.einsum("nek,ne->nk", jnp.stack(each, axis=1), shares)


def _nnx_sows() -> Model:
    made = functools.cache(
        lambda: jg.from_nnx(lambda rngs: NnxExperts(rngs), sown=(nnx.Intermediate,))
    )

    def loss(params: Any, model_state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        out, model_state = made().train(params, model_state, key, batch["x"])
        return squares(out, batch) + 0.1 * sum(model_state["balance"]), model_state

    def plain(params: Any, model_state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        module = NnxExperts(nnx.Rngs(0))
        own = nnx.state(module, nnx.Param)
        nnx.replace_by_pure_dict(own, params)
        nnx.update(module, own)
        out, sown = nnx.capture(module, nnx.Intermediate)(batch["x"])
        return squares(out, batch) + 0.1 * sum(jax.tree.leaves(sown)), model_state

    return Model(init=lambda key: made().init(key), loss=loss, has_state=True, plain=plain)


NNX_SOWS = _nnx_sows()


def of_nnx(make: Callable[[nnx.Rngs], nnx.Module]) -> Model:
    """Return an nnx model."""
    made = functools.cache(lambda: jg.from_nnx(make))  # not before x64 is on

    def loss(params: Any, model_state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        out, model_state = made().train(params, model_state, key, batch["x"])
        return squares(out, batch), model_state

    return Model(init=lambda key: made().init(key), loss=loss, has_state=True)


NNX = of_nnx(lambda rngs: NnxNet(rngs))
