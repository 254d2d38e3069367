"""A notice that this host is about to be taken away, and the sources of notices that a user may name.

No source is asked unless a user names it: `--notices gce`, `aws`, `signal:USR1@120` or `file:PATH`.
"""

import argparse
import math
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

CLOUDS = {"gce": "http://metadata.google.internal", "aws": "http://169.254.169.254"}
"""Addresses of the metadata servers of clouds, which each machine there can reach."""
SIGNALS = ("USR1", "USR2", "XCPU")
"""Signals that no part of a job uses otherwise."""

_MARGIN_S = 5.0  # what is left for the agent itself when its workers have ended


@dataclass(frozen=True)
class Notice:
    """Word that this host will be taken away soon, or may be."""

    by: str
    """Source of the notice, such as "GCE" or "SIGUSR1"."""
    what: str
    """What will happen."""
    within_s: float | None = None
    """Seconds until then, at least; None if unknown."""
    is_warning: bool = False
    """Whether the host may stay, so that there is nothing to do but to print the notice."""

    def __str__(self) -> str:
        soon = "" if self.within_s is None else f", in {self.within_s:.0f} s"
        return f"notice of {self.by}: {self.what}{soon}"


def seconds_to_leave(within_s: float | None, grace_s: float) -> float:
    """Return how long workers may take to leave before they are killed, after a notice of `within_s` seconds.

    >>> seconds_to_leave(None, 60.0), seconds_to_leave(30.0, 60.0), seconds_to_leave(4.0, 60.0)
    (60.0, 25.0, 2.0)
    """
    if within_s is None:
        return grace_s
    return max(min(grace_s, max(within_s - _MARGIN_S, within_s / 2)), 0.0)


@dataclass(frozen=True)
class CloudSource:
    """The metadata server of a cloud."""

    cloud: str
    """Key of `CLOUDS`."""

    def __str__(self) -> str:
        return self.cloud


@dataclass(frozen=True)
class SignalSource:
    """A signal that this process gets some time before its host is taken away."""

    name: str
    """Name without SIG, one of `SIGNALS`."""
    within_s: float | None = None
    """Seconds from the signal until the end; None if unknown."""

    @property
    def number(self) -> signal.Signals:
        """The signal itself."""
        return signal.Signals[f"SIG{self.name}"]

    def __str__(self) -> str:
        soon = "" if self.within_s is None else f"@{self.within_s:g}"
        return f"signal:{self.name}{soon}"


@dataclass(frozen=True)
class FileSource:
    """A file that something else writes when the host is to go, with the seconds that are left if known."""

    path: str

    def __str__(self) -> str:
        return f"file:{self.path}"


Source = CloudSource | SignalSource | FileSource


@dataclass(frozen=True)
class NoticeSettings:
    """Where a host looks for notices; by default nowhere."""

    sources: tuple[Source, ...] = ()
    metadata_server: str | None = None
    """Address to ask instead of the cloud's own, http://HOST:PORT."""

    def server_of(self, source: CloudSource) -> str:
        """Return the address of the metadata server to ask."""
        return self.metadata_server or CLOUDS[source.cloud]

    def to_arguments(self) -> list[str]:
        """Return the options of `jaxgoodput agent` that stand for these settings."""
        named = [word for source in self.sources for word in ("--notices", str(source))]
        server = self.metadata_server
        return [*named, *([] if server is None else ["--metadata-server", server])]


def settings_of(sources: Sequence[Source] | None, server: str | None) -> NoticeSettings:
    """Return the settings of the options --notices and --metadata-server.

    Raises ValueError if a source is named twice, or if no cloud is named to which the server could belong.
    """
    found = tuple(sources or ())
    kinds = [str(source).partition("@")[0] for source in found]
    twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if twice is not None:
        raise ValueError(f"--notices {twice} is given twice. Give each source once.")
    if server is not None and not any(isinstance(source, CloudSource) for source in found):
        raise ValueError(
            f"--metadata-server {server} has no effect, because no cloud is named. Name it too: --notices "
            f"{' or '.join(CLOUDS)}."
        )
    return NoticeSettings(found, server)


def notice_source(text: str) -> Source:
    """Parse gce, aws, signal:NAME[@SECONDS] or file:PATH, as an argparse type.

    >>> str(notice_source("signal:SIGUSR1@120"))
    'signal:USR1@120'
    """
    kind, colon, value = text.partition(":")
    if kind in CLOUDS and not colon:
        return CloudSource(kind)
    if kind == "file" and value:
        return FileSource(value)
    if kind == "signal":
        name, at, seconds = value.partition("@")
        name = name.upper().removeprefix("SIG")
        if name in SIGNALS and not at:
            return SignalSource(name)
        if name in SIGNALS and re.fullmatch(r"\d+(\.\d+)?", seconds):
            return SignalSource(name, float(seconds))
    raise argparse.ArgumentTypeError(
        f"{text[:80]!a} is no source of notices. Give {', '.join(CLOUDS)}, signal:NAME[@SECONDS] with "
        f"{', '.join(SIGNALS)} as NAME, or file:PATH"
    )


def metadata_server(text: str) -> str:
    """Parse the address of a metadata server, http://HOST[:PORT], as an argparse type."""
    try:
        address_of(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text[:80]!a} is no address of a metadata server. Give http://HOST or http://HOST:PORT"
        ) from None
    return text


def address_of(server: str) -> tuple[str, int]:
    """Return host and port of a server's address, http://HOST[:PORT]. Raises ValueError for another text."""
    parts = urlsplit(server)
    if re.fullmatch(r"http://[A-Za-z0-9._:\[\]-]+/?", server) is None or not parts.hostname:
        raise ValueError(f"{server!a} is not http://HOST or http://HOST:PORT")
    return parts.hostname, parts.port or 80


def seconds_in(text: str) -> float | None:
    """Return the number of seconds that a text consists of; None if it is another text.

    >>> seconds_in(" 30 "), seconds_in(""), seconds_in("soon"), seconds_in("inf")
    (30.0, None, None, None)
    """
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
