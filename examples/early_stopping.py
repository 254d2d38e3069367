"""python examples/early_stopping.py --workdir /tmp/early_stopping

Trains the digits of `quickstart.py` until the accuracy on a validation set has not become better for 200 base
steps, and reports the accuracy on a test set at the best step. Expect a test accuracy of 0.95 or more, within
a minute on two CPU cores.
"""

import dataclasses
from typing import Any

import optax
from absl import app, flags
from quickstart import Digits, default_config

import jaxgoodput as jg


class WithTwoSets(Digits):
    """The digits, the held-out ones in two halves. The rate does not decay: the end is not known."""

    def learning_rate(self, progress):
        return 0.05

    def optimizer(self):
        return optax.sgd(0.05, momentum=0.9, nesterov=True)

    def eval_dataset(self) -> Any:
        return None

    def eval_datasets(self):
        held_out = self.dataset(held_out=True)
        return {
            "validation": {name: rows[:180] for name, rows in held_out.items()},
            "test": {name: rows[180:] for name, rows in held_out.items()},
        }


def main(_):
    config = dataclasses.replace(
        default_config(flags.FLAGS.workdir),
        base_steps=20_000,
        evaluation=jg.Evaluation(every_base_steps=25, patience_base_steps=200),
        saving=jg.Saving(best="validation/accuracy", best_mode="max"),
    )
    trainer = WithTwoSets(jg.with_overrides(config, flags.FLAGS.set))
    last = trainer.fit()
    best = trainer.restore(best=True)
    accuracy = trainer.evaluate(best)["test/accuracy"]
    print(f"ended at step {int(last.step)}; step {int(best.step)} was the best")
    print(f"its test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "where checkpoints and the dashboard go", required=True)
    flags.DEFINE_multi_string("set", [], "changes to the configuration, such as batch.max=256")
    app.run(main)
