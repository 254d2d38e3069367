"""`Trainer`: the class that a user subclasses; trains, evaluates and restores a task."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, final

import jax
import numpy as np

from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.engine.state import TrainState
from jaxgoodput.goodput.search import BatchConfig
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.console import starting
from jaxgoodput.observe.events import HostJudged
from jaxgoodput.parallel.place import Place, place, replicas_of_group
from jaxgoodput.train.checkpoints.memory import RunMemory
from jaxgoodput.train.checkpoints.writer import Checkpoints
from jaxgoodput.train.config import Config
from jaxgoodput.train.control import (
    BatchWish,
    Control,
    Due,
    NotSaved,
    Preempted,
    Requests,
)
from jaxgoodput.train.evaluation import Evaluators
from jaxgoodput.train.loop import Loop
from jaxgoodput.train.prepare import prepare
from jaxgoodput.train.process import (
    Compilations,
    StopGuard,
    changed_process,
    joined,
    reported,
)
from jaxgoodput.train.runs.elastic import GenerationStart, fit_generations
from jaxgoodput.train.runs.kinds import hosts_may_change
from jaxgoodput.train.runs.membership import Membership, RunSnapshot, SaveHere
from jaxgoodput.train.start.idioms import explaining
from jaxgoodput.train.start.plans import rehearse
from jaxgoodput.train.start.problem import TaskInputs, evaluator_of, predictor_of
from jaxgoodput.train.start.restoring import restored_state, save_kept
from jaxgoodput.train.tables.commits import Opener, Tables
from jaxgoodput.train.task import Task

T = TypeVar("T")


def _refusing_arguments(method: Callable[[T], TrainState]) -> Callable[[T], TrainState]:
    """Refuse arguments, such as data or a number of epochs, that the method would have in other libraries."""

    @functools.wraps(method)
    def called(self: T, *given: Any, **named: Any) -> TrainState:
        if given or named:
            raise TypeError(
                f"{method.__name__}() takes no arguments. The data come from dataset(), the length from "
                "Config.epochs or Config.base_steps, and the batch from Config.batch."
            )
        return method(self)

    return called


class Trainer(Task):
    """Trains a model. Subclass it, write `init`, `loss`, `optimizer` and `dataset`, and call `fit()`.

    `initial` replaces what `init` makes in a new run, whole or in part. It may be parameters, `Variables`,
    the workdir of another run, or a `FromCheckpoint`, which can rename leaves and leave some out. A run that
    resumes from its own checkpoint ignores it. `devices` defaults to all devices of this process. `clock` and
    `loop`, the class of the loop, are for tests.
    """

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock | None = None,
        devices: Sequence[Any] | None = None,
        hooks: Sequence[Any] = (),
        initial: Any = None,
        loop: type[Loop] = Loop,
    ):
        if not isinstance(config, Config):
            raise TypeError(
                f"{type(self).__name__}(config) takes a jaxgoodput.Config; got {type(config).__name__}. "
                "Write Config(workdir=..., batch=BatchLimits(base=..., max=...), base_steps=...)."
            )
        self.config = config
        self.clock = clock or SystemClock()
        self.devices = devices
        self.hooks = tuple(hooks)
        self.initial = initial
        self._loop_class = loop
        self._requests: Requests | None = None
        self._loop: Loop | None = None
        self._evaluator: Evaluators | None = None

    @final
    @_refusing_arguments
    def fit(self) -> TrainState:
        """Train, and return the final state. If the workdir holds a checkpoint, resume from it.

        `params` of the state are the trained parameters. If `Config.ema` keeps an average, `averaged` is the
        average of the parameters.

        SIGTERM, SIGINT, SIGHUP and `request_stop` stop the run, and so does a hang: no step ends for
        `Saving.hang_after_s`. The run then saves its last step and tells the hooks, within `Saving.grace_s`.
        After that time the process ends even if something does not answer, unless it is an interactive
        session. If a hook or the task's own code raises, the run saves too, as far as the devices answer, and
        raises the exception. A second SIGINT interrupts without saving.

        Raises:
          Preempted: the run was asked to stop. Its state is saved, or there was no step that could be lost. A
            SystemExit with code 143, so that a script that does not catch it ends with that code.
          NotSaved: the run was asked to stop or is done, but its last step could not be saved. A SystemExit
            with code 75, which names the step that is safe.
          Diverged: values of the state are no longer finite, or too many updates in a row were refused.
          InUse: another run holds the workdir; a RuntimeError.
          PeerLost: another process of the job has died.
          RuntimeError: a sample could not be read.
          OutOfMemory: a device or the host has too little memory; a MemoryError.
          FloatingPointError: `jax_debug_nans` or `jax_debug_infs` is set, and found something.
          ValueError, TypeError: a setting, a loss or a data set cannot work; the message names the remedy.
        """
        link = joined()
        requests, membership = Requests(), link.membership
        self._requests = requests
        try:
            # The guard comes first: a stop that is requested during compilation is obeyed at step 0.
            with reported(link), changed_process(self.config, requests, self.clock) as guard:
                inputs = self._inputs()
                fit = _Fit(self, inputs, requests, guard)
                if membership is None:
                    return fit.train(GenerationStart(ledger=TimeLedger(self.clock)))
                return fit.generations(membership)
        finally:
            self._requests = self._loop = None

    @final
    def restore(self, step: int | None = None, best: bool = False) -> TrainState:
        """Return the state of a checkpoint of the workdir, without training: the newest, `step`, or the best.

        `Config.saving.best` says which is the best; if it is None, the setting of the run that saved. The
        state lies on this trainer's devices, under its strategy that is nearest to the saved one. Nothing is
        written, so that a run may train in the workdir meanwhile.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          ValueError: the checkpoint is damaged. A `WrongWorkdirError`, which is one, if it is of another
            model.
        """
        inputs = self._inputs()
        with explaining("the saved state"), jax.transfer_guard("allow"):
            return restored_state(inputs, self.devices, step=step, best=best)

    @final
    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Return what `summarize` makes of `metrics` over the whole `eval_dataset`, every sample once.

        With `eval_datasets`, the results of each are called "name/metric".

        If the state has an average of the parameters (`Config.ema`), that is evaluated; to evaluate the
        trained parameters, call `evaluate(dataclasses.replace(state, ema=None))`. Rows of tables are read as
        they were saved with the step of the state, even if another number of processes has saved them.

        Raises ValueError if rows of that step are not kept.
        """
        inputs = self._inputs()
        with explaining("the evaluation"), jax.transfer_guard("allow"):
            if inputs.tables.plans:
                with self._placed(inputs, state) as (where, tables):
                    return evaluator_of(inputs, where, tables)(state, self.summarize)
            if self._evaluator is None:
                where = place(self.devices, self.config.strategies)
                self._evaluator = evaluator_of(inputs, where)
            return self._evaluator(state, self.summarize)

    def predict(
        self, state: TrainState, data: Any, outputs: Callable[..., Mapping[str, Any]] | None = None
    ) -> dict[str, np.ndarray]:
        """Return outputs by name for every sample of `data`, in its order: arrays with one row per sample.

        `data` may be what `eval_dataset` may return. `outputs(params, model_state, batch)` computes them,
        each `[batch, ...]`, and gets the `rows` of tables as `loss` does; by default they are those of
        `metrics`. The average of the parameters is used if there is one, and rows of tables as they were
        saved, as in `evaluate`. Every call compiles once, so give it all data at once. Several processes call
        it together with the same data, and each gets all outputs, in memory.

        Raises:
          ValueError: the data have no end, or rows of that step are not kept.
          TypeError: an output is not one value (or row) per sample.
          RuntimeError: hosts of this job come and go; restore the state in a job of its own.
        """
        if hosts_may_change():
            raise RuntimeError(
                "predict() needs processes that stay, and hosts of this job come and go (run --nnodes). Call "
                "it in another job, on the state that restore() returns there."
            )
        inputs = self._inputs()
        with explaining("the prediction"), jax.transfer_guard("allow"):
            with self._placed(inputs, state) as (where, tables):
                return predictor_of(inputs, where, tables, data, outputs)(state)

    def _inputs(self) -> TaskInputs:
        """Return the task's methods, to be checked. Raises RuntimeError if nothing can be compiled."""
        if jax.config.values["jax_disable_jit"]:
            raise RuntimeError(
                "jax_disable_jit is set, but a run consists of programs that are compiled ahead. Unset it "
                "for the run. To step through a loss in a debugger, call it on a few samples under "
                "jax.disable_jit()."
            )
        return TaskInputs(self, self.config, self.clock)

    @contextlib.contextmanager
    def _placed(self, inputs: TaskInputs, state: TrainState) -> Iterator[tuple[Place, Tables]]:
        """Open the tables of a state, on this trainer's devices, for the block."""
        plans = inputs.tables.plans
        where = place(self.devices, self.config.strategies, spanning=bool(plans))
        with contextlib.ExitStack() as stack:
            if not plans:
                yield where, {}
                return
            opener = stack.enter_context(
                Opener.connected(plans, self.config.workdir, where, self.clock)
            )
            tables = opener.of_step(int(state.step))
            for table in tables.values():
                stack.callback(table.close)
            yield where, tables

    @final
    def request_stop(self) -> None:
        """Save and stop at the next step; `fit` then raises `Preempted`. Callable from hooks."""
        if self._requests is None:
            raise _nothing_runs()
        self._requests.interrupt("request_stop")

    @final
    def finish(self) -> None:
        """End training at the next step as if it were complete. Callable from hooks."""
        self._request(Control(finish=True))

    @final
    def request_save(self) -> None:
        """Save a checkpoint at the next step. Callable from hooks."""
        self._request(Control(save=True))

    @final
    def request_state(self) -> None:
        """Give the parameters to the hooks' `on_state` before the next step. Callable from hooks.

        A request after the last step has no effect: `fit` returns that state.
        """
        self._request(Control(show=True))

    @final
    def compile_sizes(self) -> None:
        """Compile other batch sizes and strategies in the background from now on. Callable from hooks.

        By default one size is compiled at a time, as soon as it promises to save more than that costs.
        """
        self._running().start.strategies.start()

    @final
    def request_batch(
        self, micro_batch_size: int, num_micro_batches: int = 1, *, strategy: str | None = None
    ) -> None:
        """Use this batch from the next step on, as if the tuner had chosen it. Callable from hooks.

        `strategy` is the name of another strategy of `Config.strategies` to use it under, such as "fsdp8".
        The loop compiles what is not ready; to compile it in the background, see `compile_sizes`. If `Config`
        does not allow the batch, or it does not fit into memory, a warning is logged and nothing changes. To
        keep the tuner from changing the batch again, set `Config.tuning.warm_up_steps` beyond the end.
        """
        if micro_batch_size < 1 or num_micro_batches < 1:
            raise ValueError(
                f"a batch needs at least one micro-batch of one sample; got micro_batch_size="
                f"{micro_batch_size}, num_micro_batches={num_micro_batches}."
            )
        if strategy is None:
            wish = BatchWish(micro_batch_size=micro_batch_size, num_micro_batches=num_micro_batches)
        else:
            replicas = self._running().start.strategies.engine(strategy).num_replicas
            wish = BatchConfig(
                micro_batch_size=micro_batch_size,
                num_micro_batches=num_micro_batches,
                num_replicas=replicas,
                strategy=strategy,
            )
        self._request(Control(batch=wish))

    def _request(self, wish: Control) -> None:
        if self._requests is None:
            raise _nothing_runs()
        self._requests.post(wish)

    def _running(self) -> Loop:
        if self._loop is None:
            raise _nothing_runs()
        return self._loop


def _nothing_runs() -> RuntimeError:
    return RuntimeError("nothing is running: call this from a hook while fit() runs.")


class _Fit:
    """One call of `Trainer.fit`: owns what outlives a generation of processes."""

    def __init__(self, trainer: Trainer, inputs: TaskInputs, requests: Requests, guard: StopGuard):
        self._trainer = trainer
        self._inputs = inputs
        self._requests = requests
        self._guard = guard
        self._due = Due(inputs.config)
        self._memory: RunMemory | None = None  # of this process's last generation

    def generations(self, membership: Membership) -> TrainState:
        """Train in one generation of processes after another, until the run is over."""
        config, group_size = self._inputs.config, membership.group_size
        # A batch of an exact number of samples is cut evenly.
        even = config.policy != "fixed" or not config.tuning.fixed_tolerance
        num_devices = group_size * jax.local_device_count()
        replicas = replicas_of_group(config.strategies, num_devices)
        share = max(config.batch.base // replicas, 1) if even else None
        if membership.num_others:
            with explaining("the start of the run"):
                rehearse(self._inputs, membership.num_others + 1, group_size)
        try:
            return fit_generations(
                self.train,
                self._rest,
                self._last_step,
                membership,
                self._requests,
                self._inputs.clock,
                share=share,
            )
        except SaveHere as told:
            self._save_and_stop(told.kept, group_size)

    def _save_and_stop(self, kept: RunSnapshot, group_size: int) -> NoReturn:
        """Save and stop, because all processes were told to stop while they waited for each other."""
        config = self._inputs.config
        error = save_kept(self._inputs, kept, group_size=group_size)
        if error is not None:
            safe = max(Checkpoints(config.workdir, keep=config.saving).newest() or 0, 0)
            raise NotSaved(kept.step, safe or None, error)
        raise Preempted(kept.step, self._requests.signal or "peer")

    def _last_step(self) -> int:
        """Return the last step that was dispatched; 0 before the first loop."""
        loop = self._trainer._loop
        return 0 if loop is None else loop.now.step

    def _rest(self, step: int) -> None:
        """Let go of the loop and its devices before the processes of the job change; `step` is in memory."""
        if self._trainer._loop is not None:
            self._memory = self._trainer._loop.keeper.memory()
        self._trainer._loop = self._trainer._evaluator = None
        self._guard.rest(step)

    def train(self, start: GenerationStart) -> TrainState:
        """Train with the processes that there are. Raises Regroup if others are about to join or leave."""
        trainer, inputs = self._trainer, self._inputs
        config, clock = inputs.config, inputs.clock
        ledger = start.ledger
        with contextlib.ExitStack() as stack:
            compilations = stack.enter_context(Compilations(ledger).counted())
            with ledger.bucket("training_prep"):
                shows = config.reporting.progress and jax.process_index() == 0
                shown = starting(lambda: compilations.num, clock) if shows else None
                # What gets ready moves values as it must. The steps are guarded: see `Loop._train`.
                with (
                    shown or contextlib.nullcontext(),
                    explaining("the start of the run"),
                    jax.transfer_guard("allow"),
                ):
                    ready = prepare(
                        inputs,
                        trainer.devices,
                        initial=trainer.initial,
                        hooks=trainer.hooks,
                        requests=self._requests,
                        stack=stack,
                        ledger=ledger,
                        membership=start.membership,
                        kept=start.kept,
                    )
                trainer._evaluator = ready.evaluator or trainer._evaluator
                loop = trainer._loop = trainer._loop_class(
                    trainer,
                    config,
                    ready,
                    requests=self._requests,
                    due=self._due,
                    remembered=self._memory,
                    ledger=ledger,
                    compilations=compilations,
                    clock=clock,
                )
                stack.callback(loop.close)
                loop.announce(start.regrouped)
                for decision in start.news:
                    loop.analyst.tell(HostJudged(step=ready.first_step, **decision))
                ready.where.meet("before the first step")
            self._guard.watch(loop)
            return loop.run()
