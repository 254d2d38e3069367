"""Values by key, each made once, by the first thread that needs it."""

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Once:
    """Values that were made, by key. Thread-safe.

    A second thread that asks for the same key waits for the first; other keys do not wait.
    """

    def __init__(self):
        self._made: dict[Hashable, Any] = {}
        self._turns: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def __call__(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of `key`; the first call makes it on its own thread.

        If making it raises, nothing is kept, and the next call tries again.
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
        """Return the value of `key` if it was made; None otherwise."""
        with self._lock:
            return self._made.get(key)

    def __len__(self) -> int:
        return len(self._made)
