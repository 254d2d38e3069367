"""Each end of a job has an exit code that is true, as a restart shows: real processes, really ended."""

import contextlib
import dataclasses
import importlib
import pathlib
import sys

import compilations
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.multihost]

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


def campaign():
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("ends")
    finally:
        sys.path.remove(str(FOLDER))


ENDS = campaign()
QUICK = (
    "alone: leaving a full disk, TERM and later TERM",
    "run: stepping, TERM INT",
    "wrapper shell: full disk, TERM",
    "run: os._exit(0)",
    "agent: the coordinator is killed, then TERM",
)


@pytest.fixture(scope="module")
def environ():
    return {**compilations.JOBS, "JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def copies(environ):
    with contextlib.closing(ENDS.CopyServer(environ)) as server:
        yield server


def test_the_quick_ends_are_rows_of_the_campaign():
    assert {*QUICK} <= {str(row) for row in ENDS.ROWS}
    assert len(ENDS.ROWS) == len({str(row) for row in ENDS.ROWS}) >= 60


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=str(row), marks=[] if str(row) in QUICK else pytest.mark.nightly)
        for row in ENDS.ROWS
    ],
)
def test_an_exit_code_says_what_was_done(row, tmp_path, copies, environ):
    if row.moment == "read-only disk":
        pytest.skip("needs root: benchmarks/ends.py mounts the disk")
    seen = ENDS.play(row, tmp_path, copies, environ)
    assert not seen.fault(row), (seen.fault(row), seen)


def seen(**fields):
    found = {"code": 143, "seconds": 1.0, "done": 7, "began": 7, "output": "step 7 is saved"}
    return ENDS.Seen(**{**found, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"began": 6, "output": ""},
        {"began": 6, "done": 6},
        {"code": 0, "began": 0, "output": ""},
        {"code": 75, "output": "step 7 could not be saved; step 4 is safe"},
        {"code": 75, "began": 3, "output": "step 7 could not be saved; step 4 is safe"},
        {"code": 75, "began": 3, "output": ""},
        {"code": 2},
    ],
)
def test_an_end_that_is_not_true_is_found_out(fields):
    row = ENDS.EndRow("any", "stepping", (), (0, 75, 143))
    assert seen(**fields).fault(row)
    assert not seen().fault(row)
    assert seen(code=143).fault(dataclasses.replace(row, codes=(75,)))
