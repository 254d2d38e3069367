"""Attention over sequences that are cut over the mesh axis "context": keys travel in a ring, or heads change.

`ring_attention`: every device keeps its queries, and keys and values go round; each device adds what it sees
of them with a running softmax (Liu et al. 2023, "Ring attention"). A device holds its own keys, those that it
computes with and those that arrive. The backward pass goes round again, with the gradients of keys and values
beside them, instead of saving what passed by. With a causal mask, the device with the last positions would
do nearly all the work, so each device takes one block of the first half of the sequence and the block
opposite to it in the second half ("zigzag"); then every device computes two of four pairs of blocks in every
turn. With a window that is short beside the sequence, work is nearly even as it is, and the ring ends with
the last device that a window reaches. A device multiplies its queries with `KEYS_AT_ONCE` keys at a time, so
memory grows with its positions and not with their square, if these have a divisor that allows such parts.

`all_to_all_attention`: devices exchange parts, so that each has all positions of some heads, and exchange the
results back (Jacobs et al. 2023, "DeepSpeed Ulysses"). It sends less, if the degree is above 2 or so and
heads are many, but the degree must divide the heads, and each device attends over the whole sequence, with
the memory that `jax.nn.dot_product_attention` takes for that.

Both equal attention on one device, up to rounding. Without a mesh, or if nothing is cut over "context", they
are `jax.nn.dot_product_attention`.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxgoodput.parallel.strategy import CONTEXT_AXIS, REPLICA_AXES, TENSOR_AXIS

KEYS_AT_ONCE = 1024  # most keys that a device's queries are multiplied with at a time
LEAST_KEYS_AT_ONCE = 128

Queries = Float[Array, "batch length heads head"]
Keys = Float[Array, "batch length kv_heads head"]
Segments = Int[Array, "batch length"] | Int[np.ndarray, "batch length"]


class _Mask(NamedTuple):
    """Which keys a query sees."""

    causal: bool
    window: int | None
    scale: float

    def some(self, query_at: Array, key_at: Array, length: int) -> Array | None:
        """Return whether any query of a block sees any key of another; None = always.

        The blocks have `length` positions and begin at `query_at` and `key_at`.
        """
        if not self.causal:
            return None
        some = key_at < query_at + length
        if self.window is not None:
            some &= key_at + length > query_at - self.window + 1
        return some

    def of(self, query_at: Array, key_at: Array, num_queries: int, num_keys: int) -> Array | None:
        """Return [queries, keys] which of the keys the queries see, by where they begin; None = all."""
        if not self.causal:
            return None
        query = query_at + jnp.arange(num_queries)[:, None]
        key = key_at + jnp.arange(num_keys)[None, :]
        seen = key <= query
        return seen if self.window is None else seen & (key > query - self.window)


def ring_attention(
    query: Queries,
    key: Keys,
    value: Keys,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | Array | None = None,
    segments: Segments | None = None,
) -> Queries:
    """Return attention over positions that are cut over "context": keys go round in a ring.

    `query` and the result are `[batch, length, heads, head]`; `key` and `value` have `kv_heads`.
    Groups of `heads / kv_heads` query heads share keys and values. `window`: with `causal`, how many
    positions a query sees, its own included. `scale` of the products: by default 1 / sqrt(head). `segments`:
    a position sees only positions with its own number, as in packed rows.

    Call it on a whole batch. Under `jax.vmap` over samples, name the axes of the replicas (`spmd_axis_name`),
    or every replica computes all samples. Rows and heads are cut over replicas and "tensor" if these divide
    them. It has gradients of any order in reverse mode, but no `jax.jvp`. Inside a `jax.shard_map` over other
    axes, that one needs `check_vma=False`.

    Each device receives the keys and values of every other device once, and in the backward pass again, with
    their gradients in float32. The balance of a causal mask costs an exchange of queries, keys, values and
    results besides.

    Raises ValueError if lengths, heads and degrees do not divide as they must.
    """
    degree, mask, query, numbers = _ready(query, key, value, segments, causal, window, scale)
    if degree == 1:
        return _alone(query, key, value, mask, numbers)
    zigzag = causal and mask.window is None
    if zigzag and query.shape[1] // degree % 2:
        raise ValueError(
            f"causal ring_attention halves the positions of each device; {query.shape[1]} positions on "
            f"{degree} devices are {query.shape[1] // degree} each. Take a length that {2 * degree} divides."
        )
    blocks = _Blocks(degree, query.shape[1] // degree, zigzag, mask)

    def local(query: Array, key: Array, value: Array, *segments: Array) -> Array:
        moved = [_to_zigzag(x, degree) if zigzag else x for x in (query, key, value, *segments)]
        found = _ring(blocks, *moved[:3], moved[3] if segments else None)
        return _from_zigzag(found, degree) if zigzag else found

    return _over_devices(local, query, key, value, numbers)


def all_to_all_attention(
    query: Queries,
    key: Keys,
    value: Keys,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | Array | None = None,
    segments: Segments | None = None,
) -> Queries:
    """Return attention over positions that are cut over "context": devices exchange heads.

    While it computes, each device has all positions of some heads. Arguments, and where it may be called, as
    of `ring_attention`. If the degree of "context" does not divide the heads of keys, keys are repeated and
    sent several times.

    Raises ValueError if the degree of "context" does not divide the heads of a device.
    """
    degree, mask, query, numbers = _ready(query, key, value, segments, causal, window, scale)
    if degree == 1:
        return _alone(query, key, value, mask, numbers)

    def local(query: Array, key: Array, value: Array, *segments: Array) -> Array:
        heads, kv_heads = query.shape[2], key.shape[2]
        copies = degree // math.gcd(degree, kv_heads)
        if heads % degree:
            raise ValueError(
                f"all_to_all_attention deals {heads} heads ({kv_heads} of keys) on each device out to "
                f"{degree} devices, which does not come out even. Use ring_attention, or a degree of context "
                "that divides them."
            )
        key, value = (jnp.repeat(x, copies, axis=2) for x in (key, value))
        query, key, value = (
            jax.lax.all_to_all(x, CONTEXT_AXIS, 2, 1, tiled=True) for x in (query, key, value)
        )
        whole = (jax.lax.all_gather(x, CONTEXT_AXIS, axis=1, tiled=True) for x in segments)
        mixed = _alone(query, key, value, mask, next(whole, None))
        return jax.lax.all_to_all(mixed, CONTEXT_AXIS, 1, 2, tiled=True)

    return _over_devices(local, query, key, value, numbers)


def _degree() -> int:
    """Return the degree of "context" in the current mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    degree = mesh.shape.get(CONTEXT_AXIS, 1)
    if degree > 1 and CONTEXT_AXIS in mesh.manual_axes:
        raise ValueError(
            f"this is inside a shard_map over {CONTEXT_AXIS!r}, where a device sees its own positions only. "
            f"Leave {CONTEXT_AXIS!r} out of its axis_names: the function cuts the positions itself."
        )
    if degree > 1 and mesh.explicit_axes:
        raise ValueError(
            f"the mesh has explicit axes, {', '.join(mesh.explicit_axes)}. Make it with AxisType.Auto, as "
            "layouts do."
        )
    return degree


def _checked(
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None,
    causal: bool,
    window: int | None,
    degree: int,
) -> int | None:
    """Refuse what does not fit together; returns the window, or None if it hides nothing."""
    shapes = f"queries {query.shape}, keys {key.shape}, values {value.shape}"
    if query.ndim != 4 or key.ndim != 4 or query.shape[2] % max(key.shape[2], 1):
        raise ValueError(
            "queries must be [batch, length, heads, head], and keys and values [batch, length, kv_heads, "
            f"head], where kv_heads divides heads; got {shapes}."
        )
    same = (*query.shape[:2], key.shape[2], query.shape[3])
    if key.shape != same or value.shape != same:
        raise ValueError(
            f"queries, keys and values must have one batch, length and head; got {shapes}."
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"queries, keys and values must have one type; got {query.dtype}, {key.dtype}, {value.dtype}."
        )
    if segments is not None and (
        segments.shape != query.shape[:2] or not jnp.issubdtype(segments.dtype, jnp.integer)
    ):
        raise ValueError(
            f"segments must be integers [batch, length], here {query.shape[:2]}; got {segments.dtype} "
            f"{segments.shape}."
        )
    length = query.shape[1]
    if length % degree:
        raise ValueError(
            f"{length} positions cannot be cut over {degree} devices of context. Pad them to a multiple."
        )
    if window is not None and not (causal and window >= 1):
        raise ValueError(f"window={window} needs causal=True and at least 1: a query sees itself.")
    return None if window is None or window >= length else window


def _ready(
    query: Array,
    key: Array,
    value: Array,
    segments: Segments | None,
    causal: bool,
    window: int | None,
    scale: float | Array | None,
) -> tuple[int, _Mask, Array, Array | None]:
    """Return the degree of "context", what a query sees, the queries and the numbers of the segments."""
    degree = _degree()
    numbers = None if segments is None else jnp.asarray(segments)
    window = _checked(query, key, value, numbers, causal, window, degree)
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    elif not isinstance(scale, float | int):  # a learned one, which has a gradient
        query, scale = (query * scale).astype(query.dtype), 1.0
    return degree, _Mask(causal, window, float(scale)), query, numbers


def _alone(query: Array, key: Array, value: Array, mask: _Mask, segments: Array | None) -> Array:
    same = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]
    window = None if mask.window is None else (mask.window - 1, 0)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=same,
        scale=mask.scale,
        is_causal=mask.causal,
        local_window_size=window,
    )


def _over_devices(
    local: Callable[..., Array], query: Array, key: Array, value: Array, segments: Array | None
) -> Array:
    """Apply `local` to each device's rows, positions and heads."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = [axis for axis in mesh.axis_names if axis not in mesh.manual_axes]
    rows = tuple(axis for axis in REPLICA_AXES if axis in axes)
    rows = rows if query.shape[0] % math.prod(mesh.shape[axis] for axis in rows) == 0 else ()
    divides = TENSOR_AXIS in axes and key.shape[2] % mesh.shape[TENSOR_AXIS] == 0
    heads = PartitionSpec(rows, CONTEXT_AXIS, TENSOR_AXIS if divides else None, None)
    more = () if segments is None else (segments,)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(heads, heads, heads, *[PartitionSpec(rows, CONTEXT_AXIS)] * len(more)),
        out_specs=heads,
        axis_names=frozenset(axes),
        check_vma=False,
    )(query, key, value, *more)


class _Blocks(NamedTuple):
    """How positions lie on the devices of "context"."""

    degree: int
    positions: int  # of a device
    zigzag: bool  # whether a device has block i and, opposite, block 2 degree - 1 - i
    mask: _Mask

    @property
    def turns(self) -> int:
        """How many devices' keys each device needs, its own included."""
        if self.mask.window is None:
            return self.degree
        return min(self.degree, 1 + math.ceil((self.mask.window - 1) / self.positions))

    @property
    def length(self) -> int:
        return self.positions // 2 if self.zigzag else self.positions

    def begins(self, device: Array) -> list[Array]:
        """Return the first position of each block of a device."""
        if not self.zigzag:
            return [device * self.positions]
        return [device * self.length, (2 * self.degree - 1 - device) * self.length]

    def parts(self, x: Array, axis: int = 1) -> list[Array]:
        """Return the blocks of what a device holds."""
        return jnp.split(x, 2, axis) if self.zigzag else [x]


def _passed_on(tree, degree: int):
    """Hand something to the next device of the ring."""
    to_next = [(i, (i + 1) % degree) for i in range(degree)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, CONTEXT_AXIS, to_next), tree)


def _in_turns(
    blocks: _Blocks, query: Array, key: Array, value: Array, segments: Array | None
) -> Array:
    return _ring_forward(blocks, query, key, value, segments)[0]


def _ring_forward(blocks, query, key, value, segments):
    queries = blocks.parts(_grouped(query, key))
    numbers = None if segments is None else blocks.parts(segments)
    device = jax.lax.axis_index(CONTEXT_AXIS)
    own = blocks.begins(device)

    def see(turn, passing, states):
        its = blocks.begins((device - turn) % blocks.degree)
        new = list(states)
        for i, j, seen in _pairs(blocks, passing):
            same = None if numbers is None else numbers[i]
            step = functools.partial(_seen, blocks.mask, own[i], its[j], queries[i], seen, same)
            new[i] = _if_any(blocks.mask.some(own[i], its[j], blocks.length), step, new[i])
        return new

    def turn(carried, number):
        passing, states = carried
        following = _passed_on(passing, blocks.degree)
        return (following, see(number, passing, states)), None

    begin = (key, value, segments), [_nothing_seen(part) for part in queries]
    (passing, states), _ = jax.lax.scan(turn, begin, jnp.arange(blocks.turns - 1))
    states = see(blocks.turns - 1, passing, states)
    mixed = jnp.concatenate([total / of[..., None] for _, of, total in states], 3)
    logs = jnp.concatenate([highest + jnp.log(of) for highest, of, _ in states], 3)
    found = _ungrouped(mixed).astype(query.dtype)
    return found, (query, key, value, segments, found, logs)


def _ring_backward(blocks, saved, gradient):
    query, key, value, segments, found, logs = saved
    grouped, given = _grouped(query, key), _grouped(gradient, key)
    # What the softmax takes away: the mean of the gradient under its weights.
    wide = (x.astype(jnp.float32) for x in (given, _grouped(found, key)))
    means = jnp.einsum("blkgh,blkgh->bkgl", *wide)
    of_queries = [blocks.parts(x) for x in (grouped, given)]
    of_queries += [blocks.parts(x, 3) for x in (logs, means)]
    queries = [*zip(*of_queries, strict=True)]
    numbers = None if segments is None else blocks.parts(segments)
    device = jax.lax.axis_index(CONTEXT_AXIS)
    own = blocks.begins(device)

    def add(turn, passing, to_query, gradients):
        its = blocks.begins((device - turn) % blocks.degree)
        to_query, gradients = list(to_query), [list(parts) for parts in gradients]
        for i, j, seen in _pairs(blocks, passing):
            same = None if numbers is None else numbers[i]
            step = functools.partial(
                _gradients, blocks.mask, own[i], its[j], queries[i], seen, same
            )
            before = to_query[i], gradients[0][j], gradients[1][j]
            after = _if_any(blocks.mask.some(own[i], its[j], blocks.length), step, before)
            to_query[i], gradients[0][j], gradients[1][j] = after
        return to_query, gradients

    def turn(carried, number):
        passing, to_query, gradients = carried
        following = _passed_on(passing, blocks.degree)
        to_query, gradients = add(number, passing, to_query, gradients)
        return (following, to_query, _passed_on(gradients, blocks.degree)), None

    to_query = [jnp.zeros(part.shape, jnp.float32) for part in of_queries[0]]
    none = [[jnp.zeros(x.shape, jnp.float32) for x in blocks.parts(y)] for y in (key, value)]
    begin = (key, value, segments), to_query, none
    (passing, *sums), _ = jax.lax.scan(turn, begin, jnp.arange(blocks.turns - 1))
    to_query, gradients = add(blocks.turns - 1, passing, *sums)
    gradients = _home(gradients, blocks)
    to_key, to_value = (jnp.concatenate(parts, 1).astype(key.dtype) for parts in gradients)
    return _flat(jnp.concatenate(to_query, 1)).astype(query.dtype), to_key, to_value, None


_ring = jax.custom_vjp(_in_turns, nondiff_argnums=(0,))
_ring.defvjp(_ring_forward, _ring_backward)


def _home(tree, blocks: _Blocks):
    """Bring something that has been passed on for all turns back to where it came from."""
    back = blocks.turns - 1
    to_origin = [(i, (i - back) % blocks.degree) for i in range(blocks.degree)]
    if not back:
        return tree
    return jax.tree.map(lambda x: jax.lax.ppermute(x, CONTEXT_AXIS, to_origin), tree)


def _pairs(blocks: _Blocks, passing):
    """Yield each pair of blocks: one of own queries, one of the keys, values and segments that pass."""
    parts = [[None] * 2 if x is None else blocks.parts(x) for x in passing]
    for i in range(2 if blocks.zigzag else 1):
        for j, seen in enumerate(zip(*parts, strict=False)):
            yield i, j, seen


def _if_any(some: Array | None, step: Callable, before):
    """Return what a step makes of `before` if it has any work; None = it always has."""
    return (
        step(before)
        if some is None
        else jax.lax.cond(some, step, lambda unchanged: unchanged, before)
    )


def _nothing_seen(query: Array) -> tuple[Array, Array, Array]:
    """Return the state before any key: highest product, sum of weights and weighted sum of values."""
    batch, length, kv_heads, groups, head = query.shape
    shape = batch, kv_heads, groups, length
    low = jnp.full(shape, -jnp.inf, jnp.float32)
    return low, jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, head), jnp.float32)


def _products(mask: _Mask, query_at, key_at, query, key, own_numbers, numbers) -> Array:
    """Return [batch, kv_heads, groups, queries, keys] scaled products, -inf where a query does not see."""
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    products = product("blkgh,bmkh->bkglm", query, key) * mask.scale
    seen = mask.of(query_at, key_at, query.shape[1], key.shape[1])
    if seen is not None:
        products = jnp.where(seen, products, -jnp.inf)
    if numbers is not None:
        same = own_numbers[:, :, None] == numbers[:, None, :]
        products = jnp.where(same[:, None, None], products, -jnp.inf)
    return products


def _seen(mask: _Mask, query_at, key_at, query, passing, own_numbers, state):
    """Return the state after seeing a block of keys, some of them at a time."""

    def see(state, part):
        begin, (key, value, numbers) = part
        before, total, mixed = state
        products = _products(mask, query_at, key_at + begin, query, key, own_numbers, numbers)
        highest = jnp.maximum(before, products.max(-1))
        safe = jnp.where(jnp.isfinite(highest), highest, 0.0)  # nothing seen yet
        weights = jnp.exp(products - safe[..., None])
        shrink = jnp.exp(before - safe)
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        more = product("bkglm,bmkh->bkglh", weights.astype(value.dtype), value)
        return (
            highest,
            total * shrink + weights.sum(-1),
            mixed * shrink[..., None] + more,
        ), None

    return jax.lax.scan(see, state, _in_parts(passing))[0]


def _gradients(mask: _Mask, query_at, key_at, of_query, passing, own_numbers, before):
    """Return the gradients of queries, keys and values, plus what one pair of blocks adds."""
    query, given, logs, means = of_query

    def add(to_query, part):
        begin, (key, value, numbers) = part
        products = _products(mask, query_at, key_at + begin, query, key, own_numbers, numbers)
        weights = jnp.exp(products - logs[..., None])
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        to_value = product("bkglm,blkgh->bmkh", weights.astype(given.dtype), given)
        to_weights = product("blkgh,bmkh->bkglm", given, value)
        to_products = (weights * (to_weights - means[..., None]) * mask.scale).astype(query.dtype)
        to_query += product("bkglm,bmkh->blkgh", to_products, key)
        return to_query, (product("bkglm,blkgh->bmkh", to_products, query), to_value)

    to_query, to_key, to_value = before
    to_query, found = jax.lax.scan(add, to_query, _in_parts(passing))
    more = (jnp.moveaxis(x, 0, 1).reshape(to_key.shape) for x in found)
    return to_query, to_key + next(more), to_value + next(more)


def _in_parts(passing):
    """Return where each part of the keys begins, and [parts, batch, keys, ...] of what passes."""
    length = passing[0].shape[1]
    fewest, most = -(-length // KEYS_AT_ONCE), length // LEAST_KEYS_AT_ONCE
    # Without a divisor in between, all at once: a handful of keys at a time would take for ever.
    count = next((n for n in range(fewest, most + 1) if length % n == 0), 1)

    def split(x):
        return jnp.moveaxis(x.reshape(x.shape[0], count, -1, *x.shape[2:]), 1, 0)

    return jnp.arange(count) * (length // count), jax.tree.map(split, passing)


def _grouped(query: Array, key: Array) -> Array:
    """Return [batch, length, kv_heads, groups, head]."""
    return query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[-1])


def _ungrouped(mixed: Array) -> Array:
    """Return [batch, kv_heads, groups, length, head] as [batch, length, heads, head]."""
    return _flat(jnp.moveaxis(mixed, 3, 1))


def _flat(grouped: Array) -> Array:
    """Return [batch, length, kv_heads, groups, head] as [batch, length, heads, head]."""
    return grouped.reshape(*grouped.shape[:2], -1, grouped.shape[-1])


def _exchanges(degree: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return to which device the first and the second half of each device's positions go for the zigzag."""

    def owner(block: int) -> int:
        return block if block < degree else 2 * degree - 1 - block

    devices = range(degree)
    return [(i, owner(2 * i)) for i in devices], [(i, owner(2 * i + 1)) for i in devices]


def _to_zigzag(x: Array, degree: int) -> Array:
    """Return a device's blocks i and 2 degree - 1 - i, from positions in order."""
    even, odd = (
        jax.lax.ppermute(half, CONTEXT_AXIS, to)
        for half, to in zip(jnp.split(x, 2, 1), _exchanges(degree), strict=True)
    )
    swap = jax.lax.axis_index(CONTEXT_AXIS) % 2 == 1
    return jnp.concatenate([jnp.where(swap, odd, even), jnp.where(swap, even, odd)], 1)


def _from_zigzag(x: Array, degree: int) -> Array:
    """Return a device's positions in order; undoes `_to_zigzag`."""
    near, far = jnp.split(x, 2, 1)
    swap = jax.lax.axis_index(CONTEXT_AXIS) % 2 == 1
    halves = jnp.where(swap, far, near), jnp.where(swap, near, far)
    back = ([(to, i) for i, to in pairs] for pairs in _exchanges(degree))
    return jnp.concatenate(
        [jax.lax.ppermute(half, CONTEXT_AXIS, to) for half, to in zip(halves, back, strict=True)], 1
    )
