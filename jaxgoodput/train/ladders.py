"""The ladders of all strategies of a run: what could be used next, and what is still being compiled.

Every strategy has its own engine, limits and ladder of micro-batch sizes (`rungs.py`). The one in use
climbs its ladder; behind it, one after another, the others have one size compiled and tried, that which
comes nearest to the present batch, and the moves of the state there and back. A strategy under which no
step fits into memory is left out. Nothing is offered that would have to be compiled.
"""

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence

from absl import logging

from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.memory import TooLarge
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.parallel.move import MoveDoesNotFit
from jaxgoodput.parallel.strategy import Layout
from jaxgoodput.train import setup
from jaxgoodput.train.choices import Offer
from jaxgoodput.train.config import Config
from jaxgoodput.train.rungs import Rungs

# Bytes per second of a move that was not measured yet; a modest memory or link.
ASSUMED_BYTES_PER_S = 1e9


class Ladders:
    """Owns the `Rungs` of every strategy and the thread that prepares the others.

    `engine` and `plan` are those of the strategy to start with; `layouts` are all of them by name, ("",)
    where there is only one. `compile_more` compiles what else a strategy needs, such as an evaluation.
    """

    def __init__(
        self,
        engine: Engine,
        plan: setup.BatchPlan,
        layouts: dict[str, Layout],
        *,
        config: Config,
        num_samples: int,
        budget: int,
        compile_more: Callable[[Engine], None] = lambda engine: None,
    ):
        self._config = config
        self._num_samples = num_samples
        self._budget = budget
        self._compile_more = compile_more
        self._engines = {name: engine.on(layout) for name, layout in layouts.items()}
        self._changed = threading.Condition()
        self._current = plan.start
        self._plans = {plan.start.strategy: plan}
        self._rungs = {plan.start.strategy: self._make_rungs(plan)}
        self._prepared: dict[str, int] = {}  # micro-batch size that is ready besides
        self._left_out: set[str] = set()  # strategies that do not fit
        self._measured_s: list[float] = []
        self._measured_bytes: list[int] = []
        self._preparing = 0  # strategies that are being prepared now
        self._turns = {name: threading.Lock() for name in layouts}
        self._stopping = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.settled_everywhere: int | None = None  # sizes of all processes; None: there is one

    @property
    def num_strategies(self) -> int:
        """How many there are, prepared or not."""
        return len(self._engines)

    def engine(self, strategy: str) -> Engine:
        """The engine of a strategy."""
        return self._engines[strategy]

    def rungs(self, strategy: str) -> Rungs:
        """The ladder of a strategy that is or was in use."""
        with self._changed:
            return self._rungs[strategy]

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
            rungs, own = self._rungs.get(strategy), self._prepared.get(strategy)
        climbed = () if rungs is None else rungs.ready(first=self.settled_everywhere)
        if self.settled_everywhere is not None:
            return climbed
        return tuple(dict.fromkeys([*climbed, *([] if own is None else [own])]))

    def memory_limit(self, strategy: str) -> int:
        """The largest micro-batch of a strategy that fits, by what is known."""
        return self.rungs(strategy).memory_limit

    @property
    def is_busy(self) -> bool:
        """Whether something is being compiled or tried now, which slows the steps beside it."""
        with self._changed:
            rungs, preparing = list(self._rungs.values()), self._preparing
        return preparing > 0 or any(ladder.is_busy for ladder in rungs)

    def start(self) -> None:
        """Compile the other sizes, and then the other strategies, in the background from now on."""
        with self._changed:
            self._rungs[self._current.strategy].start()
            if self._thread is None and len(self._engines) > 1 and not self._stopping:
                self._thread = threading.Thread(
                    target=self._prepare_others, name="jaxgoodput-strategies", daemon=True
                )
                self._thread.start()

    def prepare(self) -> None:
        """Prepare every strategy on the caller's thread."""
        self.rungs(self._current.strategy).climb()
        for strategy in self._engines:
            self._prepare(strategy)

    def require(self, strategy: str) -> None:
        """Prepare one strategy on the caller's thread, if it is not yet.

        Raises TooLarge where it does not fit into memory, ValueError where the run does not have it.
        """
        if strategy not in self._engines:
            raise ValueError(
                f"this run has no strategy {strategy!r}; Config.strategies has "
                f"{', '.join(self._engines) or 'none'}."
            )
        self._prepare(strategy)
        with self._changed:
            if strategy not in self._prepared:
                raise TooLarge(
                    f"the strategy {strategy} was left out: no step, or no move of the state, fits into "
                    "memory under it."
                )

    def leave_out(self, strategy: str) -> None:
        """Never offer this strategy again."""
        with self._changed:
            self._prepared.pop(strategy, None)
            self._left_out.add(strategy)

    def offers(self) -> tuple[Offer, ...]:
        """The other strategies that can be switched to without compiling."""
        with self._changed:
            self._raise()
            current, prepared = self._current, dict(self._prepared)
        found = []
        for strategy, size in prepared.items():
            if strategy == current.strategy:
                continue
            config = self._nearest(strategy, size, current)
            if config is not None:
                offer = Offer(
                    config=config, ready=self.ready(strategy), switch_s=self.switch_s(strategy)
                )
                found.append(offer)
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
        """`config` is in use from now on: its ladder is climbed from there."""
        with self._changed:
            self._current = config
            if config.strategy not in self._rungs:
                self._rungs[config.strategy] = self._make_rungs(self._plans[config.strategy])
                if self._thread is not None:
                    self._rungs[config.strategy].start()
            rungs = self._rungs[config.strategy]
        rungs.near(config.micro_batch_size)

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
            rungs = list(self._rungs.values())
        for ladder in rungs:
            ladder.close()
        if self._thread is not None:
            self._thread.join()

    # -- preparing others ------------------------------------------------------------------------

    def _make_rungs(self, plan: setup.BatchPlan) -> Rungs:
        config = self._config
        return Rungs(
            self._engines[plan.start.strategy],
            plan.sizes,
            accumulate=self._accumulates(plan),
            budget=self._budget,
            reach=config.max_growth if config.background_compile else math.inf,
        )

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _prepare_others(self) -> None:
        try:
            for strategy in self._engines:
                # The strategy in use comes first; it may change meanwhile.
                while not self.rungs(self._current.strategy).wait(1.0):
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
                plan = setup.batch_plan(
                    self._config, engine, self._num_samples, self._budget, strategy=strategy
                )
            except (TooLarge, setup.Indivisible) as error:
                logging.info("the strategy %s is left out: %s", strategy, error)
                return None
            with self._changed:
                self._plans[strategy] = plan
        plan = self._plans[strategy]
        if strategy == current.strategy:
            size = current.micro_batch_size
        else:
            wanted = current.micro_batch_size * current.num_replicas
            size = min(plan.sizes, key=lambda s: abs(math.log(s * engine.num_replicas / wanted)))
            engine.compile([size], accumulate=self._accumulates(plan))
            need = engine.bytes_of(size)
            if need is None or need.peak > self._budget:
                size = plan.start.micro_batch_size
                engine.compile([size], accumulate=self._accumulates(plan))
            need = engine.bytes_of(size)
            # Beside a step of the strategy in use, which goes on meanwhile.
            here, now = self._engines[current.strategy], current.micro_batch_size
            beside = [here.bytes_of(now), here.measuring_bytes_of(now)]
            taken = max((x.peak for x in beside if x is not None), default=self._budget)
            if need is not None and taken + need.peak <= self._budget and not self._stopping:
                engine.rehearse(size, engine.roles(accumulate=self._accumulates(plan)))
        with self._changed:
            others = [self._engines[s].layout for s in self._prepared if s != strategy]
        here = self._engines[current.strategy].layout
        try:
            for other in dict.fromkeys([here, *others]):
                if self._stopping:
                    return None
                if other != engine.layout:
                    engine.compile_moves([other])
        except MoveDoesNotFit as error:
            logging.info("the strategy %s is left out: %s", strategy, error)
            return None
        self._compile_more(engine)
        return size

    def _accumulates(self, plan: setup.BatchPlan) -> bool:
        return self._config.accumulate and plan.limits.max_micro_batches > 1

    def _nearest(self, strategy: str, size: int, current: BatchConfig) -> BatchConfig | None:
        """The batch of micro-batches of `size` nearest to the present one; None where none is allowed."""
        plan = self._plans[strategy]
        replicas = self._engines[strategy].num_replicas
        most = plan.limits.max_micro_batches if self._config.accumulate else 1
        options = [
            dataclasses.replace(
                plan.start,
                micro_batch_size=size,
                num_micro_batches=count,
                num_replicas=replicas,
            )
            for count in range(1, most + 1)
            if plan.limits.smallest <= size * count * replicas <= plan.limits.max
        ]
        wanted = current.global_batch_size
        return min(options, key=lambda c: abs(math.log(c.global_batch_size / wanted)), default=None)
