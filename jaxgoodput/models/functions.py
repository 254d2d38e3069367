"""`Model`: what every library's model becomes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import PyTree

from jaxgoodput.engine.state import Variables


@dataclass(frozen=True)
class Model:
    """A model as three pure functions of parameters and mutable state."""

    init: Callable[..., Variables]
    """`(key, *inputs) -> Variables`."""
    train: Callable[..., tuple[Any, PyTree]]
    """`(params, model_state, key, *inputs) -> (output, model_state)`."""
    predict: Callable[..., Any]
    """`(params, model_state, *inputs) -> output`."""
