"""Decides which batch size is worth being compiled and tried next, and keeps account of what that costs.

Exploring delays training by a price in seconds, which is known at once. What it saves is a hope. The account
earns a share of the time that passes. It may also borrow a share of the time that is left, if the hope repays
the price several times. So a short run explores little, a long run thoroughly, and a run in which nothing is
found loses at most `EARNED` + `BORROWED` of its time.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from jaxgoodput.tune.batch import hoped_gain
from jaxgoodput.tune.timings import TimingTable
from jaxgoodput.tune.verdict import Situation

EARNED = 0.02  # of the time passed
BORROWED = 0.03  # of the time that is left
REPAID = 5.0  # times the price that a loan must be expected to save
# Share of a compilation's seconds by which it delays the steps beside it, until that has been measured.
ASSUMED_DELAY = 0.3
SEVERAL = 0.9  # hope of several micro-batches, over one of as many samples


@dataclass
class Account:
    """Seconds of delay by exploring, so far."""

    spent_s: float = 0.0
    expected_s: float = math.nan
    """How long the whole run was expected to take when exploring began; NaN until then."""

    def allows(self, price_s: float, *, saving_s: float, passed_s: float, left_s: float) -> bool:
        """Return whether to explore for `price_s` seconds now, in the hope to save `saving_s` seconds.

        `passed_s` is the time since training began, `left_s` the time to its end if nothing changes. A size
        that was found shortens the run, and earns a share of what it saves. False if any of them is unknown.
        """
        saved_s = max(self.expected_s - passed_s - left_s, 0.0) if self.spent_s else 0.0
        credit_s = EARNED * (passed_s + saved_s) - self.spent_s
        if price_s <= credit_s:
            return saving_s > price_s
        return saving_s >= REPAID * price_s and price_s <= credit_s + BORROWED * (left_s + saved_s)

    def spend(self, price_s: float, *, total_s: float) -> None:
        """Charge a delay of training; `total_s` is how long the whole run is expected to take now."""
        if math.isnan(self.expected_s):
            self.expected_s = total_s
        self.spent_s += price_s


@dataclass(frozen=True, kw_only=True)
class NextSize:
    """A micro-batch size that is worth being compiled next."""

    size: int
    """Samples per replica."""
    hope: float
    """Its optimistic goodput, relative to the best compiled batch."""


class Explorer:
    """Chooses the next size to compile, if the account allows it. Call it on one thread.

    `compile_s` is how long compiling one size takes, which compilations correct. `began_s` is the time of the
    run's first step.
    """

    def __init__(self, compile_s: float, began_s: float):
        self.account = Account()
        self.outlook = ""
        """A sentence on what the next size costs and may bring, as last decided."""
        self._compile_s = compile_s
        self._began_s = began_s
        self._asked_s = math.nan  # when the compilation began that has not ended; NaN if none runs
        self._charged_s = 0.0  # for it

    def next(
        self,
        situation: Situation,
        sizes: Sequence[int],
        settled: Collection[int],
        table: TimingTable,
        *,
        now_s: float,
        num_compiled: int = 1,
    ) -> NextSize | None:
        """Return the size to compile now, if any, and charge its price. See `next_size`.

        `num_compiled` is how many sizes are compiled if one is, `now_s` the time.
        """
        if not math.isnan(self._asked_s):
            return None
        found = next_size(situation, sizes, settled, table)
        if found is None:
            self.outlook = "no other size promises enough to be compiled"
            return None
        price_s = num_compiled * self._compile_s * _delay(table)
        saving_s = situation.left_s * (1 - 1 / found.hope)
        passed_s = now_s - self._began_s
        left = {"passed_s": passed_s, "left_s": situation.left_s}
        what = (
            f"compiling micro-batches of {found.size} delays training by about {price_s:.2g} s and may save "
            f"{saving_s:.2g} s"
        )
        if not self.account.allows(price_s, saving_s=saving_s, **left):
            self.outlook = (
                f"{what}, which is too dear for the {situation.left_s:.2g} s that are left"
            )
            return None
        self.outlook = what
        self.account.spend(price_s, total_s=passed_s + situation.left_s)
        self._asked_s, self._charged_s = now_s, price_s
        return found

    def stepped(self, began_s: float, table: TimingTable, *, is_busy: bool) -> None:
        """Note that a step is done, which began at `began_s`, beside a compilation if `is_busy`.

        If the compilation that was asked for has ended by then, its price is corrected.
        """
        if math.isnan(self._asked_s) or is_busy or began_s <= self._asked_s:
            return
        self._compile_s = began_s - self._asked_s
        self.account.spend(self._compile_s * _delay(table) - self._charged_s, total_s=math.nan)
        self._asked_s = math.nan


def _delay(table: TimingTable) -> float:
    """Return by which share of its seconds a compilation delays the steps beside it."""
    share = table.disturbance()
    return ASSUMED_DELAY if math.isnan(share) else max(share, 0.0) / (1 + max(share, 0.0))


def next_size(
    situation: Situation, sizes: Sequence[int], settled: Collection[int], table: TimingTable
) -> NextSize | None:
    """Return the size, of those that are not compiled, with the highest optimistic gain; None without a gain.

    `sizes` are all micro-batch sizes that may be used, and `settled` the ones that were compiled or refused.
    `table` has the step times of the present strategy. Only batches that one change may reach are considered:
    a size in between says whether a larger one is worth its price. A compiled size that promises a gain is
    tried first, so there is no next size until it has been.
    """
    current, limits, caution = situation.current, situation.here.limits, situation.caution
    batches = np.multiply.outer(sizes, np.arange(1, limits.max_micro_batches + 1))
    batches *= current.num_replicas
    hopes = hoped_gain(situation.grad, limits, current.global_batch_size, batches)
    if len(set(situation.here.timed)) > 1:
        hopes = _modelled(situation, sizes, batches, hopes)
    else:
        hopes *= _correction(situation, sizes, batches, table)
    # The root counts on small steps to leave the device idle, which several micro-batches do not change.
    hopes[:, 1:] *= SEVERAL
    hopes = np.where(batches <= situation.largest, hopes, 0.0).max(axis=1)
    is_ready = np.isin(sizes, list(situation.here.ready))
    is_untried = is_ready & ~np.isin(sizes, [*situation.here.timed, current.micro_batch_size])
    best = float(hopes[is_ready & ~is_untried].max(initial=1.0))
    if (hopes[is_untried] >= best * (1 + caution.min_gain)).any():
        return None
    hopes = np.where(np.isin(sizes, list(settled)), 0.0, hopes / best)
    chosen = int(np.argmax(hopes))
    if not hopes[chosen] >= 1 + caution.min_gain:
        return None
    return NextSize(size=int(sizes[chosen]), hope=float(hopes[chosen]))


def _correction(
    situation: Situation, sizes: Sequence[int], batches: np.ndarray, table: TimingTable
) -> np.ndarray:
    """Return the factor that corrects each `hoped_gain`, [sizes, counts], by timed steps; 1 if not timed."""
    current, num_nodes = situation.current, situation.here.placement.num_nodes
    one = [dataclasses.replace(current, micro_batch_size=s, num_micro_batches=1) for s in sizes]
    there_s = np.array([table.step_s(num_nodes, c) for c in one])
    there_s[np.asarray(sizes) == current.micro_batch_size] = math.nan
    counts = batches / batches[:, :1]  # a micro-batch never takes longer than a whole step of one
    known = (
        situation.step_s
        / (there_s[:, None] * counts)
        * np.sqrt(batches / current.global_batch_size)
    )
    return np.nan_to_num(known, nan=1.0)


def _modelled(
    situation: Situation, sizes: Sequence[int], batches: np.ndarray, hopes: np.ndarray
) -> np.ndarray:
    """Return hopes, [sizes, counts], by the step times of the fitted model, once it knows two sizes."""
    here, current = situation.here, situation.current
    if here.fit is None:
        return hopes
    model = here.model(situation.grad)
    counts = np.broadcast_to(np.arange(1, batches.shape[1] + 1), batches.shape)
    there = model.throughput(here.placement, np.asarray(sizes)[:, None], counts)
    now = model.throughput(here.placement, current.micro_batch_size, current.num_micro_batches)
    guessed = np.sqrt(batches / current.global_batch_size)
    return np.where(hopes > 0, hopes / guessed * np.asarray(there) / float(now), 0.0)
