"""python benchmarks/strangers.py [--count 2000] [--asks 300]

Sends strangers, callers without a valid token, to a real cluster service on this machine, all at once: silent
ones, ones that send the head or the body of a request, or garbage, a byte every 4 s, and ones with a forged
token that ask again and again. The tables say after what time the service has closed their connections, and
how long a caller with a token waited for an answer before they came and while they were there.
"""

import argparse
import asyncio
import collections
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any

EVERY_S = 4.0
PAUSE_S = 0.02  # between two requests of a caller with a token
PATIENCE_S = 60.0  # a stranger that is still connected after this time was not closed
FORGED = "POST /v1/jobs HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer forged-0123456789abcdef\r\n"
# What each kind sends at once, and what it sends a byte at a time.
KINDS: dict[str, tuple[bytes, bytes]] = {
    "silent": (b"", b""),
    "head, a byte every 4 s": (b"GET / HTTP/1.1\r\n", b"X-a: b\r\n" * 100),
    "body, a byte every 4 s": (f"{FORGED}Content-Length: 1000\r\n\r\n".encode(), b"x" * 1000),
    "garbage, a byte every 4 s": (b"\x16\x03\x01", b"\x00" * 1000),
    "forged token, again and again": (f"{FORGED}Content-Length: 0\r\n\r\n".encode(), b""),
}


async def stranger(port: int, kind: str) -> tuple[str, float | None]:
    """Connect and do what the kind does; return the seconds until the connection was closed, or None."""
    at_once, slowly = KINDS[kind]
    begun = time.monotonic()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return kind, time.monotonic() - begun

    async def send() -> None:
        writer.write(at_once)
        for index in range(len(slowly)):
            await asyncio.sleep(EVERY_S)
            writer.write(slowly[index : index + 1])

    async def receive() -> None:
        while await reader.read(65536):
            if kind.startswith("forged"):
                writer.write(at_once)

    sending = asyncio.create_task(send())
    try:
        async with asyncio.timeout(PATIENCE_S):
            await receive()
    except TimeoutError:
        return kind, None
    except OSError:
        pass
    finally:
        sending.cancel()
        writer.close()
    return kind, time.monotonic() - begun


async def strangers(port: int, count: int) -> dict[str, list[float | None]]:
    """Send them all at once; return, by kind, the seconds until each was closed."""
    kinds = list(KINDS)
    found: dict[str, list[float | None]] = collections.defaultdict(list)
    every = (stranger(port, kinds[number % len(kinds)]) for number in range(count))
    for kind, seconds in await asyncio.gather(*every):
        found[kind].append(seconds)
    return found


class Known:
    """A caller with a token, that keeps its connection open."""

    def __init__(self, port: int, token: str):
        self._port, self._token = port, token
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self) -> float:
        """Ask for the nodes over a connection, which is opened if need be; return the seconds it took."""
        begun = time.perf_counter()
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        head = f"GET /v1/nodes HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {self._token}\r\n\r\n"
        writer.write(head.encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"a caller with a token was answered {answer[:200]!r}")
        fields = answer.lower().split(b"\r\n")
        (length,) = (f.partition(b":")[2] for f in fields if f.startswith(b"content-length:"))
        await reader.readexactly(int(length))
        return time.perf_counter() - begun

    async def come_anew(self) -> float:
        """The same over a new connection, which has to get past the strangers."""
        self.close()
        return await self.ask()

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def measured(port: int, token: str, count: int, asks: int) -> dict[str, Any]:
    """Ask before the strangers come, and while they are there."""
    known, anew = Known(port, token), Known(port, token)

    async def ask(times: dict[str, list[float]]) -> None:
        times["kept"].append(await known.ask())
        times["new"].append(await anew.come_anew())
        await asyncio.sleep(PAUSE_S)  # also without strangers: a processor that rests is slower

    before: dict[str, list[float]] = {"kept": [], "new": []}
    for _ in range(asks):
        await ask(before)
    arguments = [sys.executable, __file__, "--port", str(port), "--count", str(count)]
    child = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    printed = asyncio.create_task(child.communicate())
    during: dict[str, list[float]] = {"kept": [], "new": []}
    while not printed.done():
        await ask(during)
    known.close()
    anew.close()
    gone = json.loads((await printed)[0])
    return {"before": before, "during": during, "gone": gone}


def start(folder: pathlib.Path) -> tuple[subprocess.Popen[bytes], int, str]:
    """Start a service, and wait until it answers; return its process, port and token."""
    address = folder / "service" / "address"
    with (folder / "service.log").open("wb") as log:
        command = [
            *(sys.executable, "-m", "jaxgoodput.cli", "serve", "--local", "0", "--port", "0")
        ]
        command += ["--folder", str(folder / "service")]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    while True:
        if child.poll() is not None:
            raise SystemExit((folder / "service.log").read_text()[-3000:])
        try:
            url = address.read_text().strip()
            with urllib.request.urlopen(f"{url}/healthz", timeout=5):
                break
        except (OSError, ValueError):
            time.sleep(0.1)
    return child, int(url.rpartition(":")[2]), (address.parent / "token").read_text().strip()


def in_ms(seconds: list[float], share: float) -> str:
    """A quantile in milliseconds."""
    return f"{1e3 * sorted(seconds)[min(int(share * len(seconds)), len(seconds) - 1)]:.2f}"


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--asks", type=int, default=300)
    parser.add_argument("--port", type=int)  # the strangers alone, for the process that is measured
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = options.count + 100
    if soft < needed:  # raises ValueError if the system does not allow as many
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    if options.port is not None:
        print(json.dumps(asyncio.run(strangers(options.port, options.count))))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        child, port, token = start(pathlib.Path(folder))
        try:
            found = asyncio.run(measured(port, token, options.count, options.asks))
        finally:
            child.terminate()
            child.wait()
    if options.json:
        print(json.dumps(found))
        return
    print("| strangers | number | closed after, median | at most |\n|---|---|---|---|")
    for kind, every in found["gone"].items():
        closed = [seconds for seconds in every if seconds is not None]
        last = f"{max(closed):.1f} s" if len(closed) == len(every) else "never"
        print(f"| {kind} | {len(every)} | {statistics.median(closed or [0.0]):.1f} s | {last} |")
    print(
        "\n| caller with a token | number | median | p99 | median, times |\n|---|---|---|---|---|"
    )
    for way, name in (("kept", "connection kept"), ("new", "new connection")):
        first = statistics.median(found["before"][way])
        for when in ("before", "during"):
            every = found[when][way]
            times = statistics.median(every) / first
            said = f"{name}, {'no strangers' if when == 'before' else 'beside them'}"
            quantiles = f"{in_ms(every, 0.5)} ms | {in_ms(every, 0.99)} ms"
            print(f"| {said} | {len(every)} | {quantiles} | {times:.2f} |")


if __name__ == "__main__":
    main()
