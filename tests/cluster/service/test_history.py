"""The journal of a service says which devices its jobs held, and they can be simulated again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput import cli
from jaxgoodput.cluster.service.record import events
from jaxgoodput.cluster.service.record.history import read_history
from jaxgoodput.cluster.service.record.journal import ClusterJournal
from jaxgoodput.cluster.service.wire import Submission
from jaxgoodput.cluster.simulate.recorded import read_history_scenario
from jaxgoodput.specs import Allocation, JobSpec, Node

NODES = (Node(name="n0", kind="h200", num_devices=8), Node(name="n1", kind="h200", num_devices=8))
ENDS = {
    "done": lambda id_: events.CoordinatorEnded(job=id_, attempt=1, code=0),
    "failed": lambda id_: events.CoordinatorEnded(job=id_, attempt=1, code=3),
    "cancelled": lambda id_: events.JobCancelled(job=id_),
    None: lambda _: None,
}


def submitted(id_: str, **spec) -> events.JobSubmitted:
    submission = Submission(spec=JobSpec(id=id_, **spec), command=("python", "train.py"))
    return events.JobSubmitted(submission=submission, secret="s")


def planned(id_: str, sizes: dict[str, int], generation: int = 0) -> events.PlanMade:
    devices = {name: tuple(range(count)) for name, count in sizes.items() if count}
    change = Allocation(devices=devices, generation=generation)
    return events.PlanMade(changes={id_: change}, solved_s=0.0, next_solve_s=1e9)


class Log:
    """A journal that is written event by event, at times of the test's choice."""

    def __init__(self, folder):
        self.folder = folder
        self.journal = ClusterJournal(folder)
        self.say(0.0, *(events.NodeJoined(node=node, instance="i") for node in NODES))

    def say(self, at_s, *found):
        self.journal.append([event for event in found if event is not None], at_s, 1e9 + at_s)


@given(
    st.lists(
        st.tuples(
            st.lists(
                st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 5000)), max_size=5
            ),
            st.sampled_from(list(ENDS)),
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=15, deadline=None)
def test_the_history_is_what_happened(tmp_path_factory, jobs):
    log, now_s, expected = Log(tmp_path_factory.mktemp("journal")), 10.0, []
    for number, (periods, end) in enumerate(jobs):
        # The same names come again and again, as the service allows once a job has ended.
        id_ = f"job{number % 2}" if all(e is not None for _, e in jobs) else f"job{number}"
        log.say(now_s, submitted(id_, max_devices=8))
        came_s, held = now_s, []
        for generation, (first, second, seconds) in enumerate(periods):
            sizes = {"n0": first, "n1": second}
            log.say(now_s, planned(id_, sizes, generation), events.ReasonsGiven(reasons={id_: "x"}))
            now_s += seconds
            if held and held[-1][2] == sizes:
                held[-1] = (held[-1][0] + seconds, held[-1][1], sizes)
            else:
                held.append((float(seconds), first + second, sizes))
        if end is not None:
            log.say(now_s, ENDS[end](id_))
        elif any(size for _, size, _ in held):
            log.say(
                now_s, planned(id_, {}, 99)
            )  # it waits again, so that it holds nothing at the end
        held = tuple((seconds, size) for seconds, size, _ in held if size)
        expected.append((id_, came_s, end or "waiting", held))
        now_s += 7.0
    log.journal.close()
    found = read_history(log.folder)
    got = [(job.spec.id, job.submitted_s, job.phase, job.held) for job in found.jobs]
    assert got == expected
    assert found.nodes == NODES


def test_what_a_job_still_holds_counts_until_the_last_event(tmp_path):
    log = Log(tmp_path)
    log.say(5.0, submitted("a"))
    log.say(10.0, planned("a", {"n0": 2}))
    log.say(40.0, submitted("b"))
    first, second = read_history(tmp_path).jobs  # while the service has it open
    assert (first.phase, first.held) == ("running", ((30.0, 2),))
    assert (second.phase, second.held) == ("waiting", ())
    log.journal.close()


def fill(folder):
    log = Log(folder)
    log.say(100.0, submitted("rigid", mode="rigid", num_devices=4, max_devices=4, weight=2.0))
    log.say(110.0, planned("rigid", {"n0": 4}))
    log.say(120.0, submitted("grew", min_devices=2, max_devices=16, kinds=("h200",), min_run_s=9.0))
    log.say(130.0, planned("grew", {"n1": 2}))
    log.say(1130.0, planned("grew", {"n1": 6}, 1))
    log.say(2110.0, ENDS["done"]("rigid"))
    log.say(2130.0, ENDS["cancelled"]("grew"))
    log.say(2140.0, submitted("waits"))
    log.say(2150.0, submitted("gone"))
    log.say(2160.0, ENDS["cancelled"]("gone"))
    log.journal.close()


def test_jobs_of_the_journal_are_simulated_with_their_own_terms(tmp_path):
    fill(tmp_path)
    scenario = read_history_scenario(tmp_path)
    rigid, grew = scenario.jobs
    assert (rigid.num_devices, rigid.duration_s, rigid.submit_s) == (4, 2000.0, 0.0)
    assert (rigid.mode, rigid.weight) == ("rigid", 2.0)
    # 2 devices for 1,000 s and 6 for 1,000 s: 4 on average.
    assert (grew.num_devices, grew.duration_s, grew.submit_s) == (4, 2000.0, 20.0)
    assert (grew.min_devices, grew.max_devices) == (2, 16)
    assert (grew.kinds, grew.min_run_s) == (("h200",), 9.0)
    assert scenario.cluster.nodes == NODES
    said = " ".join(scenario.remarks)
    assert "2 of 4 rows" in said and "1 still waiting" in said and "1 without a start" in said
    assert "1 job with other numbers of devices at different times" in said
    (only,) = read_history_scenario(tmp_path, states="done").jobs
    assert only.id == "rigid"


def test_an_elastic_history_keeps_the_work_that_was_done(tmp_path):
    fill(tmp_path)
    rigid, grew = read_history_scenario(tmp_path, elastic="serial=0").jobs
    assert rigid.mode == "rigid" and grew.mode is None
    assert (grew.duration_s, grew.num_devices) == (
        pytest.approx(2000.0),
        4,
    )  # linear: device-seconds


def test_the_command_asks_about_another_policy(tmp_path, capsys):
    fill(tmp_path)
    code = cli.main(["simulate", "--history", str(tmp_path), "--policy", "static,tiresias"])
    said = capsys.readouterr().out
    assert code == 0 and "2 jobs on 16 devices" in said and "tiresias" in said
    code = cli.main(
        ["simulate", "--history", str(tmp_path), "--cluster", "1x4", "--policy", "static"]
    )
    assert code == 0 and "2 jobs on 4 devices" in capsys.readouterr().out


def test_a_damaged_journal_is_said_and_left_as_it_is(tmp_path, capsys):
    fill(tmp_path)
    path = tmp_path / "journal.db"
    body = bytearray(path.read_bytes())
    at = body.index(b"grew")
    body[at : at + 4] = b"grow"
    path.write_bytes(body)
    code = cli.main(["simulate", "--history", str(tmp_path)])
    said = capsys.readouterr().err
    assert code == 2 and "cannot be read from position" in said
    assert path.read_bytes() == bytes(body)
