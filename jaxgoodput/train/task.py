"""`Task`: the few methods that a user writes; pure functions of their arguments. And what is wrong with
them, said before any of them is traced.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree


class Task:
    """What is trained: a model, a loss, an optimizer and data.

    All methods are traced, compiled for several batch sizes, and called from more than one thread.
    """

    def init(self, key: Array) -> Any:
        """The parameters, a PyTree; `Variables(params=, model_state=)` for a model with mutable state."""
        raise _undefined(self, "init", "init(self, key) -> the parameters, a dict of arrays")

    def loss(self, params: PyTree, batch: PyTree, key: Array) -> Any:
        """The loss of one micro-batch, leaves of `batch` being `[micro_batch_size, ...]`.

        Returns per-sample losses `[micro_batch_size]`; or `Loss(sum, weight, aux)`, per sample or in
        total, where the weight is not the number of samples; or a scalar mean, which cannot leave
        padded samples out. `key` is a fresh key for every micro-batch on every replica. A further
        parameter called `mask` is given 1 for real rows and 0 for padding, `[micro_batch_size]`, for losses
        in which samples see each other; see `Config.loss` for what splitting a batch means for those. One
        called `rows` is given the embeddings that the micro-batch reads, by table: see `ids`.

        It is traced, like `optimizer`'s update, and not called again for every step; in a job whose hosts
        come and go it is not called again for another set of them either. So it must not read what changes
        meanwhile: attributes, `jax.process_count()`.
        """
        raise TypeError(
            f"{type(self).__name__} defines neither loss nor loss_and_state. Write "
            "loss(self, params, batch, key); for a model with mutable state, "
            "loss_and_state(self, params, model_state, batch, key) -> (loss, model_state)."
        )

    def loss_and_state(
        self, params: PyTree, model_state: PyTree, batch: PyTree, key: Array
    ) -> tuple[Any, PyTree]:
        """`loss` for a model with mutable state: also returns the state after the micro-batch.

        It is given `mask`, too, where it has a parameter of that name.

        Floating leaves (BatchNorm statistics) are averaged over replicas, weighted by samples; other
        leaves (counters, keys) must advance alike on every replica.
        """
        return self.loss(params, batch, key), model_state

    def tables(self) -> Mapping[str, Any] | None:
        """Tables of rows by id, `embedding.Table`s by name, for what may be larger than the device.

        None: there are none. `fit` opens and saves them: where it goes on from a checkpoint, they are as they
        were saved with it, whatever came after. Their own optimizer changes the rows that a step reads, and
        no others, with its learning rate times the gain. Several devices and processes hold them
        together.
        """
        return None

    def ids(self, batch: PyTree) -> Mapping[str, Any]:
        """The ids that a batch reads of every table, integers `[batch, ...]`, by the table's name.

        `batch` are NumPy arrays, and it is called behind the loop. `loss` and `metrics` then get a
        parameter called `rows`: the embeddings by table, float32 in the shape of the ids and one axis more.
        """
        raise TypeError(
            f"{type(self).__name__} has tables() and no ids(). Write ids(self, batch) -> {{table: the ids "
            "that the batch reads of it, integers [batch, ...]}."
        )

    def optimizer(self) -> optax.GradientTransformation:
        """Any optax optimizer, tuned at the base batch size.

        It sees the averaged gradient of the whole batch (so clipping does too); its schedules are
        called with progress in base steps, or, where `Config.epochs` ends the run, with the samples
        taken over the base batch size, so that a decay ends when the run does; its updates are
        multiplied by the learning-rate gain. An average of the parameters is no link of it: `Config.ema`
        keeps one of what the gain made of them.
        """
        raise _undefined(self, "optimizer", "optimizer(self): return optax.adam(1e-3), or another")

    def learning_rate(self, progress: Any) -> Any:
        """The optimizer's own learning rate at `progress` base steps, for the dashboard; None: unknown.

        `progress` is what schedules are called with: see `optimizer`.

        An optax optimizer does not say what its schedule is. By itself this changes nothing but a
        chart; `optimizer()` may hand it to optax as its schedule.
        """
        return None

    def dataset(self) -> Any:
        """Training samples: a dict of arrays, anything with `__len__` and `__getitem__`, a `Source`, a grain
        `MapDataset`, or a stream.

        Samples are PyTrees of numbers of one shape. Each is used exactly once an epoch, in an order that
        follows from `Config.seed` and the epoch, over any change of batch, devices and processes.

        Random augmentation: a grain `MapDataset` draws anew in every epoch (sample i of epoch e is read at
        `e * len + i`); an object with a method `item_of_epoch(index, epoch)` is read through that instead of
        `[index]`, and a `Source` by `batch_of_epochs(indices, epochs)`. Drawn from (index, epoch) alone, it
        is the same in a resumed run. Evaluations read epoch 0. `Config.execution.readers` says how many
        threads may call `[index]` at once.

        Without epochs, under `Config.base_steps`, in their own order: a `MapDataset` after `.repeat()`, by
        place; and a stream (a grain `IterDataset`, or anything iterable whose iterator has
        `get_state()` and `set_state(state)`, of JSON values or bytes), whose state is part of the checkpoint.
        Its samples are used exactly once if, set back, it gives the same ones again. The run ends where it
        does. Each process reads all of it and trains on its part, so it is to be the same in all of them.
        """
        raise _undefined(
            self,
            "dataset",
            'dataset(self): return {"x": inputs, "y": labels}, arrays with one row per sample',
        )

    def eval_dataset(self) -> Any:
        """Held-out samples, or None. `Config.evaluation` says when they are evaluated; at the end anyway."""
        return None

    def metrics(self, params: PyTree, batch: PyTree) -> Mapping[str, Any]:
        """Per-sample outputs of an evaluation, name -> `[batch, ...]`."""
        raise TypeError(
            f"{type(self).__name__} has an eval_dataset but no metrics. Write "
            "metrics(self, params, batch) -> {name: one value per sample}."
        )

    def metrics_with_state(
        self, params: PyTree, model_state: PyTree, batch: PyTree
    ) -> Mapping[str, Any]:
        """`metrics` for a model with mutable state, which an evaluation only reads."""
        return self.metrics(params, batch)

    def summarize(self, outputs: Mapping[str, np.ndarray]) -> Mapping[str, float]:
        """Numbers from the outputs of all held-out samples; the mean of each unless overridden."""
        return {name: float(np.mean(values)) for name, values in outputs.items()}

    def trainable(self, params: PyTree) -> PyTree | None:
        """A tree of bool like `params`: False freezes a leaf. None trains all of them."""
        return None

    def labels(self, params: PyTree) -> PyTree | None:
        """A tree of str like `params`: groups with noise statistics and a gain of their own.

        None is one group.
        """
        return None


def _undefined(task: Task, name: str, what: str) -> TypeError:
    return TypeError(f"{type(task).__name__} does not define {name}. Write {what}.")


# What each is called with; those a task need not write are looked at where it has.
ARGUMENTS = {
    "init": ("key",),
    "loss": ("params", "batch", "key"),
    "loss_and_state": ("params", "model_state", "batch", "key"),
    "optimizer": (),
    "dataset": (),
    "learning_rate": ("progress",),
    "eval_dataset": (),
    "metrics": ("params", "batch"),
    "metrics_with_state": ("params", "model_state", "batch"),
    "summarize": ("outputs",),
    "trainable": ("params",),
    "labels": ("params",),
    "tables": (),
    "ids": ("batch",),
}
ASKED = {  # given by name where it is asked for
    "loss": ("mask", "rows"),
    "loss_and_state": ("mask", "rows"),
    "metrics": ("rows",),
    "metrics_with_state": ("rows",),
}


def require_methods(task: Task) -> None:
    """Raise TypeError where a method of a task cannot be called with what it is given."""
    for name, arguments in ARGUMENTS.items():
        if not callable(value := getattr(task, name)):
            raise TypeError(
                f"{type(task).__name__}.{name} is {value!r:.60}, but {name} is a method of a Trainer. Write "
                f"`def {name}({', '.join(('self', *arguments))})`, or give the attribute another name."
            )
        if getattr(type(task), name) is getattr(Task, name):
            continue  # it raises by itself where it is needed
        try:
            signature = inspect.signature(getattr(task, name))
        except ValueError:  # of a callable that is written in C
            continue
        asked = dict.fromkeys(one for one in ASKED.get(name, ()) if one in signature.parameters)
        try:
            signature.bind(*arguments, **asked)
        except TypeError as error:
            own = ", ".join(("self", *arguments, *(f"{one}=None" for one in asked)))
            raise TypeError(
                f"{type(task).__name__}.{name}{signature} is called with ({', '.join(arguments)}), and "
                f"cannot be: {error}. Write {name}({own})."
            ) from None


def require_bools(mask: PyTree, params: PyTree) -> None:
    """Raise TypeError where what `trainable` returned is not a bool for every parameter."""
    given, wanted = _by_path(mask), _by_path(params)
    wrong = [f"{path} is missing" for path in wanted if path not in given]
    wrong += [f"{path} is no parameter" for path in given if path not in wanted]
    wrong += [
        f"{path} is {x!r:.60}" for path, x in given.items() if not isinstance(x, bool | np.bool_)
    ]
    if not wrong and jax.tree.structure(mask) != jax.tree.structure(params):
        wrong = ["its containers (dict, list, tuple) are others"]
    if not wrong:
        return
    what = "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
    raise TypeError(
        f"trainable() must give a bool for every parameter; {what}. For one answer for a whole part, write "
        "jax.tree.map(lambda _: False, params[part])."
    )


def _by_path(tree: PyTree) -> dict[str, Any]:
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {f"params{jax.tree_util.keystr(path)}": x for path, x in found}


def require_floating(kept: PyTree) -> None:
    """Raise TypeError where a parameter that is to learn holds no numbers that have a gradient."""
    for path, x in jax.tree_util.tree_flatten_with_path(kept)[0]:
        dtype = jnp.result_type(x)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(
                f"init(): params{jax.tree_util.keystr(path)} is {dtype}, and what learns is floating. Put "
                "counters into model_state (Variables), write 0.0 for 0, or have trainable() say False of it."
            )
