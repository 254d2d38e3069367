"""What a run says of other devices: right where the truth is planted, honest where it never was."""

import dataclasses
import json

import numpy as np
import problems
import pytest
import synthetic

from jaxgoodput import cli
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import Placement
from jaxgoodput.goodput.search import BatchLimits, best_batch
from jaxgoodput.observe.forecast import forecast, shapes_up_to
from jaxgoodput.observe.journal import Journal
from jaxgoodput.specs import Shape


def write(folder, clock, *events):
    writer = Journal(folder, clock=clock)
    for event in events:
        writer.write(event)
    writer.close()
    return folder


@pytest.fixture
def planted(tmp_path, clock):
    """A run on 8 devices of one node whose fit is the truth."""
    return write(
        tmp_path,
        clock,
        synthetic.fit_start(),
        synthetic.tune_end(100, 200.0, synthetic.START),
        synthetic.window(110, 220.0, 7040, synthetic.START),
    )


def test_predictions_are_those_of_the_model(planted):
    found = forecast(planted, shapes_up_to("", 16, 2))
    by_shape = {one.shape: one for one in found.expected}
    assert set(by_shape) == {Shape("", 1, n) for n in (1, 2, 4, 8)} | {Shape("", 2, 16)}
    grad = synthetic.grad_at(200.0)
    limits = BatchLimits(base=64, max=4096, micro=(4, 128))
    for one in found.expected:
        if one.shape.num_nodes > 1:
            continue
        model = GoodputModel(perf=synthetic.PERF, grad=grad, base_batch_size=64)
        at = Placement(num_nodes=1, num_replicas=one.shape.num_devices)
        config, goodput = best_batch(model, at, limits)
        assert (one.config.micro_batch_size, one.config.num_micro_batches) == (
            config.micro_batch_size,
            config.num_micro_batches,
        )
        assert one.goodput == pytest.approx(goodput)
        assert one.goodput == pytest.approx(one.throughput * one.efficiency)
        assert one.throughput == pytest.approx(one.config.global_batch_size / one.step_s)
        assert one.speed_up == pytest.approx(one.goodput / found.goodput)
    known = {shape.num_devices: one.known for shape, one in by_shape.items()}
    # Over several nodes it never ran; on 8 devices it did, with another batch than the best.
    assert known == {
        1: "extrapolated",
        2: "extrapolated",
        4: "extrapolated",
        8: "fitted",
        16: "guessed",
    }
    assert found.best is not None and found.best.goodput == max(e.goodput for e in found.expected)


def test_a_batch_that_was_timed_is_measured(planted, clock):
    (one,) = forecast(planted, [Shape("", 1, 8)]).expected
    write(planted, clock, synthetic.window(120, 240.0, 9000, one.config))
    (again,) = forecast(planted, [Shape("", 1, 8)]).expected
    assert again.known == "measured" and again.config == one.config


def test_a_fixed_batch_stays(tmp_path, clock):
    start = dataclasses.replace(
        synthetic.fit_start(), settings={**synthetic.SETTINGS, "policy": "fixed"}
    )
    write(tmp_path, clock, start, synthetic.tune_end(100, 200.0, synthetic.START))
    found = forecast(tmp_path, shapes_up_to("", 8, 1))
    assert {one.config.global_batch_size for one in found.expected} == {64}


def test_strategies_take_whole_replicas(tmp_path, clock):
    half = dataclasses.replace(synthetic.START, num_replicas=4, strategy="data4.tensor2")
    tune = dataclasses.replace(synthetic.tune_end(100, 200.0, half), num_replicas=4)
    write(tmp_path, clock, synthetic.fit_start(config=half), tune)
    found = forecast(tmp_path, shapes_up_to("", 8, 1))
    assert [(e.shape.num_devices, e.strategy, e.config.num_replicas) for e in found.expected] == [
        (2, "tensor2", 1),
        (4, "data2.tensor2", 2),
        (8, "data4.tensor2", 4),
    ]
    assert found.left_out == {Shape("", 1, 1): "a replica takes 2 devices of one node"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{run}", "--devices", "7", "--nodes", "2"], "cannot be spread evenly over --nodes 2"),
        (["{run}", "--devices", "1", "--nodes", "2"], "cannot be spread evenly over --nodes 2"),
        (["{run}", "--devices", "99999999"], "is more than 1e+06"),
        (["{run}", "--topology", "v5e:2x4"], "--topology is for a script"),
        (["{run}", "--devices", "8", "--memory-gib", "1"], "--memory-gib is for a script"),
        (["{run}", "--devices", "8", "--", "train.py"], "a command after -- is for a script"),
        (["{empty}", "--devices", "8"], "holds no goodput.jsonl"),
        (["{young}", "--devices", "8"], "has not fitted its step times yet"),
        (["{blind}", "--devices", "8"], "does not know its gradient noise yet"),
        (["{torn}", "--devices", "8"], "no start of a run"),
    ],
)
def test_bad_input_is_a_sentence(tmp_path, clock, capsys, arguments, words):
    folders = {name: tmp_path / name for name in ("run", "empty", "young", "blind", "torn")}
    for folder in folders.values():
        folder.mkdir()
    tune = synthetic.tune_end(100, 200.0, synthetic.START)
    write(folders["run"], clock, synthetic.fit_start(), tune)
    write(folders["young"], clock, synthetic.fit_start())
    blind = dataclasses.replace(tune, grad=synthetic.UNKNOWN)
    write(folders["blind"], clock, synthetic.fit_start(), blind)
    (folders["torn"] / "goodput.jsonl").write_text('{"event": "FitSt')
    try:
        code = cli.main(["plan", *(a.format(**folders) for a in arguments)])
    except SystemExit as ended:  # the parser found it
        code = ended.code
    out, err = capsys.readouterr()
    assert code == 2 and not out
    assert words in err and "jaxgoodput" in err and "Traceback" not in err


def test_nodes_are_for_runs_only(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", str(tmp_path / "train.py"), "--devices", "2", "--nodes", "2"])
    assert ended.value.code == 2 and "--nodes is for the workdir" in capsys.readouterr().err


def test_damaged_lines_are_passed_over(planted, capsys):
    path = planted / "goodput.jsonl"
    lines = path.read_text().splitlines()
    changed = json.loads(lines[1])
    changed["fit"]["params"] = "gone"
    path.write_text("\n".join([*lines, json.dumps(changed), "{", "[]"]) + "\n")
    assert cli.main(["plan", str(planted), "--devices", "8"]) == 0
    assert "best: " in capsys.readouterr().out


@pytest.mark.slow
def test_a_real_run_is_planned(tmp_path, capsys):
    """Eight devices, one of whose layouts was timed: the table is of its own fit."""
    config = problems.config(
        tmp_path / "run",
        policy="goodput",
        epochs=30,
        tuning__every_steps=20,
        tuning__warm_up_steps=5,
        execution__background_compile=True,
    )
    problems.Mean(config).fit()
    assert cli.main(["plan", str(tmp_path / "run"), "--devices", "16", "--nodes", "2"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line[:1] != "" and line.split()[:1]]
    table = {int(row[0]): row[-1] for row in rows if row[0].isdigit()}
    assert set(table) == {1, 2, 4, 8, 16}
    assert table[8] in ("measured", "fitted") and table[4] == "extrapolated"
    assert table[16] == "guessed" and "guessed: no step was timed over such a link" in out
    assert "last on 8 x cpu" in out and "best: " in out
    assert np.isfinite(forecast(tmp_path / "run", [Shape("", 1, 8)]).goodput)
