"""What earlier runs of the same program left, and how a new run begins with it."""

import dataclasses
import hashlib
import json
import os

import jax
import jaxlib.version
from absl import logging

from jaxgoodput import __version__
from jaxgoodput._fields import serial
from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.state import TrainState
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.optim import adaptation
from jaxgoodput.train.start.plans import RunSetup
from jaxgoodput.tune.plan import BatchPlan
from jaxgoodput.tune.remembered import Memory, ProgramMemory


def memory_of(setup: RunSetup, engine: Engine, plan: BatchPlan) -> Memory | None:
    """Return what earlier runs left that had the same program, data and devices, as far as can be told.

    None if this run does not use it; see `RunSetup.memory_folder`.
    """
    folder, config, where = setup.memory_folder, setup.config, setup.where
    if folder is None:
        return None
    device = where.own_devices[0]
    alike = {
        "program": engine.digest(plan.start.micro_batch_size),
        "base_batch_size": config.batch.base,
        "num_samples": len(setup.inputs.dataset),
        "statistics": serial.encode(config.statistics),
        "strategies": list(where.layouts),
        "num_devices": where.num_devices,
        "device_kind": device.device_kind,
        "num_cpus": os.cpu_count() if device.platform == "cpu" else None,
        "keep_freed_pages": config.execution.keep_freed_pages,
        "swap_cpu_products": config.execution.swap_cpu_products,
        "versions": [
            device.client.platform_version,
            jax.__version__,
            jaxlib.version.__version__,
            __version__,
        ],
    }
    key = hashlib.sha256(json.dumps(alike, sort_keys=True).encode()).hexdigest()[:32]
    return Memory.at(folder / f"{key}.json")


def begin_as_earlier(
    setup: RunSetup,
    engine: Engine,
    plan: BatchPlan,
    earlier: ProgramMemory,
    state: TrainState,
    ledger: TimeLedger,
) -> tuple[BatchConfig, TrainState]:
    """Return the batch at which an earlier run ended, and a state that trusts that run's first noise.

    It is the base batch if that noise is unknown, or if parts of the parameters have rates of their own:
    their noise is not remembered, so that the rates would stay at their base values.
    """
    if earlier.noise is None or engine.problem.has_own_rates:
        return plan.start, state
    batch = plan.resumed(earlier.batch, lambda size: setup.fits(engine, size, ledger))
    if batch == plan.start:
        return plan.start, state
    with ledger.bucket("compilation"):
        setup.compile(engine, batch.micro_batch_size, accumulate=batch.num_micro_batches > 1)
    need = engine.bytes_of(batch.micro_batch_size)
    if need is None or need.peak > (setup.budget or 0):
        return plan.start, state
    logging.info("the run begins at %d samples, as an earlier one ended", batch.global_batch_size)
    held = adaptation.with_noise_held(state.opt_state, earlier.noise.grad)
    return batch, dataclasses.replace(state, opt_state=held)
