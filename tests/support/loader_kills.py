"""Trains on one loader in processes that are killed again and again, and says what became of its samples.

    python loader_kills.py --child '{"name": "NumPy memmap", ...}'    # one life: what `killed` starts

SIGKILL ends each life at a moment that is drawn, mostly after it has saved. The next one has another number
of devices. Two files tell of it: a log with a line for every step and every warning, and, at the end, how
often each sample was applied. An optimizer counts that on the device, in state that is saved like any other.
So the steps that a kill undoes do not count, and those that are trained again do.
"""

import contextlib
import importlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

# Nothing more is imported here: the worker processes of loaders import this module, too.

NUM_SAMPLES = 1440
DEVICES = (1, 2, 3)
BATCHES = (24, 36)  # of any number of devices; none is a multiple of a loader's 7
SAVE_EVERY_S = 0.3
STEP_S = 0.1  # so that a life can be killed between two steps
KILL_WITHIN_S = 1.0  # after the life has saved, or has begun to train
LIFE_S = 600.0  # a life that takes longer has hung


@dataclass(frozen=True)
class Survived:
    """What became of the samples of a loader, and what its runs said."""

    kills: int
    """Number of processes that were killed."""
    devices: tuple[int, ...]
    """Number of devices of each process."""
    undone: int
    """Number of steps that were lost with a process and trained again."""
    lost: int | None
    """How many times too few samples were applied, in all; None if the run was refused."""
    twice: int | None
    """How many times too many samples were applied, in all; None if the run was refused."""
    said: tuple[str, ...]
    """What each process said before its first step, without repetitions."""
    refused: str | None = None
    """The error with which a process ended before its first step."""


# -- one life ------------------------------------------------------------------------------------------


class _Log:
    """A hook that writes down every step, and asks for batches of other sizes, and slows the run down."""

    def __init__(self, path: pathlib.Path, seed: float):
        self._file = open(path, "ab", buffering=0)
        self._draw = random.Random(seed)
        self.trainer: Any = None

    def write(self, **line) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")

    def on_fit_start(self, event) -> None:
        self.write(start=event.step)

    def on_step_end(self, event) -> None:
        self.write(step=event.step)
        if self._draw.random() < 0.2:
            self.trainer.request_batch(self._draw.choice(BATCHES) // event.config.num_replicas)
        if not (pathlib.Path(self.trainer.folder) / "hurry").exists():
            time.sleep(STEP_S)


def _listen(log: _Log) -> None:
    """Write every warning to the log."""
    import logging

    from absl import logging as absl_logging

    class Handler(logging.Handler):
        def emit(self, record):
            if record.levelno >= logging.WARNING:
                log.write(said=record.getMessage())

    absl_logging.get_absl_logger().addHandler(Handler())


def _life(*, name: str, folder: str, devices: int, seed: float) -> None:
    """Train until the end, or until this process is ended by a signal."""
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
    import jax

    # Compiled as in the tests, so that few programs are compiled again. It sets another number of devices.
    importlib.import_module("conftest")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_platforms", "cpu")
    import numpy as np
    from loaders import LOADERS, Counted
    from problems import counting_config

    from jaxgoodput.goodput.search import BatchLimits

    loader, home = LOADERS[name], pathlib.Path(folder)
    settings = counting_config(
        home / "run",
        batch=BatchLimits(base=min(BATCHES), max=max(BATCHES), micro=(1, max(BATCHES))),
        saving__every_s=SAVE_EVERY_S,
        **({"epochs": loader.times} if loader.has_epochs else {"base_steps": 1e6}),
    )
    log = _Log(home / "log", seed)
    log.write(devices=devices)
    _listen(log)
    log.trainer = Counted(settings, loader, home, num_samples=NUM_SAMPLES, hooks=[log])
    try:
        state = log.trainer.fit()
    except Exception as error:
        log.write(error=f"{type(error).__name__}: {error}")
        raise
    (home / "count").write_text(json.dumps(np.asarray(state.params["count"]).tolist()))


# -- all lives -----------------------------------------------------------------------------------------


def _lines(home: pathlib.Path) -> list[dict]:
    """The lines of the log; one that a kill has cut off is left out."""
    found = []
    for text in (home / "log").read_bytes().split(b"\n") if (home / "log").exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(text))
    return found


def _saved(home: pathlib.Path) -> set[str]:
    """The complete checkpoints."""
    folder = home / "run" / "checkpoints"
    return {name for name in os.listdir(folder) if name.isdigit()} if folder.exists() else set()


def _runs(process: subprocess.Popen) -> bool:
    """Whether it runs. It is not reaped, so that its number remains its own, and that of its group."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is None


def _wait(process: subprocess.Popen, until, limit_s: float) -> bool:
    """Wait for a sign, or for the end of the process; return whether one of them came in time."""
    deadline = time.monotonic() + limit_s
    while _runs(process) and not until():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _lived(name: str, home: pathlib.Path, devices: int, draw: random.Random, sign: str) -> int:
    """Run one life; return its exit code. It is killed after a `sign`: "saved", "began" or "never"."""
    saved, began = _saved(home), len(_lines(home))
    signs = {
        "saved": lambda: bool(_saved(home) - saved),
        "began": lambda: any("start" in line for line in _lines(home)[began:]),
        "never": lambda: False,
    }
    child = json.dumps(
        {"name": name, "folder": str(home), "devices": devices, "seed": draw.random()}
    )
    with open(home / "output", "ab") as output:
        process = subprocess.Popen(
            [sys.executable, __file__, "--child", child],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        if not _wait(process, signs[sign], LIFE_S):
            raise RuntimeError(f"a process has not {sign} within {LIFE_S:.0f} s (never: ended)")
        _wait(process, signs["never"], draw.uniform(0, KILL_WITHIN_S))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the worker processes of its loader
        process.wait()
    return process.returncode


def killed(name: str, home: pathlib.Path, *, times: int, kills: int, seed: int = 0) -> Survived:
    """Train on the loader `name`, with its files in `home`; kill its processes, and resume the run.

    Raises:
      RuntimeError: a process that was not killed failed while it trained, or hung.
    """
    draw, devices, refused = random.Random(f"{seed} {name}"), [0], None
    while not (home / "count").exists() and refused is None:
        num_killed = len(devices) - 1
        sign = "never" if num_killed == kills else "saved"
        if 0 < num_killed < kills and draw.random() < 1 / 3:
            sign = "began"  # so that two lives resume from one checkpoint, or one before its first save
        if sign == "never":
            (home / "hurry").touch()
        chosen = draw.choice([n for n in DEVICES if n != devices[-1]])
        began = len(_lines(home))
        code = _lived(name, home, chosen, draw, sign)
        devices.append(chosen)
        new = _lines(home)[began:]
        if code not in (0, -signal.SIGKILL):
            refused = next((line["error"] for line in new if "error" in line), None)
            if refused is None or any("step" in line for line in new):
                tail = (home / "output").read_text(errors="replace")[-6000:]
                raise RuntimeError(f"a process that was not killed ended with code {code}:\n{tail}")
    return _survived(home, times, tuple(devices[1:]), refused)


def _survived(home: pathlib.Path, times: int, devices: tuple[int, ...], refused) -> Survived:
    said, undone, newest, is_before = [], 0, 0, True
    for line in _lines(home):
        is_before = (is_before or "devices" in line) and "step" not in line  # of its life
        if "start" in line:
            undone += max(newest - line["start"], 0)
            newest = line["start"]
        elif "step" in line:
            newest = line["step"]
        elif is_before and "said" in line and line["said"] not in said:
            said.append(line["said"])
    lost = twice = None
    if refused is None:
        count = json.loads((home / "count").read_text())
        lost = int(sum(max(times - n, 0) for n in count))
        twice = int(sum(max(n - times, 0) for n in count))
    return Survived(len(devices) - 1, devices, undone, lost, twice, tuple(said), refused)


if __name__ == "__main__":
    _life(**json.loads(sys.argv[2]))
