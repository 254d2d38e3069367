"""An engine keeps an agent on every node: those that crash come back, those that are not wanted do not."""

import os
import pathlib
import socket
import ssl
import subprocess
import threading
import time

import pytest

from jaxgoodput.clock import FakeClock
from jaxgoodput.cluster.service.engines import AGAIN_S, run_engine, slurm_nodes
from jaxgoodput.cluster.service.node.agent import IN_USE


class Scripted:
    """Agents that end as a script says: by name, an exit code for each start; None: it goes on."""

    def __init__(self, clock, codes, told):
        self.clock, self.codes, self.told = clock, codes, told
        self.started, self.running, self.stopped = [], {}, False
        self.there: dict[str, tuple[str, ...]] = dict.fromkeys(codes, ("--address", "here"))

    def nodes(self):
        return self.there

    def start(self, name, arguments):
        self.started.append((name, tuple(arguments), self.clock.now()))
        self.running[name] = self.codes[name].pop(0)

    def ended(self):
        self.clock.advance(1.0)
        if self.clock.now() > 60.0:
            self.told.set()
        found = {name: code for name, code in self.running.items() if code is not None}
        for name in found:
            del self.running[name]
        return found

    def stop(self):
        self.stopped = True


def test_agents_that_crash_or_find_another_one_are_started_again_and_others_are_not():
    clock, told = FakeClock(), threading.Event()
    engine = Scripted(clock, {"a": [-9, 1, None], "b": [2], "c": [None], "d": [IN_USE, None]}, told)
    told.wait = lambda timeout=None: told.is_set()
    code = run_engine(engine, ["--devices", "2"], told, clock, pytest.fail)
    assert code == 0 and engine.stopped
    starts = {name: [at for other, _, at in engine.started if other == name] for name in "abcd"}
    assert [len(starts[name]) for name in "abcd"] == [3, 1, 1, 2]
    assert all(b - a >= AGAIN_S for a, b in zip(starts["a"], starts["a"][1:], strict=False))
    assert engine.started[0][1] == tuple("node --name a --address here --devices 2".split())


def test_it_ends_with_the_last_of_them():
    clock, told = FakeClock(), threading.Event()
    told.wait = lambda timeout=None: told.is_set()
    engine = Scripted(clock, {"a": [0], "b": [2]}, told)
    assert run_engine(engine, [], told, clock, pytest.fail) == 2
    assert not engine.stopped


def test_nodes_that_go_are_told_and_those_that_come_get_an_agent():
    clock, told, lost = FakeClock(), threading.Event(), []
    engine = Scripted(clock, {"a": [None], "b": [None, None], "c": [None]}, told)
    del engine.there["c"]

    def wait(timeout=None) -> bool:
        if clock.now() > 10.0:
            engine.there.setdefault("c", ())
        if 20.0 < clock.now() < 30.0:
            engine.there.pop("b", None)
        if 30.0 < clock.now():
            engine.there.setdefault("b", ())
        return told.is_set()

    told.wait = wait
    ended, engine.ended = engine.ended, lambda: gone(ended())

    def gone(found):
        if 20.0 < clock.now() < 30.0 and "b" in engine.running:
            del engine.running["b"]
            return {**found, "b": None}
        return found

    assert run_engine(engine, [], told, clock, lost.append) == 0
    starts = {name: [at for other, _, at in engine.started if other == name] for name in "abc"}
    assert [len(starts[name]) for name in "abc"] == [1, 2, 1]
    assert lost == ["b"] and starts["b"][1] >= 30.0 and starts["c"][0] >= 10.0


def test_slurm_outside_of_an_allocation(tmp_path, monkeypatch):
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\necho 'host list is empty' >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="host list is empty.*sbatch or salloc"):
        slurm_nodes()
    program.write_text("#!/bin/sh\necho n0; echo n1\n")
    assert slurm_nodes() == ["n0", "n1"]


PROGRAM = """#!/bin/sh
echo "$@" > "$OUT/$1"
[ "$1" = nodes ] && exit 0
echo somewhere > "$3/address"
exec sleep 60
"""


@pytest.mark.parametrize(
    "nodes, host, certified",
    [("1", "127.0.0.1", False), ("4", socket.gethostname(), True)],
)
def test_a_scheduler_for_several_hosts_can_be_reached_by_them(tmp_path, nodes, host, certified):
    program = tmp_path / "jaxgoodput"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    own = ("HOST", "CERTIFICATE", "KEY")
    environ = {
        **{name: value for name, value in os.environ.items() if name not in own},
        **{"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path)},
        "SLURM_JOB_NUM_NODES": nodes,
    }
    folder = tmp_path / "shared"
    folder.mkdir()
    recipe = pathlib.Path(__file__).parents[3] / "launch" / "service.sbatch"
    subprocess.run(["bash", str(recipe), str(folder)], env=environ, timeout=60, check=False)
    served, joined = (tmp_path / "serve").read_text(), (tmp_path / "nodes").read_text()
    assert f"--host {host} " in served
    assert (f"--tls-certificate {folder}/certificate.pem" in served) == certified
    assert (f"--ca {folder}/certificate.pem" in joined) == certified
    if certified:
        assert (folder / "key.pem").stat().st_mode & 0o77 == 0
        ssl.create_default_context(cafile=str(folder / "certificate.pem"))


DYING = """#!/bin/sh
echo "$1" >> "$OUT/started"
echo somewhere > "$3/address"
[ "$1" = nodes ] && exec sleep 600
[ "$(grep -c serve "$OUT/started")" = 1 ] && exit 1
exec sleep 600
"""


def test_a_scheduler_that_dies_in_an_allocation_is_started_again(tmp_path):
    program = tmp_path / "jaxgoodput"
    program.write_text(DYING)
    program.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path)}
    environ |= {"SLURM_JOB_NUM_NODES": "1", "HOST": "127.0.0.1"}
    folder = tmp_path / "shared"
    folder.mkdir()
    recipe = pathlib.Path(__file__).parents[3] / "launch" / "service.sbatch"
    with subprocess.Popen(["bash", str(recipe), str(folder)], env=environ) as script:
        try:
            deadline = time.monotonic() + 20.0
            started = tmp_path / "started"
            while not started.exists() or started.read_text().split().count("serve") < 2:
                assert time.monotonic() < deadline, "it was not"
                time.sleep(0.1)
        finally:
            script.terminate()
            script.wait(20.0)
    assert started.read_text().split().count("nodes") == 1
