"""Where the wall time went: a ledger of buckets, named as in Google's goodput library.

This is the *other* goodput (productive share of wall time); jaxgoodput's own is useful samples per
second.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxgoodput.clock import Clock

BUCKETS: Mapping[str, str] = {
    "program_startup": "from the start of the process until the trainer began",
    "training_prep": "building the model, the data pipeline and the optimizer",
    "compilation": "the loop waited for XLA to compile",
    "first_execution": "the first run of an executable beyond a usual step",
    "data_loading_sync": "the loop waited for the input pipeline",
    "embedding": "the loop waited for rows of tables",
    "hooks_behind": "the loop waited for hooks",
    "checkpoint_save": "the loop stood still for a checkpoint",
    "checkpoint_restore": "reading a checkpoint back",
    "wasted_progress_from_disruption": "steps since the last checkpoint, lost when the run died",
    "resharding": "moving the state from one layout to another",
    "regrouping": "processes of the job came or went",
    "evaluation": "evaluating",
    "skipped_steps": "steps whose loss, gradient or update was not finite",
    "other": "anything else that was not training",
}

PRODUCTIVE = "productive"


@dataclass(frozen=True, kw_only=True)
class SavedLedger:
    """What a checkpoint keeps of a ledger."""

    saved_at: float
    """Unix seconds."""
    wall_s: float = 0.0
    """Wall time covered: that run until then and all before it."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By bucket."""


class TimeLedger:
    """Every second of wall time lies in exactly one bucket; what no bucket claims is productive.

    `bucket` is for one thread (the loop's); everything else may be called from any thread. The
    ledger rides in a checkpoint (`saved`), and that of the next run goes on from there
    (`continue_from`); time while nothing ran is not counted.

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
        self._start_s = clock.now()  # earlier by the wall time of the runs before
        self._seconds = dict.fromkeys(BUCKETS, 0.0)
        self._open: list[_Open] = []

    @contextlib.contextmanager
    def bucket(self, name: str) -> Iterator[None]:
        """Book the time of the `with` block under `name`, less that of buckets opened inside.

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
        """Book `seconds` that have just passed under `name`, taken from an enclosing `bucket`.

        Only from one that the calling thread has opened: other threads' time is not the bucket's.

        Raises:
          ValueError: `name` is not one of `BUCKETS`, or `seconds` is negative or not finite.
        """
        _check(name)
        _check_seconds(seconds)
        with self._lock:
            self._seconds[name] += seconds
            if self._open and self._open[-1].thread_id == threading.get_ident():
                self._open[-1].inner_s += seconds

    def continue_from(self, saved: SavedLedger, last_seen: float | None = None) -> None:
        """Add the seconds of earlier runs, as `saved` gave them; buckets may be open meanwhile.

        `last_seen` (Unix seconds) is the last sign of life of the run that died, such as its last
        journal record: the time between the checkpoint and it was spent on steps that are undone,
        so it is booked as wasted_progress_from_disruption.
        """
        lost_s = 0.0 if last_seen is None else max(last_seen - saved.saved_at, 0.0)
        with self._lock:
            self._start_s -= saved.wall_s + lost_s
            self._seconds["wasted_progress_from_disruption"] += lost_s
            for name, seconds in saved.seconds.items():
                # A bucket of another version of this package must not stop a run from resuming.
                self._seconds[name if name in BUCKETS else "other"] += seconds

    def snapshot(self) -> dict[str, float]:
        """Seconds by bucket, and under 'productive' the rest; together the wall time of all runs.

        A bucket that is still open counts with what it has used so far.
        """
        with self._lock:
            now_s = self._clock.now()
            seconds = self._booked(now_s)
            # More booked than elapsed happens only when a caller books the same time twice.
            seconds[PRODUCTIVE] = max(now_s - self._start_s - sum(seconds.values()), 0.0)
            return seconds

    def saved(self) -> SavedLedger:
        """What a checkpoint keeps."""
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
            # What lies between this frame's start and the start of the next inner
            # open frame, less what closed inside.
            seconds[frame.name] += max(inner_end_s - frame.start_s - frame.inner_s, 0.0)
            inner_end_s = frame.start_s
        return seconds


class _Open:
    """A bucket whose block has not ended."""

    def __init__(self, name: str, start_s: float):
        self.name = name
        self.start_s = start_s
        self.thread_id = threading.get_ident()
        self.inner_s = 0.0  # of closed buckets and bookings inside


def _check(name: str) -> None:
    if name not in BUCKETS:
        raise ValueError(
            f"There is no badput bucket {name!r}. Use one of {', '.join(BUCKETS)}; "
            "'other' takes what fits nowhere."
        )


def _check_seconds(seconds: float) -> None:
    if not 0.0 <= seconds < float("inf"):
        raise ValueError(
            f"seconds={seconds!r} cannot be booked: a duration is finite and not negative. "
            "Take both ends from the same clock's now()."
        )
