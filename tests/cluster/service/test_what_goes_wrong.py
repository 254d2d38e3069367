"""What goes wrong around real jobs: schedulers that are killed, nodes that go, jobs that fail."""

import signal
import sqlite3

import pytest
import real_jobs
import services

from jaxgoodput.cluster.service.wire import JobList

pytestmark = [pytest.mark.multihost, pytest.mark.slow, pytest.mark.timeout(900)]

OPTIONS = ("--min-gap-s", "1", "--hints-s", "1", "--restart-s", "2", "--silent-s", "10")


@pytest.mark.nightly
def test_a_scheduler_that_is_killed_stops_nobody_and_finds_all_of_it_again(tmp_path):
    patient = ("--silent-s", "60")  # no process of it is given up for being slow on a busy machine
    with services.Service(tmp_path / "service", "--local", "1x4", *OPTIONS, *patient) as service:
        job = real_jobs.Job(service, tmp_path, "a", "--max", "2")
        service.until(lambda: service.job("a").num_devices == 2, "it does not grow")
        job.wait_for_processes(2)
        before = service.job("a")
        service.kill()
        job.wait_for_step(more=10)  # with nobody to ask
        service.start()
        after = service.job("a")
        assert (after.generation, after.devices) == (before.generation, before.devices)
        assert after.hints is not None
        progress = after.hints.progress
        service.until(lambda: service.job("a").hints.progress > progress, "it tells no more hints")
        job.hurry()
        job.wait_for_end()
        job.assert_each_sample_once()
        assert len(job.lines("regrouped")) <= 4  # nobody restarted
    # Ended by the second service, which has started no others in their place.
    services.until(
        lambda: not real_jobs.pids_of("nodes", str(tmp_path)), lambda: "agents are left behind"
    )


@pytest.mark.nightly
def test_a_node_that_goes_leaves_the_job_to_the_others(tmp_path):
    with services.Service(tmp_path / "service", "--local", "2x1", *OPTIONS) as service:
        job = real_jobs.Job(service, tmp_path, "a", "--max", "2")
        service.until(lambda: service.job("a").num_devices == 2, "it does not get both nodes")
        job.wait_for_processes(2)
        # Its coordinator is on the first.
        (agent,) = real_jobs.pids_of("node", "--name", "local1", str(service.folder))
        real_jobs.kill(agent, signal.SIGTERM)  # it gives the node up
        job.wait_for_processes(1)
        job.hurry()
        job.wait_for_end()
        job.assert_each_sample_once()


def test_an_agent_that_is_killed_takes_its_processes_along_and_comes_back(tmp_path):
    with services.Service(tmp_path / "service", "--local", "1x2", *OPTIONS) as service:
        job = real_jobs.Job(service, tmp_path, "a", "--max", "1")
        job.wait_for_step()
        (agent,) = real_jobs.pids_of("node", "--name", "local0", str(service.folder))
        its = real_jobs.pids_of("agent", "--name", "local0:0", str(tmp_path))
        assert its
        real_jobs.kill(agent, signal.SIGKILL)
        service.until(lambda: not set(real_jobs.alive(its)), "its processes outlive it")
        job.wait_for_step()  # from what was saved, under another agent
        job.hurry()
        job.wait_for_end()
        job.assert_each_sample_once()


@pytest.mark.nightly
def test_jobs_that_end_otherwise(tmp_path):
    with services.Service(tmp_path / "service", "--local", "1x2", *OPTIONS) as service:
        script = tmp_path / "fails.py"
        script.write_text("print('about to fail'); raise SystemExit(7)\n")
        real_jobs.submit(service, "fails", "--max", "1", "--", "python", str(script))
        service.until(lambda: service.job("fails").phase == "failed", "it does not fail")
        assert service.job("fails").code not in (0, None)
        assert "about to fail" in service.run("logs", "fails")

        real_jobs.submit(service, "missing", "--max", "1", "--", "no-such-program")
        service.until(lambda: service.job("missing").phase == "failed", "it does not fail")
        assert "no-such-program" in service.job("missing").reason

        job = real_jobs.Job(service, tmp_path, "a", "--max", "1", epochs=1000)
        job.wait_for_step()
        service.run("cancel", "a")
        assert service.job("a").phase == "cancelled"
        service.until(lambda: not real_jobs.pids_of("agent", str(job.folder)), "it goes on")
        assert any((job.folder / "run" / "checkpoints").iterdir())  # it was told to save


@pytest.mark.nightly
def test_a_node_that_is_drained_keeps_what_it_has_and_gets_nothing_new(tmp_path):
    with services.Service(tmp_path / "service", "--local", "1x2", *OPTIONS) as service:
        job = real_jobs.Job(service, tmp_path, "a", "--max", "1")
        job.wait_for_step()
        service.run("drain", "local0")
        script = tmp_path / "fine.py"
        script.write_text("print('fine')\n")
        real_jobs.submit(service, "b", "--max", "1", "--", "python", str(script))
        service.until(lambda: service.job("b").reason != "not planned yet", "b is not planned")
        assert service.job("b").num_devices == 0 and service.job("a").num_devices == 1
        assert "local0" in service.run("status")
        said = service.run("explain", "b")
        assert said.startswith("b: ")
        job.hurry()
        job.wait_for_end()
        service.run("drain", "--undo", "local0")
        service.until(lambda: service.job("b").phase == "done", "b is not done")


def test_a_second_service_of_a_folder_is_refused(tmp_path):
    with services.Service(tmp_path / "service", "--local", "0") as service:
        code, said = real_jobs.fails("serve", "--folder", str(service.folder), "--port", "0")
        assert code == 2 and "is in use by process" in said
        other = ("--folder", str(tmp_path / "other"), "--local", "0", "--port", str(service.port))
        code, said = real_jobs.fails("serve", *other)
        assert code == 2 and "ddress already in use" in said


def test_a_journal_that_is_damaged_is_refused_and_repaired_by_a_command(tmp_path):
    with services.Service(tmp_path / "service", "--local", "0") as service:
        services.join(service.client())
        services.submit(service.client(), services.submission("a"))
        services.submit(service.client(), services.submission("b"))
    with sqlite3.connect(service.folder / "journal.db") as connection:
        asked = """select seq from events where kind = 'JobSubmitted' and body like '%"b"%'"""
        (place,) = connection.execute(asked).fetchone()
        connection.execute("update events set body = 'x' where seq = ?", (place,))
    connection.close()
    arguments = ("serve", "--folder", str(service.folder), "--local", "0", "--port", "0")
    code, said = real_jobs.fails(*arguments)
    assert code == 2 and f"from position {place} on" in said and "--repair" in said
    assert f"before position {place} are kept" in service.run("serve", "--repair")
    with service:
        found = service.client().call("GET", "jobs", type_=JobList).jobs
        assert [job.id for job in found] == ["a"]


@pytest.mark.parametrize("what", ["one bit of the log", "the log's end"])
def test_a_killed_service_whose_log_is_damaged_says_what_is_missing_and_is_repaired(tmp_path, what):
    with services.Service(tmp_path / "service", "--local", "0") as service:
        services.join(service.client())
        for number in range(20):
            services.submit(service.client(), services.submission(f"j{number}"))
        acknowledged = {job.id for job in service.client().call("GET", "jobs", type_=JobList).jobs}
        service.kill()
    log = service.folder / "journal.db-wal"
    data = bytearray(log.read_bytes())
    if what == "one bit of the log":
        starts = range(32, len(data), 24 + 4096)
        pages = [int.from_bytes(data[at : at + 4], "big") for at in starts]
        # A page of which a later frame holds a newer copy.
        frame = next(i for i in range(8, len(pages)) if pages[i] in pages[i + 1 :])
        data[starts[frame] + 500] ^= 4
    else:
        del data[len(data) // 2 :]
    log.write_bytes(data)
    arguments = ("serve", "--folder", str(service.folder), "--local", "0", "--port", "0")
    code, said = real_jobs.fails(*arguments)
    assert code == 2 and "acknowledged events are missing" in said and "--repair" in said
    assert log.read_bytes() == data
    repaired = service.run("serve", "--repair")
    with service:
        found = {job.id for job in service.client().call("GET", "jobs", type_=JobList).jobs}
    if what == "one bit of the log":
        assert "no acknowledged event is lost" in repaired
        assert found == acknowledged and len(found) == 20
    else:
        assert "acknowledged events are lost, positions" in repaired
        assert found < acknowledged
    assert (service.folder / "journal.damaged-1" / "journal.db-wal").read_bytes() == data
