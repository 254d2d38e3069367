"""Measures the pauses when processes of a job join, leave, die and hang, and tests random faults.

    python benchmarks/elasticity.py                      # pauses, about 5 minutes
    python benchmarks/elasticity.py --groups             # three groups of two hosts, one host killed
    python benchmarks/elasticity.py --faults 50          # one long run under faults, 5 to 18 minutes
    python benchmarks/elasticity.py --silence            # workers that stand still, cables that are cut
    python benchmarks/elasticity.py --slow               # one host four times slower than the other
    python benchmarks/elasticity.py --same               # the parameters then, and those of an even split
    python benchmarks/elasticity.py --overhead           # what it costs a step to be ready for it
    python benchmarks/elasticity.py --supervisor         # what it costs to be watched

Real processes under `jaxgoodput run --nnodes`, each host an agent of its own on this machine. A pause is the
time between the last step of one set of processes and the first of the next, less a median step; after a
kill it is the time from the kill. "parts" are those of the process that is rank 0 afterwards: leaving
JAX's world, waiting for the others, fetching the state, connecting, and the rest, which is getting
ready (tracing, compiled programs from the disk) and the first step.

The model of --groups is cut over the two hosts of a group (fsdp), one device each; with a host goes all that
runs on it.

For --faults and --silence each host is a network namespace with an address of its own (as root, on Linux).
Faults are drawn, one in four times two at once: a worker killed, stopped for good, or stopped three quarters
of the time for some seconds; a host killed, told to leave (another one comes), or cut off for some seconds;
and, one in three, the links between a host and some of the others broken for some seconds, in one direction
or in both, while all still reach the coordinator.
Every sample is counted on the devices, and the exit code is 1 where one was not applied once an epoch, or a
process, port, namespace or file is left. A fault is detected when the coordinator first says so; from
then the survivors' next step is timed.

The slow host's micro-batches take four times as long (both hosts wait, 10 and 40 ms each, where they read
them); beside the step time stands what an ideal split would take. Overhead is the median step of an elastic
job of two hosts over that of two processes with the fused step, the compiler's own reduction inside, in
turns. What watches a job are its coordinator and its agents: their CPU seconds, over those that passed
while two hosts trained; and the median step of one process under `run --nproc-per-node 1` over that of the
script alone, in turns.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import kills
import models
import numpy as np

import jaxgoodput as jg
from jaxgoodput.data.sources import ArraySource

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/support"))

import namespaces

SECRET = "of a benchmark"
WAIT_S = 180.0
SAMPLES = 90_000
STEPS = 60
PARTS, PART_S = 32, 0.01
WATCHED_S = 60.0
# Faults that end a process for good or for a while, as often as each is drawn.
FAULTS = ("kill", "kill", "stop", "slow", "host", "leave", "cut", "cut")
FAULTS += ("part", "part", "one-way", "one-way")
PLACES, LEAST, SILENT_S = 6, 3, 5.0  # namespaces, hosts that are up, and the time-out of --faults


class Waiting(ArraySource):
    """Rows that take as long to read as a host takes to compute."""

    part_s = PART_S
    num_rows = 0

    def batch(self, indices: Any) -> Any:
        self.num_rows += len(indices)
        is_slow = os.environ.get("JAXGOODPUT_HOST") == "slow"
        time.sleep(len(indices) * self.part_s * (4 if is_slow else 1))
        return super().batch(indices)


class Paced(kills.Counting):
    """A model that computes hardly anything."""

    part_s = PART_S

    def dataset(self) -> Any:
        x = np.random.default_rng(0).normal(size=(self.num_samples, 16)).astype(np.float32)
        source = Waiting({"id": np.arange(self.num_samples, dtype=np.int32), "x": x})
        source.part_s = self.part_s
        self.source = source
        return source


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
    """One training process; `name` may say how many steps it does, as in "even:300"."""
    lines = Lines(folder)
    name, is_short, num_steps = name.partition(":")
    common: dict[str, Any] = {
        "workdir": str(folder / "run"),
        "policy": "fixed",
        "reporting": jg.Reporting(tensorboard=False, progress=False),
        "saving": jg.Saving(every_s=1e9, at_end=False),
    }
    if name == "counting":
        # Where all who had the state are killed at once, it goes on from there.
        common["saving"] = jg.Saving(every_s=5.0, at_end=False)
        config = jg.Config(batch=jg.BatchLimits(base=24, max=24), epochs=kills.EPOCHS, **common)
        trainer: jg.Trainer = kills.Counting(config, SAMPLES, lambda phase: None, hooks=[lines])
        state = trainer.fit()
        counts = state.params["count"]
        lines.write(kind="end", least=float(counts.min()), most=float(counts.max()))
        return
    if name in ("even", "leased"):
        config = jg.Config(
            batch=jg.BatchLimits(base=PARTS, max=PARTS, micro=(1, 1), max_micro_batches=PARTS),
            base_steps=int(num_steps or STEPS),
            rule=jg.rules.none,
            execution=jg.Execution(leases=name == "leased"),
            **common,
        )
        paced = Paced(config, 1200, lambda phase: None, hooks=[lines])
        paced.part_s = PART_S / 10 if is_short else PART_S
        state = paced.fit()
        leaves = [np.asarray(state.params[part]["kernel"]).tolist() for part in ("up", "down")]
        lines.write(kind="end", leaves=leaves, num_rows=paced.source.num_rows)
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
    name, is_cut, _ = name.partition(" in groups")
    base = {"mlp": 1536, "byte LM": 24, "decoder": 24}[name]
    config = jg.Config(
        batch=jg.BatchLimits(base=base, max=base),
        base_steps=10**6,
        strategies=(jg.Strategy(fsdp=-1),) if is_cut else (),
        **common,
    )
    models.made(name, config, hooks=[lines]).fit()


class Job:
    """A coordinator and its agents; all end with the block."""

    def __init__(
        self,
        folder: pathlib.Path,
        name: str,
        *options: str,
        address: str = "127.0.0.1:0",
        worker: Sequence[str] = (),
    ):
        self.folder = folder
        worker = worker or ("python", __file__, "--worker", str(folder), name)
        self._command = ["--", *worker]
        self._stack = contextlib.ExitStack()
        self._log = (folder / "log").open("w+")
        self._offsets: dict[pathlib.Path, int] = {}  # up to which a file has been read
        self._heard: dict[str, list[dict[str, Any]]] = {}  # by kind
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.coordinator = self._start(
            "run", "--local-hosts", "0", "--rdzv-endpoint", address, *options
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

    def _start(
        self, *arguments: str, there: Callable[[Sequence[str]], list[str]] = list
    ) -> subprocess.Popen[bytes]:
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        own = {"JAXGOODPUT_SECRET": SECRET, "JAX_PLATFORMS": "cpu", "TMPDIR": str(temporary)}
        return subprocess.Popen(
            there([sys.executable, "-m", "jaxgoodput.cli", *arguments, *self._command]),
            env={**os.environ, **own},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def agent(
        self, name: str, *options: str, there: Callable[[Sequence[str]], list[str]] = list
    ) -> None:
        """Start a host; `there` gives the command that starts a command on it."""
        endpoint = ("--rdzv-endpoint", self.address, "--reconnect-s", "0")
        arguments = ("agent", "--name", name, *endpoint, *options)
        self.agents[name] = self._start(*arguments, there=there)

    def said(self) -> str:
        """What all have written."""
        return (self.folder / "log").read_text(errors="replace")

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """What the workers wrote, in order of time."""
        for path in self.folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")  # one may be half written
            self._offsets[path] = self._offsets.get(path, 0) + len(whole + newline)
            for text in whole.splitlines():
                line = {"pid": int(path.stem), **json.loads(text)}
                self._heard.setdefault(line["kind"], []).append(line)
        return sorted(self._heard.get(kind, ()), key=lambda x: x["at"])

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


def groups(name: str, rounds: int) -> None:
    """Three groups of two hosts: one of them is killed with all that runs on it, and another comes."""
    device = ("--devices-per-process", "1")
    options = ("--nnodes", "2:6", "--hosts-per-group", "2", "--admit-every-s", "4", *device)
    found: dict[str, list[float]] = {"a host killed, to the others' next step": []}
    found["another comes, 2 -> 3 groups"] = []
    gone, back = found.values()
    with tempfile.TemporaryDirectory() as folder:
        with Job(pathlib.Path(folder), f"{name} in groups", *options) as job:
            hosts = [f"h{i}" for i in range(6)]
            for group in (hosts[:2], hosts[2:4], hosts[4:]):  # programs of every number on the disk
                for host in group:
                    job.agent(host, *device)
                job.settle(2 + hosts.index(group[0]), 8)
            for index in range(rounds):
                victim, new = hosts.pop(index % 3), f"n{index}"
                count, killed_s = len(job.lines("regrouped")), time.time()
                os.kill(job.pid(victim), signal.SIGKILL)
                job.agents[victim].send_signal(signal.SIGKILL)
                job.until(lambda count=count: len(job.lines("regrouped")) > count)
                job.settle(4, 8)
                gone.append(job.pause(killed_s)[0])
                job.agent(new, *device)
                job.settle(6, 8)
                back.append(job.pause()[0])
                hosts.append(new)
    for what, times in found.items():
        shown = f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})"
        print(f"| {name}, fsdp over two hosts | {what} | {shown} |", flush=True)


class Trouble:
    """Hosts in namespaces, and what happens to them; what is for a while only ends in threads."""

    def __init__(self, job: Job, made: namespaces.Hosts, draw: random.Random):
        self._job, self._made, self._draw = job, made, draw
        self._number = 0
        self._threads: list[threading.Thread] = []
        self._cut: set[str] = set()
        self._lost: set[tuple[int, int]] = set()  # from where to where, by place
        self.places: dict[str, int] = {}  # of the hosts that are up
        self.done: list[tuple[str, ...]] = []

    def another(self) -> None:
        """Start a host where there is none."""
        self._number += 1
        name = f"h{self._number}"
        place = next(i for i in range(PLACES) if i not in self.places.values())
        self.places[name] = place
        self._job.agent(
            name,
            *("--silent-s", str(SILENT_S), "--reconnect-s", "60"),
            there=functools.partial(self._made.command, place),
        )

    def happen(self, number: int) -> None:
        """So many faults at once, each on a host of its own."""
        self._job.until(lambda: len(self._reached()) > number)
        hosts = self._draw.sample(self._reached(), number)
        drawn = [(self._draw.choice(FAULTS), host) for host in hosts]
        self.done.append(tuple(kind for kind, host in drawn if self._befell(kind, host)))
        while len(self._reached()) < LEAST and len(self.places) < PLACES:
            self.another()

    def _reached(self) -> list[str]:
        """The hosts that are not cut off."""
        return [name for name in self.places if name not in self._cut]

    def _befell(self, kind: str, host: str) -> bool:
        """Whether there was anything that it could happen to."""
        seconds = self._draw.uniform(1.0, 2.5 * SILENT_S)
        print(f"{kind} {host}, {seconds:.1f} s", file=sys.stderr, flush=True)
        if kind in ("host", "leave"):
            self._job.agents[host].send_signal(signal.SIGKILL if kind == "host" else signal.SIGTERM)
            del self.places[host]
        elif kind == "cut":
            self._made.cut(self.places[host])
            self._cut.add(host)
            self._later(self._mend, host, seconds)
        elif kind in ("part", "one-way"):
            ways = self._ways(self.places[host], kind == "part") - self._lost
            for way in ways:
                self._made.lose(*way)
            self._lost |= ways
            self._later(self._find, ways, seconds)
            return bool(ways)
        else:
            try:
                pid = self._job.pid(host)
                os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            except (ProcessLookupError, IndexError):
                return False  # its worker is about to start
            if kind == "slow":
                self._later(_slow_down, pid, seconds)
        return True

    def _later(self, what: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=what, args=arguments))
        self._threads[-1].start()

    def _ways(self, place: int, both: bool) -> set[tuple[int, int]]:
        """From a place to those of some other hosts, or from them to it, or both."""
        others = [x for x in self.places.values() if x != place]
        ways = {(place, x) for x in self._draw.sample(others, self._draw.randint(1, len(others)))}
        back = {(y, x) for x, y in ways}
        return ways | back if both else self._draw.choice((ways, back))

    def _find(self, ways: set[tuple[int, int]], seconds: float) -> None:
        time.sleep(seconds)
        for way in ways:
            self._made.find(*way)
        self._lost -= ways

    def _mend(self, host: str, seconds: float) -> None:
        time.sleep(seconds)
        self._made.mend(self.places[host])
        self._cut.discard(host)

    def end(self) -> None:
        """Wait until what was for a while is over."""
        for thread in self._threads:
            thread.join()


def _slow_down(pid: int, seconds: float) -> None:
    """Have a process run a quarter of the time only."""
    end_s = time.time() + seconds
    with contextlib.suppress(ProcessLookupError):
        while time.time() < end_s:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.1)


def faults(count: int, seed: int) -> bool:
    """One long run under faults; whether all samples were applied once an epoch and nothing is left."""
    draw = random.Random(seed)
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made = stack.enter_context(namespaces.hosts(PLACES))
        options = (
            *("--nnodes", "1:4", "--admit-every-s", "1", "--silent-s", str(SILENT_S)),
            *("--max-restarts", "999"),
        )
        address = f"{made.root_address}:0"
        job = stack.enter_context(Job(folder, "counting", *options, address=address))
        trouble = Trouble(job, made, draw)
        stack.callback(trouble.end)
        for _ in range(LEAST):
            trouble.another()
        job.settle(LEAST, 3)
        while sum(map(len, trouble.done)) < count:
            left = count - sum(map(len, trouble.done))
            trouble.happen(min(draw.choice((1, 1, 1, 2)), left))
            steps = len(job.lines("step"))
            job.until(lambda steps=steps: len(job.lines("step")) > steps + 2)
            time.sleep(draw.uniform(0.0, 3.0))
        trouble.end()
        (folder / "run" / "hurry").touch()
        code = job.coordinator.wait(5 * WAIT_S)
        ends = job.lines("end")
        once = bool(ends) and all(x["least"] == x["most"] == kills.EPOCHS for x in ends)
        pids = {x["pid"] for x in job.lines("began")}
        num_sets = len(job.lines("regrouped"))
        for child in job.agents.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(30.0)
        left_behind = _left(job, made, pids)
        if code or not once or left_behind:
            (pathlib.Path(tempfile.gettempdir()) / "elasticity.log").write_text(job.said())
        stack.close()
        left_behind += [f"of the network: {path}" for path in made.traces()]
        left_behind += [f"files: {folder}"] if folder.exists() else []
    kinds = [kind for together in trouble.done for kind in together]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    print(
        f"{len(kinds)} faults ({counts}; {sum(len(x) > 1 for x in trouble.done)} times two at once), "
        f"{len(pids)} processes, {num_sets} sets of them heard of; exit code {code}; every "
        f"sample {kills.EPOCHS} times: {once}; left behind: {', '.join(left_behind) or 'nothing'}"
    )
    return once and not left_behind and code == 0


def _left(job: Job, made: namespaces.Hosts, pids: set[int]) -> list[str]:
    """What there is still of a job that is over."""
    found = [f"process {pid}" for pid in pids if _runs(pid)]
    for i in range(made.count):
        found += [f"process {pid} on {made.names[i]}" for pid in made.pids(i)]
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_text(errors="replace").split("\0")
            is_own = str(job.folder) in command or job.address in command
            if is_own and int(path.parent.name) != os.getpid():
                found.append(f"process {path.parent.name}")
    host, _, port = job.address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
        found.append(f"port {port}")
    found += [f"file {path}" for path in (job.folder / "tmp").iterdir()]
    checkpoints = job.folder / "run" / "checkpoints"
    found += [f"file {path}" for path in checkpoints.glob("*") if not path.name.isdigit()]
    return found


def silence(limits: Sequence[float], rounds: int) -> None:
    """Workers that stand still and cables that are cut, on each of three hosts in turns."""
    print(
        "| silence, s | what | detected after, s | the next step after that, s |\n|---|---|---|---|"
    )
    for limit_s in limits:
        found: dict[str, list[tuple[float, float]]] = {"stopped": [], "cut off": []}
        with contextlib.ExitStack() as stack:
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
            made = stack.enter_context(namespaces.hosts(3))
            silent = ("--silent-s", str(limit_s))
            options = ("--nnodes", "1:3", "--admit-every-s", "2", "--max-restarts", "99", *silent)
            address = f"{made.root_address}:0"
            job = stack.enter_context(Job(folder, "mlp", *options, address=address))
            for i, name in enumerate(made.names):
                there = functools.partial(made.command, i)
                job.agent(name, *silent, "--reconnect-s", "120", there=there)
                job.settle(i + 1, 8)
            for index in range(rounds):
                for what, times in found.items():
                    times.append(_fall_silent(job, made, index % 3, is_cut=what == "cut off"))
                    job.settle(3, 8)
        for what, times in found.items():
            shown = [
                f"{statistics.median(column):.2f} ({min(column):.2f}-{max(column):.2f})"
                for column in zip(*times, strict=True)
            ]
            print(f"| {limit_s:g} | {what} | {' | '.join(shown)} |", flush=True)


def _fall_silent(
    job: Job, made: namespaces.Hosts, victim: int, *, is_cut: bool
) -> tuple[float, float]:
    """Seconds from the fault to its detection, and from there to the others' next step."""
    name, said = made.names[victim], len(job.said())
    sets, began_s = len(job.lines("regrouped")), time.time()
    if is_cut:
        made.cut(victim)
    else:
        os.kill(job.pid(name), signal.SIGSTOP)

    def is_detected() -> bool:
        new = job.said()[said:]
        return f"SIGKILL to {name}" in new or f"{name} has gone" in new

    job.until(is_detected)
    detected_s = time.time()
    job.until(lambda: len(job.lines("regrouped")) > sets)
    set_s = job.lines("regrouped")[sets]["at"]
    job.until(lambda: job.lines("step")[-1]["at"] > set_s)
    step_s = min(x["at"] for x in job.lines("step") if x["at"] > set_s)
    if is_cut:
        made.mend(victim)
    return detected_s - began_s, step_s - detected_s


def median_step(
    name: str, *options: str, hosts: Sequence[str] = (), is_alone: bool = False
) -> float:
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
            launcher = [sys.executable, "-m", "jaxgoodput.cli", "run", *options, "--", "python"]
            command = [sys.executable] if is_alone else launcher
            command += [__file__, "--worker", folder, name]
            environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
            subprocess.run(command, env=environ, check=True, capture_output=True)
            texts = [p.read_text() for p in path.glob("*.jsonl")]
            lines = [json.loads(text) for whole in texts for text in whole.splitlines()]
            at = sorted(x["at"] for x in lines if x["kind"] == "step")
    gaps = [b - a for a, b in zip(at, at[1:], strict=False)]
    return statistics.median(gaps[10:])


def same(counts: Sequence[int]) -> None:
    """Parameters after steps of uneven parts, against those of even ones."""
    print(
        "| steps | micro-batches of the slow host | difference / largest | / each |\n|---|---|---|---|"
    )
    for count in counts:
        ends = {name: _end_of(f"{name}:{count}") for name in ("even", "leased")}
        even, leased = ([np.asarray(x) for x in ends[name][0]] for name in ("even", "leased"))
        pairs = list(zip(even, leased, strict=True))
        of_largest = max(np.abs(a - b).max() / np.abs(a).max() for a, b in pairs)
        of_each = max((np.abs(a - b) / np.abs(a)).max() for a, b in pairs)
        share = ends["leased"][1] / (PARTS * count)
        print(f"| {count} | {share:.0%} | {of_largest:.1e} | {of_each:.1e} |", flush=True)


def _end_of(name: str) -> tuple[list[Any], int]:
    """The parameters with which a job of a slow and a fast host ends, and the slow one's parts."""
    with tempfile.TemporaryDirectory() as folder:
        with Job(pathlib.Path(folder), name, "--nnodes", "2", "--join-s", "60") as job:
            for host in ("slow", "fast"):
                job.agent(host)
            if job.coordinator.wait(600):
                raise RuntimeError(job.said()[-4000:])
            slow_pid = job.pid("slow")
            (end,) = (x for x in job.lines("end") if x["pid"] == slow_pid)
            return end["leaves"], end["num_rows"]


def supervisor(rounds: int) -> None:
    """What a coordinator and agents cost, and what a launcher does to the step of a process."""
    with tempfile.TemporaryDirectory() as folder:
        options = ("--nnodes", "2", "--join-s", "60")
        with Job(pathlib.Path(folder), "byte LM", *options) as job:
            for host in ("a", "b"):
                job.agent(host)
            job.settle(2, 20)
            watchers = {"coordinator": job.coordinator.pid}
            watchers |= {f"agent {name}": child.pid for name, child in job.agents.items()}
            before, began_s = {name: _cpu_s(pid) for name, pid in watchers.items()}, time.time()
            time.sleep(WATCHED_S)
            took_s = time.time() - began_s
            shares = {name: (_cpu_s(pid) - before[name]) / took_s for name, pid in watchers.items()}
            num_steps = sum(x["at"] > began_s for x in job.lines("step"))
    each = ", ".join(f"{name} {share:.3%}" for name, share in shares.items())
    print(
        f"byte LM, 2 hosts, {num_steps} steps of {1e3 * took_s / num_steps:.0f} ms: CPU seconds over those "
        f"that passed: {each}; together {sum(shares.values()):.3%}",
        flush=True,
    )
    ratios = []
    for _ in range(rounds):
        with_s = median_step("fused", "--nproc-per-node", "1")
        ratios.append(with_s / median_step("fused", is_alone=True))
    print(
        f"byte LM, 1 process: the step under `run --nproc-per-node 1` over that of the script alone "
        f"{statistics.median(ratios):.4f} ({min(ratios):.4f}-{max(ratios):.4f})"
    )


def _cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
    parser.add_argument("--groups", action="store_true", help="instead: three groups of two")
    parser.add_argument("--faults", type=int, default=0, help="instead: one run under so many")
    parser.add_argument(
        "--silence", action="store_true", help="instead: who stands still, or is cut off"
    )
    parser.add_argument("--silent-s", default="10,3", help="its time-outs")
    parser.add_argument("--slow", action="store_true", help="instead: a host that is slower")
    parser.add_argument("--same", action="store_true", help="instead: the parameters then")
    parser.add_argument("--overhead", action="store_true", help="instead: the step itself")
    parser.add_argument("--supervisor", action="store_true", help="instead: what watching costs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(pathlib.Path(options.worker[0]), options.worker[1])
        return 0
    if options.faults:
        return 0 if faults(options.faults, options.seed) else 1
    if options.groups:
        for name in options.models.split(","):
            groups(name, options.rounds)
        return 0
    if options.silence:
        silence([float(x) for x in options.silent_s.split(",")], options.rounds)
        return 0
    if options.slow:
        slow()
        return 0
    if options.same:
        same((10, 100, 300))
        return 0
    if options.supervisor:
        supervisor(options.rounds)
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
