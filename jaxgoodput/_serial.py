"""Dataclasses as JSON and back, strictly: what does not fit the type of its field is an error that names it.

Out: dataclasses become objects, arrays and whatever can be iterated lists, functions and classes their
names, NaN and infinities null. In: the types of the fields decide; where one is a float, null is NaN.
"""

import collections.abc
import dataclasses
import enum
import functools
import itertools
import json
import math
import reprlib
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

T = TypeVar("T")

_short = reprlib.Repr()  # of values that a user wrote: neither long nor deep
_short.maxstring = _short.maxother = _short.maxlong = 60


def encode(value: Any) -> Any:
    """The value as JSON holds it; what JSON lacks and this file does not know becomes its `str`.

    >>> encode({"a": float("nan"), "b": (1, 2.5)})
    {'a': None, 'b': [1, 2.5]}
    """
    if isinstance(value, enum.Enum):
        return encode(value.value)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # arrays and their scalars, of NumPy and JAX
        return encode(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if callable(value):
        return getattr(value, "__qualname__", None) or type(value).__qualname__
    return [encode(item) for item in value] if isinstance(value, Iterable) else str(value)


def decode(value: Any, type_: Any, where: str) -> Any:
    """What `encode` made of a value of type `type_`; `where` is the path to it, for errors.

    Fields that have defaults may be missing; fields that are not known are errors, so that a misspelt limit
    is not ignored, unless the type's class variable `is_part` says that it knows a part of them only.

    >>> decode([1, None], tuple[float, ...], "loads")
    (1.0, nan)
    """
    kind, parts = typing.get_origin(type_) or type_, typing.get_args(type_)
    if kind is Any or (value is None and type_ in (None, types.NoneType)):
        return value
    if dataclasses.is_dataclass(kind):
        return _decode_fields(value, kind, where)
    if kind in (types.UnionType, typing.Union):
        return _decode_union(value, parts, where)
    if kind is Literal:
        if value not in parts:
            raise ValueError(f"{where} is {_short.repr(value)}; it must be one of {list(parts)}")
        return value
    if kind in (tuple, list, collections.abc.Sequence):
        fixed = kind is tuple and parts[-1] is not Ellipsis
        if not isinstance(value, list) or (fixed and len(value) != len(parts)):
            length = f" of {len(parts)}" if fixed else ""
            raise ValueError(f"{where} is {_short.repr(value)}; it must be a list{length}")
        kinds = parts if fixed else itertools.repeat(parts[0])
        pairs = enumerate(zip(value, kinds, strict=False))
        made = [decode(item, part, f"{where}[{i}]") for i, (item, part) in pairs]
        return made if kind is list else tuple(made)
    if kind in (dict, collections.abc.Mapping):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {_short.repr(value)}; it must be an object")
        made = {key: decode(item, parts[1], f"{where}[{key!r}]") for key, item in value.items()}
        if parts[0] is str:  # as keys are in JSON
            return made
        try:
            return {float(key): item for key, item in made.items()}
        except ValueError:
            raise ValueError(f"{where} has the keys {list(made)}; they must be numbers") from None
    if kind is float and (value is None or type(value) is int):
        return math.nan if value is None else float(value)
    if isinstance(value, list) and kind.__module__ != "builtins":
        return kind(*value)  # it was iterated over, such as a PartitionSpec
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(
            f"{where} is {_short.repr(value)}; it must be of type {getattr(kind, '__name__', kind)}"
        )
    return value


def pack(value: Any) -> dict[str, Any]:
    """A dataclass as JSON, with the version and the name of its type."""
    return {"version": _version(type(value)), "type": type(value).__name__} | encode(value)


def unpack(body: Any, type_: type[T]) -> T:
    """What `pack` wrote; a ValueError names the field where `body` is not that."""
    if not isinstance(body, dict):
        raise ValueError(f"expected a JSON object of a {type_.__name__}, got {_short.repr(body)}")
    fields = dict(body)
    version, name = fields.pop("version", None), fields.pop("type", type_.__name__)
    if name != type_.__name__:
        raise ValueError(f"expected a {type_.__name__}, got a {name}")
    if version != _version(type_):
        raise ValueError(
            f"this {name} has version {version!r}, this program reads version {_version(type_)}. "
            "Write it again with the program that reads it."
        )
    return decode(fields, type_, type_.__name__)


def dumps(value: Any, *, indent: int | None = None) -> str:
    """`pack` as text: what goes to a file or over a wire.

    >>> from jaxgoodput.specs import Shape
    >>> dumps(Shape("h200", 1, 4))
    '{"version": 1, "type": "Shape", "kind": "h200", "num_nodes": 1, "num_devices": 4}'
    """
    return json.dumps(pack(value), indent=indent, allow_nan=False)


def loads(text: str, type_: type[T]) -> T:
    """What `dumps` wrote; a ValueError names the field where the text is not that."""
    return unpack(parse(text), type_)


def parse(text: str | bytes, *, largest: float = sys.float_info.max) -> Any:
    """JSON of unknown origin; a ValueError says where it is none, or why it cannot be read.

    NaN and numbers beyond `largest` are refused.
    """

    def number(digits: str) -> float:
        value = float(digits)
        if not abs(value) <= largest:
            raise ValueError(
                f"this is JSON with the number {digits:.20}, which is none up to {largest}"
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
            "this is JSON whose lists and objects lie too deep in each other"
        ) from None


_hints = functools.cache(typing.get_type_hints)


def _version(type_: type) -> int:
    """Of the type's JSON form: its class variable `version`, where it ever changed."""
    return getattr(type_, "version", 1)


def _decode_union(value: Any, parts: Sequence[Any], where: str) -> Any:
    """`value` as the first of the types that it fits; null is None where that is one of them."""
    if value is None and types.NoneType in parts:
        return None
    errors = []
    for part in parts:
        if part is not types.NoneType:
            try:
                return decode(value, part, where)
            except ValueError as error:
                errors.append(error)
    raise ValueError("; or ".join(map(str, errors)))


def _decode_fields(value: Any, type_: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_short.repr(value)}; it must be an object")
    hints = _hints(type_)
    fields = {f.name: f for f in dataclasses.fields(type_)}
    if getattr(type_, "is_part", False):
        value = {name: value[name] for name in fields.keys() & value.keys()}
    if unknown := sorted(value.keys() - fields.keys()):
        raise ValueError(f"{where} has no field {unknown[0]!r}; its fields are {sorted(fields)}")
    needed = {
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    if missing := sorted(needed - value.keys()):
        raise ValueError(f"{where} lacks the field {missing[0]!r}")
    decoded = {k: decode(v, hints[k], f"{where}.{k}") for k, v in value.items()}
    try:
        return type_(**decoded)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
