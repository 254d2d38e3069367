"""The pictures: they show where the best configuration lies and how well the model fits."""

import dataclasses
import math
import struct
from typing import Any

import numpy as np
import pytest
import synthetic

from jaxgoodput.goodput.efficiency import GradParams

pytest.importorskip("matplotlib")

from jaxgoodput.observe import figures

ALL = [figures.goodput_surface, figures.goodput_curve, figures.fit_scatter]


def tune(**over):
    return dataclasses.replace(synthetic.tune_end(350, 700.0, synthetic.START), **over)


@pytest.mark.parametrize("draw", ALL)
def test_each_is_a_small_png(draw):
    png = figures.png(draw(tune()))
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">II", png[16:24]) == (720, 440)
    # Small enough for the event file at every change of the batch.
    assert len(png) < 100_000


@pytest.mark.parametrize("draw", ALL)
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
    return {line.get_label(): np.asarray(line.get_data(), float) for line in figure.axes[0].lines}


def test_the_curve_marks_the_verdict_and_the_noise_scale():
    event = tune()
    lines = curves(figures.goodput_curve(event))
    batch, throughput = lines["throughput, samples/s"]
    _, goodput = lines["goodput, useful samples/s"]
    assert (np.diff(batch) > 0).all() and (np.diff(throughput) >= 0).all()
    assert (goodput <= throughput).all()
    assert lines["verdict"][0, 0] == event.verdict.config.global_batch_size
    assert lines["noise scale"][0, 0] == pytest.approx(event.grad.var / event.grad.sqr * 64)


def test_the_dots_lie_around_the_diagonal():
    lines = curves(figures.fit_scatter(tune()))
    assert np.array_equal(*lines["exact"])
    measured, predicted = lines["whole step"]
    assert np.abs(np.log(predicted / measured)).max() < 0.2
    assert {"micro-batch without sync", "fit error 7.0%"} <= set(lines)


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
