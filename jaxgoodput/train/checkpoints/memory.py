"""`RunMemory`: what a run remembers besides its state, whatever becomes of the processes it trains in.

It travels with the state: in memory from one set of processes to the next, and in checkpoints from one start
to the next. The training does not depend on it, so that it may be missing, for example in older checkpoints.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxgoodput.train.control import Timers
from jaxgoodput.train.decider import BatchFindings
from jaxgoodput.tune.exploring import Explored


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """What belongs to a run and not to its processes."""

    is_part: ClassVar[bool] = True  # a checkpoint of another version may have more fields
    timers: Timers
    """How long ago checkpoints and evaluations were due."""
    best_at: float
    """Base steps at the best evaluation so far; 0 before it."""
    best_of: str | None
    """The metric by which it is the best."""
    findings: BatchFindings
    """What is known of batches: losses in all processes, bans and trials in the one that decides."""
    decides: bool
    """Whether this is the memory of the process that decides."""
    step: int
    """The last step that it knows of."""
    explored: Explored | None
    """The account of exploring, which only the process that decides keeps; others pass on what they got."""
    explored_step: int
    """The last step that `explored` knows of."""


def explored_in(*memories: RunMemory | None) -> tuple[Explored | None, int]:
    """Return the newest account of exploring among several memories of a run, and its step."""
    known = [m for m in memories if m is not None and m.explored is not None]
    newest = max(known, key=lambda m: m.explored_step, default=None)
    return (None, 0) if newest is None else (newest.explored, newest.explored_step)


def findings_in(
    earlier: RunMemory | None, of_process: RunMemory | None, step: int
) -> BatchFindings | None:
    """Return what a run that goes on after `step` knows of batches; None if nothing is known.

    `earlier` came with its state, perhaps from a process that does not decide. What this process remembers
    itself (`of_process`) is preferred if it decides, unless it knows of later steps: those are done again.
    """
    own_decides = of_process is not None and of_process.decides and of_process.step <= step
    if own_decides and not (earlier is not None and earlier.decides):
        assert of_process is not None
        return of_process.findings
    return None if earlier is None else earlier.findings
