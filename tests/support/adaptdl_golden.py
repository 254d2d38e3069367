"""Reads the numbers recorded from AdaptDL in our own words."""

import json

import numpy as np

from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.goodput.fit import StepTimings
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import PerfParams, Placement

FIELDS = {
    "alpha_c": "compute_base",
    "beta_c": "compute_per_sample",
    "alpha_n": "inter_base",
    "beta_n": "inter_per_replica",
    "alpha_r": "intra_base",
    "beta_r": "intra_per_replica",
    "gamma": "overlap",
}


def cases(golden, name):
    return json.loads((golden / "adaptdl" / f"{name}.json").read_text())["cases"]


def perf_of(params):
    return PerfParams(**{FIELDS[name]: value for name, value in params.items()})


def model_of(case):
    return GoodputModel(
        perf=perf_of(case["perf_params"]),
        grad=GradParams(**case["grad_params"]),
        base_batch_size=case["init_batch_size"],
    )


def timings_of(rows):
    missing = np.full(len(rows["num_nodes"]), np.nan)
    return StepTimings(
        num_nodes=np.array(rows["num_nodes"]),
        num_replicas=np.array(rows["num_replicas"]),
        micro_batch_size=np.array(rows["atomic_bsz"]),
        accumulate_s=np.array(rows["accum_step_time"]),
        reduce_s=missing,
        update_s=missing,
        step_s=np.array(rows["optim_step_time"]),
        weight=np.ones(len(missing)),
    )


def searches(case):
    """(nodes, replicas, expected goodput, micro-batch size, micro-batches) of every search."""
    columns = [case["num_nodes"], case["num_replicas"]]
    expect = case["expect"]
    columns += [expect["goodput"], expect["atomic_bsz"], np.array(expect["accum_steps"]) + 1]
    return [tuple(row) for row in np.broadcast(*columns)]


def adaptdl_candidates(case, replicas):
    """[(micro_batch_size, num_micro_batches)]: the at most 50 configurations AdaptDL looks at."""
    base = case["init_batch_size"]
    largest = case["max_batch_size"] or base
    low, high = case["atomic_bsz_range"] or (None, None)
    low, high = low or 1, high or largest
    per_replica = np.geomspace(max(base, low * replicas), largest, 50) / replicas
    if case["accumulation"]:
        counts = np.ceil(per_replica / high - 1e-8)
        if replicas == 1:  # its noise estimate needs two micro-batches
            counts = np.where(per_replica > base, np.maximum(counts, 2), counts)
        sizes = np.ceil(per_replica / counts - 1e-8)
    else:
        counts = np.ones(50)
        sizes = np.ceil(per_replica - 1e-8) if replicas > 1 else np.full(50, base)
    return [(int(b), int(k)) for b, k in zip(np.clip(sizes, low, high), counts, strict=True)]


def adaptdl_best(case, nodes, replicas):
    """(goodput, micro_batch_size, num_micro_batches) of the first best candidate, by our model."""
    sizes, counts = np.array(adaptdl_candidates(case, int(replicas))).T
    at = Placement(num_nodes=int(nodes), num_replicas=int(replicas))
    goodputs = model_of(case).goodput(at, sizes, counts)
    best = int(np.argmax(goodputs))
    return float(goodputs[best]), int(sizes[best]), int(counts[best])
