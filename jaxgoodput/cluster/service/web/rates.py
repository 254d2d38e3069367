"""How often a caller may ask: token buckets, and the limits on questions of each tenant."""

import contextlib
from collections.abc import Iterator

from jaxgoodput.clock import Clock
from jaxgoodput.cluster.service.record.commands import Caller, CommandRefused

MOST_ASKED = 3  # questions of a tenant in flight at once; there is room for eight in all


class TokenBucket:
    """Limits how often something happens: `per_second` on average, and up to `most` at once."""

    def __init__(self, per_second: float, most: float, now_s: float):
        self._per_second, self._most = per_second, most
        self._left, self._at_s = most, now_s

    def takes_s(self, now_s: float) -> float:
        """Count one request and return 0, or return the seconds to wait until one is allowed again."""
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_second)
        self._at_s = now_s
        if self._left >= 1.0:
            self._left -= 1.0
            return 0.0
        return (1.0 - self._left) / self._per_second


class Questions:
    """Limits each tenant's questions, which cost dozens of plans each, so that they leave room for others."""

    def __init__(self, per_minute: float, clock: Clock):
        self._per_minute, self._clock = per_minute, clock
        self._buckets: dict[tuple[str, str], TokenBucket] = {}
        self._in_flight: dict[tuple[str, str], int] = {}

    @contextlib.contextmanager
    def asked_by(self, caller: Caller) -> Iterator[None]:
        """Count a question, which is in flight inside the block. Raises CommandRefused for one too many."""
        key, most, now_s = (caller.tenant, caller.role), self._per_minute, self._clock.now()
        count = self._in_flight.get(key, 0)
        if count >= MOST_ASKED:
            raise CommandRefused(
                429,
                f"{count} questions of tenant {caller.tenant!r} are being answered already, the most that "
                "one tenant may ask at once. Wait for an answer first.",
            )
        bucket = self._buckets.setdefault(key, TokenBucket(most / 60.0, max(most, 1.0), now_s))
        if wait_s := bucket.takes_s(now_s):
            raise CommandRefused(
                429,
                f"tenant {caller.tenant!r} may ask {most:g} questions per minute. Try again in "
                f"{wait_s:.2f} s.",
                retry_s=wait_s,
            )
        self._in_flight[key] = count + 1
        try:
            yield
        finally:
            self._in_flight[key] -= 1
