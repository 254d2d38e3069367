"""`Table`: a table of rows as it is written down, before anything is opened or lies on a device."""

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
    """What `TieredTable` is made with; opens nothing. See there for what each of them means."""

    folder: str
    """Where the rows are that fit nowhere else, and all that are saved: a folder in it for each host."""
    dim: int
    """Numbers of an embedding."""
    optimizer: RowOptimizer
    """How rows learn: tuned at the base batch size."""
    device_rows: int
    """Slots on the device: as many as a batch reads different rows, at least."""
    ram_rows: int = 0
    """In RAM: `device_rows` at least, unless the device has room for all."""
    num_rows: int | None = None
    """Ids are below it; None: any 63-bit numbers, of 32 bits in a Trainer's batches without x64."""
    dtype: str = "float32"
    """Of embeddings: "float32" or "bfloat16"."""
    scale: float = 0.01
    """A row that nobody has read is uniform in -scale to scale, by its id."""
    seed: int = 0
    """Of those."""
    half_life: float = 1000.0
    """Batches after which a read counts for half as much for which rows stay."""
    store: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `RowStore`, such as `segment_bytes`."""

    @property
    def num_slots(self) -> int:
        """Of the device: no more than there are rows."""
        return self.device_rows if self.num_rows is None else min(self.device_rows, self.num_rows)

    @property
    def layout(self) -> RowLayout:
        """Of a row."""
        return RowLayout((Field(EMBEDDING, self.dim, self.dtype), *self.optimizer.fields(self.dim)))

    def folder_of(self, host: int = 0) -> pathlib.Path:
        """Where the rows are that a host owns.

        Raises ValueError where there is a table that was made with this folder itself.
        """
        if (pathlib.Path(self.folder) / "commits").is_dir():
            raise ValueError(
                f"{self.folder} holds a table that was opened by its folder alone, and those of a Trainer "
                f"lie in folders by host. Move all that is in it to {host_folder(self.folder, 0)}."
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
        """The table, as it was at the commit `at`, or this process's share of one that several hold.

        Raises what `TieredTable` and `folder_of` raise.
        """
        return TieredTable(
            self.folder_of(0 if share is None else share.peers.rank),
            dim=self.dim,
            optimizer=self.optimizer,
            device_rows=self.device_rows,
            ram_rows=self.ram_rows,
            num_rows=self.num_rows,
            dtype=self.dtype,
            scale=self.scale,
            seed=self.seed,
            half_life=self.half_life,
            device=device,
            clock=clock,
            at=at,
            share=share,
            **self.store,
        )
