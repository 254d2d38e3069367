"""`jaxgoodput plan`: right about what fits, named reasons, and nothing trained."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from jaxgoodput.engine.engine import Engines
from jaxgoodput.launcher.plan import trainer_of
from jaxgoodput.parallel.strategy import Strategy
from jaxgoodput.train.start.problem import problem_of

ROOT = pathlib.Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
import jaxgoodput as jg

class Wide(jg.Trainer):
    def init(self, key):
        return {"up": {"kernel": jnp.zeros((256, 1024))}, "down": {"kernel": jnp.zeros((1024, 256))}}

    def loss(self, params, batch, key):
        hidden = jnp.tanh(batch["x"] @ params["up"]["kernel"])
        return jnp.mean((hidden @ params["down"]["kernel"] - batch["x"]) ** 2, axis=-1)

    def optimizer(self):
        return optax.adam(1e-3)

    def dataset(self):
        return {"x": np.zeros((512, 256), np.float32)}

if __name__ == "__main__":
    config = jg.Config(
        workdir=sys.argv[1],
        batch=jg.BatchLimits(base=64, max=64),
        base_steps=10.0,
        strategies=(
            jg.Strategy(data=-1),
            jg.Strategy(fsdp=-1),
            jg.Strategy(data=-1, tensor=2),
        ),
    )
    Wide(config).fit()
    raise SystemExit("it trained")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "wide.py"
    path.write_text(SCRIPT)
    return path


def planned(script, *options):
    command = [sys.executable, "-m", "jaxgoodput", "plan", str(script), *options]
    command += ["--", str(script.parent / "run")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def rows(text):
    """The table by strategy."""
    lines = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in text.splitlines()]
    header, *body = [line for line in lines if line]
    return {row[0]: dict(zip(header, row, strict=True)) for row in body}


@pytest.mark.slow
def test_a_small_memory_is_enough_for_some_strategies_only(script):
    # Two matrices of 1 MiB with two moments: 6 MiB whole, besides gradients.
    done = planned(script, "--devices", "8", "--memory-gib", "0.0055")
    assert done.returncode == 0, done.stderr
    assert "left out: data8" in done.stdout and "MiB" in done.stdout
    table = rows(done.stdout)
    assert table["fsdp8"]["fits"] == "yes" and "data8" not in table
    assert not (script.parent / "run").exists(), "nothing was trained"


@pytest.mark.slow
def test_what_it_says_of_memory_is_what_the_compiled_step_takes(script):
    done = planned(script, "--devices", "8")
    assert done.returncode == 0, done.stderr
    table = rows(done.stdout)
    assert set(table) == {"data8", "fsdp8", "data4.tensor2"}
    trainer = trainer_of(str(script), [str(script.parent / "run")])
    problem = problem_of(trainer, trainer.config)
    made = Engines(problem, {"x": jax.ShapeDtypeStruct((256,), "float32")})
    for strategy in (Strategy(data=8), Strategy(fsdp=8), Strategy(data=4, tensor=2)):
        one = made.on(strategy.on(jax.devices()))
        size = 64 // strategy.num_replicas
        one.compile([size], accumulate=False)
        peak = one.bytes_of(size)
        assert peak is not None
        told = float(table[strategy.name]["peak MiB"])
        assert told == pytest.approx(peak.peak / 2**20, rel=0.1, abs=1.0)


@pytest.mark.slow
def test_a_script_that_never_trains_is_named(tmp_path):
    path = tmp_path / "idle.py"
    path.write_text("print('nothing')\n")
    done = planned(path, "--devices", "2")
    assert done.returncode == 2
    assert "ended before any Trainer.fit()" in done.stderr


@pytest.mark.tpu
@pytest.mark.slow
def test_a_topology_that_is_not_there(script):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU compiler (libtpu, in the extra `tpu`) is not installed")
    done = planned(script, "--topology", "v5e:2x4")
    assert done.returncode == 0, done.stderr
    table = rows(done.stdout)
    assert set(table) == {"data8", "fsdp8", "data4.tensor2"}
    assert all(float(row["step ms"]) > 0 for row in table.values())


@pytest.mark.slow
def test_without_the_tpu_compiler_the_remedy_is_named(script):
    if importlib.util.find_spec("libtpu") is not None:
        pytest.skip("the TPU compiler is installed")
    done = planned(script, "--topology", "v5e:2x4")
    assert done.returncode == 2 and "pip install 'jaxgoodput[tpu]'" in done.stderr
