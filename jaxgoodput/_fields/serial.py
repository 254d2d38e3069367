"""Dataclasses as JSON and back.

Writing: dataclasses become objects, arrays and other iterables lists, functions and classes their names, NaN
and infinities null. Reading: the types of the fields decide; if a field is a float, null is NaN. A value that
does not fit the type of its field is an error that names it.
"""

import collections.abc
import contextlib
import dataclasses
import enum
import functools
import itertools
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from jaxgoodput._fields.typed import FieldNote, describe, shortened

T = TypeVar("T")
_AS_THEY_ARE = frozenset((str, bool, int, type(None)))


def encode(value: Any) -> Any:
    """Return the value as JSON types; the `str` of a value of any other type.

    >>> encode({"a": float("nan"), "b": (1, 2.5)})
    {'a': None, 'b': [1, 2.5]}
    """
    kind = type(value)
    if kind in _AS_THEY_ARE:  # most values
        return value
    if kind is float:
        return value if math.isfinite(value) else None
    if kind is tuple or kind is list:
        return [encode(item) for item in value]
    if isinstance(value, enum.Enum):
        return encode(value.value)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # arrays and scalars of NumPy and JAX
        return encode(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: encode(getattr(value, name)) for name in field_names(kind)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if callable(value):
        return getattr(value, "__qualname__", None) or type(value).__qualname__
    return [encode(item) for item in value] if isinstance(value, Iterable) else str(value)


def decode(value: Any, type_: Any, where: str) -> Any:
    """Return the value of type `type_` that `encode` wrote; `where` names it in errors.

    Fields with defaults may be missing. Unknown fields are errors, so that a misspelt limit is not ignored,
    unless the type's class variable `is_part` says that it declares only some of the fields.
    `Annotated[T, S]`, for a field that holds arrays as well, is read as S; with a `FieldNote` for S, as T.

    >>> decode([1, None], tuple[float, ...], "loads")
    (1.0, nan)
    """
    if type(value) is type_:  # most values are numbers and strings
        return value
    kind, parts, is_dataclass = _taken_apart(type_)
    if kind is Any or (value is None and type_ in (None, types.NoneType)):
        return value
    if is_dataclass:
        return _decode_fields(value, kind, where)
    if (decode_kind := _DECODERS.get(kind)) is not None:
        return decode_kind(value, kind, parts, where)
    if kind is float and (value is None or type(value) is int):
        return math.nan if value is None else float(value)
    if isinstance(value, list) and kind.__module__ != "builtins":
        with contextlib.suppress(
            TypeError
        ):  # `kind` may be a function's type, or take other arguments
            return kind(*value)  # `encode` iterated over it, as over a PartitionSpec
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{where} is {shortened(value)}; it must be {describe(kind)}")
    return value


def pack(value: Any) -> dict[str, Any]:
    """Return a dataclass as JSON types, with the version and the name of its class."""
    return {"version": _version(type(value)), "type": type(value).__name__} | encode(value)


def unpack(body: Any, type_: type[T]) -> T:
    """Return the dataclass that `pack` wrote. Raises ValueError, which names the field that is wrong."""
    if not isinstance(body, dict):
        raise ValueError(
            f"expected a JSON object with the fields of a {type_.__name__}, got {shortened(body)}"
        )
    fields = dict(body)
    version, name = fields.pop("version", None), fields.pop("type", type_.__name__)
    if name != type_.__name__:
        raise ValueError(
            f"expected a {type_.__name__}, got a {name}: this is another kind of file or message"
        )
    if version != _version(type_):
        raise ValueError(
            f"this {name} has version {version!r}, this program reads version {_version(type_)}. "
            "Write it again with the version of the program that reads it."
        )
    return decode(fields, type_, type_.__name__)


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Return a dataclass as JSON text, for a file or a connection.

    >>> from jaxgoodput.specs import Shape
    >>> dumps(Shape("h200", 1, 4))
    '{"version": 1, "type": "Shape", "kind": "h200", "num_nodes": 1, "num_devices": 4}'
    """
    return json.dumps(pack(value), indent=indent, allow_nan=False)


def loads(text: str, type_: type[T]) -> T:
    """Return the dataclass that `dumps` wrote. Raises ValueError, which names the field that is wrong."""
    return unpack(parse(text), type_)


def parse(text: str | bytes, *, largest: float = sys.float_info.max) -> Any:
    """Parse JSON of unknown origin. Raises ValueError, which says what is wrong and where.

    NaN and numbers beyond `largest` are refused.
    """

    def number(digits: str) -> float:
        value = float(digits)
        if not abs(value) <= largest:
            raise ValueError(
                f"this is JSON with the number {digits:.20}, but numbers must be finite and at most "
                f"{largest}"
            )
        return value

    def whole(digits: str) -> int:
        number(digits)
        return int(digits)

    try:
        return json.loads(text, parse_int=whole, parse_float=number, parse_constant=number)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"this is not JSON: {error.msg} at {place}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"this is not UTF-8 text: {error.reason}, byte {error.start}") from error
    except RecursionError:
        raise ValueError(
            "this is JSON whose lists and objects are nested too deeply to read"
        ) from None


def _version(type_: type) -> int:
    """Return the version of a type's JSON form: its class variable `version`, or 1."""
    return getattr(type_, "version", 1)


def _decode_annotated(value: Any, kind: Any, parts: Sequence[Any], where: str) -> Any:
    return decode(value, parts[0] if isinstance(parts[1], FieldNote) else parts[1], where)


def _decode_literal(value: Any, kind: Any, parts: Sequence[Any], where: str) -> Any:
    if value not in parts:
        raise ValueError(f"{where} is {shortened(value)}; it must be one of {list(parts)}")
    return value


def _decode_union(value: Any, kind: Any, parts: Sequence[Any], where: str) -> Any:
    """Return `value` as the first of the types that it fits; null is None if None is one of them."""
    if value is None and types.NoneType in parts:
        return None
    # The types must differ in their JSON: the first that fits is taken.
    errors = []
    for part in parts:
        if part is not types.NoneType:
            try:
                return decode(value, part, where)
            except ValueError as error:
                errors.append(error)
    raise ValueError("; or ".join(map(str, errors)))


def _decode_sequence(value: Any, kind: Any, parts: Sequence[Any], where: str) -> Any:
    fixed = kind is tuple and parts[-1] is not Ellipsis
    if not isinstance(value, list) or (fixed and len(value) != len(parts)):
        length = f" of {len(parts)}" if fixed else ""
        raise ValueError(f"{where} is {shortened(value)}; it must be a list{length}")
    if not fixed and all(type(item) is parts[0] for item in value):
        return list(value) if kind is list else tuple(value)
    kinds = parts if fixed else itertools.repeat(parts[0])
    pairs = enumerate(zip(value, kinds, strict=False))
    items = [decode(item, part, f"{where}[{i}]") for i, (item, part) in pairs]
    return items if kind is list else tuple(items)


def _decode_mapping(value: Any, kind: Any, parts: Sequence[Any], where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {shortened(value)}; it must be an object")
    items = {key: decode(item, parts[1], f"{where}[{key!r}]") for key, item in value.items()}
    if parts[0] is str:  # keys are strings in JSON
        return items
    try:
        number = int if parts[0] is int else float
        return {number(key): item for key, item in items.items()}
    except ValueError:
        raise ValueError(f"{where} has the keys {list(items)}; they must be numbers") from None


_DECODERS: Mapping[Any, Callable[[Any, Any, Sequence[Any], str], Any]] = {
    Annotated: _decode_annotated,
    Literal: _decode_literal,
    types.UnionType: _decode_union,
    typing.Union: _decode_union,
    tuple: _decode_sequence,
    list: _decode_sequence,
    collections.abc.Sequence: _decode_sequence,
    dict: _decode_mapping,
    collections.abc.Mapping: _decode_mapping,
}


@functools.cache
def _taken_apart(type_: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Return a type without its arguments, its arguments, and whether it is a dataclass."""
    kind = typing.get_origin(type_) or type_
    return kind, typing.get_args(type_), dataclasses.is_dataclass(kind)


@functools.cache
def field_names(type_: Any) -> tuple[str, ...]:
    """Return the names of a dataclass's fields, faster than `dataclasses.fields` from the second time on."""
    return tuple(field.name for field in dataclasses.fields(type_))


@functools.cache
def _fields(type_: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of a dataclass's fields by name, and the names of the fields without a default."""
    hints = typing.get_type_hints(type_, include_extras=True)
    fields = dataclasses.fields(type_)
    needed = (
        f.name
        for f in fields
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    return {f.name: hints[f.name] for f in fields}, frozenset(needed)


def _decode_fields(value: Any, type_: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {shortened(value)}; it must be an object")
    kinds, needed = _fields(type_)
    if getattr(type_, "is_part", False):
        value = {name: value[name] for name in kinds.keys() & value.keys()}
    if unknown := sorted(value.keys() - kinds.keys()):
        raise ValueError(f"{where} has no field {unknown[0]!r}; its fields are {sorted(kinds)}")
    if missing := sorted(needed - value.keys()):
        raise ValueError(f"{where} lacks the field {missing[0]!r}, which has no default")
    # Names of what is right are not put together: it would take half of the time.
    decoded = {
        k: v if type(v) is kinds[k] else decode(v, kinds[k], f"{where}.{k}")
        for k, v in value.items()
    }
    try:
        return type_(**decoded)
    except ValueError as error:
        raise ValueError(f"{where} is not valid: {error}") from error
