"""The recipes in `launch/` really start jobs; Slurm itself is stood in for by two stubs."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest
import yaml
from processes import Job

from jaxgoodput.cli import command_parser
from jaxgoodput.launcher.hosts import SECRET

LAUNCH = pathlib.Path(__file__).resolve().parents[2] / "launch"
RECIPES = sorted(path for path in LAUNCH.iterdir() if path.is_file())

TRAIN = """
    import os, signal, sys, time
    import jax, jax.numpy as jnp
    from jax.experimental import multihost_utils

    total = multihost_utils.process_allgather(jnp.float32(jax.process_index() + 1)).sum()
    world = f"{jax.process_count()} x {len(jax.local_devices())}"
    print(f"sum={float(total)} of {world} {sys.argv[1:]}")
    if sys.argv[1] == "wait":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        print("ready", flush=True)
        time.sleep(600)
    sys.exit(int(sys.argv[1]))
"""

# What srun does for this recipe: the tasks with their ranks, and the highest code. SIGTERM kills.
SRUN = """
    #!{python}
    import os, signal, subprocess, sys
    command = sys.argv[1:]
    while command[0].startswith("-"):
        command.pop(0)
    count = int(os.environ["SLURM_NTASKS"])
    tasks = [
        subprocess.Popen(command, env={{**os.environ, "SLURM_PROCID": str(rank),
                                        "SLURM_STEP_NUM_TASKS": str(count)}})
        for rank in range(count)
    ]
    signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks])
    with open({tasks!r}, "w") as file:
        print(*(task.pid for task in tasks), file=file)
    sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(TRAIN))
    return str(path)


@pytest.fixture
def environ(tmp_path):
    """A PATH with this interpreter's commands and the stubs of Slurm's, and a job of two tasks."""
    commands = tmp_path / "bin"
    commands.mkdir()
    tasks = str(tmp_path / "tasks")
    (commands / "srun").write_text(
        textwrap.dedent(SRUN).lstrip().format(python=sys.executable, tasks=tasks)
    )
    (commands / "scontrol").write_text('#!/bin/sh\necho "scontrol $*"\n')
    (commands / "scancel").write_text(
        f'#!/bin/sh\n[ "$*" = "--signal=TERM 17.0" ] && kill -TERM $(cat {tasks})\n'
    )
    (commands / "hostname").write_text("#!/bin/sh\necho localhost\n")
    for command in commands.iterdir():
        command.chmod(0o755)
    here = os.path.dirname(sys.executable)
    return {
        "PATH": f"{commands}:{here}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "0",  # Slurm sets it for the batch script too
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_short_and_parses(path):
    assert len(path.read_text().splitlines()) <= 40
    if path.suffix != ".yaml":
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_the_pods_of_a_jobset_run_commands_that_there_are():
    """Read as Kubernetes would read it; the coordinator and the hosts train the same at one address."""
    manifest = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    assert manifest["kind"] == "JobSet"
    commands = []
    for job in manifest["spec"]["replicatedJobs"]:
        pod = job["template"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["restartPolicy"] == "Never" and container["env"][0]["name"] == SECRET
        program, *arguments = container["command"]
        assert program == "jaxgoodput"
        split = arguments.index("--")
        commands.append((command_parser().parse_args(arguments[:split]), arguments[split:]))
        endpoint = manifest["metadata"]["name"] + "-coordinator-0-0." + manifest["metadata"]["name"]
        assert commands[-1][0].rdzv_endpoint == f"{endpoint}:29400"
    (run, trained), (agent, other) = commands
    assert (run.called, agent.called) == ("run", "agent") and trained == other
    most = manifest["spec"]["replicatedJobs"][1]["template"]["spec"]["parallelism"]
    assert run.nnodes == f"1:{most}" and run.local_hosts == 0


NIGHTLY = (pytest.mark.slow, pytest.mark.nightly)


@pytest.mark.multihost
@pytest.mark.parametrize("code", [pytest.param(0, marks=NIGHTLY), 5])
def test_local_trains_and_passes_the_exit_code_on(code, train, environ):
    environ = {**environ, "PROCESSES": "2", "DEVICES": "3", "RESTARTS": "0"}
    with Job([str(LAUNCH / "local.sh"), train, str(code), "b c"], environ) as job:
        end = job.wait()
    assert end.code == code, end
    for rank in range(2):
        assert end.value(rank, "sum") == f"3.0 of 2 x 3 ['{code}', 'b c']"


@pytest.mark.multihost
def test_local_starts_again_after_143(train, environ):
    environ = {**environ, "PROCESSES": "1", "RESTARTS": "2"}
    with Job([str(LAUNCH / "local.sh"), train, "143"], environ) as job:
        end = job.wait()
    assert end.code == 143, end
    assert len(end.lines(0)) == 3


def test_local_without_a_script_says_how(environ):
    with Job([str(LAUNCH / "local.sh")], environ) as job:
        end = job.wait()
    assert end.code == 2
    assert "launch/local.sh train.py --workdir" in end.err
    assert "Exit codes:" in end.err


FIT = """
    import sys
    import jax, jax.numpy as jnp, numpy as np, optax
    import jaxgoodput as jg

    class Mean(jg.Trainer):
        def init(self, key):
            return {"w": jnp.zeros(3)}

        def loss(self, params, batch, key):
            return jnp.sum((params["w"] - batch["x"]) ** 2, axis=-1)

        def optimizer(self):
            return optax.sgd(0.1)

        def dataset(self):
            return {"x": np.ones((64, 3), np.float32)}

    config = jg.Config(
        workdir=sys.argv[1],
        batch=jg.BatchLimits(base=8, max=8),
        policy="fixed",
        epochs=4,
        reporting=jg.Reporting(tensorboard=False, progress=False),
    )
    state = Mean(config).fit()
    print(f"steps={int(state.step)} of {jax.process_count()}")
"""


@pytest.mark.multihost
def test_ssh_trains_on_the_hosts_of_a_file(tmp_path, environ):
    """The remote shell is stood in for by one that runs here."""
    script, shell, hosts = tmp_path / "fit.py", tmp_path / "shell", tmp_path / "hosts.txt"
    script.write_text(textwrap.dedent(FIT))
    shell.write_text('#!/bin/sh\nexec sh -c "$2"\n')
    shell.chmod(0o755)
    hosts.write_text("# two\none\n\ntwo  # the other\n")
    environ = {**environ, "MIN": "2", "RSH": str(shell), "ENDPOINT": "127.0.0.1:0"}
    command = [str(LAUNCH / "ssh.sh"), str(hosts), str(script), str(tmp_path / "run")]
    with Job(command, environ) as job:
        end = job.wait()
    assert end.code == 0, end
    assert end.out.count("steps=32 of 2") == 2


def test_ssh_without_a_script_says_how(environ):
    with Job([str(LAUNCH / "ssh.sh"), "hosts.txt"], environ) as job:
        end = job.wait()
    assert end.code == 2
    assert "launch/ssh.sh hosts.txt train.py --workdir" in end.err and "Exit codes:" in end.err


@pytest.mark.multihost
@pytest.mark.parametrize(
    "code, requeued", [pytest.param(0, False, marks=NIGHTLY), (5, False), (143, True)]
)
def test_slurm_requeues_what_wants_a_restart(code, requeued, train, environ):
    with Job(["bash", str(LAUNCH / "slurm.sbatch"), train, str(code)], environ) as job:
        end = job.wait()
    assert end.code == code, end
    assert end.out.count(f"sum=3.0 of 2 x 1 ['{code}']") == 2
    assert ("scontrol requeue 17" in end.out) == requeued


@pytest.mark.multihost
def test_slurm_saves_and_requeues_when_time_is_up(train, environ):
    with Job(["bash", str(LAUNCH / "slurm.sbatch"), train, "wait"], environ) as job:
        job.wait_for("ready", count=2)
        job.send(signal.SIGUSR1)  # what --signal=B:USR1@300 sends to the script
        end = job.wait()
    assert end.code == 143, end
    assert "scontrol requeue 17" in end.out
