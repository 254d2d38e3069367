"""Decides which batch size is worth being compiled and tried next, and keeps account of what that costs.

Exploring delays training by a price in seconds, which is known beforehand. What it saves is a hope. The
account earns a share of the time that passes, and of what a found size saves. It may also borrow a share of
the time that is left, if the hope repays the price several times; the more often, the more, unless the size
explored last was tried in vain. So a short run explores little, unless very much may be saved, and a long run
thoroughly. Compiling the sizes to be tried is charged, and so are their trials, but not what is compiled for
a size that has proved better. What measures the noise is charged if less than `HURRY` is hoped for.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxgoodput.goodput.efficiency import is_known
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.text import percent, roughly
from jaxgoodput.tune.batch import (
    REPAYMENT,
    assumed_growth,
    assumed_trial_s,
    hoped_gain,
    modelled_gain,
    trial_pays,
)
from jaxgoodput.tune.timings import TimingTable
from jaxgoodput.tune.verdict import Situation

EARNINGS = 0.02  # of the time passed
FOUND = 0.05  # of the time that a found size is believed to save
LOAN = 0.03  # of the time that is left
# A loan that is expected to save as many times more may be as many times larger, up to this many times, as
# long as the size explored last has kept what it promised.
MOST_LOANS = 4.0
# Share of a compilation's seconds by which it delays the steps beside it, until that has been measured.
ASSUMED_DELAY = 0.3
# On few cores, a compilation beside steps takes up to three times as long as alone, and the steps are slower.
# Training waits for a size that may gain so much: the run loses little by that, and has it sooner.
HURRY, FEW_CORES_DELAY = 2.0, 0.5
SEVERAL = 0.9  # hope of several micro-batches, over a single one of as many samples
# Between two looks at whether compiling another size pays. One may take as long as several short steps.
LOOK_STEPS, LOOK_SHARE, MOST_LOOK_S = (
    16,
    0.02,
    0.5,
)  # and a share of the time passed, up to so many seconds


@dataclass(frozen=True, kw_only=True)
class AccountState:
    """The account of exploring at one moment; all in seconds by which exploring delays training."""

    is_part: ClassVar[bool] = True  # a journal of another version may have more fields
    earned_s: float
    """What the time that has passed, and time that a found size is believed to save, have earned."""
    spent_s: float
    """Estimated delay by exploring so far, including what was charged for the size being compiled."""
    loan_s: float
    """What may be borrowed now for a hope that just repays it; NaN if the time left is unknown."""
    most_loans: float = MOST_LOANS
    """Largest multiple of `loan_s` that a very promising hope may borrow."""

    @property
    def credit_s(self) -> float:
        """What may be spent without borrowing; negative if that much is borrowed."""
        return self.earned_s - self.spent_s

    @property
    def borrowed_s(self) -> float:
        """What is borrowed now."""
        return max(-self.credit_s, 0.0)

    @property
    def most_s(self) -> float:
        """What may be borrowed at most, in the hope to save very much."""
        return self.most_loans * self.loan_s

    def allowance_s(self, price_s: float, saving_s: float) -> float:
        """Return what may be spent now on something that costs `price_s` and may save `saving_s`."""
        times = saving_s / (REPAYMENT * price_s) if price_s > 0 else math.inf
        num_loans = min(times, self.most_loans)
        return self.credit_s + (num_loans * self.loan_s if num_loans >= 1 else 0.0)


@dataclass
class Account:
    """Seconds of delay by exploring, so far."""

    spent_s: float = 0.0
    expected_s: float = math.nan
    """How long the whole run would take with the size in use when exploring began; NaN if unknown."""
    most_loans: float = MOST_LOANS
    """See `AccountState`."""

    def allows(self, price_s: float, *, saving_s: float, passed_s: float, left_s: float) -> bool:
        """Return whether to explore for `price_s` seconds now, in the hope to save `saving_s` seconds.

        `passed_s` and `left_s` are as in `state`.
        """
        state = self.state(passed_s, left_s)
        return saving_s > price_s and price_s <= state.allowance_s(price_s, saving_s)

    def state(self, passed_s: float, left_s: float) -> AccountState:
        """Return the account `passed_s` seconds after training began.

        `left_s` is the time to its end if nothing changes, NaN if unknown. A size that was found shortens the
        run, and earns a share of what it saves.
        """
        found_s = self.expected_s - passed_s - left_s
        saved_s = found_s if found_s > 0 else 0.0  # NaN: unknown
        earned_s = EARNINGS * passed_s + FOUND * saved_s
        return AccountState(
            earned_s=earned_s,
            spent_s=self.spent_s,
            loan_s=LOAN * (left_s + saved_s),
            most_loans=self.most_loans,
        )

    def spend(self, price_s: float, *, total_s: float = math.nan) -> None:
        """Charge a delay of training; `total_s` is how long the whole run is expected to take, if known."""
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


@dataclass
class Outcomes:
    """What became of the sizes that were explored. A size is referred to with its strategy."""

    _first: tuple[str, int] | None = None  # in use when exploring began
    _last: tuple[str, int] | None = None  # chosen last
    _is_disappointing: bool = False  # whether the last one that was tried is not used

    def chosen(self, current: BatchConfig, size: int) -> None:
        """Note that a size will be explored while `current` is in use."""
        self._first = self._first or (current.strategy, current.micro_batch_size)
        self._last = current.strategy, size

    def tell(
        self, account: Account, situation: Situation, total_s: float, *, is_compiled: bool
    ) -> None:
        """Tell the account, unless a trial is not over; `total_s` is how long the run is going to take."""
        if situation.home is not None:
            return
        last, timed = self._last, situation.here.timed
        here = situation.current.strategy, situation.current.micro_batch_size
        if last is not None and is_compiled:
            if here == last:
                self._is_disappointing = False
            elif here[0] == last[0] and last[1] in timed:
                # Hopes for others are less credible, too.
                self._is_disappointing = True
        account.most_loans = 1.0 if self._is_disappointing else MOST_LOANS
        if here == self._first:
            # Nothing was found, so that a shorter forecast is not a saving.
            expected_s = account.expected_s
            account.expected_s = min(expected_s, total_s) if situation.disturbed else total_s


@dataclass(frozen=True, kw_only=True)
class Explored:
    """What exploring has cost and brought a run so far: what its next processes begin with."""

    is_part: ClassVar[bool] = True  # a checkpoint of another version may have more fields
    account: Account
    outcomes: Outcomes
    passed_s: float
    """Seconds that the run has trained."""


class Looks:
    """When to look again whether compiling another size pays. `began_s` is the time when training begins."""

    def __init__(self, began_s: float):
        self._began_s = began_s
        self._step, self._now_s = 0, began_s  # of the latest one

    def is_time(self, step: int, now_s: float) -> bool:
        """Return whether enough steps and seconds have passed."""
        rest_s = min(LOOK_SHARE * (now_s - self._began_s), MOST_LOOK_S)
        return step >= self._step + LOOK_STEPS and now_s >= self._now_s + rest_s

    def looked(self, step: int, now_s: float) -> None:
        """Note a look."""
        self._step, self._now_s = step, now_s


class Explorer:
    """Chooses the next size to compile, if the account allows it. Call it on one thread.

    `compile_s` is how long compiling the plain step of one size takes beside nothing else, and `delay` the
    share of it by which that would delay training; compilations correct both, but the delay is never taken
    for less than `least_delay`. `began_s` is the time when training begins.
    """

    def __init__(
        self,
        compile_s: float,
        began_s: float,
        *,
        delay: float = ASSUMED_DELAY,
        least_delay: float = 0.0,
    ):
        self.account = Account()
        self.outlook = ""
        """A sentence on what the next size costs and may save, as last decided."""
        self.compiling: int | None = None
        """The size that was chosen last, until it is compiled."""
        self.is_trial_due = False
        """Whether a compiled size is about to be tried, as last decided."""
        self.is_hurried = False
        """Whether training should wait for what is being compiled, as last decided."""
        self.awaits_noise = False
        """Whether a size may be worth its price if the noise is large, so that it should be measured."""
        self.hurries_noise = False
        """Whether training should wait for what measures the noise, as last decided."""
        self._outcomes = Outcomes()
        self._pays_noise = False  # whether what measures it is charged
        self._awaited_noise = False  # whether training ever waited for that
        self._has_few_cores = delay >= FEW_CORES_DELAY
        self._was_hurried = False  # at any time since the size that is being compiled was chosen
        self.compile_s = compile_s
        """How long compiling one size takes, as far as is known."""
        self._delay, self._least_delay = delay, least_delay
        self._began_s = began_s
        self._num_plain = 1.0  # how often that is charged for the size that is being compiled
        self._charged_s = 0.0  # for compiling and trying that size
        self._trial_s = 0.0  # of that, for trying it

    @property
    def has_begun(self) -> bool:
        """Whether anything was charged: a size, or what measures the noise for one."""
        return self.compiling is not None or self.account.spent_s > 0

    def passed_s(self, now_s: float) -> float:
        """Return for how many seconds the run has trained, its earlier processes included."""
        return now_s - self._began_s

    def explored(self, now_s: float) -> Explored:
        """Return a copy of what exploring has cost and brought so far."""
        account, outcomes = dataclasses.replace(self.account), dataclasses.replace(self._outcomes)
        return Explored(account=account, outcomes=outcomes, passed_s=self.passed_s(now_s))

    def resume(self, earlier: Explored, now_s: float) -> None:
        """Go on with the account of earlier processes. What they were still compiling stays charged.

        How long the run would take without exploring is asked anew: its devices may be others.
        """
        self.account = dataclasses.replace(earlier.account, expected_s=math.nan)
        self._outcomes = dataclasses.replace(earlier.outcomes, _first=None)
        self._began_s = now_s - earlier.passed_s

    def next(
        self,
        situation: Situation,
        sizes: Sequence[int],
        settled: Collection[int],
        table: TimingTable,
        *,
        now_s: float,
        num_plain: float = 1.0,
        may_hurry: bool = True,
        measuring_s: float | None = None,
    ) -> NextSize | None:
        """Return the size to compile now, if any, and charge its price. See `Hopes.next_size`.

        `num_plain` is how many times as long as one plain step everything takes that is then compiled, and
        `now_s` the time. `may_hurry` says whether training can wait for it. `measuring_s` is how long
        compiling takes what measures the noise, 0 if that is there, None if the noise cannot be measured.
        Until the noise is known, a size of which less than `HURRY` is hoped waits for it; for another one,
        training may wait for what measures it. None until the size before is compiled.
        """
        left_s, passed_s = situation.left_s, self.passed_s(now_s)
        self.is_hurried = self.awaits_noise = self.hurries_noise = False
        if math.isnan(left_s):
            return None
        hopes = Hopes.of(situation, sizes, table)
        if is_known(situation.grad):
            measuring_s = None
        may_hurry &= self._has_few_cores and is_known(situation.grad)
        times = left_s, passed_s
        is_compiled = self.compiling is None
        self._outcomes.tell(self.account, situation, passed_s + left_s, is_compiled=is_compiled)
        if self.compiling is not None:
            if hopes.of_size(self.compiling) >= HURRY:
                self._hurry(hopes.of_size(self.compiling), may_hurry, measuring_s, *times)
            return None
        self.is_trial_due = hopes.is_trial_due
        found = hopes.next_size(settled)
        if found is None:
            least = percent(situation.caution.min_gain)
            self.outlook = f"no size left to compile may gain the {least} that a change must bring"
            return None
        trial_s, whole_s = _trial_s(situation, found), num_plain * self.compile_s
        saving_s = left_s * (1 - 1 / found.hope)
        # Waiting costs more, so what may not be spent on that may do for compiling beside training.
        is_hurried = may_hurry and found.hope >= HURRY
        is_hurried &= self._allows(whole_s + trial_s, found.hope, *times)
        price_s = whole_s * (1.0 if is_hurried else self._delay) + trial_s
        awaits_noise = measuring_s is not None and found.hope < HURRY
        noise_s = 0.0
        if measuring_s is not None and awaits_noise and not self._pays_noise:
            noise_s = self._delay * measuring_s
        price_s += noise_s
        what = f"compiling and trying micro-batches of {found.size}"
        price = f"training by about {roughly(price_s)}, and may save up to {roughly(saving_s)}"
        if not self._allows(price_s, found.hope, *times):
            allowed_s = self.account.state(passed_s, left_s).allowance_s(price_s, saving_s)
            limit = _limit(price_s, allowed_s)
            self.outlook = f"{what} would delay {price} of the {roughly(left_s)} left, {limit}"
            return None
        if awaits_noise:
            self.awaits_noise = True
            self._pays_noise = True
            self.account.spend(noise_s)
            self.outlook = (
                f"{what} would delay {price} of the {roughly(left_s)} left; the noise is measured first, "
                "because it decides whether this pays"
            )
            return None
        self.outlook = f"{what} delays {price} of the {roughly(left_s)} left"
        if is_hurried:
            self.outlook += "; training waits for it"
        self.is_hurried = self._was_hurried = is_hurried
        # Steps beside a compilation take longer than the ones that are left.
        total_s = math.nan if situation.disturbed else passed_s + left_s
        self.account.spend(price_s, total_s=total_s)
        self._outcomes.chosen(situation.current, found.size)
        self.compiling, self._num_plain = found.size, num_plain
        self._charged_s, self._trial_s = price_s, trial_s
        return found

    def _hurry(
        self,
        hope: float,
        may_hurry: bool,
        measuring_s: float | None,
        left_s: float,
        passed_s: float,
    ) -> None:
        """Decide whether training waits for the size that is being compiled, or for the noise before it."""
        more = 1 - self._delay  # than beside training
        if may_hurry:
            price_s = more * self._num_plain * self.compile_s
            is_paid = self._was_hurried or self._allows(price_s, hope, left_s, passed_s)
            self.is_hurried = self._was_hurried = is_paid
        if measuring_s and self._has_few_cores:
            # Begun, it goes on. It is not charged: the noise is needed for any batch that may gain much.
            self._awaited_noise |= self._allows(more * measuring_s, hope, left_s, passed_s)
            self.hurries_noise = self._awaited_noise

    def _allows(self, price_s: float, hope: float, left_s: float, passed_s: float) -> bool:
        """Return whether the account allows a price for a size with this hope."""
        saving_s = left_s * (1 - 1 / max(hope, 1.0))
        return self.account.allows(price_s, saving_s=saving_s, passed_s=passed_s, left_s=left_s)

    def compiled(self, took_s: float, table: TimingTable) -> None:
        """Note that the size chosen last is compiled, or was refused untried.

        `took_s` is how long its plain step took; 0 if nothing was compiled.
        """
        self.compiling, real_s = None, 0.0
        self.is_trial_due = took_s > 0  # until it is decided again
        if took_s > 0:
            self.compile_s, delay = took_s, 1.0
            if not self._was_hurried:
                # Beside training it takes longer, and a smaller share of that delays training.
                self._delay = max(min(self._delay, ASSUMED_DELAY), self._least_delay)
                longer = table.disturbance()
                if not math.isnan(longer):
                    self._delay = max(1 - 1 / (1 + max(longer, 0.0)), self._least_delay)
                delay = self._delay
            real_s = self._num_plain * took_s * delay + self._trial_s
        self.is_hurried = self._was_hurried = False
        self.account.spend(real_s - self._charged_s)


def _limit(price_s: float, allowed_s: float) -> str:
    """Say why a price is too high."""
    if not allowed_s > 0:
        return "but nothing may be spent on that now"
    if price_s <= allowed_s:
        return "which is too little"
    return f"but only {roughly(allowed_s)} may be spent on that now"


def _trial_s(situation: Situation, found: NextSize) -> float:
    """Return the seconds of a trial, which may bring nothing."""
    current = situation.current
    there = np.array(float(found.size * current.num_replicas * current.num_micro_batches))
    seconds = assumed_trial_s(situation, there)
    return 0.0 if math.isnan(seconds) else seconds


@dataclass(frozen=True, kw_only=True)
class Hopes:
    """The optimistic gains of all micro-batch sizes that may be used, and what they mean."""

    sizes: Sequence[int]
    gains: np.ndarray
    """Optimistic goodput with each size, relative to the best that was tried."""
    is_untried: np.ndarray
    """Whether each size is compiled, was never timed, and would be tried if it promises a gain."""
    least: float
    """Gain that is worth a change."""

    @classmethod
    def of(cls, situation: Situation, sizes: Sequence[int], table: TimingTable) -> "Hopes":
        """Return the hopes for `sizes`; `table` has the step times of the present strategy.

        Only batches that one change may reach have any: a size in between says whether a larger one is worth
        its price.
        """
        here, current, limits = situation.here, situation.current, situation.here.limits
        batches = np.multiply.outer(sizes, np.arange(1, limits.max_micro_batches + 1))
        batches *= current.num_replicas
        is_modelled = len(set(here.timed)) > 1 and here.fit is not None
        if is_modelled:
            hopes = modelled_gain(situation, sizes, batches)
        else:
            hopes = hoped_gain(situation, batches)
            hopes *= _correction(situation, sizes, batches, table)
            hopes[:, 1:] *= SEVERAL  # each takes its own time, which the hope leaves out
        hopes = np.where(batches <= situation.largest, hopes, 0.0).max(axis=1)
        is_ready = np.isin(sizes, list(here.ready))
        is_untried = is_ready & ~np.isin(sizes, [*here.timed, current.micro_batch_size])
        is_untried &= batches[:, 0] >= situation.floor
        best = float(hopes[is_ready & ~is_untried].max(initial=1.0))
        if is_modelled:
            for at in map(int, np.flatnonzero(is_untried & (hopes > 0))):
                one = dataclasses.replace(current, micro_batch_size=sizes[at], num_micro_batches=1)
                is_untried[at] = trial_pays(situation, one, float(hopes[at] / best))
        return cls(
            sizes=sizes,
            gains=hopes / best,
            is_untried=is_untried,
            least=1 + situation.caution.min_gain,
        )

    @property
    def is_trial_due(self) -> bool:
        """Whether a compiled size promises a gain and was never tried: it will be (`batch.py`)."""
        return bool((self.gains[self.is_untried] >= self.least).any())

    def of_size(self, size: int) -> float:
        """Return the optimistic gain of a size; 0 if it is of another strategy."""
        return float(self.gains[np.asarray(self.sizes) == size].max(initial=0.0))

    def next_size(self, settled: Collection[int]) -> NextSize | None:
        """Return the size that is not compiled and promises most; None without a gain, or before a trial.

        `settled` were compiled or refused, or are queued.
        """
        if self.is_trial_due:
            return None
        gains = np.where(np.isin(self.sizes, list(settled)), 0.0, self.gains)
        chosen = int(np.argmax(gains))
        if not gains[chosen] >= self.least:
            return None
        return NextSize(size=int(self.sizes[chosen]), hope=float(gains[chosen]))


def _correction(
    situation: Situation, sizes: Sequence[int], batches: np.ndarray, table: TimingTable
) -> np.ndarray:
    """Return the factor that corrects each `hoped_gain`, [sizes, counts], by timed steps; 1 if not timed."""
    current, num_nodes = situation.current, situation.here.placement.num_nodes
    one = [dataclasses.replace(current, micro_batch_size=s, num_micro_batches=1) for s in sizes]
    there_s = np.array([table.step_s(num_nodes, c) for c in one])
    there_s[np.asarray(sizes) == current.micro_batch_size] = math.nan
    counts = batches / batches[:, :1]  # a micro-batch never takes longer than a whole step of one
    known = situation.step_s / (there_s[:, None] * counts) * assumed_growth(situation, batches)
    return np.nan_to_num(known, nan=1.0)
