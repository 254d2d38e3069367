"""Rows that pass through all tiers, and losses, equal those of a dense table bit for bit."""

import jax
import numpy as np
import optax
import pytest
from dense_tables import SIZES, STEPS, batches, dense, ids_of, loss, parameters

from jaxgoodput.embedding.optimizers import Adagrad, Adam, Sgd
from jaxgoodput.embedding.pipeline import Pipeline
from jaxgoodput.embedding.step import row_step
from jaxgoodput.embedding.table import TieredTable

TIERS = {"user": (90, 140), "item": (200, 300)}  # slots on the device and in RAM
OPTIMIZERS = {"adagrad": Adagrad(0.1), "sgd": Sgd(0.1), "adam": Adam(0.05)}


def tiered(folder, optimizer, dtype, depth, num_batches=STEPS):
    """The same training, with tiers that hold a tenth of the rows."""
    tx, params = optax.sgd(0.05), parameters()
    opt_state, losses = tx.init(params), []
    tables = {
        name: TieredTable(
            folder / name,
            dim=dim,
            optimizer=optimizer,
            num_rows=size,
            device_rows=TIERS[name][0],
            ram_rows=TIERS[name][1],
            dtype=dtype,
            segment_bytes=2**14,
        )
        for name, (size, dim) in SIZES.items()
    }
    try:
        step = jax.jit(row_step(loss, tables, tx), donate_argnums=(0, 1, 2))
        with Pipeline(tables, batches(num_batches), ids_of, depth=depth) as pipeline:
            for placed in pipeline:
                batch = {"label": placed.batch["label"]}
                slots, params, opt_state, value = step(
                    placed.slots, params, opt_state, placed.lookups, batch
                )
                pipeline.trained(slots)
                losses.append(value)
        for table in tables.values():
            counts = table.counts
            assert min(counts.on_device, counts.in_ram, counts.on_disk, counts.new) > STEPS
        rows = {
            name: table.layout.unpack_host(table.rows(np.arange(SIZES[name][0])))
            for name, table in tables.items()
        }
    finally:
        for table in tables.values():
            table.close()
    return rows, np.array(jax.device_get(losses))


@pytest.mark.parametrize("depth", [0, 1], ids=["sequential", "pipelined"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("adagrad", "float32"),
        *(
            pytest.param(name, dtype, marks=pytest.mark.slow)
            for name in OPTIMIZERS
            for dtype in ("float32", "bfloat16")
            if (name, dtype) != ("adagrad", "float32")
        ),
    ],
)
def test_every_row_of_every_tier_has_the_bits_of_a_dense_table(tmp_path, name, dtype, depth):
    optimizer = OPTIMIZERS[name]
    expected, expected_losses = dense(optimizer, dtype)
    tables, losses = tiered(tmp_path, optimizer, dtype, depth)
    np.testing.assert_array_equal(losses, expected_losses)
    for table, fields in tables.items():
        for field, found in fields.items():
            np.testing.assert_array_equal(found, expected[table][field], err_msg=f"{table} {field}")
