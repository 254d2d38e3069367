"""What the metadata servers of clouds are asked, and what their answers mean: no network, no time.

GCE: <https://cloud.google.com/compute/docs/instances/spot> and
<https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice>.
AWS: <https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html> and
<https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/rebalance-recommendations.html>.
"""

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable
from urllib.parse import quote, urlencode

from jaxgoodput.launcher.notices.notice import Notice

LIMIT_S = 10.0  # for a whole answer, unless the server is asked to wait for a change
_WAIT_S = 60  # for a change, until the server answers that there was none
_PREEMPTED_S = 30.0  # from GCE's notice until the machine is switched off
_MAINTENANCE_S = 60.0  # the same of maintenance, at least: machines with GPUs get an hour
_TOKEN_S = 21600  # how long AWS's token is valid: the longest time allowed
_GCE_PAUSE_S, _AWS_PAUSE_S = 1.0, 5.0  # between two questions; AWS recommends 5 s


@dataclass(frozen=True)
class Question:
    """A request of HTTP to a metadata server."""

    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "GET"
    limit_s: float = LIMIT_S
    """Seconds within which the whole answer must be here."""


@dataclass(frozen=True)
class Answer:
    """A metadata server's answer to a `Question`."""

    status: int
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Values by name; names are in small letters."""


@dataclass(frozen=True)
class NoticeReading:
    """What an answer means."""

    notice: Notice | None = None
    """The notice that is in force; None if there is none."""
    memory: str = ""
    """What the next question needs: an ETag or a token."""
    pause_s: float = 0.0
    """Seconds to wait before the next question."""
    is_known: bool = True
    """Whether the answer says if there is a notice; a token does not."""


@runtime_checkable
class Query(Protocol):
    """One thing that a metadata server is asked again and again."""

    @property
    def name(self) -> str:
        """Name of the thing, for messages."""
        ...

    def question(self, memory: str) -> Question:
        """Return the next question; `memory` is the one of the last reading, at first empty."""
        ...

    def read(self, memory: str, answer: Answer, wall_s: float) -> NoticeReading:
        """Return what the answer to that question means at this time of day.

        Raises ValueError if it means nothing.
        """
        ...


@dataclass(frozen=True)
class GceQuery:
    """One key of GCE's metadata. The first answer comes at once, the others when the value has changed."""

    key: str
    """Key below `instance/`."""
    notices: Mapping[str, Notice]
    """Notice by value of the key."""
    quiet: frozenset[str]
    """Values that are no notice."""

    @property
    def name(self) -> str:
        """The key, with the name of the cloud."""
        return f"GCE's {self.key}"

    def question(self, memory: str) -> Question:
        """Return the next question; `memory` is the ETag of the last answer."""
        path, limit_s = f"/computeMetadata/v1/instance/{self.key}", LIMIT_S
        if memory:
            waits = {"wait_for_change": "true", "last_etag": memory, "timeout_sec": _WAIT_S}
            path, limit_s = f"{path}?{urlencode(waits)}", _WAIT_S + LIMIT_S
        return Question(path, {"Metadata-Flavor": "Google"}, limit_s=limit_s)

    def read(self, memory: str, answer: Answer, wall_s: float) -> NoticeReading:
        """Return the notice that the value of the key stands for."""
        _require(answer, 200)
        if answer.headers.get("metadata-flavor") != "Google":
            raise ValueError(
                "the answer lacks the header Metadata-Flavor: Google, so it is not GCE's"
            )
        value = answer.body.strip()
        if value not in self.notices and value not in self.quiet:
            raise ValueError(f"it answered {value[:80]!a}, which is no value of {self.key}")
        etag = answer.headers.get("etag", "")
        return NoticeReading(self.notices.get(value), memory=etag, pause_s=_GCE_PAUSE_S)


@dataclass(frozen=True)
class AwsQuery:
    """A notice of AWS, which is not found (404) until there is one. A token is fetched first."""

    path: str
    """Path below `meta-data/`."""
    is_warning: bool
    """Whether it says only that an interruption is likely."""

    @property
    def name(self) -> str:
        """The last part of the path, with the name of the cloud."""
        return f"AWS's {self.path.rpartition('/')[2]}"

    def question(self, memory: str) -> Question:
        """Return the next question; `memory` is the token, without which a token is asked for."""
        if not memory:
            lives = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            return Question("/latest/api/token", lives, method="PUT")
        return Question(f"/latest/meta-data/{self.path}", {"X-aws-ec2-metadata-token": memory})

    def read(self, memory: str, answer: Answer, wall_s: float) -> NoticeReading:
        """Return the token, or the notice if there is one."""
        if not memory:
            _require(answer, 200)
            token = answer.body.strip()
            if not token or quote(token, safe="=/+") != token:
                raise ValueError("it answered with something that is no token")
            return NoticeReading(memory=token, is_known=False)
        if answer.status == 401:  # the token has expired
            return NoticeReading(pause_s=_AWS_PAUSE_S, is_known=False)
        if answer.status == 404:
            return NoticeReading(memory=memory, pause_s=_AWS_PAUSE_S)
        _require(answer, 200)
        return NoticeReading(self._notice(answer.body, wall_s), memory, _AWS_PAUSE_S)

    def _notice(self, body: str, wall_s: float) -> Notice:
        try:
            told = json.loads(body)
            if self.is_warning:
                _seconds_since_epoch(told["noticeTime"])
                return Notice("AWS", "the machine is likely to be interrupted soon", None, True)
            within_s = _seconds_since_epoch(told["time"]) - wall_s
            action = {"terminate": "terminated", "stop": "stopped", "hibernate": "hibernated"}
            # Hibernation begins at once, whatever the time says.
            within_s = 0.0 if told["action"] == "hibernate" else max(within_s, 0.0)
            return Notice("AWS", f"the machine will be {action[told['action']]}", within_s)
        except (ValueError, TypeError, LookupError, OverflowError):
            raise ValueError(f"it answered {body[:80]!a}, which is no notice") from None


def _seconds_since_epoch(text: str) -> float:
    moment = datetime.datetime.fromisoformat(text)
    return moment.replace(tzinfo=moment.tzinfo or datetime.UTC).timestamp()


def _require(answer: Answer, status: int) -> None:
    if answer.status != status:
        raise ValueError(f"it answered with status {answer.status} instead of {status}")


_PREEMPTED = Notice("GCE", "the machine is preempted", _PREEMPTED_S)
_MAINTENANCE = Notice("GCE", "the machine will be stopped for maintenance", _MAINTENANCE_S)

QUERIES: Mapping[str, tuple[Query, ...]] = {
    "gce": (
        GceQuery("preempted", {"TRUE": _PREEMPTED}, frozenset({"FALSE"})),
        GceQuery(
            "maintenance-event",
            {"TERMINATE_ON_HOST_MAINTENANCE": _MAINTENANCE},
            # A machine that migrates stays up.
            frozenset({"NONE", "MIGRATE_ON_HOST_MAINTENANCE"}),
        ),
    ),
    "aws": (
        AwsQuery("spot/instance-action", is_warning=False),
        AwsQuery("events/recommendations/rebalance", is_warning=True),
    ),
}
"""What the metadata server of each cloud is asked."""
