"""`jaxgoodput plan`: right about what fits, named reasons, and nothing trained."""

import concurrent.futures
import importlib.util
import os
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
    """The two tables by strategy."""
    lines = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in text.splitlines()]
    found, header = {}, []
    for cells in filter(None, lines):
        if cells[0] == "strategy":
            header = cells
        else:
            found.setdefault(cells[0], {}).update(zip(header, cells, strict=True))
    return found


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
        row = table[strategy.name]
        assert float(row["peak MiB"]) == pytest.approx(peak.peak / 2**20, rel=0.1, abs=1.0)
        kinds = ("parameters", "optimizer", "activations", "temporaries")
        assert sum(float(row[kind]) for kind in kinds) == pytest.approx(
            float(row["peak MiB"]), abs=0.8
        )
        parts = 1 if strategy.data == 8 else 8 if strategy.fsdp == 8 else 2
        assert (row["parameters"], row["optimizer"]) == (f"{2 / parts:.1f}", f"{4 / parts:.1f}")


@pytest.mark.slow
def test_a_strategy_is_explained_by_the_names_of_the_script(script):
    done = planned(script, "--devices", "4", "--explain", "fsdp4")
    assert done.returncode == 0, done.stderr
    assert set(rows(done.stdout)) == {"fsdp4"}
    # The moments of both kernels are of one size, so either may be the fifth buffer.
    assert re.search("mu of (up|down)/kernel", done.stdout) and "all-gather" in done.stdout
    unknown = planned(script, "--devices", "4", "--explain", "fsdp3")
    assert unknown.returncode == 2 and "Name one of data4, " in unknown.stderr


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


@pytest.mark.tpu
@pytest.mark.nightly
@pytest.mark.slow
def test_two_plans_for_tpus_run_at_once(script):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU compiler (libtpu, in the extra `tpu`) is not installed")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda shape: planned(script, "--topology", shape), ["v5e:2x4"] * 2))
    assert [done.returncode for done in both] == [0, 0], [done.stderr for done in both]


@pytest.mark.slow
def test_without_the_tpu_compiler_the_remedy_is_named(script):
    if importlib.util.find_spec("libtpu") is not None:
        pytest.skip("the TPU compiler is installed")
    done = planned(script, "--topology", "v5e:2x4")
    assert done.returncode == 2 and "pip install 'jaxgoodput[tpu]'" in done.stderr


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("topology", "between"), [("h100:1x8", False), ("h100:2x4", True)])
def test_gpus_that_are_not_there(script, topology, between):
    """With the CUDA compiler of this environment, or of the one whose Python CUDA_COMPILER_PYTHON names."""
    python = os.environ.get("CUDA_COMPILER_PYTHON", "")
    if not python and importlib.util.find_spec("jax_cuda12_plugin") is None:
        pytest.skip(
            "the CUDA compiler is not installed: pip install 'jaxgoodput[cuda12]', or name a Python that "
            "has it in CUDA_COMPILER_PYTHON"
        )
    elsewhere = ["--python", python] if python else []
    done = planned(script, "--topology", topology, "--price-per-hour", "2", *elsewhere)
    assert done.returncode == 0, done.stderr
    table = rows(done.stdout)
    assert set(table) == {"data8", "fsdp8", "data4.tensor2"}
    for name, row in table.items():
        assert float(row["step ms"]) > 0 and float(row["per 1e6 samples"]) > 0
        assert (float(row["between MiB"]) > 0) == between, name
    assert table["fsdp8"]["parameters"] == "0.2" and table["data8"]["parameters"] == "2.0"
