"""A short run that leaves nothing behind: what the questions of this package have in common."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from jaxgoodput.data.datasets import as_source
from jaxgoodput.data.sources import Source
from jaxgoodput.data.streams import StreamSource
from jaxgoodput.train.config import Config, Evaluation, Reporting, Saving
from jaxgoodput.train.process import launched
from jaxgoodput.train.trainer import Trainer


def require_alone(trainer: Trainer, question: str) -> None:
    """Raise RuntimeError if a short run would need other processes, or would write to tables."""
    if launched().membership is not None or jax.process_count() > 1:
        raise RuntimeError(
            f"{question}() runs in one process, and this job may have several. Start it without a launcher, "
            "on the devices of one host."
        )
    if trainer.tables():
        raise RuntimeError(
            f"{question}() would write rows of the tables that tables() returns into their own folders. Try "
            "a model whose embeddings are parameters."
        )


def repeatable(data: Any, question: str) -> Source:
    """Return data that may be read now and again. Raises RuntimeError for a live stream."""
    source = as_source(data)
    if isinstance(source, StreamSource) and source.is_live:
        raise RuntimeError(
            f"{question}() would use up a live stream. Try with data that can be read again."
        )
    return source


@contextlib.contextmanager
def set_aside(trainer: Trainer) -> Iterator[None]:
    """Let the trainer have other settings, hooks and data inside the block, and nothing to evaluate."""
    before = dict(vars(trainer))
    try:
        trainer.eval_dataset = trainer.eval_datasets = lambda: None
        yield
    finally:
        vars(trainer).clear()
        vars(trainer).update(before)


def short_run(config: Config, folder: str, name: str, **changes: Any) -> Config:
    """Return the settings of a short run with a fixed batch, in a folder of that name."""
    return dataclasses.replace(
        config,
        workdir=f"{folder}/{name}",
        policy="fixed",
        evaluation=Evaluation(),
        saving=Saving(every_s=None, at_end=False),
        reporting=Reporting(window_s=0.25, tensorboard=False, progress=False),
        execution=dataclasses.replace(config.execution, compilation_cache=f"{folder}/programs"),
        **changes,
    )
