"""How large a micro-batch fits, from the bytes of those that were compiled. Numbers only.

The bytes of a step grow almost linearly with the micro-batch: two compiled sizes predict the others,
and every size is checked against its own analysis before it is used, so a wrong prediction costs a
compilation and never an allocation failure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class TooLarge(ValueError):
    """No step of the model fits into memory under a strategy."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes per device that one execution needs."""

    arguments: int
    """State and batch."""
    outputs: int
    """What is not written in place."""
    temporaries: int
    """Activations, gradients."""

    @property
    def peak(self) -> int:
        """All three: an upper bound on what the device holds during the step."""
        return self.arguments + self.outputs + self.temporaries


def largest_that_fits(sizes: Sequence[int], known: Mapping[int, StepBytes], budget: int) -> int:
    """The largest of `sizes` whose bytes, known or extrapolated from the known, are within budget.

    Returns 0 where none fits. With one known size, bytes beyond the arguments are taken as
    proportional to the size. Raises ValueError where none is known.

    >>> one = {8: StepBytes(arguments=100, outputs=0, temporaries=80)}
    >>> largest_that_fits([4, 8, 16, 32], one, budget=300)
    16
    """
    if not known:
        raise ValueError("no compiled size to predict from; compile one micro-batch size first.")
    return max((s for s in sizes if predicted_peak(s, known) <= budget), default=0)


def predicted_peak(size: int, known: Mapping[int, StepBytes]) -> int:
    """Peak bytes at `size`: its own analysis, or a line through the two nearest known sizes."""
    if size in known:
        return known[size].peak
    near = sorted(known, key=lambda s: abs(s - size))[:2]
    if len(near) == 1:
        base = known[near[0]]
        moving = base.outputs + base.temporaries
        return base.arguments + int(moving * size / near[0])
    a, b = sorted(near)
    slope = (known[b].peak - known[a].peak) / (b - a)
    return int(known[a].peak + slope * (size - a))
