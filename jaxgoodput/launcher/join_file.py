"""The file by which other hosts find a job: its address and secret, in a folder that they share.

`jaxgoodput run --join-file FILE` writes it while the job runs, and `jaxgoodput agent --join-file FILE` reads
it. Its owner alone can read it: with the secret, any program can take part in the job and read its state.
"""

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from jaxgoodput.launcher.supervise import UsageError, say


@dataclass(frozen=True)
class JoinDetails:
    """What a host needs to join a job."""

    address: str
    """Address of the coordinator, HOST:PORT."""
    secret: str = field(repr=False)


@contextlib.contextmanager
def join_file_there(path: pathlib.Path, details: JoinDetails) -> Iterator[None]:
    """Keep the file there inside the block. Raises UsageError if it cannot be written."""
    try:
        write_join_file(path, details)
    except (OSError, ValueError) as error:  # ValueError: a character that no name has
        raise UsageError(
            f"--join-file {str(path)!a} cannot be written: {error}. Name a file in a folder that all hosts "
            "see."
        ) from None
    try:
        yield
    finally:
        try:
            remove_join_file(path, details)
        except (OSError, ValueError) as error:
            say(f"the join file {path} was not removed: {error}")


def write_join_file(path: pathlib.Path, details: JoinDetails) -> None:
    """Write the file in one piece, with its folders. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # of mode 600
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(details), file)
        os.replace(name, path)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def read_join_file(path: pathlib.Path) -> JoinDetails:
    """Read what `write_join_file` wrote. Raises OSError, and ValueError for a file with other content."""
    try:
        found = json.loads(path.read_text())
        details = JoinDetails(**found)
    except (ValueError, TypeError):
        raise ValueError(
            f"{path} is not a file that `jaxgoodput run --join-file` has written"
        ) from None
    if not (isinstance(details.address, str) and isinstance(details.secret, str)):
        raise ValueError(f"{path} holds no address and secret as texts")
    return details


def remove_join_file(path: pathlib.Path, details: JoinDetails) -> None:
    """Remove the file, unless another job has written its own since. Raises OSError and ValueError."""
    with contextlib.suppress(FileNotFoundError):
        if read_join_file(path) == details:
            path.unlink()
