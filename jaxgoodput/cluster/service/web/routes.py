"""The routes: each a few lines between the book, which changes the state, and the wire types.

Everything under /v1 keeps its meaning; a new meaning gets /v2. A request that changes something may carry an
`Idempotency-Key`. Sent again with the same key, it gets the first answer and changes nothing.
"""

import asyncio
import json
import secrets
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Response

from jaxgoodput._serial import encode
from jaxgoodput.cluster.service.record import commands
from jaxgoodput.cluster.service.record.commands import Caller, CommandRefused, Outcome
from jaxgoodput.cluster.service.record.state import JobEntry, State, work_of
from jaxgoodput.cluster.service.web import metrics, page, show
from jaxgoodput.cluster.service.web.requests import (
    REFUSALS,
    Agent,
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
from jaxgoodput.cluster.service.wire import (
    VERSION,
    AllocationShown,
    ClusterShown,
    Health,
    JobExplanation,
    JobList,
    JobShown,
    Join,
    Log,
    NodeWork,
    Receipt,
    Reports,
    Submission,
    WhatIf,
)
from jaxgoodput.specs import Hints

MOST_SHOWN = 1000
LOG_LOOK_S = 0.5  # between two looks at a log that does not grow

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


async def _change(
    request: Request,
    parts: ServiceParts,
    key: str | None,
    decide: Callable[[State], Outcome],
    *,
    shown: Callable[[State, Outcome], Any] = lambda state, outcome: outcome.answer,
    status: int = 200,
) -> Response:
    """Have the book decide on a change, at most once per caller, path and idempotency key."""
    caller: Caller = request.state.caller
    code, text = await parts.book.ask(
        decide,
        lambda state, outcome: json.dumps(encode(shown(state, outcome)), allow_nan=False),
        status=status,
        request=key and f"{caller.tenant}/{caller.role}/{request.url.path}/{key}",
        body=await request.body(),
    )
    return Response(text, code, media_type="application/json")


class _Patience:
    """The time that an answer may still wait for a change."""

    def __init__(self, parts: ServiceParts, wait_s: float):
        self._parts = parts
        self._until_s = parts.clock.now() + min(wait_s, parts.longest_wait_s)

    @property
    def left_s(self) -> float:
        """Seconds left; 0 if the answer is due, because the time is up or the service is closing."""
        if self._parts.book.is_closing:
            return 0.0
        return max(self._until_s - self._parts.clock.now(), 0.0)


def _entry(parts: ServiceParts, caller: Caller, job: str) -> JobEntry:
    """Return a job of the caller's. Raises CommandRefused if the caller has no such job."""
    commands.check_owned(parts.book.state, caller, job)
    return parts.book.state.jobs[job]


# -- jobs ----------------------------------------------------------------------------------------


@router.post(
    "/v1/jobs",
    status_code=201,
    response_model=JobShown,
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
    request: Request,
    parts: Parts,
    caller: User,
    submission: Annotated[Submission, StrictJson(), Body()],
    key: Key = None,
) -> Response:
    """Submit a job."""
    secret = secrets.token_hex(32)
    answer = await _change(
        request,
        parts,
        key,
        lambda state: commands.submit(state, caller, submission, secret),
        shown=lambda state, outcome: show.job(state, state.jobs[outcome.answer], state.at_s),
        status=201,
    )
    entry = parts.book.state.jobs.get(submission.spec.id)
    # Another secret means that the request came again: the job's log must then stay.
    if entry is not None and entry.secret == secret:
        for job in {submission.spec.id, *parts.logs.unknown(parts.book.state.jobs)}:
            await asyncio.to_thread(parts.logs.delete, job)
    return answer


@router.get("/v1/jobs", response_model=JobList)
async def jobs(
    parts: Parts,
    caller: User,
    active: bool = False,
    most: Annotated[int, Query(ge=1, le=MOST_SHOWN)] = 200,
) -> Response:
    """List the caller's newest jobs; with `active`, only jobs that have not ended."""
    state, now_s = parts.book.state, parts.book.timeline.now()
    mine = [
        entry
        for entry in state.jobs.values()
        if caller.sees(entry.spec.tenant) and not (active and entry.is_over)
    ]
    found = tuple(show.job(state, entry, now_s) for entry in mine[-most:])
    return answer_json(JobList(now_s=now_s, jobs=found))


@router.get("/v1/jobs/{job}", response_model=JobShown)
async def one_job(parts: Parts, caller: User, job: Name) -> Response:
    """Show one job, with the devices that it held before."""
    entry = _entry(parts, caller, job)
    return answer_json(show.job(parts.book.state, entry, parts.book.timeline.now(), past=True))


@router.post("/v1/jobs/{job}/cancel", response_model=Receipt)
async def cancel(
    request: Request, parts: Parts, caller: User, job: Name, key: Key = None
) -> Response:
    """Let a job save and end. Its record stays."""
    return await _change(request, parts, key, lambda state: commands.cancel(state, caller, job))


@router.post("/v1/jobs/{job}/hints", response_model=Receipt)
async def hint(
    request: Request,
    parts: Parts,
    caller: UserOrAgent,
    job: Name,
    hints: Annotated[Hints, StrictJson(), Body()],
    key: Key = None,
) -> Response:
    """Report what a running job has measured."""
    return await _change(
        request, parts, key, lambda state: commands.hint(state, caller, job, hints)
    )


@router.get("/v1/jobs/{job}/allocation", response_model=AllocationShown)
async def allocation(
    parts: Parts, caller: User, job: Name, after: Position = 0, wait_s: Wait = 0.0
) -> Response:
    """Show the devices of a job, once its generation is above `after` or the job has ended."""
    patience = _Patience(parts, wait_s)
    while True:
        entry = _entry(parts, caller, job)
        is_news = entry.allocation.generation > after or entry.is_over
        if is_news or not (left_s := patience.left_s):
            return answer_json(show.allocation(entry))
        await parts.book.changed(f"job {job}", left_s)


@router.get("/v1/jobs/{job}/log", response_model=Log)
async def log(
    parts: Parts, caller: User, job: Name, offset: Position = 0, wait_s: Wait = 0.0
) -> Response:
    """Return the output of a job's processes from an offset on."""
    patience = _Patience(parts, wait_s)
    while True:
        entry = _entry(parts, caller, job)
        found = await asyncio.to_thread(parts.logs.read, job, offset, entry.is_over)
        if found.text or found.over or not (left_s := patience.left_s):
            return answer_json(found)
        await parts.book.changed(f"job {job}", min(left_s, LOG_LOOK_S))


@router.get("/v1/jobs/{job}/explain", response_model=JobExplanation)
async def explain(parts: Parts, caller: User, job: Name) -> Response:
    """Explain why a job has its devices, and what would change that."""
    _entry(parts, caller, job)
    return answer_json(await parts.planners.ask("explain", job=job))


@router.post("/v1/what-if", response_model=WhatIf)
async def what_if(
    parts: Parts, caller: User, submission: Annotated[Submission, StrictJson(), Body()]
) -> Response:
    """Show the plan as it would be with one more job. Nothing changes."""
    submission = commands.of_tenant(caller, submission)
    if submission.spec.id in parts.book.state.active:
        raise CommandRefused(
            409, f"a job named {submission.spec.id!r} exists already. Ask with another name."
        )
    found = await parts.planners.ask("what-if", submission=submission)
    for other in found["others"]:
        other["job"] = show.name_for(caller, parts.book.state, other["job"])
    return answer_json(found)


# -- nodes ---------------------------------------------------------------------------------------


@router.get("/v1/nodes", response_model=ClusterShown)
async def nodes(parts: Parts, caller: UserOrAgent) -> Response:
    """Show all nodes and which jobs hold their devices."""
    now_s = parts.book.timeline.now()
    return answer_json(show.cluster(caller, parts.book.state, now_s, parts.heartbeats.silent_s))


@router.post(
    "/v1/nodes",
    response_model=Receipt,
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
    request: Request,
    parts: Parts,
    caller: Agent,
    wanted: Annotated[Join, StrictJson(), Body()],
    key: Key = None,
) -> Response:
    """Register a node and its agent."""
    parts.heartbeats.record(wanted.node.name)
    return await _change(request, parts, key, lambda state: commands.join(state, wanted))


@router.get("/v1/nodes/{node}/work", response_model=NodeWork)
async def work(
    parts: Parts,
    caller: Agent,
    node: Name,
    instance: Annotated[str, Query(min_length=1, max_length=100)],
    after: Position = 0,
    wait_s: Wait = 0.0,
) -> Response:
    """Return the work of a node, once its version is above `after`. Every request is a heartbeat."""
    book, heartbeats = parts.book, parts.heartbeats
    # A node that waits must not look silent, so it waits for a third of that limit at most.
    patience = _Patience(parts, min(wait_s, heartbeats.limit_s / 3))
    while True:
        state = book.state
        commands.check_agent(state, node, instance)
        heartbeats.record(node)
        if state.nodes[node].silent:
            await book.ask(lambda state: commands.revive(state, node), lambda *_: "")
            continue
        if state.nodes[node].version > after or not (left_s := patience.left_s):
            return answer_json(work_of(state, node))
        await book.changed(f"node {node}", left_s)


@router.post("/v1/nodes/{node}/reports", response_model=Receipt)
async def report(
    request: Request,
    parts: Parts,
    caller: Agent,
    node: Name,
    said: Annotated[Reports, StrictJson(), Body()],
    key: Key = None,
) -> Response:
    """Report what happened to the processes of jobs on a node, and what they wrote."""
    commands.check_agent(parts.book.state, node, said.instance)
    parts.heartbeats.record(node)
    for lines in said.lines:
        if lines.job in parts.book.state.jobs:
            await asyncio.to_thread(parts.logs.append, lines.job, lines.text)
    if not said.coordinators:
        return answer_json(Receipt())
    return await _change(
        request,
        parts,
        key,
        lambda state: commands.report(state, node, said.instance, said.coordinators),
    )


@router.post("/v1/nodes/{node}/drain", response_model=Receipt)
async def drain(
    request: Request, parts: Parts, caller: Operator, node: Name, key: Key = None
) -> Response:
    """Give a node no new work. Whatever runs on it stays."""
    why = "an operator drains it"
    return await _change(
        request, parts, key, lambda state: commands.change_node(state, node, "draining", why)
    )


@router.post("/v1/nodes/{node}/down", response_model=Receipt)
async def down(
    request: Request, parts: Parts, caller: Agent, node: Name, key: Key = None
) -> Response:
    """Take a node out of service. Jobs lose the devices that they hold there."""
    why = "it was taken out of service"
    return await _change(
        request, parts, key, lambda state: commands.change_node(state, node, "down", why)
    )


@router.post("/v1/nodes/{node}/up", response_model=Receipt)
async def up(
    request: Request, parts: Parts, caller: Operator, node: Name, key: Key = None
) -> Response:
    """Take a node back into service."""
    why = "an operator took it back into service"
    return await _change(
        request, parts, key, lambda state: commands.change_node(state, node, "up", why)
    )


# -- monitoring ----------------------------------------------------------------------------------


@router.get("/healthz", response_model=Health)
async def health(parts: Parts) -> Response:
    """Tell whether the service answers and plans. Needs no token."""
    num_jobs = len(parts.book.state.active)
    plans = not parts.planners.last_error
    return answer_json(Health(ok=True, version=VERSION, num_jobs=num_jobs, plans=plans))


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
    text = metrics.text(book.state, parts.requests, more)
    return Response(text, media_type="text/plain; version=0.0.4")


def _html(text: str) -> Response:
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'"
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return Response(text, 200, {**headers, "Cache-Control": "no-store"}, media_type="text/html")


@router.get("/", **_content("text/html"))
async def whole_page(parts: Parts, caller: User) -> Response:
    """Return the web page."""
    return _html(page.whole(caller, parts.book.state, parts.book.timeline.now(), parts.links))


@router.get("/page", **_content("text/html"))
async def page_only(parts: Parts, caller: User) -> Response:
    """Return the part of the page that is refreshed."""
    return _html(page.inner(caller, parts.book.state, parts.book.timeline.now(), parts.links))


@router.get("/page.js", **_content("text/javascript"))
async def script(caller: UserOrAgent) -> Response:
    """Return the script that refreshes the page."""
    return Response(page.SCRIPT, media_type="text/javascript")
