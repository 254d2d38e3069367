"""Checksums and locks for folders: is a folder still what was written, and who is using it?

The checksums have the format of `sha256sum`, so that `sha256sum -c` can check them without this package.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import pathlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from absl import logging

SUMS = "sha256sums"
LOCK = "lock"
NUM_NAMED = 3  # files that an error names; the others are counted


class DamagedError(Exception):
    """The files of a folder differ from what was written."""


class InUse(RuntimeError):
    """Another process uses the folder."""


def seal(folder: pathlib.Path) -> None:
    """Flush a folder's files to the disk, and write the checksums of all files in its subfolders.

    Files at the top of the folder are not included. Raises OSError if the disk refuses to write.
    """
    with ThreadPoolExecutor() as pool:
        names = _names(folder)
        sums = pool.map(lambda name: _sum_on_disk(folder / name), names)
        lines = [f"{total}  {name}\n" for name, total in zip(names, sums, strict=True)]
    with open(folder / SUMS, "w") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    for inner in (*filter(pathlib.Path.is_dir, folder.rglob("*")), folder):
        sync_folder(inner)


def is_sealed(folder: pathlib.Path) -> bool:
    """Return whether a folder has checksums."""
    return (folder / SUMS).is_file()


def check(folder: pathlib.Path, *, share: int = 0, num_shares: int = 1) -> None:
    """Compare the files of a sealed folder with its checksums.

    If several processes read the folder, each checks every `num_shares`-th file, from number `share` on.
    Raises DamagedError, which names the files that are missing, changed, or were added.
    """
    text = (folder / SUMS).read_text(errors="replace")
    wanted = {name: total for total, _, name in (x.partition("  ") for x in text.split("\n") if x)}
    there = _names(folder)
    with ThreadPoolExecutor() as pool:
        own = [name for name in there if name in wanted][share::num_shares]
        sums = pool.map(lambda name: _sum(folder / name), own)
        changed = [name for name, total in zip(own, sums, strict=True) if total != wanted[name]]
    wrong = [f"{name!a:.80} is missing" for name in sorted(wanted.keys() - there)]
    wrong += [f"{name} is not what was written" for name in changed]
    wrong += [f"{name} is not in {SUMS}" for name in there if name not in wanted]
    if wrong:
        more = len(wrong) - NUM_NAMED
        raise DamagedError(
            ", ".join(wrong[:NUM_NAMED]) + (f", and {more} more" if more > 0 else "")
        )


def sync_folder(folder: pathlib.Path) -> None:
    """Flush a folder's list of files to the disk, so that it survives a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # this file system needs no flush of folders
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def held(folder: pathlib.Path) -> Iterator[int]:
    """Lock a folder during the block. The kernel releases the lock when the process ends, however it ends.

    Yields the lock's file descriptor: a child process that inherits it holds the lock, too. The lock is
    advisory: it only stops processes that call this function. If the file system has no locks, a warning is
    logged. Raises InUse, which names the holder, if another process holds the folder.
    """
    with open(folder / LOCK, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InUse(
                f"{folder} is in use by {file.read() or 'another process'}, or by one that it forked. Two "
                "runs there would delete each other's files: end that run first, or use another folder."
            ) from None
        except OSError as error:
            logging.warning(
                "%s cannot be locked (%s): make sure that no second run uses it.", folder, error
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield file.fileno()


def _names(folder: pathlib.Path) -> list[str]:
    """Return the files in the subfolders of a folder, as relative paths."""
    files = (p for p in folder.glob("*/**/*") if p.is_file())
    return sorted(p.relative_to(folder).as_posix() for p in files)


def _sum(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sum_on_disk(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
