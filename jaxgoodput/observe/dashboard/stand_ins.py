"""Stand-ins for modules that a library imports for features that hardly anybody uses."""

import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterator


class StandIn(types.ModuleType):
    """A module that is imported when the first of its names is used."""

    def __getattr__(self, name: str) -> object:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def stand_ins(*names: str) -> Iterator[None]:
    """Have imports of these modules inside the block give a stand-in.

    Modules that are loaded already, or not installed, are not replaced. After the block, imports of these
    modules are as before.
    """
    given = {name: StandIn(name) for name in names if name not in sys.modules and _is_there(name)}
    for name, module in given.items():
        module.__spec__ = importlib.util.find_spec(name)
    sys.modules.update(given)
    try:
        yield
    finally:
        for name, module in given.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False
