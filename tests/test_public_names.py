"""The promised names: exactly these, each documented, each importable from where it says."""

import importlib
import inspect

import pytest

import jaxgoodput

PROMISED = {
    "BatchConfig",
    "BatchLimits",
    "Config",
    "Cursor",
    "Diverged",
    "Engine",
    "Every",
    "GoodputModel",
    "GradParams",
    "Hook",
    "Layout",
    "Loader",
    "Loss",
    "NoiseSample",
    "PerfFit",
    "PerfParams",
    "Placement",
    "Preempted",
    "Source",
    "StepTimings",
    "Strategy",
    "TrainState",
    "Trainer",
    "Variables",
    "adaptive",
    "best_batch",
    "candidates",
    "fit_perf_params",
    "from_linen",
    "from_nnx",
    "goodput_table",
    "initialize",
    "noise_scale",
    "rules",
    "value_grad_and_noise",
    "with_overrides",
}


def test_the_package_promises_exactly_these_names():
    public = {
        name
        for name, value in vars(jaxgoodput).items()
        if not name.startswith("_") and (not inspect.ismodule(value) or name == "rules")
    }
    assert public == PROMISED


def test_every_promised_name_says_what_it_is():
    for name in PROMISED:
        assert (inspect.getdoc(getattr(jaxgoodput, name)) or "").strip(), f"{name} has no docstring"


@pytest.mark.parametrize("room", ["scheduler", "simulate"])
def test_a_room_promises_exactly_its_names_and_each_says_what_it_is(room):
    module = importlib.import_module(f"jaxgoodput.{room}")
    public = {name for name, value in vars(module).items() if not inspect.ismodule(value)}
    assert {name for name in public if not name.startswith("_")} == set(module.__all__)
    for name in module.__all__:
        assert (inspect.getdoc(getattr(module, name)) or "").strip(), f"{name} has no docstring"
