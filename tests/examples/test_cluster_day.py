"""The day of a cluster: the requests of its ways, its picture, and a small one that is really run."""

import pathlib
import subprocess
import sys

import cluster_day
import pytest
from cluster_day import WAYS, Done

DONE = (
    Done("a", 0.0, 1.0, 10.0, ((1.0, 4.0, 2), (4.0, 10.0, 1))),
    Done("b", 2.0, 4.0, 32.0, ((4.0, 32.0, 1),)),
)


def test_a_job_asks_for_what_its_way_says():
    asked = {name: way.submitted(2)[-3:] for name, way in WAYS.items()}
    assert asked["fifo"] == ["2", "--max", "2"] and asked["halves"] == ["1", "--max", "1"]
    assert asked["goodput"] == ["1", "--max", "2"]
    assert [name for name, way in WAYS.items() if not way.adapts] == ["fifo", "halves"]


def test_times_are_from_handing_in_to_the_end():
    lines = [line.split() for line in cluster_day.table({"fifo": DONE}).splitlines()]
    assert lines == [
        ["job", "fifo"],
        ["a", "10"],
        ["b", "30"],
        ["average", "20"],
        ["last", "end", "32"],
    ]


@pytest.mark.parametrize("ways", [["goodput"], ["fifo", "goodput"]])
def test_a_picture_is_drawn(tmp_path, ways):
    cluster_day.picture(dict.fromkeys(ways, DONE), tmp_path / "day.png")
    assert (tmp_path / "day.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.nightly
def test_a_small_day(tmp_path):
    out = tmp_path / "day"
    script = pathlib.Path(cluster_day.__file__)
    command = [sys.executable, str(script), f"--out={out}", "--small", "--ways=goodput"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "average" in done.stdout and (out / "day.png").stat().st_size > 1000
    for job in cluster_day.DAY[:3]:
        assert (out / "goodput" / job.name / "goodput.jsonl").exists()
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode and "is not empty" in again.stderr + again.stdout
