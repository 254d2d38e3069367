"""The assumptions of a simulation: published ones by default, realistic ones on request."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from jaxgoodput.cluster.scheduler.policy import Mode
from jaxgoodput.cluster.simulate.conditions.faults import Faults
from jaxgoodput.cluster.simulate.conditions.inputs import Inputs
from jaxgoodput.cluster.simulate.conditions.restarts import RestartCosts, Seconds, of_application
from jaxgoodput.cluster.simulate.key_numbers import check_above_zero

# benchmarks/restart_cost.py: from the signal to the first step of the next process.
RESTART_BASE_S, RESTART_BYTES_PER_S = 2.2, 7.1e8


WorkLeft = Literal["published", "nothing", "history", "told"]


@dataclass(frozen=True)
class Pin:
    """The fixed devices and batch of an application that does not adapt."""

    num_devices: int
    global_batch_size: int


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Independent failures of nodes, which are repaired after a fixed time."""

    mean_between_s: float
    """Mean seconds between two failures of one node, exponentially distributed."""
    repair_s: float = 1800.0
    """Seconds that a failed node is out of service."""
    checkpoint_s: float = 600.0
    """Seconds between checkpoints of a job; a failure loses the work since the last one."""

    def __post_init__(self):
        check_above_zero("Failures", self, "mean_between_s", "checkpoint_s")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The assumptions of a simulation. The defaults are those in Pollux's simulator.

    Raises ValueError for impossible times and shares.
    """

    round_s: float | None = 60.0
    """Seconds of a round, after which the policy is asked. None: it is asked on events, with the two gaps."""
    min_gap_s: float = 5.0
    """Least seconds between two decisions."""
    max_gap_s: float = 60.0
    """Most seconds between two decisions."""
    settled_gap_s: float | None = None
    """Most seconds between two decisions, on events, while every job runs and none may change its number of
    devices; an end of a job then calls for none either. None: `max_gap_s`."""
    restart_s: Seconds = 30.0
    """Seconds of a restart, for all applications or by application."""
    costs: RestartCosts | None = None
    """Costs by kind of change, and of compilation and storage. None: all changes cost `restart_s`."""
    told_restart_s: Seconds | None = None
    """Seconds of a restart that policies are told. None: the true ones."""
    learned_restarts: bool = False
    """Whether policies are told what a job's own restarts took, once it had some."""
    mode: Mode = "adaptive"
    """Mode of jobs whose trace gives none."""
    pins: Mapping[str, Pin] = field(default_factory=dict)
    """Applications that do not adapt, unless their job is rigid."""
    growth: float | None = 2.0
    """A job is offered at most this many times the largest size that it has run on. None: any size."""
    max_devices: int = 64
    """Most devices of one job."""
    work_left: WorkLeft = "published"
    """What every policy knows of the work that jobs have left. "nothing": only for jobs with a deadline.
    "history": what the service guesses from jobs that have ended (`JobView.work_guess`). "told": all of it.
    "published": what the published simulator of the workload tells, and nothing if there is none."""
    rounding: bool = True
    """Whether epochs end at whole seconds, and Gavel's rounds at whole steps, as published."""
    decide_at_start: bool = False
    """Whether, with rounds, the policy is also asked at time 0."""
    sharing: bool = False
    """Whether several jobs may share the same devices."""
    slowdown: Mapping[str, float] = field(default_factory=dict)
    """Factor that all progress is divided by, by application."""
    interference: float = 0.0
    """Share of their speed that jobs on several nodes lose if they meet on a node."""
    step_noise: float = 0.0
    """Standard deviation of the log of a measured time."""
    gradient_noise: float = 0.0
    """Standard deviation of the log of a measured gradient moment."""
    told_noise: float = 0.0
    """Standard deviation of the log of the error in what policies are told (see `conditions.told`)."""
    declared_errors: bool = False
    """Whether jobs declare `told_noise` to the policy (`JobView.goodput_error`)."""
    observe_s: float = 5.0
    """Seconds, on events, from the start on a new size until it has been measured."""
    failures: Failures | None = None
    """Simple failures of nodes; `faults` is more detailed."""
    faults: Faults | None = None
    """Faults of nodes, racks and jobs."""
    inputs: Inputs | None = None
    """Processors that prepare samples. None: no job waits for its input."""
    usage_half_life_s: float = 6 * 3600.0
    """Seconds after which what a tenant had counts half as much, for policies that share over time."""
    seed: int = 0
    """Seed of noise and failures."""

    def __post_init__(self):
        check_above_zero("Settings", self, "min_gap_s", "max_gap_s", "usage_half_life_s")
        optional = [name for name in ("round_s", "growth") if getattr(self, name) is not None]
        check_above_zero("Settings", self, *optional)
        for application, factor in self.slowdown.items():
            if not (factor > 0 and math.isfinite(factor)):
                raise ValueError(
                    f"Settings.slowdown[{application!r}] must be above 0 and finite, got {factor}. "
                    "1 = not slower."
                )
        for name in ("step_noise", "gradient_noise", "told_noise", "observe_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"Settings.{name} must be at least 0, got {getattr(self, name)}. 0 = none."
                )
        if not 0 <= self.interference < 1:
            raise ValueError(
                f"Settings.interference must be a share of at least 0 and below 1, got "
                f"{self.interference}: at 1, jobs that meet on a node would never finish."
            )
        if self.work_left not in get_args(WorkLeft):
            raise ValueError(
                f"Settings.work_left must be one of {', '.join(get_args(WorkLeft))}; got {self.work_left!r}."
            )
        if self.min_gap_s > self.max_gap_s:
            raise ValueError(
                f"Settings.min_gap_s={self.min_gap_s} is above max_gap_s={self.max_gap_s}; swap them."
            )

    def restart_of(self, application: str) -> float:
        """Return the seconds that a restart of an application really takes."""
        return of_application(self.restart_s, application, "Settings.restart_s")

    def told_restart_of(self, application: str) -> float:
        """Return the seconds that policies are told a restart of an application takes."""
        told = self.restart_s if self.told_restart_s is None else self.told_restart_s
        return of_application(told, application, "Settings.told_restart_s")


def pollux_settings(**changes) -> Settings:
    """Return the settings of Pollux's simulator: rounds of 60 s, restarts of 30 s, NeuMF on one device."""
    return Settings(**{"pins": {"ncf": Pin(1, 32768)}, **changes})


def sia_settings(**changes) -> Settings:
    """Return the settings of Sia's simulator: restarts and slowdowns by application (artifact, aaf7a0d)."""
    applications = ("cifar10", "deepspeech2", "bert", "yolov3", "imagenet", "ncf")
    published = {
        "restart_s": (50.0, 25.0, 120.0, 80.0, 250.0, 15.0),
        "told_restart_s": (30.0, 25.0, 120.0, 45.0, 250.0, 30.0),
        "slowdown": (1.8, 1.2, 1.2, 1.2, 1.2, 1.5),
    }
    by_name = {k: dict(zip(applications, v, strict=True)) for k, v in published.items()}
    return Settings(**{**by_name, **changes})


def gavel_settings(**changes) -> Settings:
    """Return the settings of Gavel's simulator: rounds of 360 s from time 0, rigid jobs, free restarts."""
    published = {"round_s": 360.0, "restart_s": 0.0, "mode": "rigid", "decide_at_start": True}
    return Settings(**{**published, **changes})


def restart_by_state(
    state_bytes: Mapping[str, float],
    *,
    base_s: float = RESTART_BASE_S,
    bytes_per_s: float = RESTART_BYTES_PER_S,
) -> dict[str, float]:
    """Return restart seconds by application: a fixed part, and writing and reading its state once.

    The defaults were measured with this project's own trainer (`benchmarks/restart_cost.py`).

    >>> restart_by_state({"bert": 1.3e9}, base_s=3.0, bytes_per_s=1.3e9)
    {'bert': 5.0}
    """
    if not (base_s >= 0 and bytes_per_s > 0):
        raise ValueError(
            f"base_s={base_s} must be at least 0 and bytes_per_s={bytes_per_s} above 0; measure both."
        )
    return {name: base_s + 2.0 * size / bytes_per_s for name, size in state_bytes.items()}


def realistic(settings: Settings, **changes) -> Settings:
    """Return the settings on events instead of rounds, with noise, interference and failing nodes.

    Noise, interference and failures are assumptions, not measurements; a node fails about once in 30 days.
    Restarts stay as they are; `restart_by_state` gives measured ones.
    """
    assumed = {
        "round_s": None,
        "growth": None,
        "rounding": False,
        "step_noise": 0.05,
        "gradient_noise": 0.1,
        "interference": 0.1,
        "failures": Failures(mean_between_s=30 * 24 * 3600.0),
        "learned_restarts": True,
    }
    return replace(settings, **{**assumed, **changes})
