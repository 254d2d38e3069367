"""Counts the operations of a compiled step: by hand, plain, and with a noise sample.

    python benchmarks/operations.py                  # four models on 1 and 8 CPU devices, about 2 minutes
    python benchmarks/operations.py --only mlp:1 --list   # what the steps consist of

Optimised HLO instructions outside of fused computations are counted; bodies of loops, of conditionals and of
calls are, too. Parameters, constants, tuples and their elements, bitcasts, the two ends of an asynchronous
copy and after-all are not, because they take no time. Each row is a process of its own.
"""

import collections
import json
import re
import subprocess
import sys
from typing import Any

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("only", "", "One row, 'model:devices'.")
flags.DEFINE_integer("devices", 0, "Only rows of this many devices; 0: all.")
flags.DEFINE_bool("list", False, "Print how often each operation occurs.")
flags.DEFINE_string("dump", "", "Folder to write the programs' texts to.")
flags.DEFINE_bool("worker", False, "Internal: count one row and print it as JSON.")

# model, devices, samples per device
ROWS = tuple(
    (name, devices, count // devices)
    for name, count in (("mlp", 512), ("cnn", 128), ("decoder", 16), ("recommender", 4096))
    for devices in (1, 8)
)
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast copy-start copy-done after-all".split()
)
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (?:\([^=]*?\)|\S+) ([\w\-]+)\(")
_CALLED = re.compile(r"(?:body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_APPLIED = re.compile(r"to_apply=%?([\w.\-]+)")


def operations(text: str) -> collections.Counter[str]:
    """How often each operation occurs in the text of a compiled program."""
    bodies: dict[str, list[str]] = {}
    entry, current = "", ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = head[2]
            bodies[current] = []
            entry = current if head[1] else entry
        elif current:
            bodies[current].append(line)
    found: collections.Counter[str] = collections.Counter()
    waiting = [entry]
    while waiting:
        for line in bodies[waiting.pop()]:
            if not (instruction := _INSTRUCTION.match(line)):
                continue
            kind = instruction[1]
            waiting += _CALLED.findall(line)
            waiting += [x.strip(" %") for y in _BRANCHES.findall(line) for x in y.split(",")]
            if kind == "call":
                waiting += _APPLIED.findall(line)
            elif kind not in FREE:
                found[kind] += 1
    return found


def count(name: str, num_devices: int, per_device: int) -> dict[str, dict[str, int]]:
    """The operations of one row's programs, in this process."""
    import jax

    jax.config.update("jax_num_cpu_devices", num_devices)
    import optax
    from models import made

    from jaxgoodput import BatchLimits, Config, Strategy
    from jaxgoodput.data.datasets import as_source
    from jaxgoodput.data.sources import abstract_sample
    from jaxgoodput.engine.engine import Engines
    from jaxgoodput.train.start.problem import problem_of

    base = per_device * num_devices
    config = Config(workdir="/tmp", batch=BatchLimits(base=base, max=base), base_steps=1)
    trainer = made(name, config, devices=jax.devices()[:num_devices])
    source = as_source(trainer.dataset())
    engines = Engines(problem_of(trainer, trainer.config), abstract_sample(source))
    engine = engines.on(Strategy(data=num_devices).on(jax.devices()[:num_devices]))
    programs, shape = engine.programs, engine.shape(per_device)
    tx: Any = trainer.optimizer()
    layout = engine.layout

    def hand_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(trainer.mean_loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def placed(tree, sharding):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    params = placed(jax.eval_shape(trainer.init, jax.random.key(0)), layout.replicated)
    opt_state = placed(jax.eval_shape(tx.init, params), layout.replicated)
    batch = placed(shape.batch(base), layout.batch_sharding)
    by_hand = jax.jit(hand_step, donate_argnums=(0, 1), out_shardings=layout.replicated)
    compiled = {
        "by hand": by_hand.lower(params, opt_state, batch).compile(),
        "plain": programs.step(shape, measure=False).compile(),
    }
    (measuring,) = programs.measuring(shape)
    compiled["measuring"] = measuring().compile()
    texts = {kind: program.as_text() or "" for kind, program in compiled.items()}
    if FLAGS.dump:
        for kind, text in texts.items():
            path = f"{FLAGS.dump}/{name}-{num_devices}-{kind.replace(' ', '-')}.txt"
            with open(path, "w") as file:
                file.write(text)
    return {kind: dict(operations(text)) for kind, text in texts.items()}


def main(argv: list[str]) -> None:
    """Count the rows and print the table."""
    del argv
    chosen = [row for row in ROWS if FLAGS.only in ("", f"{row[0]}:{row[1]}")]
    chosen = [row for row in chosen if FLAGS.devices in (0, row[1])]
    if FLAGS.worker:
        print(json.dumps(count(*chosen[0])))
        return
    print("| model | devices | by hand | plain | asked | measuring | asked |")
    print("|---|---|---|---|---|---|---|")
    for name, devices, _ in chosen:
        command = [sys.executable, __file__, f"--only={name}:{devices}", f"--dump={FLAGS.dump}"]
        done = subprocess.run([*command, "--worker"], stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        hand, plain, measuring = (sum(row[k].values()) for k in ("by hand", "plain", "measuring"))
        asked = hand + 12 if hand < 200 else round(max(1.05 * hand, hand + 12))
        more = round(1.5 * hand + 12)
        print(
            f"| {name} | {devices} | {hand} | {plain} | {asked} | {measuring} | {more} |",
            flush=True,
        )
        if FLAGS.list:
            for kind in sorted({k for one in row.values() for k in one}):
                print(f"  {kind:24}", *(f"{one.get(kind, 0):5}" for one in row.values()))


if __name__ == "__main__":
    app.run(main)
