"""The tables of README and docs are those of docs/measured/, and each of its files can be drawn."""

import importlib.util
import json
import pathlib
import sys

import pytest

TOP = pathlib.Path(__file__).parents[2]


def script(path: str):
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{pathlib.Path(path).stem}", TOP / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = script("docs/tables.py")
record = script("benchmarks/record.py")


@pytest.mark.parametrize("page", tables.pages(), ids=lambda p: str(p.relative_to(TOP)))
def test_a_page_shows_what_was_measured(page):
    text = page.read_text()
    assert tables.redrawn(text) == text, "run `python docs/tables.py`"


@pytest.mark.parametrize("path", sorted(tables.MEASURED.glob("*.json")), ids=lambda p: p.stem)
def test_every_result_says_what_it_is_and_fits_its_columns(path):
    found = tables.load(path.stem)
    assert found["title"] and found["command"] and found["machine"] and found["revision"]
    for table in found["tables"]:
        if "text" not in table:
            assert {len(row) for row in table["rows"]} == {len(table["columns"])}
    assert tables.whole(path.stem).startswith(f"## {found['title']}")


def test_a_block_is_replaced_and_the_text_around_it_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MEASURED", tmp_path)
    (tmp_path / "fit.json").write_text(
        '{"title": "T", "command": "c", "machine": "m", "revision": "r", "notes": ["n"], "tables": '
        '[{"name": "one", "title": "", "columns": ["a|b"], "rows": [["1"]]}]}'
    )
    page = "before\n<!-- measured: fit/one -->\nold\n<!-- /measured -->\nafter\n"
    assert tables.redrawn(page) == (
        "before\n<!-- measured: fit/one -->\n| a\\|b |\n| --- |\n| 1 |\n<!-- /measured -->\nafter\n"
    )
    both = page + "<!-- measured: * -->\n<!-- /measured -->\n"
    assert "## T" not in tables.redrawn(both)  # the page names that file already


def test_what_a_benchmark_prints_becomes_tables_and_texts():
    printed = [
        "hello",
        "",
        "times:",
        "| a | b |",
        "|---|---|",
        "| 1 | 2 |",
        "| 3 | 4 |",
        "",
        "bye",
        " x",
    ]
    assert record.parsed(printed) == [
        {"name": "1", "title": "", "text": ["hello"]},
        {"name": "2", "title": "times", "columns": ["a", "b"], "rows": [["1", "2"], ["3", "4"]]},
        {"name": "3", "title": "", "text": ["bye", " x"]},
    ]


def test_a_benchmark_that_fails_leaves_the_record(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "MEASURED", tmp_path)
    monkeypatch.setattr(record, "HERE", tmp_path)
    (tmp_path / "fails.py").write_text("print('| a |')\nraise SystemExit(3)\n")
    monkeypatch.setattr(sys, "argv", ["record.py", "fails"])
    assert record.main() == 3
    assert not list(tmp_path.glob("*.json"))


def test_what_was_printed_elsewhere_is_kept_with_its_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "MEASURED", tmp_path)
    (tmp_path / "printed.txt").write_text("| a |\n|---|\n| 1 |\n")
    elsewhere = [
        "--printed",
        str(tmp_path / "printed.txt"),
        "--on",
        "a GPU",
        "--revision",
        "1234567",
    ]
    monkeypatch.setattr(
        sys, "argv", ["record.py", "fit", "--as", "gpu", *elsewhere, "--rounds", "7"]
    )
    assert record.main() == 0
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert kept["machine"] == "a GPU" and kept["revision"] == "1234567"
    assert kept["command"].endswith("fit.py --rounds 7")
    assert kept["tables"][0]["rows"] == [["1"]]
    monkeypatch.setattr(sys, "argv", ["record.py", "fit", *elsewhere[:2]])
    with pytest.raises(SystemExit):
        record.main()
