"""The tables of README and docs are those of docs/measured/, and each of its files can be drawn."""

import importlib.util
import pathlib

import pytest

TOP = pathlib.Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("tables_of_docs", TOP / "docs" / "tables.py")
assert SPEC is not None and SPEC.loader is not None
tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tables)


@pytest.mark.parametrize("page", tables.pages(), ids=lambda p: str(p.relative_to(TOP)))
def test_a_page_shows_what_was_measured(page):
    text = page.read_text()
    assert tables.redrawn(text) == text, "run `python docs/tables.py`"


@pytest.mark.parametrize("path", sorted(tables.MEASURED.glob("*.json")), ids=lambda p: p.stem)
def test_every_result_says_what_it_is_and_fits_its_columns(path):
    found = tables.load(path.stem)
    assert found["title"] and found["command"] and found["machine"] and found["revision"]
    for table in found["tables"]:
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}, table["name"]
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
