"""Requests read and answers described by the same types: pydantic checks them, OpenAPI shows them.

What does not fit a type is refused with 422; what fits and still cannot be (a minimum above its maximum) with
409, like everything that contradicts what is there.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from jaxgoodput.cluster.service.record.commands import CommandRefused
from jaxgoodput.cluster.service.wire import (
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
    Refusal,
    Reports,
    Submission,
    WhatIf,
)
from jaxgoodput.specs import Hints

T = TypeVar("T")

READ: tuple[type[Any], ...] = (Submission, Hints, Join, Reports)
SHOWN: tuple[type[Any], ...] = (
    *(JobShown, JobList, AllocationShown, ClusterShown, NodeWork, Receipt),
    *(Log, JobExplanation, WhatIf, Health, Refusal),
)
WRONG = {
    400: "the request is no HTTP that can be read",
    401: "no token, or a wrong one",
    403: "not with this token",
    404: "there is no such thing, or it is not yours",
    408: "the body came too slowly",
    409: "it contradicts itself or what is there",
    413: "the body is too long",
    422: "it does not fit the schema",
    429: "too many requests",
    507: "the disk of the journal is full",
}


class Schema:
    """The types as pydantic reads them, and as OpenAPI names them."""

    def __init__(self):
        self._adapters: dict[type[Any], TypeAdapter[Any]] = {
            type_: TypeAdapter(type_) for type_ in READ
        }
        every: list[tuple[type[Any], Literal["validation"], TypeAdapter[Any]]] = [
            (type_, "validation", TypeAdapter(type_)) for type_ in (*READ, *SHOWN)
        ]
        template = "#/components/schemas/{model}"
        refs, found = TypeAdapter.json_schemas(every, ref_template=template)
        self._refs = {type_: ref for (type_, _), ref in refs.items()}
        self.definitions: Mapping[str, Any] = found["$defs"]
        """What the references name."""

    def read(self, body: bytes, type_: type[T]) -> T:
        """A body as a value. Raises Refused, naming the field."""
        try:
            return self._adapters[type_].validate_json(body)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False, include_context=False)
            first = found[0]
            where = ".".join([type_.__name__, *map(str, first["loc"])])
            contradicts = all(one["type"] == "value_error" for one in found)
            text = first["msg"].removeprefix("Value error, ")
            raise CommandRefused(409 if contradicts else 422, f"{where[:200]}: {text}") from None

    def takes(self, type_: type) -> dict[str, Any]:
        """What OpenAPI says of a body."""
        content = {"application/json": {"schema": self._refs[type_]}}
        return {"requestBody": {"required": True, "content": content}}

    def answers(self, type_: type, status: int = 200) -> dict[int | str, dict[str, Any]]:
        """What OpenAPI says of answers: this one, and all that can go wrong."""
        wrong = {code: _described(why, self._refs[Refusal]) for code, why in WRONG.items()}
        return {status: _described("done", self._refs[type_]), **wrong}


def _described(why: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": why, "content": {"application/json": {"schema": schema}}}
