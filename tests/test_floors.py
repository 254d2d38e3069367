"""Imports run one way: a room imports its own floor's own room and the floors below, nothing else."""

import ast
import pathlib

import pytest

import jaxgoodput

ROOT = pathlib.Path(jaxgoodput.__file__).parent
FLOORS = (
    {"_struct", "clock"},
    {"_jax"},  # private JAX calls; waits on the clock
    {"goodput"},
    {"optim", "data", "parallel", "embedding", "specs", "client"},
    {"train", "scheduler"},
    {"launcher"},
    {"cli"},
    {"__main__"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(p for p in ROOT.rglob("*.py") if p.name != "__init__.py" or p.parent != ROOT)


def imported_rooms(path: pathlib.Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("jaxgoodput.")}
    return rooms


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_down(path):
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert room in FLOOR_OF, f"{room} has no floor: add it to FLOORS, or move it"
    for other in imported_rooms(path) - {room}:
        assert FLOOR_OF[other] < FLOOR_OF[room], (
            f"{path.relative_to(ROOT)} (floor {FLOOR_OF[room]}) imports jaxgoodput.{other} "
            f"(floor {FLOOR_OF[other]}): imports run down, never sideways or up"
        )


def test_every_room_is_on_a_floor():
    rooms = {p.relative_to(ROOT).parts[0].removesuffix(".py") for p in FILES}
    assert rooms <= set(FLOOR_OF)
