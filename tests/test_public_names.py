"""The promised names: exactly these, each documented, each importable from where it says."""

import inspect

import jaxgoodput

PROMISED = {
    "BatchConfig",
    "BatchLimits",
    "Config",
    "Cursor",
    "Diverged",
    "Engine",
    "Evaluation",
    "Every",
    "Execution",
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
    "Reporting",
    "Saving",
    "Source",
    "Statistics",
    "StepTimings",
    "Strategy",
    "TrainState",
    "Trainer",
    "Tuning",
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
