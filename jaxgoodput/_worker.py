"""Background threads that have an owner: named, stopped and joined, their exceptions delivered.

A `Worker` runs one function on a thread. A `QueueWorker` handles the items that are put to it, in order. Both
keep the exception that ended them until the owner asks (`raise_error`, `close`), or hand it to `on_error` at
once. Threads are daemons: a thread that is stuck in a device or on a disk must not keep the process alive.
`concurrent.futures` does not do this: its threads are joined at exit, and it has no stop flag.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Worker:
    """A thread that runs `run(worker)` once; `run` returns soon after `worker.is_stopping` turns true.

    `on_error`, if given, is called on the worker's thread with the exception that ended `run`. Otherwise the
    exception waits for `raise_error` or `close`. `within` makes a context for the whole of `run`.
    """

    def __init__(
        self,
        name: str,
        run: Callable[["Worker"], None],
        *,
        on_error: Callable[[BaseException], None] | None = None,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
    ):
        self.error: BaseException | None = None
        self._run = run
        self._within = within
        self._on_error = on_error
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._body, name=f"jaxgoodput-{name}", daemon=True)
        self._thread.start()

    @property
    def is_stopping(self) -> bool:
        """Whether the owner has asked the worker to end."""
        return self._stopping.is_set()

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller is the worker's own thread."""
        return threading.current_thread() is self._thread

    def wait_stopping(self, timeout_s: float | None = None) -> bool:
        """Block the worker until it is asked to end, for `timeout_s` at most; True if it was asked."""
        return self._stopping.wait(timeout_s)

    def stop(self) -> None:
        """Ask the worker to end, without waiting. Idempotent."""
        self._stopping.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the thread has ended; False if it still runs after `timeout_s`."""
        if not self.is_current:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def raise_error(self) -> None:
        """Raise the exception that ended the worker, once, unless `on_error` has had it."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Stop the worker, wait for it, and raise what it failed with. Idempotent."""
        self.stop()
        self.join()
        self.raise_error()

    def __enter__(self):
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:  # an exception is already on its way to the owner
            self.stop()
            self.join()

    def _body(self) -> None:
        try:
            with self._within():
                self._run(self)
        except BaseException as error:  # SystemExit too: the owner would wait for ever
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._on_error is None:
            self.error = error
        else:
            self._on_error(error)


class Workers:
    """Short-lived workers with one owner, such as one per network connection.

    `on_error` is called with the exception of each worker that fails, on its thread. Workers that have ended
    are forgotten.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None]):
        self._name = name
        self._on_error = on_error
        self._lock = threading.Lock()
        self._running: set[Worker] = set()

    def start(self, run: Callable[[Worker], None]) -> None:
        """Run a function on a thread of its own."""

        def body(worker: Worker) -> None:
            try:
                run(worker)
            except BaseException as error:
                self._on_error(error)
            finally:
                with self._lock:
                    self._running.discard(worker)

        with self._lock:  # so that the worker is in the set before it can leave it
            self._running.add(Worker(self._name, body))

    def stop(self) -> None:
        """Ask all workers to end, without waiting."""
        with self._lock:
            for worker in self._running:
                worker.stop()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for all workers, at most `timeout_s` for each; False if one still runs."""
        with self._lock:
            running = list(self._running)
        return all([worker.join(timeout_s) for worker in running])


class QueueWorker(Worker, Generic[Item]):
    """A thread that calls `handle(item)` for every item that is put to it, in order.

    If `handle` raises, `on_error` hears of it and the next item is handled. Without `on_error` the worker
    ends, drops what waits, and raises at the owner's next `put`, `flush` or `close`.

    Once nothing waits, the thread rests for `rest_s` before it looks again, unless it is waited for.
    Waking a thread costs as much as handling a small item, and items that come meanwhile share it.
    """

    def __init__(
        self,
        name: str,
        handle: Callable[[Item], object],
        *,
        on_error: Callable[[BaseException], None] | None = None,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
        rest_s: float = 0.0,
    ):
        self._handle = handle
        self._rest_s = rest_s
        self._is_awaited = threading.Event()
        # A function in the queue is called instead of handled; None ends the worker.
        self._queue: queue.SimpleQueue[tuple[Item] | Callable[[], None] | None] = (
            queue.SimpleQueue()
        )
        super().__init__(name, self._handle_all, on_error=on_error, within=within)

    @property
    def num_waiting(self) -> int:
        """Items that were put and are not being handled yet."""
        return self._queue.qsize()

    def put(self, item: Item) -> None:
        """Have the thread handle an item after all earlier ones. Returns at once."""
        self.raise_error()
        self._queue.put((item,))

    def call_when_done(self, done: Callable[[], None]) -> None:
        """Call `done` on the worker's thread once everything put so far has been handled."""
        self._queue.put(done)
        self._is_awaited.set()

    def hurry(self) -> None:
        """End the rest, if the thread rests."""
        self._is_awaited.set()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything put so far has been handled; False if the worker ended or the time is up."""
        self.raise_error()
        if self.is_current:
            raise RuntimeError(
                "flush() was called on the worker's own thread, which would wait for itself"
            )
        done = threading.Event()
        self.call_when_done(done.set)
        waited_s = 0.0
        while not done.wait(0.05):
            waited_s += 0.05
            if not self.is_alive or (timeout_s is not None and waited_s >= timeout_s):
                break
        self.raise_error()
        return done.is_set()

    def stop(self) -> None:
        """Ask the worker to end once everything put so far has been handled. Idempotent."""
        super().stop()
        self._queue.put(None)
        self._is_awaited.set()

    def _next(self) -> tuple[Item] | Callable[[], None] | None:
        """Wait for what comes next; rest first if nothing waits."""
        if self._rest_s and self._queue.empty():
            self._is_awaited.wait(self._rest_s)
            self._is_awaited.clear()  # before looking: what is put from now on sets it again
        return self._queue.get()

    def _handle_all(self, _: Worker) -> None:
        while (entry := self._next()) is not None:
            try:
                entry() if callable(entry) else self._handle(*entry)
            except BaseException as error:
                if self._on_error is None:
                    raise
                self._on_error(error)
            del entry  # nothing is kept alive while the queue is empty
