"""`jaxgoodput plan WORKDIR`: which devices, batch and strategy a run would do best on, as a table."""

import os

from jaxgoodput.launcher.supervise import UsageError
from jaxgoodput.observe.forecast import ExpectedRun, Forecast, forecast, shapes_up_to
from jaxgoodput.specs import Shape
from jaxgoodput.text import compact, seconds

MOST_DEVICES = 65536

_SAID = {
    "measured": "this batch was timed there",
    "fitted": "other batches were timed there",
    "extrapolated": "the run never had so many replicas; its fit is carried on",
    "guessed": "no step was timed over such a link, which is taken to be as good as can be",
}


def is_workdir(path: str) -> bool:
    """Whether a path is a folder that can be no script."""
    return os.path.isdir(path) and not os.path.exists(os.path.join(path, "__main__.py"))


def plan_run(workdir: str, num_devices: int, num_nodes: int) -> str:
    """The table for a run, with what the marks mean.

    Raises UsageError where there is no run, or it cannot tell, or the devices cannot be spread.
    """
    if num_devices > MOST_DEVICES:
        raise UsageError(
            f"--devices {num_devices} is more than the {MOST_DEVICES} that are planned for."
        )
    try:
        found = forecast(workdir, shapes_up_to("", num_devices, num_nodes))
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    return _text(found)


def _text(found: Forecast) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    best = found.best
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    rows = [_row(one) for one in found.expected]
    # One strategy that has no name need not be told from others.
    for name in (n for n in (rows[0] if rows else ()) if any(row[n] for row in rows)):
        table.add_column(name, justify="left" if name in ("strategy", "known") else "right")
    for row in rows:
        table.add_row(*(cell for name, cell in row.items() if any(r[name] for r in rows)))
    console = Console(width=200, color_system=None, highlight=False, markup=False, emoji=False)
    with console.capture() as written:
        console.print(table)
    processes = f" in {found.num_processes} processes" if found.num_processes > 1 else ""
    lines = [
        f"{found.workdir}, last on {found.num_devices} x {found.device_kind}{processes}: "
        f"{found.config.global_batch_size} samples a step, {compact(found.goodput)} useful samples/s",
        f"by its own fit (error {found.fit_error:.1%}) and gradient noise "
        f"(scale {compact(found.noise_scale)} samples):",
        "",
        *([line.rstrip() for line in written.get().splitlines()] if rows else ()),
        "",
    ]
    used = {one.known for one in found.expected}
    lines += [f"{name}: {said}" for name, said in _SAID.items() if name in used]
    for shape, why in found.left_out.items():
        lines.append(f"left out: {_in_words(shape)}: {why}")
    if best is not None:
        lines.append(
            f"best: {_in_words(best.shape)}, {best.config.global_batch_size} samples a step"
            + (f", {best.strategy}" if best.strategy else "")
            + f": {best.speed_up:.2f} times the present goodput ({best.known})"
        )
    return "\n".join(lines)


def _in_words(shape: Shape) -> str:
    devices = "device" if shape.num_devices == 1 else "devices"
    nodes = "node" if shape.num_nodes == 1 else "nodes"
    return f"{shape.num_devices} {devices} on {shape.num_nodes} {nodes}"


def _row(one: ExpectedRun) -> dict[str, str]:
    """A line of the table by column."""
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
