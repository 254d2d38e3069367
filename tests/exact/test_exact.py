"""What users write trains as in a plain optax loop, however a batch is split: `exact_bench.py`."""

import itertools
import pathlib

import pytest
from exact_bench import outcome
from exact_columns import COLUMNS
from exact_known import OPEN, REFUSED, expected_refusal
from exact_rows import ROWS

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "exactness.md"
CELLS = list(itertools.product(ROWS, COLUMNS))
# A cell is a whole run, compiled for it: two to four seconds of CPU time. Each row runs in one column, the
# columns in turn. Every ninth of these is quick, every other sixth one slow, and the whole table is nightly.
SPANNING = [(row, list(COLUMNS)[at // 6 % len(COLUMNS)]) for at, row in enumerate(ROWS)]
QUICK = SPANNING[::9]
SLOW = [cell for cell in SPANNING[3::6] if cell not in QUICK]


def _cell(row: str, column: str):
    marks = [] if (row, column) in QUICK else [pytest.mark.slow]
    if (row, column) not in (*QUICK, *SLOW):
        marks.append(pytest.mark.nightly)
    if (row, column) in OPEN:
        marks.append(
            pytest.mark.xfail(reason=OPEN[row, column], strict=True, raises=AssertionError)
        )
    return pytest.param(row, column, id=f"{row}-{column}", marks=marks)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("row", "column"), [_cell(*cell) for cell in CELLS])
def test_a_row_trains_as_in_a_plain_loop_or_is_refused_by_a_sentence(tmp_path, row, column):
    found = outcome(ROWS[row], COLUMNS[column], tmp_path)
    message = expected_refusal(row, column)
    if message is None:
        assert found.kind == "equal", f"{found.difference:.1e} {found.what}"
    else:
        assert found.kind == "refused" and message in found.what, f"{found.kind}: {found.what}"


def test_few_cells_are_refused_and_the_docs_name_each_row():
    refused = [cell for cell in CELLS if expected_refusal(*cell) is not None]
    assert len(refused) <= 0.08 * len(CELLS)
    text = DOCS.read_text()
    assert not [row for row, _ in REFUSED if f"| {row} |" not in text]


def test_each_column_is_tried_in_every_run():
    assert set(QUICK).isdisjoint(SLOW)
    for cells, times in ((QUICK + SLOW, 2), (QUICK, 1)):
        counts = [sum(column == one for _, column in cells) for one in COLUMNS]
        assert min(counts) >= times
