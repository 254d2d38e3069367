"""python examples/ports/ddpm.py --workdir /tmp/ddpm

A diffusion model of scikit-learn's handwritten digits: a network learns the noise that was added to a picture
at a random time, with a linear schedule of betas and a running average of the parameters, and then draws
digits from noise alone. Expect an error of 0.13 or less on held-out pictures (1 for a guess of zero) after
1,000 base steps, within three minutes on two CPU cores.

The times and the noise of a step come from its key; those of an evaluation are always the same.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from sklearn.datasets import load_digits

import jaxgoodput as jg

LEARNING_RATE, EMA, WIDTH, NUM_TIMES, EXPECTED_ERROR = 1e-3, 0.995, 32, 200, 0.13
BETAS = np.linspace(5e-4, 0.1, NUM_TIMES, dtype=np.float32)  # ends in noise: 200 times are few
KEPT = np.cumprod(1 - BETAS)  # share of the picture's variance that is left at each time


def default_config(workdir: str) -> jg.Config:
    limits = jg.BatchLimits(base=64, max=256, sizes=(64, 128, 256))
    return jg.Config(workdir=workdir, batch=limits, base_steps=1000, ema=EMA)


class Network(nn.Module):
    """A small U-Net: two resolutions, with the time added to every residual block."""

    @nn.compact
    def __call__(self, x, time):
        angles = time[:, None] * jnp.exp(jnp.linspace(0, -5, WIDTH))[None]
        embedded = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
        embedded = nn.silu(nn.Dense(4 * WIDTH)(embedded))

        def block(x, width):
            y = nn.Conv(width, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))
            y = y + nn.Dense(width)(embedded)[:, None, None]
            y = nn.Conv(width, (3, 3))(nn.silu(nn.GroupNorm(8)(y)))
            return y + (x if x.shape == y.shape else nn.Conv(width, (1, 1))(x))

        fine = block(nn.Conv(WIDTH, (3, 3))(x), WIDTH)
        coarse = nn.Conv(2 * WIDTH, (3, 3), 2)(fine)
        coarse = block(block(coarse, 2 * WIDTH), 2 * WIDTH)
        up = jnp.repeat(jnp.repeat(coarse, 2, axis=1), 2, axis=2)
        x = block(jnp.concatenate([fine, up], axis=-1), WIDTH)
        return nn.Conv(1, (3, 3), kernel_init=nn.initializers.zeros)(nn.silu(nn.GroupNorm(8)(x)))


NETWORK = Network()


def error(params, image, time, noise):
    """Return the mean squared error of the noise that the network sees in each noisy picture `[batch]`."""
    kept = jnp.asarray(KEPT)[time][:, None, None, None]
    seen = NETWORK.apply(params, jnp.sqrt(kept) * image + jnp.sqrt(1 - kept) * noise, time)
    return jnp.mean((jnp.asarray(seen) - noise) ** 2, axis=(1, 2, 3))


def random_error(params, image, key):
    """Return the errors of pictures at random times, with random noise `[batch]`."""
    times, noises = jax.random.split(key)
    time = jax.random.randint(times, (len(image),), 0, NUM_TIMES)
    return error(params, image, time, jax.random.normal(noises, image.shape))


def drawn(params, key, count: int):
    """Return `count` pictures, made from noise in `NUM_TIMES` steps backwards."""
    first, key = jax.random.split(key)

    def backwards(x, time):
        seen = jnp.asarray(NETWORK.apply(params, x, jnp.full(count, time)))
        beta, kept = jnp.asarray(BETAS)[time], jnp.asarray(KEPT)[time]
        mean = (x - beta / jnp.sqrt(1 - kept) * seen) / jnp.sqrt(1 - beta)
        noise = jax.random.normal(jax.random.fold_in(key, time), x.shape)
        return mean + jnp.where(time > 0, jnp.sqrt(beta), 0) * noise, None

    start = jax.random.normal(first, (count, 8, 8, 1))
    return jax.lax.scan(backwards, start, jnp.arange(NUM_TIMES)[::-1])[0]


def pictures(*, held_out: bool) -> dict[str, np.ndarray]:
    """Return digits between -1 and 1; held-out ones with a time and noise for each."""
    digits: Any = load_digits()
    rng = np.random.default_rng(0)
    order = rng.permutation(len(digits.target))
    images = (digits.images[order, ..., None] / 8 - 1).astype(np.float32)
    if not held_out:
        return {"image": images[360:]}
    noise = rng.normal(size=(360, 8, 8, 1)).astype(np.float32)
    return {"image": images[:360], "time": np.arange(360) * NUM_TIMES // 360, "noise": noise}


class Diffusion(jg.Trainer):
    """A network that learns the noise in noisy pictures."""

    def init(self, key):
        return NETWORK.init(key, jnp.zeros((1, 8, 8, 1)), jnp.zeros(1, jnp.int32))

    def loss(self, params, batch, key):
        return random_error(params, batch["image"], key)

    def optimizer(self):
        return optax.adam(LEARNING_RATE)

    def dataset(self):
        return pictures(held_out=False)

    def eval_dataset(self):
        return pictures(held_out=True)

    def metrics(self, params, batch):  # of the running average
        return {"error": error(params, batch["image"], batch["time"], batch["noise"])}


def main(_):
    trainer = Diffusion(jg.with_overrides(default_config(flags.FLAGS.workdir), flags.FLAGS.set))
    state = trainer.fit()
    params = jax.device_get(state.averaged)
    for row in np.asarray(jax.jit(drawn, static_argnums=2)(params, jax.random.key(0), 6)):
        print(
            "\n".join(
                "".join(" .:*#"[int(x)] for x in line) for line in 2 + 2 * row[..., 0].clip(-1, 1)
            )
        )
    found = trainer.evaluate(state)["error"]
    print(f"held-out error {found:.3f}, expected {EXPECTED_ERROR} or less")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "where checkpoints and the dashboard go", required=True)
    flags.DEFINE_multi_string("set", [], "changes to the configuration, such as base_steps=100")
    app.run(main)
