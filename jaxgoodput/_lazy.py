"""Names that a package promises, each imported when it is first used."""

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy_names(
    package: str,
    homes: Mapping[str, str],
    modules: Mapping[str, str] | None = None,
    *,
    root: str,
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for the `__init__.py` of `package`.

    `homes` maps a module to the names it defines, separated by spaces; `modules` maps a promised name to the
    module that it is; both name modules relative to
    `root`. Editors and type checkers read the package's `__init__.pyi` instead.
    """
    modules = modules or {}
    home_of = {name: module for module, names in homes.items() for name in names.split()}
    promised = sorted([*home_of, *modules])

    def get(name: str) -> object:
        if name in modules:
            value: object = importlib.import_module(f"{root}.{modules[name]}")
        elif name in home_of:
            value = getattr(importlib.import_module(f"{root}.{home_of[name]}"), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)  # found without this function from now on
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *promised})

    return get, names, promised
