"""Checks that an elastic job whose hosts change every minute does not leak, nor the service beside it.

    python benchmarks/elastic_soak.py --minutes 60

Two hosts train for the whole time. In every minute a third one joins them, and leaves after half of it, so
that the state moves in memory twice. Beside them a service with a node of one device runs a short job every
minute. Memory, threads and descriptors are sampled every ten seconds: of the job's coordinator, of the agents
and workers of its two hosts, of the service and of the agent of its node (of each kind, the process that has
most); and the number of files in the folders of the job and of the service.

A table has their highest values in the second and in the last third of the time; the first third is left
out. The exit code is 1 if one is higher in the last third, memory by more than 5 %, the others at all; or if
a sample was not applied exactly once an epoch. The service keeps the output of each job, so its files may
grow by as many as there were jobs.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/support"))

import elasticity
import real_jobs
import services

EVERY_S, STAYS_S, SAMPLE_S = 60.0, 30.0, 10.0
STEP_S, EPOCHS_A_MINUTE = 0.2, 100  # more than can be done
FLAT = 0.05
KINDS = {  # of what this project starts, by its command
    "serve": "service",
    "node": "node agent",
    "coordinate": "coordinator",
    "run": "coordinator",
    "agent": "job agent",
}


class Held(NamedTuple):
    """What a process holds."""

    memory_mib: float
    threads: int
    descriptors: int


def held(pid: int) -> Held:
    folder = pathlib.Path(f"/proc/{pid}")
    pages = int((folder / "statm").read_text().split()[1])
    return Held(
        memory_mib=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        threads=len(os.listdir(folder / "task")),
        descriptors=len(os.listdir(folder / "fd")),
    )


def below(roots: Iterable[int]) -> list[int]:
    """Return these processes and all that they have started, directly or not."""
    found = list(roots)
    for pid in found:
        with contextlib.suppress(OSError):
            for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def kind_of(pid: int) -> str | None:
    """What a process is, by its command line; None for guests and what is about to start."""
    words = pathlib.Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    names = [pathlib.PurePath(word).name for word in words]
    if "jaxgoodput.cli" in words:
        return KINDS.get(words[words.index("jaxgoodput.cli") + 1])
    return "worker" if real_jobs.WORKER.name in names else None


def sample(roots: Iterable[int], folders: dict[str, pathlib.Path]) -> dict[tuple[str, str], float]:
    """Return the most that a process of each kind holds, and the files in each folder."""
    most: dict[tuple[str, str], float] = defaultdict(float)
    for pid in below(roots):
        with contextlib.suppress(OSError):  # it has just ended
            if (kind := kind_of(pid)) is not None:
                for name, value in held(pid)._asdict().items():
                    most[kind, name] = max(most[kind, name], value)
    for name, folder in folders.items():
        most[name, "files"] = sum(len(files) for _, _, files in os.walk(folder))
    return dict(most)


def soak(minutes: float) -> bool:
    epochs = max(int(EPOCHS_A_MINUTE * minutes), 10)
    samples: list[tuple[float, dict[tuple[str, str], float]]] = []
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        service = stack.enter_context(services.Service(folder / "service", "--local", "1x1"))
        (folder / "job").mkdir()
        worker = ("python", str(real_jobs.WORKER), str(folder / "job"), str(epochs), str(STEP_S))
        options = ("--nnodes", "1:3", "--admit-every-s", "1")
        job = stack.enter_context(
            elasticity.Job(folder / "job", "", *options, worker=(*worker, "by-row"))
        )
        for name in ("a", "b"):
            job.agent(name)
        job.until(lambda: len(job.lines("step")) > 5)
        assert service.child is not None
        roots = [service.child.pid, job.coordinator.pid]
        roots += [job.agents[name].pid for name in ("a", "b")]
        folders = {"service": folder / "service", "job": folder / "job" / "run"}
        began_s, number, is_here = time.monotonic(), 0, False
        while (now_s := time.monotonic() - began_s) < 60 * minutes:
            if now_s >= number * EVERY_S:
                number, is_here = number + 1, True
                job.agent(f"guest{number}")
                real_jobs.submit(service, f"short-{number}", "--", "sleep", "10")
            elif is_here and now_s >= (number - 1) * EVERY_S + STAYS_S:
                is_here = False
                job.agents[f"guest{number}"].send_signal(signal.SIGTERM)
            samples.append((now_s, sample(roots, folders)))
            time.sleep(SAMPLE_S)
        (folder / "job" / "run" / "hurry").touch()
        code = job.coordinator.wait(1800.0)
        ends = job.lines("end")
        once = bool(ends) and all(set(end["count"]) == {epochs} for end in ends)
        num_sets = len({x["generation"] for x in job.lines("regrouped")})
    print(
        f"{minutes:g} minutes, {number} hosts came and went, {num_sets} sets of processes; exit code {code}; "
        f"every sample {epochs} times: {once}\n\n"
        "| what | second third | last third | |\n| --- | --- | --- | --- |"
    )
    return table(samples, 60 * minutes, number) and once and code == 0


def table(
    samples: list[tuple[float, dict[tuple[str, str], float]]], seconds: float, num_jobs: int
) -> bool:
    """Print the highest values of two thirds; return whether the last ones are no higher."""
    is_flat = True

    def most(key: tuple[str, str], third: int) -> float:
        span = (third * seconds / 3, (third + 1) * seconds / 3)
        return max((x.get(key, 0.0) for at, x in samples if span[0] <= at < span[1]), default=0.0)

    for key in sorted({key for _, found in samples for key in found}):
        before, after = most(key, 1), most(key, 2)
        more = num_jobs / 3 + 1 if key == ("service", "files") else 0.0
        is_up = after > before * (1 + FLAT * (key[1] == "memory_mib")) + more
        is_flat &= not is_up
        told: Any = ("**up**", f"{after / before - 1:+.1%}") if before else ("", "")
        print(f"| {' '.join(key)} | {before:.0f} | {after:.0f} | {told[not is_up]} |")
    return is_flat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    return 0 if soak(parser.parse_args().minutes) else 1


if __name__ == "__main__":
    sys.exit(main())
