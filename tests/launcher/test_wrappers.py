"""A script under any wrapper is a worker of its job, its children are none, and no process trains alone."""

import json
import os
import re
import signal
import sys
import textwrap

import elastic_worker
import pytest
from processes import Job, gone

pytestmark = [pytest.mark.slow, pytest.mark.multihost]

PYTHON = sys.executable
HIDING = f"{PYTHON} train.py; echo after; true"
WRAPPERS = {
    "env": ["env", "X=1", PYTHON, "train.py"],
    "a shell": ["bash", "-c", f"{PYTHON} train.py; code=$?; echo after; exit $code"],
    "a script": ["./wrapper.sh", "train.py"],
    "nice, through a program in Python": ["nice", PYTHON, "wrapper.py", PYTHON, "train.py"],
    "another session": ["setsid", "--wait", PYTHON, "train.py"],
}
EVERY = [
    pytest.param(name, marks=[] if name == "env" else pytest.mark.nightly) for name in WRAPPERS
]

# Children are started before and after the script itself uses Trainer, and use it as well.
SCRIPT = """
    import multiprocessing, os, subprocess, sys
    import jaxgoodput as jg

    class Model(jg.Trainer):
        pass

    def child(pipe):
        import jax
        pipe.send((Model.__name__, jax.process_count(), len(jax.devices())))

    if __name__ == "__main__":
        import jax
        print(f"world={jax.process_index()} of {jax.process_count()}", flush=True)
        print(f"devices={jax.local_device_count()} of {jax.device_count()}", flush=True)
        print(f"x={os.environ.get('X')}", flush=True)
        if jax.process_index() == 0:
            here, there = multiprocessing.Pipe()
            reader = multiprocessing.get_context("spawn").Process(target=child, args=(there,))
            reader.start()
            print(f"reader={here.recv()}", flush=True)
            reader.join()
            done = subprocess.run([sys.executable, "other.py"], capture_output=True, text=True)
            print(f"other={done.returncode} {'cannot train' in done.stderr}", flush=True)
"""

# Another script: reading is allowed, training is not.
OTHER = """
    import jaxgoodput as jg

    class Other(jg.Trainer):
        def init(self, key): ...
        def loss(self, params, batch, key): ...
        def optimizer(self): ...
        def dataset(self): ...

    limits = jg.BatchLimits(base=4, max=4)
    Other(jg.Config(workdir="other", batch=limits, base_steps=1)).fit()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the scripts and wrappers."""
    monkeypatch.chdir(tmp_path)
    for name, body in {
        "train.py": SCRIPT,
        "other.py": OTHER,
        "wrapper.sh": f'#!/bin/sh\n"{PYTHON}" "$@"\nexit $?\n',
        "wrapper.py": "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))",
    }.items():
        (tmp_path / name).write_text(textwrap.dedent(body))
    (tmp_path / "wrapper.sh").chmod(0o755)
    return tmp_path


def run(*arguments, limit_s=90.0, **environ):
    with start(*arguments, **environ) as job:
        return job.wait(limit_s=limit_s)


def start(*arguments, **environ):
    return Job([PYTHON, "-m", "jaxgoodput.cli", "run", *arguments], environ)


@pytest.mark.parametrize("wrapper", EVERY)
def test_a_script_in_a_wrapper_is_a_worker_and_its_children_are_not(wrapper, folder):
    options = ("--nproc-per-node", "2", "--devices-per-process", "2", "--env", "X=7")
    end = run(*options, "--", *WRAPPERS[wrapper])
    assert end.code == 0, end
    for rank in range(2):
        assert end.value(rank, "world") == f"{rank} of 2"
        assert end.value(rank, "devices") == "2 of 4"
        assert end.value(rank, "x") == ("1" if wrapper == "env" else "7")
    assert end.value(0, "reader").startswith("('Model', 1, "), "the reader of data is alone"
    assert end.value(0, "other") == "1 True"


@pytest.mark.parametrize("wrapper", EVERY)
def test_workers_in_wrappers_train_together_while_hosts_come_and_go(wrapper, tmp_path, folder):
    out, epochs = tmp_path / "out", 2
    out.mkdir()
    worker = [elastic_worker.__file__, str(out), str(epochs), "0.02"]
    command = [
        word.replace("train.py", " ".join(worker)) if " " in word else word
        for word in WRAPPERS[wrapper]
    ]
    if "train.py" in command:
        command[command.index("train.py") :] = worker
    options = ("--nnodes", "2", "--local-hosts", "2", "--join-s", "60")
    end = run(*options, "--", *command, limit_s=120.0)
    assert end.code == 0, end
    assert re.search(r"generation 1: local\d\.\d, local\d\.\d, from", end.err), end
    lines = [json.loads(x) for path in out.glob("*.jsonl") for x in path.read_text().splitlines()]
    ends = [line for line in lines if line["kind"] == "end"]
    assert len(ends) == 2
    for line in ends:
        assert line["count"] == [float(epochs)] * elastic_worker.NUM_SAMPLES


@pytest.mark.parametrize("kind", ["processes", "hosts"])
@pytest.mark.parametrize("command", [["sh", "-c", "echo alone"], ["env", PYTHON, "plain.py"]])
def test_processes_that_never_join_are_not_done(kind, command, folder):
    (folder / "plain.py").write_text("import jax\nprint(jax.process_count())\n")
    options = ("--nproc-per-node", "2") if kind == "processes" else ("--nnodes", "2")
    more = () if kind == "processes" else ("--local-hosts", "2")
    end = run(*options, *more, "--", *command)
    assert end.code == 1, end
    assert "ended with code 0, but none of its processes had joined the job" in end.err
    assert f"`{command[0]}" in end.err and "python -m jaxgoodput.launcher SCRIPT" in end.err


@pytest.mark.parametrize("kind", ["processes", "hosts"])
def test_processes_that_do_not_join_in_time_are_ended_and_named(kind, folder):
    options = ("--nproc-per-node", "2") if kind == "processes" else ("--nnodes", "2")
    more = () if kind == "processes" else ("--local-hosts", "2")
    end = run(*options, *more, "--connect-s", "1", "--", "sh", "-c", "sleep 600; true")
    assert end.code == 1, end
    assert "`sh -c 'sleep 600; true'` was started 1 s ago (--connect-s)" in end.err
    assert "SIGKILL" in end.err and "jaxgoodput.initialize()" in end.err


def test_ranks_that_another_program_gives_reach_a_script_in_a_wrapper(folder):
    (folder / "train.py").write_text(
        "import jaxgoodput as jg\njg.Trainer\nimport jax\n"
        "print(f'world={jax.process_index()} of {jax.process_count()}', flush=True)\n"
    )
    starts = f'for r in 0 1; do JAXGOODPUT_PROCESS_ID=$r env "{PYTHON}" train.py & done; wait'
    command = [PYTHON, "-m", "jaxgoodput.cli", "coordinate", "--num-processes", "2"]
    with Job([*command, "--host", "127.0.0.1", "--", "bash", "-c", starts]) as job:
        end = job.wait()
    assert end.code == 0, end
    # Both write to one pipe, perhaps into the same line.
    assert "world=0 of 2" in end.out and "world=1 of 2" in end.out, end


def test_hosts_have_users_ports_and_slots_and_their_processes_get_the_variables(folder):
    (folder / "shell").write_text(
        '#!/bin/sh\n[ "$1" = -p ] && { echo "port=$2" >> shells; shift 2; }\n'
        'echo "host=$1" >> shells; exec sh -c "$2"\n'
    )
    (folder / "shell").chmod(0o755)
    (folder / "train.py").write_text(
        "import os, pathlib, time\n"
        "seen = pathlib.Path(os.environ['JAXGOODPUT_MEMBER'] + '.seen')\n"
        "seen.write_text(os.environ['X'] + os.environ['Y'])\n"
        "while len(list(pathlib.Path().glob('*.seen'))) < 3: time.sleep(0.05)\n"
    )
    options = ("--rsh", "./shell", "--rdzv-endpoint", "127.0.0.1:0", "--env", "X=a b", "--env", "Y")
    hosts = ("--nnodes", "2", "--hosts", "near=2,me@far:2222")
    end = run(*hosts, *options, "--", "python", "train.py", Y="'c'")
    assert end.code == 0, end
    seen = {path.name.rpartition(".")[0]: path.read_text() for path in folder.glob("*.seen")}
    assert {name.rpartition(".")[0] for name in seen} == {"near", "me@far:2222"}
    assert len(seen) == 3 and set(seen.values()) == {"a b'c'"}
    assert sorted((folder / "shells").read_text().split()) == [
        "host=me@far",
        "host=near",
        "port=2222",
    ]


def test_one_process_may_be_alone_and_need_not_join(folder):
    end = run("--nproc-per-node", "1", "--", "sh", "-c", "echo alone")
    assert (end.code, end.lines(0)) == (0, ["alone"])


FIRST = "import jaxgoodput as jg; jg.Trainer; print('joined=yes')"


def test_the_first_of_several_scripts_is_the_worker_and_the_next_says_so(folder):
    (folder / "first.py").write_text(FIRST)
    command = f"{PYTHON} first.py; {PYTHON} other.py"
    end = run("--nproc-per-node", "2", "--", "bash", "-c", command)
    assert end.code == 1, end
    assert end.value(0, "joined") == "yes"
    assert "first.py`) has joined as that worker already" in end.err


def test_scripts_of_a_job_of_one_process_follow_each_other_and_start_others(folder):
    (folder / "first.py").write_text(FIRST)
    (folder / "starts.py").write_text(
        "import subprocess, jaxgoodput as jg; jg.Trainer; "
        f"subprocess.run([{PYTHON!r}, 'last.py'], check=True)"
    )
    (folder / "last.py").write_text(
        "import jaxgoodput as jg\nfrom jaxgoodput.train.process import joined\n"
        "jg.Trainer\njoined()\nprint('may=train')\n"
    )
    command = f"{PYTHON} first.py && {PYTHON} starts.py && {PYTHON} last.py"
    end = run("--nproc-per-node", "1", "--", "bash", "-c", command)
    assert end.code == 0 and end.lines(0).count("may=train") == 2, end


def test_a_script_that_executes_itself_anew_stays_the_worker(folder):
    (folder / "again.py").write_text(
        "import os, sys\nimport jaxgoodput as jg\njg.Trainer\n"
        "if 'AGAIN' not in os.environ:\n"
        "    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, 'AGAIN': '1'})\n"
        "print('joined=twice')\n"
    )
    end = run("--nproc-per-node", "1", "--", "env", PYTHON, "again.py")
    assert (end.code, end.value(0, "joined")) == (0, "twice"), end


@pytest.mark.parametrize(
    "use", ["jax.devices()", pytest.param("jax.numpy.ones(3)", marks=pytest.mark.nightly)]
)
def test_a_script_that_has_used_devices_before_is_refused(use, folder):
    (folder / "train.py").write_text(f"import jax\n{use}\nimport jaxgoodput as jg\njg.Trainer\n")
    end = run("--nproc-per-node", "2", "--", *WRAPPERS["env"])
    assert end.code == 1, end
    assert "JAX has already used its devices" in end.err
    assert "call jaxgoodput.initialize() at the top of the script" in end.err


LONG = """
    import sys, time
    import jax.numpy as jnp, numpy as np, optax
    import jaxgoodput as jg
    from jaxgoodput.data.sources import ArraySource

    class Model(jg.Trainer):
        def init(self, key):
            return {"w": jnp.zeros(2)}

        def loss(self, params, batch, key):
            return ((batch["x"] - params["w"]) ** 2).mean(axis=-1)

        def optimizer(self):
            return optax.sgd(0.01)

        def dataset(self):
            return ArraySource({"x": np.ones((64, 2), np.float32)})

    class Tells(jg.Hook):
        def on_step_end(self, event):
            if event.step == 5:
                print("at step 5", flush=True)
            time.sleep(0.01)

    saving = jg.Saving(every_s=1e9)
    quiet = jg.Reporting(tensorboard=False, progress=False)
    config = jg.Config(
        workdir="run", batch=jg.BatchLimits(base=8, max=8), base_steps=1e6, policy="fixed",
        saving=saving, reporting=quiet,
    )
    Model(config, hooks=[Tells()]).fit()
"""


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)]
)
def test_a_stop_reaches_the_worker_in_a_wrapper_that_hides_how_it_ended(signum, folder):
    (folder / "train.py").write_text(textwrap.dedent(LONG))
    with start("--nproc-per-node", "1", "--", "bash", "-c", HIDING) as job:
        job.wait_for("at step 5")
        job.send(signum)
        end = job.wait()
    assert end.code == 143, end
    assert "after" in end.lines(0), "the wrapper itself was not ended"
    steps = [int(name) for name in os.listdir("run/checkpoints") if name.isdigit()]
    assert max(steps, default=0) >= 5, "143 promises that the last step is saved"


def test_a_worker_that_is_killed_in_a_wrapper_that_hides_it_has_failed(folder):
    (folder / "train.py").write_text(
        textwrap.dedent(LONG).replace(
            'print("at step 5", flush=True)', "import os; os.kill(os.getpid(), 9)"
        )
    )
    end = run("--nproc-per-node", "1", "--", "bash", "-c", HIDING)
    assert end.code == 1, end
    assert "was ended from outside" in end.err


def test_nothing_is_left_of_wrappers_whose_launcher_is_killed(folder):
    (folder / "train.py").write_text(
        "import os, time, jaxgoodput as jg\njg.Trainer\n"
        "print(f'pids {os.getpid()} {os.getppid()}', flush=True)\ntime.sleep(600)\n"
    )
    with start("--nproc-per-node", "2", "--", "bash", "-c", HIDING) as job:
        output = job.wait_for("pids", count=2)
        pids = [int(p) for line in output.splitlines() if "pids" in line for p in line.split()[2:]]
        assert len(pids) == 4
        job.send(signal.SIGKILL)
        assert all(gone(pid) for pid in pids)
