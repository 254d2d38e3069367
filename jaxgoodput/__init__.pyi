from jaxgoodput import embedding as embedding
from jaxgoodput._jax import listen_for_compilations as listen_for_compilations
from jaxgoodput.cluster import scheduler as scheduler
from jaxgoodput.cluster import simulate as simulate
from jaxgoodput.data import flow as flow
from jaxgoodput.data import lengths as lengths
from jaxgoodput.data.cursor import Cursor as Cursor
from jaxgoodput.data.loader import Loader as Loader
from jaxgoodput.data.sources import Source as Source
from jaxgoodput.data.streams import stream as stream
from jaxgoodput.engine.engine import Engine as Engine
from jaxgoodput.engine.engine import Engines as Engines
from jaxgoodput.engine.programs.program import SampleShape as SampleShape
from jaxgoodput.engine.state import Loss as Loss
from jaxgoodput.engine.state import TrainState as TrainState
from jaxgoodput.engine.state import Variables as Variables
from jaxgoodput.engine.step import Problem as Problem
from jaxgoodput.goodput.efficiency import GradGroups as GradGroups
from jaxgoodput.goodput.efficiency import GradParams as GradParams
from jaxgoodput.goodput.efficiency import noise_scale as noise_scale
from jaxgoodput.goodput.fit import PerfFit as PerfFit
from jaxgoodput.goodput.fit import StepTimings as StepTimings
from jaxgoodput.goodput.fit import fit_perf_params as fit_perf_params
from jaxgoodput.goodput.memory import StepBytes as StepBytes
from jaxgoodput.goodput.model import GoodputModel as GoodputModel
from jaxgoodput.goodput.perf import PerfParams as PerfParams
from jaxgoodput.goodput.perf import Placement as Placement
from jaxgoodput.goodput.search import BatchConfig as BatchConfig
from jaxgoodput.goodput.search import BatchLimits as BatchLimits
from jaxgoodput.goodput.search import best_batch as best_batch
from jaxgoodput.goodput.search import goodput_table as goodput_table
from jaxgoodput.launcher.worker import initialize as initialize
from jaxgoodput.models.of_equinox import from_equinox as from_equinox
from jaxgoodput.models.of_flax import from_linen as from_linen
from jaxgoodput.models.of_flax import from_nnx as from_nnx
from jaxgoodput.observe import events as events
from jaxgoodput.observe import trackers as trackers
from jaxgoodput.observe.hooks import Every as Every
from jaxgoodput.observe.hooks import Hook as Hook
from jaxgoodput.observe.hooks import Profile as Profile
from jaxgoodput.optim import learning_rate as _learning_rate
from jaxgoodput.optim.adaptation import gain as gain
from jaxgoodput.optim.adaptation import grad_groups as grad_groups
from jaxgoodput.optim.adaptation import noise_state as noise_state
from jaxgoodput.optim.adaptation import progress as progress
from jaxgoodput.optim.adaptive import adaptive as adaptive
from jaxgoodput.optim.named import InTurns as InTurns
from jaxgoodput.optim.noise import NoiseSample as NoiseSample
from jaxgoodput.optim.noise import value_grad_and_noise as value_grad_and_noise
from jaxgoodput.parallel.pipeline import bubble_fraction as bubble_fraction
from jaxgoodput.parallel.pipeline import pipeline as pipeline
from jaxgoodput.parallel.ring import all_to_all_attention as all_to_all_attention
from jaxgoodput.parallel.ring import ring_attention as ring_attention
from jaxgoodput.parallel.strategy import Layout as Layout
from jaxgoodput.parallel.strategy import Strategy as Strategy
from jaxgoodput.parallel.strategy import candidates as candidates
from jaxgoodput.train.ask.own_loop import Tuner as Tuner
from jaxgoodput.train.ask.rates import RateSearch as RateSearch
from jaxgoodput.train.ask.rates import find_learning_rate as find_learning_rate
from jaxgoodput.train.ask.tryout import Tryout as Tryout
from jaxgoodput.train.ask.tryout import try_loss as try_loss
from jaxgoodput.train.ask.tryout import tryout as tryout
from jaxgoodput.train.checkpoints.saved import FromCheckpoint as FromCheckpoint
from jaxgoodput.train.checkpoints.saved import load as load
from jaxgoodput.train.config import Config as Config
from jaxgoodput.train.config import Evaluation as Evaluation
from jaxgoodput.train.config import Execution as Execution
from jaxgoodput.train.config import Reporting as Reporting
from jaxgoodput.train.config import Saving as Saving
from jaxgoodput.train.config import Statistics as Statistics
from jaxgoodput.train.config import Tuning as Tuning
from jaxgoodput.train.config import with_overrides as with_overrides
from jaxgoodput.train.control import Diverged as Diverged
from jaxgoodput.train.control import NotSaved as NotSaved
from jaxgoodput.train.control import PeerLost as PeerLost
from jaxgoodput.train.control import Preempted as Preempted
from jaxgoodput.train.trainer import Trainer as Trainer

rules = _learning_rate  # an import under another name is no promise of a stub's

__version__: str

def _join_job() -> None: ...

__all__: list[str]
