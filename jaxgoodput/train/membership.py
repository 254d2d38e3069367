"""A run in a job whose processes come and go: what it takes from one generation of them to the next.

A generation is a set of processes that know each other: one JAX world. When it ends, because somebody is to
join or to leave, or has died, each process keeps its run in host memory (`Kept`), leaves the old world, and
enters the next, in which all go on from the run that had come furthest. Nobody restarts, and nothing is read
from the disk. Updates are the same in all processes, so one that is a step behind loses nothing by taking
the state of another: samples belong to the state that they went into.

`Membership` is what the run asks of whoever knows the other processes (`launcher.member`).
"""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import numpy as np

from jaxgoodput._serial import decode
from jaxgoodput.train.checkpoint import CheckpointMeta


@dataclass(frozen=True)
class Kept:
    """A run between two generations."""

    leaves: Mapping[str, np.ndarray]
    """The state's, by path, as `engine.saved.on_host` gives them."""
    meta: CheckpointMeta

    @property
    def step(self) -> int:
        """The last step that is in it."""
        return self.meta.step

    def to_bytes(self) -> bytes:
        """For another process: a line of JSON and the arrays behind each other."""
        kinds = [[path, str(x.dtype), list(x.shape)] for path, x in self.leaves.items()]
        out = io.BytesIO()
        out.write(json.dumps({"meta": self.meta.to_json(), "leaves": kinds}).encode() + b"\n")
        for x in self.leaves.values():
            out.write(np.ascontiguousarray(x).tobytes())
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Kept":
        """What `to_bytes` gave. Raises ValueError where it is not."""
        end = data.index(b"\n") + 1
        head = json.loads(data[:end])
        leaves, position = {}, end
        for path, dtype, shape in head["leaves"]:
            kind = jax.numpy.dtype(dtype)
            count = int(np.prod(shape, dtype=np.int64))
            leaves[path] = np.frombuffer(data, kind, count, position).reshape(shape)
            position += count * kind.itemsize
        return cls(leaves, decode(head["meta"], CheckpointMeta, "a state"))


@dataclass(frozen=True)
class Generation:
    """A set of processes that train together, and this one's place in it."""

    number: int
    process_index: int
    process_count: int
    kept: Kept | None
    """What all of them go on from; None: the newest checkpoint, or nothing."""
    seconds: Mapping[str, float]
    """What coming together took here, by part."""


@runtime_checkable
class Membership(Protocol):
    """This process's place among those of its job."""

    @property
    def is_late(self) -> bool:
        """Whether others train already, and are to wait as little as possible for this process."""
        ...

    def enter(self, kept: Kept | None, share: int | None) -> Generation:
        """Leave the present generation and wait for the next one, which JAX then knows.

        The number of its processes divides `share`, unless that is None. Every array, executable and device
        of before is gone. Raises `Released` where this process is not wanted any more, `SaveHere` where all
        were told to stop.
        """
        ...

    def is_broken(self) -> bool:
        """Whether the present generation is to end, or has lost one of its processes."""
        ...

    def on_regroup(self, ask: Callable[[], None]) -> None:
        """Have `ask` called, from another thread, when the present generation is to end."""
        ...

    def done(self) -> None:
        """Tell that the run is over: nobody is to be waited for."""
        ...


class Released(SystemExit):
    """This process is not needed any more; the others go on. Exit code 0."""

    def __init__(self, why: str):
        super().__init__(0)
        self.why = why


class SaveHere(Exception):
    """All processes were told to stop while they waited, and this one is to save what it keeps."""


class Regroup(Exception):
    """The generation is over, the run is not: `kept` goes on in the next one."""

    def __init__(self, kept: Kept, why: str):
        super().__init__(why)
        self.kept = kept
