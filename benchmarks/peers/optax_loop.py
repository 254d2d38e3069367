"""A plain optax loop. Started by run.py."""

import argparse
import functools

import jax
import numpy as np
import optax
import stopwatch
from data import WORKLOADS, load
from jax_models import Problem


def train(problem: Problem, batch: int, rate: float, seed: int) -> stopwatch.Loop:
    """Yields after every update is dispatched; the one before is done."""
    tx = problem.optimizer(rate)
    params = problem.init(jax.random.key(seed))
    opt_state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, part):
        loss, grads = jax.value_and_grad(lambda p: problem.losses(p, part).mean())(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    rng = np.random.default_rng(seed)
    size = len(next(iter(problem.train.values())))
    before = None
    while True:
        order = rng.permutation(size)
        for start in range(0, size - batch + 1, batch):
            rows = order[start : start + batch]
            part = {name: column[rows] for name, column in problem.train.items()}
            params, opt_state, loss = step(params, opt_state, part)
            jax.block_until_ready(before)
            before = loss
            yield batch, params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("target", "start"))
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--data", required=True)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", options.cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    workload = WORKLOADS[options.workload]
    problem = Problem(options.workload, *load(options.data, options.workload))
    wait = jax.block_until_ready
    if options.mode == "start":
        loop = train(problem, workload.base, workload.learning_rate, options.seed)
        stopwatch.tell(first_step_s=stopwatch.first_step(loop, wait))
        return
    for batch in workload.grid:
        loop = train(problem, batch, workload.rate(batch), options.seed)
        found = stopwatch.to_target(loop, problem.evaluate, workload, wait=wait)
        stopwatch.tell(batch=batch, **found)


if __name__ == "__main__":
    main()
