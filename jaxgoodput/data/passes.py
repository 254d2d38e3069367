"""`Passes`: gives a state to iterables that have none, by counting what was read and skipping it later."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from absl import logging

from jaxgoodput.clock import Clock, SystemClock

LONG_S = 1.0  # skipping items that took longer to read is announced


class Passes:
    """One pass over an iterable after the other, as one iterator with a state.

    `begin(number)` returns the iterable of a pass, counted from 0. It must return the same items whenever it
    is called with the same number. `num` is the number of passes; None: without end. `first` may be an
    iterator of the first pass, of which nothing has been read.

    A state is the number of a pass, and how many of its items were read. To go back to it, the pass is begun
    anew and these items are read once more. No pass begins before its first item is asked for.

    Raises (from `next`):
      ValueError: a pass has no items, or fewer than were read of it before.
    """

    def __init__(
        self,
        begin: Callable[[int], Iterable[Any]],
        num: int | None = 1,
        *,
        first: Iterator[Any] | None = None,
        clock: Clock | None = None,
    ):
        self._begin, self._num = begin, num
        self._clock = clock or SystemClock()
        self._items = first  # of this pass, once it has begun
        self._pass = self._taken = self._skip = 0
        self._read_s = 0.0  # how long it took to read `_taken` items

    def __iter__(self) -> "Passes":
        """Return the iterator itself."""
        return self

    def __next__(self) -> Any:
        """Return the next item of this pass, or the first one of the next pass."""
        while self._num is None or self._pass < self._num:
            began_s = self._clock.now()
            if self._items is None:
                self._items = self._begun()
            try:
                item = next(self._items, self)
            except BaseException:  # what has raised would seem to be at its end
                self._skip, self._taken, self._items = self._taken, 0, None
                raise
            if item is not self:
                self._taken += 1
                self._read_s += self._clock.now() - began_s
                return item
            if self._taken == 0:
                raise ValueError(
                    f"pass {self._pass} over the data has no items. A generator or another iterator can be "
                    "read once only: make a new one for each pass."
                )
            self._pass, self._taken, self._read_s, self._items = self._pass + 1, 0, 0.0, None
        raise StopIteration

    def get_state(self) -> dict[str, float | int]:
        """Return the place of the next item."""
        return {"pass": self._pass, "taken": self._taken + self._skip, "read_s": self._read_s}

    def set_state(self, state: dict[str, float | int]) -> None:
        """Go back, or forward, to a place that `get_state` returned."""
        if state == self.get_state():
            return  # beginning a pass may take long
        self._pass, self._skip = int(state["pass"]), int(state["taken"])
        self._items, self._taken, self._read_s = None, 0, state["read_s"]

    def _begun(self) -> Iterator[Any]:
        """Begin this pass, and skip what was read of it."""
        items, count = iter(self._begin(self._pass)), self._skip
        if count and self._read_s > LONG_S:
            logging.info(
                "skipping %d items of pass %d over the data, which are used: reading them took %.0f s the "
                "last time",
                count,
                self._pass,
                self._read_s,
            )
        self._read_s = 0.0  # they are read once more
        for i in range(count):
            if next(items, self) is self:
                raise ValueError(
                    f"pass {self._pass} over the data has {i} items, and {count} of them were read before. "
                    "It must have the same items each time."
                )
        self._taken, self._skip = count, 0
        return items
