"""When each node last contacted the service."""

from jaxgoodput.clock import Clock


class Heartbeats:
    """Tells for how long each node has been silent.

    When the service starts, every node counts as heard from at that moment. A node that is silent for
    `limit_s` seconds is considered down.
    """

    def __init__(self, clock: Clock, limit_s: float):
        self.limit_s = limit_s
        self._clock = clock
        self._began_s = clock.now()
        self._at_s: dict[str, float] = {}

    def record(self, node: str) -> None:
        """Note that a node has just contacted the service."""
        self._at_s[node] = self._clock.now()

    def record_all(self) -> None:
        """Restart the count for all nodes. Use this if the service itself could not receive heartbeats."""
        self._began_s = self._clock.now()
        self._at_s.clear()

    def silent_s(self, node: str) -> float:
        """Seconds since the last heartbeat of a node."""
        return self._clock.now() - self._at_s.get(node, self._began_s)
