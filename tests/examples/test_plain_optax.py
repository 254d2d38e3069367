"""The example without the Trainer runs, grows its batch and learns."""

import json
import os
import pathlib
import subprocess
import sys

import compilations
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
def test_plain_optax_learns_with_fewer_updates(tmp_path):
    command = [sys.executable, EXAMPLES / "plain_optax.py", "--workdir", tmp_path / "run"]
    sizes = ["--base_steps=400", "--base_batch_size=16", "--max_batch_size=64"]
    done = subprocess.run(
        [*command, *sizes],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **compilations.JOBS},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    *rows, last = map(json.loads, (tmp_path / "run" / "progress.jsonl").read_text().splitlines())
    assert last["test_accuracy"] > 0.93
    assert last["updates"] < 350 and rows[-1]["progress"] >= 400
    batches = {row["batch"] for row in rows}
    assert batches > {16} and batches <= {16, 32, 64}
    assert all(1 <= row["gain"] <= row["batch"] / 16 for row in rows)
