"""What the processes of jobs wrote, as it comes in from the nodes: one file a job, of bounded size.

Not in the journal: a line that is lost with the machine is no loss of the cluster's.
"""

import os
import pathlib
import threading
from collections.abc import Mapping

from absl import logging

from jaxgoodput.cluster.service.wire import Log, check_name

MOST_BYTES = 16 * 2**20
MOST_AT_ONCE = 256 * 2**10


class Logs:
    """The files of a folder, by job. Offsets count all that a job ever wrote, what was cut off included.

    Any thread may use it.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        found = {path.stem: path.read_text() for path in folder.glob("*.cut")}
        # Bytes that are not there any more; where that is lost, whoever follows reads what is there again.
        self._cut = {job: int(text) for job, text in found.items() if text.isdecimal()}
        self._jobs = {path.stem for path in folder.glob("*.log")}

    def start(self, job: str) -> None:
        """Forget what another job of that name wrote."""
        with self._lock:
            for end in (".log", ".cut"):
                self._path(job, end).unlink(missing_ok=True)
            self._cut.pop(job, None)
            self._jobs.discard(job)

    def of_others(self, jobs: Mapping[str, object]) -> set[str]:
        """The jobs that wrote something and are none of these."""
        with self._lock:
            return self._jobs - jobs.keys()

    def append(self, job: str, text: str) -> None:
        """Add what a node sent. A disk that refuses costs these lines."""
        with self._lock:
            self._jobs.add(job)
            self._append(job, text)

    def _append(self, job: str, text: str) -> None:
        path = self._path(job)
        try:
            with path.open("ab") as file:
                file.write(text.encode("utf-8", "replace"))
                size = file.tell()
            if size > MOST_BYTES:
                self._shorten(job, size)
        except OSError as error:
            logging.warning("lines of job %s could not be kept: %s", job, error)

    def _shorten(self, job: str, size: int) -> None:
        """Keep the newer half; the whole where the disk refuses."""
        path, aside = self._path(job), self._path(job, ".new")
        kept = path.read_bytes()[size - MOST_BYTES // 2 :]
        try:
            aside.write_bytes(kept)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
        self._cut[job] = self._cut.get(job, 0) + size - len(kept)
        self._path(job, ".cut").write_text(f"{self._cut[job]}")

    def read(self, job: str, offset: int, over: bool) -> Log:
        """What was written from an offset on, up to a limit; what is gone is passed over."""
        with self._lock:
            return self._read(job, offset, over)

    def _read(self, job: str, offset: int, over: bool) -> Log:
        cut = self._cut.get(job, 0)
        at = max(offset - cut, 0)
        try:
            with self._path(job).open("rb") as file:
                if at > file.seek(0, os.SEEK_END):  # more is gone than is known
                    at = 0
                file.seek(at)
                data = file.read(MOST_AT_ONCE)
        except FileNotFoundError:
            at, data = 0, b""
        return Log(
            text=data.decode("utf-8", "replace"),
            next_offset=cut + at + len(data),
            over=over and not data,
        )

    def _path(self, job: str, end: str = ".log") -> pathlib.Path:
        check_name(job, "a job")  # it is a part of a path here
        return self._folder / f"{job}{end}"
