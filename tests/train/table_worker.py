"""A run with tables in a process of its own: `table_worker.py WORKDIR [SAVE]` dies in its SAVE-th save.

SIGKILL reaches it when the tables have committed and the checkpoint has not begun.
"""

import os
import pathlib
import signal
import sys

import jax

# As in the tests: a program for other devices may round in another way.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))

from table_runs import SAVED, Two, settings  # noqa: E402

from jaxgoodput.train.checkpoints.writer import Checkpoints  # noqa: E402


def main(workdir, fatal=None):
    saves = [0]
    save = Checkpoints.save

    def dies(self, state, meta, **given):
        saves[0] += 1
        if saves[0] == fatal:
            self.wait()  # the one before is safe, as it mostly is
            os.kill(os.getpid(), signal.SIGKILL)
        return save(self, state, meta, **given)

    Checkpoints.save = dies
    Two(settings(workdir, **SAVED)).fit()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
