"""The cost of a change of devices: by kind of change, with compilation, and with storage that jobs share.

A restart first moves the job's checkpoint through the storage: written if the job was running, then read.
After that it takes the restart seconds of its application, times a factor by kind of change, plus the time
of a compilation if the job's shape is new to it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxgoodput.cluster.simulate.key_numbers import check_above_zero
from jaxgoodput.specs import Shape

Seconds = float | Mapping[str, float]  # for all applications, or by application

Change = Literal["start", "resume", "move", "shape", "kind"]
# How often a change moves the job's state through the storage.
_TRIPS: Mapping[Change, int] = {"start": 0, "resume": 1, "move": 2, "shape": 2, "kind": 2}


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The storage of checkpoints. Jobs that restart at the same time share it evenly."""

    bytes_per_s: float
    state_bytes: Seconds
    """Size of a checkpoint, for all applications or by application."""

    def __post_init__(self):
        check_above_zero("Storage", self, "bytes_per_s")


@dataclass(frozen=True, kw_only=True)
class RestartCosts:
    """The cost of each kind of change, in units of `Settings.restart_s`; by default all cost 1."""

    start: float = 1.0
    """Cost of the first start."""
    resume: float = 1.0
    """Cost of resuming after a pause, a failure or a crash."""
    move: float = 1.0
    """Cost of moving to other devices of the same shape."""
    shape: float = 1.0
    """Cost of changing the number of devices or nodes, on the same kind of device."""
    kind: float = 1.0
    """Cost of moving to another kind of device."""
    compile_s: Seconds = 0.0
    """Additional seconds if the job has not had this shape before, for all applications or by application."""
    storage: Storage | None = None
    """Storage that checkpoints pass through; None = this takes no time."""

    def __post_init__(self):
        for name in ("start", "resume", "move", "shape", "kind"):
            factor = getattr(self, name)
            if not (factor >= 0 and math.isfinite(factor)):
                raise ValueError(
                    f"RestartCosts.{name} must be at least 0 and finite, got {factor}. It multiplies the "
                    "seconds of Settings.restart_s."
                )

    def seconds(self, change: Change, application: str, restart_s: float, new_shape: bool) -> float:
        """Return the seconds that a change of devices takes, without moving checkpoints through the storage.

        `new_shape` tells that the job must compile for a shape that it has not had before.
        """
        compile_s = of_application(self.compile_s, application, "RestartCosts.compile_s")
        return getattr(self, change) * restart_s + (compile_s if new_shape else 0.0)

    def bytes(self, change: Change, application: str) -> float:
        """Return the bytes that a change of devices moves through the checkpoint storage; 0 without one."""
        if self.storage is None:
            return 0.0
        size = of_application(self.storage.state_bytes, application, "Storage.state_bytes")
        return _TRIPS[change] * size


def change_of(last: Shape | None, running: bool, new: Shape) -> Change:
    """Return the kind of a change; `last` is the job's last shape, None before its first start.

    >>> change_of(Shape("t4", 1, 4), True, Shape("t4", 2, 4))
    'shape'
    """
    if last is None:
        return "start"
    if not running:
        return "resume"
    if last.kind != new.kind:
        return "kind"
    return "move" if last == new else "shape"


def of_application(values: Seconds, application: str, name: str) -> float:
    """Return `values` if it is a number, else its entry for the application; ValueError if it has none."""
    if not isinstance(values, Mapping):
        return float(values)
    if application not in values:
        raise ValueError(
            f"{name} has no entry for {application!r}; it has {', '.join(sorted(values))}. "
            "Add one, or give one number for all."
        )
    return float(values[application])


@dataclass
class SharedStorage:
    """The jobs that are moving checkpoints. The bandwidth is divided evenly among them."""

    bytes_per_s: float
    _left: dict[str, float] = field(default_factory=dict)  # bytes by job
    _now_s: float = 0.0

    def join(self, job: str, size_bytes: float, now_s: float) -> None:
        """Let a job start to move a checkpoint of `size_bytes` through the storage."""
        self.leave(job, now_s)
        if size_bytes > 0:
            self._left[job] = size_bytes

    def leave(self, job: str, now_s: float) -> None:
        """Let a job no longer move its checkpoint, so that the others get its share of the bandwidth."""
        self._pass_to(now_s)
        self._left.pop(job, None)

    def left_s(self, now_s: float) -> dict[str, float]:
        """Return, by job, the seconds until its checkpoint has been moved, if no other job joins."""
        self._pass_to(now_s)
        # Smallest first: until the smallest has been moved, all jobs share the bandwidth, then one fewer.
        found, passed_s, before = {}, 0.0, 0.0
        waiting = len(self._left)
        for job, size in sorted(self._left.items(), key=lambda item: item[1]):
            passed_s += (size - before) * waiting / self.bytes_per_s
            found[job], before = passed_s, size
            waiting -= 1
        return found

    def _pass_to(self, now_s: float) -> None:
        seconds, self._now_s = now_s - self._now_s, now_s
        while self._left and seconds > 0:
            least, waiting = min(self._left.values()), len(self._left)
            each = min(least, seconds * self.bytes_per_s / waiting)
            seconds -= each * waiting / self.bytes_per_s
            # Sums of floats are inexact: a checkpoint within a nanosecond of its end counts as moved.
            done = each + 1e-9 * self.bytes_per_s
            self._left = {job: size - each for job, size in self._left.items() if size > done}
            if each < least:
                return
