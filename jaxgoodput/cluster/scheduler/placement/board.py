"""A board of the nodes of one kind: which job holds which devices, and how to make room at the least price.

Placing the largest job first, each on the fullest node that still has room, never splits a job of a
power-of-two size (see `shapes`). The same holds around jobs that keep their devices, as long as there is
room. If there is none, `make_room` moves smaller jobs away from one node and places them like new ones.
"""

import copy
import functools
import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxgoodput.cluster.scheduler.placement.amounts import (
    NOTHING,
    Amounts,
    amounts_of_all,
    is_limited,
)
from jaxgoodput.cluster.scheduler.shapes import chunks, domain_of
from jaxgoodput.specs import Node, Shape

LIKELY_NODES = 64  # searched first for room; the other nodes only if none of these is suitable
MOST_STATES = 2000  # combinations of holders to evict that are kept while others are added
_FEW_STATES = 100  # so few are not searched for dominated ones, which takes longer than it saves
_BLOCK = 256  # states compared at once
_NO_ROOM = np.iinfo(np.int64).max

_States = dict[tuple[int, ...], tuple[float, tuple[str, ...]]]
"""The cheapest ways to free amounts: price and evicted requests, by what is still missing."""


class Request(NamedTuple):
    """Devices wanted for one job, or for the jobs of a share group, which all run on the same devices."""

    key: str
    shape: Shape
    price: float  # of moving it
    previous: Mapping[str, tuple[int, ...]]  # present devices, of whatever shape
    keeps: bool  # whether the present devices have the wanted shape, so that it may stay
    level: str | None = None  # all nodes must lie in one domain of this level
    needs: Amounts = NOTHING  # CPUs and memory for each device


class _Eviction(NamedTuple):
    """A way to free devices: the requests to move to other nodes, and the price of moving them."""

    price: float
    nodes: list[int]
    keys: set[str]  # of the requests to move


class Board:
    """Which requests hold which devices on nodes of one kind; a node's devices are bits of an integer."""

    def __init__(self, nodes: Sequence[Node], *, one_multi_node_job_per_node: bool = False):
        self.nodes = nodes
        self.node_size = max((n.num_devices for n in nodes if n.state != "down"), default=0)
        self.index = {node.name: i for i, node in enumerate(nodes)}
        self.mask = [0 if n.state == "down" else _bits(n) for n in nodes]
        self.up = np.array([node.state == "up" for node in nodes], dtype=bool)
        # Number of devices that new jobs may take: none on a node that is draining.
        self.free = np.array([m.bit_count() for m in self.mask], dtype=np.int64) * self.up
        self._on: list[set[str]] | None = None  # made if needed: to make room
        self.held: dict[str, dict[int, int]] = {}  # key -> node index -> bits
        self.requests: dict[str, Request] = {}
        self._kept: set[str] = set()  # requests that have their previous devices
        self.is_limited = any(map(is_limited, nodes))
        # CPUs and memory that are left on each node.
        self.left = amounts_of_all(nodes)
        self._exclusive = one_multi_node_job_per_node
        self._networked = np.zeros(len(nodes), dtype=bool)
        self._domains: dict[str, np.ndarray] = {}

    @property
    def on(self) -> list[set[str]]:
        """[nodes] keys of the requests that hold devices of each node."""
        if self._on is None:
            self._on = [set() for _ in self.nodes]
            for key, bits in self.held.items():
                for node in bits:
                    self._on[node].add(key)
        return self._on

    def copy(self) -> "Board":
        """Return a board with the same requests on the same devices, to be changed on its own."""
        found = copy.copy(self)
        found.mask, found.free = list(self.mask), self.free.copy()
        found._on = None if self._on is None else list(map(set, self._on))
        found.held, found.requests = dict(self.held), dict(self.requests)
        found.left = list(self.left)
        found._kept, found._networked = set(self._kept), self._networked.copy()
        return found

    def take(self, request: Request, bits: Mapping[int, int]):
        """Give devices, which must be free, to the request; `bits` is a bit mask of devices by node."""
        for node, taken in bits.items():
            assert taken & self.mask[node] == taken
            self.mask[node] &= ~taken
            if self.up[node]:
                self.free[node] -= taken.bit_count()
            if self._on is not None:
                self._on[node].add(request.key)
            if self.is_limited:
                self.left[node] = self.left[node].minus(request.needs.times(taken.bit_count()))
            if len(bits) > 1:
                self._networked[node] = True
        self.held[request.key] = dict(bits)
        self.requests[request.key] = request

    def release(self, key: str) -> Request:
        """Free the devices of the request with this key, remove the request from the board, and return it."""
        bits, request = self.held.pop(key), self.requests.pop(key)
        self._kept.discard(key)
        for node, taken in bits.items():
            self.mask[node] |= taken
            if self.is_limited:
                self.left[node] = self.left[node].plus(request.needs.times(taken.bit_count()))
            if self.up[node]:
                self.free[node] += taken.bit_count()
            if self._on is not None:
                self._on[node].discard(key)
            if len(bits) > 1:
                self._networked[node] = any(len(self.held[k]) > 1 for k in self.on[node])
        return request

    def room(self, request: Request) -> np.ndarray:
        """Return [nodes] how many free devices of each node the request can use, given its other needs."""
        if not (self.is_limited and request.needs):
            return self.free
        pairs = zip(self.left, self.free.tolist(), strict=True)
        return np.array([left.devices(request.needs, n) for left, n in pairs], dtype=np.int64)

    def keep(self, request: Request) -> bool:
        """Give the request its present devices if they have the wanted shape and are free; else False."""
        if not request.keeps:
            return False
        bits: dict[int, int] = {}
        for name, local in request.previous.items():
            node = self.index[name]
            taken = _mask_of(tuple(local))
            if taken & self.mask[node] != taken:
                return False
            if self.is_limited and not self.left[node].holds(request.needs.times(len(local))):
                return False
            bits[node] = taken
        if self._exclusive and len(bits) > 1 and self._networked[list(bits)].any():
            return False
        self.take(request, bits)
        self._kept.add(request.key)
        return True

    def fit(self, request: Request) -> bool:
        """Give the request free devices on the fewest nodes, the fullest first; False if none fit."""
        sizes = chunks(request.shape, self.node_size)
        if len(sizes) == 1:
            nodes = self._fullest(sizes[0], request)
        else:
            nodes = self._fit_several(sizes, request)
        if nodes is None:
            return False
        self.take_parts(request, dict(zip(nodes, sizes, strict=True)))
        return True

    def take_parts(self, request: Request, sizes: Mapping[int, int]):
        """Give the request free devices of these nodes: how many, by index of the node."""
        self.take(request, {node: self._pick(node, n, request) for node, n in sizes.items()})

    def _fullest(self, size: int, request: Request) -> list[int] | None:
        """Return the fullest node that has room; of equal ones the request's own, or else the first."""
        room = np.where(self.room(request) >= size, self.free, _NO_ROOM)
        best = int(room.argmin())
        if room[best] == _NO_ROOM:
            return None
        for name in request.previous:
            own = self.index.get(name)
            if own is not None and room[own] == room[best]:
                return [own]
        return [best]

    def _fit_several(self, sizes: list[int], request: Request) -> list[int] | None:
        room = self.room(request)
        room = np.where(self._networked, 0, room) if self._exclusive else room
        own = [self.index[n] for n in request.previous if n in self.index]
        for nodes in self._domain_groups(request.level, room, sizes):
            left = np.zeros(len(self.nodes), dtype=np.int64)
            left[nodes] = room[nodes]
            found = _fit_in(left, sizes, own)
            if found is not None:
                return found
        return None

    def _domain_groups(
        self, level: str | None, room: np.ndarray, sizes: list[int]
    ) -> Iterable[np.ndarray]:
        """Return the nodes of each topology domain with enough free devices, the domain with fewest first."""
        if level is None:
            return [np.arange(len(self.nodes))]
        domains = self.domain_ids(level)
        total = np.bincount(domains, weights=room)
        order = np.argsort(total, kind="stable")
        return [np.flatnonzero(domains == d) for d in order if total[d] >= sum(sizes)]

    def domain_ids(self, level: str) -> np.ndarray:
        """Return [nodes] the topology domain of each node at a level, as numbers from 0."""
        if level not in self._domains:
            names = [domain_of(node, level) for node in self.nodes]
            self._domains[level] = np.unique(names, return_inverse=True)[1]
        return self._domains[level]

    def _pick(self, node: int, count: int, request: Request) -> int:
        """Choose `count` free devices of a node, if possible an aligned block with many that it has now."""
        mask = self.mask[node]
        if mask.bit_count() == count:
            return mask
        own = sum(1 << i for i in request.previous.get(self.nodes[node].name, ())) & mask
        # Blocks that start at multiples of their size (rounded up to a power of two) leave no odd gaps, so
        # every power-of-two size keeps as many slots as `capacity_rows` counts.
        step = 1 << (count - 1).bit_length()
        block, best, most = (1 << count) - 1, 0, -1
        for start in range(0, self.nodes[node].num_devices - count + 1, step):
            here = block << start
            if mask & here == here and (own & here).bit_count() > most:
                best, most = here, (own & here).bit_count()
        if most >= 0:
            return best
        taken = _lowest(own, count)
        return taken | _lowest(mask & ~taken, count - taken.bit_count())

    def make_room(self, request: Request) -> list[Request] | None:
        """Evict the cheapest smaller requests so that this one fits, and place it.

        Returns the evicted requests, which must be placed again, or None if no eviction makes enough room;
        then nothing has changed.
        """
        sizes = chunks(request.shape, self.node_size)
        groups = [np.arange(len(self.nodes))]
        if len(sizes) > 1 and request.level is not None:
            domains = self.domain_ids(request.level)
            groups = [np.flatnonzero(domains == d) for d in range(int(domains.max()) + 1)]
        # A job of several nodes with a level may be placed in any one domain; take the cheapest.
        found = [e for g in groups if (e := self._cheapest(g, sizes, request)) is not None]
        if not found:
            return None
        best = min(found, key=lambda eviction: eviction.price)
        evicted = [self.release(key) for key in sorted(best.keys)]
        self.take_parts(request, dict(zip(best.nodes, sizes, strict=True)))
        return evicted

    def _cheapest(self, group: np.ndarray, sizes: list[int], request: Request) -> _Eviction | None:
        """Find the cheapest way to free parts of these sizes on nodes of a group, node after node."""
        candidates = group[self.up[group]]
        candidates = candidates[np.argsort(-self.free[candidates], kind="stable")].tolist()
        found = _Eviction(0.0, [], set())
        for size in sizes:
            best = self._cheapest_node(candidates, size, request, found, num_chunks=len(sizes))
            if best is None:
                return None
            found = _Eviction(
                found.price + best.price, found.nodes + best.nodes, found.keys | best.keys
            )
        return found

    def _cheapest_node(
        self,
        candidates: list[int],
        size: int,
        request: Request,
        so_far: _Eviction,
        *,
        num_chunks: int,
    ) -> _Eviction | None:
        best: _Eviction | None = None
        for position, node in enumerate(candidates):
            if position >= LIKELY_NODES + num_chunks and best is not None:
                break
            if node in so_far.nodes:
                continue
            found = self._eviction(node, size, request, so_far.keys, several=num_chunks > 1)
            if found is not None and (best is None or found.price < best.price):
                best = found
                if best.price == 0:
                    break
        return best

    def _eviction(
        self, node: int, size: int, request: Request, gone: set[str], *, several: bool
    ) -> _Eviction | None:
        """Find the cheapest set of smaller requests on a node whose eviction leaves `size` devices free.

        Requests in `gone` are evicted already.
        """
        on = self.on[node]
        count = {key: self.held[key][node].bit_count() for key in on}
        if self.mask[node].bit_count() + sum(count.values()) < size:
            return None
        must = self._networked_on(node) if several and self._exclusive else set()
        smaller = self._smaller_on(node, request)
        if not must <= smaller:
            return None
        out = gone & on | must
        holders = sorted(smaller - gone - must)
        need = size - int(self.free[node]) - sum(count[key] for key in out)
        found = self._cheapest_holders(node, size, request, count, (need, out, holders))
        if found is None:
            return None
        price, keys = found
        price += sum(self.requests[k].price for k in sorted(must - gone))
        return _Eviction(price, [node], {*keys, *must})

    def _cheapest_holders(
        self,
        node: int,
        size: int,
        request: Request,
        count: Mapping[str, int],
        known: tuple[int, set[str], list[str]],
    ) -> tuple[float, tuple[str, ...]] | None:
        """Choose holders whose devices, CPUs and memory are enough for a request, at the least price.

        `count`: devices of each request on the node; `known`: devices that are missing, requests that leave
        anyway, and those that may.
        """
        need, out, holders = known
        prices = [self.requests[key].price for key in holders]
        if not (self.is_limited and request.needs):
            counts = [count[key] for key in holders]
            return _cheapest_set(list(zip(holders, counts, prices, strict=True)), need)
        left = self.left[node]
        for key in out:
            left = left.plus(self.requests[key].needs.times(count[key]))
        wanted = request.needs.times(size)
        lacks = (max(need, 0), *(max(w - has, 0) for w, has in zip(wanted, left, strict=True)))
        uses = [(count[key], *self.requests[key].needs.times(count[key])) for key in holders]
        return _cheapest_of(list(zip(holders, uses, prices, strict=True)), lacks)

    def _smaller_on(self, node: int, request: Request) -> set[str]:
        limit = request.shape.num_devices
        return {key for key in self.on[node] if self.requests[key].shape.num_devices < limit}

    def _networked_on(self, node: int) -> set[str]:
        """Return the requests that use this node together with other nodes, over the network."""
        return {key for key in self.on[node] if len(self.held[key]) > 1}

    def fill(self, pending: Iterable[Request], *, move: bool) -> list[Request]:
        """Place as many requests as fit, largest first, and return the rest.

        With `move`, smaller requests are evicted to make room, and placed again.
        """
        queue = [_in_queue(request) for request in pending]
        heapq.heapify(queue)
        left_out: list[Request] = []
        while queue:
            request = heapq.heappop(queue)[-1]
            if self.keep(request) or self.fit(request):
                continue
            evicted = self.make_room(request) if move else None
            if evicted is None:
                left_out.append(request)
                continue
            for other in evicted:
                heapq.heappush(queue, _in_queue(other))
        return left_out

    def devices(self, key: str) -> dict[str, tuple[int, ...]]:
        """Return the local indices of the devices that the request with this key holds, by node name."""
        if key in self._kept:
            return dict(self.requests[key].previous)
        return {
            self.nodes[node].name: _indices_in(bits)
            for node, bits in sorted(self.held[key].items())
        }


@functools.lru_cache(maxsize=4096)
def _mask_of(local: tuple[int, ...]) -> int:
    return sum(1 << i for i in local)


@functools.lru_cache(maxsize=4096)
def _indices_in(bits: int) -> tuple[int, ...]:
    return tuple(i for i in range(bits.bit_length()) if bits >> i & 1)


def _in_queue(request: Request) -> tuple[int, bool, str, Request]:
    return -request.shape.num_devices, request.level is None, request.key, request


def _fit_in(left: np.ndarray, sizes: list[int], own: list[int]) -> list[int] | None:
    """Choose another node for each part (chunk) of a job, the fullest that has room; `left` is changed.

    Of equally full nodes, one in `own` is preferred.
    """
    found: list[int] = []
    for size in sizes:
        fits = np.where(left >= size, left, _NO_ROOM)
        least = fits.min()
        if least == _NO_ROOM:
            return None
        mine = [i for i in own if fits[i] == least]
        node = mine[0] if mine else int(fits.argmin())
        found.append(node)
        left[node] = 0
    return found


def _cheapest_set(
    holders: Sequence[tuple[str, int, float]], need: int
) -> tuple[float, tuple[str, ...]] | None:
    """Choose holders (key, devices, price) with at least `need` devices at the least total price.

    Returns that price and the keys, or None if all holders together have fewer devices.
    """
    # cheapest[n]: the cheapest holders so far after which n devices are still missing.
    cheapest: dict[int, tuple[float, tuple[str, ...]]] = {max(need, 0): (0.0, ())}
    for key, count, cost in holders:
        for missing, (price, keys) in sorted(cheapest.items()):
            left, total = max(missing - count, 0), price + cost
            if missing > 0 and (left not in cheapest or total < cheapest[left][0]):
                cheapest[left] = (total, (*keys, key))
    return cheapest.get(0)


def _cheapest_of(
    holders: Sequence[tuple[str, tuple[int, ...], float]], lacks: tuple[int, ...]
) -> tuple[float, tuple[str, ...]] | None:
    """Choose holders (key, amounts, price) that together have what is lacking, at the least total price.

    As `_cheapest_set`, for several amounts at once. The price may be above the least if there are more than
    `MOST_STATES` combinations none of which is better than another in every respect.
    """
    states: _States = {lacks: (0.0, ())}
    later = tuple(sum(amounts[at] for _, amounts, _ in holders) for at in range(len(lacks)))
    for key, amounts, cost in holders:
        for missing, (price, keys) in sorted(states.items()):
            left = tuple(max(m - a, 0) for m, a in zip(missing, amounts, strict=True))
            total = price + cost
            if left != missing and (left not in states or total < states[left][0]):
                states[left] = (total, (*keys, key))
        later = tuple(has - a for has, a in zip(later, amounts, strict=True))
        states = _undominated(_completable(states, later))
    return states.get((0,) * len(lacks))


def _completable(states: _States, later: tuple[int, ...]) -> _States:
    """Return the states whose missing amounts the holders that come later have."""
    return {
        missing: state
        for missing, state in states.items()
        if all(m <= has for m, has in zip(missing, later, strict=True))
    }


def _undominated(states: _States) -> _States:
    """Return the states that no other state dominates, at most the cheapest `MOST_STATES` of them.

    A state dominates another if it misses no more of any amount and is not dearer. A few states are returned
    as they are.
    """
    if len(states) <= _FEW_STATES:
        return states
    ordered = sorted(states.items(), key=lambda item: (item[1][0], item[0]))
    missing = np.array([amounts for amounts, _ in ordered], np.int64)
    kept = np.zeros(0, np.int64)
    for first in range(0, len(ordered), _BLOCK):
        # Only states before it, which are not dearer, can dominate a state.
        block = missing[first : first + _BLOCK]
        before = np.concatenate([missing[kept], block])
        better = np.all([b <= m[:, None] for b, m in zip(before.T, block.T, strict=True)], axis=0)
        better[:, len(kept) :] = np.tril(better[:, len(kept) :], -1)
        kept = np.append(kept, first + np.flatnonzero(~better.any(1)))
        if len(kept) >= MOST_STATES:
            break
    return dict(ordered[at] for at in kept[:MOST_STATES].tolist())


def _bits(node: Node) -> int:
    return ((1 << node.num_devices) - 1) & ~sum(1 << i for i in node.withheld)


def _lowest(mask: int, count: int) -> int:
    taken = 0
    for _ in range(count):
        lowest = mask & -mask
        taken |= lowest
        mask &= ~lowest
    return taken
