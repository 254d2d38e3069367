"""Jobs that really train as pods: a real service, its agent, and a real process for each pod.

Only Kubernetes itself is one of tests: its API, controllers and kubelet are in `kubernetes_cluster.py`.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import compilations
import pytest
import real_jobs
import services
from kubernetes_cluster import Cluster, expanded

from jaxgoodput.cluster.service.kubernetes import manifests
from jaxgoodput.cluster.service.kubernetes.manifests import ManifestOptions

pytestmark = [pytest.mark.multihost, pytest.mark.slow]

ENVIRON = {"JAX_PLATFORMS": "cpu", **compilations.JOBS}
OPTIONS = ManifestOptions(
    name="cluster", image="me/mine", jobs="pods", num_nodes=1, num_devices=2, kind="cpu", resource=""
)  # fmt: skip


class Processes:
    """Runs the container of each pod as a process of this machine."""

    def __init__(self, log: pathlib.Path):
        self._log, self._children = log, {}

    def start(self, pod, environ):
        (container,) = pod["spec"]["containers"]
        program, *words = expanded(container["command"], environ)
        assert program == "jaxgoodput"
        with self._log.open("ab") as log:
            self._children[pod["metadata"]["uid"]] = subprocess.Popen(
                [sys.executable, "-m", "jaxgoodput.cli", *words],
                cwd=container["workingDir"],
                env={**os.environ, **ENVIRON, **environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop(self, pod):
        child = self._children[pod["metadata"]["uid"]]
        if not hasattr(child, "told"):
            child.told = True
            child.terminate()

    def code(self, pod):
        return self._children[pod["metadata"]["uid"]].poll()

    def close(self):
        for child in self._children.values():
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@contextlib.contextmanager
def agent_of(service, cluster, folder):
    """`jaxgoodput node --pods`, with the rights that the manifests give it."""
    for one in manifests.pods(OPTIONS):
        cluster.store.create(one["kind"], OPTIONS.namespace, one)
    credentials = cluster.account(folder / "account", OPTIONS.namespace, "cluster-pods")
    (folder / "pod.json").write_text(json.dumps(manifests.pod_template(OPTIONS)))
    command = [
        *(sys.executable, "-m", "jaxgoodput.cli", "node", "--folder", str(service.folder)),
        *("--name", "pool", "--devices", "2", "--kind", "cpu", "--address", "127.0.0.1"),
        *("--hints-s", "1", "--pods", str(folder / "pod.json"), "--owner", "cluster-pods"),
        *("--api", cluster.url, "--api-credentials", str(credentials)),
    ]
    with (folder / "agent.log").open("ab") as log:
        child = subprocess.Popen(
            command, env={**os.environ, **ENVIRON}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(120.0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def test_jobs_as_pods_grow_shrink_and_survive_a_drain_with_each_sample_applied_once(tmp_path):
    processes = Processes(tmp_path / "pods.log")
    options = ("--local", "0", "--min-gap-s", "2", "--restart-s", "2")
    with contextlib.ExitStack() as stack:
        stack.callback(processes.close)
        cluster = stack.enter_context(Cluster(processes, machines=2))
        service = stack.enter_context(services.Service(tmp_path / "service", *options))
        agent = stack.enter_context(agent_of(service, cluster, tmp_path))

        def has(job, number):
            def holds():
                found = job.lines("regrouped")
                return found and found[-1]["num_processes"] == number

            service.until(holds, f"{job.name} has not {number} processes", limit_s=300.0)
            job.wait_for_step(2)

        jobs = {"a": real_jobs.Job(service, tmp_path, "a", "--max", "2")}
        has(jobs["a"], 2)  # it begins with one process
        jobs["b"] = real_jobs.Job(service, tmp_path, "b", "--max", "1")
        has(jobs["b"], 1)
        has(jobs["a"], 1)  # it has made room

        evicted = cluster.drain("m0")
        assert evicted
        cluster.stop_serving()
        cluster.store.forget()
        cluster.serve()
        for job in jobs.values():
            has(job, 1)
            job.hurry()
        for job in jobs.values():
            job.wait_for_end()
            job.assert_each_sample_once()
        service.until(lambda: not cluster.store.of("Job"), "workloads are left")
        assert not cluster.store.of("Pod") and not cluster.store.of("Secret")
        agent.terminate()
        assert agent.wait(60.0) == 0
