"""Agents in a real Ray cluster: jobs share its nodes, one more comes, and one dies."""

import contextlib
import os
import subprocess
import sys
import time

import compilations
import pytest
import rays
import real_jobs
import services

pytestmark = [pytest.mark.multihost, pytest.mark.slow, pytest.mark.nightly]

OPTIONS = ("--local", "0", "--min-gap-s", "1", "--restart-s", "2")
EPOCHS = 250  # none ends before it hurries


@contextlib.contextmanager
def agents(service, cluster, log):
    """`jaxgoodput nodes --engine ray`, until it was told to stop and has."""
    command = [sys.executable, "-m", "jaxgoodput.cli", "nodes", "--folder", str(service.folder)]
    command += ["--engine", "ray", "--devices", "2", "--hints-s", "1"]
    environ = {"RAY_ADDRESS": cluster.address}
    with log.open("ab") as out:
        child = subprocess.Popen(
            command, env={**os.environ, **environ}, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    try:
        yield child
    finally:
        child.terminate()
        try:
            assert child.wait(120.0) == 0, log.read_text()[-6000:]
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            raise


@pytest.mark.timeout(900)
@pytest.mark.parametrize("dies", ["a node of others", "the node of its coordinator"])
def test_jobs_share_a_cluster_and_outlive_a_node(tmp_path, dies):
    reason = rays.available()
    if reason is not None:
        pytest.skip(reason)
    environ = {"JAX_PLATFORMS": "cpu", **compilations.JOBS}
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(rays.cluster(3, environ))
        service = stack.enter_context(services.Service(tmp_path / "service", *OPTIONS))
        stack.enter_context(agents(service, cluster, tmp_path / "agents.log"))
        jobs = {
            name: real_jobs.Job(service, tmp_path, name, "--max", "4", epochs=EPOCHS)
            for name in "abc"
        }

        def sizes():
            return [service.job(name).num_devices for name in jobs]

        service.until(lambda: sum(sizes()) == 6, "they do not fill the nodes")
        for job in jobs.values():
            job.wait_for_step()
        jobs["d"] = real_jobs.Job(service, tmp_path, "d", "--max", "4", epochs=EPOCHS)
        service.until(lambda: jobs["d"].lines("step"), "no job makes room for the fourth")

        cluster.add("n4")
        service.until(
            lambda: any("n4" in service.job(name).devices for name in jobs),
            "no job uses the node that came",
        )
        shown = {name: service.job(name) for name in jobs}
        print({name: (one.home, dict(one.devices)) for name, one in shown.items()})
        # A coordinator stays where its job started. All had started before n4 came.
        homes = {one.home for one in shown.values() if one.home is not None}
        assert homes and "n4" not in homes
        victim = "n4" if dies == "a node of others" else sorted(homes)[0]
        begun_s = time.time()
        cluster.kill(victim)
        service.until(
            lambda: all(victim not in service.job(name).devices for name in jobs),
            "the node that died is not missed",
        )
        print(victim, "missed after", time.time() - begun_s)
        for job in jobs.values():
            job.wait_for_step(limit_s=240.0)  # some wait until others make room
        for name, job in jobs.items():
            at = [x["at"] for x in job.lines("step") if x["at"] > begun_s]
            gaps = [b - a for a, b in zip([begun_s, *at], at, strict=False)]
            print(name, "longest pause", max(gaps), "first", at[0] - begun_s)
        for job in jobs.values():
            job.hurry()
        for job in jobs.values():
            job.wait_for_end()
            job.assert_each_sample_once()
