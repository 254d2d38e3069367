"""Checks that an elastic job under the service does not leak while its devices change every minute.

    python benchmarks/elastic_soak.py --minutes 60

A service with three nodes of one device each runs a job that takes one to three of them. In every minute
another job takes a device or two for half of it, so that the first one shrinks and grows again, with its
state in memory. Memory, threads and descriptors are sampled every ten seconds: of the service, of the agents
of its nodes, of the job's coordinator and agents, and of its workers (of each kind, the process that has
most); and the number of files in the folders of the service and of the job.

A table has their highest values in the second and in the last third of the time; the first third is left
out. The exit code is 1 if one is higher in the last third, memory by more than 5 %, the others at all; or if
a sample was not applied exactly once an epoch.
"""

import argparse
import contextlib
import os
import pathlib
import sys
import tempfile
import time
from collections import defaultdict
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/support"))

import real_jobs
import services

OPTIONS = ("--local", "3x1", "--min-gap-s", "2", "--hints-s", "1", "--restart-s", "2")
EVERY_S, GUEST_S, SAMPLE_S = 60.0, 30, 10.0
EPOCHS_A_MINUTE = 60
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


def below(root: int) -> list[int]:
    """Return a process and all that it has started, directly or not."""
    found = [root]
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


def sample(root: int, folders: dict[str, pathlib.Path]) -> dict[tuple[str, str], float]:
    """Return the most that a process of each kind holds, and the files in each folder."""
    most: dict[tuple[str, str], float] = defaultdict(float)
    for pid in below(root):
        with contextlib.suppress(OSError):  # it has just ended
            if (kind := kind_of(pid)) is not None:
                for name, value in held(pid)._asdict().items():
                    most[kind, name] = max(most[kind, name], value)
    for name, folder in folders.items():
        most[name, "files"] = sum(len(files) for _, _, files in os.walk(folder))
    return dict(most)


def guest(service: services.Service, number: int, num_devices: int) -> None:
    """Submit a job that takes devices for a while."""
    size = str(num_devices)
    name = f"guest-{number}"
    command = ("sleep", str(GUEST_S))
    real_jobs.submit(service, name, "--min", size, "--max", size, "--", *command)


def soak(minutes: float) -> bool:
    epochs = max(int(EPOCHS_A_MINUTE * minutes), 10)
    samples: list[tuple[float, dict[tuple[str, str], float]]] = []
    with tempfile.TemporaryDirectory(prefix="jaxgoodput-soak-") as text:
        folder = pathlib.Path(text)
        with services.Service(folder / "service", *OPTIONS) as service:
            job = real_jobs.Job(service, folder, "long", "--max", "3", epochs=epochs)
            job.wait_for_step()
            assert service.child is not None
            folders = {"service": folder / "service", "job": job.folder / "run"}
            began_s, num_guests = time.monotonic(), 0
            while (now_s := time.monotonic() - began_s) < 60 * minutes:
                if now_s >= num_guests * EVERY_S:
                    guest(service, num_guests, 1 + num_guests % 2)
                    num_guests += 1
                samples.append((now_s, sample(service.child.pid, folders)))
                time.sleep(SAMPLE_S)
            job.hurry()
            services.until(
                lambda: service.job("long").phase == "done", lambda: "it is not done", 1800.0
            )
            job.assert_each_sample_once()
            num_sets = len({x["generation"] for x in job.lines("regrouped")})
            sizes = sorted({x["num_processes"] for x in job.lines("regrouped")})
            steps = job.lines("end")[-1]["step"]
    print(
        f"{minutes:g} minutes, {num_guests} guests, {num_sets} sets of processes of {sizes}, {steps} "
        f"steps; every sample {epochs} times\n\n| what | second third | last third | |\n|---|---|---|---|"
    )
    return table(samples, 60 * minutes)


def table(samples: list[tuple[float, dict[tuple[str, str], float]]], seconds: float) -> bool:
    """Print the highest values of two thirds; return whether the last ones are no higher."""
    is_flat = True

    def most(key: tuple[str, str], third: int) -> float:
        span = (third * seconds / 3, (third + 1) * seconds / 3)
        return max((x.get(key, 0.0) for at, x in samples if span[0] <= at < span[1]), default=0.0)

    for key in sorted({key for _, found in samples for key in found}):
        before, after = most(key, 1), most(key, 2)
        is_up = after > before * (1 + FLAT * (key[1] == "memory_mib"))
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
