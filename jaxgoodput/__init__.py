"""Adaptive, elastic training in JAX: measure noise and step times, pick the batch that learns fastest.

A name is loaded when it is first used; importing the package loads neither JAX nor numpy.

Training:
  Trainer               Subclass it, write `init`, `loss`, `optimizer` and `dataset`, and call `fit()`
  Config                What `Trainer` needs to know besides the model
  Tuning                When the batch and the strategy are looked at again
  Statistics            How the gradient noise is measured
  Execution             How steps are compiled, and how much memory they may take
  Evaluation            How often the model is evaluated
  Saving                How often the run is saved, and which checkpoints stay
  Reporting             What a run tells while it runs
  with_overrides        `config` with `name=value` changes, values as JSON
  BatchLimits           What the user allows, in samples; no configuration ever leaves it
  TrainState            Everything that training needs to go on, as device values
  Loss                  What a user's loss may return where its weight is not the number of samples
  Variables             What `Trainer.init` returns for a model with mutable state
  FromCheckpoint        What another run learned, of any layout, for `Trainer(initial=...)`
  load                  The parameters and the model state of a run, as NumPy arrays
  from_linen            A linen module
  from_nnx              An nnx module, given the function that makes it
  Preempted             The run was asked to stop; its state is saved
  NotSaved              The run is over and its last step could not be saved
  PeerLost              Another process of this job has gone, or does not answer any more
  Diverged              Too many updates in a row had a loss or gradient that was not finite
  initialize            Join the job that `environ` (default: the process's own) describes
Watching:
  Hook                  Base class of hooks: override the methods you need; the others do nothing
  Every                 Calls a function with every n-th `StepEnd`
  Profile               Captures a profile of `steps` steps, from step `start`
  trackers              Trackers: the numbers of a run where somebody keeps those of all runs
  events                Events: frozen records of what happens in a run, for hooks, the dashboard
Samples:
  Source                Random access to equally shaped samples; subclass it to read a format of your own
  Loader                Hands out every sample in the cursor's order exactly once
  Cursor                The whole state of a data pipeline: three Python ints
  flow                  Streams of batches that are joined with tables and reduced by key
  embedding             Tables larger than the device
  lengths               Documents of very different lengths, split so that little of what is computed
Layouts:
  Strategy              How a model is copied and cut over devices
  candidates            Every strategy that uses all of `num_devices`; plain data parallelism first
  pipeline              `layer(params, x) -> x` for every layer of a stack in turn
  bubble_fraction       The part of a pipeline's time in which a stage waits
  Layout                A strategy on real devices; passed to whoever needs a mesh, never kept globally
  Problem               What is trained: the user's functions and how their gradient is measured
  SampleShape           What a micro-batch looks like: samples per replica
  Engines               One problem on any number of layouts: an engine for each
  Engine                One problem on one layout
  StepBytes             Bytes per device that one execution needs
  listen_for_compilations  Call `callback` after every backend compilation
An optax loop of your own:
  adaptive              The optimizer `tx`, tuned at `base_batch_size`, for batches of any size
  rules                 Learning-rate rules: by what factor a batch of another size multiplies
  value_grad_and_noise  `jax.value_and_grad` that measures gradient noise too
  NoiseSample           What one batch says about gradient noise: two squared norms of every leaf
  progress              Base steps done: the steps that the base batch size would have needed
  gain                  The factor that the latest update was multiplied by
  grad_groups           The cautious moments by group of parameters: what decisions rest on
  noise_state           The gradient-noise statistics by label
The model of goodput:
  GradParams            The two moments of the gradient that decide the batch
  GradGroups            The two moments of every group of parameters, at the base batch size
  noise_scale           The batch size, in samples, at which gradient noise and signal are equal
  StepTimings           What was measured: one row per configuration
  fit_perf_params       The time model that explains `timings` best, with what it cannot know marked
  PerfFit               Fitted parameters and how far to trust them
  PerfParams            What a step costs; scalars, or arrays of one shape
  Placement             Where the replicas of one job run: scalars, or arrays of one shape
  GoodputModel          Useful samples per second of any configuration, from what a job measured
  BatchConfig           One way to run a step: the global batch is the product of the three
  best_batch            The configuration of highest goodput within the limits
  goodput_table         [placements] useful samples/s of the best configuration on each
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
    "engine.engine": "Engine Engines",
    "engine.programs": "SampleShape",
    "engine.state": "Loss TrainState Variables",
    "engine.step": "Problem",
    "flax_models": "from_linen from_nnx",
    "goodput.efficiency": "GradGroups GradParams noise_scale",
    "goodput.fit": "PerfFit StepTimings fit_perf_params",
    "goodput.memory": "StepBytes",
    "goodput.model": "GoodputModel",
    "goodput.perf": "PerfParams Placement",
    "goodput.search": "BatchConfig BatchLimits best_batch goodput_table",
    "launcher.worker": "initialize",
    "observe.hooks": "Every Hook Profile",
    "optim.adaptive": "adaptive gain grad_groups noise_state progress",
    "optim.noise": "NoiseSample value_grad_and_noise",
    "parallel.pipeline": "bubble_fraction pipeline",
    "parallel.strategy": "Layout Strategy candidates",
    "train.checkpoint": "FromCheckpoint load",
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

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES, _MODULES, root=__name__)
