"""What a task says of its tables (`tables`, `ids`, a loss that takes `rows`), looked at before it runs."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxgoodput.data.sources import Source, StreamSource
from jaxgoodput.embedding.plan import Table
from jaxgoodput.embedding.table import TieredTable
from jaxgoodput.engine.rows import WithRows
from jaxgoodput.parallel.place import Place
from jaxgoodput.train.config import Config


def checked_tables(tables: Any, task: str) -> Mapping[str, Table]:
    """What `tables()` of a task has returned. Raises TypeError or ValueError for what are no tables."""
    if tables is None:
        return {}
    is_mapping = isinstance(tables, Mapping) and all(isinstance(name, str) for name in tables)
    if not is_mapping or not all(isinstance(t, Table) for t in tables.values()):
        raise TypeError(
            f"{task}.tables() must return a dict from a name to a jaxgoodput.embedding.Table; got "
            f"{tables!r:.100}."
        )
    if not tables:
        raise ValueError(f"{task}.tables() returned no table. Return None where there are none.")
    return dict(sorted(tables.items()))


def require_settings(config: Config, *, has_labels: bool) -> None:
    """Raise ValueError for settings that do not go with tables."""
    if config.ema is not None:
        raise ValueError(
            f"Config.ema={config.ema} keeps an average of all parameters, and rows of tables have none. Set "
            "ema=None, or keep in init() what is to be averaged."
        )
    if has_labels:
        raise ValueError(
            "labels() gives groups of parameters a gain of their own, and rows of tables have no label. "
            "Return None from labels()."
        )
    if config.accumulates and config.batch.max_micro_batches != 1:
        raise ValueError(
            "Config.batch lets a batch be split into several micro-batches, and a step that reads rows of "
            "tables has one. Set BatchLimits.max_micro_batches=1."
        )
    if config.statistics.from_norm_layers:
        raise ValueError(
            "Statistics.from_norm_layers measures noise on normalisation layers alone, and rows of tables "
            "have theirs. Set it to False."
        )


def require_place(where: Place, source: Source) -> None:
    """Raise ValueError where tables cannot be used: where processes come and go, under layouts that cut a
    model, of a stream.
    """
    if where.is_elastic:
        raise ValueError(
            "tables() returns tables, and the hosts of this job come and go (run --nnodes): rows in the "
            "memory of one that goes would be lost. Start a fixed number of processes (run "
            "--nproc-per-node); with another number, a run goes on from its checkpoint."
        )
    cut = [name for name, layout in where.layouts.items() if layout.strategy.is_cut]
    if cut or len(where.layouts) > 1:
        raise ValueError(
            f"tables() returns tables, and Config.strategies has {', '.join(map(repr, where.layouts))}: "
            "every device has all slots and the whole dense model. Leave strategies empty."
        )
    if isinstance(source, StreamSource):
        raise ValueError(
            "dataset() is a stream, and tables read batches ahead, which a change of the batch size has "
            "them read again: a stream cannot be. Return something with random access."
        )


def require_rows(function: Callable[..., Any], name: str) -> None:
    """Raise TypeError where a function of a task does not take the rows of its tables."""
    if "rows" not in inspect.signature(function).parameters:
        raise TypeError(
            f"tables() returns tables, and {name}() has no parameter `rows`, so that nothing reads them. "
            f"Write {name}(..., rows=None): rows[table] is float32, in the shape of what ids() says of that "
            "table and one axis more."
        )


def checked_ids(
    ids: Callable[[PyTree], Mapping[str, Any]], tables: Collection[str]
) -> Callable[[PyTree], dict[str, np.ndarray]]:
    """`ids` of a task as arrays on the host, by table.

    It raises ValueError where it names others than the tables, or has no row for each sample.
    """

    def found(batch: PyTree) -> dict[str, np.ndarray]:
        given = ids(batch)
        if not isinstance(given, Mapping) or given.keys() != set(tables):
            named = sorted(given) if isinstance(given, Mapping) else f"a {type(given).__name__}"
            raise ValueError(
                f"ids(batch) gives {named}, and tables() has {sorted(tables)}. Return a dict with the ids "
                "that a batch reads of each table."
            )
        num_rows, arrays = len(jax.tree.leaves(batch)[0]), {}
        for name in sorted(tables):  # in every process alike: they come to rounds in this order
            arrays[name] = np.asarray(given[name])
            if not arrays[name].ndim or len(arrays[name]) != num_rows:
                raise ValueError(
                    f"ids(batch)[{name!r}] has shape {arrays[name].shape} for {num_rows} samples. Its first "
                    "axis is that of the batch: one id, or as many for each sample as for any other."
                )
        return arrays

    return found


def abstract_places(
    ids: Callable[[PyTree], dict[str, np.ndarray]], sample: PyTree
) -> dict[str, jax.ShapeDtypeStruct]:
    """The ids of one sample, as a step is given them: numbers of the batch's rows."""
    zeros = jax.tree.map(lambda x: np.zeros((1, *x.shape), x.dtype), sample)
    return {name: jax.ShapeDtypeStruct(x.shape[1:], np.int32) for name, x in ids(zeros).items()}


@dataclass(frozen=True)
class HostEmbeddings:
    """Batches on the host with the embeddings that they read, wherever those are; no table changes."""

    ids: Callable[[PyTree], dict[str, np.ndarray]]
    tables: Mapping[str, TieredTable]

    def __call__(self, batch: PyTree) -> WithRows:
        """All processes that share the tables come here together, each with its own part."""
        rows = {}
        for name, wanted in self.ids(batch).items():
            table = self.tables[name]
            rows[name] = table.read(wanted.ravel()).reshape(*wanted.shape, table.dim)
        return WithRows(own=batch, rows=rows)

    def blank(self, batch: PyTree) -> WithRows:
        """The same in shape; reads nothing."""
        return WithRows(
            own=batch,
            rows={
                name: np.zeros((*wanted.shape, self.tables[name].dim), np.float32)
                for name, wanted in self.ids(batch).items()
            },
        )
