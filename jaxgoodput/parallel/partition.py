"""Which dimension of which parameter is cut over which axis; optimizer state follows its parameter.

A parameter's spec comes from the first of: a rule of the strategy (a regex found in its path), the
model's own partitioning metadata, the defaults. The defaults cut layers as Megatron-LM does (Shoeybi
et al. 2019): a projection that widens is cut over its outputs, one that narrows again over its inputs,
attention over its heads, so that each pair needs one sum. What a layer is, names tell where they are
known, otherwise its shape. "fsdp" takes a dimension that does not depend on the degrees as long as they
divide it, so that a switch of strategies moves little. "expert" takes the experts of a mixture's weights,
"stage" the layers of a stack; "context" cuts no parameter. A wrong guess is slow, never wrong. Where a
default does not divide a dimension, the dimension stays whole; where a rule or metadata does not, that is
an error, by which `suitable` leaves a strategy out.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    """A rule, the model's metadata or the model itself cuts what the degrees do not divide."""


KeyPath = tuple[Any, ...]
# A model's own metadata: path -> spec.
OwnSpecs = Sequence[tuple[str, PartitionSpec]]
# Shape and spec of each parameter.
Table = Mapping[KeyPath, tuple[tuple[int, ...], PartitionSpec]]

# Smaller leaves are not worth a collective of their own.
MIN_ELEMENTS = 2**10
# A layer's vector stays whole up to here (as in DeepSpeed's ZeRO-3): cut, it would have to be gathered in
# every layer for next to no memory, and activations would follow it.
MIN_VECTOR_ELEMENTS = 2**17
# Smaller leaves, in bytes and as a part of the model, are not worth a word where they stay whole.
WORTH_A_WORD = 2**20, 0.01

# What a layer calls its array: the name before it says what the layer is for.
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
# Experts are stacked: [experts, inputs, outputs]. A router is not, nor is an expert that all tokens share.
_EXPERTS = re.compile(r"(^|[/._])(moe|experts?)([/._\d]|$)|MoE|Moe|Expert")
_ONE_FOR_ALL = re.compile(r"router|shared|^(?!.*[eE]xpert).*\bgate[/.](kernel|weight|w)$")
# Layers that are scanned over are stacked too; in a list of layers a number follows.
_STACK = re.compile(r"(^|[/.])(layers|blocks|stack|stages|h|Scan\w+_\d+)(?![/.]\d+([/.]|$))[/.]")


def path_name(path: KeyPath) -> str:
    """A leaf's path as rules see it; empty where the parameters are one bare array.

    >>> path_name(jax.tree_util.tree_leaves_with_path({"a": [0]})[0][0])
    'a/0'
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_by_name(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by `path_name`."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@dataclass(frozen=True)
class ParamSpecs:
    """The spec of every parameter under a strategy, and of whatever has a parameter's path and shape."""

    layout: Layout
    """The strategy, and its mesh."""
    table: Table
    """Shape and spec of each parameter."""

    def spec(self, path: KeyPath, shape: Sequence[int]) -> PartitionSpec:
        """The spec of a leaf: that of the parameter whose path ends its own; otherwise it is whole.

        The longest such path counts, and the shape must be the parameter's: factored moments, counts
        and statistics are whole.
        """
        return _found(self.table, path, shape)

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


def _found(table: Table, path: KeyPath, shape: Sequence[int]) -> PartitionSpec:
    for start in range(len(path) + 1):
        found = table.get(tuple(path[start:]))
        if found is not None and found[0] == tuple(shape):
            return found[1]
    return PartitionSpec()


def param_specs(layout: Layout, params: PyTree, own: OwnSpecs = ()) -> ParamSpecs:
    """The specs of `params` (shapes suffice) under a layout's strategy; axes of degree 1 left out.

    `params` are all parameters, frozen ones too; `own` is the model's metadata (`Variables.specs`).
    Raises ValueError where a rule or metadata matches no parameter, has more dimensions than one it
    matches; CannotDivide where it cuts a dimension that its degree does not divide.
    """
    return ParamSpecs(layout=layout, table=_table(layout.strategy, params, own))


def _table(strategy: Strategy, params: PyTree, own: OwnSpecs) -> Table:
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
    behind = _stacked_behind(dict(zip(names, shapes, strict=True)))
    for name, shape in zip(names, shapes, strict=True):
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
    return {tuple(path): specs[name] for name, (path, _) in zip(names, leaves, strict=True)}


def suitable(
    strategies: Iterable[Strategy],
    state: PyTree,
    params: PyTree,
    own: OwnSpecs = (),
    *,
    memory_bytes: int | None = None,
    compute_dtype: Any = None,
) -> tuple[tuple[Strategy, ...], tuple[tuple[Strategy, str], ...]]:
    """Those strategies that a model can follow, the cheapest to communicate first; the others, and why.

    `state` is all that is kept between steps, `params` the parameters in it; shapes and dtypes suffice. Left
    out are strategies whose rules or metadata do not divide, that cut no parameter over their "expert" or
    "stage", and whose part of the state alone is more than `memory_bytes`, bytes of one device.
    Activations, gradients and copies in `compute_dtype` (None: the parameters' own) come on top of it.

    The order is an estimate, of rings over parameters and gradients. What "tensor", "context", "expert" and
    "stage" send depends on activations, which are not known here: the fewer devices they take, the earlier.
    ValueError for a degree of -1.
    """
    kept: list[tuple[tuple[float, ...], Strategy]] = []
    left_out: list[tuple[Strategy, str]] = []
    for strategy in strategies:
        degrees, num_devices = strategy.degrees, strategy.num_devices
        try:
            table = _table(strategy, params, own)
        except ValueError as error:
            left_out.append((strategy, str(error)))
            continue
        cut = {axis for _, spec in table.values() for entry in spec for axis in axes_of(entry)}
        idle = [axis for axis in (EXPERT_AXIS, STAGE_AXIS) if degrees[axis] > 1 and axis not in cut]
        need = _bytes_per_device(strategy, table, state)
        if idle:
            left_out.append((strategy, f"no parameter is cut over {idle[0]}={degrees[idle[0]]}"))
        elif memory_bytes is not None and need > memory_bytes:
            sizes = (
                f"{need / 2**30:.1f} GiB of state per device, {memory_bytes / 2**30:.1f} GiB are"
            )
            left_out.append((strategy, f"needs {sizes} there"))
        else:
            by_activations = num_devices // (strategy.data * strategy.fsdp)
            sent = _collective_bytes(strategy, table, params, compute_dtype)
            kept.append(((by_activations, sent), strategy))
    return tuple(s for _, s in sorted(kept, key=lambda pair: pair[0])), tuple(left_out)


def state_bytes(specs: ParamSpecs, tree: PyTree) -> int:
    """Bytes of one device's part of a tree, exactly: a parameter's part, of other leaves the whole."""
    return _bytes_per_device(specs.layout.strategy, specs.table, tree)


def whole_leaves(specs: ParamSpecs, params: PyTree) -> tuple[str, ...]:
    """Sentences on the large parameters that every device holds whole although the strategy cuts, and why.

    Large is more than 1 MiB and 1 % of the model. Left out are those that a rule of the strategy speaks of:
    they were chosen. `params` may be shapes; the largest comes first.
    """
    strategy = specs.layout.strategy
    degrees = {axis: strategy.degrees[axis] for axis in MODEL_AXES if strategy.degrees[axis] > 1}
    over = ", ".join(f"{axis}={degree}" for axis, degree in degrees.items())
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for _, leaf in leaves]
    found = []
    for (path, leaf), size in zip(leaves, sizes, strict=True):
        name = path_name(path)
        is_chosen = any(re.search(pattern, name) for pattern, _ in strategy.rules)
        if is_chosen or not degrees or any(specs.spec(path, leaf.shape)):
            continue
        least, share = WORTH_A_WORD
        if size <= least or size <= share * sum(sizes):
            continue
        shape = " x ".join(map(str, leaf.shape))
        why = f"neither metadata nor a default cuts {shape} over {over}"
        if not any(_cuts(n, degree) for n in leaf.shape for degree in degrees.values()):
            why = f"{shape} is divisible by none of {over}"
        found.append((-size, f"{name}, {size / 2**20:.0f} MiB, stays whole because {why}."))
    return tuple(sentence for _, sentence in sorted(found))


def _bytes_per_device(strategy: Strategy, table: Table, tree: PyTree) -> int:
    return sum(
        math.prod(x.shape) * x.dtype.itemsize // num_parts(_found(table, path, x.shape), strategy)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    )


def _collective_bytes(
    strategy: Strategy, table: Table, params: PyTree, compute_dtype: Any = None
) -> float:
    """Bytes that a device sends for its parameters in a step of one micro-batch: an estimate.

    Rings: what "fsdp" cuts is gathered forward and backward and its gradient scattered, 3 (f - 1) / f of the
    leaf; gradients of what replicas and parts of sequences hold in common are summed, 2 (n - 1) / n.
    Activations and the overlap with computing are left out.
    """
    total = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        spec = _found(table, path, leaf.shape)
        cut = {axis for entry in spec for axis in axes_of(entry)}
        itemsize = (
            leaf.dtype if compute_dtype is None else jax.numpy.dtype(compute_dtype)
        ).itemsize
        part = math.prod(leaf.shape) * itemsize / num_parts(spec, strategy)
        num_gathered = strategy.fsdp if FSDP_AXIS in cut else 1
        summed = {*REPLICA_AXES, CONTEXT_AXIS} - cut
        num_summed = math.prod(strategy.degrees[axis] for axis in summed)
        total += part * (3 * (num_gathered - 1) + 2 * (num_summed - 1) / num_summed)
    return total


def num_parts(spec: Iterable[Any], strategy: Strategy) -> int:
    """Into how many parts a spec cuts what it is the spec of."""
    return math.prod(strategy.degrees[axis] for entry in spec for axis in axes_of(entry))


def _stacked_behind(shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Names of the parameters whose layers are stacked along dimension 1, as in [inputs, layers, outputs].

    (`nn.scan(variable_axes={"params": 1})`.) All arrays of such a stack have that length in common, and not
    their first one.
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
    """The spec of a parameter that no rule and no metadata speaks of.

    `stacked_behind`: its layers are stacked along dimension 1, not 0.

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
    num_own, preferred = _layer(name, shape)
    entries: list[str | None] = [None] * len(shape)
    first_own = len(shape) - num_own
    is_expert = len(shape) >= 3 and _EXPERTS.search(name) and not _ONE_FOR_ALL.search(name)
    num_stacked = first_own - bool(is_expert)
    # However small: a stage that holds its own layers' vectors needs no collective for them.
    if num_stacked > 0 and _STACK.search(name) and _cuts(shape[0], strategy.stage):
        entries[0] = STAGE_AXIS
    is_stacked = len(shape) == 2 and _STACK.search(name)
    is_vector = num_own == 1 and (len(shape) == 1 or is_stacked)
    if math.prod(shape) < MIN_ELEMENTS or is_vector and shape[-1] < MIN_VECTOR_ELEMENTS:
        return PartitionSpec(*entries) if any(entries) else PartitionSpec()
    if is_expert and first_own > 0 and _cuts(shape[first_own - 1], strategy.expert):
        entries[first_own - 1] = EXPERT_AXIS
    if preferred is not None and _cuts(shape[preferred], strategy.tensor):
        entries[preferred] = TENSOR_AXIS

    def reluctance(dim: int) -> tuple[bool, bool, int, int]:
        # Layers that are scanned over are stacked in front: cut there, the whole stack would have to
        # be put together before the loop.
        return dim < first_own, dim == preferred, -shape[dim], -dim

    for dim in sorted(range(len(shape)), key=reluctance):
        if entries[dim] is None and _cuts(shape[dim], strategy.fsdp):
            entries[dim] = FSDP_AXIS
            break
    return PartitionSpec(*entries)


def _cuts(length: int, degree: int) -> bool:
    return degree > 1 and length % degree == 0


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
        dims = [dim for dim, entry in enumerate(cut) if TENSOR_AXIS in axes_of(entry)]
        if not dims or not outputs or matrix[-len(outputs) :] != outputs:
            continue
        back = len(matrix) - dims[0]
        if back <= len(outputs):
            entries = [*spec, *[None] * (len(shape) - len(spec))]
            entries[-back] = TENSOR_AXIS
            return PartitionSpec(*entries[: max(i for i, e in enumerate(entries) if e) + 1])
    return spec


def _without_whole(spec: Iterable[Any], strategy: Strategy) -> PartitionSpec:
    """The spec without axes of degree 1 and without trailing Nones."""
    degrees = strategy.degrees
    entries = [
        tuple(axis for axis in axes_of(entry) if degrees[axis] > 1) or None for entry in spec
    ]
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
    for dim, entry in enumerate(spec):
        degree = num_parts([entry], strategy)
        if shape[dim] % degree:
            works = [n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0]
            below = max(n for n in works if n < degree)
            above = min((n for n in works if n > degree), default=None)
            nearest = f"{below}" if above is None else f"{below} and {above}"
            over = " x ".join(f"{axis}={strategy.degrees[axis]}" for axis in axes_of(entry))
            raise CannotDivide(
                f"{source} cuts dimension {dim} of {name}, of length {shape[dim]}, over {over}, "
                f"which does not divide it. The nearest degrees that work are {nearest}; or put {exact} "
                "before it."
            )
    return spec
