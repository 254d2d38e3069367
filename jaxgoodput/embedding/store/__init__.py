"""Rows by id on a disk: a log of segments, an index in memory, commits, and compaction.

`RowStore` is the store. `folder` holds commits and segment files, `segment` the format of one file, `row_map`
says where the newest row of each id is, `appender` writes new rows, and `compaction` drops stale ones.
"""

from jaxgoodput.embedding.store.compaction import to_compact
from jaxgoodput.embedding.store.folder import Manifest, commits_in, manifests, read_manifest
from jaxgoodput.embedding.store.row_store import RowStore, StoredRows

__all__ = [
    "Manifest", "RowStore", "StoredRows", "commits_in", "manifests", "read_manifest", "to_compact",
]  # fmt: skip
