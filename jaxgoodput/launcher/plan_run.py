"""`jaxgoodput plan WORKDIR`: on which devices, and with which batch and strategy, a run would do best."""

import os
from collections.abc import Sequence

from jaxgoodput.launcher.supervise import UsageError
from jaxgoodput.observe.forecast import ExpectedRun, Forecast, forecast, shapes_up_to
from jaxgoodput.specs import Shape
from jaxgoodput.text import compact, seconds
from jaxgoodput.workdir.places import is_bucket

MOST_DEVICES = 65536

_MEANINGS = {
    "measured": "this batch was timed on this number of devices",
    "fitted": "other batches were timed on this number of devices",
    "extrapolated": "the run never had so many replicas, so its fitted model is extended",
    "guessed": "no step was timed over such a link, which is assumed to be as fast as possible",
}


def is_workdir(path: str) -> bool:
    """Return whether a path is a folder and not a script (a folder with a `__main__.py` is a script).

    A bucket is no script either.
    """
    return (
        is_bucket(path)
        or os.path.isdir(path)
        and not os.path.exists(os.path.join(path, "__main__.py"))
    )


def plan_run(workdir: str, num_devices: int, num_nodes: int) -> str:
    """Return a table of what a run would do on up to `num_devices` devices, with an explanation.

    Raises UsageError if the folder holds no run, if the run has not measured enough, or if the devices cannot
    be spread over the nodes.
    """
    if num_devices > MOST_DEVICES:
        raise UsageError(
            f"--devices {num_devices} is more than the {MOST_DEVICES} devices that can be planned for."
        )
    try:
        found = forecast(workdir, shapes_up_to("", num_devices, num_nodes))
    except (OSError, ValueError, ModuleNotFoundError) as error:
        raise UsageError(str(error)) from error
    return "\n".join([*_head(found), "", *_table(found.expected), *_legend(found), *_best(found)])


def _head(found: Forecast) -> list[str]:
    processes = f" in {found.num_processes} processes" if found.num_processes > 1 else ""
    return [
        f"{found.workdir}, last on {found.num_devices} x {found.device_kind}{processes}: "
        f"{found.config.global_batch_size} samples per step, {compact(found.goodput)} useful samples/s",
        f"from its fitted step times (error {found.fit_error:.1%}) and its gradient noise "
        f"(noise scale {compact(found.noise_scale)} samples):",
    ]


def _table(expected: Sequence[ExpectedRun]) -> list[str]:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if not expected:
        return [""]
    rows = [_row(one) for one in expected]
    # A column without any entry is left out, such as the strategy if there is only one.
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in ("strategy", "known") else "right")
    for row in rows:
        table.add_row(*(row[name] for name in names))
    console = Console(width=200, color_system=None, highlight=False, markup=False, emoji=False)
    with console.capture() as written:
        console.print(table)
    return [*(line.rstrip() for line in written.get().splitlines()), ""]


def _legend(found: Forecast) -> list[str]:
    used = {one.known for one in found.expected}
    return [
        *(f"{name}: {meaning}" for name, meaning in _MEANINGS.items() if name in used),
        *(f"left out: {_in_words(shape)}: {why}" for shape, why in found.left_out.items()),
    ]


def _best(found: Forecast) -> list[str]:
    best = found.best
    if best is None:
        return []
    strategy = f", {best.strategy}" if best.strategy else ""
    return [
        f"best: {_in_words(best.shape)}, {best.config.global_batch_size} samples per step{strategy}: "
        f"{best.speed_up:.2f} times the present goodput ({best.known})"
    ]


def _in_words(shape: Shape) -> str:
    devices = "device" if shape.num_devices == 1 else "devices"
    nodes = "node" if shape.num_nodes == 1 else "nodes"
    return f"{shape.num_devices} {devices} on {shape.num_nodes} {nodes}"


def _row(one: ExpectedRun) -> dict[str, str]:
    """Return, by column, the row of the table for one forecast of the run."""
    config, shape = one.config, one.shape
    return {
        "devices": str(shape.num_devices),
        "nodes": str(shape.num_nodes),
        "strategy": one.strategy,
        "batch": str(config.global_batch_size),
        "micro x replicas x accum": f"{config.micro_batch_size} x {config.num_replicas} x "
        f"{config.num_micro_batches}",
        "step": seconds(one.step_s),
        "samples/s": compact(one.throughput),
        "efficiency": f"{one.efficiency:.3f}",
        "goodput": compact(one.goodput),
        "speed-up": f"{one.speed_up:.2f}",
        "known": one.known,
    }
