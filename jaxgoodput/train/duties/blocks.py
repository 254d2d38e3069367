"""`Blocks`: has several steps dispatched at once if they are short.

A block is read, put on the device, dispatched and waited for as one; each of its steps has its own result.
Before a step that measures the noise, or at which something is due, a part of a block is dispatched, where
its program can run a part, else single steps are. If single steps run in loops anyway
(`train.start.looping`), the first step may be in a block.

Otherwise the program of blocks is compiled beside training if it pays, and the first steps of a size on trial
are dispatched alone. What blocks have saved at another size is therefore taken off its times, or it would
seem slower than it will be. If the steps of blocks take longer than steps alone, twice, blocks pause, ten
times as long each time. To be compared, some steps are dispatched alone first, beside a compilation and
without one.

The compiler fuses a step in a loop in another way than one alone, so that results differ by rounding. When
blocks begin depends on measured times. A run that nothing measured may change has no blocks (`may_round`), so
that it, resumed or not, gives the same bits each time.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from absl import logging

from jaxgoodput._jax import looks_for
from jaxgoodput.data.loader import StepBatch
from jaxgoodput.engine.memory import step_bytes
from jaxgoodput.engine.programs.program import Program
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.train.analyst import Analyst
from jaxgoodput.train.config import Config
from jaxgoodput.train.prepare import PreparedRun
from jaxgoodput.train.start.looping import SAVED_S, may_round
from jaxgoodput.tune.block_times import SHORT_S

# Share of a step that a block saves on a CPU beside its dispatch, about: the loop's threads take processors
# from a step.
SAVED_ON_CPU = 0.2
LOOK_EVERY = 16  # steps
SETTLED = 16  # steps after which a batch is not only tried
FIRST_PAUSE = 512  # steps, more than are compared; ten times as many each time


@dataclass(frozen=True, kw_only=True)
class _Length:
    """Whether the steps of a batch were long when their times were last looked at, at `step`."""

    batch: BatchConfig | None = None
    step: int = 0
    is_long: bool = False


@dataclass
class Blocks:
    """Gets the next batch, or the next block of batches."""

    start: PreparedRun
    config: Config
    analyst: Analyst
    _asked: set[BatchConfig] = field(default_factory=set)
    _slower: dict[BatchConfig, int] = field(default_factory=dict)
    """The step from which blocks are tried again, for batches whose steps took longer in them."""
    _suspected: set[BatchConfig] = field(default_factory=set)
    """Batches whose blocks took longer than steps alone when they were compared last."""
    _has_room: dict[BatchConfig, bool] = field(default_factory=dict)
    """Whether the compiled block of a batch fits into memory."""
    _pause: Counter[BatchConfig] = field(default_factory=Counter)
    """Steps until then, the last time."""
    _since: tuple[BatchConfig | None, int] = (None, 0)
    """The batch in use, and the step at which it was first seen."""
    _long: _Length = _Length()
    _rest: StepBatch | None = None
    """What is left of a block that is handed out in parts."""
    _at_end: bool = False
    """Whether a stream has fewer samples left than a block has."""

    def next(self, num_free: float, meanwhile: Callable[[], None]) -> StepBatch | None:
        """Return the next batch or, if the next `num_free` steps need no attention, a block; None at the end.

        `meanwhile` is called now and then while it waits, and may raise.
        """
        now, loader, rest = self.start.now, self.start.loader, self._rest
        if rest is not None and rest.config != now.batch:
            loader.go_back(rest.before, rest.num_samples)
            rest = self._rest = None
        if rest is None:
            if not self._is_ready():
                return self.start.run.next_batch(now, meanwhile)
            rest = loader.next_block(now.batch, self._length, meanwhile=meanwhile)
            if rest is None or rest.count == 1:  # a stream is near its end
                self._at_end = True
                return rest
        part, self._rest = loader.split(rest, self._most(rest, num_free))
        return part

    @property
    def _length(self) -> int:
        """Steps of a block."""
        return self.start.now.engine.blocks.num_steps

    def _most(self, block: StepBatch, num_free: float) -> int:
        """Return how many steps of a block to dispatch at once, if `num_free` need no attention."""
        if self.start.now.engine.blocks.can_split:
            return 1 if self._is_long(block.config) else max(int(min(num_free, block.count)), 1)
        return block.count if block.count == self._length <= num_free else 1

    def _is_long(self, batch: BatchConfig) -> bool:
        """Whether steps of a batch take so long that none needs to share a dispatch."""
        known, at, step = self._long.batch, self._long.step, self.start.now.step
        if known != batch or step - at >= LOOK_EVERY:  # a median takes as long as some steps
            step_s = self.analyst.step_s(batch)
            if math.isnan(step_s):  # known after the next step, perhaps
                return False
            self._long = _Length(batch=batch, step=step, is_long=step_s >= SHORT_S)
        return self._long.is_long

    def _is_ready(self) -> bool:
        """Whether the next batches may be read as a block; has its program compiled if that will pay."""
        now, batch = self.start.now, self.start.now.batch
        if self._at_end or not self._are_possible(batch):
            return False
        if now.engine.blocks.loops(now.engine.shape(batch.micro_batch_size)):
            return self._left() >= self._length
        if batch != self._since[0]:
            self._since = batch, now.step
        programs = self._programs(batch)
        is_time = now.step % LOOK_EVERY < self._length  # blocks may step over a multiple
        if all(now.engine.compiled.peek(x) is not None for x in programs):
            if not self._fits(batch):
                return False
            if now.step >= self._slower.get(batch, 0) and is_time:
                self._compare(batch)
            is_wanted = now.step >= self._slower.get(batch, 0) and self._left() >= self._length
            busy = self.start.strategies.is_busy
            return is_wanted and self.analyst.blocks.knows_alone(batch, busy=busy)
        is_settled = now.step - self._since[1] >= SETTLED
        if batch not in self._asked and is_time and is_settled and self._pay(batch):
            self._asked.add(batch)
            self.start.strategies.compiler(batch.strategy).compile_soon(programs)
        return False

    def _fits(self, batch: BatchConfig) -> bool:
        """Whether a compiled block fits into memory: it holds the rows of all its steps."""
        if batch not in self._has_room:
            found = map(self.start.now.engine.compiled.peek, self._programs(batch))
            has_room = self.start.strategies.has_room_for
            self._has_room[batch] = all(has_room(step_bytes(x)) for x in found if x is not None)
            if not self._has_room[batch]:
                logging.info("steps of %s run one by one: a block of them does not fit", batch)
        return self._has_room[batch]

    def _programs(self, batch: BatchConfig) -> tuple[partial[Program], ...]:
        """Return the programs that run blocks of a batch, and take single steps out of them."""
        engine = self.start.now.engine
        return engine.blocks.programs(engine.shape(batch.micro_batch_size))

    def _compare(self, batch: BatchConfig) -> None:
        """Find out what blocks save; if they take longer twice, none are dispatched for a while.

        Something else may have held up the machine while blocks were timed, and not while steps alone were.
        So both are timed once more, soon after each other, and blocks are tried again, ever more rarely.
        """
        saved_s = self.analyst.blocks.compare(batch)
        # A block of copies takes as long to compile as several sizes. It waits until its size is kept: with
        # its price added, no other size would be worth trying.
        if saved_s > 0 and self.start.now.engine.blocks.compile_cost <= 1:
            self._compile_along(batch)
        if saved_s >= 0:
            self._suspected.discard(batch)
        elif saved_s < 0:
            self.analyst.blocks.forget(batch)
            if batch in self._suspected:
                self._pause[batch] = self._pause[batch] * 10 or FIRST_PAUSE
                self._slower[batch] = self.start.now.step + self._pause[batch]
                self.start.strategies.compiler(batch.strategy).compile_along(lambda size: ())
            self._suspected ^= {batch}

    def _compile_along(self, batch: BatchConfig) -> None:
        """Have the blocks of other sizes compiled before these are tried, if their steps will be as short.

        Otherwise each larger batch would begin with slow steps, beside the compilation of its blocks.
        """
        engine, most = self.start.now.engine, SHORT_S / self.analyst.step_s(batch)

        def programs_of(size: int) -> Sequence[partial[Program]]:
            is_short = size <= most * batch.micro_batch_size  # if they grow in proportion
            return engine.blocks.programs(engine.shape(size)) if is_short else ()

        self.start.strategies.compiler(batch.strategy).compile_along(programs_of)

    def _are_possible(self, batch: BatchConfig) -> bool:
        start = self.start
        return (
            may_round(self.config)
            and start.run.runs_blocks
            and start.loader.can_read_blocks(self._length * batch.global_batch_size)
            and batch.num_replicas == batch.num_micro_batches == 1
            and not looks_for()  # JAX looks at the results of single steps
        )

    def _pay(self, batch: BatchConfig) -> bool:
        """Whether a program of blocks would save more time than compiling it takes."""
        step_s, saved_s = self.analyst.step_s(batch), SAVED_S
        if self.start.now.engine.blocks.is_on_cpu:
            saved_s = max(saved_s, SAVED_ON_CPU * step_s)
        compile_s = self.start.compile_s * self.start.now.engine.blocks.compile_cost
        return step_s < SHORT_S and self._left() * saved_s > compile_s

    def _left(self) -> float:
        """Return how many steps at this batch the data and the settings leave, at most."""
        start, now, base_steps = self.start, self.start.now, self.config.base_steps
        left, size = math.inf, now.batch.global_batch_size
        if start.total_samples is not None:
            left = float((start.total_samples - now.samples) // size)
        if base_steps is not None:  # a step is worth as many base steps at most
            left = min(left, (base_steps - now.progress) * self.config.batch.base / size)
        return left
