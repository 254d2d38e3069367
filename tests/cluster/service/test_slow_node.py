"""A real node that turns slow is replaced by a free one, and is back in the job after its term."""

import time

import pytest
import real_jobs
import services

from jaxgoodput.cluster.service.wire import ClusterShown

pytestmark = [pytest.mark.multihost, pytest.mark.slow, pytest.mark.nightly]

TERM_S = 60.0
LIMIT_S = 400.0  # of each wait; a busy machine starts processes slowly
OPTIONS = ("--local", "5x1", "--min-gap-s", "1", "--max-gap-s", "5", "--restart-s", "2")


@pytest.mark.timeout(1800)
def test_a_node_that_turns_five_times_slower_is_replaced_and_comes_back_after_its_term(tmp_path):
    with services.Service(tmp_path / "service", *OPTIONS, "--apart-s", f"{TERM_S:g}") as service:
        # Its time per batch is that of four hosts, so that each takes 0.2 s for its part.
        job = real_jobs.Job(
            *(service, tmp_path, "a", "--mode", "elastic", "--min", "3", "--max", "4"), step_s=0.8
        )
        client = service.client()

        def nodes_of_job():
            return set(service.job("a").devices)

        def of_faults():
            shown = client.call("GET", "nodes", type_=ClusterShown)
            return {node.node.name: node.faults for node in shown.nodes if node.faults}

        job.wait_for_processes(4, LIMIT_S)
        before, changes = nodes_of_job(), service.job("a").num_changes
        slow = max(before - {service.job("a").home})
        (spare,) = {f"local{i}" for i in range(5)} - before
        first = {x["member"] for x in job.lines("began")}

        began_s = time.monotonic()

        def passed_s():
            return f"{time.monotonic() - began_s:.1f} s"

        job.slow_down(f"{slow}:0", 5.0)
        faults = service.until(of_faults, "it is not reported", LIMIT_S)
        ((node, (fault,)),) = faults.items()
        assert (node, fault.job, fault.fault) == (slow, "a", "slow") and fault.slow_ratio > 2
        assert fault.until_s - fault.at_s == pytest.approx(TERM_S, abs=1.0)
        print(f"{slow} is reported after {passed_s()}: {fault.why}")
        wanted = before - {slow} | {spare}
        service.until(lambda: nodes_of_job() == wanted, "it is not replaced", LIMIT_S)
        print(f"{spare} replaces it after {passed_s()}")
        job.wait_for_processes(4, LIMIT_S)
        print(f"four processes train again after {passed_s()}")
        assert service.job("a").num_changes == changes + 1
        assert f"{slow} is kept apart from it for" in service.run("explain", "a")
        assert "times the median" in " ".join(service.run("status", "--once").split())

        job.slow_down(f"{slow}:0", 1.0)
        service.until(lambda: not of_faults(), "its term does not end", LIMIT_S)
        print(f"its term is over after {passed_s()}")
        assert nodes_of_job() == wanted, "nothing moves without need"
        service.run("drain", "--down", spare)
        service.until(lambda: nodes_of_job() == before, "it does not come back", LIMIT_S)
        job.wait_for_processes(4, LIMIT_S)
        print(f"it trains again after {passed_s()}, as another node was taken out of service")
        job.hurry()
        job.wait_for_end()
        job.assert_each_sample_once()
        stayed = {
            x["member"]
            for x in job.lines("began")
            if x["member"].rpartition(":")[0] in before - {slow}
        }
        assert stayed <= first, "the others' processes never restarted"
