"""Prepares other strategies while training goes on, so that a switch never waits for the compiler.

First come the sizes of the strategy in use (`SizeCompiler`). Then, for one strategy after another, the size
nearest to the present batch is compiled and tried, and so are the moves of the state there and back. A
strategy whose step does not fit into memory is left out. The tuner is only offered what is compiled.
"""

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from absl import logging

from jaxgoodput._worker import Worker
from jaxgoodput.engine.chips import Arithmetic, chip_of
from jaxgoodput.engine.engine import Engine
from jaxgoodput.goodput.memory import StepBytes, TooLarge
from jaxgoodput.goodput.perf import Placement
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.parallel.move import MoveDoesNotFit
from jaxgoodput.parallel.partition import CannotDivide
from jaxgoodput.train.compile_sizes import SizeCompiler
from jaxgoodput.tune.block_times import SHORT_S
from jaxgoodput.tune.exploring import (
    ASSUMED_DELAY,
    EARNINGS,
    AccountState,
    Explored,
    Explorer,
    Looks,
)
from jaxgoodput.tune.payoff import strategies_pay
from jaxgoodput.tune.plan import BatchPlan, Indivisible
from jaxgoodput.tune.timings import DispatchedStep, TimingTable
from jaxgoodput.tune.verdict import Situation, StrategyOption

# Assumed bytes per second of a move before one has been measured: a modest memory or link.
ASSUMED_BYTES_PER_S = 1e9
# All programs of a size, one of which measures the noise, take about this many times as long to compile as
# its plain step.
WHOLE = 3
# Steps after which a batch is no longer on trial in any process, so that its noise is to be measured. Short
# ones are waited for longer: if blocks of them pay, these are compiled before.
TRIAL_STEPS, SHORT_STEPS = 16, 32

FIXED_ON_CPU_S = 1.5e-3  # 200 operations of a small decoder, and its dispatch
# Memory traffic of an update, in multiples of the state's bytes: gradients are made, read twice to check them
# and to apply them, and what is updated is read and written.
UPDATE_PASSES, CPU_BYTES_PER_S = 3, 1e10
# Times as long as a plain step that what measures the noise takes to be compiled, about.
MEASURING = 1.5
TRIAL_WAIT_S = (
    5.0  # for the trial of a compiled size, before the noise of the one in use is measured
)
PATIENCE = 3.0  # times as long as expected that training waits for a compilation
COMPILER_CORES = 1.8  # that a compilation keeps busy
LEAST_DELAY, MOST_DELAY = 0.1, 0.9  # shares of a compilation's seconds, on a CPU


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fixed_on_cpu_s(state_bytes: int) -> float:
    """Return an upper bound on the part of a step's seconds on a CPU that does not grow with its batch."""
    return FIXED_ON_CPU_S + UPDATE_PASSES * state_bytes / CPU_BYTES_PER_S


@dataclass(frozen=True)
class _Hurried:
    """What training waits for."""

    size: int
    measuring: bool  # whether for the size to measure the noise


class StrategyCompiler:
    """Holds a `SizeCompiler` for every strategy used so far, and the thread that prepares the others.

    `engines` are the engines of all strategies by name, `plan` is the plan of the strategy to start with, and
    `plan_of` makes the plan of another one. `budget` is the memory of a device in bytes, `reach` the factor
    by which one change may grow the batch. Without `background` everything is compiled when it is needed.
    `compile_more` compiles other programs that a strategy needs, such as an evaluation. Strategies are
    referred to by name; the name is "" if the user has configured none.
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
        # What training waits for, and for how many seconds at most; replaced as a whole.
        self._hurried: tuple[_Hurried, float] | None = None
        self._waited_s: dict[_Hurried, float] = {}  # so far
        self._lock = threading.Lock()  # guards everything below
        self._current = plan.start
        self._plans = {plan.start.strategy: plan}
        self._sizes = {plan.start.strategy: self._size_compiler(plan)}
        self._prepared: dict[str, int] = {}  # size that is ready for a switch, by strategy
        self._left_out: set[str] = set()  # strategies that do not fit
        self._moves: list[tuple[float, int]] = []  # seconds and bytes of every move so far
        self._num_preparing = 0  # strategies that are being prepared now
        self._turns = {name: threading.Lock() for name in engines}
        self._is_closed = False
        self._worker: Worker | None = None
        # How many sizes every process has settled, by strategy; None if there is one process.
        self.settled_everywhere: dict[str, int] | None = None

    @property
    def num_strategies(self) -> int:
        """Number of strategies, prepared or not."""
        return len(self._engines)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all strategies, in the same order in every process."""
        return tuple(self._engines)

    def engine(self, strategy: str) -> Engine:
        """Return the engine of a strategy.

        Raises ValueError if the run does not have it.
        """
        if strategy not in self._engines:
            raise ValueError(
                f"this run has no strategy {strategy!r}; Config.strategies has "
                f"{', '.join(self._engines).strip() or 'none'}. Name one of these, or none."
            )
        return self._engines[strategy]

    def compiler(self, strategy: str) -> SizeCompiler:
        """Return the compiler of the sizes of a strategy that is or was in use."""
        with self._lock:
            return self._sizes[strategy]

    def limits(self, strategy: str) -> BatchLimits:
        """Return the batches that data, devices and memory allow under a planned strategy."""
        with self._lock:
            return self._plans[strategy].limits

    def sizes(self, strategy: str) -> tuple[int, ...]:
        """Return the micro-batch sizes that a planned strategy may ever use."""
        with self._lock:
            return self._plans[strategy].sizes

    def ready(self, strategy: str) -> Sequence[int]:
        """Return the micro-batch sizes of a strategy that the tuner may choose now.

        These are the sizes that every process has compiled, in the same order everywhere. If the run has
        several strategies, the size that this process has prepared for a switch is appended. If there are
        also several processes, the others may not have compiled that size yet; they do so if it is chosen.
        """
        with self._lock:
            self._raise_error()
            sizes, own = self._sizes.get(strategy), self._prepared.get(strategy)
        settled = self.settled_everywhere
        first = None if settled is None else settled.get(strategy, 0)
        compiled = () if sizes is None else sizes.ready(first=first)
        if settled is not None and len(self._engines) == 1:
            return compiled
        return tuple(dict.fromkeys([*compiled, *([] if own is None else [own])]))

    def memory_limit(self, strategy: str) -> int:
        """Return the largest micro-batch size of a strategy expected to fit into memory; 0 if unknown."""
        return self.compiler(strategy).memory_limit

    def arithmetic(self, config: BatchConfig) -> Arithmetic:
        """Return the operations per sample under a configuration, and the peak rate of its devices."""
        engine = self.engine(config.strategy)
        layout = engine.layout
        chip = chip_of(layout.mesh.devices.flat[0])
        return Arithmetic(
            tflops_per_sample=engine.tflops_per_sample(config.micro_batch_size),
            num_devices=config.num_replicas // layout.num_replicas * layout.num_devices,
            peak_tflops=math.nan if chip is None else chip.flops / 1e12,
        )

    @property
    def fixed_s(self) -> float:
        """Upper bound on the part of a step's seconds that does not grow with its batch; infinite if unknown.

        A small batch may leave an accelerator idle. It rarely leaves a CPU idle, except for the time that
        dispatching a step and starting its operations takes. Updating the state takes as long with any batch.
        """
        if not self._is_on_cpu:
            return math.inf
        return fixed_on_cpu_s(self._state_bytes)

    @property
    def delay(self) -> float:
        """The share of a compilation's seconds by which it delays training, before that is measured.

        The compiler takes cores of a CPU from the steps, and on few cores nearly all of its time.
        """
        if not self._is_on_cpu:
            return ASSUMED_DELAY
        return min(max(COMPILER_CORES / num_cores(), LEAST_DELAY), MOST_DELAY)

    @property
    def least_delay(self) -> float:
        """The least share by which a compilation is believed to delay training, whatever is measured.

        If one compilation follows the other, few steps on a CPU are undisturbed.
        """
        return LEAST_DELAY if self._is_on_cpu else 0.0

    @property
    def _state_bytes(self) -> int:
        """Bytes per device of the state under the strategy in use."""
        return self._engines[self._current.strategy].state_bytes

    @property
    def _is_on_cpu(self) -> bool:
        device = next(iter(self._engines.values())).layout.mesh.devices.flat[0]
        return device.platform == "cpu"

    @property
    def is_busy(self) -> bool:
        """Whether anything is being compiled or tried, which slows down the steps beside it."""
        with self._lock:
            compilers, num_preparing = list(self._sizes.values()), self._num_preparing
        return num_preparing > 0 or any(compiler.is_busy for compiler in compilers)

    def accumulates(self, strategy: str) -> bool:
        """Return whether batches of several micro-batches may be chosen under a strategy."""
        return self.compiler(strategy).accumulates

    def has_room_for(self, need: StepBytes) -> bool:
        """Return whether a program fits into a device's memory."""
        return need.peak <= self._budget

    def num_plain(self, strategy: str) -> float:
        """Return how many times as long as a plain step everything takes that one more size needs."""
        return self.compiler(strategy).num_plain

    def settled(self, strategy: str) -> tuple[int, ...]:
        """Return the sizes of a strategy that have been compiled or refused, or are about to be."""
        return self.compiler(strategy).settled

    def adopt(self, config: BatchConfig) -> None:
        """Prepare `config`, if it is in use, to measure the noise: it is no longer on trial."""
        self.compiler(config.strategy).adopt(config.micro_batch_size)

    def measures_near(self, strategy: str) -> bool:
        """Whether steps of the size in use, or of one nearby, can measure the noise by now."""
        return self.compiler(strategy).measures_near

    def may_measure(self, config: BatchConfig) -> bool:
        """Whether steps of `config` measure the noise, or may as far as is known before that is compiled."""
        return self.compiler(config.strategy).may_measure(config.micro_batch_size)

    @property
    def compiles_one_by_one(self) -> bool:
        """Whether a single size may be compiled: several processes agree on all sizes of one order."""
        return self.settled_everywhere is None

    def compile_next(self, size: int) -> None:
        """Compile one more micro-batch size in the background."""
        self.compiler(self._current.strategy).compile_next(size)

    def hurry(self, size: int | None, *, measuring: bool = False, most_s: float = math.inf) -> None:
        """Have training wait for a size of the strategy in use (`wait_if_hurried`), or for none.

        If `measuring`, it waits until steps of the size in use can measure the noise. It waits for `most_s`
        seconds at most: compiling may take longer than expected.
        """
        self._hurried = None if size is None else (_Hurried(size, measuring), most_s)

    def wait_if_hurried(self, timeout_s: float) -> bool:
        """Wait for what training waits for; True if it is not there after `timeout_s`."""
        if (waiting := self._hurried) is None:
            return False
        hurried, most_s = waiting
        waited_s = self._waited_s.get(hurried, 0.0)
        compiler = self.compiler(self._current.strategy)
        if waited_s >= most_s or compiler.wait_for(
            hurried.size, timeout_s, measuring=hurried.measuring
        ):
            return False
        if not waited_s and timeout_s:
            what = "steps that measure the noise" if hurried.measuring else "steps"
            logging.info(
                "training waits until %s of %d samples per replica are compiled", what, hurried.size
            )
        self._waited_s[hurried] = waited_s + timeout_s
        return True

    def start(self) -> None:
        """Compile other micro-batch sizes, and then other strategies, in the background from now on."""
        with self._lock:
            self._sizes[self._current.strategy].start()
            if self._worker is None and len(self._engines) > 1 and not self._is_closed:
                settings = next(iter(self._engines.values())).compiled.settings
                self._worker = Worker("strategies", self._prepare_others, within=settings)

    def prepare(self) -> None:
        """Compile all sizes of the strategy in use, and what a trial of each other one needs, and wait."""
        self.compiler(self._current.strategy).compile_all()
        for strategy in self._engines:
            self._prepare(strategy)

    def require(self, strategy: str) -> None:
        """Compile what a trial of one strategy needs, on the caller's thread, unless it is ready.

        Raises TooLarge if it does not fit into memory, ValueError if the run does not have it.
        """
        self.engine(strategy)
        self._prepare(strategy)
        with self._lock:
            if strategy not in self._prepared:
                raise TooLarge(
                    f"the strategy {strategy} was left out, because a step, or the move of the state to it, "
                    "does not fit into memory."
                )

    def fits(self, config: BatchConfig) -> bool:
        """Return whether steps of `config` fit into memory; compiles what is missing to find out."""
        engine, size = self.engine(config.strategy), config.micro_batch_size
        for program in engine.training_programs(size, accumulate=config.num_micro_batches > 1):
            engine.compile_program(program)
        need = engine.bytes_of(size)
        return need is None or need.peak <= self._budget

    def leave_out(self, strategy: str) -> None:
        """Drop a strategy that does not fit: the tuner is never offered it again."""
        with self._lock:
            self._prepared.pop(strategy, None)
            self._left_out.add(strategy)

    def others(self) -> tuple[StrategyOption, ...]:
        """Return the other strategies that the run can switch to without compiling."""
        with self._lock:
            self._raise_error()
            current, prepared = self._current, dict(self._prepared)
            plans = dict(self._plans)
        found = []
        for strategy, size in prepared.items():
            config = plans[strategy].nearest(size, current.global_batch_size)
            if strategy == current.strategy or config is None:
                continue
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
        """Return the expected seconds to move the state from the present strategy to another."""
        here = self._engines[self._current.strategy]
        moved = here.plan_move(self._engines[strategy].layout).bytes_moved
        with self._lock:
            seconds, count = (sum(values) for values in zip((0.0, 0), *self._moves, strict=True))
            least = min((s for s, _ in self._moves), default=0.0)
        # Latency dominates small moves, so no move is expected to be faster than the fastest one so far.
        per_byte = seconds / count if count else 1 / ASSUMED_BYTES_PER_S
        return max(moved * per_byte, least)

    def use(self, config: BatchConfig) -> None:
        """Note that `config` is in use from now on, and queue micro-batch sizes near it for compilation."""
        with self._lock:
            self._current = config
            if config.strategy not in self._sizes:
                sizes = self._size_compiler(self._plans[config.strategy])
                self._sizes[config.strategy] = sizes
                if self._worker is not None:
                    sizes.start()
            sizes = self._sizes[config.strategy]
        sizes.near(config.micro_batch_size)
        if config.num_micro_batches > 1:
            sizes.accumulate()

    def switched(self, seconds: float, bytes_moved: int) -> None:
        """Record the seconds and bytes of a move of the state, which predict later moves."""
        with self._lock:
            self._moves.append((seconds, bytes_moved))

    def close(self) -> None:
        """Stop compiling in the background; waits for the programs that are being compiled."""
        with self._lock:
            self._is_closed = True
            compilers = list(self._sizes.values())
        for compiler in compilers:
            compiler.close()
        if self._worker is not None:
            self._worker.join()

    def abandon(self) -> None:
        """Stop without waiting for the programs being compiled, because the process is about to end."""
        with self._lock:
            self._is_closed, self._worker = True, None
            compilers = list(self._sizes.values())
        for compiler in compilers:
            compiler.abandon()

    # -- preparing others ------------------------------------------------------------------------

    def _size_compiler(self, plan: BatchPlan) -> SizeCompiler:
        return SizeCompiler(
            self._engines[plan.start.strategy],
            plan.sizes,
            accumulate=plan.accumulate,
            covers=self._background and _covers(self._engines[plan.start.strategy], plan),
            budget=self._budget,
            reach=self._reach,
            background=self._background,
        )

    def _raise_error(self) -> None:
        """Raise the error that ended the thread, if any; it is raised again on every call."""
        if self._worker is not None and self._worker.error is not None:
            raise self._worker.error

    def _prepare_others(self, _: Worker) -> None:
        for strategy in self._engines:
            # The sizes of the strategy in use come first; it may change meanwhile.
            while not self.compiler(self._current.strategy).wait(1.0):
                if self._is_closed:
                    return
            self._prepare(strategy)

    def _prepare(self, strategy: str) -> None:
        with self._turns[strategy]:  # the loop and the thread may want the same strategy
            with self._lock:
                if self._is_closed or strategy in self._prepared or strategy in self._left_out:
                    return
                self._num_preparing += 1
            try:
                size = self._compile(strategy)
                with self._lock:
                    if size is not None:
                        self._prepared[strategy] = size
                    elif not self._is_closed:
                        self._left_out.add(strategy)
            finally:
                with self._lock:
                    self._num_preparing -= 1

    def _compile(self, strategy: str) -> int | None:
        """Plan a strategy and compile what a trial needs; return its size, or None if nothing fits."""
        engine, current = self._engines[strategy], self._current
        try:
            plan = self._plans.get(strategy) or self._plan_of(strategy)
            with self._lock:
                self._plans[strategy] = plan
            if strategy == current.strategy:
                size = current.micro_batch_size
            else:
                size = self._compile_trial(engine, plan, current)
            with self._lock:
                others = [self._engines[s].layout for s in self._prepared if s != strategy]
            here = self._engines[current.strategy].layout
            for other in dict.fromkeys([here, *others]):
                if self._is_closed:
                    return None
                if other != engine.layout:
                    engine.engines.compile_moves([engine.layout, other])
        except (TooLarge, Indivisible, CannotDivide, MoveDoesNotFit) as error:
            logging.info("the strategy %s is left out: %s", strategy, error)
            return None
        self._compile_more(engine)
        return size

    def _compile_trial(self, engine: Engine, plan: BatchPlan, current: BatchConfig) -> int:
        """Compile the size nearest to the present batch that fits, and try it if there is room."""
        wanted = current.micro_batch_size * current.num_replicas
        size = min(plan.sizes, key=lambda s: abs(math.log(s * engine.num_replicas / wanted)))
        engine.compile([size], accumulate=plan.accumulate)
        need = engine.bytes_of(size)
        if need is None or need.peak > self._budget:
            size = plan.start.micro_batch_size
            engine.compile([size], accumulate=plan.accumulate)
        need = engine.bytes_of(size)
        # Memory is shared with a step of the strategy in use, which goes on meanwhile.
        here, now = self._engines[current.strategy], current.micro_batch_size
        beside = [here.bytes_of(now), here.measuring_bytes_of(now)]
        taken = max((x.peak for x in beside if x is not None), default=self._budget)
        if need is not None and taken + need.peak <= self._budget and not self._is_closed:
            engine.rehearse(size, accumulate=plan.accumulate)
            engine.rehearse_measuring(size)
        return size


def _covers(engine: Engine, plan: BatchPlan) -> bool:
    """Return whether every batch of a plan is one micro-batch, in a run that compiles for itself alone."""
    is_alone = not engine.spans and engine.world is None
    reaches_all = max(plan.sizes) * plan.start.num_replicas >= plan.limits.max
    return is_alone and reaches_all and plan.start.num_micro_batches == 1


class CompilationStarter:
    """Starts compiling another size, or all strategies, in the background if that is expected to pay.

    `compile_s` is how long compiling the plain step of one size takes, and `began_s` the time when training
    begins. Nothing is started unless the run `explores`.

    With the base batch the noise changes nothing: it only says what other batches are worth. If the run
    `saves`, what measures it there is compiled once another size is ready or worth exploring, or once the
    time that has passed has earned it (`Account`).
    """

    def __init__(
        self,
        strategies: StrategyCompiler,
        compile_s: float,
        began_s: float,
        *,
        explores: bool,
        saves: bool = False,
    ):
        self.is_open = explores
        """Whether there is anything left to start."""
        self._explores = explores
        self._saves = saves and strategies.compiles_one_by_one and strategies.num_strategies == 1
        self._strategies = strategies
        self._compile_s = compile_s
        delay, least_delay = strategies.delay, strategies.least_delay
        self._explorer = Explorer(compile_s, began_s, delay=delay, least_delay=least_delay)
        self._strategy = ""  # whose size is being compiled
        self._latest: BatchConfig | None = None
        self._num_steps = 0  # with it, since its trial
        self._looks = Looks(began_s)
        self._due_since_s = began_s  # when no trial was due last

    def is_time(self, step: int, now_s: float) -> bool:
        """Whether to `consider` another size again."""
        return self._looks.is_time(step, now_s)

    @property
    def outlook(self) -> str:
        """What compiling another size costs and may bring, as a sentence; empty before it was considered."""
        return self._explorer.outlook

    def account(self, now_s: float, left_s: float) -> AccountState | None:
        """Return the account of exploring with `left_s` seconds left; None if the run does not explore."""
        if not self._explores:
            return None
        return self._explorer.account.state(self._explorer.passed_s(now_s), left_s)

    def explored(self, now_s: float) -> Explored | None:
        """Return what exploring has cost and brought so far; None if the run does not explore."""
        return self._explorer.explored(now_s) if self._explores else None

    def resume(self, earlier: Explored, now_s: float) -> None:
        """Go on with the account of the run's earlier processes."""
        self._explorer.resume(earlier, now_s)

    def stepped(self, ticket: DispatchedStep, table: TimingTable, *, is_trial: bool) -> None:
        """Note that a step is done; `is_trial` says whether its batch is only tried."""
        strategies, size = self._strategies, self._explorer.compiling
        if size is not None and strategies.compiler(self._strategy).is_done(size):
            strategies.hurry(None)
            self._explorer.compiled(strategies.engine(self._strategy).compile_s(size), table)
        if is_trial or ticket.config != self._latest:
            self._latest, self._num_steps = ticket.config, 0
        self._num_steps += 0 if is_trial else ticket.num_together
        # A size that is about to be tried may replace this one. What measures would disturb its trial, or be
        # compiled in vain. A trial that does not come is not waited for.
        explorer, now_s = self._explorer, ticket.began_s
        if explorer.compiling is not None or not explorer.is_trial_due:
            self._due_since_s = now_s
        is_due = explorer.is_trial_due and now_s - self._due_since_s <= TRIAL_WAIT_S
        is_next = explorer.compiling is not None or is_due
        is_passing = (
            is_next
            and strategies.compiles_one_by_one
            and strategies.measures_near(ticket.config.strategy)
        )
        if not is_passing and self._is_adopted(ticket.config, table) and self._may_measure(ticket):
            strategies.adopt(ticket.config)  # again and again: it may come back from a trial

    def _may_measure(self, ticket: DispatchedStep) -> bool:
        """Whether to measure the noise of a batch that is kept."""
        strategies, config = self._strategies, ticket.config
        if not self._saves or self._explorer.has_begun or self._explorer.awaits_noise:
            return True
        is_base = config.global_batch_size == strategies.limits(config.strategy).base
        if not is_base or len(strategies.ready(config.strategy)) > 1:
            return True
        price_s = MEASURING * self._compile_s * strategies.delay
        return EARNINGS * self._explorer.passed_s(ticket.began_s) >= price_s

    def _is_adopted(self, config: BatchConfig, table: TimingTable) -> bool:
        if not TRIAL_STEPS <= self._num_steps < SHORT_STEPS:
            return self._num_steps >= SHORT_STEPS
        return table.step_s(1, config) >= SHORT_S

    def consider(
        self,
        situation: Situation,
        table: TimingTable,
        *,
        strategy: str,
        now_s: float,
        of_all: bool,
    ) -> bool:
        """Start compiling another size of the strategy in use if it pays, or all strategies if `of_all`.

        Returns False: no size is ready at once.
        """
        strategies = self._strategies
        self._looks.looked(situation.step, now_s)
        whole_s = WHOLE * self._compile_s
        num_strategies = strategies.num_strategies
        if of_all and num_strategies > 1:
            if strategies_pay(situation, compile_s=whole_s, num_strategies=num_strategies):
                self._start_all()
                return False
        sizes, settled = strategies.sizes(strategy), strategies.settled(strategy)
        alone = strategies.compiles_one_by_one
        num_plain = strategies.num_plain(strategy)
        if not alone:
            num_plain = float(WHOLE * max(len(sizes) - len(settled), 1))
        # A size is not waited for while what measures the noise is compiled before it.
        may_hurry = alone and strategies.measures_near(strategy)
        found = self._explorer.next(
            situation,
            sizes,
            settled,
            table,
            now_s=now_s,
            num_plain=num_plain,
            may_hurry=may_hurry,
            measuring_s=self._measuring_s(situation.current) if alone else None,
        )
        self._hurry(situation.current, num_plain)
        if self._explorer.awaits_noise and situation.current.num_micro_batches == 1:
            strategies.adopt(situation.current)
        if found is not None:
            self._strategy = strategy
        if found is not None and alone:
            if not strategies.measures_near(strategy):  # whether the size is tried depends on it
                strategies.adopt(situation.current)
            strategies.compile_next(found.size)
        elif found is not None:
            self._start_all()
        return False

    def _measuring_s(self, config: BatchConfig) -> float | None:
        """Return how long it takes to compile what measures the noise of a batch; None if nothing can."""
        if config.num_micro_batches > 1:
            return 0.0  # the micro-batches tell it
        if not self._strategies.may_measure(config):
            return None
        is_there = self._strategies.measures_near(config.strategy)
        return 0.0 if is_there else MEASURING * self._explorer.compile_s

    def _hurry(self, config: BatchConfig, num_plain: float) -> None:
        """Have training wait for what the explorer hurries, if anything."""
        explorer, hurry = self._explorer, self._strategies.hurry
        if explorer.hurries_noise:
            most_s = PATIENCE * MEASURING * explorer.compile_s
            hurry(config.micro_batch_size, measuring=True, most_s=most_s)
        elif explorer.is_hurried:
            hurry(explorer.compiling, most_s=PATIENCE * num_plain * explorer.compile_s)
        else:
            hurry(None)

    def _start_all(self) -> None:
        self._strategies.start()
        self.is_open = False
        self._explorer.outlook = ""
