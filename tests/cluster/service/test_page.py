"""The page in a real browser: it shows who has what, and keeps itself up to date."""

import re
import shutil
import subprocess
import threading
import urllib.request

import pytest
import services

from jaxgoodput.cluster.service.record.commands import Caller
from jaxgoodput.cluster.service.record.state import State
from jaxgoodput.cluster.service.web import page
from jaxgoodput.cluster.service.wire import JobShown

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or ""

QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
)


def dom(url, folder, *, wait_ms):
    """The page's elements after its script has run for so long, of the browser's own, faster, time."""
    done = subprocess.run(
        [
            BROWSER, *QUIET, f"--user-data-dir={folder}", f"--virtual-time-budget={wait_ms}",
            "--dump-dom", url,
        ],
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )  # fmt: skip
    return done.stdout


def numbers(service):
    """What Prometheus would read."""
    url = f"http://127.0.0.1:{service.port}/metrics"
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {service.token}"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return answer.read().decode()


def plan_of(service, *names):
    """Wait until these jobs have devices."""
    service.until(lambda: all(service.job(name).num_devices for name in names), "no plan")


@pytest.mark.multihost
@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path):
    if not BROWSER:
        pytest.skip("no chromium on PATH (apt-get install chromium)")
    link = "http://tensorboard.example:6006"
    options = ("--local", "0", "--min-gap-s", "0.5", "--silent-s", "3600", "--tensorboard", link)
    with services.Service(tmp_path / "service", *options) as service:
        client = service.client()
        services.join(client, "n0", 2)
        for name in ("first", "second", "third"):
            made = services.submission(name, min_devices=1, max_devices=1)
            made = services.with_workdir(made, f"/runs/{name}")
            client.call("POST", "jobs", body=made, type_=JobShown, changes=True)
        plan_of(service, "first", "second")
        where = f"http://x:{service.token}@127.0.0.1:{service.port}/"
        text = dom(where, tmp_path / "profile", wait_ms=1000)
        parts = ("Nodes", "Running", "Waiting", "Devices over time", "Ended")
        places = [text.index(f"<h2>{part}</h2>") for part in parts]
        assert places == sorted(places)
        running, waiting = text[places[1] : places[2]], text[places[2] : places[3]]
        assert "</span>first</td>" in running and "</span>second</td>" in running
        assert "</span>third</td>" in waiting
        assert re.search(r"<b>2</b> of <b>2</b> devices on 1 node are in use", text)
        assert re.search(r'title="first">[01]</span>', text)
        assert len(re.findall(r'<rect class="held"', text)) == 2  # one bar a device
        assert f"{link}/?runFilter=first#timeseries" in text
        picture = tmp_path / "page.png"
        subprocess.run(
            [BROWSER, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,1000",
             f"--screenshot={picture}", where],
            check=True, timeout=120, capture_output=True,
        )  # fmt: skip
        image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
        with image.open(picture) as opened:
            colours = {page.colour(name) for name in ("first", "second", "third")}
            seen = {
                f"#{r:02x}{g:02x}{b:02x}" for _, (r, g, b) in opened.convert("RGB").getcolors(10**6)
            }
        assert colours <= seen
        client.close()


@pytest.mark.multihost
@pytest.mark.slow
def test_the_script_shows_what_has_changed_since(tmp_path):
    if not BROWSER:
        pytest.skip("no chromium on PATH (apt-get install chromium)")
    with services.Service(tmp_path / "service", "--local", "0") as service:
        where = f"http://x:{service.token}@127.0.0.1:{service.port}/"
        client, failed = service.client(), []

        def join_when_the_script_has_asked():
            try:
                service.until(lambda: 'route="/page",status="200"' in numbers(service), "no script")
                services.join(client, "newcomer", 2)
            except BaseException as error:
                failed.append(error)

        later = threading.Thread(target=join_when_the_script_has_asked)
        later.start()
        text = dom(where, tmp_path / "profile", wait_ms=200_000)
        later.join()
        client.close()
    assert not failed
    assert ">newcomer<" in text


def test_the_page_of_an_empty_cluster_says_what_to_do():
    text = page.whole(Caller("default", "operator"), State(), 5.0, page.Links())
    assert "jaxgoodput node --scheduler URL" in text
    assert text.count("<p class=dim>None") == 3
