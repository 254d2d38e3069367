"""Predicts how large a micro-batch fits into memory, from the bytes of the sizes that were compiled.

The bytes of a step grow almost linearly with the micro-batch, so two compiled sizes predict the others. Every
size is checked against its own analysis before it is used. A wrong prediction therefore costs a compilation,
but never an allocation failure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class TooLarge(ValueError):
    """Error: no step of the model fits into memory under a strategy."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes per device that one execution needs, such as a step: arguments, outputs and temporaries."""

    arguments: int
    """Bytes of state and batch."""
    outputs: int
    """Bytes of results that are not written in place."""
    temporaries: int
    """Bytes of activations and gradients."""

    @property
    def peak(self) -> int:
        """Upper bound on the bytes that the device holds during the step."""
        return self.arguments + self.outputs + self.temporaries


def largest_that_fits(sizes: Sequence[int], known: Mapping[int, StepBytes], budget: int) -> int:
    """Return the largest of `sizes` whose bytes, known or extrapolated, are within budget; 0 if none fits.

    If a single size is known, the bytes beyond the arguments are taken to be proportional to the size. Raises
    ValueError if none is known.

    >>> one = {8: StepBytes(arguments=100, outputs=0, temporaries=80)}
    >>> largest_that_fits([4, 8, 16, 32], one, budget=300)
    16
    """
    if not known:
        raise ValueError("no compiled size to predict from; compile one micro-batch size first.")
    return max((s for s in sizes if predicted_peak(s, known) <= budget), default=0)


def predicted_peak(size: int, known: Mapping[int, StepBytes]) -> int:
    """Return the peak bytes at `size`: known, or from a line through the two nearest known sizes."""
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
