"""A real Slurm runs `launch/service.sbatch`: jobs share its nodes, and one of them dies."""

import contextlib
import pathlib
import sys

import compilations
import pytest
import real_jobs
import services
import slurm as slurms

pytestmark = [pytest.mark.multihost, pytest.mark.slow, pytest.mark.nightly]

RECIPE = pathlib.Path(__file__).parents[3] / "launch" / "service.sbatch"


class InSlurm(services.Service):
    """A service that a job of Slurm's has started."""

    def __init__(self, folder: pathlib.Path, slurm: slurms.Slurm, number: str):
        super().__init__(folder)
        self.slurm, self.number = slurm, number

    def start(self) -> None:
        """Wait until it answers."""
        address = self.folder / "address"
        self.until(lambda: address.exists() and self.answers(), "it does not answer")

    def _is_alive(self) -> bool:
        return self.slurm.job(self.number).get("JobState") in ("PENDING", "RUNNING")


@pytest.mark.timeout(900)
def test_jobs_share_an_allocation_and_outlive_a_node(tmp_path):
    reason = slurms.available()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path / "service"
    folder.mkdir()
    with slurms.cluster(3) as slurm, contextlib.ExitStack() as stack:
        number = slurm.submit(
            RECIPE,
            str(folder),
            options=["--nodes=3", f"--output={tmp_path / 'service.log'}"],
            environ={
                "PATH": f"{pathlib.Path(sys.executable).parent}:{slurms.PATH}",
                "JAX_PLATFORMS": "cpu",
                "DEVICES": "2",
                "HOST": "127.0.0.1",  # where all its nodes are
                "SERVE_OPTIONS": "--min-gap-s 1 --silent-s 10 --restart-s 2",
                "NODE_OPTIONS": "--hints-s 1",
                "PYTHONPATH": str(RECIPE.parents[1]),
                **compilations.JOBS,
            },
        )
        service = stack.enter_context(InSlurm(folder, slurm, number))
        jobs = {
            name: real_jobs.Job(service, tmp_path, name, "--max", "4", epochs=150) for name in "abc"
        }

        def sizes():
            return [service.job(name).num_devices for name in jobs]

        service.until(lambda: sum(sizes()) == 6, "they do not fill the nodes")
        for job in jobs.values():
            job.wait_for_step()
        jobs["d"] = real_jobs.Job(service, tmp_path, "d", "--max", "4", epochs=20)
        service.until(lambda: jobs["d"].lines("step"), "nobody makes room for the fourth")

        used = {node for name in jobs for node in service.job(name).devices}
        victim = sorted(used)[-1]
        slurm.kill(victim)
        service.until(
            lambda: all(victim not in service.job(name).devices for name in jobs),
            "the node that died is not missed",
        )
        for job in jobs.values():
            job.wait_for_step()
            job.hurry()
        for job in jobs.values():
            job.wait_for_end()
            job.assert_each_sample_once()
        slurm.run("scancel", "--full", number)
        services.until(lambda: not service._is_alive(), lambda: "it does not end")
