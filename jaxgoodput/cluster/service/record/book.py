"""The only owner of the state: requests become events, and an event counts once it is in the journal.

All requests that change something wait in one queue. The book takes everything that has gathered there,
decides it in order against the state, writes all events in one transaction, and answers once they are on the
disk. So a hundred requests cost one `fsync`, and no caller ever sees an event that a crash could undo.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from absl import logging

from jaxgoodput.clock import Clock
from jaxgoodput.cluster.service.record.commands import CommandRefused, Outcome
from jaxgoodput.cluster.service.record.events import (
    Event,
    JournalEntry,
    RequestAnswered,
    from_text,
    to_text,
)
from jaxgoodput.cluster.service.record.journal import ClusterJournal, DiskFull
from jaxgoodput.cluster.service.record.state import State, step

MOST_DOWN_S = 24 * 3600.0
MOST_AT_ONCE = 500
MOST_WAITING = 20_000

Decide = Callable[[State], Outcome]
Show = Callable[[State, Outcome], str]


class Timeline:
    """The service's own clock: seconds since its first start, which never go back.

    While the service is down, the wall clock counts. If that says that the service was down for less than
    nothing or more than a day, the wall clock was probably changed, and the time is not counted.
    """

    def __init__(self, clock: Clock, last_s: float, last_wall: float):
        self._clock = clock
        self._began = clock.now()
        down_s = clock.wall() - last_wall if last_wall else 0.0
        if not 0.0 <= down_s <= MOST_DOWN_S:
            logging.warning(
                "by the wall clock the service was down for %.0f s. Either the clock was changed or the "
                "service was down for long; this time is not counted.",
                down_s,
            )
            down_s = 0.0
        self._base_s = last_s + down_s

    def now(self) -> float:
        """Seconds since the service was first started; it continues after a restart."""
        return self._base_s + self._clock.now() - self._began

    def wall(self) -> float:
        """Unix time in seconds, to be shown to people."""
        return self._clock.wall()


@dataclass
class _Asked:
    """A request that waits in the queue of the book, with how to decide and answer it."""

    decide: Decide
    show: Show
    request: str | None
    digest: str
    status: int
    done: "asyncio.Future[tuple[int, str]]"


class Book:
    """Keeps the `state` that the journal leads to; `ask` changes it, and `changed` waits for a change."""

    def __init__(self, journal: ClusterJournal, clock: Clock):
        self.state, last_wall = journal.replay()
        self.timeline = Timeline(clock, self.state.at_s, last_wall)
        self.is_closing = False
        """Whether the service is about to end, so that no request should wait for a change."""
        self.num_events = 0
        self.commit_s = 0.0  # total time spent on transactions
        self._clock = clock
        self._journal = journal
        self._queue: asyncio.Queue[_Asked] = asyncio.Queue(MOST_WAITING)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    async def ask(
        self,
        decide: Decide,
        show: Show,
        *,
        status: int = 200,
        request: str | None = None,
        body: bytes = b"",
    ) -> tuple[int, str]:
        """Decide on a request; return the answer's status and body once its events are on the disk.

        If `request` (an idempotency key) was answered before with the same `body`, that answer is returned
        and nothing happens. Raises CommandRefused.
        """
        if self._queue.full():
            raise CommandRefused(
                429, "too many requests wait for the journal. Send this one again in a second."
            )
        done: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        digest = hashlib.sha256(body).hexdigest()[:32] if request is not None else ""
        await self._queue.put(_Asked(decide, show, request, digest, status, done))
        return await done

    async def changed(self, key: str, wait_s: float) -> None:
        """Wait until "job NAME" or "node NAME" (the key) changes, for `wait_s` seconds at most."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(future)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await future
        finally:
            waiting = self._waiting.get(key, set())
            waiting.discard(future)
            if not waiting:
                self._waiting.pop(key, None)

    def release(self) -> None:
        """Wake everything that waits for a change, because the service is about to end."""
        self.is_closing = True
        self._wake(list(self._waiting))

    async def run(self) -> None:
        """Serve the requests in the queue until cancelled, many at once."""
        while True:
            batch = [await self._queue.get()]
            while len(batch) < MOST_AT_ONCE and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            await self._serve(batch)

    async def _serve(self, batch: list[_Asked]) -> None:
        at_s, wall = self.timeline.now(), self.timeline.wall()
        before = state = self.state
        events: list[Event] = []
        answers: list[tuple[_Asked, tuple[int, str] | Exception]] = []
        for asked in batch:
            try:
                seq = self._journal.last + len(events)
                state, found, answer = _decided(asked, state, seq, at_s, wall)
                events += found
            except CommandRefused as error:
                answer = error
            except Exception as error:  # a defect fails its own request, not the rest of the batch
                logging.exception(
                    "a request failed because of a defect of the service. It changed nothing, and other "
                    "requests are served. Please report this traceback."
                )
                answer = error
            answers.append((asked, answer))
        if events:
            full = await self._write(events, at_s, wall)
            if full is not None:
                answers = [(asked, full) for asked, _ in answers]
                state = before
        self.state = state
        if state is not before:
            self._wake([key for key in self._waiting if _changed(key, before, state)])
        for asked, answer in answers:
            if asked.done.done():  # the caller has disconnected
                continue
            if isinstance(answer, Exception):
                asked.done.set_exception(answer)
            else:
                asked.done.set_result(answer)

    async def _write(self, events: list[Event], at_s: float, wall: float) -> CommandRefused | None:
        """Write events to the journal; return the refusal of the whole batch if the disk is full."""
        begun_s = self._clock.now()
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._writer, self._journal.append, events, at_s, wall)
        except DiskFull as error:
            logging.error("nothing was written to the journal: %s", error)
            return CommandRefused(507, str(error))
        finally:
            self.commit_s += self._clock.now() - begun_s
        self.num_events += len(events)
        return None

    def _wake(self, keys: Iterable[str]) -> None:
        for key in keys:
            for future in self._waiting.get(key, ()):
                if not future.done():
                    future.set_result(None)

    def close(self) -> None:
        """Close the file of the journal."""
        self._writer.shutdown()
        self._journal.close()


def _decided(
    asked: _Asked, state: State, seq: int, at_s: float, wall: float
) -> tuple[State, list[Event], tuple[int, str]]:
    """Return the state after a request, its events and its answer. `seq` is the last position so far.

    Raises CommandRefused.
    """
    if asked.request is not None and asked.request in state.answers:
        known = state.answers[asked.request]
        if known.digest != asked.digest:
            raise CommandRefused(
                409,
                "another request with this idempotency key asked for something else. Give every request its "
                "own key.",
            )
        return state, [], (known.status, known.body)
    outcome = asked.decide(state)
    events: list[Event] = list(outcome.events)
    for number, event in enumerate(events, 1):
        _check(event)
        state = step(state, JournalEntry(seq + number, at_s, wall, event))
    body = asked.show(state, outcome)
    if asked.request is not None:
        answered = RequestAnswered(
            request=asked.request, digest=asked.digest, status=asked.status, body=body
        )
        events.append(answered)
        state = step(state, JournalEntry(seq + len(events), at_s, wall, answered))
    return state, events, (asked.status, body)


def _check(event: Event) -> None:
    """Check that an event, once written to the journal, can be read. Raises CommandRefused if not."""
    try:
        from_text(type(event).__name__, to_text(event))
    except ValueError as error:
        raise CommandRefused(
            409,
            f"the journal could not be read again after this request: {error}. Nothing was done.",
        ) from None


def _changed(key: str, before: State, after: State) -> bool:
    """Return whether "node NAME" or "job NAME" (the key) differs between two states."""
    kind, _, name = key.partition(" ")
    if kind == "node":
        return before.nodes.get(name) is not after.nodes.get(name)
    return before.jobs.get(name) is not after.jobs.get(name)
