"""A cart with a pole (Barto, Sutton and Anderson 1983), and what `ppo.py` learns from playing with it."""

import jax
import jax.numpy as jnp
import numpy as np


def heads(out):
    """Log-probabilities of both actions, and the value, from three numbers."""
    return jax.nn.log_softmax(out[..., :2]), out[..., 2]


def start(key):
    """A state near rest: position and speed of the cart, angle and angular speed of the pole."""
    return jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)


def moved(x, action):
    """The state a fiftieth of a second later, pushed to the left (0) or right (1); and whether it fell."""
    sin, cos = jnp.sin(x[2]), jnp.cos(x[2])
    push = (20 * action - 10 + 0.05 * x[3] ** 2 * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    new = x + 0.02 * jnp.stack([x[1], push - 0.05 * turn * cos / 1.1, x[3], turn])
    return new, (jnp.abs(new[0]) > 2.4) | (jnp.abs(new[2]) > 0.2095)


def play(player, key, num_steps):
    """Play `num_steps` steps; `player(x)` returns log-probabilities of the actions, and the value.

    A game that ended begins anew. Returns arrays `[num_steps, ...]` by name. JAX can trace it.
    """

    def step(x, key):
        log_p, value = player(x)
        action = jax.random.categorical(key, log_p)
        new, fell = moved(x, action)
        seen = {"x": x, "action": action, "log_p": log_p[action], "value": value, "fell": fell}
        return jnp.where(fell, start(key), new), seen

    return jax.lax.scan(step, start(key), jax.random.split(key, num_steps))[1]


def advantages(value, fell, *, discount=0.99, decay=0.95):
    """How much better each step went than its value said (Schulman et al. 2015), `[games, steps]`.

    Every step is worth 0.01 until the pole falls, so that values are at most about 1. How the last step went
    is not known, and it gets 0.
    """
    found = np.zeros_like(value)
    for t in reversed(range(value.shape[1] - 1)):
        error = 0.01 + discount * ~fell[:, t] * value[:, t + 1] - value[:, t]
        found[:, t] = error + discount * decay * ~fell[:, t] * found[:, t + 1]
    return found


def lesson(games):
    """Steps to learn from, all but the last of every game, `[samples, ...]` by name."""
    games = {name: np.asarray(x) for name, x in games.items()}
    gain = advantages(games["value"], games["fell"])
    scaled = (gain - gain.mean()) / gain.std()
    whole = {**games, "gain": scaled, "total": gain + games["value"]}
    return {name: x[:, :-1].reshape(-1, *x.shape[2:]) for name, x in whole.items()}


def batches(newest, num_samples):
    """Batches of a shuffled lesson, and of the next one, without end; `newest()` returns a lesson."""
    rng = np.random.default_rng(0)
    while True:
        rows = newest()
        order = rng.permutation(len(rows["gain"])).reshape(-1, num_samples)
        yield from ({name: x[part] for name, x in rows.items()} for part in order)
