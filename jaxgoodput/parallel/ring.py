"""Attention over sequences that are cut over the mesh axis "context": keys travel in a ring, or heads change.

`ring_attention`: every device keeps its queries, and keys and values go round; each device adds what it sees
of them with a running softmax (Liu et al. 2023, "Ring attention"). No device ever holds all keys. The
backward pass goes round again, with the gradients of keys and values beside them, instead of saving what
passed by. With a causal mask, the device with the last positions would do nearly all the work, so each device
takes one block of the first half of the sequence and the block opposite to it in the second half ("zigzag");
then every device computes two of four pairs of blocks in every turn. With a window, work is even as it is,
and the ring ends with the last device that a window reaches.

`all_to_all_attention`: devices exchange parts, so that each has all positions of some heads, and exchange the
results back (Jacobs et al. 2023, "DeepSpeed Ulysses"). It sends less, if the degree is above 2 or so and
heads are many, but the degree must divide the heads.

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

    def of(self, query_at: Array, key_at: Array, length: int) -> Array | None:
        """Return [length, length] which keys of one block the queries of another see; None = all."""
        if not self.causal:
            return None
        query = query_at + jnp.arange(length)[:, None]
        key = key_at + jnp.arange(length)[None, :]
        seen = key <= query
        return seen if self.window is None else seen & (key > query - self.window)


def ring_attention(
    query: Queries,
    key: Keys,
    value: Keys,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    segments: Segments | None = None,
) -> Queries:
    """Return attention over positions that are cut over "context": keys go round in a ring.

    `query` and the result are `[batch, length, heads, head]`; `key` and `value` have `kv_heads`.
    Groups of `heads / kv_heads` query heads share keys and values. `window`: with `causal`, how many
    positions a query sees, its own included. `scale` of the products: by default 1 / sqrt(head). `segments`:
    positions see those of the same number only, as in packed rows.

    Each device receives the keys and values of every other device once, and in the backward pass again, with
    their gradients in float32. The balance of a causal mask costs an exchange of queries, keys, values and
    results besides.

    Raises ValueError if lengths, heads and degrees do not divide as they must.
    """
    degree = _degree()
    mask = _checked(query, key, value, causal, window, scale, degree)
    numbers = None if segments is None else jnp.asarray(segments)
    if degree == 1:
        return _alone(query, key, value, mask, numbers)
    zigzag = causal and window is None
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
    scale: float | None = None,
    segments: Segments | None = None,
) -> Queries:
    """Return attention over positions that are cut over "context": devices exchange heads.

    While it computes, each device has all positions of some heads. Arguments as of `ring_attention`. If
    there are fewer heads of keys than devices in "context", keys are repeated.

    Raises ValueError if the degree of "context" does not divide the heads of a device.
    """
    degree = _degree()
    mask = _checked(query, key, value, causal, window, scale, degree)
    numbers = None if segments is None else jnp.asarray(segments)
    if degree == 1:
        return _alone(query, key, value, mask, numbers)

    def local(query: Array, key: Array, value: Array, *segments: Array) -> Array:
        heads, kv_heads = query.shape[2], key.shape[2]
        copies = degree // math.gcd(degree, kv_heads)
        if heads % degree or heads % (kv_heads * copies):
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
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape.get(CONTEXT_AXIS, 1) if CONTEXT_AXIS not in mesh.manual_axes else 1


def _checked(
    query: Queries,
    key: Keys,
    value: Keys,
    causal: bool,
    window: int | None,
    scale: float | None,
    degree: int,
) -> _Mask:
    length, heads, head = query.shape[1:]
    if key.shape != value.shape or key.shape[1] != length or heads % key.shape[2]:
        raise ValueError(
            "keys and values must be [batch, length, kv_heads, head], where kv_heads divides the query's "
            f"heads; got queries {query.shape}, keys {key.shape}, values {value.shape}."
        )
    if length % degree:
        raise ValueError(
            f"{length} positions cannot be cut over {degree} devices of context. Pad them to a multiple."
        )
    if window is not None and not (causal and window >= 1):
        raise ValueError(f"window={window} needs causal=True and at least 1: a query sees itself.")
    return _Mask(causal, window, 1.0 / math.sqrt(head) if scale is None else scale)


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
    grouped = _grouped(query, key)
    own = blocks.begins(jax.lax.axis_index(CONTEXT_AXIS))
    states = [_nothing_seen(part) for part in blocks.parts(grouped)]
    passing = key, value, segments
    for turn in range(blocks.turns):
        following = _passed_on(passing, blocks.degree) if turn + 1 < blocks.turns else None
        its = blocks.begins((jax.lax.axis_index(CONTEXT_AXIS) - turn) % blocks.degree)
        for i, query_part in enumerate(blocks.parts(grouped)):
            for j, seen in enumerate(_blocks_of(blocks, passing)):
                same = _same(blocks, segments, i, seen)
                see = functools.partial(
                    _seen, blocks.mask, own[i], its[j], query_part, *seen[:2], same
                )
                some = blocks.mask.some(own[i], its[j], blocks.length)
                states[i] = (
                    see(states[i])
                    if some is None
                    else jax.lax.cond(some, see, lambda s: s, states[i])
                )
        passing = following
    mixed = jnp.concatenate([total / of[..., None] for _, of, total in states], 3)
    logs = jnp.concatenate([highest + jnp.log(of) for highest, of, _ in states], 3)
    found = _ungrouped(mixed).astype(query.dtype)
    return found, (query, key, value, segments, found, logs)


def _ring_backward(blocks, saved, gradient):
    query, key, value, segments, found, logs = saved
    grouped, given = _grouped(query, key), _grouped(gradient, key)
    # What the softmax takes away: the mean of the gradient under its weights.
    means = jnp.einsum(
        "blkgh,blkgh->bkgl", *(x.astype(jnp.float32) for x in (given, _grouped(found, key)))
    )
    own = blocks.begins(jax.lax.axis_index(CONTEXT_AXIS))
    of_queries = [blocks.parts(x) for x in (grouped, given)]
    of_queries += [blocks.parts(x, 3) for x in (logs, means)]
    to_query = [jnp.zeros(part.shape, jnp.float32) for part in blocks.parts(grouped)]
    passing = key, value, segments
    gradients = [[jnp.zeros(x.shape, jnp.float32) for x in blocks.parts(y)] for y in (key, value)]
    for turn in range(blocks.turns):
        following = _passed_on(passing, blocks.degree) if turn + 1 < blocks.turns else None
        its = blocks.begins((jax.lax.axis_index(CONTEXT_AXIS) - turn) % blocks.degree)
        for i, of_query in enumerate(zip(*of_queries, strict=True)):
            for j, seen in enumerate(_blocks_of(blocks, passing)):
                same = _same(blocks, segments, i, seen)
                add = functools.partial(
                    _gradients, blocks.mask, own[i], its[j], of_query, *seen[:2], same
                )
                some = blocks.mask.some(own[i], its[j], blocks.length)
                before = to_query[i], gradients[0][j], gradients[1][j]
                after = (
                    add(before) if some is None else jax.lax.cond(some, add, lambda s: s, before)
                )
                to_query[i], gradients[0][j], gradients[1][j] = after
        if turn + 1 < blocks.turns:
            gradients = _passed_on(gradients, blocks.degree)
        passing = following
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


def _blocks_of(blocks: _Blocks, passing) -> list[tuple[Array, Array, Array | None]]:
    key, value, segments = passing
    numbers = [None] * 2 if segments is None else blocks.parts(segments)
    return list(zip(blocks.parts(key), blocks.parts(value), numbers, strict=False))


def _same(blocks: _Blocks, segments: Array | None, block: int, seen) -> Array | None:
    """Return [batch, 1, 1, queries, keys] whether both are of one segment; None if there are none."""
    if segments is None:
        return None
    own = blocks.parts(segments)[block]
    return (own[:, :, None] == seen[2][:, None, :])[:, None, None]


def _nothing_seen(query: Array) -> tuple[Array, Array, Array]:
    """Return the state before any key: highest product, sum of weights and weighted sum of values."""
    batch, length, kv_heads, groups, head = query.shape
    shape = batch, kv_heads, groups, length
    low = jnp.full(shape, -jnp.inf, jnp.float32)
    return low, jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, head), jnp.float32)


def _products(mask: _Mask, query_at, key_at, query, key, same) -> Array:
    """Return [batch, kv_heads, groups, queries, keys] scaled products, -inf where a query does not see."""
    products = jnp.einsum("blkgh,bmkh->bkglm", query, key, preferred_element_type=jnp.float32)
    products *= mask.scale
    for seen in (mask.of(query_at, key_at, query.shape[1]), same):
        if seen is not None:
            products = jnp.where(seen, products, -jnp.inf)
    return products


def _seen(mask: _Mask, query_at, key_at, query, key, value, same, state):
    """Return the state after seeing a block of keys."""
    before, total, mixed = state
    products = _products(mask, query_at, key_at, query, key, same)
    highest = jnp.maximum(before, products.max(-1))
    safe = jnp.where(jnp.isfinite(highest), highest, 0.0)  # nothing seen yet
    weights = jnp.exp(products - safe[..., None])
    shrink = jnp.exp(before - safe)
    more = jnp.einsum(
        "bkglm,bmkh->bkglh", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    return highest, total * shrink + weights.sum(-1), mixed * shrink[..., None] + more


def _gradients(mask: _Mask, query_at, key_at, of_query, key, value, same, before):
    """Return the gradients of queries, keys and values, plus what one pair of blocks adds."""
    query, given, logs, means = of_query
    to_query, to_key, to_value = before
    products = _products(mask, query_at, key_at, query, key, same)
    weights = jnp.exp(products - logs[..., None])
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    to_value += product("bkglm,blkgh->bmkh", weights.astype(given.dtype), given)
    to_weights = product("blkgh,bmkh->bkglm", given, value)
    to_products = (weights * (to_weights - means[..., None]) * mask.scale).astype(query.dtype)
    to_query += product("bkglm,bmkh->blkgh", to_products, key)
    to_key += product("bkglm,blkgh->bmkh", to_products, query)
    return to_query, to_key, to_value


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
