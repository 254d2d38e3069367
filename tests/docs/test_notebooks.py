"""Examples as notebooks: all of the script is there once, nothing reads a command line, and they run."""

import ast
import importlib
import importlib.util
import json
import os
import re

import notebooks
import pages
import pytest

EXAMPLES = pages.TOP / "examples"


def code_of(name):
    """Its cells of Python, without those that IPython takes for something else."""
    cells = [c["source"] for c in notebooks.notebook(name)["cells"] if c["cell_type"] == "code"]
    return [cell for cell in cells if not cell.startswith(("%", "!"))]


def defined(tree):
    """Names of what a module defines at its top."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.Assign)
    return [ast.unparse(node).partition("\n")[0] for node in tree.body if isinstance(node, kinds)]


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_notebook_has_all_of_its_script_and_no_command_line(name):
    script = ast.parse((EXAMPLES / f"{name}.py").read_text())
    cells = [ast.parse(cell) for cell in code_of(name)]  # each is whole
    found = [one for cell in cells for one in defined(cell)]
    for one in defined(script):
        assert found.count(one) == (0 if one.startswith("def main(") else 1), one
    together = "\n".join(code_of(name))
    assert not re.search(r"\bflags\b|\babsl\b|\bargv\b|__main__", together)
    variables, main = code_of(name)[-2:]
    assert f"WORKDIR = {f'/tmp/{name}'!r}" in variables and "SET = []" in variables
    assert ".fit()" in main and "print(" in main
    assert sum(isinstance(node, ast.ClassDef) for cell in cells for node in cell.body) >= 1
    assert all(
        len(cell.body) == 1 for cell in cells if any(isinstance(n, ast.ClassDef) for n in cell.body)
    )


def test_a_notebook_brings_the_modules_of_its_own():
    assert notebooks.beside("quickstart") == []
    assert notebooks.beside("lora") == ["corpora", "tokens", "small_gpt"]
    cells = [c["source"] for c in notebooks.notebook("recommender")["cells"]]
    (written,) = [cell for cell in cells if cell.startswith("%%writefile")]
    first, _, source = written.partition("\n")
    assert first == "%%writefile corpora.py"
    assert source == (EXAMPLES / "corpora.py").read_text().rstrip("\n")


def test_the_command_makes_them_anew_and_always_the_same(tmp_path, capsys):
    notebooks.main([str(tmp_path), "quickstart", "lora"])
    before = [(tmp_path / f"{name}.ipynb").read_bytes() for name in ("quickstart", "lora")]
    notebooks.main([str(tmp_path), "quickstart", "lora"])
    assert before == [(tmp_path / f"{name}.ipynb").read_bytes() for name in ("quickstart", "lora")]
    assert len(list(tmp_path.iterdir())) == 2
    assert json.loads(before[1])["cells"][0]["source"].startswith("# lora\n\nFine-tunes the model")
    with pytest.raises(SystemExit):
        notebooks.main([str(tmp_path), "no_such"])
    assert "no example 'no_such'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("nbformat", "nbclient", "ipykernel"))),
    reason="nbclient and ipykernel are not installed (the extra `docs`)",
)
@pytest.mark.filterwarnings("ignore")  # of the kernel's libraries
def test_a_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    nbclient, nbformat = map(importlib.import_module, ("nbclient", "nbformat"))
    book = nbformat.from_dict(notebooks.notebook("quickstart"))
    nbformat.validate(book)
    (given,) = [cell for cell in book.cells if "WORKDIR =" in cell.source]
    given.source = given.source.replace("/tmp/quickstart", str(tmp_path / "run"))
    given.source = given.source.replace("SET = []", "SET = ['base_steps=60', 'batch.max=64']")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    paths = [str(pages.TOP), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=400, kernel_name="python3", resources=resources).execute()
    said = [
        "".join(out.get("text", "") for out in cell.outputs)
        for cell in book.cells
        if cell.cell_type == "code"
    ]
    assert re.search(r"test accuracy 0\.\d+, expected", said[-2])
    assert "Where the time went" in said[-1] and "outcome   done" in said[-1]
