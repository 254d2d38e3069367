"""The routes: each a few lines between the book, which changes the state, and the wire types.

Everything under /v1 keeps its meaning; a new meaning gets /v2. A request that changes something may carry an
`Idempotency-Key`. Sent again with the same key, it gets the first answer and changes nothing.
"""

import asyncio
import json
import math
import secrets
import zlib
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request, Response

from jaxgoodput._fields.serial import encode
from jaxgoodput.cluster.service import wire
from jaxgoodput.cluster.service.record import commands
from jaxgoodput.cluster.service.record.book import Book
from jaxgoodput.cluster.service.record.commands import Caller, CommandRefused, Outcome
from jaxgoodput.cluster.service.record.state import JobEntry, State, work_of
from jaxgoodput.cluster.service.web import metrics, page, show
from jaxgoodput.cluster.service.web.requests import (
    MOST_POSITION,
    REFUSALS,
    Agent,
    Instance,
    Key,
    Name,
    Operator,
    Parts,
    Position,
    ServiceParts,
    StrictJson,
    StrictRoute,
    User,
    UserOrAgent,
    Wait,
)
from jaxgoodput.specs import Hints

MOST_SHOWN = 1000
LOG_LOOK_S = 0.5  # between two looks at a log that does not grow
WAIT_SPREAD = 0.25  # the part of the time to wait by which waiting requests differ
_AT_ONCE = 50  # jobs that are encoded at once, which takes about 5 ms

JsonSubmission = Annotated[wire.Submission, StrictJson(), Body()]

router = APIRouter(
    route_class=StrictRoute,
    responses=REFUSALS,
    generate_unique_id_function=lambda route: route.name,
)


def _links(path: str, names: tuple[str, ...], parameter: str, value: str) -> dict[str, Any]:
    """Describe, for OpenAPI, the routes that an answer leads to."""
    found = {name: {"operationId": name, "parameters": {parameter: value}} for name in names}
    return {"description": path, "links": found}


def answer_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a value as JSON, encoded as `cluster.client` decodes it."""
    text = json.dumps(encode(value), allow_nan=False)
    return Response(text, status, headers, media_type="application/json")


class BookedChange:
    """Has the book decide on a change, at most once per caller, path and idempotency key."""

    def __init__(self, book: Book, key: str | None, body: bytes):
        self._book, self._key, self._body = book, key, body

    async def __call__(
        self,
        decide: Callable[[State], Outcome],
        *,
        shown: Callable[[State, Outcome], Any] = lambda state, outcome: outcome.answer,
        status: int = 200,
    ) -> Response:
        """Have the book decide; return the answer once it is in the journal. Raises CommandRefused."""
        code, text = await self._book.ask(
            decide,
            lambda state, outcome: json.dumps(encode(shown(state, outcome)), allow_nan=False),
            status=status,
            request=self._key,
            body=self._body,
        )
        return Response(text, code, media_type="application/json")


async def _change_of(request: Request, parts: Parts, key: Key = None) -> BookedChange:
    caller: Caller = request.state.caller
    key = key and f"{caller.tenant}/{caller.role}/{request.url.path}/{key}"
    return BookedChange(parts.book, key, await request.body())


Changes = Annotated[BookedChange, Depends(_change_of)]


async def _wait(
    parts: ServiceParts,
    key: str,
    wait_s: float,
    look: Callable[[], Awaitable[tuple[Any, bool]]],
    every_s: float = math.inf,
) -> Response:
    """Answer with what `look` returns, once it says that this is news or the time is up.

    It looks again whenever "job NAME" or "node NAME" changes, and after `every_s` at the latest.
    """
    # Each key waits for its own part of the time: a plan wakes all nodes at once, and if they all waited
    # for as long, they would come back together for ever, and all other requests would wait for them.
    part = 1.0 - WAIT_SPREAD * zlib.crc32(key.encode()) / 2**32
    until_s = parts.clock.now() + min(wait_s, parts.longest_wait_s) * part
    while True:
        found, is_news = await look()
        left_s = until_s - parts.clock.now()
        if is_news or left_s <= 0 or parts.book.is_closing:
            return answer_json(found)
        await parts.book.changed(key, min(left_s, every_s))


def _entry(parts: ServiceParts, caller: Caller, job: str) -> JobEntry:
    """Return a job of the caller's. Raises CommandRefused if the caller has no such job."""
    commands.check_owned(parts.book.state, caller, job)
    return parts.book.state.jobs[job]


# -- jobs ----------------------------------------------------------------------------------------


@router.post(
    "/v1/jobs",
    status_code=201,
    response_model=wire.JobShown,
    responses={
        201: _links(
            "The job was submitted.",
            ("one_job", "cancel", "hint", "allocation", "log", "explain"),
            "job",
            "$response.body#/id",
        )
    },
)
async def submit(
    caller: User, change: Changes, parts: Parts, submission: JsonSubmission
) -> Response:
    """Submit a job."""
    secret = secrets.token_hex(32)
    answer = await change(
        lambda state: commands.submit(state, caller, submission, secret),
        shown=lambda state, outcome: show.job(
            caller, state, state.jobs[outcome.answer], state.at_s
        ),
        status=201,
    )
    entry = parts.book.state.jobs.get(submission.spec.id)
    # Another secret means that the request came again: the job's log must then stay.
    if entry is not None and entry.secret == secret:
        for job in {submission.spec.id, *parts.logs.unknown(parts.book.state.jobs)}:
            await asyncio.to_thread(parts.logs.delete, job)
    return answer


@router.get("/v1/jobs", response_model=wire.JobList)
async def jobs(
    parts: Parts,
    caller: User,
    active: bool = False,
    most: Annotated[int, Query(ge=1, le=MOST_SHOWN)] = 200,
    before: Position = MOST_POSITION,
) -> Response:
    """List the caller's newest jobs; with `active`, only jobs that have not ended.

    If there are more than `most`, the answer says how many, and where the next request has to continue:
    `before`, with which only jobs are listed that were submitted earlier.
    """
    state, now_s = parts.book.state, parts.book.timeline.now()
    found = show.newest(caller, state, active, most, before)
    texts = []
    for first in range(0, len(found.jobs), _AT_ONCE):
        part = [show.job(caller, state, e, now_s) for e in found.jobs[first : first + _AT_ONCE]]
        texts.append(json.dumps(encode(part), allow_nan=False)[1:-1])
        await asyncio.sleep(0)  # others are answered meanwhile
    rest = wire.JobList(
        now_s=now_s, jobs=(), num_older=found.num_older, next_before=found.next_before
    )
    text = json.dumps({name: value for name, value in encode(rest).items() if name != "jobs"})
    return Response(f'{text[:-1]}, "jobs": [{", ".join(texts)}]}}', media_type="application/json")


@router.get("/v1/jobs/{job}", response_model=wire.JobShown)
async def one_job(parts: Parts, caller: User, job: Name) -> Response:
    """Show one job, with the devices that it held before."""
    entry = _entry(parts, caller, job)
    state, now_s = parts.book.state, parts.book.timeline.now()
    return answer_json(show.job(caller, state, entry, now_s, whole=True))


@router.post("/v1/jobs/{job}/cancel", response_model=wire.Receipt)
async def cancel(caller: User, change: Changes, job: Name) -> Response:
    """Let a job save and end. Its record stays."""
    return await change(lambda state: commands.cancel(state, caller, job))


@router.post("/v1/jobs/{job}/hints", response_model=wire.Receipt)
async def hint(
    caller: UserOrAgent, change: Changes, job: Name, hints: Annotated[Hints, StrictJson(), Body()]
) -> Response:
    """Report what a running job has measured."""
    return await change(lambda state: commands.hint(state, caller, job, hints))


@router.get("/v1/jobs/{job}/allocation", response_model=wire.AllocationShown)
async def allocation(
    parts: Parts, caller: User, job: Name, after: Position = 0, wait_s: Wait = 0.0
) -> Response:
    """Show the devices of a job, once its generation is above `after` or the job has ended."""

    async def look() -> tuple[Any, bool]:
        entry = _entry(parts, caller, job)
        return show.allocation(entry), entry.allocation.generation > after or entry.is_over

    return await _wait(parts, f"job {job}", wait_s, look)


@router.get("/v1/jobs/{job}/log", response_model=wire.Log)
async def log(
    parts: Parts, caller: User, job: Name, offset: Position = 0, wait_s: Wait = 0.0
) -> Response:
    """Return the output of a job's processes from an offset on."""

    async def look() -> tuple[Any, bool]:
        entry = _entry(parts, caller, job)
        found = await asyncio.to_thread(parts.logs.read, job, offset, entry.is_over)
        return found, bool(found.text) or found.over

    return await _wait(parts, f"job {job}", wait_s, look, every_s=LOG_LOOK_S)


@router.get("/v1/jobs/{job}/explain", response_model=wire.JobExplanation)
async def explain(parts: Parts, caller: User, job: Name) -> Response:
    """Explain why a job has its devices, and what would change that."""
    _entry(parts, caller, job)
    with parts.questions.asked_by(caller):
        return answer_json(await parts.planners.ask("explain", job=job))


@router.post("/v1/what-if", response_model=wire.WhatIf)
async def what_if(parts: Parts, caller: User, submission: JsonSubmission) -> Response:
    """Show the plan as it would be with one more job, which is not submitted."""
    submission = commands.of_tenant(caller, submission)
    if parts.book.state.active_job(submission.spec.id) is not None:
        raise CommandRefused(
            409, f"a job named {submission.spec.id!r} exists already. Ask with another name."
        )
    with parts.questions.asked_by(caller):
        found = await parts.planners.ask("what-if", submission=submission)
    for other in found["others"]:
        other["job"] = show.name_for(caller, parts.book.state, other["job"])
    return answer_json(found)


# -- nodes ---------------------------------------------------------------------------------------


@router.get("/v1/nodes", response_model=wire.ClusterShown)
async def nodes(parts: Parts, caller: UserOrAgent) -> Response:
    """Show all nodes and which jobs hold their devices."""
    now_s = parts.book.timeline.now()
    return answer_json(show.cluster(caller, parts.book.state, now_s, parts.heartbeats.silent_s))


@router.post(
    "/v1/nodes",
    response_model=wire.Receipt,
    responses={
        200: _links(
            "The node has joined.",
            ("work", "report", "drain", "down", "up"),
            "node",
            "$request.body#/node/name",
        )
    },
)
async def join(
    caller: Agent,
    change: Changes,
    parts: Parts,
    wanted: Annotated[wire.Join, StrictJson(), Body()],
) -> Response:
    """Register a node and its agent."""
    parts.heartbeats.record(wanted.node.name)
    return await change(lambda state: commands.join(state, wanted))


@router.get("/v1/nodes/{node}/work", response_model=wire.NodeWork)
async def work(
    parts: Parts,
    caller: Agent,
    node: Name,
    instance: Instance,
    after: Position = 0,
    wait_s: Wait = 0.0,
) -> Response:
    """Return the work of a node, once its version is above `after`. Every request is a heartbeat."""
    book, heartbeats = parts.book, parts.heartbeats

    async def look() -> tuple[Any, bool]:
        commands.check_agent(book.state, node, instance)
        heartbeats.record(node)
        if book.state.nodes[node].silent:
            await book.ask(lambda state: commands.revive(state, node), lambda *_: "")
            return await look()
        return work_of(book.state, node), book.state.nodes[node].version > after

    # A node that waits must not look silent, so it waits for a third of that limit at most.
    return await _wait(parts, f"node {node}", min(wait_s, heartbeats.limit_s / 3), look)


@router.post("/v1/nodes/{node}/reports", response_model=wire.Receipt)
async def report(
    caller: Agent,
    change: Changes,
    parts: Parts,
    node: Name,
    said: Annotated[wire.Reports, StrictJson(), Body()],
) -> Response:
    """Report what happened to the processes of jobs on a node, and what they wrote."""
    commands.check_agent(parts.book.state, node, said.instance)
    parts.heartbeats.record(node)
    for lines in said.lines:
        if lines.job in parts.book.state.jobs:
            await asyncio.to_thread(parts.logs.append, lines.job, lines.text)
    if not said.coordinators and not said.nodes:
        return answer_json(wire.Receipt())
    now_s = parts.book.timeline.now()

    def decide(state: State) -> Outcome:
        ended = commands.report(state, node, said.instance, said.coordinators)
        # Reports of nodes come first: they count only while the job holds the nodes.
        found = commands.report_nodes(state, node, said.nodes, now_s, parts.apart_s)
        return Outcome((*found.events, *ended.events))

    return await change(decide)


@router.post("/v1/nodes/{node}/drain", response_model=wire.Receipt)
async def drain(caller: Operator, change: Changes, node: Name) -> Response:
    """Give a node no new work. Whatever runs on it stays."""
    why = "an operator drains it"
    return await change(lambda state: commands.change_node(state, node, "draining", why))


@router.post("/v1/nodes/{node}/down", response_model=wire.Receipt)
async def down(caller: Agent, change: Changes, node: Name) -> Response:
    """Take a node out of service. Jobs lose the devices that they hold there."""
    why = "it was taken out of service"
    return await change(lambda state: commands.change_node(state, node, "down", why))


@router.post("/v1/nodes/{node}/up", response_model=wire.Receipt)
async def up(caller: Operator, change: Changes, node: Name) -> Response:
    """Take a node back into service."""
    why = "an operator took it back into service"
    return await change(lambda state: commands.change_node(state, node, "up", why))


# -- monitoring ----------------------------------------------------------------------------------


@router.get("/healthz", response_model=wire.Health)
async def health(parts: Parts) -> Response:
    """Tell whether the service answers and plans. Needs no token."""
    num_jobs = len(parts.book.state.active)
    plans = not parts.planners.last_error
    return answer_json(wire.Health(ok=True, version=wire.VERSION, num_jobs=num_jobs, plans=plans))


def _content(media_type: str) -> dict[str, Any]:
    """Describe, for OpenAPI, an answer that is not JSON."""
    return {"response_class": Response, "responses": {200: {"content": {media_type: {}}}}}


@router.get("/metrics", **_content("text/plain"))
async def numbers(parts: Parts, caller: Operator) -> Response:
    """Return the metrics for Prometheus."""
    book = parts.book
    more = {
        "journal_events_total": float(book.num_events),
        "journal_commit_seconds_total": book.commit_s,
        "plans_total": float(parts.planners.planned),
    }
    silent_s = {name: parts.heartbeats.silent_s(name) for name in book.state.nodes}
    text = metrics.text(book.state, book.timeline.now(), parts.requests, silent_s, more)
    return Response(text, media_type="text/plain; version=0.0.4")


def _html(text: str) -> Response:
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'"
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return Response(text, 200, {**headers, "Cache-Control": "no-store"}, media_type="text/html")


@router.get("/", **_content("text/html"))
async def whole_page(parts: Parts, caller: User) -> Response:
    """Return the web page as HTML."""
    return _html(page.whole(caller, parts.book.state, parts.book.timeline.now(), parts.links))


@router.get("/page", **_content("text/html"))
async def page_only(parts: Parts, caller: User) -> Response:
    """Return, as HTML, the part of the web page that is refreshed."""
    return _html(page.inner(caller, parts.book.state, parts.book.timeline.now(), parts.links))


@router.get("/page.js", **_content("text/javascript"))
async def script(caller: UserOrAgent) -> Response:
    """Return the script that refreshes the page."""
    return Response(page.SCRIPT, media_type="text/javascript")
