"""Programs are lowered for accelerators that are not there, and call nothing that only a CPU has."""

import re

import engines
import optax
import pytest

from jaxgoodput.parallel.strategy import Strategy

# The partitioner's own marks, which it removes again.
MARKS = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize(
    "strategy", [Strategy(data=8), Strategy(fsdp=4, tensor=2)], ids=lambda s: s.name
)
def test_every_program_is_lowered_for_other_platforms(platform, strategy):
    engine = engines.make(strategy=strategy, tx=optax.adamw(0.1), preconditioned=True)
    programs, shape = engine.programs, engine.shape(2)
    every = [
        programs.fresh.init(),
        programs.begin(),
        programs.update(),
        programs.step_after(shape),
        *(programs.accumulate(shape, first=first) for first in (True, False)),
        *(programs.step(shape, measure=measure) for measure in (False, True)),
    ]
    for program in every:
        text = program.lower(platform).as_text()
        assert set(re.findall(r"custom_call @(\w+)", text)) <= MARKS
        assert "mhlo.num_partitions = 8" in text
