"""python docs/pictures/draw.py

Draws the pictures of docs/concepts.md from the package's own model of goodput (the numbers of the made-up job
are written below), and the README's picture from docs/measured/. Needs matplotlib (the extra `plots`).
"""

import json
import pathlib
import re

import matplotlib
import numpy as np

import jaxgoodput as jg

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

FOLDER = pathlib.Path(__file__).parent
BASE = 32
BATCHES = np.geomspace(BASE, 8192, 200)
# A step of 20 ms and 0.2 ms more for every sample, on one device.
PERF = jg.PerfParams(
    compute_base=0.02,
    compute_per_sample=0.0002,
    intra_base=0.0,
    intra_per_replica=0.0,
    inter_base=0.0,
    inter_per_replica=0.0,
    overlap=1.0,
    update_s=0.0,
)
ALONE = jg.Placement(num_nodes=1, num_replicas=1)
NOISE_SCALES = (100.0, 800.0, 6400.0)  # samples: early in a run, later, late


def model(noise_scale: float) -> jg.GoodputModel:
    """Of the made-up job, at a noise scale."""
    grad = jg.GradParams(sqr=1.0, var=noise_scale / BASE)
    return jg.GoodputModel(perf=PERF, grad=grad, base_batch_size=BASE)


def goodput() -> Figure:
    """Throughput, efficiency and their product, over the batch."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    axes[0].plot(BATCHES, model(800.0).throughput(ALONE, BATCHES), color="0.3")
    axes[0].set_title("throughput, samples/s")
    for noise_scale in NOISE_SCALES:
        one = model(noise_scale)
        label = f"noise scale {noise_scale:,.0f}"
        axes[1].plot(BATCHES, one.efficiency(BATCHES), label=label)
        (line,) = axes[2].plot(BATCHES, one.goodput(ALONE, BATCHES), label=label)
        best = BATCHES[np.argmax(one.goodput(ALONE, BATCHES))]
        axes[2].plot(best, one.goodput(ALONE, best), "o", color=line.get_color())
    axes[1].set_title("x  efficiency")
    axes[2].set_title("=  goodput, useful samples/s; the best batch is marked")
    axes[1].legend(frameon=False)
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.set_xlabel("batch, samples")
        ax.set_ylim(bottom=0)
    return figure


def gain() -> Figure:
    """What one step of a larger batch is worth, and the learning rates that follow from it."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained", sharey=True)
    scales = BATCHES / BASE
    for ax, rule, title in (
        (axes[0], jg.rules.adascale, "SGD: the gain"),
        (axes[1], jg.rules.adam_scale, "Adam: its square root"),
    ):
        for noise_scale in NOISE_SCALES:
            grad = jg.GradParams(sqr=1.0, var=noise_scale / BASE)
            factor = [float(rule(scale, grad, 0.0)) for scale in scales]
            ax.plot(scales, factor, label=f"noise scale {noise_scale:,.0f}")
        ax.plot(scales, scales, "--", color="0.7", label="the batch itself")
        ax.set_title(f"{title}, times the tuned learning rate")
        ax.set_xlabel(f"batch / base batch ({BASE})")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
    axes[0].legend(frameon=False)
    return figure


def time_to_target() -> Figure:
    """Seconds until the recommender reaches its target, by batch; a bar for each side, with its range."""
    data = json.loads((FOLDER.parent / "measured" / "time-to-target.json").read_text())
    (table,) = (table for table in data["tables"] if table["name"] == "recommender")
    sides = {}
    for name, seconds, *_ in table["rows"]:
        if found := re.fullmatch(r"([\d.]+) \(([\d.]+)\.\.([\d.]+)\)", seconds):
            sides[name] = tuple(map(float, found.groups()))
    figure, ax = plt.subplots(figsize=(8, 3), layout="constrained")
    for place, (name, (median, least, most)) in enumerate(reversed(sides.items())):
        is_ours = name.startswith("adaptive")
        label = (
            "jaxgoodput, begins with 512" if is_ours else name.replace("fixed", "fixed batch of")
        )
        ax.barh(place, median, color="tab:green" if is_ours else "0.75")
        ax.plot([least, most], [place, place], color="0.3", linewidth=1)
        ax.text(most + 0.4, place, f"{median:.1f} s", va="center")
        ax.text(-0.4, place, label.removesuffix(" (best)"), va="center", ha="right")
    ax.set_yticks([])
    ax.set_xlabel("seconds to the target (AUC 0.92): median and range of 5 seeds")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    return figure


if __name__ == "__main__":
    for draw in (goodput, gain, time_to_target):
        draw().savefig(FOLDER / f"{draw.__name__}.png", dpi=110)
