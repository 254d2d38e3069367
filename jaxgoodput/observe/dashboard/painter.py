"""Draws the dashboard's pictures on a thread of their own.

A picture takes a tenth of a second, and the first one loads matplotlib, which takes a second. Hooks run one
after the other, and training waits for hooks that are far behind: a run with steps of a millisecond would
wait for every picture.
"""

import queue
from collections.abc import Iterator
from dataclasses import dataclass

from jaxgoodput._worker import QueueWorker
from jaxgoodput.goodput.sweep import Sweep
from jaxgoodput.observe.events import TuneEnd


@dataclass(frozen=True)
class Picture:
    """A finished picture: the bytes of a PNG file, and the tag and step that it belongs to."""

    tag: str
    png: bytes
    step: int


@dataclass(frozen=True)
class Drawing:
    """What pictures are drawn from: a new verdict, if there is one, and the sweep, if it has grown."""

    tune: TuneEnd | None
    groups: tuple[str, ...]
    sweep: Sweep | None
    step: int
    error: float  # of the fit

    def pictures(self) -> list[Picture]:
        """Draw all pictures. Raises ModuleNotFoundError without matplotlib."""
        from jaxgoodput.observe.dashboard import (
            figures,  # slow to import, and matplotlib is an extra
        )

        drawn, tune = [], self.tune
        if tune is not None:
            drawn += [
                ("race/by_batch", figures.race(tune), tune.step),
                ("model/goodput_surface", figures.goodput_surface(tune), tune.step),
                ("model/goodput_curve", figures.goodput_curve(tune), tune.step),
                ("model/fit", figures.fit_scatter(tune), tune.step),
                (
                    "model/efficiency_by_group",
                    figures.efficiency_by_group(tune, self.groups),
                    tune.step,
                ),
            ]
        if self.sweep is not None:
            swept = figures.sweep_avoided(self.sweep, self.step, self.error)
            drawn.append(("model/sweep", swept, self.step))
        return [
            Picture(tag, figures.png(figure), at) for tag, figure, at in drawn if figure is not None
        ]


class Painter:
    """Draws on a thread of its own: no other hook, and so no step of a fast run, waits for a picture."""

    def __init__(self):
        self.lacking_since: int | None = None  # step of the first drawing that lacked matplotlib
        self._finished: queue.SimpleQueue[Picture] = queue.SimpleQueue()
        self._worker: QueueWorker[Drawing] | None = None  # begins with the first picture

    def begin(self, drawing: Drawing | None) -> None:
        """Draw after what was begun before. Returns at once; raises if drawing has failed before."""
        if drawing is not None:
            self._worker = self._worker or QueueWorker("pictures", self._draw)
            self._worker.put(drawing)

    def finished(self) -> Iterator[Picture]:
        """Yield the pictures that are finished, each once, in the order in which they were begun."""
        while not self._finished.empty():
            yield self._finished.get()

    def wait(self) -> None:
        """Wait until everything that was begun is finished; raises what drawing has raised."""
        if self._worker is not None:
            self._worker.flush()

    def close(self) -> None:
        """Finish, and end the thread."""
        if self._worker is not None:
            self._worker.close()

    def _draw(self, drawing: Drawing) -> None:
        try:
            for picture in drawing.pictures():
                self._finished.put(picture)
        except ModuleNotFoundError:
            if self.lacking_since is None:
                self.lacking_since = drawing.step
