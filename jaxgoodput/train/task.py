"""`Task`: the few methods that a user writes, and the checks of them that run before anything is traced."""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from jaxgoodput.optim.named import InTurns


class Task:
    """The subject of training: a model, a loss, an optimizer and data.

    Subclass it and write `init`, `loss`, `optimizer` and `dataset`; the other methods are optional. Methods
    must be pure functions of their arguments: they are traced, compiled for several batch sizes, and called
    from several threads.
    """

    def init(self, key: Array) -> Any:
        """Return the parameters, a PyTree, or `Variables(params=, model_state=)` with mutable state."""
        raise _undefined(self, "init", "init(self, key) -> the parameters, a dict of arrays")

    def loss(self, params: PyTree, batch: PyTree, key: Array) -> Any:
        """Return the loss of one micro-batch, whose leaves are `[micro_batch_size, ...]`.

        Return per-sample losses `[micro_batch_size]` if you can. If the weight is not the number of samples,
        return `Loss(sum, weight, aux)`, per sample or in total. A scalar mean works too, but cannot leave out
        padded samples. `key` is fresh for every micro-batch on every replica. With `Config(keys="sample")` it
        is an array of keys, `[micro_batch_size]`, one for each sample.

        Return a dict of losses by name if `optimizer` returns optimizers by the same names: each loss is
        then differentiated by the parameters of its own name alone. For the weighted sum of several losses
        and one optimizer, return `Loss.weighted`.

        The method may take two more parameters. `mask`, `[micro_batch_size]`, is 1 for real rows and 0 for
        padding, for losses in which samples see each other (`Config.loss` says how batches are split for
        them). `rows` holds the embeddings that the micro-batch reads, by table: see `ids`.

        It is traced, not called for every step, and an elastic job does not trace it again when hosts come or
        go. So it must not read anything that changes, such as attributes or `jax.process_count()`.
        """
        raise TypeError(
            f"{type(self).__name__} defines neither loss nor loss_and_state. Write "
            "loss(self, params, batch, key); for a model with mutable state, "
            "loss_and_state(self, params, model_state, batch, key) -> (loss, model_state)."
            + _foreign(self, "loss")
        )

    def loss_and_state(
        self, params: PyTree, model_state: PyTree, batch: PyTree, key: Array
    ) -> tuple[Any, PyTree]:
        """Return the loss and the model state after the micro-batch; replaces `loss` for mutable state.

        It may take `mask` and `rows`, like `loss`. Floating leaves of the state (BatchNorm statistics) are
        averaged over replicas, weighted by samples. Leaves named in `Variables.summed`, to which each call
        adds over its samples (a count of tokens), are added up instead. Other leaves (counters, keys) must
        change in the same way on every replica. Leaves keep their shapes and types.
        """
        return self.loss(params, batch, key), model_state

    def tables(self) -> Mapping[str, Any] | None:
        """Return embedding tables (`embedding.Table`) by name, which may be larger than a device; or None.

        `fit` opens and saves them. When a run resumes, they are restored as they were saved with its
        checkpoint. Their own optimizer updates only the rows that a step reads, at its learning rate times
        the gain. Every device holds all slots of a table (`device_rows`); only the rows in RAM and on disk
        are divided among the processes, so more devices do not hold more rows.
        """
        return None

    def ids(self, batch: PyTree) -> Mapping[str, Any]:
        """Return the ids that a batch reads from each table, integers `[batch, ...]`, by the table's name.

        It is called in the background with NumPy arrays. `loss` and `metrics` receive the embeddings as a
        parameter called `rows`: by table, float32, with the shape of the ids and one more axis.
        """
        raise TypeError(
            f"{type(self).__name__} has tables() and no ids(). Write ids(self, batch) -> {{table: the ids "
            "that the batch reads of it, integers [batch, ...]}."
        )

    def optimizer(
        self,
    ) -> optax.GradientTransformation | Mapping[str, optax.GradientTransformation] | InTurns:
        """Return any optax optimizer, tuned at the base batch size.

        It receives the averaged gradient of the whole batch, so clipping acts on that. Its updates are
        multiplied by the learning-rate gain. Its schedules are called with progress in base steps. If
        `Config.epochs` ends the run, they are called with the samples taken divided by the base batch size
        instead, so that a decay ends with the run. Do not put an average of the parameters into the chain,
        where it would miss the gain; use `Config.ema`.

        If you return a dict of optimizers by name, each moves the part of the parameters with its name (a key
        of the dict that `init` returns) by the gradient of the loss with its name, all in every update.
        `InTurns` has them take turns. Their schedules are called with the progress of their own updates.
        """
        raise _undefined(self, "optimizer", "optimizer(self): return optax.adam(1e-3), or another")

    def learning_rate(self, progress: Any) -> Any:
        """Return the optimizer's learning rate at `progress`; None if unknown.

        `progress` is the argument of schedules: see `optimizer`. An optax optimizer does not reveal its
        schedule. This method fills a chart, and says when a batch with which the loss leapt may be tried
        again: once the rate has halved. `optimizer()` may pass it to optax as the schedule.
        """
        return None

    def dataset(self) -> Any:
        """Return the training samples, as one of several kinds of data set.

        It may be a dict of arrays, anything with `__len__` and `__getitem__`, a `Source`, a grain
        `MapDataset`, or a stream. Samples are PyTrees of numbers, all of one shape. Each is used exactly once
        per epoch, in an order that depends only on `Config.seed` and the epoch, however batch, devices and
        processes change.

        Random augmentation should depend on (index, epoch) alone, so that a resumed run repeats it. A grain
        `MapDataset` is read at `epoch * len + index`. An object with a method `item_of_epoch(index, epoch)`
        is read through it instead of `[index]`, and a `Source` through `batch_of_epochs(indices, epochs)`.
        Evaluations read epoch 0. `Config.execution.readers` is the number of threads that may call `[index]`
        at once.

        Two kinds have no epochs. They are read in their own order and need `Config.base_steps`: a
        `MapDataset` after `.repeat()`, and a stream, which is any other iterable of samples. `stream` makes
        one of a loader of batches, and of several passes. If its iterator has `get_state()` and
        `set_state(state)`, with JSON values or bytes, or it has `state_dict()` and `load_state_dict(state)`,
        its state is saved in checkpoints; otherwise a resumed run skips what was used. Samples are used
        exactly once if the restored stream repeats them, which is tried before the run begins. The run ends
        when the stream does. Every process reads the whole stream and trains on its part, so it must be the
        same in all processes.
        """
        raise _undefined(
            self,
            "dataset",
            'dataset(self): return {"x": inputs, "y": labels}, arrays with one row per sample',
        )

    def eval_dataset(self) -> Any:
        """Return held-out samples, or None; evaluated as `Config.evaluation` says, and at the end."""
        return None

    def eval_datasets(self) -> Mapping[str, Any] | None:
        """Return several sets of held-out samples by name, instead of `eval_dataset`; or None.

        Each is evaluated by the same `metrics` and `summarize`, and its results are called "name/metric",
        such as "test/accuracy".
        """
        return None

    def metrics(self, params: PyTree, batch: PyTree) -> Mapping[str, Any]:
        """Return the per-sample outputs of an evaluation by name, each `[batch, ...]`."""
        raise TypeError(
            f"{type(self).__name__} has an eval_dataset but no metrics. Write "
            "metrics(self, params, batch) -> {name: one value per sample}."
            + _foreign(self, "metrics")
        )

    def metrics_with_state(
        self, params: PyTree, model_state: PyTree, batch: PyTree
    ) -> Mapping[str, Any]:
        """Return the outputs of `metrics`, for a model with mutable state; the state is only read."""
        return self.metrics(params, batch)

    def summarize(self, outputs: Mapping[str, np.ndarray]) -> Mapping[str, float]:
        """Return the metrics computed from the outputs of all held-out samples; by default, their means."""
        return {name: float(np.mean(values)) for name, values in outputs.items()}

    def trainable(self, params: PyTree) -> PyTree | None:
        """Return a tree of bool like `params`, in which False freezes a leaf; None trains all leaves."""
        return None

    def labels(self, params: PyTree) -> PyTree | None:
        """Return a tree of str like `params`, which names groups with their own noise statistics and gain.

        None makes one group of all parameters.
        """
        return None


# Methods that other trainers call, by the one that has their part here.
FOREIGN = {
    "init": ("init_params", "init_fn", "init_model"),
    "loss": ("training_step", "train_step", "compute_loss", "loss_fn", "forward"),
    "optimizer": ("configure_optimizers", "create_optimizer"),
    "dataset": ("train_dataloader", "get_train_dataloader", "train_dataset"),
    "metrics": ("validation_step", "test_step", "eval_step", "compute_metrics"),
}


def _undefined(task: Task, name: str, what: str) -> TypeError:
    return TypeError(
        f"{type(task).__name__} does not define {name}. Write {what}.{_foreign(task, name)}"
    )


def _foreign(task: Task, missing: str) -> str:
    """Return a sentence on a method that other trainers call in place of a `missing` one, if there is one."""
    names = [one for one in FOREIGN[missing] if callable(getattr(type(task), one, None))]
    return f" The run does not call {names[0]}: {missing} has its part." if names else ""


# The arguments of each method, without self. An optional method is checked only if the task defines it.
ARGUMENTS = {
    name: tuple(inspect.signature(method).parameters)[1:]
    for name, method in vars(Task).items()
    if inspect.isfunction(method)
}
ASKED = {  # optional parameters, passed by name if the method has them
    "loss": ("mask", "rows"),
    "loss_and_state": ("mask", "rows"),
    "metrics": ("rows",),
    "metrics_with_state": ("rows",),
}


def require_methods(task: Task) -> None:
    """Raise TypeError if a method of a task cannot be called with its arguments."""
    for name, arguments in ARGUMENTS.items():
        if not callable(value := getattr(task, name)):
            raise TypeError(
                f"{type(task).__name__}.{name} is {value!r:.60}, but {name} must be a method. Write `def "
                f"{name}({', '.join(('self', *arguments))})`, or give the attribute another name."
            )
        if getattr(type(task), name) is getattr(Task, name):
            continue  # the default raises a better error when it is needed
        try:
            signature = inspect.signature(getattr(task, name))
        except ValueError:  # a callable written in C has no signature
            continue
        asked = dict.fromkeys(one for one in ASKED.get(name, ()) if one in signature.parameters)
        try:
            signature.bind(*arguments, **asked)
        except TypeError as error:
            own = ", ".join(("self", *arguments, *(f"{one}=None" for one in asked)))
            raise TypeError(
                f"{type(task).__name__}.{name}{signature} cannot be called with ({', '.join(arguments)}): "
                f"{error}. Write {name}({own})."
            ) from None


def require_bools(mask: PyTree, params: PyTree) -> None:
    """Raise TypeError if the result of `trainable` is not a bool for every parameter."""
    given, wanted = _by_path(mask), _by_path(params)
    wrong = [f"{path} is missing" for path in wanted if path not in given]
    for path, x in given.items():
        if path not in wanted:
            wrong.append(f"{path} is not a parameter")
        elif not isinstance(x, bool | np.bool_):
            wrong.append(f"{path} is {x!r:.60}")
    if not wrong and jax.tree.structure(mask) != jax.tree.structure(params):
        wrong = ["its containers (dict, list, tuple) differ from those of the parameters"]
    if wrong:
        what = "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise TypeError(
            f"trainable() must return a bool for every parameter, but {what}. To freeze a whole part, write "
            "jax.tree.map(lambda _: False, params[part])."
        )


def _by_path(tree: PyTree) -> dict[str, Any]:
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {f"params{jax.tree_util.keystr(path)}": x for path, x in found}


def require_floating(kept: PyTree) -> None:
    """Raise TypeError if a trainable parameter is not of a type that has a gradient."""
    for path, x in _by_path(kept).items():
        dtype = jnp.result_type(x)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"init(): {path} is {dtype}, but trainable parameters must be floating. Put counters into "
                "model_state (Variables), write 0.0 instead of 0, or return False for it in trainable()."
            )
