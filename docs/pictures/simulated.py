"""Draws what docs/howto/simulate.md shows of the simulator: its outputs, and docs/simulate.png.

    python docs/pictures/simulated.py            # takes half a minute; the picture needs the extra `plots`
    python docs/pictures/simulated.py --check    # shows how outputs differ from today's; then exit code 1

An output is a block of `text` below the comment `<!-- printed -->`. It is what the last command above it
prints, without the times of decisions, which differ from run to run.
"""

import argparse
import difflib
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

TOP = pathlib.Path(__file__).resolve().parents[2]
PAGE = TOP / "docs" / "howto" / "simulate.md"
PICTURE = TOP / "docs" / "simulate.png"
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PRINTED = re.compile(r"(^<!-- printed -->\n```text\n)(.*?)(^```$)", re.DOTALL | re.MULTILINE)


def command_above(text: str, place: int) -> list[str]:
    """The words of the last command in the last shell block before a place of the page.

    Raises ValueError if that is no `jaxgoodput simulate`.
    """
    blocks = [block[1] for block in SHELL.finditer(text) if block.end() <= place]
    lines = blocks[-1].replace("\\\n", " ").strip().splitlines() if blocks else [""]
    words = shlex.split(lines[-1], comments=True)
    if words[:2] != ["jaxgoodput", "simulate"]:
        raise ValueError(
            f"The command above a block with `<!-- printed -->` is {lines[-1]!r}. Only outputs of "
            "`jaxgoodput simulate` can be drawn: put its command last into the shell block above."
        )
    return words


def shown(output: str) -> str:
    """The part of an output that the page shows: an answer, or the table of a comparison.

    The last two columns of a comparison are times of decisions and are left out.
    """
    for paragraph in output.strip().split("\n\n"):
        lines = paragraph.splitlines()
        if lines[0].split()[-2:] == ["decision", "p95"]:
            (rule,) = (line for line in lines if set(line) == {"-", " "})
            cut = [column.start() for column in re.finditer("-+", rule)][-2]
            return "\n".join(line[:cut].rstrip() for line in lines) + "\n"
    return output.strip() + "\n"


def run(words: list[str], folder: pathlib.Path) -> str:
    """What a command prints; pictures go into the folder. Raises CalledProcessError if it fails."""
    words = [
        str(folder) if before == "--out" else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=TOP, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def redrawn(text: str, folder: pathlib.Path) -> str:
    """The text of a page with the outputs of today; pictures go into the folder."""
    return PRINTED.sub(
        lambda block: block[1] + shown(run(command_above(text, block.start()), folder)) + block[3],
        text,
    )


def main() -> int:
    """Draw the page and the picture anew, or compare the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = PAGE.read_text()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        new = redrawn(text, folder)
        if options.check:
            sys.stdout.writelines(
                difflib.unified_diff(
                    text.splitlines(keepends=True), new.splitlines(keepends=True), "page", "today"
                )
            )
            return int(new != text)
        drawn = folder / "gantt-goodput.png"
        if not drawn.exists():
            raise SystemExit(
                "The simulator has drawn no picture, because matplotlib is not installed. Install the extra: "
                "pip install 'jaxgoodput[plots]'"
            )
        shutil.copy(drawn, PICTURE)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
