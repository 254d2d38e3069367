"""Rows by id on a disk: appended to segments, found through an index in memory, and written anew when stale.

What a `commit` has named is there for good: a manifest lists the segments that hold it, in the order in
which a later row replaces an earlier one of the same id, and segments never change. Everything since is gone
with the process. Reopened, the store takes the manifest's segments and no other file, builds the index from
their ids, and looks at the sum of every row, then or when it is read: a row that is not what was written is
an error that names it, never a value.

A segment of which more than half is stale is written anew, without what is stale, by a thread behind the
others. Its rows take their place where the last of the old ones was: whatever replaces them comes later.
"""

import contextlib
import errno
import json
import os
import pathlib
import threading
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Bool, Int64, UInt64

from jaxgoodput import _disk, _serial
from jaxgoodput.embedding.index import MISSING, index_for
from jaxgoodput.embedding.segment import DamagedFile, Segment, SegmentWriter

SEGMENT_BYTES = 2**27
STALEST = 0.5  # of a segment's rows, before it is written anew
MANY_SMALL = 16  # segments of less than a quarter of the full size, before they become one
AT_ONCE = 4096  # rows copied while they are in the processor's cache
ASIDE = "damaged"


@dataclass(frozen=True)
class SegmentEntry:
    """A segment in a manifest."""

    name: str
    num_rows: int
    total: int


@dataclass(frozen=True)
class Manifest:
    """What a commit holds."""

    number: int
    row_bytes: int
    segments: tuple[SegmentEntry, ...]
    about: Mapping[str, Any]
    """What the caller of `commit` wrote down with it."""
    lineage: tuple[int, ...] = ()
    """The commits that are kept with it, each made from the one before, and its own number."""


class IdStates(NamedTuple):
    """What is known of some ids."""

    found: Bool[np.ndarray, " n"]
    rows: UInt64[np.ndarray, "found words"]
    """Of those that were found, in their order."""


@dataclass
class StoreTraffic:
    """What a store has written and read since it was opened."""

    rows_put: int = 0
    rows_got: int = 0
    bytes_put: int = 0
    bytes_written: int = 0
    """Of segments, compaction included."""
    num_compactions: int = 0

    @property
    def write_amplification(self) -> float:
        """Bytes written to the disk for each byte that was put."""
        return self.bytes_written / self.bytes_put if self.bytes_put else 1.0


def to_compact(num_rows: Sequence[int], num_live: Sequence[int], max_rows: int) -> list[int]:
    """Which finished segments are worth writing anew as one, by their places; none: [].

    Those of which more than half is stale, emptiest first, and small ones where there are many.

    >>> to_compact([100, 100, 100], [90, 20, 49], max_rows=100)
    [1, 2]
    """
    stale = [i for i, n in enumerate(num_rows) if num_live[i] < (1 - STALEST) * n]
    small = [i for i, n in enumerate(num_rows) if n < max_rows // 4 and i not in stale]
    chosen, sum_live = [], 0
    for i in sorted(stale, key=num_live.__getitem__) + (small if len(small) > MANY_SMALL else []):
        if sum_live + num_live[i] <= max_rows:
            chosen.append(i)
            sum_live += num_live[i]
    return sorted(chosen)


def manifests(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """The commits that lie in a store's folder, by number, newest first."""
    found = {int(path.stem): path for path in folder.glob("commits/*.json") if path.stem.isdigit()}
    return dict(sorted(found.items(), reverse=True))


def read_manifest(path: pathlib.Path) -> Manifest:
    """A manifest; raises DamagedFile where it is not what was written, OSError where it cannot be read."""
    try:
        total, _, body = path.read_text().partition("\n")
        if int(total, 16) != zlib.crc32(body.encode()):
            raise ValueError("its sum is another")
        return _serial.decode(json.loads(body), Manifest, path.name)
    except ValueError as error:
        raise DamagedFile(path, f"is not what was written: {error}") from error


def commits_in(folder: pathlib.Path) -> dict[int, Mapping[str, Any]]:
    """What was said `about` every commit that lies in a store's folder and can be read, by number."""
    found = {}
    for number, path in manifests(folder).items():
        with contextlib.suppress(DamagedFile):
            found[number] = read_manifest(path).about
    return found


class RowStore:
    """Rows of one width in a folder, held by one process; safe to use from several threads.

    Raises (when it is made):
      InUse: another process has the folder.
      Damaged: the commit is not what was written, and the message says which one is; a segment is set aside.
      ValueError: rows of another width, or a commit that is not there.
      OSError: the disk refuses.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        *,
        row_bytes: int,
        num_ids: int | None = None,
        at: int | None = None,
        checks_rows: bool = True,
        segment_bytes: int = SEGMENT_BYTES,
        keep: int = 2,
        compacts: bool = True,
    ):
        """Open the folder, or begin one.

        `num_ids`: ids are below it; the index then takes 4 bytes for each. `at`: go back to this commit;
        those after it are gone with the next one, but for those that this is told to keep; 0: to before the
        first. `checks_rows=False` leaves rows to be looked at when they are read. `keep`: commits that stay.
        `compacts=False`: only when told.
        """
        if row_bytes < 8 or row_bytes % 8:
            raise ValueError(f"row_bytes={row_bytes}: rows have 8, 16, 24, ... bytes. Pad them.")
        self.folder = pathlib.Path(folder)
        self.row_bytes = row_bytes
        self.traffic = StoreTraffic()
        self._num_ids, self._keep = num_ids, max(keep, 1)
        self._shift = max((segment_bytes // row_bytes).bit_length() - 1, 8)
        self._max_rows = 2**self._shift
        self._lock = threading.Lock()  # of the index and of what it points to
        self._writing = threading.Lock()  # of the segment that grows, and of commits
        self._compacting = threading.Lock()
        self._finishing = threading.Lock()
        self._held = contextlib.ExitStack()
        with self._held:
            (self.folder / "commits").mkdir(parents=True, exist_ok=True)
            self._held.enter_context(_disk.held(self.folder))
            self._open(at, checks_rows)
            self._keep_held = self._held.pop_all()
        self._wanted, self._is_closed = threading.Event(), False
        self._failure: Exception | None = None
        self._has_room = True  # to write stale segments anew
        self._thread = threading.Thread(target=self._compact_behind, name="compaction", daemon=True)
        if compacts:
            self._thread.start()

    def __enter__(self) -> "RowStore":
        """The store."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder. What was not committed is gone."""
        self._is_closed = True
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._writing:
            self._grown()
            for writer in self._full.values():
                writer.close()
        self._keep_held.close()

    def __len__(self) -> int:
        """Rows that it holds."""
        with self._lock:
            return sum(self._num_live.values())

    @property
    def newest(self) -> Manifest | None:
        """The commit that it was opened with, or has made since."""
        return self._newest

    def commits(self) -> dict[int, Mapping[str, Any]]:
        """What was said `about` every commit that lies there and can be read, by number."""
        return commits_in(self.folder)

    # -- rows ----------------------------------------------------------------------------------------

    def get(self, ids: Int64[np.ndarray, " n"]) -> IdStates:
        """The rows of those ids that are there. Raises Damaged, naming a row that is not what was written."""
        with self._lock:
            locations = self._index.get(ids)
            parts = dict(
                self._parts
            )  # a segment that is compacted away meanwhile can still be read
        found = locations != MISSING
        rows = self._gathered(locations if found.all() else locations[found], parts)
        self.traffic.rows_got += len(rows)
        return IdStates(found, rows)

    def put(self, ids: Int64[np.ndarray, " n"], rows: UInt64[np.ndarray, "n words"]) -> None:
        """Keep a row for each id, in place of any that there was; each id once.

        Raises OSError where the disk is full or refuses: what was committed stays as it is.
        """
        if rows.shape[1] * 8 != self.row_bytes:
            raise ValueError(
                f"rows of {rows.shape[1] * 8} bytes do not fit a store of rows of {self.row_bytes} bytes."
            )
        self._raise_failure()
        with self._writing:
            self._raise_if_closed()
            start = 0
            while start < len(ids):
                part, writer = self._with_room()
                end = start + min(writer.room, len(ids) - start)
                first = (part << self._shift) + writer.num_rows
                with self._explained():
                    writer.append(ids[start:end], rows[start:end])
                numbers = np.arange(first, first + end - start, dtype=np.uint32)
                with self._lock:
                    self._point(self._index.put(ids[start:end], numbers), part, end - start)
                start = end
        self.traffic.rows_put += len(ids)
        self.traffic.bytes_put += rows.nbytes
        self.traffic.bytes_written += rows.nbytes
        if self._has_room and self._worth():
            self._wanted.set()

    def ids(self) -> Int64[np.ndarray, " n"]:
        """The ids of all rows, in ascending order."""
        with self._lock:
            found = [self._live_of(part)[0] for part in self._order]
        return np.sort(np.concatenate([np.empty(0, np.int64), *found]))

    def _gathered(self, locations: np.ndarray, parts: Mapping[int, Segment | SegmentWriter]):
        """Rows by location: read in the order of the disk, in pieces that stay in the processor's cache."""
        rows = np.empty((len(locations), self.row_bytes // 8), np.uint64)
        # Both in one number, since sorting numbers is several times as fast as sorting places by them.
        keys = locations.astype(np.uint64) << np.uint64(32)
        keys |= np.arange(len(keys), dtype=np.uint64)
        keys.sort()
        targets = (keys & np.uint64(2**32 - 1)).astype(np.int64)
        places = (keys >> np.uint64(32)).astype(np.int64)
        numbers = places >> self._shift
        places &= self._max_rows - 1
        ends = [*(np.flatnonzero(np.diff(numbers)) + 1), len(numbers)] if len(numbers) else []
        start = 0
        for end in ends:
            part = parts[int(numbers[start])]
            for at in range(start, end, AT_ONCE):
                upto = min(at + AT_ONCE, end)
                rows[targets[at:upto]] = part.take(places[at:upto])
            start = end
        return rows

    def _with_room(self) -> tuple[int, SegmentWriter]:
        """The segment that grows, and its number; a new one where it is full. Under `_writing`."""
        if self._growing is not None and self._growing.room == 0:
            self._grown()
            self._wanted.set()  # finished behind the others
        if self._growing is None:
            with self._explained():
                writer = self._new_writer(self._max_rows)
            with self._lock:
                self._growing_number = self._added(writer)
                self._order.append(self._growing_number)
            self._growing = writer
        return self._growing_number, self._growing

    def _grown(self) -> None:
        """Have the segment that grows be finished. Under `_writing`."""
        if (writer := self._growing) is None:
            return
        self._growing = None
        if writer.num_rows:
            with self._lock:
                self._full[self._growing_number] = writer
        else:  # the disk refused its first rows
            with self._lock:
                self._order.remove(self._growing_number)
                del self._parts[self._growing_number], self._num_live[self._growing_number]
            writer.close()
            writer.path.unlink(missing_ok=True)

    def _finish(self) -> None:
        """Give segments that do not grow any more what they end in, and map them anew."""
        with self._finishing:
            with self._lock:
                full = dict(self._full)
            for number, writer in full.items():
                with self._explained():
                    segment = writer.finish()
                self.traffic.bytes_written += segment.path.stat().st_size - segment.rows.nbytes
                with self._lock:
                    self._parts[number] = segment
                    self._unsynced.add(segment.path)
                    del self._full[number]

    def _new_writer(self, max_rows: int) -> SegmentWriter:
        with self._lock:
            self._next_file += 1
            name = f"{self._next_file:08d}.rows"
            self._in_use.add(name)
        try:
            return SegmentWriter(self.folder / name, self.row_bytes, max_rows)
        except BaseException:
            with self._lock:
                self._in_use.discard(name)
            raise

    def _added(self, part: Segment | SegmentWriter) -> int:
        """Give a segment a number. Under `_lock`."""
        number = next(i for i in range(len(self._parts) + 1) if i not in self._parts)
        if (number + 1) << self._shift >= MISSING:
            raise ValueError(
                f"{self.folder} has {len(self._parts)} segments, more than the index can tell apart. Make "
                "segment_bytes larger, or commit less often."
            )
        self._parts[number], self._num_live[number] = part, 0
        self._in_use.discard(part.path.name)
        return number

    def _point(self, old: np.ndarray, part: int, num_rows: int) -> None:
        """Count what has moved to a segment from wherever it was. Under `_lock`."""
        before = np.bincount((old[old != MISSING] >> np.uint32(self._shift)).astype(np.int64))
        for number in np.flatnonzero(before):
            self._num_live[int(number)] -= int(before[number])
        self._num_live[part] += num_rows

    def _live_of(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a segment that are found there, and their places. Under `_lock`."""
        ids = self._parts[number].ids
        there = np.arange(len(ids), dtype=np.uint32) + np.uint32(number << self._shift)
        places = np.flatnonzero(self._index.get(np.asarray(ids)) == there)
        return np.asarray(ids[places]), places

    # -- commits -------------------------------------------------------------------------------------

    def commit(self, about: Mapping[str, Any] | None = None, *, keep: Collection[int] = ()) -> int:
        """Put everything on the disk for good; returns the commit's number, and says `about` of it.

        Of all commits that lie there, those of `keep` stay beside the newest that this one is made from.

        Raises OSError where the disk refuses: the commit before stays the newest.
        """
        self._raise_failure()
        with self._writing:
            self._raise_if_closed()
            self._grown()
            self._finish()
            with self._lock:
                parts = [self._parts[number] for number in self._order]
                finished = [part for part in parts if isinstance(part, Segment)]
                assert len(finished) == len(parts)  # none grows
                unsynced, self._unsynced = self._unsynced, set()
                # Compacted away meanwhile, they still belong to this commit.
                names = {part.path.name for part in finished}
                self._in_use |= names
            try:
                for path in sorted(unsynced & {part.path for part in finished}):
                    _sync(path)
                number = max([*manifests(self.folder), 0]) + 1
                listed = tuple(SegmentEntry(p.path.name, len(p.ids), p.total) for p in finished)
                lineage = (*self._lineage, number)
                newest = lineage[-self._keep :]
                lineage = tuple(n for n in lineage if n in newest or n in keep)
                made = Manifest(number, self.row_bytes, listed, dict(about or {}), lineage)
                with self._explained():
                    self._write_manifest(made)
            except BaseException:
                with self._lock:
                    self._unsynced |= unsynced
                raise
            finally:
                with self._lock:
                    self._in_use -= names
            self._newest = made
            self._forget_old(made, keep)
            if not self._has_room:  # there may be by now
                self._has_room = True
                self._wanted.set()
        return made.number

    def _write_manifest(self, manifest: Manifest) -> None:
        body = json.dumps(_serial.encode(manifest))
        path = self.folder / "commits" / f"{manifest.number:08d}.json"
        unfinished = path.with_suffix(".unfinished")
        with open(unfinished, "w") as file:
            file.write(f"{zlib.crc32(body.encode()):08x}\n{body}")
            file.flush()
            os.fsync(file.fileno())
        _disk.sync_folder(self.folder)
        unfinished.rename(path)
        _disk.sync_folder(path.parent)

    def _forget_old(self, made: Manifest, keep: Collection[int]) -> None:
        """Delete commits that are not kept, and segments that no kept one names."""
        self._lineage = made.lineage
        for number, path in manifests(self.folder).items():
            if number not in self._lineage and number not in keep:
                path.unlink()
        self._delete_unnamed()

    def _delete_unnamed(self) -> None:
        """Delete segments that no commit names and that are not in use."""
        there = list(self.folder.glob("*.rows"))  # first: what comes after it stays
        with self._lock:
            named = {part.path.name for part in self._parts.values()} | self._in_use
        for path in manifests(self.folder).values():
            try:
                named |= {listed.name for listed in read_manifest(path).segments}
            except FileNotFoundError:
                continue  # `commit` has just forgotten it
            except (DamagedFile, OSError) as error:  # it goes when newer ones have taken its place
                logging.warning("%s. As long as that is so, no segment is deleted.", error)
                return
        for path in there:
            if path.name not in named:
                path.unlink(missing_ok=True)

    # -- opening -------------------------------------------------------------------------------------

    def _open(self, at: int | None, checks_rows: bool) -> None:
        self._index = index_for(self._num_ids)
        self._parts: dict[int, Segment | SegmentWriter] = {}
        self._num_live: dict[int, int] = {}
        self._order: list[int] = []  # in which a later row replaces an earlier one
        self._unsynced: set[pathlib.Path] = set()
        self._in_use: set[str] = set()  # files that are about to be segments, or part of a commit
        self._growing: SegmentWriter | None = None
        self._full: dict[int, SegmentWriter] = {}
        self._growing_number = -1
        self._newest: Manifest | None = None
        self._lineage: tuple[int, ...] = ()
        for path in self.folder.glob("commits/*.unfinished"):
            path.unlink()
        there = manifests(self.folder)
        names = [path.stem for path in self.folder.glob("**/*.rows")]
        self._next_file = max((int(name) for name in names if name.isdigit()), default=0)
        if at == 0:  # as before the first: what there is goes with the next one
            return
        if at is not None and at not in there:
            raise ValueError(
                f"{self.folder} has no commit {at}; it has {sorted(there) or 'none'}. Open one of those."
            )
        if not there:
            if names:
                self._delete_unnamed()
            return
        number = at if at is not None else next(iter(there))
        try:
            self._newest, segments = self._read(there[number], checks_rows)
        except DamagedFile as damage:
            raise _disk.DamagedError(self._set_aside(damage, number)) from damage
        # Before commits wrote it down, those that had been gone back from were deleted first.
        lineage = self._newest.lineage or sorted(n for n in there if n <= number)
        self._lineage = tuple(n for n in lineage if n in there)
        largest = max((int(s.ids.max()) for s in segments if len(s.ids)), default=-1)
        if self._num_ids is not None and largest >= self._num_ids:
            raise ValueError(
                f"{self.folder} holds the row of id {largest}, and ids below {self._num_ids} were asked for. "
                f"Open it with num_rows={largest + 1} or more (num_ids of a store), or use another folder."
            )
        for segment in segments:
            part = self._added(segment)
            self._order.append(part)
            if len(segment.ids) > self._max_rows:
                raise ValueError(
                    f"{segment.path} holds {len(segment.ids)} rows, more than segments of the size that was "
                    f"asked for ({self._max_rows}). Open the store with the segment_bytes that it had."
                )
            first = part << self._shift
            numbers = np.arange(first, first + len(segment.ids), dtype=np.uint32)
            self._index.put(np.asarray(segment.ids), numbers)
        for part in self._order:
            self._num_live[part] = len(self._live_of(part)[0])
        self._delete_unnamed()

    def _read(self, path: pathlib.Path, checks_rows: bool) -> tuple[Manifest, list[Segment]]:
        """A commit and its segments. Raises DamagedFile, or ValueError for another width."""
        manifest = read_manifest(path)
        if manifest.row_bytes != self.row_bytes:
            raise ValueError(
                f"{self.folder} holds rows of {manifest.row_bytes} bytes, and rows of {self.row_bytes} were "
                "asked for: the table was made with another dimension, optimizer or dtype. Open it with "
                "those that it was made with, or use another folder."
            )
        segments = []
        for listed in manifest.segments:
            segment = Segment.open(self.folder / listed.name, self.row_bytes)
            if (len(segment.ids), segment.total) != (listed.num_rows, listed.total):
                raise DamagedFile(segment.path, f"is not the segment that commit {path.stem} names")
            if checks_rows:
                segment.check()
            segments.append(segment)
        return manifest, segments

    def _set_aside(self, damage: DamagedFile, number: int) -> str:
        """Move a damaged segment away, and say what is left.

        A manifest stays: without it, the next start would take the commit before for the newest.
        """
        moved = ""
        if damage.path.suffix == ".rows" and damage.path.is_file():
            (self.folder / ASIDE).mkdir(exist_ok=True)
            kept = damage.path.rename(self.folder / ASIDE / damage.path.name)
            moved = f" It is kept as {kept}."
        for other, path in manifests(self.folder).items():
            if other < number:
                with contextlib.suppress(DamagedFile):
                    self._read(path, checks_rows=True)
                    return (
                        f"Commit {number} cannot be used: {damage}.{moved} Commit {other}, the one before, "
                        f"is whole: open the store with at={other}."
                    )
        return (
            f"Commit {number} cannot be used: {damage}.{moved} No commit before it is whole: restore the "
            "folder from a copy, or begin another one."
        )

    # -- compaction ----------------------------------------------------------------------------------

    def compact(self) -> bool:
        """Write stale segments anew, where that is worth it; whether there was anything to do."""
        with self._compacting:
            self._raise_if_closed()
            self._finish()
            with self._lock:
                order = self._finished()
                counts = [len(self._parts[n].ids) for n in order]
                live = [self._num_live[n] for n in order]
            chosen = [order[i] for i in to_compact(counts, live, self._max_rows)]
            if not chosen:
                return False
            with self._lock:
                found = {n: self._live_of(n) for n in chosen}
            self._rewrite(found)
            self.traffic.num_compactions += 1
            return True

    def _rewrite(self, found: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> None:
        """Replace segments by one with what is live of them: ids and places by segment."""
        num_rows = sum(len(ids) for ids, _ in found.values())
        writer = segment = None
        if num_rows:
            writer = self._new_writer(num_rows)
        old = np.concatenate(
            [places + (n << self._shift) for n, (_, places) in found.items()] or [np.empty(0, int)]
        ).astype(np.uint32)
        try:
            if writer is not None:
                with self._explained():
                    for number, (ids, places) in found.items():
                        part = self._parts[number]
                        for at in range(0, len(ids), AT_ONCE):
                            some = slice(at, at + AT_ONCE)
                            writer.append(ids[some], part.take(places[some]))
                    segment = writer.finish()
                self.traffic.bytes_written += segment.path.stat().st_size
        except BaseException:
            if writer is not None:
                writer.close()
                writer.path.unlink(missing_ok=True)
                with self._lock:
                    self._in_use.discard(writer.path.name)
            raise
        with self._lock:
            last = max(self._order.index(n) for n in found)
            if segment is not None:
                made = self._added(segment)
                ids = np.asarray(segment.ids)
                current = np.flatnonzero(self._index.get(ids) == old)  # others were put meanwhile
                numbers = current.astype(np.uint32) + np.uint32(made << self._shift)
                self._point(self._index.put(ids[current], numbers), made, len(current))
                self._order.insert(last + 1, made)
                self._unsynced.add(segment.path)
            for number in found:
                self._order.remove(number)
                del self._parts[number], self._num_live[number]
        self._delete_unnamed()

    def _finished(self) -> list[int]:
        """The segments that do not grow. Under `_lock`."""
        return [n for n in self._order if isinstance(self._parts[n], Segment)]

    def _worth(self) -> bool:
        with self._lock:
            order = self._finished()
            counts = [len(self._parts[n].ids) for n in order]
            return bool(to_compact(counts, [self._num_live[n] for n in order], self._max_rows))

    def _compact_behind(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            try:
                while not self._is_closed and self.compact():
                    pass
            except Exception as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    logging.warning("stale rows stay until the next commit: %s", error)
                    self._has_room = False
                else:  # the next `put` or `commit` raises it
                    self._failure = error
            if self._is_closed:
                return

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError(
                f"{self.folder} was closed, and may be another process's by now. Open it again to write."
            )

    @contextlib.contextmanager
    def _explained(self):
        """Say what a disk that refuses means."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES):
                raise
            raise OSError(
                error.errno,
                f"{error.strerror}: {self.folder} takes no more rows. What was committed is intact; make "
                "room there, or restore to another folder.",
            ) from error


def _sync(path: pathlib.Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
