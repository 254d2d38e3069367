"""Hooks: plain objects whose methods are called when something happens.

They run on a thread of their own, in order, behind the loop and never in its way or that of a decision. An
exception in a hook stops training with a checkpoint, at the loop's next step; it is never swallowed.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from absl import logging

from jaxgoodput.clock import Clock
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

MOST_BEHIND = 256  # events; training waits for hooks that are further behind


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


class Teller:
    """A thread that calls hooks. What one of them raises goes to `on_error`, and the others go on."""

    def __init__(
        self,
        hooks: Sequence[Any],
        *,
        is_stopping: Callable[[], bool],
        clock: Clock,
        on_error: Callable[[BaseException], None],
        book: Callable[[str, float], None],
    ):
        self._hooks = hooks
        self._is_stopping = is_stopping
        self._clock = clock
        self._on_error = on_error
        self._book = book
        self._in_hook: Any = None  # told of an event last
        self._is_slow = False  # whether training has had to wait
        self.is_awaited = False  # whether it does now
        self._queue: queue.SimpleQueue[Event | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="jaxgoodput-hooks", daemon=True)
        self._thread.start()

    def tell(self, event: Event) -> None:
        """Have the hooks hear of an event, after everything that came before it."""
        self._queue.put(event)

    def tell_when_done(self, done: threading.Event) -> None:
        """Set `done` when the hooks have heard of everything until now."""
        self._queue.put(done)

    def hold_up(self) -> None:
        """Wait where hooks are far behind, but not once a stop was asked for."""
        if self._queue.qsize() < MOST_BEHIND:
            return
        if not self._is_slow:
            self._is_slow = True
            logging.warning(
                "hooks are %d events behind, and training waits for them. At work is %s: have it do less, or "
                "less often (jg.Every).",
                MOST_BEHIND,
                type(self._in_hook).__qualname__,
            )
        start_s = self._clock.now()
        self.is_awaited = True
        while self._queue.qsize() >= MOST_BEHIND and not self._is_stopping():
            self._thread.join(0.01)
        self.is_awaited = False
        self._book("hooks_behind", self._clock.now() - start_s)

    def close(self) -> None:
        """Tell what was handed in, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                call(self._each(), item)
            except BaseException as error:
                self._on_error(error)

    def _each(self) -> Iterator[Any]:
        """The hooks, one after the other; notes which of them is at work."""
        for hook in self._hooks:
            self._in_hook = hook
            yield hook
