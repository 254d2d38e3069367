"""python examples/cluster_day.py --out /tmp/cluster_day

A day of a small cluster in a few minutes. Six real jobs, which run the other examples, arrive one after the
other and share this machine's devices under `jaxgoodput serve`. The day is repeated for each way to share:

    fifo      in order of arrival; each job gets all devices and keeps its author's batch size
    halves    two halves of the devices, each of which takes the next job; the same batch sizes
    adaptive  the same halves, but each job finds its own batch size
    goodput   jobs grow, shrink and find their batch sizes so that the total goodput is largest

Expect an average job time under goodput that is half of fifo's, and about the same as halves': the jobs last
only a minute or two, so that compilation takes what larger batches save. If jobs last three times as long
(`--longer 3`), expect two thirds of halves' job time. A device is one core, because with more devices than
cores you would measure how they disturb each other. Needs `pip install
'jaxgoodput[service,examples,plots]'`. It takes a quarter of an hour on two cores, with `--small` a few
minutes. Afterwards OUT contains a picture, and a folder for each way with the dashboard of every job.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from absl import app, flags

EXAMPLES = pathlib.Path(__file__).resolve().parent
POLL_S, LIMIT_S = 1.0, 7200.0


@dataclasses.dataclass(frozen=True)
class Job:
    """An example program, and its length in updates at its author's batch size."""

    name: str
    script: str
    base_steps: int
    arrival_s: float


DAY = (
    Job("digits-long", "quickstart.py", 6000, 0.0),
    Job("bytes-short", "language_model.py", 200, 5.0),
    Job("uses-long", "recommender.py", 600, 10.0),
    Job("bytes-long", "language_model.py", 400, 15.0),
    Job("digits-short", "quickstart.py", 2000, 25.0),
    Job("uses-short", "recommender.py", 300, 35.0),
)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to share the devices: a policy of the service, and the request of each job."""

    policy: str
    share: int  # share of the devices, as 1 / n; 0 = as many as the scheduler likes
    adapts: bool

    def submitted(self, num_devices: int) -> list[str]:
        """Return the options of `jaxgoodput submit` for a job."""
        if not self.share:
            return ["--min", "1", "--max", str(num_devices)]
        asked = str(max(num_devices // self.share, 1))
        return ["--mode", "rigid", "--min", asked, "--max", asked]


WAYS = {
    "fifo": Way("static", 1, False),
    "halves": Way("static", 2, False),
    "adaptive": Way("static", 2, True),
    "goodput": Way("goodput", 0, True),
}


@dataclasses.dataclass(frozen=True)
class Done:
    """The result of a job; times are in seconds after the first arrival."""

    name: str
    submitted_s: float
    started_s: float
    finished_s: float
    held: tuple[tuple[float, float, int], ...]
    """Return the periods in which the job had devices: (start, end, number of devices)."""

    @property
    def took_s(self) -> float:
        """Return the seconds from the submission of the job to its end."""
        return self.finished_s - self.submitted_s


class Service:
    """A service in its own folder, with all devices on one node, which is used through the command line."""

    def __init__(self, folder: pathlib.Path, policy: str, num_devices: int):
        self.folder = folder
        folder.mkdir(parents=True)
        options = ["--local", f"1x{num_devices}", "--policy", policy, "--port", "0"]
        self.log = (folder / "serve.log").open("wb")
        self.process = subprocess.Popen(
            self._command("serve", *options, "--min-gap-s", "2"),
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def call(self, *arguments: str) -> str:
        """Return the output of a command. Raises RuntimeError with its output if it fails."""
        done = subprocess.run(self._command(*arguments), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        return done.stdout

    def wait(self) -> None:
        """Wait until the service answers and its node has joined."""
        for _ in range(100):
            with contextlib.suppress(RuntimeError):  # the service does not answer yet
                if " up " in self.call("status", "--once"):
                    return
            if self.process.poll() is not None:
                break
            time.sleep(0.3)
        raise RuntimeError(f"the service has not started; see {self.folder / 'serve.log'}")

    def job(self, name: str) -> dict:
        """Return the service's description of a job."""
        return json.loads(self.call("status", name))

    def end(self) -> None:
        """Stop the service as Ctrl-C would."""
        self.process.send_signal(2)
        self.process.wait()
        self.log.close()

    def _command(self, verb: str, *arguments: str) -> list[str]:
        command = [sys.executable, "-m", "jaxgoodput", verb]
        return [*command, "--folder", str(self.folder), *arguments]


@contextlib.contextmanager
def serving(folder: pathlib.Path, policy: str, num_devices: int) -> Iterator[Service]:
    """Start a service; it ends with the block, together with its jobs."""
    service = Service(folder, policy, num_devices)
    try:
        service.wait()
        yield service
    finally:
        service.end()


def run_day(
    folder: pathlib.Path, way: Way, day: Sequence[Job], num_devices: int
) -> tuple[Done, ...]:
    """Run all jobs of a day, from the first arrival to the last end."""
    with serving(folder / "service", way.policy, num_devices) as service:
        start_s = time.monotonic()
        for job in day:
            time.sleep(max(start_s + job.arrival_s - time.monotonic(), 0.0))
            settings = [f"base_steps={job.base_steps}"]
            settings += [] if way.adapts else ["policy=fixed"]
            command = ["python", str(EXAMPLES / job.script), "--workdir", str(folder / job.name)]
            command += [f"--set={setting}" for setting in settings]
            asked = way.submitted(num_devices)
            service.call("submit", "--name", job.name, *asked, "--", *command)
        while True:
            shown = [service.job(job.name) for job in day]
            failed = [one["id"] for one in shown if one["phase"] in ("failed", "cancelled")]
            if failed:
                raise RuntimeError(f"{failed} failed: {service.call('logs', failed[0])[-2000:]}")
            if all(one["phase"] == "done" for one in shown):
                return _done(shown)
            if time.monotonic() - start_s > LIMIT_S:
                raise RuntimeError(f"not done after {LIMIT_S:.0f} s: see {folder}")
            time.sleep(POLL_S)


def _done(shown: Sequence[dict]) -> tuple[Done, ...]:
    zero = min(one["submitted_s"] for one in shown)
    found = []
    for one in shown:
        counts = [sum(map(len, part["devices"].values())) for part in one["past"]]
        found.append(
            Done(
                name=one["id"],
                submitted_s=one["submitted_s"] - zero,
                started_s=one["started_s"] - zero,
                finished_s=one["finished_s"] - zero,
                held=tuple(
                    (part["start_s"] - zero, (part["end_s"] or one["finished_s"]) - zero, count)
                    for part, count in zip(one["past"], counts, strict=True)
                    if count
                ),
            )
        )
    return tuple(found)


def average_s(done: Sequence[Done]) -> float:
    """Return the average job time, in seconds."""
    return statistics.fmean(job.took_s for job in done)


def table(days: dict[str, tuple[Done, ...]]) -> str:
    """Print the job times of every way, in seconds."""
    rows = [["job", *days]]
    names = [job.name for job in next(iter(days.values()))]
    for at, name in enumerate(names):
        rows.append([name, *(f"{done[at].took_s:.0f}" for done in days.values())])
    rows.append(["average", *(f"{average_s(done):.0f}" for done in days.values())])
    ends = (max(job.finished_s for job in done) for done in days.values())
    rows.append(["last end", *(f"{end:.0f}" for end in ends)])
    return "\n".join(f"{row[0]:14}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows)


def picture(days: dict[str, tuple[Done, ...]], path: pathlib.Path) -> None:
    """Draw how many devices each job had over time; a thin line shows that a job waits."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    longest = max(job.finished_s for done in days.values() for job in done)
    size = (9, 1.9 * len(days))
    figure, panels = plt.subplots(len(days), 1, figsize=size, sharex=True, squeeze=False)
    for panel, (name, done) in zip(panels[:, 0], days.items(), strict=True):
        for row, job in enumerate(done):
            panel.hlines(row, job.submitted_s, job.finished_s, color="0.6", linewidth=1)
            for begin_s, end_s, count in job.held:
                panel.barh(row, end_s - begin_s, left=begin_s, height=0.3 * count, color=f"C{row}")
        panel.set_yticks(range(len(done)), [job.name for job in done], fontsize=8)
        panel.invert_yaxis()
        panel.set_title(
            f"{name}: {average_s(done):.0f} s a job in the mean", fontsize=9, loc="left"
        )
        panel.set_xlim(0, 1.02 * longest)
    panels[-1, 0].set_xlabel("seconds since the first job came; as thick as it has devices")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(_):
    out = pathlib.Path(flags.FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise app.UsageError(
            f"--out {out} is not empty: its jobs would be gone on with. Name another one."
        )
    day = DAY
    if flags.FLAGS.small:
        day = tuple(dataclasses.replace(job, base_steps=job.base_steps // 10) for job in DAY[:3])
    longer = flags.FLAGS.longer
    day = tuple(
        dataclasses.replace(job, base_steps=max(round(longer * job.base_steps), 1)) for job in day
    )
    count = flags.FLAGS.devices or os.cpu_count() or 1
    days = {}
    for name in flags.FLAGS.ways:
        days[name] = run_day(out / name, WAYS[name], day, count)
        print(f"{name}: {average_s(days[name]):.0f} s a job in the mean", flush=True)
    print(table(days))
    if "goodput" in days:
        for name in days.keys() - {"goodput"}:
            print(f"goodput / {name}: {average_s(days['goodput']) / average_s(days[name]):.2f}")
    picture(days, out / "day.png")
    print(f"picture: {out / 'day.png'}")


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "an empty folder for all of it", required=True)
    flags.DEFINE_multi_enum("ways", list(WAYS), list(WAYS), "which ways to share the devices")
    flags.DEFINE_integer("devices", None, "of this machine (default: one for each core)")
    flags.DEFINE_float("longer", 1.0, "by what the jobs' lengths are multiplied")
    flags.DEFINE_boolean("small", False, "three jobs of a tenth of the length")
    app.run(main)
