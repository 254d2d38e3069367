"""What jobs, devices and allocations are, on the wire and in memory: frozen, JSON both ways, no devices.

A *kind* is a type of device ("h200"). A *shape* says how many devices of one kind a job gets and over how
many nodes; an *allocation* says which ones.
"""

import collections.abc
import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

VERSION = 1  # of the JSON form
T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Shape:
    """So many devices of one kind over so many nodes."""

    kind: str
    num_nodes: int
    num_devices: int

    def __post_init__(self):
        if not 1 <= self.num_nodes <= self.num_devices:
            raise ValueError(
                f"a shape needs at least one node and one device on each, but got {self.num_devices}"
                " devices of"
                f" kind {self.kind!r} on {self.num_nodes} nodes. A job without devices has no shape."
            )


@dataclass(frozen=True, kw_only=True)
class Node:
    """A host and its devices, local indices 0 ... num_devices - 1.

    `labels` name the topology domain at each level, such as {"rack": "r3", "pod": "p1"}. A node that is
    draining keeps what runs on it and gets nothing new; one that is down has nothing. `withheld` are local
    indices that are given to nobody: broken, or spoken for.
    """

    name: str
    kind: str
    num_devices: int
    state: Literal["up", "draining", "down"] = "up"
    labels: Mapping[str, str] = field(default_factory=dict)
    withheld: tuple[int, ...] = ()

    def __post_init__(self):
        if self.num_devices < 0:
            raise ValueError(
                f"node {self.name!r} has num_devices={self.num_devices}; it must be 0 or more"
            )
        if self.withheld:
            wrong = [i for i in self.withheld if not 0 <= i < self.num_devices]
            if wrong or len(set(self.withheld)) < len(self.withheld):
                raise ValueError(
                    f"node {self.name!r} withholds devices {list(self.withheld)}; these must be different"
                    " local"
                    f" indices from 0 to {self.num_devices - 1}"
                )

    @property
    def num_usable(self) -> int:
        """Devices that are not withheld, whatever the node's state."""
        return self.num_devices - len(self.withheld)


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """Devices kept free of all but one tenant (None: of everybody, such as for maintenance) for a while."""

    node: str
    num_devices: int
    start_s: float
    end_s: float
    tenant: str | None = None

    def __post_init__(self):
        if self.num_devices < 0:
            raise ValueError(
                f"a reservation on node {self.node!r} has num_devices={self.num_devices}; it must be 0 or"
                " more"
            )
        if not self.start_s < self.end_s:
            raise ValueError(
                f"a reservation on node {self.node!r} runs from {self.start_s} s to {self.end_s} s; it"
                " must end"
                " after it starts"
            )


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The nodes, what is reserved on them, and what devices cost."""

    nodes: tuple[Node, ...]
    reservations: tuple[Reservation, ...] = ()
    price_per_hour: Mapping[str, float] = field(default_factory=dict)  # by kind, per device
    quota: Mapping[str, int] = field(default_factory=dict)  # devices by tenant; absent = no limit

    def __post_init__(self):
        if not self.nodes:
            raise ValueError(
                "a cluster needs at least one node, but got none. Nodes that are out of service stay in"
                " the list"
                " with state='down'."
            )
        if len({node.name for node in self.nodes}) < len(self.nodes):
            names = [node.name for node in self.nodes]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(
                f"nodes {twice} occur more than once; a node is known by its name, so names must differ"
            )
        sizes = {node.name: node.num_devices for node in self.nodes}
        for reservation in self.reservations:
            if reservation.num_devices > sizes.get(reservation.node, -1):
                raise ValueError(
                    f"{reservation.num_devices} devices are reserved on node {reservation.node!r}, which"
                    + (
                        f" has {sizes[reservation.node]}"
                        if reservation.node in sizes
                        else f" is not one of the cluster's nodes, {sorted(sizes)[:5]} ..."
                    )
                )
        for tenant, limit in self.quota.items():
            if limit < 0:
                raise ValueError(
                    f"tenant {tenant!r} has a quota of {limit} devices; it must be 0 or more"
                )
        for kind, price in self.price_per_hour.items():
            if not (math.isfinite(price) and price >= 0):
                raise ValueError(
                    f"kind {kind!r} costs {price} per hour; a price is a finite number, 0 or more"
                )


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What a user asks for.

    `mode`: "adaptive" jobs may change size and batch, "elastic" ones keep their global batch, "rigid"
    ones run on exactly `num_devices`.
    """

    id: str
    mode: Literal["adaptive", "elastic", "rigid"] = "adaptive"
    min_devices: int = 1
    max_devices: int = 64
    num_devices: int | None = None  # rigid: exactly these
    weight: float = 1.0  # priority
    tenant: str = "default"
    preemptible: bool = True
    min_run_s: float = 0.0  # before it may be taken off its devices again
    kinds: tuple[str, ...] | None = None  # allowed; None = all
    level: str | None = None  # label of Node within which all of its nodes must lie, such as "rack"
    deadline_s: float | None = None  # soft: reported, never a reason to starve others

    def __post_init__(self):
        said = f"job {self.id!r}"
        if self.mode == "rigid" and self.num_devices is None:
            raise ValueError(
                f"{said} is rigid but says no num_devices; give the exact number, or choose mode='elastic'"
            )
        if self.num_devices is not None and self.num_devices < 1:
            raise ValueError(
                f"{said} asks for num_devices={self.num_devices}; it must be at least 1"
            )
        if not 1 <= self.min_devices <= self.max_devices:
            raise ValueError(
                f"{said} has min_devices={self.min_devices} and max_devices={self.max_devices}; needed is"
                " 1 <= min_devices <= max_devices"
            )
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(
                f"{said} has weight={self.weight}; a weight is a finite number above 0 (1 = normal)"
            )
        if not self.min_run_s >= 0:
            raise ValueError(f"{said} has min_run_s={self.min_run_s}; it must be 0 or more")
        if self.kinds is not None and not self.kinds:
            raise ValueError(
                f"{said} allows no kind of device; list at least one, or say kinds=None for all"
            )


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Which devices: node name -> local indices; empty = paused.

    Jobs with the same `share_group` run on the same devices at once (packing). `generation` grows by
    one with every change.
    """

    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    generation: int = 0
    share_group: str | None = None

    def __post_init__(self):
        for name, local in self.devices.items():
            if not local or len(set(local)) < len(local) or min(local) < 0:
                raise ValueError(
                    f"an allocation lists devices {list(local)} of node {name!r}; local indices are 0 or"
                    " more and"
                    " different, and a node without any is left out"
                )

    @property
    def num_nodes(self) -> int:
        """Nodes it touches."""
        return len(self.devices)

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return sum(len(local) for local in self.devices.values())


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Any dataclass of this file as JSON, with the version and the name of its type.

    >>> to_json(Shape("h200", 1, 4))
    '{"version": 1, "type": "Shape", "kind": "h200", "num_nodes": 1, "num_devices": 4}'
    """
    body = {"version": VERSION, "type": type(value).__name__} | dataclasses.asdict(value)
    return json.dumps(body, indent=indent)


def from_json(text: str, type_: type[T]) -> T:
    """What `to_json` wrote; a ValueError names the field where the text is not that.

    Fields that have defaults may be missing; fields that are not known are errors, so that a misspelt limit
    is not ignored.
    """
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"this is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    if not isinstance(body, dict):
        raise ValueError(f"expected a JSON object of a {type_.__name__}, got {body!r:.60}")
    version, name = body.pop("version", None), body.pop("type", type_.__name__)
    if version != VERSION:
        raise ValueError(
            f"this {name} has version {version!r}, this program reads version {VERSION}; write it again"
            " with the"
            " program that reads it"
        )
    if name != type_.__name__:
        raise ValueError(f"expected a {type_.__name__}, got a {name}")
    return _decode(body, type_, type_.__name__)


def _decode(value: Any, type_: Any, where: str) -> Any:
    """`value` as `type_`; `where` is the path to it, for errors."""
    origin, parts = typing.get_origin(type_), typing.get_args(type_)
    if dataclasses.is_dataclass(type_):
        return _decode_fields(value, type_, where)
    if origin in (types.UnionType, typing.Union):
        if value is None and types.NoneType in parts:
            return None
        (inner,) = (part for part in parts if part is not types.NoneType)
        return _decode(value, inner, where)
    if origin is Literal:
        if value not in parts:
            raise ValueError(f"{where} is {value!r}; it must be one of {list(parts)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} is {value!r:.60}; it must be a list")
        return tuple(_decode(item, parts[0], f"{where}[{i}]") for i, item in enumerate(value))
    if origin is collections.abc.Mapping:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {value!r:.60}; it must be an object")
        return {key: _decode(item, parts[1], f"{where}[{key!r}]") for key, item in value.items()}
    if type_ is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, type_) or (type_ is int and isinstance(value, bool)):
        raise ValueError(f"{where} is {value!r:.60}; it must be of type {type_.__name__}")
    return value


def _decode_fields(value: Any, type_: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r:.60}; it must be an object")
    hints = typing.get_type_hints(type_)
    fields = {f.name: f for f in dataclasses.fields(type_)}
    if unknown := sorted(value.keys() - fields.keys()):
        raise ValueError(f"{where} has no field {unknown[0]!r}; its fields are {sorted(fields)}")
    needed = {
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    if missing := sorted(needed - value.keys()):
        raise ValueError(f"{where} lacks the field {missing[0]!r}")
    decoded = {k: _decode(v, hints[k], f"{where}.{k}") for k, v in value.items()}
    try:
        return type_(**decoded)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
