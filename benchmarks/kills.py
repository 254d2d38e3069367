"""Checks exactly-once: a job that is killed again and again applies every sample of an epoch once.

    python benchmarks/kills.py --kills 60
    python benchmarks/kills.py --kills 10 --data batches   # a loader in place of samples that have numbers

`jaxgoodput run` starts 1 to 3 processes of 1 to 4 devices together. SIGKILL ends the job, one process of
it, or the launcher, in a phase that is drawn: starting, compiling, stepping, while a checkpoint is
written, at a change of batch, at a move to another layout. Then it starts again in a world that is drawn
anew. Two witnesses are printed. The log: a hook writes what each finished step applied; a restart at
step s undoes the lines beyond s; what remains is counted. The device: an optimizer that adds one to the
entry of every sample that it is given, in state that is checkpointed like any other. The exit code is 1
where a witness disagrees.

`--data` names what the samples come from: `samples` by their number (the default); `iterator`, which has no
state, so that a restart skips what was used; `stateful`, an iterator whose state is saved; or `batches`, a
loader of batches of 7 samples, shuffled by pass, without a state. Of the last three the log counts places in
the stream, and the device still counts samples.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxgoodput.data.cursor import Cursor, take
from jaxgoodput.data.streams import stream
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.config import Config, Execution, Reporting, Saving, Tuning
from jaxgoodput.train.trainer import Trainer

EPOCHS = 3
SAMPLES_PER_KILL = 200
FETCH_S = 0.002  # per sample: so that steps take long enough to be killed in
WORLDS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1))  # processes, devices of each
BATCHES = (24, 36, 48)  # of any number of devices
# How long after the first sign of a phase the kill comes, at most.
PHASES = {
    "starting": 0.0,  # anywhere before the first step of a life
    "compiling": 1.0,
    "stepping": 1.5,
    "writing": 0.02,
    "batch": 0.3,
    "layout": 0.3,
}
PATIENCE_S = 30.0  # after the first step of a life, for its phase to come


class Slowly:
    """Samples that take a while to read, until nobody is left to kill."""

    def __init__(self, num_samples: int, hurry: pathlib.Path):
        self._rows = np.random.default_rng(0).normal(size=(num_samples, 16)).astype(np.float32)
        self._hurry = hurry

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        if not self._hurry.exists():
            time.sleep(FETCH_S)
        return {"id": np.int32(index), "x": self._rows[index]}


class Stateful:
    """An iterator over all samples of all passes, whose state is its place."""

    def __init__(self, samples: Slowly):
        self._samples, self._place = samples, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self._place == EPOCHS * len(self._samples):
            raise StopIteration
        self._place += 1
        return self._samples[(self._place - 1) % len(self._samples)]

    def get_state(self) -> int:
        return self._place

    def set_state(self, state: int) -> None:
        self._place = state


def data_of(kind: str, samples: Slowly) -> Any:
    """The data of a run, from samples that have numbers."""

    def shuffled(number: int):
        order = np.random.default_rng(number).permutation(len(samples))
        for first in range(0, len(order), 7):
            rows = [samples[i] for i in order[first : first + 7]]
            yield jax.tree.map(lambda *parts: np.stack(parts), *rows)

    if kind == "iterator":
        return stream(lambda number: (samples[i] for i in range(len(samples))), passes=EPOCHS)
    if kind == "stateful":
        return Stateful(samples)
    if kind == "batches":
        return stream(shuffled, batched=True, passes=EPOCHS)
    return samples


def add_times_seen() -> optax.GradientTransformation:
    """Adds to every entry how often its sample was in the batch: its share over the smallest."""

    def update(updates, state, params=None):
        def times(g):
            once = jnp.min(jnp.where(g < 0, -g, jnp.inf))
            return jnp.round(-g / once)

        return jax.tree.map(times, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class Counting(Trainer):
    """Learns to repeat its samples, and counts on the device how often each was applied."""

    def __init__(self, config: Config, num_samples: int, mark, data: str = "samples", **options):
        super().__init__(config, **options)
        self.num_samples, self.data = num_samples, data
        self.mark = mark

    def init(self, key):
        up, down = jax.random.split(key)
        return {
            "up": {"kernel": jax.random.normal(up, (16, 48)) / 4},
            "down": {"kernel": jax.random.normal(down, (48, 16)) / 8},
            "count": jnp.zeros(self.num_samples),
        }

    def loss(self, params, batch, key):
        self.mark("compiling")
        own = params["count"][batch["id"]]
        out = jax.nn.gelu(batch["x"] @ params["up"]["kernel"]) @ params["down"]["kernel"]
        error = jnp.mean((out - batch["x"]) ** 2, axis=-1)
        return error + jax.lax.stop_gradient(own) - own  # the last two: no value, slope -1

    def optimizer(self):
        parts: Any = {"model": optax.sgd(0.01, momentum=0.9), "count": add_times_seen()}
        return optax.multi_transform(parts, {"up": "model", "down": "model", "count": "count"})

    def dataset(self):
        samples = Slowly(self.num_samples, pathlib.Path(self.config.workdir) / "hurry")
        return data_of(self.data, samples)


class Log:
    """A line for every start and every finished step, out of the process at once; asks for changes."""

    def __init__(self, path: pathlib.Path, mark, draw: random.Random):
        self._file = open(path, "ab", buffering=0)
        self._mark, self._draw = mark, draw
        self.trainer: Any = None

    def _write(self, **line) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")

    def on_fit_start(self, event) -> None:
        self._write(start=event.step)

    def on_step_end(self, event) -> None:
        self._write(
            step=event.step,
            before=dataclasses.asdict(event.before),
            num_samples=event.num_samples,
            batch=event.config.global_batch_size,
            strategy=event.config.strategy,
        )
        num_replicas, chance = event.config.num_replicas, self._draw.random()
        if chance > 0.15:
            return
        others = {s.name for s in self.trainer.config.strategies} - {event.config.strategy}
        other = self._draw.choice(sorted(others)) if others and chance < 0.07 else None
        self._mark("batch" if other is None else "layout")
        micro = self._draw.choice(BATCHES) // num_replicas
        self.trainer.request_batch(micro, strategy=other)


def train(workdir: pathlib.Path, num_samples: int, args: argparse.Namespace) -> None:
    """One life of a training process."""
    marks = open(workdir / "marks", "ab", buffering=0)

    def mark(phase: str) -> None:
        if jax.process_index() == 0:
            marks.write(f"{phase}\n".encode())

    num_devices = jax.device_count()
    cut = (Strategy(data=num_devices), Strategy(fsdp=num_devices))
    config = Config(
        workdir=str(workdir),
        batch=BatchLimits(base=24, max=48),
        epochs=EPOCHS if args.data == "samples" else None,
        base_steps=None if args.data == "samples" else 1e6,  # a stream ends the run
        rule=rules.none,  # a gain would multiply the counts
        strategies=cut if num_devices > 1 else (),
        tuning=Tuning(accumulate=False, warm_up_steps=10**9),
        execution=Execution(compilation_cache=None if args.cold else ""),
        saving=Saving(every_s=args.checkpoint_every_s),
        reporting=Reporting(tensorboard=False, progress=False),
    )
    log = Log(workdir / "applied.jsonl", mark, random.Random(args.seed))
    trainer = log.trainer = Counting(config, num_samples, mark, args.data, hooks=[log])
    state = trainer.fit()
    if jax.process_index() == 0:
        counts = np.asarray(state.params["count"])
        (workdir / "device.json").write_text(json.dumps(counts.tolist()))


# -- witnesses ---------------------------------------------------------------------------------------


def replay(lines: Iterable[bytes]) -> tuple[list[dict], int, int]:
    """The steps that count, the number of starts, and the number of steps that were undone.

    A start at step s undoes the steps beyond s. A line that a kill has cut off is left out.
    """
    applied: list[dict] = []
    starts = undone = 0
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if "start" in line:
            starts += 1
            kept = [a for a in applied if a["step"] <= line["start"]]
            undone += len(applied) - len(kept)
            applied = kept
        else:
            applied.append(line)
    return applied, starts, undone


def times_applied(applied: Iterable[dict], num_samples: int) -> Counter:
    """(epoch, sample) -> how often the steps applied it."""
    seen: Counter = Counter()
    for line in applied:
        cursor, left = Cursor(**line["before"]), line["num_samples"]
        while left:
            count = min(left, num_samples - cursor.offset)  # of one epoch
            indices, after = take(cursor, num_samples, count)
            seen.update((cursor.epoch, int(index)) for index in indices)
            cursor, left = after, left - count
    return seen


def places_applied(applied: Iterable[dict], num_samples: int) -> Counter:
    """(pass, place) -> how often the steps applied what a stream gave there."""
    seen: Counter = Counter()
    for line in applied:
        first = line["before"]["offset"]
        seen.update(
            divmod(place, num_samples) for place in range(first, first + line["num_samples"])
        )
    return seen


def tally(seen: Counter, num_samples: int) -> dict[str, int]:
    """How many of the samples of all epochs were applied never, once, and more often."""
    wanted = [seen[epoch, i] for epoch in range(EPOCHS) for i in range(num_samples)]
    beyond = sum(n for (epoch, _), n in seen.items() if epoch >= EPOCHS)
    return {
        "never": sum(n == 0 for n in wanted),
        "once": sum(n == 1 for n in wanted),
        "more often": sum(n > 1 for n in wanted) + beyond,
    }


# -- kills -------------------------------------------------------------------------------------------


def processes_of(workdir: pathlib.Path) -> dict[int, bool]:
    """The processes of the job by number, and whether each is a worker; others' have another folder."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            command = path.read_bytes().split(b"\0")
            if str(workdir).encode() in command and int(path.parent.name) != os.getpid():
                found[int(path.parent.name)] = b"jaxgoodput.cli" not in command
    return found


def kill(workdir: pathlib.Path, launcher: subprocess.Popen, draw: random.Random, whom: str) -> str:
    """SIGKILL to "one" worker, to the "launcher", or to "all"; back once nothing of the job runs."""
    running = processes_of(workdir)
    workers = sorted(pid for pid, is_worker in running.items() if is_worker)
    whom = whom if workers else "launcher"
    chosen = {"all": sorted(running), "launcher": [launcher.pid]}.get(whom)
    for pid in chosen or [draw.choice(workers)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launcher.wait(120)
    deadline = time.monotonic() + 60
    while left := processes_of(workdir):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {sorted(left)} outlived their launcher by 60 s")
        time.sleep(0.05)
    return whom


@dataclasses.dataclass
class Signs:
    """What the files of a life say of its phase, beside what they held before."""

    workdir: pathlib.Path
    marks_before: int
    steps_before: int
    written_before: frozenset[str]

    @classmethod
    def of(cls, workdir: pathlib.Path) -> "Signs":
        signs = cls(workdir, 0, 0, frozenset())
        return cls(workdir, len(signs._marks()), signs.num_steps, frozenset(signs._written()))

    def _marks(self) -> list[str]:
        path = self.workdir / "marks"
        return path.read_text().split()[self.marks_before :] if path.exists() else []

    def _written(self) -> set[str]:
        """Checkpoints that are not complete, those of earlier lives as well."""
        folder = self.workdir / "checkpoints"
        names = os.listdir(folder) if folder.exists() else []
        return {name for name in names if "tmp" in name} - self.written_before

    @property
    def num_steps(self) -> int:
        log = self.workdir / "applied.jsonl"
        return log.read_bytes().count(b'"step"') - self.steps_before if log.exists() else 0

    def has_come(self, phase: str) -> bool:
        if phase == "writing":
            return bool(self._written())
        return self.num_steps > 0 if phase == "stepping" else phase in self._marks()


def live(
    workdir: pathlib.Path,
    launcher: subprocess.Popen,
    draw: random.Random,
    phase: str,
    usual_s: float,
) -> str | None:
    """Wait for a phase and kill in it: the phase that was met; None where the life ended before."""
    signs, began, first_s = Signs.of(workdir), time.monotonic(), None
    if phase == "starting":
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(draw.uniform(0, usual_s))
    while phase != "starting" and not signs.has_come(phase):
        if launcher.poll() is not None:
            return None
        now = time.monotonic()
        first_s = now if first_s is None and signs.num_steps else first_s
        if now - (first_s or now) > PATIENCE_S:  # such as a move on one device
            phase = "stepping"
        time.sleep(0.005)
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(draw.uniform(0, PHASES[phase]))
    if launcher.poll() is not None:
        return None
    if phase == "starting" and signs.num_steps:
        phase = "stepping"
    whom = kill(workdir, launcher, draw, draw.choice(["all", "launcher", "one"]))
    return f"{phase}, {whom}, {time.monotonic() - began:.0f} s"


def kill_until_done(workdir: pathlib.Path, args: argparse.Namespace) -> list[tuple[str, ...]]:
    """Start, kill, start again; what was killed, and the world that it was killed in."""
    draw = random.Random(args.seed)
    killed: list[tuple[str, ...]] = []
    phases: list[str] = []  # still to come: as often each
    while True:
        num_processes, num_devices = draw.choice(WORLDS)
        started = [sys.executable, "-m", "jaxgoodput.cli", "run"]
        started += [
            "--nproc-per-node",
            str(num_processes),
            "--devices-per-process",
            str(num_devices),
        ]
        child = ["--child", str(workdir), "--kills", str(args.kills), "--seed", str(draw.random())]
        child += ["--checkpoint-every-s", str(args.checkpoint_every_s), "--data", args.data]
        child += ["--cold"] if draw.random() < 1 / 3 else []
        if len(killed) == args.kills:
            (workdir / "hurry").touch()
        with open(workdir / "output.txt", "ab") as output:
            launcher = subprocess.Popen(
                [*started, "--", sys.executable, __file__, *child],
                stdout=output,
                stderr=output,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
        try:
            if len(killed) < args.kills:
                phases = phases or draw.sample(list(PHASES), len(PHASES))
                found = live(workdir, launcher, draw, phases.pop(), args.startup_s)
                if found is not None:
                    killed.append((f"{num_processes} x {num_devices}", *found.split(", ")))
                    print(f"{len(killed):>3} {'; '.join(killed[-1])}", file=sys.stderr, flush=True)
                    continue
            code = launcher.wait(1200)
        finally:
            if launcher.poll() is None:
                kill(workdir, launcher, draw, "all")
        if code != 0:
            tail = (workdir / "output.txt").read_text()[-6000:]
            raise RuntimeError(f"a life that nobody killed ended with code {code}:\n{tail}")
        return killed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=float, default=0)
    parser.add_argument("--checkpoint-every-s", type=float, default=0.3)
    parser.add_argument(
        "--startup-s", type=float, default=8.0, help="until about when a life counts as starting"
    )
    kinds = ("samples", "iterator", "stateful", "batches")
    parser.add_argument("--data", choices=kinds, default="samples")
    parser.add_argument("--child", type=pathlib.Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    num_samples = SAMPLES_PER_KILL * args.kills
    if args.child is not None:
        train(args.child, num_samples, args)
        return 0
    with tempfile.TemporaryDirectory(prefix="jaxgoodput-kills-") as folder:
        workdir = pathlib.Path(folder)
        began = time.monotonic()
        killed = kill_until_done(workdir, args)
        lines = (workdir / "applied.jsonl").read_bytes().split(b"\n")
        applied, starts, undone = replay(lines)
        times = times_applied if args.data == "samples" else places_applied
        log = tally(times(applied, num_samples), num_samples)
        counts = np.asarray(json.loads((workdir / "device.json").read_text()))

    def told(values: Iterable) -> str:
        return " ".join(f"{name}:{n}" for name, n in sorted(Counter(values).items()))

    print(
        f"{EPOCHS} epochs of {num_samples} samples ({args.data}), checkpoints every "
        f"{args.checkpoint_every_s} s"
    )
    worlds, phases, whom = [[row[i].replace(" ", "") for row in killed] for i in range(3)]
    moves = sum(a["strategy"] != b["strategy"] for a, b in zip(applied, applied[1:], strict=False))
    rows = [
        ("kills (SIGKILL)", len(killed)),
        ("... while", told(phases)),
        ("... of which processes", told(whom)),
        ("... in processes x devices of each", told(worlds)),
        ("starts that reached training", starts),
        ("steps that count", len(applied)),
        ("steps lost with a kill", undone),
        ("batch sizes used", told(a["batch"] for a in applied)),
        ("layouts used", told(a["strategy"] or "single" for a in applied)),
        ("changes of layout", moves),
        *((f"log: samples applied {name}", n) for name, n in log.items()),
        (f"device: samples with count {EPOCHS}", int((counts == EPOCHS).sum())),
        ("device: samples with another count", int((counts != EPOCHS).sum())),
        ("wall seconds", round(time.monotonic() - began)),
    ]
    for name, value in rows:
        print(f"{name:<36} {value}")
    exact = log == {"never": 0, "once": EPOCHS * num_samples, "more often": 0}
    return 0 if exact and (counts == EPOCHS).all() and len(killed) == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
