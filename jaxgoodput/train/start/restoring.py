"""Reading and writing a workdir before the first step: who holds it, and which checkpoint the run resumes."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from jaxgoodput import _disk
from jaxgoodput._jax import PeerGone
from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.data.fingerprint import Fingerprint
from jaxgoodput.data.sources import Source
from jaxgoodput.data.streams import StreamSource
from jaxgoodput.engine.engine import Engine
from jaxgoodput.engine.saved import from_host, whole_on_host
from jaxgoodput.engine.state import TrainState
from jaxgoodput.observe.badput import TimeLedger
from jaxgoodput.parallel.place import Place, place
from jaxgoodput.train.checkpoints.folders import check_writable
from jaxgoodput.train.checkpoints.meta import CheckpointMeta, WrongWorkdirError
from jaxgoodput.train.checkpoints.saved import RestoredCheckpoint, restore
from jaxgoodput.train.checkpoints.writer import Checkpoints
from jaxgoodput.train.config import Config
from jaxgoodput.train.runs.kinds import is_alone
from jaxgoodput.train.runs.membership import RunSnapshot
from jaxgoodput.train.start.lost_values import Origin, floats
from jaxgoodput.train.start.plans import RunSetup, abstract_as_saved, set_up
from jaxgoodput.train.start.problem import TaskInputs
from jaxgoodput.train.tables.commits import Opener, Tables
from jaxgoodput.tune.plan import BatchPlan
from jaxgoodput.workdir.places import FolderKeeper, Keeper, workdir_of

# How long a process that was cut off may take to let go of the workdir.
CUT_OFF_S = 10.0


def hold_workdir(
    workdir: str,
    where: Place,
    stack: contextlib.ExitStack,
    clock: Clock,
    *,
    patience_s: float = 0.0,
    on_lost: Callable[[str], None] = logging.error,
) -> Keeper:
    """Hold the workdir until `stack` closes; process 0 does it for all, which call this together.

    Returns what keeps its files. `patience_s` is how long to wait for another holder. `on_lost` is called
    with a sentence, on another thread, if another run takes the workdir. Raises InUse in all processes if
    another run holds it, PermissionError if it cannot be written, ValueError if it is not for several
    processes, and PeerGone if this set of processes ends first.
    """
    place_of_files = workdir_of(workdir)
    if not place_of_files.takes_processes and not is_alone(where):
        raise ValueError(
            f"{workdir} is in a bucket, and this run has several processes, or hosts that come and go. They "
            "need a folder that all of them see: mount the bucket (gcsfuse, mountpoint-s3) or use a shared "
            "file system."
        )
    keeper: Keeper = FolderKeeper()
    refused, deadline_s = None, clock.now() + patience_s
    while True:
        try:
            check_writable(place_of_files.folder)
            if where.process_index == 0:
                keeper = stack.enter_context(place_of_files.held(clock, on_lost))
            refused = None
        except (OSError, _disk.InUse) as error:
            refused = error
        if not isinstance(refused, _disk.InUse) or clock.now() >= deadline_s:
            break
        if where.is_broken():  # the others did not wait so long
            raise PeerGone(str(refused))
        clock.sleep(0.1)
    if not where.everywhere(refused is None):
        raise refused or _disk.InUse(f"another process cannot use the workdir {workdir}.")
    return keeper


class Restorer:
    """Finds the state that a run resumes from, with the plan of its strategy and its tables.

    A checkpoint may turn out to be damaged after a strategy was planned or tables were opened for it; then
    the next older one is tried. Afterwards `plan` and `tables` belong to the checkpoint that was read.
    """

    def __init__(
        self,
        setup: RunSetup,
        checkpoints: Checkpoints,
        opener: Opener,
        data: Fingerprint,
        ledger: TimeLedger,
    ):
        self.plan: BatchPlan | None = None
        self.tables: Tables | None = None
        self._setup = setup
        self._checkpoints = checkpoints
        self._opener = opener
        self._data = data
        self._ledger = ledger

    def restore(self, kept: RunSnapshot | None) -> RestoredCheckpoint | None:
        """Return the state and metadata to resume from, or None for a run that begins.

        `kept` is a state in memory, which takes the place of all checkpoints. Afterwards `plan` and `tables`
        are set.
        """
        found = None
        with self._ledger.bucket("checkpoint_restore"):
            if kept is None:
                found = self._checkpoints.restore(self._abstract_for, self._open_tables)
            else:
                state = from_host(kept.leaves, self._abstract_for(kept.meta))
                found = RestoredCheckpoint(state=state, meta=kept.meta)
        if found is None:
            self._close_tables()
            self._make_plan("")
        if self.tables is None:
            self.tables = self._opener.anew()
        return found

    def _abstract_for(self, meta: CheckpointMeta) -> TrainState:
        """Return the abstract state to read into, on the saved strategy or else one that fits here."""
        setup = self._setup
        _require_same_data(meta, self._data, setup.config, setup.where)
        # Before anything is compiled; all strategies have the same leaves.
        first = next(iter(setup.engines.values()))
        self._checkpoints.require_same_model(meta, abstract_as_saved(first, meta))
        plan = self._make_plan(setup.nearest_strategy(meta.batch.strategy))
        return abstract_as_saved(setup.engines[plan.start.strategy], meta)

    def _make_plan(self, prefer: str) -> BatchPlan:
        with self._ledger.bucket("compilation"):
            self.plan = self._setup.first_plan(prefer)
        return self.plan

    def _open_tables(self, meta: CheckpointMeta) -> None:
        self._close_tables()
        self.tables = self._opener.of_checkpoint(meta.tables)

    def _close_tables(self) -> None:
        """Close the tables of a checkpoint that another process could not read."""
        for table in (self.tables or {}).values():
            table.close()
        self.tables = None


def _require_same_data(
    meta: CheckpointMeta, data: Fingerprint, config: Config, where: Place
) -> None:
    """Refuse, in all processes, a checkpoint of other data or another base batch; warn only if allowed."""
    changed = []
    difference = None if meta.data is None else meta.data.difference(data)
    if difference is not None:
        changed.append(f"the data set {difference}")
    if meta.base_batch_size not in (None, config.batch.base):
        changed.append(f"batch.base is {config.batch.base} instead of {meta.base_batch_size}")
    if where.everywhere(not changed):
        return
    what = " and ".join(changed) or "another process reads other data"
    _refuse_or_warn(
        f"{what}, against the checkpoint of step {meta.step} in {config.workdir}", config
    )


def _refuse_or_warn(what: str, config: Config) -> None:
    if not config.saving.allow_changed_data:
        raise WrongWorkdirError(
            f"{what}. Use another workdir, or set Config.saving.allow_changed_data: then samples need no "
            "longer come exactly once."
        )
    logging.warning(
        "%s. Training goes on, because Config.saving.allow_changed_data is set.",
        what,
    )


def kept_order(meta: CheckpointMeta, data: Fingerprint, config: Config) -> Fingerprint:
    """Return the fingerprint with the checkpoint's order, which a resumed run keeps.

    If this run's settings ask for another order, a warning has both.
    """
    changed = []
    if meta.cursor.seed != config.seed and data.shuffle is not None:
        changed.append(f"Config.seed={config.seed} instead of {meta.cursor.seed}")
    saved = None if meta.data is None else meta.data.shuffle
    if None not in (saved, data.shuffle) and saved != data.shuffle:
        changed.append(f"Config.shuffle={data.shuffle} instead of {saved}")
    if changed:
        logging.warning(
            "this run asks for %s. It keeps the order of samples of the checkpoint of step %d, so that each "
            "sample still comes once per epoch. A new workdir starts with another order.",
            " and ".join(changed),
            meta.step,
        )
    return data if saved is None else dataclasses.replace(data, shuffle=saved)


def resume_stream(source: Source, meta: CheckpointMeta, config: Config, where: Place) -> None:
    """Set a stream back to the place that the checkpoint recorded; all processes call this together.

    Raises WrongWorkdirError if the checkpoint is of a data set that was a stream and this one is not, or the
    other way round; or if the stream does not go on with the sample that was there, unless
    `Saving.allow_changed_data` is set.
    """
    is_stream = isinstance(source, StreamSource)
    if is_stream != (meta.stream is not None):
        before, now = ("is a stream", "was not") if is_stream else ("is not a stream", "was one")
        raise WrongWorkdirError(
            f"the data set of this run {before}, and the data set of the checkpoint of step {meta.step} "
            f"{now}. Resume with the data set that the run began with, or use another workdir."
        )
    if isinstance(source, StreamSource) and meta.stream is not None:
        source.restore(meta.stream)
        if source.is_live:
            logging.warning(
                "the stream of this run is live: it goes on with whatever comes next, after the %d samples "
                "that were used before.",
                meta.cursor.offset,
            )
        if not where.everywhere(source.goes_on(meta.cursor.offset)):
            what = (
                f"sample {meta.stream.place} of the stream is not the one that it was when the checkpoint of "
                f"step {meta.step} in {config.workdir} was saved: the stream has other samples, or another "
                "filter, order or seed"
            )
            _refuse_or_warn(what, config)


def with_average(engine: Engine, restored: RestoredCheckpoint) -> TrainState:
    """Return the state that was read, with an average of the parameters if this run wants one."""
    if engine.problem.ema is None or restored.meta.has_average:
        return restored.state
    logging.warning(
        "the checkpoint of step %d holds no average of the parameters (Config.ema). The average begins "
        "with the parameters as they are there.",
        restored.meta.step,
    )
    return engine.with_average(restored.state)


def restored_state(
    inputs: TaskInputs, devices: Sequence[Any] | None, *, step: int | None, best: bool
) -> TrainState:
    """Return a checkpoint's state, on the strategy of this run that is nearest to the saved one.

    Nothing else is got ready. Raises what `Trainer.restore` says.
    """
    config = inputs.config
    setup = set_up(inputs, place(devices, config.strategies), devices)

    def engine_for(meta: CheckpointMeta) -> Engine:
        return setup.engines[setup.nearest_strategy(meta.batch.strategy)]

    restored = restore(
        config.workdir,
        lambda meta: abstract_as_saved(engine_for(meta), meta),
        step=step,
        best=best,
        saving=config.saving,
    )
    return with_average(engine_for(restored.meta), restored)


def save_kept(inputs: TaskInputs, kept: RunSnapshot, *, group_size: int) -> str | None:
    """Write a run between two generations as its newest checkpoint; returns None, or what went wrong.

    It is not written if it holds values that were finite when the run began and are not any more.
    """
    config = inputs.config
    # The state of a group of several processes was cut over more devices than are here.
    strategies = config.strategies if group_size == 1 else ()
    where = place(None, strategies, group_size=1)
    setup = set_up(inputs, where)
    engine = next(iter(setup.engines.values()))
    state = whole_on_host(kept.leaves, abstract_as_saved(engine, kept.meta))
    shapes = {path: kind.shape for path, kind in kept.meta.leaves.items()}
    lost = Origin.unpacked(kept.meta.began, shapes).lost_on_host(floats(state))
    if lost:
        return f"step {kept.step}: values are no longer finite ({lost})"
    meta = dataclasses.replace(kept.meta, lost={})
    with contextlib.ExitStack() as stack:
        keeper = hold_workdir(config.workdir, where, stack, SystemClock(), patience_s=CUT_OFF_S)
        checkpoints = Checkpoints(config.workdir, keep=config.saving, keeper=keeper)
        stack.callback(checkpoints.close)
        return checkpoints.save(state, meta) or checkpoints.wait(alone=True)
