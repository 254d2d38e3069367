"""`RunMemory`: what a run remembers besides its state, whatever becomes of the processes it trains in.

It travels with the state: in memory from one set of processes to the next, and in checkpoints from one start
to the next. What the training does not depend on may be missing, for example in older checkpoints.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxgoodput.train.control import Timers
from jaxgoodput.train.decider import Findings
from jaxgoodput.tune.exploring import Explored


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """What belongs to a run and not to its processes."""

    is_part: ClassVar[bool] = True  # a checkpoint of another version may have more fields
    timers: Timers
    """How long ago checkpoints and evaluations were due."""
    best_at: float
    """Base steps at the best evaluation so far; 0 before it."""
    findings: Findings
    """What is known of batches. It is the same in all processes."""
    explored: Explored | None
    """The account of exploring; only the process that decides keeps it."""
    explored_step: int
    """The last step that `explored` knows of."""


def explored_in(*memories: RunMemory | None) -> tuple[Explored | None, int]:
    """Return the newest account of exploring among several memories of a run, and its step.

    The process whose state is newest may be another than the one that decides.
    """
    known = [m for m in memories if m is not None and m.explored is not None]
    newest = max(known, key=lambda m: m.explored_step, default=None)
    return (None, 0) if newest is None else (newest.explored, newest.explored_step)
