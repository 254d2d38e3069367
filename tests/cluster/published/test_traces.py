"""Workload and measurement files: what is read, and what a bad line says about itself."""

import json

import pytest

from jaxgoodput.cluster.published import traces
from jaxgoodput.cluster.published.traces import TraceError

HEADER = "name,time,application,num_replicas,batch_size\n"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_workload_is_read_line_by_line(tmp_path):
    text = HEADER + "a-0,53,cifar10,6,2048\nb-1,60.5,bert,1,12\n"
    jobs = traces.read_pollux_workload(write(tmp_path / "w.csv", text))
    assert [job.id for job in jobs] == ["a-0", "b-1"]
    assert jobs[1].submit_s == 60.5 and jobs[0].num_devices == 6
    assert jobs[0].global_batch_size == 2048 and jobs[0].mode is None


def test_sia_categories_become_modes(tmp_path):
    text = HEADER.strip() + ",category\n"
    text += "a,1,bert,1,12,rigid\nb,1,bert,1,12,scale-gpus\nc,1,bert,1,12,adaptive\n"
    jobs = traces.read_sia_workload(write(tmp_path / "w.csv", text))
    assert [job.mode for job in jobs] == ["rigid", "elastic", "adaptive"]


@pytest.mark.parametrize(
    ("line", "column", "expected"),
    [
        ("a,x,bert,1,12", "time", "number of at least 0"),
        ("a,-1,bert,1,12", "time", "number of at least 0"),
        ("a,nan,bert,1,12", "time", "number"),
        ("a,1,,1,12", "application", "name"),
        ("a,1,bert,1.5,12", "num_replicas", "whole number"),
        ("a,1,bert,0,12", "num_replicas", "at least 1"),
        ("a,1,bert,1,many", "batch_size", "whole number"),
        ("ok,1,bert,1,12", "name", "no earlier line"),
    ],
)
def test_a_malformed_line_names_file_line_column_and_what_was_expected(
    tmp_path, line, column, expected
):
    path = write(tmp_path / "w.csv", HEADER + "ok,1,bert,1,12\n" + line + "\n")
    with pytest.raises(TraceError) as error:
        traces.read_pollux_workload(path)
    message = str(error.value)
    assert str(path) in message and "line 3" in message
    assert repr(column) in message and expected in message


def test_a_line_of_another_length_and_a_missing_column_are_named(tmp_path):
    path = write(tmp_path / "w.csv", HEADER + "a,1,bert,1\n")
    with pytest.raises(TraceError, match=r"line 2: 4 columns, expected 5"):
        traces.read_pollux_workload(path)
    path = write(tmp_path / "v.csv", "name,time\na,1\n")
    with pytest.raises(TraceError, match=r"line 1: .*application, num_replicas, batch_size"):
        traces.read_pollux_workload(path)
    with pytest.raises(TraceError, match="cannot be read"):
        traces.read_pollux_workload(tmp_path / "absent.csv")


def gavel_line(**changes):
    cells = dict(
        zip(traces._GAVEL, ["LM", "run", "d", "-s", "1", "100", "2", "1", "1.2", "5"], strict=True)
    )
    return "\t".join({**cells, **changes}.values()) + "\n"


def test_gavel_traces_of_all_three_widths(tmp_path):
    (job,) = traces.read_gavel_trace(write(tmp_path / "t", gavel_line()))
    assert (job.num_steps, job.num_devices, job.slo, job.submit_s) == (100, 2, 1.2, 5.0)
    (job,) = traces.read_gavel_trace(write(tmp_path / "t", "LM\trun\t-s\t1\t100\t5\t2\n"))
    assert (job.num_steps, job.num_devices, job.slo, job.submit_s) == (100, 2, None, 5.0)
    line = "LM\trun\td\t-s\t1\t100\t2\tgns\t1\t-1.0\t777\t5\n"
    (job,) = traces.read_gavel_trace(write(tmp_path / "t", line))
    assert (job.num_steps, job.num_devices, job.slo, job.submit_s) == (100, 2, None, 5.0)


def test_bad_gavel_lines(tmp_path):
    path = write(tmp_path / "t", gavel_line() + gavel_line(total_steps="few"))
    with pytest.raises(TraceError, match=r"line 2, column 'total_steps': expected a whole number"):
        traces.read_gavel_trace(path)
    with pytest.raises(TraceError, match=r"line 1: 3 columns .* expected 7, 10, 12"):
        traces.read_gavel_trace(write(tmp_path / "t", "a\tb\tc\n"))


def test_gavel_throughputs(tmp_path):
    one, two = "('LM', 1)", "('A3C', 1)"
    table = {"v100": {one: {"null": 5.0, two: [3.0, 2.0]}}}
    read = traces.read_gavel_throughputs(write(tmp_path / "t.json", json.dumps(table)))
    assert read == {"v100": {("LM", 1): {None: 5.0, ("A3C", 1): (3.0, 2.0)}}}
    for bad in ({"null": -1.0}, {"null": [1.0, 2.0]}, {two: [1.0]}, {"LM": [1.0, 2.0]}):
        path = write(tmp_path / "t.json", json.dumps({"v100": {one: bad}}))
        with pytest.raises(TraceError, match="v100"):
            traces.read_gavel_throughputs(path)
    with pytest.raises(TraceError, match="line 1, column 2"):
        traces.read_gavel_throughputs(write(tmp_path / "t.json", "{"))


STEPS = "placement,local_bsz,step_time,sync_time\n1,8,1.0,0.1\n1,16,1.5,0.1\n"
RUN = "progress,iteration,metric,grad_sqr,grad_var\n10,10,0,1,2\n20,20,0,1,2\n"


def test_applications_are_read_from_the_folders_that_have_the_kinds(tmp_path):
    for name in ("one", "two"):
        write(tmp_path / name / "validation-8.csv", RUN)
        write(tmp_path / name / "validation-64.csv", RUN)
        write(tmp_path / name / "placements-a.csv", STEPS)
    write(tmp_path / "two" / "placements-b.csv", STEPS.replace("16", "32"))
    assert set(traces.read_sia_applications(tmp_path, ["a"])) == {"one", "two"}
    two = traces.read_sia_applications(tmp_path, ["a", "b"])["two"]
    assert (two.base_batch, two.max_batch, two.runs.num_epochs) == (8, 64, 2)
    assert (two.limits("a"), two.limits("b")) == ((8, 16), (8, 32))
    with pytest.raises(TraceError, match=r"placements-c\.csv"):
        traces.read_sia_applications(tmp_path, ["c"])


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("placements.csv", STEPS + "10,8,1,0.1\n", "line 4, column 'placement'"),
        ("placements.csv", STEPS + "2,8,1,1.1\n", "line 4, column 'sync_time': expected less"),
        ("placements.csv", STEPS + "2,8,0,0\n", "line 4, column 'step_time'"),
        ("validation-8.csv", RUN + "30,x,0,1,2\n", "line 4, column 'iteration'"),
        ("validation-8.csv", RUN.split("\n")[0], "at least one epoch"),
        ("validation-big.csv", RUN, "whole number"),
        ("validation-².csv", RUN, "whole number"),
        ("placements.csv", STEPS.split("\n")[0], "no measurement below the header"),
        ("placements.csv", STEPS + "²,8,1,0.1\n", "line 4, column 'placement'"),
        ("placements.csv", STEPS + "2,8,1e999,0\n", "line 4, column 'step_time'"),
        (
            "placements.csv",
            STEPS + "2" * 200_000,
            "line 4: this is no line of a CSV file: field larger",
        ),
        ("validation-8.csv", RUN + "0,30,0,1,2\n", "line 4, column 'progress': .* above 20"),
        ("validation-8.csv", RUN + "30,20,0,1,2\n", "line 4, column 'iteration': .* above 20"),
        ("validation-8.csv", RUN + "30,30,0,0,0\n", "line 4, column 'grad_var': .* above 0"),
    ],
)
def test_malformed_measurements(tmp_path, file, text, message):
    write(tmp_path / "app" / "placements.csv", STEPS)
    write(tmp_path / "app" / "validation-8.csv", RUN)
    write(tmp_path / "app" / file, text)
    with pytest.raises(TraceError, match=message):
        traces.read_pollux_applications(tmp_path)


@pytest.mark.slow
def test_the_shipped_layouts_are_read(shared_data):
    pollux = shared_data / "pollux"
    applications = traces.read_pollux_applications(pollux / "traces")
    assert {n: (a.base_batch, a.max_batch) for n, a in applications.items()} == {
        "bert": (12, 384),
        "cifar10": (128, 4096),
        "deepspeech2": (20, 640),
        "imagenet": (200, 12800),
        "ncf": (256, 32768),
        "yolov3": (8, 512),
    }
    assert applications["yolov3"].micro == (4, 8)
    for path in sorted(pollux.glob("workloads*/*.csv")):
        assert len(traces.read_pollux_workload(path)) in (80, 160, 240, 320)
    sia = shared_data / "sia"
    kinds = ("aws", "azure", "dgx", "dgx-ext", "quad", "rtx")
    assert set(traces.read_sia_applications(sia / "traces", kinds)) == set(applications)
    for path in sorted(sia.glob("workloads/**/*.csv")):
        assert traces.read_sia_workload(path)
    gavel = shared_data / "gavel"
    table = traces.read_gavel_throughputs(gavel / "simulation_throughputs.json")
    assert len(table["v100"]) == 83
    for path in [*gavel.glob("traces/*.trace"), *gavel.glob("shockwave/*.trace")]:
        assert all(job.num_steps for job in traces.read_gavel_trace(path))
