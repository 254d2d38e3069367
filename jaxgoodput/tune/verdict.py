"""What a verdict is, and all that it is made of."""

from dataclasses import dataclass

from jaxgoodput.goodput.search import BatchConfig


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A decision about the batch, and why."""

    config: BatchConfig
    goodput: float  # predicted, useful samples/s; NaN while the model is unknown
    gain: float  # predicted goodput over that of keeping the current configuration
    reason: str
    statistics_every: int = 1  # steps between two measurements of the gradient noise
