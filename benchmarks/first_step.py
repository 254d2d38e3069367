"""Measures how long a new user waits, from the start of the quickstart to its first finished step.

    python benchmarks/first_step.py [--repeats 5] [--bytecode] [--warm] [--asked-s 15]
    python benchmarks/first_step.py --optimizers [--leaves 10 200 1000] [--repeats 3]

Each start has a working directory of its own, so that nothing is compiled yet, and its process is ended
after the first step. `imports` is the time until the quickstart's module is there, `first step` that until
its first update is done, `compiling` the seconds of XLA in between, and `processor` what the process had of
all cores by then: half of it is what two cores need at least, whatever else runs. With `--bytecode` no
module has bytecode yet, as after an installer that makes none. With `--warm` every start but an uncounted
first finds the programs of the one before. The exit code is 1 where the median of `first step` is above
`--asked-s`.

With `--optimizers` it measures instead what a run asks of its optimizer before it starts, for models of so
many leaves: the seconds of `treatment_of` (tracing and probing), of the clock and of all cores.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
OPTIMIZERS = ("adamw", "clipped", "muon", "groups")
PARTS = ("imports", "compiling", "processor", "first_step")


class Teller:
    """A hook that prints when the first step was done, once."""

    def __init__(self, parts: dict[str, float]):
        self._parts = parts
        self._told = False

    def on_step_end(self, event: Any) -> None:
        if not self._told:
            self._told = True
            done_s = time.time() - (time.perf_counter() - event.at_s)  # hooks hear of it later
            parts = {"processor": time.process_time(), "first_step": done_s}
            print(json.dumps(self._parts | parts), flush=True)


def child(workdir: str) -> None:
    """The quickstart, with a hook more."""
    sys.path.insert(0, str(EXAMPLES))
    import quickstart

    parts = {"imports": time.time(), "compiling": 0.0}

    import jax

    def count(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            parts["compiling"] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(count)
    quickstart.Digits(quickstart.default_config(workdir), hooks=[Teller(parts)]).fit()


def measure(workdir: str, bytecode: str | None) -> dict[str, float]:
    """Seconds of the parts of one start.

    Raises:
        RuntimeError: the process ended before its first step.
    """
    outer = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    environment = outer | ({"PYTHONPYCACHEPREFIX": bytecode} if bytecode else {})
    command = [sys.executable, __file__, "--child", workdir]
    with tempfile.TemporaryFile("w+") as errors:
        start_s = time.time()
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith('{"imports"')), None)
        finally:
            process.kill()
            process.wait()
        if line is None:
            errors.seek(0)
            raise RuntimeError(
                f"the quickstart ended with {process.returncode} before its first step:\n"
                + errors.read()[-2000:]
            )
    told = json.loads(line)
    moments = {part: told[part] - start_s for part in ("imports", "first_step")}
    return told | moments


def starts(repeats: int, bytecode: bool, warm: bool) -> list[dict[str, float]]:
    """The parts of every start that counts."""
    found = []
    with tempfile.TemporaryDirectory(prefix="jaxgoodput-first-step-") as name:
        for index in range(repeats + warm):
            workdir = os.path.join(name, "run" if warm else str(index))
            prefix = os.path.join(name, f"bytecode-{index}") if bytecode else None
            parts = measure(workdir, prefix)
            if index >= warm:
                found.append(parts)
    return found


def asking(name: str, num_leaves: int) -> None:
    """Print what it takes to ask one optimizer, in a process that has compiled nothing of it."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxgoodput.optim.treatment import treatment_of

    shapes = [(32, 32), (32,), (64, 16), (16,)]
    params = {
        f"layer_{i}": jax.ShapeDtypeStruct(shapes[i % len(shapes)], jnp.float32)
        for i in range(num_leaves)
    }
    labels = {path: ("sgd", "adamw")[i % 2] for i, path in enumerate(params)}
    tx = {
        "adamw": lambda: optax.adamw(1e-3),
        "clipped": lambda: optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 1000))
        ),
        "muon": lambda: optax.contrib.muon(1e-3),
        "groups": lambda: optax.multi_transform(
            {"sgd": optax.sgd(0.1), "adamw": optax.adamw(1e-3)}, labels
        ),
    }[name]()
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))  # starting JAX is no part of it
    clock, processor = time.perf_counter(), time.process_time()
    treatment_of(tx, params)
    print(json.dumps([time.perf_counter() - clock, time.process_time() - processor]))


def ask_all(repeats: int, sizes: list[int]) -> None:
    """Print the medians of `asking` for all optimizers and numbers of leaves."""
    outer = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    print(
        f"{'optimizer':>10s} {'leaves':>7s} {'clock s':>8s} {'cores s':>8s}   of {repeats} starts"
    )
    for name in OPTIMIZERS:
        for size in sizes:
            command = [sys.executable, __file__, "--asking", name, "--leaves", str(size)]
            found = [
                json.loads(
                    subprocess.run(command, env=outer, stdout=subprocess.PIPE, check=True).stdout
                )
                for _ in range(repeats)
            ]
            clock, processor = (statistics.median(x) for x in zip(*found, strict=True))
            print(f"{name:>10s} {size:7d} {clock:8.2f} {processor:8.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bytecode", action="store_true", help="no module has bytecode yet")
    parser.add_argument("--warm", action="store_true", help="programs are compiled already")
    parser.add_argument("--asked-s", type=float, default=15.0)
    parser.add_argument("--optimizers", action="store_true", help="what asking them takes")
    parser.add_argument("--leaves", type=int, nargs="+", default=[10, 200, 1000])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--asking", choices=OPTIMIZERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.asking is not None:
        asking(options.asking, options.leaves[0])
        return
    if options.optimizers:
        ask_all(options.repeats, options.leaves)
        return
    if options.child is not None:
        child(options.child)
        return
    found = starts(options.repeats, options.bytecode, options.warm)
    print(f"{'seconds to':>12s} {'median':>7s} {'min':>6s} {'max':>6s}   of {len(found)} starts")
    for part in PARTS:
        seconds = [each[part] for each in found]
        middle, least, most = statistics.median(seconds), min(seconds), max(seconds)
        print(f"{part.replace('_', ' '):>12s} {middle:7.2f} {least:6.2f} {most:6.2f}")
    first_s = statistics.median(each["first_step"] for each in found)
    if first_s > options.asked_s:
        raise SystemExit(f"the first step came after {first_s:.1f} s, asked {options.asked_s:g}")


if __name__ == "__main__":
    main()
