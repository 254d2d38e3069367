"""`BucketView`: a local copy of some files of a workdir in a bucket, for readers that do not hold it."""

import pathlib
from collections.abc import Callable

from jaxgoodput._disk import DamagedError
from jaxgoodput.workdir.copies import GROWING, NUM_TRIES, download, warn_of_damage
from jaxgoodput.workdir.listing import Files, StoredPiece, content, read
from jaxgoodput.workdir.objects import ObjectStore


class BucketView:
    """Some files of a workdir in a bucket, as they were at the last `refresh`. See `View`."""

    def __init__(
        self, name: str, folder: pathlib.Path, store: ObjectStore, wanted: Callable[[str], bool]
    ):
        self.name = name
        self.folder = folder.resolve()
        self._store = store
        self._wanted = wanted
        self._have: dict[str, tuple[StoredPiece, ...]] = {}

    def bring(self, folder: pathlib.Path) -> None:
        """Have all files of a checkpoint in its folder, as far as they are there."""
        within = f"{folder.relative_to(self.folder).as_posix()}/"
        self._copy(lambda path: path.startswith(within))

    def refresh(self) -> None:
        """Copy what is new of the wanted files. Raises FileNotFoundError if no run has been there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._copy(self._wanted)

    def shown(self, path: pathlib.Path) -> str:
        """Return what a file in the folder is called in the workdir, for messages."""
        return f"{self.name}/{path.relative_to(self.folder).as_posix()}"

    def _copy(self, wanted: Callable[[str], bool]) -> None:
        found = read(self._store)
        if found.generation is None:
            raise FileNotFoundError(
                f"No run has written to {self.name}. Pass the --workdir that the training was started with."
            )
        files, damaged = found.listing.files, {}
        for _ in range(NUM_TRIES):
            damaged = self._once({path: x for path, x in files.items() if wanted(path)}, wanted)
            # A run that goes on deletes pieces that its new listing does not name.
            there = read(self._store).listing.files
            if not damaged or there == files:
                break
            files = there
        for path, error in damaged.items():
            warn_of_damage(path, error)

    def _once(self, files: Files, wanted: Callable[[str], bool]) -> dict[str, DamagedError]:
        """Make the wanted files here equal to a listing; returns which could not be read."""
        damaged: dict[str, DamagedError] = {}
        for path in [path for path in self._have if wanted(path) and path not in files]:
            (self.folder / path).unlink()
            del self._have[path]
        changed = {}
        for path, pieces in files.items():
            have = self._have.get(path)
            if have is not None and GROWING.fullmatch(path) and _size(have) <= _size(pieces):
                try:
                    self._append(path, _size(have), pieces)
                    self._have[path] = pieces
                except DamagedError as error:
                    damaged[path] = error
            elif have != pieces:
                changed[path] = pieces
        written = download(
            self.folder, self._store, changed, lambda _: True, on_damage=damaged.__setitem__
        )
        self._have |= {path: changed[path] for path in written}
        return damaged

    def _append(self, path: str, num_bytes: int, pieces: tuple[StoredPiece, ...]) -> None:
        """Add what follows the first `num_bytes` of a file. Its readers keep it open."""
        start, new = 0, b""
        for piece in pieces:
            end = start + piece.num_bytes
            if end > num_bytes:
                new += content(self._store, piece)[max(num_bytes - start, 0) :]
            start = end
        with open(self.folder / path, "ab") as file:
            file.write(new)


def _size(pieces: tuple[StoredPiece, ...]) -> int:
    return sum(piece.num_bytes for piece in pieces)
