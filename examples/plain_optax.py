r"""An optax loop whose batch grows by itself, without the Trainer.

    python examples/plain_optax.py

Handwritten digits (scikit-learn's, 8 x 8 pixels), a small network, SGD with momentum and a cosine schedule,
all tuned at a batch size of 32. `adaptive` measures the gradient noise, raises the learning rate with the
batch size (AdaScale), and lets the schedule follow progress. `jg.Tuner` chooses the batch size of every
update, from step times and noise, as the Trainer would.

Expect a test accuracy of at least 0.96 (0.98 with the default seed) after 1,500 base steps of progress. This
takes about 500 updates, depending on step times, in about a minute on two CPU cores; a fixed batch size
(`--max_batch_size 32`) takes 1,500 updates.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from sklearn.datasets import load_digits

import jaxgoodput as jg

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for progress.jsonl; none: print only.")
_BASE_STEPS = flags.DEFINE_integer("base_steps", 1500, "Progress to train for, in base steps.")
_BASE_BATCH = flags.DEFINE_integer("base_batch_size", 32, "Batch that the learning rate suits.")
_MAX_BATCH = flags.DEFINE_integer("max_batch_size", 512, "Largest batch, in samples.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the parameters and of the sample order.")
_NUM_GROUPS = 4  # groups of samples whose gradients are compared to measure the noise
_EVERY = 10  # updates between two lines of output


def init(key, sizes=(64, 128, 10)):
    """Return dense layers with biases, He-initialised."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(k, (m, n)) * np.sqrt(2 / m), "b": jnp.zeros(n)}
        for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def logits(params, x):
    """Return the scores of the ten digits, [batch, 10]."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss(params, batch):
    """Return the mean cross-entropy."""
    scores = logits(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"]).mean()


def powers_of_two(first, last):
    """Return `first`, twice as much, and so on up to `last`: few sizes to compile."""
    return tuple(first * 2**i for i in range((last // first).bit_length()))


def main(_):
    pixels, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(_SEED.value)
    order = rng.permutation(len(labels))
    x, y = (pixels[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    train, test = {"x": x[360:], "y": y[360:]}, {"x": x[:360], "y": y[:360]}

    base = _BASE_BATCH.value
    tx = jg.adaptive(
        optax.sgd(optax.cosine_decay_schedule(0.05, _BASE_STEPS.value), momentum=0.9),
        jg.rules.adascale,
        base_batch_size=base,
        smoothing=0.99,  # Average over about 100 base batches: the noise changes fast in a short run.
    )
    measured = jg.value_grad_and_noise(loss, num_groups=_NUM_GROUPS)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        (value, _), grads, sample = measured(params, batch)
        updates, opt_state = tx.update(
            grads, opt_state, params, global_batch_size=len(batch["y"]), noise=sample
        )
        return optax.apply_updates(params, updates), opt_state, value

    params = init(jax.random.key(_SEED.value))
    opt_state = tx.init(params)
    # So short a run never repays a compilation; here the batches are to be seen to change all the same.
    limits = jg.BatchLimits(
        base=base, max=_MAX_BATCH.value, sizes=powers_of_two(base, _MAX_BATCH.value)
    )
    tuner = jg.Tuner(limits, _BASE_STEPS.value, compile_s=0)
    updates, samples, rows, why = 0, 0, [], ""
    print("updates  progress  batch  noise scale  gain    loss")
    while not tuner.is_done:
        size = tuner.batch_size
        chosen = rng.choice(len(train["y"]), size, replace=False)
        batch = {name: array[chosen] for name, array in train.items()}
        params, opt_state, value = step(params, opt_state, batch)
        tuner.step(opt_state, value)
        updates, samples = updates + 1, samples + size
        if tuner.why != why:
            why = tuner.why
            print(why)
        if updates % _EVERY and not tuner.is_done:
            continue
        grad = jg.grad_groups(opt_state)
        rows.append(
            {
                "updates": updates,
                "progress": float(jg.progress(opt_state)),
                "batch": size,
                "noise_scale": float(jg.noise_scale(grad, base)),
                "gain": float(jg.gain(opt_state)[0]),
                "loss": float(value),
            }
        )
        print("{:7d}  {:8.1f}  {:5d}  {:11.0f}  {:4.2f}  {:.4f}".format(*rows[-1].values()))

    accuracy = float(jnp.mean(logits(params, test["x"]).argmax(-1) == test["y"]))
    print(f"test accuracy {accuracy:.4f} after {updates} updates, {samples} samples")
    if _WORKDIR.value:
        folder = pathlib.Path(_WORKDIR.value)
        folder.mkdir(parents=True, exist_ok=True)
        rows.append({"test_accuracy": accuracy, "updates": updates, "samples": samples})
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "progress.jsonl").write_text(text)


if __name__ == "__main__":
    app.run(main)
