"""`jaxgoodput board WORKDIR ...`: start TensorBoard on runs, with the settings that their curves need."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial

from absl import logging

from jaxgoodput._worker import Worker
from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.observe.dashboard.tags import pinned_link
from jaxgoodput.observe.dashboard.tensorboard import DIRECTORY
from jaxgoodput.observe.report import run_names
from jaxgoodput.workdir.places import View, is_bucket, workdir_of

FIRST_PORT, NUM_PORTS = 6006, 100
LOOK_S, LIMIT_S = 0.2, 60.0
REFRESH_S = 10.0
CURVES = rf"{DIRECTORY}/.*"


def named(
    workdirs: Sequence[str], copies: Sequence[pathlib.Path] | None = None
) -> dict[str, pathlib.Path]:
    """Return the folder with the curves of each run, by a name that no other run has.

    `copies` are the folders that the workdirs' files lie in, if they are not the workdirs themselves. Raises
    FileNotFoundError if a workdir has no curves.
    """
    # Keep symbolic links: users need them for paths with a comma or a colon.
    folders = [pathlib.Path(os.path.abspath(folder)) for folder in copies or workdirs]
    for given, folder in zip(workdirs, folders, strict=True):
        if not (folder / DIRECTORY).is_dir():
            raise FileNotFoundError(
                f"{given} holds no folder {DIRECTORY}: no run has written curves there. Pass the --workdir "
                "that the training was started with; Reporting(tensorboard=False) writes none."
            )
    names = run_names(workdirs)
    return {name: folder / DIRECTORY for name, folder in zip(names, folders, strict=True)}


def command(runs: dict[str, pathlib.Path], port: int) -> list[str]:
    """Return the command that starts TensorBoard. Raises ValueError if it cannot be given a path."""
    for name, path in runs.items():
        if "," in str(path) or ":" in name or "," in name:
            raise ValueError(
                f"{path} has a comma or a colon, where TensorBoard would split it. Make a symbolic link "
                "without one, and pass the link."
            )
    return [
        *(sys.executable, "-m", "tensorboard.main", "--host", "127.0.0.1", "--port", str(port)),
        *("--logdir_spec", ",".join(f"{name}:{path}" for name, path in runs.items())),
        # By default TensorBoard keeps ten random texts and pictures per tag.
        *("--samples_per_plugin", "text=1000,images=50", "--reload_interval", "5"),
    ]


def show(
    workdirs: Sequence[str],
    look: Callable[[str], bool],
    *,
    port: int | None = None,
    clock: Clock | None = None,
) -> int:
    """Serve until Ctrl-C, and return the exit code. `look` opens a URL and returns whether it could.

    Curves of a run in a bucket are copied to this machine, now and every `REFRESH_S`.
    """
    clock = clock or SystemClock()
    if port and not _is_free(port):  # another server would answer instead of TensorBoard
        print(
            f"jaxgoodput: port {port} is in use; choose another --port, or leave it out",
            file=sys.stderr,
        )
        return 1
    port = port or _free_port()
    with contextlib.ExitStack() as stack:
        views = [stack.enter_context(workdir_of(x).viewed(CURVES)) for x in workdirs]
        told = command(named(workdirs, [view.folder for view in views]), port)
        if any(map(is_bucket, workdirs)):
            stack.enter_context(Worker("refresh", partial(_refresh, views)))
        return _serve(told, port, look, clock)


def _refresh(views: Sequence[View], worker: Worker) -> None:
    """Bring curves up to date until the worker is stopped."""
    while not worker.wait_stopping(REFRESH_S):
        for view in views:
            try:
                view.refresh()
            except OSError as error:  # it may work again soon
                logging.warning("the curves of %s are not up to date: %s", view.name, error)


def _serve(told: list[str], port: int, look: Callable[[str], bool], clock: Clock) -> int:
    """Run TensorBoard by its command until Ctrl-C, and return the exit code."""
    url = f"http://127.0.0.1:{port}"
    child = subprocess.Popen(
        told,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if not _comes_up(child, url, clock):
            child.kill()
            print(f"jaxgoodput: TensorBoard did not start: {_last_words(child)}", file=sys.stderr)
            return 1
        print(f"TensorBoard is at {url}/ (Ctrl-C stops it)", flush=True)
        if not look(pinned_link(url)):
            print("no browser could be opened: open the address yourself", flush=True)
        print(f"jaxgoodput: TensorBoard ended by itself: {_last_words(child)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
        if child.stderr is not None:
            child.stderr.close()


def _comes_up(child: subprocess.Popen, url: str, clock: Clock) -> bool:
    """Wait until the server answers; False if it ends or the time is up."""
    until_s = clock.now() + LIMIT_S
    while child.poll() is None and clock.now() <= until_s:
        if _answers(url):
            return True
        clock.sleep(LOOK_S)
    return False


def _last_words(child: subprocess.Popen) -> str:
    """Wait for the end of a process and return the last line of its errors.

    Reading them all the time keeps the pipe from filling up, which would block the process.
    """
    return child.communicate()[1].strip().rpartition("\n")[2]


def _free_port() -> int:
    for port in range(FIRST_PORT, FIRST_PORT + NUM_PORTS):
        if _is_free(port):
            return port
    raise OSError(
        f"ports {FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1} are all in use; give --port."
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/data/environment", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False
