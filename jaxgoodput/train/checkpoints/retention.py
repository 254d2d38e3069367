"""Which checkpoints of a run are kept, and which of them is the best."""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from jaxgoodput.train.checkpoints.meta import CheckpointMeta
from jaxgoodput.train.config import Saving


class Note(NamedTuple):
    """The facts about a checkpoint that decide whether it is kept, and whether it counts."""

    progress: float = 0.0  # base steps
    value: float = math.nan  # of the metric `Saving.best`; NaN without an evaluation
    is_certified: bool = False

    @classmethod
    def of(cls, meta: CheckpointMeta, saving: Saving) -> "Note":
        """Return the note of a checkpoint; `saving` names the metric."""
        value = meta.metrics.get(saving.best or "", math.nan)
        return cls(meta.progress, value, meta.is_certified is True)


def kept(notes: Mapping[int, Note], saving: Saving) -> set[int]:
    """Return the steps whose checkpoints are kept, out of all in `notes`."""
    steps = sorted(notes)
    stay = {*steps[-saving.keep :]}
    best = best_step(notes, saving)
    if best is not None:
        stay.add(best)
    if saving.keep_every_base_steps is not None:
        firsts: dict[float, int] = {}
        for step in steps:
            firsts.setdefault(notes[step].progress // saving.keep_every_base_steps, step)
        stay.update(step for stretch, step in firsts.items() if stretch > 0)
    return stay


def require_best(saving: Saving, metrics: Collection[str]) -> None:
    """Raise ValueError if evaluations do not have the metric named by `Saving.best`."""
    if saving.best is not None and saving.best not in metrics:
        raise ValueError(
            f"Config.saving.best is {saving.best!r}, but the evaluation has no such metric. Choose one of "
            f"{', '.join(sorted(metrics))}."
        )


def best_step(notes: Mapping[int, Note], saving: Saving) -> int | None:
    """Return the first step with the best finite value of `Saving.best`; None if there is none."""
    if saving.best is None:
        return None
    sign = 1 if saving.best_mode == "min" else -1
    values = {step: sign * notes[step].value for step in sorted(notes)}
    finite = {step: value for step, value in values.items() if math.isfinite(value)}
    return min(finite, key=finite.__getitem__, default=None)
