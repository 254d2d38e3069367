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
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import DenyList
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from jaxgoodput.engine.state import SownState, Variables
from jaxgoodput.models.functions import Model
from jaxgoodput.parallel.partition import path_name
from jaxgoodput.parallel.strategy import MODEL_AXES

Axes = Mapping[str, str | None]  # logical name -> "fsdp", "tensor" or None
Specs = tuple[tuple[str, PartitionSpec], ...]


def from_linen(
    module: nn.Module,
    *,
    train_kwargs: Mapping[str, Any] | None = None,
    predict_kwargs: Mapping[str, Any] | None = None,
    random: tuple[str, ...] = ("dropout",),
    axes: Axes | None = None,
    sown: tuple[str, ...] = (),
    summed: tuple[str, ...] = (),
) -> Model:
    """Make pure functions of a linen module. Collections other than `params` are its mutable state.

    `train_kwargs` and `predict_kwargs` are passed to the module in training and in prediction, such as
    `{"train": True}` and `{"train": False}`. `random` names the random streams of a training call.

    Metadata of `nn.with_partitioning` and `nn.with_logical_partitioning` becomes `Variables.specs`. `axes`
    maps each logical name to "fsdp", "tensor" or None. `init` raises ValueError if a name is missing in
    `axes`, or if two dimensions of a parameter get the same axis.

    Values that the module sows (`self.sow`), such as the auxiliary losses of a mixture of experts, belong to
    one call and are not part of the state. `train` returns them beside the state, by collection:
    `out, model_state = model.train(...)`, then `model_state["losses"]`. Collections to which the module sows
    with a `reduce_fn` of its own cannot be told from state; name them in `sown`. `summed` names what becomes
    `Variables.summed`.
    """
    known = _checked(axes)
    in_training, in_prediction = dict(train_kwargs or {}), dict(predict_kwargs or {})

    def keys(key: Array) -> dict[str, Array]:
        return {name: jax.random.fold_in(key, i) for i, name in enumerate(random)}

    def init(key: Array, *inputs: Any) -> Variables:
        first, rest = jax.random.split(key)
        with nn.intercept_methods(_dense_without_mesh):
            variables = module.init({"params": first, **keys(rest)}, *inputs, **in_prediction)
            variables = _without_sown(module, variables, sown, inputs, in_prediction, keys(rest))
        specs = _linen_specs(variables["params"], known)
        variables = dict(nn.unbox(variables))
        params = variables.pop("params")
        return Variables(params=params, model_state=variables, specs=specs, summed=summed)

    def train(params: PyTree, model_state: PyTree, key: Array, *inputs: Any) -> tuple[Any, PyTree]:
        def apply(collections: Any) -> tuple[Any, Any]:
            return module.apply(
                {"params": params, **collections},
                *inputs,
                **in_training,
                rngs=keys(key),
                mutable=DenyList(("params", "perturbations")),
            )

        with nn.intercept_methods(_dense_without_mesh):
            out, updated = apply(model_state)
            found = sorted(updated.keys() - model_state.keys())
            _require_sown(apply, updated, set(found) - {"intermediates", *sown})
        whole = {**model_state, **updated}
        return out, SownState(whole, [(name,) for name in found]) if found else whole

    def predict(params: PyTree, model_state: PyTree, *inputs: Any) -> Any:
        with nn.intercept_methods(_dense_without_mesh):
            return module.apply({"params": params, **model_state}, *inputs, **in_prediction)

    return Model(init=init, train=train, predict=predict)


def from_nnx(
    make: Callable[[nnx.Rngs], nnx.Module],
    *,
    random: tuple[str, ...] = ("dropout",),
    axes: Axes | None = None,
    sown: tuple[type[nnx.Variable], ...] = (),
    summed: tuple[str, ...] = (),
) -> Model:
    """Make pure functions of an nnx module, from the function that creates it.

        model = from_nnx(lambda rngs: Net(rngs=rngs))

    `nnx.Param` variables are the parameters; all others, except random streams, are the mutable state. A
    training call uses `train()` mode, with random streams seeded from its key; a prediction uses `eval()`
    mode.

    Metadata (`nnx.with_partitioning`, `nnx.Param(..., out_sharding=...)`) becomes `Variables.specs`; `axes`
    and errors are the same as for `from_linen`. The module is created without a mesh: the trainer places it.

    Values that the module sows (`self.sow`) belong to one call and are not part of the state. `train` returns
    them beside the state, at the path of the module that sowed them, such as `model_state["moe"]["loss"]`.
    `sown` names their types, such as `nnx.Intermediate`, for `nnx.capture`; without it, flax warns that
    sowing outside of `capture` is deprecated. `summed` names what becomes `Variables.summed`.
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
            summed=summed,
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
        captured: Any = ()
        if sown:
            out, *captured = nnx.capture(model, *sown)(*inputs)
        else:
            out = model(*inputs)
        *_, rest = nnx.split(model, nnx.Param, nnx.RngState, ...)
        found = nnx.to_pure_dict(nnx.merge_state(rest, *captured))
        new = sorted(_paths(found) - _paths(model_state), key=str)
        return out, SownState(found, new) if new else found

    def predict(params: PyTree, model_state: PyTree, *inputs: Any) -> Any:
        model = build(params, model_state, jax.random.key(0))
        model.eval()
        return model(*inputs)

    return Model(init=init, train=train, predict=predict)


def _without_sown(
    module: nn.Module,
    variables: Mapping[str, Any],
    sown: tuple[str, ...],
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    rngs: dict[str, Array],
) -> dict[str, Any]:
    """Return the variables without collections that the module sows to: they grow with every call."""
    names = [name for name in variables if name not in ("params", *sown)]
    grown: set[str] = set()
    if names:
        again = jax.eval_shape(
            lambda given: module.apply(given, *inputs, **kwargs, rngs=rngs, mutable=names)[1],
            dict(variables),
        )
        grown = {name for name in names if not _is_like(variables[name], again.get(name))}
    return {name: x for name, x in variables.items() if name not in grown and name not in sown}


def _require_sown(
    apply: Callable[[Any], tuple[Any, Any]], updated: Mapping[str, Any], names: Iterable[str]
) -> None:
    """Raise ValueError if one of these collections, which `init` did not make, is not sowed to."""
    if not (names := sorted(names)):
        return
    again = jax.eval_shape(lambda given: apply(given)[1], dict(updated))
    kept = [name for name in names if _is_like(updated[name], again.get(name))]
    if kept:
        raise ValueError(
            f"the module makes the collection {kept[0]!r} in training, and init() did not. If the module "
            f"sows to it with a reduce_fn, write from_linen(..., sown={tuple(kept)!r}). If it is state, it "
            "would begin anew with every call: create it in init(), whatever predict_kwargs say."
        )


def _is_like(one: PyTree, other: PyTree) -> bool:
    """Return whether two trees have the same structure, shapes and types."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(jnp.shape(a) == b.shape and jnp.result_type(a) == b.dtype for a, b in pairs)


def _paths(tree: Mapping[Any, Any], before: tuple[Any, ...] = ()) -> set[tuple[Any, ...]]:
    """Return the paths of a nested dict's values, which may be trees themselves."""
    found = set()
    for name, value in tree.items():
        path = (*before, name)
        found |= _paths(value, path) if isinstance(value, Mapping) else {path}
    return found


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
