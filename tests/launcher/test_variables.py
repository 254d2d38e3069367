"""`--env`: what is given arrives, what cannot be meant is refused."""

import argparse
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgoodput.launcher.variables import as_mapping, from_line, to_line, variable

names = st.builds(
    str.__add__,
    st.sampled_from(string.ascii_letters + "_"),
    st.text(string.ascii_letters + string.digits + "_", max_size=9),
).filter(lambda name: not name.startswith(("JAX_", "JAXGOODPUT_")))
values = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)


@given(names, values)
def test_a_value_is_taken_as_it_is_written(name, value):
    assert variable(f"{name}={value}") == (name, value)


@given(st.dictionaries(names, values))
def test_variables_pass_through_one_line(found):
    line = to_line(found)
    assert "\n" not in line and from_line(line) == found


def test_a_name_alone_passes_the_value_that_it_has_here(monkeypatch):
    monkeypatch.setenv("COLOUR", "a = b")
    assert variable("COLOUR") == ("COLOUR", "a = b")
    monkeypatch.setenv("COLOUR", "")
    assert variable("COLOUR") == ("COLOUR", ""), "set, though empty"
    monkeypatch.delenv("COLOUR")
    with pytest.raises(argparse.ArgumentTypeError, match="COLOUR is not set here.*COLOUR=VALUE"):
        variable("COLOUR")


@given(st.text())
def test_any_text_gives_a_variable_or_a_reason(text):
    try:
        name, _ = variable(text)
    except argparse.ArgumentTypeError as error:
        assert str(error)
    else:
        assert name.isidentifier() and name.isascii()


@pytest.mark.parametrize(
    "name",
    ["JAXGOODPUT_PROCESS_ID", "JAXGOODPUT_", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS"],
)
def test_variables_of_the_launcher_are_refused(name):
    with pytest.raises(argparse.ArgumentTypeError, match="set by the launcher"):
        variable(f"{name}=1")
    assert variable("JAX_PLATFORMS=cpu") == ("JAX_PLATFORMS", "cpu")


@given(st.lists(st.tuples(names, values), max_size=5))
def test_each_variable_is_given_once(pairs):
    if len(dict(pairs)) == len(pairs):
        assert as_mapping(pairs) == dict(pairs)
    else:
        with pytest.raises(ValueError, match="is given twice"):
            as_mapping(pairs)


def test_more_than_a_pipe_holds_is_refused():
    with pytest.raises(ValueError, match="a file that the script reads"):
        as_mapping([("A", "x" * 40_000)])


@pytest.mark.parametrize("line", ["", "{", "[]", '{"A": 1}', "nonsense"])
def test_a_line_that_is_no_variables_is_refused(line):
    with pytest.raises(ValueError):
        from_line(line)
