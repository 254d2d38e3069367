"""Shapes that a cluster offers, which of them a job may take, and which combinations fit on the nodes.

A shape lies on one node (1, 2, 4, ... devices) or is made of whole nodes. These sizes separate allocation
from placement: any choice that satisfies `capacity_rows` can be placed without spreading a job over more
nodes than it needs. Proof: place the largest first. Before a job of size s is placed, everything on a node
has a size that is a multiple of s, so a node with n usable devices still has floor(n/s) - (devices placed)/s
slots of size s, wherever earlier jobs went. A node whose size is not a power of two behaves like the
power-of-two nodes of its binary expansion (6 = 4 + 2).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.specs import ClusterSpec, JobSpec, Node, Shape


class CapacityRows(NamedTuple):
    """Linear capacity constraints: `matrix @ (number of jobs with each shape) <= limits`.

    Shapes can be placed together exactly if they satisfy all rows. A kind has one row if all its nodes are
    full and of one power-of-two size, otherwise several. If a rigid job's own size (such as 3) is among the
    shapes, the rows are necessary but no longer sufficient.
    """

    matrix: Float[np.ndarray, "rows shapes"]
    limits: Float[np.ndarray, " rows"]
    """Devices available to each row."""
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


def _usable_by_kind(cluster: ClusterSpec) -> dict[str, list[int]]:
    """Return the number of usable devices of each node that is up, by kind."""
    usable: dict[str, list[int]] = {}
    for node in cluster.nodes:
        if node.state == "up":
            usable.setdefault(node.kind, []).append(node.num_usable)
    return usable


def shapes(
    cluster: ClusterSpec,
    jobs: Sequence[JobView] = (),
    *,
    dense_nodes: int = 8,
    all_up_to_devices: int = 64,
) -> tuple[Shape, ...]:
    """Return the shapes to choose from, sorted: per kind 1, 2, 4, ... devices of one node, and k whole nodes.

    A cluster of at most `all_up_to_devices` devices offers every k. A larger one offers k = 1 ...
    `dense_nodes`, then powers of two and 1.5 times these, because 40 or 41 nodes make no difference to a job.
    If `jobs` are given, sizes too large for all of them are left out. Sizes that a rigid job insists on, and
    sizes of several nodes in which a job runs at present, are added.
    """
    size, whole = node_size(cluster), whole_nodes(cluster)
    every = sum(capacity(cluster).values()) <= all_up_to_devices
    own_sizes = _own_sizes(jobs)
    found: set[Shape] = set()
    for kind, usable in _usable_by_kind(cluster).items():
        count = len(whole[kind])
        ks = range(1, count + 1) if every else _sparse(count, dense_nodes)
        found |= _shapes_of_kind(kind, size[kind], usable, ks, own_sizes)
    largest = max((size_limits(view.spec)[1] for view in jobs), default=None)
    return tuple(sorted(s for s in found if largest is None or s.num_devices <= largest))


def _own_sizes(jobs: Sequence[JobView]) -> set[int]:
    """Return sizes on which rigid jobs insist, and sizes of several nodes in which jobs run at present."""
    rigid = {v.spec.num_devices for v in jobs if v.spec.mode == "rigid" and v.spec.num_devices}
    return rigid | {v.allocation.num_devices for v in jobs if v.allocation.num_nodes > 1}


def _shapes_of_kind(
    kind: str, per_node: int, usable: list[int], ks: Iterable[int], more_sizes: set[int]
) -> set[Shape]:
    most = max(usable)
    if most == 0:
        return set()
    found = {Shape(kind, 1, 1 << power) for power in range(most.bit_length())}
    found |= {Shape(kind, k, k * per_node) for k in ks}
    for num_devices in more_sizes:
        num_nodes = -(-num_devices // per_node)
        if num_devices <= (most if num_nodes == 1 else sum(usable)):
            found.add(Shape(kind, num_nodes, num_devices))
    return found


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

    A job that must stay within one domain of a level may take a shape of several nodes only if some domain
    has that many whole nodes. Which devices are free at the moment plays no part.
    """
    num_devices = np.array([shape.num_devices for shape in shapes], dtype=np.int64)
    limits = np.array([size_limits(view.spec) for view in jobs], dtype=np.int64).reshape(-1, 2)
    mask = (num_devices >= limits[:, :1]) & (num_devices <= limits[:, 1:])
    for row, view in enumerate(jobs):
        if view.spec.kinds is not None:
            mask[row] &= np.array([s.kind in view.spec.kinds for s in shapes], dtype=bool)
    if cluster is not None:
        levels = np.array([view.spec.level for view in jobs], object)
        for level in sorted(set(levels) - {None}):
            mask[levels == level] &= _fits_a_domain(shapes, cluster, level)
    return mask


def domain_of(node: Node, level: str) -> str:
    """Return the node's topology domain at a level; a node without that label is a domain of its own."""
    label = node.labels.get(level)
    return f"node {node.name}" if label is None else f"label {label}"


def _fits_a_domain(
    shapes: Sequence[Shape], cluster: ClusterSpec, level: str
) -> Bool[np.ndarray, " shapes"]:
    most = {
        kind: max(Counter(domain_of(node, level) for node in nodes).values(), default=0)
        for kind, nodes in whole_nodes(cluster).items()
    }
    return np.array([s.num_nodes == 1 or s.num_nodes <= most.get(s.kind, 0) for s in shapes], bool)


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
) -> str:
    """Explain why a job has no shape at all: the first of its own limits that rules out every shape.

    `devices` counts the devices of each kind that have this `status`. `has_room` tells whether the cluster
    has room for a shape, whatever its topology.
    """
    spec = view.spec
    least, most = size_limits(spec)
    usable = {k: n for k, n in devices.items() if spec.kinds is None or k in spec.kinds}
    said = f"{devices_in_words(usable) or 'none'} {status}"
    if spec.kinds is not None and not usable:
        return f"it allows only devices of kind {list(spec.kinds)}, and the cluster has {sorted(devices)}"
    if least > max(usable.values(), default=0):
        return f"it needs at least {least} devices of one kind, and the cluster has {said}"
    if not view.goodput:
        return "its goodput table has no usable entry, so no shape is known to be of use to it"
    fits = (s for s in view.goodput if s.kind in usable and takes(spec, s) and has_room(s))
    if spec.level is None or not any(fits):
        return (
            f"its goodput table has no entry between {least} and {most} devices that fits the cluster, "
            f"which has {said}"
        )
    return f"no domain of level {spec.level!r} is large enough for its {least} devices"


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

    One row for each kind and each power of two s: the slots of size s that the chosen shapes fill are at most
    sum_k floor(n_k/s), where node k has n_k usable devices. A row is left out if its limit equals the limit
    for s = 1, which already implies it.
    """
    usable, whole = _usable_by_kind(cluster), whole_nodes(cluster)
    num_devices = np.array([shape.num_devices for shape in shapes], np.int64)
    rows: list[tuple[np.ndarray, int, str]] = []  # devices that each shape uses, limit, kind
    for kind, size in node_size(cluster).items():
        of_kind = np.array([shape.kind == kind for shape in shapes], bool)
        if of_kind.any():
            used = np.where(of_kind, num_devices, 0)
            found = _rows_of_kind(used, size, usable.get(kind, []), len(whole[kind]))
            rows += [(row, limit, kind) for row, limit in found]
    matrix = np.array([row for row, _, _ in rows], float).reshape(len(rows), len(shapes))
    limits = np.array([limit for _, limit, _ in rows], dtype=float)
    return CapacityRows(matrix, limits, tuple(kind for _, _, kind in rows))


def _rows_of_kind(
    used: np.ndarray, size: int, usable: list[int], num_whole: int
) -> list[tuple[np.ndarray, int]]:
    """Return the rows of one kind and their limits; `used`: [shapes] devices of each shape of the kind."""
    full, rest = np.divmod(used, size)
    free = np.array(usable, dtype=np.int64)
    total, rows = int(free.sum()), []
    for power in (1 << exponent for exponent in range(size.bit_length())):
        limit = int((free // power).sum()) * power
        if power == 1 or limit < total:
            rows.append((full * (size // power * power) + rest // power * power, limit))
    # Whole nodes need a row of their own if their size is not itself a power of two.
    if num_whole * size < total and size.bit_count() > 1 and full.any():
        rows.append((full * size, num_whole * size))
    return rows


def present_shapes(jobs: Sequence[JobView], cluster: ClusterSpec) -> list[Shape | None]:
    """Return the shape of each job's present devices; None if it has none."""
    kind_of = {node.name: node.kind for node in cluster.nodes}
    return [shape_of(view.allocation.devices, kind_of) for view in jobs]


def shape_of(devices: Mapping[str, Sequence[int]], kind_of: Mapping[str, str]) -> Shape | None:
    """Return the shape of devices given by node; None if they have no kind in common, or there are none."""
    kinds = {kind_of.get(name) for name in devices}
    if len(kinds) != 1 or None in kinds:
        return None
    (kind,) = kinds
    assert kind is not None
    return Shape(kind, len(devices), sum(len(local) for local in devices.values()))
