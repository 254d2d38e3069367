"""What users of other libraries write, and what to write here instead.

Some of it shows in what a function returns. The rest ends in an error of JAX or flax, to which a note is
added; the error stays what it is.
"""

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxgoodput.train.control import explained

# What flax calls the values of a module that do not train.
COLLECTIONS = {"batch_stats", "cache", "intermediates", "losses"}

# Methods of tensors of other libraries.
TENSORS = {
    "backward": "Return the loss: gradients are taken of what loss() returns.",
    "detach": "Write jax.lax.stop_gradient(x).",
    "numpy": "Leave it out, and go on with jnp: values are known on the device only.",
    "cpu": "Leave it out: the run places its values itself.",
    "cuda": "Leave it out: the run places its values itself.",
    "to": "Write x.astype(dtype); the run places its values itself.",
    "float": "Write x.astype(jnp.float32).",
    "long": "Write x.astype(jnp.int32).",
    "unsqueeze": "Write jnp.expand_dims(x, axis).",
    "permute": "Write x.transpose(axes).",
    "contiguous": "Leave it out.",
    "requires_grad": "Leave it out: trainable(params) says which leaves train.",
    "grad": "Leave it out: gradients are taken of what loss() returns.",
}

# The name of a class of errors; a pattern in their text; what to write instead.
ERRORS: tuple[tuple[str, str, str], ...] = (
    (
        "NameError",
        r"unbound axis name: (?P<name>\w+)",
        "The axis {name!r} is one of pmap, shard_map or vmap. Take axis_name= out of the model (of "
        "equinox: from_equinox(axis_name={name!r})), and lax.pmean, psum and all_gather over it out of the "
        "loss: gradients, losses and the model state are averaged over replicas by the run. For statistics "
        "over the micro-batch of all replicas, as of a "
        'synchronised BatchNorm, set Config.loss="global", in a job whose processes do not come and go.',
    ),
    (
        "ValueError",
        r"_internal_pmap_axis_name",
        "A function that the run calls uses pmap. Leave it out: the run puts the batch on all devices "
        "itself, and Config.strategies says how the model is cut.",
    ),
    (
        "ModifyScopeVariableError",
        r'collection "(?P<name>\w+)" is immutable',
        "The module changes the collection {name!r}. Let it be the model state: model = "
        "jaxgoodput.from_linen(module), and in loss_and_state `out, model_state = model.train(params, "
        "model_state, key, x)`. Or call apply(..., mutable=[{name!r}]), and return what it returns. In "
        "metrics, where nothing may change: model.predict(params, model_state, x), of a module that is told "
        "to use its averages (from_linen(predict_kwargs=...)).",
    ),
    (
        "InvalidRngError",
        r'needs PRNG for "params"',
        "A module is initialised in init only: return module.init(key, x) with some input x there, and call "
        "module.apply elsewhere.",
    ),
    (
        "InvalidRngError",
        r'needs PRNG for "(?P<name>\w+)"',
        "Give apply the key that loss gets: rngs={{{name!r}: key}}. Or use jaxgoodput.from_linen(module, "
        "random=({name!r},)), whose train(params, model_state, key, x) does. In metrics, where nothing is "
        "random: model.predict(params, model_state, x), of a module that is told to be deterministic "
        "(from_linen(predict_kwargs=...)).",
    ),
    (
        "Exception",
        r"accepts a single key, but was given a key array",
        'With Config.keys="sample", loss() gets a key for each sample. Draw with jax.vmap over them, such as '
        "jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (width,)))(key); or let the model compute one "
        "sample, and jax.vmap it over the rows of the batch and their keys.",
    ),
    (
        "TypeError",
        r"__call__\(\) missing .*argument.* '(?P<name>train|training|is_training)'",
        "The module is told whether it trains: jaxgoodput.from_linen(module, "
        "train_kwargs={{{name!r}: True}}, predict_kwargs={{{name!r}: False}}).",
    ),
    (
        "TypeError",
        r"__call__\(\) missing .*argument.* '(?P<name>deterministic|use_running_average)'",
        "The module is told whether it trains: jaxgoodput.from_linen(module, "
        "train_kwargs={{{name!r}: False}}, predict_kwargs={{{name!r}: True}}).",
    ),
    (
        "ValueError",  # of flax's merge_param
        r'Parameter "(?P<name>deterministic|use_running_average)" must be passed',
        "The module is told whether it trains: jaxgoodput.from_linen(module, "
        "train_kwargs={{{name!r}: False}}, predict_kwargs={{{name!r}: True}}).",
    ),
    (
        "TracerBoolConversionError",
        "",
        "The function is traced once, without values: in place of `if` and `while` on them, use jnp.where, "
        "jax.lax.cond or jax.lax.while_loop.",
    ),
    (
        "TracerArrayConversionError",
        "",
        "Use jnp in place of np for whatever depends on the parameters or the batch: the function is traced "
        "once, without values.",
    ),
    (
        "TracerIntegerConversionError",
        "",
        "The function is traced once, without values: in place of an index into a list use jnp.take of an "
        "array, and in place of range() of a value jax.lax.fori_loop.",
    ),
    (
        "NonConcreteBooleanIndexError",
        "",
        "The number of rows must not depend on values, as in x[x > 0]: use jnp.where, or weights that are 0 "
        "(Loss.of(losses, weights)).",
    ),
    (
        "ConcretizationTypeError",
        "",
        "The function is traced once, without values, so that .item(), float() and int() of them cannot be, "
        "and no shape may depend on them (give jnp.nonzero and jnp.unique a size=). Numbers to look at go "
        'into Loss.of(losses, name=value), and arrive as event.metrics["name"].',
    ),
    (
        "Exception",  # a value of an earlier trace may become an input that the program is never given
        r"UnexpectedTracerError|unexpected tracer|compiled for \d+ inputs but called with \d+",
        "A function keeps a value that it has computed, as in `self.last = x` or a list that grows. Return "
        'it: numbers to look at go into Loss.of(losses, name=value), and arrive as event.metrics["name"]; '
        "what the model keeps is returned by loss_and_state.",
    ),
    (
        "TypeError",
        r"loss returned shape \(\d+, \d+",
        "If the items of dataset() are batches already, return jaxgoodput.stream(data, batched=True), which "
        "takes them apart.",
    ),
)


@contextlib.contextmanager
def explaining(doing: str) -> Iterator[None]:
    """Raise errors of the block as `explained` does, and add what to write instead if that is known."""
    try:
        yield
    except Exception as error:
        told = explained(error, doing)
        if told is not error:
            raise told from None  # pages of JAX's and XLA's own frames say no more
        if (advice := advice_on(error)) is not None:
            error.add_note(advice)
        raise


def advice_on(error: BaseException) -> str | None:
    """Return what to write instead of what has led to an error; None if that is not known."""
    classes = {kind.__name__ for kind in type(error).__mro__}
    for kind, pattern, advice in ERRORS:
        found = re.search(pattern, str(error)) if kind in classes else None
        if found is not None:
            return advice.format(**found.groupdict())
    found = re.search(r"Tracer has no attribute (\w+)", str(error))
    if found is None or found[1] not in TENSORS:
        return None
    return (
        f"{found[1]} is of a tensor of torch or TensorFlow, and this is an array of JAX. "
        + TENSORS[found[1]]
    )


def require_parameters(made: Any) -> None:
    """Raise TypeError if `init` returned a model, a training state, or flax's collections."""
    if _is_of("flax.training.train_state", "TrainState", made):
        raise TypeError(
            "init() returned a TrainState of flax, but the run has its own: return its params. The optimizer "
            "comes from optimizer()."
        )
    if _is_of("flax.linen", "Module", made):
        raise TypeError(
            f"init() returned the module {type(made).__name__}, not its parameters. Write `return "
            'module.init(key, x)["params"]` with some input x, or use jaxgoodput.from_linen(module).'
        )
    if callable(made) and [made] == jax.tree.leaves(made):
        raise TypeError(
            f"init() returned a {type(made).__name__}, not parameters. Return its arrays, such as a dict of "
            "them; loss() gets them as `params`."
        )
    if isinstance(made, Mapping) and "params" in made and COLLECTIONS & made.keys():
        others = ", ".join(sorted(made.keys() - {"params"}))
        raise TypeError(
            f"init() returned flax's collections (params, {others}), all of which would be trained. Return "
            'Variables(params=found["params"], model_state=...) with the others as the state, or use '
            "jaxgoodput.from_linen(module). If they are parameters, give them other names."
        )


def _is_of(module: str, name: str, value: Any) -> bool:
    """Whether a value is of a class of a module, which is not imported for that."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
