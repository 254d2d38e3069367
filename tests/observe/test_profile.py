"""A capture of a real run has the steps that were asked for, under their numbers."""

import os
import signal
import time

import jax
import numpy as np
import optax
import pytest

import jaxgoodput as jg


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
    """The numbers of the steps in a capture."""
    found = set()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                if event.name == "train":
                    found.add(dict(event.stats)["step_num"])
    return found


@pytest.mark.slow
def test_steps_are_captured_at_a_step_and_on_a_signal(tmp_path):
    class Asks(jg.Hook):
        def on_step_end(self, event):
            if event.step == 150:  # which hooks hear of a while later, beside other tests
                os.kill(os.getpid(), signal.SIGUSR2)
            if event.step > 150 and event.step % 50 == 0:
                found = tmp_path.glob("tensorboard/plugins/profile/*/*.xplane.pb")
                if any(max(steps_in(path), default=0) >= 150 for path in found):
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


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="one step or more"):
        jg.Profile(steps=0)
