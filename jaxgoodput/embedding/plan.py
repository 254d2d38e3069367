"""`Table`: the declaration of a table of rows. It opens no file and touches no device."""

import dataclasses
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxgoodput.clock import Clock
from jaxgoodput.embedding.hosts import host_folder
from jaxgoodput.embedding.optimizers import RowOptimizer
from jaxgoodput.embedding.peers import Share
from jaxgoodput.embedding.rows import EMBEDDING, Field, RowLayout
from jaxgoodput.embedding.table import TieredTable


@dataclass(frozen=True, kw_only=True)
class Table:
    """The arguments of a `TieredTable`, for a task that declares its tables before anything is opened."""

    folder: str
    """Folder of the rows on disk, with a subfolder for each host. Saved tables are here."""
    dim: int
    """Elements of an embedding."""
    optimizer: RowOptimizer
    """Update rule of the rows, tuned at the base batch size."""
    device_rows: int
    """Slots on the device: at least the number of different rows that one batch reads."""
    ram_rows: int = 0
    """Rows in RAM: at least `device_rows`, unless all rows fit on the device."""
    num_rows: int | None = None
    """Limit of ids. None: any 63-bit number (31-bit in a Trainer's batches unless x64 is enabled)."""
    dtype: str = "float32"
    """Dtype of the embeddings, "float32" or "bfloat16"."""
    scale: float = 0.01
    """Bound of initial values: a row starts uniform in -scale to scale, as a hash of its id."""
    seed: int = 0
    """Seed of the initial values."""
    half_life: float = 1000.0
    """Batches after which a read counts half as much in the choice of the rows that stay on the device."""
    store: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `RowStore`, such as `segment_bytes`."""

    @property
    def num_slots(self) -> int:
        """Number of row slots on the device, at most the number of rows of the table."""
        return self.device_rows if self.num_rows is None else min(self.device_rows, self.num_rows)

    @property
    def layout(self) -> RowLayout:
        """The fields of a row (embedding and optimizer state), in order."""
        return RowLayout((Field(EMBEDDING, self.dim, self.dtype), *self.optimizer.fields(self.dim)))

    def folder_of(self, host: int = 0) -> pathlib.Path:
        """Return the folder of the rows that a host owns.

        Raises ValueError if a table was opened directly in `folder`.
        """
        if (pathlib.Path(self.folder) / "commits").is_dir():
            raise ValueError(
                f"{self.folder} holds a table that was opened without a Trainer. A Trainer keeps its tables "
                f"in a subfolder for each host. Move all files into {host_folder(self.folder, 0)}."
            )
        return host_folder(self.folder, host)

    def open(
        self,
        *,
        at: int | None = None,
        device: Any = None,
        clock: Clock | None = None,
        share: Share | None = None,
    ) -> TieredTable:
        """Open the table at the commit `at` (None: the newest), or this process's share of it.

        Raises what `TieredTable` and `folder_of` raise.
        """
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del given["folder"], given["store"]
        return TieredTable(
            self.folder_of(0 if share is None else share.peers.rank),
            **given,
            device=device,
            clock=clock,
            at=at,
            share=share,
            **self.store,
        )
