"""Jobs whose processes come and go: real processes, really killed; every sample is applied once, always."""

import contextlib
import json
import os
import signal
import socket
import sys
import time

import elastic_worker
import jax
import namespaces
import numpy as np
import processes
import pytest

pytestmark = [pytest.mark.multihost, pytest.mark.slow]

WORKER = elastic_worker.__file__
SECRET = "the secret of these tests"


class Cluster:
    """A coordinator and agents, each a process of its own; all are killed at the end."""

    def __init__(
        self, folder, *, epochs, step_s, nodes, options=(), settings=(), address="127.0.0.1:0"
    ):
        self.folder = folder
        folder.mkdir()
        self.command = ["--", "python", WORKER, str(folder), str(epochs), str(step_s), *settings]
        self.environ = {"JAXGOODPUT_SECRET": SECRET}
        self.epochs = epochs
        self.jobs = contextlib.ExitStack()
        self.options = ["--nnodes", nodes, *options]
        if "--hosts" not in options:
            self.options += ["--local-hosts", "0"]
        self.coordinator = self.coordinate(address)
        text = self.coordinator.wait_for("the job is at ")
        self.address = text.split("the job is at ")[1].split(",")[0]
        self.agents = {}

    def coordinate(self, address):
        return self.start("run", "--rdzv-endpoint", address, *self.options)

    def start(self, *arguments):
        command = [sys.executable, "-m", "jaxgoodput.cli", *arguments, *self.command]
        return self.jobs.enter_context(processes.Job(command, self.environ))

    def agent(self, *names, silent_s=10):
        for name in names:
            self.agents[name] = self.start(
                "agent",
                "--name",
                name,
                "--rdzv-endpoint",
                self.address,
                "--silent-s",
                str(silent_s),
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.jobs.close()

    def lines(self, kind=None):
        """What all processes wrote, in order of time."""
        found = []
        for path in self.folder.glob("*.jsonl"):
            for text in path.read_text().splitlines():
                line = json.loads(text)
                found.append({"pid": int(path.stem), **line})
        return [x for x in sorted(found, key=lambda x: x["at"]) if kind in (None, x["kind"])]

    def wait(self, what, limit_s=90.0):
        """Until `what(lines)` holds."""
        deadline = time.monotonic() + limit_s
        while not what(self.lines()):
            if time.monotonic() > deadline or not self.coordinator.running():
                raise AssertionError(f"it did not come to that:\n{self.told()}")
            time.sleep(0.05)

    def wait_for_step(self, more=5):
        """Until the run has gone on by so many steps."""
        wanted = max([x["step"] for x in self.lines("step")], default=0) + more
        self.wait(lambda lines: any(x["kind"] == "step" and x["step"] >= wanted for x in lines))

    def wait_for_processes(self, count):
        """Until the newest generation has so many, and does steps."""

        def there(lines):
            found = [x for x in lines if x["kind"] == "regrouped"]
            return bool(found) and found[-1]["num_processes"] == count

        self.wait(there)
        self.wait_for_step()

    def pid(self, host):
        """The newest worker of a host."""
        mine = [x for x in self.lines("began") if x["member"].rpartition(".")[0] == host]
        return mine[-1]["pid"]

    def told(self):
        return self.coordinator.text() + "".join(
            f"-- {name}\n{job.text()}" for name, job in self.agents.items()
        )

    def finish(self, limit_s=120.0):
        """Wait for the end; every sample must have been applied once an epoch, in order."""
        finished = self.coordinator.wait(limit_s=limit_s)
        assert finished.code == 0, self.told()
        ends = self.lines("end")
        assert ends, self.told()
        for end in ends:
            assert end["count"] == [float(self.epochs)] * elastic_worker.NUM_SAMPLES
            assert end["w"] == ends[0]["w"] and end["ema"] == ends[0]["ema"]
        steps = {x["step"]: x for x in self.lines("step")}
        done = 0
        for step in sorted(steps):
            # What a process that was killed had done last, nobody may have heard of.
            epoch, offset = steps[step]["before"]
            place = epoch * elastic_worker.NUM_SAMPLES + offset
            assert place == (step - 1) * elastic_worker.BASE
            done = place + steps[step]["num_samples"]
        assert done == self.epochs * elastic_worker.NUM_SAMPLES
        return ends[0], steps


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same run without any fault, in one process that is no job."""

    def fit(epochs):
        out = tmp_path_factory.mktemp("alone")
        elastic_worker.run(out, epochs, 0.0, devices=jax.devices()[:1])
        lines = [
            json.loads(text)
            for path in out.glob("*.jsonl")
            for text in path.read_text().splitlines()
        ]
        return lines[-1], {x["step"]: x for x in lines if x["kind"] == "step"}

    return fit


def check_same(alone, end, steps, epochs):
    """The run with faults is the run without."""
    wanted_end, wanted_steps = alone(epochs)
    for name in ("w", "ema"):
        np.testing.assert_allclose(end[name], wanted_end[name], rtol=2e-5, atol=1e-6)
    for step, line in steps.items():
        assert line["loss"] == pytest.approx(wanted_steps[step]["loss"], rel=1e-4)


def test_one_four_two_three_processes(tmp_path, alone):
    epochs = 40
    with Cluster(
        tmp_path / "job",
        epochs=epochs,
        step_s=0.05,
        nodes="1:4",
        options=("--admit-every-s", "1"),
    ) as cluster:
        cluster.agent("a")
        cluster.wait_for_processes(1)
        first = cluster.pid("a")
        cluster.agent("b", "c", "d")
        cluster.wait_for_processes(4)
        for name in ("c", "d"):
            cluster.agents[name].send(signal.SIGTERM)
        cluster.wait_for_processes(2)
        assert [cluster.agents[name].wait().code for name in ("c", "d")] == [143, 143]
        cluster.agent("e")
        cluster.wait_for_processes(3)
        end, steps = cluster.finish()
        assert cluster.pid("a") == first, "nobody who stays starts anew"
        for name in ("a", "b", "e"):
            assert cluster.agents[name].wait().code == 0
    check_same(alone, end, steps, epochs)


@pytest.mark.parametrize("victim", ["a", pytest.param("b", marks=pytest.mark.nightly)])
def test_a_worker_is_killed_and_the_others_go_on(tmp_path, alone, victim):
    epochs = 30
    with Cluster(
        tmp_path / "job", epochs=epochs, step_s=0.05, nodes="1:2", options=("--join-s", "60")
    ) as cluster:
        cluster.agent("a", "b")
        cluster.wait_for_processes(2)
        other = {"a": "b", "b": "a"}[victim]
        survivor = cluster.pid(other)
        os.kill(cluster.pid(victim), signal.SIGKILL)
        cluster.wait(lambda lines: any(x["kind"] == "regrouped" and x["step"] for x in lines))
        cluster.wait_for_processes(2)  # another one in its place
        end, steps = cluster.finish()
        assert cluster.pid(other) == survivor
        assert len(cluster.lines("began")) == 3
    check_same(alone, end, steps, epochs)


@pytest.mark.nightly
def test_a_worker_that_stands_still_is_replaced(tmp_path, alone):
    epochs = 30
    with Cluster(
        tmp_path / "job",
        epochs=epochs,
        step_s=0.05,
        nodes="2",
        options=("--join-s", "60", "--silent-s", "3"),
    ) as cluster:
        cluster.agent("a", "b", silent_s=3)
        cluster.wait_for_processes(2)
        survivor, victim = cluster.pid("b"), cluster.pid("a")
        os.kill(victim, signal.SIGSTOP)
        cluster.wait(lambda lines: len([x for x in lines if x["kind"] == "began"]) == 3)
        assert processes.gone(victim)
        end, steps = cluster.finish()
        assert cluster.pid("b") == survivor
        assert "no sign of life" in cluster.told()
    check_same(alone, end, steps, epochs)


@pytest.mark.nightly
def test_below_the_minimum_it_waits_with_the_state_in_memory(tmp_path, alone):
    epochs = 20
    with Cluster(
        tmp_path / "job", epochs=epochs, step_s=0.05, nodes="2:2", options=("--join-s", "60")
    ) as cluster:
        cluster.agent("a", "b")
        cluster.wait_for_processes(2)
        survivor = cluster.pid("b")
        os.kill(cluster.agents["a"].pid, signal.SIGKILL)  # a host with all that is on it
        assert processes.gone(cluster.pid("a"))
        time.sleep(2.0)
        before = cluster.lines("step")
        time.sleep(1.0)
        assert cluster.lines("step") == before, "below the minimum nothing is trained"
        cluster.agent("c")
        end, steps = cluster.finish()
        assert cluster.pid("b") == survivor and min(x["step"] for x in before) == 1
        assert (
            not (cluster.folder / "run" / "checkpoints").is_dir()
            or len(
                [p for p in (cluster.folder / "run" / "checkpoints").iterdir() if p.name.isdigit()]
            )
            <= 1
        ), "nothing was read from the disk: only the end is there"
    check_same(alone, end, steps, epochs)


def test_a_coordinator_that_was_killed_is_started_again(tmp_path, alone):
    """Its workers end with it; agents find the new one, and the run goes on from its checkpoint."""
    epochs = 30
    with Cluster(
        tmp_path / "job",
        epochs=epochs,
        step_s=0.05,
        nodes="2",
        options=("--join-s", "60"),
        settings=("saving.every_base_steps=10",),
    ) as cluster:
        cluster.agent("a", "b")
        cluster.wait_for_processes(2)
        cluster.wait_for_step(30)
        workers = [cluster.pid(name) for name in ("a", "b")]
        os.kill(cluster.coordinator.pid, signal.SIGKILL)
        assert all(processes.gone(pid) for pid in workers)
        cluster.coordinator.wait()
        cluster.coordinator = cluster.coordinate(cluster.address)
        end, steps = cluster.finish()
        started = [x["step"] for x in cluster.lines("regrouped")]
        assert started[0] == 0 and cluster.lines("began")[-1]["pid"] not in workers
    check_same(alone, end, steps, epochs)


def test_all_are_told_to_stop_and_save(tmp_path):
    with Cluster(
        tmp_path / "job", epochs=500, step_s=0.05, nodes="1:2", options=("--join-s", "60")
    ) as cluster:
        cluster.agent("a", "b")
        cluster.wait_for_processes(2)
        cluster.coordinator.send(signal.SIGTERM)
        finished = cluster.coordinator.wait()
        assert finished.code == 143, cluster.told()
        saved = [
            int(p.name) for p in (cluster.folder / "run/checkpoints").iterdir() if p.name.isdigit()
        ]
        last = max(x["step"] for x in cluster.lines("step"))
        assert saved and max(saved) >= last
        assert {cluster.agents[name].wait().code for name in ("a", "b")} <= {0, 143}


def test_a_joiner_that_dies_while_it_is_taken_in_costs_nobody_the_state(tmp_path, alone):
    """JAX's registration would wait for it, and then abort all others."""
    epochs = 40
    with Cluster(
        tmp_path / "job", epochs=epochs, step_s=0.05, nodes="1:3", options=("--admit-every-s", "1")
    ) as cluster:
        cluster.agent("a", "b")
        cluster.wait_for_processes(2)
        pids = [cluster.pid(name) for name in ("a", "b")]
        cluster.agent("fragile")
        cluster.wait(lambda lines: (cluster.folder / "died").exists())
        cluster.wait_for_processes(3)  # its replacement
        end, steps = cluster.finish()
        assert [cluster.pid(name) for name in ("a", "b")] == pids
        assert "registers in its place" in cluster.told()
    check_same(alone, end, steps, epochs)


def test_told_to_stop_below_the_minimum_it_saves_what_it_has_in_memory(tmp_path, alone):
    epochs = 20
    with Cluster(
        tmp_path / "job", epochs=epochs, step_s=0.05, nodes="2", options=("--join-s", "60")
    ) as cluster:
        cluster.agent("a", "b")
        cluster.wait_for_processes(2)
        os.kill(cluster.agents["a"].pid, signal.SIGKILL)
        assert processes.gone(cluster.pid("a"))
        time.sleep(3.0)
        last = max(x["step"] for x in cluster.lines("step"))
        cluster.coordinator.send(signal.SIGTERM)
        finished = cluster.coordinator.wait()
        assert finished.code == 143, cluster.told()
        folder = cluster.folder / "run/checkpoints"
        (saved,) = [int(p.name) for p in folder.iterdir() if p.name.isdigit()]
        assert saved in (last, last + 1)
        cluster.coordinator = cluster.coordinate("127.0.0.1:0")
        cluster.address = (
            cluster.coordinator.wait_for("the job is at ").split("at ")[1].split(",")[0]
        )
        cluster.agent("c", "d")
        end, steps = cluster.finish()
    check_same(alone, end, steps, epochs)


SHELL = """#!/bin/sh
# A remote shell into a namespace: HOST COMMAND
exec ip netns exec "$1" unshare --uts sh -c 'hostname "$0" && exec sh -c "$1"' "$1" "$2"
"""


@pytest.mark.nightly
def test_hosts_through_a_remote_shell_and_a_cable_that_is_cut(tmp_path, alone):
    """Each host has an address of its own; the one that is cut off comes back by itself."""
    reason = namespaces.available()
    if reason is not None:
        pytest.skip(reason)
    epochs = 150
    shell = tmp_path / "shell"
    shell.write_text(SHELL)
    shell.chmod(0o755)
    with namespaces.hosts(3) as made:
        with Cluster(
            tmp_path / "job",
            epochs=epochs,
            step_s=0.05,
            nodes="1:3",
            address=f"{made.root_address}:0",
            options=(
                *("--rsh", str(shell), "--hosts", ",".join(made.names)),
                *("--silent-s", "3", "--reconnect-s", "60", "--admit-every-s", "1"),
            ),
        ) as cluster:
            cluster.wait_for_processes(3)
            pids = [cluster.pid(name) for name in made.names]
            made.cut(1)
            cluster.wait_for_processes(2)
            made.mend(1)
            cluster.wait_for_processes(3)
            assert cluster.pid(made.names[1]) not in pids
            assert cluster.pid(made.names[0]) == pids[0], "who was not cut off goes on as it was"
            (cluster.folder / "run" / "hurry").touch()
            end, steps = cluster.finish()
    check_same(alone, end, steps, epochs)


def test_a_slow_host_takes_fewer_micro_batches_and_the_sum_is_the_same(tmp_path, alone):
    epochs = 15
    with Cluster(
        tmp_path / "job",
        epochs=epochs,
        step_s=0.005,
        nodes="2",
        options=("--join-s", "60"),
        settings=("execution.leases=true", "batch.micro=[1, 1]"),
    ) as cluster:
        cluster.agent("slow", "fast")
        end, steps = cluster.finish()
        reads = {cluster.pid(name): name for name in ("slow", "fast")}
        taken = {reads[x["pid"]]: x["num_reads"] for x in cluster.lines("end")}
        assert taken["fast"] > 2 * taken["slow"], taken
    check_same(alone, end, steps, epochs)


# -- what cannot be ----------------------------------------------------------------------------------


def start(*arguments, environ=None):
    command = [sys.executable, "-m", "jaxgoodput.cli", *arguments]
    return processes.Job(command, {"JAXGOODPUT_SECRET": SECRET, **(environ or {})})


def test_an_agent_with_a_wrong_secret_or_another_script_is_refused(tmp_path):
    script, other = tmp_path / "a.py", tmp_path / "b.py"
    script.write_text("import time; time.sleep(60)")
    other.write_text("print()")
    with start(
        "run", "--nnodes", "1", "--local-hosts", "0", "--", "python", str(script)
    ) as coordinator:
        address = coordinator.wait_for("the job is at ").split("the job is at ")[1].split(",")[0]
        to = ("agent", "--rdzv-endpoint", address, "--reconnect-s", "0")
        with start(
            *to, "--", "python", str(script), environ={"JAXGOODPUT_SECRET": "x"}
        ) as stranger:
            finished = stranger.wait()
        assert finished.code == 2 and "secret" in finished.err
        with start(*to, "--name", "h", "--", "python", str(other)) as wrong:
            finished = wrong.wait()
        assert finished.code == 2 and "the command is" in finished.err
        coordinator.wait_for("h was refused")
        with start(*to, "--name", "a", "--", "python", str(script)) as first:
            coordinator.wait_for("a has joined")
            with start(*to, "--name", "a", "--", "python", str(script)) as second:
                finished = second.wait()
            assert finished.code == 2 and "of the name a already" in finished.err
            first.send(signal.SIGTERM)
            first.wait()


def test_a_script_that_always_fails_ends_the_job_with_its_last_lines(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text("raise ValueError('no such thing')")
    with start("run", "--nnodes", "1", "--", "python", str(script)) as job:
        finished = job.wait()
    assert finished.code == 1
    assert "no such thing" in finished.err
    assert "without doing a step in between" in finished.err


def test_a_script_that_never_trains_is_done(tmp_path):
    script = tmp_path / "short.py"
    script.write_text("print('nothing to do')")
    with start("run", "--nnodes", "1:2", "--local-hosts", "2", "--", "python", str(script)) as job:
        finished = job.wait()
    assert finished.code == 0 and finished.out.count("nothing to do") == 2


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--nnodes", "3:2"], "MIN <= MAX"),
        (["--nnodes", "two"], "MIN:MAX"),
        (["--nnodes", "1", "--hosts", "a,b,a"], "a is there twice"),
        (["--nnodes", "1", "--hosts", "a", "--local-hosts", "2"], "one of"),
        (["--nnodes", "1", "--rdzv-endpoint", "here"], "HOST:PORT"),
        (["--nnodes", "1", "--hostfile", "/does/not/exist"], "/does/not/exist"),
        (
            [
                "--nnodes",
                "1",
                "--hosts",
                "a",
                "--rsh",
                "no-shell",
                "--rdzv-endpoint",
                "127.0.0.1:0",
            ],
            "agent of a cannot be started",
        ),
        (["--hosts", "a"], "--nnodes"),
        ([], "--nproc-per-node"),
    ],
)
def test_wrong_usage_is_named(tmp_path, arguments, said):
    script = tmp_path / "a.py"
    script.write_text("")
    with start("run", *arguments, "--", "python", str(script)) as job:
        finished = job.wait()
    assert finished.code == 2 and said in finished.err, finished.err


def test_a_port_that_is_taken_is_named(tmp_path):
    script = tmp_path / "a.py"
    script.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        endpoint = ("--rdzv-endpoint", f"127.0.0.1:{port}")
        with start("run", "--nnodes", "1", *endpoint, "--", "python", str(script)) as job:
            finished = job.wait()
    assert finished.code == 2 and "cannot listen" in finished.err
