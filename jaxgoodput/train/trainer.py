"""`Trainer`: a user's task with the motor that trains it."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, final

import jax
from absl import logging

from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.embedding.plan import Table
from jaxgoodput.engine.state import TrainState
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.console import starting
from jaxgoodput.observe.events import HostJudged, Regrouped
from jaxgoodput.parallel.place import place, replicas_of_group
from jaxgoodput.train.checkpoint import Checkpoints
from jaxgoodput.train.config import Config
from jaxgoodput.train.control import BatchWish, Control, NotSaved, Preempted, Requests
from jaxgoodput.train.evaluation import Evaluator
from jaxgoodput.train.loop import Loop, is_of_a_peer
from jaxgoodput.train.membership import Membership, Regroup, RunSnapshot, SaveHere
from jaxgoodput.train.prepare import (
    TaskInputs,
    evaluator,
    prepare,
    rehearse,
    restored_state,
    save_kept,
)
from jaxgoodput.train.process import (
    LAUNCHED,
    Compilations,
    LauncherLink,
    StopGuard,
    changed_process,
)
from jaxgoodput.train.tables.commits import Opener, peers_of
from jaxgoodput.train.tables.given import checked_tables
from jaxgoodput.train.task import Task


class Trainer(Task):
    """Subclass it, write `init`, `loss`, `optimizer` and `dataset`, and call `fit()`.

    `initial` is what a new run begins with in place of what `init` makes: parameters or `Variables`, whole
    or in part, the workdir of another run, or `FromCheckpoint`, which renames and leaves out. A run that
    goes on from a checkpoint of its own does not read it. `devices` defaults to all devices of this process;
    `clock` and `loop`, the class of the loop, are for tests.
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
        self.config = config
        self.clock = clock or SystemClock()
        self.devices = devices
        self.hooks = tuple(hooks)
        self.initial = initial
        self._loop_class = loop
        self._requests: Requests | None = None
        self._loop: Loop | None = None
        self._evaluator: Evaluator | None = None

    @final
    def fit(self) -> TrainState:
        """Train, resuming from the workdir where it holds a checkpoint, and return the final state.

        Its `params` are those that were trained; `averaged` has their average, where `Config.ema` keeps one.

        On SIGTERM, SIGINT, SIGHUP, `request_stop`, or where no step ends for long (`Saving.hang_after_s`),
        the last step is saved first, then hooks are told, within `Saving.grace_s`. Where that time is over
        and something still does not answer, the process ends all the same; an interactive session never. An
        exception in a hook or in the task's own code saves first as well, as far as the devices still answer,
        and is raised. A second SIGINT interrupts without saving.

        Raises:
          Preempted: it was asked to stop; the state is saved, or there was no step yet that could be lost. It
            is a SystemExit with code 143, so that a script that does not catch it ends with that code.
          NotSaved: asked to stop or done, but the last step could not be saved. A SystemExit with code 75;
            it names the step that is safe.
          Diverged: too many updates in a row were not finite.
          InUse: another run holds the workdir; a RuntimeError.
          PeerLost: another process of the job has gone.
          RuntimeError: a sample could not be read.
          ValueError, TypeError: a setting, a loss or a data set that cannot work, with the remedy.
        """
        requests = self._requests = Requests()
        membership = LAUNCHED.get(LauncherLink()).membership
        try:
            # Before anything that takes long: what is asked during compilation is done at step 0.
            with changed_process(self.config, requests, self.clock) as guard:
                given = TaskInputs(self, self.config, self.clock)
                if membership is None:
                    return self._fit(requests, guard, TimeLedger(self.clock), given)
                return self._fit_together(requests, guard, given, membership)
        finally:
            self._requests = self._loop = None

    def _fit_together(
        self, requests: Requests, guard: StopGuard, given: TaskInputs, membership: Membership
    ) -> TrainState:
        """Train in one generation of processes after another, until the run is over."""
        membership.on_regroup(lambda: requests.post(Control(regroup=True)))
        kept, before, why = None, 0, ""
        # A batch of just so many samples is cut evenly.
        even = self.config.policy != "fixed" or not self.config.tuning.fixed_tolerance
        group_size = membership.group_size
        num_devices = group_size * jax.local_device_count()
        replicas = replicas_of_group(self.config.strategies, num_devices)
        share = max(self.config.batch.base // replicas, 1) if even else None
        if membership.num_others:
            rehearse(self.config, given, membership.num_others + 1, group_size)
        while True:
            ledger = TimeLedger(self.clock)
            try:
                with ledger.bucket("regrouping"):
                    generation = membership.enter(kept, share)
            except SaveHere as told:
                self._save_and_stop(given, told.kept, group_size, requests.signal or "peer")
            kept = generation.kept
            requests.forget_regroup()
            if membership.is_broken():
                requests.post(Control(regroup=True))
            regrouped = Regrouped(
                step=0 if kept is None else kept.step,
                generation=generation.number,
                num_processes_before=before,
                num_processes=generation.process_count,
                reason=why,
                seconds=generation.seconds,
            )
            before = generation.process_count
            try:
                state = self._fit(
                    requests, guard, ledger, given, membership, kept, regrouped, generation.news
                )
                membership.done()
                return state
            except Regroup as ended:
                kept, why = ended.kept, str(ended)
            except Exception as error:
                if not is_of_a_peer(error):
                    raise
                why, before_it = str(error), 0 if kept is None else kept.step
                if self._loop is not None and self._loop.step > before_it:
                    logging.warning("it goes on from what others have, or a checkpoint: %s", why)
                    kept = None  # steps were done since, and could not be kept
            self._loop = self._evaluator = None  # of devices that will be gone
            guard.rest(0 if kept is None else kept.step)

    def _save_and_stop(
        self, given: TaskInputs, kept: RunSnapshot, group_size: int, signal: str
    ) -> NoReturn:
        """All were told to stop while they waited for each other."""
        # Of a group of several, it was cut over more devices than are here.
        strategies = self.config.strategies if group_size == 1 else ()
        config = dataclasses.replace(self.config, strategies=strategies)
        error = save_kept(config, given, kept)
        if error is not None:
            safe = max(Checkpoints(self.config.workdir, keep=self.config.saving).newest() or 0, 0)
            raise NotSaved(kept.step, safe or None, error)
        raise Preempted(kept.step, signal)

    def _fit(
        self,
        requests: Requests,
        guard: StopGuard,
        ledger: TimeLedger,
        given: TaskInputs,
        membership: Membership | None = None,
        kept: RunSnapshot | None = None,
        regrouped: Regrouped | None = None,
        news: Sequence[Mapping[str, Any]] = (),
    ) -> TrainState:
        """Train with the processes that there are. Raises Regroup where others are to come or go."""
        with contextlib.ExitStack() as stack:
            compilations = stack.enter_context(Compilations(ledger).counted())
            with ledger.bucket("training_prep"):
                shows = self.config.reporting.progress and jax.process_index() == 0
                said = starting(lambda: compilations.num, self.clock) if shows else None
                with said or contextlib.nullcontext():
                    start = prepare(
                        self,
                        self.config,
                        self.devices,
                        initial=self.initial,
                        hooks=self.hooks,
                        stack=stack,
                        ledger=ledger,
                        clock=self.clock,
                        given=given,
                        kept=kept,
                        is_broken=None if membership is None else membership.is_broken,
                        group_size=None if membership is None else membership.group_size,
                    )
                self._evaluator = start.evaluator or self._evaluator
                loop = self._loop = self._loop_class(
                    self,
                    self.config,
                    start,
                    requests=requests,
                    ledger=ledger,
                    compilations=compilations,
                    clock=self.clock,
                    membership=membership,
                )
                stack.callback(loop.close)
                loop.announce(regrouped)
                for decision in news:
                    loop.analyst.tell(HostJudged(step=loop.step, **decision))
                start.where.meet("before the first step")
            guard.watch(loop)
            return loop.run()

    @final
    def restore(self, step: int | None = None, best: bool = False) -> TrainState:
        """The state of the newest checkpoint of the workdir, of `step`'s, or of the best, without training.

        The best is by `Config.saving.best`; where that is None, by the one that the run had. On this
        trainer's devices, under its strategy that is nearest to the saved one. Nothing is written, so that a
        run may be going on there.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          ValueError: it is damaged, or, as a `WrongWorkdirError`, of another model.
        """
        return restored_state(self, self.config, self.devices, step=step, best=best)

    @final
    def evaluate(self, state: TrainState) -> dict[str, float]:
        """`summarize` of `metrics` over the whole `eval_dataset`, every sample once.

        Of the average of the parameters where `Config.ema` keeps one; of those that were trained with
        `evaluate(dataclasses.replace(state, ema=None))`. Rows of tables are those that were saved with the
        step of the state: raises ValueError where they are not kept. Where another number of processes has
        saved them, they are first given to those that are here.
        """
        plans = checked_tables(self.tables(), type(self).__name__)
        if plans:
            return self._evaluated_with(plans, state)
        if self._evaluator is None:
            where = place(self.devices, self.config.strategies)
            data = self.eval_dataset()
            self._evaluator = evaluator(self, self.config, where, data, self.clock)
        summary = self.summarize(self._evaluator(state))
        return {name: float(value) for name, value in summary.items()}

    def _evaluated_with(self, plans: Mapping[str, Table], state: TrainState) -> dict[str, float]:
        """`evaluate`, with the rows of tables as they were at the state's step."""
        where = place(self.devices, self.config.strategies, spanning=True)
        with contextlib.ExitStack() as stack:
            peers = peers_of(where)
            if peers is not None:
                stack.callback(peers.close)
            opener = Opener(plans, self.config.workdir, where, peers, self.clock)
            tables = opener.of_step(int(state.step))
            for table in tables.values():
                stack.callback(table.close)
            data = self.eval_dataset()
            run = evaluator(self, self.config, where, data, self.clock, tables)
            summary = self.summarize(run(state))
        return {name: float(value) for name, value in summary.items()}

    @final
    def request_stop(self) -> None:
        """Save and stop at the next step: `fit` then raises `Preempted`. Callable from hooks."""
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
        """Have hooks hear of the parameters before the next step (`on_state`). Callable from hooks.

        What is asked for after the last step is not done: `fit` returns that state.
        """
        self._request(Control(show=True))

    @final
    def compile_sizes(self) -> None:
        """Compile other batch sizes and strategies in the background from now on. Callable from hooks.

        Left alone, this begins once the noise gives any reason to change the batch.
        """
        self._running().strategies.start()

    @final
    def request_batch(
        self, micro_batch_size: int, num_micro_batches: int = 1, *, strategy: str | None = None
    ) -> None:
        """Use this batch from the next step on, as if a verdict had said so. Callable from hooks.

        `strategy` names another one of `Config.strategies` to use it under, such as "fsdp8". What is not
        ready is compiled in the loop: see `compile_sizes`. A batch that `Config` does not allow, or that
        does not fit into memory, is not used, and warned of. To have no verdict interfere, set
        `Config.tuning.warm_up_steps` beyond the end.
        """
        if micro_batch_size < 1 or num_micro_batches < 1:
            raise ValueError(
                f"a batch needs at least one micro-batch of one sample; got micro_batch_size="
                f"{micro_batch_size}, num_micro_batches={num_micro_batches}."
            )
        if strategy is not None:
            self._running().strategies.engine(strategy)  # is there one?
        wish = BatchWish(
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
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
