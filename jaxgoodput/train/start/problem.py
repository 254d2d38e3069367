"""The user's methods as a `Problem`, an `Evaluator` and data: what a task gives, checked before it runs."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import logging
from jaxtyping import Array, PyTree

from jaxgoodput._jax import trying
from jaxgoodput.clock import Clock
from jaxgoodput.data.datasets import as_source, has_own_order
from jaxgoodput.data.readers import Attempts
from jaxgoodput.data.rows import numbered_sample
from jaxgoodput.data.sources import Source, abstract_sample, is_endless
from jaxgoodput.engine.programs.named import NamedProblem
from jaxgoodput.engine.programs.rows import as_seen
from jaxgoodput.engine.programs.sample_keys import with_sample_keys
from jaxgoodput.engine.state import SownState, Variables, split
from jaxgoodput.engine.step import LossAndState, Problem, moving
from jaxgoodput.engine.traces import Traces
from jaxgoodput.optim.adaptive import AdaptiveOptimizer, adaptive
from jaxgoodput.optim.named import NamedPart, named
from jaxgoodput.optim.treatment import Treatment, treatment_of
from jaxgoodput.parallel.partition import leaves_by_name
from jaxgoodput.parallel.place import Place
from jaxgoodput.parallel.strategy import anywhere
from jaxgoodput.train.checkpoints.meta import saveable
from jaxgoodput.train.config import Config
from jaxgoodput.train.evaluation import Evaluator, Evaluators, Metrics
from jaxgoodput.train.start.idioms import require_parameters
from jaxgoodput.train.start.named import (
    by_name,
    named_losses,
    require_own_optimizer,
    require_parts,
    turns_of,
)
from jaxgoodput.train.tables.commits import Tables
from jaxgoodput.train.tables.declared import NoTables, TaskTables, tables_of
from jaxgoodput.train.task import Task, require_bools, require_floating, require_methods

OFTEN = 16  # steps between two measurements, up to which those that measure should run fast


class TaskInputs:
    """What a task gives, asked for once, however often a run has to get ready."""

    def __init__(self, task: Task, config: Config, clock: Clock):
        require_methods(task)
        self.task = task
        self.config = config
        self.clock = clock

    @property
    def attempts(self) -> Attempts:
        """How many times a failing read of the task's data sets is tried before it is an error."""
        return Attempts(num_retries=self.config.execution.read_retries, clock=self.clock)

    @functools.cached_property
    def dataset(self) -> Source:
        """The task's training samples, as a `Source`."""
        return as_source(self.task.dataset())

    @functools.cached_property
    def eval_datasets(self) -> Mapping[str, Any]:
        """The task's sets of held-out samples as it returns them, by name; "" is the name of a single one.

        Raises ValueError if the task has a single one and several, or if one of several has no name.
        """
        one, several = self.task.eval_dataset(), self.task.eval_datasets()
        if several is None:
            return {} if one is None else {"": one}
        if one is not None:
            raise ValueError(
                f"{type(self.task).__name__} has eval_dataset and eval_datasets. Write one of them: a single "
                "set of held-out samples, or several by name."
            )
        if not (isinstance(several, Mapping) and all(n and isinstance(n, str) for n in several)):
            raise ValueError(
                'eval_datasets() must return data sets by name, such as {"validation": ..., "test": ...}; '
                f"got {several!r:.60}."
            )
        return several

    @functools.cached_property
    def tables(self) -> TaskTables | NoTables:
        """What the task says of its embedding tables, none of them open."""
        return tables_of(self.task)

    @functools.cached_property
    def own_sample(self) -> PyTree[jax.ShapeDtypeStruct]:
        """One abstract training sample. Kept, because a stream has its first sample only for a while."""
        return self.attempts(functools.partial(abstract_sample, self.dataset))

    @functools.cached_property
    def sample(self) -> PyTree[jax.ShapeDtypeStruct]:
        """One abstract sample as steps get it; with tables, it also says which rows are read."""
        return self.tables.sample(self.own_sample, as_loaded(self.own_sample, self.config))

    @functools.cached_property
    def problem(self) -> Problem:
        """The task's methods as a `Problem`; made without a device."""
        return problem_of(self.task, self.config, self.tables)

    @functools.cached_property
    def traces(self) -> Traces:
        """What tracing its methods on one set of devices found, for the next set."""
        return Traces()


def problem_of(task: Task, config: Config, tables: TaskTables | NoTables | None = None) -> Problem:
    """Return the user's methods as a `Problem`; chooses the learning-rate rule if the user chose none.

    `tables` is what `tables_of` returns for the task, which is called if None.

    Raises ValueError for settings that do not work with tables. Raises TypeError if the optimizer is not an
    optax transformation, or if the state holds anything that cannot be checkpointed.
    """
    given = task.optimizer()
    turns = turns_of(given)
    made = _abstract_variables(task)
    params = made.params
    mask = task.trainable(params)
    kept = _trained(params, mask)
    labels = task.labels if task.labels(kept) is not None else None
    tables = tables or tables_of(task)
    loss_and_state, takes_mask = _loss_of(task, tables, None if turns is None else turns.names)
    tables.require_settings(config, has_labels=labels is not None)
    about = {
        "init": task.init,
        "loss_and_state": loss_and_state,
        "takes_mask": takes_mask,
        "base_batch_size": config.batch.base,
        "trainable": None if mask is None else task.trainable,
        "from_norm_layers": config.statistics.from_norm_layers,
        "measures_often": (config.statistics.every_steps or OFTEN + 1) <= OFTEN,
        "has_own_rates": labels is not None or turns is not None,
        "compute_dtype": None if config.compute_dtype is None else jnp.dtype(config.compute_dtype),
        "ema": config.ema,
        "swaps_products": config.execution.swap_cpu_products,
        "summed": _summed(made),
    }
    if turns is None:
        part = _Part.of(_transformation(given), kept, config)
        problem = Problem(
            tx=part.adaptive(config, tables.optimizer(part.treatment.tx), labels),
            preconditioned=part.is_divided,
            moments=part.treatment.moments,
            moves=part.treatment.moves,
            **about,
        )
        return tables.problem(_keyed(problem, config))
    _require_for_names(config, tables, has_labels=labels is not None)
    require_parts(params, kept, turns.names)
    optimizers = by_name(given)
    parts = {
        name: _Part.of(_transformation(optimizers[name], name), kept[name], config)
        for name in turns.names
    }
    problem = NamedProblem(
        tx=named(
            {
                name: NamedPart(tx=part.adaptive(config, part.treatment.tx), seen=part.seen)
                for name, part in parts.items()
            },
            turns,
            base_batch_size=config.batch.base,
        ),
        preconditioned=any(part.is_divided for part in parts.values()),
        moments=sum((part.treatment.moments for part in parts.values()), ()),
        moves=sum((part.treatment.moves for part in parts.values()), ()),
        turns=turns,
        divided=tuple(part.is_divided for part in parts.values()),
        **about,
    )
    return _keyed(problem, config)


def _keyed(problem: Problem, config: Config) -> Problem:
    """Return a problem whose loss gets the keys that the configuration says."""
    return with_sample_keys(problem) if config.keys == "sample" else problem


def as_loaded(sample: PyTree, config: Config) -> PyTree:
    """Return an abstract sample of the data set as the loader of the run hands it out."""
    return numbered_sample(sample) if config.keys == "sample" else sample


def _transformation(tx: Any, name: str | None = None) -> optax.GradientTransformation:
    """Return the optimizer of a name, or the only one. Raises TypeError if it is none of optax's."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        if name is not None:
            raise TypeError(
                f"optimizer()[{name!r}] must be an optax.GradientTransformation; got {type(tx).__name__}. "
                "Write optax.adam(1e-3), or another one of optax."
            )
        raise TypeError(
            f"optimizer() must return an optax.GradientTransformation; got {type(tx).__name__}. "
            "Write `return optax.adam(1e-3)`, or another one of optax."
        )
    if isinstance(tx, optax.GradientTransformation):
        return tx
    return optax.GradientTransformationExtraArgs(tx.init, tx.update)  # such as optax.MultiSteps


@dataclass(frozen=True, kw_only=True)
class _Part:
    """An optimizer, how it is treated, and whether noise is measured in its preconditioner's coordinates."""

    treatment: Treatment
    is_divided: bool

    @classmethod
    def of(cls, tx: optax.GradientTransformation, kept: PyTree, config: Config) -> "_Part":
        """Find out about an optimizer of the parameters `kept`."""
        treatment = _treatment(tx, kept, config)
        _require_progress(treatment, config)
        preconditioned = config.statistics.preconditioned
        preconditioned = treatment.is_adam_like if preconditioned is None else preconditioned
        if config.statistics.from_norm_layers:  # their factors are not parameters of tx
            preconditioned = False
        return cls(treatment=treatment, is_divided=preconditioned)

    def seen(self, tree: PyTree) -> PyTree:
        """Return the leaves of a gradient on which noise is measured."""
        return moving(as_seen(tree), self.treatment.moves)

    def adaptive(
        self, config: Config, tx: optax.GradientTransformation, labels: Any = None
    ) -> AdaptiveOptimizer:
        """Return the optimizer `tx`, prepared for a batch that changes."""
        return adaptive(
            tx,
            self.treatment.rule,
            base_batch_size=config.batch.base,
            smoothing=config.statistics.smoothing,
            labels=labels,
            # A run of some epochs ends by its samples, and so do its schedules.
            schedules="progress" if config.epochs is None else "samples",
            # With a fixed policy the rate stays, also for the last batch, which is smaller.
            shrinks=config.policy != "fixed" or config.tuning.fixed_tolerance > 0,
            long_averages=self.treatment.long_averages,
            seen=self.seen,
            clocks=self.treatment.clocks,
        )


def _require_for_names(config: Config, tables: TaskTables | NoTables, *, has_labels: bool) -> None:
    """Raise ValueError for what does not work with named updates."""
    for is_used, what, remedy in (
        (not isinstance(tables, NoTables), "tables()", "Return a single optimizer."),
        (has_labels, "labels()", "Drop them: each name has its own noise and gain already."),
        (config.statistics.from_norm_layers, "Statistics.from_norm_layers", "Set it to False."),
    ):
        if is_used:
            raise ValueError(
                f"optimizer() returned optimizers by name, with which {what} does not work. {remedy}"
            )


def _abstract_variables(task: Task) -> Variables:
    """Return what `init` makes, abstract. Raises TypeError for anything that cannot be checkpointed."""

    def init(key: Array) -> Any:
        made = task.init(key)
        require_parameters(made)
        return made

    made = jax.eval_shape(anywhere(saveable(init, "init()")), jax.random.key(0))
    return made if isinstance(made, Variables) else Variables(params=made, model_state=())


def _summed(made: Variables) -> tuple[str, ...]:
    """Return `Variables.summed`. Raises ValueError if the model state has nothing at one of its paths."""
    names = leaves_by_name(made.model_state)
    for path in made.summed:
        if not any(name == path or name.startswith(f"{path}/") for name in names):
            raise ValueError(
                f"Variables.summed names {path!r}, and the model state has no such leaf. It has "
                f"{', '.join(names) or 'no leaves'}."
            )
    return tuple(made.summed)


def _trained(params: PyTree, mask: PyTree | None) -> PyTree:
    """Return the parameters that train. Raises ValueError or TypeError if they cannot."""
    if mask is not None:
        require_bools(mask, params)
    kept = params if mask is None else split(params, mask)[0]
    if not jax.tree.leaves(kept):
        raise ValueError(
            "there is nothing to train: init() has no leaf that trainable() allows. Return True for at least "
            "one parameter."
        )
    require_floating(kept)
    return kept


def _treatment(tx: optax.GradientTransformation, kept: PyTree, config: Config) -> Treatment:
    """Return how the noise and the learning rate of an optimizer are treated, found by probing it."""
    preconditioned = config.statistics.preconditioned
    if config.statistics.from_norm_layers:
        preconditioned = False
    with trying():
        jax.eval_shape(saveable(tx.init, "the state of optimizer()"), kept)
        return treatment_of(tx, kept, config.rule, preconditioned)


def _require_progress(treatment: Treatment, config: Config) -> None:
    """Raise ValueError if the batch may change, and the optimizer holds what only counts updates."""
    if config.policy == "fixed" and not config.tuning.fixed_tolerance:
        return
    if treatment.by_updates:
        raise ValueError(
            f"optimizer() uses {'; and '.join(treatment.by_updates)}. A number of updates has no fixed "
            "meaning if the batch changes. If the wrapper is there to accumulate gradients, drop it and set "
            "BatchLimits.micro, the samples that are computed at once: larger batches are accumulated from "
            'micro-batches. Or keep the batch, with Config.policy "fixed": the wrapper then works as in an '
            "optax loop."
        )
    if treatment.clocks.held:
        raise ValueError(
            f"optimizer() has a schedule, at {', '.join(treatment.clocks.held)} of its state, inside a "
            "wrapper that does not advance it in every update. Progress cannot take the place of its count "
            "if the batch changes. Take the schedule out of the wrapper, or keep the batch, with "
            'Config.policy "fixed".'
        )
    if treatment.own_counts:
        logging.warning(
            "optimizer() uses %s. A schedule that is given to it goes by updates, and so ends late if the "
            "batch grows; a constant is right. Put the schedule behind it: "
            "optax.chain(tx, optax.scale_by_schedule(schedule)).",
            " and ".join(treatment.own_counts),
        )


def _loss_of(
    task: Task, tables: TaskTables | NoTables, names: tuple[str, ...] | None = None
) -> tuple[LossAndState, bool]:
    """Return the user's loss, and whether it has a parameter `mask` for the mask of real rows.

    `names` are those of its losses; None: it has a single one.
    """
    has_state = type(task).loss_and_state is not Task.loss_and_state
    written: Callable[..., Any] = task.loss_and_state if has_state else task.loss
    tables.require_rows(written, "loss_and_state" if has_state else "loss")
    takes_mask = "mask" in inspect.signature(written).parameters

    def loss_and_state(
        params: PyTree,
        model_state: PyTree,
        batch: PyTree,
        key: Array,
        mask: Array | None = None,
        **asked: Any,
    ) -> tuple[Any, PyTree]:
        if takes_mask:  # there is none if the loss is only looked at
            asked["mask"] = jnp.ones(len(jax.tree.leaves(batch)[0])) if mask is None else mask
        if has_state:
            out, changed = written(params, model_state, batch, key, **asked)
            changed = changed.kept if isinstance(changed, SownState) else changed
        else:
            out, changed = written(params, batch, key, **asked), model_state
        if names is None:
            require_own_optimizer(out)
            return out, changed
        return named_losses(out, names), changed

    return loss_and_state, takes_mask


def evaluator_of(
    inputs: TaskInputs, where: Place, opened: Tables = MappingProxyType({})
) -> Evaluators:
    """Return the evaluation of a task on its held-out data, with its tables `opened`.

    Raises ValueError if the task has no such data, or if they have no end.
    """
    task = inputs.task
    if not inputs.eval_datasets:
        raise ValueError(
            f"{type(task).__name__}.eval_dataset() returned None: there is nothing to evaluate on. Return "
            "held-out samples."
        )
    made = _evaluator(inputs, where, inputs.tables.evaluation(task, opened))
    return Evaluators(
        {name: made(source=_held_out(name, x, task)) for name, x in inputs.eval_datasets.items()}
    )


def predictor_of(
    inputs: TaskInputs, where: Place, opened: Tables, data: Any, outputs: Metrics | None
) -> Evaluator:
    """Return what computes `outputs`, or the task's metrics if it is None, for every sample of `data`.

    Raises ValueError if the data have no end.
    """
    arguments = inputs.tables.evaluation(inputs.task, opened, outputs)
    source = _finite_source("the data of predict()", data)
    name = "metrics" if outputs is None else "outputs"
    return _evaluator(inputs, where, arguments)(source=source, name=name)


def _evaluator(
    inputs: TaskInputs, where: Place, arguments: Mapping[str, Any]
) -> Callable[..., Evaluator]:
    """Return what makes an `Evaluator` of a source."""
    config = inputs.config
    return functools.partial(
        Evaluator,
        layout=where.layout,
        base=max(config.batch.base // where.num_replicas, 1),
        micro_batch_size=config.evaluation.micro_batch_size,
        compute_dtype=None if config.compute_dtype is None else jnp.dtype(config.compute_dtype),
        process_index=where.process_index,
        process_count=where.process_count,
        clock=inputs.clock,
        num_readers=config.execution.readers,
        num_retries=config.execution.read_retries,
        **arguments,
    )


def _held_out(name: str, data: Any, task: Task) -> Source:
    """Return a set of held-out samples as a source. Raises ValueError if it cannot be one."""
    what = type(task).__name__ + (f".eval_datasets()[{name!r}]" if name else ".eval_dataset()")
    try:
        return _finite_source(what, data)
    except (TypeError, ValueError) as error:
        if name or not isinstance(data, Mapping):
            raise
        raise type(error)(
            f"{what}: {error} If {', '.join(map(str, data))} are several data sets, return them from "
            "eval_datasets()."
        ) from error


def _finite_source(what: str, data: Any) -> Source:
    """Return data of which every sample is taken once. Raises ValueError if they are not such data."""
    refusal = ValueError(
        f"{what}: a {type(data).__name__} that is a stream or has no end, and every sample is taken once. "
        "Use something with a length and [], such as the data set that a loader reads (loader.dataset), or "
        "arrays."
    )
    if not isinstance(data, Mapping | Source) and has_own_order(data):
        raise refusal
    source = as_source(data)
    if is_endless(source):
        raise refusal
    return source
