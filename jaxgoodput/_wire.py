"""Messages between the processes of a job: JSON objects, one a line, each signed with the job's secret.

    server: nonce            client: nonce
    either: <signature> <json>

The key of a connection is made of the secret and both nonces, and the signature covers who speaks and the
how-manieth line it is: nothing can be replayed, reordered or sent back. Nothing is hidden: whoever can listen
reads losses and step numbers, and states and rows of tables where they go from host to host. Bytes follow a
message that says how many, in blocks that are signed likewise.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import threading
from collections.abc import Mapping
from typing import Any

_NONCE_BYTES = 16
_LONGEST_GREETING = 2**16  # nobody knows yet who it is
_BLOCK = 2**24
_HELLO_S = 10.0  # for a stranger to say who it is
_IDLE_S, _PROBE_S, _NUM_PROBES = 5, 2, 3  # of TCP's own keep-alive: a cut link is known after 11 s


class WrongSecret(ConnectionError):
    """The other side does not have the secret of this job, or is no process of one."""


def make_secret() -> str:
    """A secret for one job."""
    return secrets.token_hex(32)


class Channel:
    """One connection; any thread may send, one receives."""

    def __init__(self, sock: socket.socket, secret: str, *, is_server: bool):
        self._sock = sock
        self._file = sock.makefile("rb")
        self._sending = threading.Lock()
        self._num_sent = self._num_received = 0
        self._mine, self._theirs = (b"server", b"client") if is_server else (b"client", b"server")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", _IDLE_S),
            ("TCP_KEEPINTVL", _PROBE_S),
            ("TCP_KEEPCNT", _NUM_PROBES),
            ("TCP_USER_TIMEOUT", 1000 * (_IDLE_S + _PROBE_S * _NUM_PROBES)),
        ):
            if hasattr(socket, name):  # Linux
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        mine = os.urandom(_NONCE_BYTES).hex().encode()
        sock.settimeout(_HELLO_S)
        try:
            self.peer = str(sock.getpeername()[0])
            self.own = str(sock.getsockname()[0])
            sock.sendall(mine + b"\n")
            theirs = self._file.readline(2 * _NONCE_BYTES + 2)
        except OSError as error:
            self.close()
            raise ConnectionError(f"no answer to a greeting: {error}") from None
        if not theirs:
            self.close()
            raise ConnectionError("the other side has gone without a word")
        theirs = theirs.rstrip(b"\n")
        if len(theirs) != 2 * _NONCE_BYTES:
            self.close()
            raise WrongSecret("the other side greets like no process of a job")
        nonces = mine + theirs if is_server else theirs + mine
        self._key = hmac.digest(secret.encode(), nonces, "sha256")

    def greeting(self) -> dict[str, Any]:
        """The first message of the other side, however long it takes to the next.

        Raises ConnectionError, and closes, where nothing comes; WrongSecret, which is one, for a stranger.
        """
        try:
            message = self.receive(_LONGEST_GREETING)
            if message is None:
                raise ConnectionError(
                    f"{self.peer} has gone without a word: it may have another secret"
                )
        except ConnectionError:
            self.close()
            raise
        self._sock.settimeout(None)
        return message

    def send(self, message: Mapping[str, Any], blob: bytes | None = None) -> None:
        """Send a message, and `blob` behind it. Raises OSError where nobody is there any more."""
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
        """The next message, of so many bytes at most; None where the other side has gone.

        Raises:
            WrongSecret: it was not signed with this job's secret.
        """
        try:
            line = self._file.readline(longest)
        except (OSError, ValueError):
            return None
        if not line.endswith(b"\n"):
            return None
        signature, _, body = line[:-1].partition(b" ")
        self._check(signature, body)
        message = json.loads(body)
        if not isinstance(message, dict):
            raise WrongSecret("a message is an object")
        return message

    def receive_bytes(self, message: Mapping[str, Any]) -> bytes:
        """What came behind a message. Raises ConnectionError where the other side has gone."""
        num_bytes = int(message["num_bytes"])
        whole = bytearray(num_bytes)
        for start in range(0, num_bytes, _BLOCK):
            signature = self._exactly(64)
            view = memoryview(whole)[start : min(start + _BLOCK, num_bytes)]
            done = 0
            while done < len(view):
                count = self._file.readinto(view[done:])
                if not count:
                    raise ConnectionError("the other side has gone in the middle of what it sent")
                done += count
            self._check(signature, view)
        return bytes(whole)

    def be_patient(self, seconds: float | None) -> None:
        """Wait so long for anything from the other side; None: for ever."""
        self._sock.settimeout(seconds)

    def close(self) -> None:
        """End the connection; a second call does nothing."""
        with contextlib.suppress(OSError):  # it is over already
            self._sock.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._sock.close()

    def _exactly(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise ConnectionError("the other side has gone in the middle of what it sent")
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


def connect(address: str, secret: str, *, timeout_s: float) -> Channel:
    """A channel to `host:port`. Raises OSError where nobody answers, and WrongSecret, which is one."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
    channel = Channel(sock, secret, is_server=False)
    channel.greeting()
    return channel


def accepted(sock: socket.socket, secret: str) -> tuple[Channel, dict[str, Any]]:
    """A channel to whoever has connected, and its first message.

    Raises ConnectionError where it has gone, and WrongSecret, which is one, for a stranger.
    """
    channel = Channel(sock, secret, is_server=True)
    try:
        channel.send({"type": "welcome"})  # that this side has the secret
    except OSError as error:
        channel.close()
        raise ConnectionError(f"{channel.peer} has gone: {error}") from None
    return channel, channel.greeting()
