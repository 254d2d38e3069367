"""Which jobs of a workload have deadlines: `--deadlines SHARE:MULTIPLE`.

Published workloads have none, so a share of the jobs is drawn, by the same seed always the same. Each is due
so many times as long after its submission as it takes alone on the devices that its user asked for, on the
kind that is fastest for it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.simulate.job import Truth, packed
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.specs import ClusterSpec


def read_deadlines(text: str) -> tuple[float, float]:
    """The share of the jobs and the multiple of their time alone. Raises ValueError for anything else.

    >>> read_deadlines("0.5:2")
    (0.5, 2.0)
    """
    try:
        share, multiple = map(float, text.split(":"))
        if not (0 < share <= 1 and 0 < multiple < math.inf):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--deadlines {text!r} is not of the form SHARE:MULTIPLE, a share of the jobs of at most 1 and a "
            "multiple above 0 of the time that each takes alone, such as 0.5:2."
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
    """The jobs, that share of them with deadlines; one that runs on none of the kinds has none."""
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
