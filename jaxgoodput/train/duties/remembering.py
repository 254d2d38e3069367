"""`MemoryKeeper`: what a run remembers besides its state, to begin with and for its next processes."""

from dataclasses import dataclass

from jaxgoodput.clock import Clock
from jaxgoodput.train.analyst import Analyst
from jaxgoodput.train.checkpoints.memory import RunMemory, explored_in
from jaxgoodput.train.control import Due
from jaxgoodput.train.duties.evaluating import Evaluations
from jaxgoodput.train.prepare import PreparedRun


@dataclass
class MemoryKeeper:
    """Keeps the memory of a run. `of_process` is what this process remembers of earlier generations."""

    start: PreparedRun
    analyst: Analyst
    evaluations: Evaluations
    due: Due
    clock: Clock
    of_process: RunMemory | None

    def begin(self) -> None:
        """Set the timers, at the first step."""
        earlier, now_s = self.start.earlier, self.clock.now()
        self.due.begin(
            now_s,
            self.start.now.progress,
            keep_s=self.start.run.first_copy_s,
            earlier=None if earlier is None else earlier.timers,
        )

    def complete(self) -> None:
        """Set the timers anew after the last step, which has just been evaluated and is about to be saved."""
        self.due.restart(self.clock.now(), self.start.now.progress)

    def memory(self) -> RunMemory:
        """Return the memory as it is now. Callable from other threads."""
        now = self.start.now
        step, (findings, explored) = now.step, self.analyst.known()
        explored_step = step
        if explored is None or not self.start.is_chief:  # another process decides
            explored, explored_step = explored_in(self.of_process, self.start.earlier)
        return RunMemory(
            timers=self.due.timers(self.clock.now(), now.progress),
            best_at=self.evaluations.best_at,
            best_of=self.evaluations.config.saving.best,
            findings=findings,
            decides=self.start.is_chief,
            step=step,
            explored=explored,
            explored_step=explored_step,
        )
