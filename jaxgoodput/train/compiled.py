"""Executables kept by role and shape, each compiled once, by whichever thread needs it first."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jaxgoodput.train.executables import Recipes, Shape
from jaxgoodput.train.memory import StepBytes, step_bytes

# Roles whose peak is that of a step.
_STEPS = ("step", "step_after", "more")


class Compiled:
    """The executables of `recipes`; safe from any thread."""

    def __init__(self, recipes: Recipes):
        self.recipes = recipes
        self._found: dict[tuple[str, Shape | None], Any] = {}
        self._bytes: dict[Shape, StepBytes] = {}
        self._lock = threading.Lock()
        self._turns: dict[tuple[str, Shape | None], threading.Lock] = {}

    def __call__(self, role: str, shape: Shape | None = None) -> Any:
        """The executable, compiled on this thread where nobody has done so yet."""
        key = (role, shape)
        with self._lock:
            found = self._found.get(key)
            if found is not None:
                return found
            turn = self._turns.setdefault(key, threading.Lock())
        with turn:
            with self._lock:
                found = self._found.get(key)
            if found is None:
                found = self.recipes.recipe(role, shape).compile()
                with self._lock:
                    self._found[key] = found
                    if shape is not None and role in _STEPS:
                        old, new = self._bytes.get(shape), step_bytes(found)
                        self._bytes[shape] = new if old is None or new.peak > old.peak else old
        return found

    def has(self, roles: Sequence[str], shape: Shape) -> bool:
        """Whether all of these are compiled."""
        with self._lock:
            return all((role, shape) in self._found for role in roles)

    def bytes_of(self, shape: Shape) -> StepBytes | None:
        """Predicted peak bytes per device of a step of this shape; None before one is compiled."""
        with self._lock:
            return self._bytes.get(shape)

    def largest_of(self, roles: Sequence[str], shape: Shape) -> StepBytes | None:
        """Predicted peak bytes per device of the largest of `roles` that are compiled."""
        with self._lock:
            found = [self._found.get((role, shape)) for role in roles]
        known = [step_bytes(executable) for executable in found if executable is not None]
        return max(known, key=lambda need: need.peak, default=None)

    def cost(self, role: str, shape: Shape) -> Mapping[str, float]:
        """XLA's own cost analysis: flops and bytes accessed, per device."""
        analysis = self(role, shape).cost_analysis()
        return analysis[0] if isinstance(analysis, list) else analysis

    def text(self, role: str, shape: Shape) -> str:
        """The optimized HLO."""
        return self(role, shape).as_text()
