"""`Refusals`: what is said and done of updates that a step refused, because of their loss or gradient."""

import math
from dataclasses import dataclass

from absl import logging

from jaxgoodput._jax import looks_for
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.train.config import Config
from jaxgoodput.train.duties.saving import Saver
from jaxgoodput.train.prepare import PreparedRun
from jaxgoodput.train.watcher import StepResult


@dataclass
class Refusals:
    """Books and tells the updates that were refused, and ends a run with too many of them in a row."""

    start: PreparedRun
    config: Config
    ledger: TimeLedger
    saver: Saver

    def note(self, result: StepResult) -> None:
        """Book the time of a step that was not applied, and warn of the first of a row of them.

        Called on the watcher's thread, before the loop has the result.
        """
        if result.metrics.is_finite:
            return
        self.ledger.add("skipped_steps", max(result.parts.step_s, 0.0))
        if result.metrics.skipped_in_a_row == 1 and self.start.is_chief:
            logging.warning(
                "step %d was not applied: %s. Its batch: %s.",
                result.ticket.step,
                _fault(result),
                _samples_of(result),
            )

    def check(self, result: StepResult) -> None:
        """Raise Diverged if too many updates in a row were refused, in all processes.

        Raises FloatingPointError for the first one if JAX's switches look for NaN or infinity.
        """
        _require_finite(result)
        in_a_row = result.metrics.skipped_in_a_row
        if in_a_row < self.config.max_skipped_in_a_row:
            return
        self.saver.certify()  # an update before them may have been applied and not been good
        why, remedy = _refusal(result.metrics.weight)
        raise self.saver.diverged(
            f"{in_a_row} updates in a row {why}, the last at step {result.ticket.step}. None of them was "
            "applied.",
            f"Of the last update, {_fault(result)}. {remedy}",
        )


def _fault(result: StepResult) -> str:
    """Return what was wrong with a refused step, as far as its numbers tell."""
    found = result.metrics
    if found.weight == 0:
        return "the samples of a loss have no weight"
    if found.weight < 0:
        return "a sample's weight is negative"
    if not math.isfinite(found.loss):
        return f"its loss is {found.loss}"
    if not math.isfinite(found.grad_norm):
        return f"its loss is {found.loss:.6g}, and its gradient is not finite"
    return "loss and gradient are finite, and its update or the model state is not"


def _samples_of(result: StepResult) -> str:
    """Return which samples a step was computed from."""
    ticket = result.ticket
    place = f"place {ticket.before.offset} of epoch {ticket.before.epoch}"
    return f"{ticket.num_samples} samples from {place} on"


def _require_finite(result: StepResult) -> None:
    """Raise FloatingPointError for a refused update if JAX's switches look for NaN or infinity.

    JAX itself looks at the results of an executable's first call only.
    """
    # A batch without weight is passed over as without the switch.
    if result.metrics.is_finite or result.metrics.weight <= 0:
        return
    if switch := looks_for():
        raise FloatingPointError(
            f"{switch} is set, and step {result.ticket.step} was not applied: {_fault(result)}. Its "
            f"batch: {_samples_of(result)}. Call your functions on these samples outside of fit, under "
            "jax.jit, and JAX names the operation."
        )


def _refusal(weight: float) -> tuple[str, str]:
    """Return why an update of this weight was refused, and what to do."""
    if weight == 0:
        return "had a loss whose samples have weight 0 only", (
            "There is nothing to learn from such a loss. Check what `Loss.weight` is computed from, such as "
            "a mask of tokens that leaves none."
        )
    if weight < 0:
        return "had samples of negative weight", (
            "A weight says how much a sample counts, and is 0 or more. To train away from samples, change "
            "the sign of their loss, not of their weight."
        )
    return "had a loss, gradient, update or model state that is not finite", (
        "Lower the learning rate, clip gradients, or look at the samples of these steps (the data cursor "
        "is in the checkpoint). If the loss is finite, look at the schedule and the optimizer, or at what "
        "loss_and_state returns as the new state."
    )
