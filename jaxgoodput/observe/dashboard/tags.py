"""The dashboard's tags with their units and meanings, its pictures, and the layout of its charts.

Programs that read event files may rely on `TAGS`; tests check that the dashboard writes nothing else.
"""

import json
import re
import urllib.parse
from collections.abc import Set
from dataclasses import dataclass
from typing import TypeAlias

from jaxgoodput.observe.badput import BUCKETS
from jaxgoodput.workdir.places import workdir_of


@dataclass(frozen=True)
class Tag:
    """A curve: its name in TensorBoard, its unit and its meaning.

    A name that ends in `*` stands for a family of tags. `model` says whether the sub-run `model` has the
    prediction under the same name.
    """

    name: str
    unit: str
    meaning: str
    model: bool = False


TAGS: tuple[Tag, ...] = (
    Tag("goodput/samples_per_sec", "useful samples/s",
        "throughput x statistical efficiency: the objective (not the productive share of time)", model=True),
    Tag("goodput/predicted", "useful samples/s", "the model's goodput for this configuration"),
    Tag("goodput/predicted_lower", "useful samples/s", "predicted, minus one fit error"),
    Tag("goodput/predicted_upper", "useful samples/s", "predicted, plus one fit error"),
    Tag("goodput/throughput_samples_per_sec", "samples/s", "real samples applied per second"),
    Tag("goodput/statistical_efficiency", "1",
        "progress per sample relative to the base batch; above 1 for smaller batches"),
    Tag("evidence/loss_gained", "loss",
        "decrease of the loss per e-fold of samples; model: expected from the previous batch", model=True),
    Tag("evidence/loss_gained_lower", "loss",
        "loss_gained, minus two standard errors; model: without a margin", model=True),
    Tag("evidence/loss_gained_upper", "loss",
        "loss_gained, plus two standard errors; model: without a margin", model=True),
    Tag("goodput/predicted_gain", "1",
        "predicted goodput of the verdict, divided by that of the present batch"),
    Tag("batch/global", "samples", "samples of one update, all replicas"),
    Tag("batch/per_device", "samples", "micro-batch: samples that one replica computes at once"),
    Tag("batch/accumulation_steps", "1", "micro-batches per replica and update"),
    Tag("batch/num_replicas", "1", "replicas; global = per_device x accumulation x replicas"),
    Tag("batch/memory_limit", "samples", "largest micro-batch that fits into memory"),
    Tag("account/earned_s", "s",
        "delay of training that exploring other sizes has earned: a share of the time passed and saved"),
    Tag("account/spent_s", "s", "estimated delay of training by exploring other sizes, so far"),
    Tag("account/borrowed_s", "s", "spent on exploring beyond what was earned"),
    Tag("account/loan_limit_s", "s", "most that exploring may borrow now, in the hope to save very much"),
    Tag("gns/critical_batch_size", "samples",
        "gradient noise scale for decisions: the batch at which noise and signal are equal"),
    Tag("gns/noise_scale", "samples", "middle of the noise scale's 80 % interval"),
    Tag("gns/noise_scale_lower", "samples", "lower end of the noise scale's 80 % interval"),
    Tag("gns/noise_scale_upper", "samples", "upper end of the noise scale's 80 % interval"),
    Tag("gns/grad_sqr", "1", "squared norm of the true gradient, smoothed"),
    Tag("gns/grad_var", "1", "gradient variance at the base batch, smoothed"),
    Tag("gns/confidence", "samples of the noise", "effective number of measurements behind the estimate"),
    Tag("gns/age", "steps", "steps since the newest measurement of the gradient noise"),
    Tag("gns/is_guess", "1",
        "1 if no signal is above its own standard error, so the noise scale is little more than a guess"),
    Tag("stats/every", "steps", "steps between two measurements of the gradient noise"),
    Tag("lr/gain", "1", "factor on the optimizer's updates for the larger batch"),
    Tag("lr/base", "1",
        "the user's learning rate; schedules use the progress, or the samples under `epochs`"),
    Tag("lr/effective", "1", "base x gain"),
    Tag("perf/step_time_s", "s", "median time of one update", model=True),
    Tag("perf/predicted_step_time_s", "s", "the model's time of one update"),
    Tag("perf/predicted_step_time_lower_s", "s", "predicted, minus one fit error"),
    Tag("perf/predicted_step_time_upper_s", "s", "predicted, plus one fit error"),
    Tag("perf/tflops_per_device", "1e12/s", "matrix-product operations of loss and gradient on each device"),
    Tag("perf/mfu", "1", "model flops utilisation, relative to the bfloat16 peak; only for known chips"),
    Tag("perf/tokens_per_sec", "1/s", "samples/s x Reporting.tokens_per_sample"),
    Tag("perf/feeding_s", "s",
        "time to bring a batch's table rows to the device, while others run; a lower bound of the step"),
    Tag("perf/compute_s", "s", "fitted: one micro-batch, forward and backward"),
    Tag("perf/sync_s", "s", "fitted: averaging the gradients over the replicas"),
    Tag("perf/update_s", "s", "fitted: the optimizer's own pass"),
    Tag("perf/fit_rmsle", "1", "root mean square log error of the fit"),
    Tag("perf/num_observations", "1", "measured configurations behind the fit"),
    Tag("perf/compile_s", "s", "total time that training waited for XLA"),
    Tag("elastic/num_devices", "1", "devices of this run"),
    Tag("elastic/num_processes", "1", "processes of this run"),
    Tag("elastic/num_hosts", "1", "hosts of this run"),
    Tag("elastic/restarts", "1", "how often the run was resumed"),
    Tag("elastic/generation", "1", "number of sets of processes so far"),
    Tag("elastic/regroup_s", "s", "time that the latest change of processes took"),
    Tag("elastic/slow_ratio", "1",
        "seconds per sample of an excluded host, divided by the median of the other hosts"),
    Tag("elastic/excluded_s", "s", "time until an excluded host is tried again; 0 when it is admitted"),
    Tag("elastic/last_resize_s", "s", "time from the last record before a restart to the first window"),
    Tag("goodput_time/productive_pct", "% of wall time", "time spent training (Google's sense of goodput)"),
    *(Tag(f"badput/{name}", "% of wall time", meaning) for name, meaning in BUCKETS.items()),
    Tag("progress/scale_invariant_steps", "base steps",
        "steps that the base batch would have needed for the same progress"),
    Tag("progress/samples", "samples", "real samples applied since the first run"),
    Tag("progress/epoch", "1", "complete passes over the data"),
    Tag("progress/eta_s", "s", "remaining time at the present pace"),
    Tag("progress/skipped_steps", "1", "updates skipped because a loss, gradient or update was not finite"),
    Tag("train/*", "the user's", "scalars of the user's loss function, means over the window"),
    Tag("eval/*", "the user's", "results of evaluations"),
    Tag("eval_time_s", "s", "duration of an evaluation"),
    Tag("reshard/seconds", "s", "pause of training for a change of strategy"),
    Tag("reshard/bytes_moved", "bytes", "bytes that a change of strategy moved between devices"),
    Tag("checkpoint/stall_s", "s", "pause of training for a checkpoint"),
    Tag("hparam/mean_goodput", "useful samples/s", "mean goodput of a run, by time"),
    Tag("hparam/productive_pct", "% of wall time", "productive time at the end of a run"),
)  # fmt: skip


PICTURES: tuple[Tag, ...] = (
    Tag("race/by_batch", "1",
        "what is known of each batch: loss decrease, step time and goodput; hollow: not measured"),
    Tag("model/goodput_surface", "% of the best",
        "predicted goodput by micro-batch size and count; framed: previous batch and verdict"),
    Tag("model/goodput_curve", "samples/s",
        "predicted throughput and goodput by batch size; dashed: verdict, noise scale"),
    Tag("model/fit", "s", "predicted over measured step times; dashed: one fit error to either side"),
    Tag("model/efficiency_by_group", "1",
        "efficiency by batch size for each group of parameters; thick: all groups, which decides"),
    Tag("model/sweep", "s",
        "predicted time that fixed batches would have needed for the same progress; dashed: this run"),
)  # fmt: skip
"""Pictures, drawn when the batch changes and at the end."""


def _lines(*tags: str) -> tuple[str, list[str]]:
    # TensorBoard matches prefixes: without `$`, goodput/predicted would include its bounds.
    return "Multiline", [f"^{tag}$" for tag in tags]


# The custom-scalars page by category and chart, in the form that tensorboardX takes. A chart has at most two
# tags, because all tags of a run have the same colour.
Charts: TypeAlias = dict[str, dict[str, tuple[str, list[str]]]]
CHARTS: Charts = {
    "Learning": {
        "loss": _lines("train/loss"),
        "evaluation": ("Multiline", ["^eval/"]),
        "learning rate, base and effective": _lines("lr/base", "lr/effective"),
        "verdicts: goodput relative to the present batch (1: keep it)": _lines(
            "goodput/predicted_gain"
        ),
    },
    "Goodput": {
        "goodput, measured and model (useful samples/s)": _lines("goodput/samples_per_sec"),
        "throughput (samples/s)": _lines("goodput/throughput_samples_per_sec"),
        "statistical efficiency": _lines("goodput/statistical_efficiency"),
        "loss decrease per e-fold of samples, measured (+- 2 standard errors) and model": (
            "Margin",
            [f"evidence/loss_gained{bound}" for bound in ("", "_lower", "_upper")],
        ),
        "goodput predicted, with the fit's error (useful samples/s)": (
            "Margin",
            ["goodput/predicted", "goodput/predicted_lower", "goodput/predicted_upper"],
        ),
    },
    "Batch size": {
        # Two charts, because the noise scale may be a hundred times the batch.
        "global batch (samples)": _lines("batch/global"),
        "noise scale (samples)": _lines("gns/critical_batch_size"),
        "noise scale, 80 % interval (samples)": (
            "Margin",
            [f"gns/noise_scale{bound}" for bound in ("", "_lower", "_upper")],
        ),
        "learning-rate gain": _lines("lr/gain"),
        "micro-batch (samples per replica)": _lines("batch/per_device"),
        "micro-batches per update": _lines("batch/accumulation_steps"),
        "largest micro-batch that fits (samples)": _lines("batch/memory_limit"),
        "noise scale is little more than a guess": _lines("gns/is_guess"),
        "noise measurements: interval, age of the latest (steps)": _lines("stats/every", "gns/age"),
        "exploring other sizes: earned, spent (s)": _lines("account/earned_s", "account/spent_s"),
        "exploring other sizes: borrowed, at most (s)": _lines(
            "account/borrowed_s", "account/loan_limit_s"
        ),
    },
    "Performance model": {
        "step time, measured and model (s)": _lines("perf/step_time_s"),
        "compute and sync, fitted (s)": _lines("perf/compute_s", "perf/sync_s"),
        "optimizer, fitted (s)": _lines("perf/update_s"),
        "fit error (rms log)": _lines("perf/fit_rmsle"),
        "configurations measured": _lines("perf/num_observations"),
        "waiting for compilation (s)": _lines("perf/compile_s"),
        "step time predicted, with the fit's error (s)": (
            "Margin",
            [f"perf/predicted_step_time{bound}_s" for bound in ("", "_lower", "_upper")],
        ),
    },
    "Elasticity and time": {
        "devices and processes": _lines("elastic/num_devices", "elastic/num_processes"),
        "restarts": _lines("elastic/restarts"),
        "last restart (s)": _lines("elastic/last_resize_s"),
        "slow hosts: time relative to the others": _lines("elastic/slow_ratio"),
        "slow hosts: excluded for (s)": _lines("elastic/excluded_s"),
        "productive time (%)": _lines("goodput_time/productive_pct"),
        "lost: compilation, first runs (%)": _lines("badput/compilation", "badput/first_execution"),
        "lost: input, evaluation (%)": _lines("badput/data_loading_sync", "badput/evaluation"),
        "lost: hooks (%)": _lines("badput/hooks_behind"),
        "lost: checkpoints (%)": _lines("badput/checkpoint_save", "badput/checkpoint_restore"),
        "lost: disruption, skipped steps (%)": _lines(
            "badput/wasted_progress_from_disruption", "badput/skipped_steps"
        ),
        "lost: start-up (%)": _lines("badput/program_startup", "badput/training_prep"),
        "progress (base steps)": _lines("progress/scale_invariant_steps"),
        "samples applied": _lines("progress/samples"),
        "remaining time (s)": _lines("progress/eta_s"),
    },
}


def shown(charts: Charts, tags: Set[str]) -> Charts:
    """Return the charts that show at least one of these tags.

    >>> shown({"A": {"loss": _lines("train/loss"), "gain": _lines("lr/gain")}, "B": {}}, {"lr/gain"})
    {'A': {'gain': ('Multiline', ['^lr/gain$'])}}
    """
    found = {
        category: {
            title: (kind, patterns)
            for title, (kind, patterns) in inside.items()
            # Margin charts name whole tags; line charts have regular expressions.
            if (
                not tags.isdisjoint(patterns)
                if kind == "Margin"
                else any(re.match(pattern, tag) for pattern in patterns for tag in tags)
            )
        }
        for category, inside in charts.items()
    }
    return {category: inside for category, inside in found.items() if inside}


PINNED = (
    "goodput/samples_per_sec",
    "batch/global",
    "gns/critical_batch_size",
    "perf/step_time_s",
    "goodput_time/productive_pct",
    "train/loss",
)


def description(tag: str) -> str:
    """Return the description of a tag on its card in TensorBoard; "" for an unknown tag."""
    for known in (*TAGS, *PICTURES):
        if tag == known.name or (known.name.endswith("*") and tag.startswith(known.name[:-1])):
            unit = "" if known.unit in ("1", "the user's") else f" ({known.unit})"
            return f"{known.meaning}{unit}"
    return ""


def tag_table() -> str:
    """Return `TAGS` and `PICTURES` as a Markdown table."""
    rows = [
        f"| {tag.name} | {tag.unit} | {tag.meaning}{'; model: same tag, run `model`' * tag.model} |"
        for tag in (*TAGS, *PICTURES)
    ]
    return "\n".join(["| tag | unit | meaning |", "|---|---|---|", *rows])


def charts_link(base_url: str = "http://localhost:6006") -> str:
    """Return the address of the custom-scalars page, without smoothing."""
    return f"{base_url}/#custom_scalars&_smoothingWeight=0"


def pinned_link(base_url: str = "http://localhost:6006") -> str:
    """Return the address of TensorBoard with the goodput cards pinned, without smoothing.

    Smoothing is on by default, and would draw steps of the batch size as ramps.
    """
    cards = [{"plugin": "scalars", "tag": tag} for tag in PINNED]
    encoded = urllib.parse.quote(json.dumps(cards, separators=(",", ":")))
    return f"{base_url}/?smoothing=0&pinnedCards={encoded}#timeseries"


def how_to_look(workdir: str) -> str:
    """Return the commands that start TensorBoard on a run."""
    # By default TensorBoard keeps ten random texts and pictures per tag.
    return (
        f"dashboard: jaxgoodput board {workdir}\n"
        "  or tensorboard --samples_per_plugin text=1000,images=50 "
        f"--logdir {workdir_of(workdir).folder}/tensorboard"
    )
