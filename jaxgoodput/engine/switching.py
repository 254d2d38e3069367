"""The moves between two layouts of one problem: a state, a batch's parameters, its reduced sums.

Each is planned and compiled once, from abstract values, and kept. A bf16 compute copy moves without its
fp32 master; a state moves whole.
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from jaxgoodput.engine.once import Once
from jaxgoodput.engine.programs import Recipes
from jaxgoodput.parallel.move import Move
from jaxgoodput.parallel.plan import MovePlan, plan_move
from jaxgoodput.parallel.strategy import Layout


class Moves:
    """Compiled moves by what moves and from where to where. Safe from any thread."""

    def __init__(self, memory_bytes: int | None = None):
        self._memory_bytes = memory_bytes
        self._moves: Once[tuple[str, Layout, Layout, bool], Move] = Once()

    def state(self, old: Recipes, new: Recipes) -> Move:
        """A whole training state; the source is deleted."""
        return self._move("state", old, new, lambda recipes: recipes.abstract_state(), True)

    def plan(self, old: Recipes, new: Recipes) -> MovePlan:
        """What moving a training state costs; of the compiled move where there is one."""
        found = self._moves.peek(("state", old.layout, new.layout, True))
        if found is not None:
            return found.plan
        shardings = jax.tree.map(lambda x: x.sharding, new.abstract_state())
        return plan_move(old.abstract_state(), shardings)

    def work(self, old: Recipes, new: Recipes, *, donate: bool) -> Move:
        """(params, scale) of a batch; the source stays where it belongs to the state."""
        return self._move("work", old, new, lambda recipes: recipes.abstract_work[:2], donate)

    def fixed(self, old: Recipes, new: Recipes) -> Move:
        """(model state, key, step) of a batch; the source stays."""
        return self._move("fixed", old, new, lambda recipes: recipes.abstract_work[2:], False)

    def sums(self, old: Recipes, new: Recipes) -> Move:
        """The reduced sums of a batch; the source is deleted."""
        return self._move("sums", old, new, lambda recipes: recipes.reduced_sums(), True)

    def _move(
        self,
        what: str,
        old: Recipes,
        new: Recipes,
        abstract: Callable[[Recipes], PyTree],
        donate: bool,
    ) -> Move:
        def compile() -> Move:
            shardings: Any = jax.tree.map(lambda x: x.sharding, abstract(new))
            return Move.compile(
                abstract(old), shardings, donate=donate, memory_bytes=self._memory_bytes
            )

        return self._moves.get((what, old.layout, new.layout, donate), compile)
