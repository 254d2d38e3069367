"""One question to a metadata server and its answer, within a time limit for the whole."""

import contextlib
import http.client
import io
import re
import socket
from collections.abc import Callable
from typing import Any, cast

from jaxgoodput.clock import Clock
from jaxgoodput.launcher.notices.metadata import Answer, Question
from jaxgoodput.launcher.notices.notice import address_of

_CONNECT_S = 2.0
_LOOK_S = 0.5  # how often a waiting exchange looks whether it is to stop
_LONGEST = 2**16  # bytes of an answer


def ask(server: str, question: Question, clock: Clock, is_stopping: Callable[[], bool]) -> Answer:
    """Ask a metadata server, http://HOST[:PORT], and return its answer.

    Raises:
        OSError: it does not answer in time, or `is_stopping` holds meanwhile.
        ValueError: it answers with something other than HTTP, or with more than 64 KiB.
    """
    host, port = address_of(server)
    ends_s = clock.now() + question.limit_s
    with contextlib.closing(socket.create_connection((host, port), _CONNECT_S)) as sock:
        sock.sendall(_request(host, question))
        data = b""
        while not _is_whole(data):
            left_s = ends_s - clock.now()
            if left_s <= 0:
                raise TimeoutError(f"it did not answer within {question.limit_s:g} s")
            if is_stopping():
                raise InterruptedError("the answer is not waited for any more")
            sock.settimeout(min(left_s, _LOOK_S))
            try:
                more = sock.recv(_LONGEST)
            except TimeoutError:
                continue
            if not more:
                break
            data += more
            if len(data) > _LONGEST:
                raise ValueError(f"its answer is longer than {_LONGEST} bytes")
    return parsed(data)


def _request(host: str, question: Question) -> bytes:
    headers = {"Host": host, "Connection": "close", "Content-Length": "0", **question.headers}
    lines = [f"{question.method} {question.path} HTTP/1.1", *map(": ".join, headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def _is_whole(data: bytes) -> bool:
    """Whether an answer is complete although its sender has not closed the connection."""
    head, end, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?im)^content-length:[ \t]*(\d{1,9})[ \t]*\r?$", head)
    return bool(end) and length is not None and len(body) >= int(length[1])


class _Received:
    """Bytes that have been received already, in the shape in which `http.client` takes them."""

    def __init__(self, data: bytes):
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def parsed(data: bytes) -> Answer:
    """Return the answer that these bytes are. Raises ValueError for bytes that are no answer of HTTP."""
    response = http.client.HTTPResponse(cast(Any, _Received(data)))
    try:
        response.begin()
        body = response.read().decode()
    except (http.client.HTTPException, ValueError) as error:
        raise ValueError(f"its answer is not HTTP ({type(error).__name__})") from None
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, body, headers)
