"""What could be used next, compiled and tried behind the loop's back: sizes, and other strategies.

Of the strategy in use, micro-batch sizes: what the next change can reach is compiled first, and within it
the largest. A size that XLA's analysis says does not fit is not used, nor anything above it. Where memory
allows, each is run once on throw-away buffers, because a first execution is slow even when it is compiled.
Only a size that went through both is ready, with what measures the noise where memory allows that, and only
ready sizes are ever chosen: the noise is measured from the first step of a new size on. A size that was
asked for before it was ready has its measuring programs compiled before anything else.

Behind it, one after another, the other strategies have one size compiled and tried, that which comes nearest
to the present batch, and the moves of the state there and back. A strategy under which no step fits into
memory is left out. Nothing is offered that would have to be compiled.
"""

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from absl import logging

from jaxgoodput.engine.chips import Arithmetic, chip_of
from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.programs import Program
from jaxgoodput.goodput.memory import StepBytes, TooLarge, largest_that_fits
from jaxgoodput.goodput.perf import Placement
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.parallel.move import MoveDoesNotFit
from jaxgoodput.parallel.partition import CannotDivide
from jaxgoodput.tune.plan import BatchPlan, Indivisible
from jaxgoodput.tune.verdict import StrategyOption

# Bytes per second of a move that was not measured yet; a modest memory or link.
ASSUMED_BYTES_PER_S = 1e9


_UNMEASURED = (
    "steps of %d samples per replica fit into memory, but not with a noise measurement: the noise is not "
    "measured while they are used. Lower batch.max, or raise execution.memory_bytes."
)
_TOO_FEW = (
    "steps of %d samples per replica, in one micro-batch, have no two groups of samples to compare: the "
    "noise is not measured while they are used. Use a larger batch.base, or return per-sample losses [batch] "
    "instead of their mean."
)


@runtime_checkable
class ReadyStrategies(Protocol):
    """What the analyst asks of whoever compiles: which strategies and sizes could be used now.

    Strategies go by name; "" is the only one where none was asked for.
    """

    @property
    def num_strategies(self) -> int:
        """How many there are, prepared or not."""
        ...

    def limits(self, strategy: str) -> BatchLimits:
        """What data, devices and memory allow."""
        ...

    def sizes(self, strategy: str) -> Sequence[int]:
        """Micro-batch sizes that may ever be used, samples per replica."""
        ...

    def ready(self, strategy: str) -> Sequence[int]:
        """Those that are compiled."""
        ...

    def memory_limit(self, strategy: str) -> int:
        """The largest that fits, by what is known; 0 = none known."""
        ...

    def arithmetic(self, config: BatchConfig) -> Arithmetic:
        """What a sample takes under a configuration, and what its devices could do."""
        ...

    def others(self) -> Sequence[StrategyOption]:
        """The other strategies that are ready; what is known of their speed is left out."""
        ...

    def start(self) -> None:
        """Compile the others in the background from now on."""
        ...


def compiling_order(sizes: Sequence[int], first: int) -> tuple[int, ...]:
    """`first`, then the largest, then always the middle of what is left; two up for one down.

    The largest first: growing is what pays early, and a batch that has far to go should not have to
    wait for every size on the way.

    >>> compiling_order([1, 2, 4, 8, 16, 32, 64], 4)
    (4, 64, 16, 2, 32, 8, 1)
    """
    ups = [s for s in sorted(sizes) if s > first]
    downs = [s for s in sorted(sizes, reverse=True) if s < first]
    spread = ups[-1:]
    del ups[-1:]
    while ups:
        spread.append(ups.pop(len(ups) // 2))
    order = [first]
    while spread or downs:
        order += spread[:2]
        del spread[:2]
        order += downs[:1]
        del downs[:1]
    return tuple(order)


class SizeCompiler:
    """Owns the thread that compiles; `ready` grows as it goes.

    `near` names the size in use, the first time one that the engine has compiled already; only sizes
    that two changes by a factor `reach` can get to are compiled, and more as it moves, from `start` on.
    Sizes are taken up in one order, which is the same in every process that is told the same. Without
    `background` there is no thread, and what is missing is compiled where it is asked for.
    """

    def __init__(
        self,
        engine: Engine,
        sizes: Sequence[int],
        *,
        accumulate: bool,
        budget: int,
        reach: float = 4.0,
        background: bool = True,
    ):
        self._engine = engine
        self._sizes = tuple(sizes)
        self._accumulate = accumulate
        self._budget = budget
        self._reach = reach
        self._background = background
        self._changed = threading.Condition()
        self._current: int | None = None  # in use
        self._others = False  # whether others are compiled, too
        self._order: list[int] = []
        self._next = 0  # index into the order
        self._ready: list[int] = []
        self._measurable: dict[int, bool] = {}  # False: memory does not allow it
        self._known: dict[int, StepBytes] = {}
        self._smallest_refused: int | None = None
        self._soon: tuple[Callable[[], Program], ...] = ()  # before anything else
        self._stopping = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def num_wanted(self) -> int:
        """Sizes taken up so far, compiled or waiting."""
        with self._changed:
            return len(self._order)

    def near(self, size: int) -> None:
        """`size` is in use: take up the sizes around it, and have it measure the noise."""
        with self._changed:
            # The first was compiled before the start, but for what measures in an elastic job.
            waits = self._engine.world is not None and self._engine.measuring_programs(size)
            if not self._order and not waits:
                need = self._engine.measuring_bytes_of(size)
                fits = need is None or need.peak <= self._budget
                self._measurable[size] = self._engine.can_measure(size) and fits
            self._current = size
            # What the next change can reach comes first, then what the one after it can.
            for reach in (self._reach, self._reach**2):
                low, high = size / reach, size * reach
                around = [s for s in self._sizes if low <= s <= high]
                order = compiling_order([*around, size], size)
                self._order += [s for s in order if s not in self._order]
            missing, cannot = self._to_measure(), self._measurable.get(size) is False
            if missing is not None and self._background:
                self._run_thread()
            self._changed.notify_all()
        if cannot:
            logging.warning(self._why_unmeasured(size), size)
        if missing is not None and not self._background:
            self._prepare_measuring(missing)

    def compile_first(self, sizes: Iterable[int]) -> None:
        """Take these up before all others and compile them on the caller's thread; nothing runs yet."""
        first = [s for s in dict.fromkeys(sizes) if s in self._sizes]
        self._order = [*first, *(s for s in self._order if s not in first)]
        for size in first:
            self._try(size)
            self._next += 1

    @property
    def num_settled(self) -> int:
        """How many of the sizes taken up, in their order, are compiled or refused."""
        with self._changed:
            if self._error is not None:
                raise self._error
            return self._next

    def ready(self, *, first: int | None = None) -> tuple[int, ...]:
        """Sizes that can be used now, in the order in which they were taken up.

        `first` leaves out those that were taken up after so many.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            return tuple(s for s in self._ready if first is None or s in self._order[:first])

    def can_measure(self, size: int) -> bool:
        """Whether steps of this size can measure the noise by now."""
        with self._changed:
            return self._measurable.get(size, False)

    @property
    def memory_limit(self) -> int:
        """The largest size that fits by what is known now, samples per replica; 0 = none known."""
        with self._changed:
            known = dict(self._known)
        return largest_that_fits(self._sizes, known, self._budget) if known else 0

    @property
    def is_busy(self) -> bool:
        """Whether something is being compiled or tried now, which slows the steps beside it."""
        with self._changed:
            return self._is_waiting() and self._thread is not None and not self._stopping

    def start(self) -> None:
        """Compile other sizes in the background, from now on. Further calls change nothing."""
        with self._changed:
            self._others = True
            self._run_thread()
            self._changed.notify_all()

    def compile_soon(self, programs: Sequence[Callable[[], Program]]) -> None:
        """Compile these next, in the background; without one, whoever needs them does."""
        with self._changed:
            self._soon = tuple(programs) if self._background else ()
            if self._soon:
                self._run_thread()
                self._changed.notify_all()

    def _run_thread(self) -> None:
        """Have a thread; the lock is held."""
        if self._thread is None and not self._stopping:
            self._thread = threading.Thread(
                target=self._run, name="jaxgoodput-compile", daemon=True
            )
            self._thread.start()

    def compile_all(self) -> None:
        """Compile all that was taken up on the caller's thread."""
        with self._changed:
            self._others = True
        while self._step():
            pass

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything taken up was tried; True once it is so."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._is_waiting() or self._error is not None, timeout_s
            )

    def close(self) -> None:
        """Stop after the executable in hand."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def abandon(self) -> None:
        """Stop, and leave the thread to the executable in hand: for a process that is about to end."""
        with self._changed:
            self._stopping, self._thread = True, None
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping or self._is_waiting())
                    if self._stopping:
                        return
                self._step()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _is_waiting(self) -> bool:
        """Whether there is anything left to do; the lock is held."""
        is_other = self._others and self._next < len(self._order)
        return is_other or bool(self._soon) or self._to_measure() is not None

    def _to_measure(self) -> int | None:
        """The size in use, if it cannot measure the noise yet; the lock is held."""
        return None if self._current in self._measurable else self._current

    def _step(self) -> bool:
        """Compile what is wanted soon, have the size in use measure, or try the next one; False where there
        is none of it.
        """
        if soon := self._soon:
            self._compile(soon)
            with self._changed:
                self._soon = self._soon if self._soon is not soon else ()
                self._changed.notify_all()
            return not self._stopping
        with self._changed:
            if self._stopping or not self._is_waiting():
                return False
            missing = self._to_measure()
            size = self._order[self._next] if missing is None else missing
        if missing is not None:
            self._prepare_measuring(missing)
            return True
        self._try(size)
        with self._changed:
            self._next += 1
            self._changed.notify_all()
        return True

    def _prepare_measuring(self, size: int) -> None:
        engine = self._engine
        if not self._compile(engine.measuring_programs(size)):
            return
        need = engine.measuring_bytes_of(size)
        fits = engine.can_measure(size) and (need is None or need.peak <= self._budget)
        if not fits:
            log = logging.warning if size == self._current else logging.info
            log(self._why_unmeasured(size), size)
        elif need is not None and need.peak * 2 <= self._budget:  # a second copy of everything
            engine.rehearse_measuring(size)
        with self._changed:
            self._measurable[size] = fits
            self._changed.notify_all()

    def _why_unmeasured(self, size: int) -> str:
        return _UNMEASURED if self._engine.can_measure(size) else _TOO_FEW

    def _compile(self, programs: Sequence[Callable[[], Program]]) -> bool:
        """Compile these, unless told to stop meanwhile; False then."""
        for program in programs:
            if self._stopping:
                return False
            self._engine.compile_program(program)
        return True

    def _try(self, size: int) -> None:
        if self._smallest_refused is not None and size >= self._smallest_refused:
            return
        engine = self._engine
        # What is shared too, should this be the first that accumulates; it may never be rehearsed.
        shared = engine.shared_programs(accumulate=self._accumulate)
        own = engine.training_programs(size, accumulate=self._accumulate)
        if not self._compile([*own, *shared]):
            return
        need = engine.bytes_of(size)
        assert need is not None
        with self._changed:
            self._known[size] = need
        if need.peak > self._budget:
            self._smallest_refused = size
            logging.info(
                "micro-batches of %d samples per replica would need %.0f MiB, more than the %.0f MiB "
                "there are: not used",
                size,
                need.peak / 2**20,
                self._budget / 2**20,
            )
            return
        # A rehearsal holds a second copy of everything.
        if need.peak * 2 <= self._budget:
            engine.rehearse(size, accumulate=self._accumulate)
        if size not in self._measurable:
            self._prepare_measuring(size)
        with self._changed:
            self._ready.append(size)


class StrategyCompiler:
    """Owns the `SizeCompiler` of every strategy used so far and the thread that prepares the others.

    `engines` are those of all strategies by name; `plan` is that of the one to start with, `plan_of` makes
    that of another. `budget` is what a device has, in bytes; `reach` by which factor a batch may grow at
    once; without `background` all is compiled where it is asked for. `compile_more` compiles what else a
    strategy needs, such as an evaluation.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        plan: BatchPlan,
        plan_of: Callable[[str], BatchPlan],
        *,
        budget: int,
        reach: float,
        background: bool = True,
        compile_more: Callable[[Engine], None] = lambda engine: None,
    ):
        self._engines = dict(engines)
        self._plan_of = plan_of
        self._budget = budget
        self._reach = reach
        self._background = background
        self._compile_more = compile_more
        self._changed = threading.Condition()
        self._current = plan.start
        self._plans = {plan.start.strategy: plan}
        self._sizes = {plan.start.strategy: self._size_compiler(plan)}
        self._prepared: dict[str, int] = {}  # micro-batch size that is ready besides
        self._left_out: set[str] = set()  # strategies that do not fit
        self._measured_s: list[float] = []
        self._measured_bytes: list[int] = []
        self._preparing = 0  # strategies that are being prepared now
        self._turns = {name: threading.Lock() for name in engines}
        self._stopping = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        # By strategy, how many sizes all processes have settled; None: there is one process.
        self.settled_everywhere: dict[str, int] | None = None

    @property
    def num_strategies(self) -> int:
        """How many there are, prepared or not."""
        return len(self._engines)

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, in the same order in every process."""
        return tuple(self._engines)

    def engine(self, strategy: str) -> Engine:
        """The engine of a strategy.

        Raises ValueError where the run does not have it.
        """
        if strategy not in self._engines:
            raise ValueError(
                f"this run has no strategy {strategy!r}; Config.strategies has "
                f"{', '.join(self._engines).strip() or 'none'}."
            )
        return self._engines[strategy]

    def compiler(self, strategy: str) -> SizeCompiler:
        """What compiles the sizes of a strategy that is or was in use."""
        with self._changed:
            return self._sizes[strategy]

    def limits(self, strategy: str) -> BatchLimits:
        """The limits of a strategy that is planned, by data, devices and memory."""
        with self._changed:
            return self._plans[strategy].limits

    def sizes(self, strategy: str) -> tuple[int, ...]:
        """Micro-batch sizes that a strategy may ever use."""
        with self._changed:
            return self._plans[strategy].sizes

    def ready(self, strategy: str) -> Sequence[int]:
        """Sizes of a strategy that every process has compiled, in the same order everywhere."""
        with self._changed:
            self._raise()
            sizes, own = self._sizes.get(strategy), self._prepared.get(strategy)
        settled = self.settled_everywhere
        first = None if settled is None else settled.get(strategy, 0)
        compiled = () if sizes is None else sizes.ready(first=first)
        if settled is not None and len(self._engines) == 1:
            return compiled
        # What one process has prepared for a switch, the others compile when it comes.
        return tuple(dict.fromkeys([*compiled, *([] if own is None else [own])]))

    def memory_limit(self, strategy: str) -> int:
        """The largest micro-batch of a strategy that fits, by what is known."""
        return self.compiler(strategy).memory_limit

    def arithmetic(self, config: BatchConfig) -> Arithmetic:
        """What a sample takes under a configuration, and what its devices could do."""
        engine = self.engine(config.strategy)
        layout = engine.layout
        chip = chip_of(layout.mesh.devices.flat[0])
        return Arithmetic(
            tflops_per_sample=engine.tflops_per_sample(config.micro_batch_size),
            num_devices=config.num_replicas // layout.num_replicas * layout.num_devices,
            peak_tflops=math.nan if chip is None else chip.flops / 1e12,
        )

    @property
    def is_busy(self) -> bool:
        """Whether something is being compiled or tried now, which slows the steps beside it."""
        with self._changed:
            compilers, preparing = list(self._sizes.values()), self._preparing
        return preparing > 0 or any(compiler.is_busy for compiler in compilers)

    def start(self) -> None:
        """Compile the other sizes, and then the other strategies, in the background from now on."""
        with self._changed:
            self._sizes[self._current.strategy].start()
            if self._thread is None and len(self._engines) > 1 and not self._stopping:
                self._thread = threading.Thread(
                    target=self._prepare_others, name="jaxgoodput-strategies", daemon=True
                )
                self._thread.start()

    def prepare(self) -> None:
        """Prepare every strategy on the caller's thread."""
        self.compiler(self._current.strategy).compile_all()
        for strategy in self._engines:
            self._prepare(strategy)

    def require(self, strategy: str) -> None:
        """Prepare one strategy on the caller's thread, if it is not yet.

        Raises TooLarge where it does not fit into memory, ValueError where the run does not have it.
        """
        self.engine(strategy)
        self._prepare(strategy)
        with self._changed:
            if strategy not in self._prepared:
                raise TooLarge(
                    f"the strategy {strategy} was left out: no step, or no move of the state, fits into "
                    "memory under it."
                )

    def fits(self, config: BatchConfig) -> bool:
        """Whether steps of `config` fit into memory; compiles on the caller's thread what is missing."""
        engine, size = self.engine(config.strategy), config.micro_batch_size
        for program in engine.training_programs(size, accumulate=config.num_micro_batches > 1):
            engine.compile_program(program)
        need = engine.bytes_of(size)
        return need is None or need.peak <= self._budget

    def leave_out(self, strategy: str) -> None:
        """Never offer this strategy again."""
        with self._changed:
            self._prepared.pop(strategy, None)
            self._left_out.add(strategy)

    def others(self) -> tuple[StrategyOption, ...]:
        """The other strategies that can be switched to without compiling."""
        with self._changed:
            self._raise()
            current, prepared = self._current, dict(self._prepared)
            plans = dict(self._plans)
        found = []
        for strategy, size in prepared.items():
            if strategy == current.strategy:
                continue
            config = plans[strategy].nearest(size, current.global_batch_size)
            if config is not None:
                other = StrategyOption(
                    config=config,
                    limits=plans[strategy].limits,
                    placement=Placement(num_nodes=1, num_replicas=config.num_replicas),
                    ready=self.ready(strategy),
                    switch_s=self.switch_s(strategy),
                )
                found.append(other)
        return tuple(found)

    def switch_s(self, strategy: str) -> float:
        """What moving the state from the present strategy to another costs."""
        here = self._engines[self._current.strategy]
        moved = here.plan_move(self._engines[strategy].layout).bytes_moved
        with self._changed:
            seconds, count = sum(self._measured_s), sum(self._measured_bytes)
            least = min(self._measured_s, default=0.0)
        per_byte = seconds / count if count else 1 / ASSUMED_BYTES_PER_S
        return max(moved * per_byte, least)

    def use(self, config: BatchConfig) -> None:
        """`config` is in use from now on: sizes around it are taken up."""
        with self._changed:
            self._current = config
            if config.strategy not in self._sizes:
                sizes = self._size_compiler(self._plans[config.strategy])
                self._sizes[config.strategy] = sizes
                if self._thread is not None:
                    sizes.start()
            sizes = self._sizes[config.strategy]
        sizes.near(config.micro_batch_size)

    def switched(self, seconds: float, bytes_moved: int) -> None:
        """A state was moved."""
        with self._changed:
            self._measured_s.append(seconds)
            self._measured_bytes.append(bytes_moved)

    def close(self) -> None:
        """Stop after the executable in hand."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            compilers = list(self._sizes.values())
        for compiler in compilers:
            compiler.close()
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """Stop, and leave the threads to what they compile: for a process that is about to end."""
        with self._changed:
            self._stopping, self._thread = True, None
            compilers = list(self._sizes.values())
        for compiler in compilers:
            compiler.abandon()

    # -- preparing others ------------------------------------------------------------------------

    def _size_compiler(self, plan: BatchPlan) -> SizeCompiler:
        return SizeCompiler(
            self._engines[plan.start.strategy],
            plan.sizes,
            accumulate=plan.accumulate,
            budget=self._budget,
            reach=self._reach,
            background=self._background,
        )

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _prepare_others(self) -> None:
        try:
            for strategy in self._engines:
                # The strategy in use comes first; it may change meanwhile.
                while not self.compiler(self._current.strategy).wait(1.0):
                    if self._stopping:
                        return
                self._prepare(strategy)
        except BaseException as error:
            with self._changed:
                self._error = error

    def _prepare(self, strategy: str) -> None:
        with self._turns[strategy]:
            with self._changed:
                if self._stopping or strategy in self._prepared or strategy in self._left_out:
                    return
                self._preparing += 1
            try:
                size = self._compile(strategy)
                with self._changed:
                    if size is not None:
                        self._prepared[strategy] = size
                    elif not self._stopping:
                        self._left_out.add(strategy)
            finally:
                with self._changed:
                    self._preparing -= 1

    def _compile(self, strategy: str) -> int | None:
        """Plan a strategy and compile what a first trial needs; its size, None where nothing fits."""
        engine, current = self._engines[strategy], self._current
        if strategy not in self._plans:
            try:
                plan = self._plan_of(strategy)
            except (TooLarge, Indivisible, CannotDivide) as error:
                logging.info("the strategy %s is left out: %s", strategy, error)
                return None
            with self._changed:
                self._plans[strategy] = plan
        plan = self._plans[strategy]
        if strategy == current.strategy:
            size = current.micro_batch_size
        else:
            size = self._compile_a_trial(engine, plan, current)
        with self._changed:
            others = [self._engines[s].layout for s in self._prepared if s != strategy]
        here = self._engines[current.strategy].layout
        try:
            for other in dict.fromkeys([here, *others]):
                if self._stopping:
                    return None
                if other != engine.layout:
                    engine.engines.compile_moves([engine.layout, other])
        except MoveDoesNotFit as error:
            logging.info("the strategy %s is left out: %s", strategy, error)
            return None
        self._compile_more(engine)
        return size

    def _compile_a_trial(self, engine: Engine, plan: BatchPlan, current: BatchConfig) -> int:
        """Compile the size nearest to the present batch that fits, and try it where there is room."""
        wanted = current.micro_batch_size * current.num_replicas
        size = min(plan.sizes, key=lambda s: abs(math.log(s * engine.num_replicas / wanted)))
        engine.compile([size], accumulate=plan.accumulate)
        need = engine.bytes_of(size)
        if need is None or need.peak > self._budget:
            size = plan.start.micro_batch_size
            engine.compile([size], accumulate=plan.accumulate)
        need = engine.bytes_of(size)
        # Beside a step of the strategy in use, which goes on meanwhile.
        here, now = self._engines[current.strategy], current.micro_batch_size
        beside = [here.bytes_of(now), here.measuring_bytes_of(now)]
        taken = max((x.peak for x in beside if x is not None), default=self._budget)
        if need is not None and taken + need.peak <= self._budget and not self._stopping:
            engine.rehearse(size, accumulate=plan.accumulate)
            engine.rehearse_measuring(size)
        return size
