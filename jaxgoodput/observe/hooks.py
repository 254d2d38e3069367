"""Hooks: objects whose methods are called when something happens, and the thread that calls them.

Hooks run on a thread of their own, in order, so that a slow hook delays neither the training loop nor the
tuner. An exception in a hook is never swallowed: training saves a checkpoint and stops at its next step.
"""

import pathlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from absl import logging

from jaxgoodput._jax import settings_here
from jaxgoodput._worker import QueueWorker
from jaxgoodput.clock import Clock, SystemClock
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
from jaxgoodput.workdir.places import workdir_of

MOST_BEHIND = 256  # events that hooks may be behind before training waits for them


class Hook:
    """Base class of hooks: override the methods you need; the others do nothing.

    Any object with some of these methods is a hook, too. All are called on one thread, in order.
    """

    def on_event(self, event: Event, /) -> None:
        """Handle any event. Called before the event's own method."""

    def on_fit_start(self, event: FitStart, /) -> None:
        """Handle the start of training, or of a resumed run."""

    def on_step_end(self, event: StepEnd, /) -> None:
        """Handle a finished update. `event.metrics` are floats on the host."""

    def on_window(self, event: Window, /) -> None:
        """Handle averages over the steps of the latest `Reporting.window_s` seconds or more."""

    def on_tune_end(self, event: TuneEnd, /) -> None:
        """Handle a verdict of the tuner."""

    def on_batch_size_change(self, event: TuneEnd, /) -> None:
        """Handle a verdict that changes the batch."""

    def on_reshard(self, event: Resharded, /) -> None:
        """Handle a change of the layout of the state on the devices."""

    def on_regrouped(self, event: Regrouped, /) -> None:
        """Handle processes that joined or left."""

    def on_host_judged(self, event: HostJudged, /) -> None:
        """Handle a host that was excluded, admitted again, or refused."""

    def on_eval_end(self, event: EvalEnd, /) -> None:
        """Handle the result of an evaluation."""

    def on_state(self, event: StateShown, /) -> None:
        """Handle the current parameters, which `Trainer.request_state` asked for."""

    def on_checkpoint(self, event: Checkpoint, /) -> None:
        """Handle a checkpoint that was handed to the writer, or that failed."""

    def on_reads_retried(self, event: ReadsRetried, /) -> None:
        """Handle reads of samples that failed at first and succeeded when repeated."""

    def on_preempt(self, event: Preempt, /) -> None:
        """Handle a requested stop. The `Checkpoint` event before it says whether the state was saved."""

    def on_fit_end(self, event: FitEnd, /) -> None:
        """Handle the end of training, or of one set of processes if `event.goes_on`."""


class Every(Hook):
    """Calls a function with every n-th `StepEnd`."""

    def __init__(self, function: Callable[[StepEnd], Any], *, steps: int):
        if steps < 1:
            raise ValueError(
                f"steps must be at least 1: the function is called at multiples of it; got {steps}."
            )
        self._function = function
        self._steps = steps

    def on_step_end(self, event: StepEnd, /) -> None:
        """Call the function if the step's number is a multiple of `steps`."""
        if event.step % self._steps == 0:
            self._function(event)


class Profile(Hook):
    """Captures a profile of some steps, from step `start` on or when a signal arrives.

        MyTrainer(config, hooks=[jg.Profile(start=100, on=signal.SIGUSR2)]).fit()

    Use this to see what the devices and the host do during a step. `steps` steps are captured from step
    `start` on, and again whenever the process gets the signal `on`. The profile is written to
    `workdir/tensorboard/plugins/profile`, for TensorBoard's profiler (`pip install xprof`) and Perfetto.
    Only the process that reports is profiled. Steps are labelled with their numbers; because hooks run behind
    the loop, the capture begins and ends a few steps late. A run that resumes after `start` is not captured
    again. Only one profile can be taken at a time; a second one is skipped with a warning.

    If `on` is given, create the hook in the main thread. After the run, the signal goes to its previous
    handler again. `clock` must be the Trainer's, if that is not the system's.
    """

    def __init__(
        self,
        *,
        start: int | None = None,
        steps: int = 5,
        on: signal.Signals | None = None,
        clock: Clock | None = None,
    ):
        if steps < 1 or (start is not None and start < 0):
            raise ValueError(
                f"Profile(start={start}, steps={steps}): start must be 0 or more, and steps 1 or more."
            )
        self._start, self._steps, self._clock = start, steps, clock or SystemClock()
        self._is_requested = False
        self._since_s: float | None = None  # start of the current capture
        self._num_captured = 0
        self._folder = pathlib.Path()
        self._is_over, self._previous_handler = False, None
        if on is not None:
            self._previous_handler = signal.signal(on, self._request)

    def on_fit_start(self, event: FitStart, /) -> None:
        """Choose the folder, and drop `start` if the run has already passed it."""
        self._is_over = False
        if self._start is not None and event.step > self._start:
            self._start = None
        self._folder = workdir_of(event.settings["workdir"]).folder / "tensorboard"

    def on_step_end(self, event: StepEnd, /) -> None:
        """Begin a capture that is due, or end one that has enough steps."""
        if self._since_s is None:
            is_due = self._start is not None and event.step >= self._start
            if is_due or self._is_requested:
                self._start, self._is_requested = None if is_due else self._start, False
                self._begin(event.step)
        elif event.at_s > self._since_s:  # earlier steps ended before the capture began
            self._num_captured += 1
            if self._num_captured >= self._steps:
                self._end()

    def on_fit_end(self, event: FitEnd, /) -> None:
        """End a capture that is still going on."""
        self._is_over = True
        self._end()

    def _request(self, signum: int, frame: Any) -> None:
        if not self._is_over:
            self._is_requested = True
        elif callable(self._previous_handler):
            # Hooks run on another thread, and only the main thread may restore a handler: forward instead.
            self._previous_handler(signum, frame)

    def _begin(self, step: int) -> None:
        try:
            jax.profiler.start_trace(str(self._folder))
        except RuntimeError as error:  # another profile is being taken
            logging.warning(
                "no profile is captured from step %d on, because another one is being taken: %s. Training "
                "goes on. End the other profile first, or choose another start.",
                step,
                error,
            )
        else:
            self._since_s, self._num_captured = self._clock.now(), 0

    def _end(self) -> None:
        if self._since_s is not None:
            self._since_s = None
            jax.profiler.stop_trace()
            logging.info("the profile was written to %s", self._folder / "plugins" / "profile")


def hear(hooks: Sequence[Any], kind: type[Event]) -> bool:
    """Return whether any hook handles events of this kind; the methods of `Hook` itself do nothing.

    Use it to skip making events that no hook would use.
    """
    # Bound methods differ from object to object: compare the functions behind them.
    idle = (None, Hook.on_event, getattr(Hook, kind.hook, None))
    names = ("on_event", kind.hook, *_for_record(kind))
    methods = [getattr(hook, name, None) for hook in hooks for name in names]
    return any(getattr(method, "__func__", method) not in idle for method in methods)


def call(hooks: Iterable[Any], event: Event) -> None:
    """Call every method of `hooks` that handles `event`."""
    names = ["on_event", *_for_record(type(event)), event.hook]
    if isinstance(event, TuneEnd) and event.switched:
        names.append("on_batch_size_change")
    for hook in hooks:
        for name in names:
            method = getattr(hook, name, None)
            if method is not None:
                method(event)


def _for_record(kind: type[Event]) -> tuple[str, ...]:
    # The journal has a method of its own, so that `hear` can tell which kinds it does not need.
    return ("on_record",) if kind.journaled else ()


class Teller:
    """A thread that calls hooks. If a hook raises, `on_error` is called, and the next event is handled.

    `short_windows` says that a window may be as short as a step. `is_awaited` is true while training waits
    for the hooks; `book` receives the seconds that this took, under the name of a time bucket.
    """

    def __init__(
        self,
        hooks: Sequence[Any],
        *,
        is_stopping: Callable[[], bool],
        clock: Clock,
        on_error: Callable[[BaseException], None],
        book: Callable[[str, float], None],
        short_windows: bool = False,
    ):
        self._hooks = hooks
        self._is_stopping = is_stopping
        self._clock = clock
        self._book = book
        self._spent_s: dict[str, float] = {}  # by hook, for the calls that have ended
        self._current: tuple[str, float] | None = (
            None  # the hook that is called now, and since when
        )
        self._has_warned = False
        self._hears_steps = hear(hooks, StepEnd) or (short_windows and hear(hooks, Window))
        self.is_awaited = False
        self._worker: QueueWorker[Event] = QueueWorker(
            "hooks",
            lambda event: call(self._each(), event),
            on_error=on_error,
            within=settings_here(),
        )

    def tell(self, event: Event) -> None:
        """Have the hooks handle an event, after everything that came before it."""
        self._worker.put(event)

    def tell_when_done(self, done: threading.Event) -> None:
        """Set `done` when the hooks have handled everything so far."""
        self._worker.call_when_done(done.set)

    def hold_up(self, num_coming: Callable[[], int]) -> None:
        """Wait while the hooks are far behind, but not after a stop was requested.

        `num_coming` counts the steps that are done and have not become events yet. They count if hooks hear
        of each step, or of windows as short.
        """

        def num_behind() -> int:
            return self._worker.num_waiting + (num_coming() if self._hears_steps else 0)

        if num_behind() < MOST_BEHIND:
            return
        start_s = self._clock.now()
        self.is_awaited = True
        while num_behind() >= MOST_BEHIND and not self._is_stopping():
            self._worker.join(0.01)
            self._warn()
        self.is_awaited = False
        self._book("hooks_behind", self._clock.now() - start_s)

    def close(self) -> None:
        """Handle the events that are waiting, and end the thread."""
        self._worker.close()

    def _warn(self) -> None:
        """Say once that training waits, and for which hook most."""
        spent_s, current = dict(self._spent_s), self._current
        if current is not None:
            name, since_s = current
            spent_s[name] = spent_s.get(name, 0.0) + self._clock.now() - since_s
        if self._has_warned or not spent_s:
            return
        self._has_warned = True
        logging.warning(
            "hooks are %d events behind, and training waits for them. The slowest is %s: let it do less, or "
            "call it less often (jg.Every).",
            MOST_BEHIND,
            max(spent_s, key=lambda name: spent_s[name]),
        )

    def _each(self) -> Iterator[Any]:
        """Yield the hooks one after the other, noting how long each one takes."""
        for hook in self._hooks:
            name, start_s = type(hook).__qualname__, self._clock.now()
            self._current = name, start_s
            try:
                yield hook
            finally:
                self._current = None
                self._spent_s[name] = self._spent_s.get(name, 0.0) + self._clock.now() - start_s
