"""Times the best goodput on every placement: one decision over 65,000 configurations.

python benchmarks/goodput_table.py
"""

import sys
import time

import numpy as np

from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import PerfParams, Placement
from jaxgoodput.goodput.search import BatchLimits, goodput_table

MODEL = GoodputModel(
    perf=PerfParams(
        compute_base=0.01,
        compute_per_sample=5e-4,
        intra_base=0.005,
        intra_per_replica=2e-4,
        inter_base=0.02,
        inter_per_replica=5e-4,
        overlap=1.6,
        update_s=0.002,
    ),
    grad=GradParams(sqr=1e-3, var=0.02),
    base_batch_size=128,
)
LIMITS = BatchLimits(base=128, max=65536, micro=(4, 512), max_micro_batches=16)
NUM_CONFIGURATIONS = 65_000


def main() -> int:
    sizes = len(LIMITS.ladder()) + 3
    num_placements = -(-NUM_CONFIGURATIONS // (sizes * LIMITS.max_micro_batches))
    replicas = np.arange(1, num_placements + 1)
    placements = Placement(num_nodes=-(-replicas // 8), num_replicas=replicas)
    goodput_table(MODEL, LIMITS, placements)
    elapsed_ms, cpu_ms = [], []
    for _ in range(100):
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        goodput_table(MODEL, LIMITS, placements)
        elapsed_ms.append((time.perf_counter() - start_s) * 1e3)
        cpu_ms.append((time.thread_time() - start_cpu_s) * 1e3)
    print(
        f"{'placements':>10} {'sizes':>6} {'micro-batches':>13} {'configurations':>14} "
        f"{'median ms':>10} {'p90 ms':>8} {'median CPU ms':>14}"
    )
    print(
        f"{num_placements:10} {sizes:6} {LIMITS.max_micro_batches:13} "
        f"{num_placements * sizes * LIMITS.max_micro_batches:14} "
        f"{np.median(elapsed_ms):10.2f} {np.quantile(elapsed_ms, 0.9):8.2f} {np.median(cpu_ms):14.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
