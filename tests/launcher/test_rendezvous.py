"""Laws of the coordinator's state machine under any order of events: nobody is left behind."""

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.launcher.elastic import events as ev
from jaxgoodput.launcher.elastic import rendezvous as rv
from jaxgoodput.launcher.elastic.fitness import Check, Pace
from jaxgoodput.launcher.elastic.state import Limits, Rendezvous, Stage

GRACE_S = 30.0
FAST = Limits(
    least=1,
    most=4,
    max_restarts=1000,
    join_s=1.0,
    admit_every_s=1.0,
    silent_s=5.0,
    patience_s=20.0,
    starting_s=30.0,
    exclude_s=3.0,
    slow_windows=4,
)


class Process:
    """A worker as the coordinator sees it: obeys what it is told, some time later."""

    def __init__(self, name, host, starts_s):
        self.name, self.host = name, host
        self.starts_s = starts_s
        self.generation = 0
        self.step = -1
        self.place = None  # in a group: which part of the state it has
        self.state = "starting"  # waiting, set, training, stopped, dead
        self.form = None
        self.regroup = False
        self.kept = set()  # parts that it had before, of which it keeps a copy
        self.hung_up = False
        self.frozen_s = 0.0
        self.at_s = 0.0


class World:
    """Processes, a coordinator, and a network that delivers what it delivers in order."""

    def __init__(self, limits, seed):
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.machine = Rendezvous(limits=limits)
        self.processes = {}
        self.hosts = set()
        self.count = 0
        self.steps = 0  # of the run
        self.begun = set()  # generations that have trained
        self.stopped = set()  # processes that stand still
        self.ended = None
        self.log = []
        self.gone_hosts = set()
        self.starts = []
        self.checks = []
        self.slow = {}  # times as slow as the others, by host
        self.cuts = set()  # pairs of hosts that do not reach each other
        self.ever_cut = set()
        self.is_silent = True  # what is sent over a cut link is lost, and neither side hears of it
        self.tries = []
        self.saved = -1
        self.kills_s = math.inf  # when agents kill workers that have been told to stop and are left

    def stop(self):
        """The coordinator tells all; agents kill the workers that are left after a grace period."""
        self.kills_s = self.now_s + GRACE_S
        self.happen(ev.Stop())

    def happen(self, event):
        self.now_s += 1e-6  # no two events at once
        before = self.machine
        self.machine, actions = rv.step(before, event, self.now_s)
        self.check(before, actions)
        for action in actions:
            self.log.append((self.now_s, action))
            self.act(action)

    def check(self, before, actions):
        machine = self.machine
        assert machine.generation >= before.generation
        assert {frozenset(pair) for pair in machine.cuts} <= self.ever_cut, "no link is called cut"
        for action in actions:
            if isinstance(action, ev.Form):
                assert (
                    action.generation == before.generation + 1
                    or machine.generation > before.generation
                )
                assert machine.limits.least <= len(action.ranks) <= machine.limits.most
                assert len(action.ranks) % machine.limits.group_size == 0
                assert len(set(action.ranks)) == len(action.ranks)
                # What any process has done that lives, the next generation goes on from.
                assert action.holds == self.newest(action.ranks)
                assert not any(machine.cut_off_from(name, action.ranks) for name in action.ranks)
            if isinstance(action, ev.Tell) and action.decision.decision == "left out":
                left = [m for m in machine.members.values() if not m.leaves]
                assert len(left) >= machine.limits.least, "others suffice without who is left out"
                assert all(m.host != action.decision.host for m in left)
            if isinstance(action, ev.Admit):
                assert not machine.is_left_out(action.host)
            if isinstance(action, ev.Go):
                assert all(name in machine.members for name in machine.ranks)

    def newest(self, ranks):
        """The last step of which every place of a group is there, and within reach of all that is known."""
        machine = self.machine
        size = machine.limits.group_size
        members = {n: one for n, one in machine.members.items() if one.killed_s is None}
        known = [p for p in self.living() if p.name in members]
        known = [p for p in known if p.name in ranks or not machine.cut_off_from(p.name, ranks)]
        if size == 1:
            return max(p.step for p in known)
        done = [{p.step for p in known if p.place == place} for place in range(size)]
        return max(set.intersection(*done) - {-1}, default=-1)

    def act(self, action):
        match action:
            case ev.EndGeneration(members, generation):
                for name in members:
                    process = self.processes[name]
                    process.regroup |= process.generation == generation
            case ev.Form(_, ranks):
                for name in ranks:
                    process = self.processes.get(name)
                    if process is not None and process.state == "waiting":
                        process.state, process.form = "formed", action
            case ev.Go(generation):
                for name in self.machine.ranks:
                    process = self.processes.get(name)
                    if process is not None and process.state == "set":
                        process.state, process.generation = "training", generation
                        process.step = max(process.form.holds, 0)
                        process.regroup = process.hung_up = False
                        if name not in self.stopped:  # as a process does when it begins
                            self.happen(ev.Beat(name, generation, process.step))
            case ev.Again(generation, members):
                for name in members:
                    process = self.processes.get(name)
                    if process is not None and process.state in ("formed", "set"):
                        process.state = "rejoining"
            case ev.TryLinks(members):
                hosts = {self.processes[name].host for name in members}
                is_cut = any(self.is_cut(a, b) for a in hosts for b in hosts)
                # An attempt that fails takes longer than heartbeats are apart.
                fails_s = 3.0 if is_cut or self.stopped & set(members) else 0.0
                for name in members:
                    done_s = self.now_s + fails_s + self.rng.uniform(0.1, 1)
                    self.tries.append((done_s, name, members, self.now_s))
            case ev.Save(members, held_step):
                process = self.processes.get(members[0])
                if process is not None and process.state != "dead":
                    self.saved = max(self.saved, held_step)
                    self.end(process, 143)
            case ev.HangUp(name, others):
                assert others
                if name in self.processes:
                    self.processes[name].hung_up = True
            case ev.Kill(name, _):
                process = self.processes.get(name)
                if process is not None:
                    self.end(process, -9)
            case ev.StartProcess(host, after_s):
                if host in self.hosts:
                    self.starts.append((self.now_s + after_s, host))
            case ev.Examine(host):
                self.checks.append((self.now_s + self.rng.uniform(0.1, 1.0), host))
            case ev.Admit(host):
                self.starts = [one for one in self.starts if one[1] != host]
                self.start(host)
            case ev.Release(members):
                for name in members:
                    if name in self.processes:
                        self.end(self.processes[name], 0)
            case ev.EndJob(code, _):
                self.ended = code

    def start(self, host):
        if host not in self.hosts or self.machine.is_left_out(host):
            return
        self.count += 1
        process = Process(f"{host}.{self.count}", host, self.now_s + self.rng.uniform(0.5, 3))
        self.processes[process.name] = process
        self.happen(ev.ProcessJoined(process.name, host))

    def end(self, process, code):
        if process.state == "dead":
            return
        process.state = "dead"
        self.stopped.discard(process.name)
        self.happen(ev.ProcessExited(process.name, code))

    def add_host(self):
        host = f"h{len(self.hosts) + len(self.gone_hosts)}"
        self.hosts.add(host)
        self.happen(ev.HostArrived(host))

    def is_cut(self, host, other):
        return frozenset((host, other)) in self.cuts

    def freeze(self, name):
        self.stopped.add(name)
        self.processes[name].frozen_s = self.now_s

    def answer(self, name, members, asked_s):
        """Have a process tell of its links, which it was asked to try at `asked_s`."""
        process = self.processes.get(name)
        if process is None or process.state == "dead" or name in self.stopped:
            return
        others = [self.processes[n] for n in members if n in self.processes]
        others = [p for p in others if p.host != process.host]
        lost = {
            p.name
            for p in others
            if p.state == "dead"
            or (p.name in self.stopped and p.frozen_s <= asked_s)
            or self.is_cut(p.host, process.host)
        }
        reached = tuple(p.name for p in others if p.name not in lost)
        self.happen(ev.LinksTried(name, reached, tuple(sorted(lost))))

    def living(self):
        return [p for p in self.processes.values() if p.state != "dead"]

    def advance(self, dt):
        self.now_s += dt
        for at_s, host in list(self.starts):
            if at_s <= self.now_s:
                self.starts.remove((at_s, host))
                self.start(host)
        for at_s, host in list(self.checks):
            if at_s <= self.now_s:
                self.checks.remove((at_s, host))
                seconds = 1e-3 * self.slow.get(host, 1.0) * self.rng.uniform(1.0, 1.5)
                here = {self.processes[name].host for name in self.machine.present_ranks}
                lost = sorted(other for other in here if self.is_cut(host, other))
                check = Check(
                    product_s=seconds,
                    round_trip_s=seconds,
                    send_s=1e-3,
                    unreached=", ".join(lost),
                )
                self.happen(ev.HostExamined(host, check))
        for at_s, name, members, asked_s in list(self.tries):
            if at_s <= self.now_s:
                self.tries.remove((at_s, name, members, asked_s))
                self.answer(name, members, asked_s)
        for process in self.living():
            if self.now_s >= self.kills_s:
                self.end(process, -9)
            if process.name in self.stopped or process.state == "dead":
                continue
            if process.state == "starting" and self.now_s >= process.starts_s:
                self.wait(process)
            elif process.state == "rejoining":
                self.wait(process)
            elif process.state == "formed":
                size, form = self.machine.limits.group_size, process.form
                place = form.ranks.index(process.name) % size
                holder = form.holders[place] if form.holders else None
                source = None if holder is None else self.processes[holder]
                if source is not None:
                    has_part = place in (source.place, *source.kept)
                    assert size == 1 or has_part, "it has that part of the state"
                has_place = size == 1 or process.place == place
                has = source is None or (process.step == form.holds and has_place)
                if not has and self.is_cut(source.host, process.host):
                    self.answer(process.name, (holder,), self.now_s)
                    self.wait(process)
                    continue
                if has or (source.state != "dead" and source.step == form.holds):
                    process.state = "set"
                    process.step = max(form.holds, -1)
                    process.kept.add(process.place)
                    process.place = place
                    self.happen(ev.SetUp(process.name, process.form.generation))
        self.train()
        self.happen(ev.Tick())

    def wait(self, process):
        if process.state == "dead":  # ended by what a process before it in the same round caused
            return
        process.state = "waiting"
        generation, step = process.generation, process.step
        self.happen(ev.Ready(process.name, generation, step, place=process.place))

    def train(self):
        training = [p for p in self.living() if p.state == "training"]
        for generation in sorted({p.generation for p in training}):
            ranks = [p for p in training if p.generation == generation]
            expected = len(self.machine.ranks) if generation == self.machine.generation else None
            whole = expected == len(ranks) and not any(p.name in self.stopped for p in ranks)
            asked = any(p.regroup for p in ranks)
            hosts = {p.host for p in ranks}
            is_cut = any(self.is_cut(a, b) for a in hosts for b in hosts)
            if is_cut and whole and self.is_silent and not any(p.hung_up for p in ranks):
                for process in ranks:  # they wait for each other, and answer
                    waits = {"others_s": self.now_s - process.at_s}
                    self.happen(ev.Beat(process.name, generation, process.step, **waits))
            elif whole and self.machine.is_told and not is_cut:
                self.saved = max(self.saved, ranks[0].step)
                for process in ranks:
                    self.end(process, 143)
            elif whole and not asked and not is_cut:
                # One of them may see the step done and another not, if somebody dies now.
                times = {p.name: self.slow.get(p.host, 1.0) for p in ranks}
                step_s = 1.1 * max(times.values()) / len(ranks)
                for process in ranks:
                    process.step += 1
                    process.at_s = self.now_s
                    pace = Pace(
                        sample_s=times[process.name] / 12 * self.rng.uniform(1.0, 1.5),
                        step_s=step_s,
                        part=1,
                        whole=12,
                        is_leased=False,
                    )
                    self.happen(ev.Beat(process.name, generation, process.step, pace))
                if generation not in self.begun:  # one that never trains has lost nothing
                    self.begun.add(generation)
                    self.steps = min(self.steps, max(ranks[0].form.holds, 0))
                steps = {p.step for p in ranks}
                assert len(steps) == 1, "all are at one step"
                assert ranks[0].step == self.steps + 1, "no step is left out, none is done twice"
                self.steps = ranks[0].step
            elif not any(p.name in self.stopped for p in ranks) or asked:
                for process in ranks:
                    if process.name not in self.stopped:
                        self.wait(process)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_examples", [25, pytest.param(200, marks=pytest.mark.nightly)])
def test_any_order_of_faults_ends_in_training_with_everybody(num_examples):
    seeds, least, hosts = st.integers(0, 10**9), st.integers(1, 3), st.integers(3, 6)
    worlds = given(seeds, least, hosts, st.integers(1, 3), st.just(False))
    settings(max_examples=num_examples, deadline=None)(worlds(live))()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_examples", [25, pytest.param(300, marks=pytest.mark.nightly)])
def test_links_that_never_heal_cost_those_at_their_smaller_end_alone(num_examples):
    seeds, least, hosts = st.integers(0, 10**9), st.integers(1, 2), st.integers(3, 6)
    worlds = given(seeds, least, hosts, st.just(1), st.just(True))
    settings(max_examples=num_examples, deadline=None)(worlds(live))()


def live(seed, least, num_hosts, group_size, stay_cut):
    """A world with faults, and then a while without, but for broken links if these stay."""
    limits = dataclasses.replace(
        FAST, least=least, group_size=group_size, most=6 if stay_cut else 4
    )
    world = World(limits, seed)
    rng = world.rng
    world.is_silent = rng.random() < 0.5
    for _ in range(num_hosts):
        world.add_host()
    for _ in range(60):
        world.advance(rng.choice([0.1, 0.5, 1.0]))
        fault = rng.random()
        living = world.living()
        if fault < 0.08 and living:
            world.end(rng.choice(living), -9)
        elif fault < 0.12 and living:
            world.freeze(rng.choice(living).name)
        elif fault < 0.15 and len(world.hosts) < 6:
            world.add_host()
        elif fault < 0.18 and len(world.hosts) > least:
            host = rng.choice(sorted(world.hosts))
            world.hosts.discard(host)
            world.gone_hosts.add(host)
            world.happen(ev.Leave(host))
        elif fault < 0.21 and world.hosts:
            world.slow = {rng.choice(sorted(world.hosts)): rng.choice([3.0, 10.0])}
        elif fault < 0.23:
            generation = world.machine.generation
            for process in living:  # late, and of a generation that is over
                world.happen(ev.Ready(process.name, process.generation - 1, 99999))
                world.happen(ev.Ready(process.name, process.generation + 1, 99999))
                world.happen(ev.SetUp(process.name, generation - 1))
        elif fault < 0.29 and len(world.hosts) > 1:
            world.cuts.add(frozenset(rng.sample(sorted(world.hosts), 2)))
            world.ever_cut |= world.cuts
        elif fault < 0.31 and world.cuts:
            world.cuts.pop()
        elif fault < 0.36 and world.stopped:
            world.stopped.remove(rng.choice(sorted(world.stopped)))  # as if it had been swapped out
    world.slow = {}
    if not stay_cut:
        world.cuts.clear()
    ends_s = [one.until_s - world.now_s for one in world.machine.hosts.values() if one.until_s]
    for _ in range(120 + round(max(ends_s, default=0))):
        world.advance(1.0)
    # Of faults from which nobody's memory is left it goes on at its first step, so this is asked of the end.
    before = world.steps
    for _ in range(10 if stay_cut else 5):
        world.advance(1.0)
    assert world.ended is None
    (require_largest_part if stay_cut else require_all)(world, least, before)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_examples", [25, pytest.param(300, marks=pytest.mark.nightly)])
def test_a_job_that_is_told_to_stop_ends_and_its_code_says_whether_the_last_step_is_saved(
    num_examples,
):
    seeds, least, hosts = st.integers(0, 10**9), st.integers(1, 3), st.integers(1, 5)
    worlds = given(seeds, least, hosts, st.integers(1, 2))
    settings(max_examples=num_examples, deadline=None)(worlds(stopped))()


def stopped(seed, least, num_hosts, group_size):
    """A world with faults that is told to stop among them."""
    limits = dataclasses.replace(FAST, least=least, group_size=group_size)
    world = World(limits, seed)
    rng = world.rng
    for _ in range(num_hosts):
        world.add_host()
    stops_at = rng.randrange(40)
    done = -1
    for i in range(60):
        if world.ended is not None:
            break
        world.advance(rng.choice([0.1, 0.5, 1.0]))
        fault, living = rng.random(), world.living()
        if i == stops_at:
            # What only dead processes have done is lost in any case.
            done = max([p.step for p in living if p.state != "starting"], default=-1)
            world.stop()
        elif fault < 0.15 and living:
            world.end(rng.choice(living), -9)
        elif fault < 0.2 and living:
            world.freeze(rng.choice(living).name)
        elif fault < 0.25 and world.hosts:
            host = rng.choice(sorted(world.hosts))
            world.hosts.discard(host)
            world.gone_hosts.add(host)
            world.happen(ev.Leave(host))
    for _ in range(90):
        if world.ended is None:
            world.advance(1.0)
    assert world.ended is not None, world.log[-10:]
    if world.ended == 143:
        assert world.saved >= done or done <= 0, "143 promises that the last step is saved"


def require_all(world, least, before):
    machine, limits = world.machine, world.machine.limits
    assert not any(machine.is_left_out(host) for host in world.hosts), "who is left out comes back"
    hosts = {member.host for member in machine.members.values() if not member.leaves}
    assert hosts == world.hosts, "what has failed is replaced, what has left is not"
    usable = min(len(hosts), limits.most) // limits.group_size * limits.group_size
    if usable >= least:
        assert machine.stage is Stage.TRAINING and world.steps > before, world.log[-10:]
        here = sum(name in machine.members for name in machine.ranks)
        assert here == usable, "everybody takes part who can"
        assert not world.stopped & set(machine.ranks), "who stands still was killed"


def require_largest_part(world, least, before):
    def is_whole(part):
        return not any(world.is_cut(a, b) for a, b in itertools.combinations(part, 2))

    parts = itertools.combinations(sorted(world.hosts), least)
    if not any(map(is_whole, parts)):
        return
    machine = world.machine
    assert world.steps > before, world.log[-10:]
    hosts = {machine.members[name].host for name in machine.present_ranks}
    assert is_whole(hosts) and len(hosts) >= least
    for host in world.hosts - hosts:
        assert not is_whole({*hosts, host}), "who reaches all takes part"


def joined(limits, *names, now_s=0.0):
    machine = Rendezvous(limits=limits)
    for name in names:
        machine, _ = rv.step(machine, ev.ProcessJoined(name, name), now_s)
    return machine


def run(machine, *events, now_s=100.0, links=False):
    """What follows from these events. Unless `links`, all reach all, and say so when they are asked."""
    actions, events = [], list(events)
    while events:
        machine, more = rv.step(machine, events.pop(0), now_s)
        asked = [x.members for x in more if isinstance(x, ev.TryLinks) and not links]
        events[:0] = [ev.LinksTried(n, others, ()) for others in asked for n in others]
        actions += [x for x in more if links or not isinstance(x, ev.TryLinks)]
    return machine, actions


def trained(limits, *names, now_s=100.0):
    machine = joined(limits, *names, now_s=now_s)
    machine, _ = run(machine, *(ev.Ready(n, 0, -1) for n in names), now_s=now_s)
    machine, actions = run(machine, *(ev.SetUp(n, 1) for n in names), now_s=now_s)
    assert actions == [ev.Go(1)]
    return machine


def test_the_first_generation_waits_for_those_that_start_but_not_for_ever():
    machine = joined(FAST, "a", "b")
    machine, actions = run(machine, ev.Ready("a", 0, -1), now_s=0.5)
    assert actions == []
    machine, actions = run(machine, ev.Tick(), now_s=1.5)
    assert actions == [ev.Form(1, ("a",), (), -1)]


def test_the_newest_state_wins_and_late_messages_change_nothing():
    machine = trained(FAST, "a", "b", "c")
    machine, actions = run(machine, ev.ProcessExited("a", -9))
    assert ev.EndGeneration(("b", "c"), 1) in actions
    machine, actions = run(machine, ev.Ready("b", 1, 7), ev.SetUp("b", 1), ev.Ready("c", 0, 99))
    assert not [a for a in actions if isinstance(a, ev.Form)]
    machine, actions = run(machine, ev.Ready("c", 1, 8))
    assert actions == [ev.Form(2, ("b", "c"), ("c",), 8)]


def test_a_death_while_a_generation_forms_has_the_others_wait_anew():
    machine = trained(FAST, "a", "b", "c")
    machine, _ = run(machine, ev.ProcessExited("a", -9), ev.Ready("b", 1, 7), ev.Ready("c", 1, 7))
    machine, actions = run(machine, ev.SetUp("b", 2), ev.ProcessExited("c", -11))
    assert ev.Again(2, ("b",)) in actions
    machine, actions = run(machine, ev.Ready("b", 1, 7))
    assert ev.Form(3, ("b",), ("b",), 7) in actions


def test_silence_is_found_out_and_a_host_that_is_cut_off_is_not_waited_for():
    machine = trained(FAST, "a", "b")
    machine, _ = run(machine, ev.Beat("a", 1, 3), ev.Beat("b", 1, 3))
    machine, _ = run(machine, ev.Beat("a", 1, 9), now_s=104.0)
    machine, actions = run(machine, ev.Tick(), now_s=105.5)
    assert [a.member for a in actions if isinstance(a, ev.Kill)] == ["b"]
    machine, actions = run(machine, ev.Beat("a", 1, 9), ev.Tick(), now_s=108.0)
    assert "b" not in machine.members and ev.EndGeneration(("a",), 1) in actions


def test_below_the_minimum_it_waits_and_goes_on_when_somebody_comes():
    limits = dataclasses.replace(FAST, least=2)
    machine = trained(limits, "a", "b")
    machine, _ = run(machine, ev.ProcessExited("b", -9), ev.Ready("a", 1, 5))
    machine, actions = run(machine, ev.Tick(), now_s=500.0)
    assert actions == [] and machine.stage is Stage.GATHERING
    machine, _ = run(machine, ev.ProcessJoined("c", "b"), now_s=501.0)
    machine, actions = run(machine, ev.Ready("c", 0, -1), now_s=502.0)
    assert actions == [ev.Form(2, ("a", "c"), ("a",), 5)]


def test_a_number_of_processes_that_cannot_share_the_batch_is_not_used():
    limits = dataclasses.replace(FAST, most=8)
    machine = joined(limits, *"abcde", now_s=100.0)
    machine, actions = run(machine, *(ev.Ready(n, 0, -1, 12) for n in "abcde"))
    assert [len(a.ranks) for a in actions if isinstance(a, ev.Form)] == [4]
    machine, _ = run(machine, *(ev.SetUp(n, 1) for n in "abcd"))
    machine, actions = run(machine, ev.Tick(), now_s=900.0)
    assert actions == [], "a fifth that cannot take part changes nothing"


def test_a_script_that_always_fails_ends_the_job():
    machine = joined(FAST, "a")
    codes, number = [], 0
    for _ in range(10):
        machine, actions = run(machine, ev.ProcessExited("a" if not number else f"a{number}", 1))
        codes += [a.code for a in actions if isinstance(a, ev.EndJob)]
        if codes:
            break
        assert [a.host for a in actions if isinstance(a, ev.StartProcess)] == ["a"]
        number += 1
        machine, _ = run(machine, ev.ProcessJoined(f"a{number}", "a"))
    assert codes == [1] and number < 5


def test_done_is_done_for_those_who_wait_too():
    machine = trained(FAST, "a", "b")
    machine, actions = run(
        machine, ev.ProcessJoined("c", "c"), ev.Ready("c", 0, -1), ev.ProcessDone("a")
    )
    assert actions == [ev.Release(("c",))]
    machine, actions = run(
        machine, ev.ProcessExited("c", 0), ev.ProcessExited("a", 0), ev.ProcessExited("b", 0)
    )
    assert actions == [ev.EndJob(0, "all processes have ended")]


def test_who_stands_still_while_it_starts_does_not_hold_up_the_end():
    machine = trained(FAST, "a")
    machine, _ = run(machine, ev.ProcessJoined("c", "c"), ev.ProcessDone("a"))
    machine, actions = run(machine, ev.ProcessExited("a", 0))
    assert machine.members and not actions
    machine, actions = run(machine, ev.Tick(), now_s=100.5 + FAST.silent_s)
    assert [a.member for a in actions] == ["c"] and "the run is over" in actions[0].why
    machine, actions = run(machine, ev.ProcessExited("c", -9))
    assert actions == [ev.EndJob(0, "all processes have ended")]


def test_who_leaves_a_run_and_is_killed_after_it_is_complete_takes_nothing_from_it():
    """Such as one whose machine is gone before its script has ended."""
    machine = trained(FAST, "a", "b", "c")
    machine, _ = run(machine, ev.Leave("b"), ev.ProcessDone("a"))
    machine, _ = run(machine, ev.ProcessExited("b", -9))
    assert code_of(machine, ev.ProcessExited("a", 0), ev.ProcessExited("c", 0)) == 0
    machine = trained(FAST, "a", "b")
    machine, _ = run(machine, ev.ProcessDone("a"), ev.ProcessExited("b", -9))
    assert code_of(machine, ev.ProcessExited("a", 0)) == 137, "it was not to leave"
    machine = stepping(FAST, "a", "b")
    machine, _ = run(machine, ev.Leave("b"), ev.Stop(), ev.ProcessExited("b", -9))
    assert code_of(machine, ev.ProcessExited("a", 143)) == 137, "the run is not complete"


@pytest.mark.parametrize("least, most", [(0, 1), (3, 2)])
def test_limits_that_no_job_can_keep_are_refused(least, most):
    with pytest.raises(ValueError, match="MIN <= MAX"):
        Limits(least=least, most=most)


def test_told_to_stop_while_they_wait_the_one_that_came_furthest_saves():
    limits = dataclasses.replace(FAST, least=3)
    machine = trained(limits, "a", "b", "c")
    machine, _ = run(machine, ev.ProcessExited("a", -9), ev.Ready("b", 1, 7), ev.Ready("c", 1, 8))
    machine, actions = run(machine, ev.Stop())
    assert actions == [ev.Save(("c",), 8), ev.Release(("b",))]
    machine, actions = run(machine, ev.ProcessExited("b", 0), ev.ProcessExited("c", 143))
    assert actions == [ev.EndJob(143, "all processes have ended")]


def stepping(limits, *names):
    """A job whose processes have done step 1 of their first generation."""
    machine = trained(limits, *names)
    beats = [ev.Beat(name, 1, step) for step in (0, 1) for name in names]
    return run(machine, *beats)[0]


def code_of(machine, *events):
    """The exit code with which these events end a job."""
    (end,) = [x for x in run(machine, *events)[1] if isinstance(x, ev.EndJob)]
    return end.code


def test_a_job_is_not_saved_by_a_process_that_had_nothing_to_save():
    machine = stepping(FAST, "a")
    # The only one that trained dies while its host leaves; another comes, and is told to stop as it starts.
    machine, _ = run(machine, ev.ProcessExited("a", -9), ev.Leave("a"))
    machine, _ = run(machine, ev.ProcessJoined("b", "b"), ev.Stop())
    assert code_of(machine, ev.ProcessExited("b", 143)) == 75
    # If it had begun to train, it knows what it says.
    machine = stepping(FAST, "a")
    machine, _ = run(machine, ev.Stop())
    assert code_of(machine, ev.ProcessExited("a", 143)) == 143
    # Nothing was done yet.
    machine = trained(FAST, "a")
    machine, _ = run(machine, ev.Stop())
    assert code_of(machine, ev.ProcessExited("a", 143)) == 143


def test_if_one_process_is_told_to_stop_another_saves_what_they_hold():
    machine = stepping(FAST, "a", "b")
    machine, actions = run(machine, ev.ProcessExited("a", 143), ev.Ready("b", 1, 1))
    assert ev.Save(("b",), 1) in actions
    assert code_of(machine, ev.ProcessExited("b", 143)) == 143


@pytest.mark.parametrize("begin, code", [(trained, 1), (stepping, 75)])
def test_a_job_that_fails_because_sigterm_ends_its_processes_has_not_saved(begin, code):
    machine = begin(dataclasses.replace(FAST, max_restarts=0), "a")
    assert code_of(machine, ev.ProcessExited("a", -15)) == code


def check(seconds=1e-3, **fields):
    return Check(product_s=seconds, round_trip_s=1e-4, send_s=1e-3, **fields)


def arrived(limits, *hosts, now_s=100.0):
    """A job that trains on hosts that have passed their checks, with one process each of its host's name."""
    machine = Rendezvous(limits=limits)
    for host in hosts:
        machine, actions = run(machine, ev.HostArrived(host), now_s=now_s)
        assert actions == [ev.Examine(host)]
        machine, actions = run(machine, ev.HostExamined(host, check()), now_s=now_s)
        assert actions == [ev.Admit(host)]
    machine, _ = run(machine, *(ev.ProcessJoined(h, h) for h in hosts), now_s=now_s)
    machine, _ = run(machine, *(ev.Ready(h, 0, -1, 12) for h in hosts), now_s=now_s)
    machine, actions = run(machine, *(ev.SetUp(h, 1) for h in hosts), now_s=now_s)
    assert actions == [ev.Go(1)]
    return machine


def pace(sample_s, count, is_leased=False, part=1):
    return Pace(sample_s=sample_s, step_s=12.0, part=part, whole=12, is_leased=is_leased)


def windows(machine, seconds, num, now_s=110.0, **fields):
    """Each host's seconds per sample, so many windows long."""
    generation, actions = machine.generation, []
    for _ in range(num):
        beats = [
            ev.Beat(name, generation, 7, pace(s, len(seconds), **fields))
            for name, s in seconds.items()
        ]
        machine, more = run(machine, *beats, now_s=now_s)
        actions += more
    return machine, actions


SLOW = {"a": 1.0, "b": 1.1, "c": 4.0}


def test_a_slow_host_is_left_out_like_one_that_leaves_and_comes_back_when_its_time_is_over():
    machine = arrived(FAST, "a", "b", "c")
    machine, actions = windows(machine, SLOW, 3)
    assert actions == []
    machine, actions = windows(machine, SLOW, 1)
    told, leases, regroup = actions
    assert leases == ev.EndLeases(("c",))
    assert told.decision.host == "c" and told.decision.decision == "left out"
    assert told.decision.numbers["slow_ratio"] == pytest.approx(4 / 1.05)
    assert told.decision.numbers["excluded_s"] == 3.0
    assert regroup == ev.EndGeneration(("a", "b", "c"), 1)
    machine, actions = run(machine, *(ev.Ready(n, 1, 9, 12) for n in "abc"), now_s=110.5)
    assert ev.Release(("c",)) in actions
    form = next(a for a in actions if isinstance(a, ev.Form))
    assert form.ranks == ("a", "b") and form.news == (told.decision,)
    machine, _ = run(
        machine, ev.ProcessExited("c", 0), ev.SetUp("a", 2), ev.SetUp("b", 2), now_s=111.0
    )
    assert machine.news == () and machine.num_failures == 0
    machine, actions = run(machine, ev.Tick(), now_s=112.9)
    assert actions == []
    machine, actions = run(machine, ev.Tick(), now_s=113.1)
    assert actions == [ev.Examine("c")]
    machine, actions = run(machine, ev.HostExamined("c", check(1.0)), now_s=114.0)
    assert [a.decision.numbers["excluded_s"] for a in actions] == [6.0], "still slow, twice as long"
    machine, actions = run(machine, ev.Tick(), now_s=120.1)
    assert actions == [ev.Examine("c")]
    machine, actions = run(machine, ev.HostExamined("c", check()), now_s=121.0)
    assert actions[0].decision.decision == "taken in again" and actions[1] == ev.Admit("c")
    machine, _ = run(machine, ev.ProcessJoined("c2", "c"), now_s=121.0)
    machine, actions = run(machine, ev.Ready("c2", 0, -1, 12), now_s=125.0)
    assert actions == [ev.EndGeneration(("a", "b"), 2)]


@pytest.mark.parametrize(
    "limits, seconds, fields, why",
    [
        (dict(least=3), SLOW, {}, "below the minimum"),
        (dict(exclude_slow=0.0), SLOW, {}, "turned off"),
        (dict(exclude_slow=5.0), SLOW, {}, "not as slow as that"),
        ({}, {"a": 1.0, "b": 1.0, "c": 2.5}, {"is_leased": True}, "takes less of the work"),
        ({}, {"a": 0.01, "b": 0.01, "c": 0.1}, {}, "its part is a small part of a step"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_slow_host_stays_where_nothing_is_gained_without_it(limits, seconds, fields, why):
    machine = arrived(dataclasses.replace(FAST, **limits), "a", "b", "c")
    machine, actions = windows(machine, seconds, 20, **fields)
    assert actions == [], why


def test_of_a_host_that_takes_leases_a_part_must_not_outlast_the_batch_of_the_others():
    machine = arrived(FAST, "a", "b", "c")
    machine, actions = windows(machine, {"a": 1.0, "b": 1.0, "c": 9.0}, 4, is_leased=True)
    assert actions[0].decision.decision == "left out"


def test_who_is_left_out_is_checked_at_once_when_the_others_no_longer_suffice():
    limits = dataclasses.replace(FAST, least=2, exclude_s=1000.0)
    machine = arrived(limits, "a", "b", "c")
    machine, _ = windows(machine, SLOW, 4)
    machine, _ = run(machine, *(ev.Ready(n, 1, 9, 12) for n in "abc"), ev.ProcessExited("c", 0))
    machine, _ = run(machine, ev.SetUp("a", 2), ev.SetUp("b", 2))
    machine, actions = run(machine, ev.AgentLost("b"), ev.ProcessExited("b", -9))
    assert ev.Examine("c") in actions
    machine, actions = run(machine, ev.HostExamined("c", check(1.0)))
    assert ev.Admit("c") in actions, "slow is better than not at all"


def test_a_host_that_comes_is_judged_against_two_others_at_least():
    machine = arrived(FAST, "a", "b")
    machine, _ = run(machine, ev.HostArrived("c"))
    machine, actions = run(machine, ev.HostExamined("c", check(1.0)))
    assert actions[0].decision.decision == "left out" and "median of 2" in actions[0].decision.why
    machine = arrived(FAST, "a")
    machine, _ = run(machine, ev.HostArrived("b"))
    machine, actions = run(machine, ev.HostExamined("b", check(1.0)))
    assert actions == [ev.Admit("b")]


def test_a_host_that_cannot_compute_is_refused():
    machine = arrived(FAST, "a", "b")
    machine, _ = run(machine, ev.HostArrived("c"))
    bad = Check(failure="it computes wrong numbers")
    machine, actions = run(machine, ev.HostExamined("c", bad))
    assert actions[0].decision.decision == "refused"
    assert actions[1] == ev.Refuse("c", "it computes wrong numbers")
    assert "c" not in machine.hosts


def test_a_factor_that_leaves_healthy_hosts_out_is_refused():
    with pytest.raises(ValueError, match="more than 1"):
        Limits(least=1, most=2, exclude_slow=0.5)


GROUP = dataclasses.replace(FAST, least=2, most=4, group_size=2)


def test_told_to_stop_nobody_goes_with_a_state_while_others_may_still_come_to_save_it():
    machine = trained(FAST, "a", "b")
    machine, actions = run(machine, ev.Ready("a", 1, 10), ev.Stop())
    assert actions == [ev.EndGeneration(("b",), 1)], "a may have to save what it holds"
    machine, actions = run(machine, ev.Ready("b", 1, 10))
    assert actions == [ev.Save(("a",), 10), ev.Release(("b",))]


def test_told_to_stop_a_group_puts_its_state_together():
    machine = trained(GROUP, *"abcd")
    machine, _ = run(machine, ev.ProcessExited("d", -9), ev.Ready("a", 1, 10, place=0))
    machine, actions = run(machine, ev.Stop())
    assert not [x for x in actions if isinstance(x, ev.Release | ev.Save)]
    ready = [ev.Ready("b", 1, 10, place=1), ev.Ready("c", 1, 9, place=0)]
    machine, actions = run(machine, *ready)
    assert actions == [ev.Save(("a", "b"), 10), ev.Release(("c",))], "b hands its part over"
    machine, actions = run(machine, ev.ProcessExited("a", 143))
    assert actions == [ev.Release(("b",))]
    machine, actions = run(machine, ev.ProcessExited("b", 0), ev.ProcessExited("c", 0))
    assert actions == [ev.EndJob(143, "all processes have ended")]


def test_a_lost_part_is_had_from_a_copy_where_nobody_else_has_it():
    machine = trained(dataclasses.replace(GROUP, most=2), "a", "b")
    ready = ev.Ready("a", 1, 9, copies=((0, 4), (0, 6), (1, 4), (0, 8)), place=0)
    machine, _ = run(machine, ev.ProcessExited("b", -9), ready)
    machine, _ = run(machine, ev.ProcessJoined("e", "e"), ev.Ready("e", 0, -1))
    assert machine.stage is Stage.FORMING
    assert (machine.holders, machine.ranks) == (("a", "a"), ("a", "e"))


def test_what_a_joiner_has_fetched_counts_when_whoever_gave_it_has_gone():
    machine = trained(dataclasses.replace(GROUP, most=2), "a", "b")
    machine, _ = run(machine, ev.ProcessExited("a", -9), ev.Ready("b", 1, 9, place=1))
    machine, _ = run(machine, ev.ProcessJoined("c", "c"), ev.Ready("c", 0, 9, place=0))
    assert machine.holders == ("c", "b")


def test_a_job_that_is_told_to_stop_before_anybody_came_wants_a_restart():
    machine = Rendezvous(limits=FAST)
    why = "all processes have ended: no step was done, so there is nothing to save"
    assert run(machine, ev.Stop())[1] == [ev.EndJob(143, why)]


def test_fewer_than_a_group_is_nothing_to_wait_with_for_ever():
    machine = trained(dataclasses.replace(GROUP, least=1, most=2, max_restarts=0), "a", "b")
    machine, actions = run(machine, ev.ProcessExited("b", -9), ev.Ready("a", 1, 5))
    assert [x.code for x in actions if isinstance(x, ev.EndJob)] == [137]
    machine = trained(dataclasses.replace(GROUP, most=2), "a", "b")
    machine, _ = run(machine, ev.Leave("b"))
    assert not machine.can_go_on, "who leaves takes a part along"


def tried(member, *unreached, reached=()):
    return ev.LinksTried(member, tuple(reached), unreached)


def test_hosts_try_their_links_while_no_step_ends_and_not_before():
    machine = trained(FAST, "a", "b", "c")
    beats = [ev.Beat(n, 1, 3) for n in "abc"]
    machine, actions = run(machine, *beats, ev.Tick(), now_s=104.0, links=True)
    assert actions == []
    machine, actions = run(machine, *beats, ev.Tick(), now_s=105.1, links=True)
    assert actions == [ev.TryLinks(("a", "b", "c"))]
    machine, actions = run(machine, *beats, ev.Tick(), now_s=108.0, links=True)
    assert actions == [], "not all the time"
    machine, actions = run(machine, *(ev.Beat(n, 1, 4) for n in "abc"), now_s=110.0, links=True)
    machine, actions = run(machine, ev.Tick(), now_s=114.0, links=True)
    assert not [x for x in actions if isinstance(x, ev.TryLinks)], "a step has ended since"


def test_of_two_hosts_that_do_not_reach_each_other_the_others_go_on_with_one():
    machine = trained(FAST, "a", "b", "c")
    machine, _ = run(machine, *(ev.Beat(n, 1, 3) for n in "abc"), now_s=105.0)
    machine, actions = run(machine, tried("b", "c", reached="a"), now_s=106.0, links=True)
    assert ev.EndGeneration(("a", "b", "c"), 1) in actions
    (told,) = [x.decision for x in actions if isinstance(x, ev.Tell)]
    assert told.host == "c" and "b did not reach c" in told.why
    assert told.numbers["excluded_s"] == 1.0
    assert [x for x in actions if isinstance(x, ev.HangUp)] == [
        ev.HangUp("b", ("c",)),
        ev.HangUp("c", ("b",)),
    ], "or their sum would wait for minutes"
    ready = [ev.Ready(n, 1, 3, state_at=n) for n in "abc"]
    machine, actions = run(machine, *ready, now_s=107.0)
    assert [x.ranks for x in actions if isinstance(x, ev.Form)] == [("a", "b")]


def test_where_the_others_would_be_too_few_all_wait_with_their_state_until_the_link_is_back():
    limits = dataclasses.replace(FAST, least=2, most=2)
    machine = trained(limits, "a", "b")
    machine, _ = run(machine, *(ev.Beat(n, 1, 3) for n in "ab"), now_s=105.0)
    machine, actions = run(machine, tried("b", "a"), now_s=106.0, links=True)
    assert ev.EndGeneration(("a", "b"), 1) in actions and machine.stage is Stage.GATHERING
    machine, actions = run(
        machine, ev.Ready("a", 1, 3), ev.Ready("b", 1, 3), now_s=107.0, links=True
    )
    asked = []
    for now_s in range(108, 180):
        machine, actions = run(machine, ev.Tick(), now_s=float(now_s), links=True)
        asked += [now_s for x in actions if isinstance(x, ev.TryLinks)]
        answers = [tried("b", "a"), tried("a", "b")] if actions else []
        machine, _ = run(machine, *answers, now_s=now_s + 0.5, links=True)
    assert machine.stage is Stage.GATHERING and machine.generation == 1
    assert len(asked) >= 3 and asked[2] - asked[1] > asked[1] - asked[0], "ever more rarely"
    answers = tried("b", reached="a"), tried("a", reached="b")
    machine, actions = run(machine, *answers, now_s=180.0)
    assert [x.holds for x in actions if isinstance(x, ev.Form)] == [3]


def test_who_is_silent_itself_says_nothing_of_a_link():
    machine = trained(FAST, "a", "b", "c")
    machine, _ = run(machine, *(ev.Beat(n, 1, 3) for n in "abc"), now_s=101.0, links=True)
    machine, _ = run(machine, ev.Beat("a", 1, 3), ev.Beat("b", 1, 3), now_s=105.0, links=True)
    machine, actions = run(machine, tried("a", "c"), tried("b", "c"), now_s=105.0, links=True)
    assert actions == [] and machine.cuts == {}


def test_generations_that_end_by_themselves_without_a_step_follow_each_other_ever_more_slowly():
    machine, formed = trained(FAST, "a", "b"), []
    for tenth in range(10000, 11000, 5):
        generation = machine.generation
        events = {
            Stage.TRAINING: [ev.Ready(n, generation, 0) for n in "ab"],
            Stage.FORMING: [ev.SetUp(n, generation) for n in "ab"],
        }.get(machine.stage, [ev.Ready("b", generation, 0), ev.Tick()])
        machine, actions = run(machine, *events, now_s=tenth / 10, links=True)
        if any(isinstance(x, ev.TryLinks) for x in actions):
            answers = tried("b", reached="a"), tried("a", reached="b")
            machine, more = run(machine, *answers, now_s=tenth / 10)
            actions += more
        formed += [tenth / 10 for x in actions if isinstance(x, ev.Form)]
    gaps = [b - a for a, b in itertools.pairwise(formed)]
    assert len(formed) <= 7 and gaps[-1] > 16 and sorted(gaps) == gaps


def test_of_a_step_that_never_ends_whose_device_is_stuck_goes_and_not_if_all_are():
    machine = trained(FAST, "a", "b", "c")
    long = [ev.Beat(n, 1, 3, device_s=9.0, is_stuck=n != "a") for n in "abc"]
    machine, actions = run(machine, *long, now_s=105.0)
    assert not [x for x in actions if isinstance(x, ev.Kill)], "nobody waits for them"
    others = [ev.Beat(n, 1, 3, others_s=1.0) for n in "ac"]
    machine, actions = run(machine, *others, long[1], now_s=106.0)
    assert not [x for x in actions if isinstance(x, ev.Kill)], "nobody has waited for long"
    others = [ev.Beat(n, 1, 3, others_s=6.0) for n in "ac"]
    machine, actions = run(machine, *others, long[1], now_s=107.0)
    (kill,) = [x for x in actions if isinstance(x, ev.Kill)]
    assert kill.member == "b" and "part of step 4 for 9 s" in kill.why


def test_a_host_that_gets_a_notice_leaves_by_plan_and_the_others_go_on_from_the_state_in_memory():
    machine = trained(FAST, "a", "b", "c")
    why = "notice of AWS: the machine will be stopped, in 110 s"
    machine, actions = run(machine, ev.Leave("b", why, 110.0))
    told, leases, ends = actions
    assert str(told.decision) == f"b is told to leave: {why}"
    assert told.decision.numbers == {"notice_s": 110.0}
    assert leases == ev.EndLeases(("b",)), "at once, and not only when the generation has ended"
    assert ends == ev.EndGeneration(("a", "b", "c"), 1)
    machine, actions = run(machine, ev.Leave("b", why, 60.0))
    assert not [x for x in actions if isinstance(x, ev.Tell)], "said once"
    ready = [ev.Ready(n, 1, held, state_at=n) for n, held in (("a", 7), ("b", 8), ("c", 7))]
    machine, actions = run(machine, *ready)
    (form,) = [x for x in actions if isinstance(x, ev.Form)]
    assert (form.ranks, form.holders, form.holds) == (("a", "c"), ("b",), 8)
    assert [x.decision for x in form.news] == ["told to leave"], "hooks and the report hear of it"
    assert machine.num_failures == 0 and machine.can_go_on


def test_a_host_that_leaves_while_others_gather_or_form_takes_no_more_leases_either():
    machine = trained(FAST, "a", "b", "c")
    machine, _ = run(machine, ev.Leave("a", "SIGTERM"))
    machine, actions = run(machine, ev.Leave("b", "SIGTERM"))
    assert ev.EndLeases(("b",)) in actions
    machine, _ = run(machine, ev.Stop())
    machine, actions = run(machine, ev.Leave("c", "SIGTERM"))
    assert not [x for x in actions if isinstance(x, ev.EndLeases)], "all are told to stop anyway"


def test_a_host_that_is_left_out_takes_no_more_leases():
    machine = arrived(FAST, "a", "b", "c")
    machine, actions = windows(machine, SLOW, 4)
    assert ev.EndLeases(("c",)) in actions
