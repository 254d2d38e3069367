"""Messages between the processes of a job: JSON objects, one per line, signed with the job's secret.

    server: nonce            client: nonce
    either: <signature> <json>

The key of a connection is derived from the secret and both nonces. A signature covers the sender and the
number of the line, so that messages cannot be replayed, reordered or reflected. Nothing is encrypted: anyone
on the network can read losses and step numbers, and the states and table rows that hosts exchange. A message
may announce a number of bytes; they follow it in blocks that are signed as well.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Collection, Mapping
from typing import Any

_NONCE_BYTES = 16
_LONGEST_GREETING = 2**16  # bytes; the sender is not authenticated yet
_BLOCK = 2**24
_HELLO_S = 10.0  # for a new connection to authenticate, however many bytes it sends
_IDLE_S, _PROBE_S, _NUM_PROBES = 5, 2, 3  # TCP keep-alive: a broken link is detected after 11 s


class WrongSecret(ConnectionError):
    """The peer does not have the secret of this job, or does not speak this protocol."""


def make_secret() -> str:
    """Return a new random secret for one job."""
    return secrets.token_hex(32)


class Channel:
    """One signed connection. Any thread may send; only one thread may receive."""

    def __init__(
        self, sock: socket.socket, secret: str, *, is_server: bool, hello_s: float = _HELLO_S
    ):
        self._sock = sock
        self._file = sock.makefile("rb")
        # A time limit of the socket begins anew with each byte.
        self._deadline = threading.Timer(hello_s, self._hang_up)
        self._deadline.daemon = True
        self._deadline.start()
        self._sending = threading.Lock()
        self._num_sent = self._num_received = 0
        self._mine, self._theirs = (b"server", b"client") if is_server else (b"client", b"server")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # The system's defaults would notice a broken link only after hours, or 15 minutes while sending.
        for name, value in (
            ("TCP_KEEPIDLE", _IDLE_S),
            ("TCP_KEEPINTVL", _PROBE_S),
            ("TCP_KEEPCNT", _NUM_PROBES),
            ("TCP_USER_TIMEOUT", 1000 * (_IDLE_S + _PROBE_S * _NUM_PROBES)),
        ):
            if hasattr(socket, name):  # Linux
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        mine = os.urandom(_NONCE_BYTES).hex().encode()
        sock.settimeout(hello_s)
        try:
            self.peer = str(sock.getpeername()[0])
            self.own = str(sock.getsockname()[0])
            sock.sendall(mine + b"\n")
            theirs = self._file.readline(2 * _NONCE_BYTES + 2)
        except OSError as error:
            self.close()
            raise ConnectionError(
                f"the peer did not answer the greeting of a new connection: {error}"
            ) from None
        if not theirs:
            self.close()
            raise ConnectionError(
                "the peer closed the new connection without a greeting: it may be another kind of program"
            )
        theirs = theirs.rstrip(b"\n")
        if len(theirs) != 2 * _NONCE_BYTES:
            self.close()
            raise WrongSecret(
                "the peer's greeting is not a jaxgoodput process's: check host and port"
            )
        # Both sides contribute a nonce, so that neither can make an old recording valid again.
        nonces = mine + theirs if is_server else theirs + mine
        self._key = hmac.digest(secret.encode(), nonces, "sha256")

    def greeting(self) -> dict[str, Any]:
        """Return the peer's first message, and turn off the time limit for later ones.

        Raises ConnectionError and closes if no message comes, or WrongSecret (a ConnectionError) if it is not
        signed with the secret.
        """
        try:
            message = self.receive(_LONGEST_GREETING)
            if message is None:
                raise ConnectionError(
                    f"{self.peer} closed the connection without a message, or sent none in "
                    f"{_HELLO_S:g} s: it may have another secret"
                )
        except ConnectionError:
            self.close()
            raise
        self._deadline.cancel()
        self._sock.settimeout(None)
        return message

    def send(self, message: Mapping[str, Any], blob: bytes | None = None) -> None:
        """Send a message, followed by `blob` if given. Raises OSError if the connection is closed."""
        head = message if blob is None else {**message, "num_bytes": len(blob)}
        with self._sending:
            body = json.dumps(head).encode()
            self._sock.sendall(
                self._signature(self._mine, self._num_sent, body) + b" " + body + b"\n"
            )
            self._num_sent += 1
            for start in range(0, len(blob or b""), _BLOCK):
                assert blob is not None
                block = memoryview(blob)[start : start + _BLOCK]
                self._sock.sendall(self._signature(self._mine, self._num_sent, block))
                self._sock.sendall(block)
                self._num_sent += 1

    def receive(self, longest: int = 2**20) -> dict[str, Any] | None:
        """Return the next message, of at most `longest` bytes; None if the peer closed the connection.

        Raises:
            WrongSecret: the message is not signed with this job's secret.
        """
        try:
            line = self._file.readline(longest)
        except (OSError, ValueError):
            return None
        if not line.endswith(
            b"\n"
        ):  # cut off by the end of the connection, or longer than `longest`
            return None
        signature, _, body = line[:-1].partition(b" ")
        self._check(signature, body)
        message = json.loads(body)
        if not isinstance(message, dict):
            raise WrongSecret(f"{self.peer} sent JSON that is not an object")
        return message

    def receive_bytes(self, message: Mapping[str, Any]) -> bytes:
        """Return the bytes that follow a message. Raises ConnectionError if the peer closes the
        connection."""
        num_bytes = int(message["num_bytes"])
        whole = bytearray(num_bytes)
        for start in range(0, num_bytes, _BLOCK):
            signature = self._exactly(64)
            view = memoryview(whole)[start : min(start + _BLOCK, num_bytes)]
            done = 0
            while done < len(view):
                count = self._file.readinto(view[done:])
                if not count:
                    raise ConnectionError(
                        "the peer closed the connection before all bytes of a message had come"
                    )
                done += count
            self._check(signature, view)
        return bytes(whole)

    def be_patient(self, seconds: float | None) -> None:
        """Set how many seconds to wait for data from the peer; None: without limit."""
        self._sock.settimeout(seconds)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._deadline.cancel()
        self._hang_up()
        self._file.close()
        self._sock.close()

    def _hang_up(self) -> None:
        """End the connection: the other side reads no more from it."""
        with contextlib.suppress(OSError):  # already closed
            self._sock.shutdown(socket.SHUT_RDWR)

    def _exactly(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise ConnectionError(
                "the peer closed the connection before all bytes of a message had come"
            )
        return data

    def _check(self, signature: bytes, body: bytes | memoryview) -> None:
        wanted = self._signature(self._theirs, self._num_received, body)
        self._num_received += 1
        if not hmac.compare_digest(wanted, signature):
            raise WrongSecret(
                f"a message from {self.peer} is not signed with the secret of this job. Start every agent of "
                "a job with the same JAXGOODPUT_SECRET."
            )

    def _signature(self, who: bytes, number: int, body: bytes | memoryview) -> bytes:
        signed = hmac.new(self._key, b"%s %d " % (who, number), hashlib.sha256)
        signed.update(body)
        return signed.hexdigest().encode()


def connect(address: str, secret: str, *, timeout_s: float, hello_s: float = _HELLO_S) -> Channel:
    """Return a channel to `host:port`. Raises OSError if there is no answer, or WrongSecret (an OSError).

    `timeout_s` is for the connection, `hello_s` for the greeting after it.
    """
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
    channel = Channel(sock, secret, is_server=False, hello_s=hello_s)
    channel.greeting()
    return channel


def accepted(sock: socket.socket, secret: str) -> tuple[Channel, dict[str, Any]]:
    """Return a channel for an accepted connection, and the peer's first message.

    Raises ConnectionError if the peer closes the connection, or WrongSecret (a ConnectionError) if it does
    not have the secret.
    """
    channel = Channel(sock, secret, is_server=True)
    try:
        channel.send({"type": "welcome"})  # proves that this side has the secret
    except OSError as error:
        channel.close()
        raise ConnectionError(f"{channel.peer} closed the connection: {error}") from None
    return channel, channel.greeting()


def end_connections(hosts: Collection[str]) -> int:
    """End all TCP connections of this process to these addresses; return how many. On Linux only.

    Whatever in the process waits for the other side, such as a collective, then fails at once. Connections
    that are still being made have no peer yet as far as their sockets say, but the system's table has it.
    """
    sought, num_ended = _sockets_to(hosts), 0
    for name in os.listdir("/proc/self/fd") if sought else ():
        with contextlib.suppress(OSError):  # closed meanwhile, or ended by the other side
            copy = os.dup(int(name))  # first: another thread may use the number for another file
            try:
                if os.fstat(copy).st_ino in sought:
                    with socket.socket(fileno=os.dup(copy)) as sock:
                        sock.shutdown(socket.SHUT_RDWR)
                    num_ended += 1
            finally:
                os.close(copy)
    return num_ended


def _sockets_to(hosts: Collection[str]) -> set[int]:
    """Return the inode numbers of TCP sockets of this network with a connection to one of these addresses."""
    mapped = [f"::ffff:{host}" for host in hosts if ":" not in host]
    sought = {_in_table(host) for host in (*hosts, *mapped)}
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(FileNotFoundError), open(table) as file:
            for fields in map(str.split, list(file)[1:]):
                if fields[2].rpartition(":")[0] in sought and int(fields[9]):
                    found.add(int(fields[9]))
    return found


def _in_table(host: str) -> str:
    """Return an IP address as the tables have it: 32-bit words in the processor's order of bytes, in hex."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    packed = socket.inet_pton(family, host.partition("%")[0])
    words = [packed[i : i + 4] for i in range(0, len(packed), 4)]
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
