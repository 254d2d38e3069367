"""What was written as JSON is read back by the types of its fields; what does not fit is named."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput._fields.serial import decode, dumps, encode, loads
from jaxgoodput.cluster.simulate.settings import Pin, Settings
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.goodput.search import BatchConfig

NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class Times:
    step_s: float
    parts: tuple[float, ...] = (NAN,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    version: ClassVar[int] = 3
    cursor: Cursor
    batch: BatchConfig | None = None
    mode: Literal["a", "b"] = "a"
    times: Mapping[str, tuple[Times, ...]] = dataclasses.field(default_factory=dict)
    pair: tuple[int, str] = (0, "")
    names: Sequence[str] = ()
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)


numbers = st.floats(allow_infinity=False)
times = st.builds(Times, numbers, st.lists(numbers, max_size=2).map(tuple))
saved = st.builds(
    Saved,
    cursor=st.builds(Cursor, st.integers(0, 2**70), st.integers(0, 9), st.integers(0, 9)),
    batch=st.none() | st.just(BatchConfig(micro_batch_size=2, num_micro_batches=1, num_replicas=8)),
    mode=st.sampled_from(["a", "b"]),
    times=st.dictionaries(st.text(max_size=3), st.lists(times, max_size=2).map(tuple), max_size=2),
    pair=st.tuples(st.integers(), st.text(max_size=2)),
    names=st.lists(st.text(max_size=2), max_size=2).map(tuple),
    meta=st.just({"any": [1, {"thing": None}]}),
)


@given(saved)
def test_what_was_written_is_read_back(value):
    again = loads(dumps(value), Saved)
    assert str(again) == str(value)  # NaN is not equal to itself
    assert json.loads(dumps(value))["version"] == 3


@pytest.mark.parametrize(
    "rules",
    [
        Settings(),
        Settings(restart_s={"a": 2.0}, pins={"a": Pin(1, 2)}),
        Settings(round_s=None, growth=None),
    ],
)
def test_each_type_of_a_union_is_read_back(rules):
    assert loads(dumps(rules), Settings) == rules


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cursor": 3}, "Saved.cursor is 3; it must be an object"),
        ({"cursor": {"seed": -1}}, "Saved.cursor is not valid: Cursor.seed=-1 is negative"),
        ({"cursor": {"seed": 1.0}}, "Saved.cursor.seed is 1.0; it must be a whole number"),
        ({"pair": [1]}, r"Saved.pair is \[1\]; it must be a list of 2"),
        ({"pair": [1, 2]}, r"Saved.pair\[1\] is 2; it must be a string"),
        ({"times": {"x": [{"step_s": "1"}]}}, r"Saved.times\['x'\]\[0\].step_s is '1'"),
        ({"times": {"x": [{}]}}, r"Saved.times\['x'\]\[0\] lacks the field 'step_s'"),
        ({"names": "abc"}, "Saved.names is 'abc'; it must be a list"),
    ],
)
def test_what_does_not_fit_is_named_by_its_path(fields, words):
    with pytest.raises(ValueError, match=words):
        decode({"cursor": {"seed": 0}, **fields}, Saved, "Saved")


def test_a_union_says_all_that_it_takes():
    with pytest.raises(ValueError, match="a number; or restart_s is 'fast'; it must be an object"):
        decode("fast", float | Mapping[str, float], "restart_s")


def test_a_type_of_another_version_is_refused():
    text = dumps(Saved(cursor=Cursor(0))).replace('"version": 3', '"version": 2')
    with pytest.raises(ValueError, match="this Saved has version 2, this program reads version 3"):
        loads(text, Saved)


def test_what_json_lacks_is_written_plainly():
    value = {
        "array": jnp.arange(3),
        "numpy": np.float32(0.5),
        "nan": np.array([1.0, np.inf]),
        "rule": math.sqrt,
        "nested": (Times(math.nan, ()),),
        "big": np.int64(2**60),
        7: True,
    }
    assert json.loads(json.dumps(encode(value), allow_nan=False)) == {
        "array": [0, 1, 2],
        "numpy": 0.5,
        "nan": [1.0, None],
        "rule": "sqrt",
        "nested": [{"step_s": None, "parts": []}],
        "big": 2**60,
        "7": True,
    }
