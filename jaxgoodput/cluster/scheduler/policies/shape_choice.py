"""Jobs and shapes as matrices, and a choice of shapes as a decision; for policies that resize jobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxgoodput.cluster.scheduler.constraints import on_offer
from jaxgoodput.cluster.scheduler.limits import (
    Limit,
    amount_limits,
    counts,
    limits_of,
    per_device,
)
from jaxgoodput.cluster.scheduler.placement.amounts import needed_in_words, needs_of
from jaxgoodput.cluster.scheduler.placement.placement import place
from jaxgoodput.cluster.scheduler.policy import Decision, JobView
from jaxgoodput.cluster.scheduler.shapes import (
    capacity,
    capacity_rows,
    devices_in_words,
    goodput_matrix,
    needs_reason,
    no_shape_reason,
    present_shapes,
    shape_in_words,
    shapes,
)
from jaxgoodput.cluster.scheduler.solve.assignment import Choice, Quota, allocate
from jaxgoodput.specs import Allocation, ClusterSpec, Node, Shape

_Takers = dict[str, list[tuple[str, set[int]]]]
"""By node, the jobs that get devices there, and which."""


@dataclass(frozen=True, kw_only=True)
class ShapeProblem:
    """Jobs against shapes, as arrays. Indices refer to `jobs`, `shapes` and `kinds`.

    Use this to write a policy: compute a utility [jobs, shapes], then call `choose` and `decide`.
    """

    jobs: tuple[JobView, ...]
    cluster: ClusterSpec
    now_s: float
    shapes: tuple[Shape, ...]
    kinds: tuple[str, ...]
    goodput: np.ndarray
    """[jobs, shapes]; NaN = not allowed or unknown."""
    devices: np.ndarray
    """[shapes] number of devices."""
    kind: np.ndarray
    """[shapes] index of the kind in `kinds`."""
    present: np.ndarray
    """[jobs] present shape; -1 = none of `shapes`."""
    running: np.ndarray
    """[jobs] bool: whether the job has devices."""

    @classmethod
    def of(
        cls,
        jobs: Sequence[JobView],
        cluster: ClusterSpec,
        now_s: float,
        *,
        growth: float | None = None,
    ) -> "ShapeProblem":
        """Build the problem of these jobs on this cluster.

        If `growth` is given, a job is offered at most `growth` times the largest size on which it has run,
        and a job that has not run yet only its smallest size.
        """
        offered = shapes(cluster, jobs)
        goodput = goodput_matrix(jobs, offered, cluster)
        goodput[goodput <= 0.0] = np.nan
        devices = np.array([shape.num_devices for shape in offered], np.int64)
        kinds = tuple(sorted({shape.kind for shape in offered}))
        if growth is not None and len(jobs):
            goodput[devices > _largest_sizes(jobs, goodput, devices, growth)[:, None]] = np.nan
        held = present_shapes(jobs, cluster)
        column: dict[Shape | None, int] = {shape: i for i, shape in enumerate(offered)}
        return cls(
            jobs=tuple(jobs),
            cluster=cluster,
            now_s=now_s,
            shapes=offered,
            kinds=kinds,
            goodput=goodput,
            devices=devices,
            kind=np.array([kinds.index(shape.kind) for shape in offered], np.int64),
            present=np.array([column.get(shape, -1) for shape in held], np.int64),
            running=np.array([shape is not None for shape in held], bool),
        )

    @cached_property
    def supply(self) -> Mapping[str, int]:
        """Number of devices of each kind that may be allocated."""
        return capacity(self.cluster)

    @cached_property
    def nodes(self) -> Mapping[str, Node]:
        """Nodes of the cluster by name."""
        return {node.name: node for node in self.cluster.nodes}

    @property
    def changes(self) -> np.ndarray:
        """[jobs, shapes] bool: the job runs now, and this is not its present shape."""
        return self.running[:, None] & (np.arange(len(self.shapes)) != self.present[:, None])

    def restoring(self) -> np.ndarray:
        """Return [jobs] the shape of a job that is still restarting and may stay, -1 for other jobs.

        A job may not stay if its devices are no longer offered (a reservation has begun). If the restarting
        jobs under one limit exceed it together, none of them is sure of its devices.
        """
        until = np.array([view.restoring_until_s or -np.inf for view in self.jobs], np.float64)
        stays = until > self.now_s
        for i in np.flatnonzero(stays).tolist():
            stays[i] = on_offer(self.jobs[i].allocation, self.nodes, draining=True)
        devices = np.append(self.devices, 0)[self.present]
        kind = np.append(self.kind, -1)[self.present]
        for limit, counted, units in self.limits():
            its = stays & (counted > 0)
            use = devices * np.append(units, 0.0)[kind] * counted
            if use[its].sum() > limit.left + 1e-9:
                stays &= ~its
        return np.where(stays, self.present, -1)

    def limits(self) -> list[tuple[Limit, np.ndarray, np.ndarray]]:
        """Return each limit, with [jobs] how far a job counts and [kinds] how much of it a device uses up.

        A job uses the product for each device. If a limit is on tenants, a job counts (1) or not (0); if on
        CPUs or memory, it counts with what it needs for each device.
        """
        found = limits_of(self.cluster)
        counted = counts(found, [view.spec.tenant for view in self.jobs])
        limits = list(zip(found, counted, per_device(found, self.kinds), strict=True))
        for limit, needs, kind in amount_limits(self.cluster, [view.spec for view in self.jobs]):
            limits.append((limit, needs, np.array([k == kind for k in self.kinds], np.float64)))
        return limits

    def sizes(self, job: int) -> list[int]:
        """Return the shapes that a job may have, the smallest first."""
        allowed = np.flatnonzero(~np.isnan(self.goodput[job]))
        return [int(s) for s in allowed[np.argsort(self.devices[allowed], kind="stable")]]

    def weight(self) -> np.ndarray:
        """Return [jobs] each job's `JobSpec.weight`, as its user gave it."""
        return np.array([view.spec.weight for view in self.jobs], np.float64)

    def paused(self) -> np.ndarray:
        """Return [jobs] bool: has no devices now, but had some before."""
        found = np.zeros(len(self.jobs), bool)
        for i in np.flatnonzero(~self.running).tolist():
            view = self.jobs[i]
            found[i] = view.num_restarts > 0 or any(view.received_s.values())
        return found

    def age_s(self) -> np.ndarray:
        """Return [jobs] seconds since submission, at least 0 (clocks differ)."""
        submitted_s = np.array([view.submitted_s for view in self.jobs], np.float64)
        return np.maximum(self.now_s - submitted_s, 0.0)

    def waited_s(self) -> np.ndarray:
        """Return [jobs] seconds since a waiting job was paused, or submitted if it never ran.

        The result is 0 for a running job, and for one that was paused at an unknown time.
        """
        paused, since_s = self.paused(), np.full(len(self.jobs), self.now_s, np.float64)
        for i in np.flatnonzero(~self.running).tolist():
            view = self.jobs[i]
            if not paused[i]:
                since_s[i] = view.submitted_s
            elif view.paused_s is not None:
                since_s[i] = view.paused_s
        return np.maximum(self.now_s - since_s, 0.0)

    def restart_s(self) -> np.ndarray:
        """Return [jobs] the estimated seconds that a change of allocation costs."""
        return np.array([view.restart_s for view in self.jobs], np.float64)

    def num_restarts(self) -> np.ndarray:
        """Return [jobs] the number of restarts so far."""
        return np.array([view.num_restarts for view in self.jobs], np.float64)

    def received_s(self) -> np.ndarray:
        """Return [jobs] device-seconds that each job has received so far, summed over kinds."""
        return np.array([sum(view.received_s.values()) for view in self.jobs], np.float64)

    def declared_s(self) -> np.ndarray:
        """Return [jobs] device-seconds left on the shape that uses devices best.

        NaN if a job declares no work, has no shape, or knows only ratios of its goodput so far.
        """
        left = np.array([v.remaining if v.remaining is not None else np.nan for v in self.jobs])
        best = np.where(np.isnan(self.goodput), 0.0, self.goodput / self.devices).max(
            1, initial=0.0
        )
        measured = np.array([view.is_measured for view in self.jobs], bool)
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
        """Return the choice of highest utility that fits capacity, placement and limits.

        `utility`: [jobs, shapes], NaN = not allowed. `pinned` jobs keep their shape; `at_least` jobs run if
        they fit. `start`: [jobs] shapes that satisfy all constraints, if known. See `allocate`.
        """
        each = self.supply
        rows = capacity_rows(self.cluster, self.shapes)
        # `allocate` has a row for each kind already; only the other rows are further ones.
        plain = [
            limit == each[kind] and np.array_equal(row, np.where(self._is(kind), self.devices, 0))
            for row, limit, kind in zip(rows.matrix, rows.limits, rows.kinds, strict=True)
        ]
        more = np.flatnonzero(~np.array(plain, bool))
        quotas = [
            Quota(jobs=counted, limit=limit.left, per_device=units)
            for limit, counted, units in self.limits()
        ]
        return allocate(
            utility,
            self.devices,
            self.kind,
            np.array([each[kind] for kind in self.kinds], np.float64),
            pinned=pinned,
            at_least=at_least,
            quotas=quotas,
            rows=rows.matrix[more],
            row_limit=rows.limits[more],
            start=start,
            relative_gap=relative_gap,
            time_limit_s=time_limit_s,
        )

    def wanted(self, choice: Choice) -> dict[str, Shape]:
        """Return the chosen shapes, by job id."""
        return {
            view.spec.id: self.shapes[index]
            for view, index in zip(self.jobs, choice.shape, strict=True)
            if index >= 0
        }

    def decide(
        self,
        choice: Choice,
        *,
        placed: Mapping[str, Allocation] | None = None,
        one_multi_node_job_per_node: bool = False,
    ) -> Decision:
        """Return a decision: the chosen shapes placed on devices of nodes, and a reason for every job.

        `placed`: the devices of every job of the choice, if they are known.
        """
        wanted = self.wanted(choice)
        allocations = placed
        if allocations is None:
            allocations = place(
                wanted,
                self.jobs,
                self.cluster,
                one_multi_node_job_per_node=one_multi_node_job_per_node,
            )
        used_up = self._used_up(choice)
        left, takers = self._left(allocations), self._takers(choice, allocations)
        reasons = {}
        for row, view in enumerate(self.jobs):
            id_ = view.spec.id
            if id_ in allocations:
                why = self._why(row, int(choice.shape[row]), allocations[id_], takers)
                reasons[id_] = why + self._other_kind(row, int(choice.shape[row]), left)
            elif id_ in wanted:
                said = shape_in_words(wanted[id_])
                reasons[id_] = f"waits: {said} do not fit beside jobs that were placed before it"
            else:
                reasons[id_] = f"waits: {self._why_waits(row, used_up[row], left)}"
        return Decision(
            allocations=allocations,
            reasons=reasons,
            objective=choice.objective,
            bound=choice.bound,
        )

    def _left(self, allocations: Mapping[str, Allocation]) -> dict[str, int]:
        """Return the number of devices of each kind that no job gets."""
        free = dict(self.supply)
        kind_of = {node.name: node.kind for node in self.cluster.nodes if node.state == "up"}
        for given in allocations.values():
            for name, local in given.devices.items():
                if name in kind_of:
                    free[kind_of[name]] -= len(local)
        return free

    def _used_up(self, choice: Choice) -> list[Limit | None]:
        """Return, for every job, the first limit that leaves it no shape beside what was chosen."""
        found: list[Limit | None] = [None] * len(self.jobs)
        if not len(self.shapes):
            return found
        chosen = np.flatnonzero(choice.shape >= 0)
        for limit, counted, units in self.limits():
            use = units[self.kind] * self.devices
            left = limit.left - (use[choice.shape[chosen]] * counted[chosen]).sum()
            least = np.where(np.isnan(self.goodput), np.inf, use).min(1)
            has_its = counted > 0
            least = np.where(has_its, least * np.where(has_its, counted, 1.0), -np.inf)
            for job in np.flatnonzero(least > left + 1e-9):
                found[job] = found[job] or limit
        return found

    def _why_waits(self, row: int, used_up: Limit | None, left: Mapping[str, int]) -> str:
        view = self.jobs[row]
        sizes = self.sizes(row)
        if not sizes:
            # `reconcile` has taken out what held jobs and reservations use.
            if why := needs_reason(view, self.cluster):
                return why
            status = "that are neither held nor reserved"
            offered = set(self.shapes).__contains__
            return no_shape_reason(view, self.supply, offered, status=status)
        least, tenant = int(self.devices[sizes[0]]), view.spec.tenant
        quota = self.cluster.quota.get(tenant, least)
        if least > quota:
            return f"its tenant {tenant!r} has {quota} devices of its quota left; it needs at least {least}"
        if used_up is not None:
            return f"{used_up.said}, leaves it no shape"
        kind = self.shapes[sizes[0]].kind
        if left[kind] >= self.supply.get(kind, 0):
            return "the policy leaves the devices idle that it could have"
        if left[kind] >= least:
            needs = needs_of(view.spec)
            beside = f" with {needed_in_words(needs)}" if needs else ""
            return (
                f"{left[kind]} devices of kind {kind} are free, but not together as "
                f"{shape_in_words(self.shapes[sizes[0]])}{beside}, and making room would cost others more"
            )
        return "other jobs make better use of every device that it could have"

    def _takers(self, choice: Choice, allocations: Mapping[str, Allocation]) -> _Takers:
        """Return the jobs that get devices on nodes from which a job moves, with their devices there."""
        found: _Takers = {}
        for row in np.flatnonzero((choice.shape >= 0) & (choice.shape == self.present)).tolist():
            view = self.jobs[row]
            if allocations.get(view.spec.id) is not view.allocation:
                found |= {name: [] for name in view.allocation.devices}
        if found:
            for id_, given in allocations.items():
                for name in given.devices.keys() & found:
                    found[name].append((id_, set(given.devices[name])))
        return found

    def _why(self, row: int, shape: int, given: Allocation, takers: _Takers) -> str:
        said = shape_in_words(self.shapes[shape])
        view = self.jobs[row]
        if given is view.allocation:
            return f"keeps {said}"
        before = int(self.present[row])
        if before == shape:
            return f"moves to other devices, {said}, {self._why_moved(view.allocation, takers)}"
        goodput = self.goodput[row]
        if before >= 0 and goodput[before] > 0:
            return f"gets {said}: {goodput[shape] / goodput[before]:.2f} times its present goodput"
        return f"gets {said}"

    def _other_kind(self, row: int, shape: int, left: Mapping[str, int]) -> str:
        """Say how many devices of the kinds that a job prefers are free, if it gets another kind."""
        preferred, kind = self.jobs[row].spec.preferred_kinds, self.shapes[shape].kind
        if preferred is None or kind in preferred:
            return ""
        free = devices_in_words({name: left.get(name, 0) for name in preferred})
        return f"; it would rather have {' or '.join(preferred)} ({free} free)"

    def _why_moved(self, left: Allocation, takers: _Takers) -> str:
        """Explain why a job moves to other devices although its shape stays the same."""
        if not on_offer(left, self.nodes):
            return "because its old devices are no longer offered"
        its = {
            id_
            for name, local in left.devices.items()
            for id_, taken in takers[name]
            if not taken.isdisjoint(local)
        }
        if not its:
            return "so that all jobs fit"
        more = f" and {len(its) - 1} more" if len(its) > 1 else ""
        return f"to make room for {min(its)}{more}"

    def _is(self, kind: str) -> np.ndarray:
        return np.array([shape.kind == kind for shape in self.shapes], bool)


def _largest_sizes(
    jobs: Sequence[JobView], goodput: np.ndarray, devices: np.ndarray, growth: float
) -> np.ndarray:
    """Return [jobs] the most devices to offer: `growth` times the largest measured size.

    A job that has not run yet is offered its smallest size; a rigid job any.
    """
    profiled = np.array([view.largest_profiled for view in jobs], np.float64)
    free = np.array([view.spec.mode != "rigid" for view in jobs], bool)
    least = np.array([view.spec.min_devices for view in jobs], np.float64)
    most = np.where(free, np.maximum(growth * profiled, least), np.inf)
    known = np.where(np.isnan(goodput), np.inf, devices.astype(float))
    return np.maximum(most, np.min(known, 1, initial=np.inf))


def normalised(goodput: np.ndarray) -> np.ndarray:
    """Return [jobs, shapes] each row divided by its smallest entry; NaN stays NaN."""
    least = np.min(np.where(np.isnan(goodput), np.inf, goodput), axis=1, initial=np.inf)
    return goodput / least[:, None]
