"""What a task says of named updates, checked: the names of its losses, optimizers and parameters agree."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from jaxgoodput.engine.programs.named import OWN_NUMBERS
from jaxgoodput.engine.state import Loss, NamedLosses
from jaxgoodput.optim.named import InTurns, Turns


def turns_of(optimizers: Any) -> Turns | None:
    """Return the named parts of what `optimizer()` returned, and their turns; None for a single optimizer."""
    if isinstance(optimizers, InTurns):
        return Turns(names=tuple(sorted(optimizers.optimizers)), cycle=optimizers.cycle)
    if not isinstance(optimizers, Mapping):
        return None
    if len(optimizers) < 2 or not all(isinstance(name, str) and name for name in optimizers):
        raise ValueError(
            f"optimizer() returned a dict with the keys {list(optimizers)!r:.80}. Return at least two "
            'optimizers by the name of the part that each moves, such as {"generator": ..., "critic": ...}. '
            "Return a single optimizer as it is."
        )
    return Turns(names=tuple(sorted(optimizers)))


def by_name(optimizers: Any) -> Mapping[str, optax.GradientTransformation]:
    """Return the optimizers that `optimizer()` returned with names."""
    return optimizers.optimizers if isinstance(optimizers, InTurns) else optimizers


def require_parts(params: Any, kept: Any, names: tuple[str, ...]) -> None:
    """Raise an error unless each name is a part of the parameters that trains, and each such part is named.

    `params` are all parameters, and `kept` those that train, with None for others.
    """
    if type(params) is not dict:
        raise TypeError(
            f"optimizer() returned optimizers by name, and init() made a {type(params).__name__}. Return "
            f"a dict of parameters with the same names: {', '.join(map(repr, names))}."
        )
    if missing := [name for name in names if name not in params]:
        raise ValueError(
            f"optimizer() has {', '.join(map(repr, missing))}, and the parameters of init() are "
            f"{', '.join(map(repr, params))}. Each optimizer moves the parameters with its name."
        )
    trained = [key for key in params if jax.tree.leaves(kept[key])]
    if still := [name for name in names if name not in trained]:
        raise ValueError(
            f"there is nothing to train in {', '.join(map(repr, still))}: trainable() allows none of its "
            "leaves. Leave its optimizer and its loss out."
        )
    if unnamed := [key for key in trained if key not in names]:
        raise ValueError(
            f"no optimizer moves {', '.join(map(repr, unnamed))}: optimizer() has "
            f"{', '.join(map(repr, names))}. Put these parameters under one of the names, or freeze them in "
            "trainable()."
        )


def named_losses(out: Any, names: tuple[str, ...]) -> NamedLosses:
    """Return the losses that a task returned by name. Raises an error unless they have these names."""
    if not isinstance(out, Mapping):
        raise TypeError(
            f"optimizer() returned optimizers by name, and loss() returned a {type(out).__name__}. Return a "
            f"dict with a loss for each: {', '.join(map(repr, names))}. Each is differentiated by the "
            "parameters of its name alone."
        )
    if set(out) != set(names):
        raise ValueError(
            f"loss() returned losses named {', '.join(map(repr, out))}, and the optimizers are "
            f"{', '.join(map(repr, names))}. Return one loss for each optimizer, by the same name."
        )
    for name, part in out.items():
        if isinstance(part, Loss):
            if taken := sorted(set(OWN_NUMBERS) & set(part.aux)):
                raise ValueError(
                    f"loss {name!r} reports a number named {taken[0]!r}, and the run reports one by that "
                    "name for each loss. Give it another name."
                )
        elif not hasattr(part, "dtype"):
            raise TypeError(
                f"loss {name!r} is a {type(part).__name__}. Return losses per sample [batch], a jg.Loss or a "
                "scalar mean for each name."
            )
    return NamedLosses.together(out)


def require_own_optimizer(out: Any) -> None:
    """Raise TypeError for several losses with a single optimizer."""
    if isinstance(out, Mapping):
        raise TypeError(
            f"loss() returned losses named {', '.join(map(repr, out))}, and optimizer() a single optimizer. "
            "For numbers beside one loss, return jg.Loss.of(losses, name=value). For one update by the "
            "weighted sum of several, return jg.Loss.weighted(losses, weights). For an optimizer for each, "
            "return a dict of optimizers by the same names from optimizer()."
        )
