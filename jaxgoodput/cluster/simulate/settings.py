"""The settings that a simulated cluster runs by: the published ones by default, realistic ones on request."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxgoodput.cluster.scheduler.policy import Mode
from jaxgoodput.cluster.simulate.conditions.faults import Faults
from jaxgoodput.cluster.simulate.conditions.inputs import Inputs
from jaxgoodput.cluster.simulate.conditions.restarts import RestartCosts, Seconds, of_application

# benchmarks/restart_cost.py: from the signal to the first step of the next process.
RESTART_BASE_S, RESTART_BYTES_PER_S = 2.2, 7.1e8


@dataclass(frozen=True)
class Pin:
    """An application that its user does not let adapt."""

    num_devices: int
    global_batch_size: int


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Nodes break, independently of each other, and come back."""

    mean_between_s: float
    """Seconds between two failures of one node, exponentially distributed."""
    repair_s: float = 1800.0
    checkpoint_s: float = 600.0
    """Seconds between checkpoints; work since the last one is lost."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a simulation assumes. The defaults are those of Pollux's simulator.

    Raises ValueError for times and shares that cannot be.
    """

    round_s: float | None = 60.0
    """How often the policy is asked; None = on events, with the two gaps."""
    min_gap_s: float = 5.0
    """The least time between two decisions."""
    max_gap_s: float = 60.0
    restart_s: Seconds = 30.0
    """What a change of allocation costs."""
    costs: RestartCosts | None = None
    """How that differs by kind of change, and what compiling and storage add; None = it does not."""
    told_restart_s: Seconds | None = None
    """What policies are told it costs; None = the truth."""
    learned_restarts: bool = False
    """Whether they are told what the job's own restarts took, as soon as it had some; as published: not."""
    mode: Mode = "adaptive"
    """How jobs run whose trace does not say."""
    pins: Mapping[str, Pin] = field(default_factory=dict)
    """Applications that do not adapt; rigid jobs have sizes of their own."""
    growth: float | None = 2.0
    """A job is offered at most this many times the largest size it has run on; None = any size."""
    max_devices: int = 64
    """The most devices of one job."""
    declared_progress: bool = False
    """Whether adaptive jobs say how much work is left."""
    rounding: bool = True
    """Whether, as published, epochs end at whole seconds, and Gavel's rounds at whole steps."""
    decide_at_start: bool = False
    """Whether, with rounds, the policy is asked at time 0 already, not only after the first one."""
    sharing: bool = False
    """Whether jobs may be packed onto the same devices."""
    slowdown: Mapping[str, float] = field(default_factory=dict)
    """What all progress is divided by, by application."""
    interference: float = 0.0
    """The share of their speed that jobs of several nodes lose where they meet on a node."""
    step_noise: float = 0.0
    """Standard deviation of the log of a measured time."""
    gradient_noise: float = 0.0
    """Standard deviation of the log of a measured moment of the gradient."""
    told_noise: float = 0.0
    """Standard deviation of the log of what each entry of a job's table is wrong by: a factor of its own for
    every job and shape, which never changes."""
    declared_errors: bool = False
    """Whether jobs say how large that is (`JobView.goodput_error`)."""
    observe_s: float = 5.0
    """Seconds, on events, from the start of a new size until it is measured."""
    failures: Failures | None = None
    faults: Faults | None = None
    """What else goes wrong with nodes, racks and jobs."""
    inputs: Inputs | None = None
    """The processors that prepare samples; None = no job waits for them."""
    usage_half_life_s: float = 6 * 3600.0
    """Of what a tenant had, in the eyes of policies that share over time."""
    seed: int = 0
    """What noise and failures are drawn from."""

    def __post_init__(self):
        positive = {"min_gap_s": self.min_gap_s, "max_gap_s": self.max_gap_s}
        positive["usage_half_life_s"] = self.usage_half_life_s
        positive |= {} if self.round_s is None else {"round_s": self.round_s}
        positive |= {} if self.growth is None else {"growth": self.growth}
        positive |= {f"slowdown[{k!r}]": v for k, v in self.slowdown.items()}
        if self.failures is not None:
            positive["failures.mean_between_s"] = self.failures.mean_between_s
            positive["failures.checkpoint_s"] = self.failures.checkpoint_s
        for name, value in positive.items():
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"Settings.{name} must be above 0 and finite, got {value}.")
        for name in ("step_noise", "gradient_noise", "told_noise", "observe_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"Settings.{name} must be at least 0, got {getattr(self, name)}.")
        if not 0 <= self.interference < 1:
            raise ValueError(
                f"Settings.interference must be a share of at least 0 and below 1, got "
                f"{self.interference}: at 1 jobs that meet would never finish."
            )
        if self.min_gap_s > self.max_gap_s:
            raise ValueError(
                f"Settings.min_gap_s={self.min_gap_s} is above max_gap_s={self.max_gap_s}; swap them."
            )

    def restart_of(self, application: str) -> float:
        """Seconds that a change of allocation costs a job of it."""
        return of_application(self.restart_s, application, "Settings.restart_s")

    def told_restart_of(self, application: str) -> float:
        """Seconds that policies believe it costs."""
        told = self.restart_s if self.told_restart_s is None else self.told_restart_s
        return of_application(told, application, "Settings.told_restart_s")


def pollux_settings(**changes) -> Settings:
    """Those of Pollux's simulator: rounds of 60 s, restarts of 30 s, NeuMF pinned to one device."""
    return Settings(**{"pins": {"ncf": Pin(1, 32768)}, **changes})


def sia_settings(**changes) -> Settings:
    """Those of Sia's simulator: restarts and slowdowns by application (artifact, aaf7a0d)."""
    applications = ("cifar10", "deepspeech2", "bert", "yolov3", "imagenet", "ncf")
    published = {
        "restart_s": dict(zip(applications, (50.0, 25.0, 120.0, 80.0, 250.0, 15.0), strict=True)),
        "told_restart_s": dict(
            zip(applications, (30.0, 25.0, 120.0, 45.0, 250.0, 30.0), strict=True)
        ),
        "slowdown": dict(zip(applications, (1.8, 1.2, 1.2, 1.2, 1.2, 1.5), strict=True)),
    }
    return Settings(**{**published, **changes})


def gavel_settings(**changes) -> Settings:
    """Those of Gavel's simulator: rounds of 360 s from time 0, rigid jobs, restarts that cost nothing."""
    published = {"round_s": 360.0, "restart_s": 0.0, "mode": "rigid", "decide_at_start": True}
    return Settings(**{**published, **changes})


def restart_by_state(
    state_bytes: Mapping[str, float],
    *,
    base_s: float = RESTART_BASE_S,
    bytes_per_s: float = RESTART_BYTES_PER_S,
) -> dict[str, float]:
    """Restart seconds by application: a fixed part, and its state written and read once.

    The defaults are those of this project's own trainer on the machine of BUILD_NOTES.md.

    >>> restart_by_state({"bert": 1.3e9}, base_s=3.0, bytes_per_s=1.3e9)
    {'bert': 5.0}
    """
    if not (base_s >= 0 and bytes_per_s > 0):
        raise ValueError(
            f"base_s={base_s} must be at least 0 and bytes_per_s={bytes_per_s} above 0; measure both."
        )
    return {name: base_s + 2.0 * size / bytes_per_s for name, size in state_bytes.items()}


def realistic(settings: Settings, **changes) -> Settings:
    """The same applications on events instead of rounds, with noise, interference and nodes that break.

    Noise, interference and failures are assumptions, not measurements; a node breaks about once in 30
    days. Restarts cost what the settings say; `restart_by_state` gives measured ones.
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
