"""Measures what the ladder of micro-batch sizes costs: its best goodput against the best over all integers.

    python benchmarks/ladder.py

Problems were recorded from AdaptDL's search (README.md beside them), those it calls EDGE excluded.
"""

import json
import pathlib
import sys

import numpy as np

from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import PerfParams, Placement
from jaxgoodput.goodput.search import BatchConfig, BatchLimits, best_batch

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "shared" / "golden" / "adaptdl"
FIELDS = {
    "alpha_c": "compute_base",
    "beta_c": "compute_per_sample",
    "alpha_n": "inter_base",
    "beta_n": "inter_per_replica",
    "alpha_r": "intra_base",
    "beta_r": "intra_per_replica",
    "gamma": "overlap",
}
Row = tuple[float, int, int, int, BatchConfig, BatchConfig, int]


def losses(path: pathlib.Path) -> list[Row]:
    """(loss, case, nodes, replicas, ladder's choice, best of all, sizes), the worst first."""
    rows = []
    for case in json.loads(path.read_text())["cases"]:
        if case["tag"].startswith("EDGE"):
            continue
        perf = PerfParams(**{FIELDS[k]: v for k, v in case["perf_params"].items()})
        base = case["init_batch_size"]
        model = GoodputModel(
            perf=perf, grad=GradParams(**case["grad_params"]), base_batch_size=base
        )
        largest = case["max_batch_size"] or base
        low, high = case["atomic_bsz_range"] or (None, None)
        low, high = low or 1, min(high or largest, largest)
        limits = BatchLimits(
            base=base,
            max=largest,
            micro=(low, high),
            max_micro_batches=16 if case["accumulation"] else 1,
        )
        expect = case["expect"]
        recorded = expect["atomic_bsz"], expect["accum_steps"]
        for row in np.broadcast(case["num_nodes"], case["num_replicas"], *recorded):
            nodes, replicas, size, accum_steps = map(int, row)
            if replicas * size * (accum_steps + 1) > largest:
                continue  # AdaptDL leaves its own limits here, some of which allow nothing
            at = Placement(num_nodes=nodes, num_replicas=replicas)
            every = range(low, high + 1)
            exact, best = best_batch(model, at, limits, micro_batch_sizes=every)
            chosen, reached = best_batch(model, at, limits)
            sizes = len(limits.ladder(replicas))
            rows.append((1 - reached / best, case["id"], nodes, replicas, chosen, exact, sizes))
    return sorted(rows, key=lambda row: -row[0])


def _written(config: BatchConfig) -> str:
    return f"{config.micro_batch_size} x {config.num_micro_batches}"


def main() -> int:
    path = GOLDEN / "optimize.json"
    if not path.is_file():
        print(f"skipped: the recorded searches are not beside this checkout ({path})")
        return 0
    rows = losses(path)
    print(
        f"{len(rows)} searches; goodput lost to the ladder: worst {rows[0][0]:.2%}, mean "
        f"{np.mean([row[0] for row in rows]):.3%}; sizes: {max(row[-1] for row in rows)} at most"
    )
    print(f"{'lost':>6} {'case':>5} {'nodes':>6} {'replicas':>8} {'ladder':>10} {'integers':>10}")
    for loss, case, nodes, replicas, chosen, exact, _ in rows[:5]:
        picks = f"{_written(chosen):>10} {_written(exact):>10}"
        print(f"{loss:6.2%} {case:5} {nodes:6} {replicas:8} {picks}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
