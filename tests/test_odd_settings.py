"""Whatever is given to a setting is of the declared type and range, or the error names the field.

Every field is tried with every odd value. Which values fit is said here a second time, by hand, without the
door's own code.
"""

import contextlib
import datetime
import decimal
import enum
import fractions
import functools
import itertools
import json
import math
import os
import pathlib
import re
import typing

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.config import (
    Config,
    Evaluation,
    Execution,
    Reporting,
    Saving,
    Statistics,
    Tuning,
    with_overrides,
)

LIMITS = BatchLimits(base=32, max=1024, micro=(4, 128), min_global=8, sizes=(4, 8, 64))
USUAL = Config(workdir="work", batch=LIMITS, base_steps=100, evaluation=Evaluation(every_s=9))
NEEDED = {
    Config: {"workdir": "work", "batch": LIMITS, "base_steps": 1},
    BatchLimits: {"base": 2, "max": 2},
}
CLASSES = (
    *(Tuning, Statistics, Execution, Evaluation, Saving, Reporting),
    *(Config, BatchLimits, Strategy),
)
FIELDS = [(c, name, kind) for c in CLASSES for name, kind in typing.get_type_hints(c).items()]
SHARES = {"fixed_tolerance", "smoothing", "memory_margin", "ema"}
FROM_ZERO = {
    "min_gain",
    "dwell_steps",
    "warm_up_steps",
    "prefetch",
    "read_retries",
    "seed",
    *SHARES,
}
DEGREES = {"data", "fsdp", "tensor", "context", "expert", "stage"}
FOLDERS = {"workdir", "compilation_cache"}


class Hostile:
    """Raises whatever it is asked for."""

    def _raise(self, *_):
        raise RuntimeError("this value is asked nothing")

    __repr__ = __str__ = __eq__ = __hash__ = __bool__ = __float__ = __int__ = __len__ = _raise


class Word(enum.StrEnum):
    FIXED = "fixed"


class Number(enum.IntEnum):
    TWO = 2


# fmt: off
WHOLE = [-(10**400), -(2**63) - 1, -1, 0, 1, 2, 7, 31, 32, 33, 64, 1024, 10**6, 2**63 - 1, 2**63, 10**400]
REAL = [-math.inf, -1.5, -0.0, 0.0, 5e-324, 1e-3, 0.5, 0.999, 1.0, 1.5, 2.0, 64.0, 1e300, math.inf, math.nan]
TEXTS = [
    *"a 1 1.5 -1 1e-3 nan inf 10m 3h 5% 16GiB 1,000 1_000 None null true False yes off goodput".split(),
    *"fixed goodpt auto drop min sample bfloat16 float16 int8 /tmp/a ~ s3://b a\0b \ud800 ² é {} '1'".split(),
    *"0x10 1e400 a=b -- %s {0}".split(), "", " ", "[1, 2]", "9" * 5000, "x" * 5000,
]
KINDS = "bool_ int8 uint8 int32 int64 uint64 float16 float32 float64 complex64 str_ bytes_".split()
SCALARS = [
    *[getattr(np, kind)(value) for kind in KINDS for value in (0, 1)],
    np.int64(64), np.float32(0.5), np.float64("nan"), np.uint64(2**63), np.timedelta64(5, "s"),
    np.datetime64("2026-01-01"), jnp.bfloat16(1.0), Word.FIXED, Number.TWO,
]
ARRAYS = [
    np.array(2), np.array(0.5), np.zeros(0), np.arange(2), np.array(["a"]), np.array(None), jnp.zeros(()),
]
OTHERS = [
    None, True, False, ..., NotImplemented, 1j, b"", b"work", bytearray(b"x"), range(2), Hostile(), object(),
    int, str, Strategy, len, rules.linear, lambda: 0, math, np.float32, jnp.bfloat16, np.dtype("f4"),
    decimal.Decimal("0.5"), fractions.Fraction(1, 2), fractions.Fraction(2), pathlib.Path("work"),
    datetime.timedelta(minutes=2), datetime.datetime(2026, 1, 1), PartitionSpec("fsdp"),
    Tuning(), Saving(), Statistics(), Execution(), Evaluation(), Reporting(), LIMITS, Strategy(), USUAL,
]
ROWS = [
    [], (), [1], (1, 2), [2, 1], (1, 2.0), [True, 2], (4, 8, 64), ["a"], [None], [[1]], (Strategy(),),
    [Strategy()], [("a", PartitionSpec("fsdp"))], [["a", ["fsdp", None]]], (("a", "fsdp"),), [("a",)],
    [("(", ())], [("mlp", None)], [("a", ("moon",))], [(1, ("fsdp",))], [("a", (5,))], [("a", ({},))],
    [Hostile()], {1, 2}, frozenset(), iter([1]),
]
TABLES = [
    {}, {0: 32}, {0: 32, 0.5: 64}, {0.5: 64}, {0: 7}, {"0": 32}, {0: "32"}, {0: 32.0}, {None: 1}, {0: True},
    {math.nan: 32}, {0: 32, 1: 64}, {True: 32}, {"keep": 3}, {np.float32(0): np.int64(32)}, {0: 10**400},
]
VALUES = [*WHOLE, *REAL, *TEXTS, *SCALARS, *ARRAYS, *OTHERS, *ROWS, *TABLES]
# fmt: on


# -- what fits, by hand ------------------------------------------------------------------------------


def is_whole(value) -> bool:
    is_span = isinstance(value, np.timedelta64)
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and not is_span


def is_number(value) -> bool:
    return is_whole(value) or isinstance(value, float | np.floating | fractions.Fraction)


def is_of(value, kind, name) -> bool:
    """Whether a value is of the declared type, leniently: what only looks like it is not."""
    origin, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Union or str(origin) == "<class 'types.UnionType'>":
        return any(is_of(value, part, name) for part in parts)
    if origin is typing.Literal:
        return isinstance(value, str) and value in parts
    if origin in (tuple, typing.get_origin(typing.Sequence[int])):
        if not isinstance(value, list | tuple):
            return False
        if origin is tuple and ... not in parts:
            return len(value) == len(parts) and all(map(is_of, value, parts, [name] * len(value)))
        return all(is_of(item, parts[0], name) for item in value)
    if origin is typing.get_origin(typing.Mapping[int, int]):
        pairs = value.items() if isinstance(value, dict) else [(None, None)]
        return all(is_of(k, parts[0], name) and is_of(v, parts[1], name) for k, v in pairs)
    if origin is typing.get_origin(typing.Callable[[], int]):
        return callable(value)
    if origin is PartitionSpec:
        return isinstance(value, PartitionSpec | list | tuple)
    checks = {
        bool: lambda: isinstance(value, bool | np.bool_),
        int: lambda: is_whole(value),
        float: lambda: is_number(value),
        str: lambda: isinstance(value, str) or (name in FOLDERS and isinstance(value, os.PathLike)),
        type(None): lambda: value is None,
    }
    return checks[origin]() if origin in checks else isinstance(value, origin)


def is_in_range(value, name) -> bool:
    """Whether a number, or each of several, is finite and in the range of its field."""
    if isinstance(value, list | tuple):
        return all(is_in_range(item, name) for item in value)
    if not is_number(value):
        return True
    if not (abs(value) < 2**63 if is_whole(value) else math.isfinite(value)):
        return False
    if name in DEGREES:
        return value >= 1 or value == -1
    return (value >= 0 if name in FROM_ZERO else value > 0) and (name not in SHARES or value < 1)


def shown(value) -> str:
    return (
        type(value).__name__ if isinstance(value, Hostile) else f"{type(value)} {str(value)[:40]!r}"
    )


def problem(make, name, fits) -> str:
    """What is wrong with how a value is taken; "" if nothing is."""
    try:
        made = make()
    except ValueError as error:
        text = str(error)
        return (
            ""
            if name in text.replace("base_steps=100.0, epochs", name) and len(text) > len(name) + 20
            else f"not named: {text}"
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if fits(made) else "accepted"


@pytest.mark.parametrize("cls", CLASSES)
def test_every_odd_value_of_every_field(cls):
    found, tried = [], 0
    for kind_of, name, kind in FIELDS:
        if kind_of is not cls:
            continue
        for value in VALUES:
            given = {**NEEDED.get(cls, {}), name: value}
            if name == "epochs":
                given["base_steps"] = None if value is not None else 1

            def fits(made, value=value, name=name, kind=kind):
                kept = getattr(made, name)
                # What is kept is of the declared type to the letter: NumPy's numbers have become Python's.
                plain = type(kept).__module__ != "numpy" and is_of(kept, kind, name)
                return plain and is_of(value, kind, name) and is_in_range(kept, name)

            wrong = problem(functools.partial(cls, **given), name, fits)
            tried += 1
            if wrong:
                found.append(f"{name}={shown(value)}: {wrong}")
    assert not found, "\n".join(found[:20]) + f"\n{len(found)} of {tried}"


UNBOUNDED = (math.inf, -math.inf, math.nan, np.float32("inf"), "inf", "nan", "-Infinity")


@pytest.mark.parametrize("cls", CLASSES)
def test_a_number_without_bound_is_refused_with_what_to_write_instead(cls):
    tried = 0
    for made, name, kind in FIELDS:
        if made is not cls or not any(is_of(x, kind, name) for x in (3, 0.5)):
            continue
        for value in UNBOUNDED:
            given = {**NEEDED.get(cls, {}), name: value}
            if name == "epochs":
                given.pop("base_steps")
            with pytest.raises(ValueError, match=name) as refused:
                cls(**given)
            said = str(refused.value)
            advice = said.partition("; got ")[2].partition(". ")[2]
            assert len(advice) > 15, said
            instead = [int(float(x)) for x in re.findall(r"write ([\d.e]*\d)", advice)]
            for number in [*instead, *[None] * ("None" in advice)]:
                assert getattr(cls(**{**given, name: number}), name) == number, said
            tried += 1
    assert tried or not any(made is cls and is_of(3, kind, name) for made, name, kind in FIELDS)


def test_the_values_are_ten_thousand():
    assert len(FIELDS) * len(VALUES) >= 10_000


def test_right_values_are_taken():
    for cls, name, kind in FIELDS:
        taken = [v for v in VALUES if not isinstance(v, Hostile) and is_of(v, kind, name)]
        made = 0
        for value in taken:
            values = {**NEEDED.get(cls, {}), name: value}
            if name == "epochs" and value is not None:
                values["base_steps"] = None
            with contextlib.suppress(ValueError):  # out of range, or not together with others
                cls(**values)
                made += 1
        assert made, f"{cls.__name__}.{name} takes none of {taken}"


# fmt: off
JSON = [
    *WHOLE[1:-1], *[x for x in REAL if math.isfinite(x)], *TEXTS, None, True, False,
    [], [1], [1, 2], [2, 1], [4, 8, 64], [True, 2], [[1]], {}, {"0": 32}, {"0": 7}, {"x": 1}, {"keep": 3},
    {"min_gain": "x"}, {"every_s": -1}, [{"fsdp": 8}], [{"fsdp": 0}], [{"rules": [["a", ["fsdp"]]]}],
    [{"": 0}],
]
GROUPS = {
    "": Config, "batch.": BatchLimits, "tuning.": Tuning, "statistics.": Statistics, "saving.": Saving,
    "execution.": Execution, "evaluation.": Evaluation, "reporting.": Reporting,
}
NAMES = [f"{group}{name}" for group, cls in GROUPS.items() for made, name, _ in FIELDS if made is cls]
# fmt: on


def override_problem(name: str, text: str) -> str:
    last = name.rpartition(".")[2]
    make = functools.partial(with_overrides, USUAL, [f"{name}={text}"])
    return problem(make, last, lambda made: isinstance(made, Config))


TEXTS_OF_OVERRIDES = [*TEXTS, *map(json.dumps, JSON), "[" * 100_000, '{"a":' * 2000, "[1,", "NaN"]
OVERRIDES = list(itertools.product(NAMES, TEXTS_OF_OVERRIDES))


@pytest.mark.parametrize(
    "share", [30, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.nightly])]
)
def test_every_odd_override(share):
    cases = OVERRIDES[::share]
    found = [f"{n}={t[:40]!r}: {w}" for n, t in cases if (w := override_problem(n, t))]
    assert not found, "\n".join(found[:20]) + f"\n{len(found)} of {len(cases)}"


@settings(max_examples=300)
@given(
    name=st.sampled_from(NAMES), text=st.text(max_size=20) | st.from_regex(r"[-\[{\"0-9.emh%]{1,9}")
)
def test_any_override(name, text):
    assert override_problem(name, text) == ""


@settings(max_examples=300)
@given(name=st.text(max_size=20))
def test_a_name_that_does_not_exist_is_named(name):
    if name not in NAMES and "=" not in name:
        with pytest.raises(ValueError, match="there is no setting"):
            with_overrides(USUAL, [f"{name}=1"])


@pytest.mark.parametrize("overrides", ["seed=1", ["seed"], [""]])
def test_what_is_no_list_of_overrides_is_refused(overrides):
    with pytest.raises(ValueError, match="override"):
        with_overrides(USUAL, overrides)
