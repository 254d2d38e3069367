"""What a run leaves to the next one of the same program: step times, its last batch, its first noise.

One JSON file beside the compilation cache, under a key that the caller makes of all that step times and
noise depend on. A file that cannot be read is named and left out, one that cannot be written is named:
training never depends on it. Of two runs that write at once the later one stays, whole.
"""

import dataclasses
import pathlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from absl import logging

from jaxgoodput import _serial
from jaxgoodput.goodput.efficiency import GradGroups
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.tune.timings import MIN_COUNT, TimingRow
from jaxgoodput.tune.verdict import PROBE_STEPS

FOLDER = "jaxgoodput-runs"
# Base steps: noise that is first known later says nothing about a fresh run's first steps.
BEGINNING = 100.0
# The share of a run for which an earlier one's batch may be held against the noise: where noise grows all the
# time, that batch is far too large for a run's beginning.
EARLY = 0.1
# Step times kept of a configuration: as many as a trial takes, so that a run's own soon outnumber them.
KEEP = PROBE_STEPS


@dataclass(frozen=True, kw_only=True)
class FirstNoise:
    """The cautious moments of the gradient, by group of parameters, when they were first known."""

    progress: float
    """Base steps done by then."""
    sqr: tuple[float, ...]
    """As in `GradGroups`."""
    var: tuple[float, ...]
    """As in `GradGroups`."""

    @property
    def grad(self) -> GradGroups:
        """As decisions want them."""
        return GradGroups(sqr=np.array(self.sqr), var=np.array(self.var))


@dataclass(frozen=True, kw_only=True)
class ProgramMemory:
    """What is kept of the runs of one program."""

    version: ClassVar[int] = 2
    timings: Mapping[str, tuple[TimingRow, ...]]
    """Undisturbed step times by strategy; steps are counted back from the end of the last run."""
    batch: BatchConfig
    """In use at the end, and not on trial: a later run begins with it."""
    since_samples: int
    """Samples gone by when it was taken up; until as many have, a later run takes no smaller one early on."""
    noise: FirstNoise | None
    """None: it was not known in the first `BEGINNING` base steps."""


@dataclass(frozen=True)
class Memory:
    """The file of one program, and what earlier runs left in it."""

    path: pathlib.Path
    earlier: ProgramMemory | None

    @classmethod
    def at(cls, path: pathlib.Path) -> "Memory":
        """Read what is there; a file that is none of this version's is named in a warning and left out."""
        try:
            return cls(path, _serial.loads(path.read_text(), ProgramMemory))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            logging.warning("what earlier runs left in %s is not used: %s", path, error)
        return cls(path, None)

    def write(self, found: ProgramMemory) -> None:
        """Put `found` in its place at once; where that fails, a warning says so."""
        beside = self.path.with_name(f".{uuid.uuid4().hex}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                beside.write_text(_serial.dumps(found))
                beside.replace(self.path)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as error:
            logging.warning(
                "nothing is left to later runs in %s (%s). Free some space, or make it writable; "
                "Tuning.remember=False leaves it alone.",
                self.path,
                error,
            )


def lasting(
    timings: Mapping[str, Sequence[TimingRow]], now: int
) -> dict[str, tuple[TimingRow, ...]]:
    """The undisturbed times of what was timed often enough by step `now`, the latest of each."""
    return {
        strategy: tuple(
            dataclasses.replace(row, last=row.last - now, clean=row.clean[-KEEP:], busy=())
            for row in rows
            if len(row.clean) >= MIN_COUNT
        )
        for strategy, rows in timings.items()
    }
