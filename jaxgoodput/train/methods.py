"""What is wrong with the methods of a task, said before any of them is traced."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxgoodput.train.task import Task

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
ASKED = ("mask", "rows")  # given by name to those that have them


def require_methods(task: Task) -> None:
    """Raise TypeError where a method of a task cannot be called with what it is given."""
    for name, arguments in ARGUMENTS.items():
        if getattr(type(task), name) is getattr(Task, name):
            continue  # it raises by itself where it is needed
        try:
            signature = inspect.signature(getattr(task, name))
        except ValueError:  # of a callable that is written in C
            continue
        asked = {one: None for one in ASKED if one in signature.parameters}
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
