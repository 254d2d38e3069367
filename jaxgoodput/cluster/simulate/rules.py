"""The settings of a simulation from texts: `--rules`, `--restart-s`, `--faults`, `--costs` and `--inputs`."""

import math
from collections.abc import Mapping
from dataclasses import replace

from jaxgoodput.cluster.simulate.conditions.faults import read_faults
from jaxgoodput.cluster.simulate.conditions.inputs import read_inputs
from jaxgoodput.cluster.simulate.conditions.restarts import RestartCosts, Storage
from jaxgoodput.cluster.simulate.generator import FAMILIES
from jaxgoodput.cluster.simulate.key_numbers import naming, read_numbers
from jaxgoodput.cluster.simulate.scenario import Origin
from jaxgoodput.cluster.simulate.settings import (
    RESTART_BASE_S,
    Settings,
    WorkLeft,
    gavel_settings,
    pollux_settings,
    realistic,
    restart_by_state,
    sia_settings,
)

SETTLED_GAP_S = 24 * 3600.0  # between decisions while all jobs of a recorded trace run
RULES = ("own", "pollux", "sia", "gavel", "events", "realistic")
# Bytes of parameters and optimizer state in 32 bits, from the public sizes of the artifacts' models, and
# from the generator for its families.
STATE_BYTES: Mapping[str, float] = {
    "cifar10": 9e7, "imagenet": 2.05e8, "yolov3": 5e8, "deepspeech2": 3e8, "bert": 1.3e9, "ncf": 3.8e8,
    **{name: family.state_bytes for name, family in FAMILIES.items()},
}  # fmt: skip


def read_costs(text: str) -> RestartCosts:
    """Return the restart costs of `WHAT=NUMBER,...`.

    `start`, `resume`, `move`, `shape` and `kind` are in units of the restart seconds, `compile` is in
    seconds, and `storage` is the bandwidth in GiB/s that restarting jobs share; checkpoints have the sizes
    of `STATE_BYTES`. Raises ValueError for any other text.

    >>> read_costs("resume=0.5,compile=60").resume
    0.5
    """
    known = ("start", "resume", "move", "shape", "kind", "compile", "storage")
    found = read_numbers("--costs", text, known=known, example="resume=0.5,compile=60,storage=2")
    storage = None
    compile_s = found.pop("compile", 0.0)
    with naming(f"--costs {text!r}"):
        if "storage" in found:
            bytes_per_s = found.pop("storage") * 2**30
            storage = Storage(bytes_per_s=bytes_per_s, state_bytes=STATE_BYTES)
        return RestartCosts(compile_s=compile_s, storage=storage, **found)


def read_settings(
    name: str,
    origin: Origin,
    *,
    restart_s: float | None = None,
    seed: int = 0,
    work_left: WorkLeft = "published",
    faults: str | None = None,
    costs: str | None = None,
    inputs: str | None = None,
) -> Settings:
    """Return the settings that one of `RULES` names, for a workload of that origin.

    "own": the published settings of the workload's artifact; "events" for synthetic jobs and recorded ones.
    "pollux", "sia", "gavel": the published settings of that artifact.
    "events": the same applications, but decisions follow arrivals and ends, and jobs may be offered any size.
    "realistic": "events" with noisy measurements, interference and failing nodes. Restarts cost what writing
      and reading the state was measured to cost; Gavel's jobs need `restart_s`, as their states are unknown.

    `restart_s` replaces the seconds of a restart. `faults`, `costs` and `inputs` are texts for `read_faults`,
    `read_costs` and `read_inputs`. Raises ValueError for impossible combinations.
    """
    settings = _rules(name, origin)
    is_measured = name == "realistic" and restart_s is None
    if is_measured or restart_s is not None:
        seconds = _measured_restart_s(origin) if restart_s is None else _checked(restart_s)
        settings = replace(settings, restart_s=seconds, told_restart_s=None)
    if faults is not None:
        settings = replace(settings, faults=read_faults(faults))
    if inputs is not None:
        settings = replace(settings, inputs=read_inputs(inputs))
    if costs is not None:
        settings = replace(settings, costs=read_costs(costs))
        if is_measured and settings.costs is not None and settings.costs.storage is not None:
            # The storage accounts for writing and reading; what remains is the start of a process.
            told = settings.restart_s
            settings = replace(settings, restart_s=RESTART_BASE_S, told_restart_s=told)
    return replace(settings, seed=seed, work_left=work_left)


def _checked(restart_s: float) -> float:
    if not (restart_s >= 0 and math.isfinite(restart_s)):
        raise ValueError(f"--restart-s {restart_s}: must be at least 0 seconds, and finite.")
    return restart_s


def _measured_restart_s(origin: Origin) -> dict[str, float]:
    if origin in ("gavel", "recorded"):
        whose = "Gavel's jobs" if origin == "gavel" else "the jobs of a trace"
        raise ValueError(
            f"--rules realistic: the states of {whose} are unknown, and so is the cost of their restarts. "
            "Add --restart-s SECONDS."
        )
    return restart_by_state(STATE_BYTES)


def _rules(name: str, origin: Origin) -> Settings:
    published = {"pollux": pollux_settings(), "sia": sia_settings(), "gavel": gavel_settings()}
    own = published.get(origin, Settings())
    if name == "own":
        name = "events" if origin in ("synthetic", "recorded") else origin
    if name == "events":
        settings = replace(own, round_s=None, growth=None, rounding=False)
    elif name == "realistic":
        settings = realistic(own)
    elif name in published:
        settings = published[name]
    else:
        raise ValueError(f"--rules {name!r}: expected one of {', '.join(RULES)}.")
    if origin in ("synthetic", "recorded"):
        # The artifacts' numbers by application do not cover these jobs.
        settings = replace(settings, restart_s=30.0, told_restart_s=None, slowdown={}, pins={})
    if origin == "recorded":
        # The first start is part of the duration that was recorded.
        costs = RestartCosts(start=0.0)
        settings = replace(settings, costs=costs, settled_gap_s=SETTLED_GAP_S)
    return settings
