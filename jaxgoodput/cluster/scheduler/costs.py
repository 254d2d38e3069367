"""What a job has cost, and what it can still pay for: its budget against the prices of devices.

A device-second costs its kind's price per hour over 3,600; kinds without a price cost nothing. Shapes on
which the work that a job declares would cost more than what is left are not offered while a cheaper one is;
so one that cannot afford any keeps its cheapest, until nothing is left.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.shapes import shape_in_words
from jaxgoodput.specs import Shape

CHEAPER = 1e-9  # prices closer than this, relatively, are the same


class Purse(NamedTuple):
    """A job within its budget."""

    view: JobView
    """With the shapes only that it is offered."""
    spent: str | None
    """That its budget is spent, in words; None: it is not."""
    remark: str | None
    """What else its user should know."""


def cost(received_s: Mapping[str, float], price_per_hour: Mapping[str, float]) -> float:
    """What device-seconds by kind cost.

    >>> cost({"t4": 7200.0}, {"t4": 0.5})
    1.0
    """
    each = (s / 3600.0 * price_per_hour.get(kind, 0.0) for kind, s in received_s.items())
    return float(sum(each))


def cost_to_finish(
    view: JobView, shape: Shape, price_per_hour: Mapping[str, float]
) -> float | None:
    """What the work that it says is left costs on a shape; None where it says nothing."""
    if view.remaining is None:
        return None
    seconds = view.remaining / view.goodput[shape]
    return cost({shape.kind: seconds * shape.num_devices}, price_per_hour)


def within_budget(
    view: JobView, price_per_hour: Mapping[str, float], could_run: Callable[[Shape], bool]
) -> Purse:
    """The job with what it can pay for. `could_run`: whether it could have a shape if it were alone."""
    budget = view.spec.budget
    if budget is None:
        return Purse(view, None, None)
    kinds = {shape.kind for shape in view.goodput}
    unpriced = sorted(kinds - set(price_per_hour))
    remark = None
    if unpriced:
        what = "limits nothing" if len(unpriced) == len(kinds) else "does not count all kinds"
        remark = f"its budget of {budget:g} {what}: nobody knows what {', '.join(unpriced)} cost"
    spent = cost(view.received_s, price_per_hour)
    is_free = not any(price_per_hour.get(kind, 0.0) > 0.0 for kind in kinds)
    if spent >= budget and not is_free:
        return Purse(view, f"its budget of {budget:g} is spent ({spent:.2f} so far)", None)
    if view.remaining is None or not view.is_measured:  # goodput in no unit says nothing of time
        return Purse(view, None, remark)
    wanted = {
        shape: cost_to_finish(view, shape, price_per_hour) or 0.0
        for shape in view.goodput
        if could_run(shape)
    }
    if not wanted:
        return Purse(view, None, remark)
    cheapest = min(wanted, key=lambda shape: (wanted[shape], shape))
    left, least = budget - spent, wanted[cheapest]
    most = max(left, least * (1.0 + CHEAPER))
    offered = {s: v for s, v in view.goodput.items() if wanted.get(s, 0.0) <= most}
    if len(offered) < len(view.goodput):
        view = dataclasses.replace(view, goodput=offered)
    if least > left:
        remark = (
            f"its budget lacks {least - left:.2f}: its work costs {least:.2f} where it is cheapest, "
            f"on {shape_in_words(cheapest)}, and {left:.2f} of {budget:g} are left"
        )
    return Purse(view, None, remark)
