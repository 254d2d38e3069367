"""`Certifier`: finds values of the state that are lost, and says so in all processes."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxgoodput.train.control import Control, Requests
from jaxgoodput.train.prepare import PreparedRun
from jaxgoodput.train.start.lost_values import first_lost, floats
from jaxgoodput.train.start.value_checks import GLANCE_EVERY

NUM_NAMED = 3  # leaves that a message names; the others are counted


@dataclass
class Certifier:
    """Checks the whole state when it is asked, and a part of its large leaves every hundred steps or so.

    The second check is only started between two steps, and its result is read when it is there. If it finds
    anything, all processes are asked for a checkpoint, which checks the whole state at the same step.
    """

    start: PreparedRun
    requests: Requests
    has_found: bool = field(default=False, init=False)
    """Whether a check between saves found lost values."""
    _glances: deque[tuple[Any, ...]] = field(default_factory=deque, init=False)

    def stepped(self, count: int = 1) -> None:
        """Start a check of large leaves if it is due, and look at the results of earlier ones.

        `count` steps were dispatched since it was called last.
        """
        if self.start.now.step % GLANCE_EVERY < count:
            self.look()
        while self._glances and all(flag.is_ready() for flag in self._glances[0]):
            if any(jax.device_get(self._glances.popleft())):
                self.has_found = True
                self.requests.post(Control(save=True))

    def look(self) -> None:
        """Start a check of the large leaves whose turn it is; `stepped` sees its result when it is there."""
        now, slots = self.start.now, self.start.feed.slots
        self._glances.append(self.start.values.glance(now.engine, now.state, slots))

    @property
    def is_looking(self) -> bool:
        """Whether the result of a check between saves was not seen yet."""
        return bool(self._glances)

    def lost(self, *, rows: bool = False) -> dict[str, int]:
        """Return how many values of the state and of rows that were written are lost, by leaf; {} if none.

        With `rows`, the rows of tables on the device are included. Waits for the last step.
        """
        now, feed = self.start.now, self.start.feed
        found = self.start.values.lost(now.engine, now.state)
        if rows:
            feed.check_slots()
        return {**found, **feed.lost}

    def agreed(self, holds: bool) -> bool:
        """Whether something holds in every process; processes that are together call this together."""
        decisions = self.start.run.decisions
        return decisions.everywhere(holds) if decisions.is_together else holds

    def told(self, lost: Mapping[str, int]) -> str:
        """Return as text which leaves have lost values, with the first of them."""
        if not lost:
            return "another process found values that are no longer finite"
        leaves, found = floats(self.start.now.state), []
        for path, count in [*lost.items()][:NUM_NAMED]:
            leaf = leaves.get(path)
            what = f"{count} values" if leaf is None else f"{count} of {leaf.size} values"
            if not found and leaf is not None and leaf.is_fully_addressable:
                began = self.start.values.origin.codes.get(path)
                index, value = first_lost(jax.device_get(leaf), began)
                what += f", the first is {value} at {list(index)}"
            found.append(f"{path.removeprefix('.')} ({what})")
        more = len(lost) - NUM_NAMED
        return ", ".join(found) + (f" and {more} more leaves" if more > 0 else "")
