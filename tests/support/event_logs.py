"""Random logs of what happens to a small cluster, and a world that lives through them and checks plans."""

import dataclasses
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from hypothesis import strategies as st
from worlds import check_plan, cluster_of

from jaxgoodput.cluster.scheduler.limits import limits_of, use_by_tenant
from jaxgoodput.cluster.scheduler.policy import JobView, Plan, Policy
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.cluster.scheduler.shapes import shape_of, size_limits
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Reservation, Shape, Tenant

TENANTS = ("red", "blue")
RATE = {"a": 1.0, "b": 2.5}
PRICES = {"a": 1.0, "b": 4.0}  # an hour
MIN_GAP_S, MAX_GAP_S = 5.0, 3600.0
LEAST_STEP_S = 1e-3  # time passes between two decisions


@st.composite
def small_clusters(draw) -> list[dict]:
    """One or two kinds on two to five nodes of 1 to 8 devices in two racks, mostly equal within a kind."""
    recipe: list[dict] = []
    for kind in draw(st.sampled_from([("a",), ("a", "b")])):
        size = draw(st.sampled_from([1, 2, 4, 4, 6, 8]))
        for i in range(draw(st.integers(1, 3))):
            smaller = draw(st.sampled_from([False, False, False, True]))
            recipe.append(
                {
                    "name": f"{kind}{i}",
                    "kind": kind,
                    "num_devices": max(size - 1, 1) if smaller else size,
                    "labels": {"rack": f"r{i // 2}"},
                }
            )
    return recipe


@st.composite
def jobs(draw) -> dict:
    """Adaptive, elastic and rigid jobs and gangs; `work_s`: what they take on their smallest shape."""
    size = draw(st.sampled_from([1, 1, 1, 1, 2, 3, 4, 8, 12]))
    mode = draw(st.sampled_from(["adaptive", "adaptive", "elastic", "rigid"]))
    rare = st.sampled_from
    return {
        "mode": mode,
        "num_devices": size if mode == "rigid" else None,
        "min_devices": 1 if mode == "rigid" else size,
        "max_devices": max(size, draw(rare([1, 4, 16, 64]))),
        "weight": draw(rare([1.0, 1.0, 4.0, 0.25])),
        "tenant": draw(rare(TENANTS)),
        "kinds": draw(rare([None, None, None, ("a",), ("b",)])),
        "level": draw(rare([None, None, None, "rack"])),
        "preemptible": draw(rare([True, True, True, True, False])),
        "min_run_s": draw(rare([0.0, 0.0, 0.0, 100.0])),
        "deadline_s": draw(rare([None, None, 500.0])),
        "restart_s": draw(rare([1.0, 30.0, 200.0])),
        "work_s": draw(rare([1.0, 100.0, 1000.0, 5000.0])),
        "scaling": draw(rare([0.5, 0.9, 1.0])),
        "declares": draw(rare([False, False, True])),
        "noise": draw(rare([0.0, 0.0, 0.1, 0.4])),
        "budget": draw(rare([None, None, None, 0.5, 50.0])),
    }


@st.composite
def trees(draw) -> tuple[Tenant, ...]:
    """Red and blue side by side, or one or both of them below a third; or no tenants at all."""
    parents = draw(st.sampled_from([None, (None, None), ("lab", "lab"), (None, "lab")]))
    if parents is None:
        return ()
    rare = st.sampled_from
    found = []
    for name, parent in zip(TENANTS, parents, strict=True):
        sure = draw(rare([0, 0, 1, 2, 6]))
        more = draw(rare([None, None, 0, 2]))
        found.append(
            Tenant(
                name=name,
                parent=parent,
                guaranteed=sure,
                limit=None if more is None else sure + more,
                weight=draw(rare([1.0, 1.0, 3.0])),
                budget_per_hour=draw(rare([None, None, None, 2.0, 9.0])),
            )
        )
    if "lab" in parents:
        sure = sum(tenant.guaranteed for tenant in found if tenant.parent == "lab")
        more = draw(rare([None, 0, 3]))
        limit = None if more is None else sure + more
        found.append(Tenant(name="lab", guaranteed=sure, limit=limit))
    return tuple(found)


_which = st.integers(0, 11)
_EVENTS = (
    st.tuples(st.just("arrive"), jobs()),
    st.tuples(st.just("arrive"), jobs()),
    st.tuples(st.just("pass"), st.sampled_from([0.0, 1.0, 40.0, 700.0, 9000.0])),
    st.tuples(st.just("pass"), st.sampled_from([0.0, 1.0, 40.0, 700.0, 9000.0])),
    st.tuples(st.just("end"), _which),
    st.tuples(st.sampled_from(["down", "draining", "up", "up"]), _which),
    st.tuples(st.just("withhold"), st.tuples(_which, st.sampled_from([(), (0,), (0, 1)]))),
    st.tuples(
        st.just("reserve"),
        st.tuples(
            _which,
            st.integers(1, 8),
            st.sampled_from(["red", "blue", None]),
            st.sampled_from([(0.0, 300.0), (0.0, 5000.0), (30.0, 60.0)]),
        ),
    ),
    st.tuples(
        st.just("quota"),
        st.tuples(st.sampled_from(TENANTS), st.sampled_from([None, None, 0, 1, 2, 4, 8])),
    ),
    st.tuples(st.just("tenants"), trees()),
    st.tuples(st.just("restart"), st.none()),
)


def logs(*, most_events: int) -> st.SearchStrategy[tuple]:
    """(cluster, first jobs, events): what happens, as plain values."""
    return st.tuples(
        small_clusters(),
        st.lists(jobs(), min_size=1, max_size=2),
        st.lists(st.one_of(_EVENTS), max_size=most_events),
    )


@dataclass
class Running:
    """A job with what the world knows of it."""

    view: JobView
    truth: Mapping[Shape, float]
    """Its goodput, which its table tells with some noise."""
    work: float
    """Left, in units of goodput x seconds."""
    declares: bool
    free_s: float = 0.0
    """Restarts until then."""
    lost_s: float = 0.0
    """Spent on restarts so far."""


@dataclass
class EventWorld:
    """A cluster in which jobs work as their tables say; every plan is checked against the laws."""

    cluster: ClusterSpec
    policy: Policy
    max_gap_s: float = MAX_GAP_S
    now_s: float = 0.0
    jobs: dict[str, Running] = field(default_factory=dict)
    last: Plan | None = None
    shapes: tuple[Shape, ...] = ()
    num_arrived: int = 0
    num_decisions: int = 0
    solved: bool = False
    """Whether the last decision was one, not put off."""

    @classmethod
    def of(cls, nodes: list[dict], policy: Policy) -> "EventWorld":
        """An empty cluster."""
        return cls(cluster_of(nodes, price_per_hour=PRICES), policy)

    # What happens.

    def live(self, event: str, value) -> None:
        """One event, and the decision that follows it."""
        if event == "arrive":
            self.arrive(value)
        elif event == "pass":
            self.pass_time(value)
        elif event == "end" and self.jobs:
            del self.jobs[sorted(self.jobs)[value % len(self.jobs)]]
        elif event in ("down", "draining", "up"):
            self.change_node(value, state=event)
        elif event == "withhold":
            which, local = value
            node = self.cluster.nodes[which % len(self.cluster.nodes)]
            self.change_node(which, withheld=tuple(i for i in local if i < node.num_devices))
        elif event == "reserve":
            self.reserve(*value)
        elif event == "quota":
            tenant, limit = value
            quota = {t: n for t, n in self.cluster.quota.items() if t != tenant}
            quota |= {} if limit is None else {tenant: limit}
            self.cluster = dataclasses.replace(self.cluster, quota=quota)
        elif event == "tenants":
            self.cluster = dataclasses.replace(self.cluster, tenants=value)
        elif event == "restart":
            self.last = None
        # Equal inputs give equal plans, and a scheduler that has forgotten everything decides alike.
        self.decide(twice=event == "restart")

    def arrive(self, recipe: Mapping) -> None:
        """A job comes, with a complete table."""
        own = ("restart_s", "work_s", "scaling", "declares", "noise")
        fields = {name: value for name, value in recipe.items() if name not in own}
        if fields["deadline_s"] is not None:
            fields["deadline_s"] += self.now_s
        id_ = f"j{self.num_arrived}"
        self.num_arrived += 1
        spec = JobSpec(id=id_, **fields)
        self.shapes = self.shapes or every_shape(self.cluster)
        truth = {
            s: RATE[s.kind] * s.num_devices ** recipe["scaling"] * 0.95 ** (s.num_nodes - 1)
            for s in self.shapes
        }
        slowest = min((g for s, g in truth.items() if _allows(spec, s)), default=1.0)
        noise = random.Random(self.num_arrived)
        told = {s: g * math.exp(noise.gauss(0.0, recipe["noise"])) for s, g in truth.items()}
        view = JobView(
            spec=spec, goodput=told, submitted_s=self.now_s, restart_s=recipe["restart_s"]
        )
        self.jobs[id_] = Running(view, truth, recipe["work_s"] * slowest, recipe["declares"])

    def change_node(self, which: int, **fields) -> None:
        """A node gets another state, or other devices that are withheld."""
        which %= len(self.cluster.nodes)
        nodes = tuple(
            dataclasses.replace(node, **fields) if i == which else node
            for i, node in enumerate(self.cluster.nodes)
        )
        self.cluster = dataclasses.replace(self.cluster, nodes=nodes)

    def reserve(self, which: int, size: int, tenant: str | None, span: tuple[float, float]) -> None:
        """Devices of a node are for one tenant for a while; no node is promised twice."""
        node = self.cluster.nodes[which % len(self.cluster.nodes)]
        others = tuple(r for r in self.cluster.reservations if r.node != node.name)
        made = Reservation(
            node=node.name,
            num_devices=min(size, node.num_devices),
            start_s=self.now_s + span[0],
            end_s=self.now_s + span[0] + span[1],
            tenant=tenant,
        )
        self.cluster = dataclasses.replace(self.cluster, reservations=(*others, made))

    def pass_time(self, seconds: float) -> None:
        """Let jobs work, at most until the first of them ends."""
        ends_s = [self.end_s(id_) for id_ in self.jobs]
        until_s = min([self.now_s + seconds, *ends_s])
        for id_, job in list(self.jobs.items()):
            shape = self.shape(job.view.allocation)
            if shape is None:
                continue
            worked_s = max(until_s - max(self.now_s, job.free_s), 0.0)
            held_s = until_s - self.now_s
            job.work -= worked_s * job.truth[shape]
            job.lost_s += held_s - worked_s
            received, fraction = dict(job.view.received_s), dict(job.view.fraction_received_s)
            received[shape.kind] = received.get(shape.kind, 0.0) + held_s * shape.num_devices
            fraction[shape.kind] = fraction.get(shape.kind, 0.0) + held_s
            largest = max(job.view.largest_profiled, shape.num_devices if worked_s > 0 else 0)
            job.view = dataclasses.replace(
                job.view,
                received_s=received,
                fraction_received_s=fraction,
                largest_profiled=largest,
                remaining=max(job.work, 0.0) if job.declares else None,
            )
            if self.end_of(job, shape, until_s) <= until_s + LEAST_STEP_S:
                del self.jobs[id_]
        self.now_s = until_s

    def end_s(self, id_: str) -> float:
        """When a job would be done on what it has."""
        job = self.jobs[id_]
        shape = self.shape(job.view.allocation)
        return math.inf if shape is None else self.end_of(job, shape, self.now_s)

    def end_of(self, job: Running, shape: Shape, now_s: float) -> float:
        """The same, from a moment on."""
        return max(now_s, job.free_s) + max(job.work, 0.0) / job.truth[shape]

    def shape(self, allocation: Allocation) -> Shape | None:
        """The shape of some devices."""
        return shape_of(allocation.devices, {node.name: node.kind for node in self.cluster.nodes})

    # Decisions.

    def views(self) -> tuple[JobView, ...]:
        """What the scheduler is told."""
        return tuple(
            dataclasses.replace(
                job.view, restoring_until_s=job.free_s if job.free_s > self.now_s else None
            )
            for job in self.jobs.values()
        )

    def decide(self, *, twice: bool = False) -> Plan:
        """Ask, check the laws, and carry the plan out."""
        views = self.views()
        plan = self.ask(views, self.last)
        self.num_decisions += 1
        last_s = -math.inf if self.last is None else self.last.solved_s
        solved = last_s is not None and self.now_s >= last_s + MIN_GAP_S
        self.solved = solved
        self.check(plan, views, solved)
        if twice and solved:
            assert plan == self.ask(views, None)
        for view in views:
            job, given = self.jobs[view.spec.id], plan.allocations[view.spec.id]
            if given.devices == view.allocation.devices:
                continue
            had = view.since_s is not None or sum(view.received_s.values()) > 0
            runs = bool(given.devices)
            job.free_s = self.now_s + (view.restart_s if had and runs else 0.0)
            job.view = dataclasses.replace(
                view,
                allocation=given,
                since_s=self.now_s if runs else None,
                restoring_until_s=None,
                num_restarts=view.num_restarts + (had and runs),
            )
        self.last = plan
        return plan

    def ask(self, views: tuple[JobView, ...], last: Plan | None) -> Plan:
        """A plan for the present."""
        return reconcile(
            views,
            self.cluster,
            self.policy,
            self.now_s,
            last=last,
            min_gap_s=MIN_GAP_S,
            max_gap_s=self.max_gap_s,
        )

    def check(self, plan: Plan, views: tuple[JobView, ...], solved: bool) -> None:
        """The laws: those of every plan, who stays, quotas, reservations, and words that fit the deeds."""
        check_plan(plan, views, dataclasses.replace(self.cluster, quota={}))
        assert plan.solved_s is not None and plan.solved_s <= self.now_s
        assert not solved or plan.solved_s == self.now_s
        assert self.now_s < plan.next_solve_s <= self.now_s + self.max_gap_s
        moved: dict[str, str] = {}
        stays: set[str] = set()
        for view in views:
            id_, before = view.spec.id, view.allocation
            now = plan.allocations[id_]
            if now.devices != before.devices:
                moved[id_] = "pause" if not now.devices else "resize" if before.devices else "start"
            reason = plan.reasons[id_]
            broke = solved and reason.startswith("refused: its budget")  # stops whoever it is
            assert not broke or not now.devices
            if before.devices and self.is_held(view) and not broke:
                assert now is before, (id_, reason)
                stays.add(id_)
            if solved and not now.devices:
                assert reason.startswith(("waits: ", "refused: ")), reason
            elif solved:
                word = "keeps " if now.devices == before.devices else ("gets ", "moves ")
                assert reason.startswith(word), reason
        for name in ("start", "resize", "pause"):
            assert getattr(plan, name) == tuple(id_ for id_ in moved if moved[id_] == name)
        if solved:
            self.check_quotas(plan, views, stays)
            self.check_tenants(plan, views, stays)
            self.check_reservations(plan, views, stays)

    def is_held(self, view: JobView) -> bool:
        """Whether a job that has devices has to keep them, because they are there and it may not stop."""
        nodes = {node.name: node for node in self.cluster.nodes}
        for name, local in view.allocation.devices.items():
            if nodes[name].state == "down" or set(local) & set(nodes[name].withheld):
                return False
        drains = any(nodes[name].state == "draining" for name in view.allocation.devices)
        young = view.since_s is not None and self.now_s < view.since_s + view.spec.min_run_s
        return not view.spec.preemptible or young or drains

    def check_quotas(self, plan: Plan, views: tuple[JobView, ...], stays: set[str]) -> None:
        """Nobody gets more than his quota; who holds more already gets nothing beside."""
        for view in views:
            quota = self.cluster.quota.get(view.spec.tenant, math.inf)
            if not plan.allocations[view.spec.id].devices and size_limits(view.spec)[0] > quota:
                said = plan.reasons[view.spec.id]
                assert not said.startswith("waits: other jobs make"), said
        for tenant, limit in self.cluster.quota.items():
            its = [v.spec.id for v in views if v.spec.tenant == tenant]
            used = sum(plan.allocations[id_].num_devices for id_ in its)
            kept = sum(plan.allocations[id_].num_devices for id_ in its if id_ in stays)
            assert used <= max(limit, kept), (tenant, used, limit, kept)

    def check_tenants(self, plan: Plan, views: tuple[JobView, ...], stays: set[str]) -> None:
        """No subtree has more than its limit and budget, but for what may not be taken from its jobs."""
        kind_of = {node.name: node.kind for node in self.cluster.nodes}
        tenants = {view.spec.id: view.spec.tenant for view in views}
        kept = {id_: plan.allocations[id_] for id_ in stays}
        for limit in limits_of(dataclasses.replace(self.cluster, quota={})):
            used, held = (
                limit.used(use_by_tenant(given, tenants, kind_of))
                for given in (plan.allocations, kept)
            )
            assert used <= max(limit.left, held) + 1e-9, (limit.said, used, held)

    def check_reservations(self, plan: Plan, views: tuple[JobView, ...], stays: set[str]) -> None:
        """What is reserved on a node is left to its tenant by all that may be moved."""
        usable = {node.name: node.num_usable for node in self.cluster.nodes}
        for reservation in self.cluster.reservations:
            if not reservation.start_s <= self.now_s < reservation.end_s:
                continue
            others = sum(
                len(plan.allocations[v.spec.id].devices.get(reservation.node, ()))
                for v in views
                if v.spec.tenant != reservation.tenant and v.spec.id not in stays
            )
            assert others <= max(usable[reservation.node] - reservation.num_devices, 0)

    # The end.

    def admissible(self) -> set[str]:
        """Jobs that would run if they were alone."""
        return {
            v.spec.id for v in self.views() if self.ask((v,), None).allocations[v.spec.id].devices
        }

    def run_out(self, *, most_decisions: int = 300) -> None:
        """Nothing more happens: all that can run end, within a few times what one after the other takes."""
        future = [r.end_s - self.now_s for r in self.cluster.reservations if r.end_s > self.now_s]
        self.pass_reservations(max(future, default=0.0))
        slowest_s = (
            job.work / min(g for s, g in job.truth.items() if _allows(job.view.spec, s))
            + 10 * job.view.restart_s
            for job in self.jobs.values()
            if any(_allows(job.view.spec, s) for s in job.truth)
        )
        limit_s = self.now_s + 4 * sum(slowest_s) + 3600.0 + 4 * self.max_gap_s
        begun = self.num_decisions
        while self.jobs:
            plan = self.decide()
            if not any(job.view.allocation.devices for job in self.jobs.values()):
                assert not (self.solved and self.admissible()), plan.reasons
                if self.solved:
                    break
            assert self.now_s < limit_s, f"not done after {limit_s:.0f} s: {plan.reasons}"
            assert self.num_decisions - begun < most_decisions, plan.reasons
            self.pass_time(plan.next_solve_s - self.now_s)

    def pass_reservations(self, seconds: float) -> None:
        """Decide and work on until the last reservation is over."""
        until_s = self.now_s + seconds
        while self.now_s < until_s and self.jobs:
            plan = self.decide()
            self.pass_time(min(plan.next_solve_s, until_s) - self.now_s)
        self.now_s = max(self.now_s, until_s)


def every_shape(cluster: ClusterSpec) -> tuple[Shape, ...]:
    """Every spread of devices of a kind over its nodes."""
    found = []
    for kind in sorted({node.kind for node in cluster.nodes}):
        sizes = [node.num_devices for node in cluster.nodes if node.kind == kind]
        for num_nodes in range(1, len(sizes) + 1):
            most = num_nodes * max(sizes)
            found += [Shape(kind, num_nodes, n) for n in range(num_nodes, most + 1)]
    return tuple(found)


def _allows(spec: JobSpec, shape: Shape) -> bool:
    least, most = size_limits(spec)
    return least <= shape.num_devices <= most and (spec.kinds is None or shape.kind in spec.kinds)
