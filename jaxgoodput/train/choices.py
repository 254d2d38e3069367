"""What the analyst asks of whoever compiles: which strategies and sizes could be used now."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxgoodput.goodput.search import BatchConfig, BatchLimits


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Another strategy that can be switched to without compiling."""

    config: BatchConfig  # of the batch nearest to the present one
    ready: Sequence[int]  # micro-batch sizes that are compiled
    switch_s: float  # seconds that moving the state there takes


@runtime_checkable
class Choices(Protocol):
    """The strategies of a run, by name; "" is the only one where none was asked for."""

    @property
    def num_strategies(self) -> int:
        """How many there are, prepared or not."""
        ...

    def limits(self, strategy: str) -> BatchLimits:
        """What data, devices and memory allow."""
        ...

    def sizes(self, strategy: str) -> Sequence[int]:
        """Micro-batch sizes that may ever be used, samples per replica."""
        ...

    def ready(self, strategy: str) -> Sequence[int]:
        """Those that are compiled."""
        ...

    def memory_limit(self, strategy: str) -> int:
        """The largest that fits, by what is known; 0 = none known."""
        ...

    def offers(self) -> Sequence[Offer]:
        """The other strategies that are ready."""
        ...

    def start(self) -> None:
        """Compile the others in the background from now on."""
        ...
