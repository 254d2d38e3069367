"""One odd value of one option of any command: it works, or a usage error names the option."""

import argparse
import io
import random
import re
import socket
import sys

import pytest

from jaxgoodput import cli
from jaxgoodput.cluster.client import Client
from jaxgoodput.cluster.service import engines, serve
from jaxgoodput.cluster.service.node import agent as node_agent
from jaxgoodput.cluster.simulate import commands as simulate_commands
from jaxgoodput.launcher import local, plan, try_script
from jaxgoodput.launcher.elastic import agent, job
from jaxgoodput.observe import board

# Command lines that work, but for what they would start.
USUAL = {
    "run": "--nproc-per-node 2 -- true",
    "run --nnodes": "--nnodes 1:2 --rdzv-endpoint localhost:0 -- true",
    "agent": "--rdzv-endpoint localhost:9 --devices-per-process 1 -- true",
    "coordinate": "--num-processes 2 -- true",
    "plan": "train.py --devices 4",
    "try": "train.py --time-s 5",
    "report": ".",
    "board": ".",
    "simulate": "--workload synthetic:2 --policy goodput",
    "serve": "--folder service --local 1x2 --port 0",
    "node": "--folder service --name n0",
    "nodes": "--folder service --engine local",
    "manifests": "--image me/mine",
    "submit": "--folder service -- python train.py",
    "status": "--folder service --once",
    "logs": "--folder service a-job",
    "cancel": "--folder service a-job",
    "explain": "--folder service a-job",
    "drain": "--folder service a-node",
    "decide": "request.json",
}
REQUEST = """{"version": 1, "now_s": 0, "jobs": [{"id": "a"}],
    "cluster": {"nodes": [{"name": "n", "kind": "cpu", "num_devices": 1}]}}"""
# fmt: off
ODD = [
    *"0 -1 1 2 2.5 1e3 1e9 1e400 nan inf -inf true none 10m 3h 5% 16GiB 1,2 1:2 2:1 1:1:1 :: : a:b".split(),
    *"a=b a= = == =1 a ä ² ٣ ½ _ - -- . /dev/null /dev/null/x x@y @ @3h job@ job@x [ {} ( %s".split(),
    *"\\ * ? 1x 1x1 0x0 x 1x1x1 -1x2 t4:1x1 t4:0x1 localhost localhost:0 localhost:99999 localhost:x".split(),
    *"[::1]:5 http:// http://a http://a:x http://a:99999 http://[ https://a/b ftp://a goodput ' {0}".split(),
    *"goodput,goodput synthetic synthetic:0 synthetic:x synthetic: local slurm rigid node=1:1".split(),
    *"crash=0 start=-1 all=x 0.5:2 2:2 0:0 a:weight=0 a:b=c cpus=0 vision-small-0@1h job@-1 a:8@1h".split(),
    "", " ", "\u2028", "\ud800", "a b", "a\nb", "9" * 30, "9" * 5000, "1" + "0" * 400, "x" * 300, "é" * 5000,
    '{"a": 1}', "[" * 5000, "0" * 400 + "1", "1_000", "+1", " 1", "1 ", "1e-400", "0x10", "1.", "a\0b",
    "\x1b[2J",
]
# fmt: on


class Begun(BaseException):
    """What the command would start."""


def begin(*_, **__):
    raise Begun


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs a command line in this process up to what it would start; returns its code and its errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXGOODPUT_SECRET", "secret")
    folder = tmp_path / "service"
    folder.mkdir()
    (tmp_path / "request.json").write_text(REQUEST)
    (folder / "address").write_text("http://localhost:9\n")
    (folder / "token").write_text("0123456789abcdef" * 4 + "\n")
    for place, name in (
        *((local, "supervise"), (job, "Coordinator"), (agent, "_connected"), (plan, "plan")),
        *((serve, "_listener"), (node_agent, "_hold"), (engines, "run_engine"), (board, "show")),
        (try_script, "try_script"),
        *((Client, "call"), (simulate_commands, "_progress"), (socket, "getaddrinfo")),
    ):
        monkeypatch.setattr(place, name, begin)
    for place in (job, agent):
        monkeypatch.setattr(place, "facts_of", lambda _: {})  # reads the whole package
    parser = cli.command_parser()
    monkeypatch.setattr(cli, "command_parser", lambda: parser)

    def run(arguments):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(REQUEST.encode())))
        try:
            code = cli.main(arguments)
        except Begun:
            code = 0
        except SystemExit as ended:
            code = ended.code
        except Exception as error:
            code = error
        return code, capsys.readouterr().err

    return run


def options_of(name):
    """The options of a command that take a value, and its arguments."""
    own = cli._parsers(cli.command_parser())[name]
    return [a for a in own._actions if a.nargs != 0 and not isinstance(a, argparse._HelpAction)]


def with_odd(usual, option, text):
    """A usual command line with one option's value in place of its own."""
    words, _, command = usual.partition(" -- ")
    words = words.split()
    if not option.option_strings:  # an argument: the one word that is none of the options
        taken = {
            i + 1 for i, word in enumerate(words) if word.startswith("--") and word != "--once"
        }
        own = [i for i, word in enumerate(words) if not word.startswith("--") and i not in taken]
        words[slice(own[0], own[0] + 1) if own else slice(0, 0)] = [text]
    else:
        flag = option.option_strings[-1]
        if flag in words:
            place = words.index(flag)
            del words[place : place + 2]
        words.append(f"{flag}={text}")
    return [*words, *(["--", *command.split()] if command else [])]


def problem(call, name, option, text):
    """What is wrong with how an odd value is answered; "" if nothing is."""
    command = name.split()[0]
    code, said = call([command, *with_odd(USUAL[name], option, text)])
    flag = option.option_strings[-1] if option.option_strings else (option.metavar or option.dest)
    if code == 0:
        return ""
    if code not in (1, 2) or "Traceback" in said:
        return f"{code!r} {said[-300:]}"
    if not re.search(r"^jaxgoodput( \w+)?: .{10,}", said, re.MULTILINE | re.DOTALL):
        return f"says nothing: {said[-300:]}"
    has_name = flag.lower() in said.lower() or (not option.option_strings and text[:20] in said)
    return "" if has_name or "NUL" in said else f"not named: {said[-300:]}"


CASES = [
    (name, option, text)
    for name in USUAL
    for option in options_of(name.split()[0])
    for text in ODD
    # The tables of a workload are looked for in all folders below.
    if not (option.dest == "workload" and text in ("/", ".."))
]


def check(call, cases):
    found = []
    for name, option, text in cases:
        if wrong := problem(call, name, option, text):
            found.append(f"{name} {option.dest}={text[:40]!r}: {wrong}")
    assert not found, "\n".join(found[:20]) + f"\n{len(found)} of {len(cases)}"


@pytest.mark.parametrize("name", USUAL)
def test_a_usual_command_line_works(call, name):
    words, _, command = USUAL[name].partition(" -- ")
    code, said = call(
        [name.split()[0], *words.split(), *(["--", *command.split()] if command else [])]
    )
    assert code == 0 or name == "report", said


@pytest.mark.slow
def test_an_odd_value_names_its_option(call):
    check(call, random.Random(0).sample(CASES, 300))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", USUAL)
def test_every_odd_value_names_its_option(call, name):
    check(call, [case for case in CASES if case[0] == name])


@pytest.mark.parametrize("depth", [1, 4, 12])
@pytest.mark.parametrize(
    "line", ["simulate --policy goodput --workload", "simulate --workload synthetic:2 --cluster"]
)
def test_a_path_is_named_whole_however_long(capsys, tmp_path, line, depth):
    """A user copies it from the message."""
    path = tmp_path.joinpath(*["a folder of a long name"] * depth, "absent")
    assert cli.main([*line.split(), str(path)]) in (1, 2)
    assert str(path) in capsys.readouterr().err
