"""Shapes that a cluster offers, which of them a job may take, and which combinations fit on the nodes.

By default a shape lies on one node (1, 2, 4, ... devices) or is made of whole nodes. These sizes separate
allocation from placement: any choice that satisfies `capacity_rows` can be placed without spreading a job
over more nodes than it needs. Proof: place the largest first. Before a job of size s is placed, everything on
a node has a size that is a multiple of s, so a node with n usable devices still has floor(n/s) - (devices
placed)/s slots of size s, wherever earlier jobs went. A node whose size is not a power of two behaves like
the power-of-two nodes of its binary expansion (6 = 4 + 2).

Jobs may ask for any other size, such as exactly 3 devices, or 5 to 7. Such sizes are offered too
(`own_shapes`). With them, and with jobs that must stay within a rack, the rows are necessary but no longer
sufficient; `policies/placeable.py` then chooses again with what placing has found out.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jaxgoodput.cluster.scheduler.placement.amounts import (
    NOTHING,
    Amounts,
    amounts_of,
    in_words,
    needed_in_words,
    needs_of,
    some_limited,
    usable,
)
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.specs import ClusterSpec, JobSpec, Node, Shape
from jaxgoodput.text import count

ALL_UP_TO_DEVICES = 64  # largest cluster in which every number of whole nodes is offered


class CapacityRows(NamedTuple):
    """Linear capacity constraints: `matrix @ (number of jobs with each shape) <= limits`.

    Shapes can be placed together exactly if they satisfy all rows. A kind has one row if all its nodes are
    full and of one power-of-two size, otherwise several. If a job's own size (such as 3) is among the shapes,
    the rows are necessary but no longer sufficient.
    """

    matrix: Float[np.ndarray, "rows shapes"]
    limits: Float[np.ndarray, " rows"]
    """Devices available to each row; slots, in rows for sizes that are no powers of two."""
    kinds: tuple[str, ...]
    """Device kind of each row."""


def capacity(cluster: ClusterSpec) -> dict[str, int]:
    """Return the devices of each kind that may be allocated: on nodes that are up, and not withheld.

    Devices of draining nodes are not counted; they belong to the jobs that already run there.
    """
    total: dict[str, int] = {}
    for node in cluster.nodes:
        total[node.kind] = total.get(node.kind, 0) + (node.num_usable if node.state == "up" else 0)
    return total


def node_size(cluster: ClusterSpec) -> dict[str, int]:
    """Return the devices of a whole node of each kind: the largest node that is not down.

    Withheld devices count, so a node with one bad device does not change the size.
    """
    size: dict[str, int] = {}
    for node in cluster.nodes:
        if node.state != "down":
            size[node.kind] = max(size.get(node.kind, 0), node.num_devices)
    return size


def whole_nodes(cluster: ClusterSpec) -> dict[str, list[Node]]:
    """Return, by kind, the nodes that shapes of several nodes may use: up, full size, nothing withheld."""
    size = node_size(cluster)
    whole: dict[str, list[Node]] = {kind: [] for kind in size}
    for node in cluster.nodes:
        if node.state == "up" and node.num_usable == size[node.kind]:
            whole[node.kind].append(node)
    return whole


def _usable_by_kind(cluster: ClusterSpec, needs: Amounts = NOTHING) -> dict[str, list[int]]:
    """Return the devices of each node that is up, by kind, that jobs with these needs could use."""
    found: dict[str, list[int]] = {}
    for node in cluster.nodes:
        if node.state == "up":
            found.setdefault(node.kind, []).append(usable(node, needs))
    return found


def shapes(
    cluster: ClusterSpec,
    jobs: Sequence[JobView] = (),
    *,
    dense_nodes: int = 8,
    all_up_to_devices: int = ALL_UP_TO_DEVICES,
) -> tuple[Shape, ...]:
    """Return the shapes to choose from, sorted: per kind 1, 2, 4, ... devices of one node, and k whole nodes.

    A cluster of at most `all_up_to_devices` devices offers every k. A larger one offers k = 1 ...
    `dense_nodes`, then powers of two and 1.5 times these, because 40 or 41 nodes make no difference to a job.
    If `jobs` are given, sizes too large for all of them are left out. Sizes that their own limits ask for
    (`own_shapes`), and sizes of several nodes in which a job runs at present, are added.
    """
    size, whole = node_size(cluster), whole_nodes(cluster)
    total = sum(capacity(cluster).values())
    every = total <= all_up_to_devices
    devices = _usable_by_kind(cluster)
    default: dict[str, set[Shape]] = {}
    for kind in devices:
        count = len(whole[kind])
        ks = range(1, count + 1) if every else _sparse(count, dense_nodes)
        default[kind] = _default_shapes(kind, size[kind], max(devices[kind]), ks)
    sizes = {kind: {shape.num_devices for shape in its} for kind, its in default.items()}
    everywhere = set[int]().union(*sizes.values()).intersection(*sizes.values())
    own_sizes = _own_sizes(jobs, total, everywhere) if jobs else set[int]()
    found = set[Shape]().union(*default.values())
    for kind, its in sizes.items():
        more = (packed(kind, n, size[kind], devices[kind]) for n in own_sizes - its)
        found |= {shape for shape in more if shape is not None}
    found |= _spread_by_needs(cluster, jobs)
    largest = max((size_limits(view.spec)[1] for view in jobs), default=None)
    return tuple(sorted(s for s in found if largest is None or s.num_devices <= largest))


def own_shapes(cluster: ClusterSpec, spec: JobSpec) -> set[Shape]:
    """Return the shapes that a job's own limits ask for, beside the default ones.

    These are its least and its greatest size. If one of them is no power of two, a cluster of at most
    `ALL_UP_TO_DEVICES` devices offers every size between them, too. A job for which a node has too few CPUs
    or too little memory is spread over more nodes.

    >>> nodes = (Node(name="n", kind="h200", num_devices=8),)
    >>> found = own_shapes(ClusterSpec(nodes=nodes), JobSpec(id="x", min_devices=5, max_devices=7))
    >>> sorted(shape.num_devices for shape in found)
    [5, 6, 7]
    """
    size, devices = node_size(cluster), _usable_by_kind(cluster, needs_of(spec))
    sizes = _sizes_of(spec, sum(capacity(cluster).values()))
    kinds = devices if spec.kinds is None else devices.keys() & set(spec.kinds)
    found = (packed(kind, each, size[kind], devices[kind]) for kind in kinds for each in sizes)
    return {shape for shape in found if shape is not None}


def _spread_by_needs(cluster: ClusterSpec, jobs: Sequence[JobView]) -> set[Shape]:
    """Return the shapes of which jobs' tables know something, and that only their needs ask for."""
    if not some_limited(cluster):
        return set()
    found: set[Shape] = set()
    own: dict[tuple, set[Shape]] = {}
    for view in jobs:
        if needs := needs_of(view.spec):
            key = size_limits(view.spec), view.spec.kinds, needs
            if key not in own:
                own[key] = own_shapes(cluster, view.spec)
            found |= {shape for shape in own[key] if shape in view.goodput}
    return found


def _sizes_of(spec: JobSpec, num_devices: int) -> set[int]:
    """Return the sizes that a job's own limits ask for, in a cluster of `num_devices` devices."""
    least, most = size_limits(spec)
    is_odd = bool(least & (least - 1) or most & (most - 1))
    if is_odd and num_devices <= ALL_UP_TO_DEVICES:
        return set(range(least, min(most, num_devices) + 1))
    return {least, most}


def _own_sizes(jobs: Sequence[JobView], num_devices: int, offered: set[int]) -> set[int]:
    """Return sizes, beside the ones `offered`, that jobs ask for and of which their tables know something.

    These are sizes that follow from jobs' own limits, and sizes of several nodes in which jobs run now.
    """
    found = {v.allocation.num_devices for v in jobs if v.allocation.num_nodes > 1} - offered
    of_limits: dict[tuple[int, int], set[int]] = {}
    for view in jobs:
        limits = size_limits(view.spec)
        if limits not in of_limits:
            of_limits[limits] = _sizes_of(view.spec, num_devices) - offered
        if more := of_limits[limits] - found:
            known = view.spec.mode == "rigid" or not view.goodput
            found |= more if known else more & {shape.num_devices for shape in view.goodput}
    return found


def packed(kind: str, num_devices: int, per_node: int, usable: Sequence[int]) -> Shape | None:
    """Return the shape of a number of devices on the fewest nodes that can hold it; None if none can.

    `usable`: usable devices of each node of the kind, of which the largest has `per_node` devices.

    >>> packed("h200", 12, 8, [8, 8]), packed("h200", 16, 8, [8, 5, 5])
    (Shape(kind='h200', num_nodes=2, num_devices=12), Shape(kind='h200', num_nodes=3, num_devices=16))
    """
    if not per_node or num_devices > sum(usable):
        return None
    free = sorted(usable, reverse=True)
    for num_nodes in range(-(-num_devices // per_node), min(len(free), num_devices) + 1):
        shape = Shape(kind, num_nodes, num_devices)
        if holds(free, chunks(shape, per_node)):
            return shape
        if num_devices <= sum(free[: num_nodes - 1]):
            return None  # more nodes would only split it further
    return None


def holds(free: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether nodes have room for one part each; both are sorted, the largest first."""
    return len(sizes) <= len(free) and all(
        size <= room for size, room in zip(sizes, free, strict=False)
    )


def chunks(shape: Shape, node_size: int) -> list[int]:
    """Return how many devices a shape takes on each of its nodes, largest first.

    These are whole nodes and a rest, or an even spread if the shape has more nodes than that.

    >>> chunks(Shape("h200", 2, 12), 8), chunks(Shape("h200", 4, 6), 8)
    ([8, 4], [2, 2, 1, 1])
    """
    full, rest = divmod(shape.num_devices, node_size)
    if full + (rest > 0) == shape.num_nodes:
        return [node_size] * full + [rest] * (rest > 0)
    each, more = divmod(shape.num_devices, shape.num_nodes)
    return [each + 1] * more + [each] * (shape.num_nodes - more)


def _default_shapes(kind: str, per_node: int, most: int, ks: Iterable[int]) -> set[Shape]:
    """Return powers of two on one node, of which the largest has `most` usable devices, and whole nodes."""
    if most == 0:
        return set()
    found = {Shape(kind, 1, 1 << power) for power in range(most.bit_length())}
    return found | {Shape(kind, k, k * per_node) for k in ks}


def _sparse(count: int, dense: int) -> list[int]:
    """Return numbers of nodes up to `count`: all up to `dense`, then powers of two and 1.5 times these."""
    ks = list(range(1, min(count, dense) + 1))
    power = 1
    while power <= count:
        ks += [k for k in (power, power * 3 // 2) if dense < k <= count]
        power *= 2
    return sorted(set(ks))


def size_limits(spec: JobSpec) -> tuple[int, int]:
    """Return the least and the greatest number of devices that a job may have; equal for a rigid job."""
    if spec.mode == "rigid" and spec.num_devices is not None:
        return spec.num_devices, spec.num_devices
    return spec.min_devices, spec.max_devices


def takes(spec: JobSpec, shape: Shape) -> bool:
    """Return whether a job's own limits on the number and kind of devices permit a shape."""
    least, most = size_limits(spec)
    return least <= shape.num_devices <= most and (spec.kinds is None or shape.kind in spec.kinds)


def allowed(
    jobs: Sequence[JobView], shapes: Sequence[Shape], cluster: ClusterSpec | None = None
) -> Bool[np.ndarray, "jobs shapes"]:
    """Return which shapes each job's own limits permit: sizes, kinds and, given the cluster, topology level.

    A job that must stay within one domain of a level may take a shape of several nodes only if the nodes of
    some domain hold it. Which devices are free at the moment plays no part.
    """
    num_devices = np.array([shape.num_devices for shape in shapes], dtype=np.int64)
    limits = np.array([size_limits(view.spec) for view in jobs], dtype=np.int64).reshape(-1, 2)
    mask = (num_devices >= limits[:, :1]) & (num_devices <= limits[:, 1:])
    for row, view in enumerate(jobs):
        if view.spec.kinds is not None:
            mask[row] &= np.array([s.kind in view.spec.kinds for s in shapes], dtype=bool)
    if cluster is not None:
        levels = np.array([view.spec.level for view in jobs], object)
        domains = Domains(cluster)
        for level in sorted(set(levels) - {None}):
            mask[levels == level] &= _hold(domains, shapes, level)
        if some_limited(cluster):
            _forbid_by_needs(mask, domains, jobs, shapes)
    return mask


def _hold(domains: "Domains", shapes: Sequence[Shape], level: str) -> Bool[np.ndarray, " shapes"]:
    """Return which shapes lie on one node, or fit into a domain of a level."""
    held = (shape.num_nodes == 1 or domains.fits(shape, level) for shape in shapes)
    return np.fromiter(held, bool, len(shapes))


def fitting(
    jobs: Sequence[JobView], shapes: Sequence[Shape], cluster: ClusterSpec
) -> Bool[np.ndarray, "jobs shapes"]:
    """Return which shapes would fit if each job were alone on a cluster, such as one of free devices only.

    Beside `allowed`, this heeds on which nodes devices are free.
    """
    mask = allowed(jobs, shapes)
    _forbid_misfits(mask, Domains(cluster), range(len(jobs)), jobs, shapes)
    return mask


def _forbid_by_needs(
    mask: Bool[np.ndarray, "jobs shapes"],
    domains: "Domains",
    jobs: Sequence[JobView],
    shapes: Sequence[Shape],
) -> None:
    """Forbid, in place, shapes for which no nodes have the CPUs and the memory that a job needs."""
    rows = [row for row, view in enumerate(jobs) if needs_of(view.spec)]
    _forbid_misfits(mask, domains, rows, jobs, shapes)


def _forbid_misfits(
    mask: Bool[np.ndarray, "jobs shapes"],
    domains: "Domains",
    rows: Iterable[int],
    jobs: Sequence[JobView],
    shapes: Sequence[Shape],
) -> None:
    """Forbid, in place, shapes of the jobs in `rows` that the nodes of no domain hold."""
    held: dict[tuple[str | None, Amounts], np.ndarray] = {}
    for row in rows:
        key = jobs[row].spec.level, needs_of(jobs[row].spec)
        if key not in held:
            fits = (domains.fits(shape, *key) for shape in shapes)
            held[key] = np.fromiter(fits, bool, len(shapes))
        mask[row] &= held[key]


def domain_of(node: Node, level: str) -> str:
    """Return the node's topology domain at a level; a node without that label is a domain of its own."""
    label = node.labels.get(level)
    return f"node {node.name}" if label is None else f"label {label}"


class Domains:
    """The nodes of a cluster that are up, by kind and topology domain, to see what fits on them alone."""

    def __init__(self, cluster: ClusterSpec):
        self._nodes = [node for node in cluster.nodes if node.state == "up"]
        self._size = node_size(cluster)
        self._free: dict[tuple[str | None, Amounts], dict[str, set[tuple[int, ...]]]] = {}

    def fits(self, shape: Shape, level: str | None = None, needs: Amounts = NOTHING) -> bool:
        """Return whether the nodes of one domain hold a shape if no job uses them.

        A shape of one node, and any shape without a `level`, may lie on any nodes of its kind. `needs` is
        what each device needs beside itself.
        """
        if shape.kind not in self._size or not self._size[shape.kind]:
            return False
        if shape.num_nodes == 1:
            level = None
        key = level, needs
        if key not in self._free:
            self._free[key] = self._by_kind(level, needs)
        sizes = chunks(shape, self._size[shape.kind])
        return any(holds(free, sizes) for free in self._free[key].get(shape.kind, ()))

    def fitting(self, shapes: Iterable[Shape], spec: JobSpec) -> list[Shape]:
        """Return the shapes that a job may take and that fit if no other job is there."""
        needs = needs_of(spec)
        return [s for s in shapes if takes(spec, s) and self.fits(s, spec.level, needs)]

    def _by_kind(self, level: str | None, needs: Amounts) -> dict[str, set[tuple[int, ...]]]:
        """Return, by kind, the usable devices of each domain's nodes; equal domains once."""
        found: dict[str, dict[str, list[int]]] = {}
        for node in self._nodes:
            domain = "" if level is None else domain_of(node, level)
            its = found.setdefault(node.kind, {}).setdefault(domain, [])
            its.append(usable(node, needs) if needs else node.num_usable)
        return {
            kind: {tuple(sorted(free, reverse=True)) for free in domains.values()}
            for kind, domains in found.items()
        }


def goodput_matrix(
    jobs: Sequence[JobView], shapes: Sequence[Shape], cluster: ClusterSpec | None = None
) -> Float[np.ndarray, "jobs shapes"]:
    """Return the goodput of each job on each shape, in the job's own units.

    An entry is 0 if it is unknown, not allowed, or not a positive number.
    """
    matrix = np.zeros((len(jobs), len(shapes)))
    column: dict[Shape, int] = {shape: i for i, shape in enumerate(shapes)}
    # Tables of different jobs mostly share their Shape objects. Looking these up by identity avoids hashing
    # strings (300,000 of them for 5,000 jobs). The jobs keep the objects alive, so ids stay unique.
    by_identity: dict[int, int] = {}
    for row, view in enumerate(jobs):
        ids = list(map(id, view.goodput))
        columns = list(map(by_identity.get, ids))
        if None in columns:
            for key, shape in zip(ids, view.goodput, strict=True):
                by_identity[key] = column.get(shape, -1)
            columns = [by_identity[key] for key in ids]
        at = np.array(columns, dtype=np.int64)
        values = np.fromiter(view.goodput.values(), dtype=float, count=len(columns))
        known = at >= 0
        matrix[row, at[known]] = values[known]
    good = allowed(jobs, shapes, cluster) & np.isfinite(matrix) & (matrix > 0)
    matrix[~good] = 0.0
    return matrix


def no_shape_reason(
    view: JobView,
    devices: Mapping[str, int],
    has_room: Callable[[Shape], bool],
    *,
    status: str = "in service",
    has_table: bool = True,
) -> str:
    """Explain why a job has no shape at all: the first of its own limits that rules out every shape.

    `devices` counts the devices of each kind that have this `status`. `has_room` tells whether the cluster
    has room for a shape, whatever its topology. Without `has_table`, its table was assumed.
    """
    spec = view.spec
    least, most = size_limits(spec)
    there = {k: n for k, n in devices.items() if spec.kinds is None or k in spec.kinds}
    said = f"{devices_in_words(there) or 'none'} {status}"
    if spec.kinds is not None and not there:
        return f"it allows only devices of kind {list(spec.kinds)}, and the cluster has {sorted(devices)}"
    if least > max(there.values(), default=0):
        return f"it needs at least {least} devices of one kind, and the cluster has {said}"
    if not (view.goodput or has_table):
        sizes = str(least) if least == most else f"{least} to {most}"
        return f"no nodes of one kind hold whole processes on {sizes} devices, and the cluster has {said}"
    if not view.goodput:
        return "its goodput table has no usable entry, so no shape is known to be of use to it"
    fits = (s for s in view.goodput if s.kind in there and takes(spec, s) and has_room(s))
    if spec.level is None or not any(fits):
        return (
            f"its goodput table has no entry between {least} and {most} devices that fits the cluster, "
            f"which has {said}"
        )
    return f"no domain of level {spec.level!r} is large enough for its {least} devices"


def needs_reason(view: JobView, cluster: ClusterSpec) -> str | None:
    """Explain which CPUs or memory the nodes lack for a job; None if that is not why it has no shape."""
    needs, spec = needs_of(view.spec), view.spec
    if not needs or not some_limited(cluster):
        return None
    without = replace(spec, cpus_per_device=0.0, memory_gib_per_device=0.0)
    domains = Domains(cluster)
    known = view.goodput or own_shapes(cluster, without)
    fits = domains.fitting(known, without)
    if not fits or domains.fitting(fits, spec):
        return None
    best, least = (
        _most_usable(cluster, needs, {s.kind for s in fits}),
        min(s.num_devices for s in fits),
    )
    return (
        f"it needs {needed_in_words(needs)}, for at least {count(least, 'device')}; node {best.name!r} has "
        f"{in_words(amounts_of(best), needs)}, enough for {usable(best, needs)}, and others are no better"
    )


def _most_usable(cluster: ClusterSpec, needs: Amounts, kinds: Collection[str]) -> Node:
    """Return the node of these kinds of which a job with these needs could use most devices."""
    nodes = (node for node in cluster.nodes if node.state == "up" and node.kind in kinds)
    return max(nodes, key=lambda node: (usable(node, needs), node.num_usable))


def shape_in_words(shape: Shape) -> str:
    """Return the number and kind of a shape's devices, and of its nodes, in words.

    >>> shape_in_words(Shape("h200", 2, 16))
    '16 h200 on 2 nodes'
    """
    nodes = "node" if shape.num_nodes == 1 else "nodes"
    return f"{shape.num_devices} {shape.kind} on {shape.num_nodes} {nodes}"


def devices_in_words(devices: Mapping[str, int]) -> str:
    """Return numbers of devices by kind, in words.

    >>> devices_in_words({"h200": 8, "a100": 16})
    '16 a100, 8 h200'
    """
    return ", ".join(f"{devices[kind]} {kind}" for kind in sorted(devices))


def capacity_rows(cluster: ClusterSpec, shapes: Sequence[Shape]) -> CapacityRows:
    """Return the rows that make a choice of shapes placeable (proof at the top of this file).

    One row for each kind and each slot size s: the slots of size s that the parts of the chosen shapes fill
    are at most sum_k floor(n_k/s), where node k has n_k usable devices. Slot sizes are the powers of two, the
    size of a whole node, and sizes of parts that are neither. A row for a power of two is left out if its
    limit equals the limit for s = 1, which already implies it.
    """
    devices = _usable_by_kind(cluster)
    rows: list[tuple[np.ndarray, float, str]] = []  # use of each shape, limit, kind
    for kind, size in node_size(cluster).items():
        parts = {
            i: Counter(chunks(shape, size))
            for i, shape in enumerate(shapes)
            if shape.kind == kind and size
        }
        if parts:
            found = _rows_of_kind(parts, len(shapes), size, devices.get(kind, []))
            rows += [(row, limit, kind) for row, limit in found]
    matrix = np.array([row for row, _, _ in rows], float).reshape(len(rows), len(shapes))
    limits = np.array([limit for _, limit, _ in rows], dtype=float)
    return CapacityRows(matrix, limits, tuple(kind for _, _, kind in rows))


def _rows_of_kind(
    parts: Mapping[int, Counter[int]], num_shapes: int, size: int, usable: list[int]
) -> list[tuple[np.ndarray, float]]:
    """Return the rows of one kind and their limits.

    `parts`: by index of the shape, on how many nodes it takes how many devices.
    """
    free = np.array(usable, dtype=np.int64)
    total, rows = int(free.sum()), []

    def slots(each: int) -> np.ndarray:
        """Return [shapes] the slots of `each` devices that a shape fills."""
        found = np.zeros(num_shapes, np.int64)
        for shape, its in parts.items():
            found[shape] = sum(part // each * count for part, count in its.items())
        return found

    for power in (1 << exponent for exponent in range(size.bit_length())):
        limit = int((free // power).sum()) * power
        if power == 1 or limit < total:
            rows.append((slots(power) * power, float(limit)))
    # Whole nodes need a row of their own if their size is not itself a power of two.
    if size.bit_count() > 1 and int((free // size).sum()) * size < total and slots(size).any():
        rows.append((slots(size) * size, float((free // size).sum()) * size))
    odd = {part for its in parts.values() for part in its if part & (part - 1)} - {size}
    rows += [(slots(each), float((free // each).sum())) for each in sorted(odd)]
    return rows


def present_shapes(jobs: Sequence[JobView], cluster: ClusterSpec) -> list[Shape | None]:
    """Return the shape of each job's present devices; None if it has none."""
    kind_of = {node.name: node.kind for node in cluster.nodes}
    return [shape_of(view.allocation.devices, kind_of) for view in jobs]


def shape_of(devices: Mapping[str, Sequence[int]], kind_of: Mapping[str, str]) -> Shape | None:
    """Return the shape of devices given by node; None if they have no kind in common, or there are none."""
    if len(devices) == 1:  # most jobs
        ((name, local),) = devices.items()
        return Shape(kind_of[name], 1, len(local)) if name in kind_of else None
    kinds = {kind_of.get(name) for name in devices}
    if len(kinds) != 1 or None in kinds:
        return None
    (kind,) = kinds
    assert kind is not None
    return Shape(kind, len(devices), sum(len(local) for local in devices.values()))
