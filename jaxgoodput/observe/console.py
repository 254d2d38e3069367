"""Progress for whoever watches the terminal: a bar on a tty, else a line every few seconds."""

import contextlib
import dataclasses
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging

from jaxgoodput.clock import Clock
from jaxgoodput.observe.events import EvalEnd, FitEnd, FitStart, Preempt, TuneEnd, Window
from jaxgoodput.observe.tags import how_to_look
from jaxgoodput.observe.tensorboard import describe
from jaxgoodput.text import compact, count, seconds


class Console:
    """Shows a run's progress; for process 0, called from one background thread.

    `stream` is a text stream, `total_base_steps` the length of the run (None where only the ETA
    tells). A terminal gets a progress bar; elsewhere a line comes at most every `every_s` seconds,
    through absl's log where that shows information, else straight to `stream` (default: stderr).
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
        self._ends_s = math.nan  # when the run ends, as last known, by the clock
        self._told_s = -math.inf  # when that was

    def on_fit_start(self, event: FitStart) -> None:
        """Say on what the run runs, and where to watch it."""
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
        """Advance the bar, or print a line when one is due."""
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
        """Say why the batch changed."""
        if event.switched:
            self._line(f"step {event.step} | {event.verdict.reason}")

    def on_eval_end(self, event: EvalEnd) -> None:
        """The evaluation's results."""
        results = " | ".join(f"{name} {value:.4g}" for name, value in event.metrics.items())
        self._line(f"step {event.step} | eval: {results} | took {seconds(event.seconds)}")
        if self._clock.now() - self._told_s >= event.seconds / 2:  # known from before it
            self._ends_s += event.seconds  # it did nothing for the steps that are left
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task,
                completed=event.progress,
                description=f"step {event.step} | {_eta(self._ends_s - self._clock.now())}",
                refresh=True,
            )

    def on_preempt(self, event: Preempt) -> None:
        """Say that the run was asked to stop."""
        self._line(f"step {event.step} | {event.signal}: asked to stop")

    def on_fit_end(self, event: FitEnd) -> None:
        """Say how the run ended."""
        self.close()
        self._line(
            f"step {event.step} | {event.reason} after {seconds(event.seconds)} of training | "
            f"{compact(event.samples)} samples, {compact(event.progress)} base steps"
        )

    def close(self) -> None:
        """Take the bar off the terminal's last line; a second call does nothing."""
        if self._bar is not None and self._task is not None:
            self._bar.stop()
            self._task = None

    def _with_eta(self, event: Window) -> Window:
        """A window too short to tell when the run ends, as after a pause, says what was known before."""
        now_s = self._clock.now()
        if math.isfinite(event.eta_s):
            self._ends_s, self._told_s = now_s + event.eta_s, now_s
            return event
        return dataclasses.replace(event, eta_s=max(self._ends_s - now_s, 0.0))

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif not self._given and logging.level_info():
            logging.info("%s", text)
        else:
            print(text, file=self._stream, flush=True)


@contextlib.contextmanager
def starting(
    num_compiled: Callable[[], int], clock: Clock, stream: Any = None, *, every_s: float = 10.0
) -> Iterator[None]:
    """Say every few seconds, while the block lasts, that a run still starts, and what it has compiled."""
    out, began_s, over = sys.stderr if stream is None else stream, clock.now(), threading.Event()

    def say() -> None:
        while not over.wait(every_s):
            compiled = count(num_compiled(), "program")
            print(f"starting for {seconds(clock.now() - began_s)} | {compiled} compiled", file=out)
            out.flush()

    thread = threading.Thread(target=say, name="jaxgoodput-starting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def progress_line(event: Window, total_base_steps: float | None) -> str:
    """One line with what matters: how far, how fast, how good, how long still."""
    facts = [f"step {event.step}"]
    if total_base_steps:
        # The last update may pass the goal.
        facts.append(f"{min(100.0 * event.progress / total_base_steps, 100.0):.1f} %")
    facts += [f"batch {describe(event.config)}", *_facts(event)]
    if math.isfinite(event.noise_scale):  # inf: no signal is seen above its own error yet
        least = ">= " if event.noise_is_lower_bound else ""
        facts.append(f"noise scale {least}{compact(event.noise_scale)}")
    return " | ".join([*facts, _eta(event.eta_s)])


def _eta(eta_s: float) -> str:
    return "ETA not known yet" if math.isnan(eta_s) else f"ETA {seconds(max(eta_s, 0.0))}"


def _beside_the_bar(event: Window) -> str:
    # What a narrow terminal cuts off comes last.
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
    # Slow to import for a run whose output is read by nobody.
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.table import Column

    return Progress(
        BarColumn(bar_width=16, table_column=Column(min_width=16)),
        TaskProgressColumn(table_column=Column(min_width=4)),
        # What is left of the line; what does not fit is cut off, and not the bar.
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
        expand=True,
        console=RichConsole(file=stream),
        # No thread of its own, and the process's stdout and stderr stay what they are.
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
