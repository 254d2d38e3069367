"""A problem with several losses, each of which trains its own part of the parameters (`optim.named`).

The losses of a micro-batch are computed in one pass. Then each loss is differentiated by the parameters of
its own part, and the compiler drops what is computed for others. With turns, only one loss is differentiated,
in a branch of the program. The number of steps says which, so no program is added, and the host decides
nothing.

Sums keep the losses, their weights and their noise groups apart, as arrays `[names]` in the order of the
parts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from jaxgoodput._jax import zero_cotangent
from jaxgoodput.engine.state import Loss
from jaxgoodput.engine.step import Problem
from jaxgoodput.optim import noise
from jaxgoodput.optim.adaptation import AdaptiveState
from jaxgoodput.optim.named import Turns, coprime

# Numbers that are reported of each part, after its name and a slash.
LOSS, NOISE_SCALE, GAIN = "loss", "noise_scale", "gain"
OWN_NUMBERS = (LOSS, NOISE_SCALE, GAIN)


@dataclass(frozen=True)
class NamedProblem(Problem):
    """A problem whose loss is a `NamedLosses`, and whose `tx` is `optim.named.named` of the same parts.

    Parameters are a dict with a key for each part. `moments` and `moves` are of the leaves of all parts, in
    the order of `turns.names`.
    """

    turns: Turns = Turns(names=())
    """The parts, and which of them move in an update."""
    divided: tuple[bool, ...] = ()
    """Whether the noise of a part is measured in the coordinates of its optimizer's preconditioner."""

    @property
    def reported(self) -> tuple[str, ...]:
        """Names of the numbers that `report` adds to the user's own."""
        return tuple(f"{name}/{number}" for name in self.turns.names for number in OWN_NUMBERS)

    def report(self, opt_state: PyTree, losses: Array) -> dict[str, Array]:
        """Return the loss (0 without any weight), the pooled noise scale (0 while unknown), and the gain."""
        found: dict[str, Array] = {}
        for index, name in enumerate(self.turns.names):
            own = self._state(opt_state, name).own.tree
            read = own.findings.readout
            signal, spread = jnp.sum(read.group_sqr), jnp.sum(read.group_var)
            is_known = read.known & (signal > 0)
            ratio = spread / jnp.where(is_known, signal, 1)
            found[f"{name}/{LOSS}"] = losses[index]
            found[f"{name}/{NOISE_SCALE}"] = jnp.where(is_known, ratio * self.base_batch_size, 0)
            found[f"{name}/{GAIN}"] = own.gain.mean()
        return found

    def param_groups(self, kept: PyTree) -> tuple[str, ...]:
        """Return the names of the groups of parameters, which begin with the name of their part."""
        seen = self.moving(kept)
        return tuple(
            f"{name}/{group}"
            for name in self.turns.names
            for group in noise.leaf_groups(seen[name])[0]
        )

    def turn(self, step: Any) -> dict[str, Array]:
        """Return the index of the part that moves after `step` others; nothing if all parts always move."""
        return {"turn": self.turns.at(step)} if self.turns.cycle else {}

    @property
    def num_losses(self) -> int:
        """How many losses there are."""
        return len(self.turns.names)

    def each_loss(self, out: Any) -> list[Any]:
        """Return the losses in the order of the names. Their sum may cancel, as in a game."""
        return [out.parts[name] for name in self.turns.names]

    def dependences(self, params: PyTree, out: Any) -> list[tuple[PyTree, Any, str]]:
        """Return for each loss the parameters that it trains, its value, and the error if it reads none."""
        found = []
        for name in self.turns.names:
            part = out.parts[name]
            otherwise = (
                f"the loss {name!r} does not depend on params[{name!r}], so there is nothing to learn. "
                "Return a loss that is computed from the parameters with its name."
            )
            found.append((params[name], part.sum if isinstance(part, Loss) else part, otherwise))
        return found

    def measured_every(self, steps: int) -> int:
        """Return the steps between two that measure the noise, so that each part has its turn in them."""
        return coprime(steps, self.turns.period) if self.turns.cycle else steps

    def value_and_grad(
        self, objective: Callable[..., Any], turn: Mapping[str, Array], *, swaps: bool
    ) -> Callable[..., Any]:
        """Return a function to (losses `[names]`, other results), and each loss's gradient for its part."""
        del swaps  # a branch is no place for the compiler's kernels of single products

        def run(kept: PyTree, factors: PyTree) -> tuple[Any, PyTree]:
            losses, pull_back, others = jax.vjp(lambda x: objective(x, factors), kept, has_aux=True)

            def grads(index: int, name: str) -> PyTree:
                one = [zero_cotangent(x) for x in losses]
                one[index] = jnp.ones_like(losses[index])
                return pull_back(tuple(one))[0][name]

            def alone(index: int, name: str) -> Callable[[], PyTree]:
                return lambda: jax.tree.map(jnp.zeros_like, kept) | {name: grads(index, name)}

            parts = list(enumerate(self.turns.names))
            if turn:
                found = jax.lax.switch(turn["turn"], [alone(*part) for part in parts])
            else:
                found = kept | {name: grads(index, name) for index, name in parts}
            return (jnp.stack(losses), others), found

        return run

    def of_leaves(self, number: Array, tree: PyTree) -> list[Array]:
        """Return the number of each leaf's part, from numbers `[names]`."""
        return [x for x, n in zip(number, self._counts(tree), strict=True) for _ in range(n)]

    def least_sizes(self, grads: PyTree) -> list[int]:
        """Return the size of the smallest leaf that each optimizer moves. Frozen parts have none."""
        moving = self.moving(grads)
        sizes = [[g.size for g in jax.tree.leaves(moving[name])] for name in self.turns.names]
        return [min(found) for found in sizes if found]

    def of_norms(self, number: Array, grads: PyTree) -> Array:
        """Return numbers `[names]` as one for each moving leaf, `[leaves]`."""
        counts = self._counts(self.moving(grads))
        return number[np.repeat(np.arange(len(counts)), counts)]

    def total(self, losses: Array) -> Array:
        """Return the sum of all losses."""
        return jnp.sum(losses)

    def least(self, numbers: Array) -> Array:
        """Return the least of numbers `[names]`: a batch without weight for one part is refused."""
        return jnp.min(numbers)

    def preconditioner(self, opt_state: PyTree, kept: PyTree) -> PyTree | None:
        """Return what the optimizers multiply gradients by; None if noise is measured without it."""
        if not self.preconditioned:
            return None
        found, at = dict(kept), 0
        for name, is_divided in zip(self.turns.names, self.divided, strict=True):
            num_leaves = len(jax.tree.leaves(kept[name]))
            constants = self.moments[at : at + num_leaves]
            at += num_leaves
            made = None
            if is_divided:
                state = self._state(opt_state, name)
                made = noise.preconditioner(state, kept[name], by_leaf=constants)
            ones = made is None
            found[name] = jax.tree.map(lambda x: jnp.ones(x.shape), kept[name]) if ones else made
        return found

    def is_settled(self, opt_state: PyTree) -> Array:
        """Return for each part whether its preconditioner has seen enough updates, `[names]`."""
        settled = [
            noise.is_settled(self._state(opt_state, name)) if is_divided else jnp.ones((), bool)
            for name, is_divided in zip(self.turns.names, self.divided, strict=True)
        ]
        return jnp.stack(settled)

    def _state(self, opt_state: Any, name: str) -> AdaptiveState:
        return opt_state.inner[name]

    def _counts(self, tree: PyTree) -> list[int]:
        """Return the number of leaves of each part of a tree. Parts that are frozen have none."""
        return [len(jax.tree.leaves(tree[name])) for name in self.turns.names]
