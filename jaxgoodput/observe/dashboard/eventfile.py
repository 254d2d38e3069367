"""A TensorBoard event file that never truncates another one, and hides what a restart has undone.

It uses tensorboardX's `EventsWriter` in the caller's thread, which is a background thread already, instead of
`SummaryWriter`, which has a queue and a thread. `SummaryWriter.flush` does not wait for the queue, so that a
run that was killed after a checkpoint lost points from before it (a test shows this). After one failed write
its thread is dead, and the run blocks for ever when the queue is full.
"""

import os
import pathlib
import struct
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
    SummaryMetadata,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.proto.tensor_pb2 import (
    TensorProto,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.proto.tensor_shape_pb2 import (
    TensorShapeProto,  # pyright: ignore[reportAttributeAccessIssue]
)

from jaxgoodput.clock import Clock


class EventFile:
    """A new event file for one run in TensorBoard.

    `first_step` is the first step that this process will write: 0 for a new run, resumed step + 1 after a
    restart. TensorBoard hides what earlier files contain from that step on. If the disk refuses data, the
    data are lost and a warning is logged; the run continues. `describe` returns the description of a tag.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        clock: Clock,
        restart: int,
        first_step: int,
        describe: Callable[[str], str] = lambda _: "",
    ):
        self._describe = describe
        self._described: set[str] = set()
        self.nonzero: set[str] = set()  # tags with a value other than 0
        directory.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._num_lost = 0
        self._directory = directory
        # File names differ by seconds only, and opening an existing file truncates it.
        suffix, attempt = f".r{restart:04d}.{os.getpid()}", 0
        while any(path.name.endswith(suffix) for path in directory.glob("events.*")):
            attempt += 1
            suffix = f".r{restart:04d}.{os.getpid()}.{attempt}"
        self._writer = EventsWriter(str(directory / "events"), suffix)
        # Needed at the very first start, too: one of TensorBoard's two readers ignores the first START.
        self._write(Event(step=first_step, file_version="brain.Event:2"))
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write a scalar for each tag, as one event."""
        if values:
            self.nonzero |= {tag for tag, value in values.items() if value != 0}
            found = [self._scalar(tag, value) for tag, value in values.items()]
            self.summary(Summary(value=found), step)

    def _scalar(self, tag: str, value: float | int) -> Any:
        if tag in self._described:
            return Summary.Value(tag=tag, simple_value=value)
        self._described.add(tag)  # TensorBoard reads it from the first value only
        about = SummaryMetadata(summary_description=self._describe(tag))
        return Summary.Value(tag=tag, simple_value=value, metadata=about)

    def image(self, tag: str, png: bytes, step: int) -> None:
        """Write a picture, the bytes of a PNG file, under a tag."""
        width, height = struct.unpack(">II", png[16:24])  # the header of a PNG file
        parts = [str(width).encode(), str(height).encode(), png]
        size = TensorShapeProto(dim=[TensorShapeProto.Dim(size=len(parts))])
        tensor = TensorProto(dtype="DT_STRING", string_val=parts, tensor_shape=size)
        # One of TensorBoard's two readers drops the description of a `Summary.Image`: write a tensor instead.
        about = SummaryMetadata(
            summary_description=self._describe(tag),
            plugin_data=SummaryMetadata.PluginData(plugin_name="images"),
        )
        self.summary(Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=about)]), step)

    def summary(self, summary: Any, step: int) -> None:
        """Write any summary that tensorboardX can build."""
        self._write(Event(step=step, summary=summary))

    def flush(self) -> None:
        """Write everything to the disk."""
        self._survive(self._writer.flush)

    def close(self) -> None:
        """Flush and close the file."""
        self._survive(self._writer.close)

    def _write(self, event: Any) -> None:
        event.wall_time = self._clock.wall()
        self._survive(lambda: self._writer.write_event(event))

    def _survive(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except OSError as error:
            self._num_lost += 1
            if self._num_lost == 1 or self._num_lost % 100 == 0:
                logging.warning(
                    "TensorBoard events in %s could not be written (%s; %d so far). Training goes "
                    "on. Free some space on that disk so that later events are recorded.",
                    self._directory,
                    error,
                    self._num_lost,
                )
