"""Every code block of README and docs/ runs, or says in a comment why it cannot."""

import ast
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

import compilations
import pages
import pytest

from jaxgoodput.cli import command_parser

TOP = pages.TOP
ALL = {str(page.relative_to(TOP)): pages.blocks(page) for page in pages.PAGES}
SHELL = {block.name: block for page in ALL.values() for block in page if block.language == "sh"}
# What else a block may hold: what a program prints, and files that are not programs.
NOT_CODE = {"text", "diff"}
EXTRAS = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["optional-dependencies"]


WITH_PYTHON = [
    name
    for name, page in ALL.items()
    if any(b.language == "python" and b.kind == "shown" and not b.why_not_run for b in page)
]


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_block_has_a_language_and_a_reason_where_it_is_not_run(name):
    for block in ALL[name]:
        assert block.language in {"python", "sh"} | NOT_CODE, (
            f"{block.name}: a block of {block.language!r}. Say python, sh, or text for what is printed."
        )
        if block.language == "python":  # whatever it is, it is no nonsense
            ast.parse(block.text, block.name)
        if block.why_not_run is not None:
            assert len(block.why_not_run.split()) > 2, f"{block.name}: no reason to speak of"


@pytest.mark.parametrize("name", sorted(WITH_PYTHON))
def test_a_page_uses_no_name_before_it_is_there(name):
    """Also on pages that are run by the nightly tests only."""
    run = [b.text for b in ALL[name] if b.language == "python" and b.why_not_run is None]
    found = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F822", "-"],
        input="\n".join(run),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 0, found.stdout


def results(names, folder) -> dict[str, str | None]:
    """What came of every page: None, or a traceback. In one process, as a user's: no types are checked."""
    done = subprocess.run(
        [sys.executable, pages.__file__, folder, *names],
        env={
            **os.environ,
            **compilations.JOBS,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "2",
        },
        capture_output=True,
        text=True,
        timeout=580,
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith(pages.MARK)]
    found = {
        row["page"]: row["error"]
        for row in (json.loads(line.removeprefix(pages.MARK)) for line in lines)
    }
    assert found.keys() == set(names), f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return found


@pytest.mark.slow
def test_the_python_of_every_page_runs_from_top_to_bottom(tmp_path):
    names = [name for name in WITH_PYTHON if not pages.nightly(TOP / name)]
    failed = [error for error in results(names, tmp_path).values() if error]
    assert not failed, "\n".join(failed)


@pytest.mark.slow
@pytest.mark.nightly
def test_the_python_of_long_pages_runs_from_top_to_bottom(tmp_path):
    names = [name for name in WITH_PYTHON if pages.nightly(TOP / name)]
    failed = [error for error in results(names, tmp_path).values() if error]
    assert not failed, "\n".join(failed)


def test_a_page_that_fails_names_its_own_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nx = 1\ny = 1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as raised:
        pages.run(page, tmp_path)
    assert raised.traceback[-1].lineno == 4  # from 0


def commands(text: str) -> list[list[str]]:
    """The words of every command of a shell block; `$ `, comments and variables in front are left out."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("&;|"):
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    del words[0]
                if words:
                    found.append(words)
                words = []
            else:
                words.append(word)
    return found


def flags_of(script: pathlib.Path) -> set[str]:
    """The flags that a script, or one that it imports from beside it, defines."""
    text = script.read_text()
    names = set(re.findall(r"DEFINE_\w+\(\s*\"(\w+)\"", text))
    return names | set(re.findall(r"add_argument\(\s*\"--([\w-]+)\"", text))


def check_script(words: list[str], where: str):
    script, *rest = words
    if not script.startswith(("examples/", "benchmarks/")):
        return  # the reader's own
    path = TOP / script
    assert path.is_file(), f"{where}: there is no {script}"
    given = {re.split("=", w)[0].lstrip("-") for w in rest if re.match(r"--\w", w)}
    assert given <= flags_of(path) | {"help"}, f"{where}: {script} has no flag {given}"


def check_install(words: list[str], where: str):
    for word in words:
        if found := re.search(r"\[([\w,]+)\]", word):
            unknown = set(found[1].split(",")) - EXTRAS.keys()
            assert not unknown, f"{where}: there is no extra {sorted(unknown)}"


def check_jaxgoodput(words: list[str], where: str):
    cut = words.index("--") if "--" in words else len(words)
    own, behind = words[:cut], words[cut + 1 :]
    try:
        command_parser().parse_args(own)
    except SystemExit as error:
        assert error.code == 0, f"{where}: jaxgoodput does not take {own}"
        return
    if own[0] == "plan" and own[1].endswith(".py"):
        check_script([own[1], *behind], where)
    if behind and behind[0].endswith(("python", "python3")):
        check_script(behind[1:], where)


# Programs of the system that a reader has or not; nothing of ours can be wrong about them.
SYSTEM = {
    "tensorboard",
    "sha256sum",
    "export",
    "cd",
    "sbatch",
    "kubectl",
    "nvidia-smi",
    "git",
    "kill",
}
SYSTEM |= {"curl", "mkdocs", "ruff", "pyright", "openssl"}


@pytest.mark.parametrize("name", sorted(SHELL))
def test_a_command_is_one_that_there_is(name, capsys):
    block = SHELL[name]
    if block.why_not_run is not None:
        pytest.skip(f"not run: {block.why_not_run}")
    for words in commands(block.text):
        program = pathlib.PurePath(words[0]).name
        if program == "jaxgoodput":
            check_jaxgoodput(words[1:], name)
        elif program in ("python", "python3") and words[1] == "-m":
            assert words[2] in ("venv", "pytest", "jaxgoodput", "pip"), f"{name}: {words}"
        elif program in ("python", "python3"):
            check_script(words[1:], name)
        elif program == "pip":
            check_install(words[1:], name)
        elif words[0].startswith("launch/") or words[0].startswith(".ci/"):
            assert os.access(TOP / words[0], os.X_OK), f"{name}: {words[0]} cannot be called"
        else:
            assert program in SYSTEM, f"{name}: nothing checks {words}; say why in a comment"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=" ".join(words[:4]))
        for block in SHELL.values()
        if block.why_not_run is None
        for words in commands(block.text)
        if words[:2] == ["jaxgoodput", "simulate"]
    ],
)
def test_a_simulation_of_the_pages_runs(words, tmp_path, capsys):
    from jaxgoodput.cli import main

    assert main([w.replace("/tmp/", f"{tmp_path}/") for w in words[1:]]) == 0
    assert capsys.readouterr().out.strip()


def test_a_block_that_fails_is_seen(tmp_path):
    """The reader of pages finds blocks, reasons and hidden Python, and says where one does not end."""
    text = "<!-- setup\nx = 1\n-->\n```python\ny = x\n```\n\n"
    text += "<!-- not run: no such thing here -->\n```sh\nzzz\n```\n"
    path = tmp_path / "page.md"
    path.write_text(text)
    setup, shown, shell = pages.blocks(path)
    assert (setup.kind, setup.text, setup.line) == ("setup", "x = 1\n", 2)
    assert (shown.language, shown.text, shown.line) == ("python", "y = x\n", 5)
    assert shell.why_not_run == "no such thing here"
    path.write_text("```python\nx\n")
    with pytest.raises(ValueError, match="no line with"):
        pages.blocks(path)


def test_a_command_that_there_is_not_is_seen():
    with pytest.raises(AssertionError, match="does not take"):
        check_jaxgoodput(["simulate", "--polices", "sia"], "here")
    with pytest.raises(AssertionError, match="has no flag"):
        check_script(["examples/quickstart.py", "--worker", "x"], "here")
    with pytest.raises(AssertionError, match="there is no extra"):
        check_install(["install", "-e", ".[exampels]"], "here")
    assert commands("A=1 b c && d 'e f'; g  # h\n") == [["b", "c"], ["d", "e f"], ["g"]]
