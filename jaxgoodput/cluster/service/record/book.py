"""The one owner of the state: requests become events, events go to the journal, and then they are true.

All that wants to change something waits in one line. What has gathered there is decided against the state in
order, written in one transaction, and answered when the disk has it; so a hundred requests cost one `fsync`,
and nobody ever sees what a crash could undo.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterator
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
    """The service's own clock: seconds since its first start, which go on only, whatever the wall clock does.

    While the service was down as much time passes as the wall clock says; where that is less than nothing or
    more than a day, the clock has been changed meanwhile, and none does.
    """

    def __init__(self, clock: Clock, last_s: float, last_wall: float):
        self._clock = clock
        self._began = clock.now()
        down_s = clock.wall() - last_wall if last_wall else 0.0
        if not 0.0 <= down_s <= MOST_DOWN_S:
            logging.warning(
                "the wall clock says that the service was down for %.0f s: it was changed, or the service "
                "was away for long. That time is not counted.",
                down_s,
            )
            down_s = 0.0
        self._base_s = last_s + down_s

    def now(self) -> float:
        """Seconds."""
        return self._base_s + self._clock.now() - self._began

    def wall(self) -> float:
        """Unix time, for people."""
        return self._clock.wall()


@dataclass
class _Asked:
    """A request in the line."""

    decide: Decide
    show: Show
    request: str | None
    digest: str
    status: int
    done: "asyncio.Future[tuple[int, str]]"


class Book:
    """`state` is what the journal has; `ask` changes it, and `changed` waits for a change."""

    def __init__(self, journal: ClusterJournal, clock: Clock):
        self.state, last_wall = journal.replay()
        self.timeline = Timeline(clock, self.state.at_s, last_wall)
        self.is_closing = False
        """Whether the service is about to end: who waits for a change is answered at once."""
        self.num_events = 0
        self.commit_s = 0.0  # in all
        self._clock = clock
        self._journal = journal
        self._line: asyncio.Queue[_Asked] = asyncio.Queue(MOST_WAITING)
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
        """Status and body of the answer, once all that happened is on the disk.

        With `request`, its second coming with the same `body` gets the first one's answer. Raises Refused.
        """
        if self._line.full():
            raise CommandRefused(
                429, "too many requests wait for the journal. Send it again in a second."
            )
        done: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        digest = hashlib.sha256(body).hexdigest()[:32] if request is not None else ""
        await self._line.put(_Asked(decide, show, request, digest, status, done))
        return await done

    async def changed(self, key: str, wait_s: float) -> None:
        """Return when "job NAME" or "node NAME" has changed, or so much later."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(future)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(future, wait_s)
        finally:
            waiting = self._waiting.get(key, set())
            waiting.discard(future)
            if not waiting:
                self._waiting.pop(key, None)

    def release(self) -> None:
        """Answer all who wait for a change; the service is about to end."""
        self.is_closing = True
        for future in [f for waiting in self._waiting.values() for f in waiting]:
            if not future.done():
                future.set_result(None)

    async def run(self) -> None:
        """Serve the line, for ever."""
        while True:
            batch = [await self._line.get()]
            while len(batch) < MOST_AT_ONCE and not self._line.empty():
                batch.append(self._line.get_nowait())
            await self._serve(batch)

    async def _serve(self, batch: list[_Asked]) -> None:
        at_s, wall = self.timeline.now(), self.timeline.wall()
        before = state = self.state
        events: list[Event] = []
        answers: list[tuple[_Asked, tuple[int, str] | Exception]] = []
        place = self._journal.last
        for asked in batch:
            try:
                found, answer = self._decided(asked, state, place + len(events), at_s, wall)
                for stamped in found:
                    state = step(state, stamped)
                    events.append(stamped.event)
                answers.append((asked, answer))
            except CommandRefused as error:
                answers.append((asked, error))
            except Exception as error:  # a defect costs its own request, never those beside it
                logging.exception("a request could not be decided")
                answers.append((asked, error))
        if events:
            begun_s = self._clock.now()
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(self._writer, self._journal.append, events, at_s, wall)
            except DiskFull as error:
                logging.error("%s", error)
                refused = CommandRefused(507, str(error))
                answers = [(asked, refused) for asked, _ in answers]
                state = before
            else:
                self.num_events += len(events)
            self.commit_s += self._clock.now() - begun_s
        self.state = state
        for key in _changed_keys(before, state) if state is not before else ():
            for future in self._waiting.get(key, ()):
                if not future.done():
                    future.set_result(None)
        for asked, answer in answers:
            if asked.done.done():  # whoever asked has gone
                continue
            if isinstance(answer, Exception):
                asked.done.set_exception(answer)
            else:
                asked.done.set_result(answer)

    def _decided(
        self, asked: _Asked, state: State, place: int, at_s: float, wall: float
    ) -> tuple[list[JournalEntry], tuple[int, str]]:
        """The events of one request, and its answer. Raises Refused."""
        if asked.request is not None and asked.request in state.answers:
            known = state.answers[asked.request]
            if known.digest != asked.digest:
                raise CommandRefused(
                    409,
                    "a request of this id asked for something else. Give every request an id of its own.",
                )
            return [], (known.status, known.body)
        outcome = asked.decide(state)
        found: list[JournalEntry] = []
        for event in outcome.events:
            _check(event)
            found.append(JournalEntry(place + len(found) + 1, at_s, wall, event))
            state = step(state, found[-1])
        body = asked.show(state, outcome)
        if asked.request is not None:
            answered = RequestAnswered(
                request=asked.request, digest=asked.digest, status=asked.status, body=body
            )
            found.append(JournalEntry(place + len(found) + 1, at_s, wall, answered))
        return found, (asked.status, body)

    def close(self) -> None:
        """Let go of the journal."""
        self._writer.shutdown()
        self._journal.close()


def _check(event: Event) -> None:
    """Raises Refused for an event that could be written and not be read back."""
    try:
        from_text(type(event).__name__, to_text(event))
    except ValueError as error:
        raise CommandRefused(
            409, f"this could be written, but not be read again: {error}. Nothing was done."
        ) from None


def _changed_keys(before: State, after: State) -> Iterator[str]:
    for name, entry in after.nodes.items():
        if before.nodes.get(name) is not entry:
            yield f"node {name}"
    for id_, entry in after.jobs.items():
        if before.jobs.get(id_) is not entry:
            yield f"job {id_}"
