"""What is trusted to a disk: sums that tell whether a folder is still what was written, and a lock on one.

The sums are a file in the form of `sha256sum`, so that `sha256sum -c` reads it where this package is not.
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
NUM_NAMED = 3  # files that a sentence names, before it counts the others


class DamagedError(Exception):
    """A folder is not what was written."""


class InUse(RuntimeError):
    """Another process holds the folder."""


def seal(folder: pathlib.Path) -> None:
    """Put a folder's files on the disk for good, with the sums of all that lie in folders within it.

    Raises OSError where the disk refuses. Files of the folder's own top are nobody's concern here.
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
    """Whether the sums are there."""
    return (folder / SUMS).is_file()


def check(folder: pathlib.Path, *, share: int = 0, num_shares: int = 1) -> None:
    """Compare a sealed folder with its sums; of several readers, each looks into its share of the files.

    Raises Damaged, naming files, where one is missing, is not what was written, or was not there.
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
    """Have the names in a folder outlive a loss of power, as they are now."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system where folders need none
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def held(folder: pathlib.Path) -> Iterator[int]:
    """Hold a folder while the block lasts; the kernel lets go of it with the process, however that ends.

    Gives the lock's descriptor: processes that it is passed on to hold the folder too, as long as they run.
    Raises InUse, naming the holder, where another process holds it. Against those that do not ask it is no
    help; on a file system without locks it is none at all, which is logged.
    """
    with open(folder / LOCK, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InUse(
                f"{folder} is in use by {file.read() or 'another process'}, or by one that it forked. Two "
                "runs there would delete each other's files: end that one first, or use another folder."
            ) from None
        except OSError as error:
            logging.warning(
                "%s cannot be locked (%s): take care that no second run uses it.", folder, error
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield file.fileno()


def _names(folder: pathlib.Path) -> list[str]:
    """The files of the folders in a folder, as paths from there."""
    files = (p for p in folder.glob("*/**/*") if p.is_file())
    return sorted(p.relative_to(folder).as_posix() for p in files)


def _sum(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sum_on_disk(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
