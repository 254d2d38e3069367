"""Measures a change of layout, beside a plain copy, `jax.device_put` and a jitted identity.

    python benchmarks/reshard.py                      # the table in BUILD_NOTES.md, about 5 minutes
    python benchmarks/reshard.py --only "fsdp8>tensor8" --mebibytes 100
    python benchmarks/reshard.py --devices gpu        # on all GPUs of a machine; GB/s are absolute there

A state of float32 parameters, two optimizer moments and small leaves goes from one strategy to another
and is made anew for every turn. The four ways take turns, round by round; ratios are formed within a
round; the table gives medians. Every way ends with the sources deleted and the targets ready. *Copy* is
a jitted copy of the target state, so it writes the same bytes as the move has to write. Rows of virtual
CPU devices only inform: they share one memory, which no real devices do.
"""

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from absl import app, flags

from jaxgoodput.launcher.local import keep_freed_pages

FLAGS = flags.FLAGS
flags.DEFINE_string("only", "", "One pair, 'from>to', as the table names it.")
flags.DEFINE_integer("rounds", 7, "Turns of each way.")
flags.DEFINE_integer("mebibytes", 400, "Size of the state, counted once.")
flags.DEFINE_integer("group_mebibytes", 0, "Leaf groups of this size per device; 0 = the default.")
flags.DEFINE_enum("devices", "cpu", ["cpu", "gpu"], "8 virtual CPU devices, or the GPUs.")
flags.DEFINE_bool("worker", False, "Internal: measure in this process.")

# Degrees (data, fsdp, tensor) before and after, as numbers of devices out of 8; "half" is the first half.
PAIRS = (
    ("data8", "fsdp8"),
    ("fsdp8", "data8"),
    ("fsdp8", "tensor8"),
    ("tensor8", "fsdp8"),
    ("data2.fsdp4", "fsdp8"),
    ("fsdp8", "data2.fsdp4"),
    ("data2.tensor4", "tensor8"),
    ("data2.tensor4", "data4.tensor2"),
    ("data4.tensor2", "data2.tensor4"),
    ("fsdp4.tensor2", "data2.tensor4"),
    ("fsdp2.tensor4", "fsdp4.tensor2"),
    ("data2.fsdp2.tensor2", "fsdp4.tensor2"),
    ("fsdp8", "half:fsdp4"),
    ("half:fsdp4", "fsdp8"),
    ("half:fsdp4", "other:fsdp4"),
    ("fsdp8", "swapped:fsdp8"),
)
WIDTH = 1024


def measure() -> None:
    """All chosen pairs, in this process."""
    import jax

    if FLAGS.devices == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
    import jax.numpy as jnp
    import numpy as np

    from jaxgoodput.parallel.move import Move
    from jaxgoodput.parallel.partition import param_specs
    from jaxgoodput.parallel.plan import GROUP_BYTES
    from jaxgoodput.parallel.strategy import Layout, Strategy

    devices = jax.devices()
    count = len(devices)
    block = 8 * WIDTH * WIDTH  # elements: two matrices
    num_blocks = max(round(FLAGS.mebibytes * 2**20 / (3 * 4 * block)), 1)
    group_bytes = FLAGS.group_mebibytes * 2**20 or GROUP_BYTES

    def init() -> Any:
        def params(offset: float) -> Any:
            def filled(shape: tuple[int, ...], number: int) -> Any:
                rows = jax.lax.broadcasted_iota(jnp.float32, shape, 0)
                if len(shape) == 1:
                    return rows + number + offset
                return rows * shape[1] + jax.lax.broadcasted_iota(jnp.float32, shape, 1) + number

            return {
                str(i): {
                    "up": {"kernel": filled((WIDTH, 4 * WIDTH), i)},
                    "down": {"kernel": filled((4 * WIDTH, WIDTH), -i), "bias": filled((WIDTH,), i)},
                }
                for i in range(num_blocks)
            }

        return {"params": params(0), "m": params(1), "v": params(2), "count": jnp.int32(7)}

    abstract = jax.eval_shape(init)

    def layout(name: str) -> Layout:
        where, _, degrees_text = name.rpartition(":")
        half = count // 2
        chosen = {
            "": devices,
            "half": devices[:half],
            "other": devices[half:],
            "swapped": [*devices[half:], *devices[:half]],
        }[where]
        degrees = {"data": 1, "fsdp": 1, "tensor": 1}
        for part in degrees_text.split("."):
            axis = part.rstrip("0123456789")
            degrees[axis] = int(part[len(axis) :])
        plan = Strategy(data=degrees["data"], fsdp=degrees["fsdp"], tensor=degrees["tensor"])
        return plan.on(chosen)

    chosen = [pair for pair in PAIRS if FLAGS.only in ("", ">".join(pair))]
    print(
        f"{'from':20} {'to':20} {'moved MiB':>9} {'routes':22} {'ms':>6} {'MB/s':>7} {'/ copy':>6} "
        f"{'/ put':>6} {'/ jit':>6} {'/ best':>6} {'temp':>5}  {'extra MiB':>9} {'compile s':>9}  class"
    )
    for before, after in chosen:
        source, target = layout(before), layout(after)
        from_shardings = param_specs(source, abstract["params"]).shardings(abstract)
        to_shardings = param_specs(target, abstract["params"]).shardings(abstract)
        make = jax.jit(init, out_shardings=from_shardings).lower().compile()
        make_target = jax.jit(init, out_shardings=to_shardings).lower().compile()
        state = make()
        start = time.perf_counter()
        move = Move.compile(state, to_shardings, group_bytes=group_bytes)
        compile_s = time.perf_counter() - start

        def copied(t: Any) -> Any:
            return jax.tree.map(jnp.copy, t)

        copy = jax.jit(copied, out_shardings=to_shardings).lower(make_target()).compile()
        ways: dict[str, Callable[[Any], Any]] = {"move": move}

        handed_on: list[int] = []
        kept: list[set[int]] = []
        same_set = set(source.mesh.devices.flat) == set(target.mesh.devices.flat)
        same_order = source.mesh.devices.ravel().tolist() == target.mesh.devices.ravel().tolist()

        def put(
            t: Any,
            to: Any = to_shardings,
            handed_on: list[int] = handed_on,
            kept: list[set[int]] = kept,
            reordered: bool = same_set and not same_order,
        ) -> Any:
            if reordered:
                # A program with a collective per leaf: several at once can lock XLA:CPU up.
                done = jax.tree.map(lambda x, s: jax.block_until_ready(jax.device_put(x, s)), t, to)
            else:
                done = jax.block_until_ready(jax.device_put(t, to))
            pairs = list(zip(jax.tree.leaves(t), jax.tree.leaves(done), strict=True))
            if not kept:  # in the first turn, which is not timed
                kept.append(set())
                for i, (x, y) in enumerate(pairs):
                    before_put, after_put = pointers(x), pointers(y)
                    if set(before_put) & set(after_put):
                        kept[0].add(i)
                        handed_on.append(x.nbytes)
                    elif len(set(after_put)) < len(after_put):
                        handed_on.append(x.nbytes)  # several devices share one buffer
            for i, (x, _) in enumerate(pairs):
                if i not in kept[0]:  # the result would go with it
                    x.delete()
            return done

        ways["put"] = put
        if same_order:

            def identity(t: Any) -> Any:
                return t

            jitted = jax.jit(identity, out_shardings=to_shardings).lower(state).compile()

            def by_jit(t: Any, program: Any = jitted) -> Any:
                done = jax.block_until_ready(program(t))
                for x in jax.tree.leaves(t):
                    x.delete()
                return done

            ways["jit"] = by_jit
        seconds: dict[str, list[float]] = {name: [] for name in (*ways, "copy")}
        for turn in range(FLAGS.rounds + 1):
            for name, way in ways.items():
                del state
                state = jax.block_until_ready(make())
                start = time.perf_counter()
                result = jax.block_until_ready(way(state))
                took = time.perf_counter() - start
                if turn == 0 and name == "move":
                    wanted = make_target()
                    same = jax.tree.map(np.array_equal, result, wanted)
                    assert all(jax.tree.leaves(same)), "the move changed a value"
                    del wanted
                del result
                if turn:  # the first turn warms everything up
                    seconds[name].append(took)
            written = jax.block_until_ready(make_target())
            start = time.perf_counter()
            again = jax.block_until_ready(copy(written))
            if turn:
                seconds["copy"].append(time.perf_counter() - start)
            del written, again
        state = None
        print(row(before, after, move, seconds, sum(handed_on) > 2**20, compile_s), flush=True)


def pointers(tree: Any) -> list[int]:
    """Addresses of all buffers, to see what a way moved and what it handed on."""
    import jax

    return [
        shard.data.unsafe_buffer_pointer()
        for x in jax.tree.leaves(tree)
        for shard in x.addressable_shards
    ]


def row(
    before: str,
    after: str,
    move: Any,
    seconds: dict[str, list[float]],
    aliased: bool,
    compile_s: float,
) -> str:
    """One line of the table."""
    plan = move.plan
    target_bytes = sum(plan.after_bytes.values())
    move_s = statistics.median(seconds["move"])

    def ratio(of: str) -> float:
        if of not in seconds:
            return math.nan
        return statistics.median(a / b for a, b in zip(seconds["move"], seconds[of], strict=True))

    others = [seconds[name] for name in ("put", "jit") if name in seconds]
    best = min(others, key=statistics.median)
    to_best = statistics.median(a / b for a, b in zip(seconds["move"], best, strict=True))
    routes = "+".join(sorted({group.plan.route for group in move.groups}))
    temp = max(
        g.xla_temporary_bytes / max(g.plan.whole_bytes, 1) for g in move.groups
    )  # of XLA's programs, per device
    held_before, held_after = sum(plan.before_bytes.values()), target_bytes
    kind = "aliased" if aliased else "gather" if held_after > 1.1 * held_before else "moved"
    return (
        f"{before:20} {after:20} {plan.bytes_moved / 2**20:9.0f} {routes:22} {move_s * 1e3:6.0f} "
        f"{target_bytes / move_s / 1e6:7.0f} {1 / ratio('copy'):6.2f} {ratio('put'):6.2f} "
        f"{ratio('jit'):6.2f} {to_best:6.2f} {temp:5.2f}  {plan.peak_extra_bytes / 2**20:9.1f} "
        f"{compile_s:9.2f}  {kind}"
    )


def main(argv):
    """Run the pairs in a process of their own: the number of virtual devices is fixed at start."""
    del argv
    if FLAGS.worker:
        measure()
        return
    environ = dict(os.environ)
    if FLAGS.devices == "cpu":
        environ |= keep_freed_pages({**environ, "JAX_PLATFORMS": "cpu"})  # as the launcher sets it
    command = [sys.executable, __file__, *sys.argv[1:], "--worker"]
    subprocess.run(command, check=True, env=environ)


if __name__ == "__main__":
    app.run(main)
