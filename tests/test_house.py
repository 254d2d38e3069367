"""What the code looks like from outside stays within the limits that CONTRIBUTING.md names."""

import importlib.util
import pathlib
from types import ModuleType

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", ROOT / "benchmarks" / "house.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_package_stays_within_its_limits(house: ModuleType) -> None:
    found = house.count(ROOT / "jaxgoodput")
    exceeded = {what: found.places[what] for what in house.exceeded(found)}
    assert not exceeded


def test_what_exceeds_a_limit_is_named(
    house: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "jaxgoodput"
    package.mkdir()
    body = "\n".join(f"    x{i} = {i}" for i in range(90))
    (package / "bad.py").write_text(
        '"""Where nobody looks."""\n'
        "class Given:\n"
        + "\n".join(f"    def f{i}(self): self.a{i} = {i}" for i in range(21))
        + f"\ndef long():\n{body}\n"
        "def asks(world):\n    return world is None\n"
    )
    (package / "again.py").write_text('"""If it is."""\nclass Given:\n    pass\n')
    monkeypatch.setattr(house, "ROOT", package)
    named = house.exceeded(house.count(package))
    assert set(named) == {
        "where",
        "nobody",
        "classes too large",
        "long",
        "names of several classes",
        "participles",
    }
