"""The pictures: they show where the best configuration lies and how well the model fits."""

import dataclasses
import math
import struct
from typing import Any

import numpy as np
import pytest
import synthetic

from jaxgoodput.goodput import sweep
from jaxgoodput.goodput.efficiency import GradGroups, GradParams

pytest.importorskip("matplotlib")

from jaxgoodput.observe.dashboard import figures

OF_A_FIT = [figures.goodput_surface, figures.goodput_curve, figures.fit_scatter]
NAMES = ("table", "dense")


def fixed_goodput(event):
    assert event.model is not None
    return sweep.fixed_goodput(event.model, event.placement, event.limits)


def by_group(event):
    return figures.efficiency_by_group(event, NAMES)


def of_the_sweep(event):
    fixed = fixed_goodput(event)
    return figures.sweep_avoided(sweep.Sweep().after(350.0, 60.0, 50.0, 1e4, fixed), 350, 0.07)


ALL = [*OF_A_FIT, by_group, of_the_sweep, figures.race]


def tune(**over):
    return dataclasses.replace(synthetic.tune_end(350, 700.0, synthetic.START), **over)


def test_a_sweep_is_of_whole_samples_within_the_limits():
    event = tune()
    assert event.model is not None
    limits = dataclasses.replace(event.limits, max_micro_batches=3)
    found = sweep.fixed_goodput(event.model, event.placement, limits)
    low, high = limits.span
    replicas = event.placement.num_replicas
    for batch in found:
        splits = [batch // replicas // n for n in (1, 2, 3) if batch % (replicas * n) == 0]
        assert any(low <= micro <= high for micro in splits), batch
    one = dataclasses.replace(limits, max_micro_batches=1)
    assert max(sweep.fixed_goodput(event.model, event.placement, one)) <= high * replicas


@pytest.mark.parametrize("draw", ALL)
def test_each_is_a_small_png(draw):
    png = figures.png(draw(tune()))
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">II", png[16:24]) == (720, 440)
    # Small enough for the event file at every change of the batch.
    assert len(png) < 100_000


@pytest.mark.parametrize("draw", OF_A_FIT)
def test_without_a_fit_there_is_no_picture(draw):
    assert draw(synthetic.tune_end(10, 1.0, synthetic.START, known=False)) is None


def test_without_timings_there_is_no_scatter():
    assert figures.fit_scatter(tune(timings=None)) is None


def surface(event):
    """Its axes, percentages with NaN outside, ticks as numbers, and cells of the marked configurations."""
    axes: Any
    (axes,) = figures.goodput_surface(event).axes
    percent = np.ma.masked_array(axes.images[0].get_array()).filled(math.nan)
    across, up = ([int(tick.get_text()) for tick in ticks] for ticks in
                  (axes.get_xticklabels(), axes.get_yticklabels()))  # fmt: skip
    marks = {
        p.get_label(): (round(p.get_y() + 0.47), round(p.get_x() + 0.47)) for p in axes.patches
    }
    return axes, percent, across, up, marks


def test_the_surface_is_the_model_and_its_top_is_the_verdict():
    event = tune()
    _, percent, across, up, marks = surface(event)
    assert percent[marks["verdict"]] == pytest.approx(100.0)
    assert percent[marks["before"]] == pytest.approx(100.0 / event.verdict.gain)
    assert np.nanmax(percent) == pytest.approx(100.0)
    row, column = marks["verdict"]
    assert across[column] == event.verdict.config.micro_batch_size
    assert up[row] == event.verdict.config.num_micro_batches
    batch = np.array(across)[None, :] * np.array(up)[:, None] * synthetic.REPLICAS
    limits = synthetic.LIMITS
    assert np.array_equal(np.isnan(percent), (batch > limits.max) | (batch < limits.base))


def test_the_cells_show_their_numbers():
    axes, percent, *_ = surface(tune())
    shown = {(round(t.get_position()[1]), round(t.get_position()[0])): t for t in axes.texts}
    known = {cell: value for cell, value in np.ndenumerate(percent) if math.isfinite(value)}
    assert {cell: text.get_text() for cell, text in shown.items()} == {
        cell: f"{value:.0f}" for cell, value in known.items()
    }
    ends = [shown[min(known, key=known.__getitem__)], shown[max(known, key=known.__getitem__)]]
    assert [text.get_color() for text in ends] == ["white", "black"], "dark and light cells"


def test_unknown_noise_shows_throughput_and_says_so():
    axes, percent, *_ = surface(tune(grad=GradParams(sqr=math.nan, var=math.nan)))
    assert "noise unknown" in axes.get_title()
    assert np.nanmax(percent) == pytest.approx(100.0)


def test_a_model_that_knows_nothing_is_drawn_grey():
    event = tune()
    assert event.fit is not None
    params = dataclasses.replace(event.fit.params, intra_base=math.nan)
    event = tune(fit=dataclasses.replace(event.fit, params=params))
    assert np.isnan(surface(event)[1]).all()
    figure = figures.goodput_surface(event)
    assert figure is not None and figures.png(figure)
    assert figures.goodput_curve(event) is None


def test_a_large_ladder_is_thinned_but_keeps_what_matters():
    limits = dataclasses.replace(synthetic.LIMITS, max_micro_batches=64, max=100_000)
    _, _, across, up, marks = surface(tune(limits=limits))
    assert len(up) <= 14 and len(across) <= 14
    assert {up[0], up[-1]} == {1, 64}
    assert set(marks) == {"before", "verdict", "outside the limits"}


def curves(figure):
    """The lines and dots of a plot by label, each as [x or y, points]."""
    return {
        str(line.get_label()): np.asarray(line.get_data(), float) for line in figure.axes[0].lines
    }


def test_the_curve_marks_the_verdict_and_the_noise_scale():
    event = tune()
    lines = curves(figures.goodput_curve(event))
    batch, throughput = lines["throughput, samples/s"]
    _, goodput = lines["goodput, useful samples/s"]
    assert (np.diff(batch) > 0).all() and (np.diff(throughput) >= 0).all()
    assert (goodput <= throughput).all()
    assert lines["verdict"][0, 0] == event.verdict.config.global_batch_size
    assert lines["noise scale"][0, 0] == pytest.approx(
        event.grad.var.sum() / event.grad.sqr.sum() * 64
    )


def test_the_dots_lie_around_the_diagonal():
    lines = curves(figures.fit_scatter(tune()))
    assert np.array_equal(*lines["exact"])
    measured, predicted = lines["whole step"]
    assert np.abs(np.log(predicted / measured)).max() < 0.2
    assert {"micro-batch without sync", "fit error 7.0%"} <= set(lines)


def test_each_group_has_the_curve_of_its_own_noise():
    """Planted: of the signal three quarters with a noise scale of 64 samples, a quarter with 6400."""
    grad = GradGroups(sqr=np.array([3.0, 1.0]), var=np.array([3.0, 100.0]))
    event = tune(grad=grad)
    lines = curves(by_group(event))
    few, many = lines["table: 75% of the signal"], lines["dense: 25% of the signal"]
    batch = few[0]
    assert batch[0] == pytest.approx(64) and batch[-1] == pytest.approx(4096)
    assert few[1] == pytest.approx((64 + 64) / (64 + batch))
    assert many[1] == pytest.approx((6400 + 64) / (6400 + batch))
    assert lines["all, by signal: decides"][1] == pytest.approx(0.75 * few[1] + 0.25 * many[1])
    present = event.verdict.config.global_batch_size
    worth = 0.75 * 128 / (64 + present) + 0.25 * 6464 / (6400 + present)
    assert lines[f"batch {present}: {worth:.2g}"][:, 0] == pytest.approx([present, worth])


def test_of_many_groups_those_with_most_of_the_signal_are_told_apart():
    signal = np.array([1.0, 50.0, 2.0, 9.0, 8.0, 7.0, 6.0, 5.0, 12.0])
    grad = GradGroups(sqr=signal, var=signal * np.arange(1, 10))
    names = [f"layers/{i}/" + "attention/" * 4 + "kernel" for i in range(9)]
    figure = figures.efficiency_by_group(tune(grad=grad), names)
    lines = curves(figure)
    (rest,) = (label for label in lines if "others" in label)
    assert rest == "3 others: 8% of the signal"  # 1 + 2 + 5 of 100
    batch, worth = lines[rest]
    noise = 64 * np.array([1.0, 3.0, 8.0])[:, None]
    each = (noise + 64) / (noise + batch)
    assert worth == pytest.approx((signal[[0, 2, 7]][:, None] * each).sum(axis=0) / 8)
    apart = [label for label in lines if label.startswith("...")]
    assert len(apart) == 6 and "50% of the signal" in apart[0]
    assert all(len(label.partition(":")[0]) <= 34 for label in apart)
    assert figure is not None and figures.png(figure)


def test_groups_of_hardly_any_signal_have_no_curve_of_their_own():
    grad = GradGroups(sqr=np.array([99.0, 0.6, 0.0, 0.4]), var=np.array([99.0, 6.0, 5.0, 1.0]))
    lines = curves(figures.efficiency_by_group(tune(grad=grad), "abcd"))
    assert list(lines)[:2] == ["a: 99% of the signal", "2 others: 1% of the signal"]
    alone = GradGroups(sqr=np.array([999.0, 1.0]), var=np.array([99.0, 6.0]))
    lines = curves(figures.efficiency_by_group(tune(grad=alone), "ab"))
    assert list(lines)[:2] == ["a: 100% of the signal", "b: hardly any signal"]


def test_groups_and_names_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match="2 groups, but there are 3 names"):
        figures.efficiency_by_group(tune(), ("a", "b", "c"))
    unknown = GradGroups(sqr=np.full(2, math.nan), var=np.ones(2))
    assert figures.efficiency_by_group(tune(grad=unknown), NAMES) is None
    silent = GradGroups(sqr=np.zeros(2), var=np.ones(2))
    assert figures.efficiency_by_group(tune(grad=silent), NAMES) is None


def test_the_sweep_is_what_each_batch_would_have_taken():
    """Planted: throughput and noise are known, so is how much slower each batch is than the run's."""
    event = tune()
    model, start = event.model, synthetic.START
    assert model is not None
    fixed = fixed_goodput(event)
    assert list(fixed) == [64, 128, 256, 512, 1024, 2048, 4096]
    now = float(model.goodput(event.placement, start.micro_batch_size, start.num_micro_batches))
    times = []
    for batch in fixed:
        splits = [(batch / 8 / n, n) for n in range(1, 9) if 4 <= batch / 8 / n <= 128]
        goodputs = [float(model.goodput(event.placement, *split)) for split in splits]
        times.append(50.0 * now / max(goodputs))
    assert times[0] <= 50.0 < sum(times)  # the run's own batch, at its best split, is among them
    one = sweep.Sweep().after(350.0, 60.0, 50.0, now, fixed)
    figure = figures.sweep_avoided(one, 350, 0.07)
    lines = curves(figure)
    (shown,) = (line for label, line in lines.items() if label.startswith("fixed batch"))
    assert shown[0] == pytest.approx(list(fixed)) and shown[1] == pytest.approx(times)
    (band,) = (patch.get_paths()[0].vertices for patch in figure.axes[0].collections)
    assert np.asarray(band)[:, 1].max() == pytest.approx(max(times) * math.exp(0.07))
    assert lines["this run, all of its wall time: 1 min 00 s"][1] == pytest.approx([60, 60])
    assert figures.sweep_avoided(sweep.Sweep(), 350) is None


def test_a_stretch_of_unknown_goodput_is_left_out_of_the_sweep():
    one = sweep.Sweep().after(10.0, 6.0, 4.0, 80.0, {32: 40.0})
    assert one.after(10.0, 6.0, 4.0, math.nan, {32: 40.0}) == one
    assert one.after(10.0, 6.0, 4.0, 80.0, {}) == one


def test_a_sweep_tries_only_what_the_limits_allow():
    limits = dataclasses.replace(
        synthetic.LIMITS, sizes=(16, 64), max_micro_batches=1, min_global=32, micro=(4, 128)
    )
    event = tune(limits=limits)
    assert list(fixed_goodput(event)) == [128, 512]
    unknown = tune(grad=GradParams(sqr=math.nan, var=math.nan))
    assert list(fixed_goodput(unknown)) == [
        64
    ]  # the base batch is worth what it is, whatever the noise


@pytest.mark.parametrize("num_rows", [1, 2, 12])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
def test_axes_have_some_ticks_but_not_too_many(num_rows, scale):
    one = synthetic.timings(np.random.default_rng(0))
    times = {name: scale * getattr(one, name) for name in ("step_s", "accumulate_s")}
    weight = (np.arange(len(one.weight)) < num_rows).astype(float)
    figure = figures.fit_scatter(tune(timings=dataclasses.replace(one, weight=weight, **times)))
    assert figure is not None and figures.png(figure)  # ticks are made when it is drawn
    (axes,) = figure.axes
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        inside = [tick for tick in axis.get_majorticklocs() if low <= tick <= high]
        assert 2 <= len(inside) <= 13


def test_the_race_has_a_row_for_each_batch_and_fills_only_what_was_measured():
    event = tune()
    figure = figures.race(event)
    assert figure is not None
    gained, step, goodput = figure.axes
    names = [label.get_text() for label in gained.get_yticklabels()]
    assert names == [f"{one.config.global_batch_size}, {one.standing}" for one in event.race]
    for axes, name in ((step, "step_s"), (goodput, "goodput")):
        filled = [line.get_markerfacecolor() != "white" for line in axes.lines]
        assert filled == [one.is_timed for one in event.race]
        assert [np.asarray(line.get_xdata())[0] for line in axes.lines] == [
            getattr(one, name) for one in event.race
        ]
    assert not any("not known" in text.get_text() for axes in figure.axes for text in axes.texts)
    unknown = [dataclasses.replace(one, gained=math.nan) for one in event.race]
    figure = figures.race(tune(race=tuple(unknown)))
    assert figure is not None
    assert [text.get_text() for text in figure.axes[0].texts] == ["not known yet"]
    assert figures.race(tune(race=event.race[:1])) is None
