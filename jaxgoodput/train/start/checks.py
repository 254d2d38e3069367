"""What can be wrong with data and loss, said before the first step."""

import jax
import numpy as np
from absl import logging
from jaxtyping import PyTree

from jaxgoodput.data.fingerprint import of_stream
from jaxgoodput.data.rows import narrow, numbered
from jaxgoodput.data.sources import Source, is_endless
from jaxgoodput.data.streams import StreamSource
from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.loss_checks import unlike_halves
from jaxgoodput.engine.state import TrainState
from jaxgoodput.parallel.place import Place
from jaxgoodput.train.config import Config
from jaxgoodput.train.runs.kinds import is_alone
from jaxgoodput.train.start.plans import RunSetup
from jaxgoodput.tune.plan import BatchPlan

NUM_TRIED = 4  # samples that a loss is tried with, chosen from
NUM_READ = 16


def require_end(config: Config, source: Source) -> None:
    """Raise ValueError if `epochs` is to count passes over data without end."""
    if config.epochs is not None and is_endless(source):
        raise ValueError(
            f"Config.epochs={config.epochs} counts passes over the data, and dataset() returned a stream or "
            "a data set that repeats without end. Set Config.base_steps instead, or leave out .repeat()."
        )


def require_same_stream(source: Source, place: int, where: Place) -> None:
    """Raise ValueError if processes read different streams; all processes call this together.

    Every process reads the whole stream and trains on its part of each batch.
    """
    if not isinstance(source, StreamSource):
        return
    if source.is_live and not is_alone(where):
        raise ValueError(
            "dataset() returned a live stream, and this job has several processes, or may have: each reads "
            "the whole stream, and there is no second time to read it. Train in one process."
        )
    first, *others = where.told("its stream", of_stream(source, place))
    differing = [process for process, other in enumerate(others, start=1) if other != first]
    if differing:
        raise ValueError(
            f"dataset() returned a stream, and the samples from {place} on differ between process "
            f"{differing[0]} and process 0. Every process reads a stream whole and trains on its part of "
            "each batch: return the same stream in all of them, with the same seeds and not a part for each "
            "process (ShardByJaxProcess), or something with random access."
        )


def require_even_rest(setup: RunSetup, plan: BatchPlan, remaining: int | None) -> None:
    """Raise ValueError if a loss that cannot leave padding out would meet a padded last batch.

    `remaining` is how many samples are left until the end of `epochs`; None if progress ends the run.
    """
    config, source, engines = setup.config, setup.inputs.dataset, setup.engines.values()
    if setup.can_leave_out or config.last_batch == "drop":
        return
    counts = sorted({engine.num_replicas for engine in engines})
    in_stages = any(engine.layout.strategy.stage > 1 for engine in engines)
    if remaining is None:  # only a stream has an end all the same, and at any sample
        is_even = not isinstance(source, StreamSource) or (counts == [1] and not in_stages)
        what = "a stream"
    else:
        what = f"the {remaining} samples until the end of `epochs`"
        # With several counts, what is left for one of them depends on how long others were used.
        is_even = len(counts) == 1 and remaining % counts[0] == 0
        if in_stages:  # the last batch keeps its size there
            is_even = config.policy == "fixed" and remaining % plan.start.global_batch_size == 0
    if not is_even:
        why, remedy = (
            "loss() returns a scalar mean",
            (
                "Return per-sample losses [batch], or Loss(sum, weight) per sample, so that padding can be "
                "left out exactly; or give loss() a parameter `mask`"
            ),
        )
        if setup.loss_kind == "sample":
            why = f"the model state adds over samples ({', '.join(setup.inputs.problem.summed)})"
            remedy = "Give loss_and_state() a parameter `mask` and add only where it is 1"
        raise ValueError(
            f"{why}, and the last batch of {what} may have to be padded, so that "
            f"{' or '.join(map(str, counts))} replicas, or stages, can share it. "
            f'{remedy}; or set Config.last_batch to "drop"; or train for base_steps.'
        )


def try_loss(setup: RunSetup, engine: Engine, state: TrainState, plan: BatchPlan) -> None:
    """Warn if batches may be split and the loss of the same samples changes when they are.

    Raises ValueError for a loss that is one number, and a sum over the batch.
    """
    config, is_number = setup.config, setup.loss_kind == "mean"
    splits = plan.accumulate and (config.policy != "fixed" or plan.start.num_micro_batches > 1)
    separate = _is_separate(engine)
    if not (splits or separate or is_number) or not _can_try(setup, engine):
        return
    rows = _first_rows(setup)
    two = _as_loaded(setup, jax.tree.map(lambda x: x[:2], rows))
    if is_number and engine.loss_checks.grows_with_batch(state, two):
        raise ValueError(
            "loss() returned a scalar that grows with the batch: a sum? A scalar is taken for the mean of "
            "the batch, so that a larger batch would take larger steps. Return one loss per sample, "
            "Loss(sum, weight), or the mean."
        )
    # No more rows than a step has, as this needs the memory of a gradient, too.
    half = 2 if plan.start.micro_batch_size >= NUM_TRIED else 1
    choices = unlike_halves(rows, half) if splits or separate else []
    tried = (_as_loaded(setup, four) for four in choices)
    if any(engine.loss_checks.couples_samples(state, four) for four in tried):
        parts = ["micro-batches"] * splits + ["replicas"] * separate
        logging.warning(
            "the loss of a sample depends on the samples beside it (batch statistics, in-batch negatives, "
            "ranks, a mean over tokens), and batches may be split over %s: it then sees only the samples of "
            'its own part. Config.loss="whole" never splits a batch. If samples only differ in weight, such '
            "as their number of tokens, return Loss(sum, weight) instead of a mean.",
            " and ".join(parts),
        )


def try_state(setup: RunSetup, engine: Engine, state: TrainState, *, resumed: bool) -> None:
    """Raise ValueError if replicas' model states, which are averaged, would hold what has no mean.

    `engine` is the one that the run begins with. Other strategies, or processes that join, may give a run
    replicas only later, and it is not to end then.
    """
    if (
        not jax.tree.leaves(state.model_state)
        or (averaging := _who_averages(setup, engine)) is None
    ):
        return
    is_read = resumed and isinstance(
        setup.inputs.dataset, StreamSource
    )  # its first samples are gone
    if is_read or not _can_try(setup, engine):
        return
    tried = [
        engine.loss_checks.added_state(state, _as_loaded(setup, four))
        for four in unlike_halves(_first_rows(setup), 2)
    ]
    added, differing = (tuple(sorted(set().union(*names))) for names in zip(*tried, strict=True))
    who, remedy = averaging
    if added:
        raise ValueError(
            f"the model state {', '.join(added)} adds up over samples, and {who} sees only its own, so that "
            "their mean would be too small. If it only ever adds up, name it in "
            f"Variables(summed={added!r}), from_linen(summed=...) or from_nnx(summed=...), and what the "
            "replicas add is added up. If it is also set or begins anew, as the place in a queue does, "
            f"{remedy}"
        )
    if differing := tuple(name for name in differing if name not in added):
        raise ValueError(
            f"the model state {', '.join(differing)} is not floating and depends on the samples, and {who} "
            "sees its own, so that there is no mean of it. Make it floating if a mean over replicas is "
            "right; or, if it only ever adds up over samples, name it in "
            f"Variables(summed={differing!r}). Or {remedy}"
        )


def _who_averages(setup: RunSetup, engine: Engine) -> tuple[str, str] | None:
    """Return which replicas average their model states, now or later in this run, and how to avoid that.

    None if none will.
    """
    remedy = 'set Config.loss to "global": one call then sees the samples of all replicas.'
    if setup.where.is_elastic:  # each group of processes would still see its own samples only
        who = "each group of processes (others may join this one)"
        return who, f"train it in a fixed number of processes, and {remedy}"
    if _is_separate(engine):
        return f"each of {engine.num_replicas} replicas", remedy
    for name, other in setup.engines.items():
        if _is_separate(other):
            return f"each of {other.num_replicas} replicas under the strategy {name}", remedy
    return None


def _is_separate(engine: Engine) -> bool:
    """Return whether each of several replicas calls the loss with samples of its own."""
    return engine.num_replicas > 1 and not engine.engines.is_global(engine.layout)


def _first_rows(setup: RunSetup) -> PyTree:
    """Return the first samples, at most `NUM_READ` of them."""
    source = setup.inputs.dataset
    if isinstance(source, StreamSource):  # it keeps the samples for training
        count = source.available(0, NUM_READ)
    else:
        count = min(len(source), NUM_READ)
    return narrow(setup.inputs.attempts(lambda: source.batch(np.arange(count))))


def _as_loaded(setup: RunSetup, rows: PyTree) -> PyTree:
    """Return a few rows as the loader would hand them out, if they were the first samples."""
    if setup.config.keys != "sample":
        return rows
    indices = np.arange(len(jax.tree.leaves(rows)[0]))
    return numbered(rows, np.zeros_like(indices), indices)


def _can_try(setup: RunSetup, engine: Engine) -> bool:
    """Return whether this process can try the loss on a few samples without the other processes."""
    source = setup.inputs.dataset
    # Rows of tables are not there yet. Layers in stages need more samples, and processes that share a layout
    # would have to try it together.
    if setup.inputs.tables.plans or engine.spans or engine.layout.strategy.stage > 1:
        return False
    if isinstance(source, StreamSource):
        return source.available(0, NUM_TRIED) >= NUM_TRIED
    return len(source) >= NUM_TRIED
