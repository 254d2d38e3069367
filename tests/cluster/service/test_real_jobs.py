"""Real jobs on real processes: they start, grow, shrink and end as the scheduler says, each sample once."""

import pytest
import real_jobs
import services

pytestmark = [pytest.mark.multihost, pytest.mark.slow]

OPTIONS = ("--local", "1x8", "--min-gap-s", "2", "--hints-s", "1", "--restart-s", "2")


def sizes(service, *names):
    return [service.job(name).num_devices for name in names]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_three_jobs_make_room_for_a_fourth_and_grow_when_one_ends(tmp_path):
    with services.Service(tmp_path / "service", *OPTIONS) as service:
        jobs = {name: real_jobs.Job(service, tmp_path, name, "--max", "4") for name in "abc"}
        service.until(lambda: sum(sizes(service, *jobs)) == 8, "they do not take the devices")
        assert min(sizes(service, *jobs)) >= 1
        service.until(
            lambda: all(
                found and found[-1]["num_processes"] == service.job(name).num_devices
                for name, job in jobs.items()
                for found in (job.lines("regrouped"),)
            ),
            "their processes are not as many as their devices",
        )

        jobs["d"] = real_jobs.Job(service, tmp_path, "d", "--max", "4")
        service.until(
            lambda: service.job("d").num_devices and jobs["d"].lines("step"),
            "nobody makes room for the fourth",
        )
        assert sum(sizes(service, *jobs)) <= 8

        before = sum(sizes(service, "b", "c", "d"))
        jobs["a"].hurry()
        jobs["a"].wait_for_end()
        service.until(
            lambda: sum(sizes(service, "b", "c", "d")) > before,
            "nobody takes what the first has left",
        )
        for name in "bcd":
            jobs[name].hurry()
        for name in "bcd":
            jobs[name].wait_for_end()
        for job in jobs.values():
            job.assert_each_sample_once()
        # They grew and shrank by processes that joined and left, with the state in memory.
        for name in "abc":
            counts = [x["num_processes"] for x in jobs[name].lines("regrouped")]
            assert len(set(counts)) > 1, (name, counts)
