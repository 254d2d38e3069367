"""python docs/pictures/dashboard.py WORKDIR OUT [TAB ...]

Photographs the dashboard of a run: a PNG in OUT of each tab (default: all that have something to show), as
headless Chromium draws it, and the newest of each picture on it. docs/dashboard.png is `custom_scalars.png`,
and docs/pictures has `efficiency_by_group.png` and `sweep.png`, of

    python examples/recommender.py --workdir /tmp/recommender
    python docs/pictures/dashboard.py /tmp/recommender /tmp/pictures

and `by_batch.png`, of `examples/quickstart.py --set base_steps=20000`.

Needs Chromium on the PATH (`apt-get install chromium`) and the extra `examples`.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request

from jaxgoodput.clock import SystemClock
from jaxgoodput.observe import board
from jaxgoodput.observe.dashboard.tags import charts_link, pinned_link

SIZE = {"timeseries": (1500, 2000), "images": (1500, 2600), "text": (1500, 2600)}
OTHERS = (1500, 1700)


def link(url: str, tab: str) -> str:
    """The address of a tab, with smoothing off."""
    if tab == "custom_scalars":
        return charts_link(url)
    return pinned_link(url) if tab == "timeseries" else f"{url}/#{tab}&_smoothingWeight=0"


def photograph(browser: str, url: str, size: tuple[int, int], path: pathlib.Path) -> None:
    """One page, after a minute of the browser's own, faster, time."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
            *("--disable-sync", "--hide-scrollbars", f"--user-data-dir={profile}"),
            *(f"--window-size={size[0]},{size[1]}", "--virtual-time-budget=60000"),
            *(f"--screenshot={path}", url),
        ]
        subprocess.run(command, check=True, timeout=300, capture_output=True)


def tabs(url: str) -> list[str]:
    """The tabs that have something to show, once every run has been read."""
    clock = SystemClock()
    for _ in range(240):
        try:
            with urllib.request.urlopen(f"{url}/data/plugins_listing", timeout=20) as reply:
                active = [name for name, about in json.load(reply).items() if about["enabled"]]
            if {"hparams", "images", "custom_scalars"} <= set(active):
                return active
        except OSError:
            pass  # it is not up yet
        clock.sleep(0.5)
    raise TimeoutError(f"TensorBoard at {url} showed no tab of a whole run within two minutes.")


def newest_pictures(url: str) -> dict[str, bytes]:
    """The last PNG of every picture, by the end of its tag."""

    def get(path: str, **query: object) -> bytes:
        asked = urllib.parse.urlencode(query)
        with urllib.request.urlopen(
            f"{url}/data/plugin/images/{path}?{asked}", timeout=20
        ) as reply:
            return reply.read()

    found = {}
    for run, tags in json.loads(get("tags")).items():
        for tag in tags:
            last = json.loads(get("images", run=run, tag=tag, sample=0))[-1]
            query = dict(urllib.parse.parse_qsl(last["query"]))
            found[tag.rpartition("/")[2]] = get("individualImage", **query)
    return found


def main(argv: list[str]) -> None:
    """The command above."""
    parser = argparse.ArgumentParser(description="Photograph the dashboard of a run.")
    parser.add_argument("workdir")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("tabs", nargs="*", metavar="TAB")
    parser.add_argument("--port", type=int, default=6166)
    given = parser.parse_args(argv)
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        parser.error("there is no chromium on the PATH (apt-get install chromium)")
    given.out.mkdir(parents=True, exist_ok=True)
    server = subprocess.Popen(
        board.command(board.named([given.workdir]), given.port),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{given.port}"
        found = tabs(url)
        for tab in given.tabs or found:
            path = given.out / f"{tab}.png"
            photograph(browser, link(url, tab), SIZE.get(tab, OTHERS), path)
            print(path)
        for name, png in newest_pictures(url).items():
            path = given.out / f"{name}.png"
            path.write_bytes(png)
            print(path)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
