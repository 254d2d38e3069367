"""Processes of one job that come and go: what a run needs from the agent that supervises them.

A generation is a set of processes that know each other: one JAX world. It ends when a process is about to
join or leave, or has died. Each process then keeps its run in host memory (`RunSnapshot`), leaves the old
world and enters the next one. There all processes resume from the run that had come furthest. No process
restarts, and nothing is read from disk. Updates are the same in all processes, so a process that is a step
behind loses nothing by taking the state of another: samples belong to the state that used them.
"""

import io
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxgoodput._fields.serial import decode
from jaxgoodput._jax import PeerGone, SharedStore
from jaxgoodput.engine.saved import HostLeaf, LeafKind
from jaxgoodput.train.checkpoints.meta import CheckpointMeta

_KEEP = 4  # steps after which no process asks for what was agreed on in a step
NO_LEASE = 2**31 - 1  # larger than the number of any micro-batch


@dataclass(frozen=True)
class RunSnapshot:
    """A run's state and metadata in host memory, for example while the processes of its job change."""

    leaves: Mapping[str, HostLeaf]
    """The parts of the state that this process holds, by path, as `engine.saved.on_host` returns them."""
    meta: CheckpointMeta

    @property
    def step(self) -> int:
        """The last step that it includes."""
        return self.meta.step

    def with_parts_of(self, other: "RunSnapshot") -> "RunSnapshot":
        """Return this snapshot, completed with what another process holds of the same state."""
        leaves = {
            path: HostLeaf(own.kind, {**own.pieces, **other.leaves[path].pieces})
            for path, own in self.leaves.items()
        }
        return RunSnapshot(leaves, self.meta)

    def to_bytes(self) -> bytes:
        """Return the snapshot as a line of JSON and the bytes of its pieces, for another process."""
        kinds = [
            [path, x.kind.dtype, x.kind.shape, [[start, y.shape] for start, y in x.pieces.items()]]
            for path, x in self.leaves.items()
        ]
        out = io.BytesIO()
        out.write(json.dumps({"meta": self.meta.to_json(), "leaves": kinds}).encode() + b"\n")
        for leaf in self.leaves.values():
            for piece in leaf.pieces.values():
                out.write(np.ascontiguousarray(piece).tobytes())
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "RunSnapshot":
        """Read what `to_bytes` returned. Raises ValueError for anything else."""
        end = data.index(b"\n") + 1
        head = json.loads(data[:end])
        leaves, position = {}, end
        for path, dtype, shape, places in head["leaves"]:
            kind, pieces = jax.numpy.dtype(dtype), {}
            for start, extent in places:
                count = int(np.prod(extent, dtype=np.int64))
                piece = np.frombuffer(data, kind, count, position).reshape(extent)
                pieces[tuple(start)] = piece
                position += count * kind.itemsize
            leaves[path] = HostLeaf(LeafKind(tuple(shape), dtype), pieces)
        return cls(leaves, decode(head["meta"], CheckpointMeta, "a state"))


@dataclass(frozen=True, kw_only=True)
class OwnPart:
    """How many samples a process computed in a step, and in how many seconds, before it waited for others."""

    seconds: float
    num_samples: int
    """Samples of this process, with padding."""
    part: int
    """Samples that a process takes at a time."""
    whole: int
    """Samples of the batch, over all processes."""
    is_leased: bool
    """Whether a process takes another part when it is done with one. Otherwise all get the same number."""
    left: int | None = None
    """Samples that are left of the run after this step, over all processes; None before its last epoch, or if
    the end is not known."""
    evaluates: bool = False
    """Whether the run evaluates, at least at its end."""


@dataclass(frozen=True, kw_only=True)
class WorkSharing:
    """How processes share the work of a run."""

    leases: bool
    """Whether they take micro-batches as they become free."""
    may_release: bool
    """Whether hosts may leave once the rest of the run does not need them."""
    evaluates: bool
    """Whether the run evaluates, at least at its end."""


@dataclass(frozen=True)
class Generation:
    """A set of processes that train together, and the place of this process in it."""

    number: int
    process_index: int
    process_count: int
    kept: RunSnapshot | None
    """The state that all of them resume from; None for the newest checkpoint, or a new run."""
    seconds: Mapping[str, float]
    """Seconds that each part of coming together took here."""
    news: tuple[Mapping[str, Any], ...] = ()
    """Decisions about hosts; each has the fields of an `observe.events.HostJudged` except its step."""


@runtime_checkable
class Membership(Protocol):
    """How this process takes part in a job whose processes come and go."""

    @property
    def group_size(self) -> int:
        """Number of processes that share one copy of the model, and come and go together."""
        ...

    @property
    def num_others(self) -> int:
        """Number of processes that already train, and should wait as little as possible for this one."""
        ...

    def enter(self, kept: RunSnapshot | None, share: int | None) -> Generation:
        """Leave the present generation, wait for the next one, and connect JAX to it.

        The number of its groups divides `share`, unless that is None. Arrays, executables and devices from
        before are invalid afterwards. Raises `ReleasedExit` if this process is not needed any more, and
        `SaveHere` if all processes were told to stop.
        """
        ...

    def is_broken(self) -> bool:
        """Whether the present generation is about to end, or has lost a process."""
        ...

    def takes_leases(self) -> bool:
        """Whether this process may take leases of samples; one that is about to leave takes no more."""
        ...

    def on_regroup(self, ask: Callable[[], None]) -> None:
        """Call `ask`, from another thread, when the present generation is about to end."""
        ...

    def device_at_work(self, num_samples: int) -> AbstractContextManager[None]:
        """While this process waits for its own device, whose part of a step it has dispatched.

        `num_samples` is the global batch size, to which the time is about proportional.
        """
        ...

    def others_at_work(self) -> AbstractContextManager[None]:
        """While this process waits for the other processes' parts of a step."""
        ...

    def computed(self, own: OwnPart) -> None:
        """Report how long this process's part of a step took, so that stragglers are found."""
        ...

    def keep(self, kept: RunSnapshot) -> None:
        """Keep a copy of this state here and, in the background, on a process of another host."""
        ...

    @property
    def failure_every_s(self) -> float:
        """Expected seconds between two failures in this job, as far as failures are known."""
        ...

    def done(self) -> None:
        """Report that the run is over, so that no process waits for this one."""
        ...


class Agreement:
    """What the processes of one generation agree on within a step, through the store that they share.

    It decides who takes which micro-batch. A *lease* is a number that no other process gets; a process asks
    for the next one when it is done with the last. One process of each group that shares a copy of the model
    asks, and tells the others of its group.

    A process that is about to leave declines, and gets no more micro-batches of the step. The last one that
    has not declined cannot: no process would be left to take the rest of the batch.

    It also decides whether a step counts. If a copy is cut over several processes, its parts must be of the
    same step even if a process dies between the sum and the update. So each process says that it has the sum,
    and none updates before all have said so. A process that cannot wait any longer says no, unless the answer
    was yes before. The store keeps one answer.

    Nothing is written to the store before the first lease or commit.
    """

    def __init__(
        self,
        store: SharedStore | None,
        process_index: int,
        process_count: int,
        *,
        group_size: int = 1,
        is_broken: Callable[[], bool] = lambda: False,
    ):
        self._shared_store = store
        self._process_index = process_index
        self._process_count = process_count
        self._group, self._place = divmod(process_index, group_size)
        self._group_size = group_size
        self._is_broken = is_broken
        self._run: str | None = (
            None  # the prefix of this run's keys; None: nothing was agreed on yet
        )
        self._leased = (-1, 0)  # a step, and how many leases this process has had in it
        self._declined = (-1, False)  # a step, and whether this process takes no more leases in it

    def lease(self, step: int, *, declines: bool = False) -> int:
        """Return the number of the next micro-batch of this step that no process has taken.

        If this process `declines`, return `NO_LEASE` instead, unless all other groups have declined before.

        Raises PeerGone if the process that speaks for this one's group has died.
        """
        key = self._key(step)
        if self._group_size == 1:
            return self._next_lease(step, declines)
        last, count = self._leased
        count = count if last == step else 0
        self._leased = step, count + 1
        told = f"{key}/lease {count} of group {self._group}"
        if self._place == 0:
            lease = self._next_lease(step, declines)
            self._store.set(told, str(lease))
            return lease
        return int(self._store.wait(told, unless=self._is_broken))

    def _next_lease(self, step: int, declines: bool) -> int:
        key, (last, has_declined) = self._key(step), self._declined
        if last == step:  # once for the whole step
            return NO_LEASE if has_declined else self._store.count(f"{key}/leases")
        if declines:
            num_groups = self._process_count // self._group_size
            has_declined = self._store.count(f"{key}/declined") < num_groups - 1
            self._declined = step, has_declined
            return self._next_lease(step, declines)
        return self._store.count(f"{key}/leases")

    def commit(self, step: int) -> None:
        """Return when every process has the sum of this step; then all of them update.

        Raises PeerGone if one has not, or may not have it: then none updates.
        """
        key, answer = f"{self._key(step)}/sums", f"{self._key(step)}/all have it"
        if self._store.count(key) == self._process_count - 1:
            self._store.set(answer, "yes")
        try:
            self._store.wait(answer, unless=self._is_broken)
        except PeerGone:
            self._store.set(answer, "no")  # has no effect if another process answered first
        if self._store.try_get(answer) != "yes":
            raise PeerGone(
                f"not every process has the gradient sum of step {step + 1}, so none of them applies it"
            )

    def forget(self, step: int) -> None:
        """Remove what was agreed on `_KEEP` steps before the current `step`; process 0 does it for all."""
        if self._run is not None and self._process_index == 0 and step >= _KEEP:
            self._store.forget(self._key(step - _KEEP))

    @property
    def _store(self) -> SharedStore:
        assert self._shared_store is not None
        return self._shared_store

    def _key(self, step: int) -> str:
        if self._run is None:
            # An earlier run of this job had steps with the same numbers.
            number = self._store.count(f"jaxgoodput: runs of process {self._process_index}")
            self._run = f"jaxgoodput: run {number}"
        return f"{self._run}/step {step}"


class ReleasedExit(SystemExit):
    """Ends a process that is not needed any more, while the others go on. Exit code 0."""

    def __init__(self, why: str):
        super().__init__(0)
        self.why = why


class SaveHere(Exception):
    """All processes were told to stop between two generations; this one must save `kept`, the whole run."""

    def __init__(self, kept: RunSnapshot):
        super().__init__("all processes were told to stop")
        self.kept = kept


class Regroup(Exception):
    """The generation is over, the run is not: `kept` is what the next generation resumes from."""

    def __init__(self, kept: RunSnapshot, why: str):
        super().__init__(why)
        self.kept = kept
