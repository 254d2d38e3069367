"""Network namespaces as the hosts of a small cluster, for tests on one Linux machine (as root)."""

import contextlib
import functools
import os
import pathlib
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SETTINGS = pathlib.Path("/etc/netns")  # what `ip netns exec` puts in place of files of /etc
NAMED = pathlib.Path("/run/netns")
LINKS = pathlib.Path("/sys/class/net")


@dataclass(frozen=True)
class Hosts:
    """Hosts on a network of their own, which reach each other and the machine that they are on."""

    subnet: int
    count: int

    @property
    def names(self) -> list[str]:
        """The host names, which are those of the namespaces, too; every host can resolve all."""
        return [f"jg{self.subnet}-{i}" for i in range(self.count)]

    @property
    def root_address(self) -> str:
        """Where the hosts reach the machine itself; it has no name there."""
        return f"10.77.{self.subnet}.1"

    def address(self, i: int) -> str:
        """The address of host `i`."""
        return f"10.77.{self.subnet}.{2 + i}"

    def cut(self, i: int) -> None:
        """Pull the cable of host `i`: what is sent is lost, and nobody hears of it."""
        _ip("link", "set", self.names[i], "down")

    def mend(self, i: int) -> None:
        """Put it back."""
        _ip("link", "set", self.names[i], "up")

    def lose(self, i: int, j: int) -> None:
        """Lose what host `i` sends to host `j`, silently; what it gets from there still comes."""
        to = (self.address(j), "lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
        _ip("-n", self.names[i], "neigh", "replace", *to)

    def find(self, i: int, j: int) -> None:
        """Lose it no more."""
        _ip("-n", self.names[i], "neigh", "del", self.address(j), "dev", "eth0")

    def pids(self, i: int) -> list[int]:
        """The processes that run on host `i`."""
        return [int(pid) for pid in _ip("netns", "pids", self.names[i]).split()]

    def command(self, i: int, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on host `i`, in the process that is started."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.names[i]]
        return ["ip", "netns", "exec", self.names[i], *named, *argv]

    def traces(self) -> list[pathlib.Path]:
        """What there is of them on this machine."""
        places = [folder / name for folder in (NAMED, LINKS, SETTINGS) for name in self.names]
        return [path for path in (*places, LINKS / f"jg{self.subnet}") if path.exists()]


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Make `count` hosts; afterwards they are gone, and all processes on them.

    What a test process that was killed has left goes when the next one takes its subnet.

    Raises:
        RuntimeError: they cannot be made here; `available` says whether they can.
    """
    with _free_subnet() as subnet:
        made = Hosts(subnet, count)
        _remove(subnet)
        try:
            _make(made)
            yield made
        finally:
            _remove(subnet)


@functools.cache
def available() -> str | None:
    """Why there can be no hosts here, or None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with hosts(1) as made:
            _ip(*made.command(0, ["true"])[1:])
    except (OSError, RuntimeError) as error:
        return f"network namespaces (ip, unshare, hostname) do not work here: {error}"
    return None


def _make(made: Hosts) -> None:
    bridge = f"jg{made.subnet}"
    _ip("link", "add", bridge, "type", "bridge")
    _ip("addr", "add", f"{made.root_address}/24", "dev", bridge)
    _ip("link", "set", bridge, "up")
    known = "".join(f"{made.address(i)} {name}\n" for i, name in enumerate(made.names))
    for i, name in enumerate(made.names):
        folder = SETTINGS / name
        while not folder.is_dir():
            with contextlib.suppress(FileNotFoundError):  # another removes the empty SETTINGS
                folder.mkdir(parents=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        _ip("netns", "add", name)
        _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", name, "master", bridge, "up")
        _ip("-n", name, "addr", "add", f"{made.address(i)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")


def _remove(subnet: int) -> None:
    """Remove all that this subnet has, whoever made it."""
    for named in NAMED.glob(f"jg{subnet}-*"):
        for pid in _ip("netns", "pids", named.name, check=False).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "delete", named.name, check=False)
    # The links of a namespace go only some time after it, unless they are told to.
    for link in [*LINKS.glob(f"jg{subnet}-*"), *LINKS.glob(f"jg{subnet}")]:
        _ip("link", "delete", link.name, check=False)
    for folder in SETTINGS.glob(f"jg{subnet}-*"):
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # others are in it, or there is none
        SETTINGS.rmdir()


@contextlib.contextmanager
def _free_subnet() -> Iterator[int]:
    """The lowest subnet that no process has; it is free again when this one dies, too."""
    for subnet in range(256):
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(f"\0jaxgoodput-hosts-{subnet}")
            except OSError:
                continue
            yield subnet
            return
    raise RuntimeError("all subnets are taken")


def _ip(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()} ({done.returncode})")
    return done.stdout
