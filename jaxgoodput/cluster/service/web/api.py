"""The HTTP application: the routes, with every failure answered as a `Refusal`."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from jaxgoodput.cluster.service.record.commands import CommandRefused
from jaxgoodput.cluster.service.web.guard import BodyRefused
from jaxgoodput.cluster.service.web.requests import ServiceParts
from jaxgoodput.cluster.service.web.routes import answer_json, router
from jaxgoodput.cluster.service.wire import VERSION

LONGEST_REFUSAL = 2000  # characters; it may quote what was sent


def application(parts: ServiceParts) -> FastAPI:
    """Return the ASGI application. Put an `AccessGuard` in front: it decides who may call."""
    app = FastAPI(
        title="jaxgoodput",
        version=str(VERSION),
        docs_url=None,
        redoc_url=None,
        description="Jobs that grow and shrink by goodput.",
        separate_input_output_schemas=False,
    )
    app.state.parts = parts
    app.include_router(router)
    app.add_exception_handler(CommandRefused, _refused)
    app.add_exception_handler(RequestValidationError, _misfit)
    app.add_exception_handler(HTTPException, _http_error)
    return app


async def _refused(_: Request, error: Any) -> Response:
    headers = {"Connection": "close"} if isinstance(error, BodyRefused) else {}
    if error.status == 429:
        headers["Retry-After"] = str(math.ceil(error.retry_s))
    return answer_json({"error": str(error)}, error.status, headers)


async def _misfit(_: Request, error: Any) -> Response:
    """Answer with status 422, or 409 if the body has the right types but contradicts itself."""
    errors = error.errors()
    contradicts = all(found["type"] == "value_error" for found in errors)
    return answer_json({"error": in_words(errors[0])}, 409 if contradicts else 422)


def in_words(error: Mapping[str, Any]) -> str:
    """Return one sentence with the field that does not fit, its value, and the value that is expected.

    >>> in_words({"loc": ("body", "spec", "weight"), "input": "1", "msg": "Input should be a number"})
    "body.spec.weight is '1': Input should be a number"
    """
    where = ".".join(map(str, error["loc"]))[:200]
    got = error.get("input")
    # The whole body would say nothing.
    is_part = len(error["loc"]) > 1 and error.get("type") != "json_invalid"
    is_scalar = is_part and isinstance(got, str | int | float)
    said = f"{where} is {reprlib.repr(got)}" if is_scalar else where
    if error.get("type") == "unexpected_keyword_argument":
        return f"{said}: there is no such field. Remove it, or correct its name."
    return f"{said}: {error['msg'].removeprefix('Value error, ')}"[:LONGEST_REFUSAL]


async def _http_error(request: Request, error: Any) -> Response:
    if error.status_code == 404:
        return answer_json(
            {"error": "no such route. All routes are listed in /openapi.json."}, 404, error.headers
        )
    headers = dict(error.headers or {})
    if error.status_code == 405:
        # Starlette names the methods of the first route of a path only.
        matching = (r for r in router.routes if r.matches(request.scope)[0] != Match.NONE)
        methods = {m for route in matching for m in getattr(route, "methods", None) or ()}
        headers |= {"Allow": ", ".join(sorted(methods))} if methods else {}
    return answer_json({"error": str(error.detail)}, error.status_code, headers)
