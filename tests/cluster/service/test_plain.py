"""The door for text: whatever enters the service is plain, in every field of every request."""

import dataclasses
import inspect
import json
import sys
import types
import typing
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.cluster.service import wire
from jaxgoodput.cluster.service.plain import TextRule, admit, plain
from jaxgoodput.cluster.service.record.events import CoordinatorEnded, JobSubmitted, JournalEntry
from jaxgoodput.cluster.service.record.state import State, step
from jaxgoodput.cluster.service.web.logs import Logs
from jaxgoodput.cluster.service.web.requests import StrictJson
from jaxgoodput.cluster.service.web.routes import router
from jaxgoodput.specs import JobSpec

SPEC = {
    "id": "a", "mode": "adaptive", "min_devices": 1, "max_devices": 2, "num_devices": 2, "weight": 1.0,
    "tenant": "red", "preemptible": True, "min_run_s": 0.0, "kinds": ["h200"], "level": "rack",
    "deadline_s": 1.0, "budget": 1.0, "preferred_kinds": ["h200"],
}  # fmt: skip
COST = dict.fromkeys(
    ("compute_base", "compute_per_sample", "intra_base", "intra_per_replica", "inter_base",
     "inter_per_replica", "overlap", "update_s"),
    0.1,
)  # fmt: skip
NODE = {
    "name": "n0", "kind": "h200", "num_devices": 2, "state": "up", "labels": {"rack": "r3"},
    "withheld": [0],
}  # fmt: skip
LAYOUT = {
    "name": "data", "devices_per_replica": 1, "cost": COST, "error": 0.0, "micro": [1, 2],
    "residuals": [[1, 1.0]], "links": ["intra"],
}  # fmt: skip
REPORT = {"job": "a", "attempt": 1, "address": "h:1", "code": 1, "why": "because"}
OF_NODE = {
    "job": "a", "attempt": 1, "node": "n0", "fault": "slow", "why": "because", "slow_ratio": 5.1,
}  # fmt: skip
# A request of each type, with all of its fields.
FULL: Mapping[str, dict[str, Any]] = {
    "Submission": {
        "spec": SPEC, "command": ["python", "train.py"], "cwd": "/runs", "workdir": "/runs/a",
        "devices_per_process": 1, "variables": [["X", "1"]],
    },
    "Join": {"node": NODE, "instance": "one", "version": 1},
    "Reports": {
        "instance": "one", "coordinators": [REPORT], "nodes": [OF_NODE],
        "lines": [{"job": "a", "text": "step 1\n"}],
    },
    "Hints": {
        "generation": 1, "number": 1, "kind": "h200", "num_devices": 1, "largest": 1, "progress": 1.0,
        "base_batch_size": 1, "max_global_batch_size": 2, "min_global_batch_size": 1,
        "max_micro_batches": 2, "total": 1.0, "layouts": [LAYOUT], "grad_sqr": [1.0],
        "grad_var": [1.0], "most_gain": 1.0, "noise_confidence": 1.0, "global_batch_size": 1,
        "throughput": 1.0, "goodput": 1.0, "restarts_s": [1.0],
    },
}  # fmt: skip


def bodies() -> dict[str, Any]:
    """The types of all request bodies, as the routes declare them."""
    found = {}
    for route in router.routes:
        for parameter in inspect.signature(route.endpoint).parameters.values():  # type: ignore[attr-defined]
            noted = getattr(parameter.annotation, "__metadata__", ())
            if any(type(note).__name__ == "Body" for note in noted):
                assert any(isinstance(note, StrictJson) for note in noted), route
                type_: Any = typing.get_args(parameter.annotation)[0]
                strict: Any = Annotated[type_, StrictJson()]
                found[type_.__name__] = pydantic.TypeAdapter(strict)
    return found


BODIES = bodies()


def is_harmful(letter: str) -> bool:
    """Whether a character is a control character or a line break, or changes the order of letters."""
    turns = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    marks = "\u200e\u200f\u061c"
    return (
        unicodedata.category(letter) in ("Cc", "Zl", "Zp", "Cs")
        or unicodedata.bidirectional(letter) in turns
        or letter in marks
    )


def strings(type_: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value of a type has text: field names, 0 for an item, "key" for a key of a mapping."""
    kind, parts = typing.get_origin(type_) or type_, typing.get_args(type_)
    if type_ is str:
        yield path
    elif dataclasses.is_dataclass(kind):
        for name, its in typing.get_type_hints(kind).items():
            if name in {field.name for field in dataclasses.fields(kind)}:
                yield from strings(its, (*path, name))
    elif kind in (types.UnionType, typing.Union):
        for part in parts:
            yield from strings(part, path)
    elif kind is tuple:
        for place, part in enumerate(part for part in parts if part is not Ellipsis):
            yield from strings(part, (*path, place))
    elif kind is not typing.Literal and issubclass(kind, Mapping):
        yield from strings(parts[0], (*path, "key"))
        yield from strings(parts[1], (*path, "value"))


def with_text(value: Any, path: tuple[Any, ...], text: str) -> Any:
    """A copy of a JSON value with another text at a place."""
    if not path:
        assert isinstance(value, str)
        return text
    first, rest = path[0], path[1:]
    if isinstance(value, list):
        return [with_text(item, rest, text) if i == first else item for i, item in enumerate(value)]
    if first in ("key", "value") and len(value) == 1:
        ((key, item),) = value.items()
        return {text: item} if first == "key" else {key: with_text(item, rest, text)}
    return {**value, first: with_text(value[first], rest, text)}


def texts(value: Any) -> Iterator[str]:
    """All text in a value."""
    if isinstance(value, str):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from texts(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts(key)
            yield from texts(item)
    elif isinstance(value, tuple):
        for item in value:
            yield from texts(item)


PLACES = [
    (name, path)
    for name, adapter in BODIES.items()
    for path in strings(typing.get_args(adapter._type)[0])
]


def test_all_requests_are_looked_at():
    assert set(BODIES) == set(FULL)
    assert len(PLACES) >= 20
    for name, adapter in BODIES.items():
        value = adapter.validate_python(json.dumps(FULL[name]))
        assert {field.name for field in dataclasses.fields(value)} == set(FULL[name])


HARMFUL = st.sampled_from(
    "\x00\x07\x1b\x7f\x80\x85\x9b\x9d\xad\u061c\u200b\u200e\u200f\u2028\u2029\u202a\u202e\u2066\ufeff\n\r"
)
DIRTY = st.builds("".join, st.tuples(st.text(max_size=5), HARMFUL, st.text(max_size=5)))


@pytest.mark.parametrize("name, path", PLACES, ids=lambda part: str(part))
@given(text=st.one_of(DIRTY, st.just("x" * 15_000), st.just("\x1b[2J" * 500)))
def test_no_harmful_text_enters_in_any_field_of_any_request(name, path, text):
    body = json.dumps(with_text(FULL[name], path, text))
    try:
        value = BODIES[name].validate_python(body)
    except pydantic.ValidationError as error:
        (first, *_) = error.errors()
        assert len(first["msg"]) > 10
        return
    for found in texts(value):
        assert not any(is_harmful(letter) and letter not in "\t\n" for letter in found), found
        assert len(found) <= wire.LONGEST_WORD or path == ("lines", 0, "text")
    allowed = (("command", 0), ("variables", 0, 1), ("lines", 0, "text"))
    if path not in allowed:
        assert not any("\n" in found for found in texts(value) if found != "step 1\n")


@pytest.mark.parametrize(
    "path, is_cleaned",
    [
        (("coordinators", 0, "why"), True),
        (("coordinators", 0, "address"), True),
        (("lines", 0, "text"), True),
        (("nodes", 0, "why"), True),
        (("nodes", 0, "node"), False),
        (("coordinators", 0, "job"), False),
        (("instance",), False),
    ],
)
def test_what_is_only_reported_is_cleaned_and_not_refused(path, is_cleaned):
    body = json.dumps(with_text(FULL["Reports"], path, "a\x1b[31m\u202eb"))
    if not is_cleaned:
        with pytest.raises(
            pydantic.ValidationError, match="has the character U\\+001B at position 1"
        ):
            BODIES["Reports"].validate_python(body)
        return
    assert "a?[31m?b" in set(texts(BODIES["Reports"].validate_python(body)))


def test_a_command_may_have_lines_and_a_path_may_not():
    body = with_text(FULL["Submission"], ("command", 0), "python -c\n\tpass")
    assert BODIES["Submission"].validate_python(json.dumps(body)).command[0] == "python -c\n\tpass"
    body = with_text(FULL["Submission"], ("cwd",), "/a\nb")
    with pytest.raises(pydantic.ValidationError, match="cwd has the character U\\+000A"):
        BODIES["Submission"].validate_python(json.dumps(body))


def test_every_harmful_character_is_replaced_and_no_letter_is():
    rule = TextRule(lines=True)
    for code in range(sys.maxunicode + 1):
        letter = chr(code)
        category = unicodedata.category(letter)
        if letter in "\t\n":
            assert plain(letter, rule) == letter
        elif is_harmful(letter):
            assert plain(letter, rule) == "?", hex(code)
        elif category[0] in "LMNPS" or category == "Zs":
            assert plain(letter, rule) == letter, hex(code)


@given(text=st.text(), most=st.integers(3, 40), lines=st.booleans())
def test_plain_text_is_of_its_rule_and_stays(text, most, lines):
    rule = TextRule(most=most, lines=lines)
    found = plain(text, rule)
    assert len(found) <= most and plain(found, rule) == found
    assert admit(found, {}, "it", rule) == found
    assert lines or not set(found) & set("\t\n")


def test_a_plain_request_passes_unchanged():
    submission = wire.Submission(spec=JobSpec(id="a"), command=("python", "-c", "a\n\tb"))
    assert admit(submission, wire.TEXT_RULES) is submission


def test_reasons_in_journals_of_earlier_versions_are_cleaned_as_well():
    submission = wire.Submission(spec=JobSpec(id="a"), command=("x",))
    events = (
        JobSubmitted(submission=submission, secret="s"),
        CoordinatorEnded(job="a", attempt=0, code=2, why="no\x1b]0;title\x07 such\nfile"),
    )
    state = State()
    for seq, event in enumerate(events, 1):
        state = step(state, JournalEntry(seq, float(seq), 0.0, event))
    assert state.jobs["a"].reason == "failed: no?]0;title? such file"


def test_output_is_stored_as_it_comes_through_the_door(tmp_path):
    body = with_text(FULL["Reports"], ("lines", 0, "text"), "a\x1b[31m\x9b31m\tä\n")
    (lines,) = BODIES["Reports"].validate_python(json.dumps(body)).lines
    logs = Logs(tmp_path)
    logs.append(lines.job, lines.text)
    assert logs.read("a", 0, False).text == "a?[31m?31m\tä\n"
