"""Laws that the policies of the catalogue keep, in worlds with quotas, reservations and nodes that break."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import after, check_plan, cluster_of, job_recipes, jobs_of, nodes

from jaxgoodput.cluster.catalogue import catalogue
from jaxgoodput.cluster.scheduler.reconcile import reconcile
from jaxgoodput.specs import ClusterSpec, Node, Reservation

# The published baselines know one kind of device and neither quotas nor levels (test_baselines); policies
# that pack differ from their plain forms only where jobs were measured together (test_packing).
GENERAL = {
    name: named for name, named in catalogue().items() if not named.one_kind and not named.sharing
}


def reserved_of(cluster):
    """Node name -> (tenant, devices) at second 0."""
    return {r.node: (r.tenant, r.num_devices) for r in cluster.reservations if r.start_s <= 0.0}


@pytest.mark.parametrize("name", GENERAL)
@settings(max_examples=12, deadline=None)
@given(
    recipe=nodes(),
    recipes=job_recipes(),
    quota=st.dictionaries(st.sampled_from(["red", "blue"]), st.integers(0, 9)),
    reserve=st.none()
    | st.tuples(st.integers(0, 7), st.integers(1, 8), st.sampled_from(["red", None])),
    states=st.lists(st.sampled_from(["up", "up", "draining", "down"]), max_size=8),
    profiled=st.integers(0, 16),
)
def test_no_policy_breaks_a_law(name, recipe, recipes, quota, reserve, states, profiled):
    bare = cluster_of(recipe)
    reservations = ()
    if reserve is not None:
        index, size, tenant = reserve
        node = bare.nodes[index % len(bare.nodes)]
        size = min(size, node.num_devices)
        reservations = (
            Reservation(node=node.name, num_devices=size, start_s=0.0, end_s=1e6, tenant=tenant),
        )
    cluster = dataclasses.replace(bare, quota=quota, reservations=reservations)
    policy, jobs = GENERAL[name].policy, jobs_of(recipes, cluster)
    jobs = tuple(dataclasses.replace(v, largest_profiled=profiled) for v in jobs)
    if GENERAL[name].largest_gang is not None:
        jobs = tuple(v for v in jobs if v.spec.num_devices in (None, 1) and v.spec.min_devices == 1)
    for now_s in (0.0, 400.0):
        plan = reconcile(jobs, cluster, policy, now_s)
        check_plan(plan, jobs, cluster)
        assert plan == reconcile(jobs, cluster, policy, now_s)
        for node in cluster.nodes:
            tenant, size = reserved_of(cluster).get(node.name, (None, 0))
            others = sum(
                len(plan.allocations[v.spec.id].devices.get(node.name, ()))
                for v in jobs
                if tenant is None or v.spec.tenant != tenant
            )
            assert others <= node.num_devices - size
        # Then they restart, and nodes change under them.
        jobs = tuple(
            dataclasses.replace(v, restoring_until_s=500.0, num_restarts=3)
            for v in after(plan, jobs, now_s)
        )
        later = tuple(
            dataclasses.replace(node, state=states[i] if i < len(states) else node.state)
            for i, node in enumerate(cluster.nodes)
        )
        cluster = dataclasses.replace(cluster, nodes=later)


@pytest.mark.parametrize("name", [n for n, named in catalogue().items() if named.one_kind])
def test_a_published_baseline_says_that_it_knows_no_quotas(name):
    cluster = ClusterSpec(nodes=(Node(name="n", kind="a", num_devices=4),), quota={"red": 1})
    with pytest.raises(ValueError, match="quota"):
        catalogue()[name].policy((), cluster, 0.0)
