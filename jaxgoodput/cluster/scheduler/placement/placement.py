"""From shapes to devices: every job on the fewest nodes, and as few jobs moved as possible.

Three steps, each only where the one before did not place everybody: all that keep their shape stay and the
rest fits around them; small jobs give way greedily; the cheapest set that gives way, by an integer program
(`fewest_moves`). Kinds are independent of one another.
"""

from collections.abc import Mapping, Sequence

from jaxgoodput.cluster.scheduler.placement.board import Board, Request
from jaxgoodput.cluster.scheduler.placement.fewest_moves import fewest_moves
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.shapes import shape_of
from jaxgoodput.specs import Allocation, ClusterSpec, Node, Shape

LEAST_PRICE = 1e-3  # seconds; a job that restarts for nothing is still not moved for nothing


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
    """Devices for every job that is wanted somewhere, exactly of that shape, moving the fewest.

    What satisfies `capacity_rows` is placed completely. A job that does not fit (beyond the capacity, of a
    size such as 3 that leaves holes, or bound to one domain of a topology level) is not in the answer; the
    others are.

    wanted: job id -> shape. keep=False places everything afresh. Jobs with the same entry in `share_groups`
    (id -> group) get the same devices, so must want the same shape. The price of moving a job is its
    `restart_s`. With equal devices the present allocation is returned as it is; otherwise its generation
    grows by one.
    """
    views = {view.spec.id: view for view in jobs}
    if unknown := sorted(wanted.keys() - views.keys()):
        raise ValueError(
            f"a shape is wanted for {unknown[0]!r}, which is not among the {len(views)} jobs; pass every job "
            "whose shape is wanted"
        )
    by_kind: dict[str, list[Node]] = {}
    for node in cluster.nodes:
        by_kind.setdefault(node.kind, []).append(node)
    kind_of = {node.name: node.kind for node in cluster.nodes}
    members: dict[str, list[str]] = {}
    groups = share_groups or {}
    for job in sorted(wanted):
        members.setdefault(f"group {groups[job]}" if job in groups else f"job {job}", []).append(
            job
        )
    requests: dict[str, list[Request]] = {}
    for key, ids in members.items():
        request = _request(key, [views[i] for i in ids], [wanted[i] for i in ids], kind_of, keep)
        requests.setdefault(request.shape.kind, []).append(request)
    placed: dict[str, dict[str, tuple[int, ...]]] = {}
    in_service = {node.kind for node in cluster.nodes if node.state != "down"}
    for kind in sorted(requests.keys() & in_service):
        board = _fill_kind(by_kind[kind], requests[kind], one_multi_node_job_per_node, time_limit_s)
        placed |= {key: board.devices(key) for key in board.held}
    return {
        job: allocation_of(views[job].allocation, placed[key], groups.get(job))
        for key, ids in members.items()
        if key in placed
        for job in ids
    }


def allocation_of(
    previous: Allocation, devices: Mapping[str, tuple[int, ...]], share_group: str | None = None
) -> Allocation:
    """The previous allocation itself where nothing changes, else a new one of the next generation."""
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
    previous: Mapping[str, tuple[int, ...]] = {}
    keeps = False
    for view in views if keep else ():
        present = shape_of(view.allocation.devices, kind_of)
        if present == shape:
            previous, keeps = view.allocation.devices, True
            break
        if present is not None and not previous:
            previous = view.allocation.devices
    levels = [view.spec.level for view in views if view.spec.level is not None]
    return Request(
        key=key,
        shape=shape,
        price=max(sum(view.restart_s for view in views), LEAST_PRICE),
        previous=previous,
        keeps=keeps,
        level=levels[0] if levels and shape.num_nodes > 1 else None,
    )


def _fill_kind(
    nodes: list[Node], requests: list[Request], exclusive: bool, time_limit_s: float
) -> Board:
    board, pending = _keep_all(nodes, requests, exclusive)
    if not pending:
        return board
    waiting = board.fill(pending, move=False)
    if not waiting:
        return board
    greedy, pending = _keep_all(nodes, requests, exclusive)
    movable = [r for r in greedy.requests.values()]
    kept = set(greedy.held)
    left_out = greedy.fill(pending, move=True)
    stayed = (
        {r.key for r in movable if greedy.devices(r.key) == r.previous} if not left_out else set()
    )
    price = sum(r.price for r in movable if r.key not in stayed)
    if not left_out and price <= min(r.price for r in movable):
        return greedy  # one must move, and none is cheaper
    start, pending = _keep_all(nodes, requests, exclusive)
    gone = fewest_moves(start, pending, time_limit_s=time_limit_s)
    if gone is None:
        return greedy
    moved = [start.release(key) for key in sorted(gone)]
    exact_left_out = start.fill([*pending, *moved], move=False)
    exact_price = sum(
        r.price for r in movable if r.key in start.held and start.devices(r.key) != r.previous
    )
    assert kept >= gone
    better = (len(exact_left_out), exact_price) < (len(left_out), price)
    return start if better else greedy


def _keep_all(
    nodes: list[Node], requests: list[Request], exclusive: bool
) -> tuple[Board, list[Request]]:
    """A board with all that can stay where they are (the dearest to move first), and the rest."""
    board = Board(nodes, one_multi_node_job_per_node=exclusive)
    pending = [r for r in sorted(requests, key=lambda r: (-r.price, r.key)) if not board.keep(r)]
    return board, pending
