"""Flax models as pure functions, for use in a `Trainer`: `from_linen` and `from_nnx`.

model = from_linen(ResNet())
class Images(Trainer):
    def init(self, key): return model.init(key, jnp.zeros((1, 32, 32, 3)))
    def loss_and_state(self, params, model_state, batch, key):
        logits, model_state = model.train(params, model_state, key, batch["image"])
        return cross_entropy(logits, batch["label"]), model_state
    def metrics_with_state(self, params, model_state, batch):
        logits = model.predict(params, model_state, batch["image"])
        ...

A model's partitioning metadata is removed from its parameters and becomes `Variables.specs`. Dimension names
other than "fsdp" and "tensor" are logical; `axes` maps them to mesh axes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from jaxgoodput.engine.state import Variables
from jaxgoodput.parallel.partition import path_name
from jaxgoodput.parallel.strategy import MODEL_AXES

Axes = Mapping[str, str | None]  # logical name -> "fsdp", "tensor" or None
Specs = tuple[tuple[str, PartitionSpec], ...]


@dataclass(frozen=True)
class Model:
    """A flax model as three pure functions of parameters and mutable state."""

    init: Callable[..., Variables]
    """`(key, *inputs) -> Variables`."""
    train: Callable[..., tuple[Any, PyTree]]
    """`(params, model_state, key, *inputs) -> (output, model_state)`."""
    predict: Callable[..., Any]
    """`(params, model_state, *inputs) -> output`."""


def from_linen(
    module: nn.Module,
    *,
    train_kwargs: Mapping[str, Any] | None = None,
    predict_kwargs: Mapping[str, Any] | None = None,
    random: tuple[str, ...] = ("dropout",),
    axes: Axes | None = None,
) -> Model:
    """Make pure functions of a linen module. Collections other than `params` are its mutable state.

    `train_kwargs` and `predict_kwargs` are passed to the module in training and in prediction, such as
    `{"train": True}` and `{"train": False}`. `random` names the random streams of a training call.

    Metadata of `nn.with_partitioning` and `nn.with_logical_partitioning` becomes `Variables.specs`. `axes`
    maps each logical name to "fsdp", "tensor" or None. `init` raises ValueError if a name is missing in
    `axes`, or if two dimensions of a parameter get the same axis.
    """
    known = _checked(axes)
    in_training, in_prediction = dict(train_kwargs or {}), dict(predict_kwargs or {})

    def keys(key: Array) -> dict[str, Array]:
        return {name: jax.random.fold_in(key, i) for i, name in enumerate(random)}

    def init(key: Array, *inputs: Any) -> Variables:
        first, rest = jax.random.split(key)
        with nn.intercept_methods(_dense_without_mesh):
            variables = module.init({"params": first, **keys(rest)}, *inputs, **in_prediction)
        specs = _linen_specs(variables["params"], known)
        variables = dict(nn.unbox(variables))
        params = variables.pop("params")
        return Variables(params=params, model_state=variables, specs=specs)

    def train(params: PyTree, model_state: PyTree, key: Array, *inputs: Any) -> tuple[Any, PyTree]:
        with nn.intercept_methods(_dense_without_mesh):
            out, updated = module.apply(
                {"params": params, **model_state},
                *inputs,
                **in_training,
                rngs=keys(key),
                mutable=list(model_state),
            )
        return out, {**model_state, **updated}

    def predict(params: PyTree, model_state: PyTree, *inputs: Any) -> Any:
        with nn.intercept_methods(_dense_without_mesh):
            return module.apply({"params": params, **model_state}, *inputs, **in_prediction)

    return Model(init=init, train=train, predict=predict)


def from_nnx(
    make: Callable[[nnx.Rngs], nnx.Module],
    *,
    random: tuple[str, ...] = ("dropout",),
    axes: Axes | None = None,
) -> Model:
    """Make pure functions of an nnx module, from the function that creates it.

        model = from_nnx(lambda rngs: Net(rngs=rngs))

    `nnx.Param` variables are the parameters; all others, except random streams, are the mutable state. A
    training call uses `train()` mode, with random streams seeded from its key; a prediction uses `eval()`
    mode.

    Metadata (`nnx.with_partitioning`, `nnx.Param(..., out_sharding=...)`) becomes `Variables.specs`; `axes`
    and errors are the same as for `from_linen`. The module is created without a mesh: the trainer places it.
    """
    known = _checked(axes)

    def made(rngs: nnx.Rngs) -> nnx.Module:
        # Eager sharding would need a mesh with axes named as in the metadata.
        with nnx.use_eager_sharding(False):
            return make(rngs)

    blank = nnx.eval_shape(lambda: made(nnx.Rngs(0)))
    graph, *_ = nnx.split(blank, nnx.Param, nnx.RngState, ...)

    def init(key: Array, *inputs: Any) -> Variables:
        del inputs  # an nnx module already has its shapes
        _, params, _, rest = nnx.split(made(nnx.Rngs(key)), nnx.Param, nnx.RngState, ...)
        return Variables(
            params=nnx.to_pure_dict(params),
            model_state=nnx.to_pure_dict(rest),
            specs=_nnx_specs(params, known),
        )

    def build(params: PyTree, model_state: PyTree, key: Array) -> Any:
        # Random streams are part of the module but not of the training state, so every call seeds them.
        fresh = made(nnx.Rngs(params=key, **{name: key for name in random}))
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


def _dense_without_mesh(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    """Intercept linen's methods so that a `DenseGeneral` sees no mesh.

    On every call, flax evaluates the shape that a parameter's initializer returns. The initializer of
    `DenseGeneral` unboxes a flattened kernel before it reshapes it. If a mesh is set, unboxing constrains the
    flattened kernel by metadata of another rank, which is an error (flax issue 3676). The layer itself needs
    no mesh, because the surrounding computation constrains its result.
    """
    if isinstance(context.module, nn.DenseGeneral):
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return call(*args, **kwargs)
    return call(*args, **kwargs)


def _linen_specs(params: PyTree, axes: Axes) -> Specs:
    """Return the PartitionSpecs of the parameters that have partitioning metadata, by name."""

    def is_box(x: Any) -> bool:
        return isinstance(x, nn.meta.AxisMetadata)

    found = []
    for path, box in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_box):
        if isinstance(box, nn.Partitioned) and box.names is not None:
            name, own = path_name(path), getattr(box, "rules", None)
            found.append((name, _spec(name, box.names, axes, own)))
    return tuple(found)


def _nnx_specs(params: Any, axes: Axes) -> Specs:
    """Return the PartitionSpecs of the variables that have `out_sharding`, by name."""
    found = []
    for path, variable in nnx.to_flat_state(params):
        metadata = variable.get_metadata()
        names = metadata.get("out_sharding")
        if names is not None:
            name = "/".join(map(str, path))
            names = names.spec if isinstance(names, NamedSharding) else names
            found.append((name, _spec(name, names, axes, metadata.get("sharding_rules"))))
    return tuple(found)


def _checked(axes: Axes | None) -> Axes:
    for logical, axis in (axes or {}).items():
        if axis is not None and axis not in MODEL_AXES:
            raise ValueError(
                f"axes maps {logical!r} to {axis!r}; it must be 'fsdp', 'tensor', or None to leave the "
                "dimension whole."
            )
    return dict(axes or {})


def _spec(
    name: str, dims: Iterable[Any], axes: Axes, own_rules: Iterable[tuple[str, Any]] | None
) -> PartitionSpec:
    """Return the PartitionSpec of a parameter. Names of its dimensions are looked up in `axes`, then its own
    rules."""
    own = dict(reversed(tuple(own_rules or ())))  # flax takes the first rule of a name

    def axis_of(dim: Any, own: Mapping[str, Any] = own) -> set[str]:
        if dim is None:
            return set()
        if isinstance(dim, tuple):
            return {axis for part in dim for axis in axis_of(part, own)}
        if dim not in axes and dim in own:
            return axis_of(own[dim], {})
        if dim not in axes and dim not in MODEL_AXES:
            raise ValueError(
                f"the metadata of parameter {name} calls a dimension {dim!r}, which is neither 'fsdp' nor "
                f"'tensor'. Map it in axes={{{dim!r}: 'tensor'}}, or to 'fsdp', or to None to leave it whole."
            )
        axis = axes.get(dim, dim)
        return set() if axis is None else {axis}

    found = [axis_of(dim) for dim in dims]
    cut = [axis for dim in found for axis in dim]
    if len(set(cut)) < len(cut) or any(len(dim) > 1 for dim in found):
        raise ValueError(
            f"the metadata of parameter {name}, {tuple(dims)}, becomes {[sorted(dim) for dim in found]}: "
            "each axis can split only one dimension, and each dimension only over one axis. Map one of the "
            "names to None in axes."
        )
    return PartitionSpec(*(next(iter(dim), None) for dim in found))
