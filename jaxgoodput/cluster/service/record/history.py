"""What a service's journal says about jobs: when each came, which devices it held and for how long.

The journal is read and not changed, also while the service runs. Its events are replayed into the same state
as the service's own, so the history is what really happened.
"""

import pathlib
from dataclasses import dataclass, replace

from jaxgoodput.cluster.service.record.check import checked, states
from jaxgoodput.cluster.service.record.state import JobEntry, State
from jaxgoodput.cluster.service.record.table import FILE, CorruptJournalError, has_database
from jaxgoodput.cluster.service.wire import Phase
from jaxgoodput.specs import JobSpec, Node


@dataclass(frozen=True, kw_only=True)
class PastJob:
    """A job of a journal, and the devices that it has held."""

    spec: JobSpec
    submitted_s: float
    """Time of its submission, in seconds of the service's own clock."""
    phase: Phase
    """The phase in which it ended; "waiting" or "running" if it has not."""
    held: tuple[tuple[float, int], ...]
    """Periods with devices, in order: seconds, and number of devices."""


@dataclass(frozen=True, kw_only=True)
class ClusterHistory:
    """All jobs of a journal in order of submission, and the nodes that had joined at its end."""

    jobs: tuple[PastJob, ...]
    nodes: tuple[Node, ...]


def read_history(folder: pathlib.Path) -> ClusterHistory:
    """Return the history in the journal of a service's folder.

    Raises ValueError if there is no journal, or a damaged one.
    """
    if not has_database(folder):
        raise ValueError(
            f"there is no journal {folder / FILE}. Name the --folder of a service, which is "
            ".jaxgoodput/service in the home folder unless `jaxgoodput serve` was told another one."
        )
    found: dict[int, PastJob] = {}  # by position of the submission, as names may come again
    state = State()
    try:
        for after, _ in states(folder / FILE, checked(folder), state):
            _note(found, state, after)
            state = after
    except CorruptJournalError as error:
        raise ValueError(str(error)) from error
    nodes = (replace(entry.node, state="up") for entry in state.nodes.values())
    jobs = (_with_present(job, seq, state) for seq, job in sorted(found.items()))
    return ClusterHistory(jobs=tuple(jobs), nodes=tuple(nodes))


def _note(found: dict[int, PastJob], before: State, after: State) -> None:
    """Add what one event has changed to the jobs found so far."""
    for id_, entry in after.jobs.items():
        old: JobEntry | None = before.jobs.get(id_)
        if entry is old:
            continue
        if old is None or old.seq != entry.seq:
            found[entry.seq] = PastJob(
                spec=entry.spec, submitted_s=entry.submitted_s, phase=entry.phase, held=()
            )
            continue
        job = found[entry.seq]
        if old.since_s is not None and dict(old.allocation.devices) != dict(
            entry.allocation.devices
        ):
            period = max(after.at_s - old.since_s, 0.0), old.allocation.num_devices
            job = replace(job, held=(*job.held, period))
        found[entry.seq] = replace(job, phase=entry.phase)


def _with_present(job: PastJob, seq: int, state: State) -> PastJob:
    """Return a job with the period that had not ended at the end of the journal."""
    entry = state.jobs.get(job.spec.id)
    if entry is None or entry.seq != seq or entry.since_s is None:
        return job
    period = max(state.at_s - entry.since_s, 0.0), entry.allocation.num_devices
    return replace(job, held=(*job.held, period))
