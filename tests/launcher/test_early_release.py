"""Hosts leave before a run ends if the rest of it does not need them: laws of the decision, and real jobs."""

import contextlib
import dataclasses
import itertools
import re
import sys

import elastic_worker
import paced_worker
import processes
import pytest
import test_elastic
import test_rendezvous
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.launcher import early_release
from jaxgoodput.launcher.elastic import events as ev
from jaxgoodput.launcher.elastic import rendezvous as rv
from jaxgoodput.launcher.elastic.fitness import Check, Pace
from jaxgoodput.launcher.elastic.state import Host, Limits, Rendezvous, Stage
from jaxgoodput.launcher.release_plan import FEWEST_HOSTS, ReleaseRecord, RestOfRun, best_release

# -- the decision --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """The rest of a run whose hosts keep their speed: what would happen if some of them left."""

    samples_s: dict  # by process
    hosts: dict  # by process
    whole: int
    part: int
    is_leased: bool
    left: int
    other_s: float
    trained_s: float
    regroup_s: float
    least: int
    evaluates: bool

    def step_s(self, names, count):
        """A step, by playing it: every process takes what falls to it."""
        free_s = dict.fromkeys(names, 0.0)
        if self.is_leased:
            left = count
            while left > 0:
                name = min(free_s, key=lambda n: (free_s[n], self.samples_s[n]))
                free_s[name] += self.part * self.samples_s[name]
                left -= self.part
            for name in names:  # who gets no part computes an empty one
                free_s[name] = max(free_s[name], self.part * self.samples_s[name])
        else:
            places = itertools.cycle(names)
            for _ in range(count):
                name = next(places)
                free_s[name] += self.samples_s[name]
            # The shapes are the same everywhere: a process with fewer samples pads.
            free_s = {n: self.samples_s[n] * -(-count // len(names)) for n in names}
        return max(free_s.values()) + self.other_s

    def play(self, real_regroup_s, *, releases=True):
        """Return when it ends, its host-seconds, the hosts at the end, and how often hosts left."""
        names, left = list(self.samples_s), self.left
        at_s, host_s, delayed_s, times = self.trained_s, 0.0, 0.0, 0
        while left:
            found = None
            if releases:
                found = best_release(
                    self.rest(names, left, at_s, delayed_s),
                    lambda count: self.regroup_s,
                    is_usable=lambda count: count >= self.least,
                )
            if found is not None:
                before = len(names)
                names = [n for n in names if self.hosts[n] not in found.hosts]
                assert len({self.hosts[n] for n in names}) == found.num_hosts
                assert len(names) == found.num_processes and self.least <= len(names) < before
                assert found.num_hosts >= FEWEST_HOSTS, "the state is in memory at least twice"
                delayed_s += max(found.later_s, 0.0)
                times += 1
                at_s += real_regroup_s
                host_s += real_regroup_s * found.num_hosts
            took_s = self.step_s(names, min(left, self.whole))
            at_s += took_s
            host_s += took_s * len({self.hosts[n] for n in names})
            left -= min(left, self.whole)
        return at_s, host_s, {self.hosts[n] for n in names}, times

    def rest(self, names, left, at_s, delayed_s):
        kind = Pace(
            sample_s=0.0,
            step_s=self.step_s(names, self.whole),
            part=self.part,
            whole=self.whole,
            is_leased=self.is_leased,
            left=left,
            evaluates=self.evaluates,
        )
        return RestOfRun(
            samples_s={n: self.samples_s[n] for n in names},
            hosts={n: self.hosts[n] for n in names},
            kind=kind,
            trained_s=at_s,
            delayed_s=delayed_s,
        )


@st.composite
def runs(draw):
    slots = draw(st.lists(st.integers(1, 2), min_size=2, max_size=5))
    hosts = {f"h{i}.{k}": f"h{i}" for i, count in enumerate(slots) for k in range(count)}
    speeds = st.sampled_from([0.001, 0.0011, 0.002, 0.005, 0.02])
    part = draw(st.integers(1, 8))
    whole = part * draw(st.integers(1, 12))
    return Run(
        samples_s={name: draw(speeds) for name in hosts},
        hosts=hosts,
        whole=whole,
        part=part,
        is_leased=draw(st.booleans()),
        left=draw(st.integers(0, 40 * whole)),
        other_s=draw(st.sampled_from([0.0, 0.001, 0.05])),
        trained_s=draw(st.sampled_from([0.0, 1.0, 10.0, 200.0])),
        regroup_s=draw(st.sampled_from([0.02, 0.2, 2.0])),
        least=draw(st.integers(1, 2)),
        evaluates=draw(st.booleans()),
    )


@settings(max_examples=400, deadline=None)
@given(runs(), st.floats(0.0, 1.0))
def test_no_run_ends_later_than_a_fiftieth_and_host_seconds_are_only_saved(run, share):
    end_s, host_s, _, times = run.play(share * run.regroup_s)
    plain_end_s, plain_host_s, _, _ = run.play(0.0, releases=False)
    assert end_s <= 1.02 * plain_end_s + 1e-9
    assert host_s < plain_host_s if times else (end_s, host_s) == (plain_end_s, plain_host_s)


@settings(max_examples=200, deadline=None)
@given(runs())
def test_a_host_that_stays_in_any_case_is_never_let_go_and_evaluations_take_no_longer(run):
    rest = run.rest(list(run.samples_s), run.left, run.trained_s, 0.0)
    slowest = max(run.samples_s, key=lambda n: run.samples_s[n])
    kept = run.hosts[slowest]
    found = best_release(rest, lambda count: 0.0, is_usable=lambda count: True, kept=(kept,))
    if found is not None:
        assert kept not in found.hosts
        names = [n for n in run.samples_s if run.hosts[n] not in found.hosts]
        if run.evaluates:
            assert rest.evaluation_s(names) <= rest.evaluation_s(run.samples_s)


EVEN = Run(
    samples_s={"a": 1e-3, "b": 1e-3, "c": 2e-3, "d": 2e-3},
    hosts={name: name for name in "abcd"},
    whole=400,
    part=100,
    is_leased=False,
    left=40_000,
    other_s=0.0,
    trained_s=200.0,
    regroup_s=2.0,
    least=1,
    evaluates=False,
)


@pytest.mark.parametrize(
    ("changed", "released"),
    [
        ({}, "cd"),  # a step takes 0.2 s with all, and with the two fast ones
        ({"regroup_s": 3.0}, ""),  # more than a hundredth of 220 s
        ({"samples_s": {"a": 1e-3, "b": 1e-3, "c": 1e-3, "d": 1e-3}}, ""),  # all of them help
        ({"samples_s": {"a": 1e-3, "b": 1e-3, "c": 1e-3, "d": 4e-3}}, "d"),
        ({"trained_s": 15.0}, ""),  # shorter than what is left
        ({"left": 0}, ""),
        ({"left": 400}, ""),  # one step is over before the others have regrouped
        ({"is_leased": True, "part": 1}, ""),  # each takes what it can
        ({"samples_s": {"a": 1e-3, "b": 2e-3, "c": 8e-3, "d": 8e-3}}, "cd"),  # one alone would be as fast
        ({"samples_s": {"a": 1e-3, "b": 9e-3}}, ""),
        ({"samples_s": {"a": 1e-3}}, ""),
        ({"is_leased": True}, "cd"),  # four parts: the slow ones have one each, as long as two of a fast one
    ],
)  # fmt: skip
def test_hosts_that_add_nothing_are_let_go_and_others_stay(changed, released):
    run = dataclasses.replace(EVEN, **changed)
    found = best_release(
        run.rest(list(run.samples_s), run.left, run.trained_s, 0.0),
        lambda count: run.regroup_s,
        is_usable=lambda count: True,
    )
    assert sorted(released) == sorted(() if found is None else found.hosts)


def test_what_a_regroup_costs_is_measured_and_unknown_sizes_count_as_the_longest():
    record = ReleaseRecord()
    assert record.regroup_s(2) == float("inf"), "nothing was measured yet, so no host goes"
    record = dataclasses.replace(record, pauses_s={4: 7.0, 3: 2.5, 1: 0.1})
    assert [record.regroup_s(n) for n in (4, 3, 2, 1)] == [7.0, 2.5, 7.0, 2.0]


# -- the state machine ---------------------------------------------------------------------------------


class Machine:
    """A job of one process per host that trains for 300 s, in a run that is in its last epoch."""

    def __init__(self, num_hosts=4, *, beside=(), surplus=0, **limits):
        self.names = [f"h{i}" for i in range(num_hosts + surplus)]
        self.now_s, self.step = 100.0, 1
        limits = {"least": 1, "most": num_hosts, "exclude_slow": 0.0, "silent_s": 1e4, **limits}
        self.machine = Rendezvous(limits=Limits(**limits))
        for name in self.names:
            self.happen(ev.HostArrived(name, is_beside=name in beside))
            self.happen(ev.HostExamined(name, Check(product_s=1e-3, send_s=1e-3)))
            self.happen(ev.ProcessJoined(f"{name}.1", name))
        for name in self.names:
            self.happen(ev.Ready(f"{name}.1", 0, -1))
        self.go()
        self.now_s += 300.0

    def happen(self, event):
        self.machine, actions = rv.step(self.machine, event, self.now_s)
        return list(actions)

    def go(self):
        """Have the forming generation train, with a first step that ends after a second."""
        for name in self.machine.ranks:
            self.happen(ev.SetUp(name, self.machine.generation))
        assert self.machine.stage is Stage.TRAINING
        self.beat()
        self.now_s, self.step = self.now_s + 1.0, self.step + 1
        self.beat()

    def beat(self, samples_s=None, **fields):
        """A heartbeat of each process; what follows."""
        found = []
        for name in self.machine.ranks:
            pace = None
            if samples_s is not None:
                made = {"step_s": 0.2, "part": 100, "whole": 400, "is_leased": False, **fields}
                pace = Pace(sample_s=samples_s[name], **made)
            found += self.happen(ev.Beat(name, self.machine.generation, self.step, pace))
        return found

    def windows(self, slow=("h2.1", "h3.1"), count=3, **fields):
        """Reports of processes of which some are twice as slow; who is let go."""
        samples_s = {n: 2e-3 if n in slow else 1e-3 for n in self.machine.ranks}
        fields = {"left": 40_000, **fields}
        found = [x for _ in range(count) for x in self.beat(samples_s, **fields)]
        return found, sorted(x.host for x in found if isinstance(x, ev.LetGo))

    def leave(self):
        """Have all come back, and the released ones end."""
        actions = []
        for name in self.machine.present_ranks:
            actions += self.happen(ev.Ready(name, self.machine.generation, self.step))
        for released in [x for x in actions if isinstance(x, ev.Release)]:
            for name in released.members:
                actions += self.happen(ev.ProcessExited(name, 0))
                actions += self.happen(ev.AgentLost(name.partition(".")[0]))
        return actions


def test_two_hosts_that_add_nothing_leave_and_none_is_asked_back():
    job = Machine()
    actions, gone = job.windows()
    assert gone == ["h2", "h3"]
    assert [x for x in actions if isinstance(x, ev.EndGeneration)]
    told = [x.decision for x in actions if isinstance(x, ev.Tell)]
    assert [x.decision for x in told] == ["released"] * 2
    assert "remaining 40000 samples need no more than 2 hosts" in told[0].why
    actions = job.leave()
    (formed,) = (x for x in actions if isinstance(x, ev.Form))
    assert set(formed.ranks) == {"h0.1", "h1.1"} and formed.news == tuple(told)
    job.go()
    assert not [x for x in actions if isinstance(x, ev.StartProcess)]
    for name in ("h2", "new"):
        actions = job.happen(ev.HostArrived(name))
        assert [type(x) for x in actions] == [ev.LetGo], "it is told that it is not needed"
        job.happen(ev.AgentLost(name))
    assert job.windows(slow=())[1] == [], "both that are left help"


def test_a_host_may_come_again_once_another_has_been_lost():
    job = Machine()
    job.windows()
    job.leave()
    job.go()
    job.happen(ev.ProcessExited("h1.1", -9))
    job.happen(ev.AgentLost("h1"))
    actions = job.happen(ev.HostArrived("h2"))
    assert any(isinstance(x, ev.Examine) and x.host == "h2" for x in actions)


def test_a_job_that_falls_back_to_a_checkpoint_takes_hosts_in_again():
    job = Machine()
    job.windows()
    job.leave()
    job.go()
    # Nobody is left who holds the state: two new processes begin at the last checkpoint.
    started = []
    for name in ("h0", "h1"):
        actions = job.happen(ev.ProcessExited(f"{name}.1", -9))
        started += [x.host for x in actions if isinstance(x, ev.StartProcess)]
    assert started == ["h0", "h1"]
    for name in started:
        job.happen(ev.ProcessJoined(f"{name}.2", name))
    for name in started:
        job.happen(ev.Ready(f"{name}.2", 0, -1))
    assert job.machine.stage is Stage.FORMING and not job.machine.holders
    actions = job.happen(ev.HostArrived("h2"))
    assert [type(x) for x in actions] == [ev.Examine]


@pytest.mark.parametrize(
    ("left", "is_wanted"), [(40_000, False), (40_400, False), (40_401, True), (None, True)]
)
def test_a_run_that_has_more_to_do_than_at_the_release_takes_hosts_in_again(left, is_wanted):
    """One step more may be left, because the process that was ahead has gone."""
    job = Machine()
    job.windows()
    job.leave()
    job.go()
    job.windows(slow=(), count=1, left=left)
    actions = job.happen(ev.HostArrived("h2"))
    assert [type(x) for x in actions] == [ev.Examine if is_wanted else ev.LetGo]


def test_hosts_that_are_left_out_are_let_go_too():
    job = Machine(5, least=1)
    job.machine = dataclasses.replace(
        job.machine,
        hosts={
            **job.machine.hosts,
            "slow": Host(until_s=1e9),
            "gone": Host(until_s=1e9, is_here=False),
        },
    )
    actions, gone = job.windows(slow=("h3.1", "h4.1"), count=4)
    assert "slow" in gone and "gone" not in gone
    told = {x.decision.host for x in actions if isinstance(x, ev.Tell)}
    assert told == set(gone)
    job.now_s = 2e9
    assert not [x for x in job.happen(ev.Tick()) if isinstance(x, ev.Examine)]


@pytest.mark.parametrize(
    ("made", "reported", "released"),
    [
        ({}, {}, ["h2", "h3"]),
        ({}, {"count": 2}, []),  # too few reports
        ({}, {"left": None}, []),  # before the last epoch, or no end is known
        ({}, {"left": 399}, []),  # over before the others have regrouped
        ({"least": 4}, {}, []),
        ({"least": 3}, {}, []),  # of three, one is slow
        ({"group_size": 2}, {}, []),
        ({"beside": ("h3",)}, {}, []),  # the coordinator's own, and with it two add nothing less
        ({"beside": ("h0", "h1", "h2", "h3")}, {}, ["h2", "h3"]),  # hosts that are only simulated
        ({"surplus": 2}, {}, ["h2", "h3", "h4", "h5"]),  # spares that wait
    ],
)  # fmt: skip
def test_who_is_let_go(made, reported, released):
    assert Machine(**made).windows(**reported)[1] == released


def test_a_host_that_leaves_by_itself_or_a_stop_comes_first():
    job = Machine()
    job.windows(count=2)
    job.happen(ev.Leave("h0"))
    assert job.windows()[1] == []
    job = Machine()
    job.windows(count=2)
    job.happen(ev.Stop())
    assert job.windows()[1] == []


def test_a_new_set_of_processes_is_measured_anew():
    job = Machine()
    job.windows(count=2)
    job.happen(ev.ProcessExited("h3.1", -9))
    for name in job.machine.present_ranks:
        job.happen(ev.Ready(name, job.machine.generation, job.step))
    job.go()
    assert job.windows(slow=("h2.1",), count=2)[1] == []


class EndingWorld(test_rendezvous.World):
    """A world whose run is always as near to its end, so that hosts may be released at any moment."""

    def __init__(self, limits, seed):
        super().__init__(limits, seed)
        self.left = self.rng.choice([120, 600, 1200])
        self.let_go = {}  # by host: whether its agent has ended

    def happen(self, event):
        if isinstance(event, ev.Beat) and event.pace is not None:
            event = dataclasses.replace(event, pace=dataclasses.replace(event.pace, left=self.left))
        super().happen(event)

    def check(self, before, actions):
        super().check(before, actions)
        for action in actions:
            if isinstance(action, ev.LetGo):
                left = [m for m in self.machine.members.values() if not m.leaves]
                assert len(left) >= self.machine.limits.least
                assert all(m.host != action.host for m in left)
            if isinstance(action, ev.Admit | ev.Examine):
                assert not early_release.has_enough(self.machine), "none is asked back"

    def act(self, action):
        if isinstance(action, ev.LetGo):
            self.let_go.setdefault(action.host, False)
            self.hosts.discard(action.host)
            self.gone_hosts.add(action.host)
        super().act(action)

    def advance(self, dt):
        super().advance(dt)
        living = {process.host for process in self.living()}
        for host, has_ended in list(self.let_go.items()):
            if not has_ended and host not in living:
                self.let_go[host] = True
                self.happen(ev.AgentLost(host))


@pytest.mark.slow
@pytest.mark.parametrize("num_examples", [50, pytest.param(2000, marks=pytest.mark.nightly)])
def test_in_any_order_of_faults_the_minimum_stays_and_training_goes_on(num_examples):
    num_released = 0

    def live(seed, least, num_hosts):
        nonlocal num_released
        limits = dataclasses.replace(test_rendezvous.FAST, least=least, exclude_slow=0.0)
        world = EndingWorld(limits, seed)
        rng = world.rng
        for _ in range(num_hosts):
            world.add_host()
        world.slow = {host: rng.choice([1.0, 3.0, 10.0]) for host in sorted(world.hosts)}
        for _ in range(60):
            world.advance(rng.choice([0.1, 0.5, 1.0]))
            fault, living = rng.random(), world.living()
            if fault < 0.04 and living:
                world.end(rng.choice(living), -9)
            elif fault < 0.06 and living:
                world.freeze(rng.choice(living).name)
            elif fault < 0.09 and len(world.hosts) < 6:
                world.add_host()
            elif fault < 0.11 and len(world.hosts) > least:
                host = rng.choice(sorted(world.hosts))
                world.hosts.discard(host)
                world.gone_hosts.add(host)
                world.happen(ev.Leave(host))
        for _ in range(60):
            world.advance(1.0)
        if len(world.hosts) < least:  # others have left by themselves, and new ones are let in
            world.add_host()
            for _ in range(30):
                world.advance(1.0)
        before = world.steps
        for _ in range(5):
            world.advance(1.0)
        assert world.ended is None and world.steps > before
        num_released += len(world.let_go)

    worlds = given(st.integers(0, 10**9), st.integers(1, 2), st.integers(3, 6))
    settings(max_examples=num_examples, deadline=None)(worlds(live))()
    assert num_released, "the worlds are such that hosts are released"


# -- real jobs -----------------------------------------------------------------------------------------

SAMPLES, EPOCHS = 9600, 1
PATIENT = ("--silent-s", "60")  # a busy machine must not look like a broken one


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("split", "slow"),
    [
        ("even", ("x3", "x6")),
        pytest.param("leased", ("x6", "x12"), marks=pytest.mark.nightly),
    ],
    ids=lambda x: str(x),
)
def test_slow_hosts_leave_with_exit_code_0_and_the_job_ends(split, slow):
    """Real coordinator, agents and processes, whose steps are pauses."""
    names = ("a", "b", *slow)
    arguments = ("800", split, ",".join(names))
    command = ["--", "python", paced_worker.__file__, *arguments]
    with contextlib.ExitStack() as stack:

        def start(*options):
            cli = [sys.executable, "-m", "jaxgoodput.cli", *options, *PATIENT, *command]
            secret = {"JAXGOODPUT_SECRET": test_elastic.SECRET}
            return stack.enter_context(processes.Job(cli, secret))

        options = ("--nnodes", "1:4", "--local-hosts", "0", "--join-s", "120")
        job = start("run", "--rdzv-endpoint", "127.0.0.1:0", "--exclude-slow", "0", *options)
        told = job.wait_for("the job is at ").split("the job is at ")[1].split(",")[0]
        agents = {n: start("agent", "--name", n, "--rdzv-endpoint", told) for n in names}
        assert job.wait(limit_s=600.0).code == 0, job.text()
        gone = set(re.findall(r"jaxgoodput: (\w+) is released: ", job.text()))
        assert slow[-1] in gone <= set(slow), job.text()
        for name, agent in agents.items():
            finished = agent.wait()
            assert finished.code == 0, finished
            is_told = f"{name} is released: the remaining" in finished.out + finished.err
            assert is_told == (name in gone), finished
        assert job.text().count("has joined") == len(names), "none has come again"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.multihost
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("slow", "settings"),
    [
        (("x3", "x6"), ()),
        (("x6", "x12"), ("execution.leases=true", "batch.micro=[1, 1]")),
    ],
    ids=["even", "leased"],
)
def test_slow_hosts_leave_in_the_last_epoch_and_every_sample_is_applied_once_an_epoch(
    tmp_path, slow, settings
):
    names = ("a", "b", *slow)
    with test_elastic.Cluster(
        tmp_path / "job",
        epochs=EPOCHS,
        step_s=0.1,
        nodes="1:4",
        options=("--join-s", "60", "--exclude-slow", "0", *PATIENT),
        settings=(elastic_worker.BY_ROW, f"{elastic_worker.SAMPLES}{SAMPLES}", *settings),
    ) as cluster:
        cluster.agent(*names, silent_s=60)
        cluster.coordinator.wait_for("is released: ", limit_s=300.0)
        cluster.hurry()
        finished = cluster.coordinator.wait(limit_s=200.0)
        assert finished.code == 0, cluster.told()
        # The two slow ones go together, or the slowest one goes first.
        gone = set(re.findall(r"jaxgoodput: (\w+) is released: ", cluster.coordinator.text()))
        assert slow[-1] in gone <= set(slow), cluster.told()
        for name in names:
            ended = cluster.agents[name].wait()
            assert ended.code == 0, cluster.told()
            assert (f"{name} is released: the remaining" in cluster.agents[name].text()) == (
                name in gone
            )
        judged = [x for x in cluster.lines("judged") if x["decision"] == "released"]
        assert {x["host"] for x in judged} == gone
        ends = cluster.lines("end")
        assert len(ends) == len(names) - len(gone)
        for end in ends:
            assert end["count"] == [float(EPOCHS)] * SAMPLES
            assert end["w"] == ends[0]["w"]
        assert cluster.coordinator.text().count("is checked again") == 0
        assert len(cluster.lines("began")) == len(names), "no process was started again"
