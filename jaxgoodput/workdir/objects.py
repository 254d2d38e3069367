"""`ObjectStore`: what a run needs of an object store, and how failures of stores are told apart.

Objects are written as a whole. `replace` writes one only if no other process has written it meanwhile.
Everything else in this room is built on that one guarantee.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from jaxgoodput.clock import Clock

T = TypeVar("T")
# Longest silence within one request. A hold is renewed in a second attempt before anyone may take it.
REQUEST_S = 20.0
CONNECT_S = 5.0
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 5.0


class StoreError(OSError):
    """An object store refuses a request, or cannot be used; the message names the remedy."""


class Unavailable(StoreError):
    """The store did not answer, or not with what was asked; the same request may succeed later."""


class Changed(Exception):
    """Another process has written the object meanwhile."""


@dataclass(frozen=True)
class StoredObject:
    """The content of an object, and which one of its versions it is."""

    data: bytes
    generation: str


@runtime_checkable
class ObjectStore(Protocol):
    """The objects below one prefix of a bucket. Keys are relative to it. All methods are thread-safe.

    All of them raise Unavailable for what may pass, and StoreError for what will not.
    """

    url: str
    """Bucket and prefix, such as "gs://bucket/path"."""

    def get(self, key: str) -> StoredObject | None:
        """Return an object; None if there is none."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write an object. Returns once the store has confirmed the checksum of what it has stored."""
        ...

    def replace(self, key: str, data: bytes, generation: str | None) -> str:
        """Write an object like `put`, if it still is of this generation; None: if there is none.

        Returns the new generation. Raises Changed, and writes nothing, if it has another one.
        """
        ...

    def keys(self, below: str) -> Iterator[str]:
        """Return the keys that begin with `below`."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""
        ...


class PatientStore:
    """A store that repeats what is unavailable, with growing delays, for `patience_s` seconds at most.

    A request that was repeated may have taken effect the first time. So `replace` may raise Changed because
    of its own first attempt: the caller must look.
    """

    def __init__(self, store: ObjectStore, clock: Clock, *, patience_s: float):
        self.url = store.url
        self._store = store
        self._clock = clock
        self._patience_s = patience_s

    def get(self, key: str) -> StoredObject | None:
        """Return an object; None if there is none."""
        return self._patiently(lambda: self._store.get(key))

    def put(self, key: str, data: bytes) -> None:
        """Write an object."""
        self._patiently(lambda: self._store.put(key, data))

    def replace(self, key: str, data: bytes, generation: str | None) -> str:
        """Write an object if it still is of this generation; returns the new one."""
        return self._patiently(lambda: self._store.replace(key, data, generation))

    def keys(self, below: str) -> Iterator[str]:
        """Return the keys that begin with `below`."""
        return iter(self._patiently(lambda: list(self._store.keys(below))))

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""
        self._patiently(lambda: self._store.delete(key))

    def _patiently(self, ask: Callable[[], T]) -> T:
        delay_s, until_s = FIRST_DELAY_S, self._clock.now() + self._patience_s
        while True:
            try:
                return ask()
            except Unavailable:
                if self._clock.now() + delay_s > until_s:
                    raise
            self._clock.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
