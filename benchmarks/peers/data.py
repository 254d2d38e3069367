"""What all frameworks share: settings of the workloads, shapes and spreads of initial parameters, data files.

Needs numpy alone, so that it runs in every environment. `run.py` writes the files.
"""

import dataclasses
import pathlib
from typing import Any

import numpy as np

PLACES, WIDTH, LAYERS, HEADS = 64, 96, 2, 4  # of the byte LM
TABLES, DIM = 8, 16  # of the recommender
PAIRS = TABLES * (TABLES - 1) // 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One model and data set; every framework trains it with these."""

    base: int
    """The batch that an adaptive run begins with, and that the learning rate is for."""
    max: int
    """The largest one it may use."""
    grid: tuple[int, ...]
    """Fixed batches of the plain loops, with the rate times the root of batch / base."""
    learning_rate: float
    target: float
    is_higher_better: bool
    every: int
    """Samples between two evaluations."""
    most: int
    """Samples after which a run that has not met the target ends."""
    turn: int
    """Updates of a timed turn."""

    def rate(self, batch: int) -> float:
        """The learning rate of a fixed batch."""
        return self.learning_rate * (batch / self.base) ** 0.5

    def is_met(self, value: float) -> bool:
        """Whether a value of the metric meets the target."""
        return value >= self.target if self.is_higher_better else value <= self.target


WORKLOADS = {
    "digits": Workload(
        base=32,
        max=512,
        grid=(16, 32, 64, 128),
        learning_rate=0.05,
        target=0.98,
        is_higher_better=True,
        every=512,
        most=60_000,
        turn=60,
    ),
    "recommender": Workload(
        base=512,
        max=16384,
        grid=(512, 2048, 8192),
        learning_rate=0.05,
        target=0.86,  # of the 0.92 of examples/recommender.py: 0.6 instead of 1.5 M samples
        is_higher_better=True,
        every=65_536,
        most=4_000_000,
        turn=20,
    ),
    "lm": Workload(
        base=16,
        max=64,
        grid=(8, 16, 32),
        learning_rate=2e-3,
        target=2.9,
        is_higher_better=False,
        every=512,
        most=40_000,
        turn=20,
    ),
}


def load(folder: str, name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Training and test columns of a workload."""
    with np.load(pathlib.Path(folder) / f"{name}.npz") as arrays:
        parts: Any = {"train": {}, "test": {}}
        for key in arrays.files:
            part, column = key.split("-")
            parts[part][column] = arrays[key]
    return parts["train"], parts["test"]


def shapes(name: str, train: dict[str, np.ndarray]) -> dict[str, tuple[tuple[int, ...], float]]:
    """Every parameter's shape, and the standard deviation of its normal start; 0: zeros, infinite: ones.

    Kernels of convolutions are (height, width, in, out), matrices (in, out).
    """
    if name == "digits":
        layers = {"a": (3, 3, 1, 32), "b": (3, 3, 32, 64), "c": (1024, 128), "d": (128, 10)}
        return _with_biases({k: (s, np.prod(s[:-1]) ** -0.5) for k, s in layers.items()})
    if name == "recommender":
        num_rows = int(train["rows"].max()) + 1
        layers = {"a": (PAIRS + TABLES * DIM, 64), "b": (64, 32), "c": (32, 1)}
        dense = _with_biases({k: (s, (2 / s[0]) ** 0.5) for k, s in layers.items()})
        return {"tables": ((num_rows, DIM), 0.01), **dense}
    wide = WIDTH**-0.5
    found: dict[str, tuple[tuple[int, ...], float]] = {
        "bytes": ((256, WIDTH), 0.02),
        "places": ((PLACES, WIDTH), 0.02),
        "scale": ((WIDTH,), np.inf),
        "head": ((WIDTH, 256), wide),
    }
    for i in range(LAYERS):
        found[f"scale_a{i}"] = ((WIDTH,), np.inf)
        found[f"attention{i}"] = ((WIDTH, 3 * WIDTH), wide)
        found[f"attention_out{i}"] = ((WIDTH, WIDTH), wide / 2)
        found[f"scale_b{i}"] = ((WIDTH,), np.inf)
        found[f"mlp{i}"] = ((WIDTH, 4 * WIDTH), wide)
        found[f"mlp_out{i}"] = ((4 * WIDTH, WIDTH), wide / 4)
    return found


def _with_biases(layers: Any) -> dict[str, tuple[tuple[int, ...], float]]:
    biases = {f"{k}_bias": ((shape[-1],), 0.0) for k, (shape, _) in layers.items()}
    return {**layers, **biases}


def value(name: str, outputs: np.ndarray, test: dict[str, np.ndarray]) -> float:
    """The metric, from what the model says of every test sample: digit, score, bits per byte."""
    if name == "digits":
        return float((outputs == test["label"]).mean())
    if name == "recommender":
        return auc(outputs, test["label"])
    return float(outputs.mean())


def auc(score: np.ndarray, label: np.ndarray) -> float:
    """The area under the ROC curve."""
    rank = np.empty(len(score))
    rank[np.argsort(score, kind="stable")] = np.arange(len(score))
    uses = int((label > 0).sum())
    return float((rank[label > 0].sum() - uses * (uses - 1) / 2) / (uses * (len(label) - uses)))
