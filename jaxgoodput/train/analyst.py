"""The analyst thinks behind the loop: windows, the fit, the verdict, and everyone who is told.

One thread takes finished steps and other events in order, keeps the timing table, draws a window
every few seconds, fits the model and reaches a verdict when it is due, and calls the hooks. A verdict
goes to the loop through `Requests`.
"""

import math
import queue
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from jaxgoodput.clock import Clock
from jaxgoodput.goodput.efficiency import GradParams, efficiency, noise_scale
from jaxgoodput.goodput.fit import PerfFit, fit_perf_params
from jaxgoodput.goodput.model import GoodputModel
from jaxgoodput.goodput.perf import Placement
from jaxgoodput.goodput.search import BatchConfig, BatchLimits
from jaxgoodput.train import hooks as hooking
from jaxgoodput.train.config import Config
from jaxgoodput.train.control import Requests
from jaxgoodput.train.events import StepEnd, TuneEnd, Verdict, Window
from jaxgoodput.train.timing import TimingKey, TimingTable
from jaxgoodput.train.tune import Caution, statistics_cadence, tune
from jaxgoodput.train.watcher import Result

UNKNOWN = math.nan


class Analyst:
    """A thread over a queue of results and events."""

    def __init__(
        self,
        config: Config,
        limits: BatchLimits,
        *,
        current: BatchConfig,
        requests: Requests,
        ready: Callable[[], Sequence[int]],
        memory_limit: Callable[[], int],
        hooks: Sequence[Any],
        clock: Clock,
        on_error: Callable[[BaseException], None],
        dataset_size: int,
        adapt: bool,
        num_nodes: int = 1,
        steps_per_sample: int = 1,
    ):
        self._config = config
        self._limits = limits
        self._current = current
        self._requests = requests
        self._ready = ready
        self._memory_limit = memory_limit
        self._hooks = hooks
        self._clock = clock
        self._on_error = on_error
        self._dataset_size = dataset_size
        self._adapt = adapt
        self._num_nodes = num_nodes
        self._steps_per_sample = steps_per_sample
        self._lock = threading.Lock()
        self._table = TimingTable()
        self._fit: PerfFit | None = None
        self._every = config.statistics_every or 1
        self._changed_at = 0
        self._switches_s: list[float] = []
        self._steps_seen = 0
        self._last_tune_s = clock.now()
        self._last_tune_step = 0
        self._window: list[Result] = []
        self._window_start_s = clock.now()
        self._latest: Result | None = None
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="jaxgoodput-analyst", daemon=True)
        self._thread.start()

    # -- from other threads ----------------------------------------------------------------------

    def result(self, result: Result) -> None:
        """A step is done."""
        self._queue.put(result)

    def tell(self, event: Any) -> None:
        """Pass an event on to the hooks, after everything that came before it."""
        self._queue.put(event)

    def to_json(self) -> dict[str, Any]:
        """What must survive a restart: timings, the fit's parameters, the measuring cadence."""
        with self._lock:
            fit = None if self._fit is None else _numbers(vars(self._fit.params))
            return {
                "timings": self._table.to_json(),
                "fit": fit,
                "statistics_every": self._every,
            }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what `to_json` wrote. The fit is made again from the timings."""
        with self._lock:
            self._table.restore(saved["timings"])
            self._every = self._config.statistics_every or saved["statistics_every"]

    @property
    def statistics_every(self) -> int:
        """Steps between two noise measurements, as last decided."""
        return self._every

    def flush(self) -> None:
        """Wait until everything handed in so far is dealt with."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def close(self) -> None:
        """Deal with everything handed in and end the thread."""
        self._queue.put(None)
        self._thread.join()

    # -- on the analyst's own thread -------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                if isinstance(item, Result):
                    self._take(item)
                else:
                    if self._window:
                        self._draw()
                    hooking.call(self._hooks, item)
            except BaseException as error:  # noqa: BLE001 - raised again in the loop's thread
                self._on_error(error)

    def _take(self, result: Result) -> None:
        ticket, metrics = result.ticket, result.metrics
        finite = bool(metrics["finite"])
        if ticket.config != self._current:
            self._current, self._changed_at = ticket.config, ticket.step
            self._switches_s = self._switches_s[-8:]
        key = self._key(ticket.config, ticket.measured)
        if ticket.timed and finite:
            with self._lock:
                self._table.add(key, result.parts, ticket.step)
        elif ticket.step == self._changed_at:
            usual = self._table.median_s(key)
            extra = result.parts.step_s - (usual if usual == usual else 0.0)
            self._switches_s.append(max(extra, 0.0))
        self._latest = result
        self._steps_seen += 1
        self._window.append(result)
        own = {k: v for k, v in metrics.items() if k not in _INTERNAL}
        hooking.call(
            self._hooks,
            StepEnd(
                step=ticket.step,
                progress=metrics["progress"],
                samples=ticket.samples,
                config=ticket.config,
                num_samples=ticket.num_samples,
                before=ticket.before,
                after=ticket.after,
                finite=finite,
                seconds=result.parts.step_s if ticket.timed else None,
                metrics=own,
            ),
        )
        now = self._clock.now()
        if now - self._window_start_s >= self._config.window_s:
            self._draw()
        if self._is_tune_due(now, ticket.step):
            self._tune(now, ticket.step)

    def _is_tune_due(self, now: float, step: int) -> bool:
        if self._steps_seen < self._config.warm_up_steps:
            return False
        return (
            now - self._last_tune_s >= self._config.tune_every_s
            or step - self._last_tune_step >= self._config.tune_every_steps
        )

    def _tune(self, now: float, step: int) -> None:
        assert self._latest is not None
        metrics = self._latest.metrics
        self._last_tune_s, self._last_tune_step = now, step
        with self._lock:
            timings = self._table.timings(step)
        if timings is not None:
            fit = fit_perf_params(timings)
            with self._lock:
                self._fit = fit
        before, every = self._current, self._cadence()
        grad = GradParams(sqr=metrics["cautious_sqr"], var=metrics["cautious_var"])
        if self._adapt:
            verdict = tune(
                self._fit,
                grad,
                self._placement(),
                self._limits,
                before,
                ready=self._ready(),
                steps_since_change=step - self._changed_at,
                caution=Caution(
                    min_gain=self._config.min_gain,
                    dwell_steps=self._config.dwell_steps,
                    max_growth=self._config.max_growth,
                    switch_s=statistics.median(self._switches_s) if self._switches_s else 0.0,
                ),
                accumulate=self._config.accumulate,
                statistics_every=every,
            )
        else:
            verdict = Verdict(
                config=before,
                goodput=UNKNOWN,
                gain=1.0,
                reason="keep: the policy is a fixed batch",
                statistics_every=every,
            )
        switched = verdict.config != before
        wishes: dict[str, Any] = {}
        if switched:
            wishes["micro_batch_size"] = verdict.config.micro_batch_size
            wishes["num_micro_batches"] = verdict.config.num_micro_batches
            logging.info("step %d: %s", step, verdict.reason)
        if every != self._every:
            with self._lock:
                self._every = every
            wishes["statistics_every"] = every
        if wishes:
            self._requests.post(**wishes)
        hooking.call(
            self._hooks,
            TuneEnd(
                step=step,
                before=before,
                verdict=verdict,
                fit=self._fit,
                timings=timings,
                grad=grad,
                num_nodes=self._num_nodes,
                num_replicas=before.num_replicas,
                limits=self._limits,
                switched=switched,
            ),
        )

    def _cadence(self) -> int:
        if self._config.statistics_every is not None:
            return self._config.statistics_every
        plain = self._key(self._current, measured=False)
        measured = self._key(self._current, measured=True)
        if min(self._table.count(plain), self._table.count(measured)) < 3:
            return self._every
        return statistics_cadence(
            self._table.median_s(plain),
            self._table.median_s(measured),
            steps_per_sample=self._steps_per_sample,
            overhead=self._config.statistics_overhead,
        )

    def _key(self, config: BatchConfig, measured: bool) -> TimingKey:
        return TimingKey(
            num_nodes=self._num_nodes,
            num_replicas=config.num_replicas,
            micro_batch_size=config.micro_batch_size,
            num_micro_batches=config.num_micro_batches,
            measured=measured,
        )

    def _placement(self) -> Placement:
        return Placement(num_nodes=self._num_nodes, num_replicas=self._current.num_replicas)

    def _draw(self) -> None:
        """Close the window and tell the hooks."""
        now = self._clock.now()
        results, self._window = self._window, []
        seconds, self._window_start_s = now - self._window_start_s, now
        latest = results[-1]
        metrics, ticket = latest.metrics, latest.ticket
        config = ticket.config
        grad = GradParams(sqr=metrics["grad_sqr"], var=metrics["grad_var"])
        cautious = GradParams(sqr=metrics["cautious_sqr"], var=metrics["cautious_var"])
        known = not math.isnan(metrics["cautious_sqr"])
        timed = [r.parts.step_s for r in results if r.ticket.timed and r.ticket.config == config]
        measured = statistics.median(timed) if timed else UNKNOWN
        scale = config.global_batch_size / self._limits.base
        # At the base batch the efficiency is 1 whatever the noise.
        worth = float(efficiency(cautious, scale)) if known else (1.0 if scale == 1 else UNKNOWN)
        throughput = config.global_batch_size / measured
        fit = self._fit
        predicted_s, predicted = UNKNOWN, UNKNOWN
        if fit is not None:
            model = GoodputModel(
                perf=fit.params, grad=cautious, base_batch_size=self._limits.base
            )
            at = (self._placement(), config.micro_batch_size, config.num_micro_batches)
            predicted_s = config.global_batch_size / float(model.throughput(*at))
            predicted = config.global_batch_size / predicted_s * worth
        hooking.call(
            self._hooks,
            Window(
                step=ticket.step,
                progress=metrics["progress"],
                samples=ticket.samples,
                epoch=ticket.after.epoch,
                config=config,
                num_steps=len(results),
                seconds=seconds,
                metrics=_means(results),
                measured_step_s=measured,
                predicted_step_s=predicted_s,
                predicted_error=UNKNOWN if fit is None else fit.error,
                goodput_measured=throughput * worth,
                goodput_predicted=predicted,
                throughput=throughput,
                efficiency=worth,
                grad=grad,
                noise_scale=float(noise_scale(cautious, self._limits.base)) if known else UNKNOWN,
                noise_confidence=metrics["noise_samples"],
                gain=metrics["gain"],
                learning_rate=metrics.get("learning_rate", UNKNOWN),
                statistics_every=self._every,
                skipped_steps=int(metrics["skipped"]),
                memory_limit=self._memory_limit(),
                eta_s=self._eta_s(results, seconds),
            ),
        )

    def _eta_s(self, results: Sequence[Result], seconds: float) -> float:
        first, last = results[0], results[-1]
        if self._config.base_steps is not None:
            left = self._config.base_steps - last.metrics["progress"]
            done = last.metrics["progress"] - first.metrics["progress"]
            share = (len(results) - 1) / len(results)
            return max(left, 0.0) * seconds * share / done if done > 0 else UNKNOWN
        assert self._config.epochs is not None
        left = self._config.epochs * self._dataset_size - last.ticket.samples
        return left * seconds / max(sum(r.ticket.num_samples for r in results), 1)


_INTERNAL = frozenset({"finite", "skipped_in_a_row", "groups", "samples", "progress"})


def _means(results: Sequence[Result]) -> dict[str, float]:
    names = [
        k
        for k in results[-1].metrics
        if k in ("loss", "grad_norm") or k.startswith("aux/")
    ]
    means = {}
    for name in names:
        values = [r.metrics[name] for r in results if r.metrics["finite"]]
        means[name.removeprefix("aux/")] = float(np.mean(values)) if values else UNKNOWN
    return means


def _numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    plain = {k: float(v) for k, v in values.items()}
    return {k: v if math.isfinite(v) else None for k, v in plain.items()}
