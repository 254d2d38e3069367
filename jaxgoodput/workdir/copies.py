"""Copies files between a folder and a bucket: what has changed to the one, what is wanted to the other.

`Upload` compares the folder with the listing and writes new pieces. `download` writes files into a folder.
Both know the layout of a workdir only as far as `LEFT_OUT`, `GROWING` and `AS_ONE` say.
"""

import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from absl import logging

from jaxgoodput._disk import LOCK, DamagedError
from jaxgoodput.workdir.listing import (
    PIECE_BYTES,
    PIECES,
    Files,
    Listing,
    StoredPiece,
    content,
    digest,
    stay,
)
from jaxgoodput.workdir.objects import ObjectStore

NUM_AT_ONCE = 4  # requests; each holds a piece in memory
# Compiled programs belong to this machine. The others are unfinished, or mean something to this machine only.
COMPILED = "compilation_cache"
LEFT_OUT = re.compile(rf"{COMPILED}|\..*|.*\.tmp|.*\.part|{LOCK}|.*\.orbax-checkpoint-tmp.*")
# Files that are only ever appended to, or replaced by one of another inode. Others are written again
# as a whole if they have changed.
GROWING = re.compile(r"goodput(\.\d+)?\.jsonl|scalars\.csv|tensorboard/.*events.*")
# Folders whose files appear and vanish together.
_CHECKPOINT = r"(?:checkpoints|damaged_checkpoints|spoilt_checkpoints)/[^/]+"
AS_ONE = re.compile(rf"({_CHECKPOINT})/.*")
# In them, what is copied from a bucket only when it is wanted: it may be large.
LARGE = re.compile(rf"{_CHECKPOINT}/(?!meta/).*/.*")
NUM_TRIES = 5  # if files vanish while they are read
NUM_LOOKS = 10  # if files come and go while they are listed


class Stamp(NamedTuple):
    """What tells whether a file has changed."""

    num_bytes: int
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, path: pathlib.Path) -> "Stamp":
        """Return the stamp of a file."""
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


class _Part(NamedTuple):
    """Bytes of a file that are to become a piece."""

    path: str
    stamp: Stamp
    start: int
    num_bytes: int


class Upload:
    """Makes a listing's files those of a folder. Not thread-safe.

    `known` are the files that are in both already. A file of the listing that was not copied into the folder
    stays in the listing as long as the folder of its checkpoint is there. So does one that has vanished from
    it: to delete a checkpoint is to delete its folder.
    """

    def __init__(self, folder: pathlib.Path, store: ObjectStore, known: Mapping[str, Stamp]):
        self._folder = folder
        self._store = store
        self._known = dict(known)
        self._here = dict(known)
        self._torn: dict[str, set[str]] = {}  # what the last call has missed, by folder
        self.damaged: frozenset[str] = frozenset()
        """Folders of which the last two calls have missed the same files. They are whole in the bucket."""
        self._written: dict[
            _Part, StoredPiece
        ] = {}  # by attempts that failed later: not written again
        self._round = 0

    def __call__(self, listing: Listing) -> Files:
        """Write pieces of what has changed, and return the files of the next listing.

        Call `settle` once that is published. The files of a checkpoint leave the listing together. Raises
        StoreError, and OSError if a file cannot be read.
        """
        for _ in range(NUM_TRIES):
            try:
                return self._once(listing)
            except FileNotFoundError:  # an old checkpoint was deleted meanwhile, or a file renamed
                continue
        return self._once(listing)

    def settle(self) -> None:
        """Note that the files of the last call are in the bucket."""
        self._known, self._written = self._here, {}

    def add(self, known: Mapping[str, Stamp]) -> None:
        """Note files that were copied from the bucket into the folder."""
        self._known = {**self._known, **known}

    def is_settled(self, folder: pathlib.Path) -> bool:
        """Return whether the files in a folder of a checkpoint are those that were settled.

        May be called on any thread.
        """
        while True:
            known = self._known
            try:
                there = {path.relative_to(self._folder).as_posix(): path for path in _files(folder)}
                return all(known.get(name) == Stamp.of(path) for name, path in there.items())
            except FileNotFoundError:  # it is being deleted
                continue

    def _once(self, listing: Listing) -> Files:
        here = steady_stamps(self._folder)
        absent = self._absent(listing, here)
        files = {path: self._kept(listing, path, stamp) for path, stamp in here.items()}
        parts = [
            _Part(path, here[path], at, min(PIECE_BYTES, here[path].num_bytes - at))
            for path, kept in files.items()
            for at in range(sum(x.num_bytes for x in kept), here[path].num_bytes, PIECE_BYTES)
        ]
        if wanted := [part for part in parts if part not in self._written]:
            self._round += 1
            within = f"{PIECES}{listing.tenure}.{self._round}/"
            with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
                list(pool.map(lambda part: self._write(part, within), wanted))
        for part in parts:
            files[part.path] = (*files[part.path], self._written[part])
        # What was here and is absent stays known, so that the next look misses it, too.
        lost = {path: self._known[path] for path in absent if path in self._known}
        self._here = {**lost, **here}
        torn: dict[str, set[str]] = {}
        for path in lost:
            torn.setdefault(_checkpoint_of(path) or "", set()).add(path)
        # What is being deleted as a whole has fewer files at each look, or none.
        self.damaged = frozenset(x for x, missed in torn.items() if self._torn.get(x) == missed)
        self._torn = torn
        return {**{path: listing.files[path] for path in absent}, **files}

    def _absent(self, listing: Listing, here: Mapping[str, Stamp]) -> list[str]:
        """Return the files that stay in the listing though they are not in the folder.

        They belong to a checkpoint whose folder is there. If it holds files, and none of those that were
        copied, it is another checkpoint that took the name.
        """
        is_same: dict[str, bool] = {}
        for path, stamp in here.items():
            if (folder := _checkpoint_of(path)) is not None:
                is_same[folder] = is_same.get(folder, False) or self._known.get(path) == stamp
        absent = []
        for path in listing.files:
            folder = _checkpoint_of(path)
            if path in here or folder is None:
                continue
            if is_same[folder] if folder in is_same else (self._folder / folder).is_dir():
                absent.append(path)
        return absent

    def _kept(self, listing: Listing, path: str, stamp: Stamp) -> tuple[StoredPiece, ...]:
        """Return the pieces of a file that stay: all, none, or the first ones if it has grown."""
        before, known = listing.files.get(path), self._known.get(path)
        if before is None or known is None:
            return ()
        if known == stamp:
            return before
        has_grown = (
            GROWING.fullmatch(path) is not None
            and known.inode == stamp.inode
            and sum(piece.num_bytes for piece in before) == known.num_bytes <= stamp.num_bytes
        )
        return stay(before, stamp.num_bytes) if has_grown else ()

    def _write(self, part: _Part, within: str) -> None:
        with open(self._folder / part.path, "rb") as file:
            if os.fstat(file.fileno()).st_ino != part.stamp.inode:
                raise FileNotFoundError(f"{self._folder / part.path} was replaced")
            file.seek(part.start)
            data = file.read(part.num_bytes)
        if len(data) != part.num_bytes:
            raise FileNotFoundError(f"{self._folder / part.path} has become shorter")
        piece = StoredPiece(f"{within}{part.path}@{part.start}", part.num_bytes, digest(data))
        self._store.put(piece.key, data)
        self._written[part] = piece


def _checkpoint_of(path: str) -> str | None:
    """Return the folder of the checkpoint that a file belongs to; None if it belongs to none."""
    found = AS_ONE.fullmatch(path)
    return None if found is None else found[1]


def steady_stamps(folder: pathlib.Path) -> dict[str, Stamp]:
    """Return the stamps of a folder once two looks in a row have found the same files.

    One look alone may miss both a file that is deleted and the one that takes its place meanwhile. Raises
    FileNotFoundError if files come and go all the time.
    """
    before = stamps(folder)
    for _ in range(NUM_LOOKS):
        after = stamps(folder)
        if _inodes(before) == _inodes(after):
            return after
        before = after
    raise FileNotFoundError(f"the files in {folder} come and go faster than they can be listed")


def _inodes(found: Mapping[str, Stamp]) -> dict[str, int]:
    return {path: stamp.inode for path, stamp in found.items()}


def stamps(folder: pathlib.Path) -> dict[str, Stamp]:
    """Return the files of a folder that belong to a run, by path.

    Checkpoints come first, so that the journal, looked at later, holds at least what was written before them.
    """
    tops = sorted(folder.iterdir(), key=lambda p: (not AS_ONE.match(f"{p.name}/x/"), p.name))
    found = {}
    for top in tops:
        for path in _files(top):
            found[path.relative_to(folder).as_posix()] = Stamp.of(path)
    return found


def _files(path: pathlib.Path) -> Iterator[pathlib.Path]:
    if LEFT_OUT.fullmatch(path.name) or path.is_symlink():
        return
    if path.is_dir():
        for inner in sorted(path.iterdir()):
            yield from _files(inner)
    elif path.is_file():
        yield path


def download(
    folder: pathlib.Path,
    store: ObjectStore,
    files: Files,
    wanted: Callable[[str], bool],
    *,
    on_damage: Callable[[str, DamagedError], None],
) -> dict[str, Stamp]:
    """Write the wanted files of a listing into a folder, and return them with their stamps.

    A file whose pieces are damaged or missing is left out, and `on_damage` is told.
    """
    chosen = {path: pieces for path, pieces in files.items() if wanted(path)}

    def write(path: str) -> Stamp | None:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        try:
            with open(part, "wb") as file:
                for piece in chosen[path]:
                    file.write(content(store, piece))
        except DamagedError as error:
            part.unlink()
            on_damage(path, error)
            return None
        os.replace(part, target)
        return Stamp.of(target)

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        written = dict(zip(chosen, pool.map(write, chosen), strict=True))
    return {path: stamp for path, stamp in written.items() if stamp is not None}


def warn_of_damage(path: str, error: DamagedError) -> None:
    """Log that a file of a workdir is lost."""
    logging.warning("%s of the workdir is left out: %s.", path, error)
