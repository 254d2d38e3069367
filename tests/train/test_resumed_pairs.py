"""A run is resumed with any other devices, batches, policy and strategies that Config allows.

It continues, and each sample still comes once per epoch. If it is refused instead, following the advice of
the refusal makes it continue.
"""

import dataclasses
import math
import random
import re
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from problems import Counting, InStep, Recorder, counting_config

from jaxgoodput.goodput.search import BatchLimits
from jaxgoodput.parallel.strategy import Strategy, candidates
from jaxgoodput.train.control import Preempted

NUM_SAMPLES = 96
LIMITS = (
    BatchLimits(base=16, max=16),
    BatchLimits(base=16, max=64),
    BatchLimits(base=16, max=48, micro=(1, 4)),
    BatchLimits(base=16, max=64, min_global=4),
    BatchLimits(base=16, max=32, micro=(2, 8), max_micro_batches=2),
    BatchLimits(base=16, max=64, sizes=(2, 3, 8)),
    BatchLimits(base=16, max=96, max_micro_batches=1),
    BatchLimits(base=12, max=60),
)
POLICIES: tuple[Any, ...] = (
    "fixed",
    "goodput",
    {0: 16, 0.4: 32},
    {0: 32, 0.5: 16, 0.7: 48},
    {0: 24},
)
STRATEGIES: tuple[tuple[Strategy, ...], ...] = (
    (),
    (Strategy(data=-1),),
    (Strategy(fsdp=-1),),
    (Strategy(data=2, fsdp=-1),),
    (Strategy(data=-1), Strategy(fsdp=-1)),
    (Strategy(tensor=-1),),
    (Strategy(fsdp=2),),
    (Strategy(data=4),),
)


@dataclass(frozen=True)
class Case:
    devices: int
    limits: BatchLimits
    policy: Any
    strategies: tuple[Strategy, ...]
    accumulate: bool
    others: tuple[tuple[str, Any], ...] = ()

    def run(self, workdir, stop):
        """Two epochs, or up to a step; returns how often each sample was used."""
        settings = counting_config(
            workdir,
            epochs=2,
            batch=self.limits,
            policy=self.policy,
            strategies=self.strategies,
            tuning__accumulate=self.accumulate,
            tuning__remember=False,
            execution__background_compile=True,
            **dict(self.others),
        )
        trainer = Counting(
            settings,
            num_samples=NUM_SAMPLES,
            devices=jax.devices()[: self.devices],
            loop=InStep,
            hooks=[Recorder(lambda e: trainer.request_stop() if e.step == stop else None)],
        )
        return np.asarray(trainer.fit().params["count"])

    def having(self, **settings):
        return dataclasses.replace(self, others=(*self.others, *settings.items()))


def any_case(draw: random.Random) -> Case:
    return Case(
        devices=draw.choice([1, 2, 4, 8]),
        limits=draw.choice(LIMITS),
        policy=draw.choice(POLICIES),
        strategies=draw.choice(STRATEGIES),
        accumulate=draw.random() < 0.7,
    )


def advised(case: Case, text: str) -> Case:
    """The case changed as a refusal says."""
    widened = dataclasses.replace(
        case.limits, min_global=min(4, case.limits.base), max=max(case.limits.max, 48), sizes=None
    )
    if found := re.search(r"needs (a multiple of )?(\d+) devices; got (\d+)", text):
        if "candidates" in text or "Strategy(data" in text:
            return dataclasses.replace(case, strategies=candidates(case.devices))
        return dataclasses.replace(case, devices=int(found[2]))
    if "Widen batch.min_global and batch.max" in text:
        return dataclasses.replace(case, limits=widened)
    if found := re.search(r"batch of (\d+) samples .* can are ([\d and]+): (.*)", text):
        return divisible(case, int(found[1]), [int(n) for n in found[2].split(" and ")], found[3])
    if "Config.saving.allow_changed_data" in text:
        return case.having(saving__allow_changed_data=True)
    raise AssertionError(f"no advice to follow: {text}")


def divisible(case: Case, batch: int, near: list[int], advice: str) -> Case:
    """The case with a batch that can be split, by the last way that is named."""
    limits = case.limits
    ways = advice.split(", or ")
    if found := re.match(r"raise batch.max_micro_batches to (\d+)", ways[-1]):
        more = dataclasses.replace(limits, max_micro_batches=int(found[1]))
        return dataclasses.replace(case, limits=more)
    if "Tuning.accumulate" in ways[-1]:
        return dataclasses.replace(case, accumulate=True)
    if "raise tuning.fixed_tolerance" in ways[-1]:
        return case.having(tuning__fixed_tolerance=0.9)
    assert ways == [way for way in ways if "one of them" in way], advice
    if "Config.policy" in ways[0]:
        policy = {at: near[-1] if size == batch else size for at, size in case.policy.items()}
        most = max(limits.max, *policy.values())
        least = min(limits.smallest, *policy.values())
        return dataclasses.replace(
            case, policy=policy, limits=dataclasses.replace(limits, max=most, min_global=least)
        )
    base = near[-1]
    return dataclasses.replace(
        case, limits=dataclasses.replace(limits, base=base, max=max(base, limits.max))
    )


def carried_out(case: Case, workdir, stop=math.inf, most=4):
    """Run a case, following the advice of refusals; return the counts."""
    said = []
    for _ in range(most):
        try:
            return case.run(workdir, stop), said
        except Preempted:
            return None, said
        except ValueError as error:
            said.append(str(error))
            case = advised(case, str(error))
    raise AssertionError("advice that does not help:\n" + "\n".join(said))


def check(workdir, draw: random.Random) -> None:
    first, second = any_case(draw), any_case(draw)
    stop = draw.choice([1, 2, 3, 5])
    what = f"{first}\n{second}\nstop={stop}"
    try:
        counts, _ = carried_out(first, workdir, stop)
        counts, said = carried_out(second, workdir)
    except Exception as error:
        raise AssertionError(what) from error
    assert counts is not None and (counts == 2).all(), f"{what}\n{said}\n{counts}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_run_is_resumed_as_any_other(tmp_path, seed):
    check(tmp_path, random.Random(seed))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
def test_pairs(tmp_path, part):
    for number in range(20):
        check(tmp_path / str(number), random.Random(f"{part} {number}"))
