import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from worlds import cluster_of, nodes, table

from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.shapes import (
    allowed,
    capacity,
    capacity_rows,
    goodput_matrix,
    no_shape_reason,
    shapes,
    whole_nodes,
)
from jaxgoodput.specs import Allocation, ClusterSpec, JobSpec, Node, Shape


def even(count: int, size: int = 8, kind: str = "a", **node) -> ClusterSpec:
    return ClusterSpec(
        nodes=tuple(
            Node(name=f"{kind}{i}", kind=kind, num_devices=size, **node) for i in range(count)
        )
    )


def sizes(found: tuple[Shape, ...]) -> list[tuple[int, int]]:
    return [(shape.num_nodes, shape.num_devices) for shape in found]


def test_small_clusters_offer_powers_of_two_and_every_number_of_whole_nodes():
    assert sizes(shapes(even(5))) == [
        (1, 1),
        (1, 2),
        (1, 4),
        (1, 8),
        (2, 16),
        (3, 24),
        (4, 32),
        (5, 40),
    ]
    assert sizes(shapes(even(2, 6))) == [(1, 1), (1, 2), (1, 4), (1, 6), (2, 12)]


def test_large_clusters_offer_fewer_and_fewer_sizes():
    counts = [n for n, _ in sizes(shapes(even(100))) if n > 1]
    assert counts == [2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96]
    assert len(shapes(even(2048))) < 40


def test_only_sizes_that_a_job_can_use_are_offered_and_its_own_are_added():
    small = JobView(spec=JobSpec(id="x", max_devices=4))
    assert sizes(shapes(even(2), [small])) == [(1, 1), (1, 2), (1, 4)]
    rigid = JobView(spec=JobSpec(id="x", mode="rigid", num_devices=12))
    assert (2, 12) in sizes(shapes(even(2), [rigid])) and (2, 16) not in sizes(
        shapes(even(2), [rigid])
    )
    there = Allocation(devices={f"a{i}": tuple(range(8)) for i in range(11)})
    wide = JobView(spec=JobSpec(id="x", max_devices=1000), allocation=there)
    assert (11, 88) in sizes(shapes(even(100), [wide]))
    assert (11, 88) not in sizes(shapes(even(100)))


def test_capacity_counts_what_anybody_may_be_given():
    cluster = ClusterSpec(
        nodes=(
            Node(name="0", kind="a", num_devices=8),
            Node(name="1", kind="a", num_devices=8, withheld=(0, 3)),
            Node(name="2", kind="a", num_devices=8, state="draining"),
            Node(name="3", kind="a", num_devices=8, state="down"),
            Node(name="4", kind="b", num_devices=8, state="down"),
        )
    )
    assert capacity(cluster) == {"a": 14, "b": 0}
    assert [node.name for node in whole_nodes(cluster)["a"]] == ["0"]
    assert sizes(shapes(cluster)) == [(1, 1), (1, 2), (1, 4), (1, 8)]


@settings(max_examples=60, deadline=None)
@given(nodes())
def test_capacity_rows_are_exactly_what_can_be_placed(nodes):
    """Against a search over all placements of up to three shapes."""
    cluster = cluster_of(nodes)
    offered = shapes(cluster)
    rows = capacity_rows(cluster, offered)
    for chosen in itertools.islice(
        itertools.combinations_with_replacement(range(len(offered)), 3), 60
    ):
        counts = np.bincount(chosen, minlength=len(offered))
        by_rows = bool((rows.matrix @ counts <= rows.limits).all())
        assert by_rows == placeable(cluster, [offered[i] for i in chosen]), [
            offered[i] for i in chosen
        ]


def placeable(cluster: ClusterSpec, wanted: list[Shape]) -> bool:
    """By trying every node for every job."""

    def attempt(free: tuple[int, ...], left: list[Shape]) -> bool:
        if not left:
            return True
        shape, *rest = left
        per_node = shape.num_devices // shape.num_nodes
        fits = [
            i
            for i, node in enumerate(cluster.nodes)
            if node.kind == shape.kind and free[i] >= per_node
        ]
        tried: set[tuple[int, ...]] = set()
        for chosen in itertools.combinations(fits, shape.num_nodes):
            after = tuple(f - per_node * (i in chosen) for i, f in enumerate(free))
            key = tuple(sorted(after))
            if key not in tried and attempt(after, rest):
                return True
            tried.add(key) if len({n.kind for n in cluster.nodes}) == 1 else None
        return False

    free = tuple(node.num_usable * (node.state == "up") for node in cluster.nodes)
    return attempt(free, wanted)


def test_even_nodes_need_one_row_per_kind():
    cluster = ClusterSpec(nodes=(*even(4).nodes, *even(3, 4, "b").nodes))
    rows = capacity_rows(cluster, shapes(cluster))
    assert rows.kinds == ("a", "b") and rows.limits.tolist() == [32, 12]


def test_limits_of_a_job_decide_which_shapes_it_may_take():
    cluster = ClusterSpec(nodes=(*even(2).nodes, *even(1, 4, "b").nodes))
    offered = shapes(cluster)
    jobs = [
        JobView(spec=JobSpec(id="any")),
        JobView(spec=JobSpec(id="mid", min_devices=2, max_devices=8)),
        JobView(spec=JobSpec(id="rigid", mode="rigid", num_devices=4, min_devices=1)),
        JobView(spec=JobSpec(id="b", kinds=("b",))),
    ]
    mask = allowed(jobs, offered)
    assert mask[0].all()
    assert [offered[i].num_devices for i in np.flatnonzero(mask[1])] == [2, 4, 8, 2, 4]
    assert {offered[i].num_devices for i in np.flatnonzero(mask[2])} == {4}
    assert {offered[i].kind for i in np.flatnonzero(mask[3])} == {"b"}


def test_a_level_admits_what_one_domain_can_hold():
    racks = tuple(
        dataclasses.replace(node, labels={"rack": rack})
        for node, rack in zip(even(5).nodes, "rrrss", strict=True)
    )
    cluster = ClusterSpec(nodes=racks)
    offered = shapes(cluster)
    inside, free = (JobView(spec=JobSpec(id="x", level=level)) for level in ("rack", None))
    mask = allowed([inside, free], offered, cluster)
    assert {offered[i].num_nodes for i in np.flatnonzero(mask[0])} == {1, 2, 3}
    assert mask[1].all()
    unlabelled = allowed(
        [dataclasses.replace(inside, spec=JobSpec(id="y", level="pod"))], offered, cluster
    )
    assert {offered[i].num_nodes for i in np.flatnonzero(unlabelled[0])} == {1}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -2.0])
def test_entries_that_are_not_positive_numbers_are_not_used(bad):
    cluster = even(2)
    offered = shapes(cluster)
    good = JobView(spec=JobSpec(id="good"), goodput=table(cluster))
    half = JobView(spec=JobSpec(id="half"), goodput=table(cluster) | {offered[1]: bad})
    matrix = goodput_matrix([good, half], offered)
    np.testing.assert_array_equal(matrix[0], list(table(cluster).values()))
    assert matrix[1, 1] == 0 and (np.delete(matrix[1], 1) > 0).all()


def test_tables_with_other_shape_objects_or_other_shapes_are_read_alike():
    cluster = even(2)
    offered = shapes(cluster)
    same = {Shape(s.kind, s.num_nodes, s.num_devices): v for s, v in table(cluster).items()}
    more = same | {Shape("z", 1, 1): 5.0}
    jobs = [
        JobView(spec=JobSpec(id=str(i)), goodput=t)
        for i, t in enumerate([table(cluster), same, more])
    ]
    matrix = goodput_matrix(jobs, offered)
    np.testing.assert_array_equal(matrix[0], matrix[1])
    np.testing.assert_array_equal(matrix[0], matrix[2])


@pytest.mark.parametrize(
    ("spec", "goodput", "words"),
    [
        (JobSpec(id="x", kinds=("b",)), True, "allows only devices of kind"),
        (
            JobSpec(id="x", min_devices=32),
            True,
            "at least 32 devices of one kind, and the cluster has 16 a in service",
        ),
        (JobSpec(id="x"), False, "no usable entry"),
        (
            JobSpec(id="x", mode="rigid", num_devices=3),
            True,
            "no entry between 3 and 3 devices",
        ),
    ],
)
def test_a_job_without_any_shape_is_reported(spec, goodput, words):
    cluster = even(2)
    view = JobView(spec=spec, goodput=table(cluster) if goodput else {})
    offered = shapes(cluster)
    assert not goodput_matrix([view], offered, cluster).any()
    assert words in no_shape_reason(view, capacity(cluster), set(offered).__contains__)
