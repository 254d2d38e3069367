"""The ladder of micro-batch sizes, compiled and tried behind the loop's back.

What the next change can reach is compiled first, and within it the largest. A size that XLA's
analysis says does not fit is not used, nor anything above it. Where memory allows, each is run once on
throw-away buffers, because a first execution is slow even when it is compiled. Only a size that went
through both is ready, and only ready sizes are ever chosen. What measures the noise is compiled after
that, and only for a size that stays in use: known noise outlasts a few steps without.
"""

import threading
from collections.abc import Sequence

from absl import logging

from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.memory import StepBytes, largest_that_fits


def climbing_order(sizes: Sequence[int], first: int) -> tuple[int, ...]:
    """`first`, then the largest, then always the middle of what is left; two up for one down.

    The largest first: growing is what pays early, and a batch that has far to go should not have to
    wait for every size on the way.

    >>> climbing_order([1, 2, 4, 8, 16, 32, 64], 4)
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


class Rungs:
    """Owns the thread that compiles; `ready` grows as it goes.

    `near` names the size in use, the first time one that the engine has compiled already; only sizes
    that two changes by a factor `reach` can get to are compiled, and more as it moves. Sizes are taken
    up in one order, which is the same in every process that is told the same.
    """

    def __init__(
        self,
        engine: Engine,
        sizes: Sequence[int],
        *,
        accumulate: bool,
        budget: int,
        reach: float = 4.0,
        rehearse: bool = True,
    ):
        self._engine = engine
        self._sizes = tuple(sizes)
        self._accumulate = accumulate
        self._budget = budget
        self._reach = reach
        self._rehearse = rehearse
        self._changed = threading.Condition()
        self._order: list[int] = []
        self._next = 0  # index into the order
        self._ready: list[int] = []
        self._unrehearsed: set[int] = set()
        self._settled_on: int | None = None
        self._measurable: dict[int, bool] = {}  # False: memory does not allow it
        self._close: frozenset[int] = frozenset()  # sizes that the next change can reach
        self._known: dict[int, StepBytes] = {}
        self._smallest_refused: int | None = None
        self._stopping = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def num_wanted(self) -> int:
        """Sizes taken up so far, compiled or waiting."""
        with self._changed:
            return len(self._order)

    def near(self, size: int) -> None:
        """`size` is in use: take up the sizes around it."""
        with self._changed:
            if not self._order:
                self._measurable[size] = True
            self._settled_on = None
            self._close = frozenset(
                s for s in self._sizes if size / self._reach <= s <= size * self._reach
            )
            # What the next change can reach comes first, then what the one after it can.
            for reach in (self._reach, self._reach**2):
                low, high = size / reach, size * reach
                around = [s for s in self._sizes if low <= s <= high]
                order = climbing_order([*around, size], size)
                self._order += [s for s in order if s not in self._order]
            self._changed.notify_all()

    def settle(self, size: int) -> None:
        """`size` stays in use: have it measure the noise. Says nothing new when said again."""
        with self._changed:
            if self._settled_on != size:
                self._settled_on = size
                self._changed.notify_all()

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

    def was_rehearsed(self, size: int) -> bool:
        """False where the first execution will be slow because there was no memory to try it."""
        with self._changed:
            return size in self._ready and size not in self._unrehearsed

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
    def known(self) -> dict[int, StepBytes]:
        """XLA's analysis of the sizes compiled so far."""
        with self._changed:
            return dict(self._known)

    @property
    def is_busy(self) -> bool:
        """Whether something is being compiled or tried now, which slows the steps beside it."""
        with self._changed:
            return self._is_waiting() and self._thread is not None and not self._stopping

    def start(self) -> None:
        """Climb in the background, from now on. Further calls change nothing."""
        with self._changed:
            if self._thread is not None or self._stopping:
                return
            self._thread = threading.Thread(
                target=self._run, name="jaxgoodput-compile", daemon=True
            )
            self._thread.start()

    def climb(self) -> None:
        """Compile all that was taken up on the caller's thread, with what measures the noise."""
        while self._step():
            pass
        for size in self.ready():
            if not self.can_measure(size):
                self._prepare_measuring(size)

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
        return self._next < len(self._order) or self._to_measure() is not None

    def _to_measure(self) -> int | None:
        """The size settled on, if it is ready and cannot measure the noise yet; the lock is held."""
        size = self._settled_on
        return size if size in self._ready and size not in self._measurable else None

    def _step(self) -> bool:
        """Try the next size, or have the one settled on measure; False where there is neither."""
        with self._changed:
            if self._stopping or not self._is_waiting():
                return False
            waiting, settled_on = self._order[self._next :], self._to_measure()
        # Measuring comes before sizes that are two changes away.
        if settled_on is not None and self._close.isdisjoint(waiting):
            self._prepare_measuring(settled_on)
            return True
        size = waiting[0]
        self._try(size)
        with self._changed:
            self._next += 1
            self._changed.notify_all()
        return True

    def _prepare_measuring(self, size: int) -> None:
        engine = self._engine
        for role in engine.measuring_roles:
            if self._stopping:
                return
            engine.compile_role(role, size)
        need = engine.measuring_bytes_of(size)
        fits = need is None or need.peak <= self._budget
        if not fits:
            logging.warning(
                "steps of %d samples per replica fit into memory, but not with a noise measurement: the "
                "noise is not measured while they are in use. Lower batch.max, or raise memory_bytes.",
                size,
            )
        elif need is not None and self.was_rehearsed(size):
            engine.rehearse(size, engine.measuring_roles)
        with self._changed:
            self._measurable[size] = fits
            self._changed.notify_all()

    def _try(self, size: int) -> None:
        if self._smallest_refused is not None and size >= self._smallest_refused:
            return
        engine = self._engine
        roles = engine.training_roles(accumulate=self._accumulate)
        for role in roles:
            if self._stopping:
                return
            engine.compile_role(role, size)
        # Should this be the first that accumulates; it may never be rehearsed.
        engine.compile_shared(accumulate=self._accumulate)
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
        rehearsable = self._rehearse and need.peak * 2 <= self._budget
        if rehearsable:
            engine.rehearse(size, roles)
        with self._changed:
            self._ready.append(size)
            if not rehearsable:
                self._unrehearsed.add(size)
