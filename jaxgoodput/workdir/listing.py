"""`Listing`: the one object of a bucket that changes. It says who holds the workdir, and which files it has.

The content of files lies in other objects, the pieces, which are written once under names of their own and
never again. A file is there as soon as a listing with its pieces has replaced the one before, and all changes
of one replacement appear at once. Since a replacement names the generation that it replaces, it fails if
another process has taken the workdir meanwhile, however late it arrives.
"""

import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from jaxgoodput._disk import DamagedError
from jaxgoodput._fields import serial
from jaxgoodput.workdir.objects import ObjectStore, StoreError

KEY = "workdir.json"
PIECES = "workdir.pieces/"  # the pieces are below this prefix
# What a run calls them. Objects of other names there are not its own, and it never deletes them.
PIECE = re.compile(rf"{re.escape(PIECES)}\d+\.\d+/.+@\d+", re.DOTALL)
PIECE_BYTES = 64 * 2**20


class StoredPiece(NamedTuple):
    """A part of a file's content: one object."""

    key: str
    num_bytes: int
    sha256: str


Files = Mapping[str, tuple[StoredPiece, ...]]  # the pieces of each file by its path, in order


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that may change a workdir."""

    name: str
    """For people."""
    token: str
    """Tells this holder from all others."""
    machine: str
    """Boot and process namespace of the machine; "" if unknown. Only there `pid` means anything."""
    pid: int
    started: str
    """When the process began, in the machine's own count: numbers of processes are used again."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What `workdir.json` holds."""

    version: ClassVar[int] = 1
    turn: int = 0
    """How often the listing was written. No two versions are equal."""
    tenure: int = 0
    """How often the workdir was taken."""
    holder: Holder | None = None
    files: Files = field(default_factory=dict)

    @property
    def keys(self) -> set[str]:
        """The keys of all pieces."""
        return {piece.key for pieces in self.files.values() for piece in pieces}

    def held_by(self, holder: Holder | None) -> "Listing":
        """Return the next listing, with another holder or none."""
        tenure = self.tenure + (holder is not None)
        return dataclasses.replace(self, turn=self.turn + 1, tenure=tenure, holder=holder)

    def next(self, files: Files) -> "Listing":
        """Return the next listing of the same holder."""
        return dataclasses.replace(self, turn=self.turn + 1, files=files)


class Found(NamedTuple):
    """A listing as it lies in the store; an empty one, without a generation, if there is none."""

    listing: Listing
    generation: str | None


def read(store: ObjectStore) -> Found:
    """Return the listing of a store. Raises StoreError if it is not one of ours."""
    there = store.get(KEY)
    if there is None:
        return Found(Listing(), None)
    try:
        listing = serial.loads(there.data.decode(), Listing)
        for path in listing.files:
            _require_inside(path)
    except ValueError as error:
        raise StoreError(
            f"{store.url}/{KEY} is not the list of files of a run that this version can read: {error}. Name "
            "another workdir, or use the version of jaxgoodput that wrote it."
        ) from error
    return Found(listing, there.generation)


def packed(listing: Listing) -> bytes:
    """Return a listing as it is stored."""
    # The files as they are: there may be ten thousands of pieces, and a run writes this every few seconds.
    rest = serial.pack(dataclasses.replace(listing, files={}))
    return json.dumps({**rest, "files": dict(listing.files)}).encode()


def content(store: ObjectStore, piece: StoredPiece) -> bytes:
    """Return the content of a piece. Raises DamagedError if it is missing, or not what was written."""
    there = store.get(piece.key)
    if there is None:
        raise DamagedError(f"{store.url}/{piece.key} is missing")
    if digest(there.data) != piece.sha256:
        raise DamagedError(f"{store.url}/{piece.key} is not what was written")
    return there.data


def digest(data: bytes) -> str:
    """Return the checksum of a piece."""
    return hashlib.sha256(data).hexdigest()


def stay(pieces: tuple[StoredPiece, ...], num_bytes: int) -> tuple[StoredPiece, ...]:
    """Return which pieces of a file stay when it has grown to `num_bytes`; what follows is written anew.

    Pieces no larger than what is new are written again with it, so that a file of n flushes has about log(n)
    pieces and each byte is written about log(n) times.
    """
    kept = list(pieces)
    start = sum(piece.num_bytes for piece in kept)
    while kept and kept[-1].num_bytes <= min(num_bytes - start, PIECE_BYTES - 1):
        start -= kept.pop().num_bytes
    return tuple(kept)


def _require_inside(path: str) -> None:
    """Raise ValueError if a file would not lie in the folder that it is copied to."""
    parts = pathlib.PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"{path!a:.80} is no path of a file within a folder")
