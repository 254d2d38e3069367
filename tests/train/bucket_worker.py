"""Trains a counter of samples in a workdir: `python bucket_worker.py WORKDIR EPOCHS STEP_S`.

It prints each step, each step that the run says is saved, and at the end how often samples were applied.
"""

import sys
import time

import numpy as np
from problems import Counting, counting_config

from jaxgoodput.observe.hooks import Hook

NUM_SAMPLES = 1280


class Say(Hook):
    """Prints what the run knows, as soon as it knows it."""

    def __init__(self, step_s: float):
        self.step_s = step_s
        self.trainer: Counting | None = None

    def on_step_end(self, event):
        time.sleep(self.step_s)
        print(f"step {event.step}", flush=True)

    def on_checkpoint(self, event):
        loop = self.trainer._loop
        if loop is not None:  # else the run is over, and says so itself
            print(f"saved {loop.start.checkpoints.newest() or 0} {event.error}", flush=True)


if __name__ == "__main__":
    workdir, epochs, step_s = sys.argv[1:]
    settings = counting_config(
        workdir,
        epochs=int(epochs),
        saving__every_base_steps=4,
        saving__every_s=None,
        saving__keep=2,
        reporting__tensorboard=True,
    )
    say = Say(float(step_s))
    trainer = say.trainer = Counting(settings, num_samples=NUM_SAMPLES, hooks=[say])
    state = trainer.fit()
    print("applied", sorted(set(np.asarray(state.params["count"]).tolist())), flush=True)
