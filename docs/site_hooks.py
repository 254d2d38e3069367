"""Pages of the site that are made from what is elsewhere: notes, docstrings, `--help`, examples as notebooks.

mkdocs calls the functions `on_...`; links to files at the top of the repository, which a reader of the
repository follows, become links to those pages.
"""

import argparse
import importlib
import inspect
import json
import os
import pathlib
import re
from collections.abc import Iterator

import notebooks
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import jaxgoodput
from jaxgoodput.cli import command_parser

TOP = pathlib.Path(__file__).resolve().parents[1]

FROM_TOP = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "BUILD_NOTES.md": "build-notes.md",
    "CONTRIBUTING.md": "contributing.md",
}
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no files of docs/."""
    for name, page in FROM_TOP.items():
        if name == "README.md":
            continue  # docs/index.md stands for it
        text = relinked((TOP / name).read_text(), TOP, page)
        files.append(File.generated(config, page, content=text))
    for page, text in reference():
        files.append(File.generated(config, f"reference/{page}.md", content=text))
    for page, text in of_notebooks():
        files.append(File.generated(config, f"notebooks/{page}", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files outside of docs/ to the pages made of them."""
    if page.file.abs_src_path is None:  # made here
        return markdown
    folder = pathlib.Path(page.file.abs_src_path).parent
    return relinked(markdown, folder, page.file.src_uri)


def relinked(markdown: str, folder: pathlib.Path, page: str) -> str:
    """`markdown` of a file in `folder` with its links as those of `page`; what has no page is no link."""

    def link(found: re.Match[str]) -> str:
        target = (folder / found[1]).resolve()
        if target.is_relative_to(TOP / "docs") and not target.is_dir():
            inside = target.relative_to(TOP / "docs").as_posix()
        elif target.is_relative_to(TOP) and target.relative_to(TOP).as_posix() in FROM_TOP:
            inside = FROM_TOP[target.relative_to(TOP).as_posix()]
        elif target.exists():
            return "]"
        else:
            return found[0]  # mkdocs says that it leads nowhere
        return f"]({os.path.relpath(inside, pathlib.PurePath(page).parent)}{found[2] or ''})"

    text = LINK.sub(link, markdown)
    return re.sub(r"(?<!!)\[([^\][]*)\](?![(\[:])", r"\1", text) if text != markdown else text


def reference() -> Iterator[tuple[str, str]]:
    """(name of the page, its text) for every group of promised names, and one for the commands."""
    groups = promised()
    rows = "\n".join(
        f"| [{title}]({slug(title)}.md) | {', '.join(f'`{n}`' for n in names)} |"
        for title, names in groups.items()
    )
    yield (
        "index",
        "# Reference\n\nEvery promised name, from its docstring. What is not listed here may change.\n\n"
        f"| | |\n|---|---|\n{rows}\n| [Commands](commands.md) | `jaxgoodput COMMAND` |\n",
    )
    for title, names in groups.items():
        yield slug(title), f"# {title}\n\n" + "\n".join(map(entry, names))
    yield "commands", commands()


def of_notebooks() -> Iterator[tuple[str, str]]:
    """(name of the file, its text) of the examples as notebooks, and of a page that lists them."""
    rows = []
    for name in notebooks.NAMES:
        made = notebooks.notebook(name)
        rows.append(f"| [{name}.ipynb]({name}.ipynb) | `examples/{name}.py` |")
        yield f"{name}.ipynb", json.dumps(made, indent=1)
    yield (
        "index.md",
        "# Notebooks\n\nThe examples that most people start from, each made from its script. In a checkout "
        "`python docs/notebooks.py OUT` makes them, too; those with modules of their own write them beside "
        "the notebook.\n\n| notebook | made from |\n|---|---|\n" + "\n".join(rows) + "\n",
    )


def promised() -> dict[str, list[str]]:
    """The groups of the package's docstring, title -> names."""
    groups: dict[str, list[str]] = {}
    names: list[str] = []
    for line in (jaxgoodput.__doc__ or "").splitlines():
        if re.fullmatch(r"\S.*:", line):
            names = groups.setdefault(line[:-1], [])
        elif line.startswith("  ") and line.split()[0] in jaxgoodput.__all__:
            names.append(line.split()[0])
    missing = set(jaxgoodput.__all__) - {n for names in groups.values() for n in names}
    if missing:
        raise ValueError(f"the docstring of jaxgoodput lists no line for {sorted(missing)}")
    return groups


def slug(title: str) -> str:
    """The name of the page of a group."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower())


def entry(name: str) -> str:
    """A promised name, or a module with all that it promises."""
    value = getattr(jaxgoodput, name)
    if not inspect.ismodule(value):
        return f"::: {value.__module__}.{value.__qualname__}\n"
    inner = getattr(value, "__all__", None)
    if inner is None:
        return f"## jg.{name}\n\n::: {value.__name__}\n    options: {{show_root_heading: false}}\n"
    module = importlib.import_module(value.__name__)
    parts = [getattr(module, each) for each in inner]
    own = [p for p in parts if getattr(p, "__module__", "").startswith("jaxgoodput")]
    lines = [f"::: {p.__module__}.{p.__qualname__}\n" for p in own if hasattr(p, "__qualname__")]
    first = (inspect.getdoc(module) or "").partition("\n\n")[0]
    return f"## jg.{name}\n\n{first}\n\n" + "\n".join(lines)


def commands() -> str:
    """What `--help` says, of every command."""
    os.environ["COLUMNS"] = "100"
    parser = command_parser()
    (choices,) = (
        action.choices
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    text = "# Commands\n\n```text\n" + parser.format_help() + "```\n"
    for name, command in choices.items():
        text += f"\n## jaxgoodput {name}\n\n```text\n{command.format_help()}```\n"
    return text
