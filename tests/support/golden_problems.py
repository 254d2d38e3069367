"""The golden instances of Gavel as `FractionProblem`s."""

import json

import numpy as np

from jaxgoodput.cluster.published.gavel.fractions import FractionProblem


def instances(folder, pattern):
    for path in sorted((folder / "gavel_sia").glob(pattern)):
        data = json.loads(path.read_text())
        yield path.stem, problem_of(data["instance"]), data["instance"], data["results"]


def problem_of(instance):
    kinds = instance["worker_types"]
    jobs = instance["jobs"]
    entity_of = {j: e for e, ids in instance.get("entity_to_jobs", {}).items() for j in ids}
    slos = {int(job): s for job, s in instance.get("SLOs", {}).items()}
    costs = instance.get("instance_costs", dict.fromkeys(kinds, 1.0))
    combinations = instance.get("combinations", [])
    pairs = [tuple(c) for c in combinations if len(c) == 2]
    speeds = [
        rates
        for c, rates in zip(combinations, instance.get("pair_throughputs", []), strict=True)
        if len(c) == 2
    ]
    return FractionProblem(
        job_ids=tuple(str(job["id"]) for job in jobs),
        kinds=tuple(kinds),
        throughput=np.array([[job["throughput"][k] for k in kinds] for job in jobs], float),
        scale_factor=np.array([job["scale_factor"] for job in jobs]),
        capacity=np.array([instance["cluster_spec"][k] for k in kinds]),
        weight=np.array([job["weight"] for job in jobs], float),
        remaining_steps=np.array([job.get("steps_remaining", 0) for job in jobs], float),
        since_arrival_s=np.array([job.get("time_since_start", 0) for job in jobs], float),
        price=np.array([costs[k] for k in kinds], float),
        deadlines_s=np.array([slos.get(job["id"], np.inf) for job in jobs], float),
        isolated_s=np.zeros(len(jobs)),
        held=np.full(len(jobs), -1),
        tenant=tuple(entity_of.get(job["id"], "default") for job in jobs),
        pairs=tuple(pairs),
        pair_throughput=np.array(speeds, float).reshape(len(pairs), 2, len(kinds)),
    )
