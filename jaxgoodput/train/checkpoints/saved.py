"""Reads checkpoints without changing them: `SavedCheckpoint`, and what users read of it.

`restore` is given an abstract state, which says where each leaf goes. `load` needs no class that trained the
model. `initial_leaves` begins another model with saved parameters.
"""

import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxgoodput import _disk
from jaxgoodput._fields.serial import decode
from jaxgoodput.engine import saved as on_disk
from jaxgoodput.engine.saved import Keys, keys_of, named
from jaxgoodput.engine.state import TrainState, Variables
from jaxgoodput.parallel.partition import leaves_by_name
from jaxgoodput.train.checkpoints.folders import folders_by_step, meta_in, or_named
from jaxgoodput.train.checkpoints.meta import AVERAGE, CheckpointMeta, require_same_model
from jaxgoodput.train.checkpoints.retention import Note, best_step
from jaxgoodput.train.config import Saving
from jaxgoodput.workdir.places import View, workdir_of

NEEDED = r"config\.json|checkpoints/.*"  # of the files in a workdir


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint, for reading only: no file is changed."""

    folder: pathlib.Path
    meta: CheckpointMeta
    name: str
    """For messages."""

    @classmethod
    def at(cls, folder: pathlib.Path, name: str = "") -> "SavedCheckpoint":
        """Open the checkpoint in a folder; raises if its metadata is damaged or its checksums are missing.

        `name` is what people call it, if that is not the folder. What the run remembered is left out.
        """
        meta = meta_in(folder)
        if not _disk.is_sealed(folder):
            raise _disk.DamagedError(f"the file of checksums, {_disk.SUMS}, is missing")
        return cls(folder, meta, name or str(folder))

    @classmethod
    def find(
        cls, view: View, step: int | None, *, best: bool, saving: Saving | None = None
    ) -> "SavedCheckpoint":
        """Find a certified checkpoint in a workdir: the newest, the one of `step`, or the best.

        The best is chosen by `saving`; if None, by the settings of the run that wrote it.
        Raises FileNotFoundError if there is no such checkpoint, ValueError if it is damaged.
        """
        root = view.folder.resolve() / "checkpoints"
        folders = folders_by_step(root)
        if not folders:
            raise FileNotFoundError(
                f"{view.shown(root)} holds no checkpoint. Name the workdir of a run that has saved one."
            )
        if step is not None and step not in folders:
            raise FileNotFoundError(
                f"{view.shown(root)} holds no checkpoint of step {step}; it has {[*folders]}. Name one of "
                "them."
            )
        if best and step is not None:
            raise ValueError(
                f"best=True and step={step} exclude each other: give one of them to choose a checkpoint."
            )
        if best:
            step = _best_of(view, folders, saving)
        folder = folders[max(folders) if step is None else step]
        view.bring(folder)
        name = view.shown(folder)
        saved = or_named(folder, lambda: cls.at(folder, name), name)
        or_named(folder, lambda: _disk.check(folder), name)
        return saved

    @property
    def keys(self) -> dict[str, Keys]:
        """The keys that lead to each leaf in the tree on disk, by the leaf's path."""
        return {path: keys_of(path) for path in self.meta.leaves}

    @property
    def variables(self) -> dict[Keys, str]:
        """The paths of the leaves of parameters and model state, by their keys in `Variables`."""
        return {k: path for path, k in self.keys.items() if k[0] in ("params", "model_state")}

    def averaged(self, path: str) -> str:
        """Return the path of a parameter's average, or `path` itself if it has none."""
        average = AVERAGE + path.removeprefix(".params")
        return average if path.startswith(".params") and average in self.meta.leaves else path

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Read some leaves by their paths: see `engine.saved.read`. Raises ValueError if it is damaged."""
        folder = self.folder
        return or_named(
            folder, lambda: on_disk.read(folder / "state", self.keys, wanted), self.name
        )

    def state(self, abstract: TrainState) -> TrainState:
        """Read the whole state into the places that `abstract` gives; raises if it is damaged."""
        return on_disk.read_like(self.folder / "state", self.keys, abstract)


@dataclass(frozen=True)
class RestoredCheckpoint:
    """The training state and the metadata that were read from a checkpoint."""

    state: TrainState
    meta: CheckpointMeta


def restore(
    workdir: str,
    abstract_for: Callable[[CheckpointMeta], TrainState],
    *,
    step: int | None,
    best: bool,
    saving: Saving,
) -> RestoredCheckpoint:
    """Restore one checkpoint of a workdir without changing any file.

    `step`, `best` and `saving` select it as in `SavedCheckpoint.find`; `abstract_for` is the same as in
    `Checkpoints.restore`. Raises WrongWorkdirError if it does not belong to the model, and the errors of
    `SavedCheckpoint.find`.
    """
    with workdir_of(workdir).viewed(NEEDED) as view:
        saved = SavedCheckpoint.find(view, step, best=best, saving=saving if saving.best else None)
        abstract = abstract_for(saved.meta)
        require_same_model(saved.folder, saved.meta, abstract)
        state = or_named(saved.folder, lambda: saved.state(abstract), saved.name)
        return RestoredCheckpoint(state, saved.meta)


def load(
    workdir: str, step: int | None = None, best: bool = False, *, averaged: bool = True
) -> tuple[PyTree, PyTree]:
    """Load the parameters and the model state of a run as NumPy arrays, without the class that trained them.

    Use this for inference or export. It reads the newest checkpoint, the one of `step`, or the `best` one by
    that run's `Saving.best`. With `averaged`, parameters that the run kept an average of (`Config.ema`) are
    replaced by it. Containers have Orbax's form: dicts with text keys, and lists; named tuples and
    dataclasses become dicts by field. Random keys become their data. The model state is () if there is none.

    Raises FileNotFoundError if there is no such checkpoint, ValueError if it is damaged.
    """
    with workdir_of(workdir).viewed(NEEDED) as view:
        saved = SavedCheckpoint.find(view, step, best=best)
        found, wanted = {}, {}
        for keys, path in saved.variables.items():
            kind = saved.meta.leaves[path]
            found[keys] = saved.averaged(path) if averaged else path
            dtype = jnp.uint32 if kind.is_key else jnp.dtype(kind.dtype)
            wanted[found[keys]] = jax.ShapeDtypeStruct(kind.shape, dtype)
        arrays = saved.read(wanted)
    tree = named({keys: arrays[path] for keys, path in found.items()})
    return tree["params"], tree.get("model_state", ())


def _best_of(view: View, folders: Mapping[int, pathlib.Path], saving: Saving | None) -> int:
    """Return the step of the best checkpoint by `saving`; if None, by the settings that the run left."""
    if saving is None:
        settings = json.loads((view.folder / "config.json").read_text())
        return _best_of(view, folders, decode(settings["saving"], Saving, "config.json"))
    metas = {
        step: or_named(folder, lambda folder=folder: SavedCheckpoint.at(folder)).meta
        for step, folder in folders.items()
    }
    found = best_step({step: Note.of(meta, saving) for step, meta in metas.items()}, saving)
    if found is None:
        raise FileNotFoundError(
            f"no checkpoint in {view.name} has a value of Saving.best, which is {saving.best!r}. Set it to a "
            "metric of the evaluations during training, or name a step."
        )
    return found


@dataclass(frozen=True)
class FromCheckpoint:
    """Initial values from another run, for `Trainer(initial=...)`; its layout does not matter."""

    workdir: str
    """Workdir of the other run."""
    names: Callable[[str], str | None] | None = None
    """Function from the name of a leaf of this model, such as "params/layers/0/kernel" or "model_state/...",
    to the name of the saved leaf that it begins with, or to None if `init` should make it. Without `names`,
    leaves of the same name are used, and `init` makes the others."""
    step: int | None = None
    """Step of the checkpoint; None for the newest."""
    best: bool = False
    """Whether to use the best checkpoint by that run's `Saving.best`."""
    averaged: bool = True
    """Whether to use the average of the parameters, if that run kept one."""


def initial_leaves(initial: Any, variables: Variables) -> dict[str, Array]:
    """Return the leaves of a fresh model that `initial` gives, by name, on their devices in new buffers.

    `initial` is a tree of parameters or `Variables`, complete or partial, the workdir of a run, or
    `FromCheckpoint`. `variables` are the model's own, abstract with shardings. `init` makes all other leaves.

    Raises ValueError with the leaf's name if shapes or types differ or if `initial` names an unknown leaf,
    and the errors of `load`.
    """
    if isinstance(initial, str | os.PathLike):
        initial = FromCheckpoint(os.fspath(initial))
    if not isinstance(initial, FromCheckpoint):
        return on_disk.given_leaves(initial, variables)
    with workdir_of(initial.workdir).viewed(NEEDED) as view:
        saved = SavedCheckpoint.find(view, initial.step, best=initial.best)
        return _read_initial(initial, saved, variables)


def _read_initial(
    initial: FromCheckpoint, saved: SavedCheckpoint, variables: Variables
) -> dict[str, Array]:
    wanted = leaves_by_name(variables)
    chosen = _sources(initial, saved, wanted)
    kinds = {name: saved.meta.leaves[path] for name, path in chosen.items()}
    is_said = initial.names is not None
    on_disk.require_fit(kinds, variables, saved.name, is_said=is_said)
    if initial.averaged:
        chosen = {name: saved.averaged(path) for name, path in chosen.items()}
    found: dict[str, Array] = {}
    # Several of our leaves may share one saved leaf; take one of them per pass.
    while left := {path: name for name, path in chosen.items() if name not in found}:
        arrays = saved.read({p: on_disk.abstract_data(wanted[name]) for p, name in left.items()})
        found |= {name: on_disk.taken(arrays[p], wanted[name]) for p, name in left.items()}
    return found


def _sources(
    initial: FromCheckpoint, saved: SavedCheckpoint, wanted: Iterable[str]
) -> dict[str, str]:
    """Return by leaf name the path of the saved leaf that replaces it; leaves left to `init` are absent."""
    there = {"/".join(map(str, keys)): path for keys, path in saved.variables.items()}
    if initial.names is None:
        return {name: there[name] for name in wanted if name in there}
    sources = {name: source for name in wanted if (source := initial.names(name)) is not None}
    for name, source in sources.items():
        if source not in there:
            raise ValueError(
                f"FromCheckpoint.names maps {name} to {source}, but {saved.name} has no such leaf. It has "
                f"{on_disk.some([*there])}. Return one of them, or None to have init() make the leaf."
            )
    return {name: there[source] for name, source in sources.items()}
