"""Place jobs of given shapes on devices: every job on the fewest nodes, moving as few jobs as possible.

Four methods are tried in turn until every job is placed. First all jobs that keep their shape keep their
devices, and the rest fits around them. Then small jobs give way greedily. Then an integer program
(`fewest_moves`) finds the cheapest set of jobs to move. Last, all jobs are placed anew (`packing`), which
moves more of them, but finds room for odd sizes. Kinds are independent of each other.
"""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence

from jaxgoodput.cluster.scheduler.placement.amounts import needs_together
from jaxgoodput.cluster.scheduler.placement.board import Board, Request
from jaxgoodput.cluster.scheduler.placement.fewest_moves import fewest_moves
from jaxgoodput.cluster.scheduler.placement.packing import JobParts, pack
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.shapes import chunks, node_size, shape_of
from jaxgoodput.specs import Allocation, ClusterSpec, Node, Shape

LEAST_PRICE = 1e-3  # seconds; a job whose restart is free is still not moved without need

Placed = Mapping[str, tuple[int, ...]]
"""Local device indices by node name."""


def place(
    wanted: Mapping[str, Shape],
    jobs: Sequence[JobView],
    cluster: ClusterSpec,
    *,
    keep: bool = True,
    one_multi_node_job_per_node: bool = False,
    share_groups: Mapping[str, str] | None = None,
    time_limit_s: float = 0.5,
) -> dict[str, Allocation]:
    """Return devices, exactly of the wanted shape, for every job in `wanted`, moving the fewest jobs.

    Shapes that satisfy `capacity_rows` are placed completely, if they are powers of two or whole nodes and
    not bound to a topology domain. A job that does not fit is left out of the answer.

    `wanted` maps job ids to shapes. With `keep=False` every job is placed afresh. Jobs with the same entry in
    `share_groups` (id -> group) get the same devices, so they must want the same shape. The price of moving a
    job is its `restart_s`. A job whose devices stay the same keeps its allocation object; otherwise it gets
    the next generation. Raises ValueError for an unknown job, or for different shapes in one share group.
    """
    views = {view.spec.id: view for view in jobs}
    if unknown := sorted(wanted.keys() - views.keys()):
        raise ValueError(
            f"a shape is wanted for {unknown[0]!r}, which is not among the {len(views)} jobs; pass every job "
            "whose shape is wanted"
        )
    groups = share_groups or {}
    members = _members(wanted, groups)
    kind_of = {node.name: node.kind for node in cluster.nodes}
    requests: dict[str, list[Request]] = {}
    for key, ids in members.items():
        request = _request(key, [views[i] for i in ids], [wanted[i] for i in ids], kind_of, keep)
        requests.setdefault(request.shape.kind, []).append(request)
    placed: dict[str, Placed] = {}
    for kind in sorted(requests.keys() & node_size(cluster).keys()):
        nodes = [node for node in cluster.nodes if node.kind == kind]
        board = _fill_kind(nodes, requests[kind], one_multi_node_job_per_node, time_limit_s)
        placed |= {key: board.devices(key) for key in board.held}
    return {
        job: allocation_of(views[job].allocation, placed[key], groups.get(job))
        for key, ids in members.items()
        if key in placed
        for job in ids
    }


def _members(jobs: Iterable[str], groups: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the jobs of each request: a share group together, every other job alone."""
    members: dict[str, list[str]] = {}
    for job in sorted(jobs):
        key = f"group {groups[job]}" if job in groups else f"job {job}"
        members.setdefault(key, []).append(job)
    return members


def allocation_of(
    previous: Allocation, devices: Placed, share_group: str | None = None
) -> Allocation:
    """Return `previous` itself if these are its devices, otherwise an allocation of the next generation."""
    if devices == previous.devices and share_group == previous.share_group:
        return previous
    return Allocation(devices=devices, generation=previous.generation + 1, share_group=share_group)


def _request(
    key: str,
    views: list[JobView],
    shapes: list[Shape],
    kind_of: Mapping[str, str],
    keep: bool,
) -> Request:
    shape = shapes[0]
    if any(other != shape for other in shapes):
        raise ValueError(
            f"the jobs of a share group run on the same devices, but {[v.spec.id for v in views]} want the "
            f"shapes {shapes}; give all of them one shape"
        )
    previous, keeps = _present(views, shape, kind_of) if keep else ({}, False)
    levels = [view.spec.level for view in views if view.spec.level is not None]
    return Request(
        key=key,
        shape=shape,
        price=max(sum(view.restart_s for view in views), LEAST_PRICE),
        previous=previous,
        keeps=keeps,
        level=levels[0] if levels and shape.num_nodes > 1 else None,
        needs=needs_together(map(operator.attrgetter("spec"), views)),
    )


def _present(views: list[JobView], shape: Shape, kind_of: Mapping[str, str]) -> tuple[Placed, bool]:
    """Return devices that one of the jobs has at present, and whether they have the wanted shape."""
    previous: Placed = {}
    for view in views:
        devices = view.allocation.devices
        if _have_shape(devices, shape, kind_of):
            return devices, True
        if not previous and shape_of(devices, kind_of) is not None:
            previous = devices
    return previous, False


def _have_shape(devices: Placed, shape: Shape, kind_of: Mapping[str, str]) -> bool:
    if len(devices) != shape.num_nodes:
        return False
    left = shape.num_devices
    for name, local in devices.items():
        if kind_of.get(name) != shape.kind:
            return False
        left -= len(local)
    return left == 0


def _fill_kind(
    nodes: list[Node], requests: list[Request], exclusive: bool, time_limit_s: float
) -> Board:
    exact, pending = _keep_all(nodes, requests, exclusive)
    # Filling changes a board, so every method starts from a copy.
    around = exact.copy()
    if not around.fill(pending, move=False):
        return around
    greedy = exact.copy()
    kept = list(greedy.requests.values())
    left_out = greedy.fill(pending, move=True)
    price = float(sum(r.price for r in kept)) if left_out else _moved_price(greedy, kept)
    if not left_out and price <= min((r.price for r in kept), default=0.0):
        return greedy  # at least one must move, and none is cheaper
    below = math.inf if left_out else price
    gone = fewest_moves(exact, pending, below=below, time_limit_s=time_limit_s)
    best = greedy
    if gone is not None:
        moved = [exact.release(key) for key in sorted(gone)]
        exact_left_out = exact.fill([*pending, *moved], move=False)
        if (len(exact_left_out), _moved_price(exact, kept)) < (len(left_out), price):
            best, left_out = exact, exact_left_out
    anew = _placed_anew(nodes, requests) if left_out and not exclusive else None
    return best if anew is None else anew


def _placed_anew(nodes: list[Node], requests: list[Request]) -> Board | None:
    """Return a board with all requests, wherever they were before; None if `pack` finds no room for all."""
    board = Board(nodes)
    order = sorted(requests, key=lambda r: (-r.shape.num_devices, r.level is None, r.key))
    sizes = [tuple(chunks(request.shape, board.node_size)) for request in order]
    wanted = [
        JobParts(
            sizes=its,
            domains=None if r.level is None else tuple(board.domain_ids(r.level).tolist()),
            own=frozenset(board.index[name] for name in r.previous if name in board.index),
            needs=r.needs,
        )
        for r, its in zip(order, sizes, strict=True)
    ]
    found = pack(board.free.tolist(), wanted, board.left)
    if found is None:
        return None
    where = [dict(zip(its, size, strict=True)) for its, size in zip(found, sizes, strict=True)]
    # Jobs that stay on their nodes take their devices first, so that they do not move at all.
    stays = [
        r.keeps and {board.index.get(n, -1): len(d) for n, d in r.previous.items()} == counts
        for r, counts in zip(order, where, strict=True)
    ]
    for is_first in (True, False):
        for request, counts, stay in zip(order, where, stays, strict=True):
            if stay == is_first and not (stay and board.keep(request)):
                board.take_parts(request, counts)
    return board


def _moved_price(board: Board, kept: Iterable[Request]) -> float:
    """Return the sum of the prices of the requests whose devices on the board are not their previous ones."""
    moved = (r for r in kept if r.key in board.held and board.devices(r.key) != r.previous)
    return float(sum(r.price for r in moved))


def _keep_all(
    nodes: list[Node], requests: list[Request], exclusive: bool
) -> tuple[Board, list[Request]]:
    """Return a board on which requests keep their devices, the dearest to move first, and the others."""
    board = Board(nodes, one_multi_node_job_per_node=exclusive)
    pending = [r for r in sorted(requests, key=lambda r: (-r.price, r.key)) if not board.keep(r)]
    return board, pending
