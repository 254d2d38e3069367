"""`jaxgoodput run`: a script becomes one JAX job of several processes, and ends as one."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from processes import Job, gone, run, start

from jaxgoodput import cli
from jaxgoodput.launcher.local import Restarts, keep_freed_pages, run_local, shim_command
from jaxgoodput.launcher.supervise import ProcessesEnd, UsageError

SHIM = ["-m", "jaxgoodput.launcher"]


@pytest.fixture
def script(tmp_path):
    def write(body: str, name: str = "train.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(body))
        return path

    return write


@pytest.mark.parametrize(
    "command, expected",
    [
        (["python", "a.py", "-x"], [sys.executable, *SHIM, "a.py", "-x"]),
        (["python3.11", "a.py"], [sys.executable, *SHIM, "a.py"]),
        (["/opt/bin/python3", "a.py"], ["/opt/bin/python3", *SHIM, "a.py"]),
        (["python", "-m", "a.b", "-m"], [sys.executable, *SHIM, "-m", "a.b", "-m"]),
        (
            ["python", "-u", "-X", "dev", "-Wignore", "a.py", "-u"],
            [sys.executable, "-u", "-X", "dev", "-Wignore", *SHIM, "a.py", "-u"],
        ),
        (["dir/train.py", "1"], [sys.executable, *SHIM, "dir/train.py", "1"]),
        (["bash", "train.sh"], ["bash", "train.sh"]),
        (["pythonic", "a.py"], ["pythonic", "a.py"]),
    ],
)
def test_python_scripts_go_through_the_shim(command, expected):
    assert shim_command(command) == expected


@pytest.mark.parametrize(
    "command", [[], ["python"], ["python", "-"], ["python", "-c", "pass"], ["python", "-u"]]
)
def test_python_without_a_script_is_an_error(command):
    with pytest.raises(UsageError, match="python train.py"):
        shim_command(command)


@pytest.mark.parametrize(
    "count, options, message",
    [
        (0, {}, "at least one"),
        (2, {"devices_per_process": 0}, "at least one"),
        (2, {"max_restarts": -1}, "max_restarts=-1"),
    ],
)
def test_numbers_out_of_range_are_errors(count, options, message):
    with pytest.raises(UsageError, match=message):
        run_local(["python", "a.py"], count, **options)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run"],
        ["run", "--", "python", "train.py"],
        ["run", "--nproc-per-node", "0", "--", "python", "train.py"],
        ["run", "--nproc-per-node", "two", "--", "python", "train.py"],
        ["run", "--nproc-per-node", "2", "--max-restarts", "-1", "--", "python", "train.py"],
        ["run", "--nproc-per-node", "2"],
        ["run", "--nproc-per-node", "2", "--", "/nowhere/program"],
        ["coordinate", "--num-processes", "2"],
        ["coordinate", "--num-processes", "2", "--port", "70000", "--", "true"],
        ["report"],
        ["report", "here", "--", "command"],
    ],
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    try:
        code = cli.main(arguments)
    except SystemExit as exit_info:
        code = exit_info.code
    assert code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["coordinate", "--help"]])
def test_help_says_what_the_exit_codes_mean(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 0
    assert "143 saved and wants a restart" in capsys.readouterr().out


FAULTS = """
    import resource
    import numpy as np

    def faults(times):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(times):
            np.ones(2**23).sum()  # 64 MiB: 16,384 pages, or 32 huge ones
        return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / times

    faults(3)
    print(faults(20))
"""

needs_glibc = pytest.mark.skipif(
    not keep_freed_pages({"JAX_PLATFORMS": "cpu"}), reason="needs glibc 2.36"
)


@needs_glibc
@pytest.mark.parametrize("told", [True, False])
def test_a_cpu_worker_finds_the_pages_that_it_freed(told):
    environ = keep_freed_pages({"JAX_PLATFORMS": "cpu"}) if told else {}
    command = [sys.executable, "-c", textwrap.dedent(FAULTS)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert (float(done.stdout) < 8) == told, done.stdout


@needs_glibc
@pytest.mark.parametrize(
    "decided",
    [
        {"JAX_PLATFORMS": "cuda"},
        {"JAX_PLATFORMS": "cuda,cpu"},
        {"JAX_PLATFORMS": "cpu", "MALLOC_TRIM_THRESHOLD_": "131072"},
        {"JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    ],
)
def test_accelerators_and_those_who_have_decided_keep_their_malloc(decided):
    assert keep_freed_pages(decided) == {}


SUM = """
    import os, sys
    import beside  # a module in the script's own folder
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    def main():
        mesh = Mesh(np.array(jax.devices()), ("data",))
        sharding = NamedSharding(mesh, P("data"))
        x = jax.make_array_from_callback((4,), sharding, lambda i: 10.0 ** np.arange(4)[i])
        print(f"sum={float(jax.jit(jnp.sum)(x))}")
        print(f"world={jax.process_index()} of {jax.process_count()}, {len(jax.local_devices())}")
        print(f"argv={sys.argv[1:]}")
        print(f"malloc={sorted(name for name in os.environ if name.startswith('MALLOC_'))}")
        print("error", file=sys.stderr)

    if __name__ == "__main__":
        main()
"""


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.parametrize(
    "num_processes, devices", [(2, 2), pytest.param(1, 4, marks=pytest.mark.nightly)]
)
def test_processes_form_one_job(num_processes, devices, script):
    script("", "beside.py")
    end = run(script(SUM), num_processes, devices, arguments=["--workdir", "w", "--", "-x"])
    assert end.code == 0, end
    for rank in range(num_processes):
        assert end.value(rank, "sum") == "1111.0"
        assert end.value(rank, "world") == f"{rank} of {num_processes}, {devices}"
        assert end.value(rank, "argv") == "['--workdir', 'w', '--', '-x']"
        assert end.value(rank, "malloc") == str(sorted(keep_freed_pages(os.environ)))
        assert "error" in end.lines(rank, "err")
        assert not any("Warning" in line for line in end.lines(rank, "err")), end


@pytest.mark.slow
@pytest.mark.multihost
def test_a_module_runs_as_well(script, tmp_path, monkeypatch):
    script("import sys; print(f'{__name__} {sys.argv[1:]}')", "some_module.py")
    monkeypatch.chdir(tmp_path)
    end = run("-m", 2, arguments=["some_module", "1"])
    assert end.code == 0, end
    assert "__main__ ['1']" in end.lines(1)


def shell(body, num_processes, *options):
    """A job of shells, which start in no time: for what is the launcher's alone."""
    command = [sys.executable, "-m", "jaxgoodput.cli", "run"]
    command += ["--nproc-per-node", str(num_processes), *options]
    return Job([*command, "--", "sh", "-c", textwrap.dedent(body)])


SAVE = {
    signal.SIGTERM: """
        import signal, sys, time

        def save(signum, frame):
            print("saved", flush=True)
            sys.exit(143)

        signal.signal(signal.SIGTERM, save)
        signal.signal(signal.SIGINT, save)
        print("ready", flush=True)
        time.sleep(600)
    """,
    signal.SIGINT: """
        trap 'echo saved; exit 143' TERM INT
        echo ready
        while :; do sleep 0.05; done
    """,
}


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.parametrize("signum", SAVE)
def test_a_stop_signal_reaches_every_process(signum, script):
    python = signum == signal.SIGTERM
    with start(script(SAVE[signum]), 3) if python else shell(SAVE[signum], 3) as job:
        job.wait_for("ready", count=3)
        job.send(signum)
        end = job.wait()
    assert end.code == 143, end
    assert [end.lines(rank) for rank in range(3)] == [["ready", "saved"]] * 3


CRASH = """
    import os, sys, time
    import jax, jax.numpy as jnp
    from jax.experimental import multihost_utils

    print(f"pid={os.getpid()}", flush=True)
    multihost_utils.process_allgather(jnp.ones(()))  # everybody is there
    if jax.process_index() == int(sys.argv[1]):
        os._exit(9)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_crash_ends_the_job_with_its_code(victim, script):
    end = run(script(CRASH), 2, arguments=[str(victim)])
    assert end.code == 9, end
    assert f"process {victim} ended with 9" in end.err
    assert all(gone(int(end.value(rank, "pid"))) for rank in range(2))


@pytest.mark.slow
@pytest.mark.multihost
def test_an_exception_shows_its_traceback_and_code(script):
    raising = script("import jax\nif jax.process_index() == 1: raise KeyError('mine')\n")
    end = run(raising, 2)
    assert end.code == 1, end
    assert "KeyError: 'mine'" in end.lines(1, "err")


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.nightly)]
)
def test_nobody_survives_a_killed_launcher(signum, script):
    waiting = script(
        """
        import os, signal, subprocess, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"])
        print(f"pids {os.getpid()} {child.pid}", flush=True)
        time.sleep(600)
        """
    )
    with start(waiting, 2) as job:
        output = job.wait_for("pids", count=2)
        pids = [int(p) for line in output.splitlines() if "pids" in line for p in line.split()[2:]]
        assert len(pids) == 4
        assert all(os.kill(pid, 0) is None for pid in pids)
        job.send(signum)
        assert all(gone(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.parametrize(
    "allowed, code, starts",
    [
        pytest.param(0, 143, 1, marks=pytest.mark.nightly),
        (1, 143, 2),
        pytest.param(3, 0, 3, marks=pytest.mark.nightly),
    ],
)
def test_a_job_that_saved_starts_again_as_often_as_allowed(allowed, code, starts, script):
    leaving = """
        import os, sys
        restart = int(os.environ["JAXGOODPUT_RESTART"])
        print(f"restart {restart}")
        sys.exit(143 if restart < 2 else 0)
    """
    in_shell = """
        echo "restart $JAXGOODPUT_RESTART"
        [ "$JAXGOODPUT_RESTART" -ge 2 ] || exit 143
    """
    options = ["--max-restarts", str(allowed)]
    python = allowed == 1
    count = 2 if python else 1  # a shell is done alone only
    with (
        start(script(leaving), count, options=options)
        if python
        else shell(in_shell, count, *options) as job
    ):
        end = job.wait()
    assert end.code == code, end
    for rank in range(count):
        assert end.lines(rank) == [f"restart {i}" for i in range(starts)]


def ended(code, began=None, step=None, *, told=False):
    return ProcessesEnd(code, told, began, step)


def pauses(most, *ends):
    restarts = Restarts(most)
    return [restarts.pause_s(end) for end in ends]


def test_what_saved_starts_again_at_once_and_what_crashed_after_ever_longer_pauses():
    crashes = [ended(1, 10 * i, 10 * i + 10) for i in range(9)]
    assert pauses(99, *crashes) == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert pauses(99, ended(143), ended(143), ended(143), ended(143)) == [0, 0, 0, 0]
    assert pauses(1, ended(1, 0, 5), ended(1, 5, 9)) == [1, None]


def test_two_crashes_in_a_row_that_came_no_further_end_a_job():
    assert pauses(99, ended(1), ended(1)) == [1, None]  # before any step
    at_57 = ended(137, 0, 57), ended(137, 40, 57), ended(1, 40, 56)
    assert pauses(99, *at_57) == [1, 2, None]
    between = ended(1, 0, 5), ended(1, 5, 5), ended(75, 5, 8), ended(1, 8, 8), ended(1)
    assert pauses(99, *between) == [1, 2, 4, 8, None]


@pytest.mark.parametrize("end", [ended(0), ended(2), ended(143, told=True), ended(1, told=True)])
def test_what_is_done_or_wrongly_used_or_was_told_to_stop_is_not_started_again(end):
    assert pauses(99, end) == [None]


@pytest.mark.slow
@pytest.mark.multihost
def test_a_job_that_crashes_starts_again_once_it_has_come_further():
    body = """
        [ "$JAXGOODPUT_GRACE_S" = 7.5 ] || exit 2
        echo "restart $JAXGOODPUT_RESTART"
        echo $JAXGOODPUT_RESTART > /proc/self/fd/${JAXGOODPUT_BEATS%%:*}
        echo $((JAXGOODPUT_RESTART + 1)) > /proc/self/fd/${JAXGOODPUT_BEATS%%:*}
        [ $JAXGOODPUT_RESTART -ge 2 ] || { echo the reason; exit 9; }
    """
    with shell(body, 1, "--max-restarts", "5", "--grace-s", "7.5") as job:
        end = job.wait()
    assert end.code == 0, end
    assert [line for line in end.lines(0) if "restart" in line] == [
        f"restart {i}" for i in range(3)
    ]
    assert end.err.count("process 0 failed first: exit code 9") == 2
    assert end.err.count("[0] the reason") == 2


@pytest.mark.multihost
def test_a_job_that_was_told_to_stop_stays_stopped():
    with shell("echo ready; exec sleep 600", 2, "--max-restarts", "5") as job:
        job.wait_for("ready", count=2)
        job.send(signal.SIGTERM)
        end = job.wait()
    assert end.code == 143, end
    assert end.out.count("ready") == 2


@pytest.mark.slow
@pytest.mark.multihost
def test_any_other_program_joins_by_itself(script):
    inner = script(
        """
        import jax
        from jaxgoodput.launcher import worker
        env = worker.initialize()
        print(f"world={jax.process_count()} {env.process_id == jax.process_index()}")
        """
    )
    wrapper = script(f"exec {sys.executable} {inner}", "wrapper.sh")
    command = [sys.executable, "-m", "jaxgoodput.cli", "run", "--nproc-per-node", "2", "--"]
    with Job([*command, "sh", str(wrapper)]) as job:
        end = job.wait()
    assert end.code == 0, end
    assert [end.value(rank, "world") for rank in range(2)] == ["2 True"] * 2
