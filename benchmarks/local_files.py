"""Seconds that a run's files take on the local disk: saving, going on from them, and reading its journal.

    python benchmarks/local_files.py              # `before_after.py --only files` compares two checkouts

A run of a wide layer under Adam (26 MB of state) saves at every fifth of 100 steps, ends, and goes on for 100
more. Both runs are timed whole, in one process; the programs are compiled before.
"""

import tempfile
import time
from typing import Any

import jax
from restart_cost import Matrix

from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.observe.report import numbers
from jaxgoodput.train.config import Config, Reporting

ROWS, STEPS, EVERY = 8_192, 100, 5


class Saver:
    """Asks for a checkpoint at every fifth step, and knows when the first step was done."""

    trainer: Any = None
    first_s = 0.0

    def on_step_end(self, event) -> None:
        """Ask, if it is time."""
        self.first_s = self.first_s or time.monotonic()
        if event.step % EVERY == 0:
            self.trainer.request_save()


def trained(workdir: str, steps: int) -> tuple[float, float, float]:
    """Train until this many steps are done; return seconds to the first step, of all, and of CPU."""
    hook = Saver()
    config = Config(
        workdir=workdir,
        policy="fixed",
        batch=BatchLimits(base=32, max=32, micro=(32, 32), sizes=(32,)),
        base_steps=steps,
        reporting=Reporting(progress=False),
    )
    hook.trainer = Matrix(config, ROWS, hooks=[hook])
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    hook.trainer.fit()
    return (
        hook.first_s - began_s,
        time.monotonic() - began_s,
        time.process_time() - began_cpu_s,
    )


def main() -> None:
    """Print a line for each quantity."""
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as warm:
        trained(warm, 2)
    with tempfile.TemporaryDirectory() as workdir:
        _, took_s, cpu_s = trained(workdir, STEPS)
        first_s, again_s, _ = trained(workdir, 2 * STEPS)
        began_s = time.monotonic()
        numbers(workdir)
        read_s = time.monotonic() - began_s
    print(f"run with {STEPS // EVERY} checkpoints, s: {took_s}")
    print(f"the same, s CPU: {cpu_s}")
    print(f"going on from the last one, s to the first step: {first_s}")
    print(f"going on, s in all: {again_s}")
    print(f"reading the journal, s: {read_s}")


if __name__ == "__main__":
    main()
