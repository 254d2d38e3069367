"""No hook, and so no step, waits for a picture of the dashboard."""

import threading

import pytest
import synthetic

from jaxgoodput.clock import FakeClock
from jaxgoodput.observe.dashboard.painter import Drawing
from jaxgoodput.observe.dashboard.tensorboard import Dashboard


def test_the_dashboard_goes_on_while_a_picture_is_drawn(tmp_path, monkeypatch):
    may_draw, began = threading.Event(), threading.Event()

    def pictures(self):
        began.set()
        assert may_draw.wait(60)
        return []

    monkeypatch.setattr(Drawing, "pictures", pictures)
    dashboard = Dashboard(tmp_path, clock=FakeClock(), figures_every_s=0.0, first_figure_s=0.0)
    dashboard.on_fit_start(synthetic.fit_start())
    dashboard.on_tune_end(synthetic.tune_end(10, 300.0, synthetic.START))
    assert began.wait(60)
    dashboard.on_window(
        synthetic.window(20, 1.0, 64)
    )  # returns, although the picture is not finished
    dashboard.flush()
    may_draw.set()
    dashboard.close()


def test_what_drawing_raises_reaches_the_hooks_thread(tmp_path, monkeypatch):
    def pictures(self):
        raise ValueError("no colour")

    monkeypatch.setattr(Drawing, "pictures", pictures)
    dashboard = Dashboard(tmp_path, clock=FakeClock(), figures_every_s=0.0, first_figure_s=0.0)
    dashboard.on_fit_start(synthetic.fit_start())
    dashboard.on_tune_end(synthetic.tune_end(10, 300.0, synthetic.START))
    with pytest.raises(ValueError, match="no colour"):
        dashboard.close()
