"""Progress of a run on the console: a bar on a terminal, otherwise a line every few seconds."""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging

from jaxgoodput._worker import Worker
from jaxgoodput.clock import Clock
from jaxgoodput.observe.dashboard.tags import how_to_look
from jaxgoodput.observe.dashboard.tensorboard import describe
from jaxgoodput.observe.events import EvalEnd, FitEnd, FitStart, Preempt, TuneEnd, Window
from jaxgoodput.text import compact, count, seconds


class Console:
    """A hook that shows a run's progress. Use it in process 0 only.

    `stream` is a text stream (default: stderr), `total_base_steps` the length of the run, or None if only the
    ETA tells it. A terminal gets a progress bar. Otherwise a line is printed at most every `every_s` seconds:
    to absl's log if that shows information and no stream is given, else to the stream.
    """

    def __init__(
        self,
        clock: Clock,
        total_base_steps: float | None,
        stream: Any = None,
        *,
        every_s: float = 10.0,
    ):
        self._clock = clock
        self._total = total_base_steps
        self._stream = sys.stderr if stream is None else stream
        self._given = stream is not None
        self._every_s = every_s
        self._last_s = -math.inf
        self._bar = _bar(self._stream) if self._stream.isatty() else None
        self._task: Any = None
        self._ends_s = math.nan  # expected end of the run, by the clock
        self._estimated_s = -math.inf  # time at which that was estimated

    def on_fit_start(self, event: FitStart) -> None:
        """Show the devices of the run, and how to watch it."""
        resumed = f", resumed at step {event.step}" if event.restart else ""
        self._line(
            f"{event.num_devices} x {event.device_kind}, batch {describe(event.config)}{resumed}"
        )
        if event.settings.get("reporting", {}).get("tensorboard") and "workdir" in event.settings:
            self._line(how_to_look(str(event.settings["workdir"])))
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(
                f"step {event.step} | {_eta(math.nan)}",
                total=self._total,
                completed=event.progress,
            )

    def on_window(self, event: Window) -> None:
        """Advance the bar, or print a line if one is due."""
        event = self._with_eta(event)
        if self._bar is not None:
            if self._task is not None:
                self._bar.update(
                    self._task,
                    completed=event.progress,
                    description=_beside_the_bar(event),
                    refresh=True,
                )
            return
        now_s = self._clock.now()
        if now_s - self._last_s >= self._every_s:
            self._last_s = now_s
            self._line(progress_line(event, self._total))

    def on_tune_end(self, event: TuneEnd) -> None:
        """Show the reason of a verdict that changes the batch or the strategy; nothing for others."""
        if event.switched:
            self._line(f"step {event.step} | {event.verdict.reason}")

    def on_eval_end(self, event: EvalEnd) -> None:
        """Show the results of an evaluation."""
        results = " | ".join(f"{name} {value:.4g}" for name, value in event.metrics.items())
        self._line(f"step {event.step} | eval: {results} | took {seconds(event.seconds)}")
        if self._clock.now() - self._estimated_s >= event.seconds / 2:
            # The end was estimated before the evaluation, which has delayed it.
            self._ends_s += event.seconds
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task,
                completed=event.progress,
                description=f"step {event.step} | {_eta(self._ends_s - self._clock.now())}",
                refresh=True,
            )

    def on_preempt(self, event: Preempt) -> None:
        """Show that the run was asked to stop."""
        self._line(f"step {event.step} | {event.signal}: asked to stop")

    def on_fit_end(self, event: FitEnd) -> None:
        """Show how the run ended."""
        self.close()
        self._line(
            f"step {event.step} | {event.reason} after {seconds(event.seconds)} of training | "
            f"{compact(event.samples)} samples, {compact(event.progress)} base steps"
        )

    def close(self) -> None:
        """Remove the bar from the terminal. Idempotent."""
        if self._bar is not None and self._task is not None:
            self._bar.stop()
            self._task = None

    def _with_eta(self, event: Window) -> Window:
        """Fill in the last known ETA if a window was too short to estimate it, as after a pause."""
        now_s = self._clock.now()
        if math.isfinite(event.eta_s):
            self._ends_s, self._estimated_s = now_s + event.eta_s, now_s
            return event
        return dataclasses.replace(event, eta_s=max(self._ends_s - now_s, 0.0))

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif (
            not self._given and logging.level_info()
        ):  # absl's log adds the time, and may go to a file
            logging.info("%s", text)
        else:
            print(text, file=self._stream, flush=True)


@contextlib.contextmanager
def starting(
    num_compiled: Callable[[], int], clock: Clock, stream: Any = None, *, every_s: float = 10.0
) -> Iterator[None]:
    """Print every few seconds, during the block, that the run is starting and how much it has compiled."""
    out, began_s = sys.stderr if stream is None else stream, clock.now()

    def report(worker: Worker) -> None:
        while not worker.wait_stopping(every_s):
            compiled = count(num_compiled(), "program")
            print(f"starting for {seconds(clock.now() - began_s)} | {compiled} compiled", file=out)
            out.flush()

    with Worker("starting", report):
        yield


def progress_line(event: Window, total_base_steps: float | None) -> str:
    """Return one line with the progress, batch, loss, speed and remaining time of a run."""
    facts = [f"step {event.step}"]
    if total_base_steps:
        # The last update may exceed the total.
        facts.append(f"{min(100.0 * event.progress / total_base_steps, 100.0):.1f} %")
    facts += [f"batch {describe(event.config)}", *_facts(event)]
    if math.isfinite(event.noise_scale):  # infinite without any signal
        about = "~" if event.noise_is_guess else ""
        stated = event.noise_interval
        around = (
            f" (80 %: {compact(stated.lower)} to {compact(stated.upper)})"
            if stated.is_known
            else ""
        )
        facts.append(f"noise scale {about}{compact(event.noise_scale)}{around}")
    return " | ".join([*facts, _eta(event.eta_s)])


def _eta(eta_s: float) -> str:
    return "ETA not known yet" if math.isnan(eta_s) else f"ETA {seconds(max(eta_s, 0.0))}"


def _beside_the_bar(event: Window) -> str:
    # A narrow terminal cuts off the end: begin with what matters most.
    facts = [
        f"step {event.step}",
        _eta(event.eta_s),
        f"batch {event.config.global_batch_size}",
    ]
    return " | ".join([*facts, *_facts(event)])


def _facts(event: Window) -> list[str]:
    loss = event.metrics.get("loss")
    facts = [] if loss is None else [f"loss {loss:.4g}"]
    if math.isfinite(event.throughput):
        facts.append(f"{compact(event.throughput)} samples/s")
    if math.isfinite(event.goodput_measured):
        facts.append(f"goodput {compact(event.goodput_measured)}")
    if math.isfinite(event.tokens_per_s):
        facts.append(f"{compact(event.tokens_per_s)} tokens/s")
    if math.isfinite(event.mfu):
        facts.append(f"MFU {event.mfu:.1%}")
    if event.skipped_steps:
        facts.append(f"{event.skipped_steps} skipped")
    return facts


def _bar(stream: Any) -> Any:
    # Slow to import, and not needed if the output is a file.
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.table import Column

    return Progress(
        BarColumn(bar_width=16, table_column=Column(min_width=16)),
        TaskProgressColumn(table_column=Column(min_width=4)),
        # The description takes the rest of the line, and is cut off before the bar is.
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
        expand=True,
        console=RichConsole(file=stream),
        # Start no thread, and leave the process's stdout and stderr alone.
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
