"""Which nodes are down at the moment: `Settings.failures` and the fault script together."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from jaxgoodput.cluster.simulate.conditions.faults import FaultScript
from jaxgoodput.cluster.simulate.settings import Settings
from jaxgoodput.specs import ClusterSpec


class Breakdowns:
    """Tracks which nodes are down or slow as time passes. Call `pass_to` to let it pass."""

    def __init__(self, settings: Settings, cluster: ClusterSpec):
        self.num_failures = 0
        self.script: FaultScript | None = None
        self._cluster = cluster
        self._failures = settings.failures
        self._rng = np.random.default_rng([settings.seed, 0x6661696C])
        self._fails_at = {}
        if settings.failures is not None:
            self._fails_at = {node.name: self._lifetime(0.0) for node in cluster.nodes}
        self._down_until: dict[str, float] = {}
        checkpoints = [] if settings.failures is None else [settings.failures.checkpoint_s]
        if settings.faults is not None:
            self.script = FaultScript(settings.faults, cluster.nodes, settings.seed)
            checkpoints += [settings.faults.checkpoint_s] if settings.faults.lose_work else []
        self.checkpoint_s = min(checkpoints, default=math.inf)
        """Seconds between checkpoints of a job; infinite if no work can be lost."""

    def _lifetime(self, now_s: float) -> float:
        if self._failures is None:
            return math.inf
        return now_s + float(self._rng.exponential(self._failures.mean_between_s))

    @property
    def next_s(self) -> float:
        """Time at which a node next fails, is repaired, or changes its speed; infinite = never."""
        scripted = math.inf if self.script is None else self.script.next_s
        return min([scripted, *self._fails_at.values(), *self._down_until.values()])

    @property
    def down(self) -> frozenset[str]:
        """Names of the nodes that are down."""
        scripted = frozenset() if self.script is None else self.script.down
        return scripted.union(self._down_until)

    def pass_to(self, now_s: float) -> tuple[list[str], bool]:
        """Let time pass; return the nodes that have failed, and whether any node's state has changed."""
        # Repairs come first: a repaired node gets its next lifetime before failures are checked.
        failed: list[str] = []
        repaired = [name for name, until in self._down_until.items() if until <= now_s]
        for name in repaired:
            del self._down_until[name]
            self._fails_at[name] = self._lifetime(now_s)
        for name, at in self._fails_at.items():
            if at <= now_s and name not in self._down_until and self._failures is not None:
                self._down_until[name] = now_s + self._failures.repair_s
                self._fails_at[name] = math.inf
                failed.append(name)
        has_changed = bool(repaired)
        if self.script is not None:
            before = self.script.down
            failed += sorted(self.script.pass_to(now_s))
            has_changed |= self.script.down != before
        self.num_failures += len(failed)
        return failed, bool(failed) or has_changed

    def present(self) -> ClusterSpec:
        """Return the cluster, with `state="down"` for the nodes that are down now."""
        if not (down := self.down):
            return self._cluster
        nodes = tuple(
            replace(node, state="down") if node.name in down else node
            for node in self._cluster.nodes
        )
        return replace(self._cluster, nodes=nodes)

    def speeds(self, nodes_by_job: Mapping[str, Mapping[str, object]]) -> dict[str, float]:
        """Return the share of their speed that remains for jobs on slow nodes, by job, without the others."""
        if self.script is None:
            return {}
        left = {job: self.script.speed(nodes) for job, nodes in nodes_by_job.items()}
        return {job: share for job, share in left.items() if share < 1.0}
