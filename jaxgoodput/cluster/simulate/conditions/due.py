"""Deadlines for a share of the jobs of a workload: `--deadlines SHARE:MULTIPLE`.

Published workloads have no deadlines, so jobs are drawn at random from the seed. A job is due after MULTIPLE
times the seconds that it takes alone, on the devices that its user asked for, of the kind that is fastest
for it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.simulate.jobs.job import Truth, packed
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.specs import ClusterSpec


def read_deadlines(text: str) -> tuple[float, float]:
    """Return the share and the multiple of `SHARE:MULTIPLE`. Raises ValueError for any other text.

    >>> read_deadlines("0.5:2")
    (0.5, 2.0)
    """
    try:
        share, multiple = map(float, text.split(":"))
        if not (0 < share <= 1 and 0 < multiple < math.inf):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--deadlines {text!r} is not of the form SHARE:MULTIPLE, such as 0.5:2. SHARE is the share of "
            "the jobs, at most 1; MULTIPLE, above 0, multiplies the time that a job takes alone."
        ) from None
    return share, multiple


def with_deadlines(
    jobs: Sequence[TraceJob],
    cluster: ClusterSpec,
    truth: Truth,
    *,
    share: float,
    multiple: float,
    seed: int,
) -> tuple[TraceJob, ...]:
    """Return the jobs, a share of them with deadlines. A job that fits no kind of device gets none."""
    drawn = np.random.default_rng([seed, 0x647565]).random(len(jobs)) < share
    each: dict[str, int] = {}
    for node in cluster.nodes:
        each[node.kind] = max(each.get(node.kind, 1), node.num_devices)
    found = []
    for index, (trace, has) in enumerate(zip(jobs, drawn.tolist(), strict=True)):
        if has:
            job = truth.job(trace, Settings(), index)
            alone_s = min(
                (
                    job.isolated_s(kind, packed(trace.num_devices, size))
                    for kind, size in each.items()
                    if job.spec.kinds is None or kind in job.spec.kinds
                ),
                default=math.inf,
            )
            if math.isfinite(alone_s):
                trace = replace(trace, deadline_s=trace.submit_s + multiple * alone_s)
        found.append(trace)
    return tuple(found)
