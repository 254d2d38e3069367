"""Moves over the devices of several processes: bitwise, on routes that all of them pick alike."""

import pathlib

import pytest
from moves_worker import PAIRS
from processes import run

WORKER = pathlib.Path(__file__).with_name("moves_worker.py")


@pytest.mark.multihost
@pytest.mark.slow
def test_two_processes_move_a_state_between_layouts_that_span_them():
    finished = run(WORKER, 2, 2)
    assert finished.code == 0, finished.err
    routes = {finished.value(rank, "routes") for rank in (0, 1)}
    assert len(routes) == 1 and "pieces" not in next(iter(routes))
    for rank in (0, 1):
        assert finished.value(rank, "moved") == str(len(PAIRS))
        assert "save and restore a checkpoint" in finished.value(rank, "refused")
