"""The race between batch sizes, for the user: what is measured about each of them, what is guessed. Pure.

Nothing is decided here. `tune/batch.py` and `tune/exploring.py` decide; this file lays out what they know.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from jaxgoodput.goodput.efficiency import efficiency
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.text import compact, estimate, roughly, seconds, with_error
from jaxgoodput.tune.batch import assumed_growth
from jaxgoodput.tune.evidence import Stretch
from jaxgoodput.tune.exploring import AccountState
from jaxgoodput.tune.verdict import Situation

Standing = Literal[
    "in use",
    "on trial",
    "before the trial",
    "banned",
    "tried",
    "compiled",
    "too large",
    "being compiled",
    "not compiled",
]
"""How far a batch has come. `banned`: the loss has rejected it or a smaller one; `compiled`: but never tried;
`too large`: for the memory; `being compiled`: or about to be."""
Basis = Literal["unknown", "guessed", "modelled", "disturbed", "measured"]
"""How a step time is known. `guessed`: from the one batch that was timed; `modelled`: by a line through
several; `disturbed`: measured beside a compilation only."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One batch in the race."""

    is_part: ClassVar[bool] = True  # a journal of another version may have more fields
    config: BatchConfig
    standing: Standing
    gained: float = math.nan
    """Measured decrease of the loss per e-fold of samples when the batch was last in use; NaN if unknown."""
    gained_error: float = math.nan
    """Standard error of `gained`."""
    num_steps: int = 0
    """Steps that `gained` was measured over."""
    until_samples: float = math.nan
    """Samples that the run had trained on when `gained` was measured."""
    step_s: float = math.nan
    """Seconds of a step, without a noise measurement; NaN if unknown."""
    basis: Basis = "unknown"
    """How `step_s` is known."""
    goodput: float = math.nan
    """Useful samples/s: the batch over `step_s`, times its forecast efficiency; or NaN."""

    @property
    def is_timed(self) -> bool:
        """Whether the step time was measured, undisturbed or not."""
        return self.basis in ("measured", "disturbed")


def race_of(
    situation: Situation,
    slopes: Mapping[int, Stretch],
    *,
    sizes: Sequence[int],
    settled: Collection[int],
    memory_limit: int,
) -> tuple[Contender, ...]:
    """Return all batches of one micro-batch within the limits, and others that were used, smallest first.

    `slopes` are the measured loss decreases by global batch, `sizes` the micro-batch sizes of the strategy in
    use. `settled` of them are compiled, refused or queued, and the largest expected to fit into memory is
    `memory_limit`, 0 if unknown.
    """
    batches = _batches(situation, slopes, sizes)
    seconds, bases = zip(*(_step_s(situation, one) for one in batches.values()), strict=True)
    base = situation.here.limits.base
    size, step_s = np.array(list(batches), float), np.array(seconds)
    # The base batch has efficiency 1 whatever the noise.
    worth = np.where(size == base, 1.0, efficiency(situation.grad, size / base))
    found = []
    for (batch, config), basis, pace_s, useful in zip(
        batches.items(), bases, step_s, size / step_s * worth, strict=True
    ):
        one = Contender(
            config=config,
            standing=_standing(situation, config, settled, memory_limit),
            step_s=float(pace_s),
            basis=basis,
            goodput=float(useful),
        )
        if (slope := slopes.get(batch)) is not None:
            one = dataclasses.replace(
                one,
                gained=slope.gained,
                gained_error=slope.error,
                num_steps=slope.num_steps,
                until_samples=slope.until_samples,
            )
        found.append(one)
    return tuple(found)


def _batches(
    situation: Situation, slopes: Mapping[int, Stretch], sizes: Sequence[int]
) -> dict[int, BatchConfig]:
    """Return the configurations to show, by global batch; the ones that were in use go before others."""
    current, limits, bar = situation.current, situation.here.limits, situation.bar
    plain = [
        dataclasses.replace(current, micro_batch_size=size, num_micro_batches=1) for size in sizes
    ]
    shown = [c for c in plain if limits.smallest <= c.global_batch_size <= limits.max]
    shown += [] if bar is None else [bar.was.config]
    shown += [slope.config for slope in slopes.values()] + [situation.incumbent, current]
    return dict(sorted({c.global_batch_size: c for c in shown}.items()))


def _standing(
    situation: Situation, config: BatchConfig, settled: Collection[int], memory_limit: int
) -> Standing:
    here, bar, size = situation.here, situation.bar, config.micro_batch_size
    if config == situation.current:
        return "in use" if situation.home is None else "on trial"
    if config == situation.incumbent:
        return "before the trial"
    if bar is not None and config.global_batch_size >= bar.global_batch_size:
        return "banned"
    if config.strategy != here.config.strategy or size in {*here.timed, *situation.seconds_by_size}:
        return "tried"
    if size in here.ready:
        return "compiled"
    if 0 < memory_limit < size:
        return "too large"
    return "being compiled" if size in settled else "not compiled"


def _step_s(situation: Situation, config: BatchConfig) -> tuple[float, Basis]:
    """Return the seconds of a step, and how they are known."""
    here, current, size = situation.here, situation.current, config.micro_batch_size
    if config.strategy != current.strategy or config.num_replicas != current.num_replicas:
        return math.nan, "unknown"
    seconds = situation.seconds_by_size
    one = seconds.get(size, math.nan) if config.num_micro_batches == 1 else math.nan
    measured_s = situation.step_s if config == current else one
    if measured_s > 0:
        return measured_s, "measured" if size in situation.clean else "disturbed"
    if here.fit is not None and len(seconds) > 1:
        model, at = here.model(situation.grad), (size, config.num_micro_batches)
        modelled_s = config.global_batch_size / float(model.throughput(here.placement, *at))
        if modelled_s > 0:
            return modelled_s, "modelled"
    if not situation.step_s > 0:
        return math.nan, "unknown"
    there = np.array(float(config.global_batch_size))
    return situation.step_s * float(assumed_growth(situation, there)), "guessed"


COLUMNS = ("batch", "standing", "loss decrease", "steps", "step", "known by", "goodput")
NOTE = "(loss decrease: per e-fold of samples, +- two standard errors; goodput: useful samples per second)"
_KNOWN_BY = {
    "unknown": "-",
    "guessed": "guess",
    "modelled": "model",
    "disturbed": "busy steps",
    "measured": "steps",
}


def cells(one: Contender) -> tuple[str, ...]:
    """Return what is known of a batch as text, by `COLUMNS`; guesses have two digits and a mark."""
    duration, number = (seconds, compact) if one.is_timed else (roughly, estimate)
    about = "" if one.is_timed else "~ "
    return (
        str(one.config.global_batch_size),
        one.standing,
        with_error(one.gained, 2 * one.gained_error),
        compact(one.num_steps) if one.num_steps else "-",
        f"{about}{duration(one.step_s)}" if math.isfinite(one.step_s) else "-",
        _KNOWN_BY[one.basis],
        f"{about}{number(one.goodput)}" if math.isfinite(one.goodput) else "-",
    )


def balance(account: AccountState) -> str:
    """Return the account of exploring as a sentence.

    >>> balance(AccountState(earned_s=2.0, spent_s=3.25, loan_s=1.0))
    'exploring other sizes has delayed training by about 3.2 s; 2 s were earned and 1.2 s are borrowed'
    """
    spent = f"exploring other sizes has delayed training by about {roughly(account.spent_s)}"
    if not account.spent_s > 0:
        spent = "exploring other sizes has cost nothing so far"
    borrowed = f" and {roughly(account.borrowed_s)} are borrowed" if account.borrowed_s > 0 else ""
    return f"{spent}; {roughly(account.earned_s)} were earned{borrowed}"
