"""What belongs to a run outlives its processes: timers, what it has learnt of batches, its account."""

import contextlib
import dataclasses
import json
import math
import uuid
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Evaluated, InStep, Recorder, config

from jaxgoodput._fields import serial
from jaxgoodput.clock import FakeClock
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.goodput.efficiency import GradGroups
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.events import Checkpoint, EvalEnd
from jaxgoodput.train.checkpoints.memory import RunMemory, explored_in, findings_in
from jaxgoodput.train.checkpoints.meta import OLDEST, CheckpointMeta
from jaxgoodput.train.config import Config, Evaluation, Saving
from jaxgoodput.train.control import Due, Preempted, Timers
from jaxgoodput.train.decider import BatchFindings
from jaxgoodput.train.process import LAUNCHED, LauncherLink
from jaxgoodput.train.runs.membership import Generation, ReleasedExit, RunSnapshot
from jaxgoodput.tune.evidence import SETTLE_STEPS, Evidence
from jaxgoodput.tune.exploring import Account, Explored, Explorer, Outcomes
from jaxgoodput.tune.trial import Trials


def batch(size, replicas=1):
    return BatchConfig(
        micro_batch_size=size // replicas, num_micro_batches=1, num_replicas=replicas
    )


def told_again(value):
    """The value as the next process reads it."""
    text = json.dumps(serial.encode(value), allow_nan=False)
    return serial.decode(json.loads(text), type(value), "memory")


# -- what is learnt ----------------------------------------------------------------------------------

SIZES = st.lists(st.sampled_from([16, 32, 64, 256]), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    sizes=SIZES,
    lengths=st.lists(st.integers(1, 150), min_size=6, max_size=6),
    cut=st.floats(0.0, 1.0),
    explosions=st.floats(0.0, 0.05),
    leaps=st.sampled_from([0.0, 5.0]),
    seed=st.integers(0, 2**16),
)
def test_the_next_processes_learn_on_as_if_they_had_seen_it_all(
    sizes, lengths, cut, explosions, leaps, seed
):
    rng, samples, updates = np.random.default_rng(seed), 0, []
    grad = GradGroups(sqr=np.array([1.0]), var=np.array([100.0]))
    for number, (size, length) in enumerate(zip(sizes, lengths, strict=False)):
        for _ in range(length):
            samples += size
            loss = 3 / (1 + samples / 1e4) + 0.1 * rng.standard_normal() + leaps * (number == 2)
            explodes = bool(rng.random() < explosions)
            updates.append(((batch(size), samples, loss, size), explodes))
    one, other = Evidence(), Evidence()
    for number, (update, explodes) in enumerate(updates):
        if number == int(cut * len(updates)):
            other = told_again(other)
        for evidence in (one, other):
            evidence.add(*update, explodes=explodes)
            evidence.calibrate(grad, 16)
            if number % 40 == 39:
                if explodes or evidence.level.leap is not None:
                    evidence.deny(100.0, 0.1, leaps=True)
                elif number % 80 == 79:
                    evidence.deny(100.0, 0.1)
                evidence.review(150.0, 0.05)
    assert serial.encode(other) == serial.encode(one)
    # And it says the same.
    assert other.calibration.factor == one.calibration.factor
    for ask in (Evidence.now, lambda x: x.before, lambda x: x.after, lambda x: x.bar):
        assert serial.encode(ask(other)) == serial.encode(ask(one))


@pytest.mark.parametrize(
    ("now", "goes_on"),
    [
        (batch(64), True),
        (batch(64, replicas=2), False),
        (dataclasses.replace(batch(64), strategy="fsdp2"), False),
    ],
    ids=["as before", "more devices", "another strategy"],
)
def test_a_trial_ends_where_there_is_no_way_back(now, goes_on):
    trials = Trials(is_running=True, home=batch(16), strategies=["data1"])
    trials.resumed(now)
    assert trials.is_running is goes_on
    assert trials.home == (batch(16) if goes_on else None)
    assert trials.strategies == [], "their times are not known any more"


@given(
    decides=st.tuples(st.booleans(), st.booleans()),
    steps=st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
def test_what_the_process_that_decides_has_found_is_preferred(decides, steps):
    came, own = (
        dataclasses.replace(
            remembered(),
            decides=one,
            step=step,
            findings=BatchFindings(trials=Trials(strategies=[name])),
        )
        for one, step, name in zip(decides, steps, ["came", "own"], strict=True)
    )
    found = findings_in(came, own, came.step)
    assert found is not None
    # What came with the state, unless only this process decides, and it has not seen steps that are undone.
    prefers_own = decides == (False, True) and own.step <= came.step
    assert found.trials.strategies == ["own" if prefers_own else "came"]
    assert findings_in(None, None, 0) is None


# -- the account -------------------------------------------------------------------------------------


@given(
    spent=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=5),
    passed=st.lists(st.floats(1.0, 1e4), min_size=5, max_size=5),
)
def test_the_account_is_that_of_the_whole_run(spent, passed):
    now_s, whole_s, earlier = 0.0, 0.0, None
    for price_s, seconds in zip(spent, passed, strict=False):
        explorer = Explorer(1.0, now_s)
        if earlier is not None:
            explorer.resume(earlier, now_s)
        explorer.account.spend(price_s, total_s=500.0)
        now_s, whole_s = now_s + seconds, whole_s + seconds
        earlier = told_again(explorer.explored(now_s))
        now_s += 1000.0  # nothing trains
    assert earlier is not None
    assert earlier.passed_s == pytest.approx(whole_s)
    assert earlier.account.spent_s == pytest.approx(sum(spent))
    assert earlier.account.expected_s == 500.0


def remembered(explored=None, step=0):
    return RunMemory(
        timers=Timers(),
        best_at=0.0,
        best_of=None,
        findings=BatchFindings(),
        decides=True,
        step=step,
        explored=explored,
        explored_step=step,
    )


@given(steps=st.lists(st.one_of(st.none(), st.integers(0, 100)), max_size=5))
def test_the_newest_account_counts_whoever_has_it(steps):
    def known(step):
        account = Account(spent_s=float(step))
        return Explored(account=account, outcomes=Outcomes(), passed_s=1.0)

    memories = [remembered(None if s is None else known(s), s or 0) for s in steps]
    found, step = explored_in(None, *memories)
    told = [s for s in steps if s is not None]
    assert step == max(told, default=0)
    assert (None if found is None else found.account.spent_s) == max(told, default=None)


# -- timers ------------------------------------------------------------------------------------------


@given(
    stays=st.lists(st.floats(120.0, 480.0), min_size=5, max_size=60),
    every_s=st.sampled_from([100.0, 600.0, 3600.0]),
    every_base_steps=st.sampled_from([None, 50.0, 500.0]),
    new=st.lists(st.booleans(), min_size=60, max_size=60),
    cut=st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_what_is_due_does_not_depend_on_who_trains(stays, every_s, every_base_steps, new, cut):
    """Nor on hosts that leave at the step at which a checkpoint is due, before it is made."""
    limits, step_s = BatchLimits(base=8, max=8), 10.0
    saving = Saving(every_s=every_s, every_base_steps=every_base_steps)
    settings = Config(workdir="x", batch=limits, base_steps=1e6, saving=saving)
    due, now_s, progress, count, earlier = Due(settings), 0.0, 0.0, 0, None
    for stay, is_new, is_cut in zip(stays, new, cut, strict=False):
        if is_new:  # processes whose clocks began at other times
            due, now_s = Due(settings), now_s + 1e5
        due.begin(now_s, progress, earlier=earlier)
        num_steps = int(stay / step_s)
        for step in range(1, num_steps + 1):
            now_s, progress = now_s + step_s, progress + 1
            wish = due.asked(now_s, progress)
            if wish is not None and not (is_cut and step == num_steps):
                with due.saving():
                    count += 1
        earlier = told_again(due.timers(now_s, progress))
    by_time = progress * step_s / every_s
    by_progress = progress / every_base_steps if every_base_steps else 0.0
    # Each interval ends with a whole step, or with the one after it, and both may be due at one.
    steps_s, steps = every_s / step_s, every_base_steps or math.inf
    late = min(steps_s, steps) / (min(steps_s, steps) + 2)
    assert max(by_time, by_progress) * late - 1 <= count
    assert count <= by_time + by_progress


class Host:
    """A process of a job in which another host takes over each time: `kept` is the state it finds."""

    group_size, num_others, failure_every_s = 1, 0, math.inf

    def __init__(self, kept):
        self.kept, self.is_new = kept, True
        self.ask = lambda: None

    def enter(self, kept, share):
        if not self.is_new:
            self.kept = kept
            raise ReleasedExit("another host takes over")
        self.is_new = False
        return Generation(0, 0, 1, self.kept, {})

    def on_regroup(self, ask):
        self.ask = ask

    def is_broken(self):
        return False

    def takes_leases(self):
        return True

    def device_at_work(self, num_samples):
        return contextlib.nullcontext()

    def others_at_work(self):
        return contextlib.nullcontext()

    def computed(self, own):
        pass

    def keep(self, kept):
        pass

    def done(self):
        pass


def spot_pool(folder, clock, *, seconds, seed):
    """Train on hosts that stay 2 to 8 minutes each; return every event."""
    rng, events, kept = np.random.default_rng(seed), [], None
    step_s, end_s = 30.0, clock.now() + seconds
    while clock.now() < end_s:
        host, leaves_s = Host(kept), clock.now() + rng.uniform(120.0, 480.0)

        def stepped(event, host=host, leaves_s=leaves_s):
            clock.advance(step_s)
            if clock.now() >= leaves_s:
                host.ask()

        seen = Recorder(stepped)
        made = config(
            folder,
            base_steps=1e6,
            policy="goodput",
            saving=Saving(every_s=600.0, at_end=False, hang_after_s=1e9),
            evaluation=Evaluation(every_s=900.0),
            execution__background_compile=True,
        )
        trainer = Evaluated(made, hooks=[seen], loop=InStep, clock=clock)
        before = LAUNCHED.set(LauncherLink(membership=host))
        try:
            with contextlib.suppress(ReleasedExit):
                trainer.fit()
        finally:
            LAUNCHED.reset(before)
        events += seen.events
        assert host.kept is not None
        kept = RunSnapshot.from_bytes(host.kept.to_bytes())
    return events, kept


@pytest.mark.slow
@pytest.mark.parametrize(
    "hours",
    [0.5, pytest.param(24.0, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])],
    ids=["half an hour", "day"],
)
def test_checkpoints_and_evaluations_come_as_often_as_configured_on_hosts_that_change(
    tmp_path, hours
):
    seconds = hours * 3600.0
    events, kept = spot_pool(tmp_path, FakeClock(1e5), seconds=seconds, seed=0)
    saves = [e for e in events if isinstance(e, Checkpoint)]
    evaluations = [e for e in events if isinstance(e, EvalEnd)]
    assert seconds / 630.0 - 1 <= len(saves) <= seconds / 600.0 + 1
    assert seconds / 930.0 - 1 <= len(evaluations) <= seconds / 900.0 + 1
    # What was learnt came along, too: losses of the first host are among the last one's.
    memory = kept.meta.memory
    assert memory is not None and memory.explored is not None
    assert memory.explored.passed_s == pytest.approx(seconds, rel=0.2)
    assert memory.findings.evidence.now().num_steps > 480.0 / 30.0


# -- a restart ---------------------------------------------------------------------------------------


class Seeing(InStep):
    """Keeps what the run remembers when it begins and when it ends."""

    memories: ClassVar[list[RunMemory]] = []

    def run(self):
        Seeing.memories = [self.keeper.memory()]
        try:
            return super().run()
        finally:
            self.memories.append(self.keeper.memory())


@pytest.mark.slow
def test_a_restart_goes_on_with_what_was_learnt_and_with_its_timers(tmp_path):
    settings = config(
        tmp_path,
        base_steps=60.0,
        policy="goodput",
        evaluation=Evaluation(every_base_steps=25.0),
        saving=Saving(every_s=None),
    )
    seen = Recorder(lambda e: first.request_stop() if e.step == 15 else None)
    first = Evaluated(settings, hooks=[seen], loop=InStep)
    with pytest.raises(Preempted):
        first.fit()
    (saved,) = (tmp_path / "checkpoints").glob("[0-9]*")
    then = Evaluated(settings, hooks=[(later := Recorder())], loop=Seeing)
    then.fit()
    begun, ended = Seeing.memories
    # It begins with the losses that the first run has seen, and adds its own.
    assert begun.findings.evidence.now().num_steps + SETTLE_STEPS >= 15
    assert ended.findings.evidence.now().num_steps > begun.findings.evidence.now().num_steps
    assert ended.step == 60
    at = [e.step for e in (*seen.of(EvalEnd), *later.of(EvalEnd))]
    whole = Recorder()
    other = dataclasses.replace(settings, workdir=str(tmp_path / uuid.uuid4().hex))
    Evaluated(other, hooks=[whole], loop=InStep).fit()
    assert at == [e.step for e in whole.of(EvalEnd)]
    assert saved.name == "15"


def meta(memory):
    return CheckpointMeta(
        step=3,
        samples=48,
        cursor=Cursor(seed=1),
        batch=batch(16),
        timings={},
        statistics_every=1,
        ledger=TimeLedger(FakeClock()).saved(),
        memory=memory,
    )


@given(seed=st.integers(0, 2**16), length=st.integers(0, 300), step=st.integers(0, 100))
def test_a_memory_comes_back_with_its_checkpoint(seed, length, step):
    rng, evidence = np.random.default_rng(seed), Evidence()
    for number in range(length):
        size = 64 if number > 150 else 16
        evidence.add(batch(size), 16 * (number + 1), rng.normal(), size)
    known = Explored(account=Account(spent_s=1.5), outcomes=Outcomes(), passed_s=2.0)
    whole = dataclasses.replace(remembered(known, step), findings=BatchFindings(evidence=evidence))
    saved = json.loads(json.dumps(meta(whole).to_json(), allow_nan=False))
    assert serial.encode(CheckpointMeta.from_json(saved).memory) == serial.encode(whole)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda memory: memory["findings"]["evidence"].update(of_a_later_version=1),
        lambda memory: memory["findings"]["evidence"]["_calibration"]["likelihood"].pop(),
        lambda memory: memory.pop("timers"),
        lambda memory: memory.update(best_at="soon"),
    ],
    ids=["unknown field", "another length", "missing field", "another type"],
)
def test_a_memory_that_cannot_be_read_costs_no_checkpoint(caplog, spoil):
    saved = json.loads(json.dumps(meta(remembered()).to_json()))
    spoil(saved["memory"])
    found = CheckpointMeta.from_json(saved)
    assert found == meta(None)
    assert "what the run remembered besides its state cannot be read" in caplog.text
    caplog.clear()
    assert CheckpointMeta.from_json(saved, with_memory=False) == meta(None)
    assert not caplog.records  # it is nothing to those who only look


def test_a_checkpoint_from_before_there_was_a_memory_is_read():
    saved = meta(None).to_json() | {"version": OLDEST}
    del saved["memory"]
    assert CheckpointMeta.from_json(saved) == dataclasses.replace(meta(None), version=OLDEST)
