"""Adaptive, elastic training in JAX: measure noise and step times, pick the batch that learns fastest.

A name is loaded when it is first used; importing the package loads neither JAX nor numpy.

Training:
  Trainer               Trains a model
  Config                The settings of a run. Only `workdir`, `batch` and a length are required
  Tuning                Conditions for changing the batch and the strategy
  Statistics            Measurement of the gradient noise, which decides the batch and the learning rate
  Execution             Compilation of steps, memory, and reading of data
  Evaluation            Times of evaluations
  Saving                Times of checkpoints, and the choice of checkpoints to keep
  Reporting             Output of a run while it trains
  with_overrides        Return `config` with overrides such as `tuning.min_gain=0.1`
  BatchLimits           The batches that the user allows, in samples. No step ever uses another one
  TrainState            Everything that training needs to continue, as device values
  Loss                  Loss of a micro-batch with its weight
  InTurns               Optimizers that take turns: an update moves the part of the parameters with one name
  Variables             What `Trainer.init` returns for a model with mutable state or its own partitioning
  FromCheckpoint        Initial values from another run, for `Trainer(initial=...)`
  load                  Load the parameters and the model state of a run as NumPy arrays
  from_linen            Make pure functions of a linen module
  from_nnx              Make pure functions of an nnx module, from the function that creates it
  from_equinox          Make pure functions of an equinox model, from the function that creates it from a key
  Preempted             The run was asked to stop, and its state is saved. Exit code 143 asks for a restart
  NotSaved              The run is over and its last step could not be saved
  PeerLost              Another process of this job has died or no longer answers
  Diverged              Training cannot go on: values are lost, or too many updates in a row were refused
  tryout                Find out, in about a minute of training, what larger batches promise
  try_loss              Find out what larger batches promise for a loop of your own
  Tryout                What a minute of training says of other batches
  find_learning_rate    Find out which learning rate to begin with, from `num_steps` steps whose rate grows
  RateSearch            The loss of a run whose learning rate grew from step to step
  initialize            Join the job that `environ` describes (default: this process's environment)
Watching:
  Hook                  Base class of hooks: override the methods you need; the others do nothing
  Every                 Calls a function with every n-th `StepEnd`
  Profile               Captures a profile of some steps, from step `start` on or when a signal arrives
  trackers              Trackers: hooks that send a run's numbers to Weights & Biases, MLflow or a CSV file
  events                Events: frozen records of what happens in a run, for hooks, dashboard and journal
Samples:
  Source                Random access to equally shaped samples. Subclass it to read a format of your own
  stream                Return a source that reads an iterable in its own order, for `Trainer.dataset`
  Loader                Hands out every sample in the cursor's order exactly once
  Cursor                A place in a run's order of samples: the whole state of the data pipeline
  flow                  Pipelines over batches that join columns with tables and reduce them by key
  embedding             Tables larger than the device
  lengths               Batches of documents whose lengths differ much
Layouts:
  Strategy              How a model is copied and cut over devices
  candidates            Return every strategy that uses all of `num_devices`, plain data parallelism first
  pipeline              Apply `layer(params, x) -> x` for every layer of a stack in turn
  ring_attention        Return attention over positions that are cut over "context": keys go round in a ring
  all_to_all_attention  Return attention over positions that are cut over "context": devices exchange heads
  bubble_fraction       Return the fraction of a pipeline's time in which a stage waits: (S - 1) / (M + S - 1)
  Layout                A strategy on real devices
  Problem               What is trained: the user's functions, and how the noise of their gradient is measured
  SampleShape           What a micro-batch looks like
  Engines               One problem on any number of layouts: an engine for each, and the moves between them
  Engine                One problem on one layout. Get it from `Engines.on`
  StepBytes             Bytes per device that one execution needs
  listen_for_compilations  Call `callback` after every backend compilation, in the waiting thread
An optax loop of your own:
  Tuner                 Chooses the batches of a loop of your own, as `Trainer.fit` does in its loop
  adaptive              Wrap the optimizer `tx`, tuned at `base_batch_size`
  rules                 Learning-rate rules
  value_grad_and_noise  Make a `jax.value_and_grad` that also measures gradient noise
  NoiseSample           The gradient noise measured in one batch
  progress              Return the base steps done: the steps that the base batch size would have needed
  gain                  Return the factors that multiplied the latest update, `[labels]`
  grad_groups           Return the expected moments by group of parameters; use these for decisions
  noise_state           Return the gradient-noise statistics by label
The model of goodput:
  GradParams            The two moments of the gradient that decide the batch, both at the base batch size
  GradGroups            The two moments of every group of parameters, at the base batch size
  noise_scale           Return the batch size, in samples, at which gradient noise and signal are equal
  StepTimings           Measured times, one row per configuration; every field is an array `[rows]`
  fit_perf_params       Return the time model that explains `timings` best
  PerfFit               Fitted parameters and how far to trust them
  PerfParams            The cost of a step; scalars, or arrays of one shape. NaN means never measured
  Placement             The nodes and replicas that one job runs on: scalars, or arrays of one shape
  GoodputModel          Predicts the useful samples per second of any configuration, from a job's measurements
  BatchConfig           One way to run a step; the global batch is the product of its three numbers
  best_batch            Return the configuration with the highest goodput within the limits
  goodput_table         Return the useful samples/s of the best configuration on each placement
Many jobs:
  scheduler             Which job gets which devices
  simulate              Scheduling policies on a workload, in simulated time
"""

from jaxgoodput._lazy import lazy_names

__version__ = "0.1.0"

# Where each name comes from. Type checkers and editors read `__init__.pyi` instead; a test compares.
_NAMES = {
    "_jax": "listen_for_compilations",
    "data.cursor": "Cursor",
    "data.loader": "Loader",
    "data.sources": "Source",
    "data.streams": "stream",
    "engine.engine": "Engine Engines",
    "engine.programs.program": "SampleShape",
    "engine.state": "Loss TrainState Variables",
    "engine.step": "Problem",
    "models.of_equinox": "from_equinox",
    "models.of_flax": "from_linen from_nnx",
    "goodput.efficiency": "GradGroups GradParams noise_scale",
    "goodput.fit": "PerfFit StepTimings fit_perf_params",
    "goodput.memory": "StepBytes",
    "goodput.model": "GoodputModel",
    "goodput.perf": "PerfParams Placement",
    "goodput.search": "BatchConfig BatchLimits best_batch goodput_table",
    "launcher.worker": "initialize",
    "observe.hooks": "Every Hook Profile",
    "optim.adaptation": "gain grad_groups noise_state progress",
    "optim.adaptive": "adaptive",
    "optim.named": "InTurns",
    "optim.noise": "NoiseSample value_grad_and_noise",
    "parallel.pipeline": "bubble_fraction pipeline",
    "parallel.ring": "all_to_all_attention ring_attention",
    "parallel.strategy": "Layout Strategy candidates",
    "train.checkpoints.saved": "FromCheckpoint load",
    "train.ask.own_loop": "Tuner",
    "train.ask.rates": "RateSearch find_learning_rate",
    "train.ask.tryout": "Tryout try_loss tryout",
    "train.config": "Config Evaluation Execution Reporting Saving Statistics Tuning with_overrides",
    "train.control": "Diverged NotSaved PeerLost Preempted",
    "train.trainer": "Trainer",
}
_MODULES = {
    "embedding": "embedding",
    "events": "observe.events",
    "flow": "data.flow",
    "lengths": "data.lengths",
    "rules": "optim.learning_rate",
    "scheduler": "cluster.scheduler",
    "simulate": "cluster.simulate",
    "trackers": "observe.trackers",
}


def _join_job() -> None:
    """Join the job of the launcher that started this process, if there is one."""
    from jaxgoodput.launcher import worker

    worker.join_if_launched()


# A worker joins before its script can use JAX, if possible: often at `class X(jg.Trainer)`.
_FIRST = dict.fromkeys(("Trainer", "Tuner", "adaptive", "Engines"), _join_job)

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES, _MODULES, root=__name__, first=_FIRST)
