"""Processes, or groups of them, that come and go: a run goes on in one generation after another.

Nothing is donated before every process has the sum of a step, so that the state survives the death of a peer.
`fit_generations` owns the generations; an `Elastic` is the run within one of them.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from absl import logging

from jaxgoodput.clock import Clock
from jaxgoodput.data.loader import Loader, StepBatch
from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.state import TrainState, host_copy
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.observe.events import Regrouped
from jaxgoodput.parallel.place import Place
from jaxgoodput.train.control import Control, Decisions, Requests, is_of_a_peer
from jaxgoodput.train.runs.alone import Dispatched
from jaxgoodput.train.runs.membership import (
    Agreement,
    Membership,
    OwnPart,
    Regroup,
    RunSnapshot,
    WorkSharing,
)
from jaxgoodput.train.runs.processes import accumulated
from jaxgoodput.train.runs.state import RunState
from jaxgoodput.train.tables.feed import Feed

FIRST_COPY_S = 2.0  # after a generation's first step, if no other group has the state


@dataclass
class Elastic:
    """A run within one generation. A copy of the model lies in each process, or in each group of them."""

    feed: Feed
    decisions: Decisions
    loader: Loader
    agreement: Agreement
    where: Place
    membership: Membership
    clock: Clock
    sharing: WorkSharing
    runs_blocks: bool = False
    own_part: OwnPart | None = None
    """This process's part of the step that was dispatched last."""

    @property
    def first_copy_s(self) -> float:
        """Seconds until the first copy of the state, which is needed if no other group has it."""
        is_only_group = 1 < self.where.group_size == self.where.process_count
        return FIRST_COPY_S if is_only_group else math.inf

    def next_batch(self, now: RunState, meanwhile: Callable[[], None]) -> StepBatch | None:
        """Return the next batch, in parts if they are leased; None at the end of the data."""
        others = self.where.process_count > 1
        if self.sharing.leases and others and now.batch.num_micro_batches > 1:
            return self.loader.next_in_parts(now.batch, lambda: self._lease(now.step))
        return self.feed.next(now.batch, meanwhile)

    def _lease(self, step: int) -> int:
        return self.agreement.lease(step, declines=not self.membership.takes_leases())

    def dispatch(self, now: RunState, batch: StepBatch, *, measured: bool) -> Dispatched:
        """Do one step up to its update; see `Run.dispatch`. Raises PeerGone if not all have its sum."""
        began_s, engine = self.clock.now(), now.engine
        control = self.decisions.sent(batch.config)
        device = self.membership.device_at_work(batch.config.global_batch_size)
        with contextlib.ExitStack() as stack:
            if batch.parts is None:  # leased parts are asked for and read under way
                stack.enter_context(device)
            work, num_rows = accumulated(now, batch, measured=measured)
            assert work.sums is not None
            jax.block_until_ready(work.sums.weight)
        own_end_s = self.clock.now()
        self.own_part = self._own_part(engine, batch, num_rows, own_end_s - began_s)
        # The update donates the state, which would be lost if the sum failed under way.
        with self.membership.others_at_work():
            total = jax.block_until_ready(engine.reduce(work, control))
        if self.where.group_size > 1 and self.where.process_count > 1:
            self.agreement.commit(now.step)
        reduced_s = self.clock.now()
        state, metrics = engine.update(now.state, total, work)
        return Dispatched(state, metrics, own_end_s, reduced_s)

    def stepped(self, step: int, *, timed: bool) -> None:
        """Forget what was agreed on for old steps, and tell the job how long this process's part took."""
        self.agreement.forget(step)
        if timed and self.own_part is not None:
            self.membership.computed(self.own_part)

    def to_save(self, now: RunState) -> TrainState:
        """Return the state; on the host if one process of a group writes for all of them."""
        if now.engine.spans and self.where.writes:
            return jax.tree.map(host_copy, now.state)
        return now.state

    def keep(self, kept: RunSnapshot) -> float:
        """Copy the state to another host; returns the expected seconds between two failures."""
        self.membership.keep(kept)
        return self.membership.failure_every_s

    def ended_by(self, error: BaseException) -> str | None:
        """Return why an error ends this generation but not the run; None if it ends the run."""
        return f"a process was lost: {error}" if is_of_a_peer(error) else None

    def _own_part(self, engine: Engine, batch: StepBatch, num_rows: int, seconds: float) -> OwnPart:
        """Return this process's part of a step and its seconds: of computing or reading, the longer one."""
        config = batch.config
        num_parts = 1 if batch.parts is not None else config.num_micro_batches
        return OwnPart(
            seconds=max(seconds, batch.read_s),
            num_samples=num_rows,
            part=engine.layout.num_replicas * config.micro_batch_size * num_parts,
            whole=config.global_batch_size,
            is_leased=batch.parts is not None,
            left=self._samples_left(batch),
            evaluates=self.sharing.evaluates,
        )

    def _samples_left(self, batch: StepBatch) -> int | None:
        """Return the samples after this batch; None before the last epoch, or if no host may be released."""
        left = self.loader.samples_left(batch) if self.sharing.may_release else None
        return left if left is not None and left <= self.loader.dataset_size else None


# -- generations -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GenerationStart:
    """What a run starts with in one set of processes (a generation); a fixed set is the only one."""

    ledger: TimeLedger
    """The generation's own: process 0 continues the run's ledger from what was kept, and may be another."""
    membership: Membership | None = None
    """This process's place in its job; None if processes do not come and go."""
    kept: RunSnapshot | None = None
    """The state to go on from; None: from the newest checkpoint, or from the beginning."""
    regrouped: Regrouped | None = None
    """What to tell the hooks of the change of processes."""
    news: tuple[Mapping[str, Any], ...] = ()
    """What was decided about hosts; see `membership.Generation`."""


def fit_generations(
    train: Callable[[GenerationStart], TrainState],
    rest: Callable[[int], None],
    last_step: Callable[[], int],
    membership: Membership,
    requests: Requests,
    clock: Clock,
    *,
    share: int | None,
) -> TrainState:
    """Train in one generation of processes after another, until the run is over.

    `train` trains in one of them and raises Regroup if it ends first; `last_step` then says which step it
    dispatched last. `rest` lets go of everything that belongs to a generation. The number of groups of each
    generation divides `share`, unless that is None.

    Raises what `Membership.enter` and `train` raise.
    """
    membership.on_regroup(lambda: requests.post(Control(regroup=True)))
    kept, before, why = None, 0, ""
    while True:
        ledger = TimeLedger(clock)
        with ledger.bucket("regrouping"):
            generation = membership.enter(kept, share)
        kept = generation.kept
        if kept is not None and generation.process_count == 1:
            rest(kept.step)  # a stop must not end the only process that has the state
        first = 0 if kept is None else kept.step
        requests.forget_regroup()
        if membership.is_broken():  # it may have ended before the line above
            requests.post(Control(regroup=True))
        regrouped = Regrouped(
            step=first,
            generation=generation.number,
            num_processes_before=before,
            num_processes=generation.process_count,
            reason=why,
            seconds=generation.seconds,
        )
        before = generation.process_count
        try:
            state = train(
                GenerationStart(
                    membership=membership,
                    ledger=ledger,
                    kept=kept,
                    regrouped=regrouped,
                    news=generation.news,
                )
            )
            membership.done()
            return state
        except Regroup as ended:
            kept, why = ended.kept, str(ended)
        except Exception as error:
            if not is_of_a_peer(error):
                raise
            why = str(error)
            if last_step() > first:
                # Steps were done since and could not be kept, so that `kept` is of an earlier one.
                logging.warning(
                    "processes of the job are gone (%s). Training resumes from the state of another process, "
                    "or from a checkpoint, and repeats the steps since then.",
                    why,
                )
                kept = None
        rest(last_step() if kept is None else kept.step)
