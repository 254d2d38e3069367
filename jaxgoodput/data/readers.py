"""Reads samples: with a pool of threads if the source allows it, and again if a read failed transiently.

A read is begun first, and its samples are asked for later. If several reads are begun before the first is
asked for, all threads stay busy across the borders of batches. Samples come in the order of their indices,
whichever thread is done first. The threads are daemons, so a read that hangs does not keep the process alive.
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

from jaxgoodput._jax import settings_here
from jaxgoodput._worker import Worker
from jaxgoodput.clock import Clock
from jaxgoodput.data.sources import SequenceSource, Source

T = TypeVar("T")

FIRST_PAUSE_S = 0.5  # before the first retry; twice as long before each of the next
JOIN_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """Repeats reads that failed transiently, with backoff.

    A read that ends in an OSError (TimeoutError is one), or in an error caused by one, is repeated up to
    `num_retries` times, after 0.5 s, 1 s, 2 s, and so on.
    """

    num_retries: int
    clock: Clock
    is_over: Callable[[], bool] = lambda: False
    """Returns whether the reads are no longer wanted; then none is repeated."""
    on_retry: Callable[[], None] = lambda: None
    """Called before each repetition."""

    def __call__(self, read: Callable[[], T]) -> T:
        """Call `read` until it succeeds, and return its result. Raises its last error if attempts run out."""
        num_tried = 0
        while True:
            try:
                return read()
            except Exception as error:
                num_tried += 1
                if self.num_retries == 0 or self.is_over() or not _is_transient(error):
                    raise
                if num_tried > self.num_retries:
                    raise RuntimeError(f"{error} It was tried {num_tried} times.") from error
                pause_s = FIRST_PAUSE_S * 2 ** (num_tried - 1)
                logging.warning(
                    "%s Trying again in %g s (%d of %d).",
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
    """Waits for the batch and returns it. Raises the error of the first sample that failed."""
    reads: tuple[Future, ...] = ()
    """Reads of single samples by the pool's threads."""

    def cancel(self) -> None:
        """Cancel the reads of the batch that no thread has begun yet."""
        for read in self.reads:
            read.cancel()


class Readers:
    """Reads batches of one source. Use it as a context manager, or call `stop` and `join`.

    A source that is read sample by sample is read by `num_readers` threads; None takes the number that the
    source recommends (`SequenceSource.num_readers`). One reader, and any other kind of source, means the
    caller's own thread. Reads that fail transiently are repeated up to `num_retries` times (`Attempts`).
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
        self._threads: list[Worker] = []
        self._num_threads = 1
        self._samples: SequenceSource | None = None  # the source, if it is read sample by sample
        if isinstance(source, SequenceSource) and source.is_read_one_by_one:
            self._samples = source
            self._num_threads = source.num_readers if num_readers is None else num_readers

    @property
    def num_threads(self) -> int:
        """Number of samples that may be read at once."""
        return self._num_threads

    @property
    def are_threads(self) -> bool:
        """Whether reads that were begun continue in the background, on threads."""
        return self._num_threads > 1

    @property
    def num_retried(self) -> int:
        """Number of reads so far that failed and were tried again."""
        return self._num_retried

    def begin(self, indices: Int[np.ndarray, " n"], epochs: Int[np.ndarray, " n"]) -> Reading:
        """Begin to read the samples at `indices`, augmented for their `epochs`."""
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
        if self._stopped:  # the threads may have ended already
            for read in reads:
                read.cancel()
        return Reading(lambda: samples.stacked([r.result() for r in reads], indices), reads)

    def stop(self) -> None:
        """Begin no further read: the ones that wait raise CancelledError. Idempotent."""
        with self._lock:
            stopped, self._stopped = self._stopped, True
        if not stopped:
            for _ in self._threads:
                self._tasks.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to finish their last reads; False if one takes longer than `timeout_s`."""
        return all(thread.join(timeout_s) for thread in self._threads)

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
                within = settings_here()  # reading is the user's code
                self._threads = [
                    Worker(f"reader-{i}", self._work, within=within)
                    for i in range(self._num_threads)
                ]

    def _submit(self, read: Callable[[], Any]) -> Future:
        future: Future = Future()
        self._tasks.put((future, read))
        return future

    def _work(self, worker: Worker) -> None:
        while (task := self._tasks.get()) is not None:
            future, read = task
            if self._stopped:
                future.cancel()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(read())
                except BaseException as error:  # SystemExit too, or the caller would wait for ever
                    future.set_exception(error)
            del task, future, read  # so that an idle thread keeps no samples alive

    def _count_retry(self) -> None:
        with self._lock:
            self._num_retried += 1


def _is_transient(error: BaseException | None) -> bool:
    """Return whether an error may pass by itself: it is an OSError, or was caused by one."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None
