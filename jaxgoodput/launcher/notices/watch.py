"""Watches the sources of notices that a user has named, each on a thread of its own, or as a signal.

A source that does not answer harms nothing: it is asked again after ever longer pauses, and one line says so.
"""

import atexit
import contextlib
import dataclasses
import pathlib
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxgoodput._worker import Worker
from jaxgoodput.clock import Clock
from jaxgoodput.launcher.notices.exchange import ask
from jaxgoodput.launcher.notices.metadata import QUERIES, NoticeReading, Query
from jaxgoodput.launcher.notices.notice import (
    CloudSource,
    FileSource,
    Notice,
    NoticeSettings,
    SignalSource,
    seconds_in,
)
from jaxgoodput.launcher.supervise import ignore_if_default, say

_LONGEST_PAUSE_S = 10.0  # after failures: some notices come only 30 s before the end
_FILE_PAUSE_S = 1.0
_END_S = 1.0
_LONGEST_TEXT = 1000  # bytes of a file that are read


@dataclass(frozen=True)
class Polling:
    """What is known of a source that is asked again and again."""

    memory: str = ""
    """What the next question needs; see `metadata.NoticeReading`."""
    num_failures: int = 0
    """Consecutive failures."""
    has_complained: bool = False
    """Whether the user was told of a failure."""
    told: Notice | None = None
    """The notice that is in force, which was passed on."""


@dataclass(frozen=True)
class PollResult:
    """What follows from asking a source once."""

    polling: Polling
    pause_s: float
    notice: Notice | None = None
    """A notice that was not passed on yet."""
    line: str = ""
    """Text to print."""


def after_reading(polling: Polling, name: str, reading: NoticeReading) -> PollResult:
    """Return what follows from a reading. A notice that stays in force is passed on once."""
    told, new, line = polling.told, None, ""
    if reading.is_known:
        # The seconds that are left are fewer each time.
        if reading.notice is not None and _is_other(reading.notice, told):
            new = reading.notice
        if reading.notice is None and told is not None:
            line = f"{name}: the notice is withdrawn. A host that has left does not come back by itself"
        told = reading.notice
    after = dataclasses.replace(polling, memory=reading.memory, num_failures=0, told=told)
    return PollResult(after, reading.pause_s, new, line)


def _is_other(notice: Notice, told: Notice | None) -> bool:
    return told is None or dataclasses.replace(notice, within_s=told.within_s) != told


def after_failure(polling: Polling, name: str, why: str) -> PollResult:
    """Return what follows if a source cannot be asked: the user is told once, the pauses grow."""
    line = ""
    if not polling.has_complained:
        line = (
            f"{name} cannot be asked for notices: {why}. Training goes on, and it is asked again every "
            f"{_LONGEST_PAUSE_S:g} s at least; until it answers, this host gets no notice from there"
        )
    after = dataclasses.replace(
        polling, memory="", num_failures=polling.num_failures + 1, has_complained=True
    )
    pause_s = min(2.0 ** min(polling.num_failures, 16), _LONGEST_PAUSE_S)
    return PollResult(after, pause_s, line=line)


def read_file(path: str) -> NoticeReading:
    """Return the notice that a file is, if it exists. Raises OSError if it exists and cannot be read."""
    try:
        with pathlib.Path(path).open("rb") as file:
            text = file.read(_LONGEST_TEXT).decode(errors="replace").strip()
    except FileNotFoundError:
        return NoticeReading(pause_s=_FILE_PAUSE_S)
    within_s = seconds_in(text)
    says = f" and says {text[:80]!a}" if text and within_s is None else ""
    return NoticeReading(
        Notice("a file", f"{path} is there{says}", within_s), pause_s=_FILE_PAUSE_S
    )


@contextlib.contextmanager
def notices_to(
    events: "queue.SimpleQueue[Any]", settings: NoticeSettings, clock: Clock
) -> Iterator[None]:
    """Put each `Notice` of the named sources on a queue inside the block. No source is asked outside of it.

    Enter it in the main thread if a signal is among the sources: no other can receive signals. While Python
    shuts down, the signal is ignored, as in `signals_to`.
    """
    watchers: list[Worker] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_end, watchers)
        for source in settings.sources:
            match source:
                case SignalSource():
                    _receive(stack, source, events)
                case FileSource(path):
                    look = partial(_look_at_file, path)
                    watchers.append(_watcher(f"the file {path}", look, events))
                case CloudSource(cloud):
                    server = settings.server_of(source)
                    for query in QUERIES[cloud]:
                        look = partial(_look_at_server, server, query, clock)
                        watchers.append(_watcher(f"{query.name} at {server}", look, events))
        yield


def _end(watchers: Sequence[Worker]) -> None:
    """End the threads; one that hangs in a connection is a daemon, and must not hold up this process."""
    for watcher in watchers:
        watcher.stop()
    for watcher in watchers:
        watcher.join(_END_S)


def _receive(
    stack: contextlib.ExitStack, source: SignalSource, events: "queue.SimpleQueue[Any]"
) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"notices by {source} need the main thread, which alone can receive signals"
        )
    name = source.number.name
    notice = Notice(name, "this host is to leave", source.within_s)
    # A handler may run in the middle of any code. SimpleQueue.put is reentrant, so it is safe there.
    before = signal.signal(source.number, lambda *_: events.put(notice))
    stack.callback(atexit.register, ignore_if_default, (source.number,))
    stack.callback(signal.signal, source.number, before)


def _watcher(
    name: str, look: Callable[[str, Worker], NoticeReading], events: "queue.SimpleQueue[Any]"
) -> Worker:
    failed = partial(_watching_failed, name)
    return Worker("notices", partial(_poll, name, look, events), on_error=failed)


def _watching_failed(name: str, error: BaseException) -> None:
    say(f"{name} is not asked for notices any more: {error!r}")


def _poll(
    name: str,
    look: Callable[[str, Worker], NoticeReading],
    events: "queue.SimpleQueue[Any]",
    worker: Worker,
) -> None:
    polling = Polling()
    while not worker.is_stopping:
        try:
            result = after_reading(polling, name, look(polling.memory, worker))
        except (OSError, ValueError) as error:
            if worker.is_stopping:
                return
            result = after_failure(polling, name, str(error))
        if result.line:
            say(result.line)
        if result.notice is not None:
            events.put(result.notice)
        polling = result.polling
        worker.wait_stopping(result.pause_s)


def _look_at_file(path: str, memory: str, worker: Worker) -> NoticeReading:
    return read_file(path)


def _look_at_server(
    server: str, query: Query, clock: Clock, memory: str, worker: Worker
) -> NoticeReading:
    answer = ask(server, query.question(memory), clock, lambda: worker.is_stopping)
    return query.read(memory, answer, clock.wall())
