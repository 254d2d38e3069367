"""Lets jobs of a small simulated world go on: a plan is carried out, then time passes with nothing new.

`scheduler_asked_again.py` and `scheduler_pauses.py` use this. They prepare jobs that the simulator does not
have, such as some that have run for days, so they step their worlds themselves.
"""

import dataclasses

from jaxgoodput.cluster.scheduler import JobView
from jaxgoodput.cluster.scheduler.policy import Plan
from jaxgoodput.cluster.scheduler.shapes import shape_of


def carried_out(views, plan: Plan, now_s) -> list[JobView]:
    """The jobs with the devices that a plan gives them."""
    return [_with_devices(view, plan.allocations[view.spec.id], now_s) for view in views]


def _with_devices(view: JobView, given, now_s) -> JobView:
    if given.devices == view.allocation.devices:
        return view
    had, runs = any(view.fraction_received_s.values()), bool(given.devices)
    return dataclasses.replace(
        view,
        allocation=given,
        since_s=now_s if runs else None,
        paused_s=None if runs else now_s,
        restoring_until_s=now_s + view.restart_s if runs else None,
        num_restarts=view.num_restarts + (had and runs),
    )


def later(views, cluster, now_s, span_s) -> list[JobView]:
    """The jobs after a while in which nothing happens but that running ones work."""
    kind_of = {node.name: node.kind for node in cluster.nodes}
    return [
        _worked(view, shape_of(view.allocation.devices, kind_of), now_s, span_s) for view in views
    ]


def _worked(view, shape, now_s, span_s) -> JobView:
    until_s = view.restoring_until_s or now_s
    over = {"restoring_until_s": until_s if until_s > now_s + span_s else None}
    if shape is None or not span_s:
        return dataclasses.replace(view, **over)
    worked_s = max(now_s + span_s - max(until_s, now_s), 0.0)
    kind = shape.kind
    left = view.remaining
    if left is not None:
        left -= worked_s * view.goodput[shape]
    had_s, ran_s = view.received_s.get(kind, 0.0), view.fraction_received_s.get(kind, 0.0)
    return dataclasses.replace(
        view,
        received_s={**view.received_s, kind: had_s + span_s * shape.num_devices},
        fraction_received_s={**view.fraction_received_s, kind: ran_s + span_s},
        remaining=left,
        **over,
    )
