"""What the loop is asked to do, and how all processes come to do it at the same step.

Requests are posted from any thread (the tuner's verdict, a signal, a hook). In one process the loop
takes them at its next step. In several, each process sends its own requests as a small vector with
the reduction of a step; the sum is known to everyone before step + `DEPTH` is dispatched, and takes
effect there: no further message, no further collective, and never a different answer.
"""

import dataclasses
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.engine.state import TrainState
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.train.config import Config

# A step is dispatched once the step this many before it is done: one runs, one waits behind it.
DEPTH = 2
CONTROL_SIZE = 13


SAVED, UNSAVED = 143, 75  # exit codes; 75 is EX_TEMPFAIL of <sysexits.h>


class Preempted(SystemExit):
    """The run was asked to stop; its state is saved. Exit code 143: it wants a restart.

    `step` is the last one; None where the run was still getting ready, and had nothing to lose.
    """

    def __init__(self, step: int | None, signal_name: str):
        super().__init__(SAVED)
        self.step = step
        self.signal_name = signal_name


class NotSaved(SystemExit):
    """The run is over and its last step could not be saved. Exit code 75: started again, it repeats some.

    `step` is the last one, `safe_step` that of the newest checkpoint (None: there is none), and `state` what
    was trained, where training was done.
    """

    def __init__(self, step: int, safe_step: int | None, why: str, state: TrainState | None = None):
        super().__init__(UNSAVED)
        self.step = step
        self.safe_step = safe_step
        self.why = why
        self.state = state

    def __str__(self) -> str:
        safe = "no step is" if self.safe_step is None else f"step {self.safe_step} is"
        return f"step {self.step} could not be saved ({self.why}); {safe} safe"


class Stopping(Exception):
    """A stop was asked for, and what was waited for is not needed any more; caught by the loop."""


class PeerLost(RuntimeError):
    """Another process of this job has gone, or does not answer any more."""


class Diverged(RuntimeError):
    """Too many updates in a row had a loss or gradient that was not finite."""


@dataclass(frozen=True, kw_only=True)
class BatchWish:
    """A batch by its numbers, as a user asks for it; the loop knows the rest."""

    micro_batch_size: int
    num_micro_batches: int
    strategy: str | None = None  # the one in use when it is taken up


@dataclass(frozen=True, kw_only=True)
class Control:
    """What to do before the next step."""

    stop: bool = False
    finish: bool = False  # end as if complete
    save: bool = False
    evaluate: bool = False
    show: bool = False  # the parameters to the hooks
    regroup: bool = False  # processes are to come or go
    keep: bool = False  # a copy of the state, here and on a neighbour
    batch: BatchConfig | BatchWish | None = None  # to use from now on
    statistics_every: int | None = None
    num_ready: int = 0  # sizes compiled or refused, summed over processes
    num_measuring: int = 0  # processes in which the size in use can measure the noise

    def also(self, later: "Control") -> "Control":
        """Both; of two batches or cadences the later one."""
        return Control(
            stop=self.stop or later.stop,
            finish=self.finish or later.finish,
            save=self.save or later.save,
            evaluate=self.evaluate or later.evaluate,
            show=self.show or later.show,
            regroup=self.regroup or later.regroup,
            keep=self.keep or later.keep,
            batch=later.batch or self.batch,
            statistics_every=later.statistics_every or self.statistics_every,
            num_ready=self.num_ready + later.num_ready,
            num_measuring=self.num_measuring + later.num_measuring,
        )


NOTHING = Control()


class Requests:
    """A mailbox of things to do; the latest wish of each kind wins."""

    def __init__(self):
        self._lock = threading.Lock()
        self._wish = NOTHING
        self.signal: str | None = None  # what asked to stop, for the record
        self.is_overdue = False  # whether that was long ago: nobody is waited for any more
        self.num_batches = 0  # wishes for a batch that were posted
        self.num_batches_taken = 0

    def post(self, wish: Control) -> None:
        """Ask for something."""
        with self._lock:
            self._wish = self._wish.also(wish)
            self.num_batches += wish.batch is not None

    def forget_regroup(self) -> None:
        """What was asked of a set of processes that is over by itself is not asked of the next."""
        with self._lock:
            self._wish = dataclasses.replace(self._wish, regroup=False)

    def interrupt(self, signal: str) -> None:
        """Ask to save and stop. Safe inside a signal handler: takes no lock."""
        self.signal = signal

    def take(self) -> Control:
        """All wishes since the last call."""
        with self._lock:
            wish, self._wish = self._wish, NOTHING
            self.num_batches_taken = self.num_batches
        return wish if self.signal is None else dataclasses.replace(wish, stop=True)


class Due:
    """Which checkpoints, copies and evaluations are due by time or progress; remembers the last of each.

    Copies every `keep_s`: first soon, then as `kept` says.
    """

    def __init__(self, config: Config, now_s: float, progress: float, *, keep_s: float = math.inf):
        self._config = config
        self._keep_every_s = keep_s
        self._save_s = self._evaluate_s = self._keep_s = now_s
        self._saved = self._progress = progress

    def asked(
        self, now_s: float, progress: float | None, *, skipping: bool = False
    ) -> Control | None:
        """The wishes of this moment, None where there are none; `progress` None: not known yet.

        While updates are being skipped (`skipping`), no checkpoint is due: it would take the place of one
        from before whatever went wrong.
        """
        config, save, evaluate, keep = self._config, False, False, False
        if now_s - self._keep_s >= self._keep_every_s and not skipping:
            self._keep_s, keep = now_s, True
        every_s, every = config.saving.every_s, config.saving.every_base_steps
        if every_s and now_s - self._save_s >= every_s and not skipping:
            self._save_s, save = now_s, True
        if every and progress and progress - self._saved >= every and not skipping:
            self._saved, save = progress, True
        if config.evaluation.every_s and now_s - self._evaluate_s >= config.evaluation.every_s:
            self._evaluate_s, evaluate = now_s, True
        every = config.evaluation.every_base_steps
        if every and progress and progress - self._progress >= every:
            self._progress, evaluate = progress, True
        wish = Control(save=save, evaluate=evaluate, keep=keep)
        return None if wish == NOTHING else wish

    def kept(self, cost_s: float, failure_every_s: float) -> None:
        """A copy took the loop so long: the next when it and the work that a failure undoes cost least.

        By the root of twice the cost times the time between failures (Young 1974).
        """
        self._keep_every_s = math.sqrt(2 * cost_s * failure_every_s)


def encode(control: Control, strategies: Sequence[str]) -> np.ndarray:
    """The vector that is summed over processes, float32 `[CONTROL_SIZE]`.

    `strategies` are the names of all, in the same order in every process.
    """
    batch = control.batch
    strategy = None if batch is None else batch.strategy
    return np.asarray(
        [
            control.stop,
            control.finish,
            control.save,
            control.evaluate,
            0 if batch is None else batch.micro_batch_size,
            0 if batch is None else batch.num_micro_batches,
            control.statistics_every or 0,
            control.num_ready,
            control.num_measuring,
            0 if strategy is None else 1 + strategies.index(strategy),
            control.show,
            control.regroup,
            control.keep,
        ],
        np.float32,
    )


def decode(total: np.ndarray, strategies: Sequence[str]) -> Control:
    """The agreed control. Batches come from process 0 alone, so that their sum is its own."""
    numbers = (int(round(float(x))) for x in total)
    stop, finish, save, evaluate, micro, count, every, *numbers = numbers
    ready, measuring, strategy, show, regroup, keep = numbers
    batch = None
    if micro and count:
        batch = BatchWish(
            micro_batch_size=micro,
            num_micro_batches=count,
            strategy=strategies[strategy - 1] if strategy else None,
        )
    return Control(
        stop=stop > 0,
        finish=finish > 0,
        save=save > 0,
        evaluate=evaluate > 0,
        show=show > 0,
        regroup=regroup > 0,
        keep=keep > 0,
        batch=batch,
        statistics_every=every or None,
        num_ready=ready,
        num_measuring=measuring,
    )
