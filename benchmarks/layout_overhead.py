"""Measures what noise statistics cost a step under each layout, in time and in device memory.

    python benchmarks/layout_overhead.py                     # both tables, about 15 minutes on two cores
    python benchmarks/layout_overhead.py --only "fsdp8:plain"
    python benchmarks/layout_overhead.py --rounds 0          # cost analysis, collectives, memory only

A byte LM with matrices that a device would really have, on 8 virtual devices. Each row is a process of
its own. The engine's plain step and the step that measures the noise take turns, round by round; a ratio
is formed within a round, the plain step timed before and after; of wall time, and of the process's CPU
time, which a machine that is busy elsewhere disturbs less. Where there is one gradient of all rows, the
step that measures computes that of a quarter of them besides. Every step is waited for. Flops and bytes are
XLA's cost analysis per device; collectives are counted in the HLO, by kind and by the shapes they carry.
"""

import collections
import dataclasses
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("only", "", "One row, 'strategy:how', as the table names it.")
flags.DEFINE_integer("rounds", 3, "Turns of each kind of step; 0 = analysis only.")
flags.DEFINE_integer("steps", 1, "Timed steps of a turn.")
flags.DEFINE_integer("windows", 8, "Windows of 256 bytes per replica.")
flags.DEFINE_integer("width", 512, "Width of the model; its matrices are up to width x 4 width.")
flags.DEFINE_integer("layers", 1, "Layers of the model.")
flags.DEFINE_bool("worker", False, "Internal: measure one row and print it as JSON.")

NUM_DEVICES = 8
# Degrees, and whether gradients are divided by Adam's preconditioner before they are compared.
ROWS = (
    ({"fsdp": 8}, False),
    ({"fsdp": 4, "tensor": 2}, False),
    ({"fsdp": 8}, True),
    ({"fsdp": 4, "tensor": 2}, True),
    ({"data": 8}, False),
    ({"data": 8}, True),
    ({"data": 2, "fsdp": 4}, True),
)
MEMORY = (
    {"data": 8},
    {"data": 4, "fsdp": 2},
    {"data": 2, "fsdp": 4},
    {"fsdp": 8},
    {"fsdp": 4, "tensor": 2},
    {"fsdp": 2, "tensor": 4},
    {"data": 4, "tensor": 2},
)
COLLECTIVE = re.compile(
    r" = (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
SHAPE = re.compile(r"\w+\[[\d,]*\]")


def name_of(degrees: dict[str, int], preconditioned: bool) -> str:
    """How the table names a row."""
    strategy = ".".join(f"{axis}{degree}" for axis, degree in degrees.items())
    return f"{strategy}:{'adam' if preconditioned else 'plain'}"


def collectives(text: str) -> collections.Counter[tuple[str, str]]:
    """(kind, shape of one result) -> how many, in an optimized HLO text."""
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for results, kind in COLLECTIVE.findall(text):
        found.update((kind, shape) for shape in SHAPE.findall(results))
    return found


def num_elements(shape: str) -> int:
    """Elements of a shape such as 'f32[8,4]'."""
    return math.prod(int(n) for n in shape[shape.index("[") + 1 : -1].split(",") if n)


def build(degrees: dict[str, int], preconditioned: bool) -> tuple[Any, Any]:
    """The engine of the model under a strategy, and rows to train on; nothing is compiled."""
    import jax

    # Must be set before the first use of a device, hence a process per row.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    from models import ByteLm

    from jaxgoodput import BatchLimits, Config
    from jaxgoodput.engine.engine import Engines
    from jaxgoodput.engine.step import Problem
    from jaxgoodput.optim import learning_rate as rules
    from jaxgoodput.optim.adaptive import adaptive
    from jaxgoodput.parallel.strategy import Strategy

    class LargeByteLm(ByteLm):
        layers, width, length, heads = FLAGS.layers, FLAGS.width, 256, 8

    strategy = dataclasses.replace(Strategy(), **degrees)
    base = strategy.num_replicas * FLAGS.windows
    with tempfile.TemporaryDirectory() as workdir:
        trainer = LargeByteLm(
            Config(workdir=workdir, batch=BatchLimits(base=base, max=base), base_steps=1)
        )
    problem = Problem(
        init=trainer.init,
        loss_and_state=lambda params, state, batch, key: (trainer.loss(params, batch, key), state),
        tx=adaptive(trainer.optimizer(), rules.adascale, base_batch_size=base),
        base_batch_size=base,
        preconditioned=preconditioned,
    )
    rows = {"tokens": trainer.dataset()["tokens"][:base]}
    sample = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
    return Engines(problem, sample).on(strategy.on(jax.devices()[:NUM_DEVICES])), rows


def measure(degrees: dict[str, int], preconditioned: bool) -> dict[str, Any]:
    """One row, in this process."""
    import jax

    from jaxgoodput.engine.programs.families import SeparatePrograms

    engine, rows = build(degrees, preconditioned)
    # By what a step measures; "off" is the plain step.
    programs = {
        "measured" if program.keywords["measure"] else "off": program
        for program in (
            *engine.training_programs(FLAGS.windows, accumulate=False),
            *engine.measuring_programs(FLAGS.windows),
        )
    }
    kinds = tuple(programs)
    cost = {kind: dict(engine.compiled.cost(program)) for kind, program in programs.items()}
    found = {kind: collectives(engine.compiled.text(program)) for kind, program in programs.items()}
    plain, measured = engine.bytes_of(FLAGS.windows), engine.measuring_bytes_of(FLAGS.windows)
    row = {
        "estimator": "replicas"
        if isinstance(engine.programs, SeparatePrograms)
        else "part of the rows",
        "gflop": cost["off"]["flops"] / 1e9,
        "flops": {kind: cost[kind]["flops"] / cost["off"]["flops"] for kind in kinds},
        "bytes": {
            kind: cost[kind]["bytes accessed"] / cost["off"]["bytes accessed"] for kind in kinds
        },
        "collectives": {kind: found[kind].total() for kind in kinds},
        "extra": {
            kind: [[*what, count] for what, count in (found[kind] - found["off"]).items()]
            for kind in kinds
        },
        "fewer": {
            kind: [[*what, count] for what, count in (found["off"] - found[kind]).items()]
            for kind in kinds
        },
        "peak_bytes": [plain.peak, measured.peak],
        "temporary_bytes": [plain.temporaries, measured.temporaries],
    }
    if not FLAGS.rounds:
        return row

    batch = jax.device_put(rows, engine.layout.batch_sharding)
    mask = np.ones(len(rows["tokens"]), np.float32)
    mask = jax.device_put(mask, engine.layout.batch_sharding)
    held = [engine.init(jax.random.key(0))]

    def timed(measured: bool) -> np.ndarray:
        """Seconds of a step: of wall time, of CPU time."""
        start = now()
        held[0], metrics = engine.step(held[0], None, batch, mask, measure=measured)
        # Many collectives under way at once make XLA:CPU hang, so every step is waited for.
        jax.block_until_ready(metrics)
        return now() - start

    def now() -> np.ndarray:
        return np.array([time.perf_counter(), time.process_time()])

    def several(measured: bool) -> np.ndarray:
        return np.mean([timed(measured) for _ in range(FLAGS.steps)], axis=0)

    rounds: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for turn in range(FLAGS.rounds + 1):
        took = {"off": several(False)}
        took["measured"] = several(True)
        took["off"] = (took["off"] + several(False)) / 2
        if turn:  # the first turn warms everything up
            for kind, seconds in took.items():
                rounds[kind].append(seconds.tolist())
    return {**row, "rounds": rounds}


def memory() -> list[dict[str, Any]]:
    """Bytes of state per device, by strategy, from shapes and shardings alone."""
    import jax

    lines = []
    for degrees in MEMORY:
        engine, _ = build(degrees, False)
        leaves = jax.tree.leaves(jax.eval_shape(lambda s: s, engine.abstract_state()))
        placed = jax.tree.leaves(engine.abstract_state())
        whole = sum(x.size * x.dtype.itemsize for x in leaves)
        mine = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in placed)
        lines.append({"degrees": degrees, "whole": whole, "per_device": mine})
    return lines


def ratio(above: list[list[float]], below: list[list[float]], which: int) -> str:
    """Median and range of the ratios within rounds; `which` is 0 for wall and 1 for CPU time."""
    values = [a[which] / b[which] for a, b in zip(above, below, strict=True)]
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def shown(extra: list[list[Any]]) -> str:
    """Collectives as a table shows them: the large ones by name, scalars counted."""
    small = sum(count for _, shape, count in extra if num_elements(shape) == 1)
    large = [f"{count} {kind} {shape}" for kind, shape, count in extra if num_elements(shape) > 1]
    return ", ".join([*large, f"{small} scalars"] if small else large) or "-"


def main(argv):
    """Run the rows and print the tables."""
    del argv
    chosen = [r for r in ROWS if FLAGS.only in ("", name_of(*r))]
    if FLAGS.worker:
        print(json.dumps(measure(*chosen[0]) if chosen else memory()))
        return

    def worker(only: str) -> Any:
        options = [
            f"--{f}={FLAGS[f].value}" for f in ("rounds", "steps", "windows", "width", "layers")
        ]
        done = subprocess.run(
            [sys.executable, __file__, "--worker", f"--only={only}", *options],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])

    lines, remarks = [], []
    for degrees, preconditioned in chosen:
        name = name_of(degrees, preconditioned)
        row = worker(name)
        kinds = [kind for kind in row["flops"] if kind != "off"]
        rounds = row.get("rounds")
        step_ms = statistics.median(wall for wall, _ in rounds["off"]) * 1e3 if rounds else math.nan
        parts = {kind: [kind] for kind in kinds}
        if len(kinds) == 2:
            parts["mean of the pair"] = kinds
        for part, of in parts.items():
            times = f"{'-':22} {'-':22}"
            if rounds:
                means = np.mean([rounds[kind] for kind in of], axis=0).tolist()
                times = f"{ratio(means, rounds['off'], 0):22} {ratio(means, rounds['off'], 1):22}"
            flops, moved, colls = (
                statistics.mean(row[what][kind] for kind in of)
                for what in ("flops", "bytes", "collectives")
            )
            lines.append(
                f"{name:20} {part:16} {row['gflop']:7.1f} {step_ms:8.0f}  {times} {flops:7.4f} "
                f"{moved:6.3f}  {row['collectives']['off']:>3}/{colls:<5g} "
                f"{row['peak_bytes'][1] / row['peak_bytes'][0]:6.3f}"
            )
            print(lines[-1], file=sys.stderr)
        for kind in kinds:
            remarks.append(f"{name:20} {kind:16} more: {shown(row['extra'][kind])}")
            if row["fewer"][kind]:
                remarks.append(f"{'':37} less: {shown(row['fewer'][kind])}")
    print(
        f"{'layout:noise':20} {'step':16} {'GFLOP':>7} {'plain ms':>8}  {'wall / plain step':22} "
        f"{'CPU / plain step':22} {'flops':7} {'bytes':6}  collectives peak"
    )
    print("\n".join(lines))
    print("\ncollectives of the measured step, beyond those of the plain step")
    print("\n".join(remarks))
    if not FLAGS.only:
        print(
            f"\n{'layout':20} {'state, MB per device':>22} {'of the whole':>14} {'1 / degree':>12}"
        )
        for line in worker("memory"):
            degree = line["degrees"].get("fsdp", 1) * line["degrees"].get("tensor", 1)
            print(
                f"{name_of(line['degrees'], False).split(':')[0]:20} {line['per_device'] / 1e6:22.2f} "
                f"{line['per_device'] / line['whole']:14.4f} {1 / degree:12.4f}"
            )


if __name__ == "__main__":
    app.run(main)
