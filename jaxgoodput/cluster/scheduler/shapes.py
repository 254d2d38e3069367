"""The shapes that a cluster offers, which of them a job may take, and when a set of them surely fits.

A shape lies on one node (1, 2, 4, ... devices) or is made of whole nodes. With these sizes allocation and
placement decouple: whatever satisfies `capacity_rows` can be placed without splitting a job over more nodes
than it needs. Proof: place the largest first; before a size s is placed, everything on a node has a size
that is a multiple of s, so a node with n usable devices still has floor(n/s) - (what is placed)/s slots of
size s, wherever the others went. A node whose size is no power of two behaves as the power-of-two nodes of
its binary expansion (6 = 4 + 2).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.specs import ClusterSpec, JobSpec, Node, Shape


class CapacityRows(NamedTuple):
    """`matrix @ (number of jobs with each shape) <= limits`: satisfied exactly when everything can be placed.

    One row per kind where all nodes are full and of one power-of-two size; more where they are not.
    Exact for the sizes of `shapes`; only necessary where a rigid job's own size (such as 3) is among them.
    """

    matrix: Float[np.ndarray, "rows shapes"]
    limits: Float[np.ndarray, " rows"]
    """Devices that each row has."""
    kinds: tuple[str, ...]
    """The kind of device that each row is of."""


def capacity(cluster: ClusterSpec) -> dict[str, int]:
    """Devices of each kind that anybody may be given: of nodes that are up, without those withheld.

    A draining node's devices belong to the jobs that already run there, so they are not counted.
    """
    total: dict[str, int] = {}
    for node in cluster.nodes:
        total[node.kind] = total.get(node.kind, 0) + (node.num_usable if node.state == "up" else 0)
    return total


def node_size(cluster: ClusterSpec) -> dict[str, int]:
    """Devices of a whole node of each kind: the largest that is not down, counting withheld devices too."""
    size: dict[str, int] = {}
    for node in cluster.nodes:
        if node.state != "down":
            size[node.kind] = max(size.get(node.kind, 0), node.num_devices)
    return size


def whole_nodes(cluster: ClusterSpec) -> dict[str, list[Node]]:
    """The nodes of each kind that shapes of several nodes are made of: up, full size, none withheld."""
    size = node_size(cluster)
    whole: dict[str, list[Node]] = {kind: [] for kind in size}
    for node in cluster.nodes:
        if node.state == "up" and node.num_usable == size[node.kind]:
            whole[node.kind].append(node)
    return whole


def shapes(
    cluster: ClusterSpec,
    jobs: Sequence[JobView] = (),
    *,
    dense_nodes: int = 8,
    all_up_to_devices: int = 64,
) -> tuple[Shape, ...]:
    """What can be offered: per kind 1, 2, 4, ... devices of one node, and k whole nodes of R devices, sorted.

    Every k is offered in a cluster of at most `all_up_to_devices` devices; beyond, k = 1 ... `dense_nodes`
    and then powers of two and 1.5 times these, because a job gains nothing from the choice between 40 and
    41 nodes. Where `jobs` are given, sizes that none of them can use are left out; sizes that a rigid job
    insists on, and those in which one runs at present, are added.
    """
    nodes_of: dict[str, list[Node]] = {}
    for node in cluster.nodes:
        if node.state == "up":
            nodes_of.setdefault(node.kind, []).append(node)
    size = node_size(cluster)
    whole = whole_nodes(cluster)
    every = sum(capacity(cluster).values()) <= all_up_to_devices
    largest = max((size_limits(view.spec)[1] for view in jobs), default=None)
    rigid = {v.spec.num_devices for v in jobs if v.spec.mode == "rigid" and v.spec.num_devices}
    present = {v.allocation.num_devices for v in jobs if v.allocation.num_nodes > 1}
    found: set[Shape] = set()
    for kind, nodes in nodes_of.items():
        per_node, most = size[kind], max(node.num_usable for node in nodes)
        if most == 0:
            continue
        found |= {Shape(kind, 1, 1 << power) for power in range(most.bit_length())}
        count = len(whole[kind])
        ks = range(1, count + 1) if every else _sparse(count, dense_nodes)
        found |= {Shape(kind, k, k * per_node) for k in ks}
        for num_devices in rigid | present:
            num_nodes = -(-num_devices // per_node)
            if num_nodes == 1 and num_devices <= most:
                found.add(Shape(kind, 1, num_devices))
            elif num_nodes > 1 and num_devices <= sum(node.num_usable for node in nodes):
                found.add(Shape(kind, num_nodes, num_devices))
    return tuple(sorted(s for s in found if largest is None or s.num_devices <= largest))


def size_limits(spec: JobSpec) -> tuple[int, int]:
    """The fewest and the most devices that a job runs on."""
    if spec.mode == "rigid" and spec.num_devices is not None:
        return spec.num_devices, spec.num_devices
    return spec.min_devices, spec.max_devices


def _sparse(count: int, dense: int) -> list[int]:
    ks = list(range(1, min(count, dense) + 1))
    power = 1
    while power <= count:
        ks += [k for k in (power, power * 3 // 2) if dense < k <= count]
        power *= 2
    return sorted(set(ks))


def allowed(
    jobs: Sequence[JobView], shapes: Sequence[Shape], cluster: ClusterSpec | None = None
) -> Bool[np.ndarray, "jobs shapes"]:
    """Which shapes each job's own limits permit: sizes, kinds, and (given the cluster) the topology level.

    A job that must stay within one domain of a level may take a shape of several nodes only where one domain
    holds that many whole nodes. What is free at the moment plays no part.
    """
    num_devices = np.array([shape.num_devices for shape in shapes], dtype=np.int64)
    limits = np.array([size_limits(view.spec) for view in jobs], dtype=np.int64).reshape(-1, 2)
    mask = (num_devices >= limits[:, :1]) & (num_devices <= limits[:, 1:])
    for row, view in enumerate(jobs):
        if view.spec.kinds is not None:
            mask[row] &= np.array([s.kind in view.spec.kinds for s in shapes], dtype=bool)
    if cluster is not None:
        for level in sorted({v.spec.level for v in jobs if v.spec.level is not None}):
            fits = _fits_a_domain(shapes, cluster, level)
            mask[[view.spec.level == level for view in jobs]] &= fits
    return mask


def domain_of(node: Node, level: str) -> str:
    """The node's topology domain at a level; a node without that label is a domain of its own."""
    label = node.labels.get(level)
    return f"node {node.name}" if label is None else f"label {label}"


def _fits_a_domain(
    shapes: Sequence[Shape], cluster: ClusterSpec, level: str
) -> Bool[np.ndarray, " shapes"]:
    counts: dict[tuple[str, str], int] = {}
    for kind, nodes in whole_nodes(cluster).items():
        for node in nodes:
            key = (kind, domain_of(node, level))
            counts[key] = counts.get(key, 0) + 1
    most: dict[str, int] = {}
    for (kind, _), count in counts.items():
        most[kind] = max(most.get(kind, 0), count)
    return np.array([s.num_nodes == 1 or s.num_nodes <= most.get(s.kind, 0) for s in shapes], bool)


def goodput_matrix(
    jobs: Sequence[JobView], shapes: Sequence[Shape], cluster: ClusterSpec | None = None
) -> Float[np.ndarray, "jobs shapes"]:
    """Goodput [jobs, shapes] in each job's own units, 0 = unknown, not allowed or no positive number."""
    matrix = np.zeros((len(jobs), len(shapes)))
    column: dict[Shape, int] = {shape: i for i, shape in enumerate(shapes)}
    # Tables of different jobs mostly share their Shape objects: known by identity, a look-up hashes no
    # strings (300,000 of them for 5,000 jobs). The jobs keep the objects alive, so ids stay unique.
    by_identity: dict[int, int] = {}
    for row, view in enumerate(jobs):
        ids = list(map(id, view.goodput))
        columns = list(map(by_identity.get, ids))
        if None in columns:
            for key, shape in zip(ids, view.goodput, strict=True):
                by_identity[key] = column.get(shape, -1)
            columns = [by_identity[key] for key in ids]
        where = np.array(columns, dtype=np.int64)
        values = np.fromiter(view.goodput.values(), dtype=float, count=len(columns))
        known = where >= 0
        matrix[row, where[known]] = values[known]
    good = allowed(jobs, shapes, cluster) & np.isfinite(matrix) & (matrix > 0)
    matrix[~good] = 0.0
    return matrix


def no_shape_reason(
    view: JobView,
    devices: Mapping[str, int],
    has_room: Callable[[Shape], bool],
    *,
    where: str = "in service",
) -> str:
    """Why a job has no shape at all: the first of its own limits that leaves none.

    devices: by kind, those that `where` says. `has_room` says of a shape whether the cluster has room for
    it, whatever its topology.
    """
    spec = view.spec
    least, most = size_limits(spec)
    usable = {k: n for k, n in devices.items() if spec.kinds is None or k in spec.kinds}
    if spec.kinds is not None and not usable:
        return f"it allows only devices of kind {list(spec.kinds)}, and the cluster has {sorted(devices)}"
    said = devices_in_words(usable) or "none"
    if least > max(usable.values(), default=0):
        return f"it needs at least {least} devices of one kind, and {where} are {said}"
    if not view.goodput:
        return "its goodput table has no usable entry, so no shape is known to be of use to it"
    if spec.level is not None and any(
        s.kind in usable and least <= s.num_devices <= most and has_room(s) for s in view.goodput
    ):
        return f"no domain of level {spec.level!r} is large enough for its {least} devices"
    return (
        f"its goodput table has no entry between {least} and {most} devices that the cluster has room for "
        f"({said} {where})"
    )


def shape_in_words(shape: Shape) -> str:
    """A shape in words.

    >>> shape_in_words(Shape("h200", 2, 16))
    '16 h200 on 2 nodes'
    """
    nodes = "node" if shape.num_nodes == 1 else "nodes"
    return f"{shape.num_devices} {shape.kind} on {shape.num_nodes} {nodes}"


def devices_in_words(devices: Mapping[str, int]) -> str:
    """Numbers of devices by kind, in words.

    >>> devices_in_words({"h200": 8, "a100": 16})
    '16 a100, 8 h200'
    """
    return ", ".join(f"{devices[kind]} {kind}" for kind in sorted(devices))


def capacity_rows(cluster: ClusterSpec, shapes: Sequence[Shape]) -> CapacityRows:
    """The rows that make a choice of shapes placeable (the claim at the top of this file).

    For a kind and a size s: the slots of size s that the chosen shapes fill are at most sum_k floor(n_k/s),
    n_k the usable devices of node k. A row whose limit equals that of s = 1 says nothing new and is left
    out.
    """
    whole = whole_nodes(cluster)
    per_node = node_size(cluster)
    rows: list[Float[np.ndarray, " shapes"]] = []
    limits: list[float] = []
    kinds: list[str] = []
    usable: dict[str, list[int]] = {kind: [] for kind in per_node}
    for node in cluster.nodes:
        if node.state == "up":
            usable[node.kind].append(node.num_usable)
    for kind, counts in usable.items():
        of_kind = [(i, s) for i, s in enumerate(shapes) if s.kind == kind]
        if not of_kind:
            continue
        free = np.array(counts, dtype=np.int64)
        total = int(free.sum())
        size, power = per_node[kind], 1
        while power <= size:
            limit = int((free // power).sum()) * power
            if power == 1 or limit < total:
                row = np.zeros(len(shapes))
                for i, shape in of_kind:
                    full, rest = divmod(shape.num_devices, size)
                    row[i] = full * (size // power * power) + rest // power * power
                rows.append(row)
                limits.append(limit)
                kinds.append(kind)
            power *= 2
        limit = len(whole[kind]) * size
        if limit < total and size.bit_count() > 1:  # otherwise it was the last power
            row = np.zeros(len(shapes))
            for i, shape in of_kind:
                row[i] = shape.num_devices // size * size
            if row.any():
                rows.append(row)
                limits.append(limit)
                kinds.append(kind)
    matrix = np.array(rows) if rows else np.zeros((0, len(shapes)))
    return CapacityRows(matrix, np.array(limits, dtype=float), tuple(kinds))


def shape_of(devices: Mapping[str, Sequence[int]], kind_of: Mapping[str, str]) -> Shape | None:
    """The shape of devices by node; None where there are none, or of an unknown node or several kinds."""
    kinds = {kind_of.get(name) for name in devices}
    if len(kinds) != 1 or None in kinds:
        return None
    (kind,) = kinds
    assert kind is not None
    return Shape(kind, len(devices), sum(len(local) for local in devices.values()))
