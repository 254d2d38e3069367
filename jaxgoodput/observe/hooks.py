"""Hooks: plain objects whose methods are called when something happens.

They run on the analyst's thread, in order, behind the loop and never in its way. An exception in a
hook stops training with a checkpoint, at the loop's next step; it is never swallowed.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxgoodput.observe.events import (
    Checkpoint,
    EvalEnd,
    Event,
    FitEnd,
    FitStart,
    HostJudged,
    Preempt,
    ReadsRetried,
    Regrouped,
    Resharded,
    StateShown,
    StepEnd,
    TuneEnd,
    Window,
)


class Hook:
    """Override what is of interest; the rest does nothing."""

    def on_event(self, event: Event, /) -> None:
        """Anything happened; called before the event's own method."""

    def on_fit_start(self, event: FitStart, /) -> None:
        """Training begins or resumes."""

    def on_step_end(self, event: StepEnd, /) -> None:
        """An update is done. `event.metrics` are floats on the host."""

    def on_window(self, event: Window, /) -> None:
        """Averages over the latest stretch are known."""

    def on_tune_end(self, event: TuneEnd, /) -> None:
        """The tuner reached a verdict."""

    def on_batch_size_change(self, event: TuneEnd, /) -> None:
        """The verdict changes the batch."""

    def on_reshard(self, event: Resharded, /) -> None:
        """The state lies on the devices in another way."""

    def on_regrouped(self, event: Regrouped, /) -> None:
        """Processes have come or gone."""

    def on_host_judged(self, event: HostJudged, /) -> None:
        """A host was left out, taken in again, or refused."""

    def on_eval_end(self, event: EvalEnd, /) -> None:
        """An evaluation is done."""

    def on_state(self, event: StateShown, /) -> None:
        """The parameters as they are now, after `Trainer.request_state`."""

    def on_checkpoint(self, event: Checkpoint, /) -> None:
        """A checkpoint was handed to the writer, or failed."""

    def on_reads_retried(self, event: ReadsRetried, /) -> None:
        """Reads of samples failed and were repeated; the samples of this step were there at last."""

    def on_preempt(self, event: Preempt, /) -> None:
        """A stop was asked for, and the state has been saved: the `Checkpoint` before says whether it was."""

    def on_fit_end(self, event: FitEnd, /) -> None:
        """Training is over."""


class Every(Hook):
    """Calls a function with every n-th `StepEnd`."""

    def __init__(self, function: Callable[[StepEnd], Any], *, steps: int):
        if steps < 1:
            raise ValueError(f"steps must be at least 1; got {steps}.")
        self._function = function
        self._steps = steps

    def on_step_end(self, event: StepEnd, /) -> None:
        """Call the function where the step's number is a multiple."""
        if event.step % self._steps == 0:
            self._function(event)


def hear(hooks: Sequence[Any], kind: type[Event]) -> bool:
    """Whether any hook does something about events of this kind: the methods of `Hook` itself do nothing."""
    idle = (None, Hook.on_event, getattr(Hook, kind.hook, None))
    names = ("on_event", kind.hook, *_for_record(kind))
    methods = [getattr(hook, name, None) for hook in hooks for name in names]
    return any(getattr(method, "__func__", method) not in idle for method in methods)


def call(hooks: Iterable[Any], event: Event) -> None:
    """Tell every hook that has a method for it about `event`."""
    names = ["on_event", *_for_record(type(event)), event.hook]
    if isinstance(event, TuneEnd) and event.switched:
        names.append("on_batch_size_change")
    for hook in hooks:
        for name in names:
            method = getattr(hook, name, None)
            if method is not None:
                method(event)


def _for_record(kind: type[Event]) -> tuple[str, ...]:
    # The journal's own method: what it does not write need not be made for it.
    return ("on_record",) if kind.journaled else ()
