"""Checks that a run that is told to stop saves its last step in time and exits with the right code.

    python benchmarks/stops.py              # all, about 15 minutes on 2 cores
    python benchmarks/stops.py --only disk

Every line is a process (or a job of two) that gets a signal at a moment: while it starts, compiles, steps,
writes a checkpoint, evaluates, changes the batch; or while its disk is full or read-only, its data or a peer
hangs, its hooks are far behind. A line holds where the process ends within the grace period and five seconds,
with 143 and a checkpoint of the last step done (or before any step), or with 75 and the step that is safe
named. A second SIGINT may also end with 130, the newest checkpoint left as it is. The exit code is 1 where a
line does not hold. The full and the read-only disk need root, to mount 8 MB of memory.
"""

import argparse
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.train.config import Config, Evaluation, Execution, Reporting, Saving, Tuning
from jaxgoodput.train.loop import Loop
from jaxgoodput.train.trainer import Trainer

GRACE_S = 15.0
SLACK_S = 5.0
START_S = 120.0  # until the moment of a line has come
ROWS = 16
LAYERS = 200  # of a loss that takes seconds to compile


@dataclass(frozen=True)
class Line:
    """One stop: a moment, and the signals that come then."""

    moment: str
    signals: tuple[signal.Signals, ...]
    processes: int = 1

    @property
    def name(self) -> str:
        names = " ".join(number.name.removeprefix("SIG") for number in self.signals)
        return f"{self.moment}, {names}"


TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
KINDS = ((TERM,), (INT,), (HUP,), (INT, INT), (TERM, TERM))
MOMENTS = ("start-up", "compilation", "stepping", "saving", "evaluating", "batch change")
BEHIND = "compiling behind"
TROUBLES = (
    "full disk",
    "read-only disk",
    "hanging data",
    "hooks far behind",
    "hanging evaluation",
    BEHIND,
)
LINES = (
    *(Line(moment, kind) for moment in MOMENTS for kind in KINDS),
    *(Line(trouble, kind) for trouble in TROUBLES for kind in ((TERM,), (INT,))),
    Line("full disk", (TERM,), processes=2),
    Line("hanging peer", (TERM,), processes=2),
    Line("hanging writer", (TERM,), processes=2),
    Line("compilation", (TERM,), processes=2),
    Line("stepping", (HUP,), processes=2),
)


# -- the process that is told to stop ----------------------------------------------------------------


class Rows:
    """Samples that take a while to read, and, once told so, forever."""

    def __init__(self, task: "Stopped", num: int, read_s: float):
        self.task, self.num, self.read_s = task, num, read_s

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        time.sleep(self.read_s)
        if self.task.hangs():
            time.sleep(1e6)
        return {"x": np.full(8, index % 7, np.float32)}


class Watched(Loop):
    """Writes down every step that is done, when it is, and makes a mark when a batch changes."""

    def _on_result(self, result):
        super()._on_result(result)
        task: Stopped = self.task  # pyright: ignore[reportAssignmentType]
        task.note("steps", str(result.ticket.step))
        if result.ticket.step == 10 and task.moment in ("stepping", *TROUBLES[:2], TROUBLES[3]):
            task.mark()


class Asking:
    """Asks for what a moment needs, and is slow where hooks are to be."""

    def __init__(self):
        self.task: Stopped | None = None

    def on_step_end(self, event):
        task = self.task
        assert task is not None
        if task.moment == "hooks far behind":
            time.sleep(0.2)
        if event.step == 5 and task.moment == "saving":
            task.request_save()
            task.mark()
        if event.step == 5 and task.moment == "batch change":
            task.request_batch(2 * ROWS)
        if event.step == 5 and task.moment == BEHIND:
            task.compile_sizes()


class Stopped(Trainer):
    """Trains for good, and says when its moment has come."""

    def __init__(self, config: Config, moment: str, **options):
        asking = Asking()
        super().__init__(config, hooks=[asking], loop=Watched, **options)
        asking.task = self
        self.moment = moment
        self.began_s = time.monotonic()

    def note(self, name: str, text: str) -> None:
        path = pathlib.Path(self.config.workdir).parent / f"{name}.{jax.process_index()}"
        with path.open("a") as file:
            file.write(text + "\n")

    def mark(self) -> None:
        self.note("moment", self.moment)

    def hangs(self) -> bool:
        """Whether a reader should stand still now."""
        hanging = {"hanging data": 0, "hanging peer": 1, "hanging writer": 0}
        if hanging.get(self.moment) != jax.process_index() or self._loop is None:
            return False
        if self._loop.now.step < 10:
            return False
        self.mark()
        return True

    def init(self, key):
        ballast = 10**5 if "disk" in self.moment else 10**7
        return {
            "w": jnp.zeros(8),
            "ballast": jnp.zeros(ballast if self.moment != "stepping" else 8),
        }

    def loss(self, params, batch, key):
        x, slow = batch["x"], {"compilation": ROWS, "batch change": 2 * ROWS, BEHIND: 2 * ROWS}
        if len(x) * jax.process_count() >= slow.get(self.moment, 10**9):
            self.mark()
            for _ in range(LAYERS):
                x = jnp.sin(x @ jnp.outer(params["w"], jnp.cos(params["w"]))) + batch["x"]
        return jnp.sum((x - params["w"]) ** 2, -1) + 0 * params["ballast"][0]

    def optimizer(self):
        return optax.sgd(1e-3)

    def dataset(self):
        if self.moment == "start-up":
            self.mark()
            time.sleep(3.0)
        return Rows(self, 10**6, 0.001)

    def eval_dataset(self):
        return Rows(self, 4000, 0.01)

    def metrics(self, params, batch):
        return {"x": batch["x"][:, 0]}

    def summarize(self, outputs):
        return {}


class Evaluating(Stopped):
    """Marks the beginning of an evaluation, which takes longer than the grace period."""

    def eval_dataset(self):
        task = self

        class Slow(Rows):
            def __getitem__(self, index):
                if task._loop is not None and task._loop.now.step >= 3:
                    task.mark()
                    if task.moment == "hanging evaluation":
                        time.sleep(1e6)
                return super().__getitem__(index)

        return Slow(self, 4000, 0.01)


def train(folder: pathlib.Path, moment: str) -> None:
    """The process of one line."""
    jax.config.update("jax_platforms", "cpu")
    evaluates = moment in ("evaluating", "hanging evaluation")
    config = Config(
        workdir=str(folder / "run"),
        batch=BatchLimits(base=ROWS, max=4 * ROWS),
        base_steps=1e9,
        policy="goodput" if moment == BEHIND else "fixed",
        tuning=Tuning(accumulate=False, warm_up_steps=10**9),
        execution=Execution(background_compile=moment == BEHIND, compilation_cache=None),
        evaluation=Evaluation(every_base_steps=3.0 if evaluates else None),
        saving=Saving(every_s=1e9, grace_s=GRACE_S),
        reporting=Reporting(tensorboard=False, progress=False),
    )
    (Evaluating if evaluates else Stopped)(config, moment).fit()


# -- who tells it to ---------------------------------------------------------------------------------


@dataclass
class End:
    """How a line ended."""

    code: int
    seconds: float  # from the first signal on
    done: int  # the last step done
    saved: int  # the newest checkpoint; -1: none
    output: str

    def holds(self, line: Line) -> bool:
        if self.seconds > GRACE_S + SLACK_S:
            return False
        if self.code == 75:
            return "safe" in self.output
        if line.signals == (INT, INT) and self.code in (-INT, 130, 137):
            return True
        return self.code in (143, -TERM) and max(self.saved, 0) >= self.done


def newest(folder: pathlib.Path) -> int:
    steps = [p.name for p in (folder / "run" / "checkpoints").glob("*")]
    return max((int(name) for name in steps if name.isdigit()), default=-1)


def last(path: pathlib.Path) -> int:
    """The last step that was written down; a line that was cut off is left out."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return int(lines[-1]) if lines else 0


def play(line: Line, folder: pathlib.Path) -> End:
    """Start the process of a line, send it its signals, and see how it ends."""
    command = [sys.executable, __file__, "--child", str(folder), "--moment", line.moment]
    if line.processes > 1:
        run = [sys.executable, "-m", "jaxgoodput.cli", "run", "--grace-s", str(GRACE_S)]
        command = [*run, "--nproc-per-node", str(line.processes), "--", "python", *command[1:]]
    with open(folder / "output.txt", "w+b") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            give_up = time.monotonic() + START_S
            while not list(folder.glob("moment.*")):
                if child.poll() is not None or time.monotonic() > give_up:
                    raise RuntimeError(f"{line.name}:\n{(folder / 'output.txt').read_text()}")
                time.sleep(0.01)
            if line.moment == "full disk":
                with open(folder / "run" / "filler", "wb") as file:
                    free = os.statvfs(folder / "run")
                    file.write(bytes(free.f_bavail * free.f_frsize - 4096))
            if line.moment == "read-only disk":
                saved = str(folder / "run" / "checkpoints")
                subprocess.run(["mount", "--bind", saved, saved], check=True)
                subprocess.run(["mount", "-o", "remount,bind,ro", saved], check=True)
            # In the middle of it: of a compilation in C, of a write, of steps waiting in a collective.
            time.sleep({"saving": 0.05, "hooks far behind": 3.0}.get(line.moment, 1.0))
            began = time.monotonic()
            for number in line.signals:
                child.send_signal(number)
                time.sleep(0.3)
            code = child.wait(GRACE_S + 60)
            seconds = time.monotonic() - began
        finally:
            child.kill()
            child.wait()
    # A process of a job is done with a step when all are.
    done = min((last(path) for path in folder.glob("steps.*")), default=0)
    text = (folder / "output.txt").read_text(errors="replace")
    return End(code, seconds, done, newest(folder), text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="lines whose name holds this")
    parser.add_argument("--child", type=pathlib.Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--moment", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        train(args.child, args.moment)
        return 0
    lines = [line for line in LINES if args.only in line.name]
    print(
        f"{'moment, signals':<32} {'code':>5} {'s':>6} {'done':>6} {'saved':>6}  holds", flush=True
    )
    broken = 0
    for line in lines:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "run").mkdir()
            if "disk" in line.moment:
                mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder / "run")]
                subprocess.run(mount, check=True)
            try:
                end = play(line, folder)
            finally:
                if "disk" in line.moment:
                    subprocess.run(["umount", "--recursive", str(folder / "run")], check=True)
        holds = end.holds(line)
        broken += not holds
        shown = dataclasses.replace(line, moment=f"{line.moment} x{line.processes}").name
        print(
            f"{shown:<32} {end.code:>5} {end.seconds:>6.1f} {end.done:>6} {end.saved:>6}  "
            f"{'yes' if holds else 'NO'}",
            flush=True,
        )
        if not holds:
            print(end.output[-3000:], flush=True)
    print(f"{len(lines) - broken} of {len(lines)} hold")
    return 1 if broken else 0


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
