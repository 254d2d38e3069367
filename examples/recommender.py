"""python examples/recommender.py --workdir /tmp/recommender

Trains a recommender to tell which function of Python's standard library uses which identifier. Nearly all of
its 7.5 million parameters are in embedding tables. Expect test AUC 0.92 (popularity alone: 0.69) after 1.4 to
2.1 million samples, in 10 to 25 s on two CPU cores; the first run takes longer, because it compiles. The
first run also parses the library, which takes about 15 s.

Every update passes over all tables whatever the batch size, so large batches process up to seven times as
many samples per second. But in a larger batch each sample teaches less. The batch size starts at 512 and
grows within seconds to the point at which the product of both is largest. `tensorboard --logdir
/tmp/recommender` shows this.
"""

import corpora
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import jaxgoodput as jg

SIZES = (512, 2048, 8192, 16384)
DIM = 16
OWN = {
    "function": None,
    "item": None,
    "file": None,
    "name": 2**14,
    "scope": None,
}  # None = one row per value
CROSSED = (("file", "item"), ("scope", "item"), ("name", "item"))
CROSSED_BITS = 17
NUM_TABLES = len(OWN) + len(CROSSED)
LEARNING_RATE, TARGET_AUC = 0.05, 0.92  # the rate was tuned at the base batch size of 512


def default_config(workdir: str) -> jg.Config:
    return jg.Config(
        workdir=workdir,
        # Few sizes: on two cores, compiling and trying a size slows down the steps that run meanwhile.
        batch=jg.BatchLimits(base=512, max=16384, sizes=SIZES, max_micro_batches=1),
        base_steps=4200,
        rule=jg.rules.square_root,
        tuning=jg.Tuning(
            every_s=0.25,  # the whole run takes only seconds
            dwell_steps=10,
        ),
        # On a CPU, half of the step time would go into newly allocated pages.
        execution=jg.Execution(keep_freed_pages=True),
        evaluation=jg.Evaluation(every_base_steps=500, micro_batch_size=8192),
    )


class Recommender(jg.Trainer):
    """A small DLRM (Naumov et al. 2019): embeddings, their dot products, and two dense layers."""

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        self.data = corpora.identifier_use()
        sizes = [limit or self.data.sizes[column] for column, limit in OWN.items()]
        sizes += [2**CROSSED_BITS] * len(CROSSED)
        self.first_row = np.cumsum([0, *sizes])  # all tables are one array, stacked along the rows

    def init(self, key):
        keys = jax.random.split(key, 4)
        pairs = NUM_TABLES * (NUM_TABLES - 1) // 2
        return {
            "tables": 0.01 * jax.random.normal(keys[0], (int(self.first_row[-1]), DIM)),
            "hidden": [_dense(keys[1], pairs + NUM_TABLES * DIM, 64), _dense(keys[2], 64, 32)],
            "output": _dense(keys[3], 32, 1),
        }

    def rows(self, batch):
        """Return the row of each table that a sample reads, `int32 [batch, tables]`."""
        columns = [batch[column] % (limit or 2**31 - 1) for column, limit in OWN.items()]
        for a, b in CROSSED:
            columns.append((_mix(batch[a], batch[b]) >> (32 - CROSSED_BITS)).astype(np.int32))
        xp = np if isinstance(columns[0], np.ndarray) else jnp
        return xp.stack(columns, axis=1) + self.first_row[:-1].astype(np.int32)[None]

    def logits(self, params, batch):
        return self.score(params, params["tables"][self.rows(batch)])

    def score(self, params, embedded):
        """Return the logit of each sample, from the rows that it reads, `[batch, tables, dim]`."""
        products = jnp.einsum("bid,bjd->bij", embedded, embedded)
        upper = products[:, *np.triu_indices(NUM_TABLES, 1)]
        x = jnp.concatenate([embedded.reshape(len(embedded), -1), upper], axis=1)
        for layer in params["hidden"]:
            x = jax.nn.relu(_apply(layer, x))
        return _apply(params["output"], x)[:, 0]

    def loss(self, params, batch, key):
        del key
        return optax.sigmoid_binary_cross_entropy(self.logits(params, batch), batch["label"])

    def learning_rate(self, progress):
        return LEARNING_RATE

    def optimizer(self):
        # The usual initial accumulator of 0.1 is huge compared with the squared mean gradients of embeddings.
        return optax.adagrad(LEARNING_RATE, initial_accumulator_value=1e-7)

    def dataset(self):
        return self.data.train

    def eval_dataset(self):
        return self.data.test

    def metrics(self, params, batch):
        return {"score": self.logits(params, batch), "label": batch["label"]}

    def summarize(self, outputs):
        return {"auc": auc(outputs["score"], outputs["label"])}


def auc(score: np.ndarray, label: np.ndarray) -> float:
    """Return the probability that a use scores above a negative: the area under the ROC curve."""
    rank = np.empty(len(score))
    rank[np.argsort(score, kind="stable")] = np.arange(len(score))
    uses = int(label.sum())
    return float((rank[label == 1].sum() - uses * (uses - 1) / 2) / (uses * (len(label) - uses)))


def _mix(a, b):
    """Return a hash of two integers, `uint32`."""
    x = a.astype(np.uint32) * np.uint32(0x9E3779B1) ^ b.astype(np.uint32) * np.uint32(0x85EBCA77)
    x = (x ^ (x >> 15)) * np.uint32(0x2C1B3C6D)
    return x ^ (x >> 13)


def _dense(key, num_inputs: int, num_outputs: int):
    scale = np.sqrt(2 / num_inputs).astype(np.float32)
    weights = scale * jax.random.normal(key, (num_inputs, num_outputs))
    return {"weights": weights, "bias": jnp.zeros((1, num_outputs))}


def _apply(layer, x):
    return x @ layer["weights"] + layer["bias"]


def main(_):
    trainer = Recommender(jg.with_overrides(default_config(flags.FLAGS.workdir), flags.FLAGS.set))
    state = trainer.fit()
    print(f"test AUC {trainer.evaluate(state)['auc']:.4f}, expected {TARGET_AUC} or more")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "where checkpoints and the dashboard go", required=True)
    flags.DEFINE_multi_string("set", [], "changes to the configuration, such as base_steps=1000")
    app.run(main)
