"""The examples in docstrings hold, those of every module."""

import doctest
import importlib
import pathlib

import pytest

import jaxgoodput
import jaxgoodput.observe.dashboard.tensorboard  # what it needs sets a variable of the environment, at import

TOP = pathlib.Path(jaxgoodput.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(TOP.parent).with_suffix("").parts)
    for path in TOP.rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_hold(name):
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried and not failed
