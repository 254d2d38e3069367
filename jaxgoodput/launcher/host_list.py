"""Hosts as users name them: `USER@HOST:PORT=SLOTS`, in a list or one per line in a file."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_FORM = (
    "Write [USER@]HOST[:PORT][=SLOTS], such as node1, me@node1:2222 or node1=4, with [HOST] for an IPv6 "
    "address before a port."
)


@dataclass(frozen=True)
class NamedHost:
    """One host that a remote shell can reach."""

    host: str
    """Name or address of the host, as the remote shell takes it."""
    user: str | None = None
    port: int | None = None
    """Port of the remote shell's server; None: the shell's default."""
    slots: int | None = None
    """Number of processes on the host; None: as for all hosts."""

    @property
    def target(self) -> str:
        """The word by which the remote shell knows the host, [USER@]HOST."""
        return self.host if self.user is None else f"{self.user}@{self.host}"

    @property
    def name(self) -> str:
        """The name of the host in the job, [USER@]HOST[:PORT]."""
        if self.port is None:
            return self.target
        host = f"[{self.host}]" if ":" in self.host else self.host
        user = "" if self.user is None else f"{self.user}@"
        return f"{user}{host}:{self.port}"

    def __str__(self) -> str:
        """Return the text from which `read_host` makes an equal host."""
        return self.name if self.slots is None else f"{self.name}={self.slots}"


def read_host(text: str) -> NamedHost:
    """Return the host that a text [USER@]HOST[:PORT][=SLOTS] names. Raises ValueError.

    >>> read_host("me@node1:2222=4")
    NamedHost(host='node1', user='me', port=2222, slots=4)
    >>> read_host("fe80::1").host, read_host("[fe80::1]:22").port
    ('fe80::1', 22)
    """
    text = text.strip()
    place, equals, slots = text.partition("=")
    user, at, place = place.rpartition("@")
    host, colon, port = _split(place)
    for part in (host, *([user] if at else [])):
        # The remote shell would take a word that begins with a dash for an option.
        if part.startswith("-"):
            raise ValueError(
                f"the host {text!r} begins with a dash, which a remote shell takes for an option. {_FORM}"
            )
        if not part.isprintable() or not re.fullmatch(r"[^\s/\[\]]+", part):
            raise ValueError(f"{text!r} names no host. {_FORM}")
    return NamedHost(
        host,
        user if at else None,
        _whole(port, 65535, f"the port of {text!r}") if colon else None,
        _whole(slots, 10**6, f"the number of processes of {text!r}") if equals else None,
    )


def _split(place: str) -> tuple[str, str, str]:
    """Return the host, a colon if a port follows, and the port."""
    bracketed = re.fullmatch(r"\[([^]]*)\](?:(:)(.*))?", place, re.DOTALL)
    if bracketed is not None:
        return bracketed[1], bracketed[2] or "", bracketed[3] or ""
    return (place, "", "") if place.count(":") > 1 else place.partition(":")


def _whole(text: str, most: int, what: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= most:
        raise ValueError(f"{what} is {text!r}, which is no number from 1 to {most}. {_FORM}")
    return int(text)


def read_host_list(text: str) -> list[NamedHost]:
    """Return the hosts in a list A,B,... Raises ValueError; it says so if a host is named twice."""
    return _different([read_host(word) for word in text.split(",") if word.strip()])


def read_host_file(text: str) -> list[NamedHost]:
    """Return the hosts in a file: one per line, `HOST` or `HOST slots=N`, with comments after #.

    Raises ValueError for a line with anything else, and for a host that is there twice.

    >>> read_host_file("a  # the first\\n\\nme@b:2222 slots=4\\n")[1].slots
    4
    """
    found = []
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if len(words) > 2 or (len(words) == 2 and not words[1].startswith("slots=")):
            raise ValueError(
                f"the host file says {' '.join(words)!r}. Give one host per line, and the number of its "
                "processes as slots=N if it differs from --nproc-per-node."
            )
        if words:
            found.append(read_host(words[0] + "".join(words[1:]).removeprefix("slots")))
    return _different(found)


def _different(hosts: list[NamedHost]) -> list[NamedHost]:
    names = [host.name for host in hosts]
    if not names:
        raise ValueError("no host is named")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)} is there twice. Name each host once.")
    return hosts


def num_processes(num_hosts: int, slots: Sequence[int], other: int, *, largest: bool) -> int:
    """Return how many processes `num_hosts` hosts run: the smallest hosts, or the largest.

    `slots` are the processes of the hosts that are named; any further host runs `other`.

    >>> num_processes(2, [1, 4, 2], 1, largest=False), num_processes(4, [1, 4, 2], 1, largest=True)
    (3, 8)
    """
    chosen = sorted(slots, reverse=largest)[:num_hosts]
    return sum(chosen) + other * (num_hosts - len(chosen))
