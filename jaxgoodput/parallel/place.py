"""Which devices a run has, and who shares them: one process, several with one layout, or groups of them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from jaxgoodput._jax import SharedStore, shared_store
from jaxgoodput.clock import Clock
from jaxgoodput.parallel.strategy import Layout, Strategy

GROUP_AXIS, DEVICE_AXIS = "group", "device"
"""Axes of the mesh of all groups of processes; each group has a copy of the model."""


@dataclass(frozen=True)
class Place:
    """Which devices a run has, and which processes share them. Made by `place`.

    Several processes either share layouts that span all of them, or form groups (mostly of one process) with
    a layout for each group. `world` is then the mesh of all groups, and the state survives a peer's death.
    """

    layouts: Mapping[str, Layout]
    """Layouts by strategy name; "" is plain data parallelism that was not asked for."""
    world: Mesh | None
    """Mesh of all groups; None if there are none."""
    process_index: int
    """Number of this process."""
    process_count: int
    """Processes of the job."""
    group_size: int = 1
    """Processes that share a layout of their group."""
    is_elastic: bool = False
    """Whether processes come and go."""
    store: SharedStore | None = None
    """Strings that the processes share; None if there is one process."""
    is_broken: Callable[[], bool] = lambda: False
    """Tells whether a process of this generation has died, so that waiting for it must end."""

    @property
    def layout(self) -> Layout:
        """The layout of the first strategy."""
        return next(iter(self.layouts.values()))

    @property
    def num_groups(self) -> int:
        """Groups of processes, each with layouts of its own; 1 if all processes share theirs."""
        return 1 if self.world is None else self.world.shape[GROUP_AXIS]

    @property
    def spans(self) -> bool:
        """Whether every layout covers the devices of several processes, which form no groups."""
        return self.process_count > self.num_groups * self.group_size

    @property
    def num_devices(self) -> int:
        """Devices of all processes."""
        return self.layout.num_devices * self.num_groups

    @property
    def num_replicas(self) -> int:
        """Replicas of all processes, under the first layout."""
        return self.layout.num_replicas * self.num_groups

    @property
    def writes(self) -> bool:
        """Whether this process belongs to the group whose state is written to disk."""
        return self.process_index < self.group_size

    @property
    def own_devices(self) -> Sequence[Any]:
        """Devices of this process."""
        return self.layout.mesh.local_devices

    def meet(self, moment: str) -> None:
        """Wait until all processes call this with the same `moment`.

        Use it before a first collective: that waits 30 s at most, and processes compile at different speeds.
        Raises PeerGone if `is_broken` holds meanwhile.
        """
        if self.store is not None:
            self.store.meet(
                f"jaxgoodput: {moment}",
                self.process_index,
                self.process_count,
                timeout_s=1800.0,
                unless=self.is_broken,
            )

    def told(self, what: str, value: str) -> list[str]:
        """Exchange a string about `what` and return every process's, by rank. All processes must call it."""
        if self.store is None:
            return [value]
        keys = [f"jaxgoodput: {what}, process {rank}" for rank in range(self.process_count)]
        self.store.set(keys[self.process_index], value, overwrite=True)
        self.meet(what)
        return [self.store.get(key, timeout_s=60.0) for key in keys]

    def silent(self, clock: Clock) -> tuple[int, ...]:
        """Return the ranks of processes that do not call this within about a second of this one."""
        assert self.store is not None
        keys = [f"jaxgoodput: process {rank} has lost a peer" for rank in range(self.process_count)]
        self.store.set(keys[self.process_index], "", overwrite=True)
        clock.sleep(1.0)
        return tuple(rank for rank, key in enumerate(keys) if self.store.try_get(key) is None)

    def everywhere(self, holds: bool) -> bool:
        """Return whether `holds` is true in every process. All processes must call it."""
        if self.process_count == 1:
            return holds
        return bool(np.all(multihost_utils.process_allgather(np.float32(holds))))


def place(
    devices: Sequence[Any] | None,
    strategies: Sequence[Strategy] = (),
    *,
    spanning: bool = False,
    group_size: int | None = None,
) -> Place:
    """Put `strategies` on the devices of this run; without any, one replica on every device.

    In one process, `devices` narrows the choice (None: all). In several, plain data parallelism gets a layout
    in each process unless it is to be `spanning`; any other strategy spans all of them. If processes come and
    go, `group_size` of them form a group, and any strategy gets a layout in each group. Even a single group
    does, so that its programs stay the same when others join. Of strategies that are the same on these
    devices, the first stays.

    Raises ValueError for a strategy that does not use exactly those devices, for two that differ and have
    one name, and for several if processes come and go.
    """
    everyone, count = _everyone(devices), jax.process_count()
    store = shared_store() if count > 1 else None
    made = {"process_index": jax.process_index(), "process_count": count, "store": store}
    if group_size is not None:
        layouts, world = _in_groups(everyone, strategies, group_size)
        return Place(layouts, world, group_size=group_size, is_elastic=True, **made)
    plans = _plans(strategies, len(everyone))
    is_plain = not any(plan.is_cut for plan in plans.values()) and len(plans) <= 1
    if count > 1 and not spanning and is_plain:
        layouts, world = _in_each(everyone, plans)
        return Place(layouts, world, **made)
    return Place({name: plan.on(everyone) for name, plan in plans.items()}, None, **made)


def _everyone(devices: Sequence[Any] | None) -> Sequence[Any]:
    """Return the devices of all processes; `devices` may narrow them in a single process."""
    count = jax.process_count()
    if devices is None:
        return jax.devices() if count > 1 else jax.local_devices()
    if count > 1:
        raise ValueError(
            f"devices= is for one process; this job has {count}. Start the processes with the devices "
            "that they should use."
        )
    return devices


def _plans(strategies: Sequence[Strategy], num_devices: int) -> dict[str, Strategy]:
    """Return the strategies, with numbers for -1, by name; plain data parallelism as "" if there are none."""
    plans = list(dict.fromkeys(strategy.resolved(num_devices) for strategy in strategies))
    names = [plan.name for plan in plans]
    if len(set(names)) < len(names):
        raise ValueError(
            f"Config.strategies has two strategies of one name: {', '.join(names)}. On {num_devices} devices "
            "they differ in their rules alone. Give each a `title`, or leave one of them out."
        )
    return dict(zip(names, plans, strict=True)) or {"": Strategy(data=num_devices)}


def _in_each(
    everyone: Sequence[Any], plans: Mapping[str, Strategy]
) -> tuple[dict[str, Layout], Mesh]:
    """Return data-parallel layouts on this process's devices, and the world of all processes."""
    count, own = jax.process_count(), jax.process_index()
    by_process = [[d for d in everyone if d.process_index == rank] for rank in range(count)]
    require_as_many(by_process)
    mine = by_process[own]
    world = world_of([Strategy(data=len(mine)).on(devices) for devices in by_process])
    return {
        name: dataclasses.replace(plan, data=len(mine)).on(mine) for name, plan in plans.items()
    }, world


def _in_groups(
    everyone: Sequence[Any], strategies: Sequence[Strategy], group_size: int
) -> tuple[dict[str, Layout], Mesh]:
    """Return the layout in this process's group of processes, and the world of all groups."""
    count, own = jax.process_count(), jax.process_index()
    by_group = [
        [d for d in everyone if d.process_index // group_size == group]
        for group in range(count // group_size)
    ]
    require_as_many(by_group)
    mine = by_group[own // group_size]
    plans = _plans(strategies, len(mine))
    if len(plans) > 1:
        raise ValueError(
            "a job whose hosts come and go (run --nnodes) runs one strategy; Config.strategies "
            f"has {', '.join(plans)}. Keep the best of them, or start the job with "
            "--nproc-per-node."
        )
    ((name, plan),) = plans.items()
    return {name: plan.on(mine)}, world_of([plan.on(devices) for devices in by_group])


def replicas_of_group(strategies: Sequence[Strategy], num_devices: int) -> int:
    """Return the replicas of a group with this many devices, under the first strategy."""
    plan = next(iter(strategies), Strategy(data=num_devices))
    return plan.resolved(num_devices).num_replicas


def require_as_many(groups: Sequence[Sequence[Any]]) -> None:
    """Raise ValueError if groups have different numbers of devices."""
    counts = [len(group) for group in groups]
    if len(set(counts)) > 1:
        raise ValueError(
            f"the processes or groups of this job have {', '.join(map(str, counts))} devices, by rank, but a "
            "batch is cut evenly over all. Start each process with as many: --devices-per-process N."
        )


def world_of(groups: Sequence[Layout]) -> Mesh:
    """Return the mesh of all groups, whose layouts share one strategy."""
    devices = np.array([list(group.mesh.devices.flat) for group in groups], dtype=object)
    return Mesh(devices, (GROUP_AXIS, DEVICE_AXIS), axis_types=(AxisType.Auto,) * 2)
