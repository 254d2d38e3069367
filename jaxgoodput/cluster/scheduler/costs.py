"""What a job has cost so far, and which shapes its remaining budget still allows.

A device-second costs its kind's price per hour / 3,600; kinds without a price are free. A shape is not
offered if finishing the declared work on it would exceed the budget and a cheaper shape exists. A job that
cannot afford any shape keeps its cheapest one until the budget is spent.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.shapes import shape_in_words
from jaxgoodput.specs import Shape

CHEAPER = 1e-9  # prices closer than this, relatively, count as equal


class Purse(NamedTuple):
    """What the budget of a job leaves of it: the shapes that it can pay for, and messages to its user."""

    view: JobView
    """The job, with only those shapes in its table that it can pay for."""
    spent: str | None
    """Message that the budget is spent; None if it is not."""
    remark: str | None
    """Warning for the job's user."""


def cost(received_s: Mapping[str, float | int], price_per_hour: Mapping[str, float]) -> float:
    """Return the cost of the device-seconds that were received of each kind of device.

    >>> cost({"t4": 7200.0}, {"t4": 0.5})
    1.0
    """
    each = (s / 3600.0 * price_per_hour.get(kind, 0.0) for kind, s in received_s.items())
    return float(sum(each))


def cost_to_finish(
    view: JobView, shape: Shape, price_per_hour: Mapping[str, float]
) -> float | None:
    """Return the cost of a job's remaining work on a shape; None if it declares no work."""
    if view.remaining is None:
        return None
    seconds = view.remaining / view.goodput[shape]
    return cost({shape.kind: seconds * shape.num_devices}, price_per_hour)


def within_budget(
    view: JobView, price_per_hour: Mapping[str, float], could_run: Callable[[Shape], bool]
) -> Purse:
    """Restrict a job to the shapes that it can pay for.

    `could_run` says whether the job could have a shape if it were alone in the cluster.
    """
    budget = view.spec.budget
    if budget is None:
        return Purse(view, None, None)
    remark = _unpriced(view, price_per_hour)
    spent = cost(view.received_s, price_per_hour)
    is_free = not any(price_per_hour.get(shape.kind, 0.0) > 0.0 for shape in view.goodput)
    if spent >= budget and not is_free:
        return Purse(view, f"its budget of {budget:g} is spent ({spent:.2f} so far)", None)
    # Without samples/s the time that the remaining work takes is unknown.
    known = view.remaining is not None and view.is_measured
    costs = {
        shape: cost_to_finish(view, shape, price_per_hour) or 0.0
        for shape in (view.goodput if known else ())
        if could_run(shape)
    }
    if not costs:
        return Purse(view, None, remark)
    least, cheapest = min((price, shape) for shape, price in costs.items())
    left = budget - spent
    most = max(left, least * (1.0 + CHEAPER))
    offered = {s: v for s, v in view.goodput.items() if costs.get(s, 0.0) <= most}
    if least > left:
        remark = (
            f"its budget is {least - left:.2f} short: finishing costs at least {least:.2f} (on "
            f"{shape_in_words(cheapest)}), and {left:.2f} of {budget:g} are left"
        )
    return Purse(dataclasses.replace(view, goodput=offered), None, remark)


def _unpriced(view: JobView, price_per_hour: Mapping[str, float]) -> str | None:
    kinds = {shape.kind for shape in view.goodput}
    unpriced = sorted(kinds - set(price_per_hour))
    if not unpriced:
        return None
    what = "limits nothing" if len(unpriced) == len(kinds) else "does not count all kinds"
    return (
        f"its budget of {view.spec.budget:g} {what}: the cluster has no price for "
        f"{', '.join(unpriced)}"
    )
