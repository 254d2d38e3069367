"""A capture of a real run has the steps that were asked for, under their numbers."""

import dataclasses
import os
import signal
import time
import warnings

import jax
import numpy as np
import optax
import pytest
import synthetic

import jaxgoodput as jg
from jaxgoodput.clock import FakeClock
from jaxgoodput.data.cursor import Cursor
from jaxgoodput.observe.events import FitEnd, StepEnd


class Slow:
    """Samples that take their time: steps of several milliseconds."""

    def __len__(self):
        return 512

    def __getitem__(self, i):
        time.sleep(0.001)
        return {"x": np.full(3, float(i % 7), np.float32)}


class Line(jg.Trainer):
    def init(self, key):
        return {"w": np.zeros(3, np.float32)}

    def loss(self, params, batch, key):
        return (batch["x"] @ params["w"]) ** 2

    def optimizer(self):
        return optax.sgd(0.01)

    def dataset(self):
        return Slow()


def line(workdir, *hooks, base_steps=300.0):
    config = jg.Config(
        workdir=str(workdir),
        batch=jg.BatchLimits(base=16, max=16),
        base_steps=base_steps,
        reporting=jg.Reporting(tensorboard=False, progress=False),
    )
    return Line(config, hooks=hooks)


def steps_in(path):
    """The numbers of the steps in a capture.

    With Python 3.13, jaxlib makes its own type for `stats` in a way that Python warns of. As an error, that
    would end the process.
    """
    found = set()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                if event.name == "train":
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", DeprecationWarning)
                        found.add(dict(event.stats)["step_num"])
    return found


@pytest.mark.slow
def test_steps_are_captured_at_a_step_and_on_a_signal(tmp_path, monkeypatch):
    stop_trace, ends = jax.profiler.stop_trace, []

    def stops():
        stop_trace()
        ends.append(None)

    monkeypatch.setattr(jax.profiler, "stop_trace", stops)

    class Asks(jg.Hook):
        def on_step_end(self, event):
            if event.step == 150:  # which hooks hear of a while later, beside other tests
                os.kill(os.getpid(), signal.SIGUSR2)
            if len(ends) == 2:
                trainer.finish()

    before = signal.getsignal(signal.SIGUSR2)
    try:
        profile = jg.Profile(start=20, steps=10, on=signal.SIGUSR2)
        trainer = line(tmp_path, profile, Asks(), base_steps=30_000.0)
        trainer.fit()
    finally:
        signal.signal(signal.SIGUSR2, before)
    captures = sorted(tmp_path.glob("tensorboard/plugins/profile/*/*.xplane.pb"))
    steps = [steps_in(path) for path in captures]
    assert len(steps) in (1, 2) and all(
        len(one) >= 5 for one in steps
    )  # two of one second: one folder
    assert min(min(one) for one in steps) >= 20
    assert max(max(one) for one in steps) >= 150


class Traces:
    """In place of JAX's profiler, of which there is one."""

    def __init__(self, monkeypatch):
        self.begun, self.is_on = [], False
        monkeypatch.setattr(jax.profiler, "start_trace", self.start)
        monkeypatch.setattr(jax.profiler, "stop_trace", self.stop)

    def start(self, folder):
        if self.is_on:
            raise RuntimeError("Profile has already been started. Only one may be run at a time.")
        self.begun.append(folder)
        self.is_on = True

    def stop(self):
        assert self.is_on
        self.is_on = False


def start_of(step, workdir="w"):
    settings = {**synthetic.SETTINGS, "workdir": workdir}
    return dataclasses.replace(synthetic.fit_start(step), settings=settings)


def step_end(step, at_s):
    return StepEnd(
        step=step,
        progress=float(step),
        samples=16 * step,
        config=synthetic.START,
        num_samples=16,
        before=Cursor(seed=0),
        after=Cursor(seed=0),
        finite=True,
        at_s=at_s,
        seconds=1.0,
        metrics={},
    )


def through(first, last, *profiles):
    """A run from behind step `first` on."""
    for profile in profiles:
        profile.on_fit_start(start_of(first, workdir=f"from{first}"))
    for step in range(first + 1, last + 1):
        for profile in profiles:
            profile.on_step_end(step_end(step, at_s=float(step)))
    for profile in profiles:
        profile.on_fit_end(FitEnd(step=last, progress=1.0, samples=1, seconds=1.0, reason="done"))


def test_a_step_that_is_over_is_not_captured_again(monkeypatch):
    traces = Traces(monkeypatch)
    for first, last in ((0, 5), (5, 30), (30, 60)):
        through(first, last, jg.Profile(start=10, steps=3, clock=FakeClock()))
    assert traces.begun == ["from5/tensorboard"] and not traces.is_on


def test_the_second_of_two_captures_at_once_is_left_out(monkeypatch, caplog):
    traces = Traces(monkeypatch)
    profiles = [jg.Profile(start=start, steps=5, clock=FakeClock()) for start in (10, 12)]
    with caplog.at_level("WARNING"):
        through(0, 30, *profiles)
    assert len(traces.begun) == 1 and not traces.is_on
    assert [
        r.getMessage()
        for r in caplog.records
        if "no profile is captured from step 12" in r.getMessage()
    ]


def test_behind_the_run_the_signal_goes_to_what_heard_it_before(monkeypatch):
    traces, heard = Traces(monkeypatch), []
    before = signal.signal(signal.SIGUSR2, lambda *_: heard.append("before"))
    try:
        profile = jg.Profile(steps=2, on=signal.SIGUSR2, clock=FakeClock())
        profile.on_fit_start(start_of(0))
        signal.raise_signal(signal.SIGUSR2)
        through(0, 5, profile)
        assert len(traces.begun) == 1 and not heard
        signal.raise_signal(signal.SIGUSR2)
        assert heard == ["before"]
        through(0, 5, profile)
        assert len(traces.begun) == 1
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="steps 1 or more"):
        jg.Profile(steps=0)
