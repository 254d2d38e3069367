"""Tables that the processes of a job hold together train as if one process had all rows in memory."""

import json
import types

import jax
import numpy as np
import pytest
import shared_tables_worker
from multihost_worker import read
from processes import run
from shared_tables_worker import BASE, LARGE, made
from table_runs import NUM_SAMPLES, close_rows, dense, rows_of

from jaxgoodput.data.cursor import Cursor

pytestmark = [pytest.mark.multihost, pytest.mark.slow]

NEVER = 10**6


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One run by three jobs, of 1, 3 and 2 processes; each goes on where the one before has stopped."""
    out = tmp_path_factory.mktemp("shared")
    for count, stop, code in ((1, 20, 143), (3, 45, 143), (2, NEVER, 0)):
        done = run(shared_tables_worker.__file__, count, 1, arguments=[str(out), str(stop)])
        assert done.code == code, f"{count} processes: {done.out}\n{done.err}"
    return out


@pytest.fixture(scope="module")
def steps(out):
    lines = read(out / "steps.jsonl")
    for line in lines:
        seed, epoch, offset = line["before"]
        line["before"] = Cursor(seed=seed, epoch=epoch, offset=offset)
    return [types.SimpleNamespace(**line) for line in lines]


def test_every_sample_is_used_once_whatever_the_processes_and_the_batch(steps):
    assert [one.step for one in steps] == list(range(1, len(steps) + 1))
    assert {(one.num_processes, one.num_samples) for one in steps} == {
        (count, size) for count in (1, 2, 3) for size in (BASE, LARGE)
    }
    place = 0
    for one in steps:
        assert one.before.epoch * NUM_SAMPLES + one.before.offset == place
        place += one.num_samples


def test_rows_are_those_of_a_dense_table(out, steps):
    trainer = made(out, devices=jax.devices()[:1])
    state = trainer.restore()
    expected, params = dense(trainer, steps)
    for name in params:
        np.testing.assert_allclose(state.params[name], params[name], rtol=1e-3, atol=1e-5)
    errors = [json.loads((out / f"error.{rank}.json").read_text()) for rank in range(2)]
    assert errors[0] == errors[1]
    # One process gets the rows of both to evaluate them.
    assert trainer.evaluate(state)["error"] == pytest.approx(errors[0]["error"], rel=1e-5)
    close_rows(rows_of(trainer), expected)


def test_the_slots_of_all_processes_hold_the_same_rows(out):
    for count, ranks in ((3, range(3)), (2, range(2))):
        found = [
            [line for line in read(out / f"slots.{rank}.jsonl") if line["count"] == count]
            for rank in ranks
        ]
        assert found[0]
        for others in found[1:]:
            for one, other in zip(found[0], others, strict=True):
                assert other["total"] == one["total"]
        moved = np.array([[x["moved"] for x in lines] for lines in found])
        # Every process had rows of its own on the disk and, in the longer of the two runs, in RAM.
        in_ram, on_disk = moved.max(axis=1).T
        assert (on_disk > 0).all() and (count == 2 or (in_ram > 0).all())
