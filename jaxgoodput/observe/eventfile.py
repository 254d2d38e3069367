"""One TensorBoard event file: never truncates another, hides what a restart has undone.

Writes through tensorboardX's synchronous writer: the caller is a background thread already.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import logging
from tensorboardX.event_file_writer import EventsWriter

from jaxgoodput.clock import Clock
from jaxgoodput.observe.protos import Event, SessionLog, Summary
from jaxgoodput.observe.raster import encode_png


class EventFile:
    """Events of one run of TensorBoard, in one new file.

    `first_step` is the first step that this process will write again: 0 for a new run, resumed step
    + 1 after a restart; TensorBoard then hides whatever earlier files hold from there on. A disk
    that refuses data costs that data and a warning, not the run.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        clock: Clock,
        restart: int,
        first_step: int,
    ):
        directory.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._num_lost = 0
        self._directory = directory
        # File names have a resolution of one second, and opening truncates.
        suffix, attempt = f".r{restart:04d}.{os.getpid()}", 0
        while any(path.name.endswith(suffix) for path in directory.glob("events.*")):
            attempt += 1
            suffix = f".r{restart:04d}.{os.getpid()}.{attempt}"
        self._writer = EventsWriter(str(directory / "events"), suffix)
        # Also at the very first start: one of TensorBoard's two readers ignores the first
        # START it meets.
        self._write(Event(step=first_step, file_version="brain.Event:2"))
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """One event with a scalar per tag."""
        summary = Summary()
        for tag, value in values.items():
            summary.value.add(tag=tag, simple_value=value)
        if values:
            self.summary(summary, step)

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        """A picture, uint8 RGB [height, width, 3]; encoded here: Pillow is no dependency."""
        height, width, _ = pixels.shape
        image = Summary.Image(
            height=height, width=width, colorspace=3, encoded_image_string=encode_png(pixels)
        )
        self.summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

    def summary(self, summary: Any, step: int) -> None:
        """Any summary that tensorboardX can build."""
        self._write(Event(step=step, summary=summary))

    def flush(self) -> None:
        """Hand everything to the disk."""
        try:
            self._writer.flush()
        except OSError as error:
            self._lost(error)

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self._writer.close()
        except OSError as error:
            self._lost(error)

    def _write(self, event: Any) -> None:
        event.wall_time = self._clock.wall()
        try:
            self._writer.write_event(event)
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        self._num_lost += 1
        if self._num_lost == 1 or self._num_lost % 100 == 0:
            logging.warning(
                "TensorBoard events in %s could not be written (%s; %d so far). Training goes on. "
                "Free some space on that disk to have the rest recorded.",
                self._directory,
                error,
                self._num_lost,
            )
