"""The custom-scalars page in a real browser: charts are drawn, in both runs' colours, without errors."""

import shutil
import subprocess

import numpy as np
import pytest
import synthetic
import tensorboard_server

from jaxgoodput.clock import FakeClock
from jaxgoodput.observe import hooks
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.dashboard.tags import charts_link
from jaxgoodput.observe.dashboard.tensorboard import Dashboard

WIDTH, HEIGHT = 1500, 2000
# What TensorBoard gives the first two runs, and the background of its error boxes.
RUN, MODEL, ERROR = (255, 112, 67), (0, 119, 187), (255, 0, 0)


def screenshot(browser, url, path, profile):
    """One page as a PNG, after 60 s of the browser's own, faster, time."""
    subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", "--hide-scrollbars", f"--user-data-dir={profile}",
            f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=60000",
            f"--screenshot={path}", url,
        ],
        check=True,
        timeout=120,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip


def count(pixels, colour, tolerance=12):
    """Pixels of that colour."""
    return int((np.abs(pixels.astype(int) - colour).max(axis=-1) <= tolerance).sum())


@pytest.mark.slow
def test_the_charts_are_drawn(tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on PATH (apt-get install chromium)")
    pytest.importorskip("tensorboard", reason="the tensorboard package is not installed")
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    clock = FakeClock(1.7e9)
    state = None
    for restart, start, end in ((0, 0, 400), (1, 400, 800)):
        dashboard = Dashboard(tmp_path / "run", clock=clock, ledger=TimeLedger(clock))
        state = synthetic.run(
            lambda event, dashboard=dashboard: hooks.call([dashboard], event),
            clock,
            start_step=start,
            steps=end,
            restart=restart,
            state=state,
            end=bool(restart),
        )
        dashboard.close()
    picture = tmp_path / "page.png"
    with tensorboard_server.serving(tmp_path / "run" / "tensorboard") as server:
        url = charts_link(f"http://127.0.0.1:{server.port}")
        screenshot(browser, url, picture, tmp_path / "profile")
    with image.open(picture) as opened:
        pixels = np.asarray(opened.convert("RGB"))
    assert pixels.shape == (HEIGHT, WIDTH, 3)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 200, "the page is empty"
    assert count(pixels, RUN) > 2000, "the curves of the run are missing"
    assert count(pixels, MODEL) > 300, "the curves of the model are missing"
    # Such a box appears where the three curves of a margin chart differ in their steps.
    assert count(pixels, ERROR) < 100, "a chart shows an error"
