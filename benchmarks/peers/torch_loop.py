"""A plain torch loop. Started by run.py."""

import argparse
from typing import Any

import stopwatch
import torch  # pyright: ignore[reportMissingImports]
import torch_models
from data import WORKLOADS, load


def train(name: str, columns: Any, batch: int, rate: float, seed: int) -> stopwatch.Loop:
    """Yields after every update."""
    model = torch_models.Model(name, columns, seed)
    optimizer = torch_models.optimizer(name, model, rate)
    dataset = torch_models.Columns(columns)
    loader = torch.utils.data.DataLoader(
        dataset, batch, shuffle=True, drop_last=True, collate_fn=lambda rows: rows
    )
    while True:
        for part in loader:
            optimizer.zero_grad()
            loss = model(part)
            loss.backward()
            optimizer.step()
            yield batch, model


def no_wait(model: Any) -> None:
    """Nothing is under way behind the loop on a CPU."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("target", "start"))
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--data", required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(2)
    workload, (columns, test) = WORKLOADS[options.workload], load(options.data, options.workload)
    if options.mode == "start":
        loop = train(options.workload, columns, workload.base, workload.learning_rate, options.seed)
        stopwatch.tell(first_step_s=stopwatch.first_step(loop, no_wait))
        return
    for batch in workload.grid:
        loop = train(options.workload, columns, batch, workload.rate(batch), options.seed)
        found = stopwatch.to_target(
            loop, lambda model: torch_models.evaluate(model, test), workload, wait=no_wait
        )
        stopwatch.tell(batch=batch, **found)


if __name__ == "__main__":
    main()
