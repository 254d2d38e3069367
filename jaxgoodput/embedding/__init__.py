"""Tables larger than the device: rows in its slots while they are read, otherwise in RAM or on a disk.

A `TieredTable` has rows by id, each an embedding and what its optimizer keeps of it. A `Pipeline` brings the
rows of batch after batch to the device, ahead of the training; `row_step` makes the step that reads and
changes them there. `TieredTable.save` commits all rows; `resize` gives them to other hosts. Processes that
share a table have `Peers` that tell each other ids and rows, and each opens its `Share`.

    with TieredTable(folder, dim=16, optimizer=Adagrad(0.05), num_rows=10**8, device_rows=10**6,
                     ram_rows=10**7) as table:
        step = jax.jit(row_step(loss, {"item": table}, tx), donate_argnums=(0, 1, 2))
        with Pipeline({"item": table}, batches, ids=lambda batch: {"item": batch["item"]}) as pipeline:
            for placed in pipeline:
                slots, params, state, value = step(placed.slots, params, state, placed.lookups, placed.batch)
                pipeline.trained(slots)
        table.save()
"""

from jaxgoodput.embedding.hashing import owners
from jaxgoodput.embedding.hosts import MoveReport, host_folder, resize
from jaxgoodput.embedding.optimizers import Adagrad, Adam, RowOptimizer, Sgd
from jaxgoodput.embedding.peers import Peers, Share
from jaxgoodput.embedding.pipeline import Pipeline, PlacedBatch
from jaxgoodput.embedding.plan import Table
from jaxgoodput.embedding.step import row_step
from jaxgoodput.embedding.store import RowStore
from jaxgoodput.embedding.table import Lookup, TieredTable

__all__ = [
    "Adagrad", "Adam", "Lookup", "MoveReport", "Peers", "Pipeline", "PlacedBatch", "RowOptimizer",
    "RowStore", "Sgd",
    "Share", "Table", "TieredTable", "host_folder", "owners", "resize", "row_step",
]  # fmt: skip
