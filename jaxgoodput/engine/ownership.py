"""Who holds what: a batch and a state that were handed on are named, and what belonged to them is freed."""

import jax
from jaxtyping import PyTree

from jaxgoodput.engine.state import TrainState, Work


def check_unused(work: Work) -> None:
    """Raise ValueError for a Work of which anything is gone."""
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(work)):
        raise ValueError(
            "this Work was consumed already: accumulate(), step() and apply() take it over, and so do "
            "they and move() the state that it began from. Go on with the Work that accumulate() "
            "returned, or begin() a new one from the latest state."
        )


def check_alive(state: TrainState) -> None:
    """Raise ValueError for a state that was donated."""
    if state.step.is_deleted():
        raise ValueError(
            "this state was donated already, to a step, an update or a move. Go on with the state that "
            "came out of it."
        )


def consume(work: Work) -> None:
    """Free what belongs to the batch alone; the executables that read it hold on until they are done."""
    delete(work.sums)
    if work.owns_params:
        delete((work.params, work.scale))


def delete(tree: PyTree) -> None:
    """Free what is not freed yet."""
    for leaf in jax.tree.leaves(tree):
        if not leaf.is_deleted():
            leaf.delete()
