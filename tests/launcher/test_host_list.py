"""Hosts as users write them: what is meant is found, and nothing else reaches the remote shell."""

import string

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxgoodput.launcher.elastic import hosts as agents
from jaxgoodput.launcher.elastic.coordinator import with_slots
from jaxgoodput.launcher.elastic.state import Limits
from jaxgoodput.launcher.host_list import (
    NamedHost,
    num_processes,
    read_host,
    read_host_file,
    read_host_list,
)

letters = string.ascii_letters + string.digits
words = st.builds(str.__add__, st.sampled_from(letters + "_"), st.text(letters + "._-", max_size=9))
addresses = st.sampled_from(["fe80::1", "::1", "2001:db8::7"])
counts = st.integers(1, 10**6)
hosts = st.builds(
    NamedHost,
    host=words | addresses,
    user=st.none() | words,
    port=st.none() | st.integers(1, 65535),
    slots=st.none() | counts,
)
several = st.lists(hosts, min_size=1, max_size=5, unique_by=lambda host: host.name)


@given(hosts)
def test_a_host_is_read_as_it_is_written(host):
    assert read_host(str(host)) == host
    assert read_host(host.name).name == host.name


@given(several)
def test_a_list_and_a_file_name_the_same_hosts(named):
    assert read_host_list(",".join(map(str, named))) == named
    lines = [h.name + (f"  slots={h.slots}" if h.slots else "") + "  # one" for h in named]
    assert read_host_file("\n# all\n" + "\n\n".join(lines)) == named


@given(st.text("-a@:[]=. \n\t\0%/4") | st.text())
def test_no_text_becomes_an_option_or_two_words_of_the_remote_shell(text):
    try:
        found = read_host(text)
    except ValueError as error:
        assert "[USER@]HOST[:PORT][=SLOTS]" in str(error)
        return
    assert found.target and not found.target.startswith("-") and not found.host.startswith("-")
    assert len(found.target.split()) == 1 and found.target.isprintable()
    assert found.port is None or 1 <= found.port <= 65535


@given(hosts, st.sampled_from(["-", "-o", "--"]), st.booleans())
def test_a_dash_at_the_beginning_is_refused(host, dash, before_user):
    user = "" if host.user is None else f"{host.user}@"
    text = f"{dash}{user}{host.host}" if before_user or not user else f"{user}{dash}{host.host}"
    for read in (read_host, read_host_list, read_host_file):
        with pytest.raises(ValueError, match="begins with a dash"):
            read(text)


@pytest.mark.parametrize(
    "text, said",
    [
        ("a:0", "the port of 'a:0' is '0'"),
        ("a:65536", "no number from 1 to 65535"),
        ("a:", "the port of 'a:' is ''"),
        ("a=0", "the number of processes of 'a=0' is '0'"),
        ("a=", "the number of processes"),
        ("a=two", "is 'two'"),
        ("@a", "names no host"),
        ("me@", "names no host"),
        ("a b", "names no host"),
        ("[::1", "names no host"),
        (",", "no host is named"),
        ("a,b,a=4", "a is there twice"),
    ],
)
def test_what_is_wrong_is_named(text, said):
    with pytest.raises(ValueError, match=said):
        read_host_list(text)


@pytest.mark.parametrize(
    "line", ["a b", "a slots", "a slots=0", "a slots=4 x", "a=2 slots=3", "a 4"]
)
def test_a_line_of_a_file_names_one_host(line):
    with pytest.raises(ValueError, match=r"a|slots"):
        read_host_file(f"b\n{line}\n")


@given(several)
def test_the_remote_shell_gets_the_port_and_the_host(named):
    remote = agents.remote(named, "secret", shell="ssh -o BatchMode=yes", python="py thon")
    assert remote.names == tuple(host.name for host in named)
    for host in named:
        *shell, command = remote._command(host.name, ["agent", "a b"])
        port = [] if host.port is None else ["-p", str(host.port)]
        assert shell == ["ssh", "-o", "BatchMode=yes", *port, host.target]
        assert command.endswith(" && exec 'py thon' -m jaxgoodput.cli agent 'a b'")


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(1, 9), st.integers(1, 8), st.data())
def test_processes_are_counted_on_the_hosts_that_may_train(slots, other, most, data):
    least = data.draw(st.integers(1, most))
    limits = with_slots(Limits(least=least, most=most), other, named=slots)
    assert limits.least <= limits.most
    every = slots + [other] * max(most - len(slots), 0)
    # No choice of that many hosts has fewer, or more, as long as the named hosts take part first.
    assume(len(slots) >= most)
    chosen = data.draw(st.permutations(every))
    assert limits.least <= sum(chosen[:least]) and sum(chosen[:most]) <= limits.most
    if len(set(every)) == 1:
        assert (limits.least, limits.most) == (least * every[0], most * every[0])


def test_hosts_that_are_not_named_run_as_many_as_said():
    assert with_slots(Limits(least=2, most=3), 4).least == 8
    assert num_processes(3, [1], 4, largest=False) == 9
