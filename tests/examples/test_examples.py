"""Every example opens with its command line, and running it does what its docstring says."""

import ast
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
TRAINERS = ("quickstart", "language_model", "recommender")


def run(name, workdir, *settings):
    """The example's printed result, from a process of its own."""
    command = [sys.executable, EXAMPLES / f"{name}.py", "--workdir", workdir]
    command += [f"--set={s}" for s in ("tensorboard=false", "progress=false", *settings)]
    done = subprocess.run(
        command,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed(text, before):
    return float(text.split(before)[1].split()[0].rstrip(","))


@pytest.fixture
def corpora(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import corpora

    return corpora


@pytest.mark.parametrize("name", TRAINERS)
def test_docstring_opens_with_the_command_line_and_states_a_result(name):
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
    assert text is not None
    assert text.startswith(f"python examples/{name}.py --workdir ")
    assert "Expect" in text


@pytest.mark.slow
def test_quickstart_reaches_its_accuracy(tmp_path):
    assert printed(run("quickstart", tmp_path / "run"), "accuracy ") >= 0.98


@pytest.mark.slow
def test_language_model_beats_single_bytes_after_few_steps(tmp_path):
    text = run("language_model", tmp_path / "run", "base_steps=120")
    assert printed(text, "files: ") < 4.0


@pytest.mark.slow
def test_recommender_beats_popularity_after_few_steps(tmp_path):
    text = run("recommender", tmp_path / "run", "base_steps=400")
    assert printed(text, "AUC ") > 0.69


@pytest.mark.slow
def test_an_override_of_no_setting_is_named(tmp_path):
    command = [sys.executable, EXAMPLES / "quickstart.py", "--workdir", tmp_path / "run"]
    done = subprocess.run(
        [*command, "--set=batch.most=64"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0
    assert "there is no setting 'batch.most'" in done.stderr


def test_held_out_windows_are_of_files_that_training_never_sees(corpora):
    train, test = corpora.byte_windows(64)
    assert train.dtype == test.dtype == np.uint8
    assert train.shape[1] == test.shape[1] == 65 and len(test) <= 1024
    # Every window's last byte is the next one's first: they tile the text.
    assert np.array_equal(train[:-1, -1], train[1:, 0])
    assert len(train) * 64 > 10 * len(test) * 64


def test_negatives_never_coincide_with_a_use(corpora, tmp_path):
    source = b"class A:\n def f(self):\n  a.b(c.d, e)\n def g(self):\n  a.b(c.d, h)\n"
    source += b"def k(x):\n return a + b + c + d + x\n"
    files = []
    for i in range(30):
        path = tmp_path / f"m{i}.py"
        path.write_bytes(source.replace(b"h)", b"h%d)" % (i % 7)))
        files.append((path.name, path))
    uses, functions = corpora._parse(files)
    assert len(functions) == 90  # f, g and k of every file
    data = corpora._split(uses, functions)
    used = set(map(tuple, uses.tolist()))
    seen = []
    for part in (data.train, data.test):
        pairs = list(zip(part["function"].tolist(), part["item"].tolist(), strict=True))
        assert all(
            (pair in used) == bool(label) for pair, label in zip(pairs, part["label"], strict=True)
        )
        seen += [pair for pair, label in zip(pairs, part["label"], strict=True) if label]
    assert sorted(seen) == sorted(used)  # each use is in exactly one part


def test_auc_is_the_chance_that_a_use_scores_higher(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import recommender

    rng = np.random.default_rng(0)
    score, label = rng.normal(size=200), rng.integers(0, 2, 200)
    higher = score[label == 1][:, None] > score[label == 0][None]
    assert recommender.auc(score, label) == pytest.approx(higher.mean())
