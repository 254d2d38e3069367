"""Values by key, each made once, by whichever thread needs it first."""

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Once:
    """What was made, by key. Safe from any thread.

    A second thread that asks for the same waits for the first; one that asks for another does not.
    """

    def __init__(self):
        self._made: dict[Hashable, Any] = {}
        self._turns: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def __call__(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `key`, made on this thread where nobody has done so yet.

        Where making it raises, nothing is kept.
        """
        with self._lock:
            if key in self._made:
                return self._made[key]
            turn = self._turns.setdefault(key, threading.Lock())
        with turn:
            with self._lock:
                if key in self._made:
                    return self._made[key]
            value = make()
            with self._lock:
                self._made[key] = value
        return value

    def peek(self, key: Hashable) -> Any:
        """What is there already; None before."""
        with self._lock:
            return self._made.get(key)

    def __len__(self) -> int:
        return len(self._made)
