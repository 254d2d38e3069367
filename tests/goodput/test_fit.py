import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adaptdl_golden import cases, perf_of, timings_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgoodput.goodput import regression
from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.goodput.fit import StepTimings, fit_perf_params
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import PerfParams, Placement, compute_time, step_time, sync_time
from jaxgoodput.goodput.search import BatchLimits, goodput_table

NAN = float("nan")
TRUTH = PerfParams(
    compute_base=0.02,
    compute_per_sample=0.001,
    intra_base=0.03,
    intra_per_replica=0.002,
    inter_base=0.1,
    inter_per_replica=0.005,
    overlap=2.0,
    update_s=0.015,
)
LINKS = {
    "none": [(1, 1)],
    "intra": [(1, 2), (1, 4), (1, 8)],
    "inter": [(2, 4), (2, 16), (4, 8)],
}


def measured(truth, placements, sizes=(8, 32, 128), *, apart=True, noise=0.0, rng=None):
    """Timings of `truth`; `apart`: the parts of a step are measured too."""
    nodes, replicas, micro = np.array([(n, k, b) for n, k in placements for b in sizes]).T
    at = Placement(num_nodes=nodes, num_replicas=replicas)

    def clock(seconds):
        jitter = 1.0 if rng is None else np.exp(noise * rng.standard_normal(len(nodes)))
        return np.broadcast_to(seconds, nodes.shape) * jitter

    missing = np.full(len(nodes), NAN)
    return StepTimings(
        num_nodes=nodes,
        num_replicas=replicas,
        micro_batch_size=micro,
        accumulate_s=clock(compute_time(truth, micro)) if apart else missing,
        reduce_s=np.where(replicas > 1, clock(sync_time(truth, at)), NAN) if apart else missing,
        update_s=clock(truth.update_s) if apart and truth.update_s else missing,
        step_s=clock(step_time(truth, at, micro)),
    )


def rms(predicted, seconds):
    return float(np.sqrt(np.mean((np.log(predicted) - np.log(seconds)) ** 2)))


def published_objective(perf, rows):
    sizes = np.array(rows["atomic_bsz"])
    at = Placement(
        num_nodes=np.array(rows["num_nodes"]), num_replicas=np.array(rows["num_replicas"])
    )
    ratios = (perf.inter_per_replica / perf.inter_base) ** 2
    ratios += (perf.intra_per_replica / perf.intra_base) ** 2
    errors = rms(compute_time(perf, sizes), rows["accum_step_time"])
    errors += rms(step_time(perf, at, sizes), rows["optim_step_time"])
    return errors + 1e-3 * (perf.overlap - 1.0) ** 2 + 1e-2 * ratios


@pytest.mark.slow
def test_the_published_objective_is_reached_and_its_recorded_failures_are_not(golden):
    beaten = []
    for case in cases(golden, "fit_perf_params"):
        fit = fit_perf_params(timings_of(case["inputs"]), priors="adaptdl")
        ours = published_objective(fit.params, case["inputs"])
        recorded = case["expect"]["objective"]
        assert ours <= recorded + 1e-3, (case["id"], ours, recorded)
        truth = case["expect"]["objective_at_true"]
        if "sigma=0.0" in case["tag"] and recorded > truth + 0.1:  # AdaptDL's own failures
            assert ours <= truth + 1e-3
            beaten.append(case["id"])
    assert beaten == [5, 11]


def test_the_published_pins_hold_what_was_not_observed(golden):
    floor = 1e-8
    for case in cases(golden, "fit_perf_params"):
        rows = case["inputs"]
        fit = fit_perf_params(timings_of(rows), priors="adaptdl").params
        nodes, replicas = np.array(rows["num_nodes"]), np.array(rows["num_replicas"])
        if len(set(rows["atomic_bsz"])) == 1:
            expected = np.mean(rows["accum_step_time"]) / 2
            np.testing.assert_allclose(fit.compute_base, expected, rtol=1e-9)
        if not ((nodes == 1) & (replicas > 1)).any():
            np.testing.assert_allclose([fit.intra_base, fit.intra_per_replica], floor, rtol=1e-6)
        if not (replicas > 2).any():
            np.testing.assert_allclose(fit.intra_per_replica, floor, rtol=1e-6)
        if not (nodes > 1).any():
            expected = 1.1 * fit.intra_base, 1.1 * fit.intra_per_replica
            np.testing.assert_allclose([fit.inter_base, fit.inter_per_replica], expected)
        assert fit.update_s == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("priors", ["default", "adaptdl"])
def test_180_profiles_have_no_bad_fit_and_extrapolate_better(golden, priors):
    recorded_p90 = {0.0: 0.62, 0.02: 0.081, 0.1: 0.141}
    profiles = json.loads((golden / "adaptdl" / "fit_profiles.json").read_text())
    nodes, replicas, sizes = np.array(profiles["meta"]["grid"]).T
    grid = Placement(num_nodes=nodes, num_replicas=replicas)
    errors = {noise: [] for noise in recorded_p90}
    for case in profiles["cases"]:
        timings = timings_of(case)
        fit = fit_perf_params(timings, priors=priors).explore()
        at = Placement(num_nodes=timings.num_nodes, num_replicas=timings.num_replicas)
        seen = rms(step_time(fit, at, timings.micro_batch_size), timings.step_s)
        assert seen <= max(3 * case["noise"], 0.1)
        exact = step_time(perf_of(case["true_params"]), grid, sizes)
        errors[case["noise"]].append(rms(step_time(fit, grid, sizes), exact))
    for noise, values in errors.items():
        assert len(values) == 60
        assert np.quantile(values, 0.9) < recorded_p90[noise], noise


seconds = st.floats(-7, 1).map(lambda x: 10.0**x)


@settings(max_examples=25, deadline=None)
@given(
    base=seconds,
    per_sample=seconds,
    intra=st.floats(0.2, 2.0),
    inter=st.floats(0.2, 2.0),
    overlap=st.floats(1.2, 3.0),
    update=st.floats(0.05, 0.5),
)
def test_planted_parameters_are_recovered(base, per_sample, intra, inter, overlap, update):
    step_s = base + per_sample * 32
    truth = PerfParams(
        compute_base=base,
        compute_per_sample=per_sample,
        intra_base=intra * step_s,
        intra_per_replica=0.05 * intra * step_s,
        inter_base=inter * step_s,
        inter_per_replica=0.05 * inter * step_s,
        overlap=overlap,
        update_s=update * step_s,
    )
    fit = fit_perf_params(measured(truth, sum(LINKS.values(), [])))
    assert fit.error < 1e-3
    at = Placement(num_nodes=np.array([1, 1, 3]), num_replicas=np.array([1, 6, 12]))
    np.testing.assert_allclose(
        step_time(fit.params, at, 64, 3), step_time(truth, at, 64, 3), rtol=5e-3
    )
    for name in ("intra_base", "inter_base", "overlap", "update_s"):
        assert name not in fit.unidentified
        np.testing.assert_allclose(getattr(fit.params, name), getattr(truth, name), rtol=0.03)


def test_an_outlier_does_not_bend_the_fit(rng):
    timings = measured(TRUTH, sum(LINKS.values(), []), noise=0.02, rng=rng)
    step_s = np.array(timings.step_s)
    step_s[5] *= 20.0  # one step fell into a garbage collection
    bent = StepTimings(**{**timings.__dict__, "step_s": step_s})
    fit = fit_perf_params(bent)
    at = Placement(num_nodes=np.array([1, 1, 2]), num_replicas=np.array([1, 8, 16]))
    error = rms(step_time(fit.params, at, 64), step_time(TRUTH, at, 64))
    assert error < 0.02


def test_weights_let_old_timings_fade():
    slow = PerfParams(**{**TRUTH.__dict__, "compute_per_sample": 0.003})
    old, new = measured(slow, LINKS["none"]), measured(TRUTH, LINKS["none"])
    names = old.__dict__.keys() - {"weight"}
    both = {k: np.concatenate([getattr(old, k), getattr(new, k)]) for k in names}
    faded = fit_perf_params(StepTimings(**both, weight=np.repeat([1e-4, 1.0], 3)))
    np.testing.assert_allclose(faded.params.compute_per_sample, 0.001, rtol=0.02)
    gone = fit_perf_params(StepTimings(**both, weight=np.repeat([0.0, 1.0], 3)))
    assert gone.num_rows == 3
    np.testing.assert_allclose(gone.params.compute_per_sample, 0.001, rtol=1e-3)


@pytest.mark.parametrize("seen", [["none"], ["none", "intra"], ["none", "inter"], ["intra"]])
def test_a_link_that_was_never_measured_is_unknown_until_one_explores(seen):
    fit = fit_perf_params(measured(TRUTH, sum((LINKS[link] for link in seen), [])))
    grad = GradParams(sqr=1.0, var=100.0)
    limits = BatchLimits(base=64, max=1024, micro=(4, 256))
    placements = Placement(num_nodes=np.array([1, 1, 2]), num_replicas=np.array([1, 4, 16]))
    # With the parts of a step measured apart, one replica is known from many.
    known = np.array([True, "intra" in seen, "inter" in seen])
    np.testing.assert_array_equal(fit.knows(placements), known)
    assert fit.knows(Placement(num_nodes=2, num_replicas=2)) is ("inter" in seen)
    model = GoodputModel(perf=fit.params, grad=grad, base_batch_size=64)
    np.testing.assert_array_equal(np.isfinite(goodput_table(model, limits, placements)), known)
    bold = GoodputModel(perf=fit.explore(), grad=grad, base_batch_size=64)
    table = goodput_table(bold, limits, placements)
    assert np.isfinite(table).all()
    np.testing.assert_allclose(table[known], goodput_table(model, limits, placements)[known])
    for name in ("intra", "inter"):
        assert (f"{name}_base" in fit.unidentified) == (name not in seen)


def test_one_replica_is_not_known_from_whole_steps_of_many():
    fit = fit_perf_params(measured(TRUTH, LINKS["intra"], apart=False))
    assert not fit.knows(Placement(num_nodes=1, num_replicas=1))
    assert "update_s" in fit.unidentified and fit.params.update_s == 0.0


def test_one_size_leaves_the_split_of_the_computation_open():
    fit = fit_perf_params(measured(TRUTH, LINKS["none"] + LINKS["intra"], sizes=(32,)))
    assert {"compute_base", "compute_per_sample"} <= set(fit.unidentified)
    np.testing.assert_allclose(compute_time(fit.params, 32), compute_time(TRUTH, 32), rtol=0.01)


def test_one_number_of_replicas_leaves_the_growth_open():
    fit = fit_perf_params(measured(TRUTH, [(1, 1), (1, 8)]))
    assert {"intra_base", "intra_per_replica"} & set(fit.unidentified)
    at = Placement(num_nodes=1, num_replicas=8)
    np.testing.assert_allclose(step_time(fit.params, at, 32), step_time(TRUTH, at, 32), rtol=0.01)
    assert fit.max_replicas == 8 and fit.links == ("none", "intra")


def test_the_optimizers_time_follows_from_steps_alone_and_micro_batches_alone():
    timings = measured(TRUTH, LINKS["none"])
    only = {"update_s": np.full(3, NAN), "reduce_s": np.full(3, NAN)}
    fit = fit_perf_params(StepTimings(**{**timings.__dict__, **only}))
    np.testing.assert_allclose(fit.params.update_s, TRUTH.update_s, rtol=0.02)
    assert "update_s" not in fit.unidentified


def test_a_previous_fit_is_a_place_to_start_and_never_makes_it_worse(rng):
    timings = measured(TRUTH, sum(LINKS.values(), []), noise=0.05, rng=rng)
    cold = fit_perf_params(timings)
    partial = fit_perf_params(measured(TRUTH, LINKS["none"])).params  # NaN links inside
    for start in (TRUTH, cold.params, partial):
        assert fit_perf_params(timings, start=start).error <= cold.error + 1e-3


def test_the_unit_of_time_does_not_matter():
    for unit_s in (1e-6, 1e3):
        truth = PerfParams(
            **{k: v if k == "overlap" else v * unit_s for k, v in TRUTH.__dict__.items()}
        )
        fit = fit_perf_params(measured(truth, sum(LINKS.values(), [])))
        np.testing.assert_allclose(fit.params.intra_base, truth.intra_base, rtol=0.01)


def test_a_fit_in_one_thread_leaves_the_precision_of_the_others_alone():
    timings = measured(TRUTH, sum(LINKS.values(), []))
    expected = fit_perf_params(timings)
    done = threading.Event()
    fits = []

    def refit():
        while not done.is_set():
            fits.append(fit_perf_params(timings))

    threads = [threading.Thread(target=refit) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        while len(fits) < 10:
            # A new function each time, so that each is traced while the others compute in float64.
            traced = jax.jit(lambda x: (x * 2.0 + jnp.arange(3.0), jnp.zeros(3)))
            assert {out.dtype for out in traced(np.ones(3))} == {jnp.dtype(jnp.float32)}
            assert jnp.zeros(1).dtype == jnp.float32
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    assert all(fit == expected for fit in fits)


def test_a_fit_works_where_the_loop_forbids_transfers():
    with jax.transfer_guard("disallow"):
        assert fit_perf_params(measured(TRUTH, LINKS["none"])).error < 1e-3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"step_s": np.ones(2)}, "arrays of one length"),
        ({"step_s": np.array([0.1, 0.0, 0.1])}, "row 1 has a time of 0.0 s"),
        ({"accumulate_s": np.array([0.1, 0.1, np.inf])}, "row 2 has a time of inf s"),
        ({"num_replicas": np.array([1, 1, 0])}, "row 2 has num_nodes=1, num_replicas=0"),
        ({"num_nodes": np.array([1, 2, 1])}, "row 1 has num_nodes=2, num_replicas=1"),
        ({"weight": np.array([1.0, -1.0, 1.0])}, "weight must be finite and >= 0"),
        ({"weight": np.zeros(3)}, "nothing to fit"),
        ({"step_s": np.full(3, NAN), "accumulate_s": np.full(3, NAN)}, "nothing to fit"),
    ],
)
def test_impossible_timings_are_refused(wrong, message):
    right = measured(TRUTH, LINKS["none"])
    with pytest.raises(ValueError, match=message):
        fit_perf_params(StepTimings(**{**right.__dict__, **wrong}))


def test_unknown_priors_are_refused():
    with pytest.raises((ValueError, TypeError), match="priors|Literal"):
        fit_perf_params(measured(TRUTH, LINKS["none"]), priors="optimistic")  # pyright: ignore


@pytest.mark.slow
@given(
    point=st.lists(st.floats(-6.0, 4.0), min_size=8, max_size=8),
    shape=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 16), st.integers(1, 512)),
        min_size=1,
        max_size=6,
    ),
    has_update=st.booleans(),
    noise=st.floats(1e-3, 0.3),
    seed=st.integers(0, 99),
)
def test_slopes_are_those_of_automatic_differentiation(point, shape, has_update, noise, seed):
    """Of the errors, robust and weighted, and of the prior; errors themselves are the same with JAX."""
    rng = np.random.default_rng(seed)
    nodes, replicas, sizes = np.array(shape).T
    replicas = nodes * replicas
    times = rng.uniform(0.01, 1.0, (len(shape), 4))
    times[:, 3] = np.nan if not has_update else times[:, 3]
    rows = regression.pack(nodes, replicas, sizes, times, rng.uniform(0.5, 2.0, len(shape)))
    at = np.array(point)

    def residuals(x):
        low, high = regression.CLIP
        values = jnp.exp(jnp.clip(x, low, high))
        overlap = 1.0 + 9.0 * jax.nn.sigmoid(x[regression.OVERLAP])
        values = values.at[regression.OVERLAP].set(overlap)
        values = values.at[regression.UPDATE].multiply(has_update)
        errors = regression.log_errors(values, jnp.asarray(rows.table), jnp)
        robust = errors * jnp.sqrt(2.0 / (1.0 + jnp.sqrt(1.0 + (errors / knee) ** 2)))
        weighted = robust * rows.table[:, regression.WEIGHTS]
        prior = (x - regression.PRIOR_CENTRE) / regression.PRIOR_WIDTH
        return jnp.concatenate([weighted.ravel(), noise * prior])

    knee = max(3 * noise, 0.02)
    found = regression._residuals_and_jacobian(at, rows.table, has_update, noise, knee)
    with jax.enable_x64(True):
        expected, slopes = residuals(at), jax.jacfwd(residuals)(at)
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found[:, 1:], slopes, rtol=1e-7, atol=1e-10)
