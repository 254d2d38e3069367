"""The nodes of one kind as a board: who holds which devices, best fit, and the cheapest way to make room.

Placing the largest first, each on the fullest node that still has room, never splits a job of a
power-of-two size (see `shapes`). Around jobs that stay where they are the same holds, as long as room is
left; where it is not, `make_room` moves smaller jobs away from one node, and places them like new ones.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.cluster.scheduler.shapes import domain_of
from jaxgoodput.specs import Node, Shape

LIKELY_NODES = 64  # where room is looked for first; all nodes only where none of these will do


@dataclass(frozen=True, kw_only=True)
class Request:
    """Devices for one job, or for all jobs of a share group."""

    key: str
    shape: Shape
    price: float  # of moving it
    previous: Mapping[str, tuple[int, ...]]  # devices at present, of whatever shape
    keeps: bool  # whether these have the wanted shape, so that it may stay
    level: str | None = None  # all nodes in one domain of this level


def chunks(shape: Shape, node_size: int) -> list[int]:
    """Devices on each node, largest first: whole nodes and a rest; evenly spread if the shape has more nodes.

    >>> chunks(Shape("h200", 2, 12), 8), chunks(Shape("h200", 4, 6), 8)
    ([8, 4], [2, 2, 1, 1])
    """
    full, rest = divmod(shape.num_devices, node_size)
    if full + (rest > 0) == shape.num_nodes:
        return [node_size] * full + [rest] * (rest > 0)
    each, more = divmod(shape.num_devices, shape.num_nodes)
    return [each + 1] * more + [each] * (shape.num_nodes - more)


class Board:
    """The nodes of one kind while they are being filled. Devices are bits of one integer per node."""

    def __init__(self, nodes: Sequence[Node], *, one_multi_node_job_per_node: bool = False):
        self.nodes = nodes
        self.node_size = max((n.num_devices for n in nodes if n.state != "down"), default=0)
        self.index = {node.name: i for i, node in enumerate(nodes)}
        self.mask = [0 if n.state == "down" else _bits(n) for n in nodes]
        self.up = np.array([node.state == "up" for node in nodes], dtype=bool)
        # What new jobs may take: nothing of a node that is draining.
        self.free = np.array([m.bit_count() for m in self.mask], dtype=np.int64) * self.up
        self.on: list[set[str]] = [set() for _ in nodes]
        self.held: dict[str, dict[int, int]] = {}  # key -> node index -> bits
        self.requests: dict[str, Request] = {}
        self._exclusive = one_multi_node_job_per_node
        self._networked = np.zeros(len(nodes), dtype=bool)
        self._domains: dict[str, np.ndarray] = {}

    def take(self, request: Request, bits: Mapping[int, int]):
        """Gives these devices, which must be free, to the request."""
        for node, taken in bits.items():
            assert taken & self.mask[node] == taken
            self.mask[node] &= ~taken
            if self.up[node]:
                self.free[node] -= taken.bit_count()
            self.on[node].add(request.key)
            if len(bits) > 1:
                self._networked[node] = True
        self.held[request.key] = dict(bits)
        self.requests[request.key] = request

    def release(self, key: str) -> Request:
        """Takes its devices from a request, and hands the request back."""
        bits = self.held.pop(key)
        for node, taken in bits.items():
            self.mask[node] |= taken
            if self.up[node]:
                self.free[node] += taken.bit_count()
            self.on[node].discard(key)
            if len(bits) > 1:
                self._networked[node] = any(len(self.held[k]) > 1 for k in self.on[node])
        return self.requests.pop(key)

    def keep(self, request: Request) -> bool:
        """Leaves the request where it is, if that has the wanted shape and is still free."""
        if not request.keeps:
            return False
        bits: dict[int, int] = {}
        for name, local in request.previous.items():
            node = self.index[name]
            taken = sum(1 << i for i in local)
            if taken & self.mask[node] != taken:
                return False
            bits[node] = taken
        if self._exclusive and len(bits) > 1 and self._networked[list(bits)].any():
            return False
        self.take(request, bits)
        return True

    def fit(self, request: Request) -> bool:
        """Gives the request free devices on the fewest nodes, the fullest that have room; False = no room."""
        sizes = chunks(request.shape, self.node_size)
        if len(sizes) == 1:
            node = self._fullest(sizes[0], request)
            if node is None:
                return False
            self.take(request, {node: self._pick(node, sizes[0], request)})
            return True
        found = self._fit_several(sizes, request)
        if found is None:
            return False
        self.take(
            request, {n: self._pick(n, s, request) for n, s in zip(found, sizes, strict=True)}
        )
        return True

    def _fullest(self, size: int, request: Request) -> int | None:
        """Among the nodes with room the one with least of it; its own node, or else the first, of equals."""
        room = np.where(self.free >= size, self.free, np.iinfo(np.int64).max)
        best = int(room.argmin())
        if self.free[best] < size:
            return None
        for name in request.previous:
            own = self.index.get(name)
            if own is not None and room[own] == room[best]:
                return own
        return best

    def _fit_several(self, sizes: list[int], request: Request) -> list[int] | None:
        room = self._room_several()
        for nodes in self._domain_groups(request.level, room, sizes):
            found: list[int] = []
            own = [self.index[n] for n in request.previous if n in self.index]
            left = np.zeros(len(self.nodes), dtype=np.int64)
            left[nodes] = room[nodes]
            for size in sizes:
                fits = np.where(left >= size, left, np.iinfo(np.int64).max)
                least = fits.min()
                if least == np.iinfo(np.int64).max:
                    break
                mine = [i for i in own if fits[i] == least]
                node = mine[0] if mine else int(fits.argmin())
                found.append(node)
                left[node] = 0
            else:
                return found
        return None

    def _room_several(self) -> np.ndarray:
        return np.where(self._networked, 0, self.free) if self._exclusive else self.free

    def _domain_groups(
        self, level: str | None, room: np.ndarray, sizes: list[int]
    ) -> Iterable[np.ndarray]:
        """The nodes of each domain that may be large enough, the domain with least room first."""
        if level is None:
            return [np.arange(len(self.nodes))]
        domains = self._domain_ids(level)
        total = np.bincount(domains, weights=room)
        order = np.argsort(total, kind="stable")
        return [np.flatnonzero(domains == d) for d in order if total[d] >= sum(sizes)]

    def _domain_ids(self, level: str) -> np.ndarray:
        if level not in self._domains:
            names = [domain_of(node, level) for node in self.nodes]
            self._domains[level] = np.unique(names, return_inverse=True)[1]
        return self._domains[level]

    def _pick(self, node: int, count: int, request: Request) -> int:
        """Free devices of a node: an aligned block, the one with most of its own devices; else the lowest."""
        mask = self.mask[node]
        if mask.bit_count() == count:
            return mask
        own = sum(1 << i for i in request.previous.get(self.nodes[node].name, ())) & mask
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
        """Takes the cheapest smaller ones off the devices that the request needs, and gives it these.

        Returns those that must be placed again; None where even that does not help (and nothing has changed).
        """
        sizes = chunks(request.shape, self.node_size)
        every = np.arange(len(self.nodes))
        groups = [every]
        if len(sizes) > 1 and request.level is not None:
            domains = self._domain_ids(request.level)
            groups = [np.flatnonzero(domains == d) for d in range(int(domains.max()) + 1)]
        best: tuple[float, list[int], set[str]] | None = None
        for group in groups:
            found = self._cheapest(group, sizes, request)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        if best is None:
            return None
        _, nodes, evicted = best
        out = [self.release(key) for key in sorted(evicted)]
        self.take(
            request, {n: self._pick(n, s, request) for n, s in zip(nodes, sizes, strict=True)}
        )
        return out

    def _cheapest(
        self, group: np.ndarray, sizes: list[int], request: Request
    ) -> tuple[float, list[int], set[str]] | None:
        """Price, nodes and evicted keys of room for chunks on nodes of a group, node by node."""
        nodes: list[int] = []
        evicted: set[str] = set()
        price = 0.0
        candidates = group[self.up[group]]
        candidates = candidates[np.argsort(-self.free[candidates], kind="stable")]
        for size in sizes:
            best: tuple[float, int, set[str]] | None = None
            for position, node in enumerate(candidates.tolist()):
                if position >= LIKELY_NODES + len(sizes) and best is not None:
                    break
                if node in nodes:
                    continue
                found = self._eviction(node, size, request, evicted, several=len(sizes) > 1)
                if found is not None and (best is None or found[0] < best[0]):
                    best = (found[0], node, found[1])
                    if found[0] == 0:
                        break
            if best is None:
                return None
            price += best[0]
            nodes.append(best[1])
            evicted |= best[2]
        return price, nodes, evicted

    def _eviction(
        self, node: int, size: int, request: Request, gone: set[str], *, several: bool
    ) -> tuple[float, set[str]] | None:
        """The cheapest set of smaller holders of a node whose devices make `size` free ones."""
        if (
            self.mask[node].bit_count()
            + sum(self.held[key][node].bit_count() for key in self.on[node])
            < size
        ):
            return None
        need = size - int(self.free[node])
        must: set[str] = set()
        if several and self._exclusive:  # its network is for one
            must = {key for key in self.on[node] if len(self.held[key]) > 1}
            if any(self.requests[k].shape.num_devices >= request.shape.num_devices for k in must):
                return None
        need -= sum(self.held[key][node].bit_count() for key in gone & self.on[node] | must)
        # cheapest[n] = (price, overshoot, keys) to free at least n devices
        cheapest: dict[int, tuple[float, tuple[str, ...]]] = {max(need, 0): (0.0, ())}
        smaller = [
            key
            for key in sorted(self.on[node] - gone - must)
            if self.requests[key].shape.num_devices < request.shape.num_devices
        ]
        for key in smaller:
            bits, cost = self.held[key][node].bit_count(), self.requests[key].price
            for missing, (price, keys) in sorted(cheapest.items()):
                left, total = max(missing - bits, 0), price + cost
                if missing > 0 and (left not in cheapest or total < cheapest[left][0]):
                    cheapest[left] = (total, (*keys, key))
        if 0 not in cheapest:
            return None
        price, keys = cheapest[0]
        return price + sum(self.requests[k].price for k in must - gone), set(keys) | must

    def fill(self, pending: Iterable[Request], *, move: bool) -> list[Request]:
        """Places all it can, largest first; with `move`, smaller ones give way. Returns what is left out."""
        queue = [(-r.shape.num_devices, r.level is None, r.key, r) for r in pending]
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
                heapq.heappush(
                    queue, (-other.shape.num_devices, other.level is None, other.key, other)
                )
        return left_out

    def devices(self, key: str) -> dict[str, tuple[int, ...]]:
        """What a request holds, by node name."""
        return {
            self.nodes[node].name: tuple(i for i in range(bits.bit_length()) if bits >> i & 1)
            for node, bits in sorted(self.held[key].items())
        }


def _bits(node: Node) -> int:
    return ((1 << node.num_devices) - 1) & ~sum(1 << i for i in node.withheld)


def _lowest(mask: int, count: int) -> int:
    taken = 0
    for _ in range(count):
        lowest = mask & -mask
        taken |= lowest
        mask &= ~lowest
    return taken
