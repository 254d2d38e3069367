"""Endless jobs that are hard to place: each gets its turns, and nothing is idle that one could use."""

import importlib.util
import pathlib
from types import ModuleType

import pytest

ROOT = pathlib.Path(__file__).parents[3]
HOURS = 36.0


@pytest.fixture(scope="module")
def worlds() -> ModuleType:
    """The worlds of `benchmarks/scheduler_placement.py`, which prints what is checked here."""
    path = ROOT / "benchmarks" / "scheduler_placement.py"
    spec = importlib.util.spec_from_file_location("scheduler_placement", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(worlds, cluster, jobs, hours=HOURS):
    found = worlds.live(cluster, jobs, hours)
    assert not found.wrong
    assert found.dropped == found.idle == 0
    if jobs:
        turns = worlds.round_robin(cluster, jobs, hours)
        assert worlds.ratio(found, turns) <= worlds.MOST_WAIT, found.waits_s
    return found


def test_gangs_of_which_one_fits_a_node(worlds):
    check(worlds, worlds.cluster_of([8] * 4), worlds.named(5, 5), 48.0)


def test_gangs_of_which_one_fits_a_rack(worlds):
    cluster = worlds.cluster_of([8] * 6, per_rack=3)
    check(worlds, cluster, worlds.named(3, 16, "rack"), 12.0)


def test_a_gang_that_was_paused_for_another_returns(worlds):
    late = worlds.gang("late", 8, submitted_s=3600.0)
    check(worlds, worlds.cluster_of([8] * 4), [*worlds.named(4, 6), late], 24.0)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [1.0, 4.0])
def test_turns_do_not_grow_with_the_age_of_jobs(worlds, weight):
    jobs = [worlds.gang("first", 1, weight=weight), *worlds.named(2, 1)]
    found = check(worlds, worlds.cluster_of([1]), jobs, 100.0)
    assert found.longest_s <= 7 * 3600.0  # three clusters full of jobs: 6 h, and a turn


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_stream_of_gangs_in_racks_leaves_nothing_idle(worlds, seed):
    cluster = worlds.cluster_of([8] * 9, per_rack=3)
    _, could, dropped, _ = worlds.run_stream(cluster, worlds.stream(seed=seed))
    assert could <= 0.02
    assert dropped == 0


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(i, marks=pytest.mark.slow) for i in range(2, 8))]
)
def test_every_endless_job_gets_its_turns(worlds, seed):
    check(worlds, *worlds.random_world(seed))


@pytest.mark.slow
def test_in_a_large_cluster_every_chosen_job_is_placed_too(worlds):
    """Too many jobs for the program with nodes, so that jobs which did not fit are chosen again in turn."""
    jobs = [
        worlds.gang(f"j{i}", 16, "rack") if i % 3 else worlds.gang(f"j{i}", (3, 5, 6, 7)[i % 4])
        for i in range(1600)
    ]
    found = worlds.live(worlds.cluster_of([8] * 1300, per_rack=3), jobs, 0.25)
    assert not found.wrong
    assert found.dropped == found.idle == 0


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_every_endless_job_of_many_worlds_gets_its_turns(worlds, first):
    for seed in range(first, first + 50):
        check(worlds, *worlds.random_world(seed))
