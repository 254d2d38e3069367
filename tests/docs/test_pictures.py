"""The simulator's outputs and its picture in docs/ are those that today's code makes."""

import importlib.util
import pathlib

import numpy as np
import pytest

TOP = pathlib.Path(__file__).parents[2]


def _script():
    spec = importlib.util.spec_from_file_location(
        "simulated", TOP / "docs" / "pictures" / "simulated.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


simulated = _script()


def different(a: np.ndarray, b: np.ndarray) -> float:
    """The share of the pixels that differ visibly."""
    return float(np.mean(np.abs(a[..., :3] - b[..., :3]).max(axis=-1) > 0.1))


@pytest.mark.slow
def test_the_page_shows_what_its_commands_print_and_draw_today(tmp_path):
    image = pytest.importorskip("matplotlib.image", reason="the picture needs the extra `plots`")
    text = simulated.PAGE.read_text()
    assert len(simulated.PRINTED.findall(text)) == 2
    remedy = "run `python docs/pictures/simulated.py`, and look at the picture"
    assert simulated.redrawn(text, tmp_path) == text, remedy
    old = image.imread(simulated.PICTURE)
    new = image.imread(tmp_path / "gantt-goodput.png")
    # Versions of matplotlib draw edges and letters differently, which is a few pixels in a hundred.
    assert old.shape == new.shape and different(old, new) < 0.04, remedy


def test_every_output_of_the_simulator_in_the_docs_is_drawn():
    """Such an output begins with the table's heading or with a question's first words."""
    for page in [TOP / "README.md", *sorted((TOP / "docs").rglob("*.md"))]:
        text = page.read_text()
        drawn = {block[2] for block in simulated.PRINTED.finditer(text)}
        assert not drawn or page == simulated.PAGE, f"{page}: only {simulated.PAGE} is drawn"
        for part in text.split("```text\n")[1:]:
            output = part.partition("```\n")[0]
            if "unfair" in output or " decided at " in output:
                assert output in drawn, f"{page}: no `<!-- printed -->` above\n{output}"


def test_times_of_decisions_are_left_out_and_answers_are_whole():
    table = "          average  decision  p95\npolicy      JCT h        ms   ms\n"
    table += "--------- -------- -------- ----\nsia         2.120       1.9  3.0\n"
    kept = "          average\npolicy      JCT h\n--------- --------\nsia         2.120\n"
    assert simulated.shown(f"a title\n\n{table}\nwrote a file\n") == kept
    assert simulated.shown("gets: 2\n\njob  now\n---  ---\n") == "gets: 2\n\njob  now\n---  ---\n"


@pytest.mark.parametrize("above", ["", "```sh\njaxgoodput status\n```\n"])
def test_an_output_without_its_command_is_refused(above, tmp_path):
    text = f"{above}<!-- printed -->\n```text\nx\n```\n"
    with pytest.raises(ValueError, match="put its command last into the shell block above"):
        simulated.redrawn(text, tmp_path)


def test_the_last_command_above_is_the_one():
    text = "```sh\njaxgoodput simulate --list\njaxgoodput simulate \\\n    --seed 1  # why\n```\n"
    assert simulated.command_above(text, len(text)) == ["jaxgoodput", "simulate", "--seed", "1"]
