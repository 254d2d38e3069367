"""CPUs and memory: what nodes have, what jobs need for each device, and what is left beside jobs.

A node whose CPUs or memory are unknown never runs short of them. Amounts are whole numbers, millionths of a
CPU and KiB, so that sums are exact. All are rounded down, so that three devices with a third of 4 CPUs each
fit on a node of 4.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, JobTerms, Node

UNLIMITED = 2**60  # far more than all jobs together can need, and safe in sums of 64 bits
PER_CPU, PER_GIB = 1_000_000, 2**20
_ROUNDING = 1e-6  # so that numbers written as fractions stay what they were


class Amounts(NamedTuple):
    """An amount of CPUs and of memory."""

    cpus: int
    """Millionths of a CPU."""
    memory: int
    """KiB."""

    def __bool__(self) -> bool:
        return self.cpus > 0 or self.memory > 0

    def times(self, count: int) -> "Amounts":
        """Return the amount that so many devices need, if one needs this."""
        return Amounts(self.cpus * count, self.memory * count)

    def plus(self, other: "Amounts") -> "Amounts":
        """Return the sum of two amounts."""
        return Amounts(self.cpus + other.cpus, self.memory + other.memory)

    def minus(self, other: "Amounts") -> "Amounts":
        """Return what is left of this amount, at least 0 of each; what is unlimited stays so."""
        left = (
            has if has >= UNLIMITED else max(has - used, 0)
            for has, used in zip(self, other, strict=True)
        )
        return Amounts(*left)

    def holds(self, other: "Amounts") -> bool:
        """Return whether this amount is enough for another."""
        return self.cpus >= other.cpus and self.memory >= other.memory

    def devices(self, needs: "Amounts", most: int) -> int:
        """Return for how many devices this amount is enough, `most` at most, if each needs `needs`.

        >>> Amounts(32_000_000, UNLIMITED).devices(Amounts(10_000_000, 4096), 8)
        3
        """
        for has, need in zip(self, needs, strict=True):
            if need > 0:
                most = min(most, has // need)
        return most


NOTHING = Amounts(0, 0)
PLENTY = Amounts(UNLIMITED, UNLIMITED)


def needs_of(spec: JobTerms) -> Amounts:
    """Return what a job needs for each device; `NOTHING` itself if that is nothing."""
    if not (spec.cpus_per_device or spec.memory_gib_per_device):
        return NOTHING
    return Amounts(
        math.floor(PER_CPU * spec.cpus_per_device + _ROUNDING),
        math.floor(PER_GIB * spec.memory_gib_per_device + _ROUNDING),
    )


def is_limited(node: Node) -> bool:
    """Return whether a node may run short of CPUs or memory."""
    return node.cpus is not None or node.memory_gib is not None


def amounts_of(node: Node) -> Amounts:
    """Return what a node has for jobs."""
    if not is_limited(node):
        return PLENTY

    def whole(number: float | None, per_unit: int) -> int:
        if number is None:
            return UNLIMITED
        return min(math.floor(per_unit * number + _ROUNDING), UNLIMITED)

    return Amounts(whole(node.cpus, PER_CPU), whole(node.memory_gib, PER_GIB))


def amounts_of_all(nodes: Sequence[Node]) -> list[Amounts]:
    """Return what each node has for jobs."""
    # Thousands of nodes without such numbers are the common case.
    return [amounts_of(n) for n in nodes] if any(map(is_limited, nodes)) else [PLENTY] * len(nodes)


def some_limited(cluster: ClusterSpec) -> bool:
    """Return whether any node may run short of CPUs or memory."""
    return any(map(is_limited, cluster.nodes))


def usable(node: Node, needs: Amounts) -> int:
    """Return the number of a node's devices that jobs with these needs can use, if no others are there."""
    if not needs or not is_limited(node):
        return node.num_usable
    return amounts_of(node).devices(needs, node.num_usable)


def needs_together(specs: Iterable[JobTerms]) -> Amounts:
    """Return what jobs that share devices need for each."""
    total = NOTHING
    for spec in specs:
        if (needs := needs_of(spec)) is not NOTHING:
            total = total.plus(needs)
    return total


def used_by_node(
    specs: Mapping[str, JobSpec], allocations: Mapping[str, Allocation]
) -> dict[str, Amounts]:
    """Return, by node, what jobs use together; both arguments are by job id."""
    used: dict[str, Amounts] = {}
    for id_, allocation in allocations.items():
        if (needs := needs_of(specs[id_])) is not NOTHING:
            for name, local in allocation.devices.items():
                used[name] = used.get(name, NOTHING).plus(needs.times(len(local)))
    return used


def without(node: Node, used: Amounts) -> Node:
    """Return a node that has less by what jobs use of it."""
    if not used or not is_limited(node):
        return node
    left = amounts_of(node).minus(used)
    return replace(
        node,
        cpus=None if node.cpus is None else left.cpus / PER_CPU,
        memory_gib=None if node.memory_gib is None else left.memory / PER_GIB,
    )


def too_much(
    cluster: ClusterSpec, specs: Mapping[str, JobSpec], allocations: Mapping[str, Allocation]
) -> tuple[str, str] | None:
    """Return the first node on which jobs use more than it has, and in words what it has; None if none."""
    nodes = {node.name: node for node in cluster.nodes if is_limited(node)}
    if not nodes:
        return None
    for name, used in sorted(used_by_node(specs, allocations).items()):
        if name in nodes and not amounts_of(nodes[name]).holds(used):
            return name, in_words(amounts_of(nodes[name]))
    return None


def in_words(amounts: Amounts, needs: Amounts | None = None) -> str:
    """Return an amount in words: what is limited, and of that only what `needs` asks for.

    >>> in_words(Amounts(4_500_000, 2**21)), in_words(Amounts(4_000_000, UNLIMITED))
    ('4.5 CPUs and 2 GiB of memory', '4 CPUs')
    """
    parts = [
        f"{has / per_unit:g} {unit}"
        for has, need, per_unit, unit in zip(
            amounts,
            needs or (1, 1),
            (PER_CPU, PER_GIB),
            ("CPUs", "GiB of memory"),
            strict=True,
        )
        if need and has < UNLIMITED
    ]
    return " and ".join(parts)


def needed_in_words(needs: Amounts) -> str:
    """Return what a job needs for each device, in words.

    >>> needed_in_words(Amounts(8_000_000, 0))
    '8 CPUs per device'
    """
    asked = Amounts(*(need or UNLIMITED for need in needs))
    return f"{in_words(asked)} per device"
