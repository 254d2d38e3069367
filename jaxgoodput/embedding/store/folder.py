"""The folder of a row store: its commits, its segment files, and which of these may be deleted.

    commits/00000007.json   the manifest of commit 7: its segments, oldest rows first
    00000012.rows           a segment (see `segment`)
    damaged/00000012.rows   a segment that was set aside because it is damaged

A commit is durable once its manifest has been renamed into place; segments never change after that. A segment
file is deleted if no manifest names it, the row map does not use it, and it is not about to enter either.
"""

import contextlib
import errno
import json
import os
import pathlib
import threading
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from absl import logging

from jaxgoodput import _disk
from jaxgoodput._fields import serial
from jaxgoodput.embedding.store.row_map import RowMap
from jaxgoodput.embedding.store.segment import DamagedFile, Segment, SegmentWriter

ASIDE = "damaged"


@dataclass(frozen=True)
class SegmentEntry:
    """One segment (file of rows), as a manifest lists it."""

    name: str
    num_rows: int
    total: int
    """Checksum of its ids, row checksums and footer."""


@dataclass(frozen=True)
class Manifest:
    """The content of one commit: its segments, and the metadata of the table."""

    number: int
    row_bytes: int
    segments: tuple[SegmentEntry, ...]
    """Segments in order: a row in a later one replaces an earlier row of the same id."""
    about: Mapping[str, Any]
    """Metadata that the caller of `commit` stored."""
    lineage: tuple[int, ...]
    """Numbers of the commits that are kept, each made from the one before; the last is this commit."""


def manifests(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """Return the path of every manifest in a store's folder by commit number, newest first."""
    found = {int(path.stem): path for path in folder.glob("commits/*.json") if path.stem.isdigit()}
    return dict(sorted(found.items(), reverse=True))


def read_manifest(path: pathlib.Path) -> Manifest:
    """Read a manifest. Raises DamagedFile if its checksum is wrong, OSError if it cannot be read."""
    try:
        total, _, body = path.read_text().partition("\n")
        if int(total, 16) != zlib.crc32(body.encode()):
            raise ValueError("its checksum does not match")
        return serial.decode(json.loads(body), Manifest, path.name)
    except ValueError as error:
        raise DamagedFile(path, f"is damaged: {error}") from error


def commits_in(folder: pathlib.Path) -> dict[int, Mapping[str, Any]]:
    """Return the metadata of every readable commit in a store's folder by number, newest first."""
    found = {}
    for number, path in manifests(folder).items():
        with contextlib.suppress(DamagedFile):
            found[number] = read_manifest(path).about
    return found


class StoreFolder:
    """Owns the files of a row store. Thread-safe.

    `rows` is the store's row map, whose segments are never deleted. `keep` is the number of commits that
    stay.
    """

    def __init__(self, path: pathlib.Path, row_bytes: int, rows: RowMap, *, keep: int):
        self.path, self.row_bytes = path, row_bytes
        self.newest: Manifest | None = None
        self._rows, self._keep = rows, max(keep, 1)
        self._lineage: tuple[int, ...] = ()
        self._lock = threading.Lock()  # pins and unsynced files; held while files are deleted
        self._pinned: set[str] = set()  # new files that are not in the row map yet
        self._committing: set[str] = set()  # files that the commit in progress names
        self._unsynced: set[pathlib.Path] = set()  # finished segments that were not fsynced yet
        for unfinished in path.glob("commits/*.unfinished"):
            unfinished.unlink()
        names = [file.stem for file in path.glob("**/*.rows")]
        self._last_file = max((int(name) for name in names if name.isdigit()), default=0)

    # -- segment files -------------------------------------------------------------------------------

    def new_writer(self, max_rows: int) -> SegmentWriter:
        """Create a segment file, which `delete_unused` spares until `unpin` or `discard`."""
        with self._lock:
            self._last_file += 1
            name = f"{self._last_file:08d}.rows"
            self._pinned.add(name)
        try:
            with self.explained():
                return SegmentWriter(self.path / name, self.row_bytes, max_rows)
        except BaseException:
            self.unpin(name)
            raise

    def unpin(self, name: str) -> None:
        """Allow a file to be deleted as soon as neither the row map nor a manifest needs it."""
        with self._lock:
            self._pinned.discard(name)

    def discard(self, writer: SegmentWriter) -> None:
        """Delete the file of a segment that will not be finished."""
        writer.close()
        writer.path.unlink(missing_ok=True)
        self.unpin(writer.path.name)

    def finish(self, writer: SegmentWriter) -> Segment:
        """Finish a segment; the next commit that names it fsyncs it. Call this before it enters the map."""
        with self.explained():
            segment = writer.finish()
        with self._lock:
            self._unsynced.add(segment.path)
        return segment

    def delete_unused(self) -> None:
        """Delete the segment files that no manifest names and that are not in use."""
        with self._lock:
            # List the files first: one that is created from here on is not in the list, and so stays.
            there = list(self.path.glob("*.rows"))
            # Read the pins before the map: a file leaves its pin only after it has entered the map.
            needed = self._committing | self._pinned | self._rows.file_names()
            for path in manifests(self.path).values():
                try:
                    needed |= {entry.name for entry in read_manifest(path).segments}
                except FileNotFoundError:
                    continue  # another thread's commit has just deleted it
                except (DamagedFile, OSError) as error:
                    # Any segment may be in it. It goes once newer commits have replaced it.
                    logging.warning(
                        "%s. Until newer commits have replaced this one, no segment is deleted, and the "
                        "folder grows.",
                        error,
                    )
                    return
            for path in there:
                if path.name not in needed:
                    path.unlink(missing_ok=True)
                    self._unsynced.discard(path)

    # -- commits -------------------------------------------------------------------------------------

    def commit(self, about: Mapping[str, Any], keep: Collection[int]) -> int:
        """Make the segments of the row map durable, and return the number of the commit that names them.

        All of them must be finished. Commits outside the lineage are deleted unless `keep` names them.
        """
        # Under the lock that deletions hold: a segment that compaction replaces from here on must stay.
        with self._lock:
            segments = self._rows.finished()
            unsynced = self._unsynced & {segment.path for segment in segments}
            self._committing = {segment.path.name for segment in segments}
        try:
            for path in sorted(unsynced):
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            # Numbers of abandoned commits are not used again, so a number names one commit for good.
            number = max([*manifests(self.path), 0]) + 1
            lineage = (*self._lineage, number)
            newest = lineage[-self._keep :]
            made = Manifest(
                number,
                self.row_bytes,
                tuple(SegmentEntry(s.path.name, len(s.ids), s.total) for s in segments),
                about,
                tuple(n for n in lineage if n in newest or n in keep),
            )
            with self.explained():
                self._write(made)
        finally:
            with self._lock:
                self._committing = set()
        with self._lock:
            self._unsynced -= unsynced
        self.newest, self._lineage = made, made.lineage
        for old, path in manifests(self.path).items():
            if old not in made.lineage and old not in keep:
                path.unlink()
        self.delete_unused()
        return number

    def _write(self, manifest: Manifest) -> None:
        body = json.dumps(serial.encode(manifest))
        path = self.path / "commits" / f"{manifest.number:08d}.json"
        unfinished = path.with_suffix(".unfinished")
        with open(unfinished, "w") as file:
            file.write(f"{zlib.crc32(body.encode()):08x}\n{body}")
            file.flush()
            os.fsync(file.fileno())
        # The names of the segments must be durable before the manifest that mentions them.
        _disk.sync_folder(self.path)
        unfinished.rename(path)
        _disk.sync_folder(path.parent)

    def load(self, at: int | None, *, checks_rows: bool) -> list[Segment]:
        """Go to commit `at` (None: the newest; 0: before the first), and return its segments in order.

        Raises ValueError if there is no such commit or its rows have another width, and DamagedError if it is
        damaged.
        """
        there = manifests(self.path)
        if at == 0 or (at is None and not there):
            return []
        if at is not None and at not in there:
            raise ValueError(
                f"{self.path} has no commit {at}; it has {sorted(there) or 'none'}. Open one of those."
            )
        number = next(iter(there)) if at is None else at
        try:
            self.newest, segments = self._read(there[number], checks_rows)
        except DamagedFile as damage:
            raise _disk.DamagedError(self._set_aside(damage, number)) from damage
        self._lineage = tuple(n for n in self.newest.lineage if n in there)
        return segments

    def _read(self, path: pathlib.Path, checks_rows: bool) -> tuple[Manifest, list[Segment]]:
        """Read a commit. Raises DamagedFile, or ValueError if its rows have another width."""
        manifest = read_manifest(path)
        if manifest.row_bytes != self.row_bytes:
            raise ValueError(
                f"{self.path} holds rows of {manifest.row_bytes} bytes, and rows of {self.row_bytes} were "
                "asked for: the table was made with another dimension, optimizer or dtype. Open it with "
                "the ones that it was made with, or use another folder."
            )
        segments = []
        for entry in manifest.segments:
            segment = Segment.open(self.path / entry.name, self.row_bytes)
            if (len(segment.ids), segment.total) != (entry.num_rows, entry.total):
                raise DamagedFile(segment.path, f"is not the segment that commit {path.stem} names")
            if checks_rows:
                segment.check()
            segments.append(segment)
        return manifest, segments

    def _set_aside(self, damage: DamagedFile, number: int) -> str:
        """Move a damaged segment out of the way, and return a message that says which commit is whole.

        A damaged manifest stays: without it, the next start would take the commit before for the newest.
        """
        moved = ""
        if damage.path.suffix == ".rows" and damage.path.is_file():
            (self.path / ASIDE).mkdir(exist_ok=True)
            kept = damage.path.rename(self.path / ASIDE / damage.path.name)
            moved = f" It was moved to {kept}."
        for other, path in manifests(self.path).items():
            if other < number:
                with contextlib.suppress(DamagedFile):
                    self._read(path, checks_rows=True)
                    return (
                        f"Commit {number} cannot be used: {damage}.{moved} Commit {other}, the one before, "
                        f"is whole: open the store with at={other}."
                    )
        return (
            f"Commit {number} cannot be used: {damage}.{moved} No commit before it is whole: restore the "
            "folder from a copy, or use an empty one."
        )

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Add what was lost, and what to do, to an OSError inside the block from a full or read-only disk."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES):
                raise
            raise OSError(
                error.errno,
                f"{error.strerror}: {self.path} takes no more rows. What was committed is intact; make "
                "room there, or restore to another folder.",
            ) from error
