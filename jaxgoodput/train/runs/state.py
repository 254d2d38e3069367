"""`RunState`: what the next step goes on from, shared by the loop and the duties around it."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxgoodput.data.cursor import Cursor
from jaxgoodput.data.streams import StreamState
from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.state import TrainState
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.train.watcher import StepResult


@dataclass
class RunState:
    """The state of a run and its place in the data. Only the loop's thread writes it."""

    state: TrainState
    engine: Engine
    """The engine of the strategy in use."""
    batch: BatchConfig
    step: int
    """The last step that was dispatched."""
    samples: int
    """Samples that all dispatched steps have taken."""
    progress: float
    """Base steps done after `progress_step`, as last known."""
    progress_step: int
    """A step or two behind `step`."""
    cursor: Cursor
    """The place behind the last step's samples; the loader may be ahead of it."""
    stream: StreamState | None
    """The same place in a data set that is a stream."""
    statistics_every: int = 1
    """Steps between two measurements of the gradient noise."""
    evaluated: tuple[int, Mapping[str, float]] = field(default_factory=lambda: (-1, {}))
    """The newest evaluation: its step and its metrics."""
    is_changing: bool = False
    """Whether a step is being dispatched, so that the fields may disagree."""
    expects_steps: bool = False
    """Whether a run that finishes no step for long hangs."""

    @property
    def measured_every(self) -> int:
        """Steps between two that measure the noise: `statistics_every`, or a few more so that every part of
        the parameters has its turn."""
        return self.engine.problem.measured_every(self.statistics_every)

    def look_at(self, result: StepResult) -> None:
        """Copy the progress (base steps done) from the result of a finished step."""
        self.progress, self.progress_step = result.metrics.progress, result.ticket.step

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block, a run that finishes no step does not count as hanging, as when it compiles."""
        before, self.expects_steps = self.expects_steps, False
        try:
            yield
        finally:
            self.expects_steps = before
