"""Equinox models as pure functions, for use in a `Trainer`: `from_equinox`.

MODEL = from_equinox(lambda key: eqx.nn.MLP(64, 10, 32, 2, key=key))
class Images(Trainer):
    def init(self, key): return MODEL.init(key)
    def loss_and_state(self, params, model_state, batch, key):
        logits, model_state = MODEL.train(params, model_state, key, batch["image"])
        ...

A model of equinox computes one sample; here it is called for every row of a batch, as by `jax.vmap`.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jaxtyping import Array, PyTree

from jaxgoodput.engine.state import Variables
from jaxgoodput.models.functions import Model

Path = tuple[str, ...]


def from_equinox(make: Callable[[Array], Any], *, axis_name: str = "batch") -> Model:
    """Make pure functions of an equinox model, from the function that creates it from a key.

        model = from_equinox(lambda key: eqx.nn.MLP(64, 10, 32, 2, key=key))
        model = from_equinox(lambda key: eqx.nn.make_with_state(Net)(key))

    Floating arrays of the model, also NumPy's, are the parameters: nested dicts, by the names of their
    fields. Its other arrays, and the `State` if `make` returns one beside the model, are the mutable state.
    Everything else, such as activation functions, is taken from one call of `make` and must not depend on
    the key.

    Inputs of `train` and `predict` are `[batch, ...]`. The model is called with one row, as `model(*inputs)`,
    or as `model(*inputs, state)` if it has a state, and then returns its output and the next state. If its
    call names a parameter `key`, every row gets a key of its own in training and None in prediction, which
    is made in inference mode. `train` takes one key, which it splits, or one for each row. `axis_name` is the
    name of the batch axis, for layers such as `eqx.nn.BatchNorm`.
    """
    eqx = _equinox()

    def parts(made: Any) -> tuple[Any, Any]:
        """Return the model and its state, None if it has none."""
        has_state = isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], eqx.nn.State)
        return made if has_state else (made, None)

    blank, blank_state = parts(eqx.filter_eval_shape(lambda: make(jax.random.key(0))))
    paths, structure = jax.tree_util.tree_flatten_with_path(blank)
    places = {_path(path): leaf for path, leaf in paths}
    has_state = blank_state is not None

    def init(key: Array, *inputs: Any) -> Variables:
        del inputs  # an equinox model already has its shapes
        model, state = parts(make(key))
        leaves = {_path(path): x for path, x in jax.tree_util.tree_leaves_with_path(model)}
        params = {path: x for path, x in leaves.items() if _is_trainable(places[path])}
        rest = {
            path: x for path, x in leaves.items() if _is_array(places[path]) and path not in params
        }
        model_state: dict[str, Any] = {"arrays": _nested(rest)} if rest else {}
        if state is not None:
            model_state["state"] = _numbered(state)
        return Variables(params=_nested(params), model_state=model_state)

    def build(params: PyTree, model_state: PyTree) -> Any:
        """Return the model with these values."""
        leaves = []
        for path, leaf in places.items():
            if _is_trainable(leaf):
                leaf = _found(params, path)
            elif _is_array(leaf):
                leaf = _found(model_state["arrays"], path)
            leaves.append(leaf)
        return jax.tree.unflatten(structure, leaves)

    def state_of(model_state: PyTree) -> Any:
        if not has_state:
            return None
        numbered = model_state["state"]
        leaves = [numbered[str(i)] for i in range(len(numbered))]
        return jax.tree.unflatten(jax.tree.structure(blank_state), leaves)

    @_without_mesh
    def train(params: PyTree, model_state: PyTree, key: Array, *inputs: Any) -> tuple[Any, PyTree]:
        model = build(params, model_state)
        out, state = _of_rows(model, state_of(model_state), key, inputs, axis_name)
        return out, {**model_state, "state": _numbered(state)} if has_state else model_state

    @_without_mesh
    def predict(params: PyTree, model_state: PyTree, *inputs: Any) -> Any:
        model = eqx.nn.inference_mode(build(params, model_state))
        return _of_rows(model, state_of(model_state), None, inputs, axis_name)[0]

    return Model(init=init, train=train, predict=predict)


def _of_rows(
    model: Any, state: Any, key: Array | None, inputs: tuple[Any, ...], axis_name: str
) -> tuple[Any, Any]:
    """Return the outputs of a model for every row, and its state after them, None if it has none."""
    is_keyed = "key" in inspect.signature(type(model).__call__).parameters
    keys = key
    if key is not None and key.ndim == 0:  # else it has one for each row
        keys = jax.random.split(key, len(jax.tree.leaves(inputs)[0]))

    def of_one(key: Array | None, *rows: Any) -> tuple[Any, Any]:
        more = {"key": key} if is_keyed else {}
        return (model(*rows, **more), None) if state is None else model(*rows, state, **more)

    over = (None if keys is None else 0, *(0 for _ in inputs))
    return jax.vmap(of_one, in_axes=over, out_axes=(0, None), axis_name=axis_name)(keys, *inputs)


def _equinox() -> Any:
    try:
        return importlib.import_module("equinox")
    except ImportError as error:
        raise ImportError(f"{error}. from_equinox needs it: pip install equinox.") from error


def _without_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Trace a function without a mesh.

    A `State` refuses values of another type. Inside of a sharded program, the type of the state names the
    mesh, and that of a constant which a layer writes there does not.
    """

    def traced(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        outlines = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            program, shapes = jax.make_jaxpr(
                lambda *flat: function(*jax.tree.unflatten(structure, flat)), return_shape=True
            )(*outlines)
        out = jax.extend.core.jaxpr_as_fun(program)(*leaves)
        # Constants are plain numbers in there.
        whole = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in out]
        typed = [x.astype(y.dtype) for x, y in zip(whole, jax.tree.leaves(shapes), strict=True)]
        return jax.tree.unflatten(jax.tree.structure(shapes), typed)

    return traced


def _is_array(leaf: Any) -> bool:
    """Whether a leaf of the model's outline stands for an array."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _is_trainable(leaf: Any) -> bool:
    return _is_array(leaf) and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _path(path: tuple[Any, ...]) -> Path:
    return tuple(jax.tree_util.keystr((part,), simple=True) for part in path)


def _nested(leaves: dict[Path, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        place = root
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = leaf
    return root


def _found(tree: Any, path: Path) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _numbered(state: Any) -> dict[str, Any]:
    """Return the arrays of a `State`, which cannot be saved itself, by their number."""
    return {str(i): x for i, x in enumerate(jax.tree.leaves(state))}
