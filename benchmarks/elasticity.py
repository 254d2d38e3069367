"""What it costs when processes of a job come, go, die and stand still: pauses by part, and faults at random.

    python benchmarks/elasticity.py                      # pauses, about 5 minutes
    python benchmarks/elasticity.py --faults 50          # one long run under faults, ten minutes
    python benchmarks/elasticity.py --slow               # one host four times slower than the other
    python benchmarks/elasticity.py --overhead           # what it costs a step to be ready for it

Real processes under `jaxgoodput run --nnodes`, each host an agent of its own on this machine. A pause is the
time between the last step of one set of processes and the first of the next, less a median step; after a
kill it is the time from the kill. "parts" are those of the process that is rank 0 afterwards: leaving
JAX's world, waiting for the others, fetching the state, connecting, and the rest, which is getting
ready (tracing, compiled programs from the disk) and the first step. Faults are drawn: a worker killed or
stopped, a host killed and another one started, two at once among them; every sample is counted on the
devices, and the exit code is 1 where one was not applied once an epoch, or a process is left.

The slow host's micro-batches take four times as long (both hosts wait, 10 and 40 ms each, where they read
them); beside the step time stands what an ideal split would take. Overhead is the median step of an elastic
job of two hosts over that of two processes with the fused step, the compiler's own reduction inside, in
turns.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import kills
import models
import numpy as np

import jaxgoodput as jg
from jaxgoodput.data.sources import ArraySource

SECRET = "of a benchmark"
WAIT_S = 180.0
SAMPLES = 60_000
STEPS = 60
PARTS, PART_S = 32, 0.01


class Waiting(ArraySource):
    """Rows that take as long to read as a host takes to compute."""

    def batch(self, indices: Any) -> Any:
        is_slow = os.environ.get("JAXGOODPUT_HOST") == "slow"
        time.sleep(len(indices) * PART_S * (4 if is_slow else 1))
        return super().batch(indices)


class Paced(kills.Counting):
    """A model that computes hardly anything."""

    def dataset(self) -> Any:
        x = np.random.default_rng(0).normal(size=(self.num_samples, 16)).astype(np.float32)
        return Waiting({"id": np.arange(self.num_samples, dtype=np.int32), "x": x})


class Lines(jg.Hook):
    """Writes what it hears of the run, a line at a time, under this process's number."""

    def __init__(self, folder: pathlib.Path):
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self.write(kind="began", member=os.environ.get("JAXGOODPUT_MEMBER", ""))

    def write(self, **line: Any) -> None:
        self._file.write(json.dumps({"at": time.time(), **line}) + "\n")

    def on_regrouped(self, event: Any, /) -> None:
        self.write(
            kind="regrouped", step=event.step, count=event.num_processes, parts=dict(event.seconds)
        )

    def on_step_end(self, event: Any, /) -> None:
        self.write(kind="step", step=event.step)


def worker(folder: pathlib.Path, name: str) -> None:
    """One training process."""
    lines = Lines(folder)
    common: dict[str, Any] = {
        "workdir": str(folder / "run"),
        "policy": "fixed",
        "reporting": jg.Reporting(tensorboard=False, progress=False),
        "saving": jg.Saving(every_s=1e9, at_end=False),
    }
    if name == "counting":
        config = jg.Config(batch=jg.BatchLimits(base=24, max=24), epochs=kills.EPOCHS, **common)
        trainer: jg.Trainer = kills.Counting(config, SAMPLES, lambda phase: None, hooks=[lines])
        state = trainer.fit()
        counts = state.params["count"]
        lines.write(kind="end", least=float(counts.min()), most=float(counts.max()))
        return
    if name in ("even", "leased"):
        config = jg.Config(
            batch=jg.BatchLimits(base=PARTS, max=PARTS, micro=(1, 1), max_micro_batches=PARTS),
            base_steps=STEPS,
            rule=jg.rules.none,
            execution=jg.Execution(leases=name == "leased"),
            **common,
        )
        Paced(config, 1200, lambda phase: None, hooks=[lines]).fit()
        return
    if name == "fused":
        config = jg.Config(
            batch=jg.BatchLimits(base=24, max=24), base_steps=STEPS, loss="global", **common
        )
        models.made("byte LM", config, hooks=[lines]).fit()
        return
    if name == "elastic":
        config = jg.Config(batch=jg.BatchLimits(base=24, max=24), base_steps=STEPS, **common)
        models.made("byte LM", config, hooks=[lines]).fit()
        return
    base = {"mlp": 1536, "byte LM": 24, "decoder": 24}[name]
    config = jg.Config(batch=jg.BatchLimits(base=base, max=base), base_steps=10**6, **common)
    models.made(name, config, hooks=[lines]).fit()


class Job:
    """A coordinator and its agents; all end with the block."""

    def __init__(self, folder: pathlib.Path, name: str, *options: str):
        self.folder = folder
        self._command = ["--", "python", __file__, "--worker", str(folder), name]
        self._stack = contextlib.ExitStack()
        self._log = (folder / "log").open("w+")
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.coordinator = self._start(
            "run", "--local-hosts", "0", "--rdzv-endpoint", "127.0.0.1:0", *options
        )
        self.address = ""
        self.until(lambda: "the job is at " in self.said())
        self.address = self.said().split("the job is at ")[1].split(",")[0]

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for process in [self.coordinator, *self.agents.values()]:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._log.close()

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "jaxgoodput.cli", *arguments, *self._command],
            env={**os.environ, "JAXGOODPUT_SECRET": SECRET, "JAX_PLATFORMS": "cpu"},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def agent(self, name: str, *options: str) -> None:
        """Start a host."""
        endpoint = ("--rdzv-endpoint", self.address, "--reconnect-s", "0")
        self.agents[name] = self._start("agent", "--name", name, *endpoint, *options)

    def said(self) -> str:
        """What all have written."""
        return (self.folder / "log").read_text(errors="replace")

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """What the workers wrote, in order of time."""
        found = []
        for path in self.folder.glob("*.jsonl"):
            for text in path.read_text().splitlines():
                found.append({"pid": int(path.stem), **json.loads(text)})
        return sorted((x for x in found if x["kind"] == kind), key=lambda x: x["at"])

    def until(self, what: Callable[[], bool], wait_s: float = WAIT_S) -> None:
        """Wait for something."""
        deadline_s = time.time() + wait_s
        while not what():
            if time.time() > deadline_s or self.coordinator.poll() is not None:
                raise RuntimeError(f"it did not come to that:\n{self.said()[-4000:]}")
            time.sleep(0.02)

    def settle(self, count: int, steps: int) -> None:
        """Until the newest set of processes has so many, and has done so many steps."""

        def there() -> bool:
            sets = self.lines("regrouped")
            if not sets or sets[-1]["count"] != count:
                return False
            return sum(x["at"] > sets[-1]["at"] for x in self.lines("step")) >= steps

        self.until(there)

    def pid(self, host: str) -> int:
        """The newest worker of a host."""
        own = [x for x in self.lines("began") if x["member"].rpartition(".")[0] == host]
        return own[-1]["pid"]

    def pause(self, since: float | None = None) -> tuple[float, dict[str, float]]:
        """Seconds of the last change, less a median step, and their parts."""
        last = self.lines("regrouped")[-1]
        steps = self.lines("step")
        before = [x["at"] for x in steps if x["step"] <= last["step"]]
        after = [x["at"] for x in steps if x["step"] > last["step"] and x["at"] > last["at"]]
        usual = statistics.median(b - a for a, b in zip(after, after[1:], strict=False))
        began = before[-1] if since is None else since
        whole = after[0] - began - usual
        parts = dict(last["parts"])
        parts["get ready, first step"] = whole - sum(parts.values())
        return whole, parts


def pauses(name: str, rounds: int) -> None:
    """One table."""
    rows: dict[str, list[tuple[float, dict[str, float]]]] = {}

    def note(what: str, found: tuple[float, dict[str, float]]) -> None:
        rows.setdefault(what, []).append(found)

    with tempfile.TemporaryDirectory() as folder:
        options = ("--nnodes", "1:3", "--admit-every-s", "4")
        with Job(pathlib.Path(folder), name, *options) as job:
            # Every number of processes once, so that programs are on the disk.
            for count, host in enumerate(("a", "b", "c"), start=1):
                job.agent(host)
                job.settle(count, 8)
            job.agents["c"].send_signal(signal.SIGTERM)
            job.settle(2, 8)
            for index in range(rounds):
                new = f"d{index}"
                job.agent(new)
                job.settle(3, 8)
                note("2 -> 3 hosts, planned", job.pause())
                job.agents[new].send_signal(signal.SIGTERM)
                job.settle(2, 8)
                note("3 -> 2 hosts, planned", job.pause())
            survivor = job.pid("b")
            for victim in ("a", "b") * rounds:
                if victim == "b":
                    survivor = job.pid("a")
                count = len(job.lines("regrouped"))
                killed = time.time()
                os.kill(job.pid(victim), signal.SIGKILL)
                job.until(lambda count=count: len(job.lines("regrouped")) > count)
                job.settle(1, 3)
                note("a worker killed, to the survivor's next step", job.pause(killed))
                job.settle(2, 8)
                note("its replacement joins", job.pause())
            restarted = {x["pid"] for x in job.lines("began")}
            assert survivor in restarted
    for what, found in rows.items():
        wholes = [whole for whole, _ in found]
        names = list(found[0][1])
        medians = ", ".join(
            f"{part} {statistics.median(parts[part] for _, parts in found):.2f}" for part in names
        )
        print(
            f"| {name} | {what} | {statistics.median(wholes):.2f} ({min(wholes):.2f}-{max(wholes):.2f}) | "
            f"{medians} |",
            flush=True,
        )


def faults(count: int, seed: int) -> bool:
    """One long run under faults; whether all samples were applied once an epoch and nothing is left."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        options = (
            "--nnodes",
            "1:4",
            "--admit-every-s",
            "1",
            "--silent-s",
            "5",
            "--max-restarts",
            "999",
        )
        with Job(folder, "counting", *options) as job:
            number = 0

            def another() -> None:
                nonlocal number
                number += 1
                job.agent(f"h{number}", "--silent-s", "5")

            for _ in range(3):
                another()
            job.settle(3, 3)
            done: dict[str, int] = {}
            while sum(done.values()) < count:
                for _ in range(draw.choice((1, 1, 1, 2))):
                    kind = draw.choice(("kill", "kill", "stop", "host", "leave"))
                    living = [n for n, p in job.agents.items() if p.poll() is None]
                    host = draw.choice(living)
                    done[kind] = done.get(kind, 0) + 1
                    if kind in ("kill", "stop"):
                        signum = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
                        with contextlib.suppress(ProcessLookupError, IndexError):
                            os.kill(job.pid(host), signum)
                        continue
                    number_left = len(living) - 1
                    job.agents[host].send_signal(
                        signal.SIGKILL if kind == "host" else signal.SIGTERM
                    )
                    if number_left < 3:
                        another()
                steps = len(job.lines("step"))
                job.until(lambda steps=steps: len(job.lines("step")) > steps + 2)
                time.sleep(draw.uniform(0.0, 3.0))
                if job.coordinator.poll() is not None:
                    break
            (folder / "run" / "hurry").touch()
            code = job.coordinator.wait(WAIT_S)
            ends = job.lines("end")
            once = bool(ends) and all(x["least"] == x["most"] == kills.EPOCHS for x in ends)
            pids = {x["pid"] for x in job.lines("began")}
            time.sleep(1.0)
            left = [pid for pid in pids if _runs(pid)]
            print(
                f"{sum(done.values())} faults ({', '.join(f'{v} {k}' for k, v in sorted(done.items()))}), "
                f"{len(pids)} processes, {len(job.lines('regrouped'))} sets of them heard of; "
                f"exit code {code}; every sample {kills.EPOCHS} times: {once}; processes left: {left}"
            )
            return once and not left and code == 0


def median_step(name: str, *options: str, hosts: Sequence[str] = ()) -> float:
    """Seconds of a step of one job, after its first ones."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        if hosts:
            with Job(path, name, "--nnodes", str(len(hosts)), "--join-s", "60", *options) as job:
                for host in hosts:
                    job.agent(host)
                if job.coordinator.wait(600):
                    raise RuntimeError(job.said()[-4000:])
                at = [x["at"] for x in job.lines("step")]
        else:
            command = [sys.executable, "-m", "jaxgoodput.cli", "run", *options, "--", "python"]
            command += [__file__, "--worker", folder, name]
            environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
            subprocess.run(command, env=environ, check=True, capture_output=True)
            texts = [p.read_text() for p in path.glob("*.jsonl")]
            lines = [json.loads(text) for whole in texts for text in whole.splitlines()]
            at = sorted(x["at"] for x in lines if x["kind"] == "step")
    gaps = [b - a for a, b in zip(at, at[1:], strict=False)]
    return statistics.median(gaps[10:])


def slow() -> None:
    """One host four times slower."""
    ideal_s = PARTS / (1 / PART_S + 1 / (4 * PART_S))
    print("| split | step, ms | / ideal |\n|---|---|---|")
    for name in ("even", "leased"):
        step_s = median_step(name, hosts=("slow", "fast"))
        print(f"| {name} | {1e3 * step_s:.0f} | {step_s / ideal_s:.2f} |", flush=True)


def overhead(rounds: int) -> None:
    """The elastic step against the fused one."""
    ratios, steps = [], []
    for _ in range(rounds):
        elastic_s = median_step("elastic", hosts=("a", "b"))
        fused_s = median_step("fused", "--nproc-per-node", "2")
        ratios.append(elastic_s / fused_s)
        steps.append(fused_s)
    print(
        f"| byte LM, 2 processes | fused {1e3 * statistics.median(steps):.0f} ms | elastic / fused "
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}) |"
    )


def _runs(pid: int) -> bool:
    try:
        return "Z" not in pathlib.Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]
    except OSError:
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="mlp,byte LM", help="of benchmarks/models.py")
    parser.add_argument("--rounds", type=int, default=3, help="changes of each kind")
    parser.add_argument("--faults", type=int, default=0, help="instead: one run under so many")
    parser.add_argument("--slow", action="store_true", help="instead: a host that is slower")
    parser.add_argument("--overhead", action="store_true", help="instead: the step itself")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(pathlib.Path(options.worker[0]), options.worker[1])
        return 0
    if options.faults:
        return 0 if faults(options.faults, options.seed) else 1
    if options.slow:
        slow()
        return 0
    if options.overhead:
        overhead(options.rounds)
        return 0
    print("| model | what | pause, s: median (range) | its parts, s |\n|---|---|---|---|")
    for name in options.models.split(","):
        pauses(name, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
