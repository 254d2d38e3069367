"""python benchmarks/service_load.py [--kills 100] [--jobs 1000] [--agents 200] [--hints 500] [--seconds 60]

Loads a real cluster service on this machine with real connections; the jobs are never executed.
Agents wait for work like the agents of nodes, and jobs send hints at a steady rate. Beside them somebody
looks at the page, at the list of all jobs, at one job, at the nodes and at the metrics, each once a second,
and every list is compared with the jobs that were there when it was asked for. At the end, everything
that the service has acknowledged is compared with what it knows. With --kills it is killed (SIGKILL) again
and again under this load. The table gives requirement and result. The exit code is 1 if something was lost,
given twice, cut or answered by 5xx, or if no work was given and no hint acknowledged: that would be no load.
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

from jaxgoodput.cluster.service.wire import VERSION

HINTS: dict[str, Any] = {
    "kind": "h200", "num_devices": 1, "largest": 8, "base_batch_size": 256,
    "max_global_batch_size": 8192, "max_micro_batches": 16, "total": 50000.0,
    "grad_sqr": [1.0, 0.5, 0.1], "grad_var": [900.0, 4000.0, 30.0], "noise_confidence": 200.0,
    "global_batch_size": 1024, "throughput": 5200.0, "goodput": 4100.0, "restarts_s": [2.5, 2.9],
    "layouts": [{
        "name": "data1", "devices_per_replica": 1, "error": 0.03, "micro": [8, 256],
        "cost": {"compute_base": 0.01, "compute_per_sample": 0.0004, "intra_base": 0.004,
                 "intra_per_replica": 0.0005, "inter_base": 0.01, "inter_per_replica": 0.001,
                 "overlap": 1.5, "update_s": 0.003},
        "residuals": [[8, 1.05], [64, 0.98], [256, 1.01]], "links": ["intra"],
    }],
}  # fmt: skip
ANSWER_S = 60.0
LOOKS = {
    "page": "/",
    "jobs": "/v1/jobs?most=500",
    "one job": "/v1/jobs/j1",
    "nodes": "/v1/nodes",
    "metrics": "/metrics",
}


class Gone(Exception):
    """The service has gone in the middle of a request."""


class Connection:
    """HTTP/1.1 of as few lines as possible: what measures must cost less than what is measured."""

    def __init__(self, load: "Load"):
        self._load = load
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and answer. Raises Gone."""
        data = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {self._load.token}\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self._load.port)
            reader, writer = self._streams
            writer.write(head.encode() + data)
            status, length = 0, 0
            async with asyncio.timeout(ANSWER_S):
                while (line := await reader.readline()) != b"\r\n":
                    if not line:
                        raise ConnectionError("closed")
                    if not status:
                        status = int(line.split()[1])
                    elif line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                text = await reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            if self._streams is not None:
                self._streams[1].close()
            self._streams = None
            raise Gone(str(error)) from None
        is_json = text[:1] in (b"{", b"[")
        return status, json.loads(text) if is_json else None


@dataclass
class Load:
    """What is asked of the service, and what came of it."""

    folder: pathlib.Path
    num_jobs: int
    num_agents: int
    per_second: float
    port: int = 0
    token: str = ""
    child: subprocess.Popen[bytes] | None = None
    seconds: list[float] = field(default_factory=list)  # of answers that wait for nothing
    starting_s: list[float] = field(default_factory=list)  # the same, while all jobs come and start
    statuses: dict[int, int] = field(default_factory=dict)
    submitted: set[str] = field(default_factory=set)  # acknowledged
    hinted: dict[str, tuple[int, int]] = field(default_factory=dict)  # generation and number
    refused_hints: int = 0
    generation: dict[str, int] = field(default_factory=dict)
    parts: dict[tuple[str, str, int], tuple[int, ...]] = field(default_factory=dict)
    given_twice: list[str] = field(default_factory=list)
    num_work: int = 0  # answers of long polls that brought something
    starts_s: list[float] = field(default_factory=list)
    is_over: bool = False
    looked_s: dict[str, list[float]] = field(default_factory=dict)  # of each thing to look at
    cut: list[str] = field(default_factory=list)  # lists that lacked jobs
    num_hints: int = 0
    hinting_s: float = 1.0

    def start(self) -> None:
        """Start the service, and wait until it answers."""
        begun = time.perf_counter()
        address = self.folder / "address"
        address.unlink(missing_ok=True)
        with (self.folder.parent / "service.log").open("ab") as log:
            command = [
                *(sys.executable, "-m", "jaxgoodput.cli", "serve"),
                "--folder",
                str(self.folder),
            ]
            command += [
                "--local",
                "0",
                "--port",
                str(self.port),
                "--rate",
                "100000",
                "--silent-s",
                "120",
            ]
            self.child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while not (address.exists() and self.answers()):
            if self.child.poll() is not None:
                raise SystemExit((self.folder.parent / "service.log").read_text()[-3000:])
            time.sleep(0.1)
        self.starts_s.append(time.perf_counter() - begun)
        self.port = int(address.read_text().rpartition(":")[2])
        self.token = (self.folder / "token").read_text().strip()

    def answers(self) -> bool:
        """Whether it listens."""
        import urllib.request

        try:
            url = (self.folder / "address").read_text().strip() + "/healthz"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status == 200
        except (OSError, ValueError):
            return False

    async def timed(self, connection: Connection, *request: Any) -> tuple[int, Any]:
        """An answer that waits for nothing, counted; again until the service is there. Gone: try again."""
        begun = time.perf_counter()
        status, answer = await connection.ask(*request)
        self.seconds.append(time.perf_counter() - begun)
        self.statuses[status] = self.statuses.get(status, 0) + 1
        return status, answer

    async def surely(self, *request: Any) -> tuple[int, Any]:
        """The same, again until the service is there."""
        connection = Connection(self)
        while True:
            try:
                return await self.timed(connection, *request)
            except Gone:
                await asyncio.sleep(0.1)

    async def agent(self, number: int) -> None:
        """A node's agent: waits for work, tells where coordinators are, and watches what it is given."""
        name, version = f"n{number}", 0
        node = {"name": name, "kind": "h200", "num_devices": 8}
        join = {"node": node, "instance": "one", "version": VERSION}
        status, answer = await self.surely("POST", "/v1/nodes", join)
        if status != 200:
            raise SystemExit(f"{name} was refused: {status} {answer}")
        connection = Connection(self)
        while not self.is_over:
            try:
                path = f"/v1/nodes/{name}/work?instance=one&after={version}&wait_s=20"
                status, work = await connection.ask("GET", path)
                self.statuses[status] = self.statuses.get(status, 0) + 1
                if status != 200:
                    await asyncio.sleep(1.0)
                    continue
                self.num_work += work["version"] != version
                version = work["version"]
                self.check(name, work)
                reports = [
                    {"job": t["job"], "attempt": t["attempt"], "address": f"{name}:1"}
                    for t in work["tasks"]
                    if t["coordinates"] and t["runs"] and t["address"] is None
                ]
                if reports:
                    body = {"instance": "one", "coordinators": reports}
                    await self.timed(connection, "POST", f"/v1/nodes/{name}/reports", body)
            except Gone:
                await asyncio.sleep(0.5 + random.random())

    def check(self, name: str, work: dict[str, Any]) -> None:
        """Nobody shares a device, and a generation is the same devices for ever."""
        owner: dict[int, str] = {}
        for task in work["tasks"]:
            job, devices = task["job"], tuple(task["devices"])
            self.generation[job] = max(self.generation.get(job, 0), task["generation"])
            for index in devices:
                if owner.setdefault(index, job) != job:
                    self.given_twice.append(f"{name}:{index} is {owner[index]}'s and {job}'s")
            key = name, job, task["generation"]
            if self.parts.setdefault(key, devices) != devices:
                self.given_twice.append(f"{key} was {self.parts[key]} and is {devices}")

    async def hint(self, lane: int, lanes: int, numbers: dict[str, int]) -> None:
        """Hints of some of the jobs, at a steady rate."""
        connection, every_s = Connection(self), lanes / self.per_second
        jobs = [f"j{i}" for i in range(lane, self.num_jobs, lanes)]
        due, place = time.perf_counter() + every_s * random.random(), 0
        while not self.is_over:
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            due += every_s
            job = jobs[place % len(jobs)]
            place += 1
            numbers[job] = numbers.get(job, 0) + 1
            told = self.generation.get(job, 0), numbers[job]
            body = {**HINTS, "generation": told[0], "number": told[1], "progress": float(told[1])}
            try:
                status, _ = await self.timed(connection, "POST", f"/v1/jobs/{job}/hints", body)
            except Gone:
                await asyncio.sleep(0.5)
                continue
            if status == 200:
                self.hinted[job] = told
                self.num_hints += 1
            else:
                self.refused_hints += 1

    async def look(self, what: str, path: str) -> None:
        """Look at something once a second, like somebody with a browser or a script."""
        connection = Connection(self)
        while not self.is_over:
            await asyncio.sleep(random.uniform(0.5, 1.5))
            wanted, found, after = len(self.submitted), 0, ""
            try:
                while True:
                    begun = time.perf_counter()
                    status, answer = await connection.ask("GET", path + after)
                    self.looked_s.setdefault(what, []).append(time.perf_counter() - begun)
                    self.statuses[status] = self.statuses.get(status, 0) + 1
                    if what != "jobs":
                        break
                    found += len(answer["jobs"])
                    if answer["next_before"] is None:
                        if found < wanted:
                            self.cut.append(f"{found} of {wanted} jobs")
                        break
                    after = f"&before={answer['next_before']}"
            except Gone:
                await asyncio.sleep(0.5)

    async def submit(self, number: int) -> None:
        """Hand in a job; with an id of the request, so that asking twice does nothing twice."""
        spec = {"id": f"j{number}", "max_devices": 8}
        body = {"spec": spec, "command": ["python", "train.py"]}
        status, answer = await self.surely("POST", "/v1/jobs", body)
        if status == 201 or (status == 409 and "already" in answer["error"]):
            self.submitted.add(f"j{number}")

    async def lost(self) -> list[str]:
        """What was acknowledged and is not known."""
        connection, found = Connection(self), []
        for job in sorted(self.submitted):
            status, shown = await connection.ask("GET", f"/v1/jobs/{job}")
            if status != 200:
                found.append(f"job {job}: {status}")
                continue
            if job in self.hinted:
                has = shown["hints"] or {"generation": -1, "number": -1}
                if (has["generation"], has["number"]) < self.hinted[job]:
                    found.append(f"hints of {job}: {self.hinted[job]} acknowledged")
        return found


async def under_load(load: Load, seconds: float, kills: int) -> list[str]:
    """Everything at once; what was lost."""
    agents = [asyncio.create_task(load.agent(i)) for i in range(load.num_agents)]
    await asyncio.sleep(1.0)
    for first in range(0, load.num_jobs, 50):
        every = range(first, min(first + 50, load.num_jobs))
        await asyncio.gather(*(load.submit(number) for number in every))
    # All jobs start at once, which is timed by itself.
    seen = -1
    while len(load.parts) > seen:
        seen = len(load.parts)
        await asyncio.sleep(5.0)
    load.starting_s, load.seconds = load.seconds, []
    numbers: dict[str, int] = {}
    lanes = 50
    begun = time.perf_counter()
    hinting = [asyncio.create_task(load.hint(lane, lanes, numbers)) for lane in range(lanes)]
    hinting += [asyncio.create_task(load.look(*seen)) for seen in LOOKS.items()]
    if not kills:
        await asyncio.sleep(seconds)
    for number in range(kills):
        await asyncio.sleep(random.uniform(0.3, 4.0))
        assert load.child is not None
        os.kill(load.child.pid, signal.SIGKILL)
        load.child.wait()
        await asyncio.to_thread(load.start)
        print(
            f"\rkilled {number + 1} times, restarts take {load.starts_s[-1]:.1f} s",
            end="",
            file=sys.stderr,
        )
    if kills:
        print(file=sys.stderr)
        await asyncio.sleep(10.0)  # with plans
    load.is_over = True
    await asyncio.gather(*hinting)
    load.hinting_s = time.perf_counter() - begun
    for task in agents:
        task.cancel()
    return await load.lost()


def table(load: Load, options: argparse.Namespace, took: float, lost: list[str]) -> dict[str, str]:
    """What was asked, and what came of it."""
    seconds = sorted(load.seconds)

    def at(part: float, seconds: list[float] = seconds) -> str:
        return f"{1e3 * seconds[min(int(part * len(seconds)), len(seconds) - 1)]:.0f} ms"

    looks = {what: sorted(took) for what, took in load.looked_s.items()}
    bad = {status: n for status, n in load.statuses.items() if status >= 500}
    found = {
        "load": f"{options.jobs} jobs, {options.agents} agents, {options.hints:g} hints/s asked",
        "machine": f"{os.cpu_count()} processors, load average {os.getloadavg()[0]:.1f}",
        "answers": f"{dict(sorted(load.statuses.items()))} in {took:.0f} s",
        "hints": f"{load.num_hints} acknowledged, {load.num_hints / load.hinting_s:.0f} a second; "
        f"{load.refused_hints} refused as old",
        "time to answer": f"median {at(0.5)}, p99 {at(0.99)} (asked: 100 ms), longest {at(1.0)}",
        "while all jobs came": f"median {at(0.5, sorted(load.starting_s))}, p99 "
        f"{at(0.99, sorted(load.starting_s))}, longest {at(1.0, sorted(load.starting_s))}",
        **{
            f"looking at {what}": f"median {at(0.5, took)}, p99 {at(0.99, took)} of {len(took)}"
            for what, took in looks.items()
        },
        "lists that lacked jobs": f"{load.cut[:5] or 'none'}",
        "5xx": f"{bad or 'none'}",
        "acknowledged and lost": f"{lost[:5] or 'nothing'}",
        "given twice": f"{load.given_twice[:5] or 'nothing'} ({len(load.parts)} parts of allocations, "
        f"{load.num_work} times work)",
    }
    if options.kills:
        starts = sorted(load.starts_s)
        middle = starts[len(starts) // 2]
        found["kills"] = (
            f"{options.kills}; answers again after {middle:.1f} s ({starts[-1]:.1f} at most)"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--hints", type=float, default=500.0, help="a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kills", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        load = Load(pathlib.Path(folder) / "service", options.jobs, options.agents, options.hints)
        load.folder.mkdir()
        load.start()
        begun = time.perf_counter()
        try:
            lost = asyncio.run(under_load(load, options.seconds, options.kills))
        finally:
            assert load.child is not None
            load.child.send_signal(signal.SIGTERM)
            load.child.wait()
        took = time.perf_counter() - begun
        rows = table(load, options, took, lost)
        width = max(map(len, rows))
        print("\n".join(f"{name:{width}}  {said}" for name, said in rows.items()))
        bad = [status for status in load.statuses if status >= 500]
        idle = not (load.parts and load.num_hints)
        raise SystemExit(bool(lost or bad or load.given_twice or load.cut or idle))


if __name__ == "__main__":
    main()
