"""The dashboard: the promised tags, the layout, and no point lost or doubled by a restart."""
# pyright: reportAttributeAccessIssue=false

import json
import math
import os
import re
import signal
import subprocess
import sys
import urllib.parse

import eventreader
import pytest
import synthetic
import tensorboard_server
from tensorboardX.proto import api_pb2, layout_pb2, plugin_hparams_pb2

from jaxgoodput.clock import FakeClock, SystemClock
from jaxgoodput.goodput.intervals import UNKNOWN_INTERVAL
from jaxgoodput.observe import hooks
from jaxgoodput.observe.badput import BUCKETS, TimeLedger
from jaxgoodput.observe.dashboard import eventfile
from jaxgoodput.observe.dashboard.tags import (
    CHARTS,
    PICTURES,
    PINNED,
    TAGS,
    pinned_link,
    shown,
    tag_table,
)
from jaxgoodput.observe.dashboard.tensorboard import Dashboard
from jaxgoodput.observe.events import Checkpoint, EvalEnd, FitEnd, Preempt
from jaxgoodput.observe.journal import Journal

MARGINS = [tags for charts in CHARTS.values() for kind, tags in charts.values() if kind == "Margin"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A workdir with a whole planted run, to read only."""
    workdir, clock = tmp_path_factory.mktemp("finished"), FakeClock()
    dashboard = Dashboard(workdir, clock=clock, ledger=TimeLedger(clock))
    synthetic.run(lambda event: hooks.call([dashboard], event), clock)
    dashboard.close()
    return workdir


def promised(tag):
    return any(
        tag == t.name or (t.name.endswith("*") and tag.startswith(t.name[:-1])) for t in TAGS
    )


def test_every_promised_tag_is_written_and_no_other(finished):
    run = eventreader.scalars(finished / "tensorboard" / "measured")
    unpromised = [tag for tag in run if not promised(tag)]
    assert not unpromised
    # Seen only after a restart, with tables, of text, and on chips that are known.
    missing = {t.name for t in TAGS if not t.name.endswith("*")} - set(run)
    elsewhere = {"perf/feeding_s", "perf/tokens_per_sec", "perf/mfu"}
    assert missing == {"elastic/last_resize_s", *elsewhere}
    assert {"train/loss", "train/grad_norm", "eval/accuracy"} <= set(run)
    assert "goodput/goodput" not in run, "that tag is another library's, with another meaning"


def test_the_model_is_a_sub_run_under_the_same_tags(finished):
    model = eventreader.scalars(finished / "tensorboard" / "model")
    assert set(model) == {tag.name for tag in TAGS if tag.model}
    run = eventreader.scalars(finished / "tensorboard" / "measured")
    at = dict(run["goodput/predicted"])
    assert all(at[step] == value for step, value in model["goodput/samples_per_sec"])


def test_what_is_drawn_is_what_was_measured(tmp_path, clock):
    dashboard = Dashboard(tmp_path, clock=clock)
    dashboard.on_fit_start(synthetic.fit_start())
    one = synthetic.window(40, 31.0, 2560)
    dashboard.on_window(one)
    dashboard.close()
    run = eventreader.scalars(tmp_path / "tensorboard" / "measured")

    def shown(tag):
        ((step, value),) = run[tag]
        assert step == 40
        return value

    assert shown("batch/global") == 64 == 8 * 8 * 1
    assert shown("goodput/samples_per_sec") == pytest.approx(one.goodput_measured)
    assert shown("gns/critical_batch_size") == pytest.approx(one.noise_scale)
    stated = one.noise_interval
    for bound, value in (("", stated.middle), ("_lower", stated.lower), ("_upper", stated.upper)):
        assert shown(f"gns/noise_scale{bound}") == pytest.approx(value)
    assert shown("lr/effective") == pytest.approx(0.1 * one.gain)
    band = math.exp(synthetic.ERROR)
    assert shown("goodput/predicted_lower") == pytest.approx(one.goodput_predicted / band)
    assert shown("goodput/predicted_upper") == pytest.approx(one.goodput_predicted * band)
    assert shown("perf/predicted_step_time_upper_s") == pytest.approx(one.predicted_step_s * band)


def test_the_unknown_is_a_gap_but_a_loss_of_nan_is_shown(tmp_path, clock):
    dashboard = Dashboard(tmp_path, clock=clock)
    dashboard.on_fit_start(synthetic.fit_start())
    dashboard.on_window(
        synthetic.window(10, 1.0, 64, known=False, metrics={"loss": math.nan, "bad name!": 1.0})
    )
    dashboard.close()
    run = eventreader.scalars(tmp_path / "tensorboard" / "measured")
    assert "gns/critical_batch_size" not in run
    assert "goodput/predicted" not in run and "gns/noise_scale_upper" not in run
    assert math.isnan(run["train/loss"][0][1])
    assert run["train/bad_name_"] == [(10, 1.0)]


def test_a_margin_chart_has_its_three_curves_at_the_same_steps(tmp_path, clock):
    """TensorBoard shows an error instead of the chart otherwise."""
    dashboard = Dashboard(tmp_path, clock=clock)
    dashboard.on_fit_start(synthetic.fit_start())
    nan = math.nan
    dashboard.on_window(synthetic.window(10, 1.0, 64, predicted_error=nan))
    dashboard.on_window(synthetic.window(20, 1.0, 64, goodput_predicted=nan))
    dashboard.on_window(synthetic.window(30, 1.0, 64, predicted_step_s=nan))
    dashboard.on_window(synthetic.window(40, 1.0, 64, loss_gained_error=nan))
    dashboard.on_window(synthetic.window(50, 1.0, 64))
    dashboard.on_window(synthetic.window(60, 1.0, 64, noise_interval=UNKNOWN_INTERVAL))
    dashboard.close()
    run = eventreader.scalars(tmp_path / "tensorboard" / "measured")
    expected = {
        "evidence": [10, 20, 30, 50, 60],
        "goodput": [30, 40, 50, 60],
        "gns": [10, 20, 30, 40, 50],
        "perf": [20, 40, 50, 60],
    }
    for names in MARGINS:
        for name in names:
            assert [step for step, _ in run[name]] == expected[name.partition("/")[0]]


def test_time_is_shown_as_shares_of_the_wall_time(tmp_path, clock):
    ledger = TimeLedger(clock)
    dashboard = Dashboard(tmp_path, clock=clock, ledger=ledger)
    dashboard.on_fit_start(synthetic.fit_start())
    with ledger.bucket("compilation"):
        clock.advance(3.0)
    clock.advance(9.0)
    dashboard.on_window(synthetic.window(10, 1.0, 64))
    dashboard.close()
    run = eventreader.scalars(tmp_path / "tensorboard" / "measured")
    assert run["badput/compilation"] == [(10, 25.0)]
    assert run["goodput_time/productive_pct"] == [(10, 75.0)]
    assert run["perf/compile_s"] == [(10, 3.0)]
    shares = [run[f"badput/{name}"][0][1] for name in BUCKETS]
    assert sum(shares) + 75.0 == pytest.approx(100.0)


def test_layout_names_existing_tags_exactly(finished):
    *_, (_, value) = eventreader.values(
        finished / "tensorboard" / "measured", "custom_scalars__config__"
    )
    assert value.metadata.plugin_data.plugin_name == "custom_scalars"
    read = layout_pb2.Layout.FromString(value.tensor.string_val[0])
    layout = {c.title: [chart.title for chart in c.chart] for c in read.category}
    points = eventreader.scalars(finished / "tensorboard" / "measured")
    nonzero = {tag for tag, values in points.items() if any(value for _, value in values)}
    assert layout == {title: list(charts) for title, charts in shown(CHARTS, nonzero).items()}
    assert [category.title for category in read.category][0] == "Learning" and len(
        read.category
    ) == 5
    written = set(eventreader.scalars(finished / "tensorboard" / "measured")) | {
        "elastic/last_resize_s"
    }
    for category in read.category:
        for chart in category.chart:
            for pattern in chart.multiline.tag:
                if pattern == "^eval/":  # whatever the user measures
                    assert any(re.match(pattern, tag) for tag in written)
                    continue
                assert [tag for tag in written if re.match(pattern, tag)] == [pattern[1:-1]]
            assert len(chart.multiline.tag) <= 2, "all tags of one run have the same colour"
            for series in chart.margin.series:
                assert {series.value, series.lower, series.upper} <= written
    assert len(MARGINS) == 4


def test_a_chart_comes_to_the_page_once_it_has_something_to_show(tmp_path, clock):
    dashboard = Dashboard(tmp_path, clock=clock)
    dashboard.on_fit_start(synthetic.fit_start())

    def charts():
        folder = tmp_path / "tensorboard" / "measured"
        *_, (_, value) = eventreader.values(folder, "custom_scalars__config__")
        layout = layout_pb2.Layout.FromString(value.tensor.string_val[0])
        return {chart.title for category in layout.category for chart in category.chart}

    for step, known in ((10, False), (20, True), (30, True)):
        clock.advance(6.0)
        dashboard.on_window(synthetic.window(step, float(step), 64 * step, known=known))
        assert {"loss", "global batch (samples)"} <= charts()
        assert ("learning-rate gain" in charts()) and ("noise scale (samples)" in charts()) == known
        assert "evaluation" not in charts() and "restarts" not in charts()
    dashboard.on_eval_end(
        EvalEnd(step=30, progress=1.0, at_s=2.0, seconds=0.1, metrics={"accuracy": 0.5})
    )
    dashboard.on_fit_end(FitEnd(step=30, progress=1.0, samples=1, seconds=8.0, reason="done"))
    assert "evaluation" in charts()
    dashboard.close()
    again = Dashboard(tmp_path, clock=clock)
    again.on_fit_start(synthetic.fit_start(step=30, restart=1))
    clock.advance(6.0)
    again.on_window(synthetic.window(40, 40.0, 64 * 40))
    again.close()
    assert "evaluation" in charts() and "last restart (s)" in charts()


def test_no_curve_has_two_points_at_one_step(finished):
    for run in ("measured", "model"):
        for tag, points in eventreader.scalars(finished / "tensorboard" / run).items():
            steps = [step for step, _ in points]
            assert steps == sorted(set(steps)), tag


def test_verdicts_and_events_say_why(finished):
    folder = finished / "tensorboard" / "measured"
    verdicts = [
        value.tensor.string_val[0].decode()
        for _, value in eventreader.values(folder, "decisions/verdicts/text_summary")
    ]
    assert any("gains" in text and "step 50" in text for text in verdicts)
    # Ten verdicts to keep for the same reason with other numbers are one text.
    assert len([text for text in verdicts if "keep" in text]) < 6
    races = [
        value.tensor.string_val[0].decode()
        for _, value in eventreader.values(folder, "decisions/race/text_summary")
    ]
    assert any("| 64 | in use | 0.30 +- 0.04 | 100 |" in text for text in races)
    # A table that differs only in its numbers is not news.
    assert len(races) < 12, "verdicts"
    log = [
        value.tensor.string_val[0].decode()
        for _, value in eventreader.values(folder, "log/events/text_summary")
    ]
    assert any("batch 64 = 8 x 8 x 1 -> " in line for line in log)
    assert any("SIGTERM" in line for line in log)
    assert any("preempted" in line for line in log)


def test_failed_checkpoints_and_skipped_steps_are_told(tmp_path, clock):
    dashboard = Dashboard(tmp_path, clock=clock)
    dashboard.on_fit_start(synthetic.fit_start())
    dashboard.on_window(synthetic.window(10, 1.0, 64, skipped_steps=3))
    dashboard.on_window(synthetic.window(20, 1.0, 64, skipped_steps=3))
    dashboard.on_checkpoint(Checkpoint(step=20, seconds=0.1, error="disk full"))
    dashboard.close()
    log = [
        value.tensor.string_val[0].decode()
        for _, value in eventreader.values(
            tmp_path / "tensorboard" / "measured", "log/events/text_summary"
        )
    ]
    assert [line for line in log if "skipped" in line] == [
        "**step 10** 3 updates skipped: not finite"
    ]
    assert any("disk full" in line for line in log)


def test_pictures_are_drawn_at_changes_and_at_the_end_but_not_all_the_time(tmp_path, clock):
    pytest.importorskip("matplotlib")
    dashboard = Dashboard(tmp_path, clock=clock, figures_every_s=60.0, first_figure_s=0.0)
    dashboard.on_fit_start(synthetic.fit_start())
    drawn_at = (10, 50)
    for step in range(10, 60, 10):
        dashboard.on_tune_end(synthetic.tune_end(step, 300.0, synthetic.START))
        clock.advance(1.0)
    dashboard.on_fit_end(
        FitEnd(step=60, progress=1.0, samples=1, seconds=5.0, reason="done", buckets_s={})
    )
    dashboard.close()
    for tag in ("model/goodput_surface", "model/goodput_curve", "model/fit"):
        pictures = eventreader.values(tmp_path / "tensorboard" / "measured", tag)
        assert tuple(step for step, _ in pictures) == drawn_at
        for _, value in pictures:
            *size, png = value.tensor.string_val
            assert png.startswith(b"\x89PNG")
            assert size == [b"720", b"440"]


@pytest.mark.slow
def test_no_picture_is_drawn_at_first(tmp_path, clock):
    pytest.importorskip("matplotlib")
    dashboard = Dashboard(tmp_path, clock=clock, figures_every_s=1.0, first_figure_s=20.0)
    dashboard.on_fit_start(synthetic.fit_start())
    for step in range(10, 100, 10):
        dashboard.on_tune_end(synthetic.tune_end(step, 300.0, synthetic.START))
        clock.advance(4.9)
    dashboard.close()
    pictures = eventreader.values(tmp_path / "tensorboard" / "measured", "model/fit")
    assert next(step for step, _ in pictures) == 60, "after 24.5 s, with the sixth verdict"


def test_a_change_between_two_dates_is_drawn_when_the_next_is_due(tmp_path, clock):
    pytest.importorskip("matplotlib")
    dashboard = Dashboard(tmp_path, clock=clock, figures_every_s=60.0, first_figure_s=0.0)
    dashboard.on_fit_start(synthetic.fit_start())
    dashboard.on_tune_end(synthetic.tune_end(10, 300.0, synthetic.START))  # drawn at once
    clock.advance(5.0)
    change = synthetic.tune_end(20, 300.0, synthetic.START)
    assert change.switched
    dashboard.on_tune_end(change)
    dashboard.on_tune_end(synthetic.tune_end(30, 300.0, change.verdict.config))  # keeps it
    for step in range(40, 200, 10):
        clock.advance(5.0)
        dashboard.on_window(synthetic.window(step, 300.0, 64 * step))
    dashboard.close()
    pictures = eventreader.values(tmp_path / "tensorboard" / "measured", "model/fit")
    assert [step for step, _ in pictures] == [10, 20]


@pytest.mark.slow
def test_where_the_batch_stays_pictures_are_drawn_seldom(tmp_path, clock):
    pytest.importorskip("matplotlib")
    dashboard = Dashboard(tmp_path, clock=clock, figures_every_s=60.0, first_figure_s=0.0)
    dashboard.on_fit_start(synthetic.fit_start())
    best = synthetic.tune_end(10, 300.0, synthetic.START).verdict.config
    for step in range(10, 1510, 10):
        dashboard.on_window(synthetic.window(step, 0.1 * step, 64 * step, best))
        dashboard.on_tune_end(synthetic.tune_end(step, 300.0, best))
        clock.advance(10.0)
    dashboard.close()
    for tag in ("model/efficiency_by_group", "model/fit", "model/sweep"):
        pictures = eventreader.values(tmp_path / "tensorboard" / "measured", tag)
        steps = [step for step, _ in pictures]
        # The sweep has nothing to show at the first fit; it is drawn with the window, the others of the
        # verdict before it.
        expected = [610, 1210] if tag == "model/sweep" else [10, 600, 1200]
        assert steps == expected, tag


def test_the_sweep_is_drawn_at_the_end_as_of_the_end(tmp_path, clock):
    pytest.importorskip("matplotlib")
    dashboard = Dashboard(tmp_path, clock=clock)
    synthetic.run(lambda event: hooks.call([dashboard], event), clock, steps=600)
    dashboard.close()
    pictures = eventreader.values(tmp_path / "tensorboard" / "measured", "model/sweep")
    assert pictures[-1][0] == 600
    steps = [step for step, _ in pictures]
    assert steps == sorted(set(steps))


def test_every_card_says_what_it_shows_and_in_what_unit(finished):
    folder = finished / "tensorboard" / "measured"
    pictures = [picture.name for picture in PICTURES]
    for tag in [*eventreader.scalars(folder), *pictures]:
        about = eventreader.values(folder, tag)[0][1].metadata.summary_description
        promised = (*TAGS, *PICTURES)
        (known,) = (t for t in promised if re.fullmatch(t.name.replace("*", ".*"), tag))
        assert about.startswith(known.meaning)
        assert known.unit in ("1", "the user's") or f"({known.unit})" in about


def test_without_matplotlib_one_line_says_how_to_get_pictures(tmp_path, clock, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "jaxgoodput.observe.dashboard.figures", raising=False)
    monkeypatch.delattr("jaxgoodput.observe.dashboard.figures", raising=False)
    dashboard = Dashboard(tmp_path, clock=clock, figures_every_s=0.0, first_figure_s=0.0)
    dashboard.on_fit_start(synthetic.fit_start())
    for step in (10, 20):
        dashboard.on_tune_end(synthetic.tune_end(step, 300.0, synthetic.START))
    dashboard.close()
    folder = tmp_path / "tensorboard" / "measured"
    assert not eventreader.values(folder, "model/fit")
    log = [
        value.tensor.string_val[0].decode()
        for _, value in eventreader.values(folder, "log/events/text_summary")
    ]
    assert [line for line in log if "picture" in line] == [
        "**step 10** no pictures: they need matplotlib, pip install 'jaxgoodput[plots]'"
    ]


@pytest.mark.parametrize(("reason", "status"), [("done", 1), ("preempted", 1), ("OOM: 3 GB", 2)])
def test_hparams_hold_the_settings_and_the_outcome(tmp_path, clock, reason, status):
    dashboard = Dashboard(tmp_path, clock=clock)
    dashboard.on_fit_start(synthetic.fit_start())
    clock.advance(2.0)
    dashboard.on_window(synthetic.window(10, 10.0, 640))
    dashboard.on_eval_end(
        EvalEnd(step=10, progress=1.0, at_s=2.0, seconds=0.1, metrics={"accuracy": 0.5})
    )
    dashboard.on_fit_end(
        FitEnd(
            step=10,
            progress=1.0,
            samples=1,
            seconds=8.0,
            reason=reason,
            buckets_s={"other": 2.0, "productive": 6.0},
        )
    )
    dashboard.close()
    folder = tmp_path / "tensorboard" / "measured"
    ((_, start),) = eventreader.values(folder, "_hparams_/session_start_info")
    found = plugin_hparams_pb2.HParamsPluginData.FromString(
        start.metadata.plugin_data.content
    ).session_start_info
    assert found.hparams["policy"].string_value == "goodput"
    assert found.hparams["batch.max"].number_value == 4096
    assert found.hparams["learning_rate"].number_value == pytest.approx(0.1)
    ((_, compared),) = eventreader.values(folder, "_hparams_/experiment")
    experiment = plugin_hparams_pb2.HParamsPluginData.FromString(
        compared.metadata.plugin_data.content
    ).experiment
    metrics = [info.name.tag for info in experiment.metric_infos]
    assert metrics == [
        "hparam/mean_goodput", "hparam/productive_pct", "train/loss", "eval/accuracy"
    ]  # fmt: skip
    assert {"learning_rate", "policy"} <= {info.name for info in experiment.hparam_infos}
    ((_, end),) = eventreader.values(folder, "_hparams_/session_end_info")
    ended = plugin_hparams_pb2.HParamsPluginData.FromString(
        end.metadata.plugin_data.content
    ).session_end_info
    assert ended.status == status
    assert api_pb2.Status.Name(status) == ("STATUS_SUCCESS" if status == 1 else "STATUS_FAILURE")
    run = eventreader.scalars(folder)
    assert run["goodput_time/productive_pct"] == [(10, 75.0)]
    assert run["hparam/productive_pct"] == [(10, 75.0)]
    assert run["hparam/mean_goodput"][0][1] == pytest.approx(
        synthetic.window(10, 10.0, 640).goodput_measured
    )


def test_processes_that_come_and_go_are_no_outcome(tmp_path, clock):
    for restart, reason in enumerate(("regrouped: a host has come", "done")):
        dashboard = Dashboard(tmp_path, clock=clock)
        dashboard.on_fit_start(synthetic.fit_start(step=10 * restart, restart=restart))
        step = 10 * (restart + 1)
        end = FitEnd(step=step, progress=1.0, samples=1, seconds=8.0, reason=reason)
        dashboard.on_fit_end(end)
        dashboard.close()
        clock.advance(5.0)
    folder = tmp_path / "tensorboard" / "measured"
    assert [step for step, _ in eventreader.values(folder, "_hparams_/session_end_info")] == [20]


def steps_of(workdir, tag="batch/global", run="measured"):
    return [step for step, _ in eventreader.scalars(workdir / "tensorboard" / run)[tag]]


def test_a_restart_loses_no_point_and_doubles_none(tmp_path, clock):
    """Killed at step 470, resumed from the checkpoint at step 400."""
    for restart, start, end in ((0, 0, 470), (1, 400, 600), (2, 400, 500)):
        dashboard = Dashboard(tmp_path, clock=clock)
        dashboard.on_fit_start(synthetic.fit_start(step=start, restart=restart))
        for step in range(start + 10, end + 1, 10):
            dashboard.on_window(synthetic.window(step, float(step), 64 * step))
            if step % 200 == 0:
                dashboard.on_checkpoint(Checkpoint(step=step, seconds=0.01))
        dashboard.close()
    for run in ("measured", "model"):
        assert steps_of(tmp_path, "perf/step_time_s", run) == list(range(10, 501, 10))
    restarts = dict(eventreader.scalars(tmp_path / "tensorboard" / "measured")["elastic/restarts"])
    assert restarts[400] == 0.0
    assert restarts[410] == 2.0


def test_a_restart_from_nothing_starts_over(tmp_path, clock):
    for restart, end in ((0, 50), (1, 30)):
        dashboard = Dashboard(tmp_path, clock=clock)
        dashboard.on_fit_start(synthetic.fit_start(restart=restart))
        for step in range(10, end + 1, 10):
            dashboard.on_window(synthetic.window(step, float(step), 64 * step))
        dashboard.close()
    assert steps_of(tmp_path) == [10, 20, 30]
    assert (
        len(eventreader.values(tmp_path / "tensorboard" / "measured", "custom_scalars__config__"))
        == 1
    )


def test_two_writers_in_one_second_do_not_truncate_each_other(tmp_path, clock):
    first, second = Dashboard(tmp_path, clock=clock), Dashboard(tmp_path, clock=clock)
    first.on_fit_start(synthetic.fit_start())
    first.on_window(synthetic.window(10, 1.0, 640))
    first.flush()
    second.on_fit_start(synthetic.fit_start(step=10, progress=1.0, restart=0))
    second.on_window(synthetic.window(20, 2.0, 1280))
    first.close()
    second.close()
    assert len(list((tmp_path / "tensorboard" / "measured").glob("events.*"))) == 2
    assert steps_of(tmp_path) == [10, 20]


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import synthetic
import tensorboard_server
from jaxgoodput.clock import SystemClock
from jaxgoodput.observe.events import Checkpoint
from jaxgoodput.observe.dashboard.tensorboard import Dashboard
dashboard = Dashboard({workdir!r}, clock=SystemClock())
dashboard.on_fit_start(synthetic.fit_start())
for step in range(10, 471, 10):
    dashboard.on_window(synthetic.window(step, float(step), 64 * step))
    if step % 200 == 0:
        dashboard.on_checkpoint(Checkpoint(step=step, seconds=0.01))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_sigkill_loses_nothing_before_the_last_checkpoint(tmp_path):
    tests = os.path.join(os.path.dirname(os.path.dirname(__file__)), "support")
    program = KILLED.format(tests=tests, workdir=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    dashboard = Dashboard(tmp_path, clock=SystemClock())
    dashboard.on_fit_start(synthetic.fit_start(step=400, restart=1))
    for step in range(410, 501, 10):
        dashboard.on_window(synthetic.window(step, float(step), 64 * step))
    dashboard.close()
    assert steps_of(tmp_path) == list(range(10, 501, 10))


SAVED = """
import os, signal, sys
from tensorboardX import SummaryWriter
writer = SummaryWriter({workdir!r}, purge_step=0)
for step in range(10, 401, 10):
    for number in range(45):
        writer.add_scalar(f"perf/{{number}}", step, step)
writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_summary_writer_would_lose_points_from_before_the_last_checkpoint(tmp_path):
    """Why `eventfile.py` is there; where this fails, it can go."""
    program = SAVED.format(workdir=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    assert sum(map(len, eventreader.scalars(tmp_path).values())) < 45 * 40


def test_the_time_between_runs_is_shown_once(tmp_path, clock):
    journal = Journal(tmp_path, clock=clock)
    journal.write(synthetic.fit_start())
    clock.advance(5.0)
    journal.write(Preempt(step=10, signal="SIGTERM"))
    clock.advance(30.0)
    resumed = synthetic.fit_start(step=10, restart=1)
    journal.write(resumed)
    dashboard = Dashboard(tmp_path, clock=clock)
    dashboard.on_fit_start(resumed)
    for step in (20, 30):
        clock.advance(2.0)
        dashboard.on_window(synthetic.window(step, float(step), 64 * step, seconds=2.0))
    dashboard.close()
    journal.close()
    run = eventreader.scalars(tmp_path / "tensorboard" / "measured")
    assert run["elastic/last_resize_s"] == [(20, 30.0)]


def test_a_full_disk_costs_events_not_the_run(tmp_path, clock, monkeypatch, caplog):
    dashboard = Dashboard(tmp_path, clock=clock)
    dashboard.on_fit_start(synthetic.fit_start())

    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(eventfile.EventsWriter, "flush", full)
    with caplog.at_level("WARNING", logger="absl"):
        dashboard.flush()
    assert "Training goes on" in caplog.text
    monkeypatch.undo()
    dashboard.on_window(synthetic.window(10, 1.0, 64))
    dashboard.close()
    assert steps_of(tmp_path) == [10]


def test_events_before_the_start_are_refused(tmp_path, clock):
    dashboard = Dashboard(tmp_path, clock=clock)
    with pytest.raises(RuntimeError, match="on_fit_start"):
        dashboard.on_window(synthetic.window(10, 1.0, 64))
    dashboard.close()


def test_the_link_pins_the_goodput_cards(finished):
    link = pinned_link("http://localhost:7000")
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(link).query)
    assert query["smoothing"] == ["0"]
    cards = json.loads(query["pinnedCards"][0])
    assert [card["tag"] for card in cards] == list(PINNED)
    assert set(PINNED) <= set(eventreader.scalars(finished / "tensorboard" / "measured"))


def test_tag_table_lists_every_tag_once():
    lines = tag_table().splitlines()
    assert len(lines) == len(TAGS) + len(PICTURES) + 2
    assert len({tag.name for tag in TAGS}) == len(TAGS)
    assert all(line.count("|") == 4 for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("fast_reader", ["true", "false"])
def test_tensorboard_itself_shows_it(tmp_path, fast_reader):
    pytest.importorskip("tensorboard", reason="the tensorboard package is not installed")
    clock = FakeClock(1.7e9)
    for restart, start, end in ((0, 0, 470), (1, 400, 600)):
        dashboard = Dashboard(tmp_path, clock=clock, ledger=TimeLedger(clock))
        state = None if not restart else (400.0, 25_600, synthetic.START)
        synthetic.run(
            lambda event, dashboard=dashboard: hooks.call([dashboard], event),
            clock,
            start_step=start,
            steps=end,
            restart=restart,
            state=state,
            end=bool(restart),
        )
        dashboard.close()
    with tensorboard_server.serving(tmp_path / "tensorboard", fast_reader) as server:
        get = server.get
        page = json.loads(get("/data/plugin/custom_scalars/layout"))
        assert [category["title"] for category in page["category"]] == list(CHARTS)
        titles = [chart["title"] for category in page["category"] for chart in category["chart"]]
        assert len(titles) == len(set(titles))
        for run, tag in (("measured", "batch/global"), ("model", "perf/step_time_s")):
            query = urllib.parse.urlencode({"run": run, "tag": tag})
            points = server.get_until(
                f"/data/plugin/scalars/scalars?{query}", lambda found: found[-1][1] == 600
            )
            known_from = 10 if run == "measured" else 30
            assert [step for _, step, _ in points] == list(range(known_from, 601, 10))
        tags = json.loads(get("/data/plugin/scalars/tags"))["measured"]
        assert set(PINNED) <= set(tags)
        texts = json.loads(get("/data/plugin/text/tags"))["measured"]
        assert {"decisions/verdicts/text_summary", "log/events/text_summary"} <= set(texts)
        images = json.loads(get("/data/plugin/images/tags"))["measured"]
        assert {picture.name for picture in PICTURES} <= set(images)
        for picture in PICTURES:
            assert picture.meaning in images[picture.name]["description"]
