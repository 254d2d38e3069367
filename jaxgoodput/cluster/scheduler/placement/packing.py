"""Find room for jobs of any size on empty nodes, by a search that goes back where it got stuck.

Placing the largest job first on the fullest node (`board.py`) is enough for powers of two and whole nodes.
Other sizes can get stuck although there is room: 4, 3 and 3 before 2, 2 and 2 on nodes of 8 and 8. The search
tries the fullest node first, too, and remembers which rests it has already seen fail. It ends after
`MOST_STEPS`, so that a large cluster costs no more than a small one.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxgoodput.cluster.scheduler.placement.amounts import NOTHING, Amounts

MOST_STEPS = 3_000
MOST_PARTS = 300  # the search is recursive; larger placements are left to the greedy method


class JobParts(NamedTuple):
    """A job to be placed: its devices on each of its nodes, and where it may lie."""

    sizes: tuple[int, ...]
    """Devices on each node, the largest first."""
    domains: tuple[int, ...] | None
    """Domain of each node at the level that the job may not leave; None = it may use all nodes together."""
    own: frozenset[int]
    """Nodes that are tried first, because the job runs on them."""
    needs: Amounts = NOTHING
    """CPUs and memory for each device."""


class _Ended(Exception):
    """The search has taken `MOST_STEPS`."""


def pack(
    free: Sequence[int], jobs: Sequence[JobParts], left: Sequence[Amounts] | None = None
) -> list[list[int]] | None:
    """Return, for each job, the node of each of its parts; None if no placement is found.

    `free`: free devices of each node; `left`: its CPUs and memory, if jobs need any. The parts of a job lie
    on different nodes. Jobs are placed in the given order; the largest first is fastest.

    >>> pack([4, 3], [JobParts((2,), None, frozenset()), JobParts((4,), None, frozenset())])
    [[1], [0]]
    """
    if sum(len(job.sizes) for job in jobs) > MOST_PARTS:
        return None
    needed = left if any(job.needs for job in jobs) else None
    search = _Search(free, jobs, needed)
    try:
        return search.found if search.place(0) else None
    except _Ended:
        return None


class _Search:
    """The nodes' free devices while jobs are placed one after the other."""

    def __init__(
        self, free: Sequence[int], jobs: Sequence[JobParts], left: Sequence[Amounts] | None
    ):
        self.found: list[list[int]] = [[] for _ in jobs]
        self._free, self._jobs = list(free), jobs
        self._left = None if left is None else list(left)
        self._failed: set[tuple] = set()
        self._steps = 0
        bound = [i for i, job in enumerate(jobs) if job.domains is not None or job.own]
        # From this job on, nodes with equally many free devices are alike.
        self._alike_from = max(bound, default=-1) + 1

    def place(self, index: int) -> bool:
        """Place the jobs from `index` on; return whether all of them have room."""
        if index == len(self._jobs):
            return True
        alike = index >= self._alike_from
        nodes = self._free if self._left is None else list(zip(self._free, self._left, strict=True))
        state = (index, *(sorted(nodes) if alike else nodes))
        if state in self._failed:
            return False
        if self._place_parts(index, 0):
            return True
        self._failed.add(state)
        return False

    def _place_parts(self, index: int, part: int) -> bool:
        job, mine = self._jobs[index], self.found[index]
        if part == len(job.sizes):
            return self.place(index + 1)
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise _Ended
        size = job.sizes[part]
        for node in self._candidates(index, size):
            self._free[node] -= size
            before = None if self._left is None else self._left[node]
            if self._left is not None and before is not None:
                self._left[node] = before.minus(job.needs.times(size))
            mine.append(node)
            if self._place_parts(index, part + 1):
                return True
            mine.pop()
            self._free[node] += size
            if self._left is not None and before is not None:
                self._left[node] = before
        return False

    def _candidates(self, index: int, size: int) -> list[int]:
        """Return the nodes to try for a part: the job's own, then the fullest; of equal nodes, one."""
        job, mine = self._jobs[index], self.found[index]
        fits = [
            node
            for node, free in enumerate(self._free)
            if free >= size
            and node not in mine
            and (job.domains is None or not mine or job.domains[node] == job.domains[mine[0]])
        ]
        fits = self._with_needs(fits, job.needs.times(size))
        fits.sort(key=lambda node: (node not in job.own, self._free[node], node))
        if index < self._alike_from:
            return fits
        return list({self._state(node): node for node in reversed(fits)}.values())[::-1]

    def _with_needs(self, nodes: list[int], needed: Amounts) -> list[int]:
        """Return the nodes that have as many CPUs and as much memory left as a part needs."""
        if self._left is None or not needed:
            return nodes
        return [node for node in nodes if self._left[node].holds(needed)]

    def _state(self, node: int) -> tuple[int, Amounts | None]:
        """Return what is left of a node; nodes of which the same is left are alike."""
        return self._free[node], None if self._left is None else self._left[node]
