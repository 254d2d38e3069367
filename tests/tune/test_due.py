"""When a verdict is due: by time, by steps, and as soon as what was waited for has happened."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.tune.due import (
    CALM_STEPS,
    LEAST_S,
    LEAST_TIMES,
    LESS_OFTEN,
    PATIENCE,
    VerdictTimer,
)
from jaxgoodput.tune.verdict import PROBE_S, PROBE_STEPS

DEPTH = 2


class Run:
    """Steps of a second each, or of `step_s`, without a tuner."""

    def __init__(self, step_s=1.0, *, adapts=True):
        self.step_s = step_s
        self.step, self.num_taken, self.asked_at = 0, 0, []
        self.state = {"is_trial": False, "is_known": True, "has_fit": True}
        self.has_drifted, self.num_looks = False, 0
        self.is_timed = True
        self.due = VerdictTimer(
            0.0,
            warm_up_steps=4,
            dwell_steps=20,
            every_s=1e9,
            every_steps=50,
            depth=DEPTH,
            adapts=adapts,
        )

    def go(self, steps, *, changed=False, disturbed=False):
        """Take steps; the first one uses another batch if `changed`."""
        for i in range(steps):
            self.step += 1
            self.due.add_step(
                self.step * self.step_s,
                self.step,
                is_changed=changed and i == 0,
                is_disturbed=disturbed,
                num_taken=self.num_taken,
            )
            now_s = self.step * self.step_s
            if self.due.is_due(
                now_s,
                self.step,
                has_drifted=self.look,
                is_timed=lambda: self.is_timed,
                **self.state,
            ):
                self.due.asked(now_s, self.step, is_known=self.state["is_known"])
                self.asked_at.append(self.step)
        return self.asked_at

    def look(self):
        self.num_looks += 1
        return self.has_drifted


def test_verdicts_come_at_regular_intervals():
    assert Run().go(160) == [50, 100, 150]


@given(step_s=st.floats(1e-4, 1.0), at=st.integers(20, 48))
def test_a_drift_calls_for_a_verdict_but_is_not_looked_for_at_every_step(step_s, at):
    run = Run(step_s)
    run.due.asked(0.0, 0, is_known=True)
    run.go(at)
    assert run.num_looks <= at * step_s / LEAST_S
    run.has_drifted = True
    soon = max(at + 1, LEAST_S / step_s)
    asked = run.go(math.ceil(LEAST_S / step_s) + 1)
    assert asked and asked[0] <= soon + LEAST_S / step_s + 1


@pytest.mark.parametrize("adapts", [True, False])
@pytest.mark.parametrize("answer_s", [0.02, 0.1, 1.0])
def test_verdicts_take_a_small_share_of_the_time_however_dear_they_are(answer_s, adapts):
    run = Run(0.1, adapts=adapts)
    run.due.answer_s = answer_s
    asked = run.go(4_000)
    times = LEAST_TIMES if adapts else LESS_OFTEN * LEAST_TIMES
    assert len(asked) * answer_s <= 400 / times + 2 * answer_s
    assert len(asked) >= 400 / max(times * answer_s, 5.0) - 2, "but they do come"


def test_the_first_verdict_waits_for_no_time():
    run = Run(1e-4)
    run.state["is_known"] = False
    assert run.go(20) == [4]
    run.state["is_known"] = True
    assert run.go(1) == [4, 21]


def test_while_the_noise_is_unknown_they_come_often_and_then_at_once():
    run = Run()
    run.state["is_known"] = False
    assert run.go(11) == [4, 8]
    run.state["is_known"] = True
    assert run.go(1) == [4, 8, 12]


def test_the_end_of_a_compilation_asks_once_times_are_undisturbed():
    run = Run()
    assert run.go(60, disturbed=True) == [50]
    assert run.go(20) == [50, 60 + CALM_STEPS]


def test_nothing_is_asked_before_the_last_change_is_in_use_and_has_settled():
    run = Run()
    run.go(50)
    run.due.posted(1)
    assert run.go(100) == [50], "the loop has not accepted the change"
    run.num_taken = 1
    start = run.step + 1
    assert run.go(30, changed=True) == [50, start + 20]


@pytest.mark.parametrize("ending", ["is_judging", "has_ended"])
def test_an_answer_that_is_awaited_or_over_keeps_the_timer_still(ending):
    run = Run()
    run.due.is_judging = ending == "is_judging"
    assert bool(run.go(60)) == (ending != "is_judging")


@pytest.mark.slow
@given(step_s=st.floats(1e-4, 1.0), is_trial=st.booleans())
def test_a_change_is_judged_after_its_few_steps_and_a_moment(step_s, is_trial):
    """The first steps with a batch are disturbed, so that a few very short ones say nothing."""
    run = Run(step_s)
    run.state["is_trial"] = is_trial
    run.go(10)
    run.asked_at.clear()
    start = run.step + 1
    (asked, *_) = run.go(2000, changed=True)
    steps = PROBE_STEPS if is_trial else 20
    assert asked - start >= steps and (asked - start) * step_s >= PROBE_S - 1e-9
    assert asked - start <= max(steps, PROBE_S / step_s + 1)


@given(timed_after=st.integers(0, 100))
def test_a_trial_is_judged_by_its_own_times_but_not_waited_for_without_end(timed_after):
    run = Run()
    run.state["is_trial"] = True
    run.go(10)
    run.due.asked(0.0, run.step, is_known=True)
    run.asked_at.clear()
    start = run.step + 1
    run.is_timed = timed_after == 0
    run.go(max(timed_after, 1), changed=True)
    run.is_timed = True
    run.go(100)
    expected = min(max(timed_after, PROBE_STEPS), PATIENCE * PROBE_STEPS)
    assert run.asked_at[0] - start == expected
