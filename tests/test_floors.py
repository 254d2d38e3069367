"""Imports run one way: down the floors between rooms, and down the files within a room; no circles."""

import ast
import pathlib

import pytest

import jaxgoodput

ROOT = pathlib.Path(jaxgoodput.__file__).parent
FLOORS = (
    {
        "_disk",
        "_exits",
        "_hash",
        "_lazy",
        "_pytree",
        "_seldom",
        "_fields",
        "_wire",
        "_worker",
        "text",
        "clock",
    },
    {"goodput", "workdir", "_jax", "_commands"},  # private JAX calls; waits on the clock
    {"optim", "data", "parallel", "embedding", "specs"},
    {"engine", "tune", "cluster.client"},  # tune knows numbers only; engine knows arrays only
    {"observe", "models", "cluster.scheduler"},
    {"train", "cluster.published"},  # train and the scheduler meet in specs
    {"launcher", "cluster.catalogue"},
    {"cluster.service"},
    {"cli", "cluster.simulate"},  # the simulator reads what the service has recorded
    {"__main__"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
TOPS = (ROOT / "__init__.py", ROOT / "cluster" / "__init__.py")
FILES = sorted(p for p in ROOT.rglob("*.py") if p not in TOPS)
NAMES = {str(p.relative_to(ROOT).with_suffix("")).replace("/", "."): p for p in FILES}
MOST_FILES = 15  # in a folder, beside `__init__.py`


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imported(path: pathlib.Path) -> set[str]:
    """Modules of the package that a file imports, inside functions too, as "room.file"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if not name.startswith("jaxgoodput."):
                continue
            inner = name.removeprefix("jaxgoodput.")
            while inner and inner not in NAMES:
                inner = inner.rpartition(".")[0]
            if inner:
                found.add(inner)
    return found


def room_of(name: str) -> str:
    """The first part of a module's name; inside the cluster, the first two."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] == "cluster" else 1])


@pytest.mark.parametrize("name", sorted(NAMES))
def test_imports_run_down(name):
    room = room_of(name)
    assert room in FLOOR_OF, f"{room} has no floor: add it to FLOORS, or move it"
    upward = {
        other
        for other in imported(NAMES[name])
        if room_of(other) != room and FLOOR_OF[room_of(other)] >= FLOOR_OF[room]
    }
    assert not upward, (
        f"{name} (floor {FLOOR_OF[room]}) imports {sorted(upward)}: imports run down, never sideways or up"
    )


def test_only_the_cluster_imports_the_cluster():
    guilty = {
        name: found
        for name, path in NAMES.items()
        if not name.startswith("cluster.")
        and (found := {other for other in imported(path) if other.startswith("cluster")})
    }
    assert not guilty, f"{guilty}: a job must not need the cluster's code"


def test_no_file_imports_for_types_only():
    guilty = [
        name
        for name, path in NAMES.items()
        if any(map(is_for_types_only, ast.walk(ast.parse(path.read_text()))))
    ]
    assert not guilty, f"{guilty} import under TYPE_CHECKING, which hides a circle: turn it around"


def test_no_circles():
    graph = {name: imported(path) - {name} for name, path in NAMES.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' -> '.join([*path[path.index(name) :], name])}"
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_no_file_imports_another_files_private_names():
    guilty = []
    for name, path in NAMES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxgoodput."):
                private = [a.name for a in node.names if a.name.startswith("_")]
                guilty += [f"{name}: {node.module}.{p}" for p in private]
    assert not guilty


def test_a_folder_is_small_enough_to_hold_in_the_head():
    folders = {p.parent for p in FILES}
    sizes = {
        str(f.relative_to(ROOT)): len([p for p in f.glob("*.py") if p.name != "__init__.py"])
        for f in folders
    }
    assert {f: n for f, n in sizes.items() if n > MOST_FILES} == {}
