"""What the service answers over HTTP: routes, each a few lines between the book and the wire types.

Everything under /v1 stays as it is; another meaning is /v2. A request that changes something may carry an
`Idempotency-Key`: sent again with it, it gets the answer of the first time and does nothing.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from jaxgoodput._serial import encode
from jaxgoodput.clock import Clock
from jaxgoodput.cluster.service.planning.planners import Planners
from jaxgoodput.cluster.service.record import commands
from jaxgoodput.cluster.service.record.book import Book
from jaxgoodput.cluster.service.record.commands import Caller, CommandRefused, Outcome
from jaxgoodput.cluster.service.record.state import State, work_of
from jaxgoodput.cluster.service.web import metrics, page, show
from jaxgoodput.cluster.service.web.guard import BodyRefused
from jaxgoodput.cluster.service.web.logs import Logs
from jaxgoodput.cluster.service.web.schema import Schema
from jaxgoodput.cluster.service.wire import (
    NAME,
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

LONGEST_WAIT_S = 30.0
MOST_SHOWN = 1000
_CONTROL = re.compile(r"[^\t\n\x20-\x7e\xa0-\U0010ffff]")

Name = Annotated[str, Path(pattern=f"^{NAME}$", description="A name")]
Key = Annotated[
    str | None,
    Header(alias="Idempotency-Key", pattern=r"^[\x21-\x7e]{1,200}$", description="Of this request"),
]
Wait = Annotated[float, Query(ge=0.0, le=LONGEST_WAIT_S, description="Seconds to wait at most")]
Place = Annotated[int, Query(ge=0, le=2**62)]


# What one answer leads to, for programs that read OpenAPI.
_LINKS = {
    ("/v1/jobs", "201"): (
        ("one_job", "cancel", "hint", "allocation", "log", "explain"),
        "job",
        "$response.body#/id",
    ),
    ("/v1/nodes", "200"): (
        ("work", "report", "drain", "down", "up"),
        "node",
        "$request.body#/node/name",
    ),
}


class LastHeard:
    """When each node was heard of last; a service that starts has heard of all of them just then.

    A node that says nothing for `silent_s` is down, so none waits for an answer for as long as that.
    """

    def __init__(self, clock: Clock, limit_s: float):
        self.limit_s = limit_s
        self._clock = clock
        self._began_s = clock.now()
        self._at_s: dict[str, float] = {}

    def hear(self, name: str) -> None:
        """It is there."""
        self._at_s[name] = self._clock.now()

    def hear_all(self) -> None:
        """The service stood still: what they said meanwhile has not been heard yet."""
        self._began_s = self._clock.now()
        self._at_s.clear()

    def silent_s(self, name: str) -> float:
        """For how long nothing was heard of it."""
        return self._clock.now() - self._at_s.get(name, self._began_s)


def application(
    book: Book,
    planners: Planners,
    logs: Logs,
    seen: LastHeard,
    clock: Clock,
    requests: metrics.RequestMetrics,
    links: page.Links,
    longest_wait_s: float = LONGEST_WAIT_S,
) -> FastAPI:
    """All routes; who may use them is for the `Guard` in front to say.

    No answer waits for longer than `longest_wait_s`, whatever is asked for.
    """
    app = FastAPI(
        title="jaxgoodput", version=str(VERSION), docs_url=None, redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
        description="Jobs that grow and shrink by goodput.",
    )  # fmt: skip
    schema = Schema()

    @app.exception_handler(CommandRefused)
    async def refused(_: Request, error: CommandRefused) -> Response:
        closes = {"Connection": "close"} if isinstance(error, BodyRefused) else None
        return _json({"error": str(error)}, error.status, closes)

    @app.exception_handler(RequestValidationError)
    async def unfit(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))[:200]
        return _json({"error": f"{where}: {first['msg']}"}, 422)

    @app.exception_handler(HTTPException)
    async def nothing(request: Request, error: HTTPException) -> Response:
        why = "there is nothing here. The routes are in /openapi.json."
        said = why if error.status_code == 404 else str(error.detail)
        headers = dict(error.headers or {})
        if error.status_code == 405:
            matching = (r for r in app.routes if r.matches(request.scope)[0] != Match.NONE)
            methods = {m for route in matching for m in getattr(route, "methods", None) or ()}
            headers["Allow"] = ", ".join(sorted(methods))
        return _json({"error": said}, error.status_code, headers)

    def key_of(request: Request, key: str | None) -> str | None:
        caller: Caller = request.state.caller
        return None if key is None else f"{caller.tenant}/{caller.role}/{request.url.path}/{key}"

    async def change(
        request: Request,
        key: str | None,
        decide: Callable[[State], Outcome],
        *,
        shown: Callable[[State, Outcome], Any] = lambda state, outcome: outcome.answer,
        status: int = 200,
    ) -> Response:
        code, text = await book.ask(
            decide,
            lambda state, outcome: json.dumps(encode(shown(state, outcome)), allow_nan=False),
            status=status,
            request=key_of(request, key),
            body=await request.body(),
        )
        return Response(text, code, media_type="application/json")

    # -- jobs ------------------------------------------------------------------------------------

    @app.post("/v1/jobs", status_code=201, responses=schema.answers(JobShown, 201),
              openapi_extra=schema.takes(Submission))  # fmt: skip
    async def submit(request: Request, key: Key = None) -> Response:
        """Hand in a job."""
        caller = _caller(request, "user")
        submission = schema.read(await request.body(), Submission)
        secret = secrets.token_hex(32)

        def decide(state: State) -> Outcome:
            return commands.submit(state, caller, submission, secret)

        def shown(state: State, outcome: Outcome) -> JobShown:
            return show.job(state, state.jobs[outcome.answer], state.at_s)

        answer = await change(request, key, decide, shown=shown, status=201)
        entry = book.state.jobs.get(submission.spec.id)
        if (
            entry is not None and entry.secret == secret
        ):  # the job came now, not when this was asked first
            for job in {submission.spec.id, *logs.of_others(book.state.jobs)}:
                await asyncio.to_thread(logs.start, job)
        return answer

    @app.get("/v1/jobs", responses=schema.answers(JobList))
    async def jobs(
        request: Request,
        active: bool = False,
        most: Annotated[int, Query(ge=1, le=MOST_SHOWN)] = 200,
    ) -> Response:
        """The newest jobs of the caller's; with `active` those that are not over."""
        caller, state, now_s = _caller(request, "user"), book.state, book.timeline.now()
        mine = [
            entry
            for entry in state.jobs.values()
            if caller.sees(entry.spec.tenant) and not (active and entry.is_over)
        ]
        found = tuple(show.job(state, entry, now_s) for entry in mine[-most:])
        return _json(JobList(now_s=now_s, jobs=found))

    @app.get("/v1/jobs/{job}", responses=schema.answers(JobShown))
    async def one_job(request: Request, job: Name) -> Response:
        """One job, with what it had."""
        state = _mine(request, book, job)
        return _json(show.job(state, state.jobs[job], book.timeline.now(), past=True))

    @app.post("/v1/jobs/{job}/cancel", responses=schema.answers(Receipt))
    async def cancel(request: Request, job: Name, key: Key = None) -> Response:
        """Have a job save and end; what it did stays to be seen."""
        caller = _caller(request, "user")
        return await change(request, key, lambda state: commands.cancel(state, caller, job))

    @app.post("/v1/jobs/{job}/hints", responses=schema.answers(Receipt),
              openapi_extra=schema.takes(Hints))  # fmt: skip
    async def hint(request: Request, job: Name, key: Key = None) -> Response:
        """What a running job tells of itself."""
        caller = _caller(request, "user", "node")
        hints = schema.read(await request.body(), Hints)
        return await change(request, key, lambda state: commands.hint(state, caller, job, hints))

    @app.get("/v1/jobs/{job}/allocation", responses=schema.answers(AllocationShown))
    async def allocation(
        request: Request, job: Name, after: Place = 0, wait_s: Wait = 0.0
    ) -> Response:
        """What a job has; waits until its generation is beyond `after`, or it is over."""
        until_s = clock.now() + min(wait_s, longest_wait_s)
        while True:
            entry = _mine(request, book, job).jobs[job]
            left_s = until_s - clock.now()
            if (
                entry.allocation.generation > after
                or entry.is_over
                or left_s <= 0
                or book.is_closing
            ):
                return _json(show.allocation(entry))
            await book.changed(f"job {job}", left_s)

    @app.get("/v1/jobs/{job}/log", responses=schema.answers(Log))
    async def log(request: Request, job: Name, offset: Place = 0, wait_s: Wait = 0.0) -> Response:
        """What the processes of a job wrote, from an offset on."""
        until_s = clock.now() + min(wait_s, longest_wait_s)
        while True:
            entry = _mine(request, book, job).jobs[job]
            found = await asyncio.to_thread(logs.read, job, offset, entry.is_over)
            left_s = until_s - clock.now()
            if found.text or found.over or left_s <= 0 or book.is_closing:
                return _json(found)
            await book.changed(f"job {job}", min(left_s, 0.5))

    @app.get("/v1/jobs/{job}/explain", responses=schema.answers(JobExplanation))
    async def explain(request: Request, job: Name) -> Response:
        """Why a job has what it has, and what would change that."""
        _mine(request, book, job)
        return _json(await planners.ask("explain", job=job))

    @app.post("/v1/what-if", responses=schema.answers(WhatIf),
              openapi_extra=schema.takes(Submission))  # fmt: skip
    async def what_if(request: Request) -> Response:
        """The plan if this job came now; nothing changes."""
        caller = _caller(request, "user")
        submission = commands.of_tenant(caller, schema.read(await request.body(), Submission))
        if submission.spec.id in book.state.active:
            raise CommandRefused(
                409, f"there is a job {submission.spec.id!r} already. Ask by another name."
            )
        found = await planners.ask("what-if", submission=submission)
        for other in found["others"]:
            other["job"] = show.name_for(caller, book.state, other["job"])
        return _json(found)

    # -- the cluster -----------------------------------------------------------------------------

    @app.get("/v1/nodes", responses=schema.answers(ClusterShown))
    async def nodes(request: Request) -> Response:
        """All nodes, and who has their devices."""
        caller = _caller(request, "user", "node")
        return _json(show.cluster(caller, book.state, book.timeline.now(), seen.silent_s))

    @app.post("/v1/nodes", responses=schema.answers(Receipt), openapi_extra=schema.takes(Join))
    async def join(request: Request, key: Key = None) -> Response:
        """The agent of a node comes."""
        _caller(request, "node")
        wanted = schema.read(await request.body(), Join)
        seen.hear(wanted.node.name)
        return await change(request, key, lambda state: commands.join(state, wanted))

    @app.get("/v1/nodes/{node}/work", responses=schema.answers(NodeWork))
    async def work(
        request: Request,
        node: Name,
        instance: Annotated[str, Query(min_length=1, max_length=100)],
        after: Place = 0,
        wait_s: Wait = 0.0,
    ) -> Response:
        """What a node has to do; waits until that is of a later version than `after`."""
        _caller(request, "node")
        until_s = clock.now() + min(wait_s, longest_wait_s, seen.limit_s / 3)
        while True:
            state = book.state
            commands.of_this_agent(state, node, instance)
            seen.hear(node)
            if state.nodes[node].silent:
                await book.ask(lambda state: commands.heard(state, node), lambda *_: "")
                continue
            left_s = until_s - clock.now()
            if state.nodes[node].version > after or left_s <= 0 or book.is_closing:
                return _json(work_of(state, node))
            await book.changed(f"node {node}", left_s)

    @app.post("/v1/nodes/{node}/reports", responses=schema.answers(Receipt),
              openapi_extra=schema.takes(Reports))  # fmt: skip
    async def report(request: Request, node: Name, key: Key = None) -> Response:
        """What happened to the processes of jobs on a node."""
        _caller(request, "node")
        said = schema.read(await request.body(), Reports)
        commands.of_this_agent(book.state, node, said.instance)
        seen.hear(node)
        for lines in said.lines:
            if lines.job in book.state.jobs:
                text = _CONTROL.sub("?", lines.text)
                await asyncio.to_thread(logs.append, lines.job, text)
        if not said.coordinators:
            return _json(Receipt())
        return await change(
            request,
            key,
            lambda state: commands.report(state, node, said.instance, said.coordinators),
        )

    def node_route(to: str, verb: str, why: str) -> None:
        @app.post(f"/v1/nodes/{{node}}/{verb}", responses=schema.answers(Receipt), name=verb)
        async def changed(request: Request, node: Name, key: Key = None) -> Response:
            _caller(request, *(("node",) if to == "down" else ()))
            return await change(
                request, key, lambda state: commands.change_node(state, node, to, why)
            )

        changed.__doc__ = f"The node is {to}."

    node_route("draining", "drain", "an operator drains it")
    node_route("down", "down", "it was taken out of service")
    node_route("up", "up", "an operator took it in again")

    # -- for people and machines that watch ------------------------------------------------------

    @app.get("/healthz", responses=schema.answers(Health))
    async def health() -> Response:
        """Whether the service answers, and makes plans."""
        state = book.state
        return _json(
            Health(
                ok=True,
                version=VERSION,
                num_jobs=len(state.active),
                plans=not planners.last_error,
            )
        )

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}, **_wrong(schema)})
    async def numbers(request: Request) -> Response:
        """Numbers for Prometheus."""
        _caller(request)
        told = {
            "journal_events_total": float(book.num_events),
            "journal_commit_seconds_total": book.commit_s,
            "plans_total": float(planners.planned),
        }
        said = metrics.text(book.state, requests, told)
        return Response(said, media_type="text/plain; version=0.0.4")

    @app.get("/", responses={200: {"content": {"text/html": {}}}, **_wrong(schema)})
    async def whole_page(request: Request) -> Response:
        """The cluster and the queue at a glance."""
        return _html(page.whole(_caller(request, "user"), book.state, book.timeline.now(), links))

    @app.get("/page", responses={200: {"content": {"text/html": {}}}, **_wrong(schema)})
    async def page_only(request: Request) -> Response:
        """What of the page changes."""
        return _html(page.inner(_caller(request, "user"), book.state, book.timeline.now(), links))

    @app.get("/page.js", responses={200: {"content": {"text/javascript": {}}}, **_wrong(schema)})
    async def script(request: Request) -> Response:
        """What keeps the page up to date."""
        return Response(page.SCRIPT, media_type="text/javascript")

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = FastAPI.openapi(app)
            parts = found.setdefault("components", {})
            parts["schemas"] = dict(schema.definitions)
            parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            for (path, status), (names, part, value) in _LINKS.items():
                links = {name: {"operationId": name, "parameters": {part: value}} for name in names}
                found["paths"][path]["post"]["responses"][status]["links"] = links
            for path, methods in found["paths"].items():
                for said in methods.values():
                    said["security"] = [] if path == "/healthz" else [{"token": []}]
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = openapi
    return app


def _caller(request: Request, *roles: str) -> Caller:
    """Who asks. Raises Refused where it is neither of these roles nor the operator."""
    caller: Caller = request.state.caller
    if caller.role == "operator" or caller.role in roles:
        return caller
    raise CommandRefused(
        403,
        f"this token is of a {caller.role!r}, and this is for {' and '.join((*roles, 'operator'))}. Use "
        "another token.",
    )


def _mine(request: Request, book: Book, job: str) -> State:
    """The state, where the job is the caller's. Raises Refused."""
    state = book.state
    commands.job_of(state, _caller(request, "user"), job)
    return state


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    text = json.dumps(encode(value), allow_nan=False)
    return Response(text, status, headers, media_type="application/json")


def _html(text: str) -> Response:
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'"
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return Response(text, 200, {**headers, "Cache-Control": "no-store"}, media_type="text/html")


def _wrong(schema: Schema) -> dict[int | str, dict[str, Any]]:
    return {code: said for code, said in schema.answers(Receipt).items() if code != 200}
