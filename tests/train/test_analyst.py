"""When the analyst asks, and what a run of steps makes of the answers; steps here are made up."""

import jax.numpy as jnp
import numpy as np
import pytest
from problems import AtOnce, configured

from jaxgoodput.clock import FakeClock
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.engine.chips import Arithmetic
from jaxgoodput.engine.state import StepMetrics
from jaxgoodput.goodput.efficiency import GradParams, efficiency
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.observe.hooks import Hook
from jaxgoodput.optim.adaptation import NoiseReadout
from jaxgoodput.optim.noise import MeasuredGroups
from jaxgoodput.train.analyst import Analyst
from jaxgoodput.train.compile_ahead import StrategyCompiler
from jaxgoodput.train.control import Requests
from jaxgoodput.train.watcher import StepResult, Ticket
from jaxgoodput.tune.due import CALM_STEPS
from jaxgoodput.tune.timings import Parts
from jaxgoodput.tune.verdict import PROBE_STEPS

SIZES = (512, 2048, 8192, 16384)
# Linear up to 8192, and beyond it a cliff that no straight line knows of.
STEP_S = {512: 0.0093, 2048: 0.0120, 8192: 0.0225, 16384: 0.0560}
BESIDE_COMPILATION = 2.0  # times as long


class OneStrategy(StrategyCompiler):
    """What a run with one strategy could use."""

    def __init__(self, stage, limits):
        self.stage, self.allowed = stage, limits
        self.settled_everywhere = None

    @property
    def num_strategies(self):
        return 1

    @property
    def _is_on_cpu(self):
        return False

    def limits(self, strategy):
        return self.allowed

    def sizes(self, strategy):
        return SIZES

    def settled(self, strategy):
        return SIZES  # there is nothing left to compile

    def adopt(self, config):
        pass

    def measures_near(self, strategy):
        return True

    def may_measure(self, config):
        return True

    def accumulates(self, strategy):
        return True

    def num_plain(self, strategy):
        return 1.0

    def ready(self, strategy):
        return self.stage.ready

    def arithmetic(self, config):
        return Arithmetic(tflops_per_sample=1e-3, num_devices=2, peak_tflops=100.0)

    def memory_limit(self, strategy):
        return SIZES[-1]

    def others(self):
        return ()

    def start(self):
        pass


class Listener(Hook):
    def __init__(self):
        self.verdicts, self.steps, self.windows = [], [], []

    def on_window(self, event):
        self.windows.append(event)

    def on_tune_end(self, event):
        self.verdicts.append(event)

    def on_step_end(self, event):
        self.steps.append(event)


class Course:
    """A training run without training: the analyst's own view of it."""

    def __init__(self, tmp_path, *, start, ready=SIZES, **settings):
        self.clock, self.requests, self.heard = FakeClock(), Requests(), Listener()
        self.ready, self.errors, self.step, self.num_taken = ready, [], 0, 0
        self.every = 1  # steps between two that measure the noise, as the loop was asked
        self.samples, self.var = (
            0,
            1.0,
        )  # so far; noise that the gradients show, at a signal of 1e-6
        self.loss = lambda size: 1.0  # after a step of this size
        self.rate = 0.1  # the user's own
        self.explodes = lambda size: False  # the gradient, at this size
        self.most_gain = 0.0  # base steps that a step may be worth
        self.factors = {True: 1.0, False: 1.0}  # of the time of measured and of plain steps
        self.config = BatchConfig(micro_batch_size=start, num_micro_batches=1, num_replicas=1)
        usual = {"tuning__dwell_steps": 10, "tuning__every_steps": 4, "tuning__warm_up_steps": 4}
        config = configured(
            workdir=str(tmp_path),
            batch=BatchLimits(
                base=512, max=16384, micro=(512, 16384), sizes=SIZES, max_micro_batches=1
            ),
            base_steps=1e6,
            **{**usual, **settings},
        )
        self.analyst = Analyst(
            config,
            OneStrategy(self, config.batch),
            current=self.config,
            requests=self.requests,
            compile_s=1.0,
            hooks=[self.heard],
            clock=self.clock,
            on_error=self.errors.append,
            book=lambda name, seconds: None,
            learning_rate=lambda progress: self.rate,
            dataset_size=10**6,
            adapt=True,
            tuner=AtOnce,
        )

    def go(self, steps, *, compiling=False, ahead=2):
        """Sizes used by the next `steps` steps, of a loop that many steps ahead of the analyst."""
        used, delayed = [], []
        for _ in range(steps):
            delayed.append((self.requests.take(), self.requests.num_batches_taken))
            if len(delayed) > ahead:
                wish, self.num_taken = delayed.pop(0)
                self.config = wish.batch or self.config
                self.every = wish.statistics_every or self.every
            self.step += 1
            size = self.config.micro_batch_size
            measured = self.step % self.every == 0
            seconds = STEP_S[size] * (BESIDE_COMPILATION if compiling else 1.0)
            seconds *= self.factors[measured]
            self.clock.advance(seconds)
            self.analyst.result(self._result(size, seconds, compiling, measured))
            self.analyst.flush()
            self.analyst.flush()  # an answer to what was asked meanwhile lies behind the first
            assert not self.errors, self.errors
            used.append(size)
        return used

    def _result(self, size, seconds, compiling, measured):
        here = Cursor(seed=0)
        self.samples += size
        ticket = Ticket(
            step=self.step,
            config=self.config,
            measured=measured,
            began_s=self.clock.now() - seconds,
            timed=True,
            busy=compiling,
            num_samples=size,
            samples=self.samples,
            num_batches_taken=self.num_taken,
            before=here,
            after=here,
            metrics=jnp.zeros(()),
        )
        noise = NoiseReadout(
            sqr=1e-6,
            var=self.var,
            known=True,
            group_sqr=np.array([1e-6]),
            group_var=np.array([self.var]),
            seen_groups=1.0,
            num_samples=100.0,
            newest_samples=100.0,
        )
        metrics = StepMetrics(
            loss=self.loss(size),
            weight=1.0,
            grad_norm=1.0,
            is_finite=True,
            num_skipped=0,
            skipped_in_a_row=0,
            num_samples=size,
            num_groups=1,
            progress=float(self.step),
            gain=1.0,
            explodes=self.explodes(size),
            most_gain=self.most_gain,
            noise=noise,
            measured=MeasuredGroups(
                sqr=np.array([1e-6]), sqr_error=np.array([1e-7]), var_error=0.01
            ),
            aux={},
        )
        return StepResult(
            ticket=ticket,
            metrics=metrics,
            control=np.zeros(0),
            parts=Parts(step_s=seconds),
            ready_s=self.clock.now(),
        )


@pytest.fixture
def course(tmp_path):
    made = []

    def start(**kind):
        made.append(Course(tmp_path, **kind))
        return made[-1]

    yield start
    for one in made:
        one.analyst.close()


def test_a_size_that_the_model_hopes_for_is_tried_once_and_left(course):
    run = course(start=2048)
    used = run.go(150)
    assert run.config.micro_batch_size == 8192, "measured times go before the model's line"
    trial = [i for i, size in enumerate(used) if size == 16384]
    assert PROBE_STEPS <= len(trial) <= 2 * PROBE_STEPS
    assert trial == list(range(trial[0], trial[-1] + 1)), "and not again"
    (back,) = [e for e in run.heard.verdicts if e.verdict.reason.startswith("return")]
    assert "8192 samples is the best batch" in back.verdict.reason


def test_verdicts_and_windows_tell_how_the_race_stands_and_what_it_costs(course):
    run = course(start=2048, reporting__window_s=1e-6)
    run.go(150)
    race = {one.config.global_batch_size: one for one in run.heard.verdicts[-1].race}
    assert list(race) == list(SIZES)
    assert [race[size].standing for size in SIZES] == ["compiled", "tried", "in use", "tried"]
    assert [race[size].is_timed for size in SIZES] == [False, True, True, True]
    for size in SIZES[1:]:
        assert race[size].step_s == pytest.approx(STEP_S[size], rel=0.05)
    assert race[8192].num_steps >= 20 and race[8192].gained_error >= 0
    accounts = [window.account for window in run.heard.windows]
    earned_s = [account.earned_s for account in accounts]
    assert earned_s == sorted(earned_s) and earned_s[-1] > 0
    assert {account.spent_s for account in accounts} == {0.0}, "nothing had to be compiled"


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
def test_what_the_loss_says_of_a_larger_batch_reaches_the_next_verdicts(course, factor):
    """In both directions. What the gradients show is told as it is."""
    run = course(start=512, ready=(512,), tuning__max_growth=4.0)
    run.var = 8e-6
    real, used = GradParams(sqr=1e-6, var=factor * run.var), [512 * 1000.0]

    def loss(size):
        used[0] += size * float(efficiency(real, size / 512))
        return (used[0] / 1e6) ** -0.1

    run.loss = loss
    run.samples = 512 * 1000
    run.go(600)
    run.ready = (512, 2048)
    run.go(450)
    assert run.config.micro_batch_size == 2048
    last = run.heard.verdicts[-1]
    assert last.grad.var == pytest.approx(run.var)
    if factor == 1:
        assert 0.75 < last.noise_factor < 1.3
    else:
        assert (last.noise_factor > 1.3) if factor > 1 else (last.noise_factor < 0.75)
        assert "times as large, by how the loss fell" in last.verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("explodes", [False, True])
def test_a_leap_sends_the_run_back_at_once_until_the_rate_has_halved(course, explodes):
    run = course(start=2048, ready=(512, 2048))

    def is_too_large(size):
        return size >= 8192 and run.rate > 0.06

    if explodes:
        run.explodes = is_too_large
    else:
        run.loss = lambda size: 3.0 if is_too_large(size) else 1.0
    run.go(100)
    run.ready = SIZES
    used = run.go(400)
    first = used.index(8192)
    assert used[first : first + 20].count(8192) <= 12, "eight losses, and the way there and back"
    assert max(used) == 8192 and used.count(8192) <= 12, "it is not tried again, nor a larger one"
    (back,) = [e for e in run.heard.verdicts if e.verdict.denied]
    assert back.switched and back.verdict.config.global_batch_size == used[first - 1]
    what = "the gradient explodes" if explodes else "the loss leaps"
    assert back.verdict.reason.startswith(f"return: {what} with 8192 samples (")
    race = {one.config.global_batch_size: one for one in run.heard.verdicts[-1].race}
    assert race[8192].standing == "banned"
    run.rate = 0.05
    assert 8192 in run.go(100)
    assert run.config.micro_batch_size == 8192


def test_one_explosion_limits_what_larger_batches_are_worth_until_the_limit_has_grown(course):
    run = course(start=2048)
    run.go(150)
    assert run.config.micro_batch_size == 8192
    run.most_gain = 2.0  # a step of 8,192 samples was worth nearly 16 base steps
    run.go(100)
    best = min((512, 2048, 8192), key=lambda size: STEP_S[size] / min(size / 512, 2.0))
    assert run.config.micro_batch_size == best < 8192
    why = "as the gradient has exploded, no step is worth more than 2 base steps yet"
    assert why in run.heard.verdicts[-1].verdict.reason
    run.most_gain = 14.0
    run.go(100)
    assert run.config.micro_batch_size == 8192
    run.most_gain = 0.0
    run.go(30)
    assert "exploded" not in run.heard.verdicts[-1].verdict.reason


def test_a_loss_that_does_not_come_back_sends_it_to_the_smallest_batch(course):
    run, leapt = course(start=512, ready=(512,)), []

    def loss(size):
        leapt.extend([size] * (size > 2048))
        return 3.0 if leapt else 1.0

    run.loss = loss
    for more in ((512, 2048), SIZES):
        run.go(100)
        run.ready = more
    used = run.go(400)
    first = used.index(8192)
    assert used[first:].index(512) > used[first:].index(2048) > 0
    reasons = [e.verdict.reason for e in run.heard.verdicts if e.verdict.denied]
    assert len(reasons) == 2 and "has not come back with 2048 samples" in reasons[1]


def test_a_drift_of_step_times_calls_for_a_verdict(course):
    made = course(start=2048, ready=(2048,), tuning__every_steps=10**6, tuning__every_s=1e9)
    made.go(200)
    verdicts = len(made.heard.verdicts)
    made.go(100)
    assert len(made.heard.verdicts) == verdicts
    made.factors = {True: 3.0, False: 3.0}
    made.go(300)
    assert len(made.heard.verdicts) > verdicts


def test_nothing_more_is_asked_of_a_loop_that_has_not_taken_the_last_change(course):
    run = course(start=2048)
    run.go(400, ahead=40)
    changes = [e for e in run.heard.verdicts if e.switched]
    assert [e.before.micro_batch_size for e in changes[1:]] == [
        e.verdict.config.micro_batch_size for e in changes[:-1]
    ], "each verdict is on what the last one asked for"
    assert len({e.verdict.reason for e in changes}) == len(changes) >= 2
    assert run.config.micro_batch_size == 8192


def test_beside_a_compilation_only_a_doubling_is_believed_and_then_times_are_taken_anew(course):
    run = course(start=512, ready=(512, 2048, 8192))
    run.go(60, compiling=True)
    assert run.config.micro_batch_size == 8192, "far more than twice the goodput"
    run.ready = SIZES
    assert set(run.go(60, compiling=True)) == {8192}, "16384 promises less than twice"
    asked = len(run.heard.verdicts)
    run.go(CALM_STEPS - 1)
    assert len(run.heard.verdicts) == asked, "no verdict on times from before"
    run.go(100)
    timings = run.heard.verdicts[-1].timings
    now = dict(zip(timings.micro_batch_size.tolist(), timings.step_s.tolist(), strict=True))
    assert now[8192] == pytest.approx(STEP_S[8192])


@pytest.mark.slow
def test_a_first_comparison_of_plain_and_measured_steps_is_not_for_good(course):
    run = course(start=8192, ready=(8192,))
    run.factors = {True: 1.2, False: 2.0}  # plain steps were disturbed at first
    run.go(40)
    assert 1 < run.every <= 4, "measuring seems to cost nothing"
    run.factors[False] = 1.0
    run.go(400)
    assert run.every == 10, "20 % of a step, where 2 % are allowed"


def test_arithmetic_and_tokens_go_by_the_throughput(course):
    run = course(start=512, reporting__tokens_per_sample=64)
    run.go(400)
    window = run.heard.windows[-1]
    assert window.throughput > 0
    # A thousandth of 10^12 operations for each sample, on two devices of 100 x 10^12/s.
    assert window.tflops_per_device == pytest.approx(window.throughput * 1e-3 / 2)
    assert window.mfu == pytest.approx(window.tflops_per_device / 100)
    assert window.tokens_per_s == pytest.approx(64 * window.throughput)


def test_hooks_are_told_when_a_step_was_done_not_when_they_hear_of_it(course):
    run = course(start=512)
    run.go(3)
    assert [e.at_s for e in run.heard.steps] == pytest.approx([STEP_S[512] * k for k in (1, 2, 3)])
