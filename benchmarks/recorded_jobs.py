"""Jobs of a cluster's log, with devices for all: do they take as long as they ran, and how fast is that?

    python benchmarks/recorded_jobs.py                     # 10,000 jobs in each of seven layouts; minutes
    python benchmarks/recorded_jobs.py --jobs 1000 --layouts helios,slurm --policies static

Jobs are made up: they arrive at random over so many days that about 40 run at once, for ten minutes to a day
each, on 1 to 16 devices. Each layout's file is written, read with `simulate`'s preset, and simulated on nodes
of 8 devices, as many as the jobs need. `mean` is the mean completion time over the mean duration, `worst` the
largest such ratio of a job. CPU seconds include reading the file.
"""

import pathlib
import sys
import tempfile
import time

import numpy as np
from absl import app, flags

TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "support")]

import trace_files  # noqa: E402

from jaxgoodput.cluster.catalogue import catalogue  # noqa: E402
from jaxgoodput.cluster.simulate.comparison import compare  # noqa: E402
from jaxgoodput.cluster.simulate.recorded import TraceOptions, read_trace_scenario  # noqa: E402
from jaxgoodput.cluster.simulate.rules import read_settings  # noqa: E402

FLAGS = flags.FLAGS
flags.DEFINE_integer("jobs", 10_000, "Jobs of a log.")
flags.DEFINE_integer("seed", 0, "Seed of the jobs.")
flags.DEFINE_list("layouts", list(trace_files.LAYOUTS), "Layouts.")
flags.DEFINE_list("policies", ["static", "goodput"], "Policies.")

AT_ONCE = 40
COLUMNS = ("layout", "policy", "jobs", "nodes", "mean", "worst", "decisions", "CPU s")


def logged(num_jobs: int, seed: int) -> list[trace_files.LoggedJob]:
    """Return jobs in order of their submission."""
    rng = np.random.default_rng(seed)
    durations_s = np.exp(rng.uniform(np.log(600), np.log(86_400), num_jobs)).astype(int)
    span_s = float(durations_s.sum()) / AT_ONCE
    submits_s = np.sort(rng.uniform(0, span_s, num_jobs)).astype(int)
    sizes = rng.choice([1, 2, 4, 8, 16], num_jobs, p=[0.5, 0.2, 0.15, 0.1, 0.05])
    return [
        trace_files.LoggedJob(submit_s=int(a), wait_s=0, duration_s=int(b), num_devices=int(c))
        for a, b, c in zip(submits_s, durations_s, sizes, strict=True)
    ]


def row(layout: str, policy: str, path: pathlib.Path) -> str:
    """Read a log and simulate it."""
    began_s = time.process_time()
    scenario = read_trace_scenario(TraceOptions(path=str(path), preset=layout), "unlimitedx8")
    made = catalogue()[policy]
    (found,) = compare(scenario, {policy: made}, read_settings("own", "recorded"))
    took_s = time.process_time() - began_s
    wanted = np.array([job.duration_s for job in scenario.jobs], float)
    got = np.array([record.jct_s for record in found.jobs], float)
    cells = (
        layout,
        policy,
        f"{len(got):,}",
        f"{len(scenario.cluster.nodes):,}",
        f"{got.mean() / wanted.mean():.5f}",
        f"{(got / wanted).max():.4f}",
        f"{len(found.decision_s):,}",
        f"{took_s:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def main(_: object) -> None:
    """Print the table."""
    jobs = logged(FLAGS.jobs, FLAGS.seed)
    print(f"\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for layout in FLAGS.layouts:
            path = pathlib.Path(folder) / layout
            path.write_text(trace_files.LAYOUTS[layout](jobs))
            for policy in FLAGS.policies:
                print(row(layout, policy, path), flush=True)


if __name__ == "__main__":
    app.run(main)
