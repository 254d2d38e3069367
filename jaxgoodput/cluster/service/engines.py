"""Engines: ways to start agents on nodes, one class for each system that can start a program there.

The agent that runs jobs is the same everywhere. An engine only starts it on a node, notices when it ends, and
stops it. (Kubernetes starts agents by itself: `kubernetes/` writes its input.)
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from absl import logging

from jaxgoodput._exits import DONE, USAGE
from jaxgoodput.clock import Clock
from jaxgoodput.cluster.service.node.process import die_with_parent

ENGINE = "engine"  # a folder in the service's folder, locked by the process that runs the engine
LOOK_S, AGAIN_S = 0.5, 2.0


@runtime_checkable
class AgentStarter(Protocol):
    """An engine, such as Slurm or Ray, that starts and stops agents on nodes."""

    def nodes(self) -> Mapping[str, Sequence[str]]:
        """Return the nodes that exist now, each with options of `jaxgoodput node` that the engine sets."""
        ...

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start the agent of a node with some arguments of `jaxgoodput`. Raises OSError."""
        ...

    def ended(self) -> Mapping[str, int | None]:
        """Return the exit code of each agent that ended since the last call; None if its node is lost."""
        ...

    def stop(self) -> None:
        """Tell all agents to stop, and wait until they have."""
        ...


class Local:
    """An `AgentStarter` that runs nodes as processes of this machine, each with its own devices."""

    def __init__(self, names: Sequence[str]):
        self._names = tuple(names)
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def nodes(self) -> Mapping[str, Sequence[str]]:
        """Return the names given at the start; local nodes never come or go."""
        return dict.fromkeys(self._names, ())

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start the agent of a node as a process, which goes on if this process is killed."""
        self._children[name] = subprocess.Popen(
            self._command(name, arguments), stdin=subprocess.DEVNULL, start_new_session=True
        )

    def ended(self) -> Mapping[str, int | None]:
        """Return the exit code of each agent that ended since the last call, by the name of its node."""
        codes = {name: child.poll() for name, child in self._children.items()}
        found = {name: code for name, code in codes.items() if code is not None}
        for name in found:
            del self._children[name]
        return found

    def stop(self) -> None:
        """Tell all agents to stop, and wait until they have."""
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
        for child in self._children.values():
            child.wait()
        self._children = {}

    def _command(self, name: str, arguments: Sequence[str]) -> list[str]:
        return _command(arguments)


class Slurm(Local):
    """Runs an agent on each node of the present Slurm allocation, as a step of `srun`."""

    def _command(self, name: str, arguments: Sequence[str]) -> list[str]:
        step = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={name}", "--overlap"]
        step += ["--export=ALL", "--kill-on-bad-exit=0", f"--job-name=node-{name}"]
        return [*step, *_command(arguments)]


def slurm_nodes() -> list[str]:
    """Return the nodes of the present Slurm allocation. Raises ValueError outside of an allocation."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        raise ValueError(
            f"--engine slurm: the nodes of this allocation are not known ({str(said).strip()}). Start this "
            "command in an allocation, with sbatch or salloc."
        ) from None
    return done.stdout.split()


class Ray:
    """Runs an agent on each node of a Ray cluster, as nodes come and go.

    Each agent runs in an actor that holds the node's devices: Ray's CPUs if `kind` is "cpu", else its GPUs.
    The actor ends with its node and with this process, and the agent ends with the actor; its jobs save and
    continue elsewhere. Raises ValueError if Ray is not installed, and ConnectionError if no cluster runs.
    """

    def __init__(self, kind: str, num_devices: int):
        self._ray = _ray()
        self._resource, self._num_devices = "CPU" if kind == "cpu" else "GPU", num_devices
        self._names: dict[str, str] = {}  # of living nodes, by Ray's id
        self._actors: dict[str, Any] = {}
        self._ends: dict[str, Any] = {}

    def nodes(self) -> Mapping[str, Sequence[str]]:
        """Return the living nodes that have enough devices, each with its address."""
        alive = {
            node["NodeID"]: node
            for node in self._ray.nodes()
            if node["Alive"] and node["Resources"].get(self._resource, 0) >= self._num_devices
        }
        self._names = {id_: name for id_, name in self._names.items() if id_ in alive}
        for id_ in sorted(set(alive) - set(self._names)):
            name = alive[id_]["NodeName"]
            # Ray names a node by its address, which several nodes on one machine share.
            taken = name in self._names.values()
            self._names[id_] = f"{name}-{id_[:8]}" if taken else name
        return {
            name: ("--address", alive[id_]["NodeManagerAddress"])
            for id_, name in self._names.items()
        }

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start an agent, as soon as Ray can give it the node's devices."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # pyright: ignore[reportMissingImports]

        (id_,) = (id_ for id_, known in self._names.items() if known == name)
        needs = {"num_cpus" if self._resource == "CPU" else "num_gpus": self._num_devices}
        actor = self._ray.remote(_AgentActor).options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=id_, soft=False),
            max_concurrency=2,  # `stop` is called while `run` waits
            **needs,
        )
        self._actors[name] = actor.remote()
        self._ends[name] = self._actors[name].run.remote(list(arguments))

    def ended(self) -> Mapping[str, int | None]:
        """Return the exit code of each agent that ended since the last call; None if its node is lost."""
        if not self._ends:
            return {}
        from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]

        done, _ = self._ray.wait(list(self._ends.values()), num_returns=len(self._ends), timeout=0)
        found: dict[str, int | None] = {}
        for name in [name for name, end in self._ends.items() if end in done]:
            try:
                found[name] = self._ray.get(self._ends.pop(name))
            except RayActorError as error:
                logging.warning(
                    "the agent of node %s is lost (%s). The service is told that the node is down; the "
                    "agent is started again if the node is still there.",
                    name,
                    str(error).partition("\n")[0],
                )
                found[name] = None
            del self._actors[name]
        return found

    def stop(self) -> None:
        """Tell all agents to stop, and wait until they have."""
        for actor in self._actors.values():
            actor.stop.remote()
        self._ray.wait(list(self._ends.values()), num_returns=len(self._ends) or 1)
        self._ray.shutdown()


class _AgentActor:
    """A Ray actor, one per node, that runs the agent of its node as a child process."""

    def __init__(self):
        self._child: subprocess.Popen[bytes] | None = None
        self._is_stopping = False
        self._lock = threading.Lock()

    def run(self, arguments: Sequence[str]) -> int:
        """Run the agent until it ends; return its exit code."""
        with self._lock:
            if self._is_stopping:
                return DONE
            self._child = subprocess.Popen(
                _command(arguments), stdin=subprocess.DEVNULL, preexec_fn=die_with_parent()
            )
        return self._child.wait()

    def stop(self) -> None:
        """Tell the agent to stop."""
        with self._lock:
            self._is_stopping = True
            if self._child is not None:
                self._child.send_signal(signal.SIGTERM)


def _ray():
    """Return the module `ray`, connected to the cluster of this machine or of RAY_ADDRESS."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            "--engine ray: Ray is not installed. Install it: pip install 'jaxgoodput[ray]'."
        ) from None
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        # Without an address, Ray would start a cluster of its own.
        ray.init(address=address, namespace="jaxgoodput")
    except ConnectionError as error:
        raise ConnectionError(
            f"--engine ray: no Ray cluster was found at {address!r} ({error}). Start one with "
            "`ray start --head` and this command on one of its nodes, or set RAY_ADDRESS."
        ) from None
    return ray


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "jaxgoodput.cli", *arguments]


def run_engine(
    engine: AgentStarter,
    options: Sequence[str],
    told: threading.Event,
    clock: Clock,
    lost: Callable[[str], None],
) -> int:
    """Keep an agent on every node until `told` is set; return the exit code.

    `options` are common to all agents; `lost` is called with the name of a node that was lost. An agent that
    crashes, or finds another agent on its node, is started again after a pause. An agent that ends with DONE
    or USAGE is not wanted and stays away; if that holds for all nodes, this ends too.
    """
    due: dict[str, float] = {}  # earliest time of the next start
    running: set[str] = set()
    unwanted: dict[str, int] = {}  # exit codes
    while not told.is_set():
        nodes = engine.nodes()
        for name in sorted(set(nodes) - running - set(unwanted)):
            if due.get(name, 0.0) <= clock.now():
                engine.start(name, ["node", "--name", name, *nodes[name], *options])
                running.add(name)
        for name, code in engine.ended().items():
            running.discard(name)
            due[name] = clock.now() + AGAIN_S
            if code is None:
                lost(name)
                continue
            stays = code in (DONE, USAGE)
            unwanted |= {name: code} if stays else {}
            said = " and is not started again" if stays else ". It is started again"
            logging.warning("the agent of node %s has ended with exit code %d%s.", name, code, said)
        due = {name: at_s for name, at_s in due.items() if name in nodes}
        unwanted = {name: code for name, code in unwanted.items() if name in nodes}
        if nodes and len(unwanted) == len(nodes):
            return max(unwanted.values())
        told.wait(LOOK_S)
    engine.stop()
    return DONE
