"""A run with tables by several processes: `shared_tables_worker.py OUT STOP` stops behind that step.

Appends every step to OUT/steps.jsonl, and to OUT/slots.jsonl what is in the slots of each process at the end.
"""

import json
import pathlib
import sys
import zlib
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))

from problems import Recorder
from table_runs import Two, settings

import jaxgoodput as jg
from jaxgoodput.embedding.table import TieredTable
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.observe import hooks

BASE, LARGE, CHANGES_BEHIND = 96, 192, 4
TOTAL = 90.0


def made(out, **options):
    """The run; a batch of 96 samples can be cut over 1, 2 and 3 processes."""
    limits = BatchLimits(base=BASE, max=LARGE, sizes=(BASE, LARGE), max_micro_batches=1)
    quiet = {"policy": "goodput", "tuning__warm_up_steps": 10**6, "base_steps": TOTAL}
    config = settings(out / "run", batch=limits, rule=jg.rules.square_root, **quiet)
    return Two(config, **{"devices": None, **options})


class Lines(Recorder):
    """Writes steps, asks for another batch early on, and stops."""

    def __init__(self, out, stop):
        super().__init__()
        self.out, self.stop, self.first = out, stop, None
        self.trainer: Any = None

    def on_step_end(self, event):
        if self.first is None:
            self.first = event.step
        line = {
            "step": event.step,
            "num_processes": jax.process_count(),
            "before": [event.before.seed, event.before.epoch, event.before.offset],
            "num_samples": event.num_samples,
            "loss": event.metrics["loss"],
        }
        with (self.out / "steps.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if event.step == self.first + CHANGES_BEHIND:
            other = BASE if event.num_samples == LARGE else LARGE
            self.trainer.request_batch(other // jax.process_count())
        if event.step == self.stop:
            self.trainer.request_stop()


def write_slots_when_closed(out):
    close = TieredTable.close

    def closing(self):
        if not self.slots.is_deleted():
            total = zlib.crc32(np.asarray(self.slots).tobytes())
            line = {
                "count": jax.process_count(),
                "dim": self.dim,
                "placed": self.counts.batches,
                "total": total,
                "moved": [self.counts.in_ram, self.counts.on_disk],
            }
            with (out / f"slots.{jax.process_index()}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        close(self)

    TieredTable.close = closing


def main(out, stop):
    write_slots_when_closed(out)
    hooks.MOST_BEHIND = 2  # so that the change comes long before the stop
    lines = Lines(out, stop)
    trainer = lines.trainer = made(out, hooks=[lines])
    state = trainer.fit()
    (out / f"error.{jax.process_index()}.json").write_text(json.dumps(trainer.evaluate(state)))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
