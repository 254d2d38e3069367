"""What a change of devices costs: by kind of change, with compiling, and with storage that others use too.

A restart takes the job's checkpoint through the storage (written where it was running, then read), and then
the seconds of its application, times a factor by kind of change, and those of compiling where the job has
not had the shape before.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxgoodput.specs import Shape

Seconds = float | Mapping[str, float]  # for every application, or by application

Change = Literal["start", "resume", "move", "shape", "kind"]
# How often a change takes the state of the job through the storage.
_TRIPS: Mapping[Change, int] = {"start": 0, "resume": 1, "move": 2, "shape": 2, "kind": 2}


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Where checkpoints lie; those that restart at once share it evenly."""

    bytes_per_s: float
    state_bytes: Seconds
    """Size of a checkpoint, for every application or by application."""

    def __post_init__(self):
        if not (self.bytes_per_s > 0 and math.isfinite(self.bytes_per_s)):
            raise ValueError(
                f"Storage.bytes_per_s must be above 0 and finite, got {self.bytes_per_s}. For restarts "
                "that wait for no storage, leave RestartCosts.storage out."
            )


@dataclass(frozen=True, kw_only=True)
class RestartCosts:
    """What each kind of change costs, in units of `Settings.restart_s`; the defaults change nothing."""

    start: float = 1.0
    """The first time on any devices."""
    resume: float = 1.0
    """After a pause, a failure or a crash."""
    move: float = 1.0
    """To other devices of the same kind, as many on as many nodes."""
    shape: float = 1.0
    """To another number of devices or nodes of the same kind."""
    kind: float = 1.0
    """To another kind of device."""
    compile_s: Seconds = 0.0
    """On top, where the job has not had this shape before."""
    storage: Storage | None = None

    def __post_init__(self):
        for name in ("start", "resume", "move", "shape", "kind"):
            factor = getattr(self, name)
            if not (factor >= 0 and math.isfinite(factor)):
                raise ValueError(
                    f"RestartCosts.{name} must be at least 0 and finite, got {factor}. It multiplies the "
                    "seconds of Settings.restart_s."
                )

    def seconds(self, change: Change, application: str, restart_s: float, new_shape: bool) -> float:
        """What a change takes beside the storage; `new_shape`: the job has not had it before."""
        compile_s = of_application(self.compile_s, application, "RestartCosts.compile_s")
        return getattr(self, change) * restart_s + (compile_s if new_shape else 0.0)

    def bytes(self, change: Change, application: str) -> float:
        """What goes through the storage."""
        if self.storage is None:
            return 0.0
        size = of_application(self.storage.state_bytes, application, "Storage.state_bytes")
        return _TRIPS[change] * size


def change_of(last: Shape | None, running: bool, new: Shape) -> Change:
    """What kind of change it is; `last` is the shape that the job had last, None before its first start.

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
    """The one number, or that of the application. Raises ValueError where it has none."""
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
    """Who is at the storage: each gets an even part of it, more as soon as others are through."""

    bytes_per_s: float
    _left: dict[str, float] = field(default_factory=dict)
    _now_s: float = 0.0

    def join(self, job: str, size_bytes: float, now_s: float) -> None:
        """A job has so much to take through."""
        self._pass_to(now_s)
        self._left.pop(job, None)
        if size_bytes > 0:
            self._left[job] = size_bytes

    def leave(self, job: str, now_s: float) -> None:
        """A job has nothing there any more."""
        self._pass_to(now_s)
        self._left.pop(job, None)

    def left_s(self, now_s: float) -> dict[str, float]:
        """Seconds until each of those that are there is through, if nobody joins."""
        self._pass_to(now_s)
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
            # Floats: what is a billionth of a second from its end has ended.
            done = each + 1e-9 * self.bytes_per_s
            self._left = {job: size - each for job, size in self._left.items() if size > done}
            if each < least:
                return
