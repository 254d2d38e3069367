"""The state: what each event does, whoever asked for it, and that nobody has what another one has."""

import dataclasses

import pytest
import services
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput._exits import SAVED
from jaxgoodput.cluster.catalogue import catalogue
from jaxgoodput.cluster.service.planning import decide
from jaxgoodput.cluster.service.record import commands, events
from jaxgoodput.cluster.service.record.commands import Caller, CommandRefused
from jaxgoodput.cluster.service.record.events import (
    JournalEntry,
    PlanMade,
    ReasonsGiven,
    RequestAnswered,
)
from jaxgoodput.cluster.service.record.state import (
    MOST_ANSWER_LETTERS,
    MOST_OVER_LETTERS,
    State,
    owners,
    step,
    work_of,
)
from jaxgoodput.cluster.service.wire import VERSION, Join, Report
from jaxgoodput.specs import Allocation, Hints, Node

OPERATOR = Caller("default", "operator")
RED, BLUE, AGENT = Caller("red", "user"), Caller("blue", "user"), Caller("red", "node")


class World:
    """A state that commands change, one second each."""

    def __init__(self):
        self.state = State()
        self.now_s = 0.0

    def do(self, outcome):
        self.now_s += 1.0
        for event in outcome.events:
            stamped = JournalEntry(self.state.seq + 1, self.now_s, 1e9 + self.now_s, event)
            self.state = step(self.state, stamped)
        return outcome.answer

    def join(self, name="n0", devices=8, instance="one"):
        node = Node(name=name, kind="cpu", num_devices=devices)
        return self.do(
            commands.join(self.state, Join(node=node, instance=instance, version=VERSION))
        )

    def submit(self, name="a", caller=OPERATOR, **spec):
        made = services.submission(name, **spec)
        return self.do(commands.submit(self.state, caller, made, f"secret of {name}"))

    def plan(self, **devices):
        """Give jobs devices: name=((node, indices), ...)."""
        changes, base = {}, {}
        for job, its in devices.items():
            base[job] = self.state.jobs[job].allocation.generation
            changes[job] = Allocation(devices=dict(its), generation=base[job] + 1)
        planned = PlanMade(changes=changes, solved_s=self.now_s, next_solve_s=self.now_s + 60)
        return self.do(commands.adopt(self.state, planned, base, ReasonsGiven(reasons={})))

    def report(self, job, node="n0", instance="one", **fields):
        attempt = self.state.jobs[job].attempt
        said = Report(job=job, attempt=attempt, **fields)
        return self.do(commands.report(self.state, node, instance, (said,)))

    def task(self, job, node="n0"):
        return next((t for t in work_of(self.state, node).tasks if t.job == job), None)


@pytest.fixture
def world():
    made = World()
    made.join()
    return made


def test_a_job_from_its_start_to_its_end(world):
    world.submit("a", min_devices=1, max_devices=4)
    assert world.task("a") is None
    world.plan(a={"n0": (0, 1)}.items())
    task = world.task("a")
    assert task.devices == (0, 1) and task.coordinates and task.runs and task.address is None
    assert (task.min_processes, task.max_processes) == (1, 4)
    version = world.state.nodes["n0"].version
    world.report("a", address="127.0.0.1:5000")
    assert world.task("a").address == "127.0.0.1:5000"
    assert world.state.nodes["n0"].version > version
    world.plan(a={"n0": (0, 1, 2, 3)}.items())
    assert world.task("a").attempt == task.attempt  # a resize needs no other coordinator
    world.report("a", code=0)
    job = world.state.jobs["a"]
    assert (job.phase, job.code, job.allocation.num_devices) == ("done", 0, 0)
    assert job.received_s == {"cpu": 2 * 2 + 4 * 1}
    assert job.num_changes == 1
    assert world.task("a") is None


def test_a_pause_has_the_coordinator_save_and_the_job_comes_back(world):
    world.submit("a")
    world.plan(a={"n0": (0,)}.items())
    world.report("a", address="x:1")
    first = world.state.jobs["a"].attempt
    world.plan(a={}.items())
    assert world.state.jobs["a"].phase == "waiting"
    task = world.task("a")
    assert not task.runs and task.coordinates and task.attempt == first
    world.report("a", code=SAVED)
    assert world.state.jobs["a"].phase == "waiting"
    world.plan(a={"n0": (5,)}.items())
    task = world.task("a")
    assert (task.runs, task.attempt, task.address) == (True, first + 1, None)


def test_released_devices_are_free_and_the_job_is_given_no_others(world):
    world.submit("a", min_devices=1, max_devices=4)
    world.plan(a={"n0": (0, 1, 2, 3)}.items())
    first = world.state.jobs["a"]
    assert _most_planned(world) == 4
    world.report("a", released=(1, 3, 7))
    job = world.state.jobs["a"]
    assert dict(job.allocation.devices) == {"n0": (0, 2)}
    assert job.allocation.generation == first.allocation.generation + 1
    assert (job.attempt, job.address, job.phase) == (first.attempt, first.address, "running")
    assert world.task("a").devices == (0, 2)
    assert not {("n0", 1), ("n0", 3)} & owners(world.state).keys()
    assert _most_planned(world) == 2
    world.report("a", released=(1, 3))  # said twice
    assert world.state.jobs["a"].allocation == job.allocation
    world.report("a", released=(0, 2))  # a job keeps its minimum
    assert world.state.jobs["a"].allocation == job.allocation


def test_only_the_node_with_the_devices_releases_them_and_only_in_this_attempt(world):
    world.join("n1")
    world.submit("a", min_devices=1, max_devices=4)
    world.plan(a={"n0": (0,), "n1": (0, 1)}.items())
    before = world.state.jobs["a"].allocation
    late = Report(job="a", attempt=world.state.jobs["a"].attempt - 1, released=(0,))
    world.do(commands.report(world.state, "n0", "one", (late,)))
    world.report("a", node="n0", released=(1,))
    assert world.state.jobs["a"].allocation == before
    world.report("a", node="n1", released=(1,))
    assert dict(world.state.jobs["a"].allocation.devices) == {"n0": (0,), "n1": (0,)}


def test_another_attempt_may_need_what_the_last_one_released(world):
    world.submit("a", min_devices=1, max_devices=4)
    world.plan(a={"n0": (0, 1, 2, 3)}.items())
    world.report("a", released=(2, 3))
    assert _most_planned(world) == 2
    world.report("a", code=137)
    assert _most_planned(world) == 4


def test_a_journal_of_before_ends_a_job_that_could_not_save_as_it_did_then(world):
    world.submit("a")
    world.plan(a={"n0": (0,)}.items())
    job = world.state.jobs["a"]
    event = events.CoordinatorEnded(job="a", attempt=job.attempt, code=75, why="a full disk")
    world.do(commands.Outcome((event,)))
    assert world.state.jobs["a"].phase == "failed"


def _most_planned(world):
    """How many devices a policy may give to the only job."""
    rules = decide.PlanRules(named=catalogue()["goodput"])
    (view,) = decide.views_of(world.state, world.now_s, rules)
    assert view.spec.min_devices == 1
    return view.spec.max_devices


@pytest.mark.parametrize(
    "code, phase, again",
    [(1, "failed", 0), (75, "running", 1), (-9, "running", 1), (137, "running", 1), (143, "running", 1)],
)  # fmt: skip
def test_what_an_exit_code_means(world, code, phase, again):
    world.submit("a")
    world.plan(a={"n0": (0,)}.items())
    first = world.state.jobs["a"].attempt
    world.report("a", code=code, why="because")
    job = world.state.jobs["a"]
    assert (job.phase, job.attempt) == (phase, first + again)
    assert ("because" in job.reason) == (phase == "failed")


@pytest.mark.parametrize("code", [-9, 75])
def test_a_coordinator_that_is_killed_or_cannot_save_again_and_again_fails_the_job(world, code):
    world.submit("a")
    world.plan(a={"n0": (0,)}.items())
    for _ in range(3):
        assert world.state.jobs["a"].phase == "running"
        world.report("a", code=code)
    assert world.state.jobs["a"].phase == "failed"


@pytest.mark.parametrize("code", [-9, 137, 75])
def test_a_job_that_saves_for_too_long_when_it_is_paused_waits(world, code):
    world.submit("a")
    first = 0
    for _ in range(4):
        world.plan(a={"n0": (0,)}.items())
        first = world.state.jobs["a"].attempt
        world.plan(a={}.items())
        world.report("a", code=code)
        assert world.state.jobs["a"].phase == "waiting"
    world.plan(a={"n0": (1,)}.items())
    assert world.state.jobs["a"].attempt == first + 1
    world.report("a", code=0)
    assert world.state.jobs["a"].phase == "done"


def test_a_job_that_ends_to_go_on_again_and_again_has_failed(world):
    world.submit("a", max_devices=2)
    for moved in range(20):  # for that is what moving it takes
        world.plan(a={"n0": (moved % 8,)}.items())
        world.report("a", code=SAVED)
        assert world.state.jobs["a"].phase == "running"
    for _ in range(9):
        world.report("a", code=SAVED)
        assert world.state.jobs["a"].phase == "running"
    world.report("a", code=SAVED)
    job = world.state.jobs["a"]
    assert job.phase == "failed" and "10 times in a row" in job.reason


def test_a_report_of_an_earlier_attempt_changes_nothing(world):
    world.submit("a")
    world.plan(a={"n0": (0,)}.items())
    old = Report(job="a", attempt=world.state.jobs["a"].attempt - 1, code=1)
    assert commands.report(world.state, "n0", "one", (old,)).events == ()


def test_what_is_of_an_earlier_job_of_the_name_changes_nothing(world):
    world.submit("a")
    world.plan(a={"n0": (0,)}.items())
    before = world.state.jobs["a"]
    late = Report(job="a", attempt=before.attempt, code=0)
    world.do(commands.cancel(world.state, OPERATOR, "a"))
    generation = world.state.jobs["a"].allocation.generation
    world.submit("a")
    assert world.state.jobs["a"].allocation.generation == generation
    assert world.task("a") is None  # it has no coordinator yet, whatever it counts on from
    stale = PlanMade(
        changes={"a": Allocation(devices={"n0": (7,)}, generation=1)},
        solved_s=1.0,
        next_solve_s=60.0,
    )
    world.do(commands.adopt(world.state, stale, {"a": 0}, ReasonsGiven(reasons={})))
    assert world.state.jobs["a"].allocation.num_devices == 0
    world.plan(a={"n0": (0,)}.items())
    assert world.state.jobs["a"].attempt == before.attempt + 1
    world.do(commands.report(world.state, "n0", "one", (late,)))
    assert world.state.jobs["a"].phase == "running"
    world.report("a", code=0)
    assert world.state.jobs["a"].phase == "done"


def test_a_node_that_goes_leaves_the_others_to_the_job(world):
    world.join("n1")
    world.submit("a", min_devices=2)
    world.submit("b", min_devices=2)
    world.plan(a={"n0": (0, 1), "n1": (0, 1)}.items(), b={"n1": (2, 3)}.items())
    a, b = world.state.jobs["a"], world.state.jobs["b"]
    assert (a.home, b.home) == ("n0", "n1")
    world.do(commands.change_node(world.state, "n1", "down", "gone"))
    after = world.state.jobs
    assert dict(after["a"].allocation.devices) == {"n0": (0, 1)}
    assert after["a"].attempt == a.attempt  # its coordinator is on the other one
    assert not after["b"].allocation.devices and after["b"].home is None
    assert after["b"].phase == "waiting"
    world.plan(b={"n0": (4, 5)}.items())
    assert world.state.jobs["b"].home == "n0"
    assert world.state.jobs["b"].attempt == b.attempt + 1


def test_a_job_whose_coordinators_node_goes_gets_another_one(world):
    world.join("n1")
    world.submit("a")
    world.plan(a={"n0": (0,), "n1": (0,)}.items())
    world.report("a", address="x:1")
    before = world.state.jobs["a"]
    assert before.home == "n0"
    world.do(commands.change_node(world.state, "n0", "down", "gone"))
    after = world.state.jobs["a"]
    assert (after.home, after.attempt, after.address) == ("n1", before.attempt + 1, None)
    assert world.task("a", "n1").coordinates


def test_coordinators_go_where_a_label_says(world):
    node = Node(name="head", kind="none", num_devices=0, labels={"coordinates": ""})
    world.do(commands.join(world.state, Join(node=node, instance="h", version=VERSION)))
    world.submit("a")
    world.plan(a={"n0": (0,)}.items())
    assert world.state.jobs["a"].home == "head"
    assert world.task("a", "head").coordinates and not world.task("a", "head").devices
    assert not world.task("a", "n0").coordinates


def test_another_agent_of_a_node_begins_anew(world):
    world.submit("a")
    world.plan(a={"n0": (0,)}.items())
    before = world.state.jobs["a"].attempt
    world.join(instance="two")
    job = world.state.jobs["a"]
    assert not job.allocation.devices and job.phase == "waiting"  # until the next plan
    with pytest.raises(CommandRefused, match="another agent has joined"):
        commands.report(world.state, "n0", "one", ())
    world.plan(a={"n0": (0,)}.items())
    assert world.state.jobs["a"].attempt == before + 1


def test_a_drained_node_stays_so_when_its_agent_comes_back(world):
    world.do(commands.change_node(world.state, "n0", "draining", "maintenance"))
    world.join(instance="two")
    assert world.state.nodes["n0"].node.state == "draining"
    assert world.do(commands.change_node(world.state, "n0", "draining", "x")).note


@pytest.mark.parametrize("comes", ["answers", "joins"])
@pytest.mark.parametrize("goes", ["silent", "farewell"])
def test_a_drain_lasts_until_it_is_undone_wherever_the_node_was_meanwhile(world, goes, comes):
    world.do(commands.change_node(world.state, "n0", "draining", "maintenance"))
    world.do(commands.change_node(world.state, "n0", "down", "gone", silent=goes == "silent"))
    if comes == "joins":
        world.join(instance="two")
    elif goes == "silent":
        world.do(commands.revive(world.state, "n0"))
    else:
        assert commands.revive(world.state, "n0").events == ()  # it is down for another reason
        return
    entry = world.state.nodes["n0"]
    assert (entry.node.state, entry.why) == ("draining", "maintenance")
    world.do(commands.change_node(world.state, "n0", "up", "an operator took it in again"))
    world.do(commands.change_node(world.state, "n0", "down", "nothing was heard", silent=True))
    world.do(commands.revive(world.state, "n0"))
    assert world.state.nodes["n0"].node.state == "up"


def test_a_silent_node_that_is_taken_out_of_service_does_not_come_back_by_itself(world):
    world.do(commands.change_node(world.state, "n0", "down", "nothing was heard", silent=True))
    world.do(commands.change_node(world.state, "n0", "down", "it was taken out of service"))
    entry = world.state.nodes["n0"]
    assert (entry.node.state, entry.why) == ("down", "it was taken out of service")
    world.do(commands.revive(world.state, "n0"))
    assert world.state.nodes["n0"].node.state == "down"
    assert world.do(commands.change_node(world.state, "n0", "down", "again")).note


def test_a_plan_gives_nothing_new_of_a_node_that_was_drained_meanwhile(world):
    world.submit("a", min_devices=1)
    world.submit("b")
    world.plan(a={"n0": (0, 1)}.items())
    world.do(commands.change_node(world.state, "n0", "draining", "maintenance"))
    world.plan(b={"n0": (5,)}.items())
    assert world.state.jobs["b"].allocation.num_devices == 0
    world.plan(a={"n0": (0, 1, 2)}.items())
    assert world.state.jobs["a"].allocation.num_devices == 2
    world.plan(a={"n0": (0,)}.items())
    assert world.state.jobs["a"].allocation.num_devices == 1


def test_a_plan_gives_no_devices_that_a_node_came_back_without(world):
    world.submit("a")
    world.do(commands.change_node(world.state, "n0", "down", "a reboot"))
    world.join(devices=4, instance="two")
    world.plan(a={"n0": (3, 4)}.items())
    assert world.state.jobs["a"].allocation.num_devices == 0
    world.plan(a={"n0": (2, 3)}.items())
    assert world.state.jobs["a"].allocation.num_devices == 2


def test_hints_are_of_the_generation_that_is_handed_out_and_newer_than_the_last(world):
    world.submit("a")
    world.plan(a={"n0": (0,)}.items())

    def hint(generation, number, progress):
        told = Hints(
            generation=generation, number=number, kind="cpu", num_devices=1, largest=1,
            progress=progress, base_batch_size=32, max_global_batch_size=64,
        )  # fmt: skip
        return world.do(commands.hint(world.state, OPERATOR, "a", told))

    hint(1, 100, 10.0)
    with pytest.raises(CommandRefused, match="are older than the stored"):
        hint(1, 99, 9.0)
    hint(1, 50, 11.0)  # the clock of its host was set back
    assert world.state.jobs["a"].hints.progress == 11.0
    hint(1, 51, 5.0)  # it went back to a checkpoint
    world.plan(a={"n0": (0, 1)}.items())
    for generation in (1, 3):
        with pytest.raises(CommandRefused, match=f"generation {generation} of job 'a'"):
            hint(generation, 200, 12.0)
    hint(2, 1, 12.0)


def test_a_plan_is_taken_less_what_has_become_impossible(world):
    world.submit("a")
    world.submit("b")
    world.submit("c")
    changes = {
        name: Allocation(devices={"n0": (index,)}, generation=1) for index, name in enumerate("abc")
    }
    planned = PlanMade(changes=changes, solved_s=1.0, next_solve_s=60.0)
    world.do(commands.cancel(world.state, OPERATOR, "a"))  # meanwhile
    world.plan(b={"n0": (7,)}.items())
    world.do(
        commands.adopt(world.state, planned, {"a": 0, "b": 0, "c": 0}, ReasonsGiven(reasons={}))
    )
    jobs = world.state.jobs
    assert dict(jobs["b"].allocation.devices) == {"n0": (7,)}
    assert dict(jobs["c"].allocation.devices) == {"n0": (2,)}
    assert jobs["a"].phase == "cancelled"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["plan", "plan", "down", "up", "cancel", "end", "again"]),
            st.integers(0, 3),
            st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), max_size=4, unique=True),
        ),
        max_size=20,
    )
)
def test_no_device_is_ever_two_jobs_and_generations_grow(happens):
    world = World()
    for name in ("n0", "n1"):
        world.join(name, 4)
    for name in "abcd":
        world.submit(name)
    seen = {}
    for what, which, devices in happens:
        job, node = "abcd"[which], f"n{which % 2}"
        if what == "plan" and not world.state.jobs[job].is_over:
            its = {}
            for place, index in devices:
                its.setdefault(f"n{place}", []).append(index)
            world.plan(**{job: [(name, tuple(local)) for name, local in its.items()]})
        elif what in ("down", "up"):
            world.do(commands.change_node(world.state, node, what, "why"))
        elif what == "cancel":
            world.do(commands.cancel(world.state, OPERATOR, job))
        elif what == "end" and world.state.jobs[job].home is not None:
            entry = world.state.jobs[job]
            world.report(job, node=str(entry.home), code=0)
        elif what == "again":
            world.join(node, 4, instance=f"{world.now_s}")
            world.join(node, 4, instance="one")
        count = sum(entry.allocation.num_devices for entry in world.state.jobs.values())
        assert len(owners(world.state)) == count
        for name, entry in world.state.jobs.items():
            key = name, entry.allocation.generation
            assert seen.setdefault(key, dict(entry.allocation.devices)) == dict(
                entry.allocation.devices
            )
        for (name, _), owner in owners(world.state).items():
            assert world.state.nodes[name].node.state != "down", owner


@pytest.mark.parametrize(
    "call, status, says",
    [
        (lambda w: w.submit("a", RED, tenant="blue"), 403, "says tenant 'blue'"),
        (lambda w: w.submit("a", RED, min_devices=9, max_devices=9), 409, "have 8"),
        (lambda w: w.submit("a", RED, kinds=("h200",)), 409, "may run on h200 only"),
        (lambda w: (w.submit("a", RED), w.submit("a", RED)), 409, "a job named 'a' exists"),
        (lambda w: (w.submit("a", RED), w.submit("a", BLUE)), 409, "a job named 'a' exists"),
        (lambda w: commands.cancel(w.state, RED, "x"), 404, "you have no job 'x'"),
        (lambda w: (w.submit("a", BLUE), commands.cancel(w.state, RED, "a")), 404, "no job 'a'"),
        (lambda w: (w.submit("a", BLUE), commands.cancel(w.state, AGENT, "a")), 404, "no job 'a'"),
        (lambda w: commands.change_node(w.state, "x", "down", ""), 404, "there is no node 'x'"),
        (lambda w: commands.check_agent(w.state, "x", "one"), 404, "must join first"),
    ],
)
def test_what_is_refused_and_why(world, call, status, says):
    with pytest.raises(CommandRefused, match=says) as found:
        call(world)
    assert found.value.status == status


def test_agents_that_cannot_come():
    node = Node(name="x", kind="cpu", num_devices=1)
    join = Join(node=node, instance="one", version=VERSION - 1)
    with pytest.raises(CommandRefused, match=f"speaks version {VERSION - 1}, but"):
        commands.join(State(), join)
    with pytest.raises(ValueError, match="joins with state 'down'"):
        dataclasses.replace(join, node=dataclasses.replace(node, state="down"))
    with pytest.raises(ValueError, match="1000000 devices"):
        dataclasses.replace(join, node=dataclasses.replace(node, num_devices=10**6))


def test_no_user_fills_the_memory_with_jobs_that_are_over_or_answers(world):
    long = ("x" * 10_000,) * 99
    for number in range(60):
        made = dataclasses.replace(services.submission(f"j{number}"), command=long)
        world.do(commands.submit(world.state, RED, made, "s"))
        world.do(commands.cancel(world.state, RED, f"j{number}"))
        said = RequestAnswered(request=f"r{number}", digest="", status=201, body="x" * 990_000)
        world.do(commands.Outcome((said,)))
    jobs, answers = world.state.jobs, world.state.answers
    assert 20 < len(jobs) and sum(990_000 for _ in jobs) <= MOST_OVER_LETTERS + 990_000
    assert 20 < len(answers) and sum(len(a.body) for a in answers.values()) <= MOST_ANSWER_LETTERS
    assert "j59" in jobs and "r59" in answers


@pytest.mark.parametrize("bound, most", [("MOST_OF_TENANT", 3), ("MOST_LETTERS_OF_TENANT", 55)])
def test_a_tenant_leaves_room_for_the_others(world, monkeypatch, bound, most):
    monkeypatch.setattr(commands, bound, most)
    with pytest.raises(CommandRefused, match="tenant 'red'.*Wait until some") as found:
        for number in range(10):
            world.submit(f"j{number}", RED)
    assert found.value.status == 409 and len(world.state.active) == 3
    world.submit("b", BLUE)
    for number in range(10):
        world.submit(f"o{number}", OPERATOR)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a" * 64, "a b", "a\n", "é"])
def test_names_that_could_be_paths_are_none(name):
    with pytest.raises(ValueError, match="is not a valid name for a job"):
        services.submission(name)
    node = Node(name=name, kind="cpu", num_devices=1)
    with pytest.raises(ValueError, match="is not a valid name for a node"):
        Join(node=node, instance="one", version=VERSION)
