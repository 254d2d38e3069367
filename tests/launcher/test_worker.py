"""A worker learns its place from its environment, or is told exactly what is missing."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxgoodput as jg
from jaxgoodput.launcher import worker
from jaxgoodput.launcher.worker import WorkerEnv
from jaxgoodput.train import process
from jaxgoodput.train.runs.kinds import hosts_may_change
from jaxgoodput.train.runs.membership import Membership

OURS = {
    "JAXGOODPUT_COORDINATOR": "h:1",
    "JAXGOODPUT_NUM_PROCESSES": "4",
    "JAXGOODPUT_PROCESS_ID": "3",
}
SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "5", "SLURM_STEP_NUM_TASKS": "5"}

counts = st.integers(1, 10**6)


@st.composite
def workers(draw):
    num_processes = draw(counts)
    return dict(  # the test makes it a WorkerEnv: type checks there may draw random numbers
        num_processes=num_processes,
        process_id=draw(st.integers(0, num_processes - 1)),
        coordinator=draw(st.just("host:1234") if num_processes > 1 else st.none()),
        job_id=draw(st.none() | st.text("abc-.1", min_size=1)),
        devices_per_process=draw(st.none() | counts),
        local_device_ids=draw(st.none() | st.lists(counts, min_size=1).map(tuple)),
        restart=draw(st.integers(0, 100)),
        lifeline=draw(st.none() | st.just("3:14:159")),
        beats=draw(st.none() | st.just("4:14:160")),
        grace_s=draw(st.none() | st.floats(0, 1e4)),
    )


@given(workers())
def test_what_the_launcher_writes_the_worker_reads(fields):
    env = WorkerEnv(**fields)
    assert WorkerEnv.from_environ(env.to_environ()) == env


@given(workers())
def test_our_variables_come_before_all_others(fields):
    env = WorkerEnv(**fields)
    others = {"JAX_COORDINATOR_ADDRESS": "x:9", "JAX_NUM_PROCESSES": "99", "JAX_PROCESS_ID": "98"}
    read = WorkerEnv.from_environ({**others, **SLURM, **env.to_environ()})
    assert read is not None
    assert (read.num_processes, read.process_id) == (env.num_processes, env.process_id)
    assert read.coordinator == (env.coordinator or "x:9")


def test_jax_variables_stand_in():
    env = WorkerEnv.from_environ(
        {"JAX_COORDINATOR_ADDRESS": "h:7", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}
    )
    assert env == WorkerEnv(num_processes=3, process_id=2, coordinator="h:7")


def test_slurm_gives_the_rank_to_what_coordinate_started():
    env = WorkerEnv.from_environ(
        {
            "JAXGOODPUT_COORDINATOR": "h:7",
            "JAXGOODPUT_NUM_PROCESSES": "5",
            **SLURM,
            "SLURM_JOB_ID": "17",
            "SLURM_RESTART_COUNT": "1",
        }
    )
    assert env == WorkerEnv(
        num_processes=5, process_id=2, coordinator="h:7", job_id="17", restart=1
    )


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PATH": "/bin", "JAX_PLATFORMS": "cpu"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "17"},  # a script inside sbatch
        {"SLURM_NTASKS": "4"},  # a script inside salloc
        {"JAXGOODPUT_NUM_PROCESSES": "", "JAXGOODPUT_COORDINATOR": ""},
    ],
)
def test_a_process_alone_is_left_alone(environ):
    assert WorkerEnv.from_environ(environ) is None
    assert worker.initialize(environ) is None


@pytest.mark.parametrize(
    "environ, message",
    [
        ({k: v for k, v in OURS.items() if "ID" not in k}, "JAXGOODPUT_PROCESS_ID is not set"),
        ({k: v for k, v in OURS.items() if "NUM" not in k}, "JAXGOODPUT_NUM_PROCESSES is not set"),
        ({k: v for k, v in OURS.items() if "COOR" not in k}, "JAXGOODPUT_COORDINATOR"),
        ({**OURS, "JAXGOODPUT_PROCESS_ID": "4"}, r"4 is not in \[0, 4\)"),
        ({**OURS, "JAXGOODPUT_PROCESS_ID": "-1"}, r"-1 is not in \[0, 4\)"),
        ({**OURS, "JAXGOODPUT_PROCESS_ID": "one"}, "JAXGOODPUT_PROCESS_ID='one' is not a whole"),
        ({**OURS, "JAXGOODPUT_NUM_PROCESSES": "0"}, "at least one process"),
        ({**OURS, "JAXGOODPUT_GRACE_S": "long"}, "JAXGOODPUT_GRACE_S='long' is not a number"),
        ({**OURS, "JAXGOODPUT_DEVICES_PER_PROCESS": "0"}, "at least 1 device"),
        ({**OURS, "JAX_LOCAL_DEVICE_IDS": "0,x"}, "JAX_LOCAL_DEVICE_IDS='x'"),
        (SLURM, "jaxgoodput coordinate"),  # srun without a coordinator: tasks would be strangers
    ],
)
def test_a_wrong_environment_is_named(environ, message):
    with pytest.raises(ValueError, match=message):
        WorkerEnv.from_environ(environ)


@pytest.mark.slow
@pytest.mark.multihost
def test_a_worker_dies_with_its_lifeline_and_ignores_a_strangers_pipe():
    # Two pipes that are already closed at the other end: only the one that is named counts.
    body = """
import os, sys, time
from jaxgoodput.launcher import worker
(mine, a), (strangers, b) = os.pipe(), os.pipe()
os.close(a), os.close(b)
name = worker.pipe_name(mine)
if sys.argv[1] == "stranger":
    name = name.replace(f"{mine}:", f"{strangers}:", 1)
worker.initialize({"JAXGOODPUT_NUM_PROCESSES": "1", "JAXGOODPUT_PROCESS_ID": "0",
                   "JAXGOODPUT_LIFELINE": name})
time.sleep(0.5 if sys.argv[1] == "stranger" else 60)
"""
    ends = {
        kind: subprocess.run([sys.executable, "-c", body, kind], timeout=60).returncode
        for kind in ("stranger", "mine")
    }
    assert ends == {"stranger": 0, "mine": -signal.SIGKILL}


def test_a_launcher_that_is_itself_a_worker_hides_its_own_job(monkeypatch):
    for name, value in {**OURS, "JAX_PROCESS_ID": "1", "OTHER": "kept"}.items():
        monkeypatch.setenv(name, value)
    environ = worker.inherited_environ()
    assert environ["OTHER"] == "kept"
    assert WorkerEnv.from_environ(environ) is None
    monkeypatch.undo()


def test_a_child_of_a_worker_has_its_environment_and_is_none(monkeypatch):
    monkeypatch.setattr(process.OF_PROCESS, "link", process.LauncherLink())
    assert worker.initialize({**OURS, "JAXGOODPUT_JOINED": "1"}) is None
    assert "JAXGOODPUT_JOINED" not in os.environ
    with pytest.raises(RuntimeError, match="cannot train.*process 1 has joined as that worker"):
        process.joined()
    with pytest.raises(RuntimeError, match="cannot train"):
        jg.Tuner(jg.BatchLimits(base=4, max=8), 10)


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "JAX_NUM_PROCESSES"])
def test_variables_of_others_ask_no_script_to_join(name, monkeypatch):
    before = process.LauncherLink()
    monkeypatch.setattr(process.OF_PROCESS, "link", before)
    monkeypatch.setenv(name, "4")
    assert process.joined() is before


def test_a_loop_of_ones_own_is_refused_in_a_job_whose_hosts_change(monkeypatch):
    link = process.LauncherLink(membership=mock.create_autospec(Membership, instance=True))
    monkeypatch.setattr(process.OF_PROCESS, "link", link)
    with pytest.raises(RuntimeError, match="hosts come and go.*jg.Trainer"):
        jg.Tuner(jg.BatchLimits(base=4, max=8), 10)


def test_every_thread_of_a_process_is_part_of_its_job(monkeypatch):
    link = process.LauncherLink(membership=mock.create_autospec(Membership, instance=True))
    monkeypatch.setattr(process.OF_PROCESS, "link", link)
    found = []
    thread = threading.Thread(target=lambda: found.append((hosts_may_change(), process.joined())))
    thread.start()
    thread.join()
    assert found == [(True, link)]


@pytest.mark.parametrize(
    "error, code",
    [
        (None, 0),
        (SystemExit(143), 143),
        (SystemExit(), 0),
        (SystemExit("why"), 1),
        (KeyboardInterrupt(), 130),
        (ValueError("why"), 1),
    ],
)
def test_a_launcher_hears_how_a_run_ends(error, code):
    heard = []
    link = process.LauncherLink(report=heard.append)
    with contextlib.suppress(BaseException), process.reported(link):
        if error is not None:
            raise error
    assert heard == [None, code]


@pytest.mark.parametrize("arguments", [[], ["-m"], ["-c", "pass"], ["absent.py"]])
def test_without_a_script_the_shim_says_how(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        worker.main(arguments)
    assert exit_info.value.code == 2
    assert "usage:" in capsys.readouterr().err
