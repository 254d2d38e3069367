"""Trains a counter of samples in a workdir: `python bucket_worker.py WORKDIR EPOCHS [STEP_S]`.

The parameters count how often each sample was applied, and lie in checkpoints like any others. Each
acknowledged checkpoint is a line on standard output.
"""

import sys
import time

import jax.numpy as jnp
import numpy as np
import optax

from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.observe.events import Checkpoint
from jaxgoodput.observe.hooks import Hook
from jaxgoodput.train.config import Config, Evaluation, Execution, Reporting, Saving, Tuning
from jaxgoodput.train.trainer import Trainer

NUM_SAMPLES, BATCH = 128, 8


class Counting(Trainer):
    """Every gradient step of rate `BATCH` adds one to the entries of its samples."""

    step_s = 0.0

    def init(self, key):
        return {"seen": jnp.zeros(NUM_SAMPLES)}

    def loss(self, params, batch, key):
        return -params["seen"][batch["id"]]

    def metrics(self, params, batch):
        return {"seen": params["seen"][batch["id"]]}

    def optimizer(self):
        return optax.sgd(float(BATCH))

    def dataset(self):
        return {"id": np.arange(NUM_SAMPLES, dtype=np.int32)}

    def eval_dataset(self):
        return self.dataset()


class Say(Hook):
    """Prints which steps are saved, as soon as the run knows."""

    def __init__(self, trainer, step_s):
        self.trainer, self.step_s, self.last = trainer, step_s, 0

    def on_step_end(self, event):
        time.sleep(self.step_s)
        print(f"step {event.step}", flush=True)

    def on_checkpoint(self, event: Checkpoint):
        safe = self.trainer._loop.start.checkpoints.newest()
        print(f"saved {safe} error {event.error}", flush=True)


def settings(workdir: str, epochs: int, **changed) -> Config:
    """A quiet run that saves every four steps."""
    return Config(
        **{
            "workdir": workdir,
            "batch": BatchLimits(base=BATCH, max=BATCH),
            "epochs": epochs,
            "policy": "fixed",
            "tuning": Tuning(accumulate=False),
            "execution": Execution(background_compile=False, prefetch=0),
            "evaluation": Evaluation(every_base_steps=8),
            "saving": Saving(
                every_base_steps=4, every_s=None, keep=2, best="seen", best_mode="max"
            ),
            "reporting": Reporting(progress=False),
            **changed,
        }
    )


if __name__ == "__main__":
    workdir, epochs, *rest = sys.argv[1:]
    trainer = Counting(settings(workdir, int(epochs)))
    trainer.hooks = (Say(trainer, float(rest[0]) if rest else 0.0),)
    state = trainer.fit()
    print("seen", sorted(set(np.asarray(state.params["seen"]).tolist())), flush=True)
