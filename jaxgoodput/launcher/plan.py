"""`jaxgoodput plan SCRIPT`: what memory and time each parallel strategy would need for a script's trainer.

    python -m jaxgoodput.launcher.plan --topology v5e:16x16 train.py --workdir /tmp/run

runs the script up to its `fit()`, then compiles a step with each strategy. `plan` starts it as a process of
its own, because the TPU compiler reads its settings before JAX is loaded.
"""

import argparse
import os
import runpy
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxgoodput.engine.chips import GIB, chip_of
from jaxgoodput.launcher.supervise import UsageError

T = TypeVar("T")

# With these settings, libtpu compiles on a machine without a TPU.
_WITHOUT_CHIPS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "JAX_PLATFORMS": "cpu",
}


class _FitReached(BaseException):
    """Ends a script at its `fit()`. Not an `Exception`, so that the script does not catch it."""

    def __init__(self, found: Any, error: BaseException | None = None):
        super().__init__()
        self.found, self.error = found, error


def plan(
    arguments: Sequence[str], *, num_devices: int | None, environ: Mapping[str, str] | None = None
) -> int:
    """Plan a script's strategies in a process of its own; return its exit code.

    `num_devices` is None if the devices are a TPU topology that is not attached.
    """
    environ = dict(os.environ if environ is None else environ)
    environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the table shows what the partitioner warns of
    if num_devices is None:
        environ |= _WITHOUT_CHIPS
    else:
        environ.setdefault("JAX_PLATFORMS", "cpu")
    done = subprocess.run(
        [sys.executable, "-m", "jaxgoodput.launcher.plan", *arguments], env=environ
    )
    return done.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of strategies; return an exit code. Runs in the process that `plan` starts."""
    parser = argparse.ArgumentParser(prog="jaxgoodput plan")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--topology")
    target.add_argument("--devices", type=int)
    parser.add_argument("--num-slices", type=int, default=1)
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--memory-gib", type=float)
    parser.add_argument("script")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    try:
        devices = _devices(options.topology, options.num_slices, options.devices)
        trainer = trainer_of(options.script, options.rest)
        _print(trainer, devices, options)
    except UsageError as error:
        print(f"jaxgoodput plan: {error}", file=sys.stderr)
        return 2
    return 0


def trainer_of(script: str, arguments: Sequence[str]) -> Any:
    """Run a script until it calls `fit()`; return the trainer of that call.

    Raises UsageError if the script cannot be run, or ends without a call of `fit()`.
    """
    return reached(script, arguments, lambda trainer: trainer)


def reached(script: str, arguments: Sequence[str], look: Callable[[Any], T]) -> T:
    """Run a script until it calls `fit()`; return what `look` makes of the trainer there, in its place.

    Raises UsageError if the script cannot be run, or ends without a call of `fit()`.
    """
    from jaxgoodput.train.trainer import Trainer

    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise UsageError(
            f"{script} is a folder without a __main__.py. Name the script that trains."
        )

    def found(trainer: Any) -> Any:
        kind.fit = original  # `look` may call it
        try:
            end = _FitReached(look(trainer))
        except BaseException as error:  # not to be caught by the script, which might then train
            end = _FitReached(None, error)
        finally:
            kind.fit = found
        raise end

    kind: Any = Trainer
    original, kind.fit = kind.fit, found
    before, sys.argv = sys.argv, [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except _FitReached as end:
        if end.error is not None:
            raise end.error from None
        return end.found
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        if any(frame.filename == script for frame in traceback.extract_tb(error.__traceback__)):
            raise  # the script ran, so the error is its own
        raise UsageError(f"{script} cannot be run: {error}.") from error
    except SystemExit as ended:
        why = f"ended with {ended.code!r}"
    else:
        why = "ended"
    finally:
        kind.fit, sys.argv = original, before
        sys.path.pop(0)
    raise UsageError(
        f"{script} {why} before any Trainer.fit() was called. Name the script that trains, with its "
        "arguments behind it."
    )


def _devices(topology: str | None, num_slices: int, num_devices: int | None) -> Sequence[Any]:
    import jax

    if num_devices is not None:
        if jax.config.values["jax_platforms"] == "cpu":
            jax.config.update("jax_num_cpu_devices", num_devices)
        devices = jax.devices()
        if len(devices) < num_devices:
            raise UsageError(f"--devices {num_devices}: only {len(devices)} devices are attached.")
        return devices[:num_devices]
    from jax.experimental import topologies

    several = {} if num_slices == 1 else {"num_slices": num_slices}
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=str(topology), **several)
    except Exception as error:  # no common type: libtpu is missing, or does not know the name
        raise UsageError(
            f"the topology {topology!r} is not available: {str(error).splitlines()[0][:200]}. Names look "
            "like v5e:16x16, v6e:4x4 or v5p:4x4x4, and need the TPU compiler: pip install 'jaxgoodput[tpu]'."
        ) from error
    return list(found.devices)


def _print(trainer: Any, devices: Sequence[Any], options: argparse.Namespace) -> None:
    from rich.console import Console

    from jaxgoodput.train.ask import outlook as looking

    config, console = trainer.config, Console()
    if not console.is_terminal:
        console = Console(width=160)
    budget = _budget(config, devices, options.memory_gib)
    kept, left_out = looking.candidates_for(trainer, config, len(devices), memory_bytes=budget)
    found, others = [], list(left_out)
    with console.status("compiling", spinner="dots") as status, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in looking.outlooks(
            trainer,
            config,
            devices,
            kept,
            budget=budget,
            micro_batch_size=options.micro_batch_size,
        ):
            if isinstance(one, looking.LeftOut):
                others.append(one)
            else:
                found.append(one)
            status.update(f"compiled {len(found)} of {len(kept)}: {one.strategy.name}")
    name = options.topology or f"{len(devices)} x {devices[0].device_kind}"
    title = f"{type(trainer).__name__} on {name}, {budget / GIB:.1f} GiB per device"
    console.print(_table(title, [_row(one, len(devices)) for one in looking.by_throughput(found)]))
    for one in others:
        console.print(f"left out: {one.strategy.name}: {one.reason}", highlight=False)


def _table(title: str, rows: Sequence[Mapping[str, str]]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in rows[0] if rows else ():
        table.add_column(column, justify="left" if column in ("strategy", "fits") else "right")
    for row in rows:
        table.add_row(*row.values())
    return table


def _budget(config: Any, devices: Sequence[Any], memory_gib: float | None) -> float:
    """Return the bytes of device memory that a step may use: as given, else all less a safety margin."""
    from jaxgoodput.engine.memory import device_budget

    margin, chip = config.execution.memory_margin, chip_of(devices[0])
    if memory_gib is not None:
        return memory_gib * GIB
    if chip is not None:
        return chip.memory_bytes * (1 - margin)
    return device_budget(
        devices[0],
        num_local_devices=len(devices),
        stated=config.execution.memory_bytes,
        margin=margin,
    )


def _row(one: Any, num_devices: int) -> dict[str, str]:
    """Return, by column, the row of the table for a strategy. Step times need a chip that is known."""
    facts, step_s, bounds = one.analysis, one.step_s, one.rooflines_s
    times = f" x {one.num_micro_batches}" if one.num_micro_batches > 1 else ""
    row = {
        "strategy": one.strategy.name,
        "fits": "yes" if one.fits else "no",
        "peak MiB": f"{facts.bytes.peak / 2**20:,.0f}",
        "micro-batch": f"{one.micro_batch_size}{times}",
        "largest": f"{one.largest_micro_batch_size:,}",
        "batch": f"{one.global_batch_size}",
        "GFLOP": f"{facts.flops * one.num_micro_batches / num_devices / 1e9:,.4g}",
        "sent MiB": f"{sum(facts.traffic.values()) * one.num_micro_batches / 2**20:,.1f}",
        "async": f"{facts.num_asynchronous} of {facts.num_collectives}",
    }
    if bounds:
        row["step ms"] = f"{step_s * 1e3:,.1f}"
        row["bound by"] = max(bounds, key=bounds.__getitem__)
        row["samples/s"] = f"{one.global_batch_size / step_s:,.0f}"
    return {**row, "compiled in s": f"{one.compile_s:.1f}"}


if __name__ == "__main__":
    sys.exit(main())
