"""python docs/notebooks.py OUT [NAME ...]

Makes notebooks of the examples that people start from, one of each script, into the folder OUT. The scripts
are what is written and tested; the site makes the notebooks of its own version.

A script's docstring is the text on top, each of its classes a cell, and `main` the last cell but one, where
what the command line gives are variables with the values of the docstring's command: nothing reads
`sys.argv`, which is Jupyter's. Modules that lie beside the script are written beside the notebook.
"""

import argparse
import ast
import json
import pathlib
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
NAMES = ("quickstart", "image_classifier", "small_gpt", "lora", "recommender")
NEEDS = "Needs `pip install -e '.[examples]'` in a checkout of jaxgoodput, and a kernel of that environment."
AGAIN = (
    "What the script's command line would give. Run again with the same `WORKDIR`, training goes on from its "
    "last checkpoint; another one starts anew."
)
REPORT = "!{sys.executable} -m jaxgoodput report {WORKDIR}"


def notebook(name: str) -> dict[str, Any]:
    """The notebook of an example, as JSON of format 4.5."""
    text = (EXAMPLES / f"{name}.py").read_text()
    tree = ast.parse(text)
    docstring = ast.get_docstring(tree) or ""
    command, _, story = docstring.partition("\n\n")
    cells = [_markdown(f"# {name}\n\n{story}\n\nMade from `examples/{name}.py`. {NEEDS}")]
    for module in beside(name):
        source = (EXAMPLES / f"{module}.py").read_text()
        cells.append(_code(f"%%writefile {module}.py\n{source}"))
    parts = list(_parts(text, tree))
    cells += [_code(source) for kind, source in parts if kind == "code"]
    (main,) = (source for kind, source in parts if kind == "main")
    cells += [_markdown(AGAIN), _code(_variables(tree, command)), _code(main)]
    cells += [_markdown("Where the time went, which batches were used, and why:"), _code(REPORT)]
    return {
        "cells": [{**cell, "id": f"cell-{number}"} for number, cell in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def beside(name: str) -> list[str]:
    """The modules of examples/ that a script imports, those first that others need."""
    found: list[str] = []
    for node in ast.parse((EXAMPLES / f"{name}.py").read_text()).body:
        for alias in node.names if isinstance(node, ast.Import) else ():
            if (EXAMPLES / f"{alias.name}.py").exists():
                found += [*beside(alias.name), alias.name]
    return list(dict.fromkeys(found))


def _parts(text: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """("code", a cell) of imports, every class and what is between them; ("main", the body of `main`)."""
    lines, done, between = text.splitlines(), tree.body[0].end_lineno or 0, []
    in_imports = True
    for node in tree.body[1:]:
        source = "\n".join(lines[done : node.end_lineno])  # with what is above it
        done = node.end_lineno or 0
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        if isinstance(node, ast.ImportFrom) and node.module == "absl":
            continue  # flags are of a command line
        if isinstance(node, ast.If):  # where flags are defined
            continue
        is_main = isinstance(node, ast.FunctionDef) and node.name == "main"
        if between and (is_main or isinstance(node, ast.ClassDef) or in_imports != is_import):
            yield "code", "\n".join(between)
            between = []
        in_imports = is_import
        if is_main:
            body = "\n".join(lines[node.body[0].lineno - 1 : node.end_lineno])
            yield "main", re.sub(r"flags\.FLAGS\.(\w+)", _variable, textwrap.dedent(body))
        elif isinstance(node, ast.ClassDef):
            yield "code", source
        else:
            between.append(source)
    if between:
        yield "code", "\n".join(between)


def _variables(tree: ast.Module, command: str) -> str:
    """What the command line gives, with the values of `command`."""
    words = shlex.split(command)
    given = {
        word[2:]: value for word, value in zip(words, words[1:], strict=False) if word[:2] == "--"
    }
    lines = ["import sys", ""]
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr.startswith("DEFINE_"):
            name, default, about = (ast.literal_eval(argument) for argument in node.args)
            lines.append(f"{name.upper()} = {given.get(name, default)!r}  # {about}")
    return "\n".join(lines)


def _variable(found: re.Match[str]) -> str:
    return found[1].upper()


def _markdown(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def _code(text: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": text.strip("\n"),
    }


def main(argv: list[str]) -> None:
    """The command above."""
    parser = argparse.ArgumentParser(description="Make notebooks of the examples.")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("names", nargs="*", metavar="NAME", default=NAMES)
    given = parser.parse_args(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.names:
        if not (EXAMPLES / f"{name}.py").exists():
            parser.error(f"there is no example {name!r}; those for a start are {', '.join(NAMES)}")
        path = given.out / f"{name}.ipynb"
        path.write_text(json.dumps(notebook(name), indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
