"""python examples/ports/dqn.py --workdir /tmp/dqn

DQN on a cart with a pole (Barto, Sutton and Anderson 1983): a replay buffer, a target network, and games of
different curiosity. Every evaluation plays games with the newest parameters, and what it saw goes into the
buffer that training draws from. Expect a mean of 100 or more of 200 steps before the pole falls after 4,000
base steps, within two minutes on two CPU cores; it goes up and down from one evaluation to the next.

The batch is fixed: games are played after so many updates, so that a larger batch would use every move more
often. Batches are drawn up to a round of updates ahead, from the buffer as it is then.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import jaxgoodput as jg

GAMES, STEPS, BATCH, ROUND, CAPACITY = (
    16,
    200,
    64,
    100,
    20_000,
)  # a round: updates between two plays
LEARNING_RATE, DISCOUNT, REFRESH, EXPECTED_STEPS = 1e-3, 0.98, 100, 100
# Half of the games show how good the player is; the others move at random now and then.
CURIOSITY = np.append(np.zeros(GAMES // 2), np.geomspace(0.05, 1, GAMES // 2)).astype(np.float32)
NET = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64), nn.relu, nn.Dense(2)])


def default_config(workdir: str) -> jg.Config:
    return jg.Config(
        workdir=workdir,
        batch=jg.BatchLimits(base=BATCH, max=BATCH),
        base_steps=4000,
        policy="fixed",
        evaluation=jg.Evaluation(every_base_steps=ROUND),
    )


def values(params, x):
    """Return the worth of both actions in each state."""
    return jnp.asarray(NET.apply(params, x))


def begun(key):
    return jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)


def moved(x, action):
    """Return the state 0.02 s after a push to the left (0) or right (1), and whether the pole fell."""
    place, speed, angle, turning = x
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    force = (20.0 * action - 10.0 + 0.05 * turning**2 * sin) / 1.1
    torque = (9.8 * sin - cos * force) / (2 / 3 - 0.05 * cos**2 / 1.1)
    gained = jnp.stack([speed, force - 0.05 * torque * cos / 1.1, turning, torque])
    new = x + 0.02 * gained
    return new, (jnp.abs(new[0]) > 2.4) | (jnp.abs(new[2]) > 0.2095)


def played(params, key, curiosity):
    """Play a game of `STEPS` moves, which begins anew after a fall; return the moves by name."""

    def move(x, key):
        chance, other, again = jax.random.split(key, 3)
        best = jnp.argmax(values(params, x[None])[0])
        is_random = jax.random.bernoulli(chance, curiosity)
        action = jnp.where(is_random, jax.random.randint(other, (), 0, 2), best)
        after, fell = moved(x, action)
        seen = {"x": x, "action": action, "after": after, "fell": fell}
        return jnp.where(fell, begun(again), after), seen

    first, key = jax.random.split(key)
    return jax.lax.scan(move, begun(first), jax.random.split(key, STEPS))[1]


@jax.jit
def all_played(params, number, game, curiosity):
    """Return the moves of games, which depend on the number of updates before them."""
    keys = jax.vmap(lambda one: jax.random.fold_in(jax.random.key(number), one))(game)
    return jax.vmap(played, in_axes=(None, 0, 0))(params, keys, curiosity)


def num_stood(games) -> float:
    """Return after how many moves the pole fell, in the mean over games without random moves."""
    fell = np.asarray(games["fell"])[CURIOSITY == 0]
    return float(np.where(fell.any(axis=1), fell.argmax(axis=1), STEPS).mean())


def added(replay, games):
    """Return a buffer with the newest moves, of which it holds `CAPACITY`."""
    rows = {name: np.asarray(x).reshape(-1, *x.shape[2:]) for name, x in games.items()}
    return {
        name: np.concatenate([replay.get(name, x[:0]), x])[-CAPACITY:] for name, x in rows.items()
    }


def begun_replay():
    """Return a buffer with the games of a player that has not learnt anything."""
    params = NET.init(jax.random.key(1), jnp.zeros((1, 4)))
    return added({}, all_played(params, 0, np.arange(GAMES), CURIOSITY))


def batches(newest):
    """Yield random batches of the newest buffer, without end."""
    rng = np.random.default_rng(0)
    while True:
        replay = newest()
        rows = rng.integers(len(replay["fell"]), size=BATCH)
        yield {name: x[rows] for name, x in replay.items()}


def surprise(params, target, batch):
    """Return each move's loss: what it is worth beside what the target network says of the state after it."""
    chosen = jnp.take_along_axis(values(params, batch["x"]), batch["action"][:, None], axis=1)[:, 0]
    later = jnp.where(batch["fell"], 0, DISCOUNT * values(target, batch["after"]).max(axis=1))
    return optax.huber_loss(chosen, 1 - DISCOUNT + later)


class Dqn(jg.Trainer):
    """A player; the state of its model is the target network, and the number of updates."""

    replay = {}

    def init(self, key):
        params = NET.init(key, jnp.zeros((1, 4)))
        target = jax.tree.map(jnp.copy, params)
        return jg.Variables(
            params=params, model_state={"target": target, "updates": jnp.zeros((), int)}
        )

    def loss_and_state(self, params, model_state, batch, key):
        old, number = model_state["target"], model_state["updates"]
        is_due = number % REFRESH == 0
        target = jax.tree.map(lambda new, x: jnp.where(is_due, new, x), params, old)
        target = jax.lax.stop_gradient(target)
        return surprise(params, target, batch), {"target": target, "updates": number + 1}

    def optimizer(self):
        return optax.chain(optax.clip_by_global_norm(10.0), optax.adam(LEARNING_RATE))

    def eval_dataset(self):
        return {"game": np.arange(GAMES), "curiosity": CURIOSITY}

    def metrics_with_state(self, params, model_state, batch):
        return all_played(params, model_state["updates"], batch["game"], batch["curiosity"])

    def summarize(self, outputs):
        self.replay = added(self.replay, outputs)
        return {"stood": num_stood(outputs)}

    def dataset(self):
        self.replay = begun_replay()
        moves = batches(lambda: self.replay)
        return jg.stream(moves, batched=True, live=True, ahead_samples=ROUND * BATCH)


def main(_):
    trainer = Dqn(jg.with_overrides(default_config(flags.FLAGS.workdir), flags.FLAGS.set))
    stood = trainer.evaluate(trainer.fit())["stood"]
    print(f"it stands for {stood:.0f} of {STEPS} steps, expected {EXPECTED_STEPS} or more")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "where checkpoints and the dashboard go", required=True)
    flags.DEFINE_multi_string("set", [], "changes to the configuration, such as base_steps=100")
    app.run(main)
