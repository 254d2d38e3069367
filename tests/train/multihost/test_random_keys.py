"""Random numbers are the same in any number of processes: the whole table of `benchmarks/random_keys.py`."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[3] / "benchmarks" / "random_keys.py"

pytestmark = [pytest.mark.multihost, pytest.mark.slow]


def table(*arguments, limit_s):
    """The rows that the benchmark prints; it must find no difference."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split("|")[1:-1] for line in done.stdout.splitlines()[2:]]


@pytest.mark.nightly
def test_two_processes_of_two_devices_and_a_run_that_is_resumed_draw_what_one_process_draws():
    rows = table(
        *("--only", "2 processes of 2 devices"),
        *("--only", "stopped in 3 processes, resumed in 2"),
        limit_s=400,
    )
    assert len(rows) == 2
    for _, _, apart, _ in rows:
        assert float(apart) > 1e-3, "random numbers do not show in the losses"


@pytest.mark.nightly
def test_every_way_to_run_a_job_draws_what_one_process_draws():
    assert len(table(limit_s=2400)) > 12
