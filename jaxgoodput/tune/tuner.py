"""The tuner's thread: it fits the model and reaches verdicts while training goes on.

It handles one situation at a time. A situation that arrives while another is being judged is dropped, because
a newer one will follow.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from jaxgoodput._worker import QueueWorker
from jaxgoodput.goodput.fit import fit_perf_params
from jaxgoodput.tune.batch import tune
from jaxgoodput.tune.timings import residuals_of
from jaxgoodput.tune.verdict import Situation, Verdict


@dataclass(frozen=True, kw_only=True)
class TunerAnswer:
    """A verdict, and the situation that it was reached in, with the new fit."""

    situation: Situation
    verdict: Verdict
    cpu_s: float = 0.0
    """CPU seconds that it took."""


def answer(situation: Situation) -> TunerAnswer:
    """Fit the model to the situation and return the verdict. Pure."""
    situation = fitted(situation)
    return TunerAnswer(situation=situation, verdict=tune(situation))


def fitted(situation: Situation) -> Situation:
    """Return the situation with a new fit of the present strategy, which starts from the last one."""
    here, timings = situation.here, situation.timings
    if timings is None:
        return situation
    fit = fit_perf_params(timings, start=None if here.fit is None else here.fit.params)
    residuals = residuals_of(fit.params, here.placement, timings, situation.clean)
    here = dataclasses.replace(here, fit=fit, residuals=residuals)
    return dataclasses.replace(situation, here=here)


class TunerThread:
    """A thread that answers situations; `answer` lets tests supply a known fit."""

    def __init__(
        self,
        on_answer: Callable[[TunerAnswer], None],
        on_error: Callable[[BaseException], None],
        *,
        answer: Callable[[Situation], TunerAnswer] = answer,
    ):
        self._on_answer = on_answer
        self._answer = answer
        self._idle = threading.Event()
        self._idle.set()
        self._worker: QueueWorker[Situation] = QueueWorker("tuner", self._handle, on_error=on_error)

    @property
    def is_busy(self) -> bool:
        """Whether a situation would be dropped now."""
        return not self._idle.is_set()

    def ask(self, situation: Situation) -> bool:
        """Ask for a verdict; return False if the tuner is busy with another situation."""
        if self.is_busy:
            return False
        self._idle.clear()
        self._worker.put(situation)
        return True

    def close(self) -> None:
        """End the thread after the situation in hand."""
        self._worker.close()

    def _handle(self, situation: Situation) -> None:
        began_s = time.thread_time()
        answer = self._answer(situation)
        self._on_answer(dataclasses.replace(answer, cpu_s=time.thread_time() - began_s))
        self._idle.set()
