"""A decision as matrices, and a choice of shapes as a decision: what the goodput policies share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.cluster.scheduler.limits import Limit, counts, limits_of, per_device
from jaxgoodput.cluster.scheduler.placement.placement import place
from jaxgoodput.cluster.scheduler.policy import Decision, JobView
from jaxgoodput.cluster.scheduler.shapes import (
    capacity,
    capacity_rows,
    goodput_matrix,
    no_shape_reason,
    shape_in_words,
    shape_of,
    shapes,
)
from jaxgoodput.cluster.scheduler.solve.assignment import Choice, Quota, allocate
from jaxgoodput.specs import Allocation, ClusterSpec, Shape


@dataclass(frozen=True, kw_only=True)
class ShapeProblem:
    """Jobs against shapes; indices are those of `jobs`, `shapes` and `kinds`."""

    jobs: tuple[JobView, ...]
    cluster: ClusterSpec
    now_s: float
    shapes: tuple[Shape, ...]
    kinds: tuple[str, ...]
    goodput: np.ndarray
    """[jobs, shapes]; NaN = not allowed or unknown."""
    devices: np.ndarray
    """[shapes] how many it has."""
    kind: np.ndarray
    """[shapes] which of `kinds` it has."""
    present: np.ndarray
    """[jobs] the shape that a job has; -1 = none of these."""
    running: np.ndarray
    """[jobs] bool, whether it has devices."""

    @classmethod
    def of(
        cls,
        jobs: Sequence[JobView],
        cluster: ClusterSpec,
        now_s: float,
        *,
        growth: float | None = None,
    ) -> "ShapeProblem":
        """Reads jobs and cluster.

        `growth`: a job that has not run yet starts at its smallest size, and no job is offered more
        than this many times the largest size that it has run on; None = no such limit.
        """
        offered = shapes(cluster, jobs)
        goodput = goodput_matrix(jobs, offered, cluster)
        goodput[goodput <= 0.0] = np.nan
        devices = np.array([shape.num_devices for shape in offered], np.int64)
        kinds = tuple(sorted({shape.kind for shape in offered}))
        index = {kind: i for i, kind in enumerate(kinds)}
        if growth is not None and len(jobs):
            profiled = np.array([view.largest_profiled for view in jobs], np.float64)
            free = np.array([view.spec.mode != "rigid" for view in jobs], bool)
            least = np.array([view.spec.min_devices for view in jobs], np.float64)
            most = np.where(free, np.maximum(growth * profiled, least), np.inf)
            smallest = np.min(
                np.where(np.isnan(goodput), np.inf, devices.astype(float)), 1, initial=np.inf
            )
            goodput[devices > np.maximum(most, smallest)[:, None]] = np.nan
        kind_of = {node.name: node.kind for node in cluster.nodes}
        column = {shape: i for i, shape in enumerate(offered)}
        held = [shape_of(view.allocation.devices, kind_of) for view in jobs]
        return cls(
            jobs=tuple(jobs),
            cluster=cluster,
            now_s=now_s,
            shapes=offered,
            kinds=kinds,
            goodput=goodput,
            devices=devices,
            kind=np.array([index[shape.kind] for shape in offered], np.int64),
            present=np.array([column.get(h, -1) if h else -1 for h in held], np.int64),
            running=np.array([h is not None for h in held], bool),
        )

    @property
    def changes(self) -> np.ndarray:
        """[jobs, shapes] bool: another shape than the one that the running job has."""
        return self.running[:, None] & (np.arange(len(self.shapes)) != self.present[:, None])

    def restoring(self) -> np.ndarray:
        """[jobs] the shape of a job that is still restarting and may stay, -1 for the others.

        It may not where its devices are no longer offered (a reservation has begun), nor where those
        of its tenant that restart exceed the quota together: then none of these is sure of its devices.
        """
        until = np.array([view.restoring_until_s or -np.inf for view in self.jobs], np.float64)
        offered = offered_devices(self.cluster, draining=True)
        stays = (until > self.now_s) & np.array(
            [
                all(offered.get(name, set()).issuperset(local) for name, local in devices.items())
                for devices in (view.allocation.devices for view in self.jobs)
            ],
            bool,
        )
        devices = np.append(self.devices, 0)[self.present]
        kind = np.append(self.kind, -1)[self.present]
        for limit, counted, units in self.limits():
            its = stays & counted
            if (devices * np.append(units, 0.0)[kind])[its].sum() > limit.left + 1e-9:
                stays &= ~its
        return np.where(stays, self.present, -1)

    def limits(self) -> list[tuple[Limit, np.ndarray, np.ndarray]]:
        """Each limit with [jobs] bool, whose use counts, and [kinds] what a device counts."""
        found = limits_of(self.cluster)
        counted = counts(found, [view.spec.tenant for view in self.jobs])
        return list(zip(found, counted, per_device(found, self.kinds), strict=True))

    def sizes(self, job: int) -> list[int]:
        """The shapes that a job may have, the smallest first."""
        allowed = np.flatnonzero(~np.isnan(self.goodput[job]))
        return [int(s) for s in allowed[np.argsort(self.devices[allowed], kind="stable")]]

    def paused(self) -> np.ndarray:
        """[jobs] bool: has no devices, but has had some."""
        had = [view.num_restarts > 0 or any(view.received_s.values()) for view in self.jobs]
        return ~self.running & np.array(had, bool)

    def age_s(self) -> np.ndarray:
        """[jobs] seconds since submission, at least 0 (clocks differ)."""
        submitted_s = np.array([view.submitted_s for view in self.jobs], np.float64)
        return np.maximum(self.now_s - submitted_s, 0.0)

    def restart_s(self) -> np.ndarray:
        """[jobs] seconds that a change of allocation was measured to cost."""
        return np.array([view.restart_s for view in self.jobs], np.float64)

    def num_restarts(self) -> np.ndarray:
        """[jobs] changes so far."""
        return np.array([view.num_restarts for view in self.jobs], np.float64)

    def received_s(self) -> np.ndarray:
        """[jobs] device-seconds so far, all kinds alike."""
        return np.array([sum(view.received_s.values()) for view in self.jobs], np.float64)

    def declared_s(self) -> np.ndarray:
        """[jobs] device-seconds left at the shape that uses devices best; NaN where that is unknown.

        Unknown are jobs that declare nothing, have measured nothing yet, or have no shape.
        """
        left = np.array([v.remaining if v.remaining is not None else np.nan for v in self.jobs])
        best = np.where(np.isnan(self.goodput), 0.0, self.goodput / self.devices).max(
            1, initial=0.0
        )
        measured = np.array([view.largest_profiled > 0 for view in self.jobs], bool)
        known = measured & (best > 0.0)
        return np.where(known, left / np.where(known, best, 1.0), np.nan)

    def choose(
        self,
        utility: np.ndarray,
        *,
        pinned: np.ndarray | None = None,
        at_least: np.ndarray | None = None,
        start: np.ndarray | None = None,
        relative_gap: float,
        time_limit_s: float,
    ) -> Choice:
        """The best choice within capacity, placeability and quotas.

        `pinned` jobs keep their shape; those of `at_least` run, where they fit. start: [jobs] shapes that
        keep all that, where such are known.
        """
        each = capacity(self.cluster)
        limits = np.array([each[kind] for kind in self.kinds], np.float64)
        rows = capacity_rows(self.cluster, self.shapes)
        plain = [
            limit == each[kind] and np.array_equal(row, np.where(self._is(kind), self.devices, 0))
            for row, limit, kind in zip(rows.matrix, rows.limits, rows.kinds, strict=True)
        ]
        more = np.flatnonzero(~np.array(plain, bool))
        quotas = [
            Quota(jobs=counted, limit=limit.left, per_device=None if limit.price is None else units)
            for limit, counted, units in self.limits()
        ]
        return allocate(
            utility,
            self.devices,
            self.kind,
            limits,
            pinned=pinned,
            at_least=at_least,
            quotas=quotas,
            rows=rows.matrix[more],
            row_limit=rows.limits[more],
            start=start,
            relative_gap=relative_gap,
            time_limit_s=time_limit_s,
        )

    def decide(self, choice: Choice, *, one_multi_node_job_per_node: bool = False) -> Decision:
        """Devices for a choice, with a reason for every job."""
        wanted = {
            view.spec.id: self.shapes[index]
            for view, index in zip(self.jobs, choice.shape, strict=True)
            if index >= 0
        }
        allocations = place(
            wanted,
            self.jobs,
            self.cluster,
            one_multi_node_job_per_node=one_multi_node_job_per_node,
        )
        reasons = {}
        limits = self.limits()
        used_up = self._used_up(choice, limits)
        for row, view in enumerate(self.jobs):
            id_ = view.spec.id
            if id_ in allocations:
                reasons[id_] = self._why(row, int(choice.shape[row]), allocations)
            elif id_ in wanted:
                reasons[id_] = (
                    f"waits: {shape_in_words(wanted[id_])} do not fit beside the jobs placed first"
                )
            elif np.isnan(self.goodput[row]).all():
                offered = set(self.shapes)
                free = capacity(self.cluster)  # `reconcile` has taken out what others keep
                why = no_shape_reason(
                    view,
                    free,
                    offered.__contains__,
                    status="neither held nor reserved",
                )
                reasons[id_] = f"waits: {why}"
            elif (least := int(self.devices[self.sizes(row)[0]])) > self._quota(view):
                reasons[id_] = (
                    f"waits: {self._quota(view)} devices are left of the quota of tenant "
                    f"{view.spec.tenant!r}, and it needs at least {least}"
                )
            elif used_up[row] >= 0:
                reasons[id_] = f"waits: {limits[used_up[row]][0].said}, leaves it no shape"
            else:
                reasons[id_] = "waits: others make more of every device that it could use"
        return Decision(
            allocations=allocations,
            reasons=reasons,
            objective=choice.objective,
            bound=choice.bound,
        )

    def _used_up(
        self, choice: Choice, limits: Sequence[tuple[Limit, np.ndarray, np.ndarray]]
    ) -> np.ndarray:
        """[jobs] the limit that leaves a job no shape beside what was chosen; -1 = none."""
        found = np.full(len(self.jobs), -1)
        if not len(self.shapes):
            return found
        chosen = np.flatnonzero(choice.shape >= 0)
        for at, (limit, counted, units) in enumerate(limits):
            use = units[self.kind] * self.devices
            its = chosen[counted[chosen]]
            left = limit.left - use[choice.shape[its]].sum()
            least = np.where(np.isnan(self.goodput), np.inf, use).min(1)
            found[(found < 0) & counted & (least > left + 1e-9)] = at
        return found

    def _quota(self, view: JobView) -> int:
        """Devices that the job's tenant may have, without those of jobs that stay."""
        return self.cluster.quota.get(view.spec.tenant, int(self.devices.max(initial=0)))

    def _why(self, row: int, shape: int, allocations: Mapping[str, Allocation]) -> str:
        said = shape_in_words(self.shapes[shape])
        view = self.jobs[row]
        if allocations[view.spec.id] is view.allocation:
            return f"keeps {said}"
        before = int(self.present[row])
        if before == shape:
            return (
                f"moves to other devices, {said}, {self._why_moved(view.allocation, allocations)}"
            )
        goodput = self.goodput[row]
        if before >= 0 and goodput[before] > 0:
            return f"gets {said}: {goodput[shape] / goodput[before]:.2f} times its present goodput"
        return f"gets {said}"

    def _why_moved(self, left: Allocation, allocations: Mapping[str, Allocation]) -> str:
        """Why a job of the same shape is elsewhere now: who has the devices that it left, or nobody may."""
        offered = offered_devices(self.cluster)
        if any(not offered.get(name, set()).issuperset(d) for name, d in left.devices.items()):
            return "because those that it had are not to be given away now"
        takers = sorted(
            id_
            for id_, given in allocations.items()
            if any(set(given.devices.get(name, ())) & set(d) for name, d in left.devices.items())
        )
        if not takers:
            return "so that all fit"
        more = f" and {len(takers) - 1} more" if len(takers) > 1 else ""
        return f"so that {takers[0]}{more} can be placed where it was"

    def _is(self, kind: str) -> np.ndarray:
        return np.array([shape.kind == kind for shape in self.shapes], bool)


def offered_devices(cluster: ClusterSpec, *, draining: bool = False) -> dict[str, set[int]]:
    """Node name -> local indices that may be given away; with `draining` those of draining nodes, too."""
    states = ("up", "draining") if draining else ("up",)
    return {
        node.name: set(range(node.num_devices)) - set(node.withheld)
        for node in cluster.nodes
        if node.state in states
    }


def normalised(goodput: np.ndarray) -> np.ndarray:
    """[jobs, shapes] each row divided by its smallest entry; NaN stays NaN."""
    least = np.min(np.where(np.isnan(goodput), np.inf, goodput), axis=1, initial=np.inf)
    return goodput / least[:, None]
