"""A training state on disk: its leaves by name, written by any Orbax, read onto any layout.

A leaf is identified by its path as `jax.tree_util.keystr` writes it. On disk the paths are nested dicts and
lists (`named`), so any user of Orbax finds `params` in the usual form. A read says for every leaf where it
goes, and each device reads only its own part.
"""

import ast
import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jaxtyping import Array, PyTree

from jaxgoodput.engine.state import Variables
from jaxgoodput.parallel.partition import leaves_by_name
from jaxgoodput.parallel.plan import intersection, num_elements, within

# A step of a leaf's path: an attribute, or a key in brackets.
_KEY = re.compile(r"""\.([^.\[]+)|\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]]*)\]""")

Keys = tuple[str | int, ...]


@dataclass(frozen=True)
class LeafKind:
    """Shape and type of a leaf of the state."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, x: Any) -> "LeafKind":
        """Return the kind of an array, which may be abstract."""
        return cls(tuple(x.shape), str(x.dtype))

    @property
    def is_key(self) -> bool:
        """Whether the leaf holds PRNG keys."""
        return self.dtype.startswith("key<")

    def may_become(self, other: "LeafKind") -> bool:
        """Return whether values of this kind can be read as `other`: only floating types may change."""
        floats = [
            not kind.is_key and jnp.issubdtype(jnp.dtype(kind.dtype), jnp.floating)
            for kind in (self, other)
        ]
        return self == other or (self.shape == other.shape and all(floats))

    def __str__(self) -> str:
        return f"{self.dtype}{self.shape}"


def describe(state: PyTree) -> dict[str, LeafKind]:
    """Return the kind of every leaf by its path, which tells one model's state from another's."""
    return {path: LeafKind.of(x) for path, x in _by_path(state).items()}


def differences(saved: Mapping[str, LeafKind], wanted: Mapping[str, LeafKind]) -> list[str]:
    """Return how two descriptions differ, one sentence per leaf."""
    found = []
    for path in sorted(saved.keys() | wanted.keys()):
        a, b = saved.get(path), wanted.get(path)
        if a is None:
            found.append(f"{path} is not in the checkpoint, the model has {b}")
        elif b is None:
            found.append(f"{path} is {a} in the checkpoint, the model has no such leaf")
        elif a != b:
            found.append(f"{path} is {a} in the checkpoint, {b} in the model")
    return found


# -- names -------------------------------------------------------------------------------------------


def keys_of(path: str) -> Keys:
    """Return the names, keys and indices that a leaf's path, a string, consists of.

    >>> keys_of(".params['layers'][0]['w']")
    ('params', 'layers', 0, 'w')
    """
    found = []
    for attribute, key in _KEY.findall(path):
        number = key.removeprefix("<flat index ").removesuffix(">")
        if number.isdecimal():
            found.append(int(number))
        else:
            found.append(attribute or (ast.literal_eval(key) if key[:1] in "'\"" else key))
    return tuple(found)


def named(leaves: Mapping[Keys, Any]) -> Any:
    """Return leaves as nested dicts and lists. A sequence with holes, as in optimizers, is a dict by number.

    >>> named({("a", 0): 1, ("a", 1): 2, ("b", 3, "c"): 4})
    {'a': [1, 2], 'b': {'3': {'c': 4}}}
    """
    if () in leaves:
        return leaves[()]
    inner: dict[str | int, dict[Keys, Any]] = {}
    for (first, *rest), leaf in leaves.items():
        inner.setdefault(first, {})[tuple(rest)] = leaf
    made = {key: named(below) for key, below in inner.items()}
    is_list = list(made) == list(range(len(made)))
    return list(made.values()) if is_list else {str(key): x for key, x in made.items()}


def require_names(tree: PyTree, what: str) -> None:
    """Raise ValueError if two leaves have the same name on disk: the steps of a path joined by dots."""
    seen: dict[str, str] = {}
    for path in _by_path(tree):
        other = seen.setdefault(".".join(map(str, keys_of(path))), path)
        if other != path:
            raise ValueError(
                f"the training state cannot be checkpointed: {what}{other} and {what}{path} have one name "
                "there, the steps of a path joined by dots. Rename one of the keys."
            )


def plain(state: PyTree) -> dict[str, PyTree]:
    """Return a state as it is written: plain arrays by name, PRNG keys as their data.

    Orbax writes no arrays of size zero, so that each of them is written as zeros of the next larger size.
    """
    return named({keys_of(path): _with_size(_data(x)) for path, x in _by_path(state).items()})


def _with_size(x: Any) -> Any:
    if x.size:
        return x
    zeros = np.zeros([max(n, 1) for n in x.shape], x.dtype)
    return jax.device_put(zeros, x.sharding) if isinstance(x, Array) else zeros


# -- reading -----------------------------------------------------------------------------------------


def read(
    folder: pathlib.Path, keys: Mapping[str, Keys], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Any]:
    """Read leaves by their paths, as plain arrays on the `wanted` shardings; without one, on the host.

    `keys` has the place on disk of every leaf that was saved. Floating leaves come in the wanted type. Waits
    for no other process. A damaged folder raises an error of Orbax.
    """
    empty = {path: x for path, x in wanted.items() if not x.size and path in keys}
    wanted = {path: x for path, x in wanted.items() if path not in empty}
    item = named({place: wanted.get(path, ocp.PLACEHOLDER) for path, place in keys.items()})
    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"reader{here}"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    args = ocp.args.PyTreeRestore(  # pyright: ignore[reportCallIssue]
        item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item)
    )
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
        found = jax.tree.leaves(reader.restore(folder, args=args))
    order = jax.tree.leaves(named({place: path for path, place in keys.items()}))
    arrays = {path: x for path, x in zip(order, found, strict=True) if path in wanted}
    for path, x in empty.items():
        zeros = np.zeros(x.shape, x.dtype)
        arrays[path] = zeros if x.sharding is None else jax.device_put(zeros, x.sharding)
    return arrays


def read_like(folder: pathlib.Path, keys: Mapping[str, Keys], abstract: PyTree) -> PyTree:
    """Read a tree in the form of `abstract`, onto its shardings, in buffers of its own."""
    wanted = _by_path(abstract)
    found = read(folder, keys, {path: abstract_data(leaf) for path, leaf in wanted.items()})
    owned = [taken(found[path], leaf) for path, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract), owned)


def abstract_data(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the abstract array to read for a leaf: its data (for PRNG keys, too) on its sharding."""
    data = (
        jax.eval_shape(_data, leaf) if _is_key(leaf) else leaf
    )  # tracing takes time, so only for keys
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def taken(x: Array, leaf: Any) -> Array:
    """Copy an array that was read into a leaf of a state, and free the buffer that was read."""
    own = _owned(x, leaf)
    x.delete()
    return own


# -- on the host -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostLeaf:
    """Copy of what a process holds of a leaf, as disjoint pieces in host memory."""

    kind: LeafKind
    """Kind of the whole leaf."""
    pieces: Mapping[tuple[int, ...], np.ndarray]
    """Pieces by the index of their first element."""

    @classmethod
    def of(cls, x: Array) -> "HostLeaf":
        """Copy the parts of an array that this process's devices hold to the host."""
        pieces: dict[tuple[int, ...], np.ndarray] = {}
        for shard in x.addressable_shards:
            start = tuple(part.indices(n)[0] for part, n in zip(shard.index, x.shape, strict=True))
            if start not in pieces:
                pieces[start] = np.array(jax.device_get(shard.data))
        return cls(LeafKind.of(x), pieces)

    def at(self, index: Any) -> np.ndarray:
        """Return the part of the leaf in a box of slices. Raises ValueError if this process lacks some."""
        box = tuple(part.indices(n)[:2] for part, n in zip(index, self.kind.shape, strict=True))
        shape = tuple(last - first for first, last in box)
        whole = self.pieces.get(tuple(first for first, _ in box))
        if whole is not None and whole.shape == shape:
            return whole
        out, num_found = np.empty(shape, jnp.dtype(self.kind.dtype)), 0
        for start, piece in self.pieces.items():
            held = tuple((first, first + n) for first, n in zip(start, piece.shape, strict=True))
            common = intersection(box, held)
            if common is not None:
                out[within(common, box)] = piece[within(common, held)]
                num_found += num_elements(common)
        if num_found != out.size:
            raise ValueError(
                f"this process holds {num_found} of {out.size} values of a leaf {self.kind}, so the state "
                "cannot be put together from memory. Restore a checkpoint."
            )
        return out


def on_host(state: PyTree) -> dict[str, HostLeaf]:
    """Copy what this process holds of a state to the host, by path, as plain arrays."""
    return {path: HostLeaf.of(_data(x)) for path, x in _by_path(state).items()}


def whole_on_host(leaves: Mapping[str, HostLeaf], abstract: PyTree) -> PyTree:
    """Return a tree in the form of `abstract`, whole and on the host, from a copy by `on_host`.

    Raises ValueError if this process lacks parts of it.
    """

    def whole(x: HostLeaf, leaf: Any) -> Any:
        host = x.at(tuple(slice(0, n) for n in x.kind.shape))
        return _as_key(jnp.asarray(host), leaf) if _is_key(leaf) else host

    trees = [whole(leaves[path], leaf) for path, leaf in _by_path(abstract).items()]
    return jax.tree.unflatten(jax.tree.structure(abstract), trees)


def from_host(leaves: Mapping[str, HostLeaf], abstract: PyTree) -> PyTree:
    """Put a copy by `on_host` on devices, in the form of `abstract` and on its shardings.

    If these span processes, each must hold the parts for its own devices. Raises ValueError if the copy
    lacks them, or is of another model.
    """
    wanted = _by_path(abstract)
    given = {path: x.kind for path, x in leaves.items()}
    told = differences(given, {path: LeafKind.of(abstract_data(x)) for path, x in wanted.items()})
    if told:
        raise ValueError(
            f"the state that another process sent is of another model: {told[0]}. Start all processes with "
            "the same program."
        )

    def placed(x: HostLeaf, leaf: Any) -> Array:
        made = jax.make_array_from_callback(x.kind.shape, leaf.sharding, x.at)
        return _owned(made, leaf)

    trees = [placed(leaves[path], leaf) for path, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract), trees)


# -- beginning with values ---------------------------------------------------------------------------


def given_leaves(given: PyTree, variables: Variables) -> dict[str, Array]:
    """Put a user's initial values on their devices, by name, in buffers of their own.

    `given` is a tree of parameters, `Variables`, or a part of either. `variables` are the model's own,
    abstract with shardings. Raises ValueError, with the name, for a leaf that does not fit.
    """
    wanted = leaves_by_name(variables)
    if not isinstance(given, Variables):
        given = Variables(params=given, model_state=())
    leaves = {
        name: x if hasattr(x, "dtype") else np.asarray(x)
        for name, x in leaves_by_name(given).items()
    }
    if unknown := [name for name in leaves if name not in wanted]:
        raise ValueError(
            f"initial= has {some(unknown)}, which the model has not. It has {some([*wanted])}. Pass a tree "
            "like the result of init(), or a part of one."
        )
    require_fit({name: LeafKind.of(x) for name, x in leaves.items()}, variables, "initial=")
    return {name: _owned(_global(x, wanted[name]), wanted[name]) for name, x in leaves.items()}


def require_fit(
    given: Mapping[str, LeafKind], variables: Variables, source: str, *, is_said: bool = False
) -> None:
    """Raise ValueError if a leaf does not fit the model.

    Warns of the model's leaves that are not given, unless `is_said`: the user left them to `init`.
    """
    wanted = leaves_by_name(variables)
    for name, kind in given.items():
        own = LeafKind.of(wanted[name])
        if not kind.may_become(own):
            raise ValueError(
                f"{name} is {kind} in {source}, but {own} in the model. Leave it to init(): drop it from the "
                "tree, or let FromCheckpoint(names=...) return None for it."
            )
    left = [name for name in wanted if name not in given]
    if not given:
        raise ValueError(
            f"no leaf of the model is in {source}. The model has {some(left)}. Pass a tree with such "
            "leaves, or FromCheckpoint(names=...) with their names there."
        )
    if left and not is_said:
        logging.warning(
            "%d of the model's %d leaves are not in %s and come from init(): %s. If they have other names "
            "there, give FromCheckpoint(names=...), or name them like the model's.",
            len(left),
            len(wanted),
            source,
            some(left),
        )


def some(names: Sequence[str]) -> str:
    """Return the first eight names as one string, with "..." for more."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _global(x: Any, leaf: Any) -> Any:
    """Return a user's value as a plain array of the leaf's type, ready for the leaf's devices."""
    x = _data(x)
    x = x if _is_key(leaf) or x.dtype == leaf.dtype else x.astype(leaf.dtype)
    if leaf.sharding.is_fully_addressable:
        return x
    host = np.asarray(x)  # every process has all of it, and puts its own parts
    return jax.make_array_from_callback(host.shape, leaf.sharding, lambda index: host[index])


def _owned(x: Any, leaf: Any) -> Array:
    """Copy a plain array into a leaf of a state.

    Its old buffer may be shared with the host or the user, but a state is donated to steps.
    """
    own = jax.block_until_ready(jax.device_put(x, leaf.sharding, may_alias=False))
    return _as_key(own, leaf) if _is_key(leaf) else own


def _as_key(data: Array, leaf: Any) -> Array:
    """Return key data as PRNG keys of the leaf's kind; the default kind if the leaf is abstract."""
    like = leaf if isinstance(leaf, jax.Array) else jax.random.key(0)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))


def _by_path(tree: PyTree) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _data(x: Any) -> Any:
    return jax.random.key_data(x) if _is_key(x) else x


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
