"""What the code looks like from outside: its prose, its classes and functions, and who asks what.

    python benchmarks/house.py [--room jaxgoodput/train] [--list] [--draw 50 30]

prints one table for a folder (default: the package). `--list` names every place that counts against a
figure. `--draw 50 30` shows docstrings and messages, drawn with the commit's hash as seed, for readers
who have not seen the code.
Prose is docstrings and comments without what stands in code marks; complexity is radon's, of functions and
methods. A *site that asks the kind of run* compares `process_count` with 1, `world`, `feed` or `membership`
with None, or a family of programs with `isinstance`, outside `train/runs/`.
"""

import argparse
import ast
import collections
import io
import pathlib
import random
import re
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field

from radon.complexity import cc_visit
from radon.visitors import Function

ROOT = pathlib.Path(__file__).parents[1] / "jaxgoodput"
PREPOSITIONS = frozenset(
    "Of In For By From With On To At Under Behind Between Within".split()
)  # a docstring that begins with one has no subject
NOBODY = re.compile(r"\b(nobody|somebody|whoever|whomever|no one|everybody)\b", re.IGNORECASE)
THOSE_OF = re.compile(r"\b(that of|those that|those of|those who|that which)\b", re.IGNORECASE)
# Verbs' third forms that stand alone as a class name say nothing of what the object is.
PARTICIPLES = frozenset(
    "Given Kept Got Named Seen Lost Gone Held Taken Told Known Learnt Begun Done Made Said Sent".split()
)
KIND = re.compile(
    r"process_count\s*(==|!=|>|<|>=|<=)\s*1\b|\b1\s*<\s*\S*process_count"
    r"|\b(world|feed|membership)\s+is\s+(not\s+)?None"
    r"|isinstance\([^)]*Programs\b|\bif\s+(not\s+)?(\w+\.)*tables\s*(:|and|or|else)"
    r"|\bis_elastic\b(?!: bool|=[^=])"  # what declares or sets it asks nothing
)


@dataclass
class Found:
    """Counts of one folder, and the places behind them."""

    counts: collections.Counter = field(default_factory=collections.Counter)
    places: dict[str, list[str]] = field(default_factory=lambda: collections.defaultdict(list))

    def add(self, what: str, place: str) -> None:
        self.counts[what] += 1
        self.places[what].append(place)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, int, str]]:
    """First line, last line and text of each docstring, those of fields included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                value = getattr(statement, "value", None)
                if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant):
                    if isinstance(value.value, str):
                        yield (
                            statement.lineno,
                            statement.end_lineno or statement.lineno,
                            value.value,
                        )


def comments(source: str) -> Iterator[tuple[int, bool, str]]:
    """Line, whether it has the line to itself, and text of each comment."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row = token.start[0]
            yield row, lines[row - 1].lstrip().startswith("#"), token.string.lstrip("# ")


def attributes(node: ast.ClassDef) -> set[str]:
    """Names that a class's methods assign on `self`."""
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }


def count(folder: pathlib.Path) -> Found:
    """All counts of the Python files under a folder."""
    found, classes = Found(), collections.defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        source, where = path.read_text(), path.relative_to(ROOT.parent)
        tree, lines = ast.parse(source), source.splitlines()
        prose, not_code = [], set()
        for first, last, text in docstrings(tree):
            prose.append(text)
            not_code |= set(range(first, last + 1))
            if (text.split() or [""])[0] in PREPOSITIONS:
                found.add("begins with a preposition", f"{where}:{first} {text.strip()[:70]}")
        for row, alone, text in comments(source):
            prose.append(text)
            found.counts["comment lines"] += alone
            if alone:
                not_code.add(row)
        _count_words(found, str(where), prose)
        found.counts["lines"] += len(lines)
        found.counts["lines of code"] += sum(
            bool(line.strip()) and row not in not_code for row, line in enumerate(lines, start=1)
        )
        if "train/runs/" not in str(where):
            for row, line in enumerate(lines, start=1):
                if row not in not_code and KIND.search(line.partition("#")[0]):
                    found.add("asks the kind of run", f"{where}:{row} {line.strip()[:90]}")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                size, held = (node.end_lineno or 0) - node.lineno + 1, len(attributes(node))
                found.counts["largest class"] = max(found.counts["largest class"], size)
                found.counts["most attributes"] = max(found.counts["most attributes"], held)
                if size > 450 or held > 20:
                    found.add(
                        "classes too large",
                        f"{where}:{node.lineno} {node.name}: {size} lines, {held}",
                    )
                if not node.name.startswith("_"):
                    classes[node.name].append(f"{where}:{node.lineno}")
                if node.name in PARTICIPLES:
                    found.add("participles", f"{where}:{node.lineno} {node.name}")
        for block in cc_visit(source):
            if not isinstance(block, Function):  # a class, whose methods come by themselves
                continue
            found.counts["functions"] += 1
            size = block.endline - block.lineno + 1
            if block.complexity > 10:
                found.add("complex", f"{where}:{block.lineno} {block.name}: {block.complexity}")
            if size > 80:
                found.add("long", f"{where}:{block.lineno} {block.name}: {size} lines")
    for name, places in classes.items():
        if len(places) > 1:
            found.add("names of several classes", f"{name}: {', '.join(places)}")
    return found


def exceeded(found: Found) -> list[str]:
    """Names of the counts that are beyond their limits, as keys of `Found.places`."""
    counts, words = found.counts, max(found.counts["words"], 1)
    limits = {
        "classes too large": 0,
        "long": 0,
        "complex": 0.030 * counts["functions"],
        "names of several classes": 0,
        "participles": 0,
        "asks the kind of run": 15,
        "begins with a preposition": 20,
        "where": 0.003 * words,
        "those of": 0.0003 * words,
        "nobody": 0,
    }
    return [what for what, most in limits.items() if counts[what] > most]


def _count_words(found: Found, where: str, prose: list[str]) -> None:
    for text in prose:
        plain = re.sub(r"``[^`]*``|`[^`]*`", " ", text)
        words = re.findall(r"[A-Za-z][A-Za-z']*", plain)
        found.counts["words"] += len(words)
        for word in ("where", "if"):
            found.counts[word] += sum(w.lower() == word for w in words)
        first = text.strip()[:60].replace("\n", " ")
        if any(w.lower() == "where" for w in words):
            found.places["where"].append(f"{where} {first}")
        for name, pattern in (("nobody", NOBODY), ("those of", THOSE_OF)):
            for match in pattern.finditer(plain):
                around = plain[max(match.start() - 30, 0) : match.end() + 30].replace("\n", " ")
                found.add(name, f"{where} ...{around}...")


def texts(folder: pathlib.Path) -> tuple[list[str], list[str]]:
    """Docstrings with the names that they explain, and messages of errors and logs."""
    explained, messages = [], []
    for path in sorted(folder.rglob("*.py")):
        where = path.relative_to(ROOT.parent)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if text := ast.get_docstring(node):
                    head = "".join(f"@{ast.unparse(d)}\n" for d in node.decorator_list)
                    if isinstance(node, ast.ClassDef):
                        head += f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"
                    else:
                        head += f"def {node.name}({ast.unparse(node.args)})"
                    explained.append(f"{where}: {head}\n{text}")
            elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                if not isinstance(node.exc.func, ast.Name):
                    continue  # made elsewhere, from parts
                messages += [
                    f"{where}:{node.lineno} {_shown(a)}" for a in node.exc.args[:1] if _shown(a)
                ]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in ("warning", "error", "info") and node.args:
                    if said := _shown(node.args[0]):
                        messages.append(f"{where}:{node.lineno} {said}")
    return explained, messages


def _shown(node: ast.expr) -> str:
    """A literal or formatted string with its values as their expressions; "" for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"  # type: ignore
            for part in node.values
        )
    return ""


def draw(folder: pathlib.Path, num_docstrings: int, num_messages: int) -> None:
    """Print a random choice of docstrings and messages; the commit's hash is the seed."""
    said = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    rng = random.Random(said.stdout.strip())
    explained, messages = texts(folder)
    chosen = rng.sample(explained, num_docstrings) + rng.sample(messages, num_messages)
    for number, text in enumerate(chosen, start=1):
        print(f"--- {number}\n{text}\n")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--room", type=pathlib.Path, default=ROOT)
    parser.add_argument("--list", action="store_true", help="name the places")
    parser.add_argument("--draw", type=int, nargs=2, metavar=("DOCSTRINGS", "MESSAGES"))
    options = parser.parse_args()
    if options.draw:
        draw(options.room.resolve(), *options.draw)
        return
    found = count(options.room.resolve())
    counts, words = found.counts, max(found.counts["words"], 1)
    functions = max(counts["functions"], 1)

    def per_1000(what: str, of: int = words) -> str:
        return f"{1000 * counts[what] / of:.2f}"

    rows = [
        ("lines", str(counts["lines"]), ""),
        ("lines of code", str(counts["lines of code"]), "<= 35,900"),
        ("lines of comments", str(counts["comment lines"]), ""),
        ("where, per 1,000 words", per_1000("where"), "<= 3"),
        ("if", per_1000("if"), ">= 4"),
        ("those of, that of", per_1000("those of"), "<= 0.3"),
        ("nobody, whoever", per_1000("nobody"), "0"),
        (
            "docstrings that begin with a preposition",
            str(counts["begins with a preposition"]),
            "<= 20",
        ),
        ("lines of the largest class", str(counts["largest class"]), "<= 450"),
        ("attributes of the class with most", str(counts["most attributes"]), "<= 20"),
        ("functions over 80 lines", str(counts["long"]), "0"),
        ("complexity over 10, per 1,000 functions", per_1000("complex", functions), "<= 30"),
        ("names of several public classes", str(counts["names of several classes"]), "0"),
        ("participles as class names", str(counts["participles"]), "0"),
        ("sites that ask the kind of run", str(counts["asks the kind of run"]), "<= 15"),
    ]
    print("| what | measured | must |\n|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    if options.list:
        for what, places in found.places.items():
            print(f"\n{what}:")
            print("\n".join(f"  {place}" for place in places))


if __name__ == "__main__":
    main()
