"""What the loop is asked to do, and how all processes come to do it at the same step.

Any thread may post a request: a verdict of the tuner, a signal, a hook. In one process the loop takes the
requests at its next step. In several, each process sends its own requests as a small vector with the
reduction of a step. Every process knows the sum before it dispatches step + `DEPTH`, and obeys it there. This
takes no further message and no further collective, and all processes get the same answer.
"""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np

from jaxgoodput._exits import SAVED, UNSAVED, RunFacts, run_exit
from jaxgoodput._jax import PeerGone, found_by_debugging
from jaxgoodput.engine.memory import OutOfMemory, shortage_in
from jaxgoodput.engine.state import TrainState
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.parallel.place import Place
from jaxgoodput.train.compile_ahead import StrategyCompiler
from jaxgoodput.train.config import Config
from jaxgoodput.train.watcher import StepResult

# A step is dispatched once the step this many before it is done: one runs, one waits behind it.
DEPTH = 2


class Preempted(SystemExit):
    """The run was asked to stop, and its state is saved. Exit code 143 asks for a restart.

    `step` is the last step; None if the run was still getting ready and had nothing to lose.
    """

    def __init__(self, step: int | None, signal_name: str):
        super().__init__(SAVED)
        self.step = step
        self.signal_name = signal_name

    def __str__(self) -> str:
        step = self.step or 0
        facts = RunFacts(stopped_by=self.signal_name, last_step=step, saved_step=step)
        return f"stopped by {self.signal_name}: {run_exit(facts).why}"


class NotSaved(SystemExit):
    """The run is over and its last step could not be saved. Exit code 75: a restart repeats some steps.

    `step` is the last step, `safe_step` the step of the newest checkpoint (None if there is none), and
    `state` the trained state if training was done.
    """

    def __init__(self, step: int, safe_step: int | None, why: str, state: TrainState | None = None):
        super().__init__(UNSAVED)
        self.step = step
        self.safe_step = safe_step
        self.why = why
        self.state = state

    def __str__(self) -> str:
        facts = RunFacts(last_step=self.step, saved_step=self.safe_step or 0, unsaved_why=self.why)
        return run_exit(facts).why


class Stopping(Exception):
    """A stop was requested while the loop waited for something it no longer needs. The loop catches it."""


class PeerLost(RuntimeError):
    """Another process of this job has died or no longer answers."""


class Diverged(RuntimeError):
    """Training cannot go on: values are lost, or too many updates in a row were refused.

    Lost values were finite when the run began and are not any more. `safe_step` is the step of the last
    certified checkpoint; None if there is none.
    """

    def __init__(self, why: str, safe_step: int | None = None):
        super().__init__(why)
        self.safe_step = safe_step


@dataclass(frozen=True, kw_only=True)
class BatchWish:
    """A batch as a user asks for it, under the strategy that is in use when the loop takes it up."""

    micro_batch_size: int
    num_micro_batches: int


@dataclass(frozen=True, kw_only=True)
class Control:
    """Requests to the training loop for before its next step, such as stop, save or another batch."""

    stop: bool = False
    finish: bool = False  # end as if complete
    save: bool = False
    evaluate: bool = False
    show: bool = False  # the parameters to the hooks
    regroup: bool = False  # processes are about to join or leave
    keep: bool = False  # a copy of the state, here and on a neighbour
    batch: BatchConfig | BatchWish | None = None  # to use from now on
    statistics_every: int | None = None  # steps between two noise measurements; None: as before
    num_ready: int = 0  # sizes compiled or refused, summed over processes
    num_measuring: int = 0  # processes in which the size in use can measure the noise

    def also(self, later: "Control") -> "Control":
        """Combine two sets of requests; the later one wins if both name a batch or a noise cadence."""
        return dataclasses.replace(
            self,
            **{name: getattr(self, name) or getattr(later, name) for name in FLAGS},
            **{name: getattr(self, name) + getattr(later, name) for name in COUNTS},
            batch=later.batch or self.batch,
            statistics_every=later.statistics_every or self.statistics_every,
        )

    def batch_after(self, in_use: BatchConfig) -> BatchConfig | None:
        """Return the batch to use from now on, complete; None to stay with the one in use."""
        if isinstance(self.batch, BatchWish):
            return dataclasses.replace(in_use, **dataclasses.asdict(self.batch))
        return self.batch


FLAGS = ("stop", "finish", "save", "evaluate", "show", "regroup", "keep")
COUNTS = ("num_ready", "num_measuring")
CONTROL_SIZE = len(FLAGS) + len(COUNTS) + len(("cadence", "micro", "count", "strategy"))
NOTHING = Control()


class ControlWire:
    """How a `Control` crosses between processes: a float32 vector `[CONTROL_SIZE]` that is summed.

    `replicas` has the number of replicas of each strategy by name, in the same order in every process.
    """

    def __init__(self, replicas: Mapping[str, int]):
        self._replicas = dict(replicas)
        self._names = tuple(replicas)

    def encode(self, control: Control) -> np.ndarray:
        """Return one process's `Control` as a vector."""
        batch, numbers = control.batch, (0, 0, 0)
        if batch is not None:
            named = isinstance(batch, BatchConfig)
            strategy = 1 + self._names.index(batch.strategy) if named else 0
            numbers = batch.micro_batch_size, batch.num_micro_batches, strategy
        own = [getattr(control, name) for name in (*FLAGS, *COUNTS)]
        return np.asarray([*own, control.statistics_every or 0, *numbers], np.float32)

    def decode(self, total: np.ndarray) -> Control:
        """Return the control that all processes agreed on, from the sum of their vectors.

        Only process 0 decides on batches and cadences, so that the sum of those is its own.
        """
        numbers = [round(float(x)) for x in total]
        counts, rest = numbers[len(FLAGS) : -4], numbers[-4:]
        every, micro, count, strategy = rest
        batch = None
        if strategy:
            name = self._names[strategy - 1]
            batch = BatchConfig(
                micro_batch_size=micro,
                num_micro_batches=count,
                num_replicas=self._replicas[name],
                strategy=name,
            )
        elif micro:
            batch = BatchWish(micro_batch_size=micro, num_micro_batches=count)
        return dataclasses.replace(
            NOTHING,
            **{name: number > 0 for name, number in zip(FLAGS, numbers, strict=False)},
            **dict(zip(COUNTS, counts, strict=True)),
            batch=batch,
            statistics_every=every or None,
        )


class Requests:
    """A mailbox of requests to the loop, filled from any thread; the latest request of each kind wins."""

    def __init__(self):
        self._lock = threading.Lock()
        self._wish = NOTHING
        self.signal: str | None = None  # what asked to stop, for the record
        self.is_overdue = (
            False  # whether that was so long ago that the loop must not wait for others
        )
        self.num_batches = 0  # wishes for a batch that were posted
        self.num_batches_taken = 0

    def post(self, wish: Control) -> None:
        """Add requests to the ones that the loop takes next."""
        with self._lock:
            self._wish = self._wish.also(wish)
            self.num_batches += wish.batch is not None

    def forget_regroup(self) -> None:
        """Drop a request to regroup that was meant for a generation which has ended."""
        with self._lock:
            self._wish = dataclasses.replace(self._wish, regroup=False)

    def interrupt(self, signal: str) -> None:
        """Ask to save and stop. Takes no lock, so that a signal handler may call it."""
        self.signal = signal

    def take(self) -> Control:
        """Return all requests since the last call, combined; a stop by a signal stays in force."""
        with self._lock:
            wish, self._wish = self._wish, NOTHING
            self.num_batches_taken = self.num_batches
        return wish if self.signal is None else dataclasses.replace(wish, stop=True)


@dataclass
class OwnDecisions:
    """How a run of one process decides: a request takes effect at its next step.

    Both kinds of decisions have the same methods.
    """

    requests: Requests
    strategies: StrategyCompiler
    is_together: bool = False
    """Whether other processes act at the same steps as this one."""

    def leave(self) -> None:
        """Do nothing: there are no other processes to leave."""

    def sent(self, batch: BatchConfig) -> np.ndarray | None:
        """Return None: there are no other processes to tell anything along with a step."""
        return None

    def received(self, result: StepResult | None, in_use: BatchConfig) -> Control:
        """Return this process's own requests since the last call, whatever the arguments."""
        return self.requests.take()

    def can_measure(self, batch: BatchConfig) -> bool:
        """Whether the programs that measure the noise in a step of `batch` are compiled."""
        return self.strategies.compiler(batch.strategy).can_measure(batch.micro_batch_size)

    def everywhere(self, holds: bool) -> bool:
        """Whether something holds in every process. All processes call this together."""
        return holds

    def meet(self, moment: str) -> None:
        """Do nothing: there are no other processes to wait for."""

    def is_stop_due(self) -> bool:
        """Whether the loop must stop waiting for data, because a stop was requested."""
        return self.requests.signal is not None

    def blames_a_peer(self, error: BaseException) -> bool:
        """Return False: there is no other process that an error could come from."""
        return False


class SharedDecisions:
    """How several processes decide: requests ride along with a step, and their sum takes effect in all."""

    def __init__(
        self, requests: Requests, strategies: StrategyCompiler, where: Place, first: BatchConfig
    ):
        self.is_together = True
        self._requests = requests
        self._strategies = strategies
        self._where = where
        names = strategies.names
        self._wire = ControlWire({n: strategies.engine(n).num_replicas for n in names})
        # Sizes whose noise every process can measure: the first was compiled before the start.
        self._measuring = {(first.strategy, first.micro_batch_size)}
        self._settled = strategies.settled_everywhere = {}

    def leave(self) -> None:
        """Act without the other processes from now on: they may have died, or wait in a step."""
        self.is_together = False

    def sent(self, batch: BatchConfig) -> np.ndarray:
        """Return this process's requests, and how far its compiler has come."""
        sizes = self._strategies.compiler(batch.strategy)
        wishes = dataclasses.replace(
            self._requests.take(),
            num_ready=sizes.num_settled,
            num_measuring=int(sizes.can_measure(batch.micro_batch_size)),
        )
        return self._wire.encode(wishes)

    def received(self, result: StepResult | None, in_use: BatchConfig) -> Control:
        """Return the sum of all requests that were sent with the step of `result`."""
        if result is None:
            return NOTHING
        control, then = self._wire.decode(result.control), result.ticket.config
        if control.num_measuring == self._where.process_count:
            self._measuring.add((then.strategy, then.micro_batch_size))
        if then.strategy != in_use.strategy:
            return control
        # The sum bounds the slowest process from below: no other has settled more than was taken up.
        others = self._where.process_count - 1
        wanted = self._strategies.compiler(in_use.strategy).num_wanted
        slowest = control.num_ready - others * wanted
        self._settled[then.strategy] = max(self._settled.get(then.strategy, 0), slowest)
        return control

    def can_measure(self, batch: BatchConfig) -> bool:
        """Whether every process has said that it can measure the noise in a step of `batch`."""
        return (batch.strategy, batch.micro_batch_size) in self._measuring

    def everywhere(self, holds: bool) -> bool:
        """Whether something holds in every process. All processes call this together."""
        with jax.transfer_guard("allow"):
            return self._where.everywhere(holds)

    def meet(self, moment: str) -> None:
        """Wait until all processes have called this with the same `moment`, a name."""
        self._where.meet(moment)

    def is_stop_due(self) -> bool:
        """Whether a requested stop is overdue: otherwise the others hear of it with the next step."""
        return self._requests.is_overdue

    def blames_a_peer(self, error: BaseException) -> bool:
        """Whether an error looks like a collective that failed because another process has died."""
        return is_of_a_peer(error)


Decisions = OwnDecisions | SharedDecisions


def explained(error: Exception, doing: str) -> Exception:
    """Return an error that says what did not fit into memory, or had a NaN; any other error as it is.

    `doing` says what the run was doing, as a noun phrase.
    """
    shortage = shortage_in(error)
    if shortage is not None:
        return OutOfMemory(
            f"{doing} did not fit into memory ({shortage}). Less is needed by smaller micro-batches "
            '(BatchLimits.micro), compute_dtype="bfloat16", jax.checkpoint around layers, '
            "Strategy(fsdp=-1), which cuts the state over all devices, and on the host by "
            "Execution(prefetch=1). If other programs use the same memory, say how much is left with "
            "Execution.memory_bytes."
        )
    found = found_by_debugging(error)
    if found is not None:
        return FloatingPointError(
            f"jax_debug_{found}s found {found} in the results of {doing}. Call your functions on the same "
            "values outside of fit, under jax.jit, and JAX names the operation."
        )
    return error


def is_of_a_peer(error: BaseException) -> bool:
    """Whether an error looks like a collective that failed because another process has died."""
    if isinstance(error, PeerGone):
        return True
    if not isinstance(error, jax.errors.JaxRuntimeError | ValueError):
        return False
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "connection", "heartbeat", "coordination"))


@dataclass
class DueEvery:
    """A timer that is due each time `every` seconds or base steps have passed; never if None or 0."""

    every: float | None
    last: float = math.inf
    """When it was due last; infinite before `begin`."""

    def begin(self, at: float, passed: float = 0.0) -> None:
        """Count from `passed` before `at` on, unless it counts already.

        If the moment `at` is before the one it counts from, it counts from `at` on.
        """
        began = self.last if self.last < math.inf else at - passed
        self.last = min(began, at)

    def passed(self, at: float) -> float:
        """Return how much has passed at the moment `at` since it was due last; 0 if it is never due."""
        return max(at - self.last, 0.0) if self.every else 0.0

    def left(self, at: float) -> float:
        """Return how long after the moment `at` it is due; infinity if it is not known."""
        return self.last + self.every - at if self.every and self.last < math.inf else math.inf

    def is_due(self, at: float) -> bool:
        """Whether it is due at the moment `at`; if so, it is next due `every` later."""
        if not self.every or at - self.last < self.every:
            return False
        self.last = at
        return True


@dataclass(frozen=True, kw_only=True)
class Timers:
    """How long ago checkpoints and evaluations were due last: what a run's next processes begin with."""

    is_part: ClassVar[bool] = True  # a checkpoint of another version may have more fields
    save_s: float = 0.0
    """Seconds of training since a checkpoint was due by time."""
    save_base_steps: float = 0.0
    """Base steps since one was due by progress."""
    evaluate_s: float = 0.0
    """Seconds of training since an evaluation was due by time."""
    evaluate_base_steps: float = 0.0
    """Base steps since one was due by progress."""
    save_left: bool = False
    """Whether a checkpoint was asked for that is not made yet."""
    evaluation_left: bool = False
    """Whether an evaluation was asked for that has not ended yet."""


class Due:
    """Which checkpoints, copies and evaluations are due by time or progress.

    It belongs to the run: its timers go on when processes come and go, and when the run is resumed.
    """

    def __init__(self, config: Config):
        saving, evaluation = config.saving, config.evaluation
        self._saves = DueEvery(saving.every_s), DueEvery(saving.every_base_steps)
        self._evaluations = DueEvery(evaluation.every_s), DueEvery(evaluation.every_base_steps)
        self._copies = DueEvery(None)
        # "save" and "evaluate", if asked for and not done yet: a generation may end before. Then the next one
        # asks again.
        self._left, self._again = set[str](), set[str]()
        self._is_new = True

    def begin(
        self,
        now_s: float,
        progress: float,
        *,
        keep_s: float = math.inf,
        earlier: Timers | None = None,
    ) -> None:
        """Start with the first step of a generation; copies are due every `keep_s` until `kept` says more.

        Timers that run here already go on. Others go on from the `earlier` ones of the run. If the generation
        resumes from a state before the last interval of progress, intervals begin there. What was asked for
        and not done is asked for again.
        """
        was = earlier or Timers()
        (save_s, save_at), (evaluate_s, evaluate_at) = self._saves, self._evaluations
        save_s.begin(now_s, was.save_s)
        save_at.begin(progress, was.save_base_steps)
        evaluate_s.begin(now_s, was.evaluate_s)
        evaluate_at.begin(progress, was.evaluate_base_steps)
        told = {"save": was.save_left, "evaluate": was.evaluation_left}
        self._left |= {what for what, is_left in told.items() if is_left and self._is_new}
        self._again, self._is_new = set(self._left), False
        self._copies = DueEvery(keep_s, now_s)

    def restart(self, now_s: float, progress: float) -> None:
        """Count everything from this moment on."""
        for by_time, by_progress in (self._saves, self._evaluations):
            by_time.last, by_progress.last = now_s, progress
        self._left, self._again = set[str](), set[str]()

    def timers(self, now_s: float, progress: float) -> Timers:
        """Return the timers as they stand, for the run's next processes."""
        (save_s, save_at), (evaluate_s, evaluate_at) = self._saves, self._evaluations
        return Timers(
            save_s=save_s.passed(now_s),
            save_base_steps=save_at.passed(progress),
            evaluate_s=evaluate_s.passed(now_s),
            evaluate_base_steps=evaluate_at.passed(progress),
            save_left="save" in self._left,
            evaluation_left="evaluate" in self._left,
        )

    def asked(
        self, now_s: float, progress: float | None, *, skipping: bool = False
    ) -> Control | None:
        """Return what is due at this moment, or None. Pass `progress=None` while it is unknown.

        No checkpoint is due while updates are being skipped (`skipping`): it would replace one from before
        whatever went wrong. In a process that obeys another one, nothing is due by time: pass `now_s=-inf`.
        """
        at = now_s, progress or -math.inf
        save = not skipping and (_is_due(self._saves, at) or "save" in self._again)
        evaluate = _is_due(self._evaluations, at) or "evaluate" in self._again
        keep = not skipping and self._copies.is_due(now_s)
        asked = {what for what, it in (("save", save), ("evaluate", evaluate)) if it}
        self._left |= asked
        self._again -= asked
        if not (save or evaluate or keep):
            return None
        return Control(save=save, evaluate=evaluate, keep=keep)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Make a checkpoint inside: it does not say that itself is left to do. If that fails, it is."""
        left = self._left
        self._left = left - {"save"}
        try:
            yield
        except BaseException:
            self._left = left
            raise

    def evaluated(self) -> None:
        """Take note that an evaluation has ended."""
        self._left = self._left - {"evaluate"}

    def obeyed(self, control: Control, now_s: float) -> None:
        """Count the seconds from now on, in a process that has saved or evaluated as another one asked."""
        if control.save:
            self._saves[0].last = now_s
        if control.evaluate:
            self._evaluations[0].last = now_s

    def progress_left(self, progress: float) -> float:
        """Return the base steps until something is due by progress; infinity if nothing is."""
        return min(
            by_progress.left(progress) for _, by_progress in (self._saves, self._evaluations)
        )

    def kept(self, cost_s: float, failure_every_s: float) -> None:
        """Schedule copies so that they and the work that a failure undoes cost least together.

        `cost_s` is how long a copy takes, `failure_every_s` the time between failures. The interval is the
        root of twice their product (Young 1974).
        """
        self._copies.every = math.sqrt(2 * cost_s * failure_every_s)


def _is_due(intervals: tuple[DueEvery, DueEvery], at: tuple[float, float]) -> bool:
    """Whether one of an interval of time and one of progress is due; both are asked, so that both restart."""
    by_time, by_progress = intervals[0].is_due(at[0]), intervals[1].is_due(at[1])
    return by_time or by_progress
