"""The script whose ends `benchmarks/ends.py` looks at: it trains, and does at a moment what it is told.

    python ends_script.py FOLDER MOMENT

`FOLDER/moment.NAME` appears when the moment has come, `FOLDER/steps.NAME` holds the steps that are done, and
`FOLDER/pid.NAME` the number of the process; NAME is its host, or else its rank. With the moment "restart" it
writes the step with which it begins to `FOLDER/began`, and ends.

    python ends_script.py --copies

reads lines `FOLDER MOMENT` from its input. For each it forks, and the copy goes on as the script: that saves
it the imports. It prints the copy's number, and then how the copy ended (`os.waitpid`).
"""

import contextlib
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ends import GRACE_S

from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.train.config import Config, Evaluation, Execution, Reporting, Saving, Tuning
from jaxgoodput.train.loop import Loop
from jaxgoodput.train.trainer import Trainer

HANG_S = 6.0
ROWS = 16
LAYERS = 150  # of a loss that takes seconds to compile
AT = 10  # the step at which most moments come
LAST = 40  # the last step, if there is one
FULL_BYTES = 2**16  # the largest file on a full disk: logs are smaller, checkpoints larger

FINITE = ("complete", "complete on a full disk", "after fit", "exit 7 after fit")
EVALUATING = ("evaluating", "hanging evaluation")
SAVING = (
    "hanging loss",
    "read-only disk",
    "no folder",
)  # and full disks: they save every few steps


def name() -> str:
    return os.environ.get("JAXGOODPUT_HOST") or os.environ.get("JAXGOODPUT_PROCESS_ID", "0")


class Rows:
    """Samples, each of which takes a while to read."""

    def __init__(self, task: "Ended", num: int, read_s: float, *, evaluates: bool = False):
        self.task, self.num, self.read_s, self.evaluates = task, num, read_s, evaluates

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        time.sleep(self.read_s)
        task = self.task
        if task.has_begun and task.step >= AT and not self.evaluates:
            if task.moment == "hanging data":
                task.mark()
                time.sleep(1e6)
            if task.moment == "data fail":
                raise ValueError("a sample that cannot be read")
        if self.evaluates and task.step >= AT:
            task.mark()
            if task.moment == "hanging evaluation":
                time.sleep(1e6)
        return {"x": np.full(8, index % 7, np.float32)}


class Watched(Loop):
    """Writes down every step that is done, when it is."""

    def _on_result(self, result):
        super()._on_result(result)
        task: Ended = self.task  # pyright: ignore[reportAssignmentType]
        task.step, task.has_begun = result.ticket.step, True
        task.note("steps", str(task.step))
        if task.step >= AT and not task.has_acted:
            task.has_acted = True
            task.act()


class Asks:
    """What hooks are told, and do."""

    def __init__(self, moment: str):
        self.moment = moment
        self.task: Ended | None = None

    def on_fit_start(self, event):
        if self.moment == "restart":
            assert self.task is not None
            (self.task.folder / "began").write_text(str(event.step))
            self.task.finish()

    def on_step_end(self, event):
        task = self.task
        assert task is not None
        if event.step != AT:
            return
        match self.moment:
            case "hanging hook":
                task.mark()
                time.sleep(1e6)
            case "hook fails":
                raise ValueError("a hook that fails")
            case "exit 0 in a hook":
                sys.exit(0)
            case "saving":
                task.request_save()
                task.mark()


class Ended(Trainer):
    """Trains until its moment has come."""

    def __init__(self, config: Config, folder: pathlib.Path, moment: str):
        asks = Asks(moment)
        super().__init__(config, hooks=[asks], loop=Watched)
        asks.task = self
        self.folder, self.moment = folder, moment
        self.step, self.has_begun, self.has_acted = 0, False, False

    def note(self, kind: str, text: str) -> None:
        with (self.folder / f"{kind}.{name()}").open("a") as file:
            file.write(text + "\n")

    def mark(self) -> None:
        self.note("moment", self.moment)

    def act(self) -> None:
        """Do what is to happen at step `AT`, on the thread that hears of steps."""
        checkpoints = self.folder / "run" / "checkpoints"
        if self.moment.endswith("full disk"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, FULL_BYTES))
        if self.moment == "read-only disk":
            checkpoints.mkdir(exist_ok=True)
            subprocess.run(["mount", "--bind", checkpoints, checkpoints], check=True)
            remount = ["mount", "-o", "remount,bind,ro", checkpoints]
            while subprocess.run(remount, capture_output=True).returncode:
                time.sleep(0.05)  # the disk is busy with a save
        if self.moment == "no folder":
            made = self.folder / "file"
            made.write_text("a file in place of the folder")
            while not checkpoints.is_file():  # a save may make the folder anew at any time
                shutil.rmtree(checkpoints, ignore_errors=True)
                with contextlib.suppress(IsADirectoryError):
                    os.replace(made, checkpoints)
        if self.moment == "no process left" and name() == "1":
            os._exit(3)
        if self.moment == "one exits 0" and name() == "1":
            os._exit(0)
        if self.moment == "os._exit(0)":
            os._exit(0)
        if self.moment not in (*EVALUATING, "hanging data", "hanging hook", "saving", "after fit"):
            self.mark()

    def init(self, key):
        return {
            "w": jnp.zeros(8),
            "ballast": jax.random.normal(key, (10**5,)),
        }  # not to be compressed

    def loss(self, params, batch, key):
        x = batch["x"]
        if self.moment == "compilation":
            self.mark()
            for _ in range(LAYERS):
                x = jnp.sin(x @ jnp.outer(params["w"], jnp.cos(params["w"]))) + batch["x"]
        loss = jnp.sum((x - params["w"]) ** 2, -1) + 0 * params["ballast"][0]
        if self.moment == "hanging loss":
            loss += jax.pure_callback(self.hang, jax.ShapeDtypeStruct((), jnp.float32))
        return loss

    def hang(self):
        """Stand for a device that computes nothing more."""
        while self.step >= AT:
            time.sleep(1.0)
        return np.float32(0)

    def optimizer(self):
        return optax.sgd(1e-3)

    def dataset(self):
        if self.moment == "start":
            self.mark()
            time.sleep(3.0)
        return Rows(self, 10**6, 0.001)

    def eval_dataset(self):
        return Rows(self, 2000, 0.01, evaluates=True) if self.moment in EVALUATING else None

    def metrics(self, params, batch):
        return {"x": batch["x"][:, 0]}

    def summarize(self, outputs):
        return {}


def config(folder: pathlib.Path, moment: str) -> Config:
    every = float(AT) if moment in EVALUATING else None
    saves = 6.0 if moment in SAVING or moment.endswith("full disk") else None
    hang_s = HANG_S if moment.startswith("hanging") else 600.0
    return Config(
        workdir=str(folder / "run"),
        batch=BatchLimits(base=ROWS, max=ROWS),
        base_steps=LAST if moment in FINITE else 1e9,
        policy="fixed",
        tuning=Tuning(accumulate=False),
        execution=Execution(compilation_cache=None),
        evaluation=Evaluation(every_base_steps=every),
        saving=Saving(every_s=1e9, every_base_steps=saves, grace_s=GRACE_S, hang_after_s=hang_s),
        reporting=Reporting(tensorboard=False, progress=False),
    )


def serve_copies() -> list[str]:
    """Fork for each line of the input. Returns the words of a line in the copy that is to obey them."""
    for line in sys.stdin:
        words = line.rstrip("\n").split("\t")
        pid = os.fork()
        if pid == 0:
            os.setsid()
            with open(os.path.join(words[0], "output.txt"), "ab") as output:
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            return words
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)
    sys.exit()


def main() -> None:
    words = serve_copies() if sys.argv[1] == "--copies" else sys.argv[1:]
    folder, moment = pathlib.Path(words[0]), words[1]
    jax.config.update("jax_platforms", "cpu")
    if moment == "compilation":
        jax.config.update("jax_compilation_cache_dir", None)
    if moment == "exit 0 before fit":
        sys.exit(0)
    task = Ended(config(folder, moment), folder, moment)
    task.note("pid", str(os.getpid()))
    if moment == "beside the main thread":
        thread = threading.Thread(target=task.fit)
        thread.start()
        thread.join()
        return
    try:
        task.fit()
    finally:
        # What a script may do at its end: signals come here, too.
        if moment.startswith("leaving") or moment == "after fit":
            task.note("leaving" if moment.startswith("leaving") else "moment", moment)
            with contextlib.suppress(TimeoutError):
                time.sleep(3.0)
    if moment == "exit 7 after fit":
        sys.exit(7)


if __name__ == "__main__":
    main()
