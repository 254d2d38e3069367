"""Decides how often the gradient noise is measured: as often as its cost allows."""

import math

from jaxgoodput.optim.noise import MIN_SAMPLES
from jaxgoodput.tune.block_times import SHORT_S
from jaxgoodput.tune.timings import MIN_COUNT, TimingKey, TimingTable

# Used when the noise is first known, until steps with and without a measurement have been timed and can be
# compared; and after the batch has grown, until the noise has been measured again.
FIRST_CADENCE = 10
# The same where nothing rests on the noise: a measurement may take as long again as a step.
RARE_CADENCE = 50
MOST, MOST_RARE = 256, 100_000  # steps between two measurements, whatever they cost


def statistics_cadence(
    plain_s: float, measured_s: float, *, overhead: float, most: int = MOST
) -> int:
    """Return the steps between two noise measurements at which they cost at most `overhead` of the time.

    `plain_s` and `measured_s` are the median seconds of a step without and with a measurement. If either is
    NaN, every step measures.

    >>> statistics_cadence(0.010, 0.014, overhead=0.02)
    20
    """
    if not (plain_s > 0 and measured_s > 0):
        return 1
    extra = max(measured_s / plain_s - 1, 0.0)
    if extra <= overhead:
        return 1
    return min(math.ceil(extra / overhead - 1e-9), most)


class NoiseCadence:
    """The number of steps between two noise measurements, now and from the next verdict on.

    `fixed` is the user's own choice; if None, the cost of a measurement decides, up to `overhead` of the
    time. `is_needed` says whether anything but the record rests on the noise: then every step measures until
    it is known.
    """

    def __init__(self, fixed: int | None, overhead: float, *, is_needed: bool = True):
        self.every = fixed or (1 if is_needed else RARE_CADENCE)
        self.measured_at = math.nan  # last step that measured the noise
        self._fixed = fixed
        self._overhead = overhead

    def restore(self, every: int) -> None:
        """Resume with the cadence of a checkpoint, unless the user has fixed one."""
        self.every = self._fixed or every

    def should_relax(self, table: TimingTable, plain: TimingKey, *, is_known: bool) -> bool:
        """Return whether the noise has just become known, so that not every step needs to measure it."""
        if self._fixed is not None or self.every != 1:
            return False
        return is_known and table.count(plain) < MIN_COUNT

    def wanted(
        self,
        table: TimingTable,
        plain: TimingKey,
        measured: TimingKey,
        *,
        is_known: bool,
        newest_samples: float,
        is_needed: bool = True,
        may_block: bool = True,
    ) -> int:
        """Return the cadence that the next verdict should use.

        `plain` and `measured` are the keys in `table` of steps without and with a measurement;
        `newest_samples` is how many noise samples were taken since the batch last grew; `is_needed` is as
        above, at the present batch; `may_block` says whether several steps may be dispatched at once.
        """
        if self._fixed is not None:
            return self._fixed
        if is_needed and not is_known:
            return 1
        if min(table.count(plain), table.count(measured)) < MIN_COUNT:
            return FIRST_CADENCE if is_needed else RARE_CADENCE
        cadence = statistics_cadence(
            table.median_s(plain),
            table.median_s(measured),
            overhead=self._overhead,
            most=MOST if is_needed else MOST_RARE,
        )
        # If every step measured, no plain step would be timed again, and a wrong first comparison would
        # never be corrected. Between short steps that measure there must be room for a block of others: it
        # saves more than a measurement costs.
        is_short = may_block and table.median_s(plain) < SHORT_S
        cadence = max(cadence, FIRST_CADENCE if is_short else 2)
        is_new = is_needed and newest_samples < MIN_SAMPLES
        return min(FIRST_CADENCE, cadence) if is_new else cadence
