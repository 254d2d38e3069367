"""The folders of a workdir that hold checkpoints: which are there, of which step, what is wrong with them.

`<workdir>/checkpoints/<step>/state` holds the device values as nested dicts and lists that any Orbax can
read, by their names in `TrainState`. `/meta` holds everything that the host knows (`CheckpointMeta`) as JSON.
The metadata says of which step a checkpoint is. The folder's name is only a label.
"""

import errno
import json
import os
import pathlib
from collections.abc import Callable
from typing import NamedTuple, TypeGuard, TypeVar

import jax
import numpy as np

from jaxgoodput.engine.memory import shortage_in
from jaxgoodput.train.checkpoints.meta import CheckpointMeta, WrongWorkdirError

T = TypeVar("T")
DAMAGED = "damaged_checkpoints"  # folder beside "checkpoints", for damaged ones
SPOILT = "spoilt_checkpoints"  # folder beside "checkpoints", for a state that failed its check
TEMPORARY = "*.orbax-checkpoint-tmp*"  # folder name of a save that is not complete
NO_SPACE = os.strerror(errno.ENOSPC)


class Label(NamedTuple):
    """A folder of a checkpoint, and what a glance at its metadata tells."""

    folder: pathlib.Path
    step: int  # as recorded; if that cannot be read, the number that the folder is named by
    is_certified: bool | None  # None if it cannot be read


def labels_in(root: pathlib.Path) -> list[Label]:
    """Return the complete checkpoints in a folder, whatever their steps, in no order."""
    found = []
    for folder in root.iterdir():
        if folder.name.isdigit():
            meta, _ = attempt(lambda folder=folder: meta_in(folder))
            step = int(folder.name) if meta is None else meta.step
            found.append(Label(folder, step, None if meta is None else meta.is_certified))
    return found


def folders_by_step(root: pathlib.Path) -> dict[int, pathlib.Path]:
    """Return the folders of the checkpoints in a folder by their steps, in order of these.

    Spoilt ones are left out. If a checkpoint cannot be read, the number in the folder's name is its step.
    """
    labels = labels_in(root) if root.is_dir() else []
    # If several claim one step, the last one in this order counts.
    labels.sort(key=lambda x: (x.is_certified is True, x.folder.name == str(x.step)))
    return dict(sorted((x.step, x.folder) for x in labels if x.is_certified is not False))


def meta_in(folder: pathlib.Path, *, with_memory: bool = False) -> CheckpointMeta:
    """Read the metadata in the folder of a checkpoint; see `CheckpointMeta.from_json`."""
    saved = json.loads((folder / "meta/metadata").read_text())
    return CheckpointMeta.from_json(saved, with_memory=with_memory)


def or_named(folder: pathlib.Path, read: Callable[[], T], name: str = "") -> T:
    """Return what `read` returns; turn its failure into a ValueError that names the checkpoint.

    `name` is what people call it, if that is not the folder.
    """
    try:
        return read()
    except WrongWorkdirError:
        raise
    except Exception as failure:
        if is_out_of_memory(failure):
            raise
        raise ValueError(
            f"the checkpoint {name or folder} cannot be read ({brief(failure)}). Choose another step; "
            f"{[*folders_by_step(folder.parent)]} are there."
        ) from failure


def is_out_of_memory(failure: Exception | None) -> TypeGuard[Exception]:
    """Return whether memory ran out, which says nothing against the checkpoint."""
    return shortage_in(failure) is not None


def attempt(read: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return (what `read` returns, None), or (None, the exception) if it raises."""
    try:
        return read(), None
    except Exception as error:
        return None, error


def brief(failure: Exception) -> str:
    """Return the type of an exception and the first line of its message; a few words for a full disk."""
    if NO_SPACE in str(failure):
        return NO_SPACE
    return f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"


def check_writable(root: pathlib.Path) -> None:
    """Make the folder, if it does not exist, and check that files can be written to it.

    Raises NotADirectoryError if a file is in the way, PermissionError if nothing can be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".writable.{jax.process_index()}"
        probe.write_bytes(np.zeros(1).tobytes())
        probe.unlink()
    except OSError as failure:
        at = next((p for p in (root, *root.parents) if p.exists()), root)
        if not at.is_dir():
            raise NotADirectoryError(
                f"cannot create the workdir {root}: {at} is a file. Name a folder in Config.workdir."
            ) from failure
        raise PermissionError(
            f"cannot write to the workdir {root} ({failure.strerror or failure}). Checkpoints, events and "
            "the compilation cache go there: name a writable folder in Config.workdir."
        ) from failure
