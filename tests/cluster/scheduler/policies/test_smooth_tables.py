"""Tables that agree with a curve stay to the bit; those that contradict themselves come nearer the truth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.cluster.scheduler.policies.goodput import Goodput
from jaxgoodput.cluster.scheduler.policies.shape_choice import ShapeProblem
from jaxgoodput.cluster.scheduler.policies.tables import shrunk, shrunk_tables
from jaxgoodput.cluster.scheduler.policy import JobView
from jaxgoodput.cluster.scheduler.shapes import shapes
from jaxgoodput.cluster.simulate import synthetic_applications, uniform_cluster
from jaxgoodput.goodput.perf import Placement
from jaxgoodput.goodput.search import goodput_table
from jaxgoodput.specs import JobSpec

SHAPES = shapes(uniform_cluster("t4", 16, 4))
DEVICES = np.array([shape.num_devices for shape in SHAPES])
NODES = np.array([shape.num_nodes for shape in SHAPES])
ONE_KIND = np.zeros(len(SHAPES), int)


def exact_tables():
    """[families x phases, shapes] goodput of the made-up applications, by their own models."""
    at = Placement(num_nodes=NODES, num_replicas=DEVICES)
    return np.array(
        [
            goodput_table(application.model("t4", phase), application.limits, at)
            for application in synthetic_applications({"t4": 1.0}).values()
            for phase in range(application.num_phases)
        ]
    )


EXACT = exact_tables()


def noisy(table, deviation, seed):
    return table * np.exp(deviation * np.random.default_rng(seed).standard_normal(table.shape))


def distance(told, truth):
    """[rows] how far told tables are from the truth, whatever their level."""
    return np.nanstd(np.log(told / truth), axis=1)


@given(
    rows=st.lists(st.integers(0, len(EXACT) - 1), min_size=1, max_size=20),
    largest=st.lists(st.sampled_from([1, 2, 4, 8, 16, 64]), min_size=20, max_size=20),
)
def test_exact_tables_stay_to_the_bit_however_much_of_them_is_known(rows, largest):
    table = EXACT[rows].copy()
    table[DEVICES > np.array(largest[: len(rows)])[:, None]] = np.nan
    assert np.array_equal(shrunk(table, DEVICES, NODES, ONE_KIND), table, equal_nan=True)


@given(
    serial=st.lists(st.floats(0.0, 0.1), min_size=8, max_size=12),
    knee=st.lists(st.integers(1, 5), min_size=12, max_size=12),
    num_nodes=st.sampled_from([1, 2, 4]),
)
def test_exact_tables_of_jobs_that_scale_quite_differently_stay_on_small_clusters(
    serial, knee, num_nodes
):
    """Amdahl's law up to a number of devices of the job's own, and nothing more beyond it."""
    few = shapes(uniform_cluster("t4", num_nodes, 4))
    devices = np.array([shape.num_devices for shape in few], np.int64)
    nodes = np.array([shape.num_nodes for shape in few], np.int64)
    useful = np.minimum(devices, np.array(knee[: len(serial)])[:, None])
    table = useful / (1.0 + np.array(serial)[:, None] * (useful - 1.0)) * 0.9 ** (nodes > 1)
    assert np.array_equal(shrunk(table, devices, nodes, np.zeros(len(few), int)), table)


@given(deviation=st.sampled_from([0.15, 0.3, 0.5]), seed=st.integers(0, 10**6))
def test_noisy_tables_come_nearer_to_the_truth(deviation, seed):
    told = noisy(EXACT, deviation, seed)
    found = shrunk(told, DEVICES, NODES, ONE_KIND)
    assert distance(found, EXACT).mean() < 0.6 * distance(told, EXACT).mean()


@given(seed=st.integers(0, 10**6))
def test_rows_too_short_to_know_their_noise_use_that_of_the_others(seed):
    told = noisy(EXACT, 0.3, seed)
    told[::2, DEVICES > 4] = np.nan
    found = shrunk(told, DEVICES, NODES, ONE_KIND)
    before, after = distance(told, EXACT)[::2], distance(found, EXACT)[::2]
    assert after.mean() < 0.8 * before.mean()
    alone = told[:1]
    assert np.array_equal(shrunk(alone, DEVICES, NODES, ONE_KIND), alone, equal_nan=True)


@given(seed=st.integers(0, 10**6), factor=st.sampled_from([1e-3, 1.0, 1e6]))
def test_it_knows_no_order_of_jobs_and_shapes_and_no_unit(seed, factor):
    rng = np.random.default_rng(seed)
    told = noisy(EXACT, 0.3, seed)
    told[rng.random(told.shape) < 0.2] = np.nan
    # Triples are of sizes that are neighbours, so the order of the columns must not matter either.
    jobs, columns = rng.permutation(len(told)), rng.permutation(len(SHAPES))
    found = shrunk(told, DEVICES, NODES, ONE_KIND)
    other = shrunk(factor * told[jobs][:, columns], DEVICES[columns], NODES[columns], ONE_KIND)
    np.testing.assert_allclose(other, factor * found[jobs][:, columns], rtol=1e-6)
    assert np.array_equal(np.isnan(found), np.isnan(told))


def test_an_exact_job_among_noisy_ones_stays():
    told = noisy(EXACT, 0.3, 0)
    told[7] = EXACT[7]
    found = shrunk(told, DEVICES, NODES, ONE_KIND)
    assert np.array_equal(found[7], told[7])
    assert (found[8] != told[8]).all()


def test_kinds_have_noise_of_their_own():
    kind = np.repeat([0, 1], len(SHAPES))
    told = np.concatenate([EXACT, noisy(EXACT, 0.3, 0)], 1)
    found = shrunk(told, np.tile(DEVICES, 2), np.tile(NODES, 2), kind)
    assert np.array_equal(found[:, kind == 0], EXACT)
    assert distance(found[:, kind == 1], EXACT).mean() < 0.15


def test_what_is_declared_counts_before_what_is_seen():
    told, error = EXACT.copy(), np.zeros(EXACT.shape)
    told[:, 5] *= 2.0
    error[:, 5] = 0.7
    found = shrunk(told, DEVICES, NODES, ONE_KIND, error)
    others = np.arange(len(SHAPES)) != 5
    assert np.array_equal(found[:, others], told[:, others])
    assert np.abs(np.log(found[:, 5] / EXACT[:, 5])).max() < 0.2
    rough = noisy(EXACT, 0.3, 1)
    assert np.array_equal(shrunk(rough, DEVICES, NODES, ONE_KIND, np.zeros(EXACT.shape)), rough)


def test_tables_of_one_entry_and_none_stay():
    for columns in ([0], []):
        few = EXACT[:, columns]
        assert np.array_equal(shrunk(few, DEVICES[columns], NODES[columns], ONE_KIND[columns]), few)
    none = EXACT[:0]
    assert shrunk(none, DEVICES, NODES, ONE_KIND).shape == none.shape


def views(table, **fields):
    return [
        JobView(
            spec=JobSpec(id=f"j{i:02d}", max_devices=64),
            goodput=dict(zip(SHAPES, map(float, row), strict=True)),
            largest_profiled=64,
            **fields,
        )
        for i, row in enumerate(table)
    ]


def test_the_policy_is_not_taken_in_by_one_lucky_entry():
    cluster = uniform_cluster("t4", 16, 4)
    column = SHAPES.index(next(s for s in SHAPES if s.num_devices == 48))
    told = EXACT[-10:].copy()
    told[0, column] *= 4.0
    jobs = views(told, goodput_error={SHAPES[column]: 1.0})
    fair = Goodput()(views(EXACT[-10:]), cluster, 0.0).allocations
    assert fair["j00"].num_devices < 48
    assert Goodput()(jobs, cluster, 0.0).allocations["j00"].num_devices < 48
    taken_in = Goodput(smooth_tables=False)(jobs, cluster, 0.0).allocations
    assert taken_in["j00"].num_devices == 48


def test_declared_errors_reach_the_tables_of_a_problem():
    cluster = uniform_cluster("t4", 16, 4)
    told = EXACT[:3].copy()
    told[0, 5] *= 2.0
    jobs = views(told, goodput_error={SHAPES[5]: 0.7})
    problem = ShapeProblem.of(jobs, cluster, 0.0)
    found = shrunk_tables(problem)
    assert found[0, 5] < 0.7 * told[0, 5]
    assert np.array_equal(found[:, :5], told[:, :5])
    assert found[1, 5] == pytest.approx(told[1, 5], rel=0.2)
