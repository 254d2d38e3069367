"""Where the public traces are, for tests that compare with what was published on them."""

import pathlib

import pytest

DATA = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data():
    """The folder of the public traces, or a skip that says so."""
    if not DATA.is_dir():
        pytest.skip("the public traces (../shared/data) are not beside this checkout")
    return DATA
