"""Settings that cannot work are refused by name; overrides reach every field and keep its type."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput._serial import encode
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.train.config import Config, with_overrides

LIMITS = BatchLimits(base=32, max=1024, micro=(4, 128))


def config(**settings):
    return Config(**{"workdir": "work", "batch": LIMITS, "base_steps": 100.0, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_steps": None}, "exactly one of base_steps and epochs"),
        ({"epochs": 3}, "exactly one of base_steps and epochs.*100.0, epochs=3"),
        ({"base_steps": 0.0}, "base_steps must be positive; got 0.0"),
        ({"base_steps": float("nan")}, "base_steps must be positive; got nan"),
        ({"base_steps": None, "epochs": 0}, "epochs must be positive; got 0"),
        ({"policy": "greedy"}, "policy must be one of .'goodput', 'fixed'.; got 'greedy'"),
        ({"tune_every_steps": 0}, "tune_every_steps must be positive; got 0"),
        ({"keep_checkpoints": 0}, "keep_checkpoints must be positive"),
        ({"statistics_every": -1}, "statistics_every must be positive; got -1"),
        ({"memory_bytes": 0}, "memory_bytes must be positive; got 0"),
        ({"eval_micro_batch_size": 0}, "eval_micro_batch_size must be positive"),
        ({"min_gain": -0.1}, "min_gain must be at least 0; got -0.1"),
        ({"dwell_steps": -1}, "dwell_steps must be at least 0"),
        ({"prefetch": -2}, "prefetch must be at least 0; got -2"),
        ({"max_growth": 1.0}, 'max_growth is a factor above 1; got 1.0.*policy="fixed"'),
        ({"max_growth": float("nan")}, "max_growth is a factor above 1; got nan"),
        ({"smoothing": 1.0}, r"smoothing must lie in \[0, 1\); got 1.0"),
        ({"memory_margin": 1.0}, r"memory_margin must lie in \[0, 1\)"),
        ({"fixed_tolerance": -0.1}, r"fixed_tolerance must lie in \[0, 1\); got -0.1"),
        ({"compute_dtype": "bfloat17"}, "compute_dtype must name a floating type.*'bfloat17'"),
        ({"compute_dtype": "int8"}, "compute_dtype must name a floating type.*'int8'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_setting_that_cannot_work_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_every_default_works():
    assert config().policy == "goodput" and config(compute_dtype="bfloat16").prefetch == 2


# -- overrides ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("seed=7", "seed", 7),
        ("min_gain=0.2", "min_gain", 0.2),
        ("tune_every_s=3", "tune_every_s", 3.0),  # a whole number is a number
        ("policy=fixed", "policy", "fixed"),
        ('policy="fixed"', "policy", "fixed"),
        ("accumulate=false", "accumulate", False),
        ("memory_bytes=null", "memory_bytes", None),
        ("memory_bytes=1000000", "memory_bytes", 1000000),
        ("compute_dtype=bfloat16", "compute_dtype", "bfloat16"),
        ("compilation_cache=null", "compilation_cache", None),
        ("workdir=20260101", "workdir", "20260101"),  # a name may look like a number
        ("workdir=runs/a=b", "workdir", "runs/a=b"),
        ("workdir=", "workdir", ""),
    ],
)
def test_an_override_changes_one_field(override, field, value):
    changed = with_overrides(config(), [override])
    assert getattr(changed, field) == value
    assert type(getattr(changed, field)) is type(value)
    assert dataclasses.replace(changed, **{field: getattr(config(), field)}) == config()


def test_overrides_reach_into_the_limits_in_order():
    changed = with_overrides(
        config(),
        [
            "batch.max=512",
            "batch.micro=[8, 64]",
            "batch.sizes=[8, 16, 64]",
            "batch.max=256",
            "seed=1",
        ],
    )
    assert changed.batch == BatchLimits(base=32, max=256, micro=(8, 64), sizes=(8, 16, 64))
    assert changed.seed == 1 and config().batch == LIMITS


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "an override is name=value; got 'seed'"),
        ("sead=1", "no setting 'sead': Config has .*seed"),
        ("batch.biggest=1", "no setting 'batch.biggest': BatchLimits has .*max"),
        ("seed.low=1", "no setting 'seed.low': int has none"),
        ("seed=1.5", "seed is of type int; got '1.5'"),
        ("seed=true", "seed is of type int; got 'true'"),
        ("min_gain=low", "min_gain is of type float; got 'low'"),
        ("min_gain=[1]", "min_gain is of type float"),
        ("accumulate=1", "accumulate is of type bool; got '1'"),
        ("seed=null", "seed is of type int; got 'null'"),
        ("rule=linear", "rule is of type .*; got 'linear'"),
        ("batch.micro=[8]", r"batch.micro is of type tuple\[int, int\]"),
        ('batch.micro=[8, "many"]', "batch.micro is of type tuple"),
        ("batch.sizes=[1.5]", "batch.sizes is of type tuple"),
        ("batch.max=8", "BatchLimits.max=8 is below base=32"),
        ("policy=greedy", "policy must be one of"),
    ],
)
def test_an_override_that_cannot_work_is_refused_by_name(override, message):
    with pytest.raises(ValueError, match=message):
        with_overrides(config(), [override])


@given(
    seed=st.integers(-(10**9), 10**9),
    gain=st.floats(0, 100),
    steps=st.floats(0, exclude_min=True, allow_infinity=False),
)
def test_what_was_written_as_json_can_be_given_as_overrides(seed, gain, steps):
    wanted = config(seed=seed, min_gain=gain, base_steps=steps, memory_bytes=10**9)
    written = encode(wanted)
    overrides = [f"{k}={json.dumps(v)}" for k, v in written.items() if k not in ("batch", "rule")]
    overrides += [f"batch.{k}={json.dumps(v)}" for k, v in written["batch"].items()]
    assert with_overrides(config(), overrides) == wanted


def test_json_names_functions():
    written = encode(config(rule=rules.linear))
    assert written["rule"] == "linear" and written["batch"]["micro"] == [4, 128]
    assert json.loads(json.dumps(written)) == written
    assert set(written) == {f.name for f in dataclasses.fields(Config)}
