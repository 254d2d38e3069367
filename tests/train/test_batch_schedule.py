"""A user's own schedule of batch sizes is followed, without a compilation in the loop."""

import time

import jax
import pytest
from problems import Mean, Recorder, config, rows

from jaxgoodput.goodput.memory import StepBytes
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.observe.events import StepEnd, TuneEnd, Window
from jaxgoodput.train.config import with_overrides
from jaxgoodput.tune.plan import batch_plan, scheduled


def batches(seen):
    """The global batches of a run, each with the first step that had it."""
    found = {}
    for step in seen.of(StepEnd):
        found.setdefault(step.config.global_batch_size, step)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("length", [{"epochs": 200}, {"epochs": None, "base_steps": 900.0}])
@pytest.mark.parametrize(
    ("count", "background"),
    [pytest.param(1, True, marks=pytest.mark.nightly), (8, True), (1, False)],
)
def test_it_is_followed_on_its_clock(tmp_path, length, count, background):
    seen = Recorder()
    schedule = {0: 16, 0.3: 32, 0.6: 64}
    settings = config(
        tmp_path,
        policy=schedule,
        batch=BatchLimits(base=16, max=64),
        execution__background_compile=background,
        **length,
    )
    Mean(settings, data=rows(), hooks=[seen], devices=jax.devices()[:count]).fit()
    found = batches(seen)
    assert list(found) == [16, 32, 64]
    for share, batch in schedule.items():
        first = found[batch]
        done = (
            first.progress / settings.base_steps
            if settings.base_steps
            else first.samples / (200 * 96)
        )
        assert share <= done < share + 0.1
    reasons = [tune.verdict.reason for tune in seen.of(TuneEnd)]
    assert "change: 16 -> 32 samples, as scheduled" in reasons
    assert not any("probe" in reason or "return" in reason for reason in reasons)


@pytest.mark.slow
def test_a_hook_that_is_slow_holds_up_no_scheduled_batch(tmp_path):
    """It is at work until the batch has changed, which it therefore cannot be waited for."""
    changed = []

    def until_the_batch_has_changed(step):
        deadline = time.monotonic() + 120.0
        while step.step == 5 and trainer._loop.now.batch.global_batch_size == 16:
            assert time.monotonic() < deadline, "the batch does not change while a hook is at work"
            time.sleep(0.01)
        changed.append(step.step)

    settings = config(
        tmp_path, policy={0: 16, 0.2: 32}, batch=BatchLimits(base=16, max=32), epochs=40
    )
    seen = Recorder(until_the_batch_has_changed)
    trainer = Mean(settings, data=rows(), hooks=[seen], devices=jax.devices()[:1])
    trainer.fit()
    assert changed == list(range(1, len(changed) + 1))
    assert list(batches(seen)) == [16, 32]
    # And no window has steps of both.
    counts: dict[int, int] = {16: 0, 32: 0}
    for window in seen.of(Window):
        counts[window.config.global_batch_size] += window.num_steps
    steps = [step.config.global_batch_size for step in seen.of(StepEnd)]
    assert counts == {16: steps.count(16), 32: steps.count(32)}


def test_only_what_is_scheduled_is_planned_for():
    asked = []

    def needs(micro, parts):
        asked.append(micro)
        return StepBytes(arguments=1, outputs=0, temporaries=1)

    plan = batch_plan(
        BatchLimits(base=16, max=256, min_global=8),
        2,
        1000,
        budget=10,
        needs=needs,
        schedule={0: 8, 0.5: 96},
    )
    assert plan.start == BatchConfig(micro_batch_size=4, num_micro_batches=1, num_replicas=2)
    assert plan.sizes == (4, 48) and plan.limits.smallest == 8 and plan.limits.max == 96
    assert asked == [4]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({0.1: 16}, "and 0 must be one of them"),
        ({0: 16, 1.0: 32}, "from 0 to below 1"),
        ({0: 16, 0.5: 4096}, "between 16 and 64 samples"),
        ({}, "and 0 must be one of them"),
    ],
)
def test_one_that_cannot_be_is_refused(tmp_path, schedule, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, policy=schedule)


def test_it_may_be_given_on_the_command_line(tmp_path):
    settings = config(tmp_path)
    changed = with_overrides(settings, ['policy={"0": 16, "0.25": 64}'])
    assert changed.policy == {0.0: 16, 0.25: 64}
    assert with_overrides(changed, ["policy=fixed"]).policy == "fixed"
    with pytest.raises(ValueError, match="policy has the keys .* must be numbers"):
        with_overrides(settings, ['policy={"begin": 16}'])


def test_a_share_has_the_batch_of_the_latest_date_before_it():
    schedule = {0.5: 4, 0: 1, 0.25: 2}
    assert [scheduled(schedule, share) for share in (0, 0.2, 0.25, 0.4, 0.5, 1.5)] == [
        1, 1, 2, 2, 4, 4,
    ]  # fmt: skip
