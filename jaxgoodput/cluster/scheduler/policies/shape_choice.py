"""Jobs and shapes as matrices, and a choice of shapes as a decision; for policies that resize jobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.cluster.scheduler.constraints import offered_devices, within
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
from jaxgoodput.specs import Allocation, ClusterSpec, Shape


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
        offered = offered_devices(self.cluster, draining=True)
        on_offer = [within(view.allocation, offered) for view in self.jobs]
        stays = (until > self.now_s) & np.array(on_offer, bool)
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
        had = [view.num_restarts > 0 or any(view.received_s.values()) for view in self.jobs]
        return ~self.running & np.array(had, bool)

    def age_s(self) -> np.ndarray:
        """Return [jobs] seconds since submission, at least 0 (clocks differ)."""
        submitted_s = np.array([view.submitted_s for view in self.jobs], np.float64)
        return np.maximum(self.now_s - submitted_s, 0.0)

    def waited_s(self) -> np.ndarray:
        """Return [jobs] seconds since a waiting job was paused, or submitted if it never ran.

        The result is 0 for a running job, and for one that was paused at an unknown time.
        """
        never_ran = ~self.running & ~self.paused()
        since_s = [
            view.submitted_s if never else self.now_s if view.paused_s is None else view.paused_s
            for view, never in zip(self.jobs, never_ran.tolist(), strict=True)
        ]
        waited_s = np.maximum(self.now_s - np.array(since_s, np.float64), 0.0)
        return np.where(self.running, 0.0, waited_s)

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

        NaN if a job declares no work, is not measured, or has no shape.
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
        """Return the choice of highest utility that fits capacity, placement and limits.

        `utility`: [jobs, shapes], NaN = not allowed. `pinned` jobs keep their shape; `at_least` jobs run if
        they fit. `start`: [jobs] shapes that satisfy all constraints, if known. See `allocate`.
        """
        each = capacity(self.cluster)
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
        left = self._left(allocations)
        reasons = {}
        for row, view in enumerate(self.jobs):
            id_ = view.spec.id
            if id_ in allocations:
                why = self._why(row, int(choice.shape[row]), allocations)
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
        free = capacity(self.cluster)
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
            least = np.where(counted > 0, least * counted, -np.inf)
            for job in np.flatnonzero(least > left + 1e-9):
                found[job] = found[job] or limit
        return found

    def _why_waits(self, row: int, used_up: Limit | None, left: Mapping[str, int]) -> str:
        view = self.jobs[row]
        sizes = self.sizes(row)
        if not sizes:
            # `reconcile` has taken out what held jobs and reservations use.
            free, offered = capacity(self.cluster), set(self.shapes)
            if why := needs_reason(view, self.cluster):
                return why
            status = "that are neither held nor reserved"
            return no_shape_reason(view, free, offered.__contains__, status=status)
        least, tenant = int(self.devices[sizes[0]]), view.spec.tenant
        quota = self.cluster.quota.get(tenant, least)
        if least > quota:
            return f"its tenant {tenant!r} has {quota} devices of its quota left; it needs at least {least}"
        if used_up is not None:
            return f"{used_up.said}, leaves it no shape"
        kind = self.shapes[sizes[0]].kind
        if left[kind] >= capacity(self.cluster).get(kind, 0):
            return "the policy leaves the devices idle that it could have"
        if left[kind] >= least:
            needs = needs_of(view.spec)
            beside = f" with {needed_in_words(needs)}" if needs else ""
            return (
                f"{left[kind]} devices of kind {kind} are free, but not together as "
                f"{shape_in_words(self.shapes[sizes[0]])}{beside}, and making room would cost others more"
            )
        return "other jobs make better use of every device that it could have"

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

    def _other_kind(self, row: int, shape: int, left: Mapping[str, int]) -> str:
        """Say how many devices of the kinds that a job prefers are free, if it gets another kind."""
        preferred, kind = self.jobs[row].spec.preferred_kinds, self.shapes[shape].kind
        if preferred is None or kind in preferred:
            return ""
        free = devices_in_words({name: left.get(name, 0) for name in preferred})
        return f"; it would rather have {' or '.join(preferred)} ({free} free)"

    def _why_moved(self, left: Allocation, allocations: Mapping[str, Allocation]) -> str:
        """Explain why a job moves to other devices although its shape stays the same."""
        if not within(left, offered_devices(self.cluster)):
            return "because its old devices are no longer offered"
        takers = sorted(
            id_
            for id_, given in allocations.items()
            if any(set(given.devices.get(name, ())) & set(d) for name, d in left.devices.items())
        )
        if not takers:
            return "so that all jobs fit"
        more = f" and {len(takers) - 1} more" if len(takers) > 1 else ""
        return f"to make room for {takers[0]}{more}"

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
