"""Every example opens with its command line, and running it gives the result that its docstring states."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys

import compilations
import jax
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
TRAINERS = ("quickstart", "language_model", "recommender")
WITH_DOCSTRINGS = (
    *TRAINERS,
    "tiered_recsys",
    "image_classifier",
    "small_gpt",
    "lora",
    "early_stopping",
    "gan",
    "ppo",
)


def run(name, workdir, *settings):
    """Run an example in its own process, and return its printed result."""
    changes = [
        f"--set={s}" for s in ("reporting.tensorboard=false", "reporting.progress=false", *settings)
    ]
    return output(f"{name}.py", "--workdir", workdir, *changes)


def output(*command):
    """Run an example with these arguments in its own process, and return its output."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / command[0], *command[1:]],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **compilations.JOBS},
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


@pytest.mark.parametrize("name", WITH_DOCSTRINGS)
def test_docstring_opens_with_the_command_line_and_states_a_result(name):
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
    assert text is not None
    assert text.startswith(f"python examples/{name}.py --workdir ")
    assert "Expect" in text


@pytest.mark.slow
def test_quickstart_reaches_its_accuracy(tmp_path):
    assert printed(run("quickstart", tmp_path / "run"), "accuracy ") >= 0.97


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_ends_when_nothing_becomes_better(tmp_path):
    text = run("early_stopping", tmp_path / "run")
    found = re.search(r"ended at step (\d+); step (\d+) was the best", text)
    assert found is not None, text
    ended, best = map(int, found.groups())
    assert best < ended < 20_000 and printed(text, "test accuracy ") >= 0.95


@pytest.mark.slow
@pytest.mark.nightly
def test_two_networks_in_turns_find_most_of_the_data(tmp_path):
    text = output("gan.py", "--workdir", tmp_path / "run")
    found = re.search(r"(\d) of 8 Gaussians; ([0-9.]+) of the points", text)
    assert found is not None and int(found[1]) >= 6 and float(found[2]) > 0.5, text


@pytest.mark.slow
@pytest.mark.nightly
def test_a_player_learns_from_what_evaluations_play(tmp_path):
    text = output("ppo.py", "--workdir", tmp_path / "run")
    assert printed(text, "it stands for ") > 200


@pytest.mark.slow
@pytest.mark.nightly
def test_a_search_ends_trials_that_are_behind(tmp_path):
    text = output("sweep.py", "--workdir", tmp_path / "run", "--trials=7")
    assert printed(text, "7 trials, ") >= 1
    assert printed(text, "accuracy ") > 0.9


@pytest.mark.slow
@pytest.mark.nightly
def test_language_model_beats_single_bytes_after_few_steps(tmp_path):
    text = run(
        "language_model", tmp_path / "run", "base_steps=60", "evaluation.every_base_steps=10"
    )
    assert "base steps: " in text  # what it writes
    assert printed(text, "files: ") < 4.0


@pytest.mark.slow
@pytest.mark.nightly
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


def run_hot_switch(*settings):
    """Run hot_switch.py in its own process with eight virtual devices, and return its output."""
    return output("hot_switch.py", *settings)


def test_hot_switch_opens_with_its_command_lines_and_states_results():
    text = ast.get_docstring(ast.parse((EXAMPLES / "hot_switch.py").read_text()))
    assert text is not None
    assert text.startswith("python examples/hot_switch.py\n")
    assert "python examples/hot_switch.py --larger\n" in text
    assert text.count("Expect") == 2


@pytest.mark.slow
@pytest.mark.nightly
def test_hot_switch_computes_the_same_updates_in_four_ways():
    small = ["--documents=8", "--updates=2", "--longest=64", "--dim=32"]
    text = run_hot_switch(*small, "--num_groups=2")
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("row "))
    rows = [line[:26].strip() for line in lines[start + 1 : start + 5]]
    assert rows == ["single, padded", "single, grouped", "mixed", "mixed, without switching"]
    assert "data4.stage2" in text
    assert printed(text, "at most ") <= 1e-5
    assert printed(text, "between rows; ") == 0  # compilations


@pytest.mark.slow
@pytest.mark.nightly
def test_hot_switch_trains_what_one_device_cannot_hold():
    text = run_hot_switch("--larger", "--memory_mib=24", "--steps=12")
    need = {
        name: text.split(f"{name}: a step needs ")[1].splitlines()[0] for name in ("data8", "fsdp8")
    }
    assert need["data8"].endswith("does not fit") and need["fsdp8"].endswith(": fits")
    assert printed(text, "moments: ") > 24
    losses = [float(line.split()[1]) for line in text.split("seconds\n")[1].splitlines()]
    assert len(losses) == 12 and np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.5


def test_padding_behind_a_document_changes_nothing(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import byte_model

    from jaxgoodput.data.lengths import padded

    model = byte_model.ByteModel(dim=16, num_layers=1, longest=24)
    params = model.init(jax.random.key(0))
    documents = [np.arange(1, n, dtype=np.uint8) for n in (5, 9)]

    def losses(length):
        rows = padded(documents, length=length, num_rows=3)
        batch = {"codes": rows.tokens + np.uint8(7), "num_bytes": rows.num_tokens}
        return jax.jit(model.loss)(params, (), batch, jax.random.key(0))[0]

    short, long = losses(8), losses(24)
    np.testing.assert_allclose(short.sum, long.sum, rtol=1e-5)
    assert short.weight.tolist() == long.weight.tolist() == [4, 8, 0]
    assert short.sum[2] == 0 and np.all(np.asarray(short.sum[:2]) > 0)


@pytest.mark.slow
def test_functions_are_whole_unless_cut_off_and_of_very_different_lengths(corpora):
    documents = corpora.functions(300, longest=2048)
    sizes = np.array([len(document) for document in documents])
    assert len(documents) == 300 and sizes.max() <= 2048
    assert np.percentile(sizes, 95) > 8 * np.percentile(sizes, 25)
    whole = [bytes(d) for d in documents if len(d) < 2048]
    for text in whole:
        ast.parse(b"if True:\n" + text if text[:1].isspace() else text)
    again = corpora.functions(300, longest=2048)
    assert all(np.array_equal(a, b) for a, b in zip(documents, again, strict=True))
    short = corpora.functions(300, longest=100)
    assert [bytes(d[:100]) for d in documents] == [bytes(d) for d in short]


@pytest.mark.slow
@pytest.mark.nightly
def test_the_tiered_recommender_that_is_called_again_goes_on_as_if_it_had_not_stopped(tmp_path):
    def call(name, base_steps):
        sets = ["reporting.tensorboard=false", "reporting.progress=false", 'policy="fixed"']
        # Steps that measure differ from others in rounding, so the clock must not decide which ones do.
        sets += ["statistics.every_steps=4", "execution.background_compile=false"]
        settings = [f"--set={s}" for s in (*sets, f"base_steps={base_steps}")]
        shares = ["--device_share=0.08", "--ram_share=0.08"]
        text = output("tiered_recsys.py", f"--workdir={tmp_path / name}", *shares, *settings)
        records = map(json.loads, (tmp_path / name / "goodput.jsonl").read_text().splitlines())
        *_, auc = (x["metrics"]["auc"] for x in records if x["event"] == "EvalEnd")
        assert printed(text, "test AUC ") == round(auc, 4)
        return auc

    whole = call("whole", 160)
    call("twice", 100)
    assert call("twice", 160) == whole > 0.55


@pytest.mark.slow
@pytest.mark.nightly
def test_the_image_classifier_learns_in_few_epochs(tmp_path):
    text = run("image_classifier", tmp_path / "run", "epochs=6")
    assert printed(text, "accuracy ") > 0.9


@pytest.mark.slow
@pytest.mark.nightly
def test_the_gpt_learns_and_lora_goes_on_from_its_checkpoint(tmp_path):
    text = run("small_gpt", tmp_path / "gpt", "base_steps=100", "evaluation.every_base_steps=50")
    assert "    def __init__(" in text  # what it writes
    assert printed(text, "files: ") < 4.0
    quiet = ("--set=reporting.tensorboard=false", "--set=reporting.progress=false")
    own = ("--workdir", tmp_path / "lora", "--checkpoint", tmp_path / "gpt", "--set=base_steps=60")
    text = output("lora.py", *own, *quiet)
    assert "kept every bit: True" in text
    assert printed(text, "files: ") < 0.9 * printed(text, "before: ")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.multihost
def test_two_hosts_on_one_machine_train_together(tmp_path):
    script = [sys.executable, EXAMPLES / "two_hosts.py", "--workdir", tmp_path / "run"]
    hosts = ["--nnodes", "2", "--local-hosts", "2"]
    quiet = ["--set=reporting.tensorboard=false", "--set=base_steps=200"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxgoodput", "run", *hosts, "--", *script, *quiet],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **compilations.JOBS},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout
    assert printed(done.stdout, "accuracy ") > 0.9
