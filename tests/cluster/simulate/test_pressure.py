"""More jobs than devices: the default policy neither alternates for ever nor lets a job wait for ever."""

import pytest

from jaxgoodput.cluster.scheduler import Goodput
from jaxgoodput.cluster.simulate import TraceJob, simulate, uniform_cluster
from jaxgoodput.cluster.simulate.generator import synthetic_applications
from jaxgoodput.cluster.simulate.jobs.model import ModelTruth
from jaxgoodput.cluster.simulate.settings import Settings

EVENTS = {"round_s": None, "rounding": False, "growth": None}
TRUTH = ModelTruth(synthetic_applications({"t4": 1.0}))
STEPS_PER_S = 1.0 / (0.02 + 8e-4 * 128)  # of vision-small on one device at its base batch of 128


def line(name, hours, submit_s=0.0, num_devices=1, **fields):
    """Return a job that takes about this many hours on its devices at its base batch size."""
    return TraceJob(
        id=name,
        submit_s=submit_s,
        application="vision-small",
        num_devices=num_devices,
        global_batch_size=128 * num_devices,
        num_steps=max(int(3600 * hours * STEPS_PER_S), 1),
        **fields,
    )


def run(jobs, cluster, policy=None, **settings):
    found = simulate(
        jobs, cluster, policy or Goodput(), TRUTH, settings=Settings(**EVENTS, **settings)
    )
    return {job.id: job for job in found.jobs}


@pytest.mark.parametrize(
    ("hours", "restart_s"), [(0.03, 30.0), (0.5, 5.0), (0.5, 30.0), (3.0, 30.0)]
)
def test_equal_jobs_do_not_take_turns(hours, restart_s):
    jobs = [line("a", hours), line("b", hours)]
    done = run(jobs, uniform_cluster("t4", 1, 1), restart_s=restart_s)
    for job in done.values():
        alone_s = sum(job.device_s.values())
        # A job that is shorter than the protected run is never interrupted.
        assert job.restarts == 0 if alone_s < 4 * restart_s else job.restarts <= 4


@pytest.mark.slow
def test_a_short_job_still_overtakes_a_long_one():
    jobs = [line("long", 20.0), line("short", 0.2, submit_s=7200.0)]
    done = run(jobs, uniform_cluster("t4", 1, 1))
    assert done["short"].jct_s < 2 * 0.2 * 3600
    assert done["long"].restarts == 1
