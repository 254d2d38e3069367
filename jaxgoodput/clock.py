"""Time as an argument: the only file of the package that reads a clock."""

import threading
import time
from typing import Protocol, runtime_checkable


@runtime_checkable
class Clock(Protocol):
    """A source of seconds; tests pass a `FakeClock`."""

    def now(self) -> float:
        """Seconds since an arbitrary origin; never goes back."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch: for records that people and other processes read."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait until `seconds` have passed on this clock."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.perf_counter()

    def wall(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Block the calling thread for `seconds`."""
        time.sleep(seconds)


class FakeClock:
    """A clock that moves only when told to; safe to share between threads."""

    def __init__(self, start_s: float = 0.0):
        self._now_s = start_s
        self._lock = threading.Lock()

    def now(self) -> float:
        """The fake time, seconds."""
        with self._lock:
            return self._now_s

    def wall(self) -> float:
        """The same fake time."""
        return self.now()

    def sleep(self, seconds: float) -> None:
        """Advance the fake time by `seconds` and return at once."""
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Advance the fake time by `seconds`."""
        with self._lock:
            self._now_s += seconds
