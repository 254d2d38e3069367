"""`Profile`: what the devices and the host did during some steps, for TensorBoard's profiler and Perfetto."""

import pathlib
import signal
from typing import Any

import jax
from absl import logging

from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.observe.events import FitEnd, FitStart, StepEnd
from jaxgoodput.observe.hooks import Hook


class Profile(Hook):
    """Captures `steps` steps from `start` on, and again whenever the process gets the signal `on`.

        MyTrainer(config, hooks=[jg.Profile(start=100, on=signal.SIGUSR2)]).fit()

    The capture lies under `workdir/tensorboard/plugins/profile`, where TensorBoard finds it (`pip install
    xprof`). Steps stand in it under their numbers; as hooks run behind the loop, it begins and ends some
    steps late. It is of the process that reports. A run that goes on from behind `start` is not captured
    again, and of two captures at once the second is left out. Make it in the main thread where `on` is given;
    behind the run, the signal goes to what heard it before. `clock`: that of the Trainer, where it
    has another than the system's.
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
                f"start={start}, steps={steps}: give a step from 0 on, and one step or more."
            )
        self._start, self._steps, self._clock = start, steps, clock or SystemClock()
        self._is_asked = False
        self._since_s: float | None = None  # while it captures
        self._num_captured = 0
        self._folder = pathlib.Path()
        self._is_over, self._before = False, None
        if on is not None:
            self._before = signal.signal(on, self._ask)

    def on_fit_start(self, event: FitStart, /) -> None:
        """Where it goes, and whether its step is still to come."""
        self._is_over = False
        if self._start is not None and event.step > self._start:
            self._start = None
        self._folder = pathlib.Path(event.settings["workdir"]) / "tensorboard"

    def on_step_end(self, event: StepEnd, /) -> None:
        """Begin, or end."""
        if self._since_s is None:
            is_due = self._start is not None and event.step >= self._start
            if not (is_due or self._is_asked):
                return
            self._start, self._is_asked = None if is_due else self._start, False
            try:
                jax.profiler.start_trace(str(self._folder))
            except RuntimeError as error:  # another profile is being taken
                logging.warning("no profile begins at step %d: %s", event.step, error)
                return
            self._since_s, self._num_captured = self._clock.now(), 0
        elif event.at_s > self._since_s:  # others were done before, and are only heard of now
            self._num_captured += 1
            if self._num_captured >= self._steps:
                self._end()

    def on_fit_end(self, event: FitEnd, /) -> None:
        """A capture that has begun ends with the run."""
        self._is_over = True
        self._end()

    def _ask(self, signum: int, frame: Any) -> None:
        if not self._is_over:
            self._is_asked = True
        elif callable(self._before):  # hooks have a thread, and only the main one could put it back
            self._before(signum, frame)

    def _end(self) -> None:
        if self._since_s is not None:
            self._since_s = None
            jax.profiler.stop_trace()
            logging.info("a profile is in %s", self._folder / "plugins" / "profile")
