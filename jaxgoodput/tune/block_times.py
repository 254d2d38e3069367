"""What blocks save: the times of steps that were dispatched together, beside those of steps alone."""

import math
import statistics
import threading
from collections import defaultdict, deque

from jaxgoodput.goodput.search import BatchConfig

# Longer steps are hardly delayed by their dispatch, even on a CPU, where the loop's threads take processors
# from a step.
SHORT_S = 1e-2
MOST_SAVED = 0.8  # share of a step alone that blocks are believed to save at another size
KEEP = 48  # latest steps that a median is taken over
ENOUGH = 16  # steps of both kinds make a comparison


class BlockTimes:
    """The seconds of steps in blocks and alone, by batch; none that measures the noise. Thread-safe."""

    def __init__(self):
        self.saved_s = 0.0
        """Seconds that a step in a block takes less than one alone, as last compared; 0 if unknown."""
        self._lock = threading.Lock()
        self._seconds: defaultdict[tuple[BatchConfig, bool, bool], deque[float]]
        self._seconds = defaultdict(lambda: deque(maxlen=KEEP))

    def add(self, config: BatchConfig, step_s: float, *, in_block: bool, busy: bool) -> None:
        """Record a step; `busy` says that a compilation competed for the processors."""
        with self._lock:
            self._seconds[config, in_block, busy].append(step_s)

    def knows_alone(self, config: BatchConfig, *, busy: bool) -> bool:
        """Return whether enough steps alone are known to compare blocks with, beside a compilation or not."""
        with self._lock:
            return len(self._seconds[config, False, busy]) >= ENOUGH

    def compare(self, config: BatchConfig) -> float:
        """Return the seconds that a step saves in a block, negative if blocks are slower; NaN if unknown.

        Steps beside a compilation are compared with one another, if there are too few others. Remembers the
        result as `saved_s`.
        """
        with self._lock:
            for busy in (False, True):
                alone, block = (self._seconds[config, x, busy] for x in (False, True))
                if min(len(alone), len(block)) >= ENOUGH:
                    saved_s = statistics.median(alone) - statistics.median(block)
                    self.saved_s = max(saved_s, 0.0)
                    return saved_s
        return math.nan

    def forget(self, config: BatchConfig) -> None:
        """Forget the steps in blocks of a batch, so that they are compared afresh."""
        with self._lock:
            for busy in (False, True):
                self._seconds[config, True, busy].clear()

    def corrected(self, config: BatchConfig, step_s: float) -> float:
        """Return the seconds of a step alone, less what blocks may save if its batch has none yet."""
        with self._lock:
            has_own = any(self._seconds[config, True, busy] for busy in (False, True))
        is_single = config.num_replicas == config.num_micro_batches == 1
        if has_own or not is_single or step_s >= SHORT_S:
            return step_s
        return step_s - min(self.saved_s, MOST_SAVED * step_s)
