"""Executables kept by role and shape, each compiled once, by whichever thread needs it first."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxgoodput.engine.memory import StepBytes, step_bytes
from jaxgoodput.engine.once import Once
from jaxgoodput.engine.programs import Recipes, Shape

# Roles whose peak is that of a step.
_STEPS = ("step", "step_after", "more")


class Compiled:
    """The executables of `recipes`; safe from any thread."""

    def __init__(self, recipes: Recipes):
        self.recipes = recipes
        self._found: Once[tuple[str, Shape | None], Any] = Once()

    def __call__(self, role: str, shape: Shape | None = None) -> Any:
        """The executable, compiled on this thread where nobody has done so yet."""
        return self._found.get((role, shape), lambda: self.recipes.recipe(role, shape).compile())

    def has(self, roles: Sequence[str], shape: Shape) -> bool:
        """Whether all of these are compiled."""
        return all(self._found.peek((role, shape)) is not None for role in roles)

    def bytes_of(self, shape: Shape) -> StepBytes | None:
        """Predicted peak bytes per device of a step of this shape; None before one is compiled."""
        return self.largest_of(_STEPS, shape)

    def largest_of(self, roles: Sequence[str], shape: Shape) -> StepBytes | None:
        """Predicted peak bytes per device of the largest of `roles` that are compiled."""
        found = [self._found.peek((role, shape)) for role in roles]
        known = [step_bytes(executable) for executable in found if executable is not None]
        return max(known, key=lambda need: need.peak, default=None)

    def cost(self, role: str, shape: Shape) -> Mapping[str, float]:
        """XLA's own cost analysis: flops and bytes accessed, per device."""
        analysis = self(role, shape).cost_analysis()
        return analysis[0] if isinstance(analysis, list) else analysis

    def text(self, role: str, shape: Shape) -> str:
        """The optimized HLO."""
        return self(role, shape).as_text()
