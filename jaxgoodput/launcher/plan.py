"""`jaxgoodput plan SCRIPT`: what memory and time each parallel strategy would need for a script's trainer.

    python -m jaxgoodput.launcher.plan --topology v5e:16x16 train.py --workdir /tmp/run

runs the script up to its `fit()`, then compiles a step with each strategy. `plan` starts it as a process of
its own, because compilers read their settings before JAX is loaded.
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
from jaxgoodput.launcher.planning import table as tables
from jaxgoodput.launcher.planning.topology import devices_of, settings_for
from jaxgoodput.launcher.supervise import UsageError

T = TypeVar("T")


class _FitReached(BaseException):
    """Ends a script at its `fit()`. Not an `Exception`, so that the script does not catch it."""

    def __init__(self, found: Any, error: BaseException | None = None):
        super().__init__()
        self.found, self.error = found, error


def plan(
    arguments: Sequence[str],
    *,
    topology: str | None,
    python: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Plan a script's strategies in a process of its own; return its exit code.

    `topology` is None if the devices are this machine's. `python` is the interpreter to use, if not this one:
    the compiler for a topology may be installed in another environment.

    Raises UsageError for a topology in no known form, or an interpreter without this package.
    """
    environ = dict(os.environ if environ is None else environ)
    environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the table shows what the partitioner warns of
    # A program from JAX's cache is not compiled, so the compiler would not tell what it keeps in memory.
    environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    if topology is not None:
        environ |= settings_for(topology, environ)
    else:
        environ.setdefault("JAX_PLATFORMS", "cpu")
    if python is not None:
        _require_package(python, environ)
    command = [python or sys.executable, "-m", "jaxgoodput.launcher.plan", *arguments]
    return subprocess.run(command, env=environ).returncode


def _require_package(python: str, environ: Mapping[str, str]) -> None:
    """Raise UsageError unless an interpreter can be started and has this package."""
    test = [python, "-c", "import jaxgoodput.launcher.plan"]
    try:
        done = subprocess.run(test, env=environ, capture_output=True, text=True)
    except OSError as error:
        raise UsageError(f"--python {python} cannot be started: {error.strerror}.") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UsageError(
            f"--python {python} cannot import jaxgoodput: {last}. Install it there, with what the script "
            f"imports: {python} -m pip install 'jaxgoodput[cuda12]'."
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of strategies; return an exit code. Runs in the process that `plan` starts."""
    parser = argparse.ArgumentParser(prog="jaxgoodput plan")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--topology")
    target.add_argument("--devices", type=int)
    parser.add_argument("--num-slices", type=int, default=1)
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--memory-gib", type=float)
    parser.add_argument("--price-per-hour", type=float)
    parser.add_argument("--explain")
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

    if topology is not None:
        return devices_of(topology, num_slices)
    assert num_devices is not None
    if jax.config.values["jax_platforms"] == "cpu":
        jax.config.update("jax_num_cpu_devices", num_devices)
    devices = jax.devices()
    if len(devices) < num_devices:
        raise UsageError(f"--devices {num_devices}: only {len(devices)} devices are attached.")
    return devices[:num_devices]


def _print(trainer: Any, devices: Sequence[Any], options: argparse.Namespace) -> None:
    from rich.console import Console

    from jaxgoodput.train.ask import outlook as looking

    config, console = trainer.config, Console()
    if not console.is_terminal:
        console = Console(width=160)
    budget, share = _budget(config, devices, options.memory_gib)
    kept, left_out = looking.candidates_for(trainer, config, len(devices), memory_bytes=budget)
    if options.explain is not None:
        kept = _named(options.explain, kept, left_out)
    with console.status("compiling", spinner="dots") as status:
        found, others = _compiled(trainer, devices, kept, budget, options, status.update)
    if options.explain is None:
        others = [*left_out, *others]
    name = options.topology or f"{len(devices)} x {devices[0].device_kind}"
    title = f"{type(trainer).__name__} on {name}, {budget / GIB:.1f} GiB per device{share}"
    best = looking.by_throughput(found)
    rates = tables.rates_of(config, options.price_per_hour)
    steps = [tables.step_row(one, len(devices), rates) for one in best]
    console.print(tables.tabled(title, [tables.memory_row(one) for one in best]))
    console.print(tables.tabled("a step, best first", steps))
    types = sorted({name for one in best for name in one.analysis.flops_by_type})
    lines = tables.legend(steps, chip_of(devices[0]), types)
    if options.explain is not None and best:
        lines += tables.explained(best[0])
    for line in [*lines, *tables.left_out(others)]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _compiled(
    trainer: Any,
    devices: Sequence[Any],
    strategies: Sequence[Any],
    budget: float,
    options: argparse.Namespace,
    tell: Callable[[str], None],
) -> tuple[list[Any], list[Any]]:
    """Compile a step with each strategy; return the outlooks, and what had to be left out."""
    from jaxgoodput.train.ask import outlook as looking

    found, others = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in looking.outlooks(
            trainer,
            trainer.config,
            devices,
            strategies,
            budget=budget,
            micro_batch_size=options.micro_batch_size,
        ):
            (others if isinstance(one, looking.LeftOut) else found).append(one)
            tell(f"compiled {len(found)} of {len(strategies)}: {one.strategy.name}")
    return found, others


def _named(name: str, kept: Sequence[Any], left_out: Sequence[Any]) -> tuple[Any, ...]:
    """Return the strategy of a name. Raises UsageError if it is not among those that are kept."""
    found = tuple(strategy for strategy in kept if strategy.name == name)
    if found:
        return found
    for one in left_out:
        if one.strategy.name == name:
            raise UsageError(f"--explain {name}: it is left out: {one.reason}.")
    raise UsageError(
        f"--explain {name}: there is no such strategy here. Name one of "
        f"{', '.join(strategy.name for strategy in kept)}."
    )


def _budget(config: Any, devices: Sequence[Any], memory_gib: float | None) -> tuple[float, str]:
    """Return the bytes of device memory that a step may use, and how they were found, for the title.

    As given; or what JAX takes of the chip's memory, less a safety margin.
    """
    from jaxgoodput.engine.memory import device_budget

    margin, chip = config.execution.memory_margin, chip_of(devices[0])
    if memory_gib is not None:
        return memory_gib * GIB, ""
    if chip is None:
        stated = device_budget(
            devices[0],
            num_local_devices=len(devices),
            stated=config.execution.memory_bytes,
            margin=margin,
        )
        return stated, ""
    share = 1.0
    if chip.gpu is not None:
        share = share_of_gpu(os.environ)
    text = "" if share == 1 else f" (JAX takes {share:.0%} of a GPU: {_SHARE_VARIABLE})"
    return chip.memory_bytes * share * (1 - margin), text


_SHARE_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def share_of_gpu(environ: Mapping[str, str]) -> float:
    """Return the share of a GPU's memory that JAX takes: three quarters, unless its variable says otherwise.

    Raises UsageError if that is no share.
    """
    text = environ.get(_SHARE_VARIABLE, "0.75")
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UsageError(
            f"{_SHARE_VARIABLE} is {text!r} and must be above 0 and at most 1: the share of a GPU's memory "
            "that JAX takes. Leave it out for 0.75."
        )
    return share


if __name__ == "__main__":
    sys.exit(main())
