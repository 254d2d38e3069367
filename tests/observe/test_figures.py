"""The pictures: drawn by both painters, and showing where the best configuration lies."""

import dataclasses
import math

import numpy as np
import pytest
import synthetic

from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.observe import figures, plots
from jaxgoodput.observe.plots import Series, log_ticks, ramp
from jaxgoodput.observe.raster import Canvas, encode_png, text_width

ALL = [figures.goodput_surface, figures.goodput_curve, figures.fit_scatter]
PAINTERS = [False] + [True] * figures.has_matplotlib()


def tune(**over):
    return dataclasses.replace(synthetic.tune_end(350, 700.0, synthetic.START), **over)


@pytest.mark.parametrize("matplotlib", PAINTERS)
@pytest.mark.parametrize("draw", ALL)
def test_both_painters_draw_something_of_the_same_size(draw, matplotlib):
    pixels = draw(tune(), matplotlib=matplotlib)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (plots.HEIGHT, plots.WIDTH, 3)
    colours = np.unique(pixels.reshape(-1, 3), axis=0)
    assert len(colours) > 20
    # Small enough for the event file at every change of the batch.
    assert len(encode_png(pixels)) < 100_000


@pytest.mark.parametrize("draw", ALL)
def test_without_a_fit_there_is_no_picture(draw):
    assert draw(synthetic.tune_end(10, 1.0, synthetic.START, known=False)) is None


def test_without_timings_there_is_no_scatter():
    assert figures.fit_scatter(tune(timings=None)) is None


def given_to_heat_map(monkeypatch, event):
    seen = {}

    def record(percent, **rest):
        seen.update(rest, percent=percent)
        return np.zeros((1, 1, 3), np.uint8)

    monkeypatch.setattr(plots, "heat_map", record)
    figures.goodput_surface(event)
    return seen


def test_the_surface_is_the_model_and_its_top_is_the_verdict(monkeypatch):
    event = tune()
    seen = given_to_heat_map(monkeypatch, event)
    before, verdict = seen["marks"]
    percent = seen["percent"]
    assert percent[verdict.row, verdict.column] == pytest.approx(100.0)
    assert percent[before.row, before.column] == pytest.approx(100.0 / event.verdict.gain)
    assert np.nanmax(percent) == pytest.approx(100.0)
    assert seen["x_ticks"][verdict.column] == str(event.verdict.config.micro_batch_size)
    assert seen["y_ticks"][verdict.row] == str(event.verdict.config.num_micro_batches)
    micro = np.array(seen["x_ticks"], int)[None, :]
    batch = micro * np.array(seen["y_ticks"], int)[:, None] * synthetic.REPLICAS
    limits = synthetic.LIMITS
    assert np.array_equal(np.isnan(percent), (batch > limits.max) | (batch < limits.base))


def test_unknown_noise_shows_throughput_and_says_so(monkeypatch):
    unknown = GradParams(sqr=math.nan, var=math.nan)
    seen = given_to_heat_map(monkeypatch, tune(grad=unknown))
    assert "noise unknown" in seen["title"]
    assert np.nanmax(seen["percent"]) == pytest.approx(100.0)


@pytest.mark.parametrize("matplotlib", PAINTERS)
def test_a_model_that_knows_nothing_is_drawn_grey(matplotlib):
    event = tune()
    assert event.fit is not None
    params = dataclasses.replace(event.fit.params, intra_base=math.nan)
    event = tune(fit=dataclasses.replace(event.fit, params=params))
    assert figures.goodput_surface(event, matplotlib=matplotlib) is not None
    assert figures.goodput_curve(event, matplotlib=matplotlib) is None


def test_a_large_ladder_is_thinned_but_keeps_what_matters(monkeypatch):
    limits = dataclasses.replace(synthetic.LIMITS, max_micro_batches=64, max=100_000)
    event = tune(limits=limits)
    seen = given_to_heat_map(monkeypatch, event)
    assert len(seen["y_ticks"]) <= 14 and len(seen["x_ticks"]) <= 14
    assert {seen["y_ticks"][0], seen["y_ticks"][-1]} == {"1", "64"}
    assert len(seen["marks"]) == 2


@pytest.mark.parametrize("matplotlib", PAINTERS)
def test_one_point_can_be_drawn(matplotlib):
    point = Series(np.array([0.1]), np.array([0.2]), "one", (0, 0, 0), "dots")
    line = Series(np.array([0.1, 0.1]), np.array([0.2, 0.2]), "flat", (0, 0, 0), "line")
    pixels = plots.xy_plot(
        [point, line], title="t", x_label="x", y_label="y", matplotlib=matplotlib
    )
    assert (pixels != 255).any()


def test_the_font_is_legible():
    """A letter has its known shape, upright and turned."""
    canvas = Canvas(9, 11)
    canvas.text(2, 5, "l", (0, 0, 0))
    shown = (canvas.pixels[..., 0] == 0)[2:9, 2:7]
    expected = ["01100", "00100", "00100", "00100", "00100", "00100", "01110"]
    assert ["".join("01"[int(bit)] for bit in row) for row in shown] == expected
    turned = Canvas(11, 9)
    turned.text(5, 4, "l", (0, 0, 0), align="centre", upward=True)
    ink = np.argwhere(turned.pixels[..., 0] == 0)
    box = turned.pixels[ink[:, 0].min() :, ink[:, 1].min() :, 0][:3, :7] == 0
    assert np.array_equal(np.rot90(box, -1), shown[:, 1:4])


def test_drawing_outside_the_canvas_is_cut_off():
    canvas = Canvas(10, 10)
    canvas.text(-200, 5, "far away")
    canvas.text(8, 9, "8")
    canvas.line(-50.0, -50.0, 50.0, 60.0, (0, 0, 0), width=3, dash=2)
    canvas.line(20.0, 20.0, 30.0, 30.0, (0, 0, 0))
    canvas.disc(-30.0, 4.0, 5.0, (0, 0, 0))
    canvas.disc(0.0, 0.0, 3.0, (0, 0, 0))
    canvas.frame(-5, -5, 50, 50, (0, 0, 0))
    assert canvas.pixels.shape == (10, 10, 3)
    assert (canvas.pixels[0, 0] == 0).all()


def test_text_width_is_what_is_drawn():
    canvas = Canvas(100, 20)
    canvas.text(0, 10, "mmm", (0, 0, 0), scale=2)
    ink = np.argwhere(canvas.pixels[..., 0] == 0)
    assert ink[:, 1].max() + 1 == text_width("mmm", 2)


def test_the_colour_ramp_gets_lighter_all_the_way():
    lightness = ramp(np.linspace(0, 1, 50)) @ np.array([0.299, 0.587, 0.114])
    assert (np.diff(lightness) > 0).all()
    assert (ramp(np.array([math.nan])) == ramp(np.array([math.nan]))[0, 0]).any()


@pytest.mark.parametrize(
    ("low", "high"), [(1.0, 2.0), (0.03, 0.04), (1.0, 1e9), (5e-6, 2e3), (9.0, 11.0)]
)
def test_ticks_are_few_round_and_inside(low, high):
    ticks = log_ticks(low, high)
    assert 1 <= len(ticks) <= 7
    assert all(low <= tick <= high for tick in ticks)
    assert ticks == sorted(set(ticks))


def test_a_picture_must_be_rgb():
    with pytest.raises(ValueError, match="alpha"):
        encode_png(np.zeros((4, 4, 4), np.uint8))
