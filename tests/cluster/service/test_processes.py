"""Processes of a node's agent: their lines, their ends, and that a device is one job's at a time."""

import dataclasses
import errno
import json
import os
import signal
import sys
import threading
import time
from typing import Any
from unittest import mock

import pytest
import services
import synthetic
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput import _disk
from jaxgoodput._fields.serial import decode, encode
from jaxgoodput.clock import FakeClock, SystemClock
from jaxgoodput.cluster.client import Client, RequestRefused, Unreachable
from jaxgoodput.cluster.service.node import jobs as node_jobs
from jaxgoodput.cluster.service.node.agent import NodeAgent, NodeAgentSettings, run_node
from jaxgoodput.cluster.service.node.jobs import LONGEST_BACKOFF_S, Jobs, LaunchSettings
from jaxgoodput.cluster.service.node.process import LONGEST_LINE, MOST_LINES, OutputBuffer, Process
from jaxgoodput.cluster.service.web.guard import Bounds
from jaxgoodput.cluster.service.wire import JobTask, NodeWork, Receipt, Submission
from jaxgoodput.launcher.elastic.fitness import HostReport, to_line
from jaxgoodput.launcher.variables import from_line
from jaxgoodput.observe.journal import Journal
from jaxgoodput.specs import JobSpec, Node

# Agents do not load JAX; a test's own process may have, which warns of every fork then.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


def start(code, **options):
    lines = []
    made = Process(
        [sys.executable, "-u", "-c", code], options.pop("cwd", "/"), "the secret",
        on_line=lines.append, clock=SystemClock(), **options,
    )  # fmt: skip
    return made, lines


def ended(process, limit_s=30.0):
    deadline = time.monotonic() + limit_s
    while (code := process.code()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return code


def test_a_process_hears_the_secret_and_its_lines_are_heard():
    process, lines = start("import sys; print(input()); print('x', file=sys.stderr); sys.exit(3)")
    assert ended(process) == 3
    assert lines == ["the secret", "x"]


def test_one_that_does_not_stop_is_killed():
    code = "import signal, time; signal.signal(15, 1); print('up'); time.sleep(60)"
    process, lines = start(code)
    while not lines:
        time.sleep(0.02)
    process.stop(0.3)
    assert process.code() is None
    assert ended(process) == -signal.SIGKILL


def test_a_folder_that_is_not_there():
    with pytest.raises(FileNotFoundError, match="there is no folder /nowhere"):
        start("pass", cwd="/nowhere")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel must be Linux")
def test_it_does_not_outlive_who_started_it(tmp_path):
    pid = os.fork()
    if not pid:
        process, _ = start(f"import time; open({str(tmp_path / 'up')!r}, 'w'); time.sleep(60)")
        (tmp_path / "pid").write_text(str(process._child.pid))
        time.sleep(60)
    while not (tmp_path / "up").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.02)
    child = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 10.0
    while True:
        try:
            with open(f"/proc/{child}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] in "ZX":
                    break
        except (FileNotFoundError, ProcessLookupError):
            break
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.02)


def test_of_too_many_lines_the_oldest_are_left_out_and_that_is_said():
    lines = OutputBuffer()
    for number in range(MOST_LINES + 5):
        lines.add(f"{number}")
    text = lines.take(10**6).splitlines()
    assert text[0] == "jaxgoodput: 5 lines are left out here"
    assert text[1:] == [f"{number}" for number in range(5, MOST_LINES + 5)]
    assert lines.take(100) == ""


def test_a_line_without_an_end_takes_no_more_memory_than_others():
    process, lines = start("for _ in range(300): print('x' * 100, end='')")
    assert ended(process) == 0
    assert max(map(len, lines)) <= LONGEST_LINE
    assert "".join(lines) == "x" * 30_000  # it is read in parts: none is held as a whole


def test_lines_that_could_not_be_told_come_first_the_next_time():
    lines = OutputBuffer()
    for number in range(10):
        lines.add(f"{number}")
    first = lines.take(9)
    lines.give_back(first)
    assert lines.take(1000).split() == [f"{number}" for number in range(10)]


class Fake(Process):
    """A process that ends when it is told."""

    def __init__(self, log, command, on_line):
        self.log, self.command, self.on_line = log, command, on_line
        self.is_told, self.exit = False, None
        log.append(self)

    def stop(self, grace_s):
        self.is_told = True

    def code(self):
        return self.exit


class FakeJobs(Jobs):
    """Jobs whose processes are not started."""

    def __init__(self, clock):
        super().__init__(LaunchSettings(node="n0", host="127.0.0.1"), clock)
        self.started = []

    def _start(self, job, options, on_line):
        return Fake(self.started, options, on_line)

    def of(self, command):
        return [x for x in self.started if command in x.command and x.exit is None]


def task(job="a", **fields):
    given = {
        "generation": 1, "devices": (0, 1), "command": ("python", "x.py"), "cwd": "/",
        "workdir": None, "devices_per_process": 1, "min_processes": 1, "max_processes": 8,
        "attempt": 1, "coordinates": True, "address": None, "runs": True, "secret": f"of {job}",
    }  # fmt: skip
    return JobTask(job=job, **{**given, **fields})


def devices_of(process):
    return process.command[process.command.index("--local-devices") + 1]


@pytest.fixture
def jobs():
    return FakeJobs(FakeClock(100.0))


def take(jobs, *tasks):
    jobs.take(NodeWork(node="n0", version=1, tasks=tasks))
    jobs.look()


def test_a_coordinator_then_a_process_for_each_device_and_what_changes(jobs):
    take(jobs, task())
    (coordinator,) = jobs.started
    assert "--nnodes" in coordinator.command and "1:8" in coordinator.command
    coordinator.on_line("jaxgoodput: the job is at 127.0.0.1:5000, for 1 to 8 hosts")
    (report,) = jobs.reports()
    assert (report.address, report.attempt) == ("127.0.0.1:5000", 1)
    take(jobs, task(address="127.0.0.1:5000"))
    assert sorted(map(devices_of, jobs.of("agent"))) == ["0", "1"]
    take(jobs, task(address="127.0.0.1:5000", devices=(1, 2), generation=2))
    first, second, third = jobs.of("agent")
    assert (first.is_told, second.is_told, third.is_told) == (True, False, False)
    assert devices_of(third) == "2"
    take(jobs, task(address="127.0.0.1:5000", devices=(), runs=False, generation=3))
    assert coordinator.is_told and second.is_told and third.is_told
    coordinator.exit = 143
    jobs.look()
    (report,) = jobs.reports()
    assert report.code == 143


def test_what_the_coordinator_reports_of_a_host_goes_to_the_service_and_not_to_the_users_log(agent):
    take(agent._jobs, task(devices=()))
    (coordinator,) = agent._jobs.started
    assert "--reports-hosts" in coordinator.command
    numbers = {"slow_ratio": 5.1, "saved": 0.6}
    for host in ("n2:0", "a host of its own", "n3:4"):
        report = HostReport(host=host, fault="slow", why="because", numbers=numbers)
        coordinator.on_line(f"jaxgoodput: {to_line(report)}")
    coordinator.on_line("jaxgoodput: host report {")
    service = FakeService(reports=Unreachable("later"))
    with pytest.raises(Unreachable):
        agent._tell_reports(service, {})
    service.refuses.clear()
    agent._tell_reports(service, {})
    ((_, body),) = service.told
    assert [(x.node, x.fault, x.slow_ratio, x.why) for x in body.nodes] == [
        ("n2", "slow", 5.1, "because"),
        ("n3", "slow", 5.1, "because"),
    ]
    assert body.coordinators == () and {x.attempt for x in body.nodes} == {1}
    (line,) = agent._jobs.lines(10_000)[0][2].splitlines()
    assert "a report of a host is ignored" in line


@given(
    st.dictionaries(
        st.from_regex("[A-Z][A-Z0-9_]{0,8}", fullmatch=True).filter(lambda x: x[:4] != "JAX_"),
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=9),
        max_size=3,
    )
)
def test_the_variables_of_a_job_reach_its_agents_and_no_command_line(variables):
    submission = Submission(
        spec=JobSpec(id="a"), command=("python", "x.py"), variables=tuple(variables.items())
    )
    assert decode(encode(submission), Submission, "it") == submission
    started = []

    class Recorded(Process):
        def __init__(self, *given, **options):
            started.append(given)

    jobs = Jobs(LaunchSettings(node="n0", host="127.0.0.1"), FakeClock(100.0))
    with mock.patch.object(node_jobs, "Process", Recorded):
        held = node_jobs.NodeJob(task(variables=submission.variables))
        for kind in ("agent", "run"):
            jobs._start(held, [kind], lambda line: None)
    (agent, _, told), (coordinator, _, secret) = started
    assert told.split("\n", 1)[0] == secret == "of a"
    lines = told.split("\n")[1:]
    assert [from_line(line) for line in lines] == ([variables] if variables else [])
    assert ("--env-stdin" in agent) == bool(variables) and "--env-stdin" not in coordinator


@pytest.mark.parametrize(
    "pairs, said",
    [
        ([("A", "1"), ("A", "2")], "--env A is given twice"),
        ([("JAXGOODPUT_SECRET", "x")], "set by the launcher"),
        ([("A-B", "x")], "is no name of a variable"),
        ([("A", "x\0")], "NUL character"),
    ],
)
def test_variables_that_no_process_can_have_are_refused(pairs, said):
    with pytest.raises(ValueError, match=said):
        Submission(spec=JobSpec(id="a"), command=("python", "x.py"), variables=tuple(pairs))


def test_a_device_is_the_next_jobs_when_the_last_process_has_gone(jobs):
    where = {"address": "x:1", "coordinates": False}
    take(jobs, task("a", devices=(0,), **where))
    (first,) = jobs.of("agent")
    take(jobs, task("b", devices=(0,), **where))
    assert first.is_told and jobs.of("agent") == [first]
    first.exit = 0
    jobs.look()
    jobs.look()
    (second,) = jobs.of("agent")
    assert second.command[second.command.index("--local-devices") + 1] == "0"


def test_devices_that_a_job_released_go_back_and_no_process_starts_there_again(jobs):
    where = {"address": "x:1", "coordinates": False, "attempt": 3}
    take(jobs, task(**where))
    first, second = jobs.of("agent")
    first.on_line("[n0:0.1] jaxgoodput: n0:0 is released: by a script")
    second.on_line("jaxgoodput: n0:1 is released: the remaining 9 samples need no more than 1 host")
    jobs.look()
    assert not second.is_told and not jobs.reports(), "it still leaves"
    second.exit = 0
    jobs.look()
    (report,) = jobs.reports()
    assert (report.released, report.attempt, report.code) == ((1,), 3, None)
    jobs._clock.advance(60.0)
    jobs.look()
    assert jobs.of("agent") == [first] and not jobs.reports()
    take(jobs, task(**where, devices=(0,), generation=2))
    take(jobs, task(**where, generation=3))
    assert [devices_of(x) for x in jobs.of("agent")] == ["0", "1"], "it was given to the job again"
    first.exit = 0
    jobs.look()
    assert not jobs.reports()


def test_a_device_that_was_released_is_used_by_the_next_attempt(jobs):
    where = {"coordinates": False, "devices": (0,)}
    take(jobs, task(**where, address="x:1"))
    (first,) = jobs.of("agent")
    first.on_line("jaxgoodput: n0:0 is released: it is not needed")
    first.exit = 0
    jobs.look()
    jobs._clock.advance(60.0)
    take(jobs, task(**where, address="x:2", attempt=2))
    assert len(jobs.of("agent")) == 1


def test_another_attempt_waits_for_the_end_of_the_last_one(jobs):
    take(jobs, task())
    (first,) = jobs.started
    take(jobs, task(attempt=2))
    assert first.is_told and len(jobs.started) == 1
    first.exit = 143
    jobs.look()
    jobs.look()
    assert len(jobs.started) == 2 and jobs.reports()[0].attempt == 1


def test_a_process_that_ends_by_itself_is_started_again_later_and_later(jobs):
    where = {"address": "x:1", "coordinates": False, "devices": (0,)}
    take(jobs, task(**where))
    waits = []
    for _ in range(4):
        (process,) = jobs.of("agent")
        process.exit = 1
        begun = jobs._clock.now()
        while not jobs.of("agent"):
            jobs._clock.advance(0.5)
            jobs.look()
        waits.append(jobs._clock.now() - begun)
    assert waits == sorted(waits) and waits[-1] >= 8.0


@pytest.mark.parametrize(
    "number, code", [(errno.EAGAIN, 143), (errno.EMFILE, 143), (errno.ENOENT, 2), (errno.E2BIG, 2)]
)
def test_a_coordinator_that_cannot_start_now_is_tried_again_later(jobs, monkeypatch, number, code):
    def refuses(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "_start", refuses)
        take(jobs, task(devices=()))
    (report,) = jobs.reports()
    assert (report.code, report.attempt) == (code, 1)
    if code == 2:
        return
    assert os.strerror(number) in jobs.lines(1000)[0][2]
    take(jobs, task(devices=(), attempt=2))
    assert not jobs.started  # what is short now is short in the next moment too
    jobs._clock.advance(LONGEST_BACKOFF_S)
    jobs.look()
    assert len(jobs.started) == 1 and not jobs.reports()


def test_a_job_that_is_over_ends_and_another_of_its_name_waits(jobs):
    where = {"address": "x:1", "coordinates": False, "devices": (0,)}
    take(jobs, task(**where))
    (first,) = jobs.of("agent")
    take(jobs, task(**{**where, "secret": "another's"}))
    assert first.is_told and jobs.of("agent") == [first]
    first.exit = 0
    jobs.look()
    jobs.look()
    (second,) = jobs.of("agent")
    assert second is not first
    take(jobs)
    assert second.is_told and not jobs.is_idle
    second.exit = 0
    jobs.look()
    assert jobs.is_idle


def test_jobs_of_one_name_one_after_another_are_all_looked_after(jobs):
    where = {"address": "x:1", "coordinates": False, "devices": (0,)}
    take(jobs, task(**where))
    take(jobs, task(**{**where, "secret": "the second's"}))
    (first,) = jobs.of("agent")
    take(jobs, task(**{**where, "devices": (1,), "secret": "the third's"}))
    (_, second) = jobs.of("agent")
    take(jobs, task(**{**where, "devices": (0, 1), "secret": "the fourth's"}))
    assert first.is_told and second.is_told and jobs.of("agent") == [first, second]
    first.on_line("of the first")
    second.on_line("of the second")
    told = sorted((job, text) for job, _, text in jobs.lines(1000))
    assert told == [
        ("a", "of the first\n"), ("a", "of the second\n")
    ]  # fmt: skip
    first.exit = 0
    jobs.look()
    jobs.look()
    assert [devices_of(x) for x in jobs.of("agent")] == ["1", "0"]


class FakeService(Client):
    """Answers an agent: of each path, what `refuses` says, and otherwise that it was taken."""

    def __init__(self, **refuses):
        super().__init__("http://127.0.0.1:1", "a token")
        self.refuses, self.told = refuses, []

    def call(self, method, *path, body=None, type_=Receipt, **_):
        size = len(json.dumps(encode(body)))
        if path[-1] in self.refuses:
            raise self.refuses[path[-1]]
        if size > Bounds().body_bytes:
            raise RequestRefused(413, "too large")
        self.told.append((path, body))
        return type_()


@pytest.fixture
def agent(tmp_path):
    made = agents(tmp_path, FakeService())
    made._jobs = FakeJobs(made._clock)
    return made


def agents(folder, service):
    node = Node(name="n0", kind="cpu", num_devices=2)
    part = NodeAgentSettings(
        node=node, place=LaunchSettings(node="n0", host="127.0.0.1"), folder=folder
    )
    return NodeAgent(part, lambda: service, FakeClock(100.0))


def test_an_address_is_told_however_much_jobs_write(agent):
    service = FakeService()
    take(agent._jobs, *(task(f"j{i}", devices=()) for i in range(40)))
    for process in agent._jobs.started:
        for _ in range(MOST_LINES):
            process.on_line("\x1b" * 1000)  # six bytes each, as JSON
        process.on_line("jaxgoodput: the job is at 127.0.0.1:5000, for 1 to 8 hosts")
    agent._tell_reports(service, {})
    agent._tell_lines(service)
    reports, lines = (body for _, body in service.told)
    assert len(reports.coordinators) == 40 and not reports.lines and not lines.coordinators
    heard = {one.job for one in lines.lines}
    for _ in range(39):  # the jobs take turns
        agent._tell_lines(service)
        heard |= {one.job for one in service.told[-1][1].lines}
    assert len(heard) == 40


def test_lines_that_are_too_many_for_the_service_are_left_out(agent):
    take(agent._jobs, task(devices=()))
    agent._jobs.started[0].on_line("x")
    agent._tell_lines(FakeService(reports=RequestRefused(413, "too large")))
    assert agent._jobs.lines(1000) == []
    agent._jobs.started[0].on_line("y")
    with pytest.raises(RequestRefused):
        agent._tell_lines(FakeService(reports=RequestRefused(429, "later")))
    assert [text for _, _, text in agent._jobs.lines(1000)] == ["y\n"]


def test_a_workdir_that_cannot_be_read_costs_its_own_job_alone(agent, tmp_path):
    writer = Journal(tmp_path / "good", clock=FakeClock(1.0))
    writer.write(synthetic.fit_start())
    writer.close()
    where = {"cwd": str(tmp_path), "devices": (0,)}
    take(agent._jobs, task("a", workdir="x" * 5000, **where), task("b", workdir="good", **where))
    service = FakeService()
    agent._tell_hints(service, {})
    assert [path for path, _ in service.told] == [("jobs", "b", "hints")]


def test_an_agent_a_part_of_which_fails_ends_and_is_started_again(tmp_path):
    class Broken(FakeService):
        def call(self, *path, type_=Receipt, **_):
            if "down" in path:
                return type_()
            raise ZeroDivisionError("a defect")

    agent = agents(tmp_path, Broken())
    assert agent.run(threading.Event()) == 1  # no code that says that it is not wanted


def test_processes_save_while_the_service_does_not_hear_the_farewell(agent):
    take(agent._jobs, task(devices=()))
    (process,) = agent._jobs.started
    was_told = []

    class Hangs(FakeService):
        def call(self, method, *path, type_: Any = Receipt, **_) -> Any:
            if path[-1] == "down":
                deadline = time.monotonic() + 5.0
                while not process.is_told and time.monotonic() < deadline:
                    time.sleep(0.01)
                was_told.append(process.is_told)
                process.exit = 143
            return type_() if type_ is Receipt else NodeWork(node="n0", version=0, tasks=())

    agent._client = Hangs
    told = threading.Event()
    told.set()
    assert agent.run(told) == 0
    assert was_told == [True]


@pytest.mark.parametrize("alone_s", [30.0, None])
def test_a_node_that_is_cut_off_ends_its_jobs_where_it_is_to_and_takes_them_up_again(
    agent, alone_s
):
    agent._part = dataclasses.replace(agent._part, alone_s=alone_s)
    told, where = threading.Event(), {"address": "x:1", "coordinates": False, "devices": (0,)}
    work = NodeWork(node="n0", version=1, tasks=(task(**where),))
    started, since = agent._jobs.started, []

    class CutOff(FakeService):
        def call(self, method, *path, type_: Any = Receipt, **_) -> Any:
            if type_ is not NodeWork:
                return type_()
            if not started:
                return work
            time.sleep(0.01)
            agent._clock.advance(1.0)
            since.append(agent._clock.now())
            if len(started) == 1 and not started[0].is_told and since[-1] - since[0] < 100.0:
                raise Unreachable("it is cut off")
            if len(started) == 1 and started[0].is_told:
                started[0].exit = 143
            else:
                told.set()
                started[-1].exit = 143
            return work  # of the same version

    agent._client = CutOff
    assert agent.run(told) == 0
    assert len(started) == (1 if alone_s is None else 2)
    assert since[-1] - since[0] < 100.0 or alone_s is None


@pytest.mark.parametrize("status, ends", [(401, 0), (403, 0), (408, 0), (502, 0), (409, 2)])
def test_only_another_agent_or_version_ends_an_agent(tmp_path, status, ends):
    told = threading.Event()

    class Refuses(FakeService):
        tries = 0

        def call(self, method, *path, type_=Receipt, **_):
            if path[-1] == "down":
                return type_()
            self.tries += 1
            if self.tries > 3:
                told.set()
            raise RequestRefused(status, "a reason")

    service = Refuses()
    assert agents(tmp_path, service).run(told) == ends
    assert service.tries == 1 if ends else service.tries >= 4


def test_a_path_that_no_file_system_takes_is_refused():
    with pytest.raises(ValueError, match="more than 4096 characters"):
        services.with_workdir(services.submission(), "x" * 5000)


def test_the_next_agent_waits_for_what_one_that_was_killed_has_left(tmp_path):
    with _disk.held(tmp_path) as lock:
        process, lines = start("input(); print('up'); import time; time.sleep(60)", lock=lock)
        while not lines:
            time.sleep(0.02)
    begun_s = (clock := FakeClock(100.0)).now()
    part = agents(tmp_path, FakeService())._part
    with pytest.raises(_disk.InUse):
        run_node(part, FakeService, clock=clock)
    assert clock.now() - begun_s >= 2 * part.place.grace_s
    process.stop(10.0)
    ended(process)
    with _disk.held(tmp_path):
        pass


def test_what_was_measured_under_another_generation_is_not_told_as_of_this_one(agent, tmp_path):
    clock = FakeClock(1.0)
    writer = Journal(tmp_path / "run", clock=clock)
    service, numbers = FakeService(), {}

    def tell(generation):
        where = {"cwd": str(tmp_path), "workdir": "run", "devices": (0,)}
        take(agent._jobs, task(generation=generation, **where))
        agent._tell_hints(service, numbers)
        return [body.generation for _, body in service.told]

    writer.write(synthetic.fit_start())
    assert tell(1) == [1]
    clock.advance(1.0)
    writer.write(synthetic.tune_end(100, 200.0, synthetic.START))
    assert tell(2) == [1]
    assert tell(2) == [1]
    clock.advance(1.0)
    writer.write(synthetic.window(110, 220.0, 7040, synthetic.START))
    assert tell(2) == [1, 2]
    writer.close()
