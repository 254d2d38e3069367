"""Tables larger than the device: rows in its slots while they are read, otherwise in RAM or on a disk.

A `TieredTable` holds rows by id, each an embedding with its optimizer state. A `Pipeline` brings the rows of
each batch to the device ahead of the training, and `row_step` returns a training step that reads and updates
them there. `TieredTable.save` commits all rows; `resize` moves them to other hosts. If several processes
share a table, `Peers` connect them, and each opens its `Share`.

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
