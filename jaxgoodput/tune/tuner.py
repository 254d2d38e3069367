"""The tuner's thread: fits the model and reaches verdicts, while steps go on being counted.

One question at a time; a question that comes while another is being answered is dropped, because
a newer one will follow. The fit's own functions are compiled before the first question.
"""

import math
import queue
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from jaxgoodput.goodput.efficiency import GradParams
from jaxgoodput.goodput.fit import PerfFit, StepTimings, fit_perf_params
from jaxgoodput.goodput.perf import Placement
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.tune.batch import Caution, residuals_of, tune
from jaxgoodput.tune.strategy import Known, Option, choose_strategy, judge_trial
from jaxgoodput.tune.verdict import Verdict

PROBE_STEPS = 8  # at a size, or under a strategy, that is being tried


@dataclass(frozen=True, kw_only=True)
class Question:
    """Everything that a verdict depends on."""

    step: int
    timings: StepTimings | None
    grad: GradParams
    placement: Placement
    limits: BatchLimits
    current: BatchConfig
    ready: Collection[int]
    timed: Collection[int]
    clean: Collection[int]  # of those, timed undisturbed
    disturbed: bool  # a compilation competes with the steps
    steps_since_change: int
    caution: Caution
    accumulate: bool
    statistics_every: int
    adapt: bool  # False: the batch is fixed, only the model is of interest
    tried_from: BatchConfig | None = None  # before the probe that `current` is
    options: tuple[Option, ...] = ()  # other strategies, their fits as of when they were left
    home: Option | None = None  # that of `tried_from`, where it is another strategy
    left_s: float = math.nan  # to the end of training; NaN unknown
    step_s: float = math.nan


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A verdict, with the fit behind it."""

    question: Question
    verdict: Verdict
    fit: PerfFit | None
    residuals: tuple[tuple[int, float], ...]  # (micro-batch size, measured / modelled step time)


def answer(question: Question, last_fit: PerfFit | None) -> Answer:
    """The fit and the verdict; pure. `last_fit` is of the same strategy."""
    fit = last_fit
    if question.timings is not None:
        fit = fit_perf_params(question.timings, start=None if last_fit is None else last_fit.params)
    residuals = ()
    if fit is not None and question.timings is not None:
        residuals = residuals_of(fit.params, question.placement, question.timings, question.clean)
    if question.adapt and question.home is not None:
        assert question.tried_from is not None
        verdict = judge_trial(
            question.current,
            question.tried_from,
            _known(question, fit, residuals),
            question.home.known,
            question.grad,
            statistics_every=question.statistics_every,
        )
    elif question.adapt:
        verdict = tune(
            fit,
            question.grad,
            question.placement,
            question.limits,
            question.current,
            ready=question.ready,
            timed=question.timed,
            residuals=residuals,
            steps_since_change=question.steps_since_change,
            caution=question.caution,
            accumulate=question.accumulate,
            statistics_every=question.statistics_every,
            tried_from=question.tried_from,
        )
        here = _known(question, fit, residuals)
        # One change at a time, and none beside a compilation or before the noise is known.
        calm = verdict.config == question.current and not question.disturbed
        if question.options and here is not None and calm and question.tried_from is None:
            now = here.goodput(question.current, question.grad)
            waits = question.steps_since_change < question.caution.dwell_steps
            if math.isfinite(now) and not waits:
                verdict = choose_strategy(
                    verdict,
                    now,
                    question.options,
                    question.grad,
                    caution=question.caution,
                    accumulate=question.accumulate,
                    left_s=question.left_s,
                    probe_s=PROBE_STEPS * question.step_s,
                )
    else:
        verdict = Verdict(
            config=question.current,
            goodput=float("nan"),
            gain=1.0,
            reason="keep: the policy is a fixed batch",
            statistics_every=question.statistics_every,
        )
    return Answer(question=question, verdict=verdict, fit=fit, residuals=residuals)


def _known(
    question: Question, fit: PerfFit | None, residuals: tuple[tuple[int, float], ...]
) -> Known | None:
    if fit is None:
        return None
    return Known(fit=fit, placement=question.placement, limits=question.limits, residuals=residuals)


class Tuner:
    """A thread that answers questions."""

    def __init__(
        self,
        on_answer: Callable[[Answer], None],
        on_error: Callable[[BaseException], None],
    ):
        self._on_answer = on_answer
        self._on_error = on_error
        self._questions: queue.Queue[Question | None] = queue.Queue(maxsize=1)
        self._busy = threading.Event()
        self._busy.set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxgoodput-tuner", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a question would be dropped now."""
        return self._busy.is_set()

    def ask(self, question: Question) -> bool:
        """Have the question answered; False where another one is still being answered."""
        if self.is_busy:
            return False
        self._busy.set()
        self._questions.put(question)
        return True

    def close(self) -> None:
        """End after the question in hand."""
        self._closing.set()
        if not self._thread.is_alive():
            return
        self._questions.put(None)
        self._thread.join()

    def _run(self) -> None:
        fits: dict[str, PerfFit | None] = {}  # by strategy
        try:
            _warm_up()
            while not self._closing.is_set():
                self._busy.clear()
                question = self._questions.get()
                if question is None:
                    return
                strategy = question.current.strategy
                found = answer(question, fits.get(strategy))
                fits[strategy] = found.fit
                self._on_answer(found)
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
