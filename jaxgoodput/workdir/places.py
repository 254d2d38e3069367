"""`workdir_of`: the place that a workdir names, a `Folder` or a `Bucket`. Nothing else asks which one it is.

A run works in a local folder in either case. If the workdir is a bucket, that folder is a copy: `Bucket.held`
takes the workdir in the bucket, fetches its files, and from then on copies what the run writes. A checkpoint
counts as saved once it is in the bucket (`Keeper`). Readers, which do not hold the workdir, look at a `View`.
"""

import contextlib
import functools
import hashlib
import os
import pathlib
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

from jaxgoodput import _disk
from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.workdir.copies import COMPILED, LARGE
from jaxgoodput.workdir.keeping import BucketKeeper
from jaxgoodput.workdir.listing import PIECES
from jaxgoodput.workdir.objects import ObjectStore, PatientStore
from jaxgoodput.workdir.tenure import Tenure
from jaxgoodput.workdir.viewing import BucketView

BUCKET = re.compile(r"(gs|s3)://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(?:/+(.*?))?/*")
READER_PATIENCE_S = 20.0
# A store that is away for longer fails one save; the next one tries again.
PATIENCE_S = 60.0


@runtime_checkable
class Keeper(Protocol):
    """What keeps the files of a workdir that this process holds."""

    def secure(self) -> str | None:
        """Return when all that was written before is safe: None, or why it is not."""
        ...

    @property
    def unreachable(self) -> str | None:
        """Why nothing that is written can become safe at present; None if it can."""
        ...

    def is_safe(self, folder: pathlib.Path) -> bool:
        """Return whether the checkpoint in a folder is where it survives the loss of this machine's copy.

        If the folder is gone, this is about the checkpoint that was there last.
        """
        ...

    def bring(self, folder: pathlib.Path) -> None:
        """Have all files of a checkpoint in its folder, as far as they are there. Raises StoreError."""
        ...


@runtime_checkable
class View(Protocol):
    """A workdir that is read and not held."""

    name: str
    """The workdir, for messages."""
    folder: pathlib.Path
    """A local folder with its files, but for what `bring` brings."""

    def bring(self, folder: pathlib.Path) -> None:
        """Have all files of a checkpoint in its folder, as far as they are there. Raises StoreError."""
        ...

    def refresh(self) -> None:
        """Bring the folder up to date. Raises StoreError."""
        ...

    def shown(self, path: pathlib.Path) -> str:
        """Return what a file in the folder is called in the workdir, for messages."""
        ...


class FolderKeeper:
    """A local folder keeps its files by itself."""

    def secure(self) -> str | None:
        """Do nothing."""

    @property
    def unreachable(self) -> str | None:
        """None: nothing can fail later."""

    def is_safe(self, folder: pathlib.Path) -> bool:
        """Return whether the folder is there."""
        return folder.is_dir()

    def bring(self, folder: pathlib.Path) -> None:
        """Do nothing."""


class FolderView:
    """A local folder is read as it is."""

    def __init__(self, workdir: str):
        self.name = workdir
        self.folder = pathlib.Path(workdir)

    def bring(self, folder: pathlib.Path) -> None:
        """Do nothing."""

    def refresh(self) -> None:
        """Do nothing."""

    def shown(self, path: pathlib.Path) -> str:
        """Return the path."""
        return str(path)


class Folder:
    """A workdir that is a folder of a mounted file system."""

    takes_processes = True
    """Whether several processes may work in it together."""

    def __init__(self, workdir: str):
        self.name = workdir
        self.folder = pathlib.Path(workdir)

    @property
    def identity(self) -> str:
        """The name that no other workdir has, wherever the process runs."""
        return str(self.folder.resolve())

    @contextlib.contextmanager
    def held(self, clock: Clock, on_lost: Callable[[str], None]) -> Iterator[Keeper]:
        """Hold the folder during the block. Raises InUse if another process does."""
        with _disk.held(self.folder):
            yield FolderKeeper()

    @contextlib.contextmanager
    def viewed(self, wanted: str) -> Iterator[View]:
        """Look at the folder during the block."""
        yield FolderView(self.name)


class Bucket:
    """A workdir that is a prefix of a bucket."""

    takes_processes = False

    def __init__(self, kind: str, bucket: str, prefix: str):
        self.name = f"{kind}://{bucket}/{prefix}".rstrip("/")
        self._kind, self._bucket, self._prefix = kind, bucket, prefix
        self._title = prefix.rpartition("/")[2] or bucket

    @functools.cached_property
    def folder(self) -> pathlib.Path:
        """This machine's copy. Raises PermissionError if the folder of all copies cannot be used."""
        mark = hashlib.sha256(self.name.encode()).hexdigest()[:16]
        return private_folder() / mark / self._title

    @property
    def identity(self) -> str:
        """The name that no other workdir has, wherever the process runs."""
        return self.name

    @contextlib.contextmanager
    def held(self, clock: Clock, on_lost: Callable[[str], None]) -> Iterator[Keeper]:
        """Hold the workdir during the block, and copy what is written into `folder` to the bucket.

        `on_lost` is called with a sentence, on another thread, if another process takes the workdir. Raises
        InUse if another process holds it, StoreError if the bucket cannot be used.
        """
        store = self.store(clock, PATIENCE_S)
        self.folder.mkdir(parents=True, exist_ok=True)
        tenure = Tenure.begin(store, clock)
        with contextlib.ExitStack() as stack:
            try:
                # A run that has lost the workdir, and does not know yet, may still use the folder.
                stack.enter_context(_disk.held(self.folder))
                self._clear()
            except BaseException:
                tenure.end()
                raise
            kept = BucketKeeper(self.folder, store, tenure, on_lost)
            try:
                with contextlib.closing(kept):
                    yield kept
            finally:  # also after a stop, which is an exception
                if kept.is_complete:
                    self._clear()

    @contextlib.contextmanager
    def viewed(self, wanted: str) -> Iterator[View]:
        """Look at a copy of the workdir during the block; `wanted` are the files in it, an expression.

        Raises StoreError if the bucket cannot be used.
        """
        store = self.store(SystemClock(), READER_PATIENCE_S)
        expression = re.compile(wanted)

        def is_wanted(path: str) -> bool:
            return expression.fullmatch(path) is not None and not LARGE.fullmatch(path)

        with tempfile.TemporaryDirectory(prefix="jaxgoodput-") as scratch:
            folder = pathlib.Path(scratch) / self._title
            view = BucketView(self.name, folder, store, is_wanted)
            view.refresh()
            yield view

    def _clear(self) -> None:
        """Delete the local copy, but for compiled programs and the lock."""
        for old in self.folder.iterdir():
            if old.name in (_disk.LOCK, COMPILED):
                continue
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            else:
                old.unlink()

    def store(self, clock: Clock, patience_s: float) -> ObjectStore:
        """Return the objects of the workdir; requests are repeated for `patience_s`."""
        store = _store_class(self._kind)(self._bucket, self._prefix)
        return PatientStore(store, clock, patience_s=patience_s)


def workdir_of(workdir: str | os.PathLike[str]) -> Folder | Bucket:
    """Return the place that a workdir names. Raises ValueError for a URL that is neither gs:// nor s3://."""
    text = os.fspath(workdir)
    require_known(text)
    found = BUCKET.fullmatch(text)
    return Folder(text) if found is None else Bucket(found[1], found[2], found[3] or "")


def is_bucket(workdir: str) -> bool:
    """Return whether a text names a bucket, for commands that take other things as well."""
    return BUCKET.fullmatch(workdir) is not None


def require_known(workdir: str) -> None:
    """Raise ValueError if a workdir is neither a folder nor a bucket that runs can use."""
    if not re.match(r"[\w+.-]+:[/\\]|~", workdir):
        return
    if is_bucket(workdir):
        if f"/{PIECES}" in f"{workdir}/":
            raise ValueError(
                f"Config.workdir={workdir!r} lies below {PIECES}, in which another workdir keeps its files. "
                "Name another one."
            )
        prefix = workdir.split("://", 1)[1].strip("/").split("/")
        if {"", ".", ".."} & {*prefix}:
            raise ValueError(
                f"Config.workdir={workdir!r} has a part that is empty, . or .., which a bucket would keep as "
                "it is and this machine's copy would not. Leave it out."
            )
        return
    raise ValueError(
        "Config.workdir must be a folder of a mounted file system, gs://BUCKET/PATH or s3://BUCKET/PATH; "
        f"got {workdir!r}. Mount a bucket of another store (rclone, blobfuse), and expand a home folder with "
        "os.path.expanduser."
    )


def private_folder() -> pathlib.Path:
    """Return the folder in which copies of buckets lie on this machine; it is made if it does not exist.

    It is in XDG_CACHE_HOME, or ~/.cache, and not among temporary files, which some machines delete when they
    are old. Raises PermissionError if another user could write to it: compiled programs are kept there.
    """
    # As the standard has it, a relative path is ignored.
    named = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    home = named if named.is_absolute() else pathlib.Path(os.path.expanduser("~/.cache"))
    folder = home / "jaxgoodput"
    remedy = "Copies of workdirs in buckets lie there: set XDG_CACHE_HOME to a folder of your own."
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PermissionError(
            f"cannot make the folder {folder} ({error.strerror}). {remedy}"
        ) from error
    found = folder.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_own or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{folder} belongs to another user, or others may write to it. {remedy}"
        )
    return folder


def _store_class(kind: str) -> Callable[[str, str], ObjectStore]:
    """Return the class of the stores of a kind. Raises ModuleNotFoundError, which names what to install."""
    try:
        if kind == "gs":
            from jaxgoodput.workdir.gcs import GcsStore

            return GcsStore
        from jaxgoodput.workdir.s3 import S3Store

        return S3Store
    except ModuleNotFoundError as error:
        extra, library = ("gcs", "google-cloud-storage") if kind == "gs" else ("s3", "boto3")
        raise ModuleNotFoundError(
            f"a workdir in {kind}:// needs {library}: pip install 'jaxgoodput[{extra}]'.",
            name=error.name,
        ) from error
