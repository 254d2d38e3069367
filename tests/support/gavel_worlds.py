"""Job views and random problems for the tests of Gavel's policies."""

import dataclasses

import numpy as np

from jaxgoodput.cluster.published.gavel.fractions import FractionProblem
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node, Shape


def random_problem(rng, num_jobs, num_kinds=3, *, crowd=3.0, gangs=True):
    """About `crowd` devices are asked for per device; some speeds are 0."""
    gang = rng.choice([1, 2, 4], num_jobs, p=[0.6, 0.2, 0.2]) if gangs else np.ones(num_jobs, int)
    throughput = rng.lognormal(0, 1, (num_jobs, 1)) * rng.lognormal(0, 0.6, (num_jobs, num_kinds))
    throughput[rng.random(throughput.shape) < 0.1] = 0.0
    mean = max(int(gang.sum() / crowd / num_kinds), 4)
    return FractionProblem(
        job_ids=tuple(f"j{i:04d}" for i in range(num_jobs)),
        kinds=tuple(f"k{j}" for j in range(num_kinds)),
        throughput=throughput,
        scale_factor=gang,
        capacity=rng.integers(4, 2 * mean, num_kinds),
        weight=rng.choice([1.0, 2.0, 5.0], num_jobs),
        remaining_steps=rng.lognormal(8, 1, num_jobs),
        since_arrival_s=rng.uniform(0, 50_000, num_jobs),
        price=rng.uniform(0.5, 4, num_kinds),
        deadlines_s=np.full(num_jobs, np.inf),
        isolated_s=rng.uniform(0, 10_000, num_jobs),
        held=np.full(num_jobs, -1),
        tenant=tuple(str(t) for t in rng.choice(["a", "b", "c"], num_jobs)),
    )


def with_pairs(problem, rng, fraction=0.5):
    """Pairs of jobs of one gang size that slow each other down by a random factor."""
    pairs, speeds = [], []
    for i in range(problem.num_jobs):
        for j in range(i + 1, problem.num_jobs):
            same = problem.scale_factor[i] == problem.scale_factor[j]
            if same and rng.random() < fraction:
                pairs.append((i, j))
                slow = rng.uniform(0.3, 1.0, (2, len(problem.kinds)))
                speeds.append(problem.throughput[[i, j]] * slow)
    shape = (len(pairs), 2, len(problem.kinds))
    return dataclasses.replace(
        problem, pairs=tuple(pairs), pair_throughput=np.array(speeds, float).reshape(shape)
    )


def cluster_of(sizes, per_node=4, **more):
    """sizes: devices by kind."""
    nodes = []
    for kind, devices in sizes.items():
        for k in range(-(-devices // per_node)):
            here = min(per_node, devices - k * per_node)
            nodes.append(Node(name=f"{kind}-{k}", kind=kind, num_devices=here))
    return ClusterSpec(nodes=tuple(nodes), **more)


def rigid_view(name, gang, speeds, *, per_node=4, submitted_s=0.0, **more):
    """A rigid job with a speed on each kind."""
    spec = {k: more.pop(k) for k in ("weight", "tenant", "deadline_s", "kinds") if k in more}
    return JobView(
        spec=JobSpec(id=name, mode="rigid", num_devices=gang, max_devices=max(gang, 1), **spec),
        goodput={Shape(kind, -(-gang // per_node), gang): v for kind, v in speeds.items()},
        submitted_s=submitted_s,
        **more,
    )


def run_rounds(policy, views, cluster, num_rounds, round_s):
    """Views after so many rounds, each of which runs its decision to the end; and the decisions."""
    kind_of = {node.name: node.kind for node in cluster.nodes}
    decisions, now_s = [], 0.0
    for _ in range(num_rounds):
        decision = policy(views, cluster, now_s)
        decisions.append(decision)
        after = []
        for view in views:
            given = decision.allocations.get(view.spec.id, Allocation())
            received = dict(view.fraction_received_s)
            for kind in {kind_of[name] for name in given.devices}:
                received[kind] = received.get(kind, 0.0) + round_s
            since = view.since_s if given == view.allocation else now_s
            after.append(
                dataclasses.replace(
                    view,
                    allocation=given,
                    since_s=since if given.devices else None,
                    fraction_received_s=received,
                )
            )
        views, now_s = after, now_s + round_s
    return views, decisions


def owners(decision):
    """(node, device) -> share groups or jobs that run there."""
    found = {}
    for job, allocation in decision.allocations.items():
        for name, local in allocation.devices.items():
            for device in local:
                found.setdefault((name, device), set()).add(allocation.share_group or job)
    return found
