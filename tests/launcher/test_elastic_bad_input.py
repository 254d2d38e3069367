"""What is asked wrongly of a job whose hosts come and go, and hosts that cannot take part: what is said."""

import contextlib
import os
import re
import shutil
import signal
import socket
import sys
import time
from typing import Any

import elastic_worker
import processes
import pytest

from jaxgoodput import cli
from jaxgoodput._exits import exit_code

pytestmark = pytest.mark.multihost

SECRET = "the secret of these tests"
SHELL = """#!/bin/sh
# A remote shell to this machine: HOST COMMAND. There is no way to hosts whose names begin with "far".
case "$1" in
    far*) echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255 ;;
    other) cd other || exit 1; exec sh -c "${2#cd * && }" ;;
    old) PYTHONPATH="$PWD/old:$PYTHONPATH" exec sh -c "$2" ;;
    *) exec sh -c "$2" ;;
esac
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current one, with a remote shell and a script that waits."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shell").write_text(SHELL)
    (tmp_path / "shell").chmod(0o755)
    (tmp_path / "a.py").write_text("import time; time.sleep(600)")
    return tmp_path


def start(*arguments, script="a.py", words=(), **environ):
    command = [sys.executable, "-m", "jaxgoodput.cli", *arguments, "--", "python", script, *words]
    return processes.Job(command, {"JAXGOODPUT_SECRET": SECRET, **environ})


def start_on(hosts, nodes, *options, **more):
    """A job of hosts through the remote shell."""
    reached = ("--rsh", "./shell", "--hosts", hosts, "--rdzv-endpoint", "127.0.0.1:0")
    return start("run", "--nnodes", nodes, *reached, *options, **more)


def said_by(capsys, *arguments):
    """The exit code and the error of a command line."""
    try:
        code = cli.main(list(arguments))
    except SystemExit as end:
        code = end.code
    return code, capsys.readouterr().err


# -- options -----------------------------------------------------------------------------------------


VALUES = {"--hostfile": __file__, "--notices": "gce", "--metadata-server": "http://localhost:80"}


def options_of_run():
    """With a value each, those that take part in a job of one host left out."""
    commands: Any = cli.command_parser()._subparsers._group_actions[0]
    everywhere = {"--help", "--nnodes", "--nproc-per-node", "--devices-per-process"}
    everywhere |= {"--max-restarts", "--grace-s", "--connect-s", "--env"}
    for action in commands.choices["run"]._actions:
        name = action.option_strings[-1]
        if name not in everywhere:
            value = VALUES.get(name, "3" if action.type else "x")
            yield (name,) if action.nargs == 0 else (name, value)


@pytest.mark.parametrize("option", list(options_of_run()), ids=lambda option: option[0])
def test_an_option_of_elastic_jobs_is_refused_in_others(capsys, option):
    command = ("run", "--nproc-per-node", "1", *option, "--", "python", "a.py")
    code, said = said_by(capsys, *command)
    assert code == 2 and f"{option[0]} is for a job" in said and "give --nnodes" in said


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--nnodes", "1", "--hostfile", "twice.txt"], "twice.txt: b is there twice"),
        (["--nnodes", "1", "--hostfile", "slots.txt"], "the host file says 'b 8'"),
        (["--nnodes", "1", "--hostfile", "none.txt"], "--hostfile none.txt: no host is named"),
        (["--nnodes", "1", "--hosts", ","], "--hosts ',': no host is named"),
        (["--nnodes", "1", "--hosts=-oProxyCommand=x"], "begins with a dash"),
        (["--nnodes", "1", "--hosts", "a,me@-b"], "'me@-b' begins with a dash"),
        (["--nnodes", "2", "--hosts", "a=1,b=2", "--hosts-per-group", "2"], "run 1, 2 processes"),
        (["--nnodes", "1", "--env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set here"),
        (["--nnodes", "1", "--env", "A=1", "--env", "A=2"], "--env A is given twice"),
        (["--nnodes", "1", "--local-hosts", "0", "--env", "A=1"], "--env has no effect with"),
        (["--nproc-per-node", "1", "--env", "1A=1"], "'1A' is no name of a variable"),
        (["--nproc-per-node", "1", "--env", "JAXGOODPUT_X=1"], "set by the launcher"),
        (["--nproc-per-node", "1", "--env", "A=1", "--env", "A=1"], "--env A is given twice"),
        (["--nnodes", "1", "--rsh", "ssh"], "--rsh is for the hosts of --hosts or --hostfile"),
        (["--nnodes", "1", "--remote-python", "python3"], "--remote-python is for the hosts"),
        (["--nnodes", "3:4", "--local-hosts", "2"], "--nnodes 3:4 needs 3 hosts, 2 are named"),
        (["--nnodes", "1", "--local-hosts", "0"], "which needs the secret of the job"),
        (["--nnodes", "1", "--rdzv-endpoint", "127.0.0.1:70000"], "from 1 to 65535"),
        (["--nnodes", "1", "--rdzv-endpoint", "no.such.host.invalid:0"], "cannot listen"),
    ],
)
def test_what_cannot_be_is_named_before_anything_starts(
    capsys, monkeypatch, folder, arguments, said
):
    monkeypatch.delenv("JAXGOODPUT_SECRET", raising=False)
    (folder / "twice.txt").write_text("a\nb\nb  # once more\n")
    (folder / "none.txt").write_text("# nobody\n\n")
    (folder / "slots.txt").write_text("a\nb 8\n")
    code, told = said_by(capsys, "run", *arguments, "--", "python", "a.py")
    assert code == 2 and said in told, told


def test_an_agent_without_the_secret_is_told_where_it_comes_from(capsys, monkeypatch):
    monkeypatch.delenv("JAXGOODPUT_SECRET", raising=False)
    code, said = said_by(capsys, "agent", "--rdzv-endpoint", "127.0.0.1:1", "--", "python", "a.py")
    assert code == 2 and "JAXGOODPUT_SECRET is not set" in said


def test_an_agent_that_finds_nobody_says_where_it_looked_and_why(capsys, monkeypatch):
    monkeypatch.setenv("JAXGOODPUT_SECRET", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    to = ("agent", "--name", "a", "--rdzv-endpoint", f"127.0.0.1:{port}", "--reconnect-s", "0")
    code, said = said_by(capsys, *to, "--", "python", "a.py")
    assert code == 1 and f"a: no coordinator answers at 127.0.0.1:{port}" in said
    assert "Connection refused" in said


# -- hosts that cannot take part ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_host_without_a_way_to_it_is_named_and_the_others_train(folder):
    (folder / "short.py").write_text("print('done here')")
    with start_on("far,near", "1:2", script="short.py") as job:
        end = job.wait()
    assert end.code == 0 and "done here" in end.out
    assert "far did not join: its agent has ended with exit code 255" in end.err
    assert "ssh: connect to host far port 22: No route to host" in end.err


@pytest.mark.parametrize(
    "hosts, nodes, why",
    [
        ("far,far2", "1:2", "all agents have ended"),
        ("far,near", "2", "the agents of far have ended, and it needs 2 hosts"),
    ],
)
def test_a_job_that_cannot_have_its_hosts_ends(hosts, nodes, why):
    with start_on(hosts, nodes) as job:
        end = job.wait()
    assert end.code == 255 and f"the job ends with exit code 255: {why}" in end.err, end


def test_another_script_on_a_host_is_refused_with_both_named(folder):
    (folder / "other").mkdir()
    (folder / "other" / "a.py").write_text("print('not the same')")
    with start_on("other", "1") as job:
        end = job.wait()
    assert end.code == 2
    assert "other was refused: the content of a.py is " in end.err
    assert " there and " in end.err and " on the host of the coordinator" in end.err


@pytest.mark.parametrize("package", ["jax", "optax"])
def test_another_version_of_a_package_on_a_host_is_refused_with_both_named(folder, package):
    known = folder / "old" / f"{package}-0.0.1.dist-info"
    known.mkdir(parents=True)
    (known / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.0.1\n")
    with start_on("old", "1") as job:
        end = job.wait()
    assert end.code == 2
    assert f"old was refused: {package} is 0.0.1 there and " in end.err


@pytest.mark.slow
@pytest.mark.parametrize("is_changed", [True, False])
def test_other_code_of_the_package_on_a_host_is_refused(folder, is_changed):
    """Both call themselves the same version; where they lie does not matter."""
    (folder / "short.py").write_text("print('done here')")
    copy = folder / "old" / "jaxgoodput"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(os.path.dirname(cli.__file__), copy, ignore=ignored)
    if is_changed:
        with (copy / "clock.py").open("a") as file:
            file.write("# changed\n")
    with start_on("old", "1", script="short.py") as job:
        end = job.wait()
    assert end.code == (2 if is_changed else 0), end
    assert ("old was refused: the code of jaxgoodput is " in end.err) == is_changed


@pytest.mark.slow
def test_a_failure_that_ends_the_job_has_its_last_lines_at_the_end(folder):
    (folder / "wrong.py").write_text("raise ValueError('no such thing')")
    with start("run", "--nnodes", "1", script="wrong.py") as job:
        end = job.wait()
    assert end.code == 1
    _, ends, rest = end.err.partition(
        "the job ends with exit code 1: 3 processes in a row have failed"
    )
    assert ends and re.search(r"the last failure on local was local\.\d: exit code 1", end.err)
    assert "]     raise" in end.err or "] ValueError: no such thing" in end.err
    last = [line for line in end.err.splitlines() if line.startswith("jaxgoodput: ")][-1]
    assert last.endswith("] ValueError: no such thing")


# -- all agents end ----------------------------------------------------------------------------------


class Training:
    """`elastic_worker.py` on hosts through the remote shell."""

    def __init__(self, folder, hosts, nodes):
        self.folder = folder / "job"
        self.folder.mkdir()
        words = (str(self.folder), "500", "0.05")
        self.job = start_on(
            hosts, nodes, "--join-s", "60", script=elastic_worker.__file__, words=words
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.job.__exit__()

    def lines(self, kind):
        return [x for _, x in processes.records_so_far(self.folder) if x["kind"] == kind]

    def wait_for_step(self, step, limit_s=90.0):
        deadline = time.monotonic() + limit_s
        while not any(x["step"] >= step for x in self.lines("step")):
            assert time.monotonic() < deadline and self.job.running(), self.job.text()
            time.sleep(0.05)

    def saved(self):
        folder = self.folder / "run" / "checkpoints"
        return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]

    def agents(self):
        """By host: the process that the remote shell became."""
        found = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended
                with open(f"/proc/{name}/cmdline") as file:
                    words = file.read().split("\0")
                with open(f"/proc/{name}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
                if parent == self.job.pid and "agent" in words:
                    found[words[words.index("--name") + 1]] = int(name)
        return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)]
)
def test_a_job_whose_agents_all_end_has_their_code(folder, signum):
    with Training(folder, "a,b", "1:2") as training:
        training.wait_for_step(5)
        agents = training.agents()
        assert set(agents) == {"a", "b"}
        for pid in agents.values():
            os.kill(pid, signum)
        end = training.job.wait()
    code = 143 if signum == signal.SIGTERM else exit_code([-signal.SIGKILL])
    assert end.code == code, end
    if signum == signal.SIGTERM:
        assert max(training.saved()) >= max(x["step"] for x in training.lines("step"))


@pytest.mark.slow
def test_a_job_with_too_few_hosts_for_good_saves_and_ends(folder):
    """Otherwise it would wait with the state in memory, until somebody looks."""
    with Training(folder, "a,b", "2") as training:
        training.wait_for_step(5)
        os.kill(training.agents()["b"], signal.SIGKILL)
        end = training.job.wait()
    assert end.code == 143, end
    why = "the agents of b have ended, and it needs 2 hosts"
    assert f"the job cannot go on: {why}" in end.err
    assert max(training.saved()) >= max(x["step"] for x in training.lines("step")) - 1
