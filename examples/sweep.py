"""python examples/sweep.py --workdir /tmp/sweep

Searches for the learning rate of the digits of `quickstart.py` with Optuna, ten trials of at most 200 base
steps. A trial that is worse than the middle of the earlier ones at equal progress is ended. Two minutes on
two CPU cores.
"""

import dataclasses

import optax
import optuna
from absl import app, flags
from quickstart import Digits, default_config

import jaxgoodput as jg


class OneRate(Digits):
    """The digits with a learning rate of their own."""

    rate = 0.1

    def optimizer(self):
        return optax.sgd(self.rate, momentum=0.9, nesterov=True)

    def learning_rate(self, progress):
        return self.rate


def main(_):
    def objective(trial):
        config = dataclasses.replace(
            default_config(f"{flags.FLAGS.workdir}/{study.study_name}-{trial.number}"),
            base_steps=200,
            evaluation=jg.Evaluation(every_base_steps=40),
            reporting=jg.Reporting(progress=False, tensorboard=False),
        )
        trainer = OneRate(
            config, hooks=[jg.trackers.Pruning(trial, "accuracy", every_base_steps=40)]
        )
        trainer.rate = trial.suggest_float("rate", 1e-3, 1.0, log=True)
        return trainer.evaluate(trainer.fit())["accuracy"]

    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
    study.optimize(objective, n_trials=flags.FLAGS.trials)
    num_pruned = sum(one.state == optuna.trial.TrialState.PRUNED for one in study.trials)
    print(f"{len(study.trials)} trials, {num_pruned} of them ended early")
    print(f"learning rate {study.best_params['rate']:.4f}: accuracy {study.best_value:.4f}")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "where the trials' folders go", required=True)
    flags.DEFINE_integer("trials", 10, "how many to try")
    app.run(main)
