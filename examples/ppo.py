"""python examples/ppo.py --workdir /tmp/ppo

PPO, with pole.py: evaluations play, training uses what they played. Expect more than 200 of 257 steps.
"""

import flax.linen as nn
import jax
import numpy as np
import optax
import pole
from absl import app, flags

import jaxgoodput as jg

GAMES, STEPS, PASSES, ROUNDS = 32, 257, 4, 30  # passes over a round of games before the next one
NET = nn.Sequential([nn.Dense(64), nn.tanh, nn.Dense(64), nn.tanh, nn.Dense(3), pole.heads])


class Ppo(jg.Trainer):
    """A policy and a value, learned from what the newest parameters played."""

    def init(self, key):
        return jg.Variables(params=NET.init(key, np.zeros(4)), model_state={"n": np.zeros((), int)})

    def loss_and_state(self, params, model_state, batch, key):
        log_p, value = NET.apply(params, batch["x"])
        ratio = jax.numpy.exp((log_p * nn.one_hot(batch["action"], 2)).sum(1) - batch["log_p"])
        gain = jax.numpy.minimum(ratio * batch["gain"], ratio.clip(0.8, 1.2) * batch["gain"])
        return (value - batch["total"]) ** 2 / 2 - gain, {"n": model_state["n"] + 1}

    def optimizer(self):
        return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))

    def eval_dataset(self):
        return {"game": np.arange(GAMES)}

    def metrics_with_state(self, params, model_state, batch):  # of every game, all its steps
        keys = jax.random.split(jax.random.key(model_state["n"]), GAMES)[batch["game"]]
        return jax.vmap(lambda key: pole.play(lambda x: NET.apply(params, x), key, STEPS))(keys)

    def summarize(self, outputs):
        self.newest, fell = pole.lesson(outputs), outputs["fell"]
        return {"stood": np.where(fell.any(axis=1), fell.argmax(axis=1), STEPS).mean()}

    def dataset(self):
        made = self.init(jax.random.key(1))  # plays before the first evaluation of a run
        self.summarize(self.metrics_with_state(made.params, made.model_state, self.eval_dataset()))
        return jg.stream(pole.batches(lambda: self.newest, STEPS - 1), batched=True, live=True)


def main(_):
    limits, every = jg.BatchLimits(base=STEPS - 1, max=STEPS - 1), PASSES * GAMES
    more = {"policy": "fixed", "workdir": flags.FLAGS.workdir, "base_steps": ROUNDS * every}
    trainer = Ppo(jg.Config(batch=limits, evaluation=jg.Evaluation(every_base_steps=every), **more))
    print(f"it stands for {trainer.evaluate(trainer.fit())['stood']:.0f} of {STEPS} steps")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "where checkpoints and the dashboard go", required=True)
    app.run(main)
