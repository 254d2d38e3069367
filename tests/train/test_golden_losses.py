"""Thirty steps of each kind of model give, bit for bit, the losses and parameters recorded earlier.

The record is `golden_losses.json` beside this file. Bits depend on the compiler and on the processor's
instructions, so it has one entry for each pair of them; a machine without an entry compares within a
tolerance, and the ids of its tests end in `tolerance` instead of `bits`.

    python tests/train/test_golden_losses.py --record

adds an entry for this machine, or replaces it, which is right only where a change of the numbers is
meant. Everything here goes through promised names, so that it outlives changes of what is behind them.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxgoodput as jg

WIDTH, HIDDEN = 16, 64  # their product is the smallest matrix that a strategy cuts
BATCH, EPOCHS = 32, 2
NUM_SAMPLES = 477  # 30 batches in two epochs, the last of them padded
NUM_STEPS = 30
NUM_PROCESSES, DEVICES_PER_PROCESS = 2, 4
LIMIT_S = 300.0

RECORD = pathlib.Path(__file__).with_name("golden_losses.json")
STRATEGIES = {s.name: s for s in (jg.Strategy(data=8), jg.Strategy(fsdp=8))}
STRATEGIES["fsdp4.tensor2"] = jg.Strategy(fsdp=4, tensor=2)


# -- the kinds of model ------------------------------------------------------------------------------


class Losses(jg.Hook):
    """Keeps the loss of every step, and the last statistics of the gradient noise."""

    def __init__(self):
        self.losses: list[float] = []
        self.noise: dict[str, float] = {}

    def on_step_end(self, event, /):
        self.losses.append(event.metrics["loss"])
        self.noise = {name: event.metrics[name] for name in ("grad_sqr", "grad_var")}


def waves(shape, amplitude):
    """Numbers without a pattern that matters: random ones take long to compile."""
    return amplitude * jnp.sin(jnp.arange(1.0, 1 + shape[0] * shape[1])).reshape(shape)


class Regression(jg.Trainer):
    """Two matrices that strategies cut, and a vector that they do not."""

    def init(self, key) -> Any:
        return {
            "up": {"kernel": waves((WIDTH, HIDDEN), 0.3), "bias": jnp.zeros(HIDDEN)},
            "down": {"kernel": waves((HIDDEN, WIDTH), 0.1)},
        }

    def loss(self, params, batch, key):
        return self.errors(params, batch, self.hidden(params, batch))

    def hidden(self, params, batch):
        x = batch["x"].astype(params["up"]["kernel"].dtype)
        return jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"][None])

    def errors(self, params, batch, hidden):
        return jnp.mean((hidden @ params["down"]["kernel"] - batch["y"]) ** 2, axis=-1)

    def optimizer(self):
        return optax.sgd(optax.cosine_decay_schedule(0.1, NUM_STEPS), momentum=0.9)

    def dataset(self):
        x = np.random.default_rng(1).normal(size=(NUM_SAMPLES, WIDTH)).astype(np.float32)
        return {"x": x, "y": np.abs(x)}


class Random(Regression):
    """Random at the start and in every step: its bits hold those of the keys. Adam measures otherwise."""

    def init(self, key):
        params = super().init(key)
        shape = params["up"]["kernel"].shape
        params["up"]["kernel"] = jax.random.normal(key, shape) / 4
        return params

    def loss(self, params, batch, key):
        hidden = self.hidden(params, batch)
        kept = jax.random.bernoulli(key, 0.9, hidden.shape)
        return self.errors(params, batch, jnp.where(kept, hidden, 0))

    def optimizer(self):
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01))


class Frozen(Regression):
    """A matrix does not train."""

    def trainable(self, params):
        return {"up": {"kernel": False, "bias": True}, "down": {"kernel": True}}


class Network(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(HIDDEN, kernel_init=lambda key, shape, dtype: waves(shape, 0.3))(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.8)(x)
        return nn.Dense(WIDTH, kernel_init=lambda key, shape, dtype: waves(shape, 0.1))(nn.relu(x))


MODEL = jg.from_linen(Network(), train_kwargs={"train": True}, predict_kwargs={"train": False})


class Normalised(Regression):
    """Batch normalisation, whose averages are mutable state."""

    def init(self, key):
        return MODEL.init(key, jnp.zeros((1, WIDTH)))

    def loss_and_state(self, params, model_state, batch, key):
        out, model_state = MODEL.train(params, model_state, key, batch["x"])
        return jnp.mean((out - batch["y"]) ** 2, axis=-1), model_state


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A trainer, what is special in its configuration, and how far other machines may be from it."""

    trainer: type[jg.Trainer]
    compute_dtype: str | None = None
    num_micro_batches: int = 1
    rtol: float = 1e-3


KINDS = {
    "plain": Kind(trainer=Random),
    "batchnorm": Kind(trainer=Normalised),
    "bfloat16": Kind(trainer=Regression, compute_dtype="bfloat16", rtol=5e-2),
    "frozen": Kind(trainer=Frozen, num_micro_batches=2),  # accumulates, besides
}


# -- a run and its record ----------------------------------------------------------------------------


def trained(kind: Kind, workdir: str, strategy: jg.Strategy | None = None) -> dict[str, Any]:
    """What is recorded of one run: numbers in hexadecimal, digests of what it ends with.

    Without a strategy it is data parallelism over all devices of all processes; only the first process
    hears of losses.
    """
    replicas = jax.device_count() if strategy is None else strategy.num_replicas
    config = jg.Config(
        workdir=workdir,
        # The largest micro-batch that is allowed is the one that a fixed batch is made of.
        batch=jg.BatchLimits(
            base=BATCH, max=BATCH, micro=(1, BATCH // replicas // kind.num_micro_batches)
        ),
        epochs=EPOCHS,
        strategies=() if strategy is None else (strategy,),
        policy="fixed",
        tuning=jg.Tuning(accumulate=kind.num_micro_batches > 1, warm_up_steps=1_000_000),
        compute_dtype=kind.compute_dtype,
        statistics=jg.Statistics(
            every_steps=2,  # steps that measure, and steps that do not
        ),
        execution=jg.Execution(background_compile=False, compilation_cache=None),
        reporting=jg.Reporting(tensorboard=False, progress=False),
        saving=jg.Saving(at_end=False),
    )
    seen = Losses()
    state = kind.trainer(config, hooks=[seen]).fit()
    return {
        "losses": " ".join(float(loss).hex() for loss in seen.losses),
        "noise": {name: float(value).hex() for name, value in seen.noise.items()},
        "params": digest(state.params),
        "model_state": digest(state.model_state),
    }


def digest(tree: Any) -> str:
    """SHA-256 over the bytes of all leaves."""
    return hashlib.sha256(
        b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))
    ).hexdigest()


ENDS = ("params", "model_state")


def run(*command: str, bits: bool) -> None:
    """Run Python with these arguments to its end.

    In an environment of its own, so that tests and records compile the same programs: tests choose other
    kernels for their own process than users get. As many threads as tests have, because XLA cuts by them.
    Where no bits are compared, programs are compiled as fast as in other tests.
    """
    own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "NPROC": "16"}
    own["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(not bits).lower()
    finished = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **own},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,  # the workers of a launcher die with it
    )
    assert finished.returncode == 0, f"{finished.stdout}\n{finished.stderr}"


def in_one_process(
    out: pathlib.Path, strategy: str, *kinds: str, bits: bool
) -> dict[str, dict[str, Any]]:
    """The runs of some kinds in a process of eight devices."""
    run(__file__, "--worker", str(out), strategy, *kinds, bits=bits)
    return json.loads((out / "0.json").read_text())


def in_two_processes(out: pathlib.Path, *, bits: bool) -> dict[str, dict[str, Any]]:
    """The runs of all kinds in two processes, whose final parameters must be the same in both."""
    launcher = ["-m", "jaxgoodput.cli", "run", "--nproc-per-node", str(NUM_PROCESSES)]
    launcher += ["--devices-per-process", str(DEVICES_PER_PROCESS)]
    run(*launcher, "--", "python", __file__, "--worker", str(out), bits=bits)
    chief, peer = (json.loads((out / f"{rank}.json").read_text()) for rank in range(NUM_PROCESSES))
    for name in KINDS:
        assert [chief[name][k] for k in ENDS] == [peer[name][k] for k in ENDS], name
    return chief


@functools.cache
def recorded() -> Mapping[str, Mapping[str, Any]]:
    """Machine -> run -> what was recorded of it; empty where nothing was."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


@functools.cache
def machine() -> str:
    """What bits depend on: the compiler's version, and the processor as the compiler sees it."""
    # The name alone says little: virtual machines often call all processors of a vendor the same.
    names = ("vendor_id", "cpu family", "model", "model name", "flags", "Features")
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except FileNotFoundError:
        lines = [f"model name: {platform.processor()} {platform.machine()}"]
    fields = {name.strip(): text for name, _, text in (line.partition(":") for line in lines)}
    told = [[name, *sorted(fields[name].split())] for name in names if name in fields]
    # Products of matrices are cut by the sizes of the caches, which one name and one set of flags may hide.
    caches = pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    told.append(["caches", *(path.read_text().strip() for path in sorted(caches))])
    fingerprint = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]
    return f"jaxlib {importlib.metadata.version('jaxlib')}, cpu {fingerprint}"


def check(kind: Kind, run: str, got: Mapping[str, Any]) -> None:
    """Compare a run with its record: by bits where this machine has one, else within a tolerance."""
    losses = got["losses"].split()
    assert len(losses) == NUM_STEPS
    if has_bits():
        wanted = recorded()[machine()][run]
        steps = zip(losses, wanted["losses"].split(), strict=True)
        others = [step for step, (a, b) in enumerate(steps, 1) if a != b]
        assert not others, f"{run}: the losses of steps {others} have other bits"
        assert got == wanted
        return
    other, runs = next(iter(recorded().items()))
    print(f"{run}: no bits are recorded for {machine()}; compared with {other}, rtol {kind.rtol}")
    wanted = [float.fromhex(loss) for loss in runs[run]["losses"].split()]
    np.testing.assert_allclose([float.fromhex(loss) for loss in losses], wanted, rtol=kind.rtol)


def has_bits() -> bool:
    """Whether bits are compared on this machine."""
    return machine() in recorded()


def compared(*parts: str) -> str:
    """The id of a test."""
    return "-".join([*parts, "bits" if has_bits() else "tolerance"])


# -- the tests ---------------------------------------------------------------------------------------


# Programs take long to compile where parameters are cut, those of random keys and accumulation longest.
NIGHTLY = [
    (s, k) for s in STRATEGIES if s != "data8" for k in KINDS if (s, k) != ("fsdp8", "bfloat16")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, kind",
    [
        pytest.param(
            s,
            k,
            id=compared(s, k),
            marks=(pytest.mark.slow, pytest.mark.nightly) if (s, k) in NIGHTLY else (),
        )
        for s in STRATEGIES
        for k in KINDS
    ],
)
def test_the_losses_of_one_process_are_those_recorded(tmp_path, strategy, kind):
    got = in_one_process(tmp_path, strategy, kind, bits=has_bits())[kind]
    check(KINDS[kind], f"{strategy} {kind}", got)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    return in_two_processes(tmp_path_factory.mktemp("golden"), bits=has_bits())


@pytest.mark.multihost
@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(k, id=compared(k)) for k in KINDS])
def test_the_losses_of_two_processes_are_those_recorded(two_processes, kind):
    check(KINDS[kind], f"2 processes {kind}", two_processes[kind])


# -- recording ---------------------------------------------------------------------------------------


def work(out: pathlib.Path, strategy: str | None = None, *kinds: str) -> None:
    """What a process does: some kinds, or all, one after the other."""
    chosen = None if strategy is None else STRATEGIES[strategy]
    seen = {name: trained(KINDS[name], str(out / name), chosen) for name in kinds or KINDS}
    out.mkdir(exist_ok=True)
    (out / f"{jax.process_index()}.json").write_text(json.dumps(seen))


def everything() -> dict[str, dict[str, Any]]:
    """All runs, in folders of their own."""
    with tempfile.TemporaryDirectory() as folder:
        out, runs = pathlib.Path(folder), {}
        for name in STRATEGIES:
            for kind, seen in in_one_process(out / name, name, bits=True).items():
                runs[f"{name} {kind}"] = seen
        for kind, seen in in_two_processes(out, bits=True).items():
            runs[f"2 processes {kind}"] = seen
        return runs


def record() -> None:
    """Write this machine's entry, if its bits are the same in two attempts."""
    first, second = everything(), everything()
    if unsteady := [name for name in first if first[name] != second[name]]:
        raise SystemExit(f"two attempts gave different bits, nothing is recorded: {unsteady}")
    entries = {**recorded(), machine(): first}
    RECORD.write_text(json.dumps(entries, indent=1) + "\n")
    print(f"recorded {len(first)} runs of {jg.__file__} for {machine()}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        if sys.argv[3:]:  # not under the launcher, which says how many devices each process has
            jax.config.update("jax_num_cpu_devices", 8)
        work(pathlib.Path(sys.argv[2]), *sys.argv[3:])
    elif sys.argv[1:] == ["--record"]:
        record()
    else:
        raise SystemExit("usage: python test_golden_losses.py --record")
