"""Checkpoints in the forms of versions before this one."""

import json
import shutil

import orbax.checkpoint as ocp

from jaxgoodput import _disk
from jaxgoodput.engine.saved import keys_of

# What the metadata holds since version 2, and what it is where it is missing.
SINCE_2 = {
    "progress": 0.0,
    "metrics": {},
    "data": None,
    "base_batch_size": None,
    "is_named": False,
    "tables": {},
}


def as_version_1(folder):
    """Make a checkpoint what version 1 wrote: leaves by their number, no sums."""
    path = folder / "meta" / "metadata"
    saved = {k: v for k, v in json.loads(path.read_text()).items() if k not in SINCE_2}
    reader = ocp.StandardCheckpointer()
    tree = reader.restore(folder / "state")
    shutil.rmtree(folder / "state")
    leaves = {}
    for i, leaf in enumerate(saved["leaves"]):
        value = tree
        for key in keys_of(leaf):
            value = value[key if isinstance(value, list) else str(key)]
        leaves[f"leaf_{i:05d}"] = value
    reader.save(folder / "state", leaves)
    reader.wait_until_finished()
    path.write_text(json.dumps({**saved, "version": 1}))
    (folder / _disk.SUMS).unlink()
