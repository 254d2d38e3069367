"""Jobs whose processes come and go: real processes, really killed; every sample is applied once, always."""

import contextlib
import os
import re
import signal
import socket
import sys
import time

import elastic_worker
import eventreader
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

    def agent(self, *names, silent_s=10, options=()):
        for name in names:
            self.agents[name] = self.start(
                "agent",
                "--name",
                name,
                "--rdzv-endpoint",
                self.address,
                "--silent-s",
                str(silent_s),
                *options,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.jobs.close()

    def lines(self, kind=None):
        """What all processes wrote, in order of time."""
        found = [{"pid": pid, **line} for pid, line in processes.records_so_far(self.folder)]
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

    def hurry(self):
        """Have steps take no time from now on: a job is long enough for slow machines, and short."""
        (self.folder / "run" / "hurry").touch()

    def hurry_to(self, step):
        """Have steps take no time until this one is done, and from then on again what they took."""
        self.hurry()
        self.wait(lambda lines: any(x["kind"] == "step" and x["step"] >= step for x in lines))
        (self.folder / "run" / "hurry").unlink()

    def wait_for_save(self):
        """Until a checkpoint is being written."""
        folder, deadline = self.folder / "run" / "checkpoints", time.monotonic() + 60.0
        while not any("tmp" in name for name in os.listdir(folder)):
            assert time.monotonic() < deadline and self.coordinator.running(), self.told()
            time.sleep(0.002)

    def pid(self, host):
        """The newest worker of a host."""
        mine = [x for x in self.lines("began") if x["member"].rpartition(".")[0] == host]
        return mine[-1]["pid"]

    def ranks(self):
        """The hosts of the newest generation, by rank."""
        (*_, last) = re.findall(r"generation \d+: (.*), from", self.coordinator.text())
        return [name.rpartition(".")[0] for name in last.split(", ")]

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

    def fit(epochs, *settings, num_devices=1):
        out = tmp_path_factory.mktemp("alone")
        elastic_worker.run(out, epochs, 0.0, *settings, devices=jax.devices()[:num_devices])
        lines = [line for _, line in processes.records_so_far(out)]
        return lines[-1], {x["step"]: x for x in lines if x["kind"] == "step"}

    return fit


def check_same(alone, end, steps, epochs, *settings, rel=1e-4, **options):
    """The run with faults is the run without."""
    wanted_end, wanted_steps = alone(epochs, *settings, **options)
    for name in ("w", "ema"):
        np.testing.assert_allclose(end[name], wanted_end[name], rtol=2e-5, atol=1e-6)
    for step, line in steps.items():
        assert line["loss"] == pytest.approx(wanted_steps[step]["loss"], rel=rel, abs=0), step


@pytest.mark.nightly
@pytest.mark.parametrize("leases", ["false", "true"])
def test_dropout_with_a_key_for_each_sample_is_the_same_while_processes_join_and_leave(
    tmp_path, alone, leases
):
    """With leases, processes have micro-batches in other numbers in every step."""
    epochs, keyed = 100, (elastic_worker.DROPOUT, "keys=sample")
    settings = (*keyed, f"execution.leases={leases}", "batch.micro=[1, 2]")
    with Cluster(
        tmp_path / "job",
        epochs=epochs,
        step_s=0.05,
        nodes="1:3",
        options=("--admit-every-s", "1"),
        settings=settings,
    ) as cluster:
        cluster.agent("a")
        cluster.wait_for_processes(1)
        cluster.agent("b", "c")
        cluster.wait_for_processes(3)
        cluster.agents["b"].send(signal.SIGTERM)
        cluster.wait_for_processes(2)
        cluster.hurry()
        end, steps = cluster.finish()
    check_same(alone, end, steps, epochs, *keyed, rel=1e-6)


def test_dropout_is_the_same_in_two_processes_and_on_two_devices_of_one(tmp_path, alone):
    """With a key for each micro-batch on each replica, which is the default."""
    epochs, settings = 3, (elastic_worker.DROPOUT, "batch.micro=[1, 2]")
    with Cluster(
        tmp_path / "job",
        epochs=epochs,
        step_s=0.0,
        nodes="2",
        options=("--join-s", "60"),
        settings=settings,
    ) as cluster:
        cluster.agent("a", "b")
        end, steps = cluster.finish()
    check_same(alone, end, steps, epochs, *settings, rel=1e-6, num_devices=2)
    _, on_one_device = alone(epochs, *settings)
    apart = [abs(steps[n]["loss"] / on_one_device[n]["loss"] - 1) for n in steps]
    assert min(apart) > 1e-5, "the random numbers do not show in the losses"


def test_one_four_two_three_processes(tmp_path, alone):
    epochs = 160  # a slow machine takes a minute to start the last process
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
        assert not any(x["num_arrays"] for x in cluster.lines("forgot")), "devices are let go"
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


STEPS_PER_EPOCH = elastic_worker.NUM_SAMPLES // elastic_worker.BASE


@pytest.mark.nightly
def test_what_a_trainer_is_given_outlives_a_kill_and_hosts_that_leave_while_saving_and_at_the_end(
    tmp_path, alone
):
    """Parameters to begin with, their average, and two devices of each process under a strategy."""
    epochs = 80
    settings = (
        elastic_worker.INITIAL,
        'strategies=[{"data": -1}]',
        "saving.every_base_steps=5",
    )
    devices = ("--devices-per-process", "2")
    with Cluster(
        tmp_path / "job",
        epochs=epochs,
        step_s=0.1,
        nodes="1:3",
        options=("--admit-every-s", "1", *devices),
        settings=settings,
    ) as cluster:
        cluster.agent("a", "b", options=devices)
        cluster.wait_for_processes(2)
        survivor = cluster.pid("b")
        os.kill(cluster.pid("a"), signal.SIGKILL)
        cluster.wait(lambda lines: any(x["kind"] == "regrouped" and x["step"] for x in lines))
        cluster.agent("c", options=devices)
        cluster.wait_for_processes(3)
        assert cluster.pid("b") == survivor
        cluster.wait_for_save()  # by b, which is rank 0 since the kill
        cluster.agents["b"].send(signal.SIGTERM)
        cluster.wait_for_processes(2)
        assert cluster.agents["b"].wait().code == 143
        last = epochs * STEPS_PER_EPOCH
        cluster.hurry_to(last - STEPS_PER_EPOCH)
        cluster.agents["c"].send(signal.SIGTERM)  # nothing is left for it, says who planned it
        end, steps = cluster.finish()
        assert cluster.agents["a"].wait().code == 0
        assert cluster.agents["c"].wait().code in (0, 143)
        assert not any("tmp" in name for name in os.listdir(cluster.folder / "run/checkpoints"))
    assert len(end["w"]) == 4 and steps
    check_same(alone, end, steps, epochs, elastic_worker.INITIAL)


@pytest.mark.nightly
@pytest.mark.parametrize("left", [0, 2, 4])
def test_a_host_may_leave_at_the_very_end(tmp_path, alone, left):
    """Whether the others end or form another set of processes first: nothing is done twice, or not at all."""
    epochs = 10
    with Cluster(
        tmp_path / "job", epochs=epochs, step_s=0.1, nodes="1:2", options=("--join-s", "60")
    ) as cluster:
        cluster.agent("a", "b")
        cluster.wait_for_processes(2)
        cluster.hurry_to(epochs * STEPS_PER_EPOCH - 6)
        last = epochs * STEPS_PER_EPOCH - left
        cluster.wait(lambda lines: any(x["kind"] == "step" and x["step"] >= last for x in lines))
        cluster.agents["a"].send(signal.SIGTERM)
        end, steps = cluster.finish()
        assert cluster.agents["a"].wait().code in (0, 143)
        assert cluster.agents["b"].wait().code == 0
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
        assert "no heartbeat" in cluster.told()
    check_same(alone, end, steps, epochs)


@pytest.mark.nightly
def test_a_worker_that_is_stopped_while_it_starts_is_replaced(tmp_path, alone):
    """Nobody has heard of it yet, and one that only takes long to start is waited for."""
    epochs = 30
    options = ("--admit-every-s", "1")
    with Cluster(
        tmp_path / "job", epochs=epochs, step_s=0.05, nodes="2", options=options
    ) as cluster:
        cluster.agent("a", "b", silent_s=3)
        cluster.wait(lambda lines: any("b." in x.get("member", "") for x in lines))
        os.kill(cluster.pid("b"), signal.SIGSTOP)
        end, steps = cluster.finish()
        assert "it was stopped (SIGSTOP)" in cluster.told()
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


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_joiner_that_dies_while_it_is_taken_in_costs_nobody_the_state(tmp_path, alone):
    """JAX's registration would wait for it, and then abort all others."""
    epochs = 150  # a joiner may take long to start
    with Cluster(
        tmp_path / "job", epochs=epochs, step_s=0.05, nodes="1:3", options=("--admit-every-s", "1")
    ) as cluster:
        cluster.agent("a", "b")
        cluster.wait_for_processes(2)
        pids = [cluster.pid(name) for name in ("a", "b")]
        cluster.agent("fragile")
        cluster.wait(lambda lines: (cluster.folder / "died").exists())
        cluster.wait_for_processes(3)  # its replacement
        (cluster.folder / "run" / "hurry").touch()
        end, steps = cluster.finish()
        assert [cluster.pid(name) for name in ("a", "b")] == pids
        assert "registers in its place" in cluster.told()
    check_same(alone, end, steps, epochs)


@pytest.mark.nightly
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


@contextlib.contextmanager
def apart(tmp_path, epochs, *options):
    """Three hosts with networks of their own, and a job on them."""
    reason = namespaces.available()
    if reason is not None:
        pytest.skip(reason)
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
                *("--admit-every-s", "1", *options),
            ),
        ) as cluster:
            yield made, cluster


@pytest.mark.nightly
@pytest.mark.parametrize("cut", [0, 1])
def test_hosts_through_a_remote_shell_and_a_cable_that_is_cut(tmp_path, alone, cut):
    """Each host has an address of its own; the one that is cut off comes back by itself.

    Cut off, rank 0 still holds the workdir, until it finds out.
    """
    epochs = 150
    options = ("--silent-s", "3", "--reconnect-s", "60")
    with apart(tmp_path, epochs, *options) as (made, cluster):
        cluster.wait_for_processes(3)
        first = cluster.lines("regrouped")[-1]["pid"]  # of rank 0, which alone has hooks
        pids = {name: cluster.pid(name) for name in made.names}
        (rank_0,) = (i for i, name in enumerate(made.names) if pids[name] == first)
        victim = (rank_0 + cut) % 3
        made.cut(victim)
        cluster.wait_for_processes(2)
        made.mend(victim)
        cluster.wait_for_processes(3)
        for i, name in enumerate(made.names):
            is_same = cluster.pid(name) == pids[name]
            assert is_same == (i != victim), "who was not cut off goes on as it was"
        (cluster.folder / "run" / "hurry").touch()
        end, steps = cluster.finish()
    check_same(alone, end, steps, epochs)


@pytest.mark.nightly
@pytest.mark.parametrize("ways", [[(0, 1)], [(2, 1), (1, 2)]], ids=["one way", "both ways"])
def test_hosts_that_do_not_reach_each_other_any_more_cost_one_of_them(tmp_path, alone, ways):
    """All of them reach the coordinator, and nothing says that what they send each other is lost."""
    epochs = 300
    with apart(tmp_path, epochs, "--silent-s", "5") as (made, cluster):
        cluster.wait_for_processes(3)
        for way in ways:
            made.lose(*way)
        cluster.wait_for_processes(2)
        text = cluster.coordinator.text()
        left_out = [name for name in made.names if f"{name} is left out" in text]
        assert left_out and {made.names.index(name) for name in left_out} <= set(ways[0])
        assert "did not reach" in text and "SIGKILL" not in text, text
        for way in ways:
            made.find(*way)
        cluster.wait_for_processes(3)
        cluster.hurry()
        end, steps = cluster.finish()
    check_same(alone, end, steps, epochs)


@pytest.mark.nightly
def test_a_process_whose_device_computes_nothing_more_is_replaced_though_it_answers(
    tmp_path, alone
):
    epochs = 200
    with Cluster(
        tmp_path / "job",
        epochs=epochs,
        step_s=0.05,
        nodes="1:2",
        options=("--admit-every-s", "1", "--silent-s", "5"),
        settings=("may-stick",),
    ) as cluster:
        cluster.agent("a", "b")
        cluster.wait_for_processes(2)
        first = cluster.pid("b")
        stuck = cluster.folder / "run" / "stuck"
        stuck.write_text("b")
        cluster.coordinator.wait_for("its device has worked on its part of step", limit_s=60.0)
        stuck.unlink()
        cluster.wait(lambda lines: cluster.pid("b") != first)
        cluster.wait_for_processes(2)
        cluster.hurry()
        end, steps = cluster.finish()
    check_same(alone, end, steps, epochs, "may-stick")


@pytest.mark.nightly
def test_a_slow_host_takes_fewer_micro_batches_and_the_sum_is_the_same(tmp_path, alone):
    epochs = 15

    def parameters(name, leases, step_s):
        with Cluster(
            tmp_path / name,
            epochs=epochs,
            step_s=step_s,
            nodes="2",
            options=("--join-s", "60"),
            settings=(f"execution.leases={leases}", "batch.micro=[1, 1]"),
        ) as cluster:
            cluster.agent("slow", "fast")
            end, steps = cluster.finish()
            reads = {cluster.pid(name): name for name in ("slow", "fast")}
            taken = {reads[x["pid"]]: x["num_read"] for x in cluster.lines("end")}
        check_same(alone, end, steps, epochs)
        return np.asarray(end["w"] + end["ema"]), taken

    uneven, taken = parameters("uneven", "true", 0.02)
    assert taken["fast"] > 1.5 * taken["slow"], (
        taken
    )  # six times as fast, on a machine that may be busy
    even, taken = parameters("even", "false", 0.0)
    assert taken["fast"] == taken["slow"], taken
    # Of the same micro-batches: only the order of the sum differs.
    np.testing.assert_allclose(uneven, even, rtol=0, atol=1e-6 * np.abs(even).max())


@pytest.mark.nightly
def test_a_slow_host_is_left_out_and_comes_back_when_it_is_fast_again(tmp_path, alone):
    epochs = 200
    with Cluster(
        tmp_path / "job",
        epochs=epochs,
        step_s=0.04,
        nodes="1:3",
        options=("--join-s", "60", "--admit-every-s", "1", "--exclude-s", "2"),
        settings=("reporting.tensorboard=true",),
    ) as cluster:
        cluster.agent("a", "b", "moody")
        cluster.wait_for_processes(3)
        first = {name: cluster.pid(name) for name in ("a", "b", "moody")}
        flag = cluster.folder / "run" / "moody"
        flag.touch()
        cluster.wait_for_processes(2)
        assert processes.gone(first["moody"])
        (out,) = [x for x in cluster.lines("judged") if x["pid"] == first["a"]]
        assert (out["host"], out["decision"]) == ("moody", "left out")
        assert out["numbers"]["slow_ratio"] > 2 and out["numbers"]["excluded_s"] == 2
        flag.unlink()
        cluster.wait_for_processes(3)
        assert cluster.agents["moody"].running(), "its agent has stayed"
        (cluster.folder / "run" / "hurry").touch()
        end, steps = cluster.finish()
        for name in ("a", "b"):
            assert cluster.pid(name) == first[name], "who stays goes on as it was"
        judged = [(x["host"], x["decision"]) for x in cluster.lines("judged")]
        assert set(judged) == {("moody", "left out"), ("moody", "taken in again")}
        told = cluster.told()
        assert "moody is left out" in told and "moody is taken in again" in told
        assert told.count("moody was checked") >= 2
        folder = cluster.folder / "run" / "tensorboard" / "measured"
        texts = eventreader.values(folder, "decisions/hosts/text_summary")
        assert len(texts) == 2
        curve = eventreader.scalars(folder)["elastic/excluded_s"]
        assert [value for _, value in curve] == [2, 0]
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


@pytest.mark.parametrize("leases", ["false", pytest.param("true", marks=pytest.mark.nightly)])
@pytest.mark.nightly
def test_a_stream_is_read_once_through_a_kill_and_hosts_that_come_and_leave(tmp_path, leases):
    settings = ("stream", f"execution.leases={leases}", "batch.micro=[1, 2]")
    options = ("--admit-every-s", "1")
    with Cluster(
        tmp_path / "job", epochs=90, step_s=0.05, nodes="1:3", options=options, settings=settings
    ) as cluster:
        cluster.agent("a")
        cluster.wait_for_processes(1)
        cluster.agent("b", "c")
        cluster.wait_for_processes(3)
        cluster.agents["b"].send(signal.SIGTERM)
        cluster.wait_for_processes(2)
        count = len(cluster.lines("regrouped"))
        os.kill(cluster.pid("a"), signal.SIGKILL)
        cluster.wait(lambda lines: sum(x["kind"] == "regrouped" for x in lines) > count)
        cluster.wait_for_processes(2)
        cluster.hurry()
        cluster.finish()


@pytest.mark.nightly
def test_a_stream_that_gives_each_process_its_own_is_refused(tmp_path):
    with Cluster(
        tmp_path / "job", epochs=9, step_s=0.05, nodes="2", settings=("stream=own",)
    ) as cluster:
        cluster.agent("a", "b")
        finished = cluster.coordinator.wait(limit_s=90)
        assert finished.code == 1, cluster.told()
        assert "the samples from 0 on differ between process 1 and process 0" in cluster.told()


@pytest.mark.nightly
def test_a_script_that_always_fails_ends_the_job_with_its_last_lines(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text("raise ValueError('no such thing')")
    with start("run", "--nnodes", "1", "--", "python", str(script)) as job:
        finished = job.wait()
    assert finished.code == 1
    assert "no such thing" in finished.err
    assert "without a finished step in between" in finished.err


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


@pytest.mark.nightly
@pytest.mark.parametrize("devices", [2, 1])
def test_layouts_within_a_group(tmp_path, alone, devices):
    """fsdp over the devices of a host, or over two hosts; a worker is killed, the others go on."""
    epochs = 30
    hosts_per_group = 2 // devices
    names = "abcd"[: 2 * hosts_per_group]
    options = ["--join-s", "60", "--devices-per-process", str(devices)]
    if hosts_per_group > 1:
        options += ["--hosts-per-group", str(hosts_per_group)]
    with Cluster(
        tmp_path / "job",
        epochs=epochs,
        step_s=0.05,
        nodes=f"{hosts_per_group}:{len(names)}",
        options=options,
        settings=("fsdp=2",),
    ) as cluster:
        cluster.agent(*names, options=["--devices-per-process", str(devices)])
        cluster.wait_for_processes(len(names))
        survivor = cluster.pid("a")
        os.kill(cluster.pid(names[-1]), signal.SIGKILL)
        cluster.wait(lambda lines: sum(x["kind"] == "regrouped" for x in lines) > 1)
        cluster.wait_for_processes(len(names))  # another one in its place
        end, steps = cluster.finish()
        assert cluster.pid("a") == survivor
    check_same(alone, end, steps, epochs)


@pytest.mark.nightly
def test_groups_lose_a_member_each_and_stop_while_they_wait(tmp_path, alone):
    """No group is whole any more, but every part of the state is there; who is told to stop saves it.

    Not where they die within the update itself, if that sends anything: it takes the state along.
    """
    epochs = 40
    device = ("--devices-per-process", "1")
    options = ["--join-s", "60", "--hosts-per-group", "2", *device]
    job = {"epochs": epochs, "step_s": 0.5, "settings": ("fsdp=2",), "options": options}
    with Cluster(tmp_path / "job", nodes="4:4", **job) as cluster:
        cluster.agent(*"abcd", options=device)
        cluster.wait_for_processes(4)
        ranks = cluster.ranks()
        victims = [ranks[0], ranks[3]]  # the first part in one group, the second in the other
        cluster.wait_for_step(1)
        time.sleep(0.25)  # between two updates
        for name in victims:
            os.kill(cluster.pid(name), signal.SIGKILL)
        cluster.wait(lambda lines: sum(x["kind"] == "regrouped" for x in lines) > 1)
        cluster.wait_for_processes(4)
        assert cluster.lines("regrouped")[-1]["step"] > 0
        assert not list((cluster.folder / "run/checkpoints").glob("[0-9]*")), "from memory"
        for name in victims:
            cluster.agents[name].send(signal.SIGTERM)  # too few are left
        cluster.wait(lambda _: all(not cluster.agents[name].running() for name in victims))
        time.sleep(1.0)  # the others wait
        cluster.coordinator.send(signal.SIGTERM)
        assert cluster.coordinator.wait(limit_s=90).code == 143, cluster.told()
        (saved,) = (cluster.folder / "run/checkpoints").glob("[0-9]*")
        assert int(saved.name) >= max(x["step"] for x in cluster.lines("step"))
        (cluster.folder / "run/hurry").touch()
        again = cluster.coordinate("127.0.0.1:0")
        text = again.wait_for("the job is at ")
        cluster.coordinator, cluster.address = again, text.split("the job is at ")[1].split(",")[0]
        cluster.agent(*"efgh", options=device)
        end, steps = cluster.finish()
    check_same(alone, end, steps, epochs)


@pytest.mark.nightly
def test_the_only_group_loses_a_host_and_goes_on_from_copies_in_memory(tmp_path, alone):
    """Nobody else has the part of the state that died, but for the copy on its neighbour."""
    epochs = 40
    device = ("--devices-per-process", "1")
    options = ["--join-s", "60", "--hosts-per-group", "2", *device]
    job = {"epochs": epochs, "step_s": 0.1, "settings": ("fsdp=2",), "options": options}
    with Cluster(tmp_path / "job", nodes="2:2", **job) as cluster:
        cluster.agent("a", "b", options=device)
        cluster.wait_for_processes(2)
        began = cluster.lines("regrouped")[-1]["at"]
        cluster.wait(lambda lines: lines[-1]["at"] > began + 6)  # the first is made after 2 s
        victim, survivor = cluster.ranks()
        pid = cluster.pid(survivor)
        os.kill(cluster.pid(victim), signal.SIGKILL)
        cluster.wait(lambda lines: sum(x["kind"] == "regrouped" for x in lines) > 1)
        again = cluster.lines("regrouped")[-1]
        done = max(x["step"] for x in cluster.lines("step") if x["at"] < again["at"])
        assert 0 < again["step"] <= done
        assert not list((cluster.folder / "run/checkpoints").glob("[0-9]*")), "from memory"
        (cluster.folder / "run/hurry").touch()
        end, steps = cluster.finish()
        assert cluster.pid(survivor) == pid
    check_same(alone, end, steps, epochs)


@pytest.mark.nightly
def test_three_groups_of_two_hosts(tmp_path, alone):
    """A host is killed with all that runs on it; its group comes back with another host."""
    epochs = 60
    device = ("--devices-per-process", "1")
    options = ["--join-s", "60", "--hosts-per-group", "2", *device]
    job = {"epochs": epochs, "step_s": 0.1, "settings": ("fsdp=2",), "options": options}
    with Cluster(tmp_path / "job", nodes="2:6", **job) as cluster:
        cluster.agent(*"abcdef", options=device)
        cluster.wait_for_processes(6)
        os.kill(cluster.pid("c"), signal.SIGKILL)
        cluster.agents["c"].send(signal.SIGKILL)
        cluster.wait_for_processes(4)
        cluster.agent("g", options=device)
        cluster.wait_for_processes(6)
        end, steps = cluster.finish()
        # Or the others of its group would wait for one that has left.
        assert not any(x["num_arrays"] for x in cluster.lines("forgot"))
    check_same(alone, end, steps, epochs)
