"""Compiles the micro-batch sizes of one strategy while training goes on.

Sizes that the next change can reach come first, and among them the largest. A size that XLA's memory analysis
rejects is never used, nor is any larger one. If memory allows, each size is also executed once on throw-away
buffers, because the first execution is slow even of a compiled program.

A size becomes ready once it has been through both. Only ready sizes are ever chosen. The program that
measures the noise takes twice as long to compile as the step itself, and most sizes are only tried: it is
compiled once its size is adopted. Once all sizes are wanted, theirs are compiled along.
"""

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from absl import logging

from jaxgoodput._worker import Worker
from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.programs.program import Program
from jaxgoodput.goodput.memory import StepBytes, largest_that_fits

_UNMEASURED = (
    "steps of %d samples per replica fit into memory, but not with a noise measurement: the noise is not "
    "measured while they are used. Lower batch.max, or raise execution.memory_bytes."
)
_TOO_FEW = (
    "steps of %d samples per replica, in one micro-batch, have no two groups of samples to compare: the "
    "noise is not measured while they are used. Use a larger batch.base, or return per-sample losses [batch] "
    "instead of their mean."
)


def compiling_order(sizes: Sequence[int], first: int) -> tuple[int, ...]:
    """Return the order in which to compile: `first`, the largest, then middles; two up for one down.

    The largest comes early because growing pays early, and a batch that has far to go should not have to
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
    """Compiles sizes on a thread, in one order; `ready` lists the ones that are done.

    Call `near` with the size in use; the first time this must be one that the engine has compiled. Only sizes
    within two changes by a factor `reach` are queued, and more as the size in use moves. `start` begins to
    compile them all, `compile_next` one of them, and `adopt` has the one in use measure the noise. The order
    depends only on these calls, so it is the same in all processes. Without `background` there is no thread,
    and a missing program is compiled when it is needed.

    With `accumulate`, sizes are compiled for batches of several micro-batches, too, which takes four times as
    long. If the sizes cover all batches (`covers`), that is left until one of them does not fit into memory,
    or `accumulate` is called.
    """

    def __init__(
        self,
        engine: Engine,
        sizes: Sequence[int],
        *,
        accumulate: bool,
        covers: bool = False,
        budget: int,
        reach: float = 4.0,
        background: bool = True,
    ):
        self._engine = engine
        self._sizes = tuple(sizes)
        # Whether the programs of several micro-batches are compiled, too; None: not yet.
        self._accumulates = None if accumulate and covers else accumulate
        self._budget = budget
        self._reach = reach
        self._background = background
        # Guards everything below, and is notified of every change.
        self._changed = threading.Condition()
        self._current: int | None = None  # size in use
        self._is_adopted = True  # whether it is more than tried
        self._num_allowed: float = (
            0  # queued sizes that may be compiled, in their order; infinite: all
        )
        self._order: list[int] = []
        # Sizes that were compiled and tried, in order, and whether for several micro-batches.
        self._ready: dict[int, bool] = {}
        self._measurable: dict[int, bool] = {}  # False: its noise cannot be measured
        self._known: dict[int, StepBytes] = {}
        self._smallest_refused: int | None = None
        self._urgent: tuple[Callable[[], Program], ...] = ()  # compiled before anything else
        self._along: Callable[[int], Sequence[partial[Program]]] = lambda size: ()
        self._is_closed = False
        self._error: BaseException | None = None
        self._worker: Worker | None = None

    @property
    def num_wanted(self) -> int:
        """Number of sizes queued so far, compiled or not."""
        with self._changed:
            return len(self._order)

    @property
    def accumulates(self) -> bool:
        """Whether all ready sizes, and the one in use, may be used in batches of several micro-batches."""
        with self._changed:
            return self._current in self._ready and all(self._ready.values())

    def accumulate(self) -> None:
        """Compile all ready sizes again, for several micro-batches, if that has been left so far."""
        with self._changed:
            self._accumulate_from_now_on()
            self._changed.notify_all()

    def _accumulate_from_now_on(self) -> None:
        """Note that larger batches are made of several micro-batches; the caller holds the lock."""
        if self._accumulates is None:
            self._accumulates = True

    @property
    def settled(self) -> tuple[int, ...]:
        """The sizes that were compiled or refused, or are queued to be compiled."""
        with self._changed:
            queued = self._order[: self._num_to_do()]
            return tuple(s for s in self._sizes if s in queued or self._is_done(s))

    def is_done(self, size: int) -> bool:
        """Return whether a size was compiled and tried, or refused."""
        with self._changed:
            return self._is_done(size)

    def _is_done(self, size: int) -> bool:
        """Return whether nothing is left to do for a size; the caller holds the lock."""
        if self._smallest_refused is not None and size >= self._smallest_refused:
            return True
        return size in self._ready and (self._ready[size] or not self._accumulates)

    def _next_size(self) -> int | None:
        """Return the next size to compile, None if there is none; the caller holds the lock."""
        queued = self._order[: self._num_to_do()]
        return next((s for s in queued if not self._is_done(s)), None)

    def _num_to_do(self) -> int:
        """Return how many sizes may be compiled by now; the caller holds the lock."""
        return int(min(len(self._order), self._num_allowed))

    def near(self, size: int) -> None:
        """Note that `size` is in use, and queue the sizes around it. `adopt` has it measure the noise."""
        with self._changed:
            is_first = not self._order
            if is_first:
                self._check_first(size)
            self._is_adopted = size == self._current or not self._background
            self._current = size
            # First the sizes within reach of the next change, then the sizes within reach of two.
            for reach in (self._reach, self._reach**2):
                low, high = size / reach, size * reach
                around = [s for s in self._sizes if low <= s <= high]
                order = compiling_order([*around, size], size)
                self._order += [s for s in order if s not in self._order]
            missing, cannot = self._to_measure(), self._measurable.get(size) is False
            if missing is not None and self._background:
                self._run_worker()
            self._changed.notify_all()
        if cannot:
            logging.warning(self._why_unmeasured(size), size)
        if missing is not None and not self._background:
            self._prepare_measuring(missing)

    def adopt(self, size: int) -> None:
        """Prepare the size in use to measure the noise: it is no longer on trial."""
        with self._changed:
            if size != self._current or self._is_adopted:
                return
            self._is_adopted = True
            if self._to_measure() is not None:
                self._run_worker()
            self._changed.notify_all()

    def _check_first(self, size: int) -> None:
        """Note whether steps of the first size can measure the noise; the caller holds the lock."""
        need = self._engine.measuring_bytes_of(size)
        if need is None and self._engine.measuring_programs(size):
            return  # they were left out, to start sooner
        fits = need is None or need.peak <= self._budget
        self._measurable[size] = self._engine.can_measure(size) and fits

    def compile_first(self, sizes: Iterable[int]) -> None:
        """Queue these sizes before all others and compile them at once; call it before any step runs."""
        first = [s for s in dict.fromkeys(sizes) if s in self._sizes]
        with self._changed:
            self._order = [*first, *(s for s in self._order if s not in first)]
        for size in (*first, *first):  # again if one was refused, so that others need more programs
            if not self.is_done(size):
                self._try(size)

    @property
    def num_settled(self) -> int:
        """Number of queued sizes, in their order, that have been compiled or refused."""
        with self._changed:
            self._raise_error()
            left = (i for i, s in enumerate(self._order) if not self._is_done(s))
            return next(left, len(self._order))

    def ready(self, *, first: int | None = None) -> tuple[int, ...]:
        """Return the sizes that can be used now, in the order in which they were queued.

        `first`, if given, is the number of queued sizes to consider.

        Raises the error that has stopped the background compilation, if any.
        """
        with self._changed:
            self._raise_error()
            return tuple(s for s in self._ready if first is None or s in self._order[:first])

    def can_measure(self, size: int) -> bool:
        """Return whether steps of this size can measure the noise by now."""
        with self._changed:
            return self._measurable.get(size, False)

    def may_measure(self, size: int) -> bool:
        """Return whether steps of this size can measure the noise; True while that is not known."""
        with self._changed:
            return self._measurable.get(size, True)

    @property
    def measures_near(self) -> bool:
        """Whether steps of the size in use, or within a factor `reach` of it, can measure the noise."""
        with self._changed:
            return self._measures_near()

    def _measures_near(self) -> bool:
        """Return whether a size near the one in use can measure the noise; the caller holds the lock.

        What was measured at a batch many times smaller says little: the signal is seen worse there, and may
        be taken for much larger than it is.
        """
        now = self._current or 0
        sizes = [size for size, can in self._measurable.items() if can]
        return any(now <= size * self._reach and size <= now * self._reach for size in sizes)

    @property
    def memory_limit(self) -> int:
        """Largest size expected to fit into memory, in samples per replica; 0 if nothing is compiled yet."""
        with self._changed:
            known = dict(self._known)
        return largest_that_fits(self._sizes, known, self._budget) if known else 0

    @property
    def is_busy(self) -> bool:
        """Whether the thread is compiling or trying a size, which slows down the steps beside it."""
        with self._changed:
            return self._is_waiting() and self._worker is not None and not self._is_closed

    def start(self) -> None:
        """Compile all other sizes in the background from now on. Idempotent."""
        with self._changed:
            self._num_allowed = math.inf
            self._run_worker()
            self._changed.notify_all()

    def compile_next(self, size: int) -> None:
        """Compile one more size in the background. No other process may have to compile the same ones."""
        with self._changed:
            # The size in use comes first: its steps are compiled, but were not rehearsed.
            at = max(self._num_to_do(), 1)
            if size not in self._order[:at]:
                self._order = [s for s in self._order if s != size]
                self._order.insert(at, size)
                at += 1
            self._num_allowed = max(self._num_allowed, at)
            self._run_worker()
            self._changed.notify_all()

    def compile_soon(self, programs: Sequence[Callable[[], Program]]) -> None:
        """Compile these programs next, on the thread, behind others that were asked for in this way.

        Without `background` they are left until needed.
        """
        with self._changed:
            self._urgent += tuple(programs) if self._background else ()
            if self._urgent:
                self._run_worker()
                self._changed.notify_all()

    def compile_along(self, programs_of: Callable[[int], Sequence[partial[Program]]]) -> None:
        """Compile what `programs_of` returns for a size, too, before any further size becomes ready."""
        with self._changed:
            self._along = programs_of

    @property
    def num_plain(self) -> float:
        """How many times as long as a plain step everything takes that is compiled for one more size."""
        with self._changed:
            size, along = self._current, self._along
        plain_s = 0.0 if size is None else self._engine.compile_s(size)
        if size is None or not plain_s > 0:
            return 1.0
        more_s = (self._engine.compiled.seconds(program) or 0.0 for program in along(size))
        return 1.0 + sum(more_s) / plain_s

    def compile_all(self) -> None:
        """Compile all queued sizes on the caller's thread."""
        with self._changed:
            self._num_allowed = math.inf
        while self._step():
            pass

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all queued sizes have been tried; False if `timeout_s` is over before."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._is_waiting() or self._error is not None, timeout_s
            )

    def wait_for(self, size: int, timeout_s: float, *, measuring: bool = False) -> bool:
        """Wait until a size is compiled, or will not be; False if `timeout_s` is over before.

        If `measuring`, wait until it is compiled to measure the noise, or is not in use any more.
        """

        def is_over() -> bool:
            if self._is_closed or self._error is not None:
                return True
            if measuring:
                return self._to_measure() != size
            return self._is_done(size) or size not in self._order[: self._num_to_do()]

        with self._changed:
            return self._changed.wait_for(is_over, timeout_s)

    def close(self) -> None:
        """Stop compiling in the background; waits for the program that is being compiled."""
        worker = self._stop()
        if worker is not None:
            worker.join()

    def abandon(self) -> None:
        """Stop without waiting for the program being compiled, because the process is about to end."""
        self._stop()
        self._worker = None

    def _stop(self) -> Worker | None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            return self._worker

    def _run_worker(self) -> None:
        """Start the thread unless it runs; the caller holds the lock."""
        if self._worker is None and not self._is_closed:
            settings = self._engine.compiled.settings
            self._worker = Worker("compile", self._run, on_error=self._fail, within=settings)

    def _run(self, _: Worker) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._is_waiting())
                if self._is_closed:
                    return
            self._step()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _is_waiting(self) -> bool:
        """Return whether anything is left for the thread to compile; the caller holds the lock."""
        is_other = self._next_size() is not None
        return is_other or bool(self._urgent) or self._to_measure() is not None

    def _to_measure(self) -> int | None:
        """Return the size in use if it cannot measure the noise yet but should; the caller holds the lock."""
        can = self._current in self._measurable
        return self._current if self._is_adopted and not can else None

    def _step(self) -> bool:
        """Compile what is most urgent, one thing per call; False if nothing is waiting.

        Urgent programs come first, then the measuring program of the size in use, then the next size. If the
        noise can be measured at a size nearby, and single sizes are asked for, the next size comes first.
        """
        if urgent := self._urgent:
            self._compile_optional(
                urgent
            )  # without the lock, so that `compile_soon` may add more meanwhile
            with self._changed:
                self._urgent = self._urgent[len(urgent) :]
                self._changed.notify_all()
            return not self._is_closed
        with self._changed:
            if self._is_closed or not self._is_waiting():
                return False
            missing = self._to_measure()
            size = self._next_size()
            # A larger batch may save more than knowing the present noise, if it is known roughly.
            is_next = size is not None and self._measures_near()
        if missing is not None and not (is_next and math.isfinite(self._num_allowed)):
            self._prepare_measuring(missing)
        elif size is not None:
            self._try(size)
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
        elif (
            need is not None and need.peak * 2 <= self._budget
        ):  # room for a second copy of everything
            engine.rehearse_measuring(size)
        with self._changed:
            self._measurable[size] = fits
            self._changed.notify_all()

    def _why_unmeasured(self, size: int) -> str:
        return _UNMEASURED if self._engine.can_measure(size) else _TOO_FEW

    def _compile(self, programs: Sequence[Callable[[], Program]]) -> bool:
        """Compile these programs; False if the compiler was closed before all were done."""
        for program in programs:
            if self._is_closed:
                return False
            self._engine.compile_program(program)
        return True

    def _compile_optional(self, programs: Sequence[Callable[[], Program]]) -> bool:
        """Compile programs that a run can do without. One that cannot be compiled is left out, and named.

        The loop compiles it if it needs it nevertheless, and gets the error. False if this was closed.
        """
        for program in programs:
            try:
                if not self._compile([program]):
                    return False
            except Exception as error:
                logging.warning("left out, as it cannot be compiled: %s: %s", program, error)
        return True

    def _try(self, size: int) -> None:
        """Compile a size, check its memory and execute it once, so that it becomes ready or is refused."""
        engine, accumulate = self._engine, bool(self._accumulates)
        # Programs that all sizes share are compiled, too. If this is the first size that accumulates, nothing
        # else would, because it may be too large for a rehearsal.
        shared = engine.shared_programs(accumulate=accumulate)
        own = engine.training_programs(size, accumulate=accumulate)
        if not self._compile([*own, *shared]):
            return
        need = engine.bytes_of(size)
        assert need is not None
        fits = need.peak <= self._budget
        if not fits and engine.stop_looping(size):
            self._try(size)
            return
        with self._changed:
            self._known[size] = need
            if not fits:
                self._smallest_refused = size
                self._accumulate_from_now_on()
            self._changed.notify_all()
        if not fits:
            logging.info(
                "micro-batches of %d samples per replica are not used: they would need %.0f MiB, and only "
                "%.0f MiB are available",
                size,
                need.peak / 2**20,
                self._budget / 2**20,
            )
            return
        # A rehearsal holds a second copy of everything.
        if need.peak * 2 <= self._budget:
            engine.rehearse(size, accumulate=accumulate)
        if not self._compile_optional(self._along(size)):
            return
        if math.isinf(self._num_allowed) and size not in self._measurable:
            self._prepare_measuring(size)
        with self._changed:
            self._ready[size] = accumulate
            self._changed.notify_all()
