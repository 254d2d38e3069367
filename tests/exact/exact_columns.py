"""The columns of the exactness bench: how a batch is split over devices and calls, and what else happens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jaxgoodput as jg

BASE, NUM_UPDATES = 8, 8
TIMES = 8  # how much larger the large batch is
LARGE_STEPS = 24.0  # base steps at the large batch: enough of them for the noise to be known

SWITCHES = {
    "jax_debug_nans": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_transfer_guard": "disallow",
}


@dataclass(frozen=True, kw_only=True)
class Column:
    """How one run is done. A micro-batch is the samples of all replicas in one call of the loss."""

    name: str
    num_devices: int = 1
    num_micro_batches: int = 1
    batch: int = BASE
    strategies: tuple[jg.Strategy, ...] = ()
    stop_after: int | None = None
    """Step after which the run is stopped, to be resumed."""
    switches: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_replicas(self) -> int:
        """Number of model copies."""
        return self.strategies[0].num_replicas if self.strategies else self.num_devices

    @property
    def is_global(self) -> bool:
        """Whether one call of the loss sees the samples of all replicas."""
        return bool(self.strategies)

    @property
    def is_large(self) -> bool:
        """Whether updates are multiplied by a gain, and schedules read progress."""
        return self.batch > BASE

    def config(self, workdir: str) -> jg.Config:
        """Return the settings of the run."""
        each = self.batch // self.num_replicas // self.num_micro_batches
        return jg.Config(
            workdir=workdir,
            batch=jg.BatchLimits(base=BASE, max=self.batch, micro=(1, each)),
            base_steps=LARGE_STEPS if self.is_large else float(NUM_UPDATES),
            policy={0: self.batch} if self.is_large else "fixed",
            strategies=self.strategies,
            tuning=jg.Tuning(accumulate=self.num_micro_batches > 1),
            statistics=jg.Statistics(every_steps=1),
            execution=jg.Execution(background_compile=False, compilation_cache=None),
            reporting=jg.Reporting(tensorboard=False, progress=False),
            saving=jg.Saving(at_end=False, every_s=None),
        )


COLUMNS = {
    column.name: column
    for column in (
        Column(name="base"),
        Column(name="4 micro-batches", num_micro_batches=4),
        Column(name="2 replicas", num_devices=2),
        Column(name="4 replicas", num_devices=4),
        Column(name="fsdp", num_devices=2, strategies=(jg.Strategy(fsdp=2),)),
        Column(name="8 x base", num_devices=2, batch=TIMES * BASE),
        Column(name="resumed", stop_after=4),
        Column(name="switches", switches=SWITCHES),
    )
}
