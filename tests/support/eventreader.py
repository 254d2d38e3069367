"""Reads TensorBoard's event files without TensorBoard: 12-byte header, payload, 4-byte checksum."""

import pathlib
import struct

from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]


def read_file(path):
    """The events of one file; a truncated last record ends it."""
    data, events, at = pathlib.Path(path).read_bytes(), [], 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        if at + 16 + length > len(data):
            break
        events.append(Event.FromString(data[at + 12 : at + 12 + length]))
        at += 16 + length
    return events


def read_run(directory):
    """A run as TensorBoard shows it: files in order, a START hiding what was written beyond it."""
    kept = []
    for path in sorted(pathlib.Path(directory).glob("events.*")):
        for event in read_file(path):
            if event.HasField("session_log"):
                kept = [e for e in kept if e.step < event.step]
            elif event.HasField("summary"):
                kept.append(event)
    return kept


def scalars(directory):
    """{tag: [(step, value), ...]} of a run."""
    found = {}
    for event in read_run(directory):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def values(directory, tag):
    """The summary values of one tag with their steps, of any kind."""
    return [
        (event.step, value)
        for event in read_run(directory)
        for value in event.summary.value
        if value.tag == tag
    ]
