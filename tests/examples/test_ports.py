"""The ports train as plain loops of the same recipes do, and reach what their docstrings promise."""

import ast
import os
import pathlib
import subprocess
import sys

import compilations
import pytest

TOP = pathlib.Path(__file__).resolve().parents[2]
PORTS = TOP / "examples" / "ports"
# What is printed before the result, and the result that the docstring promises.
PROMISED = {
    "resnet": ("accuracy ", 0.95),
    "nanogpt": ("held-out text: ", -3.4),
    "ddpm": ("held-out error ", -0.13),
    "clip": ("right captions ", 0.95),
    "dqn": ("it stands for ", 100),
}


def output(*command):
    """Run a script in its own process, and return its output."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **compilations.JOBS},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_port_has_a_loop_and_a_promise():
    assert {path.stem for path in PORTS.glob("*.py")} == PROMISED.keys()


@pytest.mark.parametrize("name", PROMISED)
def test_docstring_opens_with_the_command_line_and_states_a_result(name):
    text = ast.get_docstring(ast.parse((PORTS / f"{name}.py").read_text()))
    assert text is not None and text.startswith(f"python examples/ports/{name}.py --workdir ")
    assert f"{abs(PROMISED[name][1]):.2f}".rstrip("0").rstrip(".") in text


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", PROMISED)
def test_fifty_losses_are_those_of_the_loop(name):
    text = output(TOP / "benchmarks" / "ports.py", "--check=losses", f"--only={name}")
    *_, line = text.strip().splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[0] == name
    assert float(cells[4]) < 1e-5, text


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", PROMISED)
def test_a_whole_run_reaches_what_its_docstring_promises(name, tmp_path):
    quiet = ["--set=reporting.tensorboard=false", "--set=reporting.progress=false"]
    text = output(PORTS / f"{name}.py", f"--workdir={tmp_path / 'run'}", *quiet)
    before, promised = PROMISED[name]
    found = float(text.split(before)[1].split()[0].rstrip(","))
    assert found >= promised if promised > 0 else found <= -promised, text
