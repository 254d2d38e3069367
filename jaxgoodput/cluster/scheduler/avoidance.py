"""Keep jobs off nodes that they should not use for a while, after a policy has decided.

A policy places jobs without regard to `JobView.avoids`, so no policy needs to know about it. Devices on an
avoided node are exchanged for others of the same kind: free ones, or ones on which another job is only about
to start. If there are none, the job does without them, provided that it can run on the rest. If it cannot, it
uses the node all the same, because a slow node is better than none, or waits if the node is of no use to it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxgoodput.cluster.scheduler.constraints import Devices, offered_devices
from jaxgoodput.cluster.scheduler.placement.amounts import (
    NOTHING,
    amounts_of,
    is_limited,
    needs_of,
    used_by_node,
)
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.shapes import domain_of, shape_of, takes
from jaxgoodput.specs import Allocation, ClusterSpec

Placed = dict[str, tuple[int, ...]]
"""Local device indices by node name."""


@dataclass(frozen=True, kw_only=True)
class Avoidance:
    """A policy's allocations after jobs were moved away from nodes that they avoid."""

    allocations: Mapping[str, Allocation]
    remarks: Mapping[str, str] = field(default_factory=dict)
    """What was changed for a job and why, by job id. A job that has to wait has only this reason."""
    reduced: frozenset[str] = frozenset()
    """Jobs that have fewer devices than the policy gave them; others may use these devices."""


def avoiding(
    allocations: Mapping[str, Allocation], views: Sequence[JobView], cluster: ClusterSpec
) -> Avoidance:
    """Return a policy's allocations of these jobs, with as few devices as possible on avoided nodes.

    A job that shares its devices with another one stays, because both would have to move.
    """
    affected = [
        view
        for view in views
        if (given := allocations.get(view.spec.id)) is not None
        and given.share_group is None
        and not given.devices.keys().isdisjoint(view.avoids)
    ]
    if not affected:
        return Avoidance(allocations=allocations)
    room = _Room(allocations, views, cluster)
    remarks, reduced = dict[str, str](), set[str]()
    for view in sorted(affected, key=lambda view: view.spec.id):
        id_ = view.spec.id
        said, left = room.exchange(view)
        if left:
            devices = room.given[id_]
            rest = _without(view, devices, left, room.kind_of)
            said.append(_why_without(view, left, rest))
            if rest != devices:
                room.reduce(id_, rest)
                reduced.add(id_)
        if said:  # another job's exchange may have taken it off the node
            remarks[id_] = "; ".join(said) if room.given[id_] else said[-1]
    found = {
        id_: given
        if given.devices == room.given[id_]
        else dataclasses.replace(given, devices=room.given[id_])
        for id_, given in allocations.items()
    }
    return Avoidance(allocations=found, remarks=remarks, reduced=frozenset(reduced))


class _Room:
    """Who has which devices, while jobs are moved away from nodes that they avoid."""

    def __init__(
        self,
        allocations: Mapping[str, Allocation],
        views: Sequence[JobView],
        cluster: ClusterSpec,
    ):
        self.given: dict[str, Placed] = {id_: dict(a.devices) for id_, a in allocations.items()}
        self.kind_of = {node.name: node.kind for node in cluster.nodes}
        self._nodes = {node.name: node for node in cluster.nodes}
        alone = {id_ for id_, given in allocations.items() if given.share_group is None}
        self._views = {view.spec.id: view for view in views if view.spec.id in alone}
        self._free: Devices = offered_devices(cluster)
        self._specs = {view.spec.id: view.spec for view in views}
        for devices in self.given.values():
            for name, local in devices.items():
                if name in self._free:
                    self._free[name] -= set(local)

    def exchange(self, view: JobView) -> tuple[list[str], list[str]]:
        """Exchange a job's devices on avoided nodes for others.

        Returns what was done in words, and the avoided nodes that are left, those first that it cannot use.
        """
        devices, said, left = self.given[view.spec.id], [], []
        avoided = [name for name in devices if name in view.avoids]
        for name in sorted(avoided, key=lambda name: (view.avoids[name].is_usable, name)):
            other = self._take_free(view, name) or self._swap(view, name)
            if other is None:
                left.append(name)
            else:
                said.append(f"{other} replaces {name}, which is kept apart from it")
        return said, left

    def reduce(self, id_: str, rest: Placed) -> None:
        """Leave a job the `rest` of its devices, and free the others."""
        for name, local in self.given[id_].items():
            if name not in rest:
                self._free.setdefault(name, set()).update(local)
        self.given[id_] = rest

    def _take_free(self, view: JobView, name: str) -> str | None:
        """Move a job from a node to the fullest one that has room; return its name, None if none has."""
        devices = self.given[view.spec.id]
        size = len(devices[name])
        found = [
            other
            for other, free in self._free.items()
            if len(free) >= size
            and self._nodes[other].state == "up"
            and self._suits(view, name, other)
        ]
        if not found:
            return None
        other = min(found, key=lambda other: (len(self._free[other]), other))
        self._free.setdefault(name, set()).update(devices.pop(name))
        devices[other] = _block(self._free[other], size)
        self._free[other] -= set(devices[other])
        return other

    def _swap(self, view: JobView, name: str) -> str | None:
        """Swap a job's devices on a node with ones on which another job is about to start.

        Returns the other node's name, or None if there is none.
        """
        devices = self.given[view.spec.id]
        for id_ in sorted(self._views.keys() - {view.spec.id}):
            theirs, their_view = self.given[id_], self._views[id_]
            for other in sorted(theirs):
                is_new = other not in their_view.allocation.devices
                fits = len(theirs[other]) == len(devices[name])
                if not (is_new and fits and self._suits(view, name, other)):
                    continue
                if self._suits(their_view, other, name):
                    theirs[name], devices[other] = devices.pop(name), theirs.pop(other)
                    return other
        return None

    def _has_amounts(self, view: JobView, name: str, other: str) -> bool:
        """Return whether a node has the CPUs and the memory for the devices that a job has on `name`.

        What a job uses there that would leave in exchange is not counted: it might have to go back.
        """
        if not needs_of(view.spec) or not is_limited(self._nodes[other]):
            return True
        given = {id_: Allocation(devices=devices) for id_, devices in self.given.items()}
        used = used_by_node(self._specs, given).get(other, NOTHING)
        needed = needs_of(view.spec).times(len(self.given[view.spec.id][name]))
        return amounts_of(self._nodes[other]).holds(used.plus(needed))

    def _suits(self, view: JobView, name: str, other: str) -> bool:
        """Whether a job may have devices of a node in place of those that it has been given on `name`."""
        devices, level = self.given[view.spec.id], view.spec.level
        if self.kind_of[name] != self.kind_of[other] or other in devices or other in view.avoids:
            return False
        if not self._has_amounts(view, name, other):
            return False
        rest = next((self._nodes[one] for one in devices if one != name), None)
        if level is None or rest is None:
            return True
        return domain_of(self._nodes[other], level) == domain_of(rest, level)


def _without(
    view: JobView, devices: Placed, avoided: Sequence[str], kind_of: Mapping[str, str]
) -> Placed:
    """Return what a job keeps of its devices, with as few avoided nodes as possible; {} if it must wait.

    `avoided`: the ones of its nodes that it should not use, those first that it cannot use.
    """
    num_useless = sum(not view.avoids[name].is_usable for name in avoided)
    for count in range(len(avoided), max(num_useless, 1) - 1, -1):
        left = {name: x for name, x in devices.items() if name not in avoided[:count]}
        if rest := _runnable(view, left, kind_of):
            return rest
    return {} if num_useless else devices


def _runnable(view: JobView, devices: Placed, kind_of: Mapping[str, str]) -> Placed:
    """Return the most of these devices, by whole nodes, on which a job can run; {} if there are none.

    Nodes on which it runs now are preferred.
    """
    order = sorted(
        devices, key=lambda name: (name not in view.allocation.devices, -len(devices[name]), name)
    )
    for count in range(len(order), 0, -1):
        rest = {name: devices[name] for name in devices if name in order[:count]}
        shape = shape_of(rest, kind_of)
        if shape is not None and takes(view.spec, shape) and view.goodput.get(shape, 0.0) > 0:
            return rest
    return {}


def _why_without(view: JobView, avoided: Sequence[str], rest: Placed) -> str:
    gone = [name for name in avoided if name not in rest]
    stays = [name for name in avoided if name in rest]
    said = []
    if not rest:
        useless = [name for name in gone if not view.avoids[name].is_usable]
        return (
            f"waits: it cannot use {_listed(useless)} for now, no other node is free, and it cannot run on "
            "fewer devices"
        )
    if gone:
        said.append(
            f"it does without {_listed(gone)}, kept apart from it, as no other node is free"
        )
    if stays:
        said.append(
            f"it uses {_listed(stays)}, kept apart from it, because it could not run otherwise"
        )
    return "; ".join(said)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def _block(free: set[int], size: int) -> tuple[int, ...]:
    """Return `size` of these free devices, if possible an aligned block.

    >>> _block({1, 2, 3, 5}, 2), _block({1, 3}, 2)
    ((2, 3), (1, 3))
    """
    for first in range(0, max(free) + 1, size):
        block = tuple(range(first, first + size))
        if free.issuperset(block):
            return block
    return tuple(sorted(free)[:size])
