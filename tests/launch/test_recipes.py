"""The recipes in `launch/` really start jobs; what they are given by Slurm and gcloud are stubs here.

A real Slurm runs one in `tests/launcher/test_slurm.py`.
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
import yaml
from processes import LIMIT_S, Job

from jaxgoodput.cli import command_parser
from jaxgoodput.launcher.elastic.hosts import SECRET

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
        "HOME": str(tmp_path / "home"),
        "PATH": f"{commands}:{here}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "0",  # Slurm sets it for the batch script too
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_short_and_parses(path):
    assert len(path.read_text().splitlines()) <= 40
    if path.suffix in (".sh", ".sbatch"):
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_the_pods_of_a_jobset_run_commands_that_there_are():
    """Read as Kubernetes would read it; the coordinator and the hosts train the same at one address."""
    manifest = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    assert manifest["kind"] == "JobSet"
    commands, variables = [], []
    for job in manifest["spec"]["replicatedJobs"]:
        pod = job["template"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["restartPolicy"] == "Never"
        variables.append({variable["name"]: variable["valueFrom"] for variable in container["env"]})
        assert SECRET in variables[-1]
        program, *arguments = container["command"]
        assert program == "jaxgoodput"
        split = arguments.index("--")
        commands.append((command_parser().parse_args(arguments[:split]), arguments[split:]))
    (run, trained), (agent, other) = commands
    # The coordinator listens before there is a name for its pod; hosts look for that name until there is.
    assert run.rdzv_endpoint == "$(POD_IP):29400"
    assert variables[0]["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    endpoint = manifest["metadata"]["name"] + "-coordinator-0-0." + manifest["metadata"]["name"]
    assert agent.rdzv_endpoint == f"{endpoint}:29400"
    assert (run.called, agent.called) == ("run", "agent") and trained == other
    most = manifest["spec"]["replicatedJobs"][1]["template"]["spec"]["parallelism"]
    assert run.nnodes == (1, most) and run.local_hosts == 0


NIGHTLY = (pytest.mark.slow, pytest.mark.nightly)


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.parametrize("code", [pytest.param(0, marks=NIGHTLY), 5])
def test_local_trains_and_passes_the_exit_code_on(code, train, environ):
    environ = {**environ, "PROCESSES": "2", "DEVICES": "3", "RESTARTS": "0"}
    with Job([str(LAUNCH / "local.sh"), train, str(code), "b c"], environ) as job:
        end = job.wait()
    assert end.code == code, end
    for rank in range(2):
        assert end.value(rank, "sum") == f"3.0 of 2 x 3 ['{code}', 'b c']"


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.nightly
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


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.nightly
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


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.parametrize(
    "code, requeued", [pytest.param(0, False, marks=NIGHTLY), (5, False), (143, True)]
)
@pytest.mark.nightly
def test_slurm_requeues_what_wants_a_restart(code, requeued, train, environ):
    with Job(["bash", str(LAUNCH / "slurm.sbatch"), train, str(code)], environ) as job:
        end = job.wait()
    assert end.code == code, end
    assert end.out.count(f"sum=3.0 of 2 x 1 ['{code}']") == 2
    assert ("scontrol requeue 17" in end.out) == requeued


# What --signal=B:USR1@300 sends to the script, and scancel; whether it is to go on then.
TOLD = [(signal.SIGUSR1, True), pytest.param(signal.SIGTERM, False, marks=NIGHTLY)]


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.parametrize("signum, requeued", TOLD)
def test_slurm_saves_and_requeues_when_time_is_up(signum, requeued, train, environ):
    with Job(["bash", str(LAUNCH / "slurm.sbatch"), train, "wait"], environ) as job:
        job.wait_for("ready", count=2)
        job.send(signum)
        end = job.wait()
    assert end.code == 143, end
    assert ("scontrol requeue 17" in end.out) == requeued


# What srun does for the elastic recipe: one command on one node.
SRUN_ONE = """
    #!{python}
    import os, sys
    options = [word for word in sys.argv[1:] if word.startswith("--")]
    command = sys.argv[1 + len(options):]
    node = dict(option.split("=") for option in options)["--nodelist"]
    assert node in ("n1", "n2") and {{"--nodes=1", "--ntasks=1"}} <= set(options), options
    os.execvpe(command[0], command, {{**os.environ, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}})
"""
SCONTROL = """
    #!/bin/sh
    case "$*" in
        "show hostnames n[1-2]") printf 'n1\\nn2\\n' ;;
        *) echo "scontrol $*" ;;
    esac
"""


@pytest.fixture
def slurm(environ, tmp_path):
    """A job of two nodes, for the elastic recipe."""
    for name, text in (("srun", SRUN_ONE.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(textwrap.dedent(text).lstrip())
    return {
        **environ,
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NTASKS": "2",
        "MIN": "2",
        "ENDPOINT": "127.0.0.1:0",
    }


@pytest.fixture
def fit(tmp_path):
    path = tmp_path / "fit.py"
    path.write_text(textwrap.dedent(FIT))
    return str(path)


@pytest.mark.slow
@pytest.mark.multihost
def test_slurm_elastic_trains_on_the_nodes_of_an_allocation(fit, slurm, tmp_path):
    command = ["bash", str(LAUNCH / "slurm_elastic.sbatch"), fit, str(tmp_path / "run a")]
    with Job(command, slurm) as job:
        end = job.wait()
    assert end.code == 0, end
    assert end.out.count("steps=32 of 2") == 2
    assert "[n1.1]" in end.out and "[n2.2]" in end.out or "[n2.1]" in end.out
    assert "scontrol requeue" not in end.out


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.parametrize("signum, requeued", TOLD)
def test_slurm_elastic_saves_and_requeues_when_time_is_up(signum, requeued, slurm, tmp_path):
    worker = LAUNCH.parent / "tests" / "launcher" / "elastic_worker.py"
    recipe = str(LAUNCH / "slurm_elastic.sbatch")
    with Job(["bash", recipe, str(worker), str(tmp_path), "500", "0.05"], slurm) as job:
        deadline = time.monotonic() + LIMIT_S
        while not steps_in(tmp_path):
            assert time.monotonic() < deadline and job.running(), job.text()
            time.sleep(0.05)
        job.send(signum)
        end = job.wait()
    assert end.code == 143, end
    assert ("scontrol requeue 17" in end.out) == requeued
    folder = tmp_path / "run" / "checkpoints"
    saved = [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
    assert max(saved) >= max(steps_in(tmp_path))


@pytest.mark.parametrize(
    "given, file",
    [({}, None), ({"MAX": "4"}, "~/.jaxgoodput/slurm-17"), ({"JOIN": "a file"}, "a file")],
)
def test_slurm_elastic_waits_for_further_nodes_only_if_some_are_to_join(
    given, file, slurm, tmp_path
):
    """With `--join-file`, a job whose nodes do not all start waits for others."""
    stub = tmp_path / "bin" / "jaxgoodput"
    stub.write_text('#!/bin/sh\nfor word; do echo "word: $word"; done\n')
    stub.chmod(0o755)
    with Job(["bash", str(LAUNCH / "slurm_elastic.sbatch"), "a.py"], {**slurm, **given}) as job:
        end = job.wait()
    words = [x.removeprefix("word: ") for x in end.out.splitlines() if x.startswith("word: ")]
    options = command_parser().parse_args(words[: words.index("--")])
    home = str(tmp_path / "home")
    expected = None if file is None else pathlib.Path(file.replace("~", home))
    assert end.code == 0 and options.join_file == expected
    assert options.hosts == "n1,n2"


@pytest.mark.slow
@pytest.mark.multihost
def test_slurm_join_adds_a_node_of_its_own_to_a_job_that_runs_and_leaves_before_its_time_is_up(
    slurm, tmp_path
):
    worker = LAUNCH.parent / "tests" / "launcher" / "elastic_worker.py"
    command = [str(worker), str(tmp_path), "200", "0.05"]
    own = {
        "SLURM_JOB_ID": "18",
        "SLURM_JOB_NODELIST": "n3",
        "SLURM_JOB_NUM_NODES": "1",
        "JOB": "17",
    }

    def until(what):
        deadline = time.monotonic() + LIMIT_S
        while not what():
            assert time.monotonic() < deadline and job.running(), job.text() + more.text()
            time.sleep(0.05)

    with Job(["bash", str(LAUNCH / "slurm_join.sbatch"), *command], {**slurm, **own}) as more:
        growing = {**slurm, "MAX": "3"}
        with Job(["bash", str(LAUNCH / "slurm_elastic.sbatch"), *command], growing) as job:
            until(lambda: 3 in sizes_in(tmp_path))
            (kept,) = (tmp_path / "home" / ".jaxgoodput").iterdir()
            assert kept.name == "slurm-17" and kept.stat().st_mode & 0o77 == 0
            more.send(signal.SIGUSR1)  # what --signal=B:USR1@120 sends
            end = more.wait()
            assert end.code == 0, end
            assert "notice of SIGUSR1: this host is to leave, in 60 s, leaving the job" in end.err
            until(lambda: sizes_in(tmp_path)[-1] == 2)
            (tmp_path / "run" / "hurry").touch()
            end = job.wait()
            assert end.code == 0, end
    assert not list((tmp_path / "home" / ".jaxgoodput").iterdir()), "the secret is not left there"
    (count,) = {tuple(line["count"]) for line in lines_in(tmp_path) if line["kind"] == "end"}
    assert set(count) == {200.0}, "each sample once an epoch"


def lines_in(folder):
    """What the processes of `elastic_worker.py` wrote, in order of time."""
    lines = [s for path in folder.glob("*.jsonl") for s in path.read_text().splitlines(True)]
    return sorted((json.loads(s) for s in lines if s.endswith("\n")), key=lambda line: line["at"])


def sizes_in(folder):
    """How many processes each set of them had, in order of time."""
    return [x["num_processes"] for x in lines_in(folder) if x["kind"] == "regrouped"]


def steps_in(folder):
    """The steps that the processes of `elastic_worker.py` have told of."""
    return [line["step"] for line in lines_in(folder) if line["kind"] == "step"]


# What gcloud does for this recipe, for slices of WORKERS hosts: a folder is the home of each, and the command
# runs there.
GCLOUD = """
    #!{python}
    import argparse, os, pathlib, shutil, subprocess, sys
    assert sys.argv[1:4] == ["compute", "tpus", "tpu-vm"], sys.argv
    with open({calls!r}, "a") as file:
        print(sys.argv[1:], file=file)
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["ssh", "scp"])
    parser.add_argument("words", nargs="+")
    for name in ("--worker", "--zone", "--command", "--ssh-flag"):
        parser.add_argument(name)
    options = parser.parse_args(sys.argv[4:])
    assert (options.worker, options.zone) == ("all", "here")
    slice, _, path = options.words[-1].partition(":")
    homes = [pathlib.Path({homes!r}, f"{{slice}}-w-{{i}}") for i in range(int(os.environ["WORKERS"]))]
    for home in homes:
        home.mkdir(exist_ok=True, parents=True)
        if options.verb == "scp":
            shutil.copy(options.words[0], home / path)
    if options.verb == "scp":
        sys.exit()
    environ = {{name: value for name, value in os.environ.items() if name != "JAXGOODPUT_SECRET"}}
    tasks = [
        subprocess.Popen(["bash", "-c", options.command], cwd=home, stdin=subprocess.DEVNULL,
                         env={{**environ, "HOME": str(home), "WORKER": home.name}})
        for home in homes
    ]
    sys.exit(max(task.wait() for task in tasks))
"""


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.parametrize("slices", ["a", pytest.param("a b", marks=NIGHTLY)])
@pytest.mark.nightly
def test_tpu_pod_trains_on_all_workers_of_all_slices(slices, fit, environ, tmp_path):
    calls, homes = tmp_path / "calls", tmp_path / "homes"
    gcloud = tmp_path / "bin" / "gcloud"
    gcloud.write_text(
        textwrap.dedent(GCLOUD)
        .lstrip()
        .format(python=sys.executable, calls=str(calls), homes=str(homes))
    )
    gcloud.chmod(0o755)
    (tmp_path / "bin" / "hostname").write_text("#!/bin/sh\necho $WORKER\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    num_hosts = 2 * len(slices.split())
    secret = "nobody may read this"
    environ = {
        **environ,
        "SLICES": slices,
        "WORKERS": "2",
        "MIN": str(num_hosts),
        "ZONE": "here",
        "ENDPOINT": f"127.0.0.1:{port}",
        "FOLDER": str(pathlib.Path(fit).parent),
        "JAXGOODPUT_SECRET": secret,
        "TMPDIR": str(tmp_path),
    }
    command = [str(LAUNCH / "tpu_pod.sh"), fit, str(tmp_path / "run a")]
    with Job(command, environ) as job:
        end = job.wait()
    assert end.code == 0, end
    assert end.out.count(f"steps=32 of {num_hosts}") == num_hosts
    for name in (f"{s}-{s}-w-{i}" for s in slices.split() for i in range(2)):
        assert f"{name} has joined" in end.err
    assert secret not in calls.read_text()
    kept = list(homes.glob("*/.jaxgoodput"))
    assert len(kept) == num_hosts and {path.stat().st_mode & 0o77 for path in kept} == {0}
    assert not list(tmp_path.glob("tmp.*")), "the secret is not left here"


def test_tpu_pod_without_slices_says_how(environ):
    with Job([str(LAUNCH / "tpu_pod.sh"), "train.py"], environ) as job:
        end = job.wait()
    assert end.code == 2
    assert 'SLICES="a b" launch/tpu_pod.sh train.py' in end.err and "Exit codes:" in end.err
