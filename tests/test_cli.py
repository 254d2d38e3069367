"""The command line itself: what it says of its version, and completions that a shell takes."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from jaxgoodput import __version__, cli

TOP = Path(__file__).parents[1]


def test_the_version_names_what_a_report_of_a_defect_needs(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and said.startswith(f"jaxgoodput {__version__} (jax ")
    for name in ("jax", "jaxlib", "flax", "optax"):
        assert f"{name} {importlib.metadata.version(name)}" in said


def test_a_shell_completes_commands_and_options(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--print-completion", "bash"])
    script = capsys.readouterr().out
    ask = "COMP_WORDS=({}); COMP_CWORD={}; _shtab_jaxgoodput; echo ${{COMPREPLY[@]}}"
    asked = [("jaxgoodput sub", 1, "submit"), ("jaxgoodput submit --nam", 2, "--name")]
    for words, at, expected in asked:
        command = ["bash", "-c", f"{script}\n{ask.format(words, at)}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [expected]


def test_what_is_said_of_the_version_elsewhere_is_the_same():
    citation = yaml.safe_load((TOP / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    assert citation["license"] == project["license"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["run", "--nproc-per-node", "2", "python", "x.py", "--lr", "3"],
            "jaxgoodput run: error: .* put -- before the command: jaxgoodput run ... -- python x.py --lr 3",
        ),
        (["report", "--jsn", "/tmp"], "usage: jaxgoodput report WORKDIR.*did you mean --json"),
        (
            ["plan", "x.py", "--devices", "8", "--lr", "3"],
            "options of your own program go after --: .* --lr",
        ),
        (
            ["simulate", "goodput"],
            "unrecognized arguments: goodput; jaxgoodput simulate --help lists",
        ),
        (["reprot", "/tmp"], "there is no command 'reprot'; did you mean report"),
        (["banana"], "there is no command 'banana'; There are run, "),
    ],
)
def test_a_command_line_that_is_not_understood_says_what_was_meant(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert re.search(said, capsys.readouterr().err, re.DOTALL)


def test_a_reader_that_has_gone_ends_a_command_quietly():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "jaxgoodput", "simulate", "--list"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_without_entry_points_the_command_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", "/tmp"])
    assert ended.value.code == 2 and "pip install -e ." in capsys.readouterr().err
