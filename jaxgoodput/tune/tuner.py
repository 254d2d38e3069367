"""The tuner's thread: fits the model and reaches verdicts, while steps go on being counted.

One situation at a time; one that comes while another is being judged is dropped, because a newer one
will follow. The fit's own functions are compiled before the first.
"""

import dataclasses
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxgoodput.goodput.fit import StepTimings, fit_perf_params
from jaxgoodput.tune.batch import tune
from jaxgoodput.tune.timings import residuals_of
from jaxgoodput.tune.verdict import Situation, Verdict


@dataclass(frozen=True, kw_only=True)
class TunerAnswer:
    """A verdict, and the situation that it is made of, with its fit."""

    situation: Situation
    verdict: Verdict


def answer(situation: Situation) -> TunerAnswer:
    """The fit and the verdict; pure."""
    situation = fitted(situation)
    return TunerAnswer(situation=situation, verdict=tune(situation))


def fitted(situation: Situation) -> Situation:
    """The situation with the present strategy fitted to its step times, from where the last fit ended."""
    here, timings = situation.here, situation.timings
    if timings is None:
        return situation
    fit = fit_perf_params(timings, start=None if here.fit is None else here.fit.params)
    residuals = residuals_of(fit.params, here.placement, timings, situation.clean)
    here = dataclasses.replace(here, fit=fit, residuals=residuals)
    return dataclasses.replace(situation, here=here)


class Tuner:
    """A thread that answers; `answer` is there for tests that know the fit."""

    def __init__(
        self,
        on_answer: Callable[[TunerAnswer], None],
        on_error: Callable[[BaseException], None],
        *,
        answer: Callable[[Situation], TunerAnswer] = answer,
    ):
        self._on_answer = on_answer
        self._on_error = on_error
        self._answer = answer
        self._situations: queue.Queue[Situation | None] = queue.Queue(maxsize=1)
        self._busy = threading.Event()
        self._busy.set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxgoodput-tuner", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a situation would be dropped now."""
        return self._busy.is_set()

    def ask(self, situation: Situation) -> bool:
        """Have a verdict reached; False where another one is still being reached."""
        if self.is_busy:
            return False
        self._busy.set()
        self._situations.put(situation)
        return True

    def close(self) -> None:
        """End after the situation in hand."""
        self._closing.set()
        if not self._thread.is_alive():
            return
        self._situations.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            _warm_up()
            while not self._closing.is_set():
                self._busy.clear()
                situation = self._situations.get()
                if situation is None:
                    return
                self._on_answer(self._answer(situation))
        except BaseException as error:
            self._on_error(error)


def _warm_up() -> None:
    """Compile what a fit of a few rows needs."""
    rows = np.arange(1, 4)
    unknown = np.full(3, np.nan)
    fit_perf_params(
        StepTimings(
            num_nodes=np.ones(3, np.int64),
            num_replicas=np.ones(3, np.int64),
            micro_batch_size=rows,
            accumulate_s=unknown,
            reduce_s=unknown,
            update_s=unknown,
            step_s=0.1 + 0.01 * rows,
            weight=np.ones(3),
        )
    )
