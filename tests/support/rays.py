"""A real Ray cluster on this machine, for tests: its nodes are raylets, each of which a test may kill.

Run as a program it has the cluster, in a process of its own (Ray changes the environment of whoever imports
it), and does what is written to it: `add NAME`, `kill NAME`.
"""

import contextlib
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping

import processes

NUM_CPUS = 2  # of a node with devices
# Ray gives its workers, and so the jobs under them, the priority 15: beside any other process they starve.
SETTINGS = {"RAY_worker_niceness": "0"}


def available() -> str | None:
    """Why there can be no cluster here, or None where there can."""
    if importlib.util.find_spec("ray") is None:
        return "there is no Ray here: pip install 'jaxgoodput[ray]'"
    return None


class Cluster:
    """Nodes n1, n2, ... that come and go, and the head of Ray, which has no devices and stays."""

    def __init__(self, child: "subprocess.Popen[str]"):
        self._child = child
        self.address = self._answer()

    def add(self, name: str) -> None:
        """A node comes."""
        self._tell(f"add {name}")

    def kill(self, name: str) -> None:
        """A node dies: its raylet, and all that was started there, at once."""
        self._tell(f"kill {name}")

    def _tell(self, what: str) -> None:
        assert self._child.stdin is not None  # as it was started
        print(what, file=self._child.stdin, flush=True)
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self._child.stdout is not None  # as it was started
        for line in self._child.stdout:
            if line.startswith("cluster: "):
                return line.removeprefix("cluster: ").strip()
        raise AssertionError(f"Ray's cluster has ended with {self._child.wait()}")


@contextlib.contextmanager
def cluster(num_nodes: int, environ: Mapping[str, str]) -> Iterator[Cluster]:
    """A cluster of so many nodes with devices, and its end. `environ`: variables of all that they start."""
    paths = [str(pathlib.Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    child = subprocess.Popen(
        [sys.executable, __file__, str(num_nodes)],
        env={**os.environ, **SETTINGS, **environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Cluster(child)
    finally:
        assert child.stdin is not None and child.stdout is not None  # as it was started
        child.stdin.close()
        child.wait(60.0)
        child.stdout.close()


def _main(num_nodes: int) -> None:
    from ray.cluster_utils import Cluster as Raylets  # pyright: ignore[reportMissingImports]

    raylets, nodes = Raylets(), {}
    raylets.add_node(num_cpus=0, node_name="head")
    for i in range(1, num_nodes + 1):
        nodes[f"n{i}"] = raylets.add_node(num_cpus=NUM_CPUS, node_name=f"n{i}")
    print("cluster:", raylets.address, flush=True)
    for line in sys.stdin:
        what, name = line.split()
        if what == "add":
            nodes[name] = raylets.add_node(num_cpus=NUM_CPUS, node_name=name)
        else:
            node = nodes.pop(name)
            _kill(node.all_processes["raylet"][0].process.pid)
            raylets.remove_node(node, allow_graceful=False)
        print("cluster: done", flush=True)
    raylets.shutdown()


def _kill(raylet: int) -> None:
    """A raylet and all below it."""
    children: dict[int, list[int]] = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = path.read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(path.parent.name))
    found = [raylet]
    for pid in found:
        found += children.get(pid, [])
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in found[1:]:
        assert processes.gone(pid)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
