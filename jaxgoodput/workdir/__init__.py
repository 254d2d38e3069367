"""Where a run keeps its files: a folder, or a bucket of an object store."""
