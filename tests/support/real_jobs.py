"""Jobs of tests that really train under a service: each counts how often each of its samples was applied."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

import compilations
import numpy as np
import processes
import services

WORKER = pathlib.Path(__file__).parents[1] / "launcher" / "elastic_worker.py"
NUM_SAMPLES = 120  # of its data
# Far more than a test takes: its jobs hurry in the end. Two processes read a batch in half the time.
EPOCHS, STEP_S = 150, 0.2


def submit(service: services.Service, name: str, *arguments: str) -> None:
    """`jaxgoodput submit --name NAME ...`."""
    assert service.run("submit", "--name", name, *arguments).strip() == name


def fails(*arguments: str) -> tuple[int, str]:
    """Exit code and errors of a command of `jaxgoodput`."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxgoodput.cli", *arguments],
        env={**os.environ, **compilations.JOBS},
        capture_output=True,
        text=True,
        timeout=processes.LIMIT_S,
    )
    return done.returncode, done.stderr


def pids_of(*words: str) -> list[int]:
    """Processes of `jaxgoodput` with all of these among their arguments, somewhere."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            said = path.read_bytes().decode(errors="replace").split("\0")
            is_ours = "jaxgoodput.cli" in said
            if is_ours and all(any(word in text for text in said) for word in words):
                found.append(int(path.parent.name))
    return sorted(found)


def alive(pids: Iterable[int]) -> list[int]:
    """Those that have not ended."""
    return [pid for pid in pids if not processes.gone(pid, limit_s=0.05)]


def kill(pid: int, kind: signal.Signals) -> None:
    """Send a signal to a process of this test."""
    os.kill(pid, kind)


class Job:
    """A job that trains, in a folder of its own."""

    def __init__(
        self,
        service: services.Service,
        folder: pathlib.Path,
        name: str,
        *options: str,
        epochs: int = EPOCHS,
        step_s: float = STEP_S,
    ):
        self.service, self.name, self.epochs = service, name, epochs
        self.folder = folder / name
        self.folder.mkdir()
        command = ["python", str(WORKER), str(self.folder), str(epochs), str(step_s), "by-row"]
        workdir = str(self.folder / "run")
        submit(service, name, "--workdir", workdir, *options, "--", *command)

    def lines(self, kind: str) -> list[dict]:
        """What all of its processes wrote, in order of time."""
        found = [line for _, line in processes.records_so_far(self.folder)]
        return sorted((x for x in found if x["kind"] == kind), key=lambda x: x["at"])

    def slow_down(self, host: str, times: float) -> None:
        """Have one of its hosts take so many times as long from now on; 1 ends it."""
        (self.folder / "run").mkdir(exist_ok=True)
        (self.folder / "run" / "slow").write_text(f"{host} {times}")

    def hurry(self) -> None:
        """Have its steps take no time from now on."""
        (self.folder / "run").mkdir(exist_ok=True)
        (self.folder / "run" / "hurry").touch()

    def wait_for_step(self, more: int = 5, limit_s: float = services.LIMIT_S) -> None:
        """Until it has done so many steps from now on; the service need not be there.

        They need not be new ones: a job that lost its coordinator goes on from an older checkpoint.
        """
        now_s = time.time()
        services.until(
            lambda: len({x["step"] for x in self.lines("step") if x["at"] > now_s}) >= more,
            lambda: f"{self.name} does not go on",
            limit_s,
        )

    def wait_for_processes(self, count: int, limit_s: float = services.LIMIT_S) -> None:
        """Until its newest set of processes is of so many, and does steps."""

        def there():
            found = self.lines("regrouped")
            return found and found[-1]["num_processes"] == count

        self.service.until(there, f"{self.name} has not {count} processes", limit_s)
        self.wait_for_step(2, limit_s)

    def wait_for_end(self) -> None:
        """Until it is done."""
        self.service.until(
            lambda: self.service.job(self.name).phase == "done", "it is not done", limit_s=240.0
        )

    def assert_each_sample_once(self) -> None:
        """In every process that came to the end, every sample was applied once an epoch."""
        ends = self.lines("end")
        assert ends, f"{self.name} has not ended"
        for end in ends:
            np.testing.assert_array_equal(end["count"], np.full(NUM_SAMPLES, self.epochs))
