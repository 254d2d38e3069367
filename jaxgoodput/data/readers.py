"""Who reads samples: a pool of threads where a source allows it, and again where a read failed in passing.

A read is begun, and its samples are there when they are asked for: whoever begins several before it
asks for the first keeps all threads at work over the borders of batches. The order of the samples is that
of the indices, whoever is done first. The threads are daemons: a read that hangs forever does not keep a
process from ending.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from absl import logging
from jaxtyping import Int, PyTree

from jaxgoodput.clock import Clock
from jaxgoodput.data.sources import SequenceSource, Source

T = TypeVar("T")

FIRST_PAUSE_S = 0.5  # before the first retry; twice as long before each of the next
JOIN_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """What a read may take: one that ends in an OSError, TimeoutError among them, is repeated up to
    `num_retries` times, 0.5 s, 1 s, 2 s ... later.
    """

    num_retries: int
    clock: Clock
    is_over: Callable[[], bool] = lambda: False
    """Whether nobody waits for it any more."""
    on_retry: Callable[[], None] = lambda: None

    def __call__(self, read: Callable[[], T]) -> T:
        """What `read` returns, in as many attempts as it takes and may take; raises what the last raised."""
        num_tried = 0
        while True:
            try:
                return read()
            except Exception as error:
                num_tried += 1
                if self.num_retries == 0 or self.is_over() or not _may_pass(error):
                    raise
                if num_tried > self.num_retries:
                    raise RuntimeError(f"{error} It was tried {num_tried} times.") from error
                pause_s = FIRST_PAUSE_S * 2 ** (num_tried - 1)
                logging.warning(
                    "%s It is tried again in %g s (%d of %d).",
                    error,
                    pause_s,
                    num_tried,
                    self.num_retries,
                )
                self.on_retry()
                self.clock.sleep(pause_s)


@dataclass(frozen=True)
class Reading:
    """A batch that is being read."""

    result: Callable[[], PyTree[np.ndarray]]
    """Waits for it; raises what reading it raised, of the first sample that failed."""
    reads: tuple[Future, ...] = ()
    """Of single samples, by other threads."""

    def cancel(self) -> None:
        """Leave out the reads that no thread has begun."""
        for read in self.reads:
            read.cancel()


class Readers:
    """Reads batches of one source; close it, or use it as a context manager.

    `num_readers` threads call a source that is read sample by sample; None is what the source says of itself
    (`SequenceSource.num_readers`), and one means the caller's own thread, as for every other kind of
    source. Reads that fail in passing are repeated up to `num_retries` times (`Attempts`).
    """

    def __init__(
        self, source: Source, *, clock: Clock, num_readers: int | None = None, num_retries: int = 0
    ):
        self._source = source
        self._again = Attempts(
            num_retries=num_retries,
            clock=clock,
            is_over=lambda: self._stopped,
            on_retry=self._count_retry,
        )
        self._lock = threading.Lock()
        self._num_retried = 0
        self._stopped = False
        self._tasks: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._threads: list[threading.Thread] = []
        self._num_threads = 1
        self._samples: SequenceSource | None = None  # of a source that is read sample by sample
        if isinstance(source, SequenceSource) and source.is_read_one_by_one:
            self._samples = source
            self._num_threads = source.num_readers if num_readers is None else num_readers

    @property
    def num_threads(self) -> int:
        """How many samples may be read at once."""
        return self._num_threads

    @property
    def are_threads(self) -> bool:
        """Whether reads that were begun go on by themselves."""
        return self._num_threads > 1

    @property
    def num_retried(self) -> int:
        """Reads that failed and were repeated, so far."""
        return self._num_retried

    def begin(self, indices: Int[np.ndarray, " n"], epochs: Int[np.ndarray, " n"]) -> Reading:
        """Begin to read the samples at `indices`, each as its epoch has it."""
        samples = self._samples
        if samples is None:
            whole = partial(self._source.batch_of_epochs, indices, epochs)
            return Reading(lambda: self._again(whole))
        pairs = zip(indices.tolist(), epochs.tolist(), strict=True)
        each = [partial(self._again, partial(samples.sample, *pair)) for pair in pairs]
        if not self.are_threads:
            return Reading(lambda: samples.stacked([read() for read in each], indices))
        if not self._threads:
            self._start()
        reads = tuple(self._submit(read) for read in each)
        if self._stopped:  # too late to be seen by the threads
            for read in reads:
                read.cancel()
        return Reading(lambda: samples.stacked([r.result() for r in reads], indices), reads)

    def stop(self) -> None:
        """Begin no further read: what waits for one is told by a CancelledError. Idempotent."""
        with self._lock:
            stopped, self._stopped = self._stopped, True
        if not stopped:
            for _ in self._threads:
                self._tasks.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end their last reads; False where one takes longer than `timeout_s`."""
        for thread in self._threads:
            thread.join(timeout_s)
            if thread.is_alive():
                return False
        return True

    def __enter__(self) -> "Readers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        self.join(JOIN_TIMEOUT_S)

    def _start(self) -> None:
        with self._lock:
            if not self._stopped:
                self._threads = [
                    threading.Thread(target=self._work, name=f"jaxgoodput-reader-{i}", daemon=True)
                    for i in range(self._num_threads)
                ]
                for thread in self._threads:
                    thread.start()

    def _submit(self, read: Callable[[], Any]) -> Future:
        future: Future = Future()
        self._tasks.put((future, read))
        return future

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, read = task
            if self._stopped:
                future.cancel()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(read())
                except BaseException as error:  # SystemExit too: whoever waits for it would hang
                    future.set_exception(error)
            del task, future, read  # not to be kept alive while there is nothing to do

    def _count_retry(self) -> None:
        with self._lock:
            self._num_retried += 1


def _may_pass(error: BaseException | None) -> bool:
    """Whether an error is of a kind that may be gone next time, or caused by one that is."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None
