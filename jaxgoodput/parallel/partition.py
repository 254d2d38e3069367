"""Which dimension of which parameter is cut over which axis; optimizer state follows its parameter.

A parameter's spec comes from the first of: a rule of the strategy (a regex found in its path), the
model's own partitioning metadata, the defaults. The defaults cut layers as Megatron-LM does (Shoeybi
et al. 2019): a projection that widens is cut over its outputs, one that narrows again over its inputs,
attention over its heads, so that each pair needs one sum. What a layer is, names tell where they are
known, otherwise its shape. "fsdp" takes a dimension that does not depend on the degrees as long as they
divide it, so that a switch of strategies moves little. A wrong guess is slow, never wrong. Where a
default does not divide a dimension, the dimension stays whole; where a rule does not, that is an error.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxgoodput.parallel.strategy import FSDP_AXIS, TENSOR_AXIS, Layout, Strategy, check_axes

KeyPath = tuple[Any, ...]
# A model's own metadata: path -> spec.
OwnSpecs = Sequence[tuple[str, PartitionSpec]]

# Smaller leaves are not worth a collective of their own.
MIN_ELEMENTS = 2**10

# What a layer calls its array: the name before it says what the layer is for.
_ARRAY = re.compile(r"^(kernel|weight|w|embedding|table)$")
_VECTOR = re.compile(r"(^|_)(bias|b|scale|gamma|beta|offset)$")
_BIAS = re.compile(r"(^|_)(bias|b)$")
_POSITIONS = re.compile(r"(^|_)(wpe|pos|positions?|positional)(_|$)|posemb")
_TABLE = re.compile(r"(^|_)(wte|vocab\w*|emb|embed|embedder|embeddings?|tok|tokens?|bytes)(_|$)")
_HEADS_IN = re.compile(r"^(q|k|v|qkv|query|key|value)(_proj)?$")
_HEADS_OUT = re.compile(r"^(o|out|output)(_proj)?$")
_WIDENING = re.compile(
    r"^(q|k|v|qkv|query|key|value|in|up|gate|gate_up)(_proj)?$|^(wq|wk|wv|wi|w1|w3|c_fc|c_attn)$"
    r"|^(wi_\d|fc_?1|lin_?1|linear_?1|dense_h_to_4h|query_key_value)$"
)
_NARROWING = re.compile(
    r"(^|_)(o|out|output|down)(_proj)?$|^(proj_out|wo|w2|c_proj|fc_?2|lin_?2|linear_?2|dense_4h_to_h)$"
)


def path_name(path: KeyPath) -> str:
    """A leaf's path as rules see it; empty where the parameters are one bare array.

    >>> path_name(jax.tree_util.tree_leaves_with_path({"a": [0]})[0][0])
    'a/0'
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


@dataclass(frozen=True)
class ParamSpecs:
    """The spec of every parameter under a strategy, and of whatever has a parameter's path and shape."""

    layout: Layout
    """The strategy, and its mesh."""
    table: Mapping[KeyPath, tuple[tuple[int, ...], PartitionSpec]]
    """Shape and spec of each parameter."""

    def spec(self, path: KeyPath, shape: Sequence[int]) -> PartitionSpec:
        """The spec of a leaf: that of the parameter whose path ends its own; otherwise it is whole.

        The longest such path counts, and the shape must be the parameter's: factored moments, counts
        and statistics are whole.
        """
        for start in range(len(path) + 1):
            found = self.table.get(tuple(path[start:]))
            if found is not None and found[0] == tuple(shape):
                return found[1]
        return PartitionSpec()

    def specs(self, tree: PyTree) -> PyTree:
        """The specs of a tree's leaves: parameters, gradients, optimizer state, a training state."""
        return jax.tree_util.tree_map_with_path(lambda p, x: self.spec(p, x.shape), tree)

    def shardings(self, tree: PyTree) -> PyTree:
        """The shardings of a tree's leaves, arrays or abstract."""

        def one(path: KeyPath, x: Any) -> NamedSharding:
            return self.layout.sharding(self.spec(path, x.shape))

        return jax.tree_util.tree_map_with_path(one, tree)

    def placed(self, tree: PyTree) -> PyTree:
        """Abstract values of a tree's leaves, with their shardings."""

        def one(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            # A compiled function takes only what it was compiled for, weak types included.
            weak = getattr(x, "weak_type", False)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=weak)

        return jax.tree.map(one, tree, self.shardings(tree))


def param_specs(layout: Layout, params: PyTree, own: OwnSpecs = ()) -> ParamSpecs:
    """The specs of `params` (shapes suffice) under a layout's strategy; axes of degree 1 left out.

    `params` are all parameters, frozen ones too; `own` is the model's metadata (`Variables.specs`).
    Raises ValueError where a rule or metadata matches no parameter, has more dimensions than one it
    matches, or cuts a dimension that its degree does not divide.
    """
    strategy = layout.strategy
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    names = [path_name(path) for path, _ in leaves]
    shown = ", ".join(name or "'' (a bare array)" for name in names[:8])
    shown += ", ..." if len(names) > 8 else ""
    for pattern, spec in strategy.rules:
        if not any(re.search(pattern, name) for name in names):
            raise ValueError(
                f"the rule ({pattern!r}, {spec}) matches no parameter. Paths are {shown}: correct the "
                "regex, or remove the rule."
            )
    declared = dict(own)
    if unknown := sorted(set(declared) - set(names)):
        raise ValueError(
            f"the model's metadata speaks of {unknown[0]!r}, which is no parameter. Paths are {shown}: "
            "let Variables.specs name the parameters that Variables.params holds."
        )
    shapes = [tuple(leaf.shape) for _, leaf in leaves]
    specs, guessed = {}, []
    for name, shape in zip(names, shapes, strict=True):
        ruled = [(p, s) for p, s in strategy.rules if re.search(p, name)]
        if ruled:
            spec = _checked(name, shape, ruled[0][1], strategy, f"the rule {ruled[0][0]!r}")
        elif name in declared:
            spec = _checked(name, shape, declared[name], strategy, "the model's metadata")
        else:
            spec = default_spec(name, shape, strategy)
            guessed.append(name)
        specs[name] = shape, _without_whole(spec, strategy)
    for name in guessed:
        specs[name] = specs[name][0], _beside_its_matrix(name, specs)
    table = {tuple(path): specs[name] for name, (path, _) in zip(names, leaves, strict=True)}
    return ParamSpecs(layout=layout, table=table)


def default_spec(name: str, shape: Sequence[int], strategy: Strategy) -> PartitionSpec:
    """The spec of a parameter that no rule and no metadata speaks of.

    >>> default_spec("mlp/up/kernel", (64, 256), Strategy(fsdp=2, tensor=4))
    P('fsdp', 'tensor')
    >>> default_spec("mlp/down/kernel", (256, 64), Strategy(fsdp=2, tensor=4))
    P('tensor', 'fsdp')
    """
    if not shape or math.prod(shape) < MIN_ELEMENTS:
        return PartitionSpec()
    num_own, preferred = _layer(name, shape)
    entries: list[str | None] = [None] * len(shape)
    if preferred is not None and strategy.tensor > 1 and shape[preferred] % strategy.tensor == 0:
        entries[preferred] = TENSOR_AXIS
    first_own = len(shape) - num_own

    def reluctance(dim: int) -> tuple[bool, bool, int, int]:
        # Layers that are scanned over are stacked in front: cut there, the whole stack would have to
        # be put together before the loop.
        return dim < first_own, dim == preferred, -shape[dim], -dim

    for dim in sorted(range(len(shape)), key=reluctance):
        if entries[dim] is None and strategy.fsdp > 1 and shape[dim] % strategy.fsdp == 0:
            entries[dim] = FSDP_AXIS
            break
    return PartitionSpec(*entries)


def _layer(name: str, shape: Sequence[int]) -> tuple[int, int | None]:
    """How many trailing dimensions are the layer's own, and which one "tensor" cuts; None: none."""
    parts = re.split(r"[/.]", name)
    leaf = parts[-1]
    owner = parts[-2] if _ARRAY.search(leaf) and len(parts) > 1 else leaf
    num_dims = len(shape)
    if num_dims == 1 or _VECTOR.search(leaf):
        return 1, None
    rows, columns = num_dims - 2, num_dims - 1
    if _POSITIONS.search(owner) or _POSITIONS.search(leaf):
        return 2, None  # all of its rows are read by everyone
    if leaf == "embedding" or (_TABLE.search(owner) and leaf != "kernel"):
        return 2, rows
    # Attention of flax keeps heads apart: [inputs, heads, head] and [heads, head, outputs]. In a stack
    # of plain matrices, [layers, inputs, outputs], the first is the short one.
    if num_dims >= 3 and _HEADS_IN.search(owner) and shape[-3] >= shape[-1]:
        return 3, rows
    is_image = num_dims == 4 and shape[0] == shape[1]
    if num_dims >= 3 and _HEADS_OUT.search(owner) and shape[-2] < shape[-1] and not is_image:
        return 3, num_dims - 3
    if _WIDENING.search(owner):
        return 2, columns
    if _NARROWING.search(owner) or shape[rows] > shape[columns]:
        return 2, rows
    return 2, columns


def _beside_its_matrix(
    name: str, specs: Mapping[str, tuple[tuple[int, ...], PartitionSpec]]
) -> PartitionSpec:
    """The spec of a leaf; a bias is cut over "tensor" where the outputs of its matrix are.

    Whole, its gradient would have to be gathered: four times in the backward pass of a transformer's
    block that otherwise needs three sums.
    """
    shape, spec = specs[name]
    parent, _, leaf = name.rpartition("/")
    if not shape or not _BIAS.search(leaf):
        return spec
    for beside in ("kernel", "weight", "w"):
        matrix, cut = specs.get(f"{parent}/{beside}" if parent else beside, ((), ()))
        # Behind a stack, [layers, inputs, outputs], the bias is [layers, outputs].
        outputs = shape if matrix[-len(shape) :] == shape else shape[1:]
        if TENSOR_AXIS not in tuple(cut) or not outputs or matrix[-len(outputs) :] != outputs:
            continue
        back = len(matrix) - tuple(cut).index(TENSOR_AXIS)
        if back <= len(outputs):
            entries = [*spec, *[None] * (len(shape) - len(spec))]
            entries[-back] = TENSOR_AXIS
            return PartitionSpec(*entries[: max(i for i, e in enumerate(entries) if e) + 1])
    return spec


def _without_whole(spec: Iterable[Any], strategy: Strategy) -> PartitionSpec:
    """The spec without axes of degree 1 and without trailing Nones."""
    degrees = strategy.degrees
    entries = [axis if axis is not None and degrees[axis] > 1 else None for axis in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _checked(
    name: str, shape: tuple[int, ...], spec: PartitionSpec, strategy: Strategy, source: str
) -> PartitionSpec:
    check_axes(spec, f"{source} for {name}")
    exact = f"a rule of the strategy, ('^{re.escape(name)}$', PartitionSpec(...))"
    if len(spec) > len(shape):
        raise ValueError(
            f"{source} gives {name} the spec {spec} with {len(spec)} dimensions; it has shape {shape}. "
            f"Shorten the spec, or put {exact} before it."
        )
    for dim, axis in enumerate(spec):
        degree = 1 if axis is None else strategy.degrees[axis]
        if shape[dim] % degree:
            works = [n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0]
            below = max(n for n in works if n < degree)
            above = min((n for n in works if n > degree), default=None)
            nearest = f"{below}" if above is None else f"{below} and {above}"
            raise ValueError(
                f"{source} cuts dimension {dim} of {name}, of length {shape[dim]}, over {axis}={degree}, "
                f"which does not divide it. The nearest degrees that work are {nearest}; or put {exact} "
                "before it."
            )
    return spec
