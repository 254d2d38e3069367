"""`Trainer`: the few methods a user writes, and `fit` and `evaluate` that follow from them."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import optax
from jaxtyping import Array, PyTree

from jaxgoodput.clock import Clock, SystemClock
from jaxgoodput.engine.state import TrainState
from jaxgoodput.train import setup
from jaxgoodput.train.config import Config
from jaxgoodput.train.evaluation import Evaluator
from jaxgoodput.train.loop import Run


class Trainer(abc.ABC):
    """Subclass it, write `init`, `loss`, `optimizer` and `dataset`, and call `fit()`.

    All methods are pure functions of their arguments: they are traced, compiled for several batch
    sizes, and called from more than one thread.

    `devices` defaults to all devices of this process; `clock` is for tests.
    """

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock | None = None,
        devices: Sequence[Any] | None = None,
        hooks: Sequence[Any] = (),
    ):
        self.config = config
        self.clock = clock or SystemClock()
        self.devices = devices
        self.hooks = tuple(hooks)
        self._run: Run | None = None
        self._evaluator: Evaluator | None = None

    # -- what a user writes ----------------------------------------------------------------------

    @abc.abstractmethod
    def init(self, key: Array) -> Any:
        """The parameters, a PyTree; `Variables(params=, model_state=)` for a model with mutable state."""

    def loss(self, params: PyTree, batch: PyTree, key: Array) -> Any:
        """The loss of one micro-batch, leaves of `batch` being `[micro_batch_size, ...]`.

        Returns per-sample losses `[micro_batch_size]`; or `Loss(sum, weight, aux)`, per sample or in
        total, where the weight is not the number of samples; or a scalar mean, which cannot leave
        padded samples out. `key` is a fresh key for every micro-batch on every replica.
        """
        raise TypeError(
            f"{type(self).__name__} defines neither loss nor loss_and_state. Write "
            "loss(self, params, batch, key); for a model with mutable state, "
            "loss_and_state(self, params, model_state, batch, key) -> (loss, model_state)."
        )

    def loss_and_state(
        self, params: PyTree, model_state: PyTree, batch: PyTree, key: Array
    ) -> tuple[Any, PyTree]:
        """`loss` for a model with mutable state: also returns the state after the micro-batch.

        Floating leaves (BatchNorm statistics) are averaged over replicas, weighted by samples; other
        leaves (counters, keys) must advance alike on every replica.
        """
        return self.loss(params, batch, key), model_state

    @abc.abstractmethod
    def optimizer(self) -> optax.GradientTransformation:
        """Any optax optimizer, tuned at the base batch size.

        It sees the averaged gradient of the whole batch (so clipping does too); its schedules are
        called with progress in base steps; its updates are multiplied by the learning-rate gain.
        """

    def learning_rate(self, progress: Any) -> Any:
        """The optimizer's own learning rate at `progress` base steps, for the dashboard; None: unknown.

        An optax optimizer does not say what its schedule is. By itself this changes nothing but a
        chart; `optimizer()` may hand it to optax as its schedule.
        """
        return None

    @abc.abstractmethod
    def dataset(self) -> Any:
        """Training samples: a dict of arrays, anything with `__len__` and `__getitem__`, or a grain
        `MapDataset`.
        """

    def eval_dataset(self) -> Any:
        """Held-out samples, or None."""
        return None

    def metrics(self, params: PyTree, batch: PyTree) -> Mapping[str, Any]:
        """Per-sample outputs of an evaluation, name -> `[batch, ...]`."""
        raise TypeError(
            f"{type(self).__name__} has an eval_dataset but no metrics. Write "
            "metrics(self, params, batch) -> {name: one value per sample}."
        )

    def metrics_with_state(
        self, params: PyTree, model_state: PyTree, batch: PyTree
    ) -> Mapping[str, Any]:
        """`metrics` for a model with mutable state, which an evaluation only reads."""
        return self.metrics(params, batch)

    def summarize(self, outputs: Mapping[str, np.ndarray]) -> Mapping[str, float]:
        """Numbers from the outputs of all held-out samples; the mean of each unless overridden."""
        return {name: float(np.mean(values)) for name, values in outputs.items()}

    def trainable(self, params: PyTree) -> PyTree | None:
        """A tree of bool like `params`: False freezes a leaf. None trains all of them."""
        return None

    def labels(self, params: PyTree) -> PyTree | None:
        """A tree of str like `params`: groups with noise statistics and a gain of their own.

        None is one group.
        """
        return None

    # -- what follows ----------------------------------------------------------------------------

    @final
    def fit(self) -> TrainState:
        """Train, resuming from the workdir where it holds a checkpoint, and return the final state.

        Raises:
          Preempted: SIGTERM, SIGINT or a hook asked to stop; the state is saved. It is a SystemExit
            with code 143, so that a script that does not catch it ends with that code.
          Diverged: too many updates in a row were not finite.
          RuntimeError: a sample could not be read. In one process what was learned is saved first.
          ValueError, TypeError: a setting, a loss or a data set that cannot work, with the remedy.
        """
        run = Run(self)
        self._run = run
        try:
            return run.fit()
        finally:
            self._run = None

    @final
    def evaluate(self, state: TrainState) -> dict[str, float]:
        """`summarize` of `metrics` over the whole `eval_dataset`, every sample once."""
        if self._evaluator is None:
            self._evaluator = setup.evaluator(self)
        summary = self.summarize(self._evaluator(state))
        return {name: float(value) for name, value in summary.items()}

    @final
    def request_stop(self) -> None:
        """Save and stop at the next step: `fit` then raises `Preempted`. Callable from hooks."""
        self._running().requests.interrupt("request_stop")

    @final
    def finish(self) -> None:
        """End training at the next step as if it were complete. Callable from hooks."""
        self._running().requests.post(finish=True)

    @final
    def request_save(self) -> None:
        """Save a checkpoint at the next step. Callable from hooks."""
        self._running().requests.post(save=True)

    @final
    def compile_sizes(self) -> None:
        """Compile other batch sizes and strategies in the background from now on. Callable from hooks.

        Left alone, this begins once the noise gives any reason to change the batch.
        """
        self._running().ladders.start()

    @final
    def request_batch(
        self, micro_batch_size: int, num_micro_batches: int = 1, *, strategy: str | None = None
    ) -> None:
        """Use this batch from the next step on, as if a verdict had said so. Callable from hooks.

        `strategy` names another one of `Config.strategies` to use it under, such as "fsdp8". What is not
        ready is compiled in the loop: see `compile_sizes`. To have no verdict interfere, set
        `Config.warm_up_steps` beyond the end.
        """
        if micro_batch_size < 1 or num_micro_batches < 1:
            raise ValueError(
                f"a batch needs at least one micro-batch of one sample; got micro_batch_size="
                f"{micro_batch_size}, num_micro_batches={num_micro_batches}."
            )
        running = self._running()
        if strategy is not None and strategy not in running.where.layouts:
            raise ValueError(
                f"this run has no strategy {strategy!r}; Config.strategies has "
                f"{', '.join(running.where.layouts).strip() or 'none'}."
            )
        self._running().requests.post(
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
            strategy=strategy,
        )

    def _running(self) -> Run:
        if self._run is None:
            raise RuntimeError("nothing is running: call this from a hook while fit() runs.")
        return self._run
