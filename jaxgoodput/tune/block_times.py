"""What blocks save: the times of steps that were dispatched together, beside those of steps alone."""

import math
import threading
from collections import defaultdict, deque
from collections.abc import Collection

from jaxgoodput.goodput.search import BatchConfig

# Longer steps are hardly delayed by their dispatch. On a CPU the loop's threads take processors from a step,
# and dispatched one by one, steps of 0.6 ms took 2 to 4 ms on an H100 beside a compilation.
SHORT_S = 1e-2
MOST_SAVED = 0.8  # share of a step alone that blocks are believed to save at another size
KEEP = 96  # latest steps that are compared
ENOUGH, ENOUGH_IN_BLOCKS = 16, 48  # steps of each kind make a comparison
# How much longer steps in blocks must take to be called slower; the second if both kinds were timed beside
# compilations, which slow down some more than others. In a loop, convolutions may take much longer.
MARGIN, MARGIN_BUSY = 0.1, 0.5


class BlockTimes:
    """The seconds of steps in blocks and alone, by batch; none that measures the noise. Thread-safe."""

    def __init__(self):
        self.saved_s = 0.0
        """Seconds that a step in a block takes less than one alone, as last compared; 0 if unknown."""
        self._lock = threading.Lock()
        self._row: tuple[BatchConfig | None, int] = (None, 0)  # latest steps alone, of one batch
        self._seconds: defaultdict[tuple[BatchConfig, bool, bool], deque[float]]
        self._seconds = defaultdict(lambda: deque(maxlen=KEEP))

    def add(self, config: BatchConfig, step_s: float, *, num_together: int = 1, busy: bool) -> None:
        """Record steps dispatched together; `busy` says that a compilation competed for the processors.

        One alone counts if many before it were, too. Behind a block it takes less time: it was read with
        others, and dispatched while the block ran.
        """
        with self._lock:
            before, count = self._row
            in_block = num_together > 1
            count = 0 if in_block else count + 1 if config == before else 1
            self._row = config, count
            if in_block or count > ENOUGH:
                self._seconds[config, in_block, busy].extend([step_s] * num_together)

    def knows_alone(self, config: BatchConfig, *, busy: bool) -> bool:
        """Return whether enough steps alone are known to compare blocks with, beside a compilation or not."""
        with self._lock:
            return len(self._seconds[config, False, busy]) >= ENOUGH

    def compare(self, config: BatchConfig) -> float:
        """Return the seconds that a step saves in a block, negative if blocks are slower; NaN if unknown.

        Lower quartiles are compared, because what disturbs a step only adds to its time; of steps beside a
        compilation if there are too few others. If blocks only seem a little slower, the result is 0.
        Remembers the result as `saved_s`.
        """
        with self._lock:
            for busy, margin in ((False, MARGIN), (True, MARGIN_BUSY)):
                alone, block = (self._seconds[config, x, busy] for x in (False, True))
                if len(alone) >= ENOUGH and len(block) >= ENOUGH_IN_BLOCKS:
                    alone_s, block_s = _lower_quartile(alone), _lower_quartile(block)
                    self.saved_s = max(alone_s - block_s, 0.0)
                    is_unsure = alone_s < block_s <= (1 + margin) * alone_s
                    return 0.0 if is_unsure else alone_s - block_s
        return math.nan

    def forget(self, config: BatchConfig) -> None:
        """Forget the steps of a batch, so that both kinds are timed afresh, one soon after the other."""
        with self._lock:
            for in_block in (False, True):
                for busy in (False, True):
                    self._seconds[config, in_block, busy].clear()

    def corrected(self, config: BatchConfig, step_s: float) -> float:
        """Return the seconds of a step alone, less what blocks may save if its batch has none yet."""
        with self._lock:
            has_own = any(self._seconds[config, True, busy] for busy in (False, True))
        is_single = config.num_replicas == config.num_micro_batches == 1
        if has_own or not is_single or step_s >= SHORT_S:
            return step_s
        return step_s - min(self.saved_s, MOST_SAVED * step_s)


def _lower_quartile(seconds: Collection[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]
