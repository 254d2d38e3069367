"""Flax models as pure functions: `from_linen` and `from_nnx`, for use inside a `Trainer`.

model = from_linen(ResNet())
class Images(Trainer):
    def init(self, key): return model.init(key, jnp.zeros((1, 32, 32, 3)))
    def loss_and_state(self, params, model_state, batch, key):
        logits, model_state = model.train(params, model_state, key, batch["image"])
        return cross_entropy(logits, batch["label"]), model_state
    def metrics_with_state(self, params, model_state, batch):
        logits = model.predict(params, model_state, batch["image"])
        ...
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from jaxtyping import Array, PyTree

from jaxgoodput.train.state import Variables


@dataclass(frozen=True)
class Model:
    """A flax model as three pure functions of parameters and mutable state."""

    init: Callable[..., Variables]  # (key, *inputs) -> Variables
    train: Callable[..., tuple[Any, PyTree]]  # (params, model_state, key, *inputs) -> out, state
    predict: Callable[..., Any]  # (params, model_state, *inputs) -> out


def from_linen(
    module: nn.Module,
    *,
    train_kwargs: Mapping[str, Any] | None = None,
    predict_kwargs: Mapping[str, Any] | None = None,
    random: tuple[str, ...] = ("dropout",),
) -> Model:
    """A linen module. Collections other than `params` are its mutable state.

    `train_kwargs` and `predict_kwargs` are passed to the call in either mode, such as
    `{"train": True}` and `{"train": False}`; `random` names the random streams of a training call.
    Partitioning metadata is taken off.
    """
    in_training, in_prediction = dict(train_kwargs or {}), dict(predict_kwargs or {})

    def keys(key: Array) -> dict[str, Array]:
        return {name: jax.random.fold_in(key, i) for i, name in enumerate(random)}

    def init(key: Array, *inputs: Any) -> Variables:
        first, rest = jax.random.split(key)
        variables = module.init({"params": first, **keys(rest)}, *inputs, **in_prediction)
        variables = dict(nn.unbox(variables))
        params = variables.pop("params")
        return Variables(params=params, model_state=variables)

    def train(params: PyTree, model_state: PyTree, key: Array, *inputs: Any) -> tuple[Any, PyTree]:
        out, updated = module.apply(
            {"params": params, **model_state},
            *inputs,
            **in_training,
            rngs=keys(key),
            mutable=list(model_state),
        )
        return out, {**model_state, **updated}

    def predict(params: PyTree, model_state: PyTree, *inputs: Any) -> Any:
        return module.apply({"params": params, **model_state}, *inputs, **in_prediction)

    return Model(init=init, train=train, predict=predict)


def from_nnx(
    make: Callable[[nnx.Rngs], nnx.Module], *, random: tuple[str, ...] = ("dropout",)
) -> Model:
    """An nnx module, given the function that makes it: `from_nnx(lambda rngs: Net(rngs=rngs))`.

    `nnx.Param` variables are the parameters, all others but random streams the mutable state. A
    training call is in `train()` mode with its streams seeded from its key, a prediction in `eval()`.
    """
    blank = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph, *_ = nnx.split(blank, nnx.Param, nnx.RngState, ...)

    def init(key: Array, *inputs: Any) -> Variables:
        del inputs  # an nnx module knows its shapes
        _, params, _, rest = nnx.split(make(nnx.Rngs(key)), nnx.Param, nnx.RngState, ...)
        return Variables(params=nnx.to_pure_dict(params), model_state=nnx.to_pure_dict(rest))

    def build(params: PyTree, model_state: PyTree, key: Array) -> Any:
        # Streams are part of the module but not of the training state: every call seeds them.
        fresh = make(nnx.Rngs(params=key, **{name: key for name in random}))
        _, own_params, streams, own_rest = nnx.split(fresh, nnx.Param, nnx.RngState, ...)
        nnx.replace_by_pure_dict(own_params, params)
        nnx.replace_by_pure_dict(own_rest, model_state)
        model = nnx.merge(graph, own_params, streams, own_rest)
        seeds: dict[str, Any] = {n: jax.random.fold_in(key, i) for i, n in enumerate(random)}
        nnx.reseed(model, **seeds)
        return model

    def train(params: PyTree, model_state: PyTree, key: Array, *inputs: Any) -> tuple[Any, PyTree]:
        model = build(params, model_state, key)
        model.train()
        out = model(*inputs)
        *_, rest = nnx.split(model, nnx.Param, nnx.RngState, ...)
        return out, nnx.to_pure_dict(rest)

    def predict(params: PyTree, model_state: PyTree, *inputs: Any) -> Any:
        model = build(params, model_state, jax.random.key(0))
        model.eval()
        return model(*inputs)

    return Model(init=init, train=train, predict=predict)
