"""Settings that cannot work are refused by name; overrides reach every field and keep its type."""

import dataclasses
import datetime
import enum
import json
import math
import operator
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput._fields.serial import encode
from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.optim import learning_rate as rules
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.config import (
    Config,
    Evaluation,
    Execution,
    Reporting,
    Saving,
    Statistics,
    Tuning,
    with_overrides,
)

LIMITS = BatchLimits(base=32, max=1024, micro=(4, 128))


def of(cls, *values, **fields) -> Any:
    """A dataclass of values that its types forbid."""
    return cls(*values, **fields)


def config(*overrides, **settings):
    made = Config(**{"workdir": "work", "batch": LIMITS, "base_steps": 100.0, **settings})
    return with_overrides(made, overrides)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: config(base_steps=None), "exactly one of base_steps and epochs"),
        (lambda: config(epochs=3), "exactly one of base_steps and epochs.*100.0, epochs=3"),
        (lambda: config(base_steps=0.0), "Config.base_steps must be a number above 0.*got 0.0"),
        (
            lambda: config(base_steps=float("nan")),
            "Config.base_steps must be a number above 0.*got nan",
        ),
        (lambda: config(base_steps=None, epochs=0), "Config.epochs must be .* at least 1.*got 0"),
        (
            lambda: config(policy="greedy"),
            "policy must be .goodput. or .fixed. or a mapping .*; got 'greedy'. A schedule",
        ),
        (
            lambda: config(max_skipped_in_a_row=0),
            "Config.max_skipped_in_a_row must be .* of at least 1",
        ),
        (lambda: config(compute_dtype="bfloat17"), "must name a floating type.*'bfloat17'"),
        (lambda: config(compute_dtype="int8"), "compute_dtype must name a floating type.*'int8'"),
        (lambda: Tuning(every_steps=0), "Tuning.every_steps must be .* of at least 1; got 0"),
        (lambda: Tuning(min_gain=-0.1), "Tuning.min_gain must be a number of at least 0; got -0.1"),
        (lambda: Tuning(dwell_steps=-1), "Tuning.dwell_steps must be .* of at least 0"),
        (
            lambda: Tuning(max_growth=1.0),
            'max_growth must be a number above 1; got 1.0.*policy="fixed"',
        ),
        (lambda: Tuning(max_growth=float("nan")), "max_growth must be a number above 1; got nan"),
        (
            lambda: Tuning(fixed_tolerance=-0.1),
            "fixed_tolerance must be .* from 0 to below 1.*got -0.1",
        ),
        (
            lambda: Statistics(every_steps=-1),
            "Statistics.every_steps must be .* at least 1.*got -1",
        ),
        (lambda: Statistics(smoothing=1.0), "smoothing must be .* from 0 to below 1"),
        (lambda: Execution(memory_bytes=0), "Execution.memory_bytes must be .* at least 1.*got 0"),
        (
            lambda: Execution(memory_margin=1.0),
            "Execution.memory_margin must be .* from 0 to below 1",
        ),
        (lambda: Execution(prefetch=-2), "Execution.prefetch must be .* of at least 0; got -2"),
        (
            lambda: Evaluation(micro_batch_size=0),
            "Evaluation.micro_batch_size must be .* of at least 1",
        ),
        (lambda: Saving(keep=0), "Saving.keep must be .* of at least 1"),
        (lambda: Saving(every_base_steps=0.0), "Saving.every_base_steps must be a number above 0"),
        (lambda: config("saving.best=loss"), "best='loss' needs evaluations.*every_base_steps"),
        (
            lambda: config(workdir="az://bucket/run"),
            "must be a folder of a mounted.*gs://BUCKET/PATH or s3.*'az://bucket/r",
        ),
        (lambda: config(workdir="gs://B/run"), "gs://BUCKET/PATH or s3.*'gs://B/run'"),
        (lambda: config(workdir="~/run"), "must be a folder of a mounted.*'~/run'.*expanduser"),
        (lambda: config(workdir="C:\\run"), "must be a folder of a mounted file system"),
        (
            lambda: Reporting(window_s=0.0),
            "Reporting.window_s must be a number of seconds, above 0; got 0.0",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("batch", 64, "Config.batch must be of type BatchLimits; got 64. Write batch=BatchLimits"),
        ("last_batch", "pad", "last_batch must be .smaller. or .drop.; got 'pad'"),
        ("epochs", 1.5, "Config.epochs must be a whole number .*; got 1.5. Use base_steps to end"),
        ("loss", "all", "loss must be .auto. or .*; got 'all'"),
        ("loss", None, "loss must be .auto. or .*; got None"),
        ("seed", math.nan, "Config.seed must be .* of at least 0; got nan"),
        ("tuning", "x", "Config.tuning must be of type Tuning; got 'x'"),
        ("workdir", False, "Config.workdir must be a string; got False"),
        ("policy", "goodpt", "got 'goodpt'. Did you mean .goodput"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name, value, message):
    length = {"base_steps": None, "epochs": 1}
    with pytest.raises(ValueError, match=message):
        config(**{**length, name: value})


@pytest.mark.parametrize(
    ("make", "meant"),
    [
        (lambda: of(Saving, every_s="10m"), "Write 600."),
        (lambda: of(Saving, every_s=datetime.timedelta(minutes=3)), "Write 180.0."),
        (lambda: config(base_steps="1e-3"), "Write 0.001."),
        (lambda: config(base_steps=np.array(3.0)), "Write 3.0."),
        (lambda: of(Execution, memory_bytes="16GiB"), "Write 17179869184."),
        (lambda: of(Statistics, smoothing="5%"), "Write 0.05."),
        (lambda: config(shuffle="no"), "Write False."),
        (lambda: config(ema="none"), "Write None."),
        (lambda: config(seed=True), "A bool is not a number."),
        (lambda: config(compute_dtype=np.float32), "Write 'float32'."),
        (lambda: config(strategies=Strategy(fsdp=8)), r"Write \(Strategy"),
        (lambda: config(rule="linear"), "such as jg.rules.linear"),
        (lambda: of(Strategy, data="2"), "Write 2."),
        (lambda: of(BatchLimits, base=32, max=64, micro=8), r"such as \(8, 64\)"),
    ],
)
def test_an_error_says_what_was_probably_meant(make, meant):
    with pytest.raises(ValueError, match=meant):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: config(sead=1), "Config has no field 'sead'; did you mean seed"),
        (
            lambda: config(min_gain=1),
            "Config has no field 'min_gain'; did you mean tuning.min_gain",
        ),
        (lambda: of(Tuning, colour=1), "Tuning has no field 'colour'. There are min_gain, "),
        (lambda: of(Strategy, 2), r"takes its settings by name; got 2. Write Strategy\(data=...\)"),
    ],
)
def test_a_field_that_does_not_exist_is_named_with_the_nearest(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_numbers_of_other_kinds_become_the_declared_ones():
    made = config(base_steps=6, seed=np.int64(3), shuffle=np.bool_(0), ema=np.float32(0.5))
    assert [type(x) for x in (made.base_steps, made.seed, made.shuffle, made.ema)] == [
        float,
        int,
        bool,
        float,
    ]
    assert made == config(base_steps=6.0, seed=3, shuffle=False, ema=0.5)
    assert config(workdir=pathlib.Path("work")) == config()
    assert config(strategies=[Strategy()]).strategies == (Strategy(),)


def test_every_default_works():
    assert config().policy == "goodput"
    assert config(compute_dtype="bfloat16").execution.prefetch == 2


# -- overrides ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("seed=7", 7),
        ("tuning.min_gain=0.2", 0.2),
        ("tuning.every_s=3", 3.0),  # a whole number is a number
        ("policy=fixed", "fixed"),
        ('policy="fixed"', "fixed"),
        ("tuning.accumulate=false", False),
        ("tuning.accumulate=False", False),  # as Python writes it
        ("execution.memory_bytes=None", None),
        ("execution.memory_bytes=null", None),
        ("execution.memory_bytes=1000000", 1000000),
        ("compute_dtype=bfloat16", "bfloat16"),
        ("execution.compilation_cache=null", None),
        ("workdir=20260101", "20260101"),  # a name may look like a number
        ("workdir=runs/a=b", "runs/a=b"),
        ("workdir=", ""),
        ('strategies=[{"fsdp": 8}]', (Strategy(fsdp=8),)),
        ('saving={"keep": 9}', Saving(keep=9)),
    ],
)
def test_an_override_changes_one_field(override, value):
    changed, name = config(override), override.partition("=")[0]
    field = operator.attrgetter(name)
    assert field(changed) == value and type(field(changed)) is type(value)
    written, usual = flat(changed), flat(config())
    assert {k for k in usual if written[k] != usual[k]} <= {k for k in usual if k.startswith(name)}


def test_values_that_are_as_good_as_python_s_own_are_taken():
    class Policy(enum.StrEnum):
        FIXED = "fixed"

    policy: Any = Policy.FIXED
    assert type(dataclasses.replace(config(), policy=policy).policy) is str
    limits = of(BatchLimits, base=8, max=64, sizes=range(8, 12), micro=np.array([8, 16]))
    assert (limits.sizes, limits.micro) == ((8, 9, 10, 11), (8, 16))


def flat(settings):
    """Settings by their whole names."""
    found = {}
    for name, value in encode(settings).items():
        inner = value if isinstance(value, dict) else None
        found |= {name: value} if inner is None else {f"{name}.{k}": v for k, v in inner.items()}
    return found


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
        ("seed", "an override is name=value, such as tuning.min_gain=0.1; got 'seed'"),
        ("sead=1", "no setting 'sead'; did you mean seed"),
        ("colour=1", "no setting 'colour'. There are workdir, batch, batch.base, .*saving.keep"),
        ("batch.mox=1", "no setting 'batch.mox'; did you mean batch.max"),
        ("min_gain=0.1", "no setting 'min_gain'; did you mean tuning.min_gain.$"),
        ("save_at_end=false", "no setting 'save_at_end'; did you mean saving.at_end"),
        ("tune_every_s=1", "no setting 'tune_every_s'; did you mean tuning.every_s"),
        ("saving.min_gain=0.1", "no setting 'saving.min_gain'; did you mean tuning.min_gain"),
        ("seed.low=1", "no setting 'seed.low'"),
        ("seed=1.5", "seed must be .* of at least 0; got 1.5"),
        ("seed=true", "seed must be .* of at least 0; got True"),
        ("seed=null", "seed must be .* of at least 0; got None"),
        ("tuning.min_gain=low", "tuning.min_gain must be a number of at least 0; got 'low'"),
        ("tuning.min_gain=[1]", "tuning.min_gain is .1.; it must be a number"),
        ("tuning.accumulate=1", "tuning.accumulate must be True or False; got 1. Write True"),
        ("rule=linear", "rule must be a function, or None; got 'linear'. Pass a function"),
        ("batch.micro=[8]", "batch.micro is .8.; it must be a list of 2"),
        ('batch.micro=[8, "many"]', "batch.micro.1. is 'many'; it must be a whole number"),
        ("batch.sizes=[1.5]", "batch.sizes.0. is 1.5; it must be a whole number"),
        ("batch.max=8", "BatchLimits.max=8 is below base=32"),
        ("tuning.min_gain=-1", "tuning.min_gain must be a number of at least 0; got -1"),
        ("saving=3", "saving must be of type Saving; got 3"),
        ("policy=greedy", "policy must be .goodput. or .fixed. or a mapping"),
        (
            "tuning.every_s=10m",
            "tuning.every_s must be a number of seconds, .*; got '10m'. Write 600",
        ),
    ],
)
def test_an_override_that_cannot_work_is_refused_by_name(override, message):
    with pytest.raises(ValueError, match=message):
        with_overrides(config(), [override])


@pytest.mark.slow
@given(
    seed=st.integers(0, 10**9),
    gain=st.floats(0, 100),
    steps=st.floats(0, exclude_min=True, allow_infinity=False),
)
def test_what_was_written_as_json_can_be_given_as_overrides(seed, gain, steps):
    tuning, execution = Tuning(min_gain=gain), Execution(memory_bytes=10**9)
    wanted = config(seed=seed, base_steps=steps, tuning=tuning, execution=execution)
    overrides = [f"{name}={json.dumps(value)}" for name, value in flat(wanted).items()]
    assert with_overrides(config(), overrides) == wanted


def test_json_names_functions():
    written = encode(config(rule=rules.linear))
    assert written["rule"] == "linear" and written["batch"]["micro"] == [4, 128]
    assert json.loads(json.dumps(written)) == written
    assert set(written) == {f.name for f in dataclasses.fields(Config)}
