"""A real Slurm runs `launch/slurm_elastic.sbatch`: nodes die, time runs out; every sample is applied once."""

import os
import pathlib
import signal
import sys
import time

import compilations
import elastic_worker
import processes
import pytest
import slurm as slurms

pytestmark = [pytest.mark.multihost, pytest.mark.slow, pytest.mark.nightly]

RECIPE = pathlib.Path(__file__).parents[2] / "launch" / "slurm_elastic.sbatch"
JOIN = RECIPE.with_name("slurm_join.sbatch")


@pytest.fixture(scope="module")
def slurm():
    reason = slurms.available()
    if reason is not None:
        pytest.skip(reason)
    with slurms.cluster(3) as made:
        yield made


class Submitted:
    """The recipe as a job of Slurm's, training `elastic_worker.py`."""

    def __init__(self, slurm, folder, *, nodes, epochs=150, settings=(), **variables):
        self.slurm, self.folder, self.epochs = slurm, folder, epochs
        self.log = folder / "log"
        self.command = (elastic_worker.__file__, str(folder), str(epochs), "0.05", *settings)
        self.environ = {
            "JAX_PLATFORMS": "cpu",
            "ENDPOINT": "127.0.0.1:0",
            "HOME": str(folder),
            "PYTHONPATH": str(RECIPE.parents[1]),
            # This interpreter's commands, whether or not its environment is activated.
            "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
            **compilations.JOBS,
        }
        self.number = self.submit(RECIPE, self.log, nodes=nodes, **variables)

    def submit(self, recipe, log, *, nodes=1, **variables):
        """Submit a recipe with the script and arguments of this job; its number."""
        return self.slurm.submit(
            recipe,
            *self.command,
            options=[f"--nodes={nodes}", f"--output={log}"],
            environ={**self.environ, **variables},
        )

    def lines(self, kind=None):
        """What all processes wrote, in order of time."""
        found = [{"pid": pid, **line} for pid, line in processes.records_so_far(self.folder)]
        return [x for x in sorted(found, key=lambda x: x["at"]) if kind in (None, x["kind"])]

    def wait(self, what, limit_s=120.0):
        deadline = time.monotonic() + limit_s
        while not what():
            if time.monotonic() > deadline:
                log = self.log.read_text() if self.log.exists() else ""
                raise AssertionError(f"it did not come to that: {self.state}\n{log}")
            time.sleep(0.1)

    def wait_for_processes(self, count, more=5):
        """Until the newest generation has so many, and has done some steps."""

        def there():
            found = self.lines("regrouped")
            if not found or found[-1]["num_processes"] != count:
                return False
            done = [x for x in self.lines("step") if x["at"] > found[-1]["at"]]
            return len({x["step"] for x in done}) >= more

        self.wait(there)

    @property
    def state(self):
        return self.slurm.job(self.number)["JobState"]

    def worker(self, node):
        """The process of the newest worker of a node."""
        mine = [x for x in self.lines("began") if x["member"].rpartition(".")[0] == node]
        return mine[-1]["pid"]

    def saved(self):
        folder = self.folder / "run" / "checkpoints"
        return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]

    def finish(self):
        """Hurry to the end; every sample must have been applied once an epoch, in order."""
        (self.folder / "run").mkdir(exist_ok=True)
        (self.folder / "run" / "hurry").touch()
        self.wait(lambda: self.state in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"))
        assert self.state == "COMPLETED", self.log.read_text()
        ends = self.lines("end")
        for end in ends:
            assert end["count"] == [float(self.epochs)] * elastic_worker.NUM_SAMPLES
        steps = {x["step"]: x for x in self.lines("step")}
        done = 0
        for step in sorted(steps):
            epoch, offset = steps[step]["before"]
            assert epoch * elastic_worker.NUM_SAMPLES + offset == (step - 1) * elastic_worker.BASE
            done = (step - 1) * elastic_worker.BASE + steps[step]["num_samples"]
        assert ends and done == self.epochs * elastic_worker.NUM_SAMPLES
        self.wait(lambda: not self.slurm.pids(f"SLURM_JOB_ID={self.number}"), limit_s=30.0)


def test_saves_when_time_is_up_and_goes_on_in_the_same_job(slurm, tmp_path):
    job = Submitted(slurm, tmp_path, nodes=2)
    job.wait_for_processes(2)
    # What --signal=B:USR1@300 does in time.
    slurm.run("scancel", "--batch", "--signal=USR1", job.number)
    job.wait(lambda: job.slurm.job(job.number)["Restarts"] == "1")
    last = max(x["step"] for x in job.lines("step"))
    assert max(job.saved()) >= last
    job.wait(lambda: len(job.lines("began")) == 4, limit_s=240.0)
    job.wait(lambda: job.lines("regrouped")[-1]["at"] > job.lines("began")[-1]["at"])
    job.wait_for_processes(2)
    job.finish()
    assert len(job.lines("began")) == 4


def test_saves_and_does_not_come_back_when_it_is_cancelled(slurm, tmp_path):
    job = Submitted(slurm, tmp_path, nodes=2)
    job.wait_for_processes(2)
    slurm.run("scancel", job.number)
    job.wait(lambda: not slurm.pids(f"SLURM_JOB_ID={job.number}"))
    job.wait(lambda: job.state == "CANCELLED")
    last = max(x["step"] for x in job.lines("step"))
    assert max(job.saved()) >= last and slurm.job(job.number)["Restarts"] == "0"


def test_goes_on_without_a_worker_and_without_a_node(slurm, tmp_path):
    job = Submitted(slurm, tmp_path, nodes=3)
    job.wait_for_processes(3)
    first, others = job.worker("n0"), [job.worker(name) for name in ("n1", "n2")]
    os.kill(others[0], signal.SIGKILL)
    job.wait(lambda: job.worker("n1") != others[0])
    job.wait_for_processes(3)
    slurm.kill("n2")
    job.wait_for_processes(2)
    job.wait(lambda: "down" in slurm.state("n2"))  # Slurm has heard of it, too
    before = len(job.lines("step"))
    job.wait(lambda: len(job.lines("step")) > before + 20)
    assert job.state == "RUNNING" and slurm.job(job.number)["Restarts"] == "0"
    job.finish()
    assert job.worker("n0") == first, "who stays has its process still"
    assert len(job.lines("began")) == 4 and "n2 has left: " in job.log.read_text()


def test_nodes_of_other_jobs_join_a_job_that_runs_and_leave_when_their_time_is_up(slurm, tmp_path):
    job = Submitted(slurm, tmp_path, nodes=1, epochs=200, MAX="3")
    job.wait_for_processes(1)
    first = job.worker("n0")
    more = [job.submit(JOIN, tmp_path / f"more{i}", JOB=job.number) for i in range(2)]
    job.wait_for_processes(3)
    slurm.run(
        "scancel", "--batch", "--signal=USR1", more[0]
    )  # what --signal=B:USR1@120 does in time
    job.wait_for_processes(2)
    job.wait(lambda: slurm.job(more[0])["JobState"] == "COMPLETED")
    assert "leaving the job" in (tmp_path / "more0").read_text()
    job.finish()
    job.wait(lambda: slurm.job(more[1])["JobState"] == "COMPLETED")
    assert job.worker("n0") == first and len(job.lines("began")) == 3
    assert not job.saved() or max(job.saved()) == max(x["step"] for x in job.lines("step"))
    assert not list((tmp_path / ".jaxgoodput").iterdir()), "the secret is not left there"
