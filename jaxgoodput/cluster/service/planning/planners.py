"""The processes that make plans and answer questions. Each follows the journal (`follow.py`).

One process plans. Another one, the adviser, answers questions: explaining why a job waits costs as much as
dozens of plans, which must not delay the next plan. A process that dies is started again.
"""

import asyncio
import contextlib
import json
import pathlib
import sys
from collections.abc import AsyncIterator
from typing import Any

from absl import logging

from jaxgoodput._fields.serial import decode, encode
from jaxgoodput.cluster.service.record import commands
from jaxgoodput.cluster.service.record.book import Book
from jaxgoodput.cluster.service.record.commands import CommandRefused
from jaxgoodput.cluster.service.record.events import PlanMade, ReasonsGiven
from jaxgoodput.cluster.service.wire import PlanOptions

LOOK_S = 0.25
AGAIN_S = 1.0  # pause before a planner that died is started again
MOST_DEATHS = 10  # consecutive deaths of planners that never answered
PLAN_S = 600.0  # a planner that takes longer is stuck
ANSWER_S = 60.0
MOST_QUESTIONS = 8  # in flight at once


class Planners:
    """Passes plans from the planner process to the book, and users' questions to the adviser process."""

    def __init__(self, book: Book, folder: pathlib.Path, policy: PlanOptions):
        self.planned = 0
        self.last_error = ""
        self._book = book
        module = "jaxgoodput.cluster.service.planning.follow"
        self._command = [sys.executable, "-m", module, str(folder), json.dumps(encode(policy))]
        self._adviser: asyncio.subprocess.Process | None = None
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._starting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Keep making plans until cancelled. Raises ChildProcessError if planners die again and again."""
        deaths = 0
        while True:
            process = await self._start()
            why = ""
            try:
                await self._look(process)
                async for message in _messages(process, PLAN_S):
                    if deaths:
                        deaths, self.last_error = 0, ""
                    if "failed" in message:
                        self.last_error = message["failed"]
                        logging.error(
                            "no plan could be made, so jobs keep their devices: %s", self.last_error
                        )
                    elif message:
                        await self._adopt(message)
                    await self._look(process)
            except TimeoutError:
                why = f"did not answer within {PLAN_S:g} s"
            finally:
                await _end(process)
            deaths += 1
            self.last_error = f"the planner {why or f'ended with {process.returncode}'}"
            if deaths >= MOST_DEATHS:
                raise ChildProcessError(
                    f"no plan can be made: {deaths} times in a row {self.last_error}. Its own messages above "
                    "say why. Jobs keep their devices. Start the service again once the cause is repaired."
                )
            logging.warning(
                "no plan can be made for the moment: %s; another planner is started",
                self.last_error,
            )
            await asyncio.sleep(AGAIN_S)

    async def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Return the adviser's answer to an "explain" or "what-if" question. Raises CommandRefused."""
        if len(self._asked) >= MOST_QUESTIONS:
            raise CommandRefused(
                429,
                f"{len(self._asked)} questions are being answered already. Ask again in a few seconds.",
            )
        async with self._starting:
            if self._adviser is None or self._adviser.returncode is not None:
                if self._reading is not None:  # it fails the questions of the adviser that died
                    await asyncio.wait([self._reading])
                self._adviser = await self._start()
                self._reading = asyncio.create_task(self._hear(self._adviser))
            adviser = self._adviser
        self._number += 1
        number = self._number
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            line = {"do": do, "id": number, "now_s": self._book.timeline.now(), **fields}
            _send(adviser, line)
            async with asyncio.timeout(ANSWER_S):
                said = await answer
        except (TimeoutError, OSError) as error:
            if isinstance(error, TimeoutError):
                await _end(adviser)  # it would first work through questions that have timed out
            raise CommandRefused(
                429,
                f"this question could not be answered within {ANSWER_S:g} s ({error}). The cluster may be "
                "too large for it now; ask again when fewer jobs wait.",
            ) from None
        finally:
            self._asked.pop(number, None)
        if "error" in said:
            raise CommandRefused(said["status"], said["error"])
        return said["answer"]

    async def close(self) -> None:
        """End the adviser's process."""
        if self._reading is not None:
            self._reading.cancel()
        if self._adviser is not None:
            await _end(self._adviser)

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, limit=2**26
        )

    async def _look(self, process: asyncio.subprocess.Process) -> None:
        """Ask for a plan, shortly after the last answer, so that only one request is ever in flight."""
        await asyncio.sleep(LOOK_S)
        with contextlib.suppress(OSError):  # it has died, which the reader of its answers notices
            _send(process, {"do": "look", "now_s": self._book.timeline.now()})

    async def _adopt(self, message: dict[str, Any]) -> None:
        planned = decode(message["planned"], PlanMade, "planned")
        reasoned = decode(message["reasoned"], ReasonsGiven, "reasoned")
        base = message["base"]
        try:
            await self._book.ask(
                lambda state: commands.adopt(state, planned, base, reasoned), lambda state, _: ""
            )
            self.planned += 1
            self.last_error = ""
        except CommandRefused as error:
            self.last_error = str(error)

    async def _hear(self, process: asyncio.subprocess.Process) -> None:
        async for message in _messages(process):
            future = self._asked.get(message["id"])
            if future is not None and not future.done():
                future.set_result(message)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(OSError("the process that answers has ended"))


def _send(process: asyncio.subprocess.Process, message: dict[str, Any]) -> None:
    assert process.stdin is not None  # it was started with a pipe
    process.stdin.write(json.dumps(encode(message)).encode() + b"\n")


async def _messages(
    process: asyncio.subprocess.Process, limit_s: float | None = None
) -> AsyncIterator[dict[str, Any]]:
    """Yield a process's messages until it ends. Raises TimeoutError if one takes longer than the limit."""
    assert process.stdout is not None  # it was started with a pipe
    while True:
        async with asyncio.timeout(limit_s):
            line = await process.stdout.readline()
        if not line.endswith(b"\n"):  # it has ended, possibly in the middle of a line
            return
        yield json.loads(line)


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None  # it was started with a pipe
    process.stdin.close()
    if process.returncode is None:
        process.kill()
        await process.wait()
