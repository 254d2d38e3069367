"""Dataclasses whose fields are checked by their annotations, before the object is made.

`@typed` checks every value that is given to a field: its type, that a number is finite and fits into 64 bits,
and the notes of `Annotated` (ranges, conversions, remedies). The error names the field, the value, what is
allowed and, if it can be told, what was probably meant. A whole number is accepted for a float, and a scalar
of NumPy for a number of its kind; a bool is not a number.
"""

import collections.abc
import dataclasses
import datetime
import difflib
import functools
import inspect
import math
import numbers
import os
import re
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

T = TypeVar("T")

_NO = object()  # a value does not fit
_LARGEST = 2**63 - 1

_short = reprlib.Repr()  # for errors: a value may be long and deeply nested
_short.maxstring = _short.maxother = _short.maxlong = 60


class FieldNote:
    """What an annotation says of a field beside its type."""


@dataclass(frozen=True)
class Range(FieldNote):
    """The numbers that a field takes."""

    words: str
    """The range in an error, such as "above 0"."""
    above: int | float = -math.inf
    least: int | float = -math.inf
    below: int | float = math.inf

    def __contains__(self, value: int | float) -> bool:
        return value > self.above and value >= self.least and value < self.below


@dataclass(frozen=True)
class Conversion(FieldNote):
    """Values of other classes that say the same, and the function that converts them."""

    classes: tuple[type, ...]
    function: Callable[[Any], Any]


@dataclass(frozen=True)
class Remedy(FieldNote):
    """The end of an error about a field: what to write instead."""

    text: str


@dataclass(frozen=True)
class Endless(FieldNote):
    """The end of an error about an infinite number: what has no limit instead."""

    text: str


PRACTICALLY = Endless("For practically no limit write 1000000000.")
_YEARS = Endless("For practically no limit write 1e9, about 32 years.")

Positive = Annotated[float, Range("above 0", above=0)]
NotNegative = Annotated[float, Range("of at least 0", least=0)]
Seconds = Annotated[float, Range("of seconds, above 0", above=0), _YEARS]
Share = Annotated[float, Range("from 0 to below 1 (a share)", least=0, below=1)]
InnerShare = Annotated[float, Range("between 0 and 1 (a share)", above=0, below=1)]
Count = Annotated[int, Range("of at least 1", least=1)]
CountOrZero = Annotated[int, Range("of at least 0", least=0)]
Folder = Annotated[str, Conversion((os.PathLike,), os.fspath)]


def typed(cls: type[T]) -> type[T]:
    """Have a keyword-only dataclass check its fields by their annotations, before its own `__post_init__`.

    Making it raises ValueError for a value that does not fit, and TypeError for a field that does not exist.
    """
    make: Callable[..., None] = cls.__init__
    name = cls.__name__

    # It has no annotations, so that a checker of all functions, as in tests, leaves the checks to the door.
    def init(self, *args, **values):
        if args:
            raise TypeError(
                f"{name} takes its settings by name; got {shortened(args[0])}. Write "
                f"{name}({next(iter(annotations(cls)))}=...)."
            )
        kinds = annotations(cls)
        for field in sorted(values.keys() - kinds.keys()):
            raise TypeError(f"{name} has no field {field!r}{meant(field, field_names(cls))}")
        make(self, **{k: fit(v, kinds[k], f"{name}.{k}") for k, v in values.items()})

    signature = inspect.signature(make)
    plain = typing.get_type_hints(cls)
    parameters = [
        p.replace(annotation=plain[p.name])
        for p in signature.parameters.values()
        if p.name in plain
    ]
    setattr(cls, "__signature__", signature.replace(parameters=parameters))  # noqa: B010
    setattr(cls, "__init__", init)  # noqa: B010
    return cls


@functools.cache
def annotations(cls: type) -> dict[str, Any]:
    """Return the annotation of each field of a dataclass, with its notes."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


@functools.cache
def field_names(cls: type) -> tuple[str, ...]:
    """Return the names of all fields of a dataclass, with a dot for fields of the dataclasses in it."""
    found: list[str] = []
    for name, kind in annotations(cls).items():
        found.append(name)
        inner = typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind
        if dataclasses.is_dataclass(inner) and isinstance(inner, type):
            found += (f"{name}.{field}" for field in field_names(inner))
    return tuple(found)


def meant(name: str, known: Sequence[str]) -> str:
    """Return the end of an error about an unknown field: the names that may have been meant."""
    last = name.rpartition(".")[-1]
    close = [k for k in known if k.rpartition(".")[-1] == last]
    close = close or difflib.get_close_matches(name, known, n=3)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f". There are {', '.join(known)}."


def fit(value: Any, kind: Any, where: str) -> Any:
    """Return `value` as the type that an annotation asks for; `where` names the field in the error.

    Raises ValueError if it is of another type, out of range or not finite.

    >>> fit(6, Positive, "Config.base_steps")
    6.0
    >>> fit("10m", Seconds, "Tuning.every_s")
    Traceback (most recent call last):
    ValueError: Tuning.every_s must be a number of seconds, above 0; got '10m'. Write 600.
    """
    found = _fitted(value, kind)
    if found is _NO:
        raise ValueError(refusal(value, kind, where))
    return found


def refusal(value: Any, kind: Any, where: str) -> str:
    """Return the error for a value that does not fit."""
    remedy = _remedy(value, kind, where)
    return f"{where} must be {describe(kind)}; got {shortened(value)}." + (remedy and f" {remedy}")


def describe(kind: Any) -> str:
    """Return in words which values an annotation allows.

    >>> describe(Count | None), describe(Literal["min", "max"]), describe(tuple[int, int])
    ('a whole number of at least 1, or None', '"min" or "max"', 'a tuple (a whole number, a whole number)')
    """
    origin, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
    if (words := _KINDS.get(origin)) is None:
        return f"of type {getattr(origin, '__name__', origin)}"
    return words.describe(*parts)


@dataclass(frozen=True)
class FieldKind:
    """A kind of annotation: its words in errors, and which values fit; both take its parts."""

    describe: Callable[..., str]
    fitted: Callable[..., Any]


def _fitted(value: Any, annotation: Any) -> Any:
    """Return the value as the type that an annotation asks for, or `_NO`."""
    origin, parts = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if (kind := _KINDS.get(origin)) is not None:
        return kind.fitted(value, *parts)
    return value if isinstance(value, origin) else _NO


def _noted(value: Any, kind: Any, *notes: Any) -> Any:
    for note in notes:
        if isinstance(note, Conversion) and isinstance(value, note.classes):
            try:
                value = note.function(value)
            except (TypeError, ValueError):
                return _NO
    found = _fitted(value, kind)
    ranges = [note for note in notes if isinstance(note, Range)]
    return found if found is not _NO and all(found in allowed for allowed in ranges) else _NO


def _noted_in_words(kind: Any, *notes: Any) -> str:
    return " ".join([describe(kind), *(note.words for note in notes if isinstance(note, Range))])


def _any_of(value: Any, *kinds: Any) -> Any:
    return next((found for kind in kinds if (found := _fitted(value, kind)) is not _NO), _NO)


def _any_of_in_words(*kinds: Any) -> str:
    numbers_once = [kind for kind in kinds if not (kind is int and float in kinds)]
    *firsts, last = map(describe, sorted(numbers_once, key=lambda kind: kind is type(None)))
    return f"{', '.join(firsts)}{',' if last == 'None' else ''} or {last}" if firsts else last


def _one_of(value: Any, *choices: Any) -> Any:
    plain = str.__str__(value) if isinstance(value, str) else value  # enums and NumPy's strings
    return next((x for x in choices if type(plain) is type(x) and plain == x), _NO)


def _one_of_in_words(*choices: Any) -> str:
    return " or ".join(f'"{x}"' if isinstance(x, str) else repr(x) for x in choices)


def _tuple(value: Any, *kinds: Any) -> Any:
    """Return a list or tuple as a tuple, if its items fit."""
    if isinstance(value, range) or (getattr(value, "ndim", 0) == 1 and len(value)):
        value = list(value)
    if not isinstance(value, list | tuple):
        return _NO
    wanted = [kinds[0]] * len(value) if kinds[-1] is Ellipsis else kinds
    if len(value) != len(wanted):
        return _NO
    items = tuple(map(_fitted, value, wanted))
    return _NO if any(item is _NO for item in items) else items


def _tuple_in_words(*kinds: Any) -> str:
    if kinds[-1] is Ellipsis:
        return f"a tuple, each item {describe(kinds[0])}"
    return f"a tuple ({', '.join(map(describe, kinds))})"


def _mapping(value: Any, key: Any, item: Any) -> Any:
    if not isinstance(value, Mapping):
        return _NO
    found = {_fitted(k, key): _fitted(x, item) for k, x in value.items()}
    return _NO if any(x is _NO for pair in found.items() for x in pair) else found


def _bool(value: Any) -> Any:
    is_numpys = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    return bool(value) if isinstance(value, bool) or is_numpys else _NO


def _int(value: Any) -> Any:
    # NumPy counts its time spans among the integers.
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or _is_span(value):
        return _NO
    return int(value) if abs(int(value)) <= _LARGEST else _NO


def _float(value: Any) -> Any:
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or _is_span(value):
        return _NO
    try:
        found = float(value)
    except OverflowError:
        return _NO
    return found if math.isfinite(found) else _NO


def _is_span(value: Any) -> bool:
    return type(value).__name__ == "timedelta64"


def _str(value: Any) -> Any:
    # Of a subclass, such as an enumeration of strings, only the text is kept.
    return str.__str__(value) if isinstance(value, str) else _NO


def _function(value: Any, *_: Any) -> Any:
    return value if callable(value) else _NO


def _sequence(value: Any, kind: Any) -> Any:
    return _tuple(value, kind, ...)


_union = FieldKind(_any_of_in_words, _any_of)
_KINDS: Mapping[Any, FieldKind] = {
    Any: FieldKind(lambda: "anything", lambda value: value),
    type(None): FieldKind(lambda: "None", lambda value: value if value is None else _NO),
    bool: FieldKind(lambda: "True or False", _bool),
    int: FieldKind(lambda: "a whole number", _int),
    float: FieldKind(lambda: "a number", _float),
    str: FieldKind(lambda: "a string", _str),
    Annotated: FieldKind(_noted_in_words, _noted),
    typing.Union: _union,
    types.UnionType: _union,
    Literal: FieldKind(_one_of_in_words, _one_of),
    tuple: FieldKind(_tuple_in_words, _tuple),
    collections.abc.Sequence: FieldKind(lambda kind: _tuple_in_words(kind, ...), _sequence),
    collections.abc.Mapping: FieldKind(
        lambda key, item: f"a mapping from {describe(key)} to {describe(item)}", _mapping
    ),
    collections.abc.Callable: FieldKind(lambda *_: "a function", _function),
}


def shortened(value: Any) -> str:
    """Return the `repr` of a value for an error, without its middle if it is long."""
    try:
        return _short.repr(value)
    except Exception as error:  # the value's own
        return f"a {type(value).__name__} (whose repr raises {type(error).__name__})"


def path_in_words(path: Any) -> str:
    """Return a path for an error: whole, because it is there to be copied, unless none can be so long."""
    text = repr(str(path))
    return text if len(text) <= 4096 else shortened(str(path))  # the longest that Linux takes


# -- what was meant ------------------------------------------------------------------------------------

_SECONDS = {"ms": 1e-3, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_BYTES = {f"{letter}{unit}": base**power for power, letter in enumerate("kmgt", start=1)
          for unit, base in (("", 2**10), ("ib", 2**10), ("b", 10**3))} | {"b": 1}  # fmt: skip


def _remedy(value: Any, kind: Any, where: str) -> str:
    """Return a sentence on what to write instead; "" if nothing better is known than what is allowed."""
    leaves, notes = _leaves(kind)
    guess = _guess(value, where)
    if guess is not _NO and guess is not value and _fitted(guess, kind) is not _NO:
        return f"Write {shortened(guess)}."
    if (choice := _nearest(value, leaves)) is not None:
        return f'Did you mean "{choice}"?'
    number = _unbounded(value) if {int, float} & set(leaves) else 0.0
    if number == math.inf and (endless := [x.text for x in notes if isinstance(x, Endless)]):
        return endless[0]
    if math.isnan(number):
        return "NaN is no number: look at what it was computed from."
    written = [note.text for note in notes if isinstance(note, Remedy)]
    if isinstance(value, bool) and {int, float} & set(leaves):
        written.append("A bool is not a number.")
    if math.isinf(number):
        written.append("Write a finite number.")
    return next(iter(written), "")


def _unbounded(value: Any) -> float:
    """Return the infinite number or NaN that a value, or a text, stands for; 0 for any other value."""
    if isinstance(value, bool) or not isinstance(value, str | numbers.Real) or _is_span(value):
        return 0.0
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return 0.0
    return 0.0 if math.isfinite(number) else number


def _nearest(value: Any, leaves: Sequence[Any]) -> str | None:
    choices = [choice for leaf in leaves for choice in typing.get_args(leaf)]
    texts = [choice for choice in choices if isinstance(choice, str)]
    close = difflib.get_close_matches(value, texts, n=1) if isinstance(value, str) else []
    return next(iter(close), None)


def _leaves(kind: Any) -> tuple[list[Any], list[Any]]:
    """Return the types that an annotation consists of, and its notes."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        leaves, notes = _leaves(parts[0])
        return leaves, [*parts[1:], *notes]
    if origin in (typing.Union, types.UnionType):
        pairs = [_leaves(part) for part in parts]
        return [x for leaves, _ in pairs for x in leaves], [x for _, notes in pairs for x in notes]
    return [kind], []


def _guess(value: Any, where: str) -> Any:
    """Return what was probably meant by a value of another type; `_NO` if nothing comes to mind."""
    if isinstance(value, str):
        return _of_text(value.strip(), where)
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, type):
        return value.__name__
    if dataclasses.is_dataclass(value):
        return (value,)
    return _of_number(value)


def _of_number(value: Any) -> Any:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # an array of one number
        return value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return _NO
    if isinstance(value, float) and value.is_integer() and _int(int(value)) is not _NO:
        return int(value)
    return bool(value) if value in (0, 1) else _NO


def _of_text(text: str, where: str) -> Any:
    """Return the value that a text stands for: a number, a time, bytes, a share, a bool or None."""
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    words |= {"none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    found = number_in(text, where)
    return _NO if found is None else found


def number_in(text: str, where: str) -> float | int | None:
    """Return the number that a text stands for, in the unit of the field `where`; None if there is none.

    >>> number_in("10m", "grace_s"), number_in("1,000", "steps"), number_in("5%", "share")
    (600, 1000, 0.05)
    """
    found = re.fullmatch(r"([-+]?[\d_,]*\.?\d+(?:e[-+]?\d+)?)\s*([a-z%]*)", text.lower())
    if not found or len(text) > 30:
        return None
    number, unit = float(re.sub("[_,]", "", found[1])), found[2]
    scales = {"": 1.0, "%": 0.01}
    scales |= _SECONDS if where.endswith("_s") else _BYTES if where.endswith("_bytes") else {}
    if unit not in scales or not math.isfinite(number * scales[unit]):
        return None
    scaled = number * scales[unit]
    return int(scaled) if scaled.is_integer() else scaled
