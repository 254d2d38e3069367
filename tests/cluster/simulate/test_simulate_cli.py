"""`jaxgoodput simulate` prints a table for every policy, writes files on request, and explains bad input."""

import json
import re

import pytest

from jaxgoodput import cli
from jaxgoodput._fields.serial import dumps, unpack
from jaxgoodput.cluster.catalogue import catalogue
from jaxgoodput.cluster.simulate import pictures
from jaxgoodput.cluster.simulate.comparison import compare
from jaxgoodput.cluster.simulate.records import Result
from jaxgoodput.cluster.simulate.rules import read_settings
from jaxgoodput.cluster.simulate.scenario import Scenario, read_cluster, read_scenario
from jaxgoodput.specs import ClusterSpec, Node

# Few and short jobs, so that a policy takes a fraction of a second.
SMALL = ["--workload", "synthetic:5", "--hours", "0.2", "--seed", "7"]


def run(capsys, *arguments):
    try:
        code = cli.main(["simulate", *arguments])
    except SystemExit as ended:  # the parser found an error
        code = ended.code
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def artifact(tmp_path):
    """Return a small artifact: `pollux(...)` and `gavel(...)` write one in their layout."""

    class Artifact:
        def pollux(self, application="toy", suffix="", devices=1):
            traces = tmp_path / "a" / "traces" / "toy"
            traces.mkdir(parents=True)
            rows = [
                f"{placement},{size},{0.1 + 0.01 * size / 4 + 0.02 * (len(placement) - 1)},0.01"
                for placement in ("1", "2", "4", "11", "22", "44")
                for size in (4, 16, 64)
            ]
            head = "placement,local_bsz,step_time,sync_time\n"
            (traces / f"placements{suffix}.csv").write_text(head + "\n".join(rows) + "\n")
            for batch in (16, 64, 256):
                lines = [f"{100 * e},{100 * e},0.5,1.0,{4.0 * e}" for e in (1, 2)]
                text = "progress,iteration,metric,grad_sqr,grad_var\n" + "\n".join(lines)
                (traces / f"validation-{batch}.csv").write_text(text + "\n")
            path = tmp_path / "a" / "workloads" / "workload-1.csv"
            path.parent.mkdir()
            path.write_text(
                "name,time,application,num_replicas,batch_size\n"
                f"x,0,{application},{devices},64\ny,100,toy,1,64\n"
            )
            return path

        def gavel(self):
            alone = {"('A3C', 1)": {"null": 4.0}, "('LM (batch size 5)', 2)": {"null": 6.0}}
            table = {"v100": alone, "k80": {"('A3C', 1)": {"null": 1.0}}}
            (tmp_path / "simulation_throughputs.json").write_text(json.dumps(table))
            lines = [
                ["A3C", "run", "d", "-n", "0", "2000", "1", "1.0", "-1", "0"],
                ["LM (batch size 5)", "run", "d", "-n", "0", "3000", "2", "1.0", "-1", "10"],
            ]
            path = tmp_path / "small.trace"
            path.write_text("\n".join("\t".join(line) for line in lines))
            return path

    return Artifact()


@pytest.mark.slow
def test_a_comparison_writes_a_table_json_and_pictures(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "folder"
    policies = "goodput,static"
    code, said, err = run(
        capsys, "--policy", policies, *SMALL, "--cluster", "2x4", "--out", str(out)
    )
    assert code == 0
    assert "goodput: 5/5 jobs" in err and "\x1b" not in said + err
    lines = {line.split()[0]: line.split() for line in said.splitlines() if line.strip()}
    body = json.loads((out / "results.json").read_text())
    results = [unpack(one, Result) for one in body["results"]]
    assert [result.policy for result in results] == ["goodput", "static"]
    for result in results:
        summary = result.summary()
        cells = lines[result.policy][1:]
        assert float(cells[0]) == pytest.approx(summary["average_jct_s"] / 3600, abs=1e-3)
        assert float(cells[4]) == pytest.approx(summary["restarts_per_job"], abs=0.01)
    names = {path.name for path in out.iterdir()}
    assert names == {
        "results.json", "completion.png", "gantt-goodput.png", "gantt-static.png",
    }  # fmt: skip


def test_without_matplotlib_it_says_so_and_writes_the_json(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "has_matplotlib", lambda: False)
    code, said, _ = run(capsys, "--policy", "static", *SMALL, "--out", str(tmp_path))
    assert code == 0 and "jaxgoodput[plots]" in said
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.slow
def test_every_policy_is_named_and_runs(capsys):
    """Run each policy on the one-device jobs of a synthetic hour."""
    code, said, _ = run(capsys, "--list")
    assert code == 0 and {line.split()[0] for line in said.splitlines()} == set(catalogue())
    made = read_scenario("synthetic:12", "a100:2x4", hours=0.3, seed=7)
    jobs = tuple(j for j in made.jobs if j.application in ("vision-small", "recommender"))
    alone = [type(j)(**{**vars(j), "num_devices": 1, "num_steps": 1000}) for j in jobs]
    made = Scenario(**{**vars(made), "jobs": tuple(alone)})
    settings = read_settings("events", "synthetic")
    results = compare(made, catalogue(), settings)
    assert len(results) == len(catalogue())
    for result in results:
        assert len(result.jobs) == len(alone) > 3 and result.summary()["average_jct_s"] > 0


def test_pollux_layout(capsys, artifact):
    path = artifact.pollux()
    policies = "pollux,optimus,tiresias"
    code, said, err = run(capsys, "--policy", policies, "--workload", str(path))
    assert code == 0, err
    assert "2 jobs on 64 devices" in said
    folder = str(path.parent)
    code, again, _ = run(capsys, "--policy", policies, "--workload", folder, "--cluster", "16x4")
    columns = [line.split()[:5] for line in said.splitlines()[2:]]
    assert code == 0 and columns == [line.split()[:5] for line in again.splitlines()[2:]]


def test_sia_layout_names_the_kinds_that_were_measured(capsys, artifact):
    path = artifact.pollux(suffix="-aws")
    code, _, err = run(
        capsys, "--policy", "goodput", "--workload", str(path), "--cluster", "h900:2x4"
    )
    assert code == 2 and "'h900'" in err and "aws" in err
    code, _, err = run(
        capsys, "--policy", "sia", "--workload", str(path), "--cluster", "4x4", "--rules", "events",
        "--restart-s", "5",
    )  # fmt: skip
    assert code == 0, err


def test_gavel_layout(capsys, artifact):
    path = str(artifact.gavel())
    code, said, err = run(
        capsys, "--policy", "max-min,fifo", "--workload", path, "--cluster", "v100:1x4,k80:1x4"
    )
    assert code == 0, err
    assert "max-min" in said
    code, _, err = run(capsys, "--policy", "allox", "--workload", path, "--cluster", "1x4")
    assert code == 2 and "one device only" in err


WRONG = {
    "no such policy": (["--policy", "goodput,wizard"], "'wizard'"),
    "no such workload": (["--workload", "/no/such/file.csv"], "no such file"),
    "no number of jobs": (["--workload", "synthetic:many"], "number of jobs"),
    "a number that is none": (["--workload", "synthetic:²"], "number of jobs"),
    "more jobs than memory": (["--workload", "synthetic:99999999999"], "below a million"),
    "more hours than memory": (["--hours", "1e8"], "more than 100000"),
    "more devices than memory": (["--cluster", "999999x999999"], "at most 100000 devices"),
    "no jobs": (["--workload", "synthetic:0"], "such as synthetic:160"),
    "no hours": (["--hours", "0"], "hours"),
    "cluster of words": (["--cluster", "large"], "NODESxDEVICES"),
    "zero nodes": (["--cluster", "0x4"], "at least 1"),
    "no such cluster file": (["--cluster", "none.json"], "cannot be read"),
    "unknown rules": (["--rules", "wild"], "pollux, sia"),
    "unknown kind": (["--cluster", "z99:2x4"], "--speed z99"),
    "speed of words": (["--speed", "t4=fast"], "KIND=NUMBER"),
    "speed of nothing": (["--speed", "t4=0"], "above 0"),
    "one kind": (["--cluster", "t4:2x4,a100:1x4", "--policy", "optimus"], "one kind"),
}


@pytest.mark.parametrize("arguments, says", WRONG.values(), ids=WRONG)
def test_bad_input_is_named_and_nothing_is_written(capsys, tmp_path, arguments, says):
    out = tmp_path / "out"
    code, said, err = run(capsys, *SMALL, *arguments, "--out", str(out))
    assert (
        code == 2
        and says in err
        and re.search(r"^jaxgoodput( simulate: error)?: ", err, re.MULTILINE)
    )
    assert not said and not out.exists()


@pytest.mark.parametrize("text, says", [("inf", "inf is more"), ("nan", "nan is less")])
def test_seconds_are_finite(capsys, text, says):
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--restart-s", text])
    assert f"--restart-s: {says}" in capsys.readouterr().err


def test_a_file_in_the_way_is_found_before_anything_runs(capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    code, said, err = run(capsys, *SMALL, "--out", str(tmp_path / "file" / "out"))
    assert code == 2 and "is a file" in err and not said


@pytest.mark.parametrize("option", [("--hours", "2"), ("--speed", "t4=2")])
def test_what_means_nothing_to_a_trace_is_refused(capsys, artifact, option):
    code, said, err = run(capsys, "--workload", str(artifact.pollux()), *option)
    assert code == 2 and option[0] in err and "synthetic jobs only" in err and not said


def test_a_job_that_is_larger_than_the_cluster_is_refused(capsys, artifact):
    path = str(artifact.pollux(devices=16))
    code, _, err = run(capsys, "--policy", "tiresias", "--workload", path, "--cluster", "2x4")
    assert code == 2 and "needs 16 devices" in err and "has 8" in err


def test_a_malformed_line_is_named(capsys, artifact):
    path = artifact.pollux()
    path.write_text(path.read_text().replace("100,toy", "soon,toy"))
    code, _, err = run(capsys, "--workload", str(path))
    assert code == 2 and "line 3" in err and "'time'" in err


DEEP = "[" * 200_000  # Python 3.13 reads many thousands
DAMAGED = {
    "no object": ("[]", "expected an object by kinds of devices, got \\[\\]"),
    "no jobs": ('{"v100": 3}', "'v100'\\]: expected an object by jobs, got 3"),
    "no partners": ('{"v100": {"(\'A3C\', 1)": null}}', "object by partners of the job, got None"),
    "too deep": (DEEP, "nested too deeply"),
    "not a number": ('{"v100": {"(\'A3C\', 1)": {"null": NaN}}}', "the number NaN"),
    "too large": ('{"v100": {"(\'A3C\', 1)": {"null": 1' + "0" * 400 + "}}}", "the number 1000"),
    "no key": ('{"v100": {"(((": {}}}', "'\\(\\(\\(' is not of the form"),
    "not text": (b"\xff{}", "cannot be read: .*codec can't decode"),
}


@pytest.mark.parametrize("data, says", DAMAGED.values(), ids=DAMAGED)
def test_damaged_tables_are_named(capsys, artifact, data, says):
    path = artifact.gavel()
    table = path.parent / "simulation_throughputs.json"
    table.write_bytes(data if isinstance(data, bytes) else data.encode())
    code, _, err = run(capsys, "--policy", "fifo", "--workload", str(path), "--cluster", "1x4")
    assert code == 2 and re.match(rf"jaxgoodput: {table}.*{says}", err), err


def test_a_cluster_that_lies_too_deep_is_refused(capsys, tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(DEEP)
    code, _, err = run(capsys, *SMALL, "--cluster", str(path))
    assert code == 2 and "too deep" in err and str(path) in err


def test_an_application_without_tables_is_named(capsys, artifact):
    path = str(artifact.pollux(application="nobody"))
    code, _, err = run(capsys, "--policy", "goodput", "--workload", path)
    assert code == 2 and "'nobody'" in err


def test_on_a_terminal_progress_is_a_bar_that_goes_away(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    code, said, err = run(capsys, "--policy", "static", *SMALL)
    assert code == 0 and "\x1b" not in said
    assert "5/5 jobs" in err and err.endswith("\x1b[2K")  # the line is erased


def test_clusters_from_text_and_from_json(tmp_path):
    mixed = read_cluster("aws:2x4,rtx:1x8,aws:1x2")
    sizes = [(node.name, node.kind, node.num_devices) for node in mixed.nodes]
    assert sizes == [
        ("aws-000", "aws", 4), ("aws-001", "aws", 4), ("rtx-000", "rtx", 8), ("aws-002", "aws", 2),
    ]  # fmt: skip
    path = tmp_path / "cluster.json"
    spec = ClusterSpec(nodes=(Node(name="n", kind="t4", num_devices=4, withheld=(1,)),))
    path.write_text(dumps(spec))
    assert read_cluster(str(path)) == spec
    path.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_cluster(str(path))


@pytest.mark.parametrize("layout", ["synthetic", "pollux", "sia", "gavel"])
def test_rules_follow_the_workload(layout):
    own = read_settings("own", layout)
    assert own.round_s == {"synthetic": None, "gavel": 360.0}.get(layout, 60.0)
    quick = read_settings("events", layout, restart_s=5.0, seed=3, work_left="told")
    assert quick.round_s is None and quick.restart_of("anything") == 5.0
    assert (
        quick.told_restart_of("anything") == 5.0 and quick.work_left == "told" and quick.seed == 3
    )
    assert bool(quick.slowdown) == (layout == "sia") and bool(quick.pins) == (layout == "pollux")
    told = read_settings("realistic", layout, restart_s=60.0)
    assert told.failures is not None and told.round_s is None
    assert told.restart_of("bert") == told.told_restart_of("bert") == 60.0
    if layout == "gavel":
        with pytest.raises(ValueError, match="--restart-s"):
            read_settings("realistic", layout)
    else:
        real = read_settings("realistic", layout)
        large, small = real.restart_of("bert"), real.restart_of("cifar10")
        assert small < large < 10.0 and real.told_restart_of("bert") == large


@pytest.mark.slow
def test_deadlines_are_dealt_out_and_told(capsys):
    small = ("--workload", "synthetic:12", "--hours", "1", "--cluster", "4x8")
    code, said, _ = run(capsys, "--policy", "goodput,edf", *small, "--deadlines", "0.5:3")
    assert code == 0
    goodput, edf = (line for line in said.splitlines() if "deadlines met" in line)
    assert goodput.startswith("goodput: ") and edf.startswith("edf: ")
    num = int(goodput.split(" of ")[1].split()[0])
    assert 0 < num < 12 and edf.split(" of ")[1].split()[0] == str(num)


@pytest.mark.parametrize("text", ["0.5", "0:2", "1.5:2", "0.5:-1", "a:b", "0.5:inf", ""])
def test_deadlines_that_are_none_are_refused(capsys, text):
    code, _, err = run(capsys, "--workload", "synthetic:3", "--deadlines", text)
    assert code == 2 and "--deadlines" in err and "Traceback" not in err
