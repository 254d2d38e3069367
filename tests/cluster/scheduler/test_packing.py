"""The search for room finds a placement whenever there is one, and never an impossible one."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.cluster.scheduler.placement.packing import JobParts, pack


@st.composite
def problems(draw) -> tuple[list[int], list[tuple[tuple[int, ...], bool]], list[int]]:
    """Free devices of up to 4 nodes, jobs (parts, whether they must stay in a rack), and racks."""
    free = draw(st.lists(st.integers(0, 8), min_size=1, max_size=4))
    part = st.integers(1, 8)
    jobs = draw(st.lists(st.lists(part, min_size=1, max_size=3), min_size=1, max_size=5))
    bound = draw(st.lists(st.booleans(), min_size=len(jobs), max_size=len(jobs)))
    sizes = [(tuple(sorted(job, reverse=True)), one) for job, one in zip(jobs, bound, strict=True)]
    return free, sizes, [i // 2 for i in range(len(free))]


def by_trying(free: list[int], jobs: list[tuple[tuple[int, ...], bool]], racks: list[int]) -> bool:
    if not jobs:
        return True
    (sizes, is_bound), *rest = jobs
    for chosen in itertools.permutations(range(len(free)), len(sizes)):
        if is_bound and len({racks[n] for n in chosen}) > 1:
            continue
        left = list(free)
        for node, size in zip(chosen, sizes, strict=True):
            left[node] -= size
        if min(left) >= 0 and by_trying(left, rest, racks):
            return True
    return False


@settings(max_examples=400, deadline=None)
@given(problems())
def test_room_is_found_whenever_there_is_some(problem):
    free, jobs, racks = problem
    jobs = sorted(jobs, key=lambda job: -sum(job[0]))
    wanted = [JobParts(sizes, tuple(racks) if one else None, frozenset()) for sizes, one in jobs]
    found = pack(free, wanted)
    assert (found is not None) == by_trying(free, jobs, racks)
    if found is None:
        return
    left = list(free)
    for (sizes, is_bound), where in zip(jobs, found, strict=True):
        assert len(set(where)) == len(sizes)
        assert not is_bound or len({racks[n] for n in where}) == 1
        for node, size in zip(where, sizes, strict=True):
            left[node] -= size
    assert min(left) >= 0


def test_a_search_that_takes_too_long_finds_nothing():
    jobs = [JobParts((5,), None, frozenset({i})) for i in range(12)]
    assert pack([9] * 11, jobs) is None
