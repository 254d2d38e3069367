"""A value that is lost in one of several processes stops all of them, with the last good checkpoint kept."""

import json
import pathlib

import certified_worker
import problems
import pytest
from processes import run

pytestmark = [pytest.mark.multihost, pytest.mark.slow]


@pytest.mark.parametrize("kind", ["cut", "copies"])
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_all_processes_end_with_the_truth(tmp_path, kind, rank):
    environ = {"PYTHONPATH": str(pathlib.Path(problems.__file__).parent)}
    arguments = [str(tmp_path), kind, str(rank)]
    ended = run(certified_worker.__file__, 2, 1, arguments=arguments, environ=environ)
    found = [tmp_path / f"{process}.json" for process in (0, 1)]
    assert all(x.exists() for x in found), f"{ended.out}\n{ended.err}"
    for process, path in enumerate(found):
        told = json.loads(path.read_text())
        # A request takes effect two steps later.
        assert told["safe"] == 5 and "Step 5 is certified" in told["said"]
        knows = kind == "cut" or process == rank
        what = "params['large'] (1 of 20000 values" if knows else "another process found values"
        assert what in told["said"]
    steps = [x.name for x in (tmp_path / "run/checkpoints").iterdir() if x.name.isdigit()]
    assert steps == ["5"]
    (aside,) = [x.name for x in (tmp_path / "run/spoilt_checkpoints").iterdir()]
    assert int(aside) >= certified_worker.SPOILT_AT
