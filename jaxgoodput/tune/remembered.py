"""The memory that a run leaves to the next run of its program: step times, last batch and first noise.

This memory is one JSON file beside the compilation cache. The caller derives its name from everything that
step times and noise depend on. Training never depends on the file: if it cannot be read or written, a warning
says so. If two runs write at once, the later one replaces the file as a whole.
"""

import dataclasses
import pathlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from absl import logging

from jaxgoodput._fields import serial
from jaxgoodput.goodput.efficiency import GradGroups
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.optim.noise import MIN_SAMPLES
from jaxgoodput.tune.timings import MIN_COUNT, TimingRow
from jaxgoodput.tune.verdict import PROBE_STEPS

FOLDER = "jaxgoodput-runs"
# Base steps after which noise is too late to tell anything about a fresh run's first steps.
BEGINNING = 100.0
# Share of a run in which the batch of an earlier run may overrule the measured noise. It is small because the
# noise may grow during a run, and the last batch is then far too large for the beginning.
EARLY = 0.1
# Number of step times to keep for each configuration: as many as a trial takes, so that a run's own times
# soon outnumber them.
KEEP = PROBE_STEPS


@dataclass(frozen=True, kw_only=True)
class FirstNoise:
    """The gradient's signal and noise when a run first knew them, by group of parameters."""

    progress: float
    """Base steps done at that time."""
    sqr: tuple[float, ...]
    """Squared norms of the mean gradient, as in `GradGroups`."""
    var: tuple[float, ...]
    """Noise of the gradient, as in `GradGroups`."""

    @property
    def grad(self) -> GradGroups:
        """The moments in the form that decisions use."""
        return GradGroups(sqr=np.array(self.sqr), var=np.array(self.var))


@dataclass(frozen=True, kw_only=True)
class ProgramMemory:
    """What a run leaves for later runs of its program: step times, last batch and first noise."""

    version: ClassVar[int] = 2
    timings: Mapping[str, tuple[TimingRow, ...]]
    """Undisturbed step times by strategy, with steps counted back from the end of the last run."""
    batch: BatchConfig
    """Last batch that was not on trial; a later run begins with it."""
    since_samples: int
    """Samples trained on before that batch was chosen; until then, a later run tries no smaller one."""
    noise: FirstNoise | None
    """First known noise; None if it was not known within `BEGINNING` base steps."""


@dataclass(frozen=True)
class Memory:
    """The memory file of one program, and its content when this run began."""

    path: pathlib.Path
    earlier: ProgramMemory | None

    @classmethod
    def at(cls, path: pathlib.Path) -> "Memory":
        """Read a memory file. A file that this version cannot read is ignored, with a warning."""
        try:
            return cls(path, serial.loads(path.read_text(), ProgramMemory))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            logging.warning(
                "what earlier runs measured, in %s, cannot be read: %s. This run measures anew, and replaces "
                "the file when it ends.",
                path,
                error,
            )
        return cls(path, None)

    def write(self, found: ProgramMemory) -> None:
        """Replace the file with `found`, atomically; if that fails, log a warning."""
        beside = self.path.with_name(f".{uuid.uuid4().hex}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                beside.write_text(serial.dumps(found))
                beside.replace(self.path)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as error:
            logging.warning(
                "cannot save step times for later runs in %s (%s). Free some space, make the folder "
                "writable, or set Tuning.remember=False.",
                self.path,
                error,
            )


def lasting(
    timings: Mapping[str, Sequence[TimingRow]], now: int
) -> dict[str, tuple[TimingRow, ...]]:
    """Return the latest undisturbed times of configurations timed often enough; `now` is the last step."""
    return {
        strategy: tuple(
            dataclasses.replace(row, last=row.last - now, clean=row.clean[-KEEP:], busy=())
            for row in rows
            if len(row.clean) >= MIN_COUNT
        )
        for strategy, rows in timings.items()
    }


@dataclass
class BatchHistory:
    """The batches that a run has used and its first noise, together with the memory of earlier runs.

    From this follow the memory for the next run, and how far the batch of an earlier run may guide this one.
    """

    # Every batch with the samples trained on before it was chosen, without failed trials; empty if unknown.
    _chosen: list[tuple[int, BatchConfig]] = field(default_factory=list)
    _noise: FirstNoise | None = None
    _settled: tuple[int, BatchConfig] | None = None  # last batch of an earlier run

    @classmethod
    def begun(cls, start: BatchConfig) -> "BatchHistory":
        """Return the history of a run that begins with a batch."""
        return cls(_chosen=[(0, start)])

    def resume(self) -> None:
        """Forget the batches noted so far: the run used its first ones before, and which is not known."""
        self._chosen = []

    def go_on(self, current: BatchConfig, since_samples: int) -> None:
        """Note the batch that other processes go on with, which may be another than their last one."""
        if self._chosen and self._chosen[-1][1] != current:
            self.add(current, since_samples)

    def recall(self, earlier: ProgramMemory, current: BatchConfig) -> None:
        """Take over the first noise and the last batch of earlier runs."""
        self._noise = earlier.noise
        self._settled = earlier.since_samples, earlier.batch
        if current.global_batch_size == earlier.batch.global_batch_size:
            self._chosen = [(earlier.since_samples, current)]

    def add(self, config: BatchConfig, since_samples: int) -> None:
        """Note that `config` is in use, after `since_samples` samples of the run."""
        before = [chosen for _, chosen in self._chosen[-2:-1]]
        if before == [config]:  # back again: the batch in between was a trial
            self._chosen.pop()
        else:
            self._chosen.append((since_samples, config))

    def add_noise(self, progress: float, grad: GradGroups, newest_samples: float) -> None:
        """Note the noise of a step if it is the first that is known, near the beginning of the run."""
        latest = BEGINNING if self._noise is None else self._noise.progress
        if progress < latest and newest_samples >= MIN_SAMPLES:
            sqr, var = (tuple(np.asarray(x).tolist()) for x in (grad.sqr, grad.var))
            self._noise = FirstNoise(progress=progress, sqr=sqr, var=var)

    def memory(
        self,
        timings: Mapping[str, Sequence[TimingRow]],
        step: int,
        current: BatchConfig,
        *,
        is_trial: bool,
    ) -> ProgramMemory:
        """Return the memory for the next run, at the last step; a batch on trial is left out."""
        since, batch = self._settled or (0, current)
        chosen = self._chosen[:-1] if is_trial and len(self._chosen) > 1 else self._chosen
        if chosen:
            since, batch = chosen[-1]
        return ProgramMemory(
            timings=lasting(timings, step), batch=batch, since_samples=since, noise=self._noise
        )

    def max_growth(self, current: BatchConfig, usual: float) -> float:
        """Return the factor by which one change may grow the batch.

        It is the usual one, or larger if an earlier run settled on a larger batch, which is known to work.
        """
        if self._settled is None or self._settled[1].strategy != current.strategy:
            return usual
        return max(usual, self._settled[1].global_batch_size / current.global_batch_size)

    def floor(self, current: BatchConfig, samples: int, share_done: float) -> int:
        """Return the smallest global batch to consider now.

        Early in the run this is the batch of an earlier run, until that run had reached it, whatever the
        noise says: over a whole run a larger batch loses less than over its first samples.
        """
        since, batch = self._settled or (0, current)
        is_early = samples < since and share_done < EARLY
        stays = current.global_batch_size >= batch.global_batch_size
        return batch.global_batch_size if is_early and stays else 1
