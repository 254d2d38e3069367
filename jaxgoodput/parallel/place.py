"""Which devices a run has, and who shares them: one process, several with one layout, or groups of them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from jaxgoodput._jax import shared_store
from jaxgoodput.clock import Clock
from jaxgoodput.parallel.strategy import Layout, Strategy

GROUP_AXIS, DEVICE_AXIS = "group", "device"
"""Of the mesh of all groups of processes, each of which has a copy of the model."""


@dataclass(frozen=True)
class Place:
    """Which devices a run has, and who shares them.

    Where there are several processes, either the layouts span all of them, or each group of them (mostly one)
    has a layout of its own and `world` is the mesh of all groups: then a state outlives a peer.
    """

    layouts: Mapping[str, Layout]  # by strategy; the name "" is plain data parallelism, unasked
    world: Mesh | None
    process_index: int
    process_count: int
    group_size: int = 1
    """Processes that share a layout, where there is a world."""
    is_elastic: bool = False
    """Whether processes come and go."""
    is_broken: Callable[[], bool] = lambda: False
    """Whether a process of this generation has gone: nobody waits for it."""

    @property
    def layout(self) -> Layout:
        """The first layout."""
        return next(iter(self.layouts.values()))

    @property
    def spans(self) -> bool:
        """Whether the layouts are of devices of several processes."""
        return self.process_count > 1 and self.world is None

    @property
    def num_devices(self) -> int:
        """Devices of all processes."""
        return self.layout.num_devices if self.world is None else self.world.size

    @property
    def num_replicas(self) -> int:
        """Replicas of all processes, under the first layout."""
        num_groups = 1 if self.world is None else self.world.shape[GROUP_AXIS]
        return self.layout.num_replicas * num_groups

    @property
    def writes(self) -> bool:
        """Whether this process is of those that have the state which is written to the disk."""
        return self.process_index < self.group_size

    @property
    def own_devices(self) -> Sequence[Any]:
        """This process's part of the devices."""
        return self.layout.mesh.local_devices

    def meet(self, moment: str) -> None:
        """Wait for all processes: they compile at different speeds, and a first collective waits 30 s."""
        store = shared_store()
        if self.process_count > 1 and store is not None:
            store.meet(
                f"jaxgoodput: {moment}",
                self.process_index,
                self.process_count,
                timeout_s=1800.0,
                unless=self.is_broken,
            )

    def told(self, what: str, value: str) -> list[str]:
        """What every process says, by process; they come here together."""
        store = shared_store()
        if self.process_count == 1 or store is None:
            return [value]
        keys = [f"jaxgoodput: {what}, process {rank}" for rank in range(self.process_count)]
        store.set(keys[self.process_index], value, overwrite=True)
        self.meet(what)
        return [store.get(key, timeout_s=60.0) for key in keys]

    def silent(self, clock: Clock) -> tuple[int, ...]:
        """The processes that do not come here within a second or so of this one."""
        store = shared_store()
        assert store is not None
        keys = [f"jaxgoodput: process {rank} has lost a peer" for rank in range(self.process_count)]
        store.set(keys[self.process_index], "", overwrite=True)
        clock.sleep(1.0)
        return tuple(rank for rank, key in enumerate(keys) if store.try_get(key) is None)

    def everywhere(self, holds: bool) -> bool:
        """Whether it holds in every process; they come here together."""
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
    """The layouts of `strategies` (none: one replica on every device).

    `devices` narrows them where there is one process. In several processes, plain data parallelism has a
    layout in each of them unless it is to be `spanning`. Where processes come and go, any strategy has a
    layout in each group of `group_size` of them, also where there is one group, which then takes the same
    programs. Of strategies that are the same on these devices the first stays.

    Raises ValueError for a strategy that does not use exactly those devices, and for two that differ and
    have one name; for several, where processes come and go.
    """
    count = jax.process_count()
    if count > 1 and devices is not None:
        raise ValueError(
            f"devices= is for one process; this job has {count}. Start the processes with the devices "
            "that they should use."
        )
    everyone = jax.devices() if count > 1 else jax.local_devices() if devices is None else devices
    if group_size is not None:
        return _groups(everyone, strategies, group_size)
    num_devices = len(everyone)
    plans = list(dict.fromkeys(strategy.resolved(num_devices) for strategy in strategies))
    names = [plan.name for plan in plans]
    if len(set(names)) < len(names):
        raise ValueError(
            f"Config.strategies has two of one name: {', '.join(names)}. On {num_devices} devices they have "
            "the same degrees, and other rules: give each a `title`, or leave one of them out."
        )
    world = None
    plain = not plans or (len(plans) == 1 and not plans[0].is_cut)
    if count > 1 and not spanning and plain:
        own = [[d for d in everyone if d.process_index == i] for i in range(count)]
        require_as_many(own)
        world = world_of([Strategy(data=len(devices)).on(devices) for devices in own])
        everyone = jax.local_devices()
        plans = [dataclasses.replace(plan, data=len(everyone)) for plan in plans]
    layouts = {"": Strategy(data=len(everyone)).on(everyone)}
    if plans:
        layouts = {name: plan.on(everyone) for name, plan in zip(names, plans, strict=True)}
    return Place(layouts, world, jax.process_index(), count)


def _groups(everyone: Sequence[Any], strategies: Sequence[Strategy], group_size: int) -> Place:
    """A layout in each group of processes, and the world of all groups."""
    count, own = jax.process_count(), jax.process_index()
    of_group = [
        [d for d in everyone if d.process_index // group_size == group]
        for group in range(count // group_size)
    ]
    mine = of_group[own // group_size]
    require_as_many(of_group)
    plans = list(dict.fromkeys(strategy.resolved(len(mine)) for strategy in strategies))
    if len(plans) > 1:
        raise ValueError(
            "in a job whose hosts come and go (run --nnodes) there is one strategy; Config.strategies "
            f"has {', '.join(plan.name for plan in plans)}. Leave the best of them, or start it with "
            "--nproc-per-node."
        )
    plan = plans[0] if plans else Strategy(data=len(mine))
    world = world_of([plan.on(devices) for devices in of_group])
    name = plan.name if plans else ""
    return Place({name: plan.on(mine)}, world, own, count, group_size, is_elastic=True)


def replicas_of_group(strategies: Sequence[Strategy], num_devices: int) -> int:
    """Replicas of a group with so many devices, under the first strategy."""
    plan = next(iter(strategies), Strategy(data=num_devices))
    return plan.resolved(num_devices).num_replicas


def require_as_many(groups: Sequence[Sequence[Any]]) -> None:
    """Raise ValueError where some groups have more devices than others."""
    counts = [len(group) for group in groups]
    if len(set(counts)) > 1:
        raise ValueError(
            f"the processes or groups of this job have {', '.join(map(str, counts))} devices, by rank, and a "
            "batch is cut evenly over all. Start each process with as many: --devices-per-process N."
        )


def world_of(groups: Sequence[Layout]) -> Mesh:
    """The mesh of all groups, of one strategy each."""
    devices = np.array([list(group.mesh.devices.flat) for group in groups], dtype=object)
    return Mesh(devices, (GROUP_AXIS, DEVICE_AXIS), axis_types=(AxisType.Auto,) * 2)
