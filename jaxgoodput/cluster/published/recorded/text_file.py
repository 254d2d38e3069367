"""Trace files as text and rows: plain or compressed, with any delimiter, with or without a header."""

import csv
import gzip
import pathlib
import zlib
from collections.abc import Iterable, Iterator

from jaxgoodput.cluster.published.recorded.layout import Cells, TraceLayout
from jaxgoodput.cluster.published.traces import TraceError

_DELIMITERS = (",", "\t", "|", ";")
MISFIT = "another number of cells than the header"


def text_of(path: pathlib.Path) -> str:
    """Return the text of a file, which may be compressed by gzip. Raises TraceError."""
    try:
        body = path.read_bytes()
        if body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        if body[257:262] == b"ustar":
            raise TraceError(
                f"{path} is an archive. Unpack it with tar -xf, and name the file in it."
            )
        return body.decode("utf-8-sig")  # spreadsheets put a byte order mark first
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


def table_rows(path: pathlib.Path, layout: TraceLayout) -> Iterator[tuple[str, Cells | None]]:
    """Yield the rows of a table, each with its place for errors; None for a row of another length.

    Raises TraceError if the file has no column of a name that the layout needs.
    """
    lines = text_of(path).splitlines()
    blank = next((i for i, line in enumerate(lines) if line.strip()), 0)
    lines[:blank] = [""] * blank  # spaces alone are no row
    first = next((line for line in lines if line.strip()), "")
    delimiter = layout.delimiter or max(_DELIMITERS, key=first.count)
    reader = csv.reader(lines, delimiter=delimiter)
    try:
        header = list(layout.header or map(str.strip, next(filter(None, reader), ())))
        _check_names(path, header, layout.names, delimiter)
        yield from _rows(path, reader, header)
    except csv.Error as error:  # such as a cell of more than 128 KiB
        raise TraceError(
            f"{path}, line {reader.line_num}: this is no line of a table: {error}."
        ) from error


def _rows(path: pathlib.Path, reader, header: list[str]) -> Iterator[tuple[str, Cells | None]]:
    for cells in reader:
        if not cells:
            continue
        place = f"{path}, line {reader.line_num}"
        fits = len(cells) == len(header)
        yield place, dict(zip(header, map(str.strip, cells), strict=True)) if fits else None


def _check_names(
    path: pathlib.Path, header: list[str], needed: Iterable[str], delimiter: str
) -> None:
    missing = [name for name in needed if name not in header]
    if missing:
        raise TraceError(
            f"{path}: there is no column {', '.join(missing)}. With {delimiter!r} between cells, the "
            f"columns are {', '.join(header) or 'none: the file is empty'}."
        )
