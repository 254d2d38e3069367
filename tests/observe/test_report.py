"""The report tells the planted story."""

import io
import json

import pytest
import synthetic

from jaxgoodput import cli
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.observe import journal
from jaxgoodput.observe.events import Checkpoint, EvalEnd, FitEnd
from jaxgoodput.observe.journal import Journal
from jaxgoodput.observe.report import compare, numbers, report, sparkline
from jaxgoodput.text import compact


def section(text, title):
    """The lines of one section, up to the next title; those that were broken are whole again."""
    lines = text.replace("\n  ", " ").splitlines()
    rest = lines[lines.index(title) + 2 :]
    ends = [i - 1 for i, line in enumerate(rest) if i and set(line) == {"="}]
    return [line for line in rest[: ends[0] if ends else None] if line]


def second_row(text, first):
    """The cells of the table below the one of the batches: what they gave."""
    _, line = [line for line in section(text, "Batch sizes") if line.split()[:1] == [first]]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def row(text, title, first):
    """The cells of the table row that starts with `first`."""
    line, *_ = [line for line in section(text, title) if line.split()[:1] == [first]]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


@pytest.fixture
def planted(tmp_path, clock):
    """100 steps at 64, 300 at 512 = 32 x 8 x 2; killed at 450, resumed from 400."""
    large = BatchConfig(micro_batch_size=32, num_micro_batches=2, num_replicas=8)
    writer = Journal(tmp_path, clock=clock)
    writer.write(synthetic.fit_start())
    samples = at_checkpoint = 0
    for step in range(10, 451, 10):
        config = synthetic.START if step <= 100 else large
        samples += 10 * config.global_batch_size
        clock.advance(1.0)
        writer.write(synthetic.window(step, step * 2.0, samples, config, slow=1.25, seconds=1.0))
        if step == 100:
            writer.write(synthetic.tune_end(100, 200.0, synthetic.START))
        if step == 400:
            at_checkpoint = samples
            writer.write(Checkpoint(step=400, seconds=0.25))
    clock.advance(60.0)
    writer.write(synthetic.fit_start(step=400, progress=800.0, restart=1, config=large))
    writer.write(
        EvalEnd(step=400, progress=800.0, at_s=9.0, seconds=1.0, metrics={"accuracy": 0.98765})
    )
    writer.write(Checkpoint(step=400, seconds=0.5, error="No space left on device"))
    one = synthetic.window(
        410, 820.0, at_checkpoint + 5120, large, slow=1.25, seconds=1.0, skipped_steps=7
    )
    writer.write(one)
    writer.write(
        FitEnd(
            step=410,
            progress=820.0,
            samples=at_checkpoint + 5120,
            seconds=100.0,
            reason="done",
            buckets_s={"compilation": 30.0, "evaluation": 10.0, "productive": 60.0},
        )
    )
    writer.close()
    return tmp_path, one


def test_the_time_adds_up(planted):
    text = report(planted[0])
    assert row(text, "Where the time went", "productive")[1:3] == ["1 min 00 s", "60.0%"]
    assert row(text, "Where the time went", "compilation")[1:3] == ["30 s", "30.0%"]
    assert row(text, "Where the time went", "evaluation")[1:3] == ["10 s", "10.0%"]
    assert row(text, "Where the time went", "total")[1:3] == ["1 min 40 s", "100.0%"]
    bars = {
        name: row(text, "Where the time went", name)[3].count("█")
        for name in ("productive", "compilation", "evaluation")
    }
    assert bars == {"productive": 12, "compilation": 6, "evaluation": 2}


def test_the_batches_are_those_that_were_used_and_kept(planted):
    workdir, one = planted
    text = report(workdir)
    small = row(text, "Batch sizes", "64")
    # 100 steps of 64 samples, 10 of 41 kept windows; the model is a fifth too fast (1 / 1.25).
    assert small[1:5] == ["8 x 8 x 1", "100", "6.4k", "24.4%"]
    assert second_row(text, "64")[3] == "-20.0%"
    large = row(text, "Batch sizes", "512")
    # The 50 steps that the restart undid are not counted: 300 + 10.
    assert large[1:5] == ["32 x 8 x 2", "310", "159k", "75.6%"]
    assert second_row(text, "512")[3:5] == ["-20.0%", compact(one.throughput)]


def test_verdicts_come_with_their_reasons(planted):
    lines = section(report(planted[0]), "Verdicts")
    assert lines[0].startswith(
        "1 verdict, 1 change; error of the last fit 7.0% on 12 configurations"
    )
    assert "not yet known separately: averaging between hosts" in lines[0]
    assert lines[1].startswith("step 100: change: 64 -> ")


def test_the_race_is_told_with_what_exploring_has_cost(planted):
    workdir, one = planted
    text = report(workdir)
    small = row(text, "The race between batch sizes", "64")
    assert small[1:4] == ["in use", "0.30 +- 0.04", "100"] and small[5] == "steps"
    guess = row(text, "The race between batch sizes", "512")
    assert guess[1:4] == ["not compiled", "-", "-"] and guess[4].startswith("~")
    assert guess[5] == "model"
    assert "exploring other sizes has delayed training by about 3 s" in text
    told = numbers(workdir)
    assert [x["config"]["micro_batch_size"] for x in told["race"]] == [4, 8, 16, 32, 64, 128]
    assert told["account"]["spent_s"] == one.account.spent_s
    # A journal from before there was a race says nothing about it.
    path = workdir / journal.FILE_NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.pop("race", None), line.pop("account", None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "The race" not in report(workdir) and numbers(workdir)["race"] == []


def test_incidents_are_told(planted):
    lines = section(report(planted[0]), "Restarts, checkpoints, skipped steps")
    assert lines[0] == (
        "restart 1: resumed at step 400, 50 steps undone, 1 min 00 s after the last record"
    )
    assert lines[1] == "step 400: checkpoint failed: No space left on device"
    assert lines[2].startswith("1 checkpoint; training paused for 250 ms in total")
    assert lines[3].startswith("7 updates skipped")
    assert "accuracy" in report(planted[0]) and "0.9877" in report(planted[0])


def test_the_header_says_what_ran_and_how_it_ended(planted):
    workdir, _ = planted
    lines = section(report(workdir), "Run")
    assert f"workdir   {workdir}" in lines
    assert "devices   8 x cpu, 1 process" in lines
    assert "outcome   done" in lines
    assert any("step 410, 820 base steps of 4k" in line for line in lines)


def test_a_run_that_was_killed_or_goes_on_is_reported_too(tmp_path, clock):
    writer = Journal(tmp_path, clock=clock)
    synthetic.run(writer.write, clock, steps=100, end=False)
    writer.close()
    path = tmp_path / journal.FILE_NAME
    path.write_bytes(path.read_bytes()[:-5])
    text = report(tmp_path)
    assert "still running, or killed" in text
    assert "no end recorded yet" in text
    assert "goodput.jsonl:13: the line was changed or cut" in " ".join(text.split())


def test_a_run_without_a_window_is_reported(tmp_path, clock):
    writer = Journal(tmp_path, clock=clock)
    writer.write(synthetic.fit_start())
    writer.close()
    assert "8 x cpu" in report(tmp_path)


def test_unknown_values_are_dashes(tmp_path, clock):
    writer = Journal(tmp_path, clock=clock)
    writer.write(synthetic.fit_start())
    nan = float("nan")
    writer.write(
        synthetic.window(
            10, 1.0, 640, known=False, measured_step_s=nan, efficiency=nan, goodput_measured=nan
        )
    )
    writer.close()
    assert second_row(report(tmp_path), "64")[1:] == ["-", "-", "-", "-", "-", "-"]


def test_many_changes_are_shortened(tmp_path, clock):
    writer = Journal(tmp_path, clock=clock)
    writer.write(synthetic.fit_start())
    for step in range(1, 41):
        writer.write(synthetic.tune_end(step, 300.0, synthetic.START))
    writer.close()
    lines = section(report(tmp_path), "Verdicts")
    assert lines[0].startswith("40 verdicts, 40 changes")
    assert any("... 28 more ..." in line for line in lines)
    assert lines[-1].startswith("step 40:")


def test_errors_say_what_to_pass(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder .*--workdir"):
        report(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no goodput.jsonl.*--workdir"):
        report(tmp_path)
    line = '{"event": "Checkpoint", "step": 3, "wall": 1.0, "restart": 0}'
    (tmp_path / journal.FILE_NAME).write_text(f"{line}\n{{\n")
    with pytest.raises(ValueError, match="0 record.*no start of a run, and 2 line"):
        report(tmp_path)


def test_a_terminal_that_knows_few_signs_gets_the_rest(planted, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert cli.main(["report", str(planted[0])]) == 0
    out.flush()
    assert b"Where the time went" in out.buffer.getvalue()


@pytest.mark.slow
def test_a_journal_in_parts_is_one_run_with_the_same_totals(tmp_path, clock, monkeypatch):
    """Parts that are old enough to be short tell the same, but for the curves."""
    told = {}
    for name, size in (("whole", journal.SEGMENT_BYTES), ("parts", 30_000)):
        monkeypatch.setattr(journal, "SEGMENT_BYTES", size)
        writer = Journal(tmp_path / name, clock=type(clock)())
        now = synthetic.run(writer.write, type(clock)(), steps=2000, end=False)
        synthetic.run(
            writer.write, type(clock)(), steps=4000, start_step=1800, restart=1, state=now
        )
        writer.close()
        told[name] = report(tmp_path / name).split("Over time")
    first, second = told["whole"], told["parts"]
    assert len(list((tmp_path / "parts").glob("goodput.*.jsonl"))) > journal.NUM_WHOLE + 3
    assert first[0].replace("whole", "parts") == second[0]
    assert first[1].partition("Restarts")[2] == second[1].partition("Restarts")[2]
    sizes = [p.stat().st_size for p in journal.segments(tmp_path / "parts" / journal.FILE_NAME)]
    assert max(sizes[: -1 - journal.NUM_WHOLE]) < 0.6 * min(sizes[-1 - journal.NUM_WHOLE : -1])


def test_what_stands_in_a_line_cannot_move_the_cursor(tmp_path, clock):
    writer = Journal(tmp_path, clock=clock)
    writer.write(synthetic.fit_start())
    writer.write(Checkpoint(step=1, seconds=0.1, error="full\x1b[2J\r\ud800"))
    writer.close()
    assert "checkpoint failed: full\ufffd[2J\ufffd\ufffd" in report(tmp_path)


def test_a_sparkline_rises_with_its_values_and_keeps_its_width():
    assert sparkline([float(i) for i in range(1, 9)]) == "▁▂▃▄▅▆▇█"
    assert len(sparkline([1.0] * 500)) == 60
    assert sparkline([1.0, float("nan"), 2.0]) == "▁ █"
    assert sparkline([1.0, 10.0, 100.0], log=True) == "▁▅█"
    assert sparkline([0.0, 1.0, 2.0], log=True) == " ▁█"
    assert sparkline([]) == ""


def test_it_is_plain_text_wherever_it_goes(planted, monkeypatch):
    text = report(planted[0])
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "40", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    assert report(planted[0]) == text
    assert "\x1b" not in text
    assert max(len(x) for x in text.splitlines() if not x.startswith("workdir")) <= 80


def test_what_never_changes_is_said_in_words(tmp_path, clock):
    writer = Journal(tmp_path, clock=clock)
    writer.write(synthetic.fit_start())
    for step in (10, 20, 30):
        writer.write(synthetic.window(step, float(step), 64 * step))
    writer.write(EvalEnd(step=30, progress=3.0, at_s=9.0, seconds=1.0, metrics={"auc": 0.75}))
    writer.close()
    lines = [" ".join(line.split()) for line in section(report(tmp_path), "Over time")]
    assert "global batch 64 throughout" in lines
    assert "eval/auc 0.75" in lines
    (loss,) = (line for line in lines if line.startswith("loss "))
    assert "->" in loss and "▁" in loss


def test_a_terminal_without_other_signs_gets_ascii(planted):
    text = report(planted[0], ascii=True)
    assert text.isascii() and "####" in text and "?" not in text
    assert len(text.splitlines()) == len(report(planted[0]).splitlines())


def test_the_numbers_are_those_of_the_text(planted, capsys):
    workdir, one = planted
    assert cli.main(["report", str(workdir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(numbers(workdir)))
    assert (found["step"], found["progress"], found["outcome"]) == (410, 820.0, "done")
    assert found["time_s"] == {"compilation": 30.0, "evaluation": 10.0, "productive": 60.0}
    small, large = found["batches"]
    assert (small["batch"], small["steps"], small["samples"]) == (64, 100, 6400)
    assert (large["batch"], large["steps"]) == (512, 310)
    assert large["predicted_error"] == pytest.approx(-0.2)
    assert found["last_eval"] == {"accuracy": 0.98765} and found["restarts"] == 1
    (change,) = found["changes"]
    assert change["step"] == 100 and change["reason"].startswith("change: 64 -> ")


def test_several_runs_stand_side_by_side(planted, tmp_path_factory, clock, capsys):
    other = tmp_path_factory.mktemp("other")
    writer = Journal(other, clock=clock)
    writer.write(synthetic.fit_start())
    writer.close()
    text = compare([planted[0], other])
    lines = {line[:12].strip(): line[12:].split() for line in text.splitlines()}
    assert lines["outcome"] == ["done", "no", "end"] and lines["last batch"] == ["512", "-"]
    assert lines["eval/accurac"] == ["y", "0.9877", "-"]
    for name in ("x/run", "y/run"):
        writer = Journal(other / name, clock=clock)
        writer.write(synthetic.fit_start())
        writer.close()
    header = compare([other / "x/run", other / "y/run"]).splitlines()[0]
    assert header.split() == ["x/run", "y/run"]
    assert cli.main(["report", "--json", str(planted[0]), str(other)]) == 0
    assert [one["outcome"] for one in json.loads(capsys.readouterr().out)] == ["done", None]


def test_a_run_in_its_own_folder_has_a_name(planted, tmp_path_factory, monkeypatch):
    other = tmp_path_factory.mktemp("other")
    for file in planted[0].glob("goodput*"):
        (other / file.name).write_bytes(file.read_bytes())
    monkeypatch.chdir(other)
    assert compare([".", planted[0]]).splitlines()[0].split() == [other.name, planted[0].name]


def ended(step, reason, *, wall_s, of=0):
    return FitEnd(
        step=step,
        progress=2.0 * step,
        samples=64 * step,
        seconds=wall_s - of,
        reason=reason,
        buckets_s={"compilation": 5.0, "productive": wall_s - 5.0},
    )


def test_a_run_that_goes_on_has_the_time_of_those_before_and_its_own(tmp_path, clock):
    writer = Journal(tmp_path, clock=clock)
    writer.write(synthetic.fit_start())
    clock.advance(15.0)
    writer.write(ended(10, "preempted", wall_s=15.0))
    clock.advance(1000.0)  # nobody trains
    writer.write(synthetic.fit_start(step=10, progress=20.0, restart=1))
    for step in (20, 30):
        clock.advance(20.0)
        writer.write(synthetic.window(step, 2.0 * step, 64 * step, seconds=20.0))
    writer.close()
    found = numbers(tmp_path)
    assert found["time_is_estimated"] and found["outcome"] is None and found["restarts"] == 1
    assert found["time_s"] == {
        "productive": 50.0,
        "compilation": 5.0,
        "evaluation": 0,
        "checkpoint_save": 0,
    }
    assert found["trained_s"] == pytest.approx(15.0 + 40.0)
    assert "no end recorded yet" in report(tmp_path)


def test_processes_that_come_and_go_are_no_restart(tmp_path, clock):
    writer = Journal(tmp_path, clock=clock)
    writer.write(synthetic.fit_start())
    clock.advance(15.0)
    writer.write(ended(10, "regrouped: b has come", wall_s=15.0))
    clock.advance(2.0)
    writer.write(synthetic.fit_start(step=10, progress=20.0, restart=1))
    clock.advance(20.0)
    writer.write(ended(20, "done", wall_s=37.0))
    clock.advance(5.0)
    writer.write(synthetic.fit_start(step=20, progress=40.0, restart=2))
    writer.close()
    found = numbers(tmp_path)
    assert found["restarts"] == 1 and found["trained_s"] == pytest.approx(15.0 + 20.0)
    lines = section(report(tmp_path), "Restarts, checkpoints, skipped steps")
    assert lines[0] == "step 10: regrouped: b has come; continued with 1 process after 2 s"
    assert lines[1].startswith("restart 1: resumed at step 20")
