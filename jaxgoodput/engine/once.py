"""Something made once for each key, by whichever thread asks first; others of that key wait for it."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Once(Generic[K, V]):
    """A dictionary that fills itself. Making a value for one key does not hold up the others.

    >>> squares = Once()
    >>> squares.get(3, lambda: 9), squares.get(3, lambda: 0), squares.peek(4)
    (9, 9, None)
    """

    def __init__(self):
        self._found: dict[K, V] = {}
        self._turns: dict[K, threading.Lock] = {}
        self._lock = threading.Lock()

    def peek(self, key: K) -> V | None:
        """What was made, None before."""
        with self._lock:
            return self._found.get(key)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """What was made, or is made now, on this thread. Where `make` raises, nothing is kept."""
        with self._lock:
            if key in self._found:
                return self._found[key]
            turn = self._turns.setdefault(key, threading.Lock())
        with turn:
            with self._lock:
                if key in self._found:
                    return self._found[key]
            value = make()
            with self._lock:
                self._found[key] = value
        return value
