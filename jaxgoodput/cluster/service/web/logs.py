"""The output of jobs, as agents send it: one file per job, of limited size.

It is not part of the journal: losing lines together with the machine does not harm the cluster.
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
    """The log files of all jobs, in one folder. Thread-safe.

    Offsets count every byte that a job has written, including bytes that have been cut off.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        found = {path.stem: path.read_text() for path in folder.glob("*.cut")}
        # Bytes cut off so far. If this number is lost, a reader gets the lines that are left once more.
        self._cut = {job: int(text) for job, text in found.items() if text.isdecimal()}
        self._jobs = {path.stem for path in folder.glob("*.log")}

    def delete(self, job: str) -> None:
        """Delete the log of a job, such as an earlier job of the same name."""
        with self._lock:
            for end in (".log", ".cut"):
                self._path(job, end).unlink(missing_ok=True)
            self._cut.pop(job, None)
            self._jobs.discard(job)

    def unknown(self, jobs: Mapping[str, object]) -> set[str]:
        """Return the jobs that have a log but are not among `jobs`."""
        with self._lock:
            return self._jobs - jobs.keys()

    def append(self, job: str, text: str) -> None:
        """Append lines, which must be plain. If the disk refuses, drop them."""
        path, data = self._path(job), text.encode("utf-8", "replace")
        with self._lock:
            self._jobs.add(job)
            try:
                with path.open("ab") as file:
                    file.write(data)
                    size = file.tell()
                if size > MOST_BYTES:
                    self._shorten(job, size)
            except OSError as error:
                logging.warning(
                    "lines that job %s printed could not be stored and are lost: %s. The job goes on. Free "
                    "some space on the disk of the service's folder.",
                    job,
                    error,
                )

    def _shorten(self, job: str, size: int) -> None:
        """Keep the newer half of a log; keep all of it if the disk refuses."""
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
        """Return a part of a log from an offset on. If its beginning was cut off, the first line says so.

        `over` tells whether the job has ended; the log is over once all of it has been read as well.
        """
        with self._lock:
            cut = self._cut.get(job, 0)
            at, data = max(offset - cut, 0), b""
            try:
                with self._path(job).open("rb") as file:
                    if at > file.seek(0, os.SEEK_END):  # the number of bytes cut off was lost
                        at = 0
                    file.seek(at)
                    data = file.read(MOST_AT_ONCE)
            except FileNotFoundError:
                at = 0
        text = data.decode("utf-8", "replace")
        if offset < cut and data:
            text = f"jaxgoodput: {cut - offset} bytes are left out here\n{text}"
        return Log(text=text, next_offset=cut + at + len(data), over=over and not data)

    def _path(self, job: str, end: str = ".log") -> pathlib.Path:
        check_name(job, "a job")  # a name that contains a path must not leave the folder
        return self._folder / f"{job}{end}"
