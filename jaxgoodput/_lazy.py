"""Public names of a package that are imported only when they are first used."""

# Builtin types alone annotate this file: importing `collections.abc` doubles the time of `import jaxgoodput`.
import importlib
import sys


def lazy_names(
    package: str,
    homes: dict[str, str],
    modules: dict[str, str] | None = None,
    *,
    root: str,
    first=None,
) -> tuple[object, object, list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for the `__init__.py` of `package`.

    `homes` maps a module to the public names it defines, separated by spaces. `modules` maps a public name to
    the module that it stands for. Module names are relative to `root`. `first` has functions that are called
    before certain names are loaded. Editors and type checkers read the package's `__init__.pyi` instead.
    """
    modules, first = modules or {}, first or {}
    home_of = {name: module for module, names in homes.items() for name in names.split()}
    promised = sorted([*home_of, *modules])

    def get(name: str) -> object:
        if name in first:
            first[name]()
        if name in modules:
            value: object = importlib.import_module(f"{root}.{modules[name]}")
        elif name in home_of:
            value = getattr(importlib.import_module(f"{root}.{home_of[name]}"), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)  # from now on, found without this function
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *promised})

    return get, names, promised
