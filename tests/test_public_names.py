"""The promised names: documented, loaded late, seen by editors, and enough for every example."""

import ast
import dataclasses
import importlib
import inspect
import pathlib
import subprocess
import sys
import textwrap
import types

import pytest

import jaxgoodput

ROOT = pathlib.Path(__file__).parents[1]
# A room that examples import by itself, and what it promises.
ROOMS = {f"jaxgoodput.{room}" for room in ("embedding", "cluster.scheduler", "cluster.simulate")}

# All of them loaded here: inside a test, the environment that some of the dependencies set would count.
VALUES = {name: getattr(jaxgoodput, name) for name in jaxgoodput.__all__}


def in_stub(package: types.ModuleType) -> dict[str, str]:
    """The stub's names, each with the module that it comes from, or is."""
    found, other = {}, {}
    for node in ast.parse(pathlib.Path(f"{package.__file__}i").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            (alias,) = node.names
            full = f"{node.module}.{alias.name}"
            (found if alias.asname == alias.name else other)[alias.asname or alias.name] = full
        elif isinstance(node, ast.Assign):
            (target,) = node.targets
            found[ast.unparse(target)] = other[ast.unparse(node.value)]
    return found


def one_line(name: str) -> str:
    """What the package's docstring says of a name."""
    lines = (jaxgoodput.__doc__ or "").splitlines()
    return next(
        (x[2:].removeprefix(name).strip() for x in lines if x[2:].split()[:1] == [name]), ""
    )


def test_editors_see_the_same_names_from_the_same_places():
    found = {}
    for name, value in VALUES.items():
        is_module = isinstance(value, types.ModuleType)
        found[name] = value.__name__ if is_module else f"{value.__module__}.{value.__name__}"
    assert in_stub(jaxgoodput) == found
    assert VALUES.keys() <= set(dir(jaxgoodput))


@pytest.mark.parametrize("name", VALUES)
def test_the_package_says_of_a_name_what_the_name_says_of_itself(name):
    first = (inspect.getdoc(VALUES[name]) or "").partition("\n")[0]
    line = one_line(name)
    assert line and (first.startswith(line) or name in ("scheduler", "simulate")), (
        f"{name} begins with {first!r}; the docstring of the package says {line!r}, which must be the "
        "beginning of it"
    )


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Trainor'"):
        getattr(jaxgoodput, "Trainor")  # noqa: B009  # pyright: ignore


@pytest.mark.parametrize(
    "statement",
    [
        "import jaxgoodput",
        "from jaxgoodput.cli import main; main(['--help'])",
        "from jaxgoodput.cli import main; main(['run', '--help'])",
    ],
)
def test_neither_the_package_nor_its_help_waits_for_jax(statement):
    program = f"""
        import sys
        try:
            {statement}
        except SystemExit:
            pass
        slow = {{"jax", "numpy", "scipy", "flax", "optax", "rich", "matplotlib", "tensorboardX"}}
        print(sorted(slow & sys.modules.keys()))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"


def field_docs(cls: type) -> set[str]:
    """The fields of a class that have a line of documentation under them."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    return {
        ast.unparse(field.target)
        for field, below in zip(node.body, node.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def test_every_field_of_a_promised_dataclass_is_documented():
    guilty = {}
    for name, value in VALUES.items():
        if isinstance(value, type) and dataclasses.is_dataclass(value):
            missing = {f.name for f in dataclasses.fields(value) if not f.name.startswith("_")}
            missing -= field_docs(value)
            if missing:
                guilty[name] = missing
    assert not guilty


def used(source: str) -> tuple[set[str], set[str]]:
    """(modules of the package that a program imports, names that it takes from `jg`)."""
    modules, names = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {a.name for a in node.names if a.name.split(".")[0] == "jaxgoodput"}
            assert all(a.asname == "jg" for a in node.names if a.name == "jaxgoodput")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jaxgoodput":
            modules.add(node.module or "")
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "jg":
            names.add(node.attr)
    return modules, names


def python_blocks(page: str) -> list[str]:
    return [part.partition("```")[0] for part in page.split("```python\n")[1:]]


PROGRAMS = {path.name: path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))} | {
    f"{path.relative_to(ROOT)}, block {i}": block
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
    for i, block in enumerate(python_blocks(path.read_text()))
    if "jg." in block
}


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_examples_use_promised_names_only(program):
    modules, names = used(PROGRAMS[program])
    assert names <= {*VALUES, "__version__"}
    assert modules <= ROOMS | {"jaxgoodput"}


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_promises_exactly_its_names_and_each_says_what_it_is(room):
    module = importlib.import_module(room)
    if hasattr(module, "__getattr__"):  # its names are loaded late; the stub names them for editors
        public = set(in_stub(module))
    else:
        public = {name for name, value in vars(module).items() if not inspect.ismodule(value)}
    assert {name for name in public if not name.startswith("_")} == set(module.__all__)
    for name in module.__all__:
        assert (inspect.getdoc(getattr(module, name)) or "").strip(), f"{name} has no docstring"


@pytest.mark.slow
@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_promises_the_same_whatever_was_imported_before(room):
    """A function may have the name of its module, which an import of the module must not put in its place."""
    program = f"""
    import importlib, pkgutil, types
    package = importlib.import_module({room!r})
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{room}." + found.name)
    wrong = [n for n in package.__all__ if isinstance(getattr(package, n), types.ModuleType)]
    assert not wrong, wrong
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
