"""Jobs whose hosts are about to be taken away: real processes, a metadata server on loopback."""

import json
import os
import signal

import elastic_worker
import metadata_servers
import pytest
import test_elastic
from test_elastic import Cluster, check_same

from jaxgoodput.observe.report import report

pytestmark = [pytest.mark.multihost, pytest.mark.slow]

alone = test_elastic.alone  # the same run without any fault
JOIN = ("--join-s", "60", "--admit-every-s", "1")


@pytest.fixture
def server():
    with metadata_servers.metadata_server() as made:
        yield made


def saved(cluster):
    folder = cluster.folder / "run" / "checkpoints"
    return [int(p.name) for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []


def last_step(cluster):
    return max(x["step"] for x in cluster.lines("step"))


def test_one_of_three_hosts_is_preempted_and_the_others_go_on_without_a_restart(
    tmp_path, alone, server
):
    epochs = 60
    settings = ("execution.leases=true", "batch.micro=[2, 2]")
    with Cluster(
        tmp_path / "job", epochs=epochs, step_s=0.03, nodes="1:3", options=JOIN, settings=settings
    ) as cluster:
        asks = ("--notices", "gce", "--metadata-server", server.address)
        cluster.agent("a", "c")
        cluster.agent("b", options=asks)
        cluster.wait_for_processes(3)
        stay = [cluster.pid(name) for name in ("a", "c")]
        server.set(preempted="TRUE")
        left = cluster.agents["b"].wait(limit_s=30.0)  # the machine is switched off after 30 s
        assert left.code == 143
        why = "notice of GCE: the machine is preempted, in 30 s"
        assert f"b: {why}, leaving the job" in left.err
        assert f"b is told to leave: {why}" in cluster.coordinator.text()
        cluster.wait_for_processes(2)
        assert not saved(cluster), "the state moved in memory"
        cluster.hurry()
        end, steps = cluster.finish()
        assert [cluster.pid(name) for name in ("a", "c")] == stay
        assert len(cluster.lines("began")) == 3, "no process was started in place of another"
        (judged,) = {(x["host"], x["decision"], x["why"]) for x in cluster.lines("judged")}
        assert judged == ("b", "told to leave", why)
        assert "host b told to leave: notice of GCE" in report(cluster.folder / "run")
    check_same(alone, end, steps, epochs)


def test_notices_of_all_hosts_at_once_save_the_last_step_and_end_with_143(tmp_path):
    going = tmp_path / "going"
    with Cluster(
        tmp_path / "job",
        epochs=500,
        step_s=0.05,
        nodes="1:2",
        options=JOIN,
        settings=("execution.leases=true", "batch.micro=[2, 2]"),
    ) as cluster:
        cluster.agent("a", "b", options=("--notices", f"file:{going}"))
        cluster.wait_for_processes(2)
        (tmp_path / "seconds").write_text("60")
        (tmp_path / "seconds").rename(going)
        assert cluster.coordinator.wait().code == 143, cluster.told()
        assert max(saved(cluster)) >= last_step(cluster)
        assert {cluster.agents[name].wait().code for name in ("a", "b")} <= {0, 143}
        assert "in 60 s, leaving the job" in cluster.told()


@pytest.mark.nightly
def test_a_stop_while_a_notice_is_pending_saves(tmp_path):
    with Cluster(tmp_path / "job", epochs=500, step_s=0.3, nodes="1:2", options=JOIN) as cluster:
        cluster.agent("a", "b", options=("--notices", "signal:USR1@90"))
        cluster.wait_for_processes(2)
        cluster.agents["a"].send(signal.SIGUSR1)
        cluster.agents["a"].wait_for("notice of SIGUSR1: this host is to leave, in 90 s")
        cluster.coordinator.send(signal.SIGTERM)
        assert cluster.coordinator.wait().code == 143, cluster.told()
        assert max(saved(cluster)) >= last_step(cluster)


@pytest.mark.parametrize("how", ["signal", pytest.param("file", marks=pytest.mark.nightly)])
def test_a_notice_of_the_coordinators_host_saves_and_stops_the_job(how, tmp_path):
    going = tmp_path / "going"
    source = {"signal": "signal:USR1@60", "file": f"file:{going}"}[how]
    with Cluster(
        tmp_path / "job", epochs=500, step_s=0.05, nodes="1", options=("--notices", source)
    ) as cluster:
        cluster.agent("a")
        cluster.wait_for_processes(1)
        going.touch()
        if how == "signal":
            cluster.coordinator.send(signal.SIGUSR1)
        assert cluster.coordinator.wait().code == 143, cluster.told()
        assert "the coordinator's host will be gone" in cluster.told()
        assert max(saved(cluster)) >= last_step(cluster)


@pytest.mark.nightly
def test_a_worker_that_does_not_leave_in_time_is_killed_before_its_host_is(tmp_path, alone):
    """One that stands still: the others go on without it, and nothing is lost."""
    epochs = 60
    with Cluster(
        tmp_path / "job", epochs=epochs, step_s=0.05, nodes="1:2", options=JOIN
    ) as cluster:
        cluster.agent("a", "b", options=("--notices", "signal:USR1@6"))
        cluster.wait_for_processes(2)
        os.kill(cluster.pid("b"), signal.SIGSTOP)
        cluster.agents["b"].send(signal.SIGUSR1)
        assert cluster.agents["b"].wait(limit_s=30.0).code == 143
        assert "no heartbeat" not in cluster.told() and "was stopped" not in cluster.told()
        end, steps = cluster.finish()
    check_same(alone, end, steps, epochs)


def test_a_metadata_server_that_does_not_answer_harms_no_training(tmp_path, alone, server):
    epochs = 5
    server.status = 500
    with Cluster(tmp_path / "job", epochs=epochs, step_s=0.02, nodes="1") as cluster:
        cluster.agent("a", options=("--notices", "aws", "--metadata-server", server.address))
        end, steps = cluster.finish()
        assert cluster.agents["a"].wait().code == 0
        said = cluster.agents["a"].text()
        assert said.count("cannot be asked for notices") == 2, "once for each thing that is asked"
    check_same(alone, end, steps, epochs)


@pytest.mark.nightly
def test_a_warning_is_printed_and_the_host_stays(tmp_path, server):
    body = json.dumps({"noticeTime": "2026-01-01T00:00:00Z"})
    server.aws["events/recommendations/rebalance"] = body
    with Cluster(tmp_path / "job", epochs=20, step_s=0.02, nodes="1") as cluster:
        cluster.agent("a", options=("--notices", "aws", "--metadata-server", server.address))
        cluster.agents["a"].wait_for("It stays in the job until it has to go")
        cluster.hurry() if (cluster.folder / "run").is_dir() else None
        cluster.finish()
        assert len(cluster.lines("step")) == 20 * elastic_worker.NUM_SAMPLES // elastic_worker.BASE
