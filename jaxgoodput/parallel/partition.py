"""Which dimension of which parameter is cut over which axis; optimizer state follows its parameter.

A parameter's spec comes from the first of these that has one: a rule of the strategy (a regex found in its
path), the model's own partitioning metadata, the defaults. The defaults cut layers as Megatron-LM does
(Shoeybi et al. 2019): a widening projection is cut over its outputs, a narrowing one over its inputs,
attention over its heads, so each pair needs one sum. Known names tell what a layer is, otherwise its shape.
"fsdp" takes a dimension that does not depend on the degrees as long as they divide it, so switching
strategies moves little. "expert" takes the experts of a mixture's weights, "stage" the layers of a stack;
"context" cuts no parameter. A wrong guess is slow, but never gives wrong results. If a default does not
divide a dimension, the dimension stays whole. If a rule or metadata does not, that is an error, and
`suitable` leaves such strategies out.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxgoodput.parallel.strategy import (
    CONTEXT_AXIS,
    EXPERT_AXIS,
    FSDP_AXIS,
    MODEL_AXES,
    REPLICA_AXES,
    STAGE_AXIS,
    TENSOR_AXIS,
    Layout,
    Strategy,
    axes_of,
    check_axes,
)


class CannotDivide(ValueError):
    """Error: a rule, the model's metadata or the model itself cuts what the degrees do not divide."""


KeyPath = tuple[Any, ...]
# A model's own metadata: path -> spec.
OwnSpecs = Sequence[tuple[str, PartitionSpec]]
# Shape and spec of each parameter.
Table = Mapping[KeyPath, tuple[tuple[int, ...], PartitionSpec]]

# Smaller leaves are not worth a collective of their own.
MIN_ELEMENTS = 2**10
# A layer's vector stays whole up to this size (as in DeepSpeed's ZeRO-3). If cut, every layer would have to
# gather it to save next to no memory, and activations would be cut likewise.
MIN_VECTOR_ELEMENTS = 2**17
# Leaves that stay whole are mentioned if they are larger than this, in bytes and as a fraction of the model.
WORTH_A_WORD = 2**20, 0.01

# What layers call their array; the name before it says what the layer is for.
_ARRAY = re.compile(r"^(kernel|weight|w|embedding|table)$")
_VECTOR = re.compile(r"(^|_)(bias|b|scale|gamma|beta|offset|(layer|rms)?_?norm|ln)$")
_BIAS = re.compile(r"(^|_)(bias|b)$")
_POSITIONS = re.compile(r"(^|_)(wpe|pos|positions?|positional)(_|$)|posemb")
_TABLE = re.compile(r"(^|_)(wte|vocab\w*|emb|embed|embedder|embeddings?|tok|tokens?|bytes)(_|$)")
_HEADS_IN = re.compile(r"^(q|k|v|qkv|query|key|value)(_proj)?$")
_HEADS_OUT = re.compile(r"^(o|out|output)(_proj)?$")
_WIDENING = re.compile(
    r"^(q|k|v|qkv|query|key|value|in|up|gate|gate_up)(_proj)?$|^(wq|wk|wv|wi|w1|w3|c_fc|c_attn)$"
    r"|^(wi_\d|fc_?1|lin_?1|linear_?1|dense_h_to_4h|query_key_value)$"
    r"|^(head|lm_?head|logits(_dense)?|unembed(ding)?|classifier)$"
)
_NARROWING = re.compile(
    r"(^|_)(o|out|output|down)(_proj)?$|^(proj_out|wo|w2|c_proj|fc_?2|lin_?2|linear_?2|dense_4h_to_h)$"
)
# Experts are stacked: [experts, inputs, outputs]. Routers and experts that all tokens share are not.
_EXPERTS = re.compile(r"(^|[/._])(moe|experts?)([/._\d]|$)|MoE|Moe|Expert")
_ONE_FOR_ALL = re.compile(r"router|shared|^(?!.*[eE]xpert).*\bgate[/.](kernel|weight|w)$")
# Layers that are scanned over are stacked too; in a list of layers, a number follows the name.
_STACK = re.compile(r"(^|[/.])(layers|blocks|stack|stages|h|Scan\w+_\d+)(?![/.]\d+([/.]|$))[/.]")


def path_name(path: KeyPath) -> str:
    """Return a leaf's path as rules see it; empty if the parameters are one bare array.

    >>> path_name(jax.tree_util.tree_leaves_with_path({"a": [0]})[0][0])
    'a/0'
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_by_name(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by `path_name`."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@dataclass(frozen=True)
class ParamSpecs:
    """The spec of every parameter under a layout, and of other leaves that share its path and shape."""

    layout: Layout
    """Layout whose strategy the specs follow."""
    table: Table
    """Shape and spec of each parameter."""

    def spec(self, path: KeyPath, shape: Sequence[int]) -> PartitionSpec:
        """Return the spec of a leaf: of the parameter at the end of its path, otherwise whole.

        If several parameters' paths end the leaf's path, the longest counts. The shape must be the
        parameter's, so factored moments, counts and statistics are whole.
        """
        return _found(self.table, path, shape)

    def specs(self, tree: PyTree) -> PyTree:
        """Return the specs of a tree's leaves: parameters, gradients, optimizer or training state."""
        return jax.tree_util.tree_map_with_path(lambda p, x: self.spec(p, x.shape), tree)

    def shardings(self, tree: PyTree) -> PyTree:
        """Return the shardings of a tree's leaves, which may be abstract."""
        return jax.tree_util.tree_map_with_path(
            lambda path, x: self.layout.sharding(self.spec(path, x.shape)), tree
        )

    def placed(self, tree: PyTree) -> PyTree:
        """Return the abstract values of a tree's leaves, with their shardings."""

        def one(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            # A compiled function takes only what it was compiled for, weak types included.
            weak = getattr(x, "weak_type", False)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=weak)

        return jax.tree.map(one, tree, self.shardings(tree))


def _found(table: Table, path: KeyPath, shape: Sequence[int]) -> PartitionSpec:
    for start in range(len(path) + 1):
        found = table.get(tuple(path[start:]))
        if found is not None and found[0] == tuple(shape):
            return found[1]
    return PartitionSpec()


def param_specs(layout: Layout, params: PyTree, own: OwnSpecs = ()) -> ParamSpecs:
    """Work out how a layout's strategy cuts `params`. Axes of degree 1 are left out of the specs.

    `params` are all parameters, also frozen ones; shapes suffice. `own` is the model's metadata
    (`Variables.specs`).

    Raises:
        CannotDivide: a rule or metadata cuts a dimension that its degree does not divide.
        ValueError: a rule or metadata matches no parameter, or has more dimensions than one it matches.
    """
    return ParamSpecs(layout=layout, table=_table(layout.strategy, params, own))


def _table(strategy: Strategy, params: PyTree, own: OwnSpecs) -> Table:
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    shapes = {path_name(path): tuple(leaf.shape) for path, leaf in leaves}
    _require_matches(strategy, own, shapes)
    declared = dict(own)
    specs, guessed = {}, []
    behind = _stacked_behind(shapes)
    for name, shape in shapes.items():
        ruled = [(p, s) for p, s in strategy.rules if re.search(p, name)]
        if ruled:
            spec = _checked(name, shape, ruled[0][1], strategy, f"the rule {ruled[0][0]!r}")
        elif name in declared:
            spec = _checked(name, shape, declared[name], strategy, "the model's metadata")
        else:
            spec = default_spec(name, shape, strategy, stacked_behind=name in behind)
            guessed.append(name)
        specs[name] = shape, _without_whole(spec, strategy)
    for name in guessed:
        specs[name] = specs[name][0], _beside_its_matrix(name, specs)
    return {tuple(path): specs[path_name(path)] for path, _ in leaves}


def _require_matches(strategy: Strategy, own: OwnSpecs, names: Iterable[str]) -> None:
    """Raise ValueError if a rule or the metadata matches no parameter."""
    names = list(names)
    shown = ", ".join(name or "'' (a bare array)" for name in names[:8])
    shown += ", ..." if len(names) > 8 else ""
    for pattern, spec in strategy.rules:
        if not any(re.search(pattern, name) for name in names):
            raise ValueError(
                f"the rule ({pattern!r}, {spec}) matches no parameter. Paths are {shown}: correct the "
                "regex, or remove the rule."
            )
    if unknown := sorted({name for name, _ in own} - set(names)):
        raise ValueError(
            f"the model's metadata names {unknown[0]!r}, which is no parameter. Paths are {shown}: "
            "let Variables.specs name the parameters that Variables.params holds."
        )


def suitable(
    strategies: Iterable[Strategy],
    state: PyTree,
    params: PyTree,
    own: OwnSpecs = (),
    *,
    memory_bytes: int | None = None,
    compute_dtype: Any = None,
) -> tuple[tuple[Strategy, ...], tuple[tuple[Strategy, str], ...]]:
    """Choose the strategies that a model can follow.

    Returns them, the cheapest to communicate first, and the others, each with the reason. `state` is all
    that is kept between steps, `params` the parameters in it; shapes and dtypes suffice. A strategy is left
    out if its rules or metadata do not divide, if it cuts no parameter over its "expert" or "stage", or if
    its part of the state alone exceeds `memory_bytes` of one device. Activations, gradients and copies in
    `compute_dtype` (None: the parameters' own) need memory besides.

    The order is an estimate, from rings over parameters and gradients. What "tensor", "context", "expert"
    and "stage" send depends on activations, which are not known here, so strategies with fewer such devices
    come first. Raises ValueError for a degree of -1.
    """
    kept: list[tuple[tuple[float, ...], Strategy]] = []
    left_out: list[tuple[Strategy, str]] = []
    for strategy in strategies:
        num_devices = strategy.num_devices
        try:
            table = _table(strategy, params, own)
        except ValueError as error:
            left_out.append((strategy, str(error)))
            continue
        if reason := _unsuited(strategy, table, state, memory_bytes):
            left_out.append((strategy, reason))
            continue
        by_activations = num_devices // (strategy.data * strategy.fsdp)
        sent = _collective_bytes(strategy, table, params, compute_dtype)
        kept.append(((by_activations, sent), strategy))
    return tuple(s for _, s in sorted(kept, key=lambda pair: pair[0])), tuple(left_out)


def _unsuited(
    strategy: Strategy, table: Table, state: PyTree, memory_bytes: int | None
) -> str | None:
    """Return why a strategy does not suit a model: an axis cuts nothing, or memory lacks; None if it does."""
    degrees = strategy.degrees
    cut = {axis for _, spec in table.values() for axis in _axes(spec)}
    for axis in (EXPERT_AXIS, STAGE_AXIS):
        if degrees[axis] > 1 and axis not in cut:
            return f"no parameter is cut over {axis}={degrees[axis]}"
    need = _bytes_per_device(strategy, table, state)
    if memory_bytes is not None and need > memory_bytes:
        return f"needs {need / 2**30:.1f} GiB of state per device, {memory_bytes / 2**30:.1f} GiB are there"
    return None


def state_bytes(specs: ParamSpecs, tree: PyTree) -> int:
    """Return the exact bytes of one device's part of a tree; leaves that follow no parameter are whole."""
    return _bytes_per_device(specs.layout.strategy, specs.table, tree)


def whole_leaves(specs: ParamSpecs, params: PyTree) -> tuple[str, ...]:
    """Return name, size and reason of large parameters that every device holds whole although others are cut.

    Large means more than 1 MiB and 1 % of the model. Parameters that a rule of the strategy names are left
    out, because that was a choice. `params` may be shapes; the largest comes first.
    """
    strategy = specs.layout.strategy
    degrees = {axis: strategy.degrees[axis] for axis in MODEL_AXES if strategy.degrees[axis] > 1}
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for _, leaf in leaves]
    least, share = WORTH_A_WORD
    large = max(least, share * sum(sizes))
    whole = []
    for (path, leaf), size in zip(leaves, sizes, strict=True):
        name = path_name(path)
        is_chosen = any(re.search(pattern, name) for pattern, _ in strategy.rules)
        if size > large and not is_chosen and not any(specs.spec(path, leaf.shape)):
            why = _why_whole(leaf.shape, degrees)
            whole.append((-size, f"{name}, {size / 2**20:.0f} MiB, because {why}"))
    return tuple(sentence for _, sentence in sorted(whole)) if degrees else ()


def _why_whole(shape: Sequence[int], degrees: Mapping[str, int]) -> str:
    over = ", ".join(f"{axis}={degree}" for axis, degree in degrees.items())
    sizes = " x ".join(map(str, shape))
    if any(_cuts(length, degree) for length in shape for degree in degrees.values()):
        return f"neither metadata nor a default cuts {sizes} over {over}"
    return f"{sizes} is divisible by none of {over}"


def _bytes_per_device(strategy: Strategy, table: Table, tree: PyTree) -> int:
    return sum(
        math.prod(x.shape) * x.dtype.itemsize // num_parts(_found(table, path, x.shape), strategy)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    )


def _collective_bytes(
    strategy: Strategy, table: Table, params: PyTree, compute_dtype: Any = None
) -> float:
    """Estimate the bytes that a device sends for its parameters in a step of one micro-batch.

    Rings: a leaf cut over "fsdp" is gathered forward and backward and its gradient scattered, 3 (f - 1) / f
    of the leaf. Gradients of leaves that n replicas and parts of sequences have in common are summed,
    2 (n - 1) / n of the leaf. Activations, and the overlap with computing, are left out.
    """
    total = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        spec = _found(table, path, leaf.shape)
        cut = set(_axes(spec))
        dtype = leaf.dtype if compute_dtype is None else jax.numpy.dtype(compute_dtype)
        part = math.prod(leaf.shape) * dtype.itemsize / num_parts(spec, strategy)
        num_gathered = strategy.fsdp if FSDP_AXIS in cut else 1
        summed = {*REPLICA_AXES, CONTEXT_AXIS} - cut
        num_summed = math.prod(strategy.degrees[axis] for axis in summed)
        total += part * (3 * (num_gathered - 1) + 2 * (num_summed - 1) / num_summed)
    return total


def num_parts(spec: Iterable[Any], strategy: Strategy) -> int:
    """Return how many parts a spec cuts an array into."""
    return math.prod(strategy.degrees[axis] for axis in _axes(spec))


def _axes(spec: Iterable[Any]) -> list[Any]:
    """Return the mesh axes that a spec names, over all its dimensions."""
    return [axis for entry in spec for axis in axes_of(entry)]


def _stacked_behind(shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Return the names of parameters with layers stacked along dimension 1: [inputs, layers, outputs].

    (`nn.scan(variable_axes={"params": 1})`.) All arrays of such a stack have the same length in dimension 1,
    and different ones in dimension 0.
    """
    stacks: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        found = _STACK.search(name)
        if found:
            stacks.setdefault(name[: found.end()], {})[name] = shape
    return {
        name
        for stack in stacks.values()
        if min(map(len, stack.values())) >= 2
        and len({shape[1] for shape in stack.values()}) == 1
        and len({shape[0] for shape in stack.values()}) > 1
        for name in stack
    }


def default_spec(
    name: str, shape: Sequence[int], strategy: Strategy, *, stacked_behind: bool = False
) -> PartitionSpec:
    """Return the spec of a parameter that neither a rule nor metadata names.

    `stacked_behind` says that its layers are stacked along dimension 1, not 0.

    >>> default_spec("mlp/up/kernel", (64, 256), Strategy(fsdp=2, tensor=4))
    P('fsdp', 'tensor')
    >>> default_spec("mlp/down/kernel", (256, 64), Strategy(fsdp=2, tensor=4))
    P('tensor', 'fsdp')
    """
    if not shape:
        return PartitionSpec()
    if stacked_behind:
        first, layers, *rest = shape
        spec = [*default_spec(name, (layers, first, *rest), strategy), None, None][: len(shape)]
        return PartitionSpec(spec[1], spec[0], *spec[2:])
    param = _Param(name, tuple(shape))
    entries: list[str | None] = [None] * len(shape)

    def cut(dim: int | None, axis: str) -> bool:
        if dim is None or entries[dim] is not None:
            return False
        if does_cut := _cuts(shape[dim], strategy.degrees[axis]):
            entries[dim] = axis
        return does_cut

    # However small: a stage that holds its own layers' vectors needs no collective for them.
    cut(param.stack_dim, STAGE_AXIS)
    if not param.is_small:
        cut(param.expert_dim, EXPERT_AXIS)
        cut(param.layer[1], TENSOR_AXIS)
        any(cut(dim, FSDP_AXIS) for dim in sorted(range(len(shape)), key=param.reluctance))
    return PartitionSpec(*entries) if any(entries) else PartitionSpec()


def _cuts(length: int, degree: int) -> bool:
    return degree > 1 and length % degree == 0


@dataclass(frozen=True)
class _Param:
    """What the name and the shape of a parameter tell about the layer that it belongs to."""

    name: str
    shape: Sequence[int]

    @cached_property
    def layer(self) -> tuple[int, int | None]:
        """How many trailing dimensions are the layer's own, and the one that "tensor" cuts (None: none)."""
        parts = re.split(r"[/.]", self.name)
        leaf = parts[-1]
        owner = parts[-2] if _ARRAY.search(leaf) and len(parts) > 1 else leaf
        num_dims = len(self.shape)
        if num_dims == 1 or _VECTOR.search(leaf):
            return 1, None
        rows, columns = num_dims - 2, num_dims - 1
        is_table = leaf == "embedding" or (_TABLE.search(owner) and leaf != "kernel")
        # The first that holds counts.
        guesses = (
            # Every device reads all positions.
            (_POSITIONS.search(owner) or _POSITIONS.search(leaf), 2, None),
            (is_table, 2, rows),
            (self._takes_heads_apart(owner), 3, rows),
            (self._joins_heads(owner), 3, num_dims - 3),
            (_WIDENING.search(owner), 2, columns),
            (_NARROWING.search(owner), 2, rows),
            (self.shape[rows] > self.shape[columns], 2, rows),
            (True, 2, columns),
        )
        return next((num_own, dim) for holds, num_own, dim in guesses if holds)

    def _takes_heads_apart(self, owner: str) -> bool:
        """Return whether it is [inputs, heads, head], as flax's attention has it.

        In a stack of plain matrices, [layers, inputs, outputs], the first dimension is the short one.
        """
        is_named = len(self.shape) >= 3 and _HEADS_IN.search(owner) is not None
        return is_named and self.shape[-3] >= self.shape[-1]

    def _joins_heads(self, owner: str) -> bool:
        """Return whether it is [heads, head, outputs], as flax's attention has it, and no image kernel."""
        is_named = len(self.shape) >= 3 and _HEADS_OUT.search(owner) is not None
        is_image = len(self.shape) == 4 and self.shape[0] == self.shape[1]
        return is_named and not is_image and self.shape[-2] < self.shape[-1]

    @property
    def first_own(self) -> int:
        """First dimension that is the layer's own; layers and experts are stacked in front of it."""
        return len(self.shape) - self.layer[0]

    @cached_property
    def is_expert(self) -> bool:
        """Whether the experts of a mixture are stacked in front."""
        is_named = _EXPERTS.search(self.name) and not _ONE_FOR_ALL.search(self.name)
        return len(self.shape) >= 3 and bool(is_named)

    @property
    def expert_dim(self) -> int | None:
        """Dimension along which the experts of a mixture are stacked."""
        return self.first_own - 1 if self.is_expert and self.first_own > 0 else None

    @property
    def stack_dim(self) -> int | None:
        """Dimension of layers that are scanned over."""
        is_stacked = self.first_own > self.is_expert and _STACK.search(self.name)
        return 0 if is_stacked else None

    @property
    def is_small(self) -> bool:
        """Whether cutting it is not worth a collective."""
        if math.prod(self.shape) < MIN_ELEMENTS:
            return True
        is_stacked = len(self.shape) == 2 and _STACK.search(self.name)
        is_vector = self.layer[0] == 1 and (len(self.shape) == 1 or is_stacked)
        return bool(is_vector) and self.shape[-1] < MIN_VECTOR_ELEMENTS

    def reluctance(self, dim: int) -> tuple[bool, bool, int, int]:
        """Return the sort key of a dimension: "fsdp" takes the first that its degree divides.

        Layers that are scanned over come last: if their dimension were cut, the whole stack would have to be
        gathered before the loop.
        """
        return dim < self.first_own, dim == self.layer[1], -self.shape[dim], -dim


def _beside_its_matrix(
    name: str, specs: Mapping[str, tuple[tuple[int, ...], PartitionSpec]]
) -> PartitionSpec:
    """Return the spec of a leaf; a bias is cut over "tensor" if the outputs of its matrix are.

    If it stayed whole, its gradient would have to be gathered: four times in the backward pass of a
    transformer block that otherwise needs three sums.
    """
    shape, spec = specs[name]
    parent, _, leaf = name.rpartition("/")
    if not shape or not _BIAS.search(leaf):
        return spec
    for beside in ("kernel", "weight", "w"):
        matrix, cut = specs.get(f"{parent}/{beside}" if parent else beside, ((), ()))
        back = _cut_output(shape, matrix, cut)
        if back is not None:
            entries = [*spec, *[None] * (len(shape) - len(spec))]
            entries[-back] = TENSOR_AXIS
            return _trimmed(entries)
    return spec


def _cut_output(bias: tuple[int, ...], matrix: tuple[int, ...], spec: Iterable[Any]) -> int | None:
    """Return the output dimension of a matrix that "tensor" cuts, from the end; None if no bias has it."""
    # If layers are stacked behind, [inputs, layers, outputs], the bias is [layers, outputs].
    outputs = bias if matrix[-len(bias) :] == bias else bias[1:]
    dims = [dim for dim, entry in enumerate(spec) if TENSOR_AXIS in axes_of(entry)]
    if not dims or not outputs or matrix[-len(outputs) :] != outputs:
        return None
    back = len(matrix) - dims[0]
    return back if back <= len(outputs) else None


def _without_whole(spec: Iterable[Any], strategy: Strategy) -> PartitionSpec:
    """Return the spec without axes of degree 1 and without trailing Nones."""
    degrees = strategy.degrees
    return _trimmed(
        [tuple(axis for axis in axes_of(entry) if degrees[axis] > 1) or None for entry in spec]
    )


def _trimmed(entries: list[Any]) -> PartitionSpec:
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _checked(
    name: str, shape: tuple[int, ...], spec: PartitionSpec, strategy: Strategy, source: str
) -> PartitionSpec:
    """Return `spec`; raise ValueError, which names its `source`, if the parameter cannot follow it."""
    check_axes(spec, f"{source} for {name}")
    exact = f"a rule of the strategy, ('^{re.escape(name)}$', PartitionSpec(...))"
    if len(spec) > len(shape):
        raise ValueError(
            f"{source} gives {name} the spec {spec} with {len(spec)} dimensions; it has shape {shape}. "
            f"Shorten the spec, or put {exact} before it."
        )
    for dim, entry in enumerate(spec):
        degree = num_parts([entry], strategy)
        if shape[dim] % degree:
            over = " x ".join(f"{axis}={strategy.degrees[axis]}" for axis in axes_of(entry))
            raise CannotDivide(
                f"{source} cuts dimension {dim} of {name}, of length {shape[dim]}, over {over}, "
                f"which does not divide it. The nearest degrees that work are "
                f"{_nearest_divisors(shape[dim], degree)}; or put {exact} before it."
            )
    return spec


def _nearest_divisors(length: int, degree: int) -> str:
    """Return the divisors of `length` next below and above `degree`, which does not divide it.

    >>> _nearest_divisors(12, 5), _nearest_divisors(12, 24)
    ('4 and 6', '12')
    """
    works = [n for n in range(1, length + 1) if length % n == 0]
    nearest = [max(n for n in works if n < degree), *[n for n in works if n > degree][:1]]
    return " and ".join(map(str, nearest))
