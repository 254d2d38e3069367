"""The job log of Philly, which is JSON: a list of jobs, each with all attempts to run it.

A job becomes a row as in other traces. It ran as long as its attempts together, without the time between
them, on the devices of the first attempt that had any (as in the repository's own notebook). If any attempt
has no start or no end, which the README explains as an error of the log or as a job that still ran, it is
not known for how long the job ran.
"""

import pathlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from jaxgoodput._fields.serial import decode, parse
from jaxgoodput.cluster.published.recorded.layout import Cells
from jaxgoodput.cluster.published.recorded.text_file import text_of
from jaxgoodput.cluster.published.recorded.times import is_missing, time_s
from jaxgoodput.cluster.published.traces import TraceError


@dataclass(frozen=True, kw_only=True)
class PhillyServer:
    """A server of an attempt, and its devices."""

    is_part: ClassVar[bool] = True
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PhillyAttempt:
    """One attempt to run a job of Philly's log."""

    is_part: ClassVar[bool] = True
    start_time: str | None = None
    end_time: str | None = None
    detail: tuple[PhillyServer, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PhillyJob:
    """A job of Philly's log."""

    is_part: ClassVar[bool] = True
    jobid: str
    submitted_time: str | None = None
    status: str = ""
    user: str | None = None
    vc: str | None = None
    attempts: tuple[PhillyAttempt, ...] = ()


def philly_rows(path: pathlib.Path) -> Iterator[tuple[str, Cells]]:
    """Yield each job of the log as a row, with its place for errors. Raises TraceError."""
    try:
        found = parse(text_of(path))
        if not isinstance(found, list):
            raise ValueError("expected a list of jobs")
        for number, body in enumerate(found):
            place = f"{path}, job {number}"
            yield place, _row(decode(body, PhillyJob, f"job {number}"))
    except ValueError as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(
            f"{path}: {error}. The preset philly reads cluster_job_log, a JSON list of jobs with "
            "submitted_time and attempts."
        ) from error


def _row(job: PhillyJob) -> Cells:
    return {
        "submitted_time": job.submitted_time or "",
        "start": next((a.start_time or "" for a in job.attempts), ""),
        "duration": _seconds(job),
        "devices": str(_devices(job)),
        "jobid": job.jobid,
        "status": job.status,
        "user": job.user or "",
        "vc": job.vc or "",
    }


def _devices(job: PhillyJob) -> int:
    """Return the devices of the first attempt that had any."""
    counts = (sum(len(server.gpus) for server in attempt.detail or ()) for attempt in job.attempts)
    return next((count for count in counts if count), 0)


def _seconds(job: PhillyJob) -> str:
    """Return for how long the attempts of a job ran together; "" if that is not known."""
    total = 0.0
    for attempt in job.attempts:
        start, end = attempt.start_time or "", attempt.end_time or ""
        if is_missing(start) or is_missing(end):
            return ""
        total += time_s(end) - time_s(start)
    return repr(total) if job.attempts else ""
