r"""AdaptDL and jaxgoodput, each beside the plain loop of its own framework: same models, data, settings.

    python benchmarks/peers/run.py                                  # digits and recommender
    python benchmarks/peers/run.py --workloads digits --seeds 3 --environment /tmp/adaptdl

AdaptDL 0.2.11 with torch is installed by pip into a virtual environment of its own (1.2 GB), at
--environment or in a temporary folder. Every measurement is a process of its own, one at a time, on the
same npz files, with two threads and the memory settings of `jaxgoodput run`; their results are printed as
they come, a JSON line each, and then the table. Ratios are formed within one process (steps) or one seed
(samples): median and range over seeds.

* step: updates at the base batch with all that adaptivity measures, over those of the same framework's
  plain loop, in turns within one process, after start-up; by the clock, and in CPU seconds.
* to target: samples and seconds of training, without evaluations and the compilation of the first step,
  until the test metric is met; the best fixed batch is the one of the plain loop's sweep with the least
  seconds. jaxgoodput has its programs on the disk, and remembers nothing else of earlier runs.
  AdaptDL decides between passes, and not before its first fit after 30 s: it is given passes as short as
  the stretch between two evaluations, and where it still came to no decision, the row says so.
* a change of batch: the first step at another batch, less a median step. AdaptDL's loader is made to
  change with every pass.
  jaxgoodput has a schedule.
* a change of processes: from the last step before to the first one after, less a median step. AdaptDL
  saves, ends and is started again, at once, by this script: no scheduler, pod or image is in it.
  jaxgoodput runs under `jaxgoodput run --nnodes 1:2`, and moves its state in memory.
* lines: those of `train` (AdaptDL), or of `Task` and `config_of` (jaxgoodput), without docstrings and
  comments; evaluation is in neither.
* first step: from the start of a process; cold is the first process of its kind, with nothing compiled.
"""

import argparse
import ast
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from data import WORKLOADS

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "examples")]

REQUIREMENTS = (
    "adaptdl==0.2.11",
    "torch==2.13.0",
    "setuptools<80",  # adaptdl imports pkg_resources
    "numpy",
    "requests",
    "portpicker",
    "autograd",
)
PARTS = ("start", "step", "target", "change", "elastic")
NUM_STEPS = 15  # of a number of processes, before the next change
LIMIT_S = 1800.0


def write_data(folder: pathlib.Path, name: str) -> None:
    """The columns of a workload, from scikit-learn and Python's own library."""
    import corpora
    from sklearn.datasets import load_digits

    parts: dict[str, dict[str, Any]]
    if name == "digits":
        digits: Any = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        parts = {
            part: {
                "image": (digits.images[rows, ..., None] / 16).astype(np.float32),
                "label": digits.target[rows].astype(np.int32),
            }
            for part, rows in (("test", order[:360]), ("train", order[360:]))
        }
    elif name == "recommender":
        import recommender

        import jaxgoodput as jg

        config = jg.Config(workdir="", batch=jg.BatchLimits(base=1, max=1), base_steps=1)
        task = recommender.Recommender(config)
        step = -(-len(task.data.test["label"]) // 50_000)
        test = {k: v[::step] for k, v in task.data.test.items()}
        parts = {
            part: {"rows": task.rows(columns), "label": columns["label"]}
            for part, columns in (("train", task.data.train), ("test", test))
        }
    else:
        train, test = corpora.byte_windows(64, max_test_windows=256)
        parts = {"train": {"windows": train}, "test": {"windows": test}}
    columns = {f"{part}-{k}": v for part, found in parts.items() for k, v in found.items()}
    np.savez(folder / f"{name}.npz", allow_pickle=False, **columns)


class Peers:
    """Runs the scripts of one workload, and keeps what they tell."""

    def __init__(
        self,
        name: str,
        data: pathlib.Path,
        python: str,
        caches: pathlib.Path,
        results: pathlib.Path,
    ):
        self.name, self.data, self.caches, self.results = name, data, caches, results
        self.pythons = {"adaptdl_loop": python, "torch_loop": python}
        self.found: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def command(self, script: str, mode: str, *options: str) -> list[str]:
        command = [self.pythons.get(script, sys.executable), str(HERE / f"{script}.py")]
        command += [mode, self.name, "--data", str(self.data), *options]
        if script in ("ours", "optax_loop"):
            command += ["--cache", str(self.caches / f"{script}-{self.name}")]
        return command

    def run(self, script: str, mode: str, seed: int, **marks: Any) -> None:
        """One process; what it tells is kept, with `marks`."""
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                self.command(script, mode, "--seed", str(seed)),
                env=environ(ADAPTDL_CHECKPOINT_PATH=folder),
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        lines = [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")]
        if done.returncode or not lines:
            raise RuntimeError(f"{script} {mode} {self.name}: {done.stderr[-3000:]}")
        for line in lines:
            self.keep(script, mode, seed=seed, **line, **marks)

    def keep(self, script: str, mode: str, **line: Any) -> None:
        """A line for the table."""
        where = {"workload": self.name, "script": script, "mode": mode}
        text = json.dumps({**where, **line, "load": round(os.getloadavg()[0], 1)})
        print(text, flush=True)
        with self.results.open("a") as file:
            file.write(text + "\n")

    def read(self) -> None:
        """All lines of this workload, of earlier runs as well."""
        for text in self.results.read_text().splitlines():
            line = json.loads(text)
            if line["workload"] == self.name and not line.get("first"):
                self.found.setdefault((line["script"], line["mode"]), []).append(line)

    def elastic_adaptdl(self, rounds: int) -> None:
        """One process, then two, then one again: each set is started when the one before has ended."""
        with tempfile.TemporaryDirectory() as folder:
            steps, checkpoints = pathlib.Path(folder) / "steps", pathlib.Path(folder) / "saved"
            checkpoints.mkdir()
            before: list[float] = []
            for restart in range(2 * rounds + 1):
                count = 1 + restart % 2
                after = self._generation(count, restart, steps, checkpoints)
                if before:
                    usual = statistics.median(b - a for a, b in zip(after, after[1:], strict=False))
                    what = "1 -> 2" if count == 2 else "2 -> 1"
                    self.keep(
                        "adaptdl_loop", "elastic", what=what, lost_s=after[0] - before[-1] - usual
                    )
                before = [at_s for at_s, pid in _lines(steps) if pid in self._pids]

    def _generation(
        self, count: int, restart: int, steps: pathlib.Path, checkpoints: pathlib.Path
    ) -> list[float]:
        """Start a set of processes, wait for its steps, and end it. When rank 0's steps were done."""
        port = str(47000 + os.getpid() % 1000 + restart)
        command = self.command("adaptdl_loop", "elastic", "--steps", str(steps))
        ranks = [
            subprocess.Popen(
                command,
                env=environ(
                    ADAPTDL_CHECKPOINT_PATH=str(checkpoints),
                    ADAPTDL_MASTER_ADDR="127.0.0.1",
                    ADAPTDL_MASTER_PORT=port,
                    ADAPTDL_NUM_NODES="1",
                    ADAPTDL_NUM_REPLICAS=str(count),
                    ADAPTDL_REPLICA_RANK=str(rank),
                    ADAPTDL_NUM_RESTARTS=str(restart),
                ),
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(count)
        ]
        self._pids = {ranks[0].pid}
        deadline_s, mine = time.time() + 300, []
        while len(mine) < NUM_STEPS and time.time() < deadline_s:
            time.sleep(0.02)
            mine = [at_s for at_s, pid in _lines(steps) if pid in self._pids]
            if any(process.poll() is not None for process in ranks):
                break
        for process in ranks:
            process.send_signal(signal.SIGTERM)
        errors = [process.communicate(timeout=60)[1] for process in ranks]
        codes = [process.returncode for process in ranks]
        if codes != [143] * count or len(mine) < NUM_STEPS:
            raise RuntimeError(f"AdaptDL ended with {codes}: {errors[0][-3000:]}")
        return mine

    def elastic_ours(self, rounds: int) -> None:
        """The same with hosts that come and are told to leave, by benchmarks/elasticity.py."""
        import elasticity

        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            worker = self.command("ours", "elastic", "--steps", name)
            options = ("--nnodes", "1:2", "--admit-every-s", "1")
            with elasticity.Job(folder, self.name, *options, worker=worker) as job:
                for host in ("a", "b"):  # both numbers once, so that programs are on the disk
                    job.agent(host)
                    job.settle(len(job.agents), NUM_STEPS)
                job.agents["b"].send_signal(signal.SIGTERM)
                job.settle(1, NUM_STEPS)
                for i in range(rounds):
                    job.agent(f"c{i}")
                    job.settle(2, NUM_STEPS)
                    self.keep("ours", "elastic", what="1 -> 2", lost_s=job.pause()[0])
                    job.agents[f"c{i}"].send_signal(signal.SIGTERM)
                    job.settle(1, NUM_STEPS)
                    self.keep("ours", "elastic", what="2 -> 1", lost_s=job.pause()[0])


def _lines(path: pathlib.Path) -> list[tuple[float, int]]:
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [(float(at_s), int(pid)) for at_s, pid in map(str.split, whole.splitlines())]


def environ(**more: str) -> dict[str, str]:
    """That of every process: two threads, freed pages kept, and when it was started."""
    from jaxgoodput.launcher.local import keep_freed_pages

    own = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return {
        **own,
        **keep_freed_pages(own),
        "OMP_NUM_THREADS": "2",
        # Beside other work, threads of torch that wait by spinning take ten times as long.
        "OMP_WAIT_POLICY": "PASSIVE",
        # AdaptDL's checkpoints hold numpy's numbers, which torch.load refuses since 2.6.
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        "PEERS_STARTED": str(time.time()),
        **more,
    }


def install(folder: pathlib.Path) -> pathlib.Path:
    """An environment with AdaptDL, made unless it is there: its interpreter."""
    python = folder / "bin/python"
    if not python.exists():
        print(f"installing {', '.join(REQUIREMENTS)} in {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *REQUIREMENTS], check=True)
    return python


def lines_of(script: str, *names: str) -> int:
    """Lines of code of these functions and classes, without docstrings, comments and blank lines."""
    text = (HERE / f"{script}.py").read_text()
    count = 0
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
            kept = ast.get_source_segment(text, node) or ""
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.ClassDef):
                    kept = kept.replace(f'"""{ast.get_docstring(inner, clean=False)}"""', "")
            count += sum(
                bool(x.strip()) and not x.strip().startswith("#") for x in kept.split("\n")
            )
    return count


SIDES = {"AdaptDL": ("adaptdl_loop", "torch_loop"), "jaxgoodput": ("ours", "optax_loop")}


def table(peers: Peers) -> str:
    """The figures of one workload. A row in which jaxgoodput is not ahead says so."""
    lines = [
        f"| {peers.name} | AdaptDL beside torch | jaxgoodput beside optax | ahead |",
        "|---|---|---|---|",
    ]

    def row(
        what: str,
        values: dict[str, list[float]],
        form: str,
        note: Any = None,
        *,
        plain: bool = False,  # nobody is ahead by a plain loop
    ) -> None:
        if not all(values.values()):
            return
        cells = [
            f"{_spread(found, form)}{'' if note is None else f' ({note[side]})'}"
            for side, found in values.items()
        ]
        theirs, mine = (statistics.median(found) for found in values.values())
        ahead = "" if plain else "jaxgoodput" if mine < theirs else "**not jaxgoodput**"
        lines.append(f"| {what} | {' | '.join(cells)} | {ahead} |")

    def told(mode: str, key: str, *, plain: bool = False, **equal: Any) -> dict[str, list[Any]]:
        return {
            side: [
                x[key]
                for x in peers.found.get((scripts[plain], mode), [])
                if all(x[k] == v for k, v in equal.items())
            ]
            for side, scripts in SIDES.items()
        }

    row("step / plain loop", told("step", "ratio"), ".2f")
    row("the same in CPU seconds", told("step", "cpu_ratio"), ".2f")
    row("step, ms", _scaled(told("step", "adaptive_s"), 1e3), ".2f")
    row("plain loop's step, ms", _scaled(told("step", "plain_s"), 1e3), ".2f", plain=True)
    if all((script, "target") in peers.found for scripts in SIDES.values() for script in scripts):
        best = {side: _best(peers.found[scripts[1], "target"]) for side, scripts in SIDES.items()}
        for key in ("samples", "seconds"):
            ratios = {
                side: _paired(peers.found[scripts[0], "target"], best[side], key)
                for side, scripts in SIDES.items()
            }
            row(f"{key} to target / best fixed batch", ratios, ".2f")
        notes = {
            side: f"met {sum(x['met'] for x in runs)}/{len(runs)}; {_decided(runs)}"
            for side, scripts in SIDES.items()
            for runs in [peers.found[scripts[0], "target"]]
        }
        row("samples to target", told("target", "samples"), ".3g", notes)
        row("seconds to target", told("target", "seconds"), ".3g")
        for key in ("samples", "seconds"):
            values = {side: [x[key] for x in runs] for side, runs in best.items()}
            fixed = {side: f"batch {runs[0]['batch']}" for side, runs in best.items()}
            row(f"{key} of the best fixed batch", values, ".3g", fixed, plain=True)
    changes = {s: [y for x in v for y in x] for s, v in told("change", "lost_s").items()}
    row("seconds lost at a change of batch", changes, ".4f", dict.fromkeys(SIDES, "0 restarts"))
    for what in ("1 -> 2", "2 -> 1"):
        found = told("elastic", "lost_s", what=what)
        restarts = {"AdaptDL": "all restart", "jaxgoodput": "0 restarts"}
        row(f"seconds lost, {what} processes", found, ".2f", restarts)
    counted = {
        "AdaptDL": [float(lines_of("adaptdl_loop", "train"))],
        "jaxgoodput": [float(lines_of("ours", "Task", "config_of"))],
    }
    plain_lines = {s: f"plain loop {lines_of(scripts[1], 'train')}" for s, scripts in SIDES.items()}
    row("lines", counted, ".0f", plain_lines)
    for what, is_cold in (("cold", True), ("warm", False)):
        plain = told("start", "first_step_s", plain=True, cold=is_cold)
        if all(plain.values()):
            note = {side: f"plain loop {_spread(found, '.1f')}" for side, found in plain.items()}
            found = told("start", "first_step_s", cold=is_cold)
            row(f"seconds to the first step, {what}", found, ".1f", note)
    return "\n".join(lines)


def _best(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs of the batch that takes the least seconds, of those that met the target most often."""
    batches = {x["batch"]: [y for y in runs if y["batch"] == x["batch"]] for x in runs}
    return min(
        batches.values(),
        key=lambda b: (
            -sum(x["met"] for x in b),
            statistics.median(x["seconds"] for x in b),
        ),
    )


def _decided(runs: list[dict[str, Any]]) -> str:
    batches = sorted({b for x in runs for b in x["batches"]})
    if len(batches) == 1:
        return f"stayed at {batches[0]}"
    return f"batches {', '.join(map(str, batches))}"


def _paired(mine: list[dict[str, Any]], best: list[dict[str, Any]], key: str) -> list[float]:
    by_seed = {x["seed"]: x[key] for x in best}
    return [x[key] / by_seed[x["seed"]] for x in mine]


def _scaled(values: dict[str, list[float]], factor: float) -> dict[str, list[float]]:
    return {side: [factor * x for x in found] for side, found in values.items()}


def _spread(found: Sequence[float], form: str) -> str:
    middle = f"{statistics.median(found):{form}}"
    return middle if len(found) < 2 else f"{middle} ({min(found):{form}}-{max(found):{form}})"


def measure(peers: Peers, seeds: int, parts: Sequence[str]) -> None:
    """All parts of one workload; sides take turns within a seed."""
    scripts = [script for pair in SIDES.values() for script in pair]
    adaptive = [pair[0] for pair in SIDES.values()]
    if "start" in parts:
        for is_cold in (True, *[False] * seeds):
            for script in scripts:
                peers.run(script, "start", 0, cold=is_cold)
    if "target" in parts:
        peers.run("ours", "target", seeds, first=True)  # compiles programs of all its batches
    for seed in range(seeds):
        for part in ("step", "change"):
            for script in adaptive if part in parts else ():
                peers.run(script, part, seed)
        for script in scripts if "target" in parts else ():
            peers.run(script, "target", seed)
    if "elastic" in parts:
        peers.elastic_adaptdl(seeds)
        peers.elastic_ours(seeds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="digits,recommender", help=", ".join(WORKLOADS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--environment", type=pathlib.Path, help="where AdaptDL is, or will be")
    parser.add_argument(
        "--results", type=pathlib.Path, help="a file that is added to; tables are of all"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        python = str(install(options.environment or folder / "adaptdl").absolute())
        results = options.results or folder / "results.jsonl"
        tables = []
        for workload in options.workloads.split(","):
            write_data(folder, workload)
            peers = Peers(workload, folder, python, folder / "caches", results)
            measure(peers, options.seeds, [x for x in options.parts.split(",") if x])
            peers.read()
            tables.append(table(peers))
    print("\n\n".join(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
