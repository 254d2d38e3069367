"""The service as a whole, in this process: what is asked twice, clocks that jump, disks that are full."""

import argparse
import asyncio
import contextlib
import errno
import json
import os
import pathlib
import secrets
import sys
import types
from typing import Any

import pytest
import services

from jaxgoodput import _disk
from jaxgoodput._fields.serial import encode
from jaxgoodput.clock import FakeClock
from jaxgoodput.cluster.client import Client
from jaxgoodput.cluster.service import serve, terminal
from jaxgoodput.cluster.service.planning import planners as planners_module
from jaxgoodput.cluster.service.planning.planners import Planners
from jaxgoodput.cluster.service.record import commands
from jaxgoodput.cluster.service.record.book import MOST_DOWN_S, Book, Timeline
from jaxgoodput.cluster.service.record.commands import Caller, CommandRefused, Outcome
from jaxgoodput.cluster.service.record.events import CoordinatorEnded
from jaxgoodput.cluster.service.record.journal import ClusterJournal
from jaxgoodput.cluster.service.web import logs as logs_module
from jaxgoodput.cluster.service.web import show
from jaxgoodput.cluster.service.web.guard import TOKEN_FILE, own_token
from jaxgoodput.cluster.service.web.heartbeats import Heartbeats
from jaxgoodput.cluster.service.web.logs import Logs
from jaxgoodput.cluster.service.web.requests import MOST_POSITION
from jaxgoodput.cluster.service.wire import (
    VERSION,
    ClusterShown,
    JobList,
    JobShown,
    Join,
    NodeShown,
    PlanOptions,
    Report,
)
from jaxgoodput.specs import Node

OPERATOR = Caller("default", "operator")


def no_words(*_):
    """What a request is answered that asks for nothing."""
    return ""


class JumpingClock(FakeClock):
    """A clock whose wall time is set by hand."""

    def __init__(self, wall_s):
        super().__init__(100.0)
        self.wall_s = wall_s

    def wall(self):
        return self.wall_s


def with_book(folder, use, clock=None, most_bytes=None):
    """`use(book)` beside a book that serves its line."""

    async def main():
        book = Book(ClusterJournal(folder, most_bytes=most_bytes), clock or FakeClock(1e9))
        task = asyncio.create_task(book.run())
        try:
            return await use(book)
        finally:
            task.cancel()
            book.close()

    return asyncio.run(main())


def submit(book, name, *, request=None, body=b"", secret="s"):
    made = services.submission(name)
    return book.ask(
        lambda state: commands.submit(state, OPERATOR, made, secret),
        lambda state, outcome: json.dumps({"id": outcome.answer, "jobs": len(state.jobs)}),
        status=201,
        request=request,
        body=body,
    )


def test_a_request_that_comes_again_gets_the_same_answer_and_does_nothing(tmp_path):
    async def use(book):
        first = await submit(book, "a", request="r1", body=b"a")
        await submit(book, "b")
        again = await submit(book, "a", request="r1", body=b"a")
        assert first == again == (201, '{"id": "a", "jobs": 1}')
        assert list(book.state.jobs) == ["a", "b"]
        with pytest.raises(CommandRefused, match="asked for something else") as found:
            await submit(book, "c", request="r1", body=b"c")
        assert found.value.status == 409
        return first

    first = with_book(tmp_path, use)

    async def after_a_crash(book):
        return await submit(book, "a", request="r1", body=b"a")

    assert with_book(tmp_path, after_a_crash) == first


def test_many_at_once_are_decided_in_order_and_written_together(tmp_path):
    async def use(book):
        asked = [submit(book, f"j{i % 50}") for i in range(100)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(x, CommandRefused) for x in found) == 50  # each name once
        assert list(book.state.jobs) == [f"j{i}" for i in range(50)]
        return book.state

    state = with_book(tmp_path, use)
    assert ClusterJournal(tmp_path).replay()[0] == state


def test_a_decision_that_breaks_costs_its_own_request_only(tmp_path):
    async def use(book):
        def broken(state):
            raise ZeroDivisionError("a defect")

        asked = [submit(book, "a"), book.ask(broken, lambda *_: ""), submit(book, "b")]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(found[1], ZeroDivisionError)
        assert list(book.state.jobs) == ["a", "b"]

    with_book(tmp_path, use)


def test_a_full_disk_refuses_what_changes_and_answers_the_rest(tmp_path):
    async def use(book):
        number = 0
        with pytest.raises(CommandRefused, match="Free some space") as found:
            while number < 10_000:
                await submit(book, f"j{number}", secret="s" * 2000)
                number += 1
        assert found.value.status == 507
        assert len(book.state.jobs) == number  # what was refused is not there
        return number, book.state

    number, state = with_book(tmp_path, use, most_bytes=2**17)
    assert number > 3
    assert ClusterJournal(tmp_path).replay()[0] == state

    async def with_room_again(book):
        await submit(book, "after")
        assert len(book.state.jobs) == number + 1

    with_book(tmp_path, with_room_again)


@pytest.mark.parametrize(
    "down_s, counts", [(60.0, True), (0.0, True), (-3600.0, False), (1e9, False)]
)
def test_time_goes_on_only_whatever_the_wall_clock_does(down_s, counts):
    clock = JumpingClock(5000.0 + down_s)
    timeline = Timeline(clock, last_s=200.0, last_wall=5000.0)
    assert timeline.now() == 200.0 + (down_s if counts else 0.0)
    clock.wall_s -= 1e6  # it is set back while the service runs
    clock.advance(10.0)
    assert timeline.now() == 210.0 + (down_s if counts else 0.0)
    assert MOST_DOWN_S < 1e9


def test_a_service_that_stood_still_gives_nodes_the_time_to_speak(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "LOOK_S", 0.01)
    clock = FakeClock(1e9)

    async def use(book):
        join = Join(
            node=Node(name="n0", kind="cpu", num_devices=4), instance="one", version=VERSION
        )
        await book.ask(lambda state: commands.join(state, join), lambda *_: "")
        watching = asyncio.create_task(serve._watch(book, Heartbeats(clock, 30.0), clock))
        await asyncio.sleep(0.1)
        clock.advance(1000.0)
        await asyncio.sleep(0.1)
        assert book.state.nodes["n0"].node.state == "up"
        for _ in range(1000):
            clock.advance(1.0)
            await asyncio.sleep(0.03)
            if book.state.nodes["n0"].node.state == "down":
                break
        watching.cancel()
        assert book.state.nodes["n0"].node.state == "down"

    with_book(tmp_path, use, clock)


BUSY = """
import json, os, select, time
while data := os.read(0, 65536):
    time.sleep(1.0)
    more = select.select([0], [], [], 0)[0]
    print(json.dumps({"failed": f"{len(data.splitlines())} and {len(more)}"}), flush=True)
"""
STUCK = """
import json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    time.sleep(600.0 if asked["job"] == "slow" else 0.0)
    print(json.dumps({"id": asked["id"], "answer": asked["job"]}), flush=True)
"""
LATE = """
import json, pathlib, sys
if not (started := pathlib.Path(sys.argv[1])).exists():
    started.touch()
    sys.exit(3)
for line in sys.stdin:
    print("{}", flush=True)
"""


def with_planners(folder, script, use, *arguments):
    """`use(planners)` where the processes that plan and answer run a script."""

    async def beside(book):
        planners = Planners(book, folder, PlanOptions())
        planners._command = [sys.executable, "-c", script, *arguments]
        try:
            return await use(planners)
        finally:
            await planners.close()

    return with_book(folder, beside)


def test_a_planner_that_is_slow_is_asked_for_one_plan_at_a_time(tmp_path):
    async def use(planners):
        running = asyncio.create_task(planners.run())
        said = set()
        for _ in range(6000):
            await asyncio.sleep(0.01)
            said.add(planners.last_error)
            if said > {""}:
                break
        for _ in range(150):  # what it is told next is one state, too
            await asyncio.sleep(0.01)
            said.add(planners.last_error)
        running.cancel()
        await asyncio.wait([running])
        assert said == {"", "1 and 0"}

    with_planners(tmp_path, BUSY, use)


def test_a_planner_that_dies_at_each_start_is_told_of_and_ends_the_service(tmp_path, monkeypatch):
    monkeypatch.setattr(planners_module, "AGAIN_S", 0.0)

    async def use(planners):
        with pytest.raises(ChildProcessError, match="10 times in a row.*ended with 3"):
            async with asyncio.timeout(60.0):
                await planners.run()
        assert "ended with 3" in planners.last_error

    with_planners(tmp_path, "raise SystemExit(3)", use)


def test_a_planner_that_hangs_is_ended_and_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(planners_module, "PLAN_S", 0.5)
    monkeypatch.setattr(planners_module, "AGAIN_S", 60.0)

    async def use(planners):
        running = asyncio.create_task(planners.run())
        for _ in range(500):
            if planners.last_error:
                break
            await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.wait([running])
        assert "did not answer within 0.5 s" in planners.last_error

    with_planners(tmp_path, "import time; time.sleep(600)", use)


def test_plans_are_made_again_when_the_next_planner_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(planners_module, "AGAIN_S", 0.5)

    async def use(planners):
        running = asyncio.create_task(planners.run())
        said = []
        for _ in range(500):
            said.append(planners.last_error)
            if any(said) and not said[-1]:
                break
            await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.wait([running])
        assert any("ended with 3" in error for error in said) and not said[-1]

    with_planners(tmp_path, LATE, use, str(tmp_path / "started"))


@pytest.mark.slow
def test_an_adviser_that_is_stuck_is_ended_and_the_next_question_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(planners_module, "ANSWER_S", 10.0)

    async def use(planners):
        assert await planners.ask("explain", job="fast") == "fast"
        stuck = planners.ask("explain", job="slow"), planners.ask("explain", job="behind it")
        found = await asyncio.gather(*stuck, return_exceptions=True)
        assert [one.status for one in found if isinstance(one, CommandRefused)] == [429, 429]
        assert await planners.ask("explain", job="fast") == "fast"

    with_planners(tmp_path, STUCK, use)


def test_a_free_port_is_the_one_of_the_service_before_if_it_can_be(tmp_path):
    service = serve.Service(folder=tmp_path, port=0)
    with serve._listener(service) as first:
        port = first.getsockname()[1]
        (tmp_path / serve.ADDRESS_FILE).write_text(f"http://127.0.0.1:{port}\n")
        with serve._listener(service) as other:  # somebody has it
            assert other.getsockname()[1] != port
    with serve._listener(service) as again:
        assert again.getsockname()[1] == port


def test_who_holds_a_folder_on_another_machine_is_left_alone(tmp_path):
    assert serve._holder(tmp_path) is None
    with _disk.held(tmp_path):
        assert serve._holder(tmp_path) == os.getpid()
        (tmp_path / _disk.LOCK).write_text("process 1 on elsewhere")
        assert serve._holder(tmp_path) is None


def test_what_holds_secrets_is_read_by_nobody_else_and_is_whole(tmp_path, monkeypatch):
    async def use(book):
        await submit(book, "a")
        for end in ("", "-wal"):
            assert (tmp_path / f"journal.db{end}").stat().st_mode & 0o077 == 0

    with_book(tmp_path, use)

    def dies(*_):
        raise InterruptedError

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(secrets, "token_urlsafe", dies)
        own_token(tmp_path)
    (token,) = own_token(tmp_path).tokens
    assert len(token.token) > 20
    assert (tmp_path / TOKEN_FILE).stat().st_mode & 0o077 == 0


def test_a_reason_with_brackets_is_shown_as_it_is(monkeypatch, capsys):
    node = Node(name="n0", kind="[/cpu]", num_devices=4, state="down")
    job = JobShown(
        id="a", tenant="red", phase="failed", reason="failed: no [/tmp/x] there", command=("x",),
        workdir=None, min_devices=1, max_devices=1, devices={}, home=None, generation=1, num_devices=0,
        submitted_s=0.0, started_s=None, finished_s=1.0, num_changes=0, device_s=0.0, code=1, hints=None,
    )  # fmt: skip

    class Answers(Client):
        def call(self, *_, type_, **__):
            shown = NodeShown(node=node, jobs={}, silent_s=0.0, why="[/b]")
            return (
                JobList(now_s=1.0, jobs=(job,))
                if type_ is JobList
                else ClusterShown(now_s=1.0, nodes=(shown,))
            )

    monkeypatch.setattr(
        terminal, "_connect", lambda _: ("", lambda: Answers("http://127.0.0.1:1", "x" * 20))
    )
    monkeypatch.setenv("COLUMNS", "200")
    options = argparse.Namespace(job=None, once=True)
    assert terminal.status(options, argparse.ArgumentParser()) == terminal.DONE
    printed = capsys.readouterr().out
    assert "failed: no [/tmp/x] there" in printed and "down ([/b])" in printed


def test_whoever_follows_a_log_that_was_cut_goes_on_after_a_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(logs_module, "MOST_BYTES", 1000)
    said = Logs(tmp_path)
    for number in range(30):
        said.append("a", f"{number:099d}\n")
    first = said.read("a", 0, False)
    offset = first.next_offset
    assert offset == 3000
    note, _, rest = first.text.partition("\n")
    assert note == f"jaxgoodput: {3000 - len(rest)} bytes are left out here"
    assert said.read("a", 3000 - len(rest), False).text == rest
    again = Logs(tmp_path)
    again.append("a", "after\n")
    assert again.read("a", offset, False).text == "after\n"
    (tmp_path / "a.cut").unlink()
    assert Logs(tmp_path).read("a", offset, False).text.endswith("after\n")  # rather than nothing
    again.delete("a")
    assert Logs(tmp_path).read("a", 0, False).next_offset == 0 and not list(tmp_path.iterdir())


def test_a_disk_that_is_full_costs_a_log_nothing_that_it_had(tmp_path, monkeypatch):
    monkeypatch.setattr(logs_module, "MOST_BYTES", 1000)
    said = Logs(tmp_path)
    written = "".join(f"{number:099d}\n" for number in range(10))
    said.append("a", written)

    def full(path, data):
        with path.open("wb") as file:
            file.write(data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "write_bytes", full)
        said.append("a", "one more\n")
    found = said.read("a", 0, False)
    assert (found.text, found.next_offset) == (written + "one more\n", len(written) + 9)
    assert [path.name for path in tmp_path.iterdir()] == ["a.log"]


@pytest.mark.parametrize("most", [1, 7, 100])
def test_a_listing_that_is_cut_says_so_and_leads_to_the_rest(tmp_path, most):
    """Also while jobs come, end and come again between two pages."""

    async def use(book):
        names = [f"j{number}" for number in range(30)]
        for name in names:
            await submit(book, name)
        found, before, left = [], MOST_POSITION, None
        while before is not None:
            page = show.newest(OPERATOR, book.state, False, most, before)
            assert len(page.jobs) <= most and left in (None, page.num_older + len(page.jobs))
            assert (page.next_before is None) == (page.num_older == 0)
            found = [*(job.spec.id for job in page.jobs), *found]
            before, left = page.next_before, page.num_older
            await submit(book, f"new-{len(found)}")
            ended = names[-1] if len(found) <= 1 else found[-1]
            with contextlib.suppress(CommandRefused):
                await book.ask(
                    lambda state, job=ended: commands.cancel(state, OPERATOR, job), no_words
                )
        assert found == names
        active = show.newest(OPERATOR, book.state, True, 100, MOST_POSITION)
        assert {job.spec.id for job in active.jobs} < set(book.state.jobs)
        others = Caller("blue", "user")
        assert show.newest(others, book.state, False, 100, MOST_POSITION).jobs == []

    with_book(tmp_path, use)


def test_a_client_follows_a_listing_to_its_end():
    class Pages(Client):
        def call(self, *path, type_, before=None, **query):
            asked.append((path, before, query))
            return JobList(now_s=0.0, jobs=(), next_before={None: 7, 7: 3, 3: None}[before])

    asked = []
    client = Pages("http://127.0.0.1:1", "x" * 20)
    assert [page.next_before for page in client.pages("jobs", type_=JobList, most=5)] == [
        7,
        3,
        None,
    ]
    assert [(before, query) for _, before, query in asked] == [
        (None, {"most": 5}),
        (7, {"most": 5}),
        (3, {"most": 5}),
    ]


def test_a_clock_that_was_set_back_between_two_starts_costs_jobs_nothing(tmp_path):
    clock = JumpingClock(1e9)

    async def first(book):
        node = Node(name="n0", kind="cpu", num_devices=4)
        join = Join(node=node, instance="one", version=VERSION)
        await book.ask(lambda state: commands.join(state, join), lambda *_: "")
        await submit(book, "a")
        clock.advance(50.0)
        await submit(book, "b")

    with_book(tmp_path, first, clock)
    clock.wall_s -= 86400.0

    async def second(book):
        await submit(book, "c")
        times = [entry.submitted_s for entry in book.state.jobs.values()]
        assert times == sorted(times) and times[-1] - times[0] == 50.0

    with_book(tmp_path, second, clock)


def test_what_could_not_be_read_back_is_refused_and_not_written(tmp_path):
    async def use(book):
        ended = CoordinatorEnded(job="a", attempt=0, code=10**400)
        await submit(book, "a")
        with pytest.raises(CommandRefused, match="not be read again") as found:
            await book.ask(lambda _: Outcome((ended,)), lambda *_: "")
        assert found.value.status == 409
        return book.state

    state = with_book(tmp_path, use)
    assert ClusterJournal(tmp_path).replay()[0] == state
    with pytest.raises(ValueError, match="not an exit code"):
        Report(job="a", attempt=1, code=10**400)


def test_what_is_written_is_json_that_comes_back(tmp_path):
    async def use(book):
        await submit(book, "a")
        return book.state

    state = with_book(tmp_path, use)
    assert encode(state) == encode(ClusterJournal(tmp_path).replay()[0])


@pytest.mark.parametrize("num_turns", range(6))
def test_a_cancelled_planner_ends_even_if_an_answer_comes_at_that_moment(num_turns):
    """A cancellation that is swallowed would leave a service that never ends."""

    async def scene():
        process: Any = types.SimpleNamespace(stdout=asyncio.StreamReader())

        async def read():
            async for _ in planners_module._messages(process, 60.0):
                pass

        reading = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        process.stdout.feed_data(b"{}\n")
        for _ in range(num_turns):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading], timeout=2.0)
        ended = reading.done()
        reading.cancel()
        assert ended

    asyncio.run(scene())
