"""What all routes share: how a request body is read, who may call, and which refusals are documented."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Header, Path, Query, Request, Response, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from jaxgoodput.clock import Clock
from jaxgoodput.cluster.service.plain import admit
from jaxgoodput.cluster.service.planning.planners import Planners
from jaxgoodput.cluster.service.record.book import Book
from jaxgoodput.cluster.service.record.commands import Caller, CommandRefused
from jaxgoodput.cluster.service.web.heartbeats import Heartbeats
from jaxgoodput.cluster.service.web.logs import Logs
from jaxgoodput.cluster.service.web.metrics import RequestMetrics
from jaxgoodput.cluster.service.web.page import Links
from jaxgoodput.cluster.service.web.rates import Questions
from jaxgoodput.cluster.service.wire import NAME, TEXT_RULES, Refusal

LONGEST_WAIT_S = 30.0
APART_S = 300.0  # for which a node is kept apart from a job that reports it, at first

_WHY_REFUSED = {
    400: "The request is not valid HTTP.",
    401: "The token is missing or wrong.",
    403: "This token may not do that.",
    404: "No such thing exists, or it belongs to another tenant.",
    408: "The body arrived too slowly.",
    409: "The request contradicts itself or the state of the cluster.",
    413: "The body is too long.",
    422: "The request does not fit the schema.",
    429: "Too many requests.",
    507: "The disk that holds the journal is full.",
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Refusal, "description": why} for status, why in _WHY_REFUSED.items()
}
"""The refusals that any route may answer with, for OpenAPI."""


class StrictJson:
    """Marks the type of a request body that pydantic reads from the JSON text itself. All its text is plain.

    The wire types are strict. In strict mode pydantic takes a list for a tuple, or an object for a dataclass,
    only if it parses the JSON; it would refuse what `json.loads` returns.
    """

    def __get_pydantic_core_schema__(self, type_: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Parse the body's text, validate it as its type, then let its text through the door."""
        parsed = core_schema.json_schema(handler(type_))
        return core_schema.no_info_after_validator_function(_admitted, parsed)

    def __get_pydantic_json_schema__(
        self, schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Describe the parsed value, not the text."""
        return handler(schema["schema"]["schema"])


def _admitted(value: Any) -> Any:
    return admit(value, TEXT_RULES)


class _TextRequest(Request):
    """A request whose body FastAPI leaves as text, for `StrictJson` to parse."""

    async def json(self) -> bytes:
        return await self.body()


class StrictRoute(APIRoute):
    """A route of the API whose request bodies are read by `StrictJson`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, which gets the body as text instead of parsed JSON."""
        handle = super().get_route_handler()

        async def handle_text(request: Request) -> Response:
            request = _TextRequest(request.scope, request.receive)
            if self.body_field is not None:
                # Read here, because FastAPI turns every exception in its own reading into a 400.
                await request.body()
            return await handle(request)

        return handle_text


@dataclass(frozen=True, kw_only=True)
class ServiceParts:
    """The parts of a running service that routes use."""

    book: Book
    planners: Planners
    logs: Logs
    heartbeats: Heartbeats
    clock: Clock
    requests: RequestMetrics
    questions: Questions
    links: Links
    longest_wait_s: float = LONGEST_WAIT_S
    """The longest time for which an answer waits for a change, whatever the request asks for."""
    apart_s: float = APART_S
    """How long a node is kept apart from a job that reports it for the first time."""


async def _parts(request: Request) -> ServiceParts:
    return request.app.state.parts


_TOKEN = HTTPBearer(scheme_name="token", auto_error=False)  # checked by `AccessGuard`, shown here


class RoleCheck:
    """A FastAPI dependency that returns the caller, who must have one of these roles or be the operator."""

    def __init__(self, *roles: str):
        self._roles = roles

    async def __call__(
        self, request: Request, _: Annotated[object, Security(_TOKEN)] = None
    ) -> Caller:
        """Return the caller. Raises CommandRefused if it has none of the roles that are allowed."""
        caller: Caller = request.state.caller
        if caller.role == "operator" or caller.role in self._roles:
            return caller
        raise CommandRefused(
            403,
            f"this token has the role {caller.role!r}, but this request is for "
            f"{' and '.join((*self._roles, 'operator'))}. Use another token.",
        )


Parts = Annotated[ServiceParts, Depends(_parts)]
User = Annotated[Caller, Depends(RoleCheck("user"))]
Agent = Annotated[Caller, Depends(RoleCheck("node"))]
UserOrAgent = Annotated[Caller, Depends(RoleCheck("user", "node"))]
Operator = Annotated[Caller, Depends(RoleCheck())]

Name = Annotated[str, Path(pattern=f"^{NAME}$", description="A name")]
Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[\x21-\x7e]{1,200}$",
        description="A name for this request, unique to it",
    ),
]
Instance = Annotated[
    str,
    Query(pattern=r"^[\x21-\x7e]{1,100}$", description="The instance with which the agent joined"),
]
Wait = Annotated[float, Query(ge=0.0, le=LONGEST_WAIT_S, description="Longest wait in seconds")]
MOST_POSITION = 2**62
Position = Annotated[int, Query(ge=0, le=MOST_POSITION)]
