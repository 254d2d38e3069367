"""Step times and fits, a table and a fit for each strategy: another layout is another program."""

from collections.abc import Mapping
from typing import Any

from jaxgoodput._serial import encode
from jaxgoodput.goodput.fit import PerfFit
from jaxgoodput.goodput.perf import Placement
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.train.choices import Offer
from jaxgoodput.tune.batch import residuals_of
from jaxgoodput.tune.strategy import Known, Option
from jaxgoodput.tune.timings import TimingKey, TimingTable


class Books:
    """Used by one thread; `to_json` rides in a checkpoint."""

    def __init__(self, num_nodes: int):
        self.num_nodes = num_nodes
        self._tables: dict[str, TimingTable] = {}
        self.fits: dict[str, PerfFit | None] = {}

    def table(self, strategy: str) -> TimingTable:
        """The step times of a strategy."""
        return self._tables.setdefault(strategy, TimingTable())

    def key(self, config: BatchConfig, *, measured: bool) -> TimingKey:
        """Under which the times of a configuration are kept."""
        return TimingKey(
            num_nodes=self.num_nodes,
            num_replicas=config.num_replicas,
            micro_batch_size=config.micro_batch_size,
            num_micro_batches=config.num_micro_batches,
            measured=measured,
        )

    def placement(self, config: BatchConfig) -> Placement:
        """Where a configuration runs, as the model sees it."""
        return Placement(num_nodes=self.num_nodes, num_replicas=config.num_replicas)

    def timed(self, config: BatchConfig, *, clean: bool) -> set[int]:
        """Micro-batch sizes of the configuration's strategy that were timed; `clean`: undisturbed."""
        table = self.table(config.strategy)
        return table.timed_sizes(self.num_nodes, config.num_replicas, clean=clean)

    def option(self, offer: Offer, limits: BatchLimits) -> Option:
        """What is known of another strategy; its fit is as of when it was left."""
        strategy = offer.config.strategy
        fit, timings = self.fits.get(strategy), self.table(strategy).timings(0)
        timed, known = self.timed(offer.config, clean=True) & set(offer.ready), None
        if fit is not None and timings is not None and timed:
            placement = self.placement(offer.config)
            known = Known(
                fit=fit,
                placement=placement,
                limits=limits,
                residuals=residuals_of(fit.params, placement, timings, timed),
            )
        return Option(config=offer.config, timed=timed, known=known, switch_s=offer.switch_s)

    def to_json(self) -> dict[str, Any]:
        """Timings and the parameters of the fits, by strategy."""
        return {
            # Of copies: a save may come while a strategy is seen for the first time.
            "timings": {name: table.to_json() for name, table in list(self._tables.items())},
            "fits": {n: encode(f.params) for n, f in list(self.fits.items()) if f},
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what `to_json` wrote. Fits are made again from the timings."""
        timings = saved["timings"]
        # A run from before there were strategies has one table.
        for name, rows in (timings if isinstance(timings, Mapping) else {"": timings}).items():
            self.table(name).restore(rows)
