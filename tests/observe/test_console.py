"""What a person sees on the terminal."""

import dataclasses
import io
import time

import pytest
import synthetic
from absl import logging

from jaxgoodput._fields.serial import encode
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.observe.console import Console, progress_line, starting
from jaxgoodput.observe.events import EvalEnd, FitEnd, Preempt
from jaxgoodput.text import compact, seconds
from jaxgoodput.train.config import Config, Reporting


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_line_holds_what_matters():
    one = synthetic.window(1200, 1724.0, 100_000)
    line = progress_line(one, 4000.0)
    assert line.startswith("step 1200 | 43.1 % | batch 64 = 8 x 8 x 1 | loss 0.7288 | ")
    assert f"{compact(one.throughput)} samples/s" in line
    assert f"goodput {compact(one.goodput_measured)}" in line
    assert "noise scale 716" in line
    assert line.endswith("ETA 3 min 12 s")


def test_what_is_unknown_is_left_out():
    one = synthetic.window(10, 10.0, 640, known=False, goodput_measured=float("nan"), metrics={})
    line = progress_line(one, None)
    assert "%" not in line and "nan" not in line
    assert "goodput" not in line and "noise" not in line and "loss" not in line


def test_progress_never_passes_the_goal():
    assert "| 100.0 % |" in progress_line(synthetic.window(10, 101.0, 640), 100.0)


def test_lines_come_at_most_every_few_seconds(clock):
    stream = io.StringIO()
    console = Console(clock, 4000.0, stream, every_s=10.0)
    console.on_fit_start(synthetic.fit_start())
    for step in range(1, 101):
        console.on_window(synthetic.window(step, float(step), 64 * step))
        clock.advance(1.0)
    steps = [line for line in stream.getvalue().splitlines() if line.startswith("step ")]
    assert [line.split(" | ")[0] for line in steps] == [f"step {n}" for n in range(1, 101, 10)]


def test_what_happens_is_said_at_once(clock):
    stream = io.StringIO()
    console = Console(clock, 4000.0, stream)
    console.on_fit_start(synthetic.fit_start(step=400, restart=1))
    console.on_tune_end(synthetic.tune_end(450, 10.0, synthetic.START))
    console.on_eval_end(
        EvalEnd(step=450, progress=1.0, at_s=9.0, seconds=0.5, metrics={"auc": 0.92347})
    )
    console.on_preempt(Preempt(step=460, signal="SIGTERM"))
    console.on_fit_end(
        FitEnd(step=460, progress=512.0, samples=15_300, seconds=192.0, reason="preempted")
    )
    console.close()
    said = stream.getvalue()
    assert "8 x cpu, batch 64 = 8 x 8 x 1, resumed at step 400" in said
    assert "step 450 | change: 64 -> " in said
    assert "auc 0.9235" in said
    assert "SIGTERM" in said
    assert "preempted after 3 min 12 s of training | 15.3k samples, 512 base steps" in said


def test_the_start_says_where_to_watch(clock):
    stream = io.StringIO()
    start = synthetic.fit_start()
    config = Config(workdir="/runs/a/", batch=BatchLimits(base=64, max=64), epochs=1)
    settings = encode(config)
    Console(clock, None, stream).on_fit_start(dataclasses.replace(start, settings=settings))
    assert "dashboard: jaxgoodput board /runs/a/\n" in stream.getvalue()
    assert "--logdir /runs/a/tensorboard\n" in stream.getvalue()
    stream = io.StringIO()
    off = encode(dataclasses.replace(config, reporting=Reporting(tensorboard=False)))
    Console(clock, None, stream).on_fit_start(dataclasses.replace(start, settings=off))
    assert "dashboard" not in stream.getvalue()


def test_a_verdict_that_changes_nothing_is_not_said(clock):
    stream = io.StringIO()
    Console(clock, None, stream).on_tune_end(
        synthetic.tune_end(10, 1.0, synthetic.START, known=False)
    )
    assert stream.getvalue() == ""


def test_the_bar_has_its_step_and_eta_from_the_start_and_right_after_an_evaluation(clock):
    stream = Terminal()
    console = Console(clock, 4000.0, stream)
    console.on_fit_start(synthetic.fit_start())
    assert "step 0 | ETA not known yet" in stream.getvalue()
    console.on_window(synthetic.window(1200, 1724.0, 100_000, eta_s=192.0))
    clock.advance(12.0)  # of which the evaluation takes 2
    console.on_eval_end(
        EvalEnd(step=1210, progress=1730.0, at_s=9.0, seconds=2.0, metrics={"auc": 0.9})
    )
    assert "step 1210 | ETA 3 min 02 s" in stream.getvalue().rpartition("auc")[2]
    # The first window behind it may be a single step, which does not tell the pace.
    clock.advance(2.0)
    console.on_window(synthetic.window(1211, 1731.0, 100_064, eta_s=float("nan")))
    assert "step 1211 | ETA 3 min 00 s | batch 64" in stream.getvalue()
    console.close()


def test_a_pace_that_is_known_since_an_evaluation_is_not_put_off_by_it(clock):
    stream = Terminal()
    console = Console(clock, 4000.0, stream)
    console.on_fit_start(synthetic.fit_start())
    clock.advance(60.0)  # an evaluation, at whose end the window before it is told first
    console.on_window(synthetic.window(1200, 1724.0, 100_000, eta_s=192.0))
    console.on_eval_end(
        EvalEnd(step=1200, progress=1724.0, at_s=60.0, seconds=60.0, metrics={"auc": 0.9})
    )
    assert "step 1200 | ETA 3 min 12 s" in stream.getvalue().rpartition("auc")[2]
    console.close()


def test_a_line_without_times_has_no_empty_places():
    nan = float("nan")
    one = synthetic.window(1, 1.0, 64, known=False, throughput=nan, goodput_measured=nan, eta_s=nan)
    line = progress_line(one, 4000.0)
    assert "- samples/s" not in line and line.endswith("| ETA not known yet")


def test_a_terminal_gets_a_bar_that_ends(clock):
    stream = Terminal()
    console = Console(clock, 4000.0, stream)
    console.on_fit_start(synthetic.fit_start())
    console.on_window(synthetic.window(1200, 1724.0, 100_000))
    console.on_tune_end(synthetic.tune_end(1210, 1730.0, synthetic.START))
    console.on_fit_end(FitEnd(step=1210, progress=1730.0, samples=1, seconds=2.0, reason="done"))
    console.close()
    shown = stream.getvalue()
    assert "43%" in shown
    assert "step 1200 | ETA 3 min 12 s | batch 64 | loss 0.7288" in shown and "━━━━" in shown
    assert "change: 64 -> " in shown
    assert "\x1b[?25h" in shown.split("\x1b[?25l")[-1], "the cursor must come back"


def test_stderr_is_used_where_the_log_shows_no_information(clock, capsys):
    before = logging.get_verbosity()
    try:
        logging.set_verbosity(logging.WARNING)
        Console(clock, None).on_fit_start(synthetic.fit_start())
    finally:
        logging.set_verbosity(before)
    assert "8 x cpu" in capsys.readouterr().err


def test_the_log_is_used_where_it_shows_information(clock, capsys, caplog):
    before = logging.get_verbosity()
    try:
        logging.set_verbosity(logging.INFO)
        with caplog.at_level("INFO", logger="absl"):
            Console(clock, None).on_fit_start(synthetic.fit_start())
    finally:
        logging.set_verbosity(before)
    assert "8 x cpu" in caplog.text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (999.4, "999"), (999.6, "1k"), (1024, "1.02k"), (999_600, "1M"),
        (-15_300.0, "-15.3k"), (float("inf"), "inf"), (float("nan"), "-"), (None, "-"),
    ],
)  # fmt: skip
def test_compact_numbers(value, text):
    assert compact(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 us"), (0.9994, "999 ms"), (0.9996, "1 s"), (59.96, "1 min 00 s"),
        (3599.6, "1 h 00 min"), (172_800.0, "2 d 00 h"), (float("inf"), "never"), (None, "-"),
    ],
)  # fmt: skip
def test_durations(value, text):
    assert seconds(value) == text


def test_a_long_start_is_not_silent(clock):
    stream = io.StringIO()
    with starting(lambda: 3, clock, stream, every_s=0.01):
        clock.advance(12.0)
        deadline = time.monotonic() + 60.0
        while "12 s | 3 programs compiled" not in stream.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    said = stream.getvalue()
    assert said.startswith("starting for ")
    time.sleep(0.05)
    assert stream.getvalue() == said
