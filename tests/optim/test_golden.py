"""Statistics, gains, progress and rules are AdaptDL's, by numbers that AdaptDL produced."""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgoodput.goodput.efficiency import GradParams, gain
from jaxgoodput.optim import adaptation, noise
from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.optim.adaptive import adaptive

LABELS = ["first", "second"]
SUGGESTED = 1e-9  # the README's tolerance; its Adam scenarios allow 1e-6


@pytest.fixture
def gns(golden):
    return json.loads((golden / "adaptdl" / "gns.json").read_text())


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.slow
def test_scenarios_replay(gns, float64):
    for scenario in gns["scenarios"]:
        replay(scenario, 1e-6 if scenario["optimizer"].startswith("Adam") else SUGGESTED)


@pytest.mark.slow
def test_float32_is_close(gns):
    for scenario in gns["scenarios"][::2]:
        replay(scenario, 2e-5)


def replay(scenario, rtol):
    base = 4  # any: only ratios count
    shapes = scenario["param_group_shapes"]
    params = [jnp.zeros(shape) for shape in shapes]
    is_adam = scenario["optimizer"].startswith("Adam")
    rule = rules.adam_scale if is_adam else rules.adascale
    tx: Any = adaptive(
        optax.scale_by_adam(b2=0.99) if is_adam else optax.sgd(0.1),
        rule,
        base_batch_size=base,
        smoothing=scenario["smoothing"],
        labels=LABELS,
        max_gain_growth=math.inf,
        num_std_errors=0.0,
        min_samples=0.0,
        keeps_fresh=False,
    )
    state, previous, progress = tx.init(params), None, 0.0
    rtol_of = {"rtol": rtol, "atol": 1e-12 if rtol <= 1e-6 else 1e-5}
    for index, step in enumerate(scenario["steps"]):
        note = f"{scenario['name']}, step {index}"
        given = step["grads"] or [[[[math.nan] * math.prod(s) for s in shapes]] * 2]
        groups = [
            [jnp.asarray(g, float).reshape(s) for g, s in zip(replica, shapes, strict=True)]
            for micro in given
            for replica in micro
        ]
        grads = jax.tree.map(lambda *rows: sum(rows) / len(rows), *groups)
        samples = step["total_scale"] * base
        scale = noise.preconditioner(state, params, b2=0.99) if is_adam else None
        if scale is not None:  # AdaptDL's norm is |P g|^2, ours g' P g
            scale = jax.tree.map(jnp.square, scale)
        biased = len(groups) == 1
        if not biased:
            sample = noise.NoiseSample(
                small_sqr=sum(noise.squared_norms(g, scale) for g in groups) / len(groups),
                large_sqr=noise.squared_norms(grads, scale),
                num_groups=len(groups),
                num_samples=samples,
            )
        elif previous is not None:
            sample = noise.differenced_sample(grads, previous, samples, scale)
        else:
            sample = None
        finite = bool(np.isfinite(np.concatenate([np.ravel(g) for g in grads])).all())
        assert finite != step["nan_step"], note
        before = state
        updates, state = tx.update(
            grads,
            state,
            params,
            global_batch_size=samples,
            noise=sample,
            biased=biased,
            finite=finite,
        )
        if not finite:
            # The samples of the batch have gone by, refused or not.
            now = adaptation.find(state)
            gone = dataclasses.replace(
                adaptation.find(before),
                base_batches=now.base_batches,
                base_batches_rest=now.base_batches_rest,
                unmeasured=now.unmeasured,
            )
            same = adaptation.with_own(before, lambda _, gone=gone: gone)
            jax.tree.map(np.testing.assert_array_equal, same, state)
        previous = grads if finite and biased else None

        expect, statistics = step["expect"], adaptation.noise_state(state)
        if finite:  # by the pooled moments; ours is by group
            progress += float(gain(noise.grad_params(statistics), step["total_scale"]))
        measured = {
            "sqr_avg_groups": statistics.current.sqr[:-1],
            "var_avg_groups": statistics.current.var[:-1],
            "sqr_avg": noise.grad_params(statistics).sqr,
            "var_avg": noise.grad_params(statistics).var,
            "progress": progress,
        }
        for name, value in measured.items():
            np.testing.assert_allclose(value, expect[name], **rtol_of, err_msg=f"{note}: {name}")
        for at, value in expect["gain"].items():
            got = gain(noise.grad_params(statistics), float(at))
            np.testing.assert_allclose(got, value, **rtol_of, err_msg=f"{note}: gain({at})")
        for at, values in expect["lr_factor_groups"].items():
            got = rule(jnp.asarray(float(at)), noise.grad_params(statistics, per_group=True), 0.0)
            np.testing.assert_allclose(got, values, **rtol_of, err_msg=f"{note}: factor({at})")
        if sample is not None:
            assert bool(statistics.biased) == expect["biased"], note
        for v, value in zip(
            getattr(state.inner, "nu", []), step.get("adam_exp_avg_sq_after", []), strict=True
        ):
            np.testing.assert_allclose(jnp.ravel(v), value, rtol=1e-5, err_msg=note)


def test_rules_match(gns, float64):
    of_name = {
        "AdaScale": rules.adascale,
        "AdamScale": rules.adam_scale,
        "LinearScale": rules.linear,
        "SqrtScale": rules.square_root,
    }
    for case in gns["scaling_rules"]:
        grad = GradParams(sqr=case.get("sqr", math.nan), var=case.get("var", math.nan))
        if case["rule"] == "LEGWScale":
            base_epoch = case["data_size"] / case["init_batch_size"]
            rule = rules.legw(case["base_warmup_epochs"] * base_epoch)
        else:
            rule = of_name[case["rule"]]
        factor = rule(case["scale"], grad, case.get("progress", 0.0))
        np.testing.assert_allclose(factor, case["lr_factor"], rtol=SUGGESTED, err_msg=str(case))
