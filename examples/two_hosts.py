"""jaxgoodput run --nnodes 1:2 --local-hosts 2 -- python examples/two_hosts.py --workdir /tmp/two_hosts

Trains the quickstart's network on two hosts, here both on this machine; on two real hosts, use `--hosts a,b`
instead of `--local-hosts 2`. Expect lines that name two processes, and a test accuracy of 0.97 or more,
within a minute on two CPU cores. If you end one of the processes during the training (`kill -9`), the other
one continues from memory and says so, and a new process joins.

Only the hook, which prints the processes, is about hosts.
"""

import jax
from absl import app, flags
from quickstart import Digits, default_config

import jaxgoodput as jg

LEAST_ACCURACY = 0.97


class Tells(jg.Hook):
    """Prints which processes take part, whenever that changes."""

    def on_regrouped(self, event):
        why = f", since {event.reason}" if event.reason else ""
        print(f"step {event.step}: {event.num_processes} processes{why}", flush=True)


def main(_):
    config = jg.with_overrides(default_config(flags.FLAGS.workdir), flags.FLAGS.set)
    trainer = Digits(config, hooks=[Tells()])
    state = trainer.fit()
    accuracy = trainer.evaluate(state)["accuracy"]
    if jax.process_index() == 0:
        print(f"test accuracy {accuracy:.4f}, expected {LEAST_ACCURACY} or more")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "where checkpoints and the dashboard go", required=True)
    flags.DEFINE_multi_string("set", [], "changes to the configuration, such as base_steps=1000")
    app.run(main)
