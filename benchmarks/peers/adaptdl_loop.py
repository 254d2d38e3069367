"""AdaptDL's own loop (github.com/petuum/adaptdl, adaptdl 0.2.11), and a plain torch loop in turns with it.

Started by run.py, which stands in for AdaptDL's scheduler: it sets the environment variables that the
scheduler would, and starts the processes again.
"""

import argparse
import itertools
import os
import time
from typing import Any

import adaptdl.env  # pyright: ignore[reportMissingImports]
import adaptdl.torch  # pyright: ignore[reportMissingImports]
import stopwatch
import torch  # pyright: ignore[reportMissingImports]
import torch_loop
import torch_models
from adaptdl.torch import scaling_rules  # pyright: ignore[reportMissingImports]
from adaptdl.torch._metrics import _metrics_state  # pyright: ignore[reportMissingImports]
from data import WORKLOADS, Workload, load

# The same rules as ours: the root of the scale for Adagrad; None is AdaScale, or AdamScale for Adam.
RULES = {"recommender": scaling_rules.SqrtScale}


def train(name: str, columns: Any, workload: Workload, limits: Any, seed: int) -> stopwatch.Loop:
    """Yields after every update."""
    largest, bounds = limits
    adaptdl.torch.init_process_group("gloo")
    model = torch_models.Model(name, columns, seed)
    optimizer = torch_models.optimizer(name, model, workload.learning_rate)
    rule = RULES[name]() if name in RULES else None
    wrapped = adaptdl.torch.AdaptiveDataParallel(model, optimizer, scaling_rule=rule)
    dataset = torch_models.Passes(columns, workload.every, seed)  # it decides between passes only
    loader: Any = adaptdl.torch.AdaptiveDataLoader(
        dataset, batch_size=workload.base, shuffle=True, drop_last=True, collate_fn=lambda x: x
    )
    loader.autoscale_batch_size(largest, local_bsz_bounds=bounds, gradient_accumulation=True)
    for dataset.number in adaptdl.torch.remaining_epochs_until(10**9):
        for part in loader:
            optimizer.zero_grad()
            loss = wrapped(part)
            loss.backward()
            optimizer.step()
            if wrapped.require_backward_grad_sync:
                yield loader.current_batch_size, model


def limits_of(workload: Workload, *, is_pinned: bool = False) -> tuple[int, tuple[int, int]]:
    """The largest batch, and bounds of micro-batches. Pinned: all is measured, and the batch stays."""
    if is_pinned:
        return workload.base + 1, (workload.base, workload.base)
    return workload.max, (workload.base // 2, workload.max // 2)  # at least two micro-batches


def paused(seconds: float) -> None:
    """Evaluations are no part of the step times that AdaptDL goes by."""
    state: Any = _metrics_state()
    state.step_start += seconds


class Forced:
    """Has the loader change between two batches with every pass, where AdaptDL itself would decide."""

    def __init__(self, base: int):
        # With one replica, it makes larger batches of at least two micro-batches.
        self.found = itertools.cycle([(base, 0), (base, 1)])

    def __call__(self, helper: Any) -> int:
        state = helper._state
        state.current_local_bsz, state.accumulation_steps = next(self.found)
        return state.current_local_bsz


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=("step", "target", "start", "change", "elastic"))
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--data", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--changes", type=int, default=10)
    parser.add_argument("--steps", help="a file: a line for every update")
    options = parser.parse_args()
    torch.set_num_threads(max(2 // adaptdl.env.num_replicas(), 1))
    name, seed, workload = options.workload, options.seed, WORKLOADS[options.workload]
    columns, test = load(options.data, name)
    wait, limits = torch_loop.no_wait, limits_of(workload)
    pinned = limits_of(workload, is_pinned=True)
    if options.mode == "start":
        loop = train(name, columns, workload, limits, seed)
        stopwatch.tell(first_step_s=stopwatch.first_step(loop, wait))
    elif options.mode == "target":
        loop = train(name, columns, workload, limits, seed)

        def evaluate(model: Any) -> float:
            return torch_models.evaluate(model, test)

        found = stopwatch.to_target(loop, evaluate, workload, wait=wait, paused=paused)
        stopwatch.tell(**found)
    elif options.mode == "step":
        plain = torch_loop.train(name, columns, workload.base, workload.learning_rate, seed)
        loop = train(name, columns, workload, pinned, seed)
        before = [stopwatch.turn(plain, workload.turn, wait)]
        after = []
        for _ in range(options.rounds + 1):
            after.append(stopwatch.turn(loop, workload.turn, wait))
            before.append(stopwatch.turn(plain, workload.turn, wait))
        stopwatch.tell(**stopwatch.ratios(before[1:], after[1:]))  # the first turns warm up
    elif options.mode == "change":
        forced = Forced(workload.base)
        adaptdl.torch.data.AdaptiveDataLoaderHelper._sync_local_bsz = lambda self: forced(self)
        few = {k: v[: 20 * 2 * workload.base] for k, v in columns.items()}
        steps = []
        for num, _ in train(name, few, workload, limits, seed):
            steps.append((time.perf_counter(), num))
            if sum(a[1] != b[1] for a, b in itertools.pairwise(steps)) > options.changes + 2:
                break
        stopwatch.tell(lost_s=stopwatch.lost(steps, skip=2))
    else:
        with open(options.steps, "a", buffering=1) as file:
            for _ in train(name, columns, workload, pinned, seed):
                file.write(f"{time.time()} {os.getpid()}\n")


if __name__ == "__main__":
    main()
