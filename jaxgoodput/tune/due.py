"""Decides when the next verdict is due."""

import math
from collections.abc import Callable

from jaxgoodput.tune.verdict import PROBE_S, PROBE_STEPS, Situation

# Between two verdicts for which nothing was waited, and between two looks for a drift.
LEAST_S = 0.5
# And times what the last one took in CPU seconds: on few processors, steps wait for it.
LEAST_TIMES = 50.0
# And times that, if the batch is fixed: verdicts are only shown.
LESS_OFTEN = 10.0
PATIENCE = 4  # times its usual length that a trial may take until its steps are timed
CALM_STEPS = 8  # undisturbed steps after a compilation before their times are compared


class VerdictTimer:
    """Counts steps, seconds and changes, and says when the tuner should be asked.

    It is asked at regular intervals, and also when something it was waiting for has happened: a trial has
    run its course, the noise has become known, a compilation has ended, or what the last verdict rested on
    has drifted. It is asked less often if the batch is fixed (`adapts` is false). It is not asked while the
    last change is still on its way to the loop, which happens `depth` steps after the loop has accepted it.
    """

    def __init__(
        self,
        now_s: float,
        *,
        warm_up_steps: int,
        dwell_steps: int,
        every_s: float,
        every_steps: int,
        depth: int,
        adapts: bool = True,
    ):
        self.is_judging = False  # from a question to its answer
        self.judged: Situation | None = None  # what was asked about last
        self.answer_s = 0.0  # CPU seconds of the last answer
        self.is_disturbed = False  # whether a compilation competed with the newest step
        self._warm_up_steps = warm_up_steps
        self._dwell_steps = dwell_steps
        self._every_s = every_s
        self._every_steps = every_steps
        self._depth = depth
        self._less_often = 1.0 if adapts else LESS_OFTEN
        self._num_steps = 0
        self._asked = now_s, 0  # second and step of the last question
        self._looked_s = math.inf  # for a drift; until the first question there is none to look for
        # No change that would have to settle first.
        self._changed_at, self._changed_s = -dwell_steps, -math.inf
        self._num_calm = CALM_STEPS  # undisturbed steps since the last disturbed one
        self._num_posted = 0  # batch changes posted to the loop so far
        self._taken_at: (
            int | None
        ) = -depth  # step at which the loop accepted the last one; None: not yet
        self._was_unknown = self._was_disturbed = False  # noise and steps, at the last question

    def add_step(
        self, now_s: float, step: int, *, is_changed: bool, is_disturbed: bool, num_taken: int
    ) -> None:
        """Count a finished step; `num_taken` is how many batch changes the loop had accepted before it."""
        if is_changed:
            self._changed_at, self._changed_s = step, now_s
        if self._taken_at is None and num_taken >= self._num_posted:
            self._taken_at = step
        self.is_disturbed = is_disturbed
        self._num_calm = 0 if is_disturbed else self._num_calm + 1
        self._num_steps += 1

    @property
    def is_warming_up(self) -> bool:
        """Whether the first steps are not over yet."""
        return self._num_steps <= self._warm_up_steps

    def steps_since_change(self, step: int) -> int:
        """Return how many steps ago the configuration changed."""
        return step - self._changed_at

    def posted(self, num_posted: int) -> None:
        """Note that a change was posted to the loop, the `num_posted`-th one."""
        self._num_posted, self._taken_at = num_posted, None

    def has_arrived(self, step: int) -> bool:
        """Return whether the last change is in use, so that another one may follow."""
        return self._taken_at is not None and step >= self._taken_at + self._depth

    def is_due(
        self,
        now_s: float,
        step: int,
        *,
        is_trial: bool,
        is_timed: Callable[[], bool],
        is_known: bool,
        has_fit: bool,
        has_drifted: Callable[[], bool],
    ) -> bool:
        """Return whether to ask for a verdict now; `is_known` says whether the gradient noise is.

        `is_timed` says whether the present step time is known; a trial waits for that, but not for ever.
        `has_drifted` says whether what the last verdict rested on holds no longer; it is called now and then.
        """
        if self._must_wait(step):
            return False
        if now_s < self._changed_s + PROBE_S:
            return False
        if is_trial:
            num_steps = self.steps_since_change(step)
            return num_steps >= PROBE_STEPS and (is_timed() or num_steps >= PATIENCE * PROBE_STEPS)
        asked_s, asked_at = self._asked
        if asked_at < self._changed_at:  # the batch may have further to go
            return self.steps_since_change(step) >= self._dwell_steps
        if self._was_unknown and is_known:
            return True
        if self._was_disturbed and not self.is_disturbed:
            return True
        since_asked = step - asked_at
        every_steps = self._every_steps
        if not (is_known and has_fit):
            every_steps = min(every_steps, self._warm_up_steps)
        since_s = now_s - asked_s
        least_s = max(LEAST_S, LEAST_TIMES * self._less_often * self.answer_s)
        is_long = since_s >= least_s or self._looked_s == math.inf
        if since_s >= self._every_s or (since_asked >= every_steps and is_long):
            return True
        if since_asked < self._dwell_steps or now_s < self._looked_s + least_s:
            return False
        self._looked_s = now_s
        return has_drifted()

    def _must_wait(self, step: int) -> bool:
        """Return whether the tuner must not be asked yet: too early, busy, or a change is on its way."""
        is_calming = 0 < self._num_calm < CALM_STEPS  # undisturbed step times will be there soon
        is_early = self._num_steps < self._warm_up_steps
        return self.is_judging or is_early or is_calming or not self.has_arrived(step)

    def asked(self, now_s: float, step: int, *, is_known: bool) -> None:
        """Note that the tuner is asked now, which puts off the next question."""
        self._asked, self._looked_s = (now_s, step), now_s
        self._was_unknown, self._was_disturbed = not is_known, self.is_disturbed
