import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adaptdl_golden import adaptdl_best, cases, model_of, perf_of, searches
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.goodput.efficiency import GradGroups, GradParams, efficiency, gain, noise_scale
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import PerfParams, Placement, compute_time, step_time, sync_time

PERF = PerfParams(
    compute_base=0.01,
    compute_per_sample=0.001,
    intra_base=0.02,
    intra_per_replica=0.001,
    inter_base=0.05,
    inter_per_replica=0.002,
    overlap=1.5,
)
moments = st.floats(0.0, 1e6)
scales = st.floats(1.0, 1e4)


def test_the_model_is_the_published_one(golden):
    for case in cases(golden, "goodput_eval"):
        model, expect = model_of(case), case["expect"]
        at = Placement(num_nodes=case["num_nodes"], num_replicas=case["num_replicas"])
        config = (case["atomic_bsz"], case["accum_steps"] + 1)
        np.testing.assert_allclose(
            [
                compute_time(model.perf, config[0]),
                sync_time(model.perf, at),
                step_time(model.perf, at, config[0], 1),
                step_time(model.perf, at, *config),
                model.throughput(at, *config),
                model.efficiency(expect["batch_size"]),
                model.goodput(at, *config),
            ],
            [
                expect["accum_time"],
                expect["network_time"],
                expect["optim_time"],
                expect["total_time"],
                expect["throughput"],
                expect["efficiency"],
                expect["goodput"],
            ],
            rtol=1e-9,
            err_msg=f"case {case['id']}",
        )


def test_arrays_of_jax_give_the_published_numbers_too(golden):
    for case in cases(golden, "goodput_eval")[::10]:
        model = jax.tree.map(jnp.float32, model_of(case))
        at = Placement(
            num_nodes=jnp.int32(case["num_nodes"]), num_replicas=jnp.int32(case["num_replicas"])
        )
        config = jnp.int32(case["atomic_bsz"]), jnp.int32(case["accum_steps"] + 1)
        goodput = jax.jit(GoodputModel.goodput)(model, at, *config)
        assert goodput.dtype == jnp.float32
        np.testing.assert_allclose(goodput, case["expect"]["goodput"], rtol=1e-5)


def test_the_published_search_has_the_published_answers_under_our_model(golden):
    for case in cases(golden, "optimize"):
        if case["tag"].startswith("EDGE"):
            continue
        for nodes, replicas, goodput, size, count in searches(case):
            ours = adaptdl_best(case, nodes, replicas)
            assert ours[1:] == (size, count), case["id"]
            np.testing.assert_allclose(ours[0], goodput, rtol=1e-9)


def test_speedups_are_the_published_ones(golden):
    for case in cases(golden, "speedup"):
        alone = adaptdl_best(case, 1, 1)[0]
        np.testing.assert_allclose(alone, case["base_goodput"], rtol=1e-9)
        for point in case["points"]:
            if point["num_replicas"] == 0:
                assert point["speedup"] == 0.0  # no devices, no progress: nothing to search
                continue
            best = adaptdl_best(case, point["num_nodes"], point["num_replicas"])[0]
            np.testing.assert_allclose(best / alone, point["speedup"], rtol=1e-9)


def test_the_update_is_paid_once_per_step():
    at = Placement(num_nodes=1, num_replicas=4)
    slow = PerfParams(**{**PERF.__dict__, "update_s": 0.25})
    for count in (1, 2, 7):
        extra = step_time(slow, at, 8, count) - step_time(PERF, at, 8, count)
        np.testing.assert_allclose(extra, 0.25, rtol=1e-12)


def test_overlap_runs_from_taking_turns_to_the_longer_of_the_two():
    at = Placement(num_nodes=2, num_replicas=2)
    alone, sync = compute_time(PERF, 64), sync_time(PERF, at)
    turns = PerfParams(**{**PERF.__dict__, "overlap": 1.0})
    hidden = PerfParams(**{**PERF.__dict__, "overlap": 500.0})
    np.testing.assert_allclose(step_time(turns, at, 64), alone + sync, rtol=1e-12)
    np.testing.assert_allclose(step_time(hidden, at, 64), max(alone, sync), rtol=2e-3)


@pytest.mark.parametrize("unit_s", [1e-7, 1.0, 1e5])
def test_a_step_scales_with_the_unit_of_time_even_in_float32(unit_s):
    at = Placement(num_nodes=jnp.int32(2), num_replicas=jnp.int32(8))
    times = {k: jnp.float32(v * unit_s) for k, v in PERF.__dict__.items()}
    perf = PerfParams(**{**times, "overlap": jnp.float32(9.5)})
    exact = PerfParams(**{**PERF.__dict__, "overlap": 9.5})
    expected = step_time(exact, Placement(num_nodes=2, num_replicas=8), 32, 3) * unit_s
    np.testing.assert_allclose(step_time(perf, at, 32, 3), expected, rtol=1e-4)


def test_a_link_never_measured_makes_the_goodput_unknown():
    nan = float("nan")
    perf = PerfParams(**{**PERF.__dict__, "inter_base": nan, "inter_per_replica": nan})
    grad = GradParams(sqr=1.0, var=4.0)
    model = GoodputModel(perf=perf, grad=grad, base_batch_size=32)
    assert np.isfinite(model.goodput(Placement(num_nodes=1, num_replicas=1), 32))
    assert np.isfinite(model.goodput(Placement(num_nodes=1, num_replicas=8), 32))
    assert np.isnan(model.goodput(Placement(num_nodes=2, num_replicas=8), 32))


def test_unknown_noise_makes_every_batch_but_the_base_unknown():
    unknown = GradParams(sqr=float("nan"), var=float("nan"))
    np.testing.assert_array_equal(
        np.isnan(gain(unknown, np.array([0.5, 1.0, 2.0]))), [True, False, True]
    )


@given(sqr=moments, var=moments, scale=scales)
def test_gain_is_one_at_the_base_and_between_one_and_scale_above_it(sqr, var, scale):
    grad = GradParams(sqr=sqr, var=var)
    assert gain(grad, 1.0) == 1.0
    assert 1.0 - 1e-9 <= gain(grad, scale) <= scale * (1 + 1e-9)
    assert 0.0 < efficiency(grad, scale) <= 1.0 + 1e-9


@given(sqr=st.floats(1e-6, 1e6), var=st.floats(1e-6, 1e6), scale=st.floats(1e-3, 1.0))
def test_below_the_base_a_sample_is_worth_more_and_a_step_less(sqr, var, scale):
    grad = GradParams(sqr=sqr, var=var)
    assert gain(grad, scale) <= 1.0 + 1e-9
    assert efficiency(grad, scale) >= 1.0 - 1e-9


@given(sqr=st.floats(1e-3, 1e3), var=st.floats(1e-3, 1e3), batch=st.integers(1, 10**5))
def test_efficiency_is_the_noise_scales_formula(sqr, var, batch):
    base = 64
    grad = GradParams(sqr=sqr, var=var)
    phi = noise_scale(grad, base)
    expected = (phi + base) / (phi + batch)
    np.testing.assert_allclose(efficiency(grad, batch / base), expected, rtol=1e-9)


def test_without_signal_the_noise_scale_is_infinite_and_every_sample_counts():
    silent = GradParams(sqr=0.0, var=3.0)
    assert noise_scale(silent, 64) == np.inf
    np.testing.assert_allclose(efficiency(silent, np.array([2.0, 100.0])), 1.0)


def test_golden_parameters_carry_no_update(golden):
    assert perf_of(cases(golden, "goodput_eval")[0]["perf_params"]).update_s == 0.0


groups_of_moments = st.lists(
    st.tuples(st.floats(1e-3, 1e3), st.floats(0.0, 1e6)), min_size=1, max_size=6
)


@given(groups_of_moments, scales)
def test_groups_are_never_worth_more_than_their_pooled_moments(rows, scale):
    sqr, var = np.array(rows).T
    groups, pooled = GradGroups(sqr=sqr, var=var), GradParams(sqr=sqr.sum(), var=var.sum())
    worth = float(efficiency(groups, scale))
    assert 0 < worth <= float(efficiency(pooled, scale)) * (1 + 1e-9)
    np.testing.assert_allclose(gain(groups, scale), worth * scale)
    # As arrays of batches, and as arrays of one group each.
    np.testing.assert_allclose(efficiency(groups, np.array([[scale, 1.0]])), [[worth, 1.0]])
    alone = GradGroups(sqr=sqr[:1], var=var[:1])
    one = GradParams(sqr=sqr[0], var=var[0])
    np.testing.assert_allclose(efficiency(alone, scale), efficiency(one, scale))


@given(groups_of_moments, st.integers(1, 4096))
def test_at_the_noise_scale_of_groups_their_samples_are_worth_half_on_average(rows, base):
    sqr, var = np.array(rows).T
    var = np.maximum(var, 1e-3)
    groups = GradGroups(sqr=sqr, var=var)
    critical = float(noise_scale(groups, base))
    scales_of = [noise_scale(GradParams(sqr=s, var=v), base) for s, v in zip(sqr, var, strict=True)]
    worth = np.array([n / (n + critical) for n in scales_of])
    np.testing.assert_allclose(np.average(worth, weights=sqr), 0.5, rtol=1e-5)
    assert min(scales_of) * (1 - 1e-6) <= critical <= max(scales_of) * (1 + 1e-6)


def test_at_the_base_unknown_groups_are_worth_what_they_are():
    unknown = GradGroups(sqr=np.array([np.nan]), var=np.array([1.0]))
    assert efficiency(unknown, 1.0) == 1.0 and np.isnan(efficiency(unknown, 2.0))


def test_groups_without_any_signal_are_one():
    groups = GradGroups(sqr=np.zeros(2), var=np.array([1.0, 2.0]))
    assert efficiency(groups, 8.0) == 1.0 and noise_scale(groups, 64) == np.inf
