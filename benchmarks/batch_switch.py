"""Measures the cost of a change of the batch size, and compares the predicted with the used memory.

    python benchmarks/batch_switch.py

One run of `fit` on the CNN switches between three sizes every few steps, once all are compiled. For every
switch, the table gives the step after it, relative to the median step of its size. There must be no
compilation on the loop's thread after start-up. Then, for each size, XLA's predicted peak bytes of a step are
compared with the device's peak, if the backend reports it (CPU does not).
"""

import statistics
import tempfile
import time

import jax
from absl import app, flags
from models import made

import jaxgoodput as jg
from jaxgoodput.data.datasets import as_source
from jaxgoodput.data.sources import abstract_sample
from jaxgoodput.engine.engine import Engines
from jaxgoodput.train.start.problem import problem_of

FLAGS = flags.FLAGS
flags.DEFINE_integer("switches", 30, "Changes of the batch.")
flags.DEFINE_integer("stay", 12, "Steps between two changes.")

SIZES = (8, 16, 32)


class Mover(jg.Hook):
    """Waits until every size is ready, then moves between them."""

    def __init__(self):
        self.trainer: jg.Trainer | None = None
        self.steps: list[
            tuple[int, float, int]
        ] = []  # micro-batch size, seconds, steps since switch
        self.compiled_before: int | None = None
        self._last: tuple[float, int] | None = None
        self._since = 0
        self._switches = 0

    def on_step_end(self, event, /):
        now, size = time.perf_counter(), event.config.micro_batch_size
        assert self.trainer is not None
        run = self.trainer._loop
        assert run is not None
        if self._last is not None:
            self._since = 0 if size != self._last[1] else self._since + 1
            if self.compiled_before is not None:
                self.steps.append((size, now - self._last[0], self._since))
        self._last = (now, size)
        if self.compiled_before is None:
            self.trainer.compile_sizes()  # whatever the noise of random data promises
            sizes = run.start.strategies.compiler(run.now.batch.strategy)
            if set(SIZES) <= set(sizes.ready()) and not sizes.is_busy:
                self.compiled_before = run.compilations.num
                self._since = 0
            return
        if self._since == FLAGS.stay:
            if self._switches == FLAGS.switches:
                self.compiled = run.compilations.num - self.compiled_before
                self.trainer.finish()
                return
            self._switches += 1
            other = SIZES[(SIZES.index(size) + 1) % len(SIZES)]
            self.trainer.request_batch(other)


def main(argv):
    """Run and print both tables."""
    del argv
    mover = Mover()
    with tempfile.TemporaryDirectory() as workdir:
        config = jg.Config(
            workdir=workdir,
            batch=jg.BatchLimits(
                base=16, min_global=8, max=32, micro=(min(SIZES), max(SIZES)), sizes=SIZES
            ),
            base_steps=1_000_000,
            tuning=jg.Tuning(accumulate=False, every_s=1e9, every_steps=10**9, warm_up_steps=10**9),
            reporting=jg.Reporting(progress=False),
            saving=jg.Saving(at_end=False),
        )
        trainer = made("cnn", config, hooks=[mover], devices=jax.devices()[:1])
        mover.trainer = trainer
        trainer.fit()
    print(
        f"device {jax.devices()[0].device_kind}; compilations on the loop's thread: {mover.compiled}"
    )
    print(
        f"{'micro-batch':>11} {'switches':>8} {'median step ms':>14} {'step after a switch / median':>30}"
    )
    for size in SIZES:
        usual = statistics.median(s for z, s, since in mover.steps if z == size and since > 1)
        first = [s / usual for z, s, since in mover.steps if z == size and since == 0]
        print(
            f"{size:>11} {len(first):>8} {usual * 1e3:>14.1f} "
            f"{statistics.median(first):>12.2f} (at most {max(first):.2f})"
        )
    source = as_source(trainer.dataset())
    engines = Engines(problem_of(trainer, trainer.config), abstract_sample(source))
    engine = engines.on(jg.Strategy().on(jax.devices()[:1]))
    device = jax.devices()[0]
    print(f"\n{'micro-batch':>11} {'predicted MiB':>14} {'measured peak MiB':>18}")
    for size in SIZES:
        engine.compile([size], accumulate=False)
        engine.rehearse(size, accumulate=False)
        engine.rehearse_measuring(size)
        stats = device.memory_stats() or {}
        peak = stats.get("peak_bytes_in_use")
        need = engine.bytes_of(size)
        assert need is not None
        told = f"{peak / 2**20:.1f}" if peak is not None else "the backend does not say"
        print(f"{size:>11} {need.peak / 2**20:>14.1f} {told:>18}")


if __name__ == "__main__":
    app.run(main)
