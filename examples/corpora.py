"""Real data without a download: the source of Python's own standard library, as bytes and as identifiers.

`byte_windows` cuts the source into windows of bytes, for a language model. `functions` returns documents of
very different lengths. `identifier_use` asks which function uses which identifier, for a recommender with
large embedding tables: the popularity of identifiers follows a power law, as in the data of real
recommenders. Parsing for `identifier_use` takes about 15 s, so its result is cached in a folder that is named
after the interpreter's version and the number of files.

Some distributions ship Python without its test suite, which leaves a third of the functions. The sizes and
results that the examples state hold for a full CPython 3.11.
"""

import ast
import dataclasses
import hashlib
import os
import pathlib
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator

import numpy as np

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})
NEGATIVES = 4  # negatives per positive, in training
MIN_IDENTIFIERS = 4  # functions with fewer identifiers say too little about themselves
_TESTS = frozenset({"test", "tests", "idle_test"})


def standard_library(*, tests: bool) -> list[tuple[str, pathlib.Path]]:
    """Return the source files of the interpreter's library as (relative name, path), sorted by name."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if _NOT_LIBRARY.isdisjoint(parts) and (tests or _TESTS.isdisjoint(parts)):
            files.append(("/".join(parts), path))
    if not files:
        raise ValueError(
            f"the standard library at {root} holds no .py files (a zipped or embedded interpreter?); "
            "run the examples with an interpreter whose library is a folder of sources."
        )
    return sorted(files)


def is_held_out(name: str, *, one_in: int) -> bool:
    return int.from_bytes(hashlib.md5(name.encode()).digest()[:8]) % one_in == 0


def byte_windows(length: int, *, max_test_windows: int = 1024) -> tuple[np.ndarray, np.ndarray]:
    """Return (train, test) windows `uint8 [windows, length + 1]` of the library's source without its tests.

    Every 20th file, by the md5 of its name, is held out; test windows are spread evenly over these files. A
    window has one byte more than `length`, because the first byte is only read and the last only predicted.
    """
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for name, path in standard_library(tests=False):
        parts[is_held_out(name, one_in=20)].append(path.read_bytes())
    train, test = (_cut(b"\n".join(parts[held_out]), length) for held_out in (False, True))
    keep = np.linspace(0, len(test) - 1, min(max_test_windows, len(test))).astype(np.int64)
    return train, test[keep]


def _cut(text: bytes, length: int) -> np.ndarray:
    codes = np.frombuffer(text, np.uint8)
    starts = np.arange(0, len(codes) - length, length)
    return codes[starts[:, None] + np.arange(length + 1)]


def functions(count: int, *, longest: int, seed: int = 0) -> list[np.ndarray]:
    """Return `count` functions of the library without its tests, as bytes of source `uint8 [length]`.

    Methods and nested functions count as functions. Half of them have fewer than 260 bytes, one in twenty
    more than 1,750; they are cut off at `longest`. Their order is random. No more files are parsed than
    needed.
    """
    rng = np.random.default_rng(seed)
    files = standard_library(tests=False)
    found: list[np.ndarray] = []
    for i in rng.permutation(len(files)):
        source = files[i][1].read_bytes()
        lines = source.splitlines(keepends=True)
        for _, node in _functions(source):
            text = b"".join(lines[node.lineno - 1 : node.end_lineno])
            found.append(np.frombuffer(text[:longest], np.uint8))
        if len(found) >= count:
            return [found[j] for j in rng.permutation(len(found))[:count]]
    raise ValueError(
        f"the standard library holds {len(found)} functions outside its tests; {count} were asked for. "
        "Use fewer or smaller updates."
    )


@dataclasses.dataclass(frozen=True)
class IdentifierUse:
    """Pairs (function, identifier) with a label: does the function use the identifier?

    `train` and `test` are dicts of columns `int32 [samples]`: function, item, file, name (the function's own
    name), scope (the class or module around it) and label (0 or 1; half of each in `test`). Samples are in
    random order.
    """

    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]
    sizes: dict[str, int]  # number of distinct values in each column


def identifier_use(cache: str | os.PathLike[str] | None = None) -> IdentifierUse:
    """Return the recommender's data. The first call parses the library; later ones read the cache.

    Each function is a user, and each identifier that it uses is an item. A tenth of the uses is held out as
    test. Negatives are drawn in proportion to popularity^0.75, as in word2vec, and never coincide with a use.

    Args:
      cache: folder of the parsed library; by default one in the system's temporary folder.
    """
    folder = pathlib.Path(cache or pathlib.Path(tempfile.gettempdir()) / "jaxgoodput-examples")
    files = standard_library(tests=True)
    version = ".".join(map(str, sys.version_info[:3]))
    path = folder / f"identifiers-{version}-{len(files)}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.stem}.{os.getpid()}.npz")
        uses, functions = _parse(files)
        np.savez(partial, uses=uses, functions=functions)
        # Atomic, so that two examples that start together never read half a file.
        os.replace(partial, path)
    with np.load(path) as arrays:
        return _split(arrays["uses"], arrays["functions"])


def _parse(files: list[tuple[str, pathlib.Path]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (function, item) `int32 [pairs, 2]` and (file, name, scope) `int32 [functions, 3]`."""
    per_function = []
    for file_index, (_, path) in enumerate(files):
        for scope, function in _functions(path.read_bytes()):
            identifiers = _identifiers(function)
            if len(identifiers) >= MIN_IDENTIFIERS:
                per_function.append((file_index, function.name, scope, identifiers))

    counts: dict[str, int] = {}
    for *_, identifiers in per_function:
        for identifier in identifiers:
            counts[identifier] = counts.get(identifier, 0) + 1
    items = {s: i for i, s in enumerate(sorted(s for s, count in counts.items() if count >= 2))}
    names = {s: i for i, s in enumerate(sorted({name for _, name, _, _ in per_function}))}
    scopes = {s: i for i, s in enumerate(sorted({(f, scope) for f, _, scope, _ in per_function}))}
    uses, functions = [], []
    for file_index, name, scope, identifiers in per_function:
        uses += [(len(functions), items[s]) for s in sorted(identifiers) if s in items]
        functions.append((file_index, names[name], scopes[file_index, scope]))
    return np.array(uses, np.int32), np.array(functions, np.int32)


def _functions(source: bytes) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Return (qualified name of the scope, node) of every function in a module, including nested ones."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            module = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # the library's tests contain files with deliberate syntax errors
    stack: list[tuple[str, ast.AST]] = [("", module)]
    while stack:
        scope, node = stack.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield scope, child
                stack.append((f"{scope}.{child.name}", child))
            elif isinstance(child, ast.ClassDef):
                stack.append((f"{scope}.{child.name}", child))
            else:
                stack.append((scope, child))


def _identifiers(function: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


def _split(uses: np.ndarray, functions: np.ndarray) -> IdentifierUse:
    rng = np.random.default_rng(0)
    uses = rng.permutation(uses)
    num_items = int(uses[:, 1].max()) + 1
    known = np.sort(uses[:, 0].astype(np.int64) * num_items + uses[:, 1])
    popularity = np.bincount(uses[:, 1], minlength=num_items) ** 0.75
    cumulative = np.cumsum(popularity) / popularity.sum()

    def with_negatives(positives: np.ndarray, per_positive: int) -> dict[str, np.ndarray]:
        function = np.tile(positives[:, 0], per_positive)
        item = np.searchsorted(cumulative, rng.random(len(function))).astype(np.int32)
        keys = function.astype(np.int64) * num_items + item
        place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        unused = known[place] != keys
        function = np.concatenate([positives[:, 0], function[unused]])
        item = np.concatenate([positives[:, 1], item[unused]])
        label = (np.arange(len(item)) < len(positives)).astype(np.int32)
        order = rng.permutation(len(item))
        function, item, label = function[order], item[order], label[order]
        file, name, scope = functions[function].T
        columns = {"function": function, "item": item, "file": file, "name": name, "scope": scope}
        return {k: np.ascontiguousarray(v) for k, v in (columns | {"label": label}).items()}

    num_test = len(uses) // 10
    sizes = dict(zip(("file", "name", "scope"), (functions.max(0) + 1).tolist(), strict=True))
    return IdentifierUse(
        train=with_negatives(uses[num_test:], NEGATIVES),
        test=with_negatives(uses[:num_test], 1),
        sizes=sizes | {"function": len(functions), "item": num_items},
    )
