"""What a task says of its tables (`tables`, `ids`, a loss that takes `rows`), checked before it runs.

`TaskTables` has what the phases of getting ready need of it, `NoTables` the same for a task without tables.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from jaxgoodput.data.loader import Loader
from jaxgoodput.data.sources import Source
from jaxgoodput.data.streams import StreamSource
from jaxgoodput.embedding.plan import Table
from jaxgoodput.embedding.table import TieredTable
from jaxgoodput.engine.programs.rows import WithRows, rows_apart, with_tables
from jaxgoodput.engine.step import Problem
from jaxgoodput.parallel.place import Place
from jaxgoodput.train.config import Config
from jaxgoodput.train.evaluation import Metrics
from jaxgoodput.train.tables.commits import Opener, Tables
from jaxgoodput.train.tables.feed import Feed, PlainFeed, TableFeed
from jaxgoodput.train.task import Task

Ids = Callable[[PyTree], dict[str, np.ndarray]]
"""A function that returns the ids that a batch on the host reads, by table."""


class NoTables:
    """Stands for the tables of a task that has none: `TaskTables` has the same methods."""

    plans: Mapping[str, Table] = MappingProxyType({})
    ids = None

    def sample(self, own: PyTree, loaded: PyTree) -> PyTree:
        """Return an abstract sample as the loader hands it out; `own` is as the data set has it."""
        return loaded

    def require_place(self, where: Place, source: Source) -> None:
        """Do nothing: without tables, any devices and data will do."""

    def require_rows(self, function: Callable[..., Any], name: str) -> None:
        """Do nothing: without tables, any function of the task will do."""

    def require_settings(self, config: Config, *, has_labels: bool) -> None:
        """Do nothing: without tables, any settings will do."""

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return the optimizer unchanged."""
        return tx

    def problem(self, problem: Problem) -> Problem:
        """Return the problem unchanged."""
        return problem

    def evaluation(
        self, task: Task, opened: Tables, outputs: Metrics | None = None
    ) -> dict[str, Any]:
        """Return the user's metrics, or other `outputs`, as an argument of `Evaluator`."""
        return {"metrics": task.metrics_with_state if outputs is None else outputs}

    def feed(self, opener: Opener, opened: Tables, loader: Loader, config: Config) -> Feed:
        """Return a `PlainFeed`, which hands out the loader's batches."""
        return PlainFeed(loader)


@dataclass(frozen=True)
class TaskTables:
    """The tables of a task, none of them open, and the ids that a batch reads."""

    plans: Mapping[str, Table]
    ids: Ids

    def sample(self, own: PyTree, loaded: PyTree) -> PyTree:
        """Return an abstract sample as the loader hands it out, with the places of its rows.

        `own` is the sample as the data set has it.
        """
        zeros = jax.tree.map(lambda x: np.zeros((1, *x.shape), x.dtype), own)
        places = {
            n: jax.ShapeDtypeStruct(x.shape[1:], np.int32) for n, x in self.ids(zeros).items()
        }
        return WithRows(own=loaded, rows=places)

    def require_place(self, where: Place, source: Source) -> None:
        """Raise ValueError if the tables cannot be used on these devices, or with these data.

        Processes must not come and go, layouts must not cut the model, and the data must not be a stream.
        """
        if where.is_elastic:
            raise ValueError(
                "tables() returns tables, and the hosts of this job come and go (run --nnodes): rows in the "
                "memory of a host that leaves would be lost. Start a fixed number of processes (run "
                "--nproc-per-node). A run may resume from its checkpoint with another number of them."
            )
        cut = [name for name, layout in where.layouts.items() if layout.strategy.is_cut]
        if cut or len(where.layouts) > 1:
            raise ValueError(
                "tables() returns tables, and Config.strategies has "
                f"{', '.join(map(repr, where.layouts))}. With tables, every device holds all slots and the "
                "whole dense model. Leave strategies empty."
            )
        if isinstance(source, StreamSource):
            raise ValueError(
                "dataset() is a stream, and tables need random access: they read batches ahead, and read "
                "them again when the batch size changes. Return something with random access."
            )

    def require_rows(self, function: Callable[..., Any], name: str) -> None:
        """Raise TypeError if a function of the task does not take the rows of its tables."""
        if "rows" not in inspect.signature(function).parameters:
            raise TypeError(
                f"tables() returns tables, and {name}() has no parameter `rows`, so that nothing reads them. "
                f"Write {name}(..., rows=None): rows[table] is float32, in the shape of what ids() says of "
                "that table and one axis more."
            )

    def require_settings(self, config: Config, *, has_labels: bool) -> None:
        """Raise ValueError for settings that do not work with tables."""
        splits = config.accumulates and config.batch.max_micro_batches != 1
        for applies, refusal in (
            (
                config.ema is not None,
                f"Config.ema={config.ema} keeps an average of all parameters, and rows of tables have none. "
                "Set ema=None, or keep in init() what is to be averaged.",
            ),
            (
                has_labels,
                "labels() gives groups of parameters a gain of their own, and rows of tables have no label. "
                "Return None from labels().",
            ),
            (
                splits,
                "Config.batch lets a batch be split into several micro-batches, and a step that reads rows "
                "of tables has one. Set BatchLimits.max_micro_batches=1.",
            ),
            (
                config.statistics.from_norm_layers,
                "Statistics.from_norm_layers measures noise on normalisation layers alone, and rows of "
                "tables have theirs. Set it to False.",
            ),
        ):
            if applies:
                raise ValueError(refusal)

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return the optimizer of everything but rows, which have their own."""
        return rows_apart(tx)

    def problem(self, problem: Problem) -> Problem:
        """Return `problem` for steps that read rows of the tables."""
        return with_tables(problem, self.plans)

    def evaluation(
        self, task: Task, opened: Tables, outputs: Metrics | None = None
    ) -> dict[str, Any]:
        """Return the arguments of an `Evaluator`: metrics of a batch with its rows, and how they are read.

        `outputs` replaces the metrics.
        """
        embedded = HostEmbeddings(self.ids, opened)
        metrics = self._metrics_of(task, outputs)
        return {"metrics": metrics, "read": embedded, "blank": embedded.blank}

    def _metrics_of(self, task: Task, outputs: Metrics | None) -> Metrics:
        of_task = type(task).metrics_with_state is not Task.metrics_with_state
        has_state = of_task or outputs is not None
        written: Callable[..., Any] = task.metrics_with_state if has_state else task.metrics
        name = "metrics_with_state" if has_state else "metrics"
        if outputs is not None:
            written, name = outputs, "outputs"
        self.require_rows(written, name)

        def metrics(params: PyTree, model_state: PyTree, batch: WithRows) -> Mapping[str, Any]:
            state = (model_state,) if has_state else ()
            return written(params, *state, batch.own, rows=batch.rows)

        return metrics

    def feed(self, opener: Opener, opened: Tables, loader: Loader, config: Config) -> Feed:
        """Return a `TableFeed`, which hands out the loader's batches with their rows on the device."""
        return TableFeed(
            opened,
            loader,
            where=opener.where,
            commit_to=opener.workdir,
            clock=opener.clock,
            threads=config.execution.prefetch > 0,
            peers=opener.peers,
            base_batch_size=config.batch.base,
        )


def tables_of(task: Task) -> TaskTables | NoTables:
    """Return what a task says of its tables. Raises TypeError or ValueError if `tables()` is wrong."""
    declared, name = task.tables(), type(task).__name__
    if declared is None:
        return NoTables()
    is_mapping = isinstance(declared, Mapping) and all(isinstance(key, str) for key in declared)
    if not is_mapping or not all(isinstance(t, Table) for t in declared.values()):
        raise TypeError(
            f"{name}.tables() must return a dict from a name to a jaxgoodput.embedding.Table; got "
            f"{declared!r:.100}."
        )
    if not declared:
        raise ValueError(
            f"{name}.tables() returned an empty dict. Return None if there are no tables."
        )
    plans = dict(sorted(declared.items()))
    return TaskTables(plans, _checked_ids(task, tuple(plans)))


def _checked_ids(task: Task, names: tuple[str, ...]) -> Ids:
    """Return `ids` of a task as arrays on the host, by table.

    It raises ValueError if it names others than the tables, or has no row for each sample.
    """

    def found(batch: PyTree) -> dict[str, np.ndarray]:
        given = task.ids(batch)
        if not isinstance(given, Mapping) or given.keys() != set(names):
            named = sorted(given) if isinstance(given, Mapping) else f"a {type(given).__name__}"
            raise ValueError(
                f"ids(batch) gives {named}, and tables() has {sorted(names)}. Return a dict with the ids "
                "that a batch reads of each table."
            )
        num_rows, arrays = len(jax.tree.leaves(batch)[0]), {}
        for name in names:  # sorted, because processes exchange ids in this order
            arrays[name] = np.asarray(given[name])
            if not arrays[name].ndim or len(arrays[name]) != num_rows:
                raise ValueError(
                    f"ids(batch)[{name!r}] has shape {arrays[name].shape} for {num_rows} samples. Its first "
                    "axis must be the batch axis: each sample reads one id, or the same number of ids."
                )
        return arrays

    return found


@dataclass(frozen=True)
class HostEmbeddings:
    """Adds to batches on the host the embeddings that they read. No table changes."""

    ids: Ids
    tables: Mapping[str, TieredTable]

    def __call__(self, batch: PyTree) -> WithRows:
        """Return a batch with its rows. All processes that share the tables call this together."""
        rows = {}
        for name, wanted in self.ids(batch).items():
            table = self.tables[name]
            rows[name] = table.read(wanted.ravel()).reshape(*wanted.shape, table.dim)
        return WithRows(own=batch, rows=rows)

    def blank(self, batch: PyTree) -> WithRows:
        """Return a batch with rows of zeros, in the same shapes, without reading."""
        return WithRows(
            own=batch,
            rows={
                name: np.zeros((*wanted.shape, self.tables[name].dim), np.float32)
                for name, wanted in self.ids(batch).items()
            },
        )
