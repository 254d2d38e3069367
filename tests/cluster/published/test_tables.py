"""Interpolated measurements: exact where measured, monotone in between, an error outside."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.cluster.published.tables import Application, Curve, Runs, StepTable, normalised


def true_step(nodes, devices, size):
    """A plane, so that piecewise linear interpolation has to be exact."""
    return 0.1 + 0.01 * size + 0.02 * devices + 0.05 * nodes


def table():
    sizes = np.array([8.0, 16.0, 32.0])
    curves = {}
    for counts in [(1,), (2,), (4,), (1, 1), (2, 2), (4, 4), (1, 4)]:
        step = true_step(len(counts), sum(counts), sizes)
        curves[counts] = Curve(sizes, step, step / 4)
    points = [
        (n, n * g, b, true_step(n, n * g, b), true_step(n, n * g, b) / 4)
        for n in (3, 16)
        for g in (1, 4)
        for b in sizes
    ]
    return StepTable("plane", curves, np.array(points))


def test_of_one_measured_placement_nothing_else_follows():
    whole = table()
    alone = StepTable("one", {(1,): whole.curves[1,]}, np.empty((0, 5)))
    assert alone.times((1,), 8) == whole.times((1,), 8)
    with pytest.raises(
        ValueError, match=r"one: 8 samples .* on \[2\] .* outside of what was measured"
    ):
        alone.times((2,), 8)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=6).filter(any), st.integers(0, 5))
def test_rotations_and_idle_nodes_make_no_difference(counts, by):
    rotated = counts[by % len(counts) :] + counts[: by % len(counts)]
    assert normalised(rotated) == normalised(counts) == normalised(normalised(counts))
    assert sorted(normalised(counts)) == sorted(c for c in counts if c)


@pytest.mark.parametrize("counts", [(4,), (4, 4), (4, 1), (0, 1, 4)])
@pytest.mark.parametrize("size", [8, 13, 32])
def test_a_measured_placement_is_interpolated_over_the_batch(counts, size):
    devices, nodes = sum(counts), len([c for c in counts if c])
    step, sync = table().times(counts, size)
    assert step == pytest.approx(true_step(nodes, devices, size))
    assert sync == pytest.approx(step / 4)


@pytest.mark.parametrize("counts", [(3, 3), (3,), (2, 3, 4), (4,) * 7, (2,) * 9])
def test_any_other_placement_is_interpolated_over_nodes_devices_and_batch(counts):
    step, _ = table().times(counts, 20)
    assert step == pytest.approx(true_step(len(counts), sum(counts), 20))


def test_nodes_beyond_the_farthest_count_as_that_many():
    assert table().times((2,) * 20, 8)[0] == pytest.approx(true_step(16, 40, 8))


@pytest.mark.parametrize(("counts", "size"), [((1,), 7), ((4, 4), 33), ((4,) * 16, 40), ((9,), 8)])
def test_outside_of_what_was_measured_is_an_error(counts, size):
    with pytest.raises(ValueError, match=r"plane: .* samples per device"):
        table().times(counts, size)
    assert np.isnan(table().times_of_sizes(counts, np.array([float(size)]))).all()


@given(
    st.sampled_from([(1,), (1, 4), (2, 2), (3, 3), (4,) * 5]),
    st.lists(st.floats(4, 40), min_size=1, max_size=5),
)
def test_many_sizes_at_once_are_each_one_alone(counts, sizes):
    measured = table()
    together = measured.times_of_sizes(counts, np.array(sizes))
    for size, times in zip(sizes, together, strict=True):
        if np.isfinite(times).all():
            assert measured.times(counts, size) == pytest.approx(tuple(times))
        else:
            with pytest.raises(ValueError):
                measured.times(counts, size)


def runs():
    sqr = np.array([[1.0, 0.5], [3.0, 1.5]])
    iterations = np.array([[10.0, 20.0], [4.0, 8.0]])
    progress = np.array([[10.0, 20.0], [9.0, 21.0]])
    return Runs("app", (8, 32), progress, iterations, sqr, 10 * sqr)


@given(st.floats(8, 32), st.integers(0, 1))
def test_runs_are_linear_in_the_batch(batch, epoch):
    share = (batch - 8) / 24
    sqr, var = runs().moments(batch, epoch)
    assert sqr == pytest.approx((1 + 2 * share) / (1 + epoch))
    assert var == pytest.approx(10 * sqr)
    ends = runs().iterations_at_end(batch, epoch)
    assert ends == pytest.approx((10 - 6 * share) * (1 + epoch))


def test_an_epoch_is_over_when_the_first_run_ended_it():
    assert runs().epoch_ends.tolist() == [9.0, 20.0]
    assert runs().num_epochs == 2


@pytest.mark.parametrize("batch", [7, 33])
def test_a_batch_outside_of_the_runs_is_an_error(batch):
    with pytest.raises(ValueError, match=r"app: .* outside of the measured runs \(8 to 32\)"):
        runs().moments(batch, 0)


def test_limits_are_those_of_the_kind_and_of_the_application():
    application = Application("app", {"a": table()}, runs(), (10, 64))
    assert application.limits("a") == (10, 32)
    assert (application.base_batch, application.max_batch) == (8, 32)
