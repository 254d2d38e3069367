"""A training state on the disk: its leaves by name, written by any Orbax, read onto any layout.

A leaf is known by its path as `jax.tree_util.keystr` writes it. On the disk the paths are nested dicts and
lists (`named`), so that whoever has Orbax finds `params` as he would expect. What is read says of every
leaf where it goes, and each device reads its own part.
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

# A step of a leaf's path: an attribute, or a key in brackets.
_KEY = re.compile(r"""\.([^.\[]+)|\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]]*)\]""")

Keys = tuple[str | int, ...]


@dataclass(frozen=True)
class LeafKind:
    """What a leaf of the state is."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, x: Any) -> "LeafKind":
        """Of an array, or an abstract one."""
        return cls(tuple(x.shape), str(x.dtype))

    @property
    def is_key(self) -> bool:
        """Whether it holds keys of random numbers."""
        return self.dtype.startswith("key<")

    def may_become(self, other: "LeafKind") -> bool:
        """Whether values of this kind can be read as values of another: only floating types change."""
        floats = [
            not kind.is_key and jnp.issubdtype(jnp.dtype(kind.dtype), jnp.floating)
            for kind in (self, other)
        ]
        return self == other or (self.shape == other.shape and all(floats))

    def __str__(self) -> str:
        return f"{self.dtype}{self.shape}"


def describe(state: PyTree) -> dict[str, LeafKind]:
    """What every leaf is, by its path: tells one model's state from another's."""
    return {path: LeafKind.of(x) for path, x in _by_path(state).items()}


def differences(saved: Mapping[str, LeafKind], wanted: Mapping[str, LeafKind]) -> list[str]:
    """How two descriptions differ, one sentence a leaf."""
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
    """The steps of a leaf's path.

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
    """Leaves as nested dicts and lists; a sequence with holes, as optimizers have, is a dict by number.

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
    """Raise ValueError where two leaves have one name on the disk, the steps of a path joined by dots."""
    seen: dict[str, str] = {}
    for path in _by_path(tree):
        other = seen.setdefault(".".join(map(str, keys_of(path))), path)
        if other != path:
            raise ValueError(
                f"the training state cannot be checkpointed: {what}{other} and {what}{path} have one name "
                "there, the steps of a path joined by dots. Rename one of the keys."
            )


def plain(state: PyTree) -> dict[str, PyTree]:
    """A state as it goes to the disk: plain arrays by name, keys as their data."""
    return named({keys_of(path): _data(x) for path, x in _by_path(state).items()})


# -- reading -----------------------------------------------------------------------------------------


def read(
    folder: pathlib.Path, keys: Mapping[str, Keys], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Any]:
    """Leaves by their paths, as plain arrays: where they are wanted; on the host where no sharding is said.

    `keys` says of all leaves that are there where they are. Floating leaves come in the type that is
    wanted. Waits for no other process. Raises what Orbax raises where the folder is damaged.
    """
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
    return {path: x for path, x in zip(order, found, strict=True) if path in wanted}


def read_like(folder: pathlib.Path, keys: Mapping[str, Keys], abstract: PyTree) -> PyTree:
    """A tree of leaves in the form of `abstract`, which says where they go, in buffers of their own."""
    wanted = _by_path(abstract)
    found = read(folder, keys, {path: abstract_data(leaf) for path, leaf in wanted.items()})
    owned = [taken(found[path], leaf) for path, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract), owned)


def abstract_data(leaf: Any) -> jax.ShapeDtypeStruct:
    """What to ask the reader for: a plain array on its leaf's sharding."""
    data = jax.eval_shape(_data, leaf) if _is_key(leaf) else leaf  # a trace takes its time
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def taken(x: Array, leaf: Any) -> Array:
    """What the reader handed over as a leaf of a state; its own buffer is let go."""
    own = _owned(x, leaf)
    x.delete()
    return own


# -- on the host -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostLeaf:
    """What a process holds of a leaf, as disjoint pieces in memory of their own."""

    kind: LeafKind
    pieces: Mapping[tuple[int, ...], np.ndarray]
    """By the index of their first element."""

    @classmethod
    def of(cls, x: Array) -> "HostLeaf":
        """A copy of what lies on this process's devices."""
        pieces: dict[tuple[int, ...], np.ndarray] = {}
        for shard in x.addressable_shards:
            start = tuple(part.indices(n)[0] for part, n in zip(shard.index, x.shape, strict=True))
            if start not in pieces:
                pieces[start] = np.array(shard.data)
        return cls(LeafKind.of(x), pieces)

    def at(self, index: Any) -> np.ndarray:
        """The part of the leaf in a box of slices. Raises ValueError where it is not all here."""
        spans = [part.indices(n)[:2] for part, n in zip(index, self.kind.shape, strict=True)]
        whole = self.pieces.get(tuple(first for first, _ in spans))
        shape = tuple(last - first for first, last in spans)
        if whole is not None and whole.shape == shape:
            return whole
        out, num_found = np.empty(shape, jnp.dtype(self.kind.dtype)), 0
        for start, piece in self.pieces.items():
            both = [
                (max(first, own), min(last, own + n))
                for (first, last), own, n in zip(spans, start, piece.shape, strict=True)
            ]
            if all(first < last for first, last in both):
                there = zip(both, spans, strict=True)
                here = zip(both, start, strict=True)
                part = piece[tuple(slice(a - own, b - own) for (a, b), own in here)]
                out[tuple(slice(a - first, b - first) for (a, b), (first, _) in there)] = part
                num_found += part.size
        if num_found != out.size:
            raise ValueError(f"of {self.kind} this process holds {num_found} of {out.size} values.")
        return out


def on_host(state: PyTree) -> dict[str, HostLeaf]:
    """What this process holds of a state, by path, as plain arrays in memory of their own."""
    return {path: HostLeaf.of(_data(x)) for path, x in _by_path(state).items()}


def whole_on_host(leaves: Mapping[str, HostLeaf], abstract: PyTree) -> PyTree:
    """A tree in the form of `abstract` of what `on_host` gave, whole and on the host; keys as keys.

    Raises ValueError where parts of it are not here.
    """

    def whole(x: HostLeaf, leaf: Any) -> Any:
        host = x.at(tuple(slice(0, n) for n in x.kind.shape))
        if not _is_key(leaf):
            return host
        return jax.random.wrap_key_data(
            jnp.asarray(host), impl=jax.random.key_impl(_key_like(leaf))
        )

    trees = [whole(leaves[path], leaf) for path, leaf in _by_path(abstract).items()]
    return jax.tree.unflatten(jax.tree.structure(abstract), trees)


def from_host(leaves: Mapping[str, HostLeaf], abstract: PyTree) -> PyTree:
    """A tree in the form of `abstract`, which says where leaves go, of what `on_host` gave.

    Where it goes to several processes, each comes with what its own devices are to hold. Raises ValueError
    where it is of another model, or does not hold that.
    """
    wanted = _by_path(abstract)
    given = {path: x.kind for path, x in leaves.items()}
    told = differences(given, {path: LeafKind.of(abstract_data(x)) for path, x in wanted.items()})
    if told:
        raise ValueError(f"the state that another process holds is of another model: {told[0]}.")

    def placed(x: HostLeaf, leaf: Any) -> Array:
        made = jax.make_array_from_callback(x.kind.shape, leaf.sharding, x.at)
        return _owned(made, leaf)

    trees = [placed(leaves[path], leaf) for path, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract), trees)


# -- beginning with values ---------------------------------------------------------------------------


def given_leaves(given: PyTree, variables: Variables) -> dict[str, Array]:
    """Leaves of a fresh model that a user gives, by their names, on their devices in buffers of their own.

    `given` is a tree of parameters, or `Variables`, or a part of one; `variables` are the model's own,
    abstract with shardings. Raises ValueError, naming the leaf, for one that does not fit.
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
            f"initial= has {some(unknown)}, which the model has not. It has {some([*wanted])}. Give a tree "
            "like that of init(), or a part of it."
        )
    require_fit({name: LeafKind.of(x) for name, x in leaves.items()}, variables, "initial=")
    return {name: _owned(_global(x, wanted[name]), wanted[name]) for name, x in leaves.items()}


def require_fit(
    given: Mapping[str, LeafKind], variables: Variables, source: str, *, is_said: bool = False
) -> None:
    """Raise ValueError where a leaf does not fit; warn of those left to `init` unless the user said so."""
    wanted = leaves_by_name(variables)
    for name, kind in given.items():
        own = LeafKind.of(wanted[name])
        if not kind.may_become(own):
            raise ValueError(
                f"{name} is {kind} in {source}, {own} in the model. Leave it to init(): drop it from a "
                "tree, or have FromCheckpoint(names=...) return None for it."
            )
    left = [name for name in wanted if name not in given]
    if not given:
        raise ValueError(
            f"no leaf of the model is in {source}. The model has {some(left)}. Give a tree with such "
            "leaves, or FromCheckpoint(names=...), which says what they are called there."
        )
    if left and not is_said:
        logging.warning(
            "%d of the model's %d leaves are not in %s and come from init(): %s",
            len(left),
            len(wanted),
            source,
            some(left),
        )


def some(names: Sequence[str]) -> str:
    """The first of many names."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _global(x: Any, leaf: Any) -> Any:
    """A user's value as a plain array of a leaf's type, which may be put where the leaf goes."""
    x = _data(x)
    x = x if _is_key(leaf) or x.dtype == leaf.dtype else x.astype(leaf.dtype)
    if leaf.sharding.is_fully_addressable:
        return x
    host = np.asarray(x)  # every process has the whole of it, and puts its own parts
    return jax.make_array_from_callback(host.shape, leaf.sharding, lambda index: host[index])


def _owned(x: Any, leaf: Any) -> Array:
    """A plain array as a leaf of a state, in a buffer of its own.

    That which it comes in may be shared with the host or with the user, and a state is donated to steps.
    """
    own = jax.block_until_ready(jax.device_put(x, leaf.sharding, may_alias=False))
    impl = jax.random.key_impl(_key_like(leaf)) if _is_key(leaf) else None
    return own if impl is None else jax.random.wrap_key_data(own, impl=impl)


def _by_path(tree: PyTree) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _data(x: Any) -> Any:
    return jax.random.key_data(x) if _is_key(x) else x


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _key_like(x: Any) -> Any:
    return x if isinstance(x, jax.Array) else jax.random.key(0)
