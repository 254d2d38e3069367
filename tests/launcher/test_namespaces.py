"""The hosts that other tests run jobs on are as apart, and as connected, as those tests believe."""

import contextlib
import pathlib
import signal
import socket
import subprocess
import sys
import time

import namespaces
import pytest

pytestmark = pytest.mark.multihost

PYTHON = [sys.executable, "-ISc"]
PORT = 7000
LIMIT_S = 30.0  # far more than anything takes that is to come
SHORT_S = 0.3  # far more than an answer takes, for one that does not come

SERVE = f"""
import socket
server = socket.create_server(("", {PORT}))
print("listens", flush=True)
while True:
    connection, (caller, _) = server.accept()
    connection.sendall(caller.encode())
    connection.close()
"""
CALL = f"""
import socket, sys
try:
    with socket.create_connection((sys.argv[1], {PORT}), timeout=float(sys.argv[2])) as connection:
        print(connection.recv(99).decode(), end="")
except OSError as error:
    print(type(error).__name__, end="")
"""


@pytest.fixture(scope="module", autouse=True)
def _namespaces_can_be_made():
    if reason := namespaces.available():
        pytest.skip(reason)


@pytest.fixture
def pair():
    with namespaces.hosts(2) as made:
        yield made


@contextlib.contextmanager
def served(command):
    """Keep SERVE running, ready for callers."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout.readline() == "listens\n"
            yield server
        finally:
            server.kill()


def output(command):
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=90).stdout


def call(made, i, address, limit_s=LIMIT_S):
    """What host `i` gets from the server at `address`: its own address as that one sees it."""
    return output(made.command(i, [*PYTHON, CALL, address, str(limit_s)]))


def traces(name):
    """What there is of the host `name` on this machine."""
    folders = (namespaces.NAMED, namespaces.LINKS, namespaces.SETTINGS)
    return [folder / name for folder in folders if (folder / name).exists()]


def test_hosts_reach_each_other_by_address_and_by_name(pair):
    with served(pair.command(0, [*PYTHON, SERVE])):
        assert call(pair, 1, pair.address(0)) == pair.address(1)
        assert call(pair, 1, pair.names[0]) == pair.address(1)


def test_the_machine_and_its_hosts_reach_each_other(pair):
    with served(pair.command(0, [*PYTHON, SERVE])):
        with socket.create_connection((pair.address(0), PORT), LIMIT_S) as connection:
            assert connection.recv(99).decode() == pair.root_address
    with socket.create_server((pair.root_address, PORT)) as server:
        server.settimeout(LIMIT_S)
        command = pair.command(1, [*PYTHON, CALL, pair.root_address, str(LIMIT_S)])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
            connection, (address, _) = server.accept()
            connection.close()
            assert caller.wait(LIMIT_S) == 0
    assert address == pair.address(1)


@pytest.mark.parametrize("cut", [0, 1])
def test_nothing_passes_a_cut_link_until_it_is_mended(pair, cut):
    with served(pair.command(0, [*PYTHON, SERVE])):
        assert call(pair, 1, pair.address(0)) == pair.address(1)
        pair.cut(cut)
        assert call(pair, 1, pair.address(0), SHORT_S) == "TimeoutError"
        pair.mend(cut)
        assert call(pair, 1, pair.address(0)) == pair.address(1)


def test_a_cut_link_leaves_the_others_alone():
    with namespaces.hosts(3) as made, served(made.command(0, [*PYTHON, SERVE])):
        made.cut(1)
        assert call(made, 1, made.address(0), SHORT_S) == "TimeoutError"
        assert call(made, 2, made.address(0)) == made.address(2)


@pytest.mark.parametrize("way", [(0, 1), (1, 0)])
def test_what_one_host_sends_another_can_be_lost_and_nothing_else(way):
    with namespaces.hosts(3) as made, served(made.command(0, [*PYTHON, SERVE])):
        assert call(made, 1, made.address(0)) == made.address(1)
        made.lose(*way)
        assert call(made, 1, made.address(0), SHORT_S) == "TimeoutError"
        assert call(made, 2, made.address(0)) == made.address(2)
        made.find(*way)
        assert call(made, 1, made.address(0)) == made.address(1)


def test_a_host_is_called_by_its_own_name_which_stands_for_its_own_address(pair):
    own = "import socket; name = socket.gethostname(); print(name, socket.gethostbyname(name))"
    before = socket.gethostname()
    for i in range(2):
        assert output(pair.command(i, [*PYTHON, own])).split() == [pair.names[i], pair.address(i)]
    assert socket.gethostname() == before


def test_a_command_keeps_its_arguments_its_folder_and_its_process(pair, tmp_path):
    script = "import os, sys; print(os.getpid(), os.getcwd(), *sys.argv[1:])"
    arguments = ["", "two words", "$HOME", '"', "--", "-e"]
    child = subprocess.Popen(
        pair.command(0, [*PYTHON, script, *arguments]),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    told, _ = child.communicate(timeout=LIMIT_S)
    assert told == " ".join([str(child.pid), str(tmp_path), *arguments]) + "\n"


def test_users_at_the_same_time_have_different_hosts(pair):
    with namespaces.hosts(2) as other:
        assert not set(pair.names) & set(other.names)
        assert pair.address(0) != other.address(0)
        with served(pair.command(0, [*PYTHON, SERVE])):
            # There is no way from one to the other, so the kernel refuses at once.
            assert call(other, 1, pair.address(0)) == "OSError"
    assert all(traces(name) for name in pair.names)  # the end of one is not that of the other


def test_nothing_is_left_also_after_an_error():
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(namespaces.hosts(2))
        assert all(len(traces(name)) == 3 for name in made.names)
        with served(made.command(0, [*PYTHON, SERVE])) as server:
            made.cut(1)
            with pytest.raises(ZeroDivisionError), stack.pop_all():
                raise ZeroDivisionError
            assert server.wait(LIMIT_S) == -signal.SIGKILL
    assert [traces(name) for name in made.names] == [[], []]
    assert not (namespaces.LINKS / f"jg{made.subnet}").exists()


def test_what_a_killed_process_has_left_goes_when_its_subnet_is_taken_again():
    script = (
        f"import sys, time; sys.path.insert(0, {str(pathlib.Path(namespaces.__file__).parent)!r})\n"
        "import namespaces\n"
        "with namespaces.hosts(1) as made:\n"
        "    print(made.names[0], flush=True)\n"
        "    time.sleep(600)"
    )
    with subprocess.Popen([*PYTHON, script], stdout=subprocess.PIPE, text=True) as user:
        name = user.stdout.readline().strip()
        user.kill()
    deadline = time.monotonic() + LIMIT_S
    with contextlib.ExitStack() as kept:  # lower ones may have become free meanwhile
        while traces(name) and time.monotonic() < deadline:
            kept.enter_context(namespaces.hosts(0))
    assert traces(name) == []


def test_where_none_can_be_made_the_reason_is_told(monkeypatch):
    uncached = namespaces.available.__wrapped__
    assert uncached() is None
    with monkeypatch.context() as patched:
        patched.setattr(namespaces.os, "geteuid", lambda: 1000)
        assert uncached() == "network namespaces need root"
    with monkeypatch.context() as patched:
        patched.setenv("PATH", "/nowhere")
        assert "do not work here: [Errno 2] No such file or directory: 'ip'" in str(uncached())
