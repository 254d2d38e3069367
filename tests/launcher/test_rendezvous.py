"""Laws of the coordinator's state machine under any order of events: nobody is left behind."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.launcher import rendezvous as rv

FAST = rv.Limits(
    least=1,
    most=4,
    max_restarts=1000,
    join_s=1.0,
    admit_every_s=1.0,
    silent_s=5.0,
    patience_s=20.0,
    starting_s=30.0,
)


class Process:
    """A worker as the coordinator sees it: obeys what it is told, some time later."""

    def __init__(self, name, host, starts_s):
        self.name, self.host = name, host
        self.starts_s = starts_s
        self.generation = 0
        self.step = -1
        self.state = "starting"  # waiting, set, training, stopped, dead
        self.form = None
        self.regroup = False
        self.at_s = 0.0


class World:
    """Processes, a coordinator, and a network that delivers what it delivers in order."""

    def __init__(self, limits, seed):
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.machine = rv.Rendezvous(limits=limits)
        self.processes = {}
        self.hosts = set()
        self.count = 0
        self.steps = 0  # of the run
        self.stopped = set()  # processes that stand still
        self.ended = None
        self.log = []
        self.gone_hosts = set()
        self.starts = []

    def happen(self, event):
        before = self.machine
        self.machine, actions = rv.step(before, event, self.now_s)
        self.check(before, actions)
        for action in actions:
            self.log.append((self.now_s, action))
            self.act(action)

    def check(self, before, actions):
        machine = self.machine
        assert machine.generation >= before.generation
        for action in actions:
            if isinstance(action, rv.Form):
                assert (
                    action.generation == before.generation + 1
                    or machine.generation > before.generation
                )
                assert machine.limits.least <= len(action.ranks) <= machine.limits.most
                assert len(set(action.ranks)) == len(action.ranks)
                # What any process has done that lives, the next generation goes on from.
                done = [p.step for p in self.living() if p.name in machine.members]
                assert action.holds == max(done)
                self.steps = min(self.steps, max(action.holds, 0))
            if isinstance(action, rv.Go):
                assert all(name in machine.members for name in machine.ranks)

    def act(self, action):
        match action:
            case rv.Regroup(members, generation):
                for name in members:
                    process = self.processes[name]
                    process.regroup |= process.generation == generation
            case rv.Form(_, ranks):
                for name in ranks:
                    process = self.processes.get(name)
                    if process is not None and process.state == "waiting":
                        process.state, process.form = "formed", action
            case rv.Go(generation):
                for name in self.machine.ranks:
                    process = self.processes.get(name)
                    if process is not None and process.state == "set":
                        process.state, process.generation = "training", generation
                        process.step = max(process.form.holds, 0)
                        process.regroup = False
            case rv.Again(generation, members):
                for name in members:
                    process = self.processes.get(name)
                    if process is not None and process.state in ("formed", "set"):
                        process.state = "rejoining"
            case rv.Kill(name, _):
                process = self.processes.get(name)
                if process is not None:
                    self.end(process, -9)
            case rv.Start(host, after_s):
                if host in self.hosts:
                    self.starts.append((self.now_s + after_s, host))
            case rv.Release(members):
                for name in members:
                    if name in self.processes:
                        self.end(self.processes[name], 0)
            case rv.End(code, _):
                self.ended = code

    def start(self, host):
        self.count += 1
        process = Process(f"{host}.{self.count}", host, self.now_s + self.rng.uniform(0.5, 3))
        self.processes[process.name] = process
        self.happen(rv.Joined(process.name, host))

    def end(self, process, code):
        if process.state == "dead":
            return
        process.state = "dead"
        self.stopped.discard(process.name)
        self.happen(rv.Gone(process.name, code))

    def add_host(self):
        host = f"h{len(self.hosts) + len(self.gone_hosts)}"
        self.hosts.add(host)
        self.happen(rv.Arrived(host))
        self.start(host)

    def living(self):
        return [p for p in self.processes.values() if p.state != "dead"]

    def advance(self, dt):
        self.now_s += dt
        for at_s, host in list(self.starts):
            if at_s <= self.now_s:
                self.starts.remove((at_s, host))
                self.start(host)
        for process in self.living():
            if process.name in self.stopped:
                continue
            if process.state == "starting" and self.now_s >= process.starts_s:
                self.wait(process)
            elif process.state == "rejoining":
                self.wait(process)
            elif process.state == "formed":
                holder = process.form.holder
                has = holder is None or process.step == process.form.holds
                there = has or self.processes[holder].state != "dead"
                if there:
                    process.state = "set"
                    process.step = max(process.form.holds, -1)
                    self.happen(rv.SetUp(process.name, process.form.generation))
        self.train()
        self.happen(rv.Tick())

    def wait(self, process):
        process.state = "waiting"
        self.happen(rv.Ready(process.name, process.generation, process.step))

    def train(self):
        training = [p for p in self.living() if p.state == "training"]
        for generation in sorted({p.generation for p in training}):
            ranks = [p for p in training if p.generation == generation]
            expected = len(self.machine.ranks) if generation == self.machine.generation else None
            whole = expected == len(ranks) and not any(p.name in self.stopped for p in ranks)
            asked = any(p.regroup for p in ranks)
            if whole and not asked:
                # One of them may see the step done and another not, if somebody dies now.
                for process in ranks:
                    process.step += 1
                    self.happen(rv.Beat(process.name, generation, process.step))
                steps = {p.step for p in ranks}
                assert len(steps) == 1, "all are at one step"
                assert ranks[0].step == self.steps + 1, "no step is left out, none is done twice"
                self.steps = ranks[0].step
            elif not any(p.name in self.stopped for p in ranks) or asked:
                for process in ranks:
                    if process.name not in self.stopped:
                        self.wait(process)


@pytest.mark.parametrize("num_examples", [25, pytest.param(200, marks=pytest.mark.nightly)])
def test_any_order_of_faults_ends_in_training_with_everybody(num_examples):
    worlds = given(st.integers(0, 10**9), st.integers(1, 3), st.integers(3, 6))
    settings(max_examples=num_examples)(worlds(live))()


def live(seed, least, num_hosts):
    """A world with faults, and then a while without."""
    limits = dataclasses.replace(FAST, least=least)
    world = World(limits, seed)
    rng = world.rng
    for _ in range(num_hosts):
        world.add_host()
    for _ in range(60):
        world.advance(rng.choice([0.1, 0.5, 1.0]))
        fault = rng.random()
        living = world.living()
        if fault < 0.08 and living:
            world.end(rng.choice(living), -9)
        elif fault < 0.12 and living:
            world.stopped.add(rng.choice(living).name)
        elif fault < 0.15 and len(world.hosts) < 6:
            world.add_host()
        elif fault < 0.18 and len(world.hosts) > least:
            host = rng.choice(sorted(world.hosts))
            world.hosts.discard(host)
            world.gone_hosts.add(host)
            world.happen(rv.Leave(host))
        elif fault < 0.20:
            generation = world.machine.generation
            for process in living:  # late, and of a generation that is over
                world.happen(rv.Ready(process.name, process.generation - 1, 99999))
                world.happen(rv.Ready(process.name, process.generation + 1, 99999))
                world.happen(rv.SetUp(process.name, generation - 1))
    before = world.steps
    for _ in range(80):
        world.advance(1.0)
    machine = world.machine
    hosts = {member.host for member in machine.members.values() if not member.leaves}
    assert hosts == world.hosts, "what has failed is replaced, what has left is not"
    if len(hosts) >= least:
        assert machine.stage is rv.Stage.TRAINING and world.steps > before, world.log[-10:]
        here = sum(name in machine.members for name in machine.ranks)
        assert here == min(len(hosts), limits.most), "everybody takes part who can"
    assert not world.stopped & set(machine.ranks), "who stands still was killed"
    assert world.ended is None


def joined(limits, *names, now_s=0.0):
    machine = rv.Rendezvous(limits=limits)
    for name in names:
        machine, _ = rv.step(machine, rv.Joined(name, name), now_s)
    return machine


def run(machine, *events, now_s=100.0):
    actions = []
    for event in events:
        machine, more = rv.step(machine, event, now_s)
        actions += more
    return machine, actions


def trained(limits, *names, now_s=100.0):
    machine = joined(limits, *names, now_s=now_s)
    machine, _ = run(machine, *(rv.Ready(n, 0, -1) for n in names), now_s=now_s)
    machine, actions = run(machine, *(rv.SetUp(n, 1) for n in names), now_s=now_s)
    assert actions == [rv.Go(1)]
    return machine


def test_the_first_generation_waits_for_those_that_start_but_not_for_ever():
    machine = joined(FAST, "a", "b")
    machine, actions = run(machine, rv.Ready("a", 0, -1), now_s=0.5)
    assert actions == []
    machine, actions = run(machine, rv.Tick(), now_s=1.5)
    assert actions == [rv.Form(1, ("a",), None, -1)]


def test_the_newest_state_wins_and_late_messages_change_nothing():
    machine = trained(FAST, "a", "b", "c")
    machine, actions = run(machine, rv.Gone("a", -9))
    assert rv.Regroup(("b", "c"), 1) in actions
    machine, actions = run(machine, rv.Ready("b", 1, 7), rv.SetUp("b", 1), rv.Ready("c", 0, 99))
    assert not [a for a in actions if isinstance(a, rv.Form)]
    machine, actions = run(machine, rv.Ready("c", 1, 8))
    assert actions == [rv.Form(2, ("b", "c"), "c", 8)]


def test_a_death_while_a_generation_forms_has_the_others_wait_anew():
    machine = trained(FAST, "a", "b", "c")
    machine, _ = run(machine, rv.Gone("a", -9), rv.Ready("b", 1, 7), rv.Ready("c", 1, 7))
    machine, actions = run(machine, rv.SetUp("b", 2), rv.Gone("c", -11))
    assert rv.Again(2, ("b",)) in actions
    machine, actions = run(machine, rv.Ready("b", 1, 7))
    assert rv.Form(3, ("b",), "b", 7) in actions


def test_silence_is_found_out_and_a_host_that_is_cut_off_is_not_waited_for():
    machine = trained(FAST, "a", "b")
    machine, _ = run(machine, rv.Beat("a", 1, 3), rv.Beat("b", 1, 3))
    machine, _ = run(machine, rv.Beat("a", 1, 9), now_s=104.0)
    machine, actions = run(machine, rv.Tick(), now_s=105.5)
    assert [a.member for a in actions if isinstance(a, rv.Kill)] == ["b"]
    machine, actions = run(machine, rv.Beat("a", 1, 9), rv.Tick(), now_s=108.0)
    assert "b" not in machine.members and rv.Regroup(("a",), 1) in actions


def test_below_the_minimum_it_waits_and_goes_on_when_somebody_comes():
    limits = dataclasses.replace(FAST, least=2)
    machine = trained(limits, "a", "b")
    machine, _ = run(machine, rv.Gone("b", -9), rv.Ready("a", 1, 5))
    machine, actions = run(machine, rv.Tick(), now_s=500.0)
    assert actions == [] and machine.stage is rv.Stage.GATHERING
    machine, _ = run(machine, rv.Joined("c", "b"), now_s=501.0)
    machine, actions = run(machine, rv.Ready("c", 0, -1), now_s=502.0)
    assert actions == [rv.Form(2, ("a", "c"), "a", 5)]


def test_a_number_of_processes_that_cannot_share_the_batch_is_not_used():
    limits = dataclasses.replace(FAST, most=8)
    machine = joined(limits, *"abcde", now_s=100.0)
    machine, actions = run(machine, *(rv.Ready(n, 0, -1, 12) for n in "abcde"))
    assert [len(a.ranks) for a in actions if isinstance(a, rv.Form)] == [4]
    machine, _ = run(machine, *(rv.SetUp(n, 1) for n in "abcd"))
    machine, actions = run(machine, rv.Tick(), now_s=900.0)
    assert actions == [], "a fifth that cannot take part changes nothing"


def test_a_script_that_always_fails_ends_the_job():
    machine = joined(FAST, "a")
    codes, number = [], 0
    for _ in range(10):
        machine, actions = run(machine, rv.Gone("a" if not number else f"a{number}", 1))
        codes += [a.code for a in actions if isinstance(a, rv.End)]
        if codes:
            break
        assert [a.host for a in actions if isinstance(a, rv.Start)] == ["a"]
        number += 1
        machine, _ = run(machine, rv.Joined(f"a{number}", "a"))
    assert codes == [1] and number < 5


def test_done_is_done_for_those_who_wait_too():
    machine = trained(FAST, "a", "b")
    machine, actions = run(machine, rv.Joined("c", "c"), rv.Ready("c", 0, -1), rv.Done("a"))
    assert actions == [rv.Release(("c",))]
    machine, actions = run(machine, rv.Gone("c", 0), rv.Gone("a", 0), rv.Gone("b", 0))
    assert actions == [rv.End(0, "all processes have ended")]


@pytest.mark.parametrize("least, most", [(0, 1), (3, 2)])
def test_limits_that_no_job_can_keep_are_refused(least, most):
    with pytest.raises(ValueError, match="MIN <= MAX"):
        rv.Limits(least=least, most=most)


def test_told_to_stop_while_they_wait_the_one_that_came_furthest_saves():
    limits = dataclasses.replace(FAST, least=3)
    machine = trained(limits, "a", "b", "c")
    machine, _ = run(machine, rv.Gone("a", -9), rv.Ready("b", 1, 7), rv.Ready("c", 1, 8))
    machine, actions = run(machine, rv.Stop())
    assert actions == [rv.Save("c"), rv.Release(("b",))]
    machine, actions = run(machine, rv.Gone("b", 0), rv.Gone("c", 143))
    assert actions == [rv.End(143, "all processes have ended")]
