"""The time ledger: the wall time of a run by bucket, named as in Google's goodput library.

Google's goodput is the productive share of wall time. Elsewhere in jaxgoodput, goodput means useful samples
per second.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxgoodput.clock import Clock

BUCKETS: Mapping[str, str] = {
    "program_startup": "from the start of the process to the start of the trainer",
    "training_prep": "building the model, the data pipeline and the optimizer",
    "compilation": "waiting for XLA to compile",
    "first_execution": "first run of an executable, beyond the time of a usual step",
    "data_loading_sync": "waiting for the input pipeline",
    "embedding": "waiting for rows of tables",
    "hooks_behind": "waiting for hooks",
    "checkpoint_save": "pauses for saving checkpoints",
    "checkpoint_restore": "reading a checkpoint",
    "wasted_progress_from_disruption": "steps since the last checkpoint that a crash has undone",
    "resharding": "moving the state from one layout to another",
    "regrouping": "processes joining or leaving the job",
    "evaluation": "evaluating",
    "skipped_steps": "steps whose loss, gradient or update was not finite",
    "other": "everything else that was not training",
}

PRODUCTIVE = "productive"


@dataclass(frozen=True, kw_only=True)
class SavedLedger:
    """A time ledger as a checkpoint stores it: the seconds by bucket, and when they were saved."""

    saved_at: float
    """Time of saving, Unix seconds."""
    wall_s: float = 0.0
    """Wall time of this run until then and of all runs before it."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time by bucket."""


class TimeLedger:
    """Assigns every second of wall time to exactly one bucket; what no bucket claims is productive.

    Only the training loop's thread may use `bucket`; all other methods are thread-safe. Checkpoints store the
    ledger (`saved`), and the next run continues it (`continue_from`). Time between runs is not counted.

    >>> from jaxgoodput.clock import FakeClock
    >>> clock = FakeClock()
    >>> ledger = TimeLedger(clock)
    >>> with ledger.bucket("evaluation"):
    ...     clock.advance(1.0)
    >>> clock.advance(3.0)
    >>> {name: seconds for name, seconds in ledger.snapshot().items() if seconds}
    {'evaluation': 1.0, 'productive': 3.0}
    """

    def __init__(self, clock: Clock):
        self._clock = clock
        self._lock = threading.Lock()
        self._start_s = clock.now()  # moved back by the wall time of earlier runs
        self._seconds = dict.fromkeys(BUCKETS, 0.0)
        self._open: list[_Open] = []

    @contextlib.contextmanager
    def bucket(self, name: str) -> Iterator[None]:
        """Book the time of the `with` block under `name`, without the time of buckets inside it.

        Raises:
          ValueError: `name` is not one of `BUCKETS`.
        """
        _check(name)
        with self._lock:
            frame = _Open(name, self._clock.now())
            self._open.append(frame)
        try:
            yield
        finally:
            with self._lock:
                elapsed_s = self._clock.now() - frame.start_s
                self._open.remove(frame)
                self._seconds[name] += max(elapsed_s - frame.inner_s, 0.0)
                if self._open:
                    self._open[-1].inner_s += elapsed_s

    def add(self, name: str, seconds: float) -> None:
        """Book `seconds` that have just passed under `name`.

        They are taken from the enclosing `bucket` if the calling thread has opened it.

        Raises:
          ValueError: `name` is not one of `BUCKETS`, or `seconds` is negative or not finite.
        """
        _check(name)
        if not 0.0 <= seconds < float("inf"):
            raise ValueError(
                f"seconds={seconds!r} cannot be booked: a duration is finite and not negative. "
                "Take both ends from the same clock's now()."
            )
        with self._lock:
            self._seconds[name] += seconds
            if self._open and self._open[-1].thread_id == threading.get_ident():
                self._open[-1].inner_s += seconds

    def continue_from(self, saved: SavedLedger, last_seen: float | None = None) -> None:
        """Add the time of earlier runs, from `saved`. Buckets may be open.

        `last_seen` (Unix seconds) is when the previous run last wrote to its journal. The time from the
        checkpoint until then was spent on steps that are undone, so it is booked as
        wasted_progress_from_disruption.
        """
        lost_s = 0.0 if last_seen is None else max(last_seen - saved.saved_at, 0.0)
        with self._lock:
            self._start_s -= saved.wall_s + lost_s
            self._seconds["wasted_progress_from_disruption"] += lost_s
            for name, seconds in saved.seconds.items():
                # A bucket of another version must not prevent the run from resuming.
                self._seconds[name if name in BUCKETS else "other"] += seconds

    def snapshot(self) -> dict[str, float]:
        """Return the seconds by bucket, and the rest as 'productive': together the wall time of all runs.

        Buckets that are still open count with their time so far.
        """
        with self._lock:
            now_s = self._clock.now()
            seconds = self._booked(now_s)
            # Negative only if a caller has booked the same time twice.
            seconds[PRODUCTIVE] = max(now_s - self._start_s - sum(seconds.values()), 0.0)
            return seconds

    def saved(self) -> SavedLedger:
        """Return the ledger as a checkpoint stores it, for `continue_from`."""
        with self._lock:
            now_s = self._clock.now()
            return SavedLedger(
                wall_s=now_s - self._start_s,
                saved_at=self._clock.wall(),
                seconds=self._booked(now_s),
            )

    def _booked(self, now_s: float) -> dict[str, float]:
        seconds = dict(self._seconds)
        inner_end_s = now_s
        for frame in reversed(self._open):
            # The time from the start of this bucket to the start of the next open bucket inside it, without
            # the closed buckets in between.
            seconds[frame.name] += max(inner_end_s - frame.start_s - frame.inner_s, 0.0)
            inner_end_s = frame.start_s
        return seconds


class _Open:
    """A bucket whose block has not ended yet."""

    def __init__(self, name: str, start_s: float):
        self.name = name
        self.start_s = start_s
        self.thread_id = threading.get_ident()
        self.inner_s = 0.0  # time of closed buckets and bookings inside


def _check(name: str) -> None:
    if name not in BUCKETS:
        raise ValueError(
            f"There is no badput bucket {name!r}. Use one of {', '.join(BUCKETS)}; "
            "'other' is for everything else."
        )
