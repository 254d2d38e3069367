"""A step of a plain loop, alone and in a loop of one program: seconds of a step, and of compiling it.

    python benchmarks/looped_steps.py                        # the problems of everyday.py, about a minute
    python benchmarks/looped_steps.py --only pictures

`alone` is one donated jit of a step, one dispatch a step. `part` is a program of eight steps in a loop whose
bounds are arguments, of which one step is dispatched at a time; `block` dispatches all eight. The ways take
turns on one batch (`part` and `block`: of eight times the rows); ratios are formed within a turn, and given
as their median with quartiles.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from everyday import WORKLOADS, Scale, Workload

import jaxgoodput as jg

FLAGS = flags.FLAGS
flags.DEFINE_list("only", list(WORKLOADS), "Problems.")
flags.DEFINE_integer("turns", 9, "Turns.")

BLOCK = 16
TURN_S = 0.3


def programs_of(workload: Workload) -> tuple[dict[str, Callable[[], Any]], list[float]]:
    """Return functions that run one step, one in a loop, and eight; and what compiling took."""
    task: Any = workload.task(
        jg.Config(
            workdir="unused",
            batch=jg.BatchLimits(base=workload.base, max=workload.base),
            base_steps=1,
        )
    )
    tx, data = task.optimizer(), task.dataset()
    first = np.arange(BLOCK * workload.base) % len(next(iter(data.values())))
    wide = jax.device_put({name: column[first] for name, column in data.items()})
    rows = jax.device_put({name: column[first[: workload.base]] for name, column in data.items()})

    def step(params: Any, opt_state: Any, part: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(task.mean_loss)(params, part)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def steps(params: Any, opt_state: Any, begin: jax.Array, end: jax.Array, wide: Any) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(BLOCK, workload.base, *x.shape[1:]), wide)

        def one(i: jax.Array, carried: Any) -> Any:
            params, opt_state, losses = carried
            part = jax.tree.map(lambda x: x[i], parts)
            params, opt_state, loss = step(params, opt_state, part)
            return params, opt_state, losses.at[i].set(loss)

        return jax.lax.fori_loop(begin, end, one, (params, opt_state, jnp.zeros(BLOCK)))

    zero, end = jnp.int32(0), {"part": jnp.int32(1), "block": jnp.int32(BLOCK)}
    seconds, runs = [], {}
    for names, function, inputs in (
        (["alone"], step, {"alone": (rows,)}),
        (["part", "block"], steps, {name: (zero, at, wide) for name, at in end.items()}),
    ):
        state = began_with(task, tx)
        began_s = time.perf_counter()
        lowered = jax.jit(function, donate_argnums=(0, 1)).lower(*state, *inputs[names[0]])
        compiled = lowered.compile()
        seconds.append(time.perf_counter() - began_s)
        for name in names:
            runs[name] = stepping(compiled, began_with(task, tx), inputs[name])
    return runs, seconds


def began_with(task: Any, tx: Any) -> tuple[Any, Any]:
    """Parameters and optimizer state."""
    params = task.init(jax.random.key(0))
    return params, tx.init(params)


def stepping(compiled: Any, state: tuple[Any, Any], inputs: Any) -> Callable[[], Any]:
    """Return a function that dispatches once, with the state that the dispatch before left."""
    held = [state]

    def run() -> Any:
        params, opt_state, loss = compiled(*held[0], *inputs)
        held[0] = params, opt_state
        return loss

    return run


def seconds_of(run: Callable[[], Any], count: int) -> float:
    """Return the seconds of one of `count` dispatches."""
    began_s = time.perf_counter()
    for _ in range(count - 1):
        run()
    jax.block_until_ready(run())
    return (time.perf_counter() - began_s) / count


def main(argv: list[str]) -> None:
    """Measure and print."""
    del argv
    rows = []
    for name in FLAGS.only:
        runs, compiling_s = programs_of(WORKLOADS[name].scaled(Scale()))
        found: dict[str, list[float]] = {way: [] for way in runs}
        for run in runs.values():
            seconds_of(run, 3)
        counts = {way: max(int(TURN_S / seconds_of(run, 10)), 5) for way, run in runs.items()}
        for _ in range(FLAGS.turns):
            for way, run in runs.items():
                steps = BLOCK if way == "block" else 1
                found[way].append(seconds_of(run, counts[way]) / steps)
        alone = found["alone"]
        row = [name, f"{statistics.median(alone) * 1e6:.0f}"]
        for way in ("part", "block"):
            low, mid, high = np.percentile(np.divide(found[way], alone), [25, 50, 75])
            row.append(f"{mid:.2f} ({low:.2f}-{high:.2f})")
        rows.append([*row, f"{compiling_s[0]:.2f}", f"{compiling_s[1]:.2f}"])
    columns = ["problem", "alone, us", "part / alone", "block / alone, a step"]
    columns += ["compiling alone, s", "compiling the loop, s"]
    print("\none step alone and in a loop")
    for cells in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    app.run(main)
