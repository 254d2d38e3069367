"""How simulated jobs advance and what they learn: closed forms, and laws of the view."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import application, cluster, steps, sync_s, truth, workload

from jaxgoodput.cluster.published.tables import Application, Runs
from jaxgoodput.cluster.published.traces import TraceJob
from jaxgoodput.cluster.scheduler.shapes import shapes
from jaxgoodput.cluster.simulate.jobs.gavel import GavelTruth
from jaxgoodput.cluster.simulate.jobs.job import every_size, packed
from jaxgoodput.cluster.simulate.jobs.learner import Learner, configurations, split
from jaxgoodput.cluster.simulate.jobs.model import ModelApplication, ModelTruth
from jaxgoodput.cluster.simulate.settings import Pin, Settings, gavel_settings
from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.goodput.perf import PerfParams
from jaxgoodput.goodput.search import BatchLimits

EXACT: dict[str, Any] = {"rounding": False}
SHAPES = shapes(cluster())


def toy(settings=None, **changes):
    trace = TraceJob(
        **{"id": "j", "submit_s": 0.0, "application": "toy", "global_batch_size": 64, **changes}
    )
    return truth().job(trace, Settings(**EXACT) if settings is None else settings, 0)


@given(st.integers(1, 10_000), st.integers(1, 64), st.integers(1, 128), st.integers(1, 64))
def test_a_split_covers_the_batch_in_the_fewest_micro_batches(batch, devices, base, largest):
    micro, count = split(batch, devices, base, largest, 10**9)
    assert 1 <= micro <= largest
    assert devices * micro * count >= batch
    if devices > 1:
        assert devices * largest * (count - 1) < batch
    elif batch > base:
        assert count >= 2
    limit = max(batch // 2, devices * count)
    capped, count = split(batch, devices, base, largest, limit)
    assert devices * capped * count <= limit


def test_the_search_finds_adaptdls_optimum(golden):
    cases = json.loads((golden / "adaptdl" / "optimize.json").read_text())["cases"]
    checked = 0
    for case in cases:
        known = case["accumulation"] and case["atomic_bsz_range"] and "goodput" in case["expect"]
        # An application's tables always bound the micro-batch.
        if not known or None in case["atomic_bsz_range"] or "EDGE" in case["tag"]:
            continue
        p, base, most = case["perf_params"], case["init_batch_size"], case["max_batch_size"]
        low, high = case["atomic_bsz_range"]
        zeros = np.ones((2, 1))
        app = Application("x", {}, Runs("x", (base, most), zeros, zeros, zeros, zeros), (low, high))
        nodes, devices = (np.atleast_1d(case[k]) for k in ("num_nodes", "num_replicas"))
        found = configurations(nodes.tolist(), devices.tolist(), app, (low, high))
        perf = PerfParams(
            compute_base=p["alpha_c"],
            compute_per_sample=p["beta_c"],
            inter_base=p["alpha_n"],
            inter_per_replica=p["beta_n"],
            intra_base=p["alpha_r"],
            intra_per_replica=p["beta_r"],
            overlap=p["gamma"],
        )
        learner = Learner(app, "x")
        places = tuple(zip(map(int, nodes), map(int, devices), strict=True))
        learner._configurations[places, None] = found
        grad = GradParams(**case["grad_params"])
        table = learner.goodput(perf, grad, places, None)
        # If the least batch exceeds the largest allowed one, the reference exceeds it; we offer nothing.
        fits = low * devices <= most
        expected = np.atleast_1d(case["expect"]["goodput"])
        assert table.max(1)[fits] == pytest.approx(expected[fits], rel=1e-9)
        assert not table.max(1)[~fits].any()
        checked += int(fits.sum())
    assert checked >= 19


@given(st.integers(1, 64), st.integers(1, 8))
def test_packed_placements_fill_nodes(devices, each):
    counts = packed(devices, each)
    assert sum(counts) == devices and max(counts) <= each
    assert len(counts) == -(-devices // each)
    shape = every_size([("a", 64, each)])[devices - 1]
    assert (shape.num_devices, shape.num_nodes) == (devices, len(counts))


def test_a_fixed_batch_advances_at_its_measured_speed():
    job = toy(Settings(mode="elastic", **EXACT))
    job.place("a", (2, 2))
    step = 0.02 + 16 / 64 + sync_s(2, 4)  # 64 samples over 4 devices
    times = 0.0
    for epoch in range(5):
        var = 8.0 * (epoch + 1)
        gain = (var + 1) / (var / 4 + 1)
        times += 400 * step / gain
    assert job.advance(1e9) == pytest.approx(times)
    assert job.done


def test_accumulation_costs_no_synchronisation():
    job = toy(Settings(mode="rigid", **EXACT), num_devices=1, global_batch_size=128)
    job.place("a", (1,))
    assert job.global_batch_size == 128
    sqr, var = 1.0, 8.0
    gain = (var + sqr) / (var / 8 + sqr)
    used = job.advance(1.0)
    done = job.save()[1]
    assert used == 1.0 and done == pytest.approx(gain / (4 * (0.02 + 32 / 64)))


@given(st.lists(st.floats(0.5, 200), min_size=1, max_size=30), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_progress_only_grows_and_does_not_depend_on_how_time_is_cut(pieces, size):
    whole, cut = (toy(Settings(mode="rigid", **EXACT), num_devices=1 << size) for _ in range(2))
    counts = (1 << size,) if size < 3 else (4, 4)
    for job in (whole, cut):
        job.place("b", counts)
    total, used = sum(pieces), 0.0
    before = cut.save()
    for piece in pieces:
        used += cut.advance(piece)
        assert cut.save() >= before
        before = cut.save()
    assert whole.advance(total) == pytest.approx(used)
    assert whole.save() == pytest.approx(cut.save())


def test_half_the_speed_takes_twice_the_time():
    fast, slow = (toy(Settings(mode="elastic", **EXACT)) for _ in range(2))
    for job in (fast, slow):
        job.place("a", (1,))
    assert slow.advance(1e9, 0.5) == pytest.approx(2 * fast.advance(1e9))


def test_next_stop_leads_to_the_exact_end():
    # With a fixed batch; an adaptive job may choose another one whenever time is split.
    whole, pieces = (toy(Settings(mode="elastic", **EXACT)) for _ in range(2))
    for job in (whole, pieces):
        job.place("b", (4,))
    end, now = whole.advance(1e9), 0.0
    while not pieces.done:
        stop = pieces.next_stop(7.0)
        now += pieces.advance(7.0 if stop is None else stop)
    assert now == pytest.approx(end, rel=1e-6)


def test_before_its_first_run_a_job_only_knows_one_device_of_each_kind():
    job = toy()
    assert {(s.kind, s.num_devices): g for s, g in job.goodput(SHAPES).items()} == {
        ("a", 1): 1.0,
        ("b", 1): 1.0,
    }
    assert job.largest_profiled == 0 and not job.tells_work


def test_a_job_is_offered_at_most_twice_what_it_ran_on():
    job = toy()
    for counts, largest in (((1,), 2), ((2,), 4), ((4,), 8)):
        job.place("a", counts)
        job.advance(1.0)
        offered = job.goodput(SHAPES)
        assert max(s.num_devices for s in offered) == largest
        assert all(math.isfinite(g) and g > 0 for g in offered.values())
    unlimited = toy(Settings(growth=None, **EXACT))
    unlimited.place("a", (1,))
    unlimited.advance(1.0)
    assert max(s.num_devices for s in unlimited.goodput(SHAPES)) == 8


def test_a_kind_without_measurements_is_projected_by_the_ratio_of_single_devices():
    job = toy()
    job.place("a", (2,))
    job.advance(5.0)
    offered = {(s.kind, s.num_nodes, s.num_devices): g for s, g in job.goodput(SHAPES).items()}
    ratio = (0.02 + 32 / 64) / (0.02 + 0.4 * 32 / 64)
    for size in (1, 2, 4):
        assert offered["b", 1, size] == pytest.approx(ratio * offered["a", 1, size])
    job.place("b", (2,))
    job.advance(5.0)
    after = {(s.kind, s.num_nodes, s.num_devices): g for s, g in job.goodput(SHAPES).items()}
    assert after["b", 1, 2] != pytest.approx(ratio * after["a", 1, 2])


def test_the_learned_goodput_approaches_the_truth():
    """Exact measurements of single devices at two sizes: the compute time is known exactly."""
    job = toy()
    job.place("a", (1,))
    job.advance(300.0)
    shape = next(s for s in SHAPES if (s.kind, s.num_devices) == ("a", 1))
    expected = job.goodput((shape,))[shape]
    before = job.save()
    job.advance(1.0)
    assert (job.save()[1] - before[1]) * 16 == pytest.approx(expected, rel=0.02)


def test_a_pinned_application_keeps_its_size_and_batch():
    job = toy(Settings(pins={"toy": Pin(1, 512)}))
    assert job.spec.max_devices == 1
    job.place("a", (1,))
    job.advance(100.0)
    assert job.global_batch_size == 512
    assert {s.num_devices for s in job.goodput(SHAPES)} == {1}


def test_noise_changes_what_is_measured_and_not_what_is_true():
    quiet, noisy = toy(), toy(Settings(step_noise=0.2, **EXACT))
    for job in (quiet, noisy):
        job.place("a", (1,))
        job.advance(1.0)
    assert noisy.save() == quiet.save()
    assert noisy.goodput(SHAPES) != quiet.goodput(SHAPES)


def test_the_work_left_counts_useful_samples():
    job = toy(Settings(**EXACT))
    assert job.remaining() == 2000 * 16
    job.place("a", (1,))
    job.advance(50.0)
    assert job.remaining() == pytest.approx((2000 - job.save()[1]) * 16)


def test_isolated_time_is_that_of_the_best_batch():
    job = toy(Settings(mode="rigid", **EXACT))
    fixed = job.isolated_s("a", (2,))
    job.place("a", (2,))
    assert fixed == pytest.approx(job.advance(1e9))
    assert toy().isolated_s("a", (2,)) <= fixed * (1 + 1e-9)
    slow = toy(Settings(slowdown={"toy": 2.0}, **EXACT))
    assert slow.isolated_s("a", (2,)) == pytest.approx(2 * toy().isolated_s("a", (2,)))


def test_an_unknown_application_and_a_missing_batch_are_named():
    with pytest.raises(ValueError, match=r"'gpt'.* tiny, toy"):
        toy(application="gpt")
    with pytest.raises(ValueError, match="rigid, which needs a global batch size"):
        toy(Settings(mode="rigid"), global_batch_size=None)


GAVEL = {
    "v100": {("LM", 1): {None: 10.0, ("A3C", 1): (6.0, 1.0)}, ("LM", 2): {None: 15.0}},
    "k80": {("LM", 1): {None: 2.0}, ("LM", 2): {None: 0.0}},
}


def gavel(settings=None, **changes):
    fields = {"id": "g", "submit_s": 10.0, "application": "LM", "num_steps": 1000, **changes}
    return GavelTruth(GAVEL).job(TraceJob(**fields), settings or gavel_settings(), 0)


def test_gavel_jobs_do_whole_steps():
    job = gavel()
    job.place("v100", (1,))
    assert job.advance(60.05) == 60.05 and job.remaining() == 400
    assert job.advance(60.0) == 40.0 and job.done
    exact = gavel(gavel_settings(rounding=False))
    exact.place("v100", (1,))
    exact.advance(60.05)
    assert exact.remaining() == pytest.approx(399.5)


def test_gavel_kinds_on_which_a_job_does_not_fit_are_left_out():
    offered = every_size([("v100", 2, 2), ("k80", 2, 2)])
    assert {(s.kind, s.num_devices) for s in gavel().goodput(offered)} == {("v100", 1), ("k80", 1)}
    two = gavel(num_devices=2)
    assert {(s.kind, s.num_devices) for s in two.goodput(offered)} == {("v100", 2)}
    assert two.isolated_s("k80", (1,)) == math.inf
    assert two.isolated_s("v100", (1,)) == pytest.approx(2 * 1000 / 15)
    with pytest.raises(ValueError, match="no kind of device has a throughput"):
        gavel(num_devices=8)
    with pytest.raises(ValueError, match="no number of steps"):
        gavel(num_steps=None)


def test_gavel_pairs_and_deadlines():
    job, other = gavel(slo=1.5), gavel()
    assert job.spec.deadline_s == pytest.approx(10 + 1.5 * 100)
    assert job.beside(other, "v100") is None
    partner = GavelTruth({**GAVEL, "v100": {**GAVEL["v100"], ("A3C", 1): {None: 5.0}}}).job(
        TraceJob(id="p", submit_s=0.0, application="A3C", num_steps=5), gavel_settings(), 1
    )
    assert job.beside(partner, "v100") == 0.6


def model_physics(noise=100.0):
    perf = PerfParams(
        compute_base=0.01,
        compute_per_sample=0.01,
        intra_base=0.02,
        intra_per_replica=0.001,
        inter_base=0.05,
        inter_per_replica=0.001,
        overlap=1.0,
    )
    limits = BatchLimits(base=32, max=1024, micro=(4, 64))
    app = ModelApplication(
        perf={"a": perf},
        limits=limits,
        first=GradParams(sqr=1.0, var=1.0),
        last=GradParams(sqr=1.0, var=noise),
        num_samples=1e5,
    )
    return ModelTruth({"m": app})


def test_model_jobs_take_the_time_that_the_model_says():
    trace = TraceJob(id="m", submit_s=0.0, application="m")
    job = model_physics().job(trace, Settings(**EXACT), 0)
    assert {g for g in job.goodput(SHAPES).values()} == {1.0}
    expected = job.isolated_s("a", (4,))
    job.place("a", (4,))
    first = job.goodput(SHAPES)
    job.advance(1.0)
    left = job.remaining()
    assert left is not None and left < 1e5 and job.goodput(SHAPES) != first
    assert job.next_stop(1e9) == pytest.approx(expected - 1.0)
    assert 1.0 + job.advance(1e9) == pytest.approx(expected) and job.done


def test_growing_noise_makes_large_shapes_worth_more():
    shape = {s.num_devices: s for s in SHAPES if s.kind == "a"}
    job = model_physics().job(
        TraceJob(id="m", submit_s=0.0, application="m"), Settings(growth=None), 0
    )
    job.place("a", (4, 4))
    job.advance(1.0)
    early = job.goodput(SHAPES)
    job.advance(0.95 * job.isolated_s("a", (4, 4)))
    late = job.goodput(SHAPES)
    assert late[shape[8]] / late[shape[1]] > 1.5 * early[shape[8]] / early[shape[1]]


def test_a_shape_that_the_limits_forbid_is_refused():
    job = model_physics().job(TraceJob(id="m", submit_s=0.0, application="m"), Settings(), 0)
    job.place("a", (300,))
    with pytest.raises(ValueError, match="allow no batch"):
        job.advance(1.0)


def test_tables_of_the_fixture_are_what_they_claim():
    assert steps("a", 1.0).times((2, 2), 16.0)[0] == pytest.approx(0.02 + 0.25 + sync_s(2, 4))
    assert application().base_batch == 16 and len(workload()) == 8
